"""One direction of one call of a recurrent layer: all its arrays, as far as they are wanted, and its checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...adapters.protocol import RecurrentCall
from ...recurrence.replay import Replay
from ...recurrence.rounding import Rounding, rounding_of
from ...results.checks import Check
from ...typing import Array
from ..assemble import Arrays
from ..sweep import replay_check, sweep, weights_to_check
from .wanted import Wanted
from .weight_sum import WeightSum


@dataclass
class TracedCall:
    """The arrays of a call, its checks, and of a sweep its weight gradients and what rounding goes by."""

    arrays: Arrays
    checks: list[Check]
    weights: Mapping[str, Array] | None = None
    rounding: Rounding = field(default_factory=Rounding)

    def present(self, wanted: Wanted | None) -> Arrays:
        """What there is of it, and is wanted."""
        found = {name: array for name, array in self.arrays.items() if array is not None}
        return found if wanted is None else {name: array for name, array in found.items() if wanted.has(name)}


def trace_call(
    call: RecurrentCall, wanted: Wanted, sums: dict[str, WeightSum], replayed: Callable[[RecurrentCall], Replay]
) -> TracedCall:
    """Replay a call, and sweep back through it where there is a loss; ``sums`` collects dL/dW by weights shared."""
    names = call.cell.state_names
    arrays: Arrays = {"input": call.input, "mask": call.mask, "output": call.output, "output_grad": call.output_grad}
    if call.final_state_grad is not None:
        arrays |= _boundary("final", names, call.final_state_grad)
    if not wanted.replayed:
        return TracedCall(arrays, [])
    run, steps = replayed(call), int(call.input.shape[1])
    arrays |= dict(zip(names, run.states, strict=True))
    arrays |= {"gates": run.gates, "gate_preactivation": run.preactivation}
    traced = TracedCall(arrays, [replay_check(call, run)])
    if call.output_grad is None or not wanted.swept:
        return traced
    spend = not wanted.has("gate_preactivation") and not wanted.weighed
    result = sweep(call, run, call.output_grad, call.final_state_grad, call.state_grad, spend=spend)
    if spend:
        arrays["gate_preactivation"] = None
    arrays |= {f"{name}_grad": grad for name, grad in zip(names, result.state_grads, strict=True)}
    arrays |= {"gate_grad": result.gate_grad if call.cell.gates else None, "input_grad": result.input_grad}
    arrays |= _boundary("initial", names, result.initial_state_grad)
    if not wanted.weighed:
        return traced
    traced.weights, reference = weights_to_check(call, run, result)
    traced.rounding = rounding_of(run, result)
    if call.weight_grads is not None:
        key = call.weights_key or f"{call.layer}/{call.direction}"
        sums.setdefault(key, WeightSum(call, reference)).add(traced.weights, steps, traced.rounding.weights)
    return traced


def _boundary(when: str, names: Sequence[str], grads: Sequence[Array]) -> Arrays:
    """Gradients of the first or last state: stacked where all states have one size, else one variable each."""
    if len({grad.shape[-1] for grad in grads}) == 1:
        return {f"{when}_state_grad": tuple(grads)}
    return {f"{when}_{name}_grad": grad for name, grad in zip(names, grads, strict=True)}
