"""Names of layers, inputs and outputs: nested models with equal names, models called twice, dicts.

Results are compared with finite differences of the unchanged model's loss, for each weight and input.
"""

import keras
import numpy as np
import pytest
from keras_plain import central_difference, to_float

import rnnlens as rl

pytestmark = pytest.mark.usefixtures("float64", "uncertified")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4, 2))


def total(y, out):
    """Return the sum of the sines of all outputs, each output weighted by its own factor."""
    leaves = [out[key] for key in sorted(out)] if isinstance(out, dict) else keras.tree.flatten(out)
    return sum((i + 1.0) * keras.ops.sum(keras.ops.sin(leaf)) for i, leaf in enumerate(leaves))


def derivative_by_weight(model, x, variable, index=(0, 0)):
    before = np.array(keras.ops.convert_to_numpy(variable))

    def loss(values):
        variable.assign(values)
        return to_float(total(None, model(x)))

    try:
        return central_difference(loss, before, index)
    finally:
        variable.assign(before)


def nested(name, sequences):
    inputs = keras.Input((4, 2))
    hidden = keras.layers.LSTM(2, return_sequences=sequences, name="lstm")(inputs)
    return keras.Model(inputs, hidden, name=name)


def two_nested():
    inputs = keras.Input((4, 2))
    nested_models = nested("first", True), nested("second", False)
    model = keras.Model(inputs, nested_models[1](nested_models[0](inputs)))
    return model, {f"{nested_model.name}/lstm": nested_model.get_layer("lstm").cell for nested_model in nested_models}


class Two(keras.Model):
    """A model with a list of two nested models of the same code."""

    def __init__(self):
        super().__init__()
        self.parts = [nested("left", False), nested("right", False)]

    def call(self, x):
        return self.parts[0](x) * 2.0 + self.parts[1](x)


def two_subclassed():
    model = Two()
    model(X)
    return model, {f"{nested_model.name}/lstm": nested_model.get_layer("lstm").cell for nested_model in model.parts}


@pytest.mark.one_engine
@pytest.mark.parametrize("make", [two_nested, two_subclassed])
def test_each_nested_layer_has_its_own_gradients(make):
    model, cells = make()
    for _ in range(2):  # the second run reuses what was compiled
        all_grads = rl.gradients(model, X, loss=total)
        for name, cell in cells.items():
            expected = derivative_by_weight(model, X, cell.recurrent_kernel)
            single_grad = rl.gradients(model, X, loss=total, wrt=f"{name}/recurrent_kernel")
            assert float(single_grad[0, 0, 0]) == pytest.approx(expected, rel=1e-5, abs=1e-9)
            assert float(all_grads[name]["recurrent_kernel"][0, 0, 0]) == pytest.approx(expected, rel=1e-5, abs=1e-9)
            weight_grad = rl.weights(model, X, loss=total)[name]["recurrent_kernel_grad"]
            assert float(weight_grad[0, 0, 0]) == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.one_engine
def test_the_norm_of_all_gradients_counts_each_once():
    model, _ = two_nested()
    grads = rl.gradients(model, X, loss=total, clip={"global_clipnorm": 1e-3})
    squares = sum(
        derivative_by_weight(model, X, v, index) ** 2
        for v in model.trainable_weights
        for index in np.ndindex(tuple(v.shape))
    )
    assert grads.clip["norm"] == pytest.approx(np.sqrt(squares), rel=1e-5)


@pytest.mark.one_engine
def test_a_nested_model_called_twice():
    inputs = keras.Input((4, 2))
    inner = nested("inner", True)
    model = keras.Model(inputs, inner(inner(inputs) * 2.0))
    weight_grad = rl.gradients(model, X, loss=total, wrt="inner/lstm/recurrent_kernel")
    expected = derivative_by_weight(model, X, inner.get_layer("lstm").cell.recurrent_kernel)
    assert float(weight_grad[0, 0, 0]) == pytest.approx(expected, rel=1e-5)
    trace = rl.trace(model, X, loss=total)
    assert {"inner/lstm#0", "inner/lstm#1"} <= set(trace)
    index = (0, 1, 1)
    input_derivative = central_difference(lambda x: to_float(total(None, model(x))), X, index)
    assert float(trace["inner/lstm#0"].input_grad[index]) == pytest.approx(input_derivative, rel=1e-5)


def dict_functional():
    inputs = {"zeta": keras.Input((4, 2), name="zeta"), "alpha": keras.Input((4, 2), name="alpha")}
    z = keras.layers.LSTM(2, name="z")(inputs["zeta"])
    a = keras.layers.GRU(2, name="a")(inputs["alpha"])
    return keras.Model(inputs, {"width": z * a, "angle": z - a})


def listed_by_name():
    zeta, alpha = keras.Input((4, 2), name="zeta"), keras.Input((4, 2), name="alpha")
    z, a = keras.layers.LSTM(2, name="z")(zeta), keras.layers.GRU(2, name="a")(alpha)
    return keras.Model([zeta, alpha], {"width": z * a, "angle": z - a})


class DictSubclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.z, self.a = keras.layers.LSTM(2, name="z"), keras.layers.GRU(2, name="a")

    def call(self, x):
        z, a = self.z(x["zeta"]), self.a(x["alpha"])
        return {"width": z * a, "angle": z - a}


def dict_subclassed():
    return DictSubclassed()


@pytest.mark.one_engine
@pytest.mark.parametrize("make", [dict_functional, listed_by_name, dict_subclassed])
def test_inputs_and_outputs_in_dicts(make):
    model = make()
    x = {"zeta": X, "alpha": RNG.normal(size=(3, 4, 2))}
    model(x)
    for name in x:
        input_grad = rl.gradients(model, x, loss=total, wrt=f"input[{name}]")
        index = (1, 2, 0)
        expected = central_difference(
            lambda perturbed, name=name: to_float(total(None, model({**x, name: perturbed}))), x[name], index
        )
        assert float(input_grad[index]) == pytest.approx(expected, rel=1e-5), name
    trace = rl.trace(model, x, loss=total)
    assert trace.loss == pytest.approx(to_float(total(None, model(x))), rel=1e-9)


@pytest.mark.one_engine
@pytest.mark.parametrize("make", [dict_functional, listed_by_name, dict_subclassed])
@pytest.mark.parametrize("output_key", ["width", "angle"])
def test_an_output_by_its_key(make, output_key):
    model = make()
    x = {"zeta": X, "alpha": RNG.normal(size=(3, 4, 2))}
    model(x)

    def output_sum(alpha):
        return to_float(keras.ops.sum(keras.ops.convert_to_tensor(model({**x, "alpha": alpha})[output_key])))

    input_grad = rl.gradients(model, x, of=f"output[{output_key}]", reduce="sum", wrt="input[alpha]")
    assert float(input_grad[0, 1, 1]) == pytest.approx(central_difference(output_sum, x["alpha"], (0, 1, 1)), rel=1e-5)


@pytest.mark.one_engine
def test_layers_of_one_name_in_different_nested_models_are_listed_apart():
    model, cells = two_nested()
    assert [info.name for info in rl.layers(model)] == list(cells)
    weights = rl.weights(model)
    for name, cell in cells.items():
        values = keras.ops.convert_to_numpy(cell.kernel).reshape(weights[name]["kernel"].shape)
        np.testing.assert_array_equal(weights[name]["kernel"], values)
