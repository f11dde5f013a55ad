"""Keras 2 files in the command line's reader: the loaded model equals the saved one, and no code of the file runs."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
import tf_keras as keras
from tf_keras.protobuf import saved_metadata_pb2

import rnnlens as rl
from rnnlens import errors
from rnnlens.cli.models import load_model

X = np.random.default_rng(0).normal(size=(2, 4, 2)).astype("float32")
Y = np.zeros((2, 1), dtype="float32")


def make_model():
    layer = keras.layers.GRU(3, recurrent_activation="hard_sigmoid", name="gru")
    model = keras.Sequential([keras.Input((4, 2)), layer, keras.layers.Dense(1, name="head")])
    model.compile("sgd", "mse")
    return model


def save_model(model, folder, form):
    path = folder / {"h5": "model.h5", "keras": "model.keras", "folder": "model"}[form]
    model.save(path, **({"save_format": "tf"} if form == "folder" else {}))
    return path


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
@pytest.mark.parametrize("form", ["h5", "keras", "folder"])
def test_a_file_of_keras_2_is_the_model_that_was_saved(form, tmp_path):
    model = make_model()
    loaded = load_model(str(save_model(model, tmp_path, form)))
    assert type(loaded).__module__.startswith("tf_keras.")
    np.testing.assert_array_equal(loaded(6 * X), model(6 * X))
    assert rl.trace(loaded, X, Y).certificate.state == "passed"


def make_model_with_lambda():
    twice = keras.layers.Lambda(lambda t: t * 2)
    return keras.Sequential([keras.Input((4, 2)), twice, keras.layers.GRU(3, name="gru")])


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
@pytest.mark.parametrize("form", ["h5", "keras", "folder"])
def test_code_in_a_file_is_run_only_where_the_user_says_so(form, tmp_path):
    model = make_model_with_lambda()
    path = save_model(model, tmp_path, form)
    with pytest.raises(errors.FileError, match="could run code that it contains") as caught:
        load_model(str(path))
    assert "Lambda" in str(caught.value)
    np.testing.assert_allclose(load_model(str(path), unsafe=True)(X), model(X), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
@pytest.mark.parametrize("module", ["os", "keras_of_somebody", "subprocess"])
def test_a_function_of_any_module_that_a_file_names_is_not_fetched(module, tmp_path):
    path = save_model(make_model(), tmp_path, "h5")
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        head = config["config"]["layers"][-1]["config"]
        function_config = {"class_name": "function", "config": "system", "registered_name": "system"}
        head["activation"] = {**function_config, "module": module}
        file.attrs["model_config"] = json.dumps(config)
    with pytest.raises(errors.FileError, match=f"names the module {module!r}"):
        load_model(str(path))


def test_a_saved_graph_is_no_configuration(tmp_path):
    path = tmp_path / "own"
    model = keras.Sequential([keras.Input((4, 2)), keras.layers.SimpleRNN(2)])
    model.save(path, save_format="tf")
    metadata = saved_metadata_pb2.SavedMetadata()
    metadata.ParseFromString((path / "keras_metadata.pb").read_bytes())
    for node in metadata.nodes:  # a subclassed model has another class name
        node.metadata = node.metadata.replace('"class_name": "Sequential"', '"class_name": "Subclassed"')
    (path / "keras_metadata.pb").write_bytes(metadata.SerializeToString())
    with pytest.raises(errors.FileError, match="a subclassed model, Subclassed, is in there as graphs only"):
        load_model(str(path))
