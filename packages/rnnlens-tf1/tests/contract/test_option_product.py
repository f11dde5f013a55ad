"""Every cell with every option, without eager mode: results equal a float64 reference, or the layer is refused by name.

The variants of a group are branches of one model, so that one trace covers them all. The loss is linear in the outputs
of the layers, with known random coefficients: these *are* the direct gradients. The reference takes the weights from
the layers, and states and inputs from the arrays of the test; gradients of weights and inputs are compared with
TensorFlow's in the user's own graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, product

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_keras as keras
from option_variants import CELLS, DIRECTIONS, STARTS, Variant

import rnnlens as rl
from rnnlens.recurrence.cells import GRU, LSTM, SimpleRNN
from rnnlens.testing.reference import Reference, bptt

SAMPLE, TIME, FEATURE, UNIT = 3, 4, 2, 2
#: The last sample is all padding.
MASK = np.array([[False, True, False, True], [True, True, False, False], [False] * 4])


@dataclass
class Branch:
    """One variant in a model: its layers, their initial states, and the loss coefficients of their outputs."""

    variant: Variant
    layers: list
    starts: list
    output: np.ndarray
    finals: list

    @property
    def name(self):
        return self.variant.name

    def reference(self, index, x, mask, session) -> Reference:
        """Return the float64 reference of one direction."""
        return bptt(
            self.cell(index, session),
            x,
            [np.asarray(s) for s in self.starts[index]],
            self.state_grad(index, mask),
            mask=mask,
            backward=self.variant.directions[index] == "backward",
            final_state_grad=self.finals[index],
        )

    def cell(self, index, session):
        kernel, recurrent, *bias = session.run(list(self.layers[index].cell.weights))
        bias = bias[0] if bias else None
        if self.variant.cell == "simple_rnn":
            return SimpleRNN(kernel, recurrent, bias)
        if self.variant.cell == "lstm":
            return LSTM(kernel, recurrent, bias)
        if self.variant.cell == "gru_before":
            return GRU(kernel, recurrent, bias, reset_after=False)
        outer, inner = (None, None) if bias is None else bias
        return GRU(kernel, recurrent, outer, inner, reset_after=True)

    def direct_grad(self, index):
        """Return the loss coefficients of one direction's outputs, in order of time."""
        coefficients = self.output[..., index * UNIT : (index + 1) * UNIT]
        return (
            coefficients[:, ::-1] if self.variant.direction == "backward" and self.variant.sequences else coefficients
        )

    def state_grad(self, index, mask):
        """Return the direct gradient of the states (sample, time, unit): zero where the output is a constant."""
        grad = np.zeros((SAMPLE, TIME, UNIT))
        if self.variant.sequences:
            grad[:] = self.direct_grad(index)
        else:
            grad[:, 0 if self.variant.directions[index] == "backward" else TIME - 1] = self.direct_grad(index)
        return grad if mask is None else grad * self.reaches_state(index, mask)[..., None]

    def reaches_state(self, index, mask):
        """Return a mask (sample, time) of the outputs that depend on the state.

        Keras 2 returns zeros before the first valid step, and at every masked step of a bidirectional layer that
        returns all steps.
        """
        step = -1 if self.variant.directions[index] == "backward" else 1
        is_reached = (mask[:, ::step].cumsum(1) > 0)[:, ::step]
        return is_reached & mask if self.variant.direction == "bidirectional" and self.variant.sequences else is_reached


@dataclass
class Group:
    """One model with a branch per variant, its input arrays, and its loss as a tensor."""

    model: keras.Model
    session: tf.Session
    arrays: list
    branches: list
    loss: tf.Tensor
    gradients: list
    masked: bool

    @property
    def mask(self):
        return MASK if self.masked else None

    def trace(self, **options):
        return rl.trace(self.model, self.arrays, loss=self.loss.name, **options)

    def run_gradients(self):
        """Return TensorFlow's gradients in the user's own graph: by float inputs (list) and by variable name (dict)."""
        feed = dict(zip(self.model.inputs, self.arrays, strict=True))
        gradients = self.session.run(self.gradients, feed)
        return gradients[:3], {v.name: g for v, g in zip(self.model.trainable_weights, gradients[3:], strict=True)}


def make_group(variants, masked, unroll, session):
    random = np.random.default_rng(1)
    x = keras.Input(batch_shape=(SAMPLE, TIME, FEATURE))
    mask = keras.Input(batch_shape=(SAMPLE, TIME), dtype="bool")
    states = [keras.Input(batch_shape=(SAMPLE, UNIT)) for _ in range(2)]
    arrays = [random.normal(size=(SAMPLE, TIME, FEATURE)), MASK, *random.normal(size=(2, SAMPLE, UNIT))]
    calls = [_call_layer(variant, unroll, x, mask if masked else None, states) for variant in variants]
    model = keras.Model([x, mask, *states], [outputs for _, outputs in calls])
    coefficients = [[random.normal(size=t.shape) for t in outputs] for _, outputs in calls]
    terms = [tf.reduce_sum(c * t) for c, t in zip(chain(*coefficients), model.outputs, strict=True)]
    loss = tf.add_n(terms, name="loss")
    # Before any run: TensorFlow cannot add to a While that was run the outputs that its gradient needs.
    gradients = tf.gradients(loss, [x, *states, *model.trainable_weights], unconnected_gradients="zero")
    recorded_states = [v for layer in _stateful_layers(model) for v in tf.nest.flatten(layer.states)]
    for v in {id(v): v for v in (*model.weights, *recorded_states)}.values():
        session.run(v.initializer)
        v.load(random.normal(size=v.shape), session)
    branches = [
        _make_branch(variant, layer, branch_coefficients, arrays[2:], session)
        for variant, (layer, _), branch_coefficients in zip(variants, calls, coefficients, strict=True)
    ]
    return Group(model, session, arrays, branches, loss, gradients, masked)


def _call_layer(variant, unroll, x, mask, states):
    layer = variant.layer(keras.layers, UNIT, unroll)
    size = (2 if variant.cell == "lstm" else 1) * len(variant.directions)
    options = {"initial_state": (states * 2)[:size]} if "given" in variant.start else {}
    return layer, tf.nest.flatten(layer(x, mask=mask, **options))


def _stateful_layers(model):
    return [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False) and hasattr(layer, "cell")]


def _make_branch(variant, layer, coefficients, given_states, session):
    direction_layers = [layer.forward_layer, layer.backward_layer] if variant.direction == "bidirectional" else [layer]
    count = 2 if variant.cell == "lstm" else 1
    output, *finals = coefficients
    starts = []
    for i, direction_layer in enumerate(direction_layers):
        if "stateful" in variant.start:  # Keras 2 starts from the recorded state unless it is all zero
            starts.append(session.run(tf.nest.flatten(direction_layer.states)))
        elif "given" in variant.start:
            starts.append([given_states[(i * count + k) % 2] for k in range(count)])
        else:
            starts.append([np.zeros((SAMPLE, UNIT))] * count)
    final_coefficients = [finals[i * count : (i + 1) * count] or None for i in range(len(direction_layers))]
    return Branch(variant, direction_layers, starts, output, final_coefficients)


@pytest.fixture
def session(graph):
    keras.backend.set_floatx("float64")
    config = tf.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # rewriting hundreds of loops is slow
    with tf.Session(graph=graph, config=config) as session:
        tf.keras.backend.set_session(session)
        yield session
    keras.backend.set_floatx("float32")


def assert_close(actual, expected, label):
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10, err_msg=label)


def is_refused(masked, unroll):
    """Return whether rnnlens refuses a layer, given whether it is masked and unrolled: it does if both hold."""
    return masked and unroll


def check_group(group):
    """Check states, total gradients, and the gradients of all weights and inputs."""
    trace = group.trace()
    by_x, *by_states = [np.zeros_like(a) for a in (group.arrays[0], *group.arrays[2:])]
    for branch in group.branches:
        references = [
            branch.reference(i, group.arrays[0], group.mask, group.session) for i in range(len(branch.layers))
        ]
        check_node(trace[branch.name], branch, references)
        by_x += trace[branch.name].input_grad.values
        for i, reference in enumerate(references if branch.variant.start == "given" else []):
            for k, grad in enumerate(reference.initial_state_grad):
                by_states[(i * len(references[0].initial_state_grad) + k) % 2] += grad
    (input_grad, *state_grads), by_variable = group.run_gradients()
    assert_close(by_x, input_grad, "input")
    for actual, grad in zip(by_states, state_grads, strict=True):
        assert_close(actual, grad, "given states")
    weights = rl.weights(group.model, group.arrays, loss=group.loss.name)
    for branch in group.branches:
        for index, layer in enumerate(branch.layers):
            check_weights(weights[branch.name], index, {v.name: by_variable[v.name] for v in layer.cell.weights})


def check_weights(node, index, expected):
    """Check one direction's weight gradients, summed over time, against TensorFlow's own."""
    for name, grad in expected.items():
        key = name.rpartition("/")[2].removesuffix(":0")
        actual = [node[f"{key}_grad"]]
        if f"recurrent_{key}_grad" in node and key == "bias":
            actual.append(node["recurrent_bias_grad"])
        assert_close(np.stack([at_direction(array, index) for array in actual]).reshape(grad.shape), grad, name)


def check_node(node, branch, references):
    """Check states and their total gradients at every step of every direction."""
    names = ("hidden", "cell") if branch.variant.cell == "lstm" else ("hidden",)
    for index, reference in enumerate(references):
        for name, states, grads in zip(names, reference.states, reference.state_grads, strict=True):
            label = f"{branch.name} {branch.variant.directions[index]} {name}"
            assert_close(at_direction(node[name], index), states, label)
            assert_close(at_direction(node[f"{name}_grad"], index), grads, f"{label}_grad")
        assert_close(
            at_direction(node["initial_state_grad"], index), np.stack(reference.initial_state_grad, 1), branch.name
        )


def at_direction(array, index):
    return array.isel(direction=index) if "direction" in array.dims else array


def check_refused(group):
    for branch in group.branches:
        with pytest.raises(rl.errors.UnsupportedError, match=f"Layer '{branch.name}' cannot be traced"):
            group.trace(layers=branch.name)


@pytest.mark.full
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.parametrize("unroll", [False, True], ids=["loop", "unrolled"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("cell", CELLS)
def test_equal_or_refused_by_name(session, cell, masked, unroll, bias, direction):
    variants = [Variant(cell, bias, direction, *options) for options in product((True, False), STARTS)]
    group = make_group(variants, masked, unroll, session)
    with rl.options(certify="never"):  # the comparisons here cover more
        (check_refused if is_refused(masked, unroll) else check_group)(group)


@pytest.mark.parametrize(
    ("variant", "masked", "unroll"),
    [
        (Variant("simple_rnn", False, "backward", True, "stateful"), True, False),
        (Variant("lstm", True, "forward", False, "given"), True, False),
        (Variant("gru_after", True, "backward", True, "stateful_given"), False, True),
        (Variant("gru_before", True, "forward", True, "given"), True, False),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_one_of_each_cell(session, variant, masked, unroll):
    group = make_group([variant], masked, unroll, session)
    check_group(group)
    assert group.trace().certificate.state == "passed"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_masked_and_unrolled_is_refused_by_name(session, direction):
    group = make_group([Variant("lstm", True, direction, True, "zeros")], True, True, session)
    check_refused(group)
    with pytest.raises(rl.errors.UnsupportedError, match="unroll=True, with a mask"):
        group.trace()


def test_a_mask_that_comes_with_the_input_is_as_good(session):
    inputs = keras.Input((TIME, FEATURE))
    model = keras.Model(inputs, keras.layers.GRU(UNIT, unroll=True, name="r")(keras.layers.Masking()(inputs)))
    model.get_weights()
    with pytest.raises(rl.errors.UnsupportedError, match="unroll=True, with a mask"):
        rl.trace(model, np.ones((SAMPLE, TIME, FEATURE)))
