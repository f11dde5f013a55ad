"""A smaller last chunk, padded for a compiled engine, has the numbers of the streaming call for every loss."""

import dask
import dask.array as da
import numpy as np
import pytest

import rnnlens as rl

keras = pytest.importorskip("keras")
CHUNK, COUNT, STEPS, FEATURES = 8, 19, 6, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(COUNT, STEPS, FEATURES)).astype("float32")
Y = RNG.normal(size=(COUNT, 1)).astype("float32")
BY_STEP = RNG.normal(size=(COUNT, STEPS, 1)).astype("float32")
LABELS = RNG.integers(0, 2, (COUNT, 1))
WEIGHTS = RNG.uniform(0.5, 2.0, COUNT).astype("float32")


def build_model(loss="mse", steps=False, **options):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    gru = layers.GRU(3, return_sequences=steps, name="gru", **options)
    model = keras.Sequential([layers.Input((STEPS, FEATURES)), gru, layers.Dense(1, activation="sigmoid")])
    model.compile(loss=loss)
    return model


def mean_of_squares(y, output):
    return keras.ops.mean((y - output) ** 2)


CASES = {
    "loss": (build_model, Y, {}, {}),
    "sum": (lambda: build_model(keras.losses.MeanSquaredError(reduction="sum")), Y, {}, {}),
    "loss of every step": (lambda: build_model(steps=True), BY_STEP, {}, {}),
    "sample weights": (build_model, Y, {}, {"sample_weight": WEIGHTS}),
    "class weights": (lambda: build_model("binary_crossentropy"), LABELS, {"class_weight": {0: 1.0, 1: 3.0}}, {}),
    "regulariser": (lambda: build_model(kernel_regularizer=keras.regularizers.L2(0.1)), Y, {}, {}),
    "activity": (lambda: build_model(activity_regularizer=keras.regularizers.L2(0.1)), Y, {}, {}),
    "function": (build_model, Y, {"loss": mean_of_squares, "combine": "mean"}, {}),
    "input of a loss": (build_model, Y, {"wrt": ["input", "gru.hidden"]}, {}),
    "output": (build_model, None, {"of": "output", "reduce": "mean", "wrt": ["gru/kernel", "input"]}, {}),
    "each output": (build_model, None, {"of": "output", "reduce": "sum", "per_sample": True, "wrt": ["gru/bias"]}, {}),
    "weighted outputs": (build_model, None, {"of": "output", "reduce": WEIGHTS[:, None], "wrt": ["gru/kernel"]}, {}),
    "mean over samples": (build_model, None, {"of": "output", "reduce": "sum", "wrt": ["input"], "across": "mean"}, {}),
}


def to_dask(array):
    return None if array is None else da.from_array(array, chunks=(CHUNK, *array.shape[1:]))


#: One case per kind of padding, as each compiles for seconds; `make test-full` runs all.
FEW = ("loss of every step", "sample weights", "regulariser", "weighted outputs")


@pytest.mark.parametrize(
    "case", [case if case in FEW else pytest.param(case, marks=pytest.mark.full) for case in CASES]
)
def test_the_numbers_are_those_of_the_streaming_call(case):
    make, y, keywords, weights = CASES[case]
    model = make()
    streamed = rl.gradients(model, X, y, batch_size=CHUNK, **keywords, **weights)
    lazy_weights = {name: to_dask(value) for name, value in weights.items()}
    with dask.config.set(scheduler="synchronous"):
        chunked = rl.gradients(model, to_dask(X), to_dask(y), **keywords, **lazy_weights).compute()
    np.testing.assert_allclose(chunked.value, streamed.value, rtol=1e-6)
    for name in streamed.tensors:
        expected = streamed[name].values
        np.testing.assert_allclose(chunked[name].values, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
