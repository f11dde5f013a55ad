"""One captured call through the recurrence: replay, direct gradients to the right places, sweep, weight gradients.

What is the same for all cells is decided here, once, for all verbs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..adapters.protocol import RecurrentCall
from ..recurrence.adjoint import (
    adjoint,
    adjoint_custom,
    custom_weight_gradients,
    probed,
    unmasked_output_cotangent,
    weight_gradients,
)
from ..recurrence.cells import affine
from ..recurrence.cells.cell import has_gates
from ..recurrence.replay import Replay
from ..recurrence.rounding import replay_sensitivity
from ..recurrence.trajectory import Adjoint
from ..results.checks import CEILING, REPLAY, Check, epsilon, rounding_bound
from ..typing import Array


def sweep(
    call: RecurrentCall,
    run: Replay,
    output_grad: Array | None = None,
    final_state_grad: Sequence[Array] | None = None,
    state_grad: Mapping[int, Array] | None = None,
    *,
    spend: bool = False,
) -> Adjoint:
    """Total gradients of a call from direct ones.

    Parameters
    ----------
    output_grad : shaped as ``call.output``
        What comes from above through the layer's output; None for nothing.
    final_state_grad : one (sample, size) array per state
        What comes through the states that the layer returned.
    state_grad : (sample, time, size) by index of the state
        What is put on the states themselves, such as the cotangent of ``lstm.cell``.
    spend
        The pre-activations of ``run`` are not needed any more (:func:`~rnnlens.recurrence.adjoint.adjoint`).
    """
    states, own_output = _place_output(call, run, output_grad)
    for index, extra in (state_grad or {}).items():
        present = states[index]
        states[index] = extra if present is None else present + extra
    if call.cell.by_framework:
        return adjoint_custom(run, states, own_output, final_state_grad)
    return adjoint(run, states, final_state_grad, spend=spend)


def weights_of(call: RecurrentCall, run: Replay, result: Adjoint, *, by_time: bool = False) -> Mapping[str, Array]:
    """dL/dW of the call, summed over time or with a leading time axis."""
    if call.cell.by_framework:
        return custom_weight_gradients(run, result, by_time=by_time)
    return weight_gradients(run, result, by_time=by_time)


def replay_check(call: RecurrentCall, run: Replay) -> Check:
    """Whether the replay gives what the framework returned, as far as rounding goes.

    Where a gate keeps nearly all, 1 - z has few digits left, and so has what the step adds: then the sensitivity
    to one more rounding is looked at.
    """
    kind, steps = call.compute_dtype or call.output.dtype, int(call.input.shape[1])
    bound = rounding_bound(kind, steps)
    if run.residual > bound:
        bound = min(max(bound, bound * replay_sensitivity(run) / epsilon(kind)), CEILING)
    return Check(REPLAY, call.layer, run.residual, bound)


#: Random combinations of rows that the check of weight gradients looks at.
PROBES = 8


def weights_to_check(
    call: RecurrentCall, run: Replay, result: Adjoint
) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
    """What per-step weight gradients sum to, and the framework's own, as far as a check needs them.

    Of cells with equations random combinations of the rows: a fault in any weight shows in them (Freivalds 1977).
    """
    reference = {name: grad for name, grad in (call.weight_grads or {}).items() if name not in call.tied}
    if call.cell.by_framework:
        return weights_of(call, run, result), reference
    return weight_gradients(run, result, probes=PROBES), probed(reference, PROBES)


def weight_norms_by_time(run: Replay, result: Adjoint) -> dict[str, Array]:
    """Frobenius norm of each timestep's contribution to dL/dW: (time, gate), of a weight without gates (time,).

    A few steps at a time, so that memory stays at a few copies of the weights.
    """
    cell, xp, time = run.cell, run.xp, run.input.shape[1]
    parts: dict[str, list[Array]] = {}
    for start in range(0, time, 8):
        grads = weight_gradients(run, result, by_time=True, times=slice(start, start + 8))
        for name, grad in grads.items():
            gated = has_gates(cell.parameters[name])
            split = affine.split_gates(grad, len(cell.gates), xp) if gated else grad
            axes = tuple(i for i in range(1, len(split.shape)) if not gated or i != len(split.shape) - 2)
            parts.setdefault(name, []).append(xp.sqrt(xp.sum(split * split, axis=axes)))
    return {name: xp.concat(pieces, axis=0) for name, pieces in parts.items()}


def _place_output(
    call: RecurrentCall, run: Replay, output_grad: Array | None
) -> tuple[list[Array | None], Array | None]:
    """Gradient of the output to the state that it is, or to the steps' own outputs where it is none."""
    states: list[Array | None] = [None] * len(run.states)
    if output_grad is None:
        return states, None
    spread = output_grad if call.returns_sequences else _at_last_step(run, output_grad)
    index = call.cell.output_state
    if run.output_is_state:
        if call.output_from_state is not None:
            spread = run.xp.where(call.output_from_state[:, :, None], spread, run.xp.zeros_like(spread))
        states[index] = spread
        return states, None
    own, carried = unmasked_output_cotangent(run, spread, call.masked_output)
    states[index] = carried
    return states, own


def _at_last_step(run: Replay, output_grad: Array) -> Array:
    """(sample, unit) to (sample, time, unit): zero but at the step that the recurrence took last."""
    *_, last = run.steps()
    spread = run.xp.zeros_like(run.xp.broadcast_to(output_grad[:, None, :], _with_time(run, output_grad)))
    spread[:, last, :] = output_grad
    return spread


def _with_time(run: Replay, array: Array) -> tuple[int, int, int]:
    return int(array.shape[0]), int(run.input.shape[1]), int(array.shape[1])
