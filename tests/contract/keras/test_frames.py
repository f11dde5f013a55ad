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


def as_sequence(tensor):
    return L.Dense(2)(L.GRU(3, return_sequences=True)(tensor))


def columns(size=(HEIGHT, WIDTH)):
    """Read an image column by column."""
    image = keras.Input((*size, F))
    turned = L.Permute((2, 1, 3))(L.Conv2D(3, 3, padding="same")(image))
    return keras.Model(image, as_sequence(L.Reshape((size[1], size[0] * 3))(turned)))


def square_columns():
    return columns((HEIGHT, HEIGHT))


def pooled_rows():
    image = keras.Input((HEIGHT, 4, F))
    pooled = L.MaxPooling2D(2)(L.Conv2D(3, 1)(image))
    return keras.Model(image, as_sequence(L.Reshape((HEIGHT // 2, 6))(pooled)))


def turned_frames():
    image = keras.Input((HEIGHT, WIDTH, F))
    turned = L.Permute((2, 1, 3))(image)
    return keras.Model(image, as_sequence(each(L.Flatten())[0](each(L.Conv1D(4, 3))[0](turned))))


def channels_first():
    series = keras.Input((WIDTH, WIDTH))
    return keras.Model(series, as_sequence(L.Permute((2, 1))(series)))


class TurnedInside(keras.Model):
    def __init__(self):
        super().__init__()
        self.flat, self.gru = L.TimeDistributed(L.Flatten()), L.GRU(3, return_sequences=True)

    def call(self, x):
        return self.gru(self.flat(keras.ops.transpose(x, (0, 2, 1, 3))))


class Summed(keras.Model):
    """A sum of its own stands between the image and the layer."""

    def __init__(self):
        super().__init__()
        self.gru = L.GRU(3, return_sequences=True)

    def call(self, x):
        return self.gru(keras.ops.einsum("bhwf->bwf", x))


#: Sizes of the input, and its axis that counts steps; None where the layers do not show it.
TURNED = {
    columns: ((HEIGHT, WIDTH, F), 2),
    square_columns: ((HEIGHT, HEIGHT, F), 2),
    pooled_rows: ((HEIGHT, 4, F), 1),
    turned_frames: ((HEIGHT, WIDTH, F), 2),
    channels_first: ((WIDTH, WIDTH), 2),
    TurnedInside: ((HEIGHT, WIDTH, F), 2),
    Summed: ((HEIGHT, WIDTH, F), None),
}


def axis_of_steps(model, x):
    """Return the axis along which a perturbed entry changes no output step that lies before it."""
    found = []
    for axis in range(1, x.ndim):
        first_steps = []
        for i in range(x.shape[axis]):
            perturbed = x.copy()
            np.moveaxis(perturbed, axis, 0)[i] += 1.0
            changed = np.abs(keras.ops.convert_to_numpy(model(perturbed) - model(x))).max((0, 2)) > 1e-6
            first_steps.append(np.flatnonzero(changed)[0])
        if first_steps[-1] > 0 and first_steps == sorted(first_steps):
            found.append(axis)
    return found


@pytest.mark.product(keep=("columns", "TurnedInside", "Summed"))
@pytest.mark.parametrize("build", TURNED, ids=lambda build: build.__name__)
def test_the_axis_that_becomes_steps_is_time(build):
    """An image read column by column had its rows called steps, by the time Jacobian alone."""
    keras.utils.set_random_seed(0)
    sizes, steps = TURNED[build]
    model, x = build(), np.random.default_rng(0).normal(size=(B, *sizes)).astype("float32")
    model(x)
    assert steps is None or axis_of_steps(model, x) == [steps]
    expected = gradient(lambda tensor: keras.ops.sum(model(tensor)), x)
    by_input = rl.gradients(model, x, of="output", reduce="sum", wrt="input")
    jacobian = rl.jacobian(model, x)
    summed = jacobian.sum([dim for dim in jacobian.dims if dim.startswith("out_")]).values
    if steps is None:
        assert "time" not in by_input.dims
        assert "in_time" not in jacobian.dims
    else:
        expected = np.moveaxis(expected, steps, 1)
        assert by_input.dims[:2] == ("sample", "time")
        assert jacobian.sizes["in_time"] == sizes[steps - 1]
        summed = summed.reshape(expected.shape)
    np.testing.assert_allclose(by_input, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(summed.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


def test_a_picture_beside_a_film_of_the_same_rank_has_no_steps():
    picture, film = keras.Input((HEIGHT, WIDTH, F), name="picture"), keras.Input((T, WIDTH, F), name="film")
    hidden = L.GRU(3)(each(L.Flatten())[0](each(L.Conv1D(2, 3))[0](film)))
    model = keras.Model([picture, film], L.Dense(2)(L.Concatenate()([L.Flatten()(picture), hidden])))
    x = {"film": data()[:, :, 0], "picture": data()[:, 0]}
    by_input = rl.gradients(model, x, of="output", reduce="sum", wrt=["input[picture]", "input[film]"])["model"]
    assert by_input["input[picture]"].dims == ("sample", "axis_1", "axis_2", "feature")
    assert by_input["input[film]"].dims == ("sample", "time", "width", "feature")
    assert "in_time" not in rl.jacobian(model, x, wrt="input[picture]").dims
    assert rl.jacobian(model, x, wrt="input[film]").sizes["in_time"] == T


def test_an_image_read_by_rows_and_by_columns_has_no_steps():
    image = keras.Input((HEIGHT, HEIGHT))
    model = keras.Model(image, L.Concatenate()([L.GRU(3)(image), L.GRU(3)(L.Permute((2, 1))(image))]))
    x = data()[:, 0, :, :1, 0].repeat(HEIGHT, axis=2)
    by_input = rl.gradients(model, x, of="output", reduce="sum", wrt="input")
    assert by_input.dims == ("sample", "axis_1", "feature")


def test_looking_for_steps_leaves_the_model_as_it_is():
    model, x = Subclass(), data()
    model(x)
    names = keras.layers.Dense(1).name
    nodes = [(len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in model._flatten_layers()]
    rl.gradients(model, x, of="output", reduce="sum", wrt="input")
    assert nodes == [(len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in model._flatten_layers()]
    assert int(keras.layers.Dense(1).name.rpartition("_")[2]) == int(names.rpartition("_")[2] or 0) + 1


def test_a_graph_that_was_edited_shows_nothing():
    model = keras.Sequential([films(), *each(L.Flatten()), L.GRU(3), L.Dense(2)])
    for layer in model.layers:
        layer._inbound_nodes.clear()
    by_input = rl.gradients(model, data(), of="output", reduce="sum", wrt="input")
    assert by_input.dims == ("sample", "axis_1", "axis_2", "axis_3", "feature")
