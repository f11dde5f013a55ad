"""A model of Keras' own layers and plain settings is traced once; a changed setting causes a new trace.

Each trace enters a ``keras.StatelessScope`` and a compiled run enters none, so the tests count these entries. Results
are compared with the unchanged model's own outputs.
"""

import functools
import gc
import weakref

import keras
import numpy as np
import pytest
from keras import layers

import rnnlens as rl

pytestmark = pytest.mark.compiled

#: On torch nothing is compiled, so each run counts as a trace.
COMPILES = keras.backend.backend() != "torch"
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(3, 5, 2)).astype("float32"), RNG.normal(size=(3, 5, 2)).astype("float32")


def sequential():
    model = keras.Sequential(
        [
            keras.Input((5, 2)),
            layers.LSTM(4, return_sequences=True, name="lstm"),
            layers.Dropout(0.5, name="drop"),
            layers.Dense(2, kernel_regularizer="l2", name="head"),
        ]
    )
    model.compile("adam", "mse")
    return model


def functional():
    inputs = keras.Input((5, 2))
    masked = layers.Masking()(inputs)
    hidden = layers.Bidirectional(layers.GRU(3, return_sequences=True), name="both")(masked)
    model = keras.Model(inputs, layers.TimeDistributed(layers.Dense(2))(layers.LayerNormalization()(hidden)) + inputs)
    model.compile(loss=keras.losses.Huber(delta=0.7))
    return model


VERBS = {
    "trace": lambda model: rl.trace(model, X, Y),
    "weights": lambda model: rl.weights(model, X, Y),
    "gradients": lambda model: rl.gradients(model, X, Y, wrt=["input", "weights"]),
    "jacobian": lambda model: rl.jacobian(model, X, measure="norm"),
}


@pytest.fixture
def traces(monkeypatch):
    """Yield a function that returns the number of traces in a call, and the result of the call."""
    entries, original = [], keras.StatelessScope.__enter__
    monkeypatch.setattr(keras.StatelessScope, "__enter__", lambda scope: (entries.append(1), original(scope))[1])

    def count(call):
        entries.clear()
        result = call()
        return len(entries), result

    with rl.options(certify="always"):
        yield count


def reference_loss(model):
    value = keras.ops.mean(keras.losses.get(model.loss)(Y, model(X)))
    return sum(float(keras.ops.convert_to_numpy(term)) for term in (value, *model.losses))


def traced_once(model, verb, traces):
    first, _ = traces(lambda: VERBS[verb](model))
    second, _ = traces(lambda: VERBS[verb](model))
    return first > 0 and (second == 0) == COMPILES


@pytest.mark.product(on=None, keep=("trace", "jacobian"))
@pytest.mark.parametrize("verb", VERBS)
def test_the_second_call_is_not_traced_and_nothing_keeps_the_model_alive(verb, traces):
    model = sequential()
    assert traced_once(model, verb, traces)
    model_ref = weakref.ref(model)
    del model
    gc.collect()
    keras.backend.clear_session(free_memory=True)
    assert model_ref() is None


@pytest.mark.one_engine("jax", "torch")
def test_a_graph_of_wrapped_and_masked_layers_is_traced_once(traces):
    assert traced_once(functional(), "jacobian", traces)


def test_new_values_are_arguments(traces):
    model = sequential()
    VERBS["trace"](model)
    model.set_weights([1.5 * w + 0.1 for w in model.get_weights()])
    count, trace = traces(lambda: VERBS["trace"](model))
    assert (count == 0) == COMPILES
    assert trace.loss == pytest.approx(reference_loss(model), rel=1e-5)
    assert "NOT" not in trace.certificate.sentence


def _set_on_cell(name, value):
    return lambda model: setattr(model.get_layer("lstm").cell, name, value)


def _replace_call(model):
    """Override the head's ``call`` by a wrapper that has the name and module of the wrapped function."""
    layer, gain = model.get_layer("head"), 3.0
    original = layer.call
    layer.call = functools.wraps(original)(lambda x, **options: gain * original(x, **options))


SETTINGS = {
    "activation": _set_on_cell("activation", keras.activations.relu),
    "recurrent activation": _set_on_cell("recurrent_activation", keras.activations.hard_sigmoid),
    "direction": lambda model: setattr(model.get_layer("lstm"), "go_backwards", True),
    "bias": lambda model: setattr(model.get_layer("head"), "use_bias", False),
    "factor of a regulariser": lambda model: setattr(model.get_layer("head").kernel.regularizer, "l2", 0.3),
    "trainable": lambda model: setattr(model.get_layer("lstm"), "trainable", False),
    "loss": lambda model: model.compile(loss="mae"),
    "another layer": lambda model: model.add(layers.Dense(2)),
    "a layer fewer": lambda model: model.pop(),
    "a method": _replace_call,
}


@pytest.mark.one_engine("jax", "torch")
def test_a_setting_that_changes_is_traced_again(traces):
    model = sequential()
    VERBS["trace"](model)
    for name, change in SETTINGS.items():
        change(model)
        count, trace = traces(lambda: VERBS["trace"](model))
        assert count > 0, name
        assert trace.loss == pytest.approx(reference_loss(model), rel=1e-5), name
        assert trace.certificate.sentence.startswith("certified"), name


@pytest.mark.one_engine("jax", "torch")
def test_a_method_of_a_class_that_changes_is_traced_again(traces, monkeypatch):
    model, original = sequential(), layers.Dense.call
    VERBS["trace"](model)
    doubled = functools.wraps(original)(lambda self, x, training=None: 2 * original(self, x, training))
    monkeypatch.setattr(layers.Dense, "call", doubled)
    count, trace = traces(lambda: VERBS["trace"](model))
    assert count > 0
    assert trace.loss == pytest.approx(reference_loss(model), rel=1e-5)


@pytest.mark.one_engine("jax", "torch")
def test_another_rate_of_dropout_is_traced_again(traces):
    model = sequential()
    rl.trace(model, X, Y, training=True, seed=0)
    model.get_layer("drop").rate = 0.0
    count, trace = traces(lambda: rl.trace(model, X, Y, training=True, seed=0))
    assert count > 0
    assert trace.loss == pytest.approx(reference_loss(model), rel=1e-5)
