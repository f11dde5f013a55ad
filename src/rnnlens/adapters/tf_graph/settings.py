"""Rates and switches of a graph (keep probabilities, the learning phase) with the values that a net sets them to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import message
from .blocks import Source, behind_identities
from .found import Condition
from .frames import body_graph
from .record import function_of
from .sequences import same


class GraphSettings:
    """Single numbers outside of the loops that do not depend on data, with their present values.

    A cell can be known at these values alone: at a keep probability of 1, say. ``used`` has the values that were read.

    Parameters
    ----------
    value_of
        The value of a scalar tensor outside of the loops; None where it depends on data or on chance.
    """

    def __init__(self, value_of: Callable[[Any], Any] = lambda _: None) -> None:
        self._value_of = value_of
        self.used: dict[Any, tuple[Any, Any]] = {}

    def value(self, tensor: Any, outer: Source) -> Any:
        """The value of a tensor of a body that is such a number outside; None for any other."""
        outside = same(tensor, outer)
        if outside.shape.rank != 0 or outside.op._get_control_flow_context() is not None:
            return None
        key = outside.ref()
        if key not in self.used:
            value = self._value_of(outside)
            if value is None:
                return None
            self.used[key] = (outside, value)
        return self.used[key][1]

    def chosen_branch(self, tensor: Any, outer: Source) -> Any:
        """The tensor that a conditional passes on at the present value of its switch; None for any other tensor."""
        op = tensor.op
        if op.type == "Merge":
            switch = behind_identities(op.inputs[0]).op
            taken = self.value(switch.inputs[1], outer) if switch.type == "Switch" else None
            passed = None if taken is None else behind_identities(op.inputs[int(taken)]).op
            return passed.inputs[0] if passed is not None and passed.type == "Switch" else None
        if op.type in ("If", "StatelessIf") and (taken := self.value(op.inputs[0], outer)) is not None:
            branch = op.get_attr("then_branch" if taken else "else_branch").name
            function, home = function_of(op.graph, branch)
            _, given, returned = body_graph(function, op.inputs[1:], home)
            passed = behind_identities(returned[tensor.value_index])
            return next((t for t, p in zip(op.inputs[1:], given, strict=True) if p is passed), None)
        return None

    def conditions(self, loop: str) -> tuple[Condition, ...]:
        """What has to hold in a run of a loop whose cell was recognised at the present values."""
        words = message(
            f"The loop {loop!r} cannot be looked into in training: its states are dropped within it.",
            got="recurrent_dropout, training=True, eager execution disabled",
            hint="training=False; or run eagerly",
        )
        return tuple(Condition(tensor, value, words) for tensor, value in self.used.values())


#: Without any value: all that is not constant counts as variable.
NO_SETTINGS = GraphSettings()
