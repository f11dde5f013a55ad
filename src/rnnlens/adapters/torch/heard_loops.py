"""Torch's own cells in a Python loop, overheard in somebody's training step: one recurrence where a state is handed on.

The state that a cell returned is one tensor, which the next step and the user's code both read: what arrives there is
the *total* gradient. What came back through the next step, and from h_t to c_t, is heard at the nodes that the cell has
in the graph, and the difference is the direct gradient, with the rounding of the total one. Nothing is put into the
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .heard_call import HeardCall

#: What a cell is given: its input, and its states, none where it starts from zeros.
Fed = tuple[Tensor, list[Tensor]]


@dataclass(eq=False)
class HeardLoop:
    """The calls of one cell that hand its state on: what they were fed and returned, what came back.

    Attributes
    ----------
    call
        Of the whole loop, as far as it is known at its first step.
    inputs, states
        By step, detached; of states the list of all that a cell has, the initial ones aside.
    grads, through
        By state and step: all that arrived there, and what of it came through the cell itself.
    fed_itself
        Whether the state was the input as well: which of the two a gradient came through cannot be heard.
    """

    call: HeardCall
    initial: list[Tensor]
    inputs: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    grads: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    through: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    fed_itself: bool = False

    @property
    def backwards(self) -> set[int]:
        """Backward passes that came through."""
        return self.call.backwards

    @property
    def number(self) -> int:
        """Place in the order of the calls."""
        return self.call.number

    def finished(self) -> HeardCall:
        """As one call: every state by step (sample, time, unit), and the direct gradients there."""
        call, count = self.call, len(self.initial)
        call.returned = [_stacked([states[place] for states in self.states]) for place in range(count)]
        call.grads = {
            place: _stacked([self._direct(place, step) for step in range(len(self))]) for place in range(count)
        }
        call.args = (_stacked(self.inputs), tuple(_rows(state) for state in self.initial)) if self.inputs else ()
        return call

    def __len__(self) -> int:
        return len(self.states)

    def _direct(self, place: int, step: int) -> Tensor:
        total, through = self.grads.get((place, step)), self.through.get((place, step))
        if total is None:
            return torch.zeros_like(self.states[step][place])
        return total if through is None else total - through


class Loops:
    """Knows which loop a cell's call goes on with: the one that returned the very tensors that it is fed as its state.

    A loop lives as long as the tensors that its last step returned, or their graph.
    """

    def __init__(self) -> None:
        self._at: Any = WeakTensorKeyDictionary()

    def step(self, fed: Fed, new: list[Tensor], begin: Callable[[], HeardCall]) -> HeardLoop:
        """Note a call of a cell, ``fed`` an input and a state, that returned ``new``; ``begin`` makes a loop."""
        _, given = fed
        loop = self._continued(given)
        if loop is None:
            start = given or [torch.zeros_like(state) for state in new]
            loop = HeardLoop(begin(), [state.detach().clone() for state in start])
        for place, state in enumerate(new):
            self._at[state] = (loop, place)
        loop.states.append([state.detach() for state in new])
        return loop

    def _continued(self, given: Sequence[Tensor]) -> HeardLoop | None:
        known = [self._at.get(state) for state in given]
        if not known or None in known or [place for _, place in known] != list(range(len(known))):
            return None
        loop: HeardLoop = known[0][0]
        latest = all(state.data_ptr() == last.data_ptr() for state, last in zip(given, loop.states[-1], strict=True))
        return loop if latest and all(other is loop for other, _ in known) else None


def listen_inside(loop: HeardLoop, fed: Fed, new: list[Tensor], on: Callable[[], bool]) -> None:
    """Hear what goes back, within the last call of a loop, to the states that it was fed, and between new ones.

    The hidden state of an LSTM is computed from its cell state, and both are returned.
    """
    step, (x, given) = len(loop) - 1, fed
    loop.fed_itself |= any(x is state for state in given)
    ends = {(state.grad_fn, state.output_nr): (place, step) for place, state in enumerate(new)}
    if step:
        ends |= {(state.grad_fn, state.output_nr): (place, step - 1) for place, state in enumerate(given)}

    def heard(edge: int, at: tuple[int, int]) -> Any:
        def hook(inner: tuple[Tensor | None, ...], outer: Any) -> None:
            grad = inner[edge]
            if grad is not None and on():
                known = loop.through.get(at)
                loop.through[at] = grad.detach().clone() if known is None else known + grad.detach()

        return hook

    for node, edge, parent in _edges([state.grad_fn for state in new], [x.grad_fn, *(s.grad_fn for s in given)]):
        if parent in ends:
            node.register_hook(heard(edge, ends[parent]))


def _edges(first: Iterable[Any], boundaries: Iterable[Any]) -> Iterator[tuple[Any, int, tuple[Any, int]]]:
    """From nodes of the graph back to its boundaries: a node, which of its gradients, where that one goes."""
    waiting, done = list(first), {None, *boundaries}
    while waiting:
        node = waiting.pop()
        if node in done:
            continue
        done.add(node)
        for edge, parent in enumerate(node.next_functions):
            yield node, edge, parent
            waiting.append(parent[0])


def joined(calls: Iterable[HeardCall | HeardLoop]) -> tuple[list[HeardCall], list[str]]:
    """Calls and loops as calls, and notes; a cell whose state is changed at every step has no loop, and is left out."""
    calls = list(calls)
    lengths: dict[str, list[int]] = {}
    for call in calls:
        if isinstance(call, HeardLoop):
            lengths.setdefault(call.call.path, []).append(len(call))
    changed = {path for path, found in lengths.items() if len(found) > 2 and max(found) == 1}
    itself = {call.call.path for call in calls if isinstance(call, HeardLoop) and call.fed_itself}
    words = ((changed, "its state is changed between its steps"), (itself, "it is fed its own state as an input"))
    notes = [
        f"{path}: {why}, so that it is not heard in batch mode. A probe shows it."
        for paths, why in words
        for path in sorted(paths)
    ]
    apart = changed | itself
    notes += [
        f"{path}: the state was not passed on unchanged from call to call; its {sum(found)} calls are {len(found)} "
        f"recurrences of {min(found)} to {max(found)} steps."
        for path, found in lengths.items()
        if len(found) > 1 and path not in apart
    ]
    kept = [call for call in calls if not (isinstance(call, HeardLoop) and call.call.path in apart)]
    return [call.finished() if isinstance(call, HeardLoop) else call for call in kept], notes


def _rows(value: Tensor) -> Tensor:
    """(sample, unit), also of a single sample without its axis."""
    return value[None] if value.dim() == 1 else value


def _stacked(steps: Sequence[Tensor]) -> Tensor:
    return torch.stack([_rows(value) for value in steps], dim=1)
