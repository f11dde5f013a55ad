"""Settings of a graph, such as keep probabilities and the learning phase, with their present values."""

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
    """Scalars outside of the loops that do not depend on data, with their present values.

    Some cells are known at these values only, for example at a keep probability of 1. ``used`` has the values read so
    far.

    Parameters
    ----------
    value_of
        Function from a scalar tensor outside of the loops to its value; None if that depends on data or random numbers.
    """

    def __init__(self, value_of: Callable[[Any], Any] = lambda _: None) -> None:
        self._value_of = value_of
        self.used: dict[Any, tuple[Any, Any]] = {}

    def value(self, tensor: Any, outer: Source) -> Any:
        """Return the present value of a body's tensor that is a setting outside of the loops; None for any other."""
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
        """Return the tensor that a condition passes on at the present value of its switch.

        None for any other tensor.
        """
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
        """Return the values of the settings that a run must have for the recognised cell to be valid."""
        words = message(
            f"The loop {loop!r} cannot be looked into in training: its states are dropped within it.",
            got="recurrent_dropout, training=True, eager execution disabled",
            hint="training=False; or run eagerly",
        )
        return tuple(Condition(tensor, value, words) for tensor, value in self.used.values())


#: No setting has a value: only constants of the graph are constant.
NO_SETTINGS = GraphSettings()
