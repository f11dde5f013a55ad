"""Loading of models for the command line: a Keras file, or a Python function that returns a model.

A model file may contain code that runs on loading. Keras files are read in safe mode, torch weights with
``weights_only=True``; files that these refuse are refused here, with the reason, unless ``--unsafe`` is given.

Models written by Keras 2 (``.keras``, HDF5, SavedModel folders) are loaded with ``tf_keras``. Their configuration may
name any function of any installed module, and contain the byte code of a lambda; the graphs of a SavedModel are
programs. Without ``--unsafe`` configurations are checked before a model is built from them, and of a SavedModel only
the configuration and the weights are read.
"""

from __future__ import annotations

import difflib
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
from ..errors import FileError, InputError, MissingDependencyError, ModelError, RnnlensError, did_you_mean
from .console import print_remark
from .data import check_archive

_FILES = (".keras", ".h5", ".hdf5")
#: Backends in order of preference: the lightest first; torch before TensorFlow, as it needs no tracing.
_ENGINES = ("jax", "torch", "tensorflow")
#: Packages that a configuration of Keras 2 may name; a module of None or "" denotes a registered name.
_ALLOWED_MODULES = ("keras", "tf_keras", "tensorflow.keras", "tensorflow.python.keras")
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
        raise InputError("This names no model.", got=repr(spec), expected=expected, hint=_model_hint(spec))
    _choose_engine(announce=False)
    _import_custom_objects(imports)
    model = _model_of(spec)
    if weights is not None:
        if not weights.is_file():
            raise FileError("There is no such weights file.", got=str(weights))
        check_archive(weights)
        adapter_for(model).load_weights(model, weights, unsafe=unsafe)
    return model


def _model_hint(spec: str) -> str | None:
    """Return what to type instead of a torch file, a Python file or a module without a function."""
    path = Path(spec)
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin", ".safetensors"):
        return (
            f"my_module:make --weights {spec}, where make() in my_module.py returns the model. A file of the whole "
            f"model has its weights in torch.load({path.name!r}, weights_only=False).state_dict(): save these"
        )
    if path.suffix == ".py" or spec.replace(".", "").isidentifier():
        module = ".".join(path.with_suffix("").parts) if path.suffix == ".py" else spec
        near = _near(path)
        if near is not None:
            return near
        return f"{module}:make, where make() in it returns the model"
    return _near(path)


def _near(path: Path) -> str | None:
    """Return the model file whose name is closest to that of a path, in the same folder."""
    files = [file.name for file in path.parent.glob("*") if file.suffix in (".keras", ".h5", ".hdf5")]
    closest = difflib.get_close_matches(path.name, files, n=1, cutoff=0.6)
    return str(path.with_name(closest[0])) if closest else None


def _load_keras(path: Path, imports: Iterable[str], unsafe: bool) -> Any:
    if not path.exists():
        raise FileError(
            "There is no such model file.", got=str(path), expected="a file written by model.save", hint=_near(path)
        )
    check_archive(path)
    if _is_keras2_file(path):
        return _load_keras2(path, tuple(imports), unsafe)
    _choose_engine(announce=True)
    with _silence_libraries():  # TensorFlow's libraries write to standard error on import
        keras = _import_library(
            "keras", "A Keras model needs Keras.", "pip install keras, and one of jax, torch, tensorflow"
        )
    custom_objects = _import_custom_objects(imports)
    try:
        with warnings.catch_warnings():
            # The warning about an optimizer without steps only matters for training.
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            # Keras writes losses into HDF5 files by short names, which it does not find when it reads them.
            loss_names = ("mse", "mae", "mape", "msle", "kld", "bce") if path.suffix != ".keras" else ()
            short_losses = {name: keras.losses.get(name) for name in loss_names}
            return keras.saving.load_model(
                path, custom_objects={**short_losses, **custom_objects}, safe_mode=not unsafe
            )
    except Exception as error:  # Keras raises ValueError, TypeError, KeyError, OSError alike
        raise _keras_load_error(path, error) from error


def _load_keras2(path: Path, imports: Collection[str], unsafe: bool) -> Any:
    """Load a file of Keras 2 with Keras 2, where ``hard_sigmoid`` differs; refuse code in it unless ``unsafe``."""
    try:
        with _silence_libraries():
            custom_objects = _import_custom_objects(imports)
            hint = "pip install --no-deps tf_keras==2.21.0, with tensorflow 2.21"
            keras = _import_library("tf_keras", "A model that Keras 2 wrote needs tf_keras.", hint)
            if unsafe:
                return keras.models.load_model(path, custom_objects=custom_objects, safe_mode=False)
            if path.is_dir():
                return _rebuild_saved_model(keras, path, custom_objects, imports)
            _refuse_code(path, _read_configuration(path), imports)
            with keras.src.saving.serialization_lib.SafeModeScope(True):
                return keras.models.load_model(path, custom_objects=custom_objects)
    except RnnlensError:
        raise
    except Exception as error:
        raise _keras_load_error(path, error) from error


def _import_library(name: str, problem: str, hint: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(problem, got=str(error), hint=hint) from error


@contextmanager
def _silence_libraries() -> Iterator[None]:
    """Drop output of compiled libraries to standard error; messages of Python code pass."""
    sys.stderr.flush()
    saved_stderr = os.dup(2)
    python_stderr, sys.stderr = sys.stderr, os.fdopen(os.dup(saved_stderr), "w")
    try:
        with open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), 2)
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)
        sys.stderr.close()
        sys.stderr = python_stderr


def _keras_load_error(path: Path, error: Exception) -> RnnlensError:
    """Build the error for a file that Keras did not load, with the reason."""
    text = str(error)
    if "safe_mode" in text or "unsafe_deserialization" in text or "arbitrary code" in text:
        problem = "a Lambda layer" if "Lambda" in text or "lambda" in text else "content"
        return _unsafe_file_error(path, f"{problem} that Keras' safe mode refuses")
    missing_name = re.search(r"(?:Could not locate (?:class|function)|Unknown \w+:) '([^']+)'", text)
    if missing_name:
        problem = f"The model uses {missing_name[1]!r}, which is not known here."
        return ModelError(problem, got=str(path), hint="--import your.module, where it is defined")
    lines = text.strip().splitlines() or [type(error).__name__]
    return FileError("This model file cannot be loaded.", got=f"{path}: {lines[-1][:300]}")


def _choose_engine(*, announce: bool) -> None:
    """Set KERAS_BACKEND, unless it is set, to an installed backend: the one in Keras' configuration file, if any."""
    if "KERAS_BACKEND" in os.environ or "keras" in sys.modules:
        return
    installed_engines = [name for name in _ENGINES if importlib.util.find_spec(name) is not None]
    if not installed_engines:
        return  # importing Keras then raises an error that names the missing package
    keras_home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        configured_engine = json.loads((keras_home / "keras.json").read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        configured_engine = None
    engine = configured_engine if configured_engine in installed_engines else installed_engines[0]
    os.environ["KERAS_BACKEND"] = engine
    if announce:
        print_remark(f"Keras runs on {engine} (set KERAS_BACKEND to choose)")


def _import_custom_objects(modules: Iterable[str]) -> dict[str, Any]:
    """Import modules; return their own classes and functions by name, as custom objects for a model file."""
    custom_objects: dict[str, Any] = {}
    for name in modules:
        module = _import_module(name)
        custom_objects |= {
            key: value for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
        }
    return custom_objects


def _import_module(name: str) -> Any:
    """Import a module that the user named; the current folder is searched last, as it may contain a file keras.py."""
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        near = difflib.get_close_matches(name, [file.stem for file in Path.cwd().glob("*.py")], n=1, cutoff=0.6)
        hint = f"{near[0]}, of this folder" if near else "run from the folder that holds it, or install it"
        raise InputError(f"There is no module {error.name!r}.", got=name, hint=hint) from error


def resolve(spec: str) -> Any:
    """Import the object that ``package.module:name`` names; raise InputError if there is none."""
    module_name, _, dotted_name = spec.partition(":")
    if module_name.endswith(".py"):
        module = ".".join(Path(module_name).with_suffix("").parts)
        expected = "package.module:name, the module as import names it"
        raise InputError("A module is named without .py.", got=spec, expected=expected, hint=f"{module}:{dotted_name}")
    named_object = _import_module(module_name)
    for attribute in dotted_name.split("."):
        if not hasattr(named_object, attribute):
            names = [
                name
                for name, value in getattr(named_object, "__dict__", {}).items()
                if callable(value) and not name.startswith("_")
            ]
            hint = did_you_mean(attribute, names)
            raise InputError(f"{module_name} has nothing named {dotted_name!r}.", got=spec, hint=hint)
        named_object = getattr(named_object, attribute)
    return named_object


def _model_of(spec: str) -> Any:
    """Return the object that ``spec`` names if it is a model, or else its return value if it is a function."""
    named_object = resolve(spec)
    if not isinstance(named_object, type) and adapter_of(named_object) is not None:
        return named_object
    if not callable(named_object):
        raise InputError(f"{spec} is neither a model nor a function.", got=type(named_object).__name__)
    try:
        return named_object()
    except TypeError as error:
        hint = "write a function without parameters that returns the model"
        raise InputError(f"{spec} cannot be called without arguments.", got=str(error), hint=hint) from error


def _is_keras2_file(path: Path) -> bool:
    """Return whether a file was written by Keras 2; a folder is a SavedModel, which only Keras 2 reads and writes."""
    if path.is_dir():
        return (path / "keras_metadata.pb").is_file()
    try:
        version = str(_read_configuration(path).get("keras_version", ""))
    except (OSError, ValueError, KeyError):
        return False
    return version.partition(".")[0] in ("1", "2")


def _read_configuration(path: Path) -> dict[str, Any]:
    """Read the configuration in a ``.keras`` or HDF5 file: version, layers, loss."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            metadata = json.loads(archive.read("metadata.json"))
            return {**metadata, "model": json.loads(archive.read("config.json"))}
    with h5py.File(path, "r") as file:
        names = ("keras_version", "model_config", "training_config")
        attributes = {name: file.attrs[name] for name in names if name in file.attrs}
        texts = {name: value.decode() if isinstance(value, bytes) else str(value) for name, value in attributes.items()}
        return {
            "keras_version": texts["keras_version"],
            "model": json.loads(texts["model_config"]),
            "training": json.loads(texts.get("training_config", "null")),
        }


def _refuse_code(path: Path, configuration: Any, imports: Collection[str]) -> None:
    """Raise FileError if a configuration has byte code, or names a module other than Keras' and ``imports``."""
    for key, value in _entries(configuration):
        if key == "function_type" and value == "lambda":
            raise _unsafe_file_error(path, "a Lambda layer that holds Python code")
        if not key.endswith("module") or not isinstance(value, str) or value in ("", "builtins"):
            continue
        allowed_modules = (*_ALLOWED_MODULES, *imports)
        if not any(value == name or value.startswith(f"{name}.") for name in allowed_modules):
            raise _unsafe_file_error(path, f"it names the module {value!r}", f"--import {value}, if that is yours; or ")


def _entries(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keys of nested dicts and lists with their values."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield str(key), value
            yield from _entries(value)
    elif isinstance(tree, list):
        for item in tree:
            yield from _entries(item)


def _unsafe_file_error(path: Path, content: str, first_hint: str = "") -> FileError:
    """Build the error for a file that could run code."""
    return FileError(
        "This model file is not loaded, because doing so could run code that it contains.",
        got=f"{path}: {content}",
        hint=f"{first_hint}--unsafe, if you trust whoever made the file",
    )


def _rebuild_saved_model(keras: Any, path: Path, custom_objects: dict[str, Any], imports: Collection[str]) -> Any:
    """Rebuild a SavedModel from its Keras configuration, and load the weights of its checkpoint."""
    from tf_keras.protobuf import saved_metadata_pb2

    metadata = saved_metadata_pb2.SavedMetadata()
    metadata.ParseFromString((path / "keras_metadata.pb").read_bytes())
    root = next(json.loads(node.metadata) for node in metadata.nodes if node.node_path == "root")
    _refuse_code(path, root, imports)
    if root["class_name"] not in ("Sequential", "Functional", "Model") and root["class_name"] not in custom_objects:
        raise _unsafe_file_error(path, f"a subclassed model, {root['class_name']}, is in there as graphs only")
    with keras.src.saving.serialization_lib.SafeModeScope(True):
        model_config = {"class_name": root["class_name"], "config": root["config"]}
        model = keras.models.model_from_json(json.dumps(model_config), custom_objects=custom_objects)
    if not model.built:
        model.build(root.get("build_input_shape"))
    model.load_weights(path / "variables" / "variables").assert_existing_objects_matched().expect_partial()
    if root.get("training_config"):
        from tf_keras.src.saving.legacy.saving_utils import compile_args_from_training_config

        model.compile(**compile_args_from_training_config(root["training_config"], custom_objects))
    return model
