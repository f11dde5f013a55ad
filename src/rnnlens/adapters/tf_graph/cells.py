"""Cells of unknown equations, with their weights by the names of the layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...recurrence.cells import StepCell
from ...typing import Array
from .found import Loop
from .weights import short


class Renamed(StepCell):
    """A native cell whose weights are called as the layer lists them.

    Parameters
    ----------
    inner
        The step, which names its weights by the operations of their variables.
    names
        From these to those of the layer.
    """

    def __init__(self, inner: StepCell, names: Mapping[str, str]) -> None:
        self._inner, self._names = inner, names
        self.state_sizes, self.output_size = inner.state_sizes, inner.output_size
        self.output_state, self.output_is_state = inner.output_state, inner.output_is_state

    @classmethod
    def of(cls, loop: Loop, inner: StepCell) -> Renamed:
        """The cell of a loop."""
        assert loop.cell.body is not None
        return cls(inner, {name: short(loop, name) for name in loop.cell.body.variables})

    def advance(self, x: Array, state: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
        """See :class:`StepCell`."""
        return self._inner.advance(x, state)

    def vjp(self, x: Array, state: Sequence[Array], output: Array, new: Sequence[Array]) -> Any:
        """See :class:`StepCell`."""
        return self._inner.vjp(x, state, output, new)

    def weight_vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> Mapping[str, Array]:
        """See :class:`StepCell`."""
        found = self._inner.weight_vjp(x, state, output_cotangent, state_cotangent)
        return {self._names[name]: gradient for name, gradient in found.items()}

    def produced(self, x: Array, state: Sequence[Array], output: Array, new: Sequence[Array]) -> tuple[Array, ...]:
        """See :class:`StepCell`."""
        return self._inner.produced(x, state, output, new)

    def jacobian(self, x: Array, state: Sequence[Array]) -> tuple[Array, Array]:
        """See :class:`StepCell`."""
        return self._inner.jacobian(x, state)
