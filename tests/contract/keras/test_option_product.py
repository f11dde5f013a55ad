"""Each cell with each option: captures are replayed in float64, and gradients are the framework's own.

The variants of a group are branches of one model, which needs one forward and one backward pass for all of them. The
loss is linear in the outputs of the layers, with known random coefficients: these *are* the direct gradients.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from keras_eager import eager_captures
from option_variants import CELLS, all_variants
from spoken_keras import LEGACY, engine, keras, keras_adapter, path_of, restored_states, states_of

from rnnlens.adapters.protocol import Batch, Taps
from rnnlens.testing.keras_models import gradients
from rnnlens.testing.reference import bptt

adapter = keras_adapter()
SAMPLE, TIME, FEATURE, UNIT = 2, 4, 2, 2
MASK = np.array([[False, True, False, True], [True, True, False, False]])


#: Number of parts; each part has every value of every option, since no option has 5 or 7 values, or a multiple.
PARTS = 5 if engine() == "torch" else 7


def variants(cell, part_index):
    """Return one part of the 48 variants of a cell."""
    return all_variants(cell)[part_index::PARTS]


def refused_by_keras(variant, masked, unroll):
    """Return whether Keras cannot run a variant: on torch it cannot reverse the list of masks of an unrolled loop."""
    backwards = variant.direction != "forward"
    return engine() == "torch" and masked and unroll and backwards


@dataclass
class Group:
    """One model with a branch per variant, its inputs, and the coefficients of its loss."""

    model: keras.Model
    inputs: list
    coefficients: list
    names: list

    def loss(self, y_true, y_pred):
        pairs = zip(self.coefficients, keras.tree.flatten(y_pred), strict=True)
        return sum(keras.ops.sum(keras.ops.multiply(c, y)) for c, y in pairs)


def build_group(cell, masked, unroll, part_index):
    rng = np.random.default_rng(1)
    x = keras.Input(batch_shape=(SAMPLE, TIME, FEATURE))
    mask = keras.Input(batch_shape=(SAMPLE, TIME), dtype="bool")
    states = [keras.Input(batch_shape=(SAMPLE, UNIT)) for _ in range(2)]
    outputs, names = [], []
    for variant in variants(cell, part_index):
        if refused_by_keras(variant, masked, unroll):
            continue
        bias = "glorot_uniform" if variant.bias and cell != "lstm" else "zeros"
        layer = variant.layer(keras.layers, UNIT, unroll, bias_initializer=bias)
        size = (2 if cell == "lstm" else 1) * (2 if variant.direction == "bidirectional" else 1)
        state_options = {"initial_state": (states * 2)[:size]} if "given" in variant.start else {}
        outputs.append(keras.tree.flatten(layer(x, mask=mask if masked else None, **state_options)))
        names.append(variant.name)
    model = keras.Model([x, mask, *states], outputs)
    for v in states_of(model):
        v.assign(rng.normal(size=v.shape))
    arrays = [rng.normal(size=(SAMPLE, TIME, FEATURE)), MASK, *rng.normal(size=(2, SAMPLE, UNIT))]
    coefficients = [rng.normal(size=t.shape) for t in keras.tree.flatten(outputs)]
    return Group(model, arrays, coefficients, names)


@contextmanager
def eager_execution():
    """Run the block eagerly: compiling a graph of a hundred loops takes minutes. Compiled runs have their own tests."""
    with ExitStack() as stack:
        stack.enter_context(eager_captures())
        if engine() == "jax":
            import jax

            stack.enter_context(jax.disable_jit())
        yield


#: Quick runs: on Keras 2 each cell once and each kind of run once; on JAX and TensorFlow both kinds of
#: loop under a mask, where the engines differ.
EACH_ONCE = tuple(map(str, zip(CELLS, (False, True, True, False), (True, False, True, False), range(4), strict=True)))
each_once = pytest.mark.product(keep=EACH_ONCE if LEGACY else EACH_ONCE[1:3])


@pytest.fixture(scope="module", params=list(product(CELLS, (False, True), (False, True), range(PARTS))), ids=str)
def captured_group(request, float64):
    """Return the group, its capture, and the framework's own gradients."""
    group = build_group(*request.param)
    with eager_execution():
        capture = adapter.run(group.model, Batch(group.inputs, loss=group.loss), Taps.direct(weight_grads=True)).capture
    x, mask, *states = group.inputs

    def loss_of(tensors):
        return group.loss(None, group.model([tensors[0], keras.ops.convert_to_tensor(mask), *tensors[1:]]))

    with eager_execution(), restored_states(group.model):
        return group, capture, gradients(loss_of, [x, *states], group.model.trainable_variables)


def calls_and_references(capture):
    """Yield each call with its float64 reference, computed from the captured direct gradients."""
    for call in capture.calls:
        yield (
            call,
            bptt(
                call.cell,
                call.input,
                call.initial_state,
                state_cotangent(call),
                mask=call.mask,
                backward=call.direction == "backward",
                final_state_grad=call.final_state_grad,
            ),
        )


def state_cotangent(call):
    """Return the direct gradient of y as a cotangent of h, (sample, time, unit).

    It is zero where y does not depend on h.
    """
    grad = np.zeros((SAMPLE, TIME, UNIT))
    last = 0 if call.direction == "backward" else TIME - 1
    if call.returns_sequences:
        grad[:] = call.output_grad
    else:
        grad[:, last] = call.output_grad
    return grad if call.output_from_state is None else grad * call.output_from_state[..., None]


@each_once
def test_every_call_is_there(captured_group):
    group, capture, _ = captured_group
    assert {c.layer for c in capture.calls} == set(group.names)


@each_once
def test_outputs_and_states_replay(captured_group):
    for call, reference in calls_and_references(captured_group[1]):
        hidden = reference.states[0]
        expected = hidden if call.output_from_state is None else hidden * call.output_from_state[..., None]
        last = 0 if call.direction == "backward" else TIME - 1
        expected = expected if call.returns_sequences else expected[:, last]
        np.testing.assert_allclose(call.output, expected, rtol=1e-10, atol=1e-12, err_msg=call.layer)
        for returned, states in zip(call.final_state or (), reference.states, strict=call.final_state is not None):
            np.testing.assert_allclose(returned, states[:, last], rtol=1e-10, atol=1e-12, err_msg=call.layer)


@each_once
def test_direct_gradients_are_the_coefficients_of_the_loss(captured_group):
    group, capture, _ = captured_group
    coefficients = iter(group.coefficients)
    by_layer = {}
    for call in capture.calls:
        by_layer.setdefault(call.layer, []).append(call)
    for calls in map(by_layer.get, group.names):
        layer_coefficients = next(coefficients)
        for direction_index, call in enumerate(calls):
            direct = layer_coefficients[..., direction_index * UNIT : (direction_index + 1) * UNIT]
            # A backward layer returns its last step first; Bidirectional reverses that itself.
            is_reversed = call.direction == "backward" and not call.bidirectional and call.returns_sequences
            np.testing.assert_allclose(call.output_grad, direct[:, ::-1] if is_reversed else direct, atol=1e-12)
        for call in calls:
            for grad in call.final_state_grad or ():
                np.testing.assert_allclose(grad, next(coefficients), atol=1e-12)


@each_once
def test_weight_gradients_are_the_frameworks(captured_group):
    group, capture, (_, _, variable_grads) = captured_group
    by_path = {path_of(v): g for v, g in zip(group.model.trainable_variables, variable_grads, strict=True)}
    for call in capture.calls:
        prefix = f"{'forward' if call.direction == 'forward' else 'backward'}_" if call.bidirectional else ""
        expected = {
            path.split("/")[-1]: grad
            for path, grad in by_path.items()
            if path.split("/")[0] == call.layer and (not prefix or path.split("/")[1].startswith(prefix))
        }
        actual = dict(call.weight_grads)
        if "recurrent_bias" in actual:
            actual["bias"] = np.stack([actual["bias"], actual.pop("recurrent_bias")])
        assert actual.keys() == expected.keys()
        for name, grad in actual.items():
            np.testing.assert_allclose(grad, expected[name], rtol=1e-10, atol=1e-12, err_msg=f"{call.layer} {name}")


@each_once
def test_adjoint_of_everything_captured_is_the_frameworks_input_gradient(captured_group):
    """Replayed gradients of all branches sum to the framework's: an error in one's mask, flag, order or state shows."""
    _, capture, (_, (x_grad, *state_grads), _) = captured_group
    input_grad, state_sums = np.zeros_like(x_grad), [np.zeros_like(g) for g in state_grads]
    for call, reference in calls_and_references(capture):
        input_grad += reference.input_grad
        if "given" in call.layer and not ignores_given_state(call.layer):
            offset = len(reference.initial_state_grad) if call.direction == "backward" and call.bidirectional else 0
            for i, grad in enumerate(reference.initial_state_grad):
                state_sums[(offset + i) % 2] += grad
    np.testing.assert_allclose(input_grad, x_grad, rtol=1e-10, atol=1e-11)
    for actual, expected in zip(state_sums, state_grads, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-11)


def ignores_given_state(name):
    """Return whether Keras 2 ignores a given state: a stateful layer with a non-zero state does."""
    return LEGACY and "stateful" in name


def test_what_keras_cannot_run_is_refused_by_name():
    if engine() != "torch":
        return
    from rnnlens.errors import UnsupportedError

    layer = keras.layers.LSTM(2, unroll=True, go_backwards=True, name="back")
    model = keras.Sequential([keras.Input((TIME, FEATURE)), keras.layers.Masking(), layer])
    with pytest.raises(UnsupportedError) as caught:
        _ = adapter.run(model, Batch(np.ones((1, TIME, FEATURE))), Taps.states()).capture
    assert str(caught.value) == (
        "Layer 'back': Keras on torch cannot run unroll=True with go_backwards=True and a mask.\n  try:      "
        "unroll=False"
    )
