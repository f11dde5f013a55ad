"""What must hold of every recurrence, whatever its sizes, weights and masks."""

import cells
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnlens.recurrence.adjoint import adjoint, weight_gradients
from rnnlens.recurrence.replay import replay

GATES = {"simple_rnn": 1, "lstm": 4, "gru": 3}


@st.composite
def problems(draw):
    """A cell with data, initial state, mask and cotangents."""
    kind = draw(st.sampled_from(sorted(GATES)))
    batch, time, features, units = (draw(st.integers(1, n)) for n in (3, 6, 3, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = GATES[kind] * units
    cell = cells.make(
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


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * max(1.0, np.abs(b).max(initial=0.0)))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_adjoint_is_linear_in_what_comes_from_above(problem):
    cell, x, state, mask, rng = problem
    run = replay(cell, x, state, mask=mask)
    one, two = rng.normal(size=run.states[0].shape), rng.normal(size=run.states[0].shape)
    both, first, second = adjoint(run, 2 * one - 3 * two), adjoint(run, one), adjoint(run, two)
    close(both.input_grad, 2 * first.input_grad - 3 * second.input_grad)
    close(both.gate_grad, 2 * first.gate_grad - 3 * second.gate_grad)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_running_backwards_is_running_forwards_on_reversed_time(problem):
    cell, x, state, mask, rng = problem
    direct = rng.normal(size=(*x.shape[:2], cell.units))
    forward = replay(cell, x, state, mask=mask)
    turned_mask = None if mask is None else mask[:, ::-1]
    backward = replay(cell, x[:, ::-1], state, mask=turned_mask, order="backward")
    close(backward.states[0][:, ::-1], forward.states[0])
    one, two = adjoint(forward, direct), adjoint(backward, direct[:, ::-1])
    close(two.input_grad[:, ::-1], one.input_grad)
    close(two.state_grads[-1][:, ::-1], one.state_grads[-1])


@settings(max_examples=60, deadline=None)
@given(problems())
def test_what_is_masked_neither_moves_nor_is_moved(problem):
    cell, x, state, _, rng = problem
    mask = rng.random(x.shape[:2]) > 0.5
    direct = rng.normal(size=(*x.shape[:2], cell.units))
    run = replay(cell, x, state, mask=mask)
    other = replay(cell, np.where(mask[:, :, None], x, 1e3), state, mask=mask)
    np.testing.assert_array_equal(other.states[0], run.states[0])
    result = adjoint(run, direct)
    assert not result.input_grad[~mask].any()
    assert not result.gate_grad[~mask].any()


@settings(max_examples=60, deadline=None)
@given(problems())
def test_samples_do_not_see_each_other_and_weight_gradients_add_up(problem):
    cell, x, state, mask, rng = problem
    direct = rng.normal(size=(*x.shape[:2], cell.units))
    run = replay(cell, x, state, mask=mask)
    whole = adjoint(run, direct)
    total = weight_gradients(run, whole)
    sums = {name: np.zeros_like(value) for name, value in total.items()}
    for b in range(x.shape[0]):
        one = slice(b, b + 1)
        alone = replay(cell, x[one], [s[one] for s in state], mask=None if mask is None else mask[one])
        result = adjoint(alone, direct[one])
        close(result.input_grad, whole.input_grad[one])
        for name, value in weight_gradients(alone, result).items():
            sums[name] += value
    for name, value in total.items():
        close(sums[name], value)
        close(weight_gradients(run, whole, by_time=True)[name].sum(0), value)
