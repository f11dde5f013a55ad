"""Full text of the error for each kind of bad input to a Keras model, raised before anything runs."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras_eager import eager_captures

from rnnlens import errors
from rnnlens.adapters.keras import adapter
from rnnlens.adapters.protocol import Batch, Port, Taps

X, Y = np.ones((2, 4, 3)), np.ones((2, 2))
OUTPUTS_ONLY = Taps.states()

pytestmark = pytest.mark.one_engine


@pytest.fixture(scope="module")
def model(float64):
    layers = [keras.Input((4, 3)), keras.layers.LSTM(2, name="lstm_10"), keras.layers.Dense(2, name="head")]
    network = keras.Sequential(layers, name="net")
    network.compile("sgd", "mse")
    return network


@pytest.fixture(autouse=True)
def eager_mode():
    with eager_captures():
        yield


CASES = {
    "rank": (
        Batch(np.ones((4, 3))),
        OUTPUTS_ONLY,
        errors.InputError,
        "The rank of x does not match the model.\n  got:      x of shape (4, 3)\n  expected: (any, any, 3)",
    ),
    "features": (
        Batch(np.ones((2, 4, 5))),
        OUTPUTS_ONLY,
        errors.InputError,
        "The feature count of x does not match the model.\n  got:      x of shape (2, 4, 5)\n"
        "  expected: (any, any, 3)\n  try:      x with the 3 features of the training",
    ),
    "axes swapped": (
        Batch(np.ones((2, 3, 5))),
        OUTPUTS_ONLY,
        errors.InputError,
        "The feature count of x does not match the model.\n  got:      x of shape (2, 3, 5)\n"
        "  expected: (any, any, 3)\n  try:      x.swapaxes(1, 2)",
    ),
    "no samples": (
        Batch(np.ones((0, 4, 3))),
        OUTPUTS_ONLY,
        errors.InputError,
        "Batch is empty.\n  got:      x of shape (0, 4, 3)\n  expected: at least 1 sample\n"
        "  try:      leave out a batch without samples: if len(x): ...",
    ),
    "no steps": (
        Batch(np.ones((2, 0, 3))),
        OUTPUTS_ONLY,
        errors.InputError,
        "Sequence is empty.\n  got:      x of shape (2, 0, 3)\n  expected: at least 1 time step",
    ),
    "text": (
        Batch(np.array([["a"]])),
        OUTPUTS_ONLY,
        errors.InputError,
        "x is not numeric.\n  got:      dtype <U1\n  expected: numbers\n"
        "  try:      encode text as integer ids first, for example with keras.layers.TextVectorization",
    ),
    "samples of y": (
        Batch(X, np.ones((3, 2))),
        Taps.direct(weight_grads=True),
        errors.InputError,
        "y has another number of samples than x.\n  got:      y of shape (3, 2)\n  expected: 2 samples\n"
        "  try:      x and y of the same samples, such as x[:n], y[:n]",
    ),
    "no y": (
        Batch(X),
        Taps.direct(weight_grads=True),
        errors.InputError,
        "The compiled loss needs a target.\n  got:      y=None\n  try:      pass y, or loss= of outputs alone",
    ),
    "loss of another shape": (
        Batch(X, Y, loss=lambda y, p: keras.ops.square(y - p)),
        Taps.direct(weight_grads=True),
        errors.InputError,
        "The loss is not one number.\n  got:      shape (2, 2)\n  expected: shape ()\n"
        "  try:      keras.ops.mean(...) or keras.ops.sum(...) around it",
    ),
    "unknown layer": (
        Batch(X),
        Taps.states(("lstm_1",)),
        errors.LayerNotFoundError,
        "No layer is called 'lstm_1'.\n  try:      did you mean 'lstm_10'? Known: 'lstm_10', 'head'",
    ),
    "unknown call": (
        Batch(X),
        Taps.states(("lstm_10#3",)),
        errors.LayerNotFoundError,
        "There is no call 'lstm_10#3'.\n  try:      did you mean 'lstm_10'? Known: 'lstm_10'",
    ),
    "both weights": (
        Batch(X, Y, sample_weight=np.ones(2), class_weight={0: 1.0}),
        Taps.direct(weight_grads=True),
        errors.InputError,
        "Both class_weight and sample_weight were given.\n  try:      multiply them into one",
    ),
    "initial state": (
        Batch(X, initial_state={"lstm_10": [np.ones((2, 5)), np.ones((2, 2))]}),
        OUTPUTS_ONLY,
        errors.InputError,
        "The initial state given for 'lstm_10' has another shape than the layer's states.\n  got:      shapes [(2, "
        "5), (2, 2)]\n"
        "  expected: shapes [(2, 2), (2, 2)]",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_text(model, case):
    batch, request, kind, text = CASES[case]
    with pytest.raises(kind) as caught:
        _ = adapter.run(model, batch, request).capture
    assert str(caught.value) == text


def test_unknown_loss(model):
    with pytest.raises(errors.InputError) as caught:
        adapter.run(model, Batch(X, Y, loss="msee"), Taps.direct(weight_grads=True))
    text = "Keras has no loss of that name.\n  got:      'msee'\n  try:      did you mean 'mse'? Known: "
    assert str(caught.value).startswith(text)


def test_not_built():
    with pytest.raises(errors.ModelError) as caught:
        adapter.describe(keras.Sequential([keras.layers.LSTM(2)], name="net"))
    assert str(caught.value) == (
        "Model 'net' is not built: its weights do not exist yet.\n"
        "  expected: a model that was called on a batch\n"
        "  try:      model(x)"
    )


def test_not_compiled():
    model = keras.Sequential([keras.Input((4, 3)), keras.layers.LSTM(2)], name="net")
    with pytest.raises(errors.ModelError) as caught:
        _ = adapter.run(model, Batch(X, Y), Taps.direct(weight_grads=True)).capture
    assert str(caught.value) == (
        "Model 'net' has no loss: it is not compiled.\n"
        '  try:      model.compile(loss=...), or pass loss=, such as loss="mse"'
    )


@pytest.mark.parametrize("kind", ["channels first", "TimeDistributed"])
def test_what_cannot_be_traced_is_listed_and_refused_by_name(kind):
    inputs = keras.Input((4, 3, 2))
    if kind == "channels first":
        layer = keras.layers.ConvLSTM1D(2, 2, data_format="channels_first", name="r")
        model = keras.Model(inputs, layer(inputs))
        reason = "its states have spatial axes, and rnnlens does not have its equations."
    else:
        model = keras.Model(inputs, keras.layers.TimeDistributed(keras.layers.LSTM(2, name="r"), name="td")(inputs))
        reason = "LSTM inside TimeDistributed runs once per outer step."
    (info,) = adapter.describe(model)
    with pytest.raises(errors.UnsupportedError) as caught:
        _ = adapter.run(model, Batch(np.ones((1, 4, 3, 2))), OUTPUTS_ONLY).capture
    first_line = f"Layer {info.name!r} cannot be traced: {reason}"
    assert str(caught.value).splitlines()[0] == first_line == info.options["refused"]


def test_loss_that_is_not_a_number_is_reported_and_not_raised(model):
    capture = adapter.run(model, Batch(X, Y * np.nan), Taps.direct(weight_grads=True)).capture
    assert np.isnan(capture.loss)
    assert capture.notes == [
        "The loss is nan: gradients of it are not meaningful; rl.find_nonfinite(model, x, y) finds where it first "
        "appears."
    ]


def test_a_port_that_does_not_exist(model):
    with pytest.raises(errors.LayerNotFoundError) as caught:
        adapter.run(model, Batch(X), Taps.ports([Port("output")], [Port("weight", "head", key="kernle")]))
    assert str(caught.value) == (
        "There is no weight 'kernle' in layer 'head'.\n  try:      did you mean 'kernel'? Known: 'kernel', 'bias'"
    )
