"""Whether a cell of unknown equations, run again, is the function that it was within the model."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedError, no_function_of_its_own

#: Replayed by the same operations, no cell is off by as much from rounding alone, unless it amplifies it through time.
_ROUNDING = {"float64": 1e-8, "float32": 1e-2}


def refuse_another_function(call: Any, off: float) -> None:
    """Judge by ``off``, the residual of the step that the recurrence took first, which nothing before it has amplified.

    Half precision is left to the self-checks.

    Raises
    ------
    UnsupportedError
        If the cell read what was only there while its model ran: an attribute set by ``call``, the training flag.
    """
    bound = _ROUNDING.get(str(call.compute_dtype or call.output.dtype).rpartition(".")[2])
    if bound is not None and not off <= bound:
        cell = f"The cell of {call.layer!r}"
        raise UnsupportedError(no_function_of_its_own(cell, f"outputs that differ by {off:.2g} (relative)"))
