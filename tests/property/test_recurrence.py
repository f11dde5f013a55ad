"""Properties of the adjoint and the replay of RNN, LSTM and GRU for random sizes, weights and masks."""

import cells
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnlens.recurrence.adjoint import adjoint, weight_gradients
from rnnlens.recurrence.replay import replay

GATES = {"simple_rnn": 1, "lstm": 4, "gru": 3}


@st.composite
def problems(draw):
    """Draw a cell with data, initial state, mask, and a random generator for cotangents."""
    kind = draw(st.sampled_from(sorted(GATES)))
    batch, time, features, units = (draw(st.integers(1, n)) for n in (3, 6, 3, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = GATES[kind] * units
    cell = cells.make_cell(
        kind,
        rng.normal(size=(features, width)),
        rng.normal(size=(units, width)) * draw(st.sampled_from([0.1, 1.0, 3.0])),
        rng.normal(size=width) if draw(st.booleans()) else None,
        reset_after=draw(st.booleans()),
    )
    x = rng.normal(size=(batch, time, features))
    mask = rng.random((batch, time)) > 0.3 if draw(st.booleans()) else None
    state = [rng.normal(size=(batch, n)) for n in cell.state_sizes]
    return cell, x, state, mask, rng


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * max(1.0, np.abs(b).max(initial=0.0)))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_adjoint_is_linear_in_what_comes_from_above(problem):
    cell, x, state, mask, rng = problem
    run = replay(cell, x, state, mask=mask)
    u, v = rng.normal(size=run.states[0].shape), rng.normal(size=run.states[0].shape)
    combined, from_u, from_v = adjoint(run, 2 * u - 3 * v), adjoint(run, u), adjoint(run, v)
    assert_close(combined.input_grad, 2 * from_u.input_grad - 3 * from_v.input_grad)
    assert_close(combined.gate_grad, 2 * from_u.gate_grad - 3 * from_v.gate_grad)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_running_backwards_is_running_forwards_on_reversed_time(problem):
    cell, x, state, mask, rng = problem
    cotangent = rng.normal(size=(*x.shape[:2], cell.units))
    forward = replay(cell, x, state, mask=mask)
    reversed_mask = None if mask is None else mask[:, ::-1]
    backward = replay(cell, x[:, ::-1], state, mask=reversed_mask, order="backward")
    assert_close(backward.states[0][:, ::-1], forward.states[0])
    forward_grads, backward_grads = adjoint(forward, cotangent), adjoint(backward, cotangent[:, ::-1])
    assert_close(backward_grads.input_grad[:, ::-1], forward_grads.input_grad)
    assert_close(backward_grads.state_grads[-1][:, ::-1], forward_grads.state_grads[-1])


@settings(max_examples=60, deadline=None)
@given(problems())
def test_what_is_masked_neither_moves_nor_is_moved(problem):
    cell, x, state, _, rng = problem
    mask = rng.random(x.shape[:2]) > 0.5
    cotangent = rng.normal(size=(*x.shape[:2], cell.units))
    run = replay(cell, x, state, mask=mask)
    perturbed_run = replay(cell, np.where(mask[:, :, None], x, 1e3), state, mask=mask)
    np.testing.assert_array_equal(perturbed_run.states[0], run.states[0])
    gradients = adjoint(run, cotangent)
    assert not gradients.input_grad[~mask].any()
    assert not gradients.gate_grad[~mask].any()


@settings(max_examples=60, deadline=None)
@given(problems())
def test_samples_do_not_see_each_other_and_weight_gradients_add_up(problem):
    cell, x, state, mask, rng = problem
    cotangent = rng.normal(size=(*x.shape[:2], cell.units))
    run = replay(cell, x, state, mask=mask)
    batch_grads = adjoint(run, cotangent)
    total = weight_gradients(run, batch_grads)
    sums = {name: np.zeros_like(value) for name, value in total.items()}
    for b in range(x.shape[0]):
        sample = slice(b, b + 1)
        sample_run = replay(cell, x[sample], [s[sample] for s in state], mask=None if mask is None else mask[sample])
        sample_grads = adjoint(sample_run, cotangent[sample])
        assert_close(sample_grads.input_grad, batch_grads.input_grad[sample])
        for name, value in weight_gradients(sample_run, sample_grads).items():
            sums[name] += value
    for name, value in total.items():
        assert_close(sums[name], value)
        assert_close(weight_gradients(run, batch_grads, by_time=True)[name].sum(0), value)
