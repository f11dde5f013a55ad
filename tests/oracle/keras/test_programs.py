"""Whole programs as tutorials and strangers write them, held against the engine's autodiff of the untouched model."""

from __future__ import annotations

from functools import cache

import keras_programs
import numpy as np
import pytest
from spoken_keras import LEGACY, engine, keras, untouched

import rnnlens as rl

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.op_by_op]

#: Keras 2 has no LoRA; a subclass with a call of its own is refused by name there (docs/LIMITATIONS.md).
OF_KERAS_3 = ("subclassed layer", "adapted head") if LEGACY else ()
PROGRAMS = {name: make for name, make in keras_programs.PROGRAMS.items() if name not in OF_KERAS_3}
every_program = pytest.mark.parametrize("name", PROGRAMS)
TIME_FIRST = {"input": ("time", "sample", "feature"), "output": ("time", "sample", "unit")}
#: On tf_keras ten programs, on JAX and TensorFlow one, on torch all.
OF_KERAS_2 = (
    *("imdb bidirectional lstm", "addition", "translation step by step", "stateful lstm", "custom cell"),
    *("residual forecast", "cut between chunks", "attention pooling", "by hand both ways", "state in a variable"),
)
few = pytest.mark.product(keep=OF_KERAS_2 if LEGACY else ("autoregressive",))


def leaves_of(x):
    return list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, list) else [x]


def rebuilt(x, leaves):
    return dict(zip(x, leaves, strict=True)) if isinstance(x, dict) else leaves if isinstance(x, list) else leaves[0]


def floats_of(x):
    return [i for i, leaf in enumerate(leaves_of(x)) if leaf.dtype.kind == "f"]


def names_of(x):
    """Names of the inputs in rnnlens."""
    names = list(x) if isinstance(x, dict) else ["a", "b"][: len(x)] if isinstance(x, list) else [None]
    return ["input" if name is None else f"input[{name}]" for name in names]


@cache
def program(name):
    keras.utils.set_random_seed(0)
    return PROGRAMS[name]()


def differentiated(function, arrays):
    """Return the value of a function of tensors, a scalar, and its gradients."""
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
    """Return the weights, frozen ones too; states of stateful layers are none."""
    return [v for v in model.weights if v.name.partition(":")[0] not in ("rnn_state", "Variable")]


def by_variables(model, x, y):
    """Return the loss and its gradients by the float inputs and by the weights."""
    if LEGACY:
        import tensorflow as tf

        held = [v.numpy() for v in model.variables]
        inputs = [tf.constant(leaf) for leaf in leaves_of(x)]
        with untouched(model), tf.GradientTape() as tape:
            tape.watch([*(inputs[i] for i in floats_of(x)), *weights_of(model)])  # frozen weights, too
            given = rebuilt(x, inputs)
            value = model.compute_loss(given, tf.nest.map_structure(tf.constant, y), model(given))
        sources = [*(inputs[i] for i in floats_of(x)), *weights_of(model)]
        grads = tape.gradient(value, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        for variable, before in zip(model.variables, held, strict=True):
            variable.assign(before)
        return float(value), [tf.convert_to_tensor(g).numpy() for g in grads]
    floats, variables = floats_of(x), weights_of(model)

    def loss(leaves):
        inputs = list(leaves_of(x))
        for i, leaf in zip(floats, leaves, strict=False):
            inputs[i] = leaf
        with keras.StatelessScope(zip(variables, leaves[len(floats) :], strict=True)):
            given = rebuilt(x, inputs)
            return model.compute_loss(given, y, model(given))

    values = [keras.ops.convert_to_numpy(v) for v in variables]
    return differentiated(loss, [*(leaves_of(x)[i] for i in floats), *values])


def output_shape(model, x):
    if LEGACY:
        with untouched(model):
            return tuple(model(x).shape)
    with keras.StatelessScope():  # a stateful layer does not go on from here
        return tuple(model(x).shape)


def close(ours, theirs, what=""):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape, what
    np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-10 * max(1, np.abs(theirs).max()), err_msg=str(what))


@few
@every_program
def test_gradients_of_the_loss(name):
    model, x, y = program(name)
    value, grads = by_variables(model, x, y)
    inputs = [names_of(x)[i] for i in floats_of(x)]
    axes = TIME_FIRST if name == "time first" else None
    for tensor, expected in zip(inputs, grads, strict=False):
        ours = rl.gradients(model, x, y, wrt=tensor, axes=axes)
        assert ours.certificate.state == "passed", ours.certificate
        close(ours, expected if axes is None else expected.swapaxes(0, 1), tensor)
    ours = rl.gradients(model, x, y, wrt="weights")
    assert ours.certificate.state == "passed", ours.certificate
    assert np.isclose(rl.trace(model, x, y).loss, value)
    found = sum(float((np.asarray(g) ** 2).sum()) for layer in ours.values() for g in layer.values())
    close(found, sum(float((g**2).sum()) for g in grads[len(inputs) :]))


@few
@every_program
def test_weights_by_gate(name):
    model, x, y = program(name)
    _, grads = by_variables(model, x, y)
    found = rl.weights(model, x, y)
    assert found.certificate.state == "passed", found.certificate
    ours = sum(
        float((np.asarray(found[layer][key]) ** 2).sum())
        for layer in found
        for key in found[layer]
        if key.endswith("_grad") and key != "bias_total_grad"
    )
    close(ours, sum(float((g**2).sum()) for g in grads[len(floats_of(x)) :]))


@few
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "several outputs" not in name])
def test_time_jacobians(name):
    model, x, _ = program(name)
    if not floats_of(x) or name == "time first":  # ids have no derivative
        return
    for i in floats_of(x):
        ours = rl.jacobian(model, x, wrt=names_of(x)[i])
        assert ours.certificate.state == "passed", ours.certificate
        signs = np.random.default_rng(0).choice([-1.0, 1.0], ours.shape[1 : len(output_shape(model, x))])

        def combined(leaves, i=i, signs=signs):
            inputs = list(leaves_of(x))
            inputs[i] = leaves[0]
            inputs = [keras.ops.convert_to_tensor(leaf) for leaf in inputs]
            if LEGACY:
                with untouched(model):
                    return keras.ops.sum(model(rebuilt(x, inputs)) * signs)
            with keras.StatelessScope():
                return keras.ops.sum(model(rebuilt(x, inputs)) * keras.ops.convert_to_tensor(signs))

        _, (expected,) = differentiated(combined, [leaves_of(x)[i]])
        close(np.tensordot(np.asarray(ours), signs, (range(1, 1 + signs.ndim), range(signs.ndim))), expected)


@pytest.mark.one_engine("torch", "tf_keras")
def test_samples_on_another_axis_are_asked_for():
    model, x, _ = program("time first")
    with pytest.raises(rl.errors.InputError, match="step along the first axis of the input") as refused:
        rl.jacobian(model, x)
    assert '"input": ("time", "sample", "feature")' in str(refused.value)
    ours = rl.jacobian(model, x, axes=TIME_FIRST)
    assert ours.certificate.state == "passed", ours.certificate
    signs = np.random.default_rng(0).choice([-1.0, 1.0], ours.shape[1:3])

    def combined(leaves):
        combination = keras.ops.convert_to_tensor(signs[:, None])
        if LEGACY:
            return keras.ops.sum(model(keras.ops.convert_to_tensor(leaves[0])) * combination)
        with keras.StatelessScope():
            return keras.ops.sum(model(keras.ops.convert_to_tensor(leaves[0])) * combination)

    _, (expected,) = differentiated(combined, [x])
    close(np.tensordot(np.asarray(ours), signs, ((1, 2), (0, 1))).swapaxes(0, 1), expected)


@pytest.mark.one_engine("torch", "tf_keras")
def test_gradients_of_samples_on_another_axis_are_asked_for_too():
    model, x, y = program("time first")
    _, grads = by_variables(model, x, y)
    for arguments in (
        {"wrt": "input"},
        {"wrt": "weights", "batch_size": 2},
        {"wrt": "lstm.weights", "per_sample": True},
        {"wrt": "lstm.hidden", "of": "output", "at": {"time": 1}, "reduce": "sum"},
    ):
        with pytest.raises(rl.errors.InputError, match="step along the first axis of the input"):
            rl.gradients(model, x, y, **arguments)
    ours = rl.gradients(model, x, y, wrt="input", axes=TIME_FIRST)
    assert (ours.dims, ours.certificate.state) == (("sample", "time", "feature"), "passed")
    close(np.asarray(ours).swapaxes(0, 1), grads[0])
    whole = rl.gradients(model, x, y, wrt="weights")  # of one batch: the numbers do not depend on names of axes
    assert whole.certificate.state == "passed"
    one = rl.gradients(model, x, y, wrt="lstm.weights", per_sample=True, axes=TIME_FIRST)
    each = np.asarray(one["lstm"]["kernel"])
    assert each.shape[0] == x.shape[1]
    close(each.sum(0), np.asarray(whole["lstm"]["kernel"]))


class Heard:
    """Calls of a cell, with numbers that were added to its new hidden state: their gradients are the total ones."""

    def __init__(self, cell):
        self.cell, self.calls, self.original = cell, [], cell.call
        vars(cell)["call"] = self

    def __call__(self, inputs, states, training=False):
        import torch

        _, new = self.original(inputs, states, training=training)
        added = torch.zeros_like(new[0], requires_grad=True)
        moved = new[0] + added
        self.calls.append((inputs, states[0], moved, added))
        return moved, [moved, *new[1:]]


def same_state(one, after):
    return after[1] is not None and np.array_equal(one[1].detach(), after[1].detach())


def gates_of(cell, x, h):
    """Gates of one step of a Keras LSTM, in its own order, after the equations."""
    weights = [keras.ops.convert_to_numpy(v) for v in (cell.kernel, cell.recurrent_kernel, cell.bias)]
    rows = (x @ weights[0] + h @ weights[1] + weights[2]).reshape(len(x), 4, -1)
    gates = 1 / (1 + np.exp(-rows))
    gates[:, 2] = np.tanh(rows[:, 2])
    return gates


@pytest.mark.only_on("torch")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "mask" not in name])
def test_states_gates_and_total_gradients(name):
    """A torch layer of Keras calls its cell at each step, so that each state can be moved."""
    import torch

    model, x, y = program(name)
    kept = [keras.ops.convert_to_numpy(v).copy() for v in model.variables]
    found = [la for la in model._flatten_layers() if isinstance(la, keras.layers.RNN)]
    inner = [la for pair in model._flatten_layers() if isinstance(pair, keras.layers.Bidirectional)
             for la in (pair.forward_layer, pair.backward_layer)]  # fmt: skip
    trace = rl.trace(model, x, y)
    with pytest.MonkeyPatch.context() as patch:
        for layer in found:
            patch.setattr(type(layer), "inner_loop", keras.layers.RNN.inner_loop)  # no fused kernel
        cells = {la.name: Heard(la.cell) for la in found if la not in inner and hasattr(la.cell, "recurrent_kernel")}
        value = model.compute_loss(x, y, model(x))
        for heard in cells.values():
            del vars(heard.cell)["call"]
    for layer, heard in cells.items():
        nodes = sorted(node for node in trace if node.split("/")[-1].partition("#")[0] == layer)
        if name == "autoregressive":
            nodes = ["lstm_rnn", "lstm_cell"]
        if not heard.calls:
            assert nodes == []
            continue
        backwards = next(la for la in found if la.name == layer).go_backwards
        turn = (lambda a: a[:, ::-1]) if backwards else (lambda a: a)
        # Keras on torch runs the first step once more, for the shape of its output.
        steps = [one for one, after in zip(heard.calls, [*heard.calls[1:], [None] * 2]) if not same_state(one, after)]  # noqa: B905
        xs, hs, states, added = zip(*steps, strict=True)
        grads = torch.autograd.grad(value, added, retain_graph=True, allow_unused=True)
        grads = [torch.zeros_like(a) if g is None else g for g, a in zip(grads, added, strict=True)]

        def join(parts, turn=turn):
            return turn(np.stack([p.detach().numpy() for p in parts], 1))

        ours = {key: np.concatenate([np.asarray(trace[node][key]) for node in nodes], 1) for key in trace[nodes[0]]
                if key in ("hidden", "hidden_grad", "h", "h_grad", "gates")}  # fmt: skip
        close(ours.get("hidden", ours.get("h")), join(states), layer)
        close(ours.get("hidden_grad", ours.get("h_grad")), join(grads), layer)
        if type(heard.cell) is keras.layers.LSTMCell:
            gates = [gates_of(heard.cell, a.detach().numpy(), h.detach().numpy()) for a, h in zip(xs, hs, strict=True)]
            theirs = turn(np.stack(gates, 1))
            order = {"input": 0, "forget": 1, "cell": 2, "output": 3}
            labels = [str(g) for g in trace[nodes[0]].gates.gate.values]
            dims = trace[nodes[0]].gates.dims
            arranged = np.moveaxis(ours["gates"], dims.index("gate"), 2)
            close(arranged, theirs[:, :, [order.get(label, i) for i, label in enumerate(labels)]], layer)
    for variable, before in zip(model.variables, kept, strict=True):
        variable.assign(before)
