"""What a cell computed on its way from one state to the next."""

from __future__ import annotations

from typing import NamedTuple

from ...typing import Array


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
        return Record(self.preactivation[index], self.gates[index], None if self.inner is None else self.inner[index])
