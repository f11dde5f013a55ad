"""The BPTT adjoint: total gradients of every state, gate and input of a recurrent layer from the direct ones.

    lambda_t = dL/ds_t|direct + A_{t+1}^T lambda_{t+1},   dL/dx_t = B_t^T lambda_t,   masked step: A = I, B = 0

Werbos 1990, doi:10.1109/5.58337; in this notation Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, eqs. 3-5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ..typing import Array, Namespace
from .activations import ACTIVATIONS
from .cells import KnownCell, affine, equations
from .cells.record import Record
from .parallel import for_each, large_parts, still_wanted, walk_parts
from .run import Run


@dataclass
class Adjoint:
    """Total gradients, sample-first and chronological.

    Attributes
    ----------
    state_grads : one (sample, time, size) array per state
        dL/ds_t of each state as it is produced: all that the same step computes from it is included, as the path of
        an LSTM's c_t through h_t.
    gate_grad : (sample, time, gate, unit), None for a custom cell
        dL/dz_t, with respect to the pre-activations.
    input_grad : (sample, time, feature)
    initial_state_grad : one (sample, size) array per state
    output_cotangent : (sample, time, unit), custom cells only
        The direct gradient of each step's output after masking was undone.
    returned_grads : as ``state_grads``, custom cells only
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
    run: Run,
    state_cotangent: Array | Sequence[Array | None],
    final_state_cotangent: Sequence[Array] | None = None,
) -> Adjoint:
    """Sweep direct gradients back through a known cell's recurrence.

    Parameters
    ----------
    state_cotangent : (sample, time, unit) array, or a sequence of one (or None) per state
        dL/ds_t, direct: through what sits above the layer only. A lone array belongs to the first state, the output.
    final_state_cotangent : one (sample, size) array per state, optional
        What comes back through the states that the layer returned after its last step.
    """
    if not isinstance(run.cell, KnownCell) or run.record is None:
        raise TypeError("adjoint() sweeps known cells; custom cells go through adjoint_custom()")
    xp = run.xp
    direct = per_state(state_cotangent, len(run.states))
    final = final_or_zero(run, final_state_cotangent)
    result = Adjoint(
        tuple(xp.empty_like(s) for s in run.states),
        xp.empty_like(run.record.gates),
        xp.empty_like(run.input),
        tuple(xp.empty_like(s) for s in final),
    )

    def work(some: slice) -> None:
        mine = tuple(None if d is None else d[some, ...] for d in direct)
        _sweep(run.of_samples(some), mine, tuple(f[some, ...] for f in final), result.of_samples(some))

    batch, _, units = run.states[0].shape
    for_each(work, walk_parts(batch, units, xp=xp), xp=xp)
    return result


def _sweep(run: Run, direct: Sequence[Array | None], carry: tuple[Array, ...], out: Adjoint) -> None:
    """Walk against the order of the recurrence and fill ``out``."""
    xp, cell, record = run.xp, cast(KnownCell, run.cell), cast(Record, run.record)
    module, gate_grad = equations(cell), cast(Array, out.gate_grad)
    for t in run.steps(reverse=True):
        still_wanted()
        cotangent = tuple(c if d is None else c + d[:, t, :] for c, d in zip(carry, direct, strict=True))
        now, after = record.at((slice(None), t, ...)), tuple(s[:, t, :] for s in run.states)
        dz, carry, total = module.pull_back(cell, now, run.state_before(t), after, cotangent, run.state_scale, xp)
        if run.mask is not None:
            real = run.mask[:, t, None]
            carry = tuple(xp.where(real, new, old) for new, old in zip(carry, cotangent, strict=True))
            total = tuple(xp.where(real, new, old) for new, old in zip(total, cotangent, strict=True))
            dz = xp.where(real[:, :, None], dz, xp.zeros_like(dz))
        gate_grad[:, t, :, :] = dz
        for grads, value in zip(out.state_grads, total, strict=True):
            grads[:, t, :] = value
    flat = affine.join_gates(gate_grad, xp)
    out.input_grad[...] = affine.unproject(flat, cell.kernel, run.input_scale, len(cell.gates), xp)
    for target, value in zip(out.initial_state_grad, carry, strict=True):
        target[...] = value


def weight_gradients(
    run: Run, result: Adjoint, *, by_time: bool = False, times: slice = slice(None), probes: int = 0
) -> dict[str, Array]:
    """Gradients of a known cell's weights, by the names of :meth:`KnownCell.weights`.

    Summed over samples, and over time unless ``by_time``: then each array has a leading time axis, and its sum over
    time is dL/dW. ``times`` restricts the sum, or that axis, to some steps. With ``probes``, kernels come as that many
    random combinations of their rows (:class:`affine.Contraction`), to be compared with :func:`probed`.
    """
    if not isinstance(run.cell, KnownCell) or run.record is None or result.gate_grad is None:
        raise TypeError("weight_gradients() knows the weights of known cells only")
    how, xp, (batch, time, gates, units) = affine.Contraction(by_time, probes), run.xp, result.gate_grad.shape
    found: dict[int, dict[str, Array]] = {}

    def work(some: slice) -> None:
        found[some.start] = _weight_gradients(run.of_samples(some), result.of_samples(some), how, times)

    for_each(work, large_parts(batch, len(range(time)[times]) * gates * units, xp=xp), xp=xp)
    first, *others = (found[start] for start in sorted(found))
    return {name: sum((part[name] for part in others), start=grad) for name, grad in first.items()}


def _weight_gradients(run: Run, result: Adjoint, how: affine.Contraction, times: slice) -> dict[str, Array]:
    cell, xp, record = cast(KnownCell, run.cell), run.xp, cast(Record, run.record)
    gate_grad = cast(Array, result.gate_grad)[:, times, :, :]
    flat = affine.join_gates(gate_grad, xp)
    grads = {"kernel": affine.outer(run.input[:, times, :], flat, run.input_scale, len(cell.gates), how, xp)}
    if cell.bias is not None:
        grads["bias"] = affine.total(flat, how, xp)
    before = run.before(0)[:, times, :]
    record = record.at((slice(None), times, ...))
    grads |= equations(cell).recurrent_gradients(cell, record, before, gate_grad, run.state_scale, how, xp)
    if cell.projection is not None:
        hidden_grad = result.state_grads[0] if run.mask is None else _at_real_steps(run, result.state_grads[0])
        squashed = ACTIVATIONS[cell.activation].value(run.states[1][:, times, :], xp)
        unprojected = record.gates[..., 3, :] * squashed
        grads["projection"] = affine.outer(unprojected, hidden_grad[:, times, :], None, 1, how, xp)
    return grads


def probed(weights: Mapping[str, Array], probes: int, xp: Namespace) -> dict[str, Array]:
    """Whole gradients reduced to the combinations of rows that ``weight_gradients(..., probes=probes)`` returns."""
    how = affine.Contraction(probes=probes)
    return {
        name: affine.probe_rows(w.shape[0], w, how, xp) @ w if len(w.shape) == 2 else w for name, w in weights.items()
    }


def _at_real_steps(run: Run, values: Array) -> Array:
    return run.xp.where(run.mask[:, :, None], values, run.xp.zeros_like(values))  # type: ignore[index]


def per_state(cotangent: Array | Sequence[Array | None], count: int) -> tuple[Array | None, ...]:
    """One direct gradient, or None, per state; a lone array belongs to the first state."""
    if isinstance(cotangent, (tuple, list)):
        return tuple(cotangent)
    return (cotangent, *([None] * (count - 1)))


def final_or_zero(run: Run, final: Sequence[Array] | None) -> tuple[Array, ...]:
    """What the sweep starts from at the last step."""
    if final is not None:
        return tuple(final)
    return tuple(run.xp.zeros_like(s) for s in run.initial_state)
