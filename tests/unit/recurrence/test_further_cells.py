"""Cells beyond RNN, LSTM and GRU: derivatives against the complex step in float64, and the structure of the steps."""

import array_api_strict
import numpy as np
import pytest
import torch

from rnnlens.recurrence import cells
from rnnlens.recurrence.adjoint import adjoint, probe_combinations, weight_gradients
from rnnlens.recurrence.replay import replay

BATCH, TIME, FEATURES, UNITS = 2, 4, 2, 3
STEP = 1e-30
MASK = np.array([[True, False, True, True], [False, True, True, False]])


def normal(rng, *shape):
    return rng.normal(size=shape)


def make_cell(name, seed=0):
    rng = np.random.default_rng(seed)
    kernel, recurrent, bias = (
        lambda gates: normal(rng, FEATURES, gates * UNITS),
        lambda gates, size=UNITS: 0.7 * normal(rng, size, gates * UNITS),
        lambda gates: normal(rng, gates * UNITS),
    )
    if name in ("peephole", "peephole_clipped"):
        peepholes = {f"peephole_{g}": normal(rng, UNITS) for g in ("input", "forget", "output")}
        unclipped = cells.PeepholeLSTM(
            kernel(4), recurrent(4, 2), bias(4), **peepholes, projection=normal(rng, UNITS, 2)
        )
        if name == "peephole":
            return unclipped
        clipping = {"cell_clip": 0.8, "projection_clip": 0.5, "forget_bias": 1.0}
        return cells.PeepholeLSTM(**unclipped.weights(), **clipping)
    return {
        "peephole_bare": lambda: cells.PeepholeLSTM(kernel(4), recurrent(4)),
        "cifg": lambda: cells.CIFG(kernel(3), recurrent(3), bias(3), bias(3)),
        "layer_norm": lambda: cells.LayerNormLSTM(
            kernel(4), recurrent(4), bias(4), bias(4), bias(4), normal(rng, UNITS), normal(rng, UNITS)
        ),
        "min_gru": lambda: cells.MinGRU(kernel(2), bias(2), activation="tanh"),
        "min_lstm": lambda: cells.MinLSTM(kernel(3), bias(3)),
        "min_lstm_plain": lambda: cells.MinLSTM(kernel(3), activation="tanh", normalised=False),
        "lru": lambda: cells.LRU(
            normal(rng, UNITS), normal(rng, UNITS), normal(rng, UNITS), *(normal(rng, FEATURES, UNITS) for _ in "ri")
        ),
        "ind_rnn": lambda: cells.IndRNN(kernel(1), normal(rng, UNITS), bias(1), activation="tanh"),
        "ind_rnn_softmax": lambda: cells.IndRNN(kernel(1), normal(rng, UNITS), activation="softmax"),
    }[name]()


NAMES = [
    *(
        "peephole",
        "peephole_clipped",
        "peephole_bare",
        "cifg",
        "layer_norm",
        "min_gru",
        "min_lstm",
        "min_lstm_plain",
        "lru",
    ),
    *("ind_rnn", "ind_rnn_softmax"),
]
DIAGONAL = ("min_gru", "min_lstm", "min_lstm_plain", "ind_rnn", "lru")
by_name = pytest.mark.parametrize("name", NAMES)


def make_inputs(cell, masked):
    rng = np.random.default_rng(1)
    x = normal(rng, BATCH, TIME, FEATURES)
    start = [normal(rng, BATCH, n) for n in cell.state_sizes]
    direct = [normal(rng, BATCH, TIME, n) for n in cell.state_sizes]
    return x, start, direct, MASK if masked else None


def loss_of(cell, x, start, direct, mask, order="forward"):
    """Return the sum of all states, weighted by ``direct``, of a loop over the steps."""
    state, total = list(start), 0.0
    steps = range(TIME) if order == "forward" else range(TIME - 1, -1, -1)
    for t in steps:
        _, new = cell.step(cell.project(x[:, t], None, np), state, None, np)
        valid = np.ones((BATCH, 1), bool) if mask is None else mask[:, t, None]
        state = [np.where(valid, n, s) for n, s in zip(new, state, strict=True)]
        total = total + sum((s * d[:, t]).sum() for s, d in zip(state, direct, strict=True))
    return total


def complex_gradient(function, array):
    gradient = np.zeros(array.shape)
    for index in np.ndindex(*array.shape):
        perturbed = array.astype(complex)
        perturbed[index] += 1j * STEP
        gradient[index] = function(perturbed).imag / STEP
    return gradient


def assert_close(actual, expected, tolerance=1e-9):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


@by_name
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("order", ["forward", "backward"])
def test_gradients_equal_the_complex_step(name, masked, order):
    cell = make_cell(name)
    x, start, direct, mask = make_inputs(cell, masked)
    run = replay(cell, x, tuple(start), mask=mask, order=order)
    result = adjoint(run, direct)
    assert_close(result.input_grad, complex_gradient(lambda v: loss_of(cell, v, start, direct, mask, order), x))
    for i, grad in enumerate(result.initial_state_grad):
        loss_at = lambda v, i=i: loss_of(cell, x, [*start[:i], v, *start[i + 1 :]], direct, mask, order)  # noqa: E731
        assert_close(grad, complex_gradient(loss_at, start[i]))
    weight_grads = weight_gradients(run, result)
    assert set(weight_grads) == set(cell.weights())
    by_time = weight_gradients(run, result, by_time=True)
    combined = weight_gradients(run, result, probes=8)
    complex_cell = cell.with_weights(lambda w: w.astype(complex))
    for weight, value in cell.weights().items():
        loss_at = lambda v, weight=weight: loss_of(complex_cell.holding({weight: v}), x, start, direct, mask, order)  # noqa: E731
        expected = complex_gradient(loss_at, value)
        assert_close(weight_grads[weight], expected)
        assert_close(by_time[weight].sum(0), expected)
        assert_close(combined[weight], probe_combinations({weight: expected}, 8)[weight])
    spent = adjoint(run, direct, spend=True)
    np.testing.assert_array_equal(spent.gate_grad, result.gate_grad)
    np.testing.assert_array_equal(spent.input_grad, result.input_grad)


@by_name
def test_a_replay_from_the_known_output_is_the_same(name):
    cell = make_cell(name)
    x, start, _, mask = make_inputs(cell, True)
    run = replay(cell, x, tuple(start), mask=mask)
    replayed = replay(cell, x, tuple(start), mask=mask, hidden=run.states[0])
    assert replayed.residual < 1e-12
    for state, expected in zip(replayed.states, run.states, strict=True):
        assert_close(state, expected, 1e-12)


@by_name
def test_all_array_libraries_agree(name):
    def run_with(convert):
        cell = make_cell(name).with_weights(convert)
        x, start, direct, mask = make_inputs(make_cell(name), True)
        run = replay(cell, convert(x), tuple(map(convert, start)), mask=convert(mask))
        result = adjoint(run, [convert(d) for d in direct])
        return [*run.states, *result.state_grads, result.input_grad, *weight_gradients(run, result).values()]

    numpy_results = run_with(np.asarray)
    for results in (run_with(torch.asarray), run_with(array_api_strict.asarray)):
        for actual, expected in zip(results, numpy_results, strict=True):
            assert_close(actual, expected, 1e-12)


@by_name
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_the_linear_system_is_that_of_the_complex_step(name, masked):
    cell = make_cell(name)
    x, start, _, mask = make_inputs(cell, masked)
    run = replay(cell, x, tuple(start), mask=mask)
    system = run.linear_system()
    steps = system.build(0, TIME, slice(0, BATCH), inputs=True)
    total, cuts = sum(cell.state_sizes), np.cumsum(cell.state_sizes)[:-1]
    for t in range(TIME):
        rows = np.broadcast_to(np.eye(total), (BATCH, total, total)).copy()
        out = np.zeros((BATCH, total, total + FEATURES))
        steps[t].to_total_gradients(rows, total)
        steps[t].pull(rows, out, inputs=True)
        before = np.concatenate(run.state_before(t), axis=1)
        for b in range(BATCH):
            if mask is not None and not mask[b, t]:
                expected = np.concatenate([np.eye(total), np.zeros((total, FEATURES))], axis=1)
            else:
                state_and_input = np.concatenate([before[b], x[b, t]])
                columns = []
                for i in range(len(state_and_input)):
                    perturbed = state_and_input.astype(complex)
                    perturbed[i] += 1j * STEP
                    state = np.split(perturbed[None, :total], cuts, axis=1)
                    new_states = cell.step(cell.project(perturbed[None, total:], None, np), state, None, np)[1]
                    columns.append(np.concatenate(new_states, axis=1)[0].imag / STEP)
                expected = np.stack(columns, axis=1)
            assert_close(out[b], expected)


@pytest.mark.parametrize("name", DIAGONAL)
def test_diagonal_recurrences_never_build_a_matrix(name):
    cell = make_cell(name)
    x, start, _, _ = make_inputs(cell, False)
    system = replay(cell, x, tuple(start)).linear_system()
    states = sum(cell.state_sizes)
    assert system.numbers(False) <= states
    assert system.pattern(0) is not None


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("lru", "ind_rnn_softmax")])
def test_gradients_by_gate_values_are_those_by_what_the_gates_are_made_of(name):
    """For unsaturated smooth activations dL/dz = act'(z) dL/da, with gate gradients dL/da and pre-activations z."""
    cell = make_cell(name)
    x, start, direct, mask = make_inputs(cell, True)
    run = replay(cell, x, tuple(start), mask=mask)
    result = adjoint(run, direct)
    z, a = run.preactivation, run.gates
    slopes = np.where(np.abs(a - np.tanh(z)) < 1e-12, 1 - a**2, np.where(np.abs(a - z) < 1e-12, 1.0, a * (1 - a)))
    values = np.where(MASK[:, :, None, None], cell.gate_gradient(run, result), 0)
    assert_close(values * slopes, result.gate_grad)


@by_name
def test_words_and_shapes_agree(name):
    cell = make_cell(name)
    for weight, value in cell.weights().items():
        dims = cell.parameters[weight].dims
        assert len(value.shape) == len(dims) - ("gate" in dims)
    assert len(cell.state_names) == len(cell.state_sizes)
    assert cells.cell_of_kind(cell.kind) is type(cell)
