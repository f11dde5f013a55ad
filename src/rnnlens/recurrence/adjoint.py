"""The BPTT adjoint: total gradients of every state, gate and input of a recurrent layer from the direct ones.

    lambda_t = dL/ds_t|direct + A_{t+1}^T lambda_{t+1},   dL/dx_t = B_t^T lambda_t,   masked step: A = I, B = 0

Werbos 1990, doi:10.1109/5.58337; in this notation Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eqs. 3-5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from .arrays import Array
from .cells import Record, affine
from .parallel import for_each, large_parts, still_wanted, walk_parts
from .replay import Replay


@dataclass
class Adjoint:
    """Total gradients, sample-first and chronological.

    Attributes
    ----------
    state_grads : one (sample, time, size) array per state
        dL/ds_t of each state as it is produced: all that the same step computes from it is included, as the path of
        an LSTM's c_t through h_t.
    gate_grad : (sample, time, gate, unit), None for a cell of the framework
        dL/dz_t, with respect to the pre-activations; of a cell without gates, to what its input is projected to.
    input_grad : (sample, time, feature)
    initial_state_grad : one (sample, size) array per state
    output_cotangent : (sample, time, unit), custom cells only
        The direct gradient of each step's output after masking was undone.
    returned_grads : as ``state_grads``, of cells that a framework differentiates only
        What arrives at the states as a step returns them, without their paths to each other within the step.
    """

    state_grads: tuple[Array, ...]
    gate_grad: Array | None
    input_grad: Array
    initial_state_grad: tuple[Array, ...]
    output_cotangent: Array | None = None
    returned_grads: tuple[Array, ...] | None = None

    def of_samples(self, some: slice) -> Adjoint:
        """The same gradients, of some of the samples; views, where the library has them."""
        return Adjoint(
            tuple(g[some, ...] for g in self.state_grads),
            None if self.gate_grad is None else self.gate_grad[some, ...],
            self.input_grad[some, ...],
            tuple(g[some, ...] for g in self.initial_state_grad),
            None if self.output_cotangent is None else self.output_cotangent[some, ...],
            None if self.returned_grads is None else tuple(g[some, ...] for g in self.returned_grads),
        )


def adjoint(
    run: Replay,
    state_cotangent: Array | Sequence[Array | None],
    final_state_cotangent: Sequence[Array] | None = None,
    *,
    spend: bool = False,
) -> Adjoint:
    """Sweep direct gradients back through the recurrence of a cell with equations.

    Parameters
    ----------
    state_cotangent : (sample, time, unit) array, or a sequence of one (or None) per state
        dL/ds_t, direct: through what sits above the layer only. A lone array belongs to the first state, the output.
    final_state_cotangent : one (sample, size) array per state, optional
        What comes back through the states that the layer returned after its last step.
    spend
        Put ``gate_grad`` where the pre-activations of ``run`` were, which nobody needs any more: large memory that was
        never touched takes longer to get than to fill.
    """
    if run.record is None:
        raise TypeError("adjoint() sweeps cells with equations; a cell of the framework goes through adjoint_custom()")
    xp, record = run.xp, run.record
    run = replace(run, cell=run.cell.with_weights(_columns_first))
    direct = per_state(state_cotangent, len(run.states))
    final = final_or_zero(run, final_state_cotangent)
    result = Adjoint(
        tuple(xp.empty_like(s) for s in run.states),
        record.preactivation if spend else xp.empty_like(record.preactivation),
        xp.empty_like(run.input),
        tuple(xp.empty_like(s) for s in final),
        returned_grads=None if run.cell.autodiff is None else tuple(xp.empty_like(s) for s in run.states),
    )

    def work(some: slice) -> None:
        mine = tuple(None if d is None else d[some, ...] for d in direct)
        _sweep(run.of_samples(some), mine, tuple(f[some, ...] for f in final), result.of_samples(some))

    batch, _, units = run.states[0].shape
    for_each(work, walk_parts(batch, units, xp=xp), xp=xp)
    return result


def _columns_first(weight: Array) -> Array:
    """The same weight, whose transpose lies in memory row by row: few rows times that are twice as fast."""
    return np.asfortranarray(weight) if isinstance(weight, np.ndarray) else weight


def _sweep(run: Replay, direct: Sequence[Array | None], carry: tuple[Array, ...], out: Adjoint) -> None:
    """Walk against the order of the recurrence and fill ``out``."""
    xp, cell, record = run.xp, run.cell, cast(Record, run.record)
    gate_grad = cast(Array, out.gate_grad)
    for t in run.steps(reverse=True):
        still_wanted()
        cotangent = tuple(c if d is None else c + d[:, t, :] for c, d in zip(carry, direct, strict=True))
        now, after = record.at((slice(None), t, ...)), tuple(s[:, t, :] for s in run.states)
        dz, carry, total = cell.pull_back(now, run.state_before(t), after, cotangent, run.state_scale, xp)
        if run.mask is not None:
            real = run.mask[:, t, None]
            carry = tuple(xp.where(real, new, old) for new, old in zip(carry, cotangent, strict=True))
            total = tuple(xp.where(real, new, old) for new, old in zip(total, cotangent, strict=True))
            dz = xp.where(real[:, :, None], dz, xp.zeros_like(dz))
        gate_grad[:, t, :, :] = dz
        for grads, value in zip(out.returned_grads or (), cotangent, strict=False):
            grads[:, t, :] = value
        for grads, value in zip(out.state_grads, total, strict=True):
            grads[:, t, :] = value
    flat = affine.join_gates(gate_grad, xp)
    out.input_grad[...] = cell.input_gradient(run.input, flat, run.input_scale, xp)
    for target, value in zip(out.initial_state_grad, carry, strict=True):
        target[...] = value


def weight_gradients(
    run: Replay, result: Adjoint, *, by_time: bool = False, times: slice = slice(None), probes: int = 0
) -> dict[str, Array]:
    """Gradients of the weights of a cell with equations, by the names of :meth:`Cell.weights`.

    Summed over samples, and over time unless ``by_time``: then each array has a leading time axis, and its sum over
    time is dL/dW. ``times`` restricts the sum, or that axis, to some steps. With ``probes``, kernels come as that many
    random combinations of their rows (:class:`affine.Contraction`), to be compared with :func:`probed`.
    """
    if run.record is None or result.gate_grad is None:
        raise TypeError("weight_gradients() knows the weights of cells with equations only")
    how, xp, (batch, time, gates, units) = affine.Contraction(by_time, probes), run.xp, result.gate_grad.shape
    found: dict[int, dict[str, Array]] = {}

    def work(some: slice) -> None:
        mine, part = run.of_samples(some), result.of_samples(some)
        found[some.start] = mine.cell.weight_gradients(mine, part, how, times)

    for_each(work, large_parts(batch, len(range(time)[times]) * gates * units, xp=xp), xp=xp)
    first, *others = (found[start] for start in sorted(found))
    return {name: sum((part[name] for part in others), start=grad) for name, grad in first.items()}


def probed(weights: Mapping[str, Array], probes: int) -> dict[str, Array]:
    """Whole gradients reduced to the combinations of rows that ``weight_gradients(..., probes=probes)`` returns."""
    how = affine.Contraction(probes=probes)
    return {name: affine.probe_rows(w.shape[0], w, how) @ w if len(w.shape) == 2 else w for name, w in weights.items()}


def per_state(cotangent: Array | Sequence[Array | None], count: int) -> tuple[Array | None, ...]:
    """One direct gradient, or None, per state; a lone array belongs to the first state."""
    if isinstance(cotangent, (tuple, list)):
        return tuple(cotangent)
    return (cast(Array, cotangent), *([None] * (count - 1)))


def final_or_zero(run: Replay, final: Sequence[Array] | None) -> tuple[Array, ...]:
    """What the sweep starts from at the last step."""
    if final is not None:
        return tuple(final)
    return tuple(run.xp.zeros_like(s) for s in run.initial_state)
