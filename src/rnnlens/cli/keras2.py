"""Loading of models written by Keras 2 with ``tf_keras``: ``.keras``, HDF5, and SavedModel folders.

A configuration may name any function of any installed module, and contain the byte code of a lambda; the graphs of a
SavedModel are programs. None of it is run without ``--unsafe``: configurations are checked before a model is built from
them, and of a SavedModel only the configuration and the weights are read.
"""

from __future__ import annotations

import importlib
import json
import os
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import h5py

from ..errors import FileError, MissingDependencyError

#: Packages that a configuration may name; a module of None or "" denotes a registered name.
_HARMLESS = ("keras", "tf_keras", "tensorflow.keras", "tensorflow.python.keras")


def written_by_keras2(path: Path) -> bool:
    """Return whether a file was written by Keras 2; a folder is a SavedModel, which only Keras 2 reads and writes."""
    if path.is_dir():
        return (path / "keras_metadata.pb").is_file()
    try:
        version = str(_configuration(path).get("keras_version", ""))
    except (OSError, ValueError, KeyError):
        return False
    return version.partition(".")[0] in ("1", "2")


def load_keras2(path: Path, own: dict[str, Any], imports: Collection[str], unsafe: bool) -> Any:
    """Load a model written by Keras 2; exceptions of ``tf_keras`` are not converted.

    Raises
    ------
    FileError
        If loading could run code of the file, and ``unsafe`` is False.
    """
    keras = _tf_keras()
    if unsafe:
        return keras.models.load_model(path, custom_objects=own, safe_mode=False)
    if path.is_dir():
        return _from_numbers(keras, path, own, imports)
    _refuse_code(path, _configuration(path), imports)
    with keras.src.saving.serialization_lib.SafeModeScope(True):
        return keras.models.load_model(path, custom_objects=own)


def _tf_keras() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        return importlib.import_module("tf_keras")
    except ImportError as error:
        hint = "pip install --no-deps tf_keras==2.21.0, with tensorflow 2.21"
        what = "A model that Keras 2 wrote needs tf_keras."
        raise MissingDependencyError(what, got=str(error), hint=hint) from error


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
        training = words.get("training_config")
        return {
            "keras_version": words["keras_version"],
            "model": json.loads(words["model_config"]),
            "training": None if training is None else json.loads(training),
        }


def _refuse_code(path: Path, configuration: Any, imports: Collection[str]) -> None:
    """Raise FileError if a configuration contains byte code, or names a module that is not allowed.

    Allowed are Keras modules and those in ``imports``.
    """
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
    return FileError(
        "This model file is not loaded, because doing so could run code that it contains.",
        got=f"{path}: {got}",
        hint=f"{first}--unsafe, if you trust whoever made the file",
    )


def _from_numbers(keras: Any, path: Path, own: dict[str, Any], imports: Collection[str]) -> Any:
    """Rebuild a SavedModel from its configuration, and load the weights of its checkpoint."""
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
