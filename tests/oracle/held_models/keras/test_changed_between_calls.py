"""Python state that a model or a loss reads changes between two calls: the second result uses the new state.

Each model here is linear in one number, the gain, stored where users store such numbers. The loss is compared with that
of the unchanged model, and the gradients with the gain, to which they are proportional.
"""

import dataclasses
import functools
import types

import keras
import numpy as np
import pytest

import rnnlens as rl

pytestmark = pytest.mark.compiled

X = np.random.default_rng(0).normal(size=(3, 5, 2)).astype("float32")
Y = np.ones((3, 4), "float32")
GAIN = {"value": 1.0}


def gain_one_call_away():
    return GAIN["value"]


@dataclasses.dataclass
class Config:
    gain: float = 1.0
    inner: list = dataclasses.field(default_factory=lambda: [1.0])


class GainLayer(keras.layers.Layer):
    """A layer that multiplies by ``read_gain(self.store)``."""

    def __init__(self, store, read_gain):
        super().__init__()
        self.store, self._read_gain = store, read_gain

    def call(self, x):
        return x * self._read_gain(self.store)


class GainCell(keras.layers.Layer):
    state_size, output_size = 4, 4

    def __init__(self, store):
        super().__init__()
        self.store = store

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
        self.recurrent = self.add_weight(shape=(4, 4), name="recurrent")

    def call(self, x, states):
        h = keras.ops.tanh(x @ self.kernel + states[0] @ self.recurrent)
        return h * self.store.gain, [h]


class Subclassed(keras.Model):
    def __init__(self, options):
        super().__init__()
        self.rnn, self.options = keras.layers.SimpleRNN(4, name="rnn"), options

    def call(self, x):
        return self.rnn(x) * self.options["scale"][0]


class WithAttribute(keras.losses.Loss):
    beta = 1.0

    def call(self, y, out):
        return keras.ops.sum(out, axis=-1) * self.beta


class Callable:
    def __init__(self):
        self.beta = 1.0

    def __call__(self, y, out):
        return keras.ops.sum(out) * self.beta

    def method(self, y, out):
        return keras.ops.sum(out) * self.beta


def recurrent(*after, cell=None):
    layer = keras.layers.SimpleRNN(4, name="rnn") if cell is None else keras.layers.RNN(cell, name="rnn")
    return keras.Sequential([keras.Input((5, 2)), layer, *after])


def total(y, out):
    return keras.ops.sum(out)


def gain_in_layer(store, read_gain, write_gain):
    return recurrent(GainLayer(store, read_gain)), total, lambda gain: write_gain(store, gain)


def _list_of_layer():
    layer = GainLayer([1.0], lambda store: store[0])
    return recurrent(layer), total, lambda gain: layer.store.__setitem__(0, gain)


def _dict():
    layer = GainLayer({"a": {"b": 1.0}}, lambda store: store["a"]["b"])
    return recurrent(layer), total, lambda gain: layer.store["a"].__setitem__("b", gain)


def _array():
    return gain_in_layer(
        np.ones(4, "float32"), lambda store: keras.ops.convert_to_tensor(store), lambda store, gain: store.fill(gain)
    )


def _object():
    return gain_in_layer(Config(), lambda store: store.gain, lambda store, gain: setattr(store, "gain", gain))


def _object_in_object():
    return gain_in_layer(Config(), lambda store: store.inner[0], lambda store, gain: store.inner.__setitem__(0, gain))


def _namespace():
    return gain_in_layer(
        types.SimpleNamespace(gain=1.0), lambda store: store.gain, lambda store, gain: setattr(store, "gain", gain)
    )


def _global_one_call_away():
    return recurrent(GainLayer(None, lambda store: gain_one_call_away())), total, lambda gain: GAIN.update(value=gain)


def _cell():
    cell = GainCell(Config())
    return recurrent(cell=cell), total, lambda gain: setattr(cell.store, "gain", gain)


def _model():
    model = Subclassed({"scale": [1.0]})
    model(X)
    return model, total, lambda gain: model.options["scale"].__setitem__(0, gain)


def _lambda_closure():
    store = {"gain": 1.0}
    return recurrent(keras.layers.Lambda(lambda x: x * store["gain"])), total, lambda gain: store.update(gain=gain)


def _lambda_object():
    store = Config()
    return recurrent(keras.layers.Lambda(lambda x: x * store.inner[0])), total, lambda g: store.inner.__setitem__(0, g)


def _activation():
    store = [1.0]
    model = recurrent(keras.layers.Dense(4, activation=lambda x: x * store[0]))
    return model, total, lambda gain: store.__setitem__(0, gain)


def _loss_attribute():
    loss = WithAttribute(reduction="sum")
    return recurrent(), loss, lambda gain: setattr(loss, "beta", gain)


def _compiled_loss():
    model, loss = recurrent(), WithAttribute(reduction="sum")
    model.compile(loss=loss)
    return model, None, lambda gain: setattr(loss, "beta", gain)


def _callable_loss():
    loss = Callable()
    return recurrent(), loss, lambda gain: setattr(loss, "beta", gain)


def _bound_method():
    owner = Callable()
    return recurrent(), owner.method, lambda gain: setattr(owner, "beta", gain)


def _partial():
    store = {"gain": 1.0}
    loss = functools.partial(lambda y, out, store: keras.ops.sum(out) * store["gain"], store=store)
    return recurrent(), loss, lambda gain: store.update(gain=gain)


def _partial_of_a_global():
    loss = functools.partial(lambda y, out, scale: keras.ops.sum(out) * scale(), scale=gain_one_call_away)
    return recurrent(), loss, lambda gain: GAIN.update(value=gain)


def _default_argument():
    store = [1.0]
    return recurrent(), lambda y, out, k=store: keras.ops.sum(out) * k[0], lambda gain: store.__setitem__(0, gain)


CASES = {
    name.strip("_"): value
    for name, value in list(globals().items())
    if isinstance(value, types.FunctionType) and name.startswith("_") and not name.startswith("__")
}


def reference_loss(model, loss, x=X):
    out = model(x)
    return float(keras.ops.convert_to_numpy((model.loss if loss is None else loss)(Y, out)))


@pytest.fixture(autouse=True)
def _restored_gain():
    yield
    GAIN["value"] = 1.0


CERTIFIED = ("object_in_object", "lambda_closure", "compiled_loss")


@pytest.fixture
def certificates_by_case(name):
    """Certify only the three cases of CERTIFIED; reference runs are compiled by the same rules as other runs."""
    with rl.options(certify="always" if name in CERTIFIED else "never"):
        yield


@pytest.mark.product(on="jax", keep=CERTIFIED)
@pytest.mark.usefixtures("certificates_by_case")
@pytest.mark.parametrize("name", sorted(CASES))
def test_trace_follows(name):
    keras.utils.set_random_seed(1)
    model, loss, change = CASES[name]()
    before = rl.trace(model, X, Y, loss=loss, layers="rnn")
    assert before.loss == pytest.approx(reference_loss(model, loss), rel=1e-5)
    change(100.0)
    after = rl.trace(model, X, Y, loss=loss, layers="rnn")
    assert after.loss == pytest.approx(reference_loss(model, loss), rel=1e-5)
    np.testing.assert_allclose(after["rnn"].input_grad, 100 * before["rnn"].input_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.product(on="jax", keep=("cell",))
@pytest.mark.parametrize("name", ["object_in_object", "cell", "model", "lambda_closure", "loss_attribute"])
def test_gradients_follow(name):
    keras.utils.set_random_seed(1)
    model, loss, change = CASES[name]()
    before = rl.gradients(model, X, Y, loss=loss, wrt="input")
    change(100.0)
    after = rl.gradients(model, X, Y, loss=loss, wrt="input")
    np.testing.assert_allclose(after, 100 * before, rtol=1e-4, atol=1e-6)
    assert float(abs(before).max()) > 0


@pytest.mark.one_engine("jax", "torch")
def test_changed_back_is_the_first_answer():
    model, loss, change = CASES["object"]()
    first = rl.trace(model, X, Y, loss=loss).loss
    change(3.0)
    rl.trace(model, X, Y, loss=loss)
    change(1.0)
    assert rl.trace(model, X, Y, loss=loss).loss == first


@pytest.mark.one_engine("jax", "torch")
def test_a_builtin_layer_is_reconfigured():
    model = recurrent(keras.layers.Dense(3, name="head"))
    x = X * 3
    rl.trace(model, x, Y[:, :3], loss="mse")

    def matches_reference_run():
        expected = np.mean((keras.ops.convert_to_numpy(model(x)) - 1) ** 2)
        return rl.trace(model, x, Y[:, :3], loss="mse").loss == pytest.approx(float(expected), rel=1e-5)

    model.get_layer("head").activation = keras.activations.relu
    assert matches_reference_run()
    model.get_layer("rnn").cell.activation = keras.activations.relu
    assert matches_reference_run()
    model.add(keras.layers.Dense(3))
    assert matches_reference_run()
    model.pop()
    model.get_layer("rnn").go_backwards = True
    assert matches_reference_run()


@pytest.mark.one_engine("jax", "torch")
def test_one_loss_after_another():
    model = recurrent()
    squared = rl.gradients(model, X, Y, loss="mse", wrt="input")
    absolute = rl.gradients(model, X, Y, loss="mae", wrt="input")
    assert float(abs(squared - absolute).max()) > 1e-3
