"""Models that take their input shape from the first batch, written as in the tutorials of Keras.

Only stateful layers fix the batch size; the number of steps is fixed only if Keras itself refuses another.
"""

from __future__ import annotations

import numpy as np
import pytest
from spoken_keras import LEGACY, keras

import rnnlens as rl
from rnnlens import errors

pytestmark = [pytest.mark.one_engine("torch", "tf_keras"), pytest.mark.op_by_op]

L = keras.layers
RANDOM = np.random.default_rng(0)
SAMPLES, STEPS, FEATURES = 10, 4, 2
X = RANDOM.normal(size=(SAMPLES, STEPS, FEATURES))
Y = X.sum((1, 2))[:, None]
TOKENS = RANDOM.integers(0, 9, (SAMPLES, STEPS))


def compile_model(model):
    model.compile("sgd", "mse")
    return model


def fit_once(model, x=X):
    compile_model(model).fit(x, Y, batch_size=4, epochs=1, verbose=0)
    return model


def sequential_model():
    return keras.Sequential([L.LSTM(3), L.Dense(1)])


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = L.GRU(3), L.Dense(1)

    def call(self, x):
        return self.head(self.rnn(x))


def called_model():
    model = compile_model(sequential_model())
    model(X[:2])
    return model


def predicted_model():
    model = compile_model(sequential_model())
    model.predict(X[:3], verbose=0)
    return model


def built_model(shape, model=None):
    model = model or sequential_model()
    model.build(shape)
    return compile_model(model)


def functional_model(shape):
    inputs = keras.Input(batch_shape=shape)
    return compile_model(keras.Model(inputs, L.Dense(1)(L.LSTM(3)(inputs))))


def loaded_model(path):
    fit_once(sequential_model()).save(path)
    return keras.models.load_model(path)


def cloned_model():
    model = keras.models.clone_model(fit_once(sequential_model()))
    return model if model.built else built_model((None, STEPS, FEATURES), model)


#: Programs that build a model on another batch size or number of steps than the data has.
PROGRAMS = {
    "fit": lambda _: fit_once(sequential_model()),
    "called once": lambda _: called_model(),
    "predict": lambda _: predicted_model(),
    "subclass, fit": lambda _: fit_once(Subclass()),
    "stacked, fit": lambda _: fit_once(keras.Sequential([L.LSTM(3, return_sequences=True), L.GRU(2), L.Dense(1)])),
    "bidirectional, fit": lambda _: fit_once(keras.Sequential([L.Bidirectional(L.SimpleRNN(3)), L.Dense(1)])),
    "convolution, fit": lambda _: fit_once(keras.Sequential([L.Conv1D(3, 2, padding="causal"), L.LSTM(3), L.Dense(1)])),
    "model in a model, fit": lambda _: fit_once(keras.Sequential([keras.Sequential([L.GRU(3)]), L.Dense(1)])),
    "load_model": lambda folder: loaded_model(folder / "model.keras"),
    "clone_model": lambda _: compile_model(cloned_model()),
    "Input(batch_shape)": lambda _: functional_model((4, STEPS, FEATURES)),
    "build, other steps": lambda _: built_model((None, STEPS + 3, FEATURES)),
    "build, other batch": lambda _: built_model((4, STEPS, FEATURES)),
    "Input, other steps": lambda _: fit_once(
        keras.Sequential([keras.Input((None, FEATURES)), L.LSTM(3), L.Dense(1)]), RANDOM.normal(size=(10, 6, FEATURES))
    ),
}  # fmt: skip


@pytest.mark.product(keep=("fit", "load_model", "build, other steps") if LEGACY else ("fit", "build, other steps"))
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_verb_takes_any_number_of_samples(program, tmp_path):
    model = PROGRAMS[program](tmp_path)
    shapes = [tuple(tensor.shape) for tensor in getattr(model, "inputs", None) or ()]
    name = rl.layers(model).names[0]
    trace = rl.trace(model, X, Y)
    assert trace[name].hidden.shape[0] == SAMPLES
    gradient = rl.gradients(model, X, Y, of="loss", wrt="input", batch_size=4, combine="mean")
    np.testing.assert_allclose(gradient, rl.gradients(model, X, Y, of="loss", wrt="input"), rtol=1e-9, atol=1e-12)
    assert shapes == [tuple(tensor.shape) for tensor in getattr(model, "inputs", None) or ()]
    perturbation = np.where(np.arange(SAMPLES)[:, None, None] == 9, 1e-6 * RANDOM.normal(size=X.shape), 0.0)
    slope = (mean_squared_error(model, X + perturbation) - mean_squared_error(model, X - perturbation)) / 2
    np.testing.assert_allclose(np.sum(np.asarray(gradient) * perturbation), slope, rtol=1e-5)
    jacobian = rl.jacobian(model, X[:3], of=f"{name}.hidden", wrt="input")
    assert jacobian.sizes["sample"] == 3
    assert rl.weights(model, X, Y).certificate.state == "passed"
    assert not rl.find_nonfinite(model, X, Y)


def mean_squared_error(model, x):
    return np.mean((keras.ops.convert_to_numpy(model(x)) - Y) ** 2)


@pytest.mark.one_engine
def test_diagnose_and_report_take_any_number_of_samples(tmp_path):
    model = fit_once(sequential_model())
    assert str(rl.diagnose(model, X, Y))
    rl.report(model, X, Y, path=tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 0


@pytest.mark.one_engine("torch", "tf_keras")
@pytest.mark.parametrize("steps", [STEPS, STEPS + 2])
def test_tokens_of_any_number_of_steps(steps):
    model = fit_once(keras.Sequential([L.Embedding(9, 3), L.LSTM(3), L.Dense(1)]), TOKENS)
    tokens = RANDOM.integers(0, 9, (3, steps))
    hidden = rl.trace(model, tokens)[rl.layers(model).names[0]].hidden
    assert hidden.shape == (3, steps, 3)


@pytest.mark.one_engine("torch", "tf_keras")
def test_steps_are_binding_where_keras_refuses_others():
    model = functional_model((None, STEPS, FEATURES))
    with pytest.raises(errors.InputError) as caught:
        rl.trace(model, RANDOM.normal(size=(2, STEPS + 1, FEATURES)))
    assert str(caught.value) == (
        "The shape of x does not match the model.\n  got:      x of shape (2, 5, 2)\n  expected: (any, 4, 2)"
    )
    with pytest.raises(ValueError, match="incompatible"):
        model(RANDOM.normal(size=(2, STEPS + 1, FEATURES)))


@pytest.mark.compiled
def test_the_batch_is_binding_in_stateful_layers():
    layers = [keras.Input(batch_shape=(5, STEPS, FEATURES)), L.LSTM(3, stateful=True, name="rnn"), L.Dense(1)]
    model = compile_model(keras.Sequential(layers))
    assert rl.gradients(model, X, Y, of="loss", wrt="input", batch_size=5, combine="mean").shape == X.shape
    with pytest.raises(errors.InputError) as caught:
        rl.trace(model, X, Y)
    assert str(caught.value).startswith("The shape of x does not match the model.\n  got:      x of shape (10, 4, 2)\n")
    assert str(caught.value).endswith("  try:      a stateful layer keeps one state per sample of its batch")


@pytest.mark.one_engine("torch", "tf_keras")
@pytest.mark.parametrize("make", [sequential_model, Subclass])
def test_a_model_without_weights_is_refused_until_it_is_built(make):
    model = compile_model(make())
    for verb in (rl.trace, rl.weights, rl.find_nonfinite):
        with pytest.raises(errors.ModelError, match=r"try:      model\(x\)$"):
            verb(model, X, Y)
    assert not model.built
    model(X)
    weights = model.get_weights()
    assert rl.trace(model, X, Y).certificate.state == "passed"
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
