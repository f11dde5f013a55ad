"""Typical mistakes with models of JAX: the message says what is wrong and was given, and what it says to type works."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import rnnlens as rl

X = np.random.default_rng(0).normal(size=(6, 10, 4)).astype("float32")
CLASSES = np.array([0, 1, 2, 0, 1, 2])
ONE_HOT = np.eye(3)[CLASSES]


class Net(nnx.Module):
    def __init__(self):
        self.rnn = nnx.RNN(nnx.GRUCell(4, 8, rngs=nnx.Rngs(0)))
        self.head = nnx.Linear(8, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.rnn(x)[:, -1])


def squared(output, target):
    return ((output - target) ** 2).mean()


def cross_entropy(output, target):
    return optax.softmax_cross_entropy_with_integer_labels(output, target).mean()


def swapped(a, b):
    return cross_entropy(b, a)


class Unlisted(nnx.RNNCellBase):
    """A leaky unit, whose equations are no known cell's."""

    def __init__(self):
        self.kernel = nnx.Param(0.1 * jnp.ones((4, 3)))

    def __call__(self, carry, inputs):
        carry = 0.9 * carry + jnp.sin(inputs @ self.kernel)
        return carry, carry

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return jnp.zeros((input_shape[0], 3))

    @property
    def num_feature_axes(self):
        return 1


def trace(x=X, y=ONE_HOT, loss=squared):
    return rl.trace(Net(), x, y, loss=loss, quantities="hidden")


#: Mistake -> the arguments of ``trace``, what was given, what to type, and the arguments once that was typed.
MISTAKES = {
    "a shorter y": ({"y": ONE_HOT[:5]}, "y (5, 3) float64", "x[:5]", {"x": X[:5], "y": ONE_HOT[:5]}),
    "one-hot for an index": (
        {"loss": cross_entropy},
        "output (6, 3) float32, y (6, 3) float64",
        "numpy.argmax(y, -1) in place of y",
        {"loss": cross_entropy, "y": np.argmax(ONE_HOT, -1)},
    ),
    "swapped arguments": (
        {"loss": swapped, "y": CLASSES},
        "y (6,) int64",
        "loss=lambda output, target: swapped(target, output)",
        {"loss": lambda output, target: swapped(target, output), "y": CLASSES},
    ),
    "the loss of a training step": (
        {"loss": lambda model, x, y: squared(model(x), y)},
        "y (6, 3) float64",
        "loss=lambda output, target: ((output - target) ** 2).mean()",
        {"loss": lambda output, target: ((output - target) ** 2).mean()},
    ),
    "no loss": (
        {"loss": None},
        "x (6, 10, 4) float32, y (6, 3) float32",
        "loss=lambda output, target: ((output - target) ** 2).mean()",
        {"loss": lambda output, target: ((output - target) ** 2).mean()},
    ),
    "one sequence": ({"x": X[0], "y": ONE_HOT[:1]}, "x (10, 4) float32", "x[None]", {"x": X[:1], "y": ONE_HOT[:1]}),
    "other features": ({"x": X[..., :3]}, "x (6, 10, 3) float32", "x with the 4 features of the training", {}),
    "turned axes": ({"x": X.swapaxes(1, 2)}, "x (6, 4, 10) float32", "x.swapaxes(1, 2)", {}),
}


@pytest.mark.parametrize(("arguments", "got", "hint", "mended"), MISTAKES.values(), ids=MISTAKES)
def test_an_exception_of_a_model_or_loss_is_explained(arguments, got, hint, mended):
    with pytest.raises(rl.errors.UserCodeError) as caught:
        trace(**arguments)
    text = str(caught.value)
    assert got in text.partition("\n  got:      ")[2].partition("\n")[0]
    assert text.rpartition("\n  try:      ")[2].startswith(hint)
    assert trace(**mended)["rnn.cell"].hidden.shape[-1] == 8


def test_parameters_without_their_key():
    module = nn.RNN(nn.GRUCell(8))
    params = module.init(jax.random.key(0), X)["params"]
    with pytest.raises(rl.errors.UserCodeError, match="the parameters are not under the key 'params'") as caught:
        rl.trace(rl.jax.model(module, params), X)
    assert str(caught.value).endswith('\n  try:      rl.jax.model(module, {"params": params})')
    hidden = rl.trace(rl.jax.model(module, {"params": params}), X)["cell"].hidden
    assert np.allclose(hidden, jnp.asarray(module.apply({"params": params}, X)), atol=1e-6)


def test_what_is_no_model():
    module = nn.RNN(nn.GRUCell(8))
    params = module.init(jax.random.key(0), X)
    hints = {
        "module": (module, "rl.jax.model(module, params), with params = module.init(jax.random.key(0), x)"),
        "apply": (module.apply, "rl.jax.model(apply, params)"),
        "params": (params, "rl.jax.model(module, params)"),
    }
    for model, hint in hints.values():
        with pytest.raises(rl.errors.ModelError) as caught:
            rl.trace(model, X)
        assert caught.value.hint.startswith(hint)
    assert rl.trace(rl.jax.model(module, params), X)["cell"].hidden.shape == (6, 10, 8)
    with pytest.raises(rl.errors.InputError, match="The module or the function comes first") as caught:
        rl.jax.model(params, module)
    assert caught.value.hint == "rl.jax.model(module, params)"


@pytest.mark.parametrize(
    ("name", "y"),
    [
        ("cross_entropy", CLASSES),
        ("sparse_categorical_crossentropy", CLASSES),
        ("categorical_crossentropy", ONE_HOT),
        ("binary_crossentropy", ONE_HOT),
        ("mse", ONE_HOT),
        ("mae", ONE_HOT),
    ],
)
def test_a_loss_by_name_is_written_as_a_function(name, y):
    with pytest.raises(rl.errors.InputError, match="A loss for a model of JAX is a function") as caught:
        trace(y=y, loss=name)
    loss = eval(caught.value.hint.removeprefix("loss=").partition(", of logits")[0], {"optax": optax})
    y, outputs = y.astype("int32" if y.ndim == 1 else "float32"), np.array([[0.5, 0.3, -1.0]] * 6, "float32")
    by_keras = keras.losses.get("sparse_categorical_crossentropy" if name == "cross_entropy" else name)
    logits = {"from_logits": True} if "cross" in name else {}
    assert np.allclose(loss(outputs, y), np.mean(by_keras(y, outputs, **logits)), atol=1e-6)


def test_a_function_that_takes_a_key_besides_the_data():
    module = nn.RNN(nn.GRUCell(8))
    params = module.init(jax.random.key(0), X)
    with pytest.raises(rl.errors.UserCodeError, match="the function takes 'key' besides the data") as caught:
        rl.trace(rl.jax.model(lambda params, x, key: module.apply(params, x), params), X)
    _, _, code = caught.value.hint.partition(" in place of x, or ")
    apply, key = lambda params, x, key: module.apply(params, x), jax.random.key(0)
    model = eval(code, {"rl": rl, "apply": apply, "key": key, "params": params})
    assert rl.trace(model, X)["cell"].hidden.shape == (6, 10, 8)


def test_a_target_taken_for_another_argument_of_the_model():
    class Switched(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.RNN(nn.GRUCell(8))(x) * (2.0 if train else 1.0)

    module = Switched()
    model = rl.jax.model(module, module.init(jax.random.key(0), X))
    with pytest.raises(rl.errors.UserCodeError, match="y was given without a loss") as caught:
        rl.trace(model, X, CLASSES)
    loss = eval(caught.value.hint.removeprefix("loss="))
    assert np.isfinite(rl.trace(model, X, np.zeros((6, 10, 8)), loss=loss).loss)


def test_a_class_for_a_model():
    with pytest.raises(rl.errors.ModelError) as caught:
        rl.trace(Net, X)
    assert str(caught.value).endswith("\n  try:      an instance of it: model = Net(...)")


@pytest.mark.parametrize("verb", ["weights(model, x, {})", "gradients(model, x, {})"])
def test_a_gradient_of_the_loss_without_a_loss_names_what_to_type(verb):
    """The same text for a known cell and for one of unknown equations; what it says is typed as it stands."""
    cells = {"known": nnx.GRUCell(4, 3, rngs=nnx.Rngs(0)), "unknown": Unlisted()}
    for model in (nnx.RNN(cell) for cell in cells.values()):
        with pytest.raises(rl.errors.InputError, match="There is no loss to differentiate") as caught:
            eval(f"rl.{verb.format('')}", {"rl": rl, "model": model, "x": X})
        scope = {"rl": rl, "model": model, "x": X, "y": np.zeros((6, 10, 3), "float32")}
        assert eval(f"rl.{verb.format(caught.value.hint)}", scope)


@pytest.mark.parametrize("verb", ["jacobian(model, ids, {})", "gradients(model, ids, y, loss=loss, {})"])
def test_ids_have_no_derivative_and_what_is_named_in_their_place_has(verb):
    """An embedding refuses ids that were cast to floats, which the hint said to do."""

    class Reader(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return nn.RNN(nn.GRUCell(3, name="memory"))(nn.Embed(9, 4)(ids))

    ids, y = np.arange(18).reshape(3, 6) % 9, np.zeros((3, 6, 3), "float32")
    scope = {"rl": rl, "ids": ids, "y": y, "loss": squared}
    scope["model"] = rl.jax.model(Reader(), Reader().init(jax.random.key(0), ids))
    named = 'wrt="input"'
    with pytest.raises(rl.errors.RnnlensError, match="ntegers have no derivative") as caught:
        eval(f"rl.{verb.format(named)}", scope)
    _, try_it = str(caught.value).split("\n  try:      ")
    assert 'wrt="memory.input"' in try_it
    named = 'wrt="memory.input"'
    result = eval(f"rl.{verb.format(named)}", scope)
    assert result.certificate.state == "passed"
    assert np.abs(result).max() > 0


@pytest.mark.parametrize("verb", [rl.trace, rl.gradients, rl.find_nonfinite])
def test_a_while_loop_has_no_gradient_and_the_loop_named_in_its_place_has(verb):
    def network(loop):
        def apply(params, x):
            step = lambda h, x_t: (jnp.tanh(x_t @ params["rnn"]["w"] + h), None)  # noqa: E731
            hidden, _ = jax.lax.scan(step, jnp.zeros((len(x), 3)), jnp.swapaxes(x, 0, 1))
            return loop(lambda h: jnp.tanh(h @ params["decoder"]), hidden)

        return rl.jax.model(apply, {"rnn": {"w": 0.1 * jnp.ones((4, 3))}, "decoder": jnp.eye(3)})

    def unbounded(step, h):
        return jax.lax.while_loop(lambda state: state[0] < 3, lambda state: (state[0] + 1, step(state[1])), (0, h))[1]

    with pytest.raises(rl.errors.UnsupportedError, match="while loop") as caught:
        verb(network(unbounded), X, ONE_HOT, loss=squared)
    assert "jax.lax.fori_loop with fixed bounds" in caught.value.hint
    result = verb(network(lambda step, h: jax.lax.fori_loop(0, 3, lambda i, h: step(h), h)), X, ONE_HOT, loss=squared)
    assert verb is rl.find_nonfinite or result.certificate.state == "passed"
