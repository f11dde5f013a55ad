"""What a cell without derivatives of its own asks of the framework whose layer it describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..arrays import Array


class Autodiff(Protocol):
    """The step of one cell, differentiated by a framework; arrays (n, size) in and out, of the kind that is given."""

    def vjp(
        self, projected: Array, before: Sequence[Array], cotangent: Sequence[Array]
    ) -> tuple[Array, list[Array], Mapping[str, Array]]:
        """Pull dL/ds_t back to what was projected and to the states before, row by row, and to the weights, summed."""

    def produced(self, projected: Array, before: Sequence[Array], cotangent: Sequence[Array]) -> list[Array]:
        """Pull dL/ds_t back to each state where the step computes it, row by row: with its paths to the others."""
