"""A model on its way to Dask workers: it is sent as bytes, and each worker process rebuilds it once.

Bytes of a model are code: whoever can change them can run programs on the workers. They travel from the client to its
own workers only; nothing is unpickled from files.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import pickle
import sys
import tempfile
import threading
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from socket import gethostname
from typing import Any

from ..autodiff.tensors import to_numpy
from ..errors import ModelError, UnsupportedError
from .worker import fit_process, fit_thread

#: Number of models that a worker process keeps at once; a comparison of many models drops the least recently used.
_KEPT = 4
_models: OrderedDict[str, Any] = OrderedDict()
_loading = threading.Lock()


class TravellingModel:
    """A model that is itself in its own process, and bytes in any other one until it is used there.

    Parameters
    ----------
    model
        The user's model. Its weights may not change before the lazy result is computed.
    digest
        Returns the digest of a model; importable by name.
    engine
        Engine that it runs on: ``"torch"``, ``"jax"``, ``"tensorflow"``.

    Attributes
    ----------
    digest
        Hash of the weights and of the structure, the same in every process.
    """

    def __init__(self, model: Any, digest: Callable[[Any], str], engine: str) -> None:
        self._digest, self.digest, self._engine = digest, digest(model), engine
        self._model: Any = model
        self._bytes: bytes | None = None
        self._key = ""
        self._home = (gethostname(), os.getpid())

    def pack(self) -> bytes:
        """Return the model as bytes; they are made once.

        Raises
        ------
        UnsupportedError
            If a part of the model cannot be sent; the message names it.
        """
        if self._bytes is None:
            self._bytes = packed(self._model, self._engine)
            self._key = hashlib.sha256(self._bytes).hexdigest()
        return self._bytes

    def get(self) -> Any:
        """Return the model: the user's own in its process, otherwise the one rebuilt and kept in this process.

        Raises
        ------
        ModelError
            If the weights changed since the lazy result was made.
        """
        if self._model is None:
            return _rebuilt(self._key, self.pack(), self._home != (gethostname(), os.getpid()))
        if self._digest(self._model) != self.digest:
            what = "The model's weights changed after this lazy result was made, so it would mix two models."
            raise ModelError(what, hint="make the lazy result again, or compute it before training goes on")
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        state = {"digest": self.digest, "_model": None, "_bytes": self.pack(), "_home": self._home}
        return {**state, "_key": self._key}

    def __dask_tokenize__(self) -> tuple[str, str]:
        return ("rnnlens-model", self.digest)


def packed(model: Any, engine: str) -> bytes:
    """Serialise a model: Keras by its own format, torch modules and others by cloudpickle.

    Raises
    ------
    UnsupportedError
        If a part of the model cannot be sent; the message names it.
    """
    package = _keras_package(model)
    if package is not None:
        return _pickled(_keras_parts(model, package), model)
    if engine == "tensorflow":
        raise UnsupportedError(
            "A TensorFlow-1 graph belongs to its session and cannot be sent to workers.",
            got=type(model).__name__,
            hint="x.compute() a part of the data here, or load the checkpoint as a tf_keras model",
        )
    return _pickled({"model": model}, model)


def _keras_package(model: Any) -> str | None:
    """Return the Keras package that a model is built with; None for models of other frameworks."""
    for package in ("keras", "tf_keras"):
        base = getattr(getattr(sys.modules.get(package), "layers", None), "Layer", None)
        if base is not None and isinstance(model, base):
            return package
    return None


def _keras_parts(model: Any, package: str) -> dict[str, Any]:
    """Return what rebuilds a Keras model: its archive, the classes and functions of the user, states and engine."""
    keras = sys.modules[package]
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            model.save(path)
            archive = Path(path).read_bytes()
    except Exception as error:
        raise _cannot_travel(type(model).__name__, error) from error
    # Stateful recurrent layers that have a recorded state.
    stateful = [layer for layer in _layers(model) if getattr(layer, "stateful", False)]
    stateful = [layer for layer in stateful if getattr(layer, "states", None) and layer.states[0] is not None]
    return {
        "package": package,
        "backend": keras.backend.backend() if package == "keras" else "tensorflow",
        "archive": archive,
        "custom": _custom_objects(model, package),
        "states": {layer.name: [to_numpy(state) for state in layer.states] for layer in stateful},
    }


def _custom_objects(model: Any, package: str) -> dict[str, Any]:
    """Return the user's own classes and functions in a Keras model, by the name under which Keras looks them up."""
    found: dict[str, Any] = {}
    parts = [model, *_layers(model)]
    cells = [cell for layer in parts if (cell := getattr(layer, "cell", None)) is not None]
    parts += [inner for cell in cells for inner in (cell, *getattr(cell, "cells", []))]
    for part in parts:
        found |= {type(part).__name__: type(part)} if not type(part).__module__.startswith(package) else {}
    given = getattr(model, "loss", None)
    for part in given.values() if isinstance(given, Mapping) else given if isinstance(given, list) else [given]:
        target = part if callable(part) and hasattr(part, "__name__") else type(part)
        if part is not None and not isinstance(part, str) and not target.__module__.startswith(package):
            found[target.__name__] = target
    return found


def _layers(model: Any) -> list[Any]:
    flatten = getattr(model, "_flatten_layers", None)
    return list(flatten()) if flatten is not None else [model]


def _pickled(parts: Mapping[str, Any], model: Any) -> bytes:
    try:
        return dumps(dict(parts))
    except Exception as error:
        path, cause = blamed(model)
        raise _cannot_travel(path, cause or error) from error


def dumps(value: Any) -> bytes:
    """Pickle a value, classes of the user's script by value, and torch modules with parametrizations by their parts."""
    cloudpickle = importlib.import_module("cloudpickle")
    stream = io.BytesIO()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc,name-defined]
        def reducer_override(self, part: Any) -> Any:
            parametrized: Any = sys.modules.get("torch.nn.utils.parametrize")
            is_module = parametrized is not None and isinstance(part, sys.modules["torch"].nn.Module)
            if is_module and parametrized.is_parametrized(part):
                kind = parametrized.type_before_parametrizations(part)
                return _with_parametrizations, (kind, dict(kind.__getstate__(part)))
            return super().reducer_override(part)

    Pickler(stream).dump(value)
    return stream.getvalue()


def dumps_arguments(value: Any, parts: Mapping[str, Any]) -> bytes:
    """Pickle a value that is made of arguments of the user, given by name.

    Raises
    ------
    UnsupportedError
        If an argument cannot be sent; the message names it.
    """
    try:
        return dumps(value)
    except Exception as error:
        path, cause = blamed(parts, "arguments")
        raise _cannot_travel(path, cause or error) from error


def _with_parametrizations(kind: type, state: dict[str, Any]) -> Any:
    """Rebuild a torch module with parametrizations, which torch itself refuses to pickle."""
    parametrize: Any = importlib.import_module("torch.nn.utils.parametrize")
    module: Any = object.__new__(kind)
    kind.__setstate__(module, state)  # type: ignore[attr-defined]
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)
    if hasattr(module, "_init_flat_weights"):  # a library RNN collects its weights, which were incomplete before
        module._init_flat_weights()
    return module


def blamed(value: Any, path: str = "", depth: int = 6) -> tuple[str, Exception | None]:
    """Return the dotted path of the innermost part that cannot be pickled, and the error it raises."""
    path = path or type(value).__name__
    for name, part in _parts(value) if depth else ():
        try:
            dumps(part)
        except Exception as error:
            inner, cause = blamed(part, f"{path}.{name}", depth - 1)
            return inner, cause or error
    return path, None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the named parts of a module, a mapping, a list or any object with attributes."""
    if isinstance(value, Mapping):
        yield from ((str(name), part) for name, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), part) for index, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for name, part in vars(value).items():
            if name in ("_modules", "_parameters", "_buffers"):
                yield from ((str(key), inner) for key, inner in part.items())
            else:
                yield name, part


def _cannot_travel(path: str, error: Exception) -> UnsupportedError:
    reason = next(iter(str(error).strip().splitlines()), "")
    return UnsupportedError(
        f"Not everything can be sent to workers: {path} cannot be serialised.",
        got=f"{type(error).__name__}: {reason}",
        expected="parts that pickle, or a Keras model whose save() works",
        hint=f"take {path} out (open files, locks and generators cannot travel), or compute without a cluster",
    )


def _rebuilt(key: str, data: bytes, elsewhere: bool) -> Any:
    """Return the model of these bytes, rebuilt at its first use in this process; ``key`` is the hash of the bytes."""
    with _loading:
        if key not in _models:
            if elsewhere:
                fit_process()
            _models[key] = unpacked(data)
            while len(_models) > _KEPT:
                _models.popitem(last=False)
        _models.move_to_end(key)
        if elsewhere:
            fit_thread()
        return _models[key]


def unpacked(data: bytes) -> Any:
    """Rebuild the model that :func:`packed` serialised."""
    parts = pickle.loads(data)
    if "archive" not in parts:
        return parts["model"]
    if parts["package"] == "keras":
        use_backend(parts["backend"])
    keras = importlib.import_module(parts["package"])
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        Path(path).write_bytes(parts["archive"])
        with warnings.catch_warnings():  # variables of an optimizer that never ran are not restored
            warnings.simplefilter("ignore")
            model = keras.models.load_model(path, custom_objects=parts["custom"], compile=True, safe_mode=False)
    for layer in _layers(model):
        for state, value in zip(
            getattr(layer, "states", None) or (), parts["states"].get(layer.name, ()), strict=False
        ):
            state.assign(value)
    return model


def imported_backend() -> str | None:
    """Return Keras' engine in this process; None where Keras is not imported."""
    return importlib.import_module("keras").backend.backend() if "keras" in sys.modules else None


def propose_backend(backend: str | None) -> None:
    """Choose Keras' engine in this process unless Keras is imported already."""
    if backend is not None and "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = backend


def use_backend(backend: str) -> None:
    """Choose Keras' engine in this process, or raise if another one was chosen before."""
    propose_backend(backend)
    there = importlib.import_module("keras").backend.backend()
    if there != backend:
        raise ModelError(
            "This worker runs Keras on another engine than the client.",
            got=there,
            expected=backend,
            hint=f"start the workers with KERAS_BACKEND={backend}",
        )


def keras_file(path: Path, backend: str | None) -> Any:
    """Load a ``.keras`` file with the Keras that wrote it; its Lambda layers are refused by Keras, being code."""
    with zipfile.ZipFile(path) as archive:
        written = json.loads(archive.read("metadata.json"))["keras_version"]
    if written.startswith("2."):
        return importlib.import_module("tf_keras").models.load_model(path)
    if backend is not None:
        use_backend(backend)
    return importlib.import_module("keras").models.load_model(path)
