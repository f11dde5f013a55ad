"""Every (of, wrt) pair of docs/gradients.md against the engine's own differentiation of the same network, written out."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tapped_network as net

import rnnlens as rl

ENGINE = keras.backend.backend()
if ENGINE == "jax":
    import jax

    jax.config.update("jax_enable_x64", True)

OPS = SimpleNamespace(
    tanh=keras.ops.tanh,
    sigmoid=keras.ops.sigmoid,
    stack=lambda a, i: keras.ops.stack(a, axis=i),
    concat=lambda a, i: keras.ops.concatenate(a, axis=i),
)
P = net.random_arrays(net.WEIGHTS, 0)
E = net.zeros()
X = np.random.default_rng(1).normal(size=(net.B, net.T, net.F))
Y = np.random.default_rng(2).normal(size=(net.B, net.O))
#: Padding on the right, a hole, and padding on the left.
MASK = np.array([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1], [0, 0, 1, 1, 1]], dtype=bool)
GIVEN = {name: np.random.default_rng(i).normal(size=E[name].shape) for i, name in enumerate(net.TARGETS) if name in E}
ALL = [*net.WEIGHTS, *net.TAPS]


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    """Losses are computed in floatx, whatever the model is."""
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def autodiff(function, *arguments):
    """Value and gradients of ``function(dict of tensors, ...)`` with respect to the first; zeros where there is no path."""
    tensors, *rest = keras.tree.map_structure(keras.ops.convert_to_tensor, arguments)
    if ENGINE == "jax":
        value, found = jax.jit(jax.value_and_grad(function))(tensors, *rest)
    elif ENGINE == "tensorflow":
        import tensorflow as tf

        @tf.function(autograph=False)
        def both(tensors, *rest):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                value = function(tensors, *rest)
            return value, tape.gradient(value, tensors, unconnected_gradients=tf.UnconnectedGradients.ZERO)

        value, found = both(tensors, *rest)
    else:
        import torch

        tensors = {k: a.detach().requires_grad_() for k, a in tensors.items()}
        value = function(tensors, *rest)
        grads = torch.autograd.grad(value, list(tensors.values()), allow_unused=True, materialize_grads=True)
        found = dict(zip(tensors, grads, strict=True))
        value = value.detach()
    return float(value), {k: np.asarray(g) for k, g in found.items()}


def reference(scalar, mask=None):
    x = X if mask is None else X * mask[:, :, None]

    def function(tensors, x, y):
        return scalar(net.run(tensors, tensors, x, y, OPS, mask))

    return autodiff(function, {**P, **E}, x, Y)


def build(masking):
    layers = keras.layers
    x = keras.Input((None, net.F))
    h = layers.Masking(name="masking")(x) if masking else x
    h = layers.Conv1D(net.C, 2, padding="causal", activation="tanh", name="conv1d")(h)
    h = layers.LSTM(net.H, return_sequences=True, name="lstm")(h)
    h = layers.Bidirectional(layers.GRU(net.G, return_sequences=True), name="gru")(h)
    h = layers.SimpleRNN(net.R, name="rnn")(h)
    model = keras.Model(x, layers.Dense(net.O, name="head")(h))
    model.compile(loss="mse")
    for layer in model.layers:
        if layer.weights:
            layer.set_weights(weights_of(layer.name))
    return model


def weights_of(layer):
    """The weights of a layer in the layout of Keras."""

    def flat(name):
        array = P[f"{layer}/{name}"]
        return array if layer in ("conv1d", "head") else array.reshape(*array.shape[:-2], -1)

    if layer != "gru":
        names = [name for name in ("kernel", "recurrent_kernel", "bias") if f"{layer}/{name}" in P]
        return [flat(name) for name in names]
    biases = np.stack([flat("bias"), flat("recurrent_bias")], axis=1)
    return [a[d] for d in range(2) for a in (flat("kernel"), flat("recurrent_kernel"), biases)]


@pytest.fixture(scope="module")
def model():
    return build(masking=False)


@pytest.fixture(scope="module")
def masked_model():
    return build(masking=True)


def check(g, expected, value):
    np.testing.assert_allclose(g.value, value, rtol=1e-10)
    scale = max(np.abs(a).max() for a in expected.values())
    for name in ALL:
        true = expected[name]
        if not true.any():
            assert name in g.disconnected, name
            assert name not in g.tensors or not g[name].values.any(), name
            continue
        got = g[name].values
        assert got.shape == true.shape, name
        assert np.abs(got - true).max() <= 1e-10 * scale, name
        np.testing.assert_allclose(got, true, rtol=1e-8, atol=1e-13 * scale, err_msg=name)


@pytest.mark.parametrize("of", net.TARGETS)
def test_every_pair_equals_autodiff(model, of):
    weights = GIVEN.get(of, 1.0)
    value, expected = reference(lambda out: keras.ops.sum(out[of] * weights))
    given = {"y": Y} if of == "loss" else {"reduce": weights}
    check(rl.gradients(model, X, of=of, wrt=ALL, **given), expected, value)


@pytest.mark.parametrize("of", ["loss", "lstm.cell", "gru.hidden", "rnn.output"])
def test_every_pair_equals_autodiff_under_masks(masked_model, of):
    weights = GIVEN.get(of, 1.0)
    value, expected = reference(lambda out: keras.ops.sum(out[of] * weights), MASK)
    given = {"y": Y} if of == "loss" else {"reduce": weights}
    check(rl.gradients(masked_model, X * MASK[:, :, None], of=of, wrt=ALL, **given), expected, value)


def test_callable_of_the_output(model):
    def function(out):
        return keras.ops.sum(keras.ops.exp(out[:, 1]))

    value, expected = reference(lambda out: function(out["output"]))
    check(rl.gradients(model, X, of=function, wrt=ALL), expected, value)


def test_callable_of_named_tensors_inside_and_outside(model):
    def mixed(hidden, cell, halves, out):
        total = keras.ops.sum(hidden[:, 2] * cell[:, 3]) + keras.ops.sum(halves[:, 1, 0] ** 2)
        return total + keras.ops.sum(out) ** 2

    names = ["lstm.hidden", "lstm.cell", "gru.hidden", "output"]
    value, expected = reference(lambda out: mixed(*(out[name] for name in names)))
    check(rl.gradients(model, X, of=(mixed, *names), wrt=ALL), expected, value)
