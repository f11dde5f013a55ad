"""Whole Keras programs from tutorials and public code, against the engine's autodiff of the unmodified model."""

from __future__ import annotations

from functools import cache

import keras_programs
import numpy as np
import pytest
from spoken_keras import LEGACY, engine, keras, restored_states

import rnnlens as rl

pytestmark = [pytest.mark.one_engine("torch", "tf_keras"), pytest.mark.usefixtures("float64"), pytest.mark.op_by_op]

#: Keras 2 has no LoRA; a layer subclass that overrides call is refused by name there (docs/LIMITATIONS.md).
KERAS_3_ONLY = ("subclassed layer", "adapted head") if LEGACY else ()
PROGRAMS = {name: make for name, make in keras_programs.PROGRAMS.items() if name not in KERAS_3_ONLY}
every_program = pytest.mark.parametrize("name", PROGRAMS)
TIME_FIRST = {"input": ("time", "sample", "feature"), "output": ("time", "sample", "unit")}
#: The quick run tests these ten programs on tf_keras, one on JAX and TensorFlow, and all on torch.
QUICK_ON_KERAS_2 = (
    *("imdb bidirectional lstm", "addition", "translation step by step", "stateful lstm", "custom cell"),
    *("residual forecast", "cut between chunks", "attention pooling", "by hand both ways", "state in a variable"),
)
few_programs = pytest.mark.product(keep=QUICK_ON_KERAS_2 if LEGACY else ("autoregressive",))


def leaves_of(x):
    return list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, list) else [x]


def restructure(x, leaves):
    return dict(zip(x, leaves, strict=True)) if isinstance(x, dict) else leaves if isinstance(x, list) else leaves[0]


def float_indices(x):
    return [i for i, leaf in enumerate(leaves_of(x)) if leaf.dtype.kind == "f"]


def input_names(x):
    """Return the names of the inputs in rnnlens."""
    names = list(x) if isinstance(x, dict) else ["a", "b"][: len(x)] if isinstance(x, list) else [None]
    return ["input" if name is None else f"input[{name}]" for name in names]


@cache
def program(name):
    keras.utils.set_random_seed(0)
    return PROGRAMS[name]()


def value_and_grads(function, arrays):
    """Return the value and the gradients of a scalar function of tensors."""
    if engine() == "jax":
        import jax

        value, grads = jax.value_and_grad(function)(list(map(jax.numpy.asarray, arrays)))
        return float(value), [np.asarray(g) for g in grads]
    if engine() == "torch":
        import torch

        leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
        value = function(leaves)
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
        return float(value.detach()), [np.zeros(a.shape) if g is None else g.numpy() for g, a in zip(grads, arrays)]  # noqa: B905
    import tensorflow as tf

    leaves = [tf.constant(a) for a in arrays]
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        value = function(leaves)
    grads = tape.gradient(value, leaves, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return float(value), [tf.convert_to_tensor(g).numpy() for g in grads]


def weights_of(model):
    """Return all weights, frozen ones too, without the states of stateful layers."""
    return [v for v in model.weights if v.name.partition(":")[0] not in ("rnn_state", "Variable")]


def loss_and_grads(model, x, y):
    """Return the loss and its gradients with respect to the float inputs and the weights."""
    if LEGACY:
        import tensorflow as tf

        saved_values = [v.numpy() for v in model.variables]
        inputs = [tf.constant(leaf) for leaf in leaves_of(x)]
        with restored_states(model), tf.GradientTape() as tape:
            tape.watch([*(inputs[i] for i in float_indices(x)), *weights_of(model)])  # frozen weights, too
            model_input = restructure(x, inputs)
            value = model.compute_loss(model_input, tf.nest.map_structure(tf.constant, y), model(model_input))
        sources = [*(inputs[i] for i in float_indices(x)), *weights_of(model)]
        grads = tape.gradient(value, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        for variable, before in zip(model.variables, saved_values, strict=True):
            variable.assign(before)
        return float(value), [tf.convert_to_tensor(g).numpy() for g in grads]
    indices, variables = float_indices(x), weights_of(model)

    def loss(leaves):
        inputs = list(leaves_of(x))
        for i, leaf in zip(indices, leaves, strict=False):
            inputs[i] = leaf
        with keras.StatelessScope(zip(variables, leaves[len(indices) :], strict=True)):
            model_input = restructure(x, inputs)
            return model.compute_loss(model_input, y, model(model_input))

    values = [keras.ops.convert_to_numpy(v) for v in variables]
    return value_and_grads(loss, [*(leaves_of(x)[i] for i in indices), *values])


def output_shape(model, x):
    if LEGACY:
        with restored_states(model):
            return tuple(model(x).shape)
    with keras.StatelessScope():  # keeps the states of stateful layers unchanged
        return tuple(model(x).shape)


def assert_close(actual, expected, label=""):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, label
    np.testing.assert_allclose(
        actual, expected, rtol=1e-7, atol=1e-10 * max(1, np.abs(expected).max()), err_msg=str(label)
    )


@few_programs
@every_program
def test_gradients_of_the_loss(name):
    model, x, y = program(name)
    value, expected_grads = loss_and_grads(model, x, y)
    inputs = [input_names(x)[i] for i in float_indices(x)]
    axes = TIME_FIRST if name == "time first" else None
    for tensor, expected in zip(inputs, expected_grads, strict=False):
        gradients = rl.gradients(model, x, y, wrt=tensor, axes=axes)
        assert gradients.certificate.state == "passed", gradients.certificate
        assert_close(gradients, expected if axes is None else expected.swapaxes(0, 1), tensor)
    gradients = rl.gradients(model, x, y, wrt="weights")
    assert gradients.certificate.state == "passed", gradients.certificate
    assert np.isclose(rl.trace(model, x, y).loss, value)
    squared_norm = sum(float((np.asarray(g) ** 2).sum()) for layer in gradients.values() for g in layer.values())
    assert_close(squared_norm, sum(float((g**2).sum()) for g in expected_grads[len(inputs) :]))


@few_programs
@every_program
def test_weights_by_gate(name):
    model, x, y = program(name)
    _, expected_grads = loss_and_grads(model, x, y)
    weights = rl.weights(model, x, y)
    assert weights.certificate.state == "passed", weights.certificate
    squared_norm = sum(
        float((np.asarray(weights[layer][key]) ** 2).sum())
        for layer in weights
        for key in weights[layer]
        if key.endswith("_grad") and key != "bias_total_grad"
    )
    assert_close(squared_norm, sum(float((g**2).sum()) for g in expected_grads[len(float_indices(x)) :]))


@few_programs
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "several outputs" not in name])
def test_time_jacobians(name):
    model, x, _ = program(name)
    if not float_indices(x) or name == "time first":  # ids have no derivative
        return
    for i in float_indices(x):
        jacobian = rl.jacobian(model, x, wrt=input_names(x)[i])
        assert jacobian.certificate.state == "passed", jacobian.certificate
        signs = np.random.default_rng(0).choice([-1.0, 1.0], jacobian.shape[1 : len(output_shape(model, x))])

        def signed_sum(leaves, i=i, signs=signs):
            inputs = list(leaves_of(x))
            inputs[i] = leaves[0]
            inputs = [keras.ops.convert_to_tensor(leaf) for leaf in inputs]
            if LEGACY:
                with restored_states(model):
                    return keras.ops.sum(model(restructure(x, inputs)) * signs)
            with keras.StatelessScope():
                return keras.ops.sum(model(restructure(x, inputs)) * keras.ops.convert_to_tensor(signs))

        _, (expected,) = value_and_grads(signed_sum, [leaves_of(x)[i]])
        assert_close(np.tensordot(np.asarray(jacobian), signs, (range(1, 1 + signs.ndim), range(signs.ndim))), expected)


@pytest.mark.one_engine("torch", "tf_keras")
def test_samples_on_another_axis_are_asked_for():
    model, x, _ = program("time first")
    with pytest.raises(rl.errors.InputError, match="step along the first axis of the input") as error:
        rl.jacobian(model, x)
    assert '"input": ("time", "sample", "feature")' in str(error.value)
    jacobian = rl.jacobian(model, x, axes=TIME_FIRST)
    assert jacobian.certificate.state == "passed", jacobian.certificate
    signs = np.random.default_rng(0).choice([-1.0, 1.0], jacobian.shape[1:3])

    def signed_sum(leaves):
        combination = keras.ops.convert_to_tensor(signs[:, None])
        if LEGACY:
            return keras.ops.sum(model(keras.ops.convert_to_tensor(leaves[0])) * combination)
        with keras.StatelessScope():
            return keras.ops.sum(model(keras.ops.convert_to_tensor(leaves[0])) * combination)

    _, (expected,) = value_and_grads(signed_sum, [x])
    assert_close(np.tensordot(np.asarray(jacobian), signs, ((1, 2), (0, 1))).swapaxes(0, 1), expected)


@pytest.mark.one_engine("torch", "tf_keras")
def test_steps_behind_a_permutation_are_found():
    keras.utils.set_random_seed(0)
    x_steps_first = np.random.default_rng(0).normal(size=(70, 7, 3))
    x, y = x_steps_first.transpose(0, 2, 1).copy(), x_steps_first[:, 1, :1]
    layers = [keras.layers.Permute((2, 1)), keras.layers.GRU(4), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input(x.shape[1:]), *layers])
    stated = {"input": ("sample", "feature", "time")}
    in_order = keras.Sequential([keras.Input(x_steps_first.shape[1:]), *layers[1:]])
    for call in (
        lambda model, x, **axes: np.asarray(rl.jacobian(model, x, **axes)),
        lambda model, x, **axes: np.asarray(rl.gradients(model, x, y, loss="mse", wrt="input", **axes)),
        lambda model, x, **axes: str(rl.diagnose(model, x, y, loss="mse", **axes)).partition("Ruled out")[0],
    ):
        expected = call(in_order, x_steps_first)
        for found in (call(model, x), call(model, x, axes=stated)):
            if isinstance(found, str):
                assert found == expected
                assert "The input 5 steps before the last" in found
            else:
                assert_close(found, expected)


@pytest.mark.one_engine("torch", "tf_keras")
def test_gradients_of_samples_on_another_axis_are_asked_for_too():
    model, x, y = program("time first")
    _, expected_grads = loss_and_grads(model, x, y)
    for arguments in (
        {"wrt": "input"},
        {"wrt": "weights", "batch_size": 2},
        {"wrt": "lstm.weights", "per_sample": True},
        {"wrt": "lstm.hidden", "of": "output", "at": {"time": 1}, "reduce": "sum"},
    ):
        with pytest.raises(rl.errors.InputError, match="step along the first axis of the input"):
            rl.gradients(model, x, y, **arguments)
    input_grad = rl.gradients(model, x, y, wrt="input", axes=TIME_FIRST)
    assert (input_grad.dims, input_grad.certificate.state) == (("sample", "time", "feature"), "passed")
    assert_close(np.asarray(input_grad).swapaxes(0, 1), expected_grads[0])
    weight_grads = rl.gradients(model, x, y, wrt="weights")  # one batch: the numbers do not depend on the axis names
    assert weight_grads.certificate.state == "passed"
    sample_grads = rl.gradients(model, x, y, wrt="lstm.weights", per_sample=True, axes=TIME_FIRST)
    kernel_grads = np.asarray(sample_grads["lstm"]["kernel"])
    assert kernel_grads.shape[0] == x.shape[1]
    assert_close(kernel_grads.sum(0), np.asarray(weight_grads["lstm"]["kernel"]))


class CellRecorder:
    """Recorder of cell calls; adds a zero to each new hidden state, whose gradient is the state's total gradient."""

    def __init__(self, cell):
        self.cell, self.calls, self.original = cell, [], cell.call
        vars(cell)["call"] = self

    def __call__(self, inputs, states, training=False):
        import torch

        _, new = self.original(inputs, states, training=training)
        offset = torch.zeros_like(new[0], requires_grad=True)
        hidden = new[0] + offset
        self.calls.append((inputs, states[0], hidden, offset))
        return hidden, [hidden, *new[1:]]


def same_state(call, next_call):
    return next_call[1] is not None and np.array_equal(call[1].detach(), next_call[1].detach())


def gates_of(cell, x, h):
    """Return the gates (sample, gate, unit) of one Keras LSTM step by its equations, in the order of Keras."""
    weights = [keras.ops.convert_to_numpy(v) for v in (cell.kernel, cell.recurrent_kernel, cell.bias)]
    rows = (x @ weights[0] + h @ weights[1] + weights[2]).reshape(len(x), 4, -1)
    gates = 1 / (1 + np.exp(-rows))
    gates[:, 2] = np.tanh(rows[:, 2])
    return gates


@pytest.mark.only_on("torch")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "mask" not in name])
def test_states_gates_and_total_gradients(name):
    """The trace equals autograd; on torch, Keras calls the cell at each step, so a zero can be added to each state."""
    import torch

    model, x, y = program(name)
    saved_values = [keras.ops.convert_to_numpy(v).copy() for v in model.variables]
    rnn_layers = [la for la in model._flatten_layers() if isinstance(la, keras.layers.RNN)]
    wrapped_layers = [la for wrapper in model._flatten_layers() if isinstance(wrapper, keras.layers.Bidirectional)
             for la in (wrapper.forward_layer, wrapper.backward_layer)]  # fmt: skip
    trace = rl.trace(model, x, y)
    with pytest.MonkeyPatch.context() as patch:
        for layer in rnn_layers:
            patch.setattr(type(layer), "inner_loop", keras.layers.RNN.inner_loop)  # no fused kernel
        cells = {
            la.name: CellRecorder(la.cell)
            for la in rnn_layers
            if la not in wrapped_layers and hasattr(la.cell, "recurrent_kernel")
        }
        value = model.compute_loss(x, y, model(x))
        for recorder in cells.values():
            del vars(recorder.cell)["call"]
    for layer, recorder in cells.items():
        nodes = sorted(node for node in trace if node.split("/")[-1].partition("#")[0] == layer)
        if name == "autoregressive":
            nodes = ["lstm_rnn", "lstm_cell"]
        if not recorder.calls:
            assert nodes == []
            continue
        backwards = next(la for la in rnn_layers if la.name == layer).go_backwards
        chronological = (lambda a: a[:, ::-1]) if backwards else (lambda a: a)
        # Keras on torch runs the first step twice, to get the shape of its output.
        steps = [
            call
            for call, next_call in zip(recorder.calls, [*recorder.calls[1:], [None] * 2])  # noqa: B905
            if not same_state(call, next_call)
        ]
        xs, hs, states, offsets = zip(*steps, strict=True)
        grads = torch.autograd.grad(value, offsets, retain_graph=True, allow_unused=True)
        grads = [torch.zeros_like(a) if g is None else g for g, a in zip(grads, offsets, strict=True)]

        def stack_steps(tensors, chronological=chronological):
            return chronological(np.stack([p.detach().numpy() for p in tensors], 1))

        traced = {key: np.concatenate([np.asarray(trace[node][key]) for node in nodes], 1) for key in trace[nodes[0]]
                if key in ("hidden", "hidden_grad", "h", "h_grad", "gates")}  # fmt: skip
        assert_close(traced.get("hidden", traced.get("h")), stack_steps(states), layer)
        assert_close(traced.get("hidden_grad", traced.get("h_grad")), stack_steps(grads), layer)
        if type(recorder.cell) is keras.layers.LSTMCell:
            gates = [
                gates_of(recorder.cell, a.detach().numpy(), h.detach().numpy()) for a, h in zip(xs, hs, strict=True)
            ]
            expected_gates = chronological(np.stack(gates, 1))
            gate_order = {"input": 0, "forget": 1, "cell": 2, "output": 3}
            labels = [str(g) for g in trace[nodes[0]].gates.gate.values]
            dims = trace[nodes[0]].gates.dims
            traced_gates = np.moveaxis(traced["gates"], dims.index("gate"), 2)
            assert_close(
                traced_gates, expected_gates[:, :, [gate_order.get(label, i) for i, label in enumerate(labels)]], layer
            )
    for variable, before in zip(model.variables, saved_values, strict=True):
        variable.assign(before)
