"""The BPTT adjoint: total gradients of a recurrent layer's states, gates and inputs from the direct gradients.

    lambda_t = dL/ds_t|direct + A_{t+1}^T lambda_{t+1},   dL/dx_t = B_t^T lambda_t,   masked step: A = I, B = 0

Werbos 1990, doi:10.1109/5.58337; in this notation Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eqs. 3-5.

:func:`adjoint` is for cells with known equations. :func:`adjoint_custom` is for cells whose steps the framework
differentiates, in the cheaper of two ways: the Jacobians of all (sample, time) steps are computed in one vectorised
batch and multiplied in sequence; or, if they do not fit into memory, each step has its own vector-Jacobian product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import cast

import numpy as np

from ..typing import Array, Namespace
from .arrays import for_each, large_parts, raise_if_cancelled, walk_parts, without_subnormal
from .cells import StepCell, affine
from .replay import Replay
from .sweep_rows import FLUSH_EVERY
from .trajectory import Adjoint, States, carry_masked

#: Largest total size of all step Jacobians, in bytes, for which they are computed at once.
FOLD_LIMIT = 256 * 2**20
#: Number of random combinations of a kernel's rows that checks compare; they reveal an error in any weight.
PROBES = 8


def adjoint(
    run: Replay,
    state_cotangent: Array | Sequence[Array | None],
    final_state_cotangent: Sequence[Array] | None = None,
    *,
    spend: bool = False,
) -> Adjoint:
    """Compute total gradients from direct gradients by BPTT, for a cell with known equations.

    Parameters
    ----------
    state_cotangent : (sample, time, unit) array, or a sequence of one (or None) per state
        Direct gradients dL/ds_t: only through the layers above. A single array belongs to the first state.
    final_state_cotangent : one (sample, size) array per state, optional
        Direct gradients of the final states that the layer returned; zeros by default.
    spend
        Whether ``gate_grad`` overwrites the pre-activations of ``run``, which must not be used afterwards. It avoids a
        large allocation.
    """
    if run.record is None:
        raise TypeError("adjoint() sweeps cells with equations; a cell of the framework goes through adjoint_custom()")
    xp, record = run.xp, run.record
    # Products of few rows with the transpose of a NumPy weight are twice as fast in column-major order.
    columns_first = run.cell.with_weights(lambda w: np.asfortranarray(w) if isinstance(w, np.ndarray) else w)
    run = replace(run, cell=columns_first)
    if isinstance(state_cotangent, (tuple, list)):
        direct = tuple(state_cotangent)
    else:
        direct = (state_cotangent, *[None] * (len(run.states) - 1))
    final = final_or_zero(run, final_state_cotangent)
    result = Adjoint(
        tuple(xp.empty_like(s) for s in run.states),
        record.preactivation if spend else xp.empty_like(record.preactivation),
        xp.empty_like(run.input),
        tuple(xp.empty_like(s) for s in final),
        returned_grads=None if run.cell.autodiff is None else tuple(xp.empty_like(s) for s in run.states),
    )

    def sweep_samples(samples: slice) -> None:
        part_direct = tuple(None if d is None else d[samples, ...] for d in direct)
        _sweep(run.of_samples(samples), part_direct, tuple(f[samples, ...] for f in final), result.of_samples(samples))

    batch, _, *sizes = run.states[0].shape
    for_each(sweep_samples, walk_parts(batch, math.prod(sizes), xp=xp), xp=xp)
    return result


def _sweep(run: Replay, direct: Sequence[Array | None], carry: tuple[Array, ...], out: Adjoint) -> None:
    """Run BPTT from the last step of the recurrence to the first, and write the gradients to ``out``."""
    xp, cell, record = run.xp, run.cell, run.known_record
    gate_grad: Array = out.gate_grad

    def pull(t: int, cotangent: States) -> tuple[Array, ...]:
        step_record, states_after = record.at((slice(None), t, ...)), tuple(s[:, t, ...] for s in run.states)
        dz, previous_grads, total = cell.pull_back(
            step_record, run.state_before(t), states_after, cotangent, run.state_scale, xp
        )
        is_real = None if run.mask is None else run.mask[:, t]
        gate_grad[:, t, ...] = dz if is_real is None else carry_masked(dz, xp.zeros_like(dz), is_real, xp)
        for grads, value in zip(out.returned_grads or (), cotangent, strict=False):
            grads[:, t, ...] = value
        for grads, new_grad, state_grad in zip(out.state_grads, total, cotangent, strict=True):
            grads[:, t, ...] = carry_masked(new_grad, state_grad, is_real, xp)
        return previous_grads

    carry = _pull_back_steps(run, direct, carry, pull)
    flat = affine.join_gates(gate_grad, xp)
    out.input_grad[...] = cell.input_gradient(run.input, flat, run.input_scale, xp)
    for target, value in zip(out.initial_state_grad, carry, strict=True):
        target[...] = value


def _pull_back_steps(
    run: Replay,
    direct: Sequence[Array | None],
    carry: tuple[Array, ...],
    pull: Callable[[int, States], tuple[Array, ...]],
) -> tuple[Array, ...]:
    """Pull cotangents back from the last step of the recurrence to the first; return dL/ds_0.

    ``pull(t, cotangent)`` returns the cotangents before step t from those after it. They end at every step where
    user code changes the states between the steps.
    """
    xp, last_step = run.xp, next(run.steps(reverse=True))
    for t in run.steps(reverse=True):
        raise_if_cancelled()
        if run.start_states is not None and t != last_step:
            carry = tuple(xp.zeros_like(c) for c in carry)
        if t % FLUSH_EVERY == 0:
            carry = tuple(without_subnormal(c, xp) for c in carry)
        cotangent = tuple(c if d is None else c + d[:, t, ...] for c, d in zip(carry, direct, strict=True))
        is_real = None if run.mask is None else run.mask[:, t]
        carry = tuple(
            carry_masked(new_carry, cotangent_part, is_real, xp)
            for new_carry, cotangent_part in zip(pull(t, cotangent), cotangent, strict=True)
        )
    return carry


def weight_gradients(
    run: Replay, result: Adjoint, *, by_time: bool = False, times: slice = slice(None), probes: int = 0
) -> dict[str, Array]:
    """Return dL/dW by the names of a cell's weights, summed over samples and time.

    With ``by_time`` gradients have a leading time axis instead of the sum over time. For a cell with known equations,
    ``times`` restricts the sum, or that axis, to some steps, and with ``probes`` > 0 the gradients of kernels are that
    many random combinations of their rows (:class:`affine.Contraction`), compared with :func:`probe_combinations`.
    """
    if run.cell.by_framework and times == slice(None):
        return _weight_gradients_by_framework(run, result, by_time)
    if run.record is None or result.gate_grad is None:
        raise TypeError("weight_gradients() needs the gates of the cell and their gradients")
    contraction, xp, (batch, time, *sizes) = affine.Contraction(by_time, probes), run.xp, result.gate_grad.shape
    by_start: dict[int, dict[str, Array]] = {}

    def differentiate_samples(samples: slice) -> None:
        part_run, part_adjoint = run.of_samples(samples), result.of_samples(samples)
        by_start[samples.start] = part_run.cell.weight_gradients(part_run, part_adjoint, contraction, times)

    for_each(differentiate_samples, large_parts(batch, len(range(time)[times]) * math.prod(sizes), xp=xp), xp=xp)
    first_part, *other_parts = (by_start[start] for start in sorted(by_start))
    return {name: sum((grads[name] for grads in other_parts), start=grad) for name, grad in first_part.items()}


def probe_combinations(weights: Mapping[str, Array], probes: int = PROBES) -> dict[str, Array]:
    """Reduce weight gradients to the random combinations that ``weight_gradients(..., probes=probes)`` returns."""
    contraction = affine.Contraction(probes=probes)
    return {
        name: affine.probe_rows(w.shape[0], w, contraction) @ w if len(w.shape) == 2 else w
        for name, w in weights.items()
    }


def final_or_zero(run: Replay, final: Sequence[Array] | None) -> tuple[Array, ...]:
    """Return the cotangents of the final states with which BPTT starts; zeros if ``final`` is None."""
    if final is not None:
        return tuple(final)
    return tuple(run.xp.zeros_like(s) for s in run.initial_state)


def unmasked_output_cotangent(run: Replay, output_grad: Array, masked_output: str) -> tuple[Array, Array | None]:
    """Move output gradients at masked steps to the value that the layer returned there.

    Returns the gradient of each step's own output, and the gradient of the state carried over, or None. The second is
    None unless the layer returns that state at masked steps (``masked_output="state"``).
    """
    xp, mask, step_grads = run.xp, run.mask, run.at_real_steps(output_grad)
    if mask is None or masked_output == "zero":
        return step_grads, None
    if masked_output == "state":
        return step_grads, xp.where(mask[:, :, None], xp.zeros_like(output_grad), output_grad)
    pending = xp.zeros_like(output_grad[:, 0, :])
    for t in run.steps(reverse=True):
        pending = pending + output_grad[:, t, :]
        is_real = mask[:, t, None]
        step_grads[:, t, :] = xp.where(is_real, pending, xp.zeros_like(pending))
        pending = xp.where(is_real, xp.zeros_like(pending), pending)
    return step_grads, None


def adjoint_custom(
    run: Replay,
    state_cotangent: Sequence[Array | None],
    output_cotangent: Array | None,
    final_state_cotangent: Sequence[Array] | None = None,
) -> Adjoint:
    """Compute total gradients from direct gradients by BPTT, for a cell that the framework differentiates.

    Parameters
    ----------
    state_cotangent : one (sample, time, size) array or None per state
        Direct gradients of the states as they leave each step.
    output_cotangent : (sample, time, output_size) or None
        Direct gradients of each step's output if the output is not a state.
    """
    xp, cell = run.xp, cast(StepCell, run.cell)
    vjp = _step_vjp(run, cell)
    if output_cotangent is None:
        batch, time = run.input.shape[:2]
        output_cotangent = xp.zeros(
            (batch, time, cell.output_size), dtype=run.states[0].dtype, device=getattr(run.input, "device", None)
        )
    state_grads = tuple(xp.empty_like(s) for s in run.states)
    input_grad = xp.empty_like(run.input)

    def pull(t: int, cotangent: States) -> tuple[Array, ...]:
        input_grad[:, t, :], previous_grads = vjp(t, output_cotangent[:, t, :], cotangent)
        for grads, value in zip(state_grads, cotangent, strict=True):
            grads[:, t, :] = value
        return previous_grads

    carry = _pull_back_steps(run, state_cotangent, final_or_zero(run, final_state_cotangent), pull)
    produced = _produced_gradients(run, state_grads, output_cotangent)
    return Adjoint(produced, None, run.at_real_steps(input_grad), carry, output_cotangent, state_grads)


def _produced_gradients(run: Replay, returned: tuple[Array, ...], output: Array) -> tuple[Array, ...]:
    """Return total gradients of states, given those of returned states: add paths within the step, as c_t to h_t."""
    xp, cell = run.xp, cast(StepCell, run.cell)
    previous_states = [_fold(s, xp) for s in run.states_before()]
    flat = cell.produced(_fold(run.input, xp), previous_states, _fold(output, xp), [_fold(g, xp) for g in returned])
    pairs = zip(flat, returned, strict=True)
    return tuple(
        carry_masked(xp.reshape(produced_grad, returned_grad.shape), returned_grad, run.mask, xp)
        for produced_grad, returned_grad in pairs
    )


def _weight_gradients_by_framework(run: Replay, result: Adjoint, by_time: bool) -> dict[str, Array]:
    """Return dL/dW of a cell run by the framework, by its weight names; with a leading time axis if ``by_time``."""
    xp, previous_states = run.xp, run.states_before()
    grads = tuple(map(run.at_real_steps, result.returned_grads or result.state_grads))
    assert result.output_cotangent is not None
    output, cell = run.at_real_steps(result.output_cotangent), cast(StepCell, run.cell)
    if not by_time:
        folded = [_fold(s, xp) for s in previous_states], _fold(output, xp), [_fold(g, xp) for g in grads]
        return dict(cell.weight_vjp(_fold(run.input, xp), *folded))
    per_step = [
        cell.weight_vjp(run.input[:, t], [s[:, t] for s in previous_states], output[:, t], [g[:, t] for g in grads])
        for t in range(run.input.shape[1])
    ]
    return {name: xp.stack([step[name] for step in per_step]) for name in per_step[0]}


def _fold(a: Array, xp: Namespace) -> Array:
    """Fold samples and steps into one axis: (sample, time, n) to (sample * time, n)."""
    return xp.reshape(a, (a.shape[0] * a.shape[1], *a.shape[2:]))


def _step_vjp(run: Replay, cell: StepCell) -> Callable[[int, Array, States], tuple[Array, tuple[Array, ...]]]:
    """Return the vector-Jacobian product of a step, from dL/dy_t and dL/ds_t to dL/dx_t and dL/ds_{t-1}.

    It multiplies with step Jacobians that are computed for all steps at once, or is the framework's own.
    """
    xp, (batch, time, features) = run.xp, run.input.shape
    rows, states = sum(cell.state_sizes) + cell.output_size, sum(cell.state_sizes)
    # A Jacobian costs one pull-back per row, so it is worthwhile only if rows do not far outnumber steps.
    if batch * time * rows * (states + features) * 8 > FOLD_LIMIT or rows > 4 * time:
        return lambda t, output, state: cell.vjp(run.input[:, t, :], run.state_before(t), output, state)
    jacobians = cell.jacobian(_fold(run.input, xp), [_fold(s, xp) for s in run.states_before()])
    by_state, by_input = (xp.reshape(j, (batch, time, *j.shape[1:])) for j in jacobians)
    boundaries = list(accumulate(cell.state_sizes, initial=0))

    def vjp(t: int, output: Array, state: States) -> tuple[Array, tuple[Array, ...]]:
        row = xp.concat([*state, output], axis=-1)[:, None, :]
        carry = (row @ by_state[:, t, :, :])[:, 0, :]
        dx = (row @ by_input[:, t, :, :])[:, 0, :]
        return dx, tuple(carry[:, start:end] for start, end in pairwise(boundaries))

    return vjp
