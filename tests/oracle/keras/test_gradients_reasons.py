"""Each cause of a missing gradient, provoked in Keras on every engine, with the full text of its explanation."""

import keras
import numpy as np
import pytest
import reasons
from reasons import reason_texts

import rnnlens as rl

pytestmark = pytest.mark.one_engine("jax", "torch")

X = np.random.default_rng(1).integers(0, 11, (3, 6)).astype("int32")
layers = keras.layers


class Broken(keras.Model):
    """A subclassed model (no Keras graph); each branch into its GRU loses the gradient for a different reason."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(11, 4, name="embedding")
        self.fixed = layers.Dense(4, name="fixed")
        self.hidden = layers.Dense(4, name="hidden")
        self.hard = layers.Dense(4, name="hard")
        self.dead = layers.Dense(4, bias_initializer=keras.initializers.Constant(-100), activation="relu", name="dead")
        self.spare = layers.Dense(2, name="spare")
        self.gru = layers.GRU(5, name="gru")
        self.head = layers.Dense(2, name="head")
        self.spare.build((None, 2))
        self.fixed.trainable = False

    def call(self, ids):
        e = self.embedding(ids)
        best = keras.ops.one_hot(keras.ops.argmax(self.hard(e), axis=-1), 4)
        best = keras.ops.cast(best, e.dtype)
        return self.head(self.gru(self.fixed(e) + keras.ops.stop_gradient(self.hidden(e)) + best + self.dead(e)))


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    model = Broken()
    model(X)
    return model


@pytest.fixture(scope="module")
def g(model):
    before = [np.array(w) for w in model.get_weights()]
    grads = rl.gradients(model, X, of=reasons.TARGET, reduce="sum", wrt=["weights", "input"])
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new, err_msg="an experiment left a weight moved")
    assert all("call" not in vars(layer) for layer in model.layers)
    return grads


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("input", reasons.integer_input("int32")),
        ("head/kernel", reasons.not_on_path("head/kernel")),
        ("head/bias", reasons.not_on_path("head/bias")),
        ("hidden/kernel", reasons.stop_gradient("hidden/kernel", "hidden")),
        ("hard/kernel", reasons.non_differentiable("hard/kernel")),
        ("spare/kernel", reasons.unused_layer("spare")),
        ("dead/kernel", reasons.relu_dead("dead", 72)),
    ],
)
def test_each_cause_in_full(g, name, expected):
    assert reason_texts(g.disconnected[name]) == expected
    code, sentence, remedy = expected
    assert "disconnected" in repr(g)
    assert f"{name}: [{code}] {sentence} Try: {remedy}" in repr(g)


def test_nothing_else_is_called_disconnected(g):
    connected = {"embedding/embeddings", "fixed/kernel", "fixed/bias", "gru/kernel", "gru/recurrent_kernel", "gru/bias"}
    assert connected | {"gru/recurrent_bias"} == set(g.tensors) - {"dead/kernel", "dead/bias"}
    assert not connected & set(g.disconnected)


def test_frozen_weights_have_their_gradient_and_a_flag(g):
    assert reason_texts(g.flags["fixed/kernel"]) == reasons.frozen("fixed/kernel", "fixed")
    assert g["fixed"]["kernel"].values.any()
    assert set(g.flags) == {"fixed/kernel", "fixed/bias"}


@pytest.mark.one_engine
def test_one_tensor_without_a_gradient_is_an_error_with_its_reason(model):
    with pytest.raises(rl.errors.DisconnectedError) as caught:
        rl.gradients(model, X, of=reasons.TARGET, reduce="sum", wrt="input")
    code, sentence, remedy = reasons.integer_input("int32")
    assert str(caught.value) == (
        f"There is no gradient of gru.final_hidden with respect to 'input' [{code}].\n"
        f"  got:      {sentence}\n  try:      {remedy}"
    )


@pytest.mark.one_engine
def test_masked_steps_all_of_them_or_some():
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype("float32")
    x[:, 0] = x[1, 3] = 0
    model = keras.Sequential([keras.Input((4, 3)), layers.Masking(), layers.LSTM(2, name="lstm")])
    names = ["input", "lstm.input"]
    partly_masked = rl.gradients(model, x, of="lstm.hidden", reduce="sum", wrt=names)
    for name in names:
        assert reason_texts(partly_masked.flags[name]) == reasons.masked_in_part(3, 8)
    fully_masked = rl.gradients(model, x, of="lstm.hidden", at={"time": 0}, reduce="sum", wrt=names)
    for name in names:
        assert reason_texts(fully_masked.disconnected[name]) == reasons.masked_at(0, 1, name, "lstm.hidden")
        assert not fully_masked[name].values.any()


@pytest.mark.one_engine
def test_underflow_of_half_precision():
    keras.utils.set_random_seed(0)
    first = layers.Dense(3, dtype="float16", name="first")
    tiny = keras.initializers.Constant(1.5e-5)
    last = layers.Dense(1, dtype="float16", name="last", kernel_initializer=tiny)
    model = keras.Sequential([keras.Input((2,), dtype="float16"), first, last])
    x = np.full((2, 2), 2e-4, dtype="float16")
    g = rl.gradients(model, x, of="output", reduce="sum", wrt=["first/kernel", "first/bias"])
    assert reason_texts(g.disconnected["first/kernel"]) == reasons.underflow("6e-09")
    assert not g["first/kernel"].values.any()
    np.testing.assert_allclose(g["first/bias"].values, 3e-5, rtol=0.1)
