"""A layer that creates its weights at its first call is refused before anything is changed, and fit goes on.

Keras 2 calls every layer when it adds it to a model, and has no such models.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from spoken_keras import engine, keras

import rnnlens as rl
from rnnlens.errors import TrackingWarning, UnbuiltModelError

pytestmark = [pytest.mark.one_engine, pytest.mark.filterwarnings("ignore:.*does not have a `build\\(\\)` method")]

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(8, 6, 5)), rng.normal(size=(8, 6, 2))


class NormalisedCell(keras.layers.Layer):
    """A cell without ``build``: the cell and the normalisation inside it are built at its first call."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.state_size = self.output_size = units
        self.inner = keras.layers.SimpleRNNCell(units, activation=None)
        self.norm = keras.layers.LayerNormalization()

    def call(self, inputs, states):
        output = keras.ops.tanh(self.norm(self.inner(inputs, states)[0]))
        return output, [output]


def network():
    keras.utils.set_random_seed(1)
    rnn = keras.layers.RNN(NormalisedCell(4), return_sequences=True, name="rnn")
    model = keras.Sequential([keras.Input((None, 5)), rnn, keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


def trained(model, *callbacks):
    history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[*callbacks])
    return [*history.history["loss"], *model.get_weights()]


def assert_equal(results, expected):
    for result, reference in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, reference)


VERBS = {
    "trace": lambda model: rl.trace(model, X, Y),
    "gradients": lambda model: rl.gradients(model, X, Y, wrt="input"),
    "jacobian": lambda model: rl.jacobian(model, X),
    "find_nonfinite": lambda model: rl.find_nonfinite(model, X, Y),
}


@pytest.mark.product(keep=("trace",))
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_refuses_and_the_model_trains_as_if_it_had_not_been_called(verb):
    model = network()
    built = [layer.built for layer in model._flatten_layers()]
    with pytest.raises(UnbuiltModelError) as error:
        VERBS[verb](model)
    inner = model.get_layer("rnn").cell.inner
    assert str(error.value) == (
        f"Layer {inner.name!r} is not built: SimpleRNNCell creates its weights at its first call.\n"
        "  expected: a model that was called on a batch\n"
        "  try:      model(x)"
    )
    assert [layer.built for layer in model._flatten_layers()] == built
    assert_equal(trained(model), trained(network()))


def test_after_one_call_the_trace_is_certified_and_the_gradient_that_of_the_engine():
    model = network()
    model(X)
    trace = rl.trace(model, X, Y)
    assert trace.certificate.state == "passed"
    gradient = rl.gradients(model, X, Y, wrt="input")
    step = 1e-6 * np.random.default_rng(1).normal(size=X.shape)
    difference = [model.evaluate(X + sign * step, Y, batch_size=8, verbose=0) for sign in (0.5, -0.5)]
    np.testing.assert_allclose((gradient.values * step).sum(), difference[0] - difference[1], rtol=1e-5)


@pytest.mark.product(keep=("probe",), on="tensorflow")
@pytest.mark.parametrize("recorded", ["probe", "batches"])
def test_a_watch_waits_for_the_first_batch_and_changes_nothing(recorded, tmp_path):
    options = {"probe": (X[:3], Y[:3])} if recorded == "probe" else {}
    watch = rl.keras.Watch(tmp_path / "run.zarr", every=1, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrackingWarning)
        watched = trained(network(), watch)
    assert_equal(watched, trained(network()))
    assert watch.gaps == []
    run = rl.open(tmp_path / "run.zarr")
    late = engine() == "tensorflow"  # on JAX and torch, fit builds a model before its first callback
    first = {("probe", False): 0, ("probe", True): 1, ("batches", False): 1, ("batches", True): 2}[recorded, late]
    assert run.steps.values.tolist() == list(range(first, 5))
    assert any("built by its first batch" in note for note in run.notes) == (late and recorded == "probe")
