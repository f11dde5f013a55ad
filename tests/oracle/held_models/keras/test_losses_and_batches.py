"""The loss of a data set equals that of all samples as one batch, for each batch size, loss and weighting.

The reference is Keras' own loss on all samples (``evaluate``), and its central differences, on the same model.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import rnnlens as rl
from rnnlens.errors import InputError, UnsupportedError

pytestmark = pytest.mark.usefixtures("float64", "uncertified")

N, T, V = 4, 3, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, T, 3))
IDS = np.where(np.arange(T)[None] < np.array([3, 1, 2, 2])[:, None], RNG.integers(1, 9, (N, T)), 0)
REAL = RNG.normal(size=(N, 1))
STEPS = np.where(IDS > 0, RNG.integers(1, V, (N, T)), 0)
PER_SAMPLE = RNG.uniform(0.2, 2.0, N)
PER_STEP = RNG.uniform(0.2, 2.0, (N, T))


def regressor(**options):
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((T, 3)), layers.LSTM(4, name="lstm", **options), layers.Dense(1, name="head")])


def tagger(mask):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((T,), dtype="int32"),
            layers.Embedding(9, 3, mask_zero=mask, name="embedding"),
            layers.LSTM(4, return_sequences=True, name="lstm"),
            layers.Dense(V, activation="softmax", name="head"),
        ]
    )


def mean_square(y, p):
    return ops.mean(ops.square(y - p))


def sum_of_squares(y, p):
    return ops.sum(ops.square(y - p))


def root_mean_square(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p)))


Loss = keras.losses
SPARSE = "sparse_categorical_crossentropy"
CASES = {
    "name": (regressor, X, REAL, lambda: "mse", None),
    "function": (regressor, X, REAL, lambda: mean_square, None),
    "function that sums": (regressor, X, REAL, lambda: sum_of_squares, None),
    "root of a mean": (regressor, X, REAL, lambda: root_mean_square, None),
    "sum": (regressor, X, REAL, lambda: Loss.MeanSquaredError(reduction="sum"), None),
    "sum and regularisers": (
        lambda: regressor(kernel_regularizer="l2", activity_regularizer="l1"),
        X,
        REAL,
        lambda: Loss.MeanSquaredError(reduction="sum"),
        None,
    ),
    "mean and a regulariser": (lambda: regressor(kernel_regularizer="l2"), X, REAL, lambda: "mse", None),
    "weights": (regressor, X, REAL, lambda: "mse", PER_SAMPLE),
    "weights of one": (regressor, X, REAL, lambda: Loss.MeanSquaredError(reduction="sum"), np.ones(N)),
    "mean with sample weight": (
        regressor,
        X,
        REAL,
        lambda: Loss.MeanSquaredError(reduction="mean_with_sample_weight"),
        PER_SAMPLE,
    ),
    "masked": (lambda: tagger(True), IDS, STEPS, lambda: SPARSE, None),
    "masked, weights of steps": (lambda: tagger(True), IDS, STEPS, lambda: SPARSE, PER_STEP),
    "masked sum": (
        lambda: tagger(True),
        IDS,
        STEPS,
        lambda: Loss.SparseCategoricalCrossentropy(reduction="sum"),
        None,
    ),
    "ignore_class": (
        lambda: tagger(False),
        IDS,
        STEPS,
        lambda: Loss.SparseCategoricalCrossentropy(ignore_class=0),
        None,
    ),
    "weights of steps": (lambda: tagger(False), IDS, STEPS, lambda: SPARSE, PER_STEP),
    "dice": (lambda: tagger(False), IDS, np.eye(V)[STEPS], lambda: Loss.Dice(), None),
}
ALWAYS = ("sum and regularisers", "masked, weights of steps")


def evaluate_loss(model, x, y, weight=None):
    return float(model.evaluate(x, y, sample_weight=weight, batch_size=N, verbose=0))


def slope(model, x, y, weight, name, size=3e-3):
    """Return a random direction for a weight of the head, and the central difference of the loss along it."""
    variable = getattr(model.get_layer("head"), name)
    before = np.array(variable)
    direction = np.random.default_rng(4).normal(size=before.shape)
    values = []
    for sign in (1, -1):
        variable.assign(before + sign * size * direction)
        values.append(evaluate_loss(model, x, y, weight))
    variable.assign(before)
    return direction, (values[0] - values[1]) / (2 * size)


@pytest.mark.one_engine
@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_the_batch_size_never_changes_the_loss(name):
    make, x, y, loss, weight = CASES[name]
    model = make()
    model.compile(loss=loss())
    direction, expected = slope(model, x, y, weight, "kernel")
    wrt = ["head.weights", "lstm.hidden", "lstm.weights"]
    full_grads = rl.gradients(model, x, y, wrt=wrt, sample_weight=weight)
    np.testing.assert_allclose(float(full_grads.value), evaluate_loss(model, x, y, weight), rtol=2e-6)
    np.testing.assert_allclose((full_grads["head"]["kernel"] * direction).sum(), expected, rtol=2e-3, atol=1e-4)
    batched_grads = rl.gradients(model, x, y, wrt=wrt, batch_size=3, sample_weight=weight)
    np.testing.assert_allclose(float(batched_grads.value), float(full_grads.value), rtol=1e-6)
    for layer, quantity in (("head", "kernel"), ("head", "bias"), ("lstm", "hidden"), ("lstm", "kernel")):
        reference = full_grads[layer][quantity].values
        np.testing.assert_allclose(
            batched_grads[layer][quantity], reference, rtol=1e-5, atol=1e-6 * abs(reference).max()
        )


@pytest.mark.one_engine
@pytest.mark.parametrize("name", ["masked, weights of steps"])
def test_trace_and_weights_give_the_same_loss(name):
    make, x, y, loss, weight = CASES[name]
    model = make()
    model.compile(loss=loss())
    value = evaluate_loss(model, x, y, weight)
    assert rl.trace(model, x, y, sample_weight=weight).loss == pytest.approx(value, rel=2e-6)
    assert rl.weights(model, x, y, sample_weight=weight).loss == pytest.approx(value, rel=2e-6)


@pytest.mark.one_engine
def test_a_loss_given_is_the_same_as_one_compiled():
    model = regressor()
    grads = rl.gradients(model, X, REAL, loss=sum_of_squares, wrt="head.weights", batch_size=3)
    model.compile(loss=sum_of_squares)
    np.testing.assert_allclose(float(grads.value), evaluate_loss(model, X, REAL), rtol=1e-6)


@pytest.mark.one_engine
@pytest.mark.full
def test_several_outputs_with_losses_of_their_own():
    keras.utils.set_random_seed(1)
    x = keras.Input((T,), dtype="int32")
    h = layers.LSTM(4, return_sequences=True, name="lstm")(layers.Embedding(9, 3, mask_zero=True)(x))
    tags = layers.Dense(V, activation="softmax", name="head")(h)
    model = keras.Model(x, {"tags": tags, "size": layers.Dense(1, name="size")(layers.LSTM(3, name="last")(h))})
    model.compile(
        loss={"tags": SPARSE, "size": Loss.MeanSquaredError(reduction="sum")}, loss_weights={"tags": 2.0, "size": 0.3}
    )
    y = {"tags": STEPS, "size": REAL}
    value = float(model.evaluate(IDS, y, batch_size=N, verbose=0, return_dict=True)["loss"])
    full_grads = rl.gradients(model, IDS, y, wrt="weights")
    batched_grads = rl.gradients(model, IDS, y, wrt="weights", batch_size=3)
    np.testing.assert_allclose([float(full_grads.value), float(batched_grads.value)], value, rtol=2e-6)
    for layer in ("head", "size", "lstm"):
        reference = full_grads[layer]["kernel"].values
        np.testing.assert_allclose(
            batched_grads[layer]["kernel"], reference, rtol=1e-5, atol=1e-6 * abs(reference).max()
        )


@pytest.mark.one_engine
@pytest.mark.parametrize("shape", [(N,), (N, 1)])
def test_a_function_sees_targets_aligned_as_compile_aligns_them(shape):
    model = regressor()
    value = rl.trace(model, X, REAL.reshape(shape), loss=mean_square).loss
    model.compile(loss=mean_square)
    assert value == pytest.approx(float(model.evaluate(X, REAL.reshape(shape), verbose=0)), rel=1e-6)
    assert value == pytest.approx(float(np.mean((REAL - model.predict(X, verbose=0)) ** 2)), rel=1e-6)


@pytest.mark.one_engine
@pytest.mark.parametrize(("samples", "one_hot"), [(1, False), (T, False), (T, True)])
def test_class_weights_hold_for_the_label_of_each_step(samples, one_hot):
    model = tagger(False)
    loss = "categorical_crossentropy" if one_hot else SPARSE
    model.compile(loss=loss)
    class_weights = {1: 0.2, 2: 3.0}
    x, labels = IDS[:samples], STEPS[:samples]
    weights = np.vectorize(lambda label: class_weights.get(label, 1.0))(labels)
    y = np.eye(V)[labels] if one_hot else labels
    value = rl.trace(model, x, y, class_weight=class_weights).loss
    assert value == pytest.approx(evaluate_loss(model, x, y, weights), rel=1e-6)


@pytest.mark.one_engine
def test_one_weight_per_sample_is_not_taken_for_one_per_step():
    model = tagger(False)
    model.compile(loss=SPARSE)
    for samples in (T, N):
        with pytest.raises(InputError, match="A loss at every step needs one weight per sample and step"):
            rl.trace(model, IDS[:samples], STEPS[:samples], sample_weight=np.ones(samples))
    loss = rl.trace(model, IDS, STEPS, sample_weight=PER_SAMPLE[:, None]).loss
    assert loss == pytest.approx(evaluate_loss(model, IDS, STEPS, np.repeat(PER_SAMPLE[:, None], T, 1)), rel=1e-6)


@pytest.mark.one_engine
def test_batch_statistics_and_what_is_more_than_outputs_are_refused_over_batches():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((T, 3)), layers.LSTM(4), layers.BatchNormalization(name="norm"), layers.Dense(1)]
    )
    model.compile(loss="mse")
    with pytest.raises(UnsupportedError, match="layer 'norm' uses statistics of its batch"):
        rl.gradients(model, X, REAL, training=True, batch_size=3)
    rl.gradients(model, X, REAL, training=True)
    rl.gradients(model, X, REAL, batch_size=3)

    class Adds(layers.Layer):
        def call(self, x):
            self.add_loss(ops.sum(x**2))
            return x

    model = keras.Sequential([keras.Input((T, 3)), layers.LSTM(4), Adds(), layers.Dense(1)])
    model.compile(loss="mse")
    with pytest.raises(UnsupportedError, match="calls add_loss"):
        rl.gradients(model, X, REAL, batch_size=3)

    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.sum((y - y_pred) ** 2)

    inputs = keras.Input((T, 3))
    model = Own(inputs, layers.Dense(1)(layers.LSTM(4)(inputs)))
    model.compile()
    with pytest.raises(UnsupportedError, match="compute_loss"):
        rl.gradients(model, X, REAL, batch_size=3)
    grads = rl.gradients(model, X, REAL, batch_size=3, combine="sum")
    np.testing.assert_allclose(float(grads.value), float(rl.gradients(model, X, REAL).value), rtol=1e-6)

    def penalised(y, p):
        return ops.mean((y - p) ** 2) + ops.sum(model.trainable_variables[0] ** 2)

    with pytest.raises(UnsupportedError, match="reads the model's weights itself"):
        rl.gradients(model, X, REAL, loss=penalised, batch_size=3)


@pytest.mark.one_engine
def test_a_loss_that_does_not_depend_on_the_model_says_so():
    model = regressor()
    trace = rl.trace(model, X, REAL, loss=lambda y, p: ops.mean(y**2))
    assert any("No path leads from the loss" in note for note in trace.notes)
