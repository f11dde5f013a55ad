"""Each (of, wrt) pair of docs/gradients.md against the engine's gradient of the same network in plain operations."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tapped_network as net
from keras_float64 import default_float
from keras_plain import without_jit

import rnnlens as rl

pytestmark = pytest.mark.usefixtures("uncertified")

ENGINE = keras.backend.backend()
if ENGINE == "jax":
    import jax

    jax.config.update("jax_enable_x64", True)

OPS = SimpleNamespace(
    tensor=keras.ops.convert_to_tensor,
    tanh=keras.ops.tanh,
    sigmoid=keras.ops.sigmoid,
    mean=keras.ops.mean,
    stack=lambda a, i: keras.ops.stack(a, axis=i),
    concat=lambda a, i: keras.ops.concatenate(a, axis=i),
)
P = net.random_arrays(net.WEIGHTS, 0)
E = net.zero_taps()
X = np.random.default_rng(1).normal(size=(net.B, net.T, net.F))
Y = np.random.default_rng(2).normal(size=(net.B, net.OUT))
#: Padding on the right, a masked step in the middle, padding on the left.
MASK = np.array([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1], [0, 0, 1, 1, 1]], dtype=bool)
TARGET_WEIGHTS = {
    name: np.random.default_rng(i).normal(size=E[name].shape) for i, name in enumerate(net.TARGETS) if name in E
}
ALL = [*net.WEIGHTS, *net.TAPS]


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    """Set Keras' default dtype to float64, because Keras computes the loss of any model in the default dtype."""
    with default_float("float64"):
        yield


def autodiff(function, *arguments):
    """Return value and gradients of ``function(dict of tensors, ...)`` with respect to the dict.

    The gradient is zero for tensors that the value does not depend on.
    """
    tensors, *constants = keras.tree.map_structure(keras.ops.convert_to_tensor, arguments)
    if ENGINE == "jax":
        with without_jit():
            value, gradients = jax.value_and_grad(function)(tensors, *constants)
    elif ENGINE == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = function(tensors, *constants)
        gradients = tape.gradient(value, tensors, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    else:
        import torch

        tensors = {k: a.detach().requires_grad_() for k, a in tensors.items()}
        value = function(tensors, *constants)
        grads = torch.autograd.grad(value, list(tensors.values()), allow_unused=True, materialize_grads=True)
        gradients = dict(zip(tensors, grads, strict=True))
        value = value.detach()
    return float(value), {k: np.asarray(g) for k, g in gradients.items()}


def reference_gradients(scalar, mask=None):
    x = X if mask is None else X * mask[:, :, None]

    def function(tensors, x, y):
        return scalar(net.run_network(tensors, tensors, x, y, OPS, mask, holds_initial_state=ENGINE == "jax"))

    return autodiff(function, {**P, **E}, x, Y)


def build(masking):
    layers = keras.layers
    x = keras.Input((None, net.F))
    # Conv1D passes no mask on, so the recurrent layers take it as an argument.
    mask = {"mask": keras.ops.any(x != 0, axis=-1)} if masking else {}
    h = layers.Conv1D(net.C, 2, padding="causal", activation="tanh", name="conv1d")(x)
    h = layers.LSTM(net.H, return_sequences=True, name="lstm")(h, **mask)
    h = layers.Bidirectional(layers.GRU(net.G, return_sequences=True), name="gru")(h, **mask)
    h = layers.SimpleRNN(net.R, name="rnn")(h, **mask)
    model = keras.Model(x, layers.Dense(net.OUT, name="head")(h))
    model.compile(loss="mse")
    for layer in model.layers:
        if layer.weights:
            layer.set_weights(weights_of(layer.name))
    return model


def weights_of(layer):
    """Return the weights of a layer in the layout of Keras."""

    def flat_array(name):
        array = P[f"{layer}/{name}"]
        return array if layer in ("conv1d", "head") else array.reshape(*array.shape[:-2], -1)

    if layer != "gru":
        names = [name for name in ("kernel", "recurrent_kernel", "bias") if f"{layer}/{name}" in P]
        return [flat_array(name) for name in names]
    biases = np.stack([flat_array("bias"), flat_array("recurrent_bias")], axis=1)
    return [a[d] for d in range(2) for a in (flat_array("kernel"), flat_array("recurrent_kernel"), biases)]


@pytest.fixture(scope="module")
def model():
    return build(masking=False)


@pytest.fixture(scope="module")
def masked_model():
    return build(masking=True)


def check_gradients(g, expected, value):
    np.testing.assert_allclose(g.value, value, rtol=1e-10)
    scale = max(np.abs(a).max() for a in expected.values())
    for name, expected_grad in expected.items():
        if not expected_grad.any():
            assert name in g.disconnected, name
            assert name not in g.tensors or not g[name].values.any(), name
            continue
        actual = g[name].values
        assert actual.shape == expected_grad.shape, name
        assert np.abs(actual - expected_grad).max() <= 1e-10 * scale, name
        np.testing.assert_allclose(actual, expected_grad, rtol=1e-8, atol=1e-13 * scale, err_msg=name)


def make_target(of):
    weights = TARGET_WEIGHTS.get(of, np.ones(()))
    return (lambda out: keras.ops.sum(out[of] * keras.ops.convert_to_tensor(weights))), {"y": Y} if of == "loss" else {
        "reduce": weights
    }


@pytest.mark.compiled("loss")
@pytest.mark.parametrize("of", ["loss", *(pytest.param(of, marks=pytest.mark.full) for of in net.TARGETS[1:])])
def test_every_pair_equals_autodiff(model, of):
    scalar, target = make_target(of)
    value, expected = reference_gradients(scalar)
    check_gradients(rl.gradients(model, X, of=of, wrt=ALL, **target), expected, value)


@pytest.mark.product(keep=("masked",))
@pytest.mark.parametrize("mask", [None, MASK], ids=["unmasked", "masked"])
def test_all_targets_together_equal_autodiff(model, masked_model, mask):
    """Gradients of a randomly weighted sum of all targets equal autodiff's; an error in any one pair would show."""
    names = [of for of in net.TARGETS if of in TARGET_WEIGHTS]

    def weighted_sum(*tensors):
        return sum(
            keras.ops.sum(t * keras.ops.convert_to_tensor(TARGET_WEIGHTS[of]))
            for of, t in zip(names, tensors, strict=True)
        )

    value, expected = reference_gradients(lambda out: weighted_sum(*(out[of] for of in names)), mask)
    x, tested_model = (X, model) if mask is None else (X * mask[:, :, None], masked_model)
    check_gradients(rl.gradients(tested_model, x, of=(weighted_sum, *names), wrt=ALL), expected, value)


@pytest.mark.full
@pytest.mark.parametrize("of", net.TARGETS)
def test_every_pair_equals_autodiff_under_masks(masked_model, of):
    scalar, target = make_target(of)
    value, expected = reference_gradients(scalar, MASK)
    check_gradients(rl.gradients(masked_model, X * MASK[:, :, None], of=of, wrt=ALL, **target), expected, value)


def test_loss_and_what_recurrent_layers_carry_come_from_one_captured_pass(masked_model):
    """Gradients of the loss by recurrent quantities, all from one capture as in callbacks, equal the reference."""
    names = ["lstm.hidden", "lstm.cell", "lstm.output", "lstm.gates", "lstm.input", "gru.hidden", "gru.output"]
    names += ["gru.initial_hidden", "rnn.final_hidden", "rnn.output"]
    value, expected = reference_gradients(lambda out: out["loss"], MASK)
    g = rl.gradients(masked_model, X * MASK[:, :, None], Y, wrt=names)
    assert set(g.tensors) == set(names)
    check_gradients(g, {name: expected[name] for name in names}, value)


@pytest.mark.one_engine
def test_callable_of_the_output(model):
    def function(out):
        return keras.ops.sum(keras.ops.exp(out[:, 1]))

    value, expected = reference_gradients(lambda out: function(out["output"]))
    check_gradients(rl.gradients(model, X, of=function, wrt=ALL), expected, value)


class TwoHeads(keras.Model):
    """A subclassed model whose two outputs are known only after a call."""

    def __init__(self):
        super().__init__()
        self.gru = keras.layers.GRU(4, return_sequences=True, name="gru")
        self.heads = [keras.layers.Dense(2, name="first"), keras.layers.Dense(3, name="second")]

    def call(self, x):
        sequence = self.gru(x)
        return self.heads[0](sequence), self.heads[1](sequence[:, -1])


@pytest.mark.one_engine
def test_a_callable_sees_every_output_of_a_subclassed_model():
    model = TwoHeads()
    model(X)

    def scalar_of_outputs(outputs):
        first, second = outputs
        return keras.ops.sum(first[:, 2] ** 2) + keras.ops.sum(keras.ops.sin(second))

    value, expected = autodiff(lambda tensors: scalar_of_outputs(model(tensors["x"])), {"x": X})
    g = rl.gradients(model, X, of=scalar_of_outputs, wrt=["input", "second/bias"])
    assert np.abs(expected["x"]).max() > 0.01
    np.testing.assert_allclose(g.value, value, rtol=1e-10)
    np.testing.assert_allclose(g["model"]["input"], expected["x"], rtol=1e-9, atol=1e-12)
    assert g["second"]["bias"].values.any()
    with pytest.raises(rl.errors.InputError, match="The model returns several tensors"):
        rl.gradients(model, X, of="output", reduce="sum", wrt="input")
    with pytest.raises(rl.errors.InputError, match="The model returns several tensors"):
        rl.jacobian(model, X)
