"""Replay and adjoint of RNN, LSTM and GRU cells with all their options, against a dense complex-step reference."""

import itertools

import array_api_compat.numpy as np_xp
import array_api_strict
import cells
import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits

from rnnlens.errors import UnsupportedError
from rnnlens.recurrence.adjoint import adjoint, probe_combinations, weight_gradients
from rnnlens.recurrence.arrays import large_parts, walk_parts
from rnnlens.recurrence.cells import Cell, IndRNN, SimpleRNN
from rnnlens.recurrence.replay import distance, replay
from rnnlens.recurrence.trajectory import Scales
from rnnlens.testing import reference

BATCH, TIME, FEATURES, UNITS = 2, 4, 2, 3


def make_cell(kind, *, reset_after=True, bias=True, recurrent_bias=False, projection=False, rng, **activations):
    gates = {"simple_rnn": 1, "lstm": 4, "gru": 3}[kind] * UNITS
    hidden = 2 if projection else UNITS
    return cells.make_cell(
        kind,
        kernel=rng.normal(size=(FEATURES, gates)),
        recurrent_kernel=rng.normal(size=(hidden, gates)) * 0.7,
        bias=rng.normal(size=gates) if bias else None,
        recurrent_bias=rng.normal(size=gates) if recurrent_bias else None,
        projection=rng.normal(size=(UNITS, hidden)) if projection else None,
        reset_after=reset_after,
        **activations,
    )


def variants():
    for kind, reset_after, bias, recurrent_bias, projection in itertools.product(
        ("simple_rnn", "lstm", "gru"), *[(True, False)] * 4
    ):
        if (kind != "gru" and not reset_after) or (kind != "lstm" and projection):
            continue
        if kind == "gru" and not reset_after and recurrent_bias:
            continue
        yield {
            "kind": kind,
            "reset_after": reset_after,
            "bias": bias,
            "recurrent_bias": recurrent_bias,
            "projection": projection,
        }


def make_inputs(cell, rng, masked):
    x = rng.normal(size=(BATCH, TIME, FEATURES))
    mask = np.array([[True, False, True, True], [False, True, True, False]]) if masked else None
    s0 = [rng.normal(size=(BATCH, n)) for n in cell.state_sizes]
    dy = rng.normal(size=(BATCH, TIME, cell.state_sizes[0]))
    final = [rng.normal(size=s.shape) for s in s0]
    return x, mask, s0, dy, final


def assert_close(actual, expected, tolerance=1e-10):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * max(np.abs(expected).max(), 1e-300)


def assert_same_when_spent(run, unspent, spent):
    """Assert that ``spend=True``, which overwrites the pre-activations by their gradients, changes no gradient."""
    assert np.shares_memory(spent.gate_grad, run.record.preactivation)
    for name in ("state_grads", "initial_state_grad", "gate_grad", "input_grad"):
        for unspent_grad, spent_grad in zip(getattr(unspent, name), getattr(spent, name), strict=True):
            np.testing.assert_array_equal(unspent_grad, spent_grad)


@pytest.mark.parametrize("variant", list(variants()), ids=lambda v: "-".join(str(x) for x in v.values()))
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("known_hidden", [False, True], ids=["in_sequence", "at_once"])
def test_adjoint_equals_dense_reference(variant, masked, order, known_hidden):
    rng = np.random.default_rng(7)
    cell = make_cell(**variant, rng=rng)
    x, mask, s0, dy, final = make_inputs(cell, rng, masked)
    expected = reference.bptt(cell, x, s0, dy, mask=mask, backward=order == "backward", final_state_grad=final)
    hidden = expected.states[0] if known_hidden else None

    run = replay(cell, x, s0, mask=mask, order=order, hidden=hidden)
    result = adjoint(run, dy, final)

    for array, expected_array in zip(run.states, expected.states, strict=True):
        assert_close(array, expected_array)
    for array, expected_array in zip(result.state_grads, expected.state_grads, strict=True):
        assert_close(array, expected_array)
    for array, expected_array in zip(result.initial_state_grad, expected.initial_state_grad, strict=True):
        assert_close(array, expected_array)
    assert_close(result.input_grad, expected.input_grad)
    assert run.residual <= 1e-12
    assert_same_when_spent(run, result, adjoint(run, dy, final, spend=True))


@pytest.mark.parametrize("variant", list(variants()), ids=lambda v: "-".join(str(x) for x in v.values()))
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_weight_gradients_equal_complex_step(variant, masked):
    rng = np.random.default_rng(8)
    cell = make_cell(**variant, rng=rng)
    x, mask, s0, dy, final = make_inputs(cell, rng, masked)
    run = replay(cell, x, s0, mask=mask)
    result = adjoint(run, dy, final)
    cotangent = list(result.state_grads)
    if cell.kind == "lstm":
        through_hidden = np.zeros_like(cotangent[1])
        before = run.states_before()
        for b, t in np.ndindex(BATCH, TIME):
            if mask is None or mask[b, t]:
                state = [s[b, t] for s in before]
                through_hidden[b, t] = reference.through_hidden(cell, x[b, t], state).T @ cotangent[0][b, t]
        cotangent[1] = cotangent[1] - through_hidden
    expected = reference.weight_gradients(cell, x, run.states_before(), cotangent, mask=mask)

    summed, by_time = weight_gradients(run, result), weight_gradients(run, result, by_time=True)

    combined, expected_combined = weight_gradients(run, result, probes=8), probe_combinations(expected, 8)
    for name, expected_grad in expected_combined.items():
        assert_close(combined[name], expected_grad)
        assert combined[name].shape == (
            (8, expected[name].shape[1]) if expected[name].ndim == 2 else expected_grad.shape
        )
    assert set(summed) == set(expected) == set(cell.weights())
    for name, expected_grad in expected.items():
        assert_close(summed[name], expected_grad)
        assert_close(by_time[name].sum(0), expected_grad)
        assert by_time[name].shape == (TIME, *expected_grad.shape)


@pytest.mark.parametrize("variant", list(variants()), ids=lambda v: "-".join(str(x) for x in v.values()))
def test_all_array_libraries_agree(variant):
    rng = np.random.default_rng(9)
    cell = make_cell(**variant, rng=rng)
    x, mask, s0, dy, final = make_inputs(cell, rng, True)

    def run_with(convert):
        run = replay(cell.with_weights(convert), convert(x), [convert(s) for s in s0], mask=convert(mask))
        result = adjoint(run, convert(dy), [convert(f) for f in final])
        grads = weight_gradients(run, result)
        return [*run.states, run.gates, *result.state_grads, result.gate_grad, result.input_grad, *grads.values()]

    numpy_results = run_with(np.asarray)
    for results in (run_with(torch.asarray), run_with(array_api_strict.asarray)):
        for actual, expected in zip(results, numpy_results, strict=True):
            assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize("kind", ["simple_rnn", "lstm", "gru"])
@pytest.mark.parametrize("activation", sorted(set(reference.ACTIVATIONS) - {"exponential"}))
def test_adjoint_with_every_activation_of_the_reference(kind, activation):
    rng = np.random.default_rng(10)
    recurrent = "sigmoid" if activation in ("softmax", "log_softmax", "linear") else activation
    cell = make_cell(kind, rng=rng, activation=activation, recurrent_activation=recurrent)
    x, _, s0, dy, final = make_inputs(cell, rng, False)
    expected = reference.bptt(cell, x, s0, dy, final_state_grad=final)
    run = replay(cell, x, s0)
    result = adjoint(run, dy, final)
    for state_grad, expected_grad in zip(result.state_grads, expected.state_grads, strict=True):
        assert_close(state_grad, expected_grad)
    assert_close(result.input_grad, expected.input_grad)
    assert_same_when_spent(run, result, adjoint(run, dy, final, spend=True))


def test_dropout_multipliers_per_gate_and_shared():
    rng = np.random.default_rng(11)
    for kind, shape in itertools.product(("simple_rnn", "lstm", "gru"), ("shared", "per_gate")):
        cell = make_cell(kind, rng=rng, reset_after=False)
        gates = len(cell.gates)
        leading_shape = () if shape == "shared" else (gates,)
        x, _, s0, dy, final = make_inputs(cell, rng, False)
        scales = Scales(
            rng.integers(0, 2, size=(*leading_shape, BATCH, FEATURES)) * 2.0,
            rng.integers(0, 2, size=(*leading_shape, BATCH, UNITS)) * 2.0,
        )
        run = replay(cell, x, s0, scales=scales)
        result = adjoint(run, dy, final)
        direction = rng.normal(size=x.shape)

        def loss(shift, cell=cell, s0=s0, x=x, direction=direction, scales=scales, dy=dy, final=final):
            shifted_run = replay(cell, x + shift * direction, s0, scales=scales)
            return (shifted_run.states[0] * dy).sum() + sum(
                (s[:, -1] * f).sum() for s, f in zip(shifted_run.states, final, strict=True)
            )

        slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
        assert_close((result.input_grad * direction).sum(), slope, 1e-7)
        assert_close(replay(cell, x, s0, hidden=run.states[0], scales=scales).gates, run.gates, 1e-13)


def test_a_residual_counts_nan_on_one_side_only():
    nan, ones = np.array([[[1.0, np.nan, 3.0]]]), np.array([[[1.5, 2.0, 3.0]]])
    assert distance(ones, ones + 0.25, None, np_xp) == (0.25, 3.25)
    assert distance(np.where(np.isnan(nan), nan, ones), nan, None, np_xp) == (0.5, 3.0)
    assert distance(ones, nan, None, np_xp)[0] == np.inf
    assert distance(nan, ones, None, np_xp)[0] == np.inf
    assert distance(nan, ones, np.array([[False]]), np_xp) == (0.0, 3.0)


def test_one_wrong_weight_shows_in_the_combinations_of_rows():
    rng = np.random.default_rng(12)
    weights = {"kernel": rng.normal(size=(50, 40))}
    wrong_weights = {"kernel": weights["kernel"].copy()}
    wrong_weights["kernel"][31, 7] += 1e-3
    difference = probe_combinations(wrong_weights, 8)["kernel"] - probe_combinations(weights, 8)["kernel"]
    np.testing.assert_allclose(np.abs(difference[:, 7]), 1e-3)
    assert not np.delete(difference, 7, axis=1).any()


def test_large_batches_are_dealt_out_and_give_the_same():
    rng = np.random.default_rng(13)
    cell = make_cell("lstm", rng=rng)
    batch, time = 3000, 10
    x, s0 = rng.normal(size=(batch, time, FEATURES)), [rng.normal(size=(batch, UNITS)) for _ in range(2)]
    dy, mask = rng.normal(size=(batch, time, UNITS)), rng.random((batch, time)) > 0.2
    run = replay(cell, x, s0, mask=mask)
    with threadpool_limits(2, user_api="blas"):
        assert len(walk_parts(batch, UNITS, xp=np_xp)) == 2
        assert len(large_parts(batch, time * 4 * UNITS, xp=np_xp)) == 2
        known_run = replay(cell, x, s0, mask=mask, hidden=run.states[0])
        result = adjoint(known_run, dy)
        dealt_grads = weight_gradients(known_run, result)
    with threadpool_limits(1, user_api="blas"):
        for name, grad in weight_gradients(known_run, result).items():
            assert_close(dealt_grads[name], grad, 1e-12)
    assert_close(known_run.gates, run.gates, 1e-13)
    for samples in (slice(0, 7), slice(1495, 1505), slice(2990, 3000)):
        partial_result = adjoint(replay(cell, x[samples], [s[samples] for s in s0], mask=mask[samples]), dy[samples])
        assert_close(partial_result.input_grad, result.input_grad[samples], 1e-13)
        assert_close(partial_result.state_grads[1], result.state_grads[1][samples], 1e-13)
        assert_close(partial_result.initial_state_grad[0], result.initial_state_grad[0][samples], 1e-13)


def test_the_reference_takes_no_cell_for_another(monkeypatch):
    unknown = IndRNN(np.ones((FEATURES, UNITS)), np.ones(UNITS))
    with pytest.raises(UnsupportedError, match="The reference has no equations of the cell 'ind_rnn'") as caught:
        reference.step(unknown, np.ones(FEATURES), [np.ones(UNITS)])
    monkeypatch.setattr(reference, "EQUATIONS", dict(reference.EQUATIONS))
    statement = caught.value.hint.partition(",")[0]
    exec(f"import rnnlens.testing; {statement}", {"function": lambda cell, x, states: [2 * states[0]]})
    np.testing.assert_array_equal(reference.step(unknown, np.ones(FEATURES), [np.ones(UNITS)])[0], 2 * np.ones(UNITS))


def test_a_cell_without_derivatives_says_so_outside_of_a_framework():
    class Bare(SimpleRNN):
        pull_back = Cell.pull_back

    run = replay(Bare(np.ones((2, 3)), np.eye(3)), np.ones((1, 2, 2)), [np.zeros((1, 3))])
    with pytest.raises(UnsupportedError, match=r"write pull_back in its class, or rl\.cells\.register"):
        adjoint(run, np.ones((1, 2, 3)))
