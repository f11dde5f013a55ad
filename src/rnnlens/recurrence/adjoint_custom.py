"""The BPTT adjoint of a cell whose equations are not known: the framework differentiates single steps, we chain them.

Two ways, the cheaper one is taken. *Folded*: the Jacobians of all (sample, time) steps in one vectorised batch, chained
by matrix products. *Stepwise*: one vector-Jacobian product per step, where those Jacobians would not fit into memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from .adjoint import Adjoint, final_or_zero
from .arrays import Array, Namespace
from .cells import StepCell
from .replay import Replay

#: Largest size of all per-step Jacobians together, in bytes, up to which they are built.
FOLD_LIMIT = 256 * 2**20


def output_is_state(run: Replay) -> bool:
    """Whether a custom cell puts out one of its states, as most do, so that dL/dy_t belongs to dL/ds_t.

    Equal values do not tell: in ``h + gain * x`` the gain may be zero just now.
    """
    return run.step_output is None or run.cell.output_is_state


def unmasked_output_cotangent(run: Replay, output_grad: Array, masked_output: str) -> tuple[Array, Array | None]:
    """Move the gradient at masked outputs to where the framework took those outputs from.

    Returns the gradient of each step's own output, and what belongs to the state carried over instead.
    """
    xp, mask = run.xp, run.mask
    if mask is None:
        return output_grad, None
    zero = xp.zeros_like(output_grad)
    kept = xp.where(mask[:, :, None], output_grad, zero)
    if masked_output == "zero":
        return kept, None
    if masked_output == "state":
        return kept, xp.where(mask[:, :, None], zero, output_grad)
    pending = xp.zeros_like(output_grad[:, 0, :])
    for t in run.steps(reverse=True):
        pending = pending + output_grad[:, t, :]
        real = mask[:, t, None]
        kept[:, t, :] = xp.where(real, pending, xp.zeros_like(pending))
        pending = xp.where(real, xp.zeros_like(pending), pending)
    return kept, None


def adjoint_custom(
    run: Replay,
    state_cotangent: Sequence[Array | None],
    output_cotangent: Array | None,
    final_state_cotangent: Sequence[Array] | None = None,
) -> Adjoint:
    """Sweep direct gradients back through a custom cell's recurrence.

    Parameters
    ----------
    state_cotangent : one (sample, time, size) array or None per state
        Direct gradients of the states as they leave each step.
    output_cotangent : (sample, time, output_size) or None
        Direct gradients of each step's output where that is not a state.
    """
    xp, cell = run.xp, cast(StepCell, run.cell)
    sweep = _Folded(run, cell) if _fits(run, cell) else _Stepwise(run, cell)
    if output_cotangent is None:
        batch, time = run.input.shape[:2]
        output_cotangent = xp.zeros((batch, time, cell.output_size), dtype=run.states[0].dtype, device=_device(run))
    carry = final_or_zero(run, final_state_cotangent)
    state_grads = tuple(xp.empty_like(s) for s in run.states)
    input_grad = xp.zeros_like(run.input)
    for t in run.steps(reverse=True):
        cotangent = tuple(c if d is None else c + d[:, t, :] for c, d in zip(carry, state_cotangent, strict=True))
        dx, carry = sweep.pull_back(t, output_cotangent[:, t, :], cotangent)
        if run.mask is not None:
            real = run.mask[:, t, None]
            carry = tuple(xp.where(real, new, old) for new, old in zip(carry, cotangent, strict=True))
            dx = xp.where(real, dx, xp.zeros_like(dx))
        input_grad[:, t, :] = dx
        for grads, value in zip(state_grads, cotangent, strict=True):
            grads[:, t, :] = value
    produced = _as_produced(run, state_grads, output_cotangent)
    return Adjoint(produced, None, input_grad, carry, output_cotangent, state_grads)


def _as_produced(run: Replay, returned: tuple[Array, ...], output: Array) -> tuple[Array, ...]:
    """Gradients of the states as the step produces them: c_t of an LSTM also moves the h_t of its own step."""
    xp, cell = run.xp, cast(StepCell, run.cell)
    before = [_fold(s, xp) for s in run.states_before()]
    flat = cell.produced(_fold(run.input, xp), before, _fold(output, xp), [_fold(g, xp) for g in returned])
    found = tuple(xp.reshape(new, old.shape) for new, old in zip(flat, returned, strict=True))
    if run.mask is None:
        return found
    real = run.mask[:, :, None]
    return tuple(xp.where(real, new, old) for new, old in zip(found, returned, strict=True))


def custom_weight_gradients(run: Replay, result: Adjoint, *, by_time: bool = False) -> Mapping[str, Array]:
    """dL/dW of a custom cell by the framework's names; with a leading time axis if ``by_time``."""
    xp, before = run.xp, run.states_before()
    grads, output = result.returned_grads or result.state_grads, cast(Array, result.output_cotangent)
    if run.mask is not None:
        real = run.mask[:, :, None]
        grads = tuple(xp.where(real, g, xp.zeros_like(g)) for g in grads)
        output = xp.where(real, output, xp.zeros_like(output))
    cell = cast(StepCell, run.cell)
    if not by_time:
        return cell.weight_vjp(
            _fold(run.input, xp), [_fold(s, xp) for s in before], _fold(output, xp), [_fold(g, xp) for g in grads]
        )
    per_step = [
        cell.weight_vjp(run.input[:, t], [s[:, t] for s in before], output[:, t], [g[:, t] for g in grads])
        for t in range(run.input.shape[1])
    ]
    return {name: xp.stack([step[name] for step in per_step]) for name in per_step[0]}


def _device(run: Replay) -> object:
    return getattr(run.input, "device", None)


def _fold(a: Array, xp: Namespace) -> Array:
    """(sample, time, n) to (sample * time, n)."""
    return xp.reshape(a, (a.shape[0] * a.shape[1], *a.shape[2:]))


def _fits(run: Replay, cell: StepCell) -> bool:
    batch, time, features = run.input.shape
    rows, states = sum(cell.state_sizes) + cell.output_size, sum(cell.state_sizes)
    # Building Jacobians costs one pull-back per row, so they pay only while rows do not outnumber steps by far.
    return bool(batch * time * rows * (states + features) * 8 <= FOLD_LIMIT and rows <= 4 * time)


class _Folded:
    """Pull back through Jacobians that were built for all steps at once."""

    def __init__(self, run: Replay, cell: StepCell) -> None:
        self.xp, self.sizes = run.xp, cell.state_sizes
        before = [_fold(s, run.xp) for s in run.states_before()]
        by_state, by_input = cell.jacobian(_fold(run.input, run.xp), before)
        lead = run.input.shape[:2]
        self.by_state = run.xp.reshape(by_state, (*lead, *by_state.shape[1:]))
        self.by_input = run.xp.reshape(by_input, (*lead, *by_input.shape[1:]))

    def pull_back(self, t: int, output: Array, state: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
        row = self.xp.concat([*state, output], axis=-1)[:, None, :]
        carry = (row @ self.by_state[:, t, :, :])[:, 0, :]
        dx = (row @ self.by_input[:, t, :, :])[:, 0, :]
        parts, start = [], 0
        for size in self.sizes:
            parts.append(carry[:, start : start + size])
            start += size
        return dx, tuple(parts)


class _Stepwise:
    """Pull back one step at a time."""

    def __init__(self, run: Replay, cell: StepCell) -> None:
        self.run, self.cell = run, cell

    def pull_back(self, t: int, output: Array, state: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
        return self.cell.vjp(self.run.input[:, t, :], self.run.state_before(t), output, state)
