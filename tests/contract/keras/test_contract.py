"""The public contract check passes for compiled user models and reports a broken adapter."""

from __future__ import annotations

import numpy as np
import pytest
from specimens_keras import declared
from spoken_keras import PACKAGE, engine, keras, keras_adapter

from rnnlens.adapters.keras import reference_run
from rnnlens.adapters.protocol import Batch, Taps
from rnnlens.adapters.registry import adapter_for
from rnnlens.testing import check_adapter
from rnnlens.testing.keras_models import MODELS

adapter = keras_adapter()


def loss(y_true, y_pred):
    return keras.ops.sum(keras.ops.square(y_pred)) + keras.ops.sum(y_pred)


def data():
    x = np.random.default_rng(0).normal(size=(2, 4, 2))
    x[0, 2:] = 0.0
    return x


@pytest.mark.op_by_op
@pytest.mark.compiled("bidirectional")
@pytest.mark.parametrize("name", MODELS)
def test_contract(name):
    assert len(check_adapter(adapter, MODELS[name](keras), Batch(data(), loss=loss), rtol=1e-9)) == 7


@pytest.mark.one_engine("torch", "tf_keras")
def test_a_broken_adapter_is_found_out():
    class ReversingAdapter(type(adapter)):
        def run(self, model, batch, taps):
            run = super().run(model, batch, taps)
            for call in run.capture.calls if taps.record != "ports" else ():
                call.output = call.output[:, ::-1] if call.returns_sequences else call.output
            return run

    with pytest.raises(AssertionError, match=f"{PACKAGE}: outputs replay: lower output: off by"):
        check_adapter(ReversingAdapter(PACKAGE), MODELS["stacked"](keras), Batch(data(), loss=loss), rtol=1e-9)


@pytest.mark.op_by_op
def test_names_of_nodes():
    def node_names(name):
        return [c.layer for c in adapter.run(MODELS[name](keras), Batch(data()), Taps.states()).capture.calls]

    assert node_names("shared") == ["rnn#0", "rnn#1"]
    assert node_names("nested") == ["encoder/gru"]
    assert node_names("bidirectional") == ["bi", "bi"]


class Spare(keras.Model):
    """A model with two recurrent layers that are never called and have no weights."""

    def __init__(self):
        super().__init__()
        self.one = keras.layers.LSTM(3, name="one")
        self.never = keras.layers.GRU(2, name="never")
        self.both = keras.layers.Bidirectional(keras.layers.LSTM(2), name="both")

    def call(self, x):
        return self.one(x)


@pytest.mark.one_engine("torch", "tf_keras")
@pytest.mark.filterwarnings("ignore:.build:UserWarning")  # Keras 3 warns about layers that are not built
def test_a_layer_that_nobody_calls_is_left_out():
    model = Spare()
    model(data())
    assert [
        call.layer
        for call in adapter.run(model, Batch(data(), loss=loss), Taps.direct(weight_grads=True)).capture.calls
    ] == ["one"]
    assert list(adapter.weights(model)) == ["one"]


def test_a_model_belongs_to_its_adapter_which_knows_the_engine():
    model = MODELS["stacked"](keras)
    assert adapter_for(model) is adapter
    assert adapter.engine == engine()


def test_names_and_ties_of_variables_are_read_once_for_all_weights(monkeypatch):
    model = declared().model
    walks, tied = [], reference_run.tied_variables
    monkeypatch.setattr(reference_run, "tied_variables", lambda model: walks.append(1) or tied(model))
    facts, names = adapter.facts(model), set(reference_run.names_of(model).values())
    locations = [
        facts.weight_location(layer, None, key)
        for layer, weights in adapter.weights(model).items()
        for key in weights.values
    ]
    assert len(locations) > 2
    assert {location.name for location in locations if location is not None} <= names
    assert walks == [1]
