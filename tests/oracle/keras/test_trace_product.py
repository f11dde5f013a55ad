"""``rl.trace`` with all combinations of Keras options, against a dense reference and the engine's autodiff.

Many layers share one model. Its loss is a fixed linear function of the output of each layer, so the direct gradient of
each is known, and each layer is traced as if it were the only one.
"""

import itertools
from contextlib import contextmanager, nullcontext

import cells
import keras
import numpy as np
import pytest
from keras_float64 import default_float

import rnnlens as rl
from rnnlens.testing import reference

pytestmark = pytest.mark.usefixtures("uncertified")

BATCH, TIME, FEATURES, UNITS = 3, 4, 2, 2
FLAGS = ("mask", "backwards", "stateful", "initial_state", "sequences", "bidirectional", "unroll", "bias")
CELLS = ("simple_rnn", "lstm", "gru_after", "gru_before")
# A masked step in the middle; padding on both sides; padding on the left.
MASK = np.array([[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=bool)
LAYERS = {"simple_rnn": keras.layers.SimpleRNN, "lstm": keras.layers.LSTM, "gru": keras.layers.GRU}


class Variant:
    """One layer with one combination of options, and the data that the reference needs."""

    def __init__(self, cell, flags, rng):
        self.kind = cell.partition("_")[0] if cell.startswith("gru") else cell
        self.flags = dict(zip(FLAGS, flags, strict=True))
        self.name = "_".join([cell, *(flag for flag in FLAGS if self.flags[flag])])
        options = {
            "go_backwards": self.flags["backwards"],
            "stateful": self.flags["stateful"],
            "return_sequences": self.flags["sequences"],
            "unroll": self.flags["unroll"],
            "use_bias": self.flags["bias"],
            "bias_initializer": keras.initializers.RandomNormal(seed=1),
        }
        if self.kind == "gru":
            options["reset_after"] = cell.endswith("after")
        layer_class = LAYERS[self.kind]
        if self.flags["bidirectional"]:
            second = layer_class(UNITS, name="second", **{**options, "go_backwards": not self.flags["backwards"]})
            self.layer = keras.layers.Bidirectional(
                layer_class(UNITS, name="first", **options), backward_layer=second, name=self.name
            )
            self.direction_layers = [self.layer.forward_layer, self.layer.backward_layer]
        else:
            self.layer = layer_class(UNITS, name=self.name, **options)
            self.direction_layers = [self.layer]
        self.states = 2 if self.kind == "lstm" else 1
        self.initial_states = [rng.normal(size=(BATCH, UNITS)) for _ in range(self.states * len(self.direction_layers))]
        width = UNITS * len(self.direction_layers)
        self.functional = rng.normal(size=(BATCH, TIME, width) if self.flags["sequences"] else (BATCH, width))

    def call(self, x, mask, states):
        extra = {"initial_state": states} if self.flags["initial_state"] else {}
        return self.layer(x, mask=mask if self.flags["mask"] else None, **extra)

    def set_states(self, rng):
        for layer in self.direction_layers:
            for state in layer.states or ():
                state.assign(rng.normal(size=state.shape))

    def initial_state(self, index):
        layer = self.direction_layers[index]
        if self.flags["initial_state"]:
            return self.initial_states[index * self.states : (index + 1) * self.states]
        if self.flags["stateful"]:
            return [keras.ops.convert_to_numpy(s.value).astype("float64") for s in layer.states]
        return [np.zeros((BATCH, UNITS))] * self.states

    def reference_cell(self, index):
        cell = self.direction_layers[index].cell
        arrays = {
            w.name: keras.ops.convert_to_numpy(w.value).astype("float64") for w in cell.weights if "seed" not in w.name
        }
        if self.kind == "gru" and cell.reset_after and self.flags["bias"]:
            arrays["bias"], arrays["recurrent_bias"] = arrays["bias"]
        return cells.make_cell(self.kind, reset_after=getattr(cell, "reset_after", True), **arrays)


def make_variants(cell, unroll, rng):
    combinations = itertools.product(*[(False, True) if flag != "unroll" else (unroll,) for flag in FLAGS])
    return [
        variant for variant in (Variant(cell, flags, rng) for flags in combinations) if not keras_fails(variant.flags)
    ]


def keras_fails(flags):
    """Return whether Keras 3.15 fails with the flags: on torch it cannot reverse the mask of an unrolled loop."""
    runs_backwards = flags["backwards"] or flags["bidirectional"]
    return keras.backend.backend() == "torch" and flags["unroll"] and flags["mask"] and runs_backwards


def build(group, dtype):
    x = keras.Input(batch_shape=(BATCH, TIME, FEATURES), dtype=dtype, name="x")
    mask = keras.Input(batch_shape=(BATCH, TIME), dtype="bool", name="mask")
    states = [
        [
            keras.Input(batch_shape=(BATCH, UNITS), dtype=dtype, name=f"{v.name}_s{i}")
            for i in range(len(v.initial_states))
        ]
        if v.flags["initial_state"]
        else []
        for v in group
    ]
    outputs = [v.call(x, mask, s) for v, s in zip(group, states, strict=True)]
    model = keras.Model([x, mask, *itertools.chain(*states)], outputs)
    # Eager on TensorFlow, which takes minutes to trace so many loops; the results are the same.
    model.compile(run_eagerly=keras.backend.backend() == "tensorflow")
    return model


def chronological(values, variant, index):
    """Return the output of one direction in chronological order.

    Keras returns a backward layer's output in the order of computation, and reverses that of the second direction once
    more.
    """
    computed = values[:, ::-1] if index == 1 else values
    return computed[:, ::-1] if variant.direction_layers[index].go_backwards else computed


def expected_gradients(variant, index, x, output):
    """Return the direct gradient of one direction in chronological order, its states, and the total gradients.

    The output of Keras at a masked step depends on engine and option: the state, the previous output, or zero. If it is
    not the state, the direct gradient there does not reach the state.
    """
    backward = variant.direction_layers[index].go_backwards
    cell, s0 = variant.reference_cell(index), variant.initial_state(index)
    mask = MASK if variant.flags["mask"] else None
    units = slice(index * UNITS, (index + 1) * UNITS)
    direct = np.zeros((BATCH, TIME, UNITS))
    if variant.flags["sequences"]:
        direct = chronological(variant.functional[..., units], variant, index)
    else:
        direct[:, 0 if backward else -1] = variant.functional[..., units]
    states = reference.bptt(cell, x, s0, np.zeros_like(direct), mask=mask, backward=backward).states
    reaches_state = np.ones((BATCH, TIME, 1), dtype=bool)
    if variant.flags["sequences"]:
        outputs = chronological(output[..., units], variant, index)
        reaches_state = (np.abs(outputs - states[0]) < 1e-4).all(axis=-1, keepdims=True)
        # For an unrolled backward loop, TensorFlow zeroes the mirror image of the masked steps.
        is_mirrored = (
            keras.backend.backend() == "tensorflow" and variant.flags["unroll"] and variant.flags["bidirectional"]
        )
        assert mask is None or is_mirrored or reaches_state[mask].all(), (variant.name, "replays")
        if mask is not None and (variant.flags["unroll"] or keras.backend.backend() != "jax"):
            # Zeros before the first real step are constants, even if the initial state is zero too.
            reaches_state[before_first_real_step(mask, backward)] = False
    if mask is not None and zeroes_masked_steps(variant, index):
        reaches_state[~mask] = False
    total = reference.bptt(cell, x, s0, direct * reaches_state, mask=mask, backward=backward)
    return direct, states, total


def zeroes_masked_steps(variant, index):
    """Return whether a direction of a bidirectional layer returns zeros at masked steps.

    These zeros are constants and pass no gradient on, even where the state is zero too.
    """
    is_ignored = keras.backend.backend() in ("jax", "tensorflow") and variant.flags["unroll"]
    return variant.direction_layers[index].zero_output_for_mask and variant.flags["sequences"] and not is_ignored


def before_first_real_step(mask, backward):
    mask_in_order = mask[:, ::-1] if backward else mask
    before = np.cumsum(mask_in_order, axis=1) == 0
    return before[:, ::-1] if backward else before


def assert_close(actual, expected, tolerance, label):
    actual = np.asarray(actual, dtype="float64")
    assert actual.shape == expected.shape, label
    scale = max(np.abs(expected).max(), 1e-12)
    max_error = float(np.abs(actual - expected).max())
    assert max_error <= tolerance * scale, label


def keras_outputs(model, inputs, group):
    """Return the outputs of Keras itself, and restore the states of stateful layers."""
    variables = [state for v in group for layer in v.direction_layers for state in layer.states or ()]
    saved = [(state, keras.ops.convert_to_numpy(state.value)) for state in variables]
    outputs = [keras.ops.convert_to_numpy(o) for o in model(inputs)]
    for state, value in saved:
        state.assign(value)
    return outputs


def linear_loss(functionals, outputs):
    return sum(keras.ops.sum(f * o) for f, o in zip(functionals, outputs, strict=True))


@pytest.fixture
def dtype(request):
    """Set the default float dtype of Keras during a test."""
    with default_float(request.param), jax_without_float64() if request.param == "float32" else nullcontext():
        yield request.param


@contextmanager
def jax_without_float64():
    """Disable float64 in JAX within the block: with it, Keras cannot run a float32 GRU without biases."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


def cases():
    """Yield all cases; those marked ``full`` run with `make test-full` only, because tracing many loops takes long."""
    quick = {("float64", "lstm", False)}
    if keras.backend.backend() == "tensorflow":
        quick |= {("float64", "gru_after", True)}
    if keras.backend.backend() == "torch":
        quick |= {("float64", cell, False) for cell in CELLS} | {("float64", "lstm", True), ("float32", "lstm", False)}
    for case in itertools.product(("float64", "float32"), CELLS, (False, True)):
        name = "-".join([*case[:2], "unroll" if case[2] else "loop"])
        yield pytest.param(*case, id=name, marks=() if case in quick else pytest.mark.full)


@pytest.mark.one_engine
@pytest.mark.parametrize(("dtype", "cell", "unroll"), list(cases()), indirect=["dtype"])
def test_every_option_product(cell, unroll, dtype):
    tolerance = {"float64": 1e-10, "float32": 1e-4}[dtype]
    rng = np.random.default_rng(5)
    group = make_variants(cell, unroll, rng)
    model = build(group, dtype)
    for variant in group:
        variant.set_states(rng)
    x = rng.normal(size=(BATCH, TIME, FEATURES)).astype(dtype)
    initial_states = [s.astype(dtype) for v in group if v.flags["initial_state"] for s in v.initial_states]
    states = {v.name: [v.initial_state(i) for i in range(len(v.direction_layers))] for v in group}

    outputs = dict(zip(states, keras_outputs(model, [x, MASK, *initial_states], group), strict=True))
    expected = {
        v.name: [expected_gradients(v, i, x.astype("float64"), outputs[v.name]) for i in range(len(v.direction_layers))]
        for v in group
    }

    trace = rl.trace(model, [x, MASK, *initial_states], [v.functional.astype(dtype) for v in group], loss=linear_loss)

    assert set(trace.layers) == {v.name for v in group}
    assert all(check.ok for check in trace.checks)
    for variant in group:
        compare(variant, trace[variant.name], expected[variant.name], tolerance)
        after = [variant.initial_state(i) for i in range(len(variant.direction_layers))]
        assert np.array_equal(np.array(after), np.array(states[variant.name])), "a state advanced"


@pytest.mark.parametrize("dtype", ["float64"], indirect=True)
def test_the_product_leaves_out_only_what_keras_itself_cannot_run(dtype):
    layer = keras.layers.SimpleRNN(2, go_backwards=True, unroll=True)
    x = np.zeros((BATCH, TIME, FEATURES))
    if keras.backend.backend() == "torch":
        with pytest.raises(AttributeError, match="'tuple' object has no attribute 'shape'"):
            layer(x, mask=keras.ops.convert_to_tensor(MASK))
    else:
        assert layer(x, mask=keras.ops.convert_to_tensor(MASK)).shape == (BATCH, 2)


def compare(variant, traced, expected, tolerance):
    directions = ["backward" if layer.go_backwards else "forward" for layer in variant.direction_layers]
    total_input = sum(total.input_grad for _, _, total in expected)
    assert_close(traced.input_grad, total_input, tolerance, (variant.name, "input_grad"))
    names = ["hidden", "cell"][: variant.states]
    for direction, (direct, states, total) in zip(directions, expected, strict=True):
        direction_trace = traced.dataset.sel(direction=direction) if len(expected) > 1 else traced.dataset
        for name, state, grad in zip(names, states, total.state_grads, strict=True):
            assert_close(direction_trace[name], state, tolerance, (variant.name, direction, name))
            assert_close(direction_trace[f"{name}_grad"], grad, tolerance, (variant.name, direction, f"{name}_grad"))
        initial = np.stack(total.initial_state_grad, axis=1)
        assert_close(
            direction_trace["initial_state_grad"], initial, tolerance, (variant.name, direction, "initial_state_grad")
        )
        if not variant.flags["sequences"]:
            direct = direct[:, 0 if direction == "backward" else -1]
        assert_close(direction_trace["output_grad"], direct, tolerance, (variant.name, direction, "output_grad"))
