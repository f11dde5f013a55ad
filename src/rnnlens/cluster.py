"""Work on Dask workers: the model as bytes, rebuilt once in each process; threads, memory, errors and results there.

Dask is imported only where the data are lazy or a client is given. Bytes of a model are code: whoever can change them
can run programs on the workers. They are sent from the client to its own workers only; no file is unpickled.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import importlib
import io
import os
import pickle
import sys
import tempfile
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from threadpoolctl import threadpool_limits

from .autodiff.tensors import to_numpy
from .errors import ModelError, RnnlensError, UnsupportedError, UserCodeError

T = TypeVar("T")

#: Parameters of glibc's mallopt, <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM = 1 << 30
#: Largest threshold that older versions of glibc accept.
_LARGEST_MMAP = 1 << 25
#: Environment variables with the number of threads of OpenMP, OpenBLAS and MKL, read when they are loaded.
_BLAS_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_thread_state = threading.local()
_cached_results: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def limit_process() -> None:
    """Set numbers of threads and malloc options of this worker process before an engine is imported.

    Libraries that are imported later use as many threads as the worker has; otherwise workers of one machine
    compete for its cores. Dask's nanny makes malloc return freed memory at once, which costs more time than a chunk
    of many arrays takes to compute; glibc's own threshold is set again.
    """
    threads = str(threads_of_worker())
    os.environ |= dict.fromkeys(_BLAS_VARIABLES, threads)
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ.setdefault(name, threads)
    flags = os.environ.get("XLA_FLAGS", "")
    if threads == "1" and "jax" not in sys.modules and "xla_cpu_multi_thread_eigen" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    if "MALLOC_TRIM_THRESHOLD_" in os.environ:
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_TRIM_THRESHOLD, _TRIM)
            libc.mallopt(_M_MMAP_THRESHOLD, _TRIM) or libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP)


def limit_thread() -> None:
    """Limit libraries that are imported already to the worker's threads; some of them keep a limit for each thread."""
    if not hasattr(_thread_state, "limits"):
        _thread_state.limits = threadpool_limits(threads_of_worker())
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads_of_worker())


def threads_of_worker() -> int:
    """Return the number of threads of the Dask worker that runs this task; 1 outside of a worker."""
    distributed: Any = sys.modules.get("distributed")
    if distributed is not None:
        with suppress(ValueError, AttributeError):
            return int(distributed.get_worker().state.nthreads)
    return 1


def cached_result(model: Any, token: str, compute: Callable[[], T]) -> T:
    """Return the result of ``compute``, which is called once in this process for each model and ``token`` of a call."""
    model_results = _cached_results.setdefault(model, {})
    if token not in model_results:
        if len(model_results) > 8:
            model_results.clear()
        model_results[token] = compute()
    result: T = model_results[token]
    return result


@contextmanager
def name_failed_samples(rows: tuple[int, int]) -> Iterator[None]:
    """Add the samples of a chunk to the message of any exception raised for it."""
    try:
        yield
    except Exception as error:
        is_rnnlens_error = isinstance(error, RnnlensError) and type(error).__module__ == RnnlensError.__module__
        raise (type(error) if is_rnnlens_error else UserCodeError)(failed_samples_text(rows, error)) from None


def failed_samples_text(rows: tuple[int, int], error: Exception) -> str:
    """Return the text of an error with the samples ``rows[0]`` to ``rows[1] - 1`` for which it was raised."""
    reason = str(error).strip() or type(error).__name__
    kind = "" if isinstance(error, RnnlensError) else f"{type(error).__name__}: "
    return f"Samples {rows[0]} to {rows[1] - 1} failed: {kind}{reason}"


def warn(text: str, category: type[Warning]) -> None:
    """Issue a warning, at the client too if this is a Dask worker."""
    if "distributed" in sys.modules:
        importlib.import_module("distributed").warn(text, category)
    else:
        warnings.warn(text, category, stacklevel=2)


def current_client() -> Any:
    """Return the Dask client in use, or None; Dask is not imported."""
    distributed: Any = sys.modules.get("distributed")
    return None if distributed is None else distributed.client._get_global_client()


def finished_results(dask_client: Any, futures: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each Dask future when it finishes, with its result or exception; cancel the others at an interrupt.

    A lost scheduler ends all futures that are left with the error of the connection. The scheduler is told to
    forget the tasks before this returns: one of the same name, sent while it keeps a failed one, would fail like
    that.
    """
    distributed = importlib.import_module("distributed")
    pending = dict.fromkeys(futures)
    try:
        for future in distributed.as_completed(futures, loop=dask_client.loop):
            try:
                result = future.result()
            except Exception as error:
                result = error.with_traceback(None)  # its frames would keep the futures, and Dask the failed tasks
            del pending[future]
            yield future, result
    except (OSError, distributed.CancelledError) as error:
        yield from ((future, error) for future in list(pending))
        pending.clear()
    finally:
        if pending:
            dask_client.cancel(list(pending))
        for future in futures:
            future.release()
        dask_client.sync(asyncio.sleep, 0)  # releases wait in the client's event loop; what is sent later comes after


#: Number of models that a worker process keeps at once; a comparison of many models drops the least recently used.
_MOST_MODELS = 4
_models: OrderedDict[str, Any] = OrderedDict()
_models_lock = threading.Lock()


class TravellingModel:
    """A model that is itself in its own process, and bytes in any other one until it is used there.

    Its weights may not change before the lazy result is computed. ``digest``, a function that can be imported by name,
    returns a hash of a model's weights and structure, which is the same in every process.
    """

    def __init__(self, model: Any, digest: Callable[[Any], str], engine: str) -> None:
        self._digest, self.digest, self._engine = digest, digest(model), engine
        self._model: Any = model
        self._bytes: bytes | None = None
        self._key = ""
        self._home = (gethostname(), os.getpid())

    def pack(self) -> bytes:
        """Return the model as bytes; they are made once."""
        if self._bytes is None:
            self._bytes = pack_model(self._model, self._engine)
            self._key = hashlib.sha256(self._bytes).hexdigest()
        return self._bytes

    def get(self) -> Any:
        """Return the model: the user's own in its process, otherwise the one rebuilt and kept in this process."""
        if self._model is None:
            return _rebuilt_model(self._key, self.pack(), self._home != (gethostname(), os.getpid()))
        if self._digest(self._model) != self.digest:
            problem = "The model's weights changed after this lazy result was made, so it would mix two models."
            raise ModelError(problem, hint="make the lazy result again, or compute it before training goes on")
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        state = {"digest": self.digest, "_model": None, "_bytes": self.pack(), "_home": self._home}
        return {**state, "_key": self._key}

    def __dask_tokenize__(self) -> tuple[str, str]:
        return ("rnnlens-model", self.digest)


def pack_model(model: Any, engine: str) -> bytes:
    """Serialise a model: Keras by its own format, torch modules and others by cloudpickle."""
    package = _keras_package(model)
    if package is not None:
        return pickle_named_parts(_keras_parts(model, package), model)
    if engine == "tensorflow":
        raise UnsupportedError(
            "A TensorFlow-1 graph belongs to its session and cannot be sent to workers.",
            got=type(model).__name__,
            hint="x.compute() a part of the data here, or load the checkpoint as a tf_keras model",
        )
    return pickle_named_parts({"model": model}, model)


def _keras_package(model: Any) -> str | None:
    """Return the Keras package that a model is built with; None for models of other frameworks."""
    for package in ("keras", "tf_keras"):
        base = getattr(getattr(sys.modules.get(package), "layers", None), "Layer", None)
        if base is not None and isinstance(model, base):
            return package
    return None


def _keras_parts(model: Any, package: str) -> dict[str, Any]:
    """Return the parts from which a Keras model is rebuilt: archive, user classes and functions, states and engine."""
    keras = sys.modules[package]
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            model.save(path)
            archive = Path(path).read_bytes()
    except Exception as error:
        raise _serialisation_error(type(model).__name__, error) from error
    # Stateful recurrent layers that have a recorded state.
    stateful_layers = [layer for layer in _layers(model) if getattr(layer, "stateful", False)]
    stateful_layers = [
        layer for layer in stateful_layers if getattr(layer, "states", None) and layer.states[0] is not None
    ]
    return {
        "package": package,
        "backend": keras.backend.backend() if package == "keras" else "tensorflow",
        "archive": archive,
        "custom": _custom_objects(model, package),
        "states": {layer.name: [to_numpy(state) for state in layer.states] for layer in stateful_layers},
    }


def _custom_objects(model: Any, package: str) -> dict[str, Any]:
    """Return the user's own classes and functions in a Keras model, by the name under which Keras looks them up."""
    custom_objects: dict[str, Any] = {}
    model_parts = [model, *_layers(model)]
    cells = [cell for layer in model_parts if (cell := getattr(layer, "cell", None)) is not None]
    model_parts += [cell_part for cell in cells for cell_part in (cell, *getattr(cell, "cells", []))]
    for part in model_parts:
        custom_objects |= {type(part).__name__: type(part)} if not type(part).__module__.startswith(package) else {}
    loss = getattr(model, "loss", None)
    for part in loss.values() if isinstance(loss, Mapping) else loss if isinstance(loss, list) else [loss]:
        definition = part if callable(part) and hasattr(part, "__name__") else type(part)
        if part is not None and not isinstance(part, str) and not definition.__module__.startswith(package):
            custom_objects[definition.__name__] = definition
    return custom_objects


def _layers(model: Any) -> list[Any]:
    flatten = getattr(model, "_flatten_layers", None)
    return list(flatten()) if flatten is not None else [model]


def pickle_value(value: Any) -> bytes:
    """Pickle a value, classes of the user's script by value, and torch modules with parametrizations by their parts."""
    cloudpickle = importlib.import_module("cloudpickle")
    stream = io.BytesIO()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc,name-defined]
        def reducer_override(self, part: Any) -> Any:
            parametrize_module: Any = sys.modules.get("torch.nn.utils.parametrize")
            is_module = parametrize_module is not None and isinstance(part, sys.modules["torch"].nn.Module)
            if is_module and parametrize_module.is_parametrized(part):
                kind = parametrize_module.type_before_parametrizations(part)
                return _rebuild_parametrized, (kind, dict(kind.__getstate__(part)))
            return super().reducer_override(part)

    Pickler(stream).dump(value)
    return stream.getvalue()


def pickle_named_parts(value: Any, parts: Any, name: str = "") -> bytes:
    """Pickle a value.

    If that fails, raise an error that names the user's object in ``parts`` that cannot be pickled.
    """
    try:
        return pickle_value(value)
    except Exception as error:
        path, part_error = unpicklable_part(parts, name)
        raise _serialisation_error(path, part_error or error) from error


def _rebuild_parametrized(kind: type, state: dict[str, Any]) -> Any:
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


def unpicklable_part(value: Any, path: str = "", depth: int = 6) -> tuple[str, Exception | None]:
    """Return the dotted path of the innermost part of a value that cannot be pickled, and the error it raises."""
    path = path or type(value).__name__
    for name, part in _named_parts(value) if depth else ():
        try:
            pickle_value(part)
        except Exception as error:
            inner_path, inner_error = unpicklable_part(part, f"{path}.{name}", depth - 1)
            return inner_path, inner_error or error
    return path, None


def _named_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each part of a module, a mapping, a list or any object with attributes."""
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


def _serialisation_error(path: str, error: Exception) -> UnsupportedError:
    reason = next(iter(str(error).strip().splitlines()), "")
    return UnsupportedError(
        f"Not everything can be sent to workers: {path} cannot be serialised.",
        got=f"{type(error).__name__}: {reason}",
        expected="parts that pickle, or a Keras model whose save() works",
        hint=f"take {path} out (open files, locks and generators cannot travel), or compute without a cluster",
    )


def _rebuilt_model(key: str, data: bytes, is_other_process: bool) -> Any:
    """Return the model of these bytes, rebuilt at its first use in this process; ``key`` is the hash of the bytes."""
    with _models_lock:
        if key not in _models:
            if is_other_process:
                limit_process()
            _models[key] = unpack_model(data)
            while len(_models) > _MOST_MODELS:
                _models.popitem(last=False)
        _models.move_to_end(key)
        if is_other_process:
            limit_thread()
        return _models[key]


def unpack_model(data: bytes) -> Any:
    """Rebuild the model that :func:`pack_model` serialised."""
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
    current_backend = importlib.import_module("keras").backend.backend()
    if current_backend != backend:
        raise ModelError(
            "This worker runs Keras on another engine than the client.",
            got=current_backend,
            expected=backend,
            hint=f"start the workers with KERAS_BACKEND={backend}",
        )
