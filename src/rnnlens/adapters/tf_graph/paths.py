"""What the tensors of a body depend on: states, the present step, or neither."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from .frames import Frame, Variable

_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank"})


#: Parts of conditions.
_BRANCHES = frozenset({"Switch", "Merge", "If", "StatelessIf"})


def _is_random(op: Any) -> bool:
    draws = op.type.startswith(("Random", "Stateful", "Truncated", "Multinomial"))
    return bool(op.op_def.is_stateful and draws)


class Paths:
    """Which tensors of a body follow from the states before the step, and which change from step to step.

    What only asks for the shape of a tensor does not depend on it. Random numbers change from step to step.
    """

    def __init__(self, frame: Frame, states: Sequence[Variable]) -> None:
        self.frame = frame
        self._state_ids = {id(v.before) for v in states}
        self._variables = {id(v.before): v for v in frame.variables}
        self._found: dict[int, tuple[bool, bool]] = {}
        self._settle_variables()

    def by_state(self, tensor: Any) -> bool:
        """Whether it follows from the states."""
        return self._of(tensor)[0]

    def is_variable(self, tensor: Any) -> bool:
        """Whether it stands for a variable of the loop at the beginning of a step."""
        return id(tensor) in self._variables

    def by_step(self, tensor: Any) -> bool:
        """Whether it changes from step to step."""
        return self._of(tensor)[1]

    def new_at_each_step(self, targets: Iterable[Any]) -> list[Any]:
        """The largest floating tensors behind the targets that no state reaches and that change from step to step.

        A condition that changes from step to step is replaced by the numbers that it is computed from.
        """
        found: dict[int, Any] = {}
        waiting, seen = list(targets), set()
        while waiting:
            tensor = waiting.pop(0)
            if id(tensor) in seen or self.frame.outer.get(tensor) is not None:
                continue
            seen.add(id(tensor))
            if not self.by_state(tensor):
                if self.by_step(tensor):
                    behind = [] if tensor.dtype.is_floating else [t for t in tensor.op.inputs if self.by_step(t)]
                    if behind and not self.is_variable(tensor):
                        waiting.extend(behind)
                    else:
                        found[id(tensor)] = tensor
            elif not self.is_variable(tensor) and tensor.op.type not in _SHAPES:
                waiting.extend(tensor.op.inputs)
        return list(found.values())

    def only_read(self, targets: Iterable[Any], reads: Sequence[Any]) -> list[Any]:
        """Those of the tensors that are read at each step from which alone, and weights, the targets follow.

        Empty where something else is new to them at each step: random numbers, the number of the step, a condition.
        """
        ids, found = {id(read) for read in reads}, set()
        for tensor in self.behind(targets, stop=ids):
            if id(tensor) in ids:
                found.add(id(tensor))
            elif self.is_variable(tensor) or tensor.op.type in _BRANCHES or _is_random(tensor.op):
                return []
        return [read for read in reads if id(read) in found]

    def chance(self, tensor: Any, reads: Sequence[Any]) -> Any:
        """The operation that draws the random numbers of a tensor; None where there is none, or data is in it too."""
        every = list(self.behind([tensor]))
        if any(t is read for t in every for read in reads):
            return None
        return next((t.op for t in every if _is_random(t.op)), None)

    def carried(self, targets: Iterable[Any]) -> list[Variable]:
        """The variables of the loop that lie behind the targets, and those behind what these become."""
        found: dict[int, Variable] = {}
        waiting = list(targets)
        while waiting:
            for variable in self.directly(waiting.pop()):
                if id(variable) not in found:
                    found[id(variable)] = variable
                    waiting.append(variable.after)
        return [v for v in self.frame.variables if id(v) in found]

    def directly(self, target: Any) -> list[Variable]:
        """The variables of the loop that lie behind a tensor."""
        return [self._variables[id(t)] for t in self.behind([target]) if id(t) in self._variables]

    def behind(self, targets: Iterable[Any], stop: Container[int] = ()) -> Iterator[Any]:
        """The tensors of the body that others are computed from, themselves included; tensors by id end the search.

        What only asks for the shape of a tensor is not computed from it.
        """
        waiting, seen = list(targets), set()
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in seen or self.frame.outer.get(tensor) is not None:
                continue
            seen.add(id(tensor))
            yield tensor
            if id(tensor) not in stop and not self.is_variable(tensor) and tensor.op.type not in _SHAPES:
                waiting.extend(tensor.op.inputs)

    def _settle_variables(self) -> None:
        """Variables that become what the states make of them are states to all that reads them."""
        while True:
            self._found = {}
            more = {i for i, v in self._variables.items() if i not in self._state_ids and self.by_state(v.after)}
            if not more:
                return
            self._state_ids |= more

    def _of(self, tensor: Any) -> tuple[bool, bool]:
        waiting = [tensor]
        while waiting:
            current = waiting[-1]
            inputs = self._inputs(current)
            needed = [t for t in inputs if id(t) not in self._found]
            if needed and id(current) not in self._found:
                waiting.extend(needed)
                continue
            waiting.pop()
            if id(current) not in self._found:
                self._found[id(current)] = self._judged(current, inputs)
        return self._found[id(tensor)]

    def _inputs(self, tensor: Any) -> list[Any]:
        leaf = id(tensor) in self._variables or self.frame.outer.get(tensor) is not None
        return [] if leaf or tensor.op.type in _SHAPES else list(tensor.op.inputs)

    def _judged(self, tensor: Any, inputs: list[Any]) -> tuple[bool, bool]:
        if id(tensor) in self._variables:
            return id(tensor) in self._state_ids, True
        if self.frame.outer.get(tensor) is not None:
            return False, False
        state = any(self._found[id(t)][0] for t in inputs)
        return state, _is_random(tensor.op) or any(self._found[id(t)][1] for t in inputs)
