"""What a cell computed on its way from one state to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..arrays import Array


class Record(NamedTuple):
    """Gates before and after their activation: (..., gate, unit).

    ``inner`` is what else a cell remembers of the step: the recurrent part of a GRU's candidate before the reset gate
    multiplies it (``reset_after`` only); of a cell that a framework differentiates what its input was projected to.
    """

    preactivation: Array
    gates: Array
    inner: Array | None = None

    def at(self, index: tuple[object, ...]) -> Record:
        """The same record at one index of its leading axes."""
        return self.map(lambda part: part[index])

    def map(self, function: Callable[[Array], Array]) -> Record:
        """The same record with a function of each part that there is."""
        inner = None if self.inner is None else function(self.inner)
        return Record(function(self.preactivation), function(self.gates), inner)
