"""``rl.weights``: values and gradients against the framework's own, by gate, direction and time step."""

import keras
import numpy as np
import pytest

import rnnlens as rl
from rnnlens.errors import InputError, LayerNotFoundError, QuantityNotFoundError, TooLargeError
from rnnlens.testing import keras_models

pytestmark = pytest.mark.usefixtures("float64", "uncertified")

BATCH, TIME, FEATURES = 3, 4, 2
RNG = np.random.default_rng(3)
X = RNG.normal(size=(BATCH, TIME, FEATURES))
Y = RNG.normal(size=(BATCH, 2))
KINDS = {"simple_rnn": keras.layers.SimpleRNN, "lstm": keras.layers.LSTM, "gru": keras.layers.GRU}


def make_model(kind, *, bidirectional=False, regularizer=None, **options):
    layer = KINDS[kind](3, name="rnn", kernel_regularizer=regularizer, bias_initializer="random_normal", **options)
    if bidirectional:
        layer = keras.layers.Bidirectional(layer, name="rnn")
    model = keras.Sequential([keras.Input((TIME, FEATURES)), layer, keras.layers.Dense(2, name="head")])
    model.compile(loss="mse")
    return model


def numpy_of(variable):
    return keras.ops.convert_to_numpy(variable.value)


def data_gradients(model):
    def loss(tensors):
        return keras.ops.mean((model(tensors[0]) - keras.ops.convert_to_tensor(Y)) ** 2)

    variables = model.trainable_variables
    _, _, gradients = keras_models.gradients(loss, [X], variables)
    return {v.path: g for v, g in zip(variables, gradients, strict=True)}


def direction_layers(model, bidirectional):
    layer = model.get_layer("rnn")
    return [layer.forward_layer, layer.backward_layer] if bidirectional else [layer]


def split_by_gate(cell, name, array):
    """Return a weight of Keras as (..., gate, unit) arrays by name; the biases of a GRU are two entries."""
    gates = {"SimpleRNNCell": 1, "LSTMCell": 4, "GRUCell": 3}[type(cell).__name__]
    shaped = array.reshape(*array.shape[:-1], gates, array.shape[-1] // gates)
    if name == "bias" and shaped.ndim == 3:
        return {"bias": shaped[0], "recurrent_bias": shaped[1]}
    return {name: shaped}


@pytest.mark.compiled("lstm-options1-False")
@pytest.mark.product(keep=("lstm-options1-False", "gru-options3-True"))
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"), [("simple_rnn", {}), ("lstm", {}), ("gru", {}), ("gru", {"reset_after": False})]
)
def test_values_and_gradients_are_the_frameworks(kind, options, bidirectional):
    model = make_model(kind, bidirectional=bidirectional, **options)
    expected = data_gradients(model)

    weights = rl.weights(model, X, Y)["rnn"]
    by_time = rl.weights(model, X, Y, by_time=True)["rnn"]
    norms = rl.weights(model, X, Y, by_time=True, measure="norm")["rnn"]

    for index, layer in enumerate(direction_layers(model, bidirectional)):
        selection = {"direction": index} if bidirectional else {}
        for variable in layer.cell.trainable_variables:
            values = split_by_gate(layer.cell, variable.name, numpy_of(variable))
            gradients = split_by_gate(layer.cell, variable.name, expected[variable.path])
            for name, value in values.items():
                np.testing.assert_array_equal(weights[name].isel(selection), value)
                grad = weights[f"{name}_grad"].isel(selection)
                np.testing.assert_allclose(grad, gradients[name], rtol=0, atol=1e-12)
                grad_by_time = by_time[f"{name}_grad"].isel(selection)
                assert grad_by_time.dims == ("time", *grad.dims)
                np.testing.assert_allclose(grad_by_time.sum("time"), gradients[name], rtol=0, atol=1e-12)
                reduced_dims = [dim for dim in grad_by_time.dims if dim not in ("time", "gate")]
                norm = norms[f"{name}_grad_norm"].isel(selection)
                assert norm.dims == ("time", "gate")
                np.testing.assert_allclose(norm, np.sqrt((grad_by_time**2).sum(reduced_dims)), rtol=1e-12)


def test_other_layers_and_penalties():
    model = make_model("lstm", regularizer=keras.regularizers.L1L2(0.1, 0.2))
    expected = data_gradients(model)
    result = rl.weights(model, X, Y)
    head = model.get_layer("head")
    np.testing.assert_array_equal(result["head"].kernel, numpy_of(head.kernel))
    np.testing.assert_allclose(result["head"].kernel_grad, expected[head.kernel.path], atol=1e-12)
    kernel = numpy_of(model.get_layer("rnn").cell.kernel)
    assert result.penalties == {"rnn/kernel": pytest.approx(0.1 * abs(kernel).sum() + 0.2 * (kernel**2).sum())}
    assert result.penalty_loss == pytest.approx(float(keras.ops.convert_to_numpy(sum(model.losses))), rel=1e-12)


def test_gates_are_labelled_and_not_finite_values_are_counted_where_they_are():
    model = make_model("lstm")
    kernel = numpy_of(model.get_layer("rnn").cell.kernel).copy()
    kernel[0, 3] = np.nan  # unit 0 of the forget gate
    kernel[1, 10] = np.inf  # unit 1 of the output gate
    model.get_layer("rnn").cell.kernel.assign(kernel)
    w = rl.weights(model)["rnn"]
    assert list(w.kernel.gate.values) == ["input", "forget", "candidate", "output"]
    assert np.isnan(w.kernel.sel(gate="forget", unit=0, feature=0))
    assert w["kernel_nan_count"].to_dict()["data"] == [0, 1, 0, 0]
    assert w["kernel_inf_count"].to_dict()["data"] == [0, 0, 0, 1]
    assert w.nonfinite == {"kernel": 2}
    assert "2 NaN or infinite" in repr(w)
    assert "rnn/kernel: 2 NaN or infinite" in repr(rl.weights(model))
    assert np.isnan(rl.weight_norms(model)["rnn/kernel"].item())


def test_norms_append_to_a_history():
    model = make_model("gru")
    first = rl.weight_norms(model)
    kernel = model.get_layer("rnn").cell.kernel
    kernel.assign(numpy_of(kernel) * 2)
    second = rl.weight_norms(model, history=first)
    assert list(first.step) == [0]
    assert list(second.step) == [0, 1]
    np.testing.assert_allclose(second["rnn/kernel"][1], 2 * second["rnn/kernel"][0])
    values = numpy_of(kernel).reshape(FEATURES, 3, 3)
    per_gate = rl.weight_norms(model, over=["feature", "unit", "unit_in"], ord=1)["rnn/kernel"]
    assert per_gate.dims == ("step", "gate")
    np.testing.assert_allclose(per_gate[0], abs(values).sum((0, 2)))
    largest = rl.weight_norms(model, ord=lambda v: abs(v).max())["rnn/kernel"]
    np.testing.assert_allclose(largest, [abs(values).max()])


def test_results_are_saved_and_opened(tmp_path):
    model = make_model("lstm", bidirectional=True)
    result = rl.weights(model, X, Y)
    result.save(tmp_path / "w.nc")
    opened = rl.open(tmp_path / "w.nc")
    assert type(opened) is type(result)
    assert opened["rnn"].dataset.identical(result["rnn"].dataset)
    assert opened.penalties == result.penalties


def test_nothing_of_the_model_changes():
    model = make_model("lstm")
    before = [numpy_of(v) for v in model.variables]
    values = rl.weights(model, X, Y)["rnn"].kernel.values
    values[...] = 7
    assert all(np.array_equal(a, numpy_of(v)) for a, v in zip(before, model.variables, strict=True))


def test_mistakes_are_explained():
    model = make_model("lstm")
    with pytest.raises(
        LayerNotFoundError, match=r"No layer named 'rnnn' with weights\.\n  try:      did you mean 'rnn'"
    ):
        rl.weights(model, layers="rnnn")
    with pytest.raises(InputError, match="by_time= is a switch"):
        rl.weights(model, X, Y, by_time="norm")
    with pytest.raises(InputError, match="Gradients of weights need data"):
        rl.weights(model, by_time=True)
    with pytest.raises(QuantityNotFoundError, match=r"pass data for gradients: rl\.weights\(model, x, y\)"):
        _ = rl.weights(model)["rnn"].kernel_grad
    with rl.options(memory="1 KiB"), pytest.raises(TooLargeError, match='measure="norm" keeps one norm'):
        rl.weights(model, X, Y, by_time=True)


class Mixed(keras.layers.Layer):
    """A layer that contains an LSTM, and a variable that scales the LSTM's states between two segments."""

    def __init__(self):
        super().__init__(name="mixed")
        self.inner = keras.layers.LSTM(3, return_sequences=True, return_state=True, name="inner")

    def build(self, shape):
        self.inner.build(shape)
        self.decay = self.add_weight(shape=(3,), initializer="random_normal", name="decay")
        self.built = True

    def call(self, x):
        _, *states = self.inner(x[:, :2])
        return self.inner(x[:, 2:], initial_state=[state * self.decay for state in states])[0][:, -1]


@pytest.mark.one_engine
def test_a_variable_of_a_layer_that_is_made_of_layers():
    model = keras.Sequential([keras.Input((TIME, FEATURES)), Mixed(), keras.layers.Dense(2, name="head")])
    model.compile(loss="mse")
    expected = data_gradients(model)[model.get_layer("mixed").decay.path]
    assert abs(expected).max() > 1e-6
    grads = rl.gradients(model, X, Y, wrt="weights")
    assert list(grads["mixed"]) == ["decay"]
    assert set(grads) == {"mixed/inner", "mixed", "head"}
    np.testing.assert_allclose(grads["mixed"]["decay"], expected, rtol=1e-9)
    np.testing.assert_allclose(rl.weights(model, X, Y)["mixed"]["decay_grad"], expected, rtol=1e-9)


class Holder(keras.Model):
    """A model with variables as attributes, in a list and in a dict; each scales the output of its layer."""

    def __init__(self, inner, name):
        super().__init__(name=name)
        self.rest = inner
        self.alone = keras.Variable(RNG.normal(size=3), name="alone")
        self.listed = [keras.Variable(RNG.normal(size=3), name="twice") for _ in range(2)]
        self.named = {"a": keras.Variable(RNG.normal(size=3), name="kernel")}  # the name of a layer's variable
        self.fixed = keras.Variable(RNG.normal(size=3), trainable=False, name="fixed")

    def build(self, shape):
        self.rest.build(shape)
        self.scale = self.add_weight(shape=(3,), initializer="random_normal", name="scale")
        self.built = True

    def own_variables(self):
        first, second = self.listed
        by_name = {"alone": self.alone, "twice": first, "twice#2": second, "kernel": self.named["a"]}
        return {**by_name, "scale": self.scale, "fixed": self.fixed}

    def call(self, x):
        x = self.rest(x)
        for factor in self.own_variables().values():
            x = x * factor
        return x


@pytest.mark.parametrize("nested", [False, True])
def test_variables_of_a_model_beside_its_layers(nested):
    model = Holder(keras.layers.LSTM(3, name="lstm"), "lstm")  # model and layer have the same name
    holders = {"lstm_": model}
    if nested:
        inner, model = model, Holder(model, "outer")
        holders = {"outer": model, "lstm": inner}
    model.compile(loss="mse", optimizer=keras.optimizers.SGD(global_clipnorm=1e-9))
    target = RNG.normal(size=(BATCH, 3))
    model(X)

    def loss(tensors):
        return keras.ops.mean((model(tensors[0]) - keras.ops.convert_to_tensor(target)) ** 2)

    _, _, grads = keras_models.gradients(loss, [X], model.trainable_variables)
    expected = {id(v): g for v, g in zip(model.trainable_variables, grads, strict=True)}
    weight_grads, weights = rl.gradients(model, X, target, wrt="weights"), rl.weights(model, X, target)
    for name, holder in holders.items():
        variables = holder.own_variables()
        assert (
            set(weight_grads[name])
            == set(variables)
            == {key for key in weights[name] if f"{key}_grad" in weights[name]}
        )
        for key, variable in variables.items():
            np.testing.assert_array_equal(weights[name][key], numpy_of(variable))
            if key != "fixed":
                assert np.any(expected[id(variable)])
                np.testing.assert_allclose(weight_grads[name][key], expected[id(variable)], rtol=1e-8)
                np.testing.assert_allclose(weights[name][f"{key}_grad"], expected[id(variable)], rtol=1e-8)
        assert f"{name}/fixed is frozen" in str(weight_grads)
    assert set(weight_grads) == {*holders, "lstm/lstm" if nested else "lstm"}
    norm = np.sqrt(sum((g**2).sum() for g in grads))
    assert norm > 1e-9
    layer = "lstm/lstm" if nested else "lstm"
    clipped = rl.gradients(model, X, target, wrt=f"{layer}/kernel", clip="optimizer").clipped
    np.testing.assert_allclose(clipped[layer]["kernel"], weight_grads[layer]["kernel"] * (1e-9 / norm), rtol=1e-8)
