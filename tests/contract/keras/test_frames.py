"""Films (sample, time, height, width, feature): gradients and time Jacobians have the same, right names of axes."""

import numpy as np
import pytest
from spoken_keras import gradient, keras

import rnnlens as rl

L = keras.layers
B, T, HEIGHT, WIDTH, F = 2, 4, 6, 5, 2
FILM = ("sample", "time", "height", "width", "feature")


def each(*layers):
    return [L.TimeDistributed(layer) for layer in layers]


def films():
    return keras.Input((T, HEIGHT, WIDTH, F))


def convolved():
    return keras.Sequential([films(), *each(L.Conv2D(3, 3), L.GlobalAveragePooling2D()), L.GRU(3), L.Dense(2)])


def nested():
    per_frame = keras.Sequential([keras.Input((HEIGHT, WIDTH, F)), L.Conv2D(3, 3), L.Flatten(), L.Dense(4)])
    return keras.Sequential([films(), *each(per_frame), L.GRU(3, return_sequences=True), *each(L.Dense(2))])


def next_frames():
    features = [*each(L.Conv2D(2, 3), L.Flatten()), L.GRU(24, return_sequences=True), L.Reshape((T, 4, 3, 2))]
    return keras.Sequential([films(), *features, *each(L.Conv2DTranspose(F, 3))])


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.convolution, self.flat = each(L.Conv2D(3, 3), L.Flatten())
        self.gru, self.head = L.GRU(3), L.Dense(2)

    def call(self, x):
        return self.head(self.gru(self.flat(self.convolution(x))))


MODELS = {model.__name__: model for model in (convolved, nested, next_frames, Subclass)}


def data():
    return np.random.default_rng(0).normal(size=(B, T, HEIGHT, WIDTH, F)).astype("float32")


@pytest.mark.product(keep=("convolved", "next_frames"))
@pytest.mark.parametrize("case", MODELS)
def test_films_have_steps_and_axes_of_space(case):
    keras.utils.set_random_seed(0)
    model, x = MODELS[case](), data()
    outputs = model(x)
    by_input = rl.gradients(model, x, of="output", reduce="sum", wrt="input")
    assert by_input.dims == FILM
    expected = gradient(lambda tensor: keras.ops.sum(model(tensor)), x)
    np.testing.assert_allclose(by_input, expected, rtol=1e-4, atol=1e-6)
    jacobian = rl.jacobian(model, x)
    assert {"in_time", "in_height", "in_width", "in_channel"} <= set(jacobian.coords)
    summed = jacobian.sum([dim for dim in jacobian.dims if dim.startswith("out_")])
    places = [jacobian[f"in_{name}"].values for name in ("height", "width", "channel")]
    np.testing.assert_allclose(summed.values, by_input.values[:, :, *places], rtol=1e-4, atol=1e-6)
    if len(outputs.shape) == 5:
        by_output = rl.gradients(model, x, of="output", reduce="sum", wrt="output")
        assert by_output.dims == (*FILM[:-1], "channel")
        assert {"out_height", "out_width", "out_channel"} <= set(jacobian.coords)


def test_a_picture_beside_a_film_has_no_steps():
    picture = keras.Input((HEIGHT, WIDTH, F), name="picture")
    film = keras.Input((T, HEIGHT, WIDTH, F), name="film")
    hidden = L.GRU(3)(L.TimeDistributed(L.Flatten())(L.TimeDistributed(L.Conv2D(2, 3))(film)))
    model = keras.Model([picture, film], L.Dense(2)(L.Concatenate()([L.Flatten()(picture), hidden])))
    x = {"picture": data()[:, 0], "film": data()}
    by_input = rl.gradients(model, x, of="output", reduce="sum", wrt=["input[picture]", "input[film]"])["model"]
    assert by_input["input[picture]"].dims == ("sample", "axis_1", "axis_2", "feature")
    assert by_input["input[film]"].dims == FILM


def test_steps_of_tables_have_rows():
    """A layer without convolutions that runs once per step gives no axes of space."""
    model = keras.Sequential([keras.Input((T, HEIGHT, F)), *each(L.Flatten()), L.GRU(3), L.Dense(2)])
    by_input = rl.gradients(model, data()[..., 0, :], of="output", reduce="sum", wrt="input")
    assert by_input.dims == ("sample", "time", "axis_2", "feature")
