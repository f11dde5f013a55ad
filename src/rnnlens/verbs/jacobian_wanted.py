"""What is wanted of a time Jacobian, and what was done to get it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..typing import Array
from .jacobian_target import Tensor

Reduce = Callable[[Array], Array]


@dataclass
class Ends:
    """The two ends, and what is wanted of them.

    Attributes
    ----------
    out_times, in_times
        Steps asked for, in the order asked; None where there is no time.
    weights : (sample or 1, time or 1, row, unit) or None
        Rows that are pulled instead of single output units.
    reduce, tail
        What becomes of a block (sample, group, out, in).
    """

    of: Tensor
    wrt: Tensor
    out_times: list[int] | None
    in_times: list[int] | None
    weights: np.ndarray[Any, Any] | None
    reduce: Reduce | None
    tail: tuple[int, ...]
    average: bool

    @property
    def rows(self) -> int:
        """Rows per output step."""
        return self.of.size if self.weights is None else int(self.weights.shape[2])

    @property
    def groups(self) -> int:
        """Output steps."""
        return 1 if self.out_times is None else len(self.out_times)

    def rows_at(self, size: int) -> np.ndarray[Any, Any]:
        """(sample or 1, time or 1, row, unit)."""
        return np.eye(size)[None, None] if self.weights is None else self.weights


@dataclass
class Tally:
    """What was done."""

    mode: str = "reverse"
    route: str = "direct"
    flops: float = 0.0
    peak_bytes: int = 0
    pruned_error_square: float = 0.0
    pruned_rows: int = 0
    pruned: bool = False
