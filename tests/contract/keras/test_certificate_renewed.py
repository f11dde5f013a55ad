"""A model that the user changes between two calls is certified anew, and its Jacobian is that of the changed model."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import rnnlens as rl
from rnnlens.adapters.keras import adapter

LAYERS = keras.layers
X = np.random.default_rng(0).normal(size=(2, 4, 2))
X[1, 1] = 0.0


def make_model():
    recurrent = LAYERS.GRU(3, return_sequences=True, name="rnn")
    return keras.Sequential([keras.Input((4, 2)), LAYERS.Masking(name="mask"), recurrent])


CHANGES = {
    "an activation": lambda model: setattr(model.get_layer("rnn").cell, "activation", keras.activations.softsign),
    "an option": lambda model: setattr(model.get_layer("rnn"), "return_sequences", False),
    "the direction": lambda model: setattr(model.get_layer("rnn"), "go_backwards", True),
    "a mask": lambda model: setattr(model.get_layer("rnn"), "zero_output_for_mask", True),
    "unrolled": lambda model: setattr(model.get_layer("rnn"), "unroll", True),
    "a further layer": lambda model: model.add(LAYERS.Dense(2)),
    "a layer less": lambda model: model.pop(),
}


def slopes(model, step, feature, size=1e-6):
    """Return the derivatives of all outputs by one input of each sample, by central differences."""
    change = np.zeros_like(X)
    change[:, step, feature] = size
    change[~X.any(axis=-1)] = 0.0  # a masked step stays masked
    ends = [keras.ops.convert_to_numpy(model(X + sign * change)) for sign in (1, -1)]
    return (ends[0] - ends[1]) / (2 * size)


def certificate_and_jacobian(model):
    jacobian = rl.jacobian(model, X)
    assert jacobian.certificate.state == "passed"
    return jacobian.certificate, np.asarray(jacobian)


@pytest.mark.product(on="torch", keep=("an activation", "a mask"))
@pytest.mark.parametrize("name", [name for name in CHANGES if name != "a layer less"])
def test_a_changed_model_is_certified_anew(name):
    model = make_model()
    assert not certificate_and_jacobian(model)[0].earlier
    certificate, before = certificate_and_jacobian(model)
    assert certificate.earlier  # of the same model one comparison suffices
    CHANGES[name](model)
    certificate, after = certificate_and_jacobian(model)
    assert not certificate.earlier
    assert name == "unrolled" or after.shape != before.shape or np.abs(after - before).max() > 1e-6
    np.testing.assert_allclose(after[..., 2, 1], slopes(model, 2, 1), atol=1e-7)


def test_other_values_of_weights_need_no_other_certificate():
    model = make_model()
    rl.jacobian(model, X)
    model.set_weights([2 * weight for weight in model.get_weights()])
    certificate, jacobian = certificate_and_jacobian(model)
    assert certificate.earlier
    np.testing.assert_allclose(jacobian[..., 2, 1], slopes(model, 2, 1), atol=1e-7)


@pytest.mark.parametrize("use", ["verbs", "predict", "fit"])
def test_calls_and_training_change_no_fingerprint(use):
    model = make_model()
    model.compile("sgd", "mse")
    y = np.zeros((2, 4, 3))
    before = adapter.fingerprint(model)
    if use == "verbs":
        rl.trace(model, X, y)
        rl.gradients(model, X, y, wrt="rnn.hidden")
        rl.jacobian(model, X)
    elif use == "predict":
        model.predict(X, verbose=0)
        model(X, training=True)
    else:
        model.fit(X, y, epochs=2, verbose=0)
    assert adapter.fingerprint(model) == before


def test_layers_of_a_model_that_lost_one_are_read_anew():
    model = make_model()
    model.add(LAYERS.LSTM(2, name="last"))
    assert [layer.name for layer in rl.layers(model)] == ["rnn", "last"]
    rl.jacobian(model, X)
    CHANGES["a layer less"](model)
    assert [layer.name for layer in rl.layers(model)] == ["rnn"]
    assert rl.jacobian(model, X).certificate.state == "passed"
