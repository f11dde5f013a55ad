"""Conditionals on the learning phase of Keras: what they give where nothing is trained, as dropout that is left out."""

from __future__ import annotations

from typing import Any

from .blocks import Source
from .boundaries import same
from .copying import function_of
from .frames import body_graph


class Phase:
    """The learning phase, as a loop reads it.

    Parameters
    ----------
    tensor
        What is fed for it, outside of the loop; None where the graph has none.
    outer
        The invariants of the loop.
    """

    def __init__(self, tensor: Any, outer: Source) -> None:
        self._tensor, self._outer = tensor, outer

    def off(self, tensor: Any) -> Any:
        """What a conditional on the phase lets through outside of training; None for any other tensor."""
        if self._tensor is None or not tensor.dtype.is_floating:
            return None
        op = tensor.op
        if op.type == "Merge":
            switch = _behind(op.inputs[0]).op
            return switch.inputs[0] if switch.type == "Switch" and self._is_phase(switch.inputs[1]) else None
        if op.type in ("If", "StatelessIf") and self._is_phase(op.inputs[0]):
            function, home = function_of(op.graph, op.get_attr("else_branch").name)
            _, taken, returned = body_graph(function, op.inputs[1:], home)
            passed = _behind(returned[tensor.value_index])
            return next((t for t, p in zip(op.inputs[1:], taken, strict=True) if p is passed), None)
        return None

    def _is_phase(self, tensor: Any) -> bool:
        return same(tensor, self._outer) is self._tensor


def _behind(tensor: Any) -> Any:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor
