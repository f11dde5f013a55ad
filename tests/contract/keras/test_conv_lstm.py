"""Gradients of ConvLSTM layers equal the framework's own, of an unrolled copy and of the model itself."""

import numpy as np
import pytest
from spoken_keras import engine, keras

import rnnlens as rl
from rnnlens.errors import TooLargeError, UnsupportedError

LAYERS = {1: keras.layers.ConvLSTM1D, 2: keras.layers.ConvLSTM2D, 3: keras.layers.ConvLSTM3D}
SPACE = {1: (6,), 2: (5, 4), 3: (4, 3, 3)}
NAMES = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}
TIME = 3

OPTIONS = {
    "1d": (1, {"padding": "same"}),
    "2d": (2, {}),
    "2d strides": (2, {"padding": "same", "strides": 2}),
    "2d dilation": (2, {"dilation_rate": 2, "kernel_size": 2, "use_bias": False}),
    "2d relu, backwards": (2, {"activation": "relu", "go_backwards": True}),
    "3d": (3, {"padding": "same", "kernel_size": 2}),
}


def build(rank, bidirectional=False, **options):
    keras.utils.set_random_seed(0)
    recurrent = LAYERS[rank](2, **{"kernel_size": 3, "return_sequences": True, **options}, name="conv")
    if bidirectional:
        recurrent = keras.layers.Bidirectional(recurrent, name="conv")
    layers = [keras.Input((TIME, *SPACE[rank], 2)), recurrent, keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, TIME, *SPACE[rank], 2)).astype("float32")
    return model, x, rng.normal(size=(2, 1)).astype("float32")


@pytest.mark.product(keep=("2d relu, backwards",))
@pytest.mark.parametrize("case", OPTIONS)
def test_traces_and_gradients_are_certified(case):
    rank, options = OPTIONS[case]
    model, x, y = build(rank, **options)
    trace = rl.trace(model, x, y)
    assert trace.certificate.state == "passed", trace.certificate
    layer = trace["conv"]
    assert layer.hidden.dims == ("sample", "time", *NAMES[rank], "channel")
    assert layer.gates.dims == ("sample", "time", *NAMES[rank], "gate", "channel")
    assert layer.initial_state_grad.dims == ("sample", "state", *NAMES[rank], "channel")
    for name, array in (("hidden", layer.hidden_grad), ("gate_preactivation", layer.gate_grad)):
        gradient = rl.gradients(model, x, y, wrt=f"conv.{name}")
        assert gradient.dims == array.dims
        assert gradient.certificate.state == "passed", gradient.certificate
        np.testing.assert_allclose(gradient.values, array.values, rtol=1e-4, atol=1e-7)
    weights = rl.weights(model, x, y)
    assert weights.certificate.state == "passed", weights.certificate
    window = tuple(f"kernel_{axis}" for axis in NAMES[rank])
    assert weights["conv"].kernel_grad.dims == (*window, "feature", "gate", "channel")


def unrolled_states(model, x, zeros):
    """Return the hidden states (sample, time, ...), computed by one call of the cell per step.

    ``zeros`` is added to them, so that they can be differentiated.
    """
    cell, hidden = model.get_layer("conv").cell, []
    shape = tuple(model.get_layer("conv")(x).shape)
    state = [keras.ops.zeros((2, *shape[2:]), dtype=cell.compute_dtype)] * 2
    for t in range(TIME):
        _, (new, carried) = cell(x[:, t], state)
        state = [new + zeros[t], carried]
        hidden.append(state[0])
    return keras.ops.stack(hidden, axis=1)


@pytest.mark.one_engine("torch", "tf_keras")
def test_total_gradients_are_those_of_an_unrolled_copy():
    model, x, y = build(2)
    trace = rl.trace(model, x, y)["conv"]
    x, y = (keras.ops.convert_to_tensor(array, dtype=str(trace.hidden.dtype)) for array in (x, y))

    def loss(zeros):
        flat = keras.ops.reshape(unrolled_states(model, x, zeros), (2, -1))
        return keras.ops.mean((model.layers[-1](flat) - y) ** 2)

    shape = tuple(trace.hidden.shape)
    zeros = np.zeros((TIME, shape[0], *shape[2:]), dtype=trace.hidden.dtype)
    expected = np.moveaxis(gradient(loss, zeros), 0, 1)
    np.testing.assert_allclose(trace.hidden_grad.values, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.one_engine("torch", "tf_keras")
def test_gradients_of_a_state_are_those_of_an_unrolled_copy():
    model, x, _ = build(2)
    selection = {"time": 1, "height": 0, "channel": 1}
    gradients = rl.gradients(model, x, of="conv.hidden", at=selection, reduce="sum", wrt="input")
    expected = gradient(lambda x: keras.ops.sum(unrolled_states(model, x, [0.0] * TIME)[:, 1, 0, :, 1]), x)
    np.testing.assert_allclose(gradients.values, expected, rtol=1e-4, atol=1e-7)
    assert not np.any(gradients.values[:, 2])


def gradient(function, array):
    """Return the engine's gradient of a scalar ``function`` with respect to ``array``."""
    if engine() == "torch":
        tensor = keras.ops.convert_to_tensor(array).requires_grad_()
        function(tensor).backward()
        return tensor.grad.numpy()
    if engine() == "jax":
        import jax

        return np.asarray(jax.grad(function)(array))
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tensor = tf.constant(array)
        tape.watch(tensor)
        value = function(tensor)
    return tape.gradient(value, tensor).numpy()


@pytest.mark.one_engine("torch", "tf_keras")
@pytest.mark.parametrize("rank", [1, 2])
def test_outputs_of_bidirectional_layers_have_time_before_direction(rank):
    model, x, y = build(rank, bidirectional=True, padding="same")
    gradients = rl.gradients(model, x, y, wrt="conv.output")
    assert gradients.dims == ("sample", "time", "direction", *NAMES[rank], "channel")
    assert gradients.certificate.state == "passed", gradients.certificate
    assert gradients.certificate.uncertified == ("conv.output",)  # nothing that depends on it is compared
    kernel = np.asarray(model.layers[-1].get_weights()[0])
    error = np.asarray(model.predict(x, verbose=0)) - y
    output_grad = (error @ kernel.T).reshape(2, TIME, *SPACE[rank], 4)  # of the mean square over two samples
    expected = np.stack([output_grad[..., :2], output_grad[..., 2:]], axis=2)
    np.testing.assert_allclose(gradients.values, expected, rtol=1e-4, atol=1e-7)
    summed = rl.gradients(model, x, of="conv.output", wrt="conv.hidden", reduce="sum")
    assert summed.dims == gradients.dims
    assert summed.shape == gradients.shape


@pytest.mark.one_engine("torch", "tf_keras")
def test_bidirectional_layers_have_a_direction():
    model, x, y = build(2, bidirectional=True, padding="same")
    trace = rl.trace(model, x, y)
    assert trace.certificate.state == "passed", trace.certificate
    assert trace["conv"].hidden_grad.dims == ("sample", "time", "direction", "height", "width", "channel")
    last_step_model, x, y = build(2, bidirectional=True, padding="same", return_sequences=False)
    with rl.options(certify="never"):
        last_output = rl.trace(last_step_model, x, y, quantities="output")["conv"].output
    assert last_output.dims == ("sample", "direction", "height", "width", "channel")
    assert last_output.sizes["height"] == SPACE[2][0]


@pytest.mark.one_engine("torch", "tf_keras")
def test_dropout_acts_as_in_training():
    model, x, y = build(2, dropout=0.3, recurrent_dropout=0.3)
    trace = rl.trace(model, x, y, training=True)
    assert trace.certificate.state == "passed", trace.certificate


@pytest.mark.one_engine("torch", "tf_keras")
def test_an_input_of_another_size_has_axes_of_its_own():
    model, x, y = build(2)
    dims = rl.trace(model, x, y)["conv"].input_grad.dims
    assert dims == ("sample", "time", "input_height", "input_width", "feature")


@pytest.mark.product(keep=("2d strides",))
@pytest.mark.parametrize("case", OPTIONS)
def test_time_jacobians_by_norms_over_places_and_channels(case):
    rank, options = OPTIONS[case]
    model, x, y = build(rank, **options)
    input_norms = rl.jacobian(model, x, measure="norm")
    expected = gradient(lambda tensor: keras.ops.sum(model(tensor)), x)
    assert input_norms.dims == ("sample", "in_time")
    np.testing.assert_allclose(input_norms, np.sqrt((expected.reshape(2, TIME, -1) ** 2).sum(2)), rtol=1e-4)
    assert input_norms.certificate.state == "passed", input_norms.certificate
    state_norms = rl.jacobian(model, x, of="conv.hidden", wrt="conv.hidden", measure="norm")
    assert state_norms.dims == ("sample", "out_time", "in_time")
    state_size = np.prod(rl.trace(model, x, y)["conv"].hidden.shape[2:])
    np.testing.assert_allclose(np.diagonal(state_norms, axis1=1, axis2=2), np.sqrt(state_size), rtol=1e-6)
    future = np.tril(np.ones((TIME, TIME)), -1) if options.get("go_backwards") else np.triu(np.ones((TIME, TIME)), 1)
    assert not (state_norms.values * future).any()
    assert state_norms.certificate.state == "passed", state_norms.certificate


@pytest.mark.one_engine("torch", "tf_keras")
def test_a_step_matrix_that_does_not_fit_is_refused_by_name():
    model, x, _ = build(2)
    with pytest.raises(TooLargeError, match=r"One step of 'conv' is linearised .*\n.*3x2x2 numbers: "):
        rl.jacobian(model, x, measure="norm", memory=2000)


REFUSED = {
    "fixed points": (
        lambda model, x, y: rl.fixed_points(model, x, layer="conv"),
        "rnnlens does not compute fixed points",
    ),
    "diagnosis": (
        lambda model, x, y: rl.diagnose(model, np.repeat(x, 64, axis=0), np.repeat(y, 64, axis=0)),
        "Layer 'conv' cannot be diagnosed: its states have axes of space.",
    ),
}


@pytest.mark.one_engine("torch", "tf_keras")
@pytest.mark.parametrize("verb", REFUSED)
def test_what_needs_states_without_space_is_refused_by_name(verb):
    call, message = REFUSED[verb]
    with pytest.raises(UnsupportedError) as caught:
        call(*build(2))
    assert str(caught.value).startswith(message)


@pytest.mark.product(keep=("2",))
@pytest.mark.parametrize("rank", SPACE)
def test_frames_of_the_model_have_axes_of_space(rank):
    """Frames that a model takes and returns have steps, axes of space and channels; so have units of a Jacobian."""
    keras.utils.set_random_seed(0)
    recurrent = LAYERS[rank](2, kernel_size=3, padding="same", return_sequences=True, name="conv")
    model = keras.Sequential([keras.Input((TIME, *SPACE[rank], 2)), recurrent, keras.layers.Dense(3)])
    x = np.random.default_rng(0).normal(size=(2, TIME, *SPACE[rank], 2)).astype("float32")
    at = {"time": 1, "channel": 2, "width": 0}
    by_input = rl.gradients(model, x, of="output", wrt="input", at=at, reduce="sum")
    assert by_input.dims == ("sample", "time", *NAMES[rank], "feature")
    jacobian = rl.jacobian(model, x, at={"out_time": 1})
    places = {f"out_{name}": 0 for name in NAMES[rank][-1:]} | {"out_channel": 2}
    selected = np.logical_and.reduce([jacobian[name] == number for name, number in places.items()])
    summed = jacobian.values[:, 0, selected].sum(1)
    np.testing.assert_allclose(summed.reshape(by_input.shape), by_input, atol=1e-6)
    assert [*jacobian.coords["in_channel"].values[:3]] == [0, 1, 0]
    expected = gradient(lambda tensor: keras.ops.sum(model(tensor)[:, 1, ..., 0, 2]), x)
    np.testing.assert_allclose(by_input, expected, atol=1e-6)
