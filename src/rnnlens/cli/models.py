"""Loading of models for the command line: a Keras file, or a Python function that returns a model.

A model file may contain code that runs on loading. Keras files are read in safe mode, torch weights with
``weights_only=True``; files that these refuse are refused here, with the reason, unless ``--unsafe`` is given.

Models written by Keras 2 (``.keras``, HDF5, SavedModel folders) are loaded with ``tf_keras``. Their configuration may
name any function of any installed module, and contain the byte code of a lambda; the graphs of a SavedModel are
programs. Without ``--unsafe`` configurations are checked before a model is built from them, and of a SavedModel only
the configuration and the weights are read.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from ..adapters.registry import adapter_for, adapter_of
from ..errors import FileError, InputError, MissingDependencyError, ModelError, RnnlensError
from .console import say
from .data import check_archive

_FILES = (".keras", ".h5", ".hdf5")
#: Backends in order of preference: the lightest first; torch before TensorFlow, as it needs no tracing.
_ENGINES = ("jax", "torch", "tensorflow")
#: Packages that a configuration of Keras 2 may name; a module of None or "" denotes a registered name.
_HARMLESS = ("keras", "tf_keras", "tensorflow.keras", "tensorflow.python.keras")
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def load_model(spec: str, *, weights: Path | None = None, imports: Iterable[str] = (), unsafe: bool = False) -> Any:
    """Load the model named by ``spec``: a ``.keras`` or ``.h5`` file, a SavedModel, or ``package.module:factory``.

    ``weights`` are a file for the model of a factory; ``imports`` are modules with custom layers; ``unsafe`` also loads
    files whose content could run code.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if Path(spec).suffix in _FILES or (Path(spec) / "saved_model.pb").is_file():
        if weights is not None:
            raise InputError("A model file has its own weights.", got=f"--weights {weights}", hint="leave it out")
        return _load_keras(Path(spec), imports, unsafe)
    if not _FACTORY.fullmatch(spec):
        expected = "a path ending in .keras or .h5, the folder of a SavedModel, or package.module:factory"
        raise InputError("This names no model.", got=repr(spec), expected=expected)
    _choose_engine(announce=False)
    _names_in(imports)
    model = _make(spec)
    if weights is not None:
        if not weights.is_file():
            raise FileError("There is no such weights file.", got=str(weights))
        check_archive(weights)
        adapter_for(model).load_weights(model, weights, unsafe=unsafe)
    return model


def _load_keras(path: Path, imports: Iterable[str], unsafe: bool) -> Any:
    if not path.exists():
        raise FileError("There is no such model file.", got=str(path), expected="a file written by model.save")
    check_archive(path)
    if _written_by_keras2(path):
        return _load_keras2(path, tuple(imports), unsafe)
    _choose_engine(announce=True)
    with _quiet_libraries():  # TensorFlow's libraries write to standard error on import
        keras = _library("keras", "A Keras model needs Keras.", "pip install keras, and one of jax, torch, tensorflow")
    own = _names_in(imports)
    try:
        with warnings.catch_warnings():
            # The warning about an optimizer without steps only matters for training.
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            # Keras writes losses into HDF5 files by short names, which it does not find when it reads them.
            names = ("mse", "mae", "mape", "msle", "kld", "bce") if path.suffix != ".keras" else ()
            short = {name: keras.losses.get(name) for name in names}
            return keras.saving.load_model(path, custom_objects={**short, **own}, safe_mode=not unsafe)
    except Exception as error:  # Keras raises ValueError, TypeError, KeyError, OSError alike
        raise _keras_refusal(path, error) from error


def _load_keras2(path: Path, imports: Collection[str], unsafe: bool) -> Any:
    """Load a file of Keras 2 with Keras 2, where ``hard_sigmoid`` differs; refuse code in it unless ``unsafe``."""
    try:
        with _quiet_libraries():
            own, hint = _names_in(imports), "pip install --no-deps tf_keras==2.21.0, with tensorflow 2.21"
            keras = _library("tf_keras", "A model that Keras 2 wrote needs tf_keras.", hint)
            if unsafe:
                return keras.models.load_model(path, custom_objects=own, safe_mode=False)
            if path.is_dir():
                return _from_numbers(keras, path, own, imports)
            _refuse_code(path, _configuration(path), imports)
            with keras.src.saving.serialization_lib.SafeModeScope(True):
                return keras.models.load_model(path, custom_objects=own)
    except RnnlensError:
        raise
    except Exception as error:
        raise _keras_refusal(path, error) from error


def _library(name: str, what: str, hint: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(what, got=str(error), hint=hint) from error


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Drop output of compiled libraries to standard error; messages of Python code pass."""
    sys.stderr.flush()
    kept = os.dup(2)
    python_stderr, sys.stderr = sys.stderr, os.fdopen(os.dup(kept), "w")
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        sys.stderr.close()
        sys.stderr = python_stderr


def _keras_refusal(path: Path, error: Exception) -> RnnlensError:
    """Build the error for a file that Keras did not load, with the reason."""
    text = str(error)
    if "safe_mode" in text or "unsafe_deserialization" in text or "arbitrary code" in text:
        what = "a Lambda layer" if "Lambda" in text or "lambda" in text else "content"
        return _refusal(path, f"{what} that Keras' safe mode refuses")
    missing = re.search(r"(?:Could not locate (?:class|function)|Unknown \w+:) '([^']+)'", text)
    if missing:
        what = f"The model uses {missing[1]!r}, which is not known here."
        return ModelError(what, got=str(path), hint="--import your.module, where it is defined")
    lines = text.strip().splitlines() or [type(error).__name__]
    return FileError("This model file cannot be loaded.", got=f"{path}: {lines[-1][:300]}")


def _choose_engine(*, announce: bool) -> None:
    """Set KERAS_BACKEND, unless it is set, to an installed backend: the one in Keras' configuration file, if any."""
    if "KERAS_BACKEND" in os.environ or "keras" in sys.modules:
        return
    installed = [name for name in _ENGINES if importlib.util.find_spec(name) is not None]
    if not installed:
        return  # importing Keras then raises an error that names the missing package
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        configured = json.loads((home / "keras.json").read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        configured = None
    engine = configured if configured in installed else installed[0]
    os.environ["KERAS_BACKEND"] = engine
    if announce:
        say(f"Keras runs on {engine} (set KERAS_BACKEND to choose)")


def _names_in(modules: Iterable[str]) -> dict[str, Any]:
    """Import modules; return their own classes and functions by name, as custom objects for a model file."""
    own: dict[str, Any] = {}
    for name in modules:
        module = _import(name)
        own |= {key: it for key, it in vars(module).items() if getattr(it, "__module__", None) == module.__name__}
    return own


def _import(name: str) -> Any:
    """Import a module that the user named; the current folder is searched last, as it may contain a file keras.py."""
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        hint = "run from the folder that holds it, or install it"
        raise InputError(f"There is no module {error.name!r}.", got=name, hint=hint) from error


def resolve(spec: str) -> Any:
    """Import the object that ``package.module:name`` names; raise InputError if there is none."""
    module_name, _, dotted = spec.partition(":")
    found = _import(module_name)
    for part in dotted.split("."):
        if not hasattr(found, part):
            raise InputError(f"{module_name} has nothing named {dotted!r}.", got=spec)
        found = getattr(found, part)
    return found


def _make(spec: str) -> Any:
    """Return the object that ``spec`` names if it is a model, or else its return value if it is a function."""
    found = resolve(spec)
    if not isinstance(found, type) and adapter_of(found) is not None:
        return found
    if not callable(found):
        raise InputError(f"{spec} is neither a model nor a function.", got=type(found).__name__)
    try:
        return found()
    except TypeError as error:
        hint = "write a function without parameters that returns the model"
        raise InputError(f"{spec} cannot be called without arguments.", got=str(error), hint=hint) from error


def _written_by_keras2(path: Path) -> bool:
    """Return whether a file was written by Keras 2; a folder is a SavedModel, which only Keras 2 reads and writes."""
    if path.is_dir():
        return (path / "keras_metadata.pb").is_file()
    try:
        version = str(_configuration(path).get("keras_version", ""))
    except (OSError, ValueError, KeyError):
        return False
    return version.partition(".")[0] in ("1", "2")


def _configuration(path: Path) -> dict[str, Any]:
    """Read the configuration in a ``.keras`` or HDF5 file: version, layers, loss."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            found = json.loads(archive.read("metadata.json"))
            return {**found, "model": json.loads(archive.read("config.json"))}
    with h5py.File(path, "r") as file:
        names = ("keras_version", "model_config", "training_config")
        known = {name: file.attrs[name] for name in names if name in file.attrs}
        words = {name: value.decode() if isinstance(value, bytes) else str(value) for name, value in known.items()}
        return {
            "keras_version": words["keras_version"],
            "model": json.loads(words["model_config"]),
            "training": json.loads(words.get("training_config", "null")),
        }


def _refuse_code(path: Path, configuration: Any, imports: Collection[str]) -> None:
    """Raise FileError if a configuration has byte code, or names a module other than Keras' and ``imports``."""
    for key, value in _entries(configuration):
        if key == "function_type" and value == "lambda":
            raise _refusal(path, "a Lambda layer that holds Python code")
        if not key.endswith("module") or not isinstance(value, str) or value in ("", "builtins"):
            continue
        allowed = (*_HARMLESS, *imports)
        if not any(value == name or value.startswith(f"{name}.") for name in allowed):
            raise _refusal(path, f"it names the module {value!r}", f"--import {value}, if that is yours; or ")


def _entries(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keys of nested dicts and lists with their values."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield str(key), value
            yield from _entries(value)
    elif isinstance(tree, list):
        for part in tree:
            yield from _entries(part)


def _refusal(path: Path, got: str, first: str = "") -> FileError:
    """Build the error for a file that could run code."""
    return FileError(
        "This model file is not loaded, because doing so could run code that it contains.",
        got=f"{path}: {got}",
        hint=f"{first}--unsafe, if you trust whoever made the file",
    )


def _from_numbers(keras: Any, path: Path, own: dict[str, Any], imports: Collection[str]) -> Any:
    """Rebuild a SavedModel from its Keras configuration, and load the weights of its checkpoint."""
    from tf_keras.protobuf import saved_metadata_pb2

    metadata = saved_metadata_pb2.SavedMetadata()
    metadata.ParseFromString((path / "keras_metadata.pb").read_bytes())
    root = next(json.loads(node.metadata) for node in metadata.nodes if node.node_path == "root")
    _refuse_code(path, root, imports)
    if root["class_name"] not in ("Sequential", "Functional", "Model") and root["class_name"] not in own:
        raise _refusal(path, f"a subclassed model, {root['class_name']}, is in there as graphs only")
    with keras.src.saving.serialization_lib.SafeModeScope(True):
        described = {"class_name": root["class_name"], "config": root["config"]}
        model = keras.models.model_from_json(json.dumps(described), custom_objects=own)
    if not model.built:
        model.build(root.get("build_input_shape"))
    model.load_weights(path / "variables" / "variables").assert_existing_objects_matched().expect_partial()
    if root.get("training_config"):
        from tf_keras.src.saving.legacy.saving_utils import compile_args_from_training_config

        model.compile(**compile_args_from_training_config(root["training_config"], own))
    return model
