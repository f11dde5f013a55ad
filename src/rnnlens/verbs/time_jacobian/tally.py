"""What was done to get a time Jacobian."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Tally:
    """Counted while pieces are computed.

    Attributes
    ----------
    pruned
        Whether rows were left out on purpose; ``pruned_rows`` of them, which would have brought so large a square.
    """

    flops: float = 0.0
    pruned: bool = False
    pruned_rows: int = 0
    pruned_error_square: float = 0.0
