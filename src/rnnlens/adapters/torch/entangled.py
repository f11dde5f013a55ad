"""Whether recurrences that the user's own loops make are plain chains of steps, seen from the graph of the pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .record import Run


def entangled(runs: list[Run], outputs: Iterable[Tensor]) -> bool:
    """Whether any recurrence is more than a chain of steps with something below and something above.

    A chain: its layer runs once; what it is fed does not depend on what it returned, other than through the state that
    is passed on; and its states are read after the last step only, but for the one that is its output.
    """
    looped = [run for run in runs if len(run.visits) > 1]
    owners = [run.owner.key for run in runs]
    if any(owners.count(run.owner.key) > 1 for run in runs if not run.owner.stacked or run in looped):
        return True
    if not looped:
        return False
    between = {key for run in looped for key in _states_between(run)}
    fed = [tensor for run in runs for tensor in _fed(run)]
    if between & _upstream([*outputs, *fed]):
        return True
    return any(_returned(run) & _upstream(_fed(run)) for run in looped)


def _fed(run: Run) -> list[Tensor]:
    """What comes into a recurrence from below."""
    return [*(piece.input for visit in run.visits for piece in visit.pieces[:1]), *run.visits[0].link.fed]


def _states_between(run: Run) -> set[Any]:
    """Where gradients arrive that belong to a state which is not the output, before the last step."""
    visits = run.visits[:-1] if run.valid() is None else run.visits
    return {_key(tap) for visit in visits for tap in visit.state_taps if tap is not None}


def _returned(run: Run) -> set[Any]:
    """All that the user's code got from a recurrence."""
    taps = [tap for visit in run.visits for tap in visit.state_taps if tap is not None]
    return {_key(tensor) for tensor in [*taps, *(visit.pieces[-1].output for visit in run.visits)]}


def _key(tensor: Tensor) -> Any:
    """The node of the graph that made a tensor; a leaf stands for itself."""
    return id(tensor) if tensor.grad_fn is None else tensor.grad_fn


def _upstream(tensors: Iterable[Tensor]) -> set[Any]:
    """Every node and leaf that a tensor was computed from."""
    seen: set[Any] = {id(tensor) for tensor in tensors if tensor.grad_fn is None}
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            seen.add(id(node.variable))
        waiting.extend(parent for parent, _ in node.next_functions if parent is not None and parent not in seen)
    return seen
