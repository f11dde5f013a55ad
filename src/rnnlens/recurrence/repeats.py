"""Whether a cell, run again, is the function that it was within the model."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedError, message, no_function_of_its_own

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
    if _is_beyond_rounding(call, off):
        cell = f"The cell of {call.layer!r}"
        raise UnsupportedError(no_function_of_its_own(cell, f"outputs that differ by {off:.2g} (relative)"))


def refuse_other_equations(call: Any, off: float) -> None:
    """Judge the equations that a user registered, likewise.

    Raises
    ------
    UnsupportedError
        If the layer returned something else than they give.
    """
    if _is_beyond_rounding(call, off):
        cell = call.cell
        raise UnsupportedError(
            message(
                f"The equations of {type(cell).__name__} are not those of {cell.registered_for} in {call.layer!r}.",
                got=f"outputs that differ by {off:.2g} (relative)",
                expected="what the layer itself returns",
                hint="compare step with the layer's own; the order of gates and weights= in rl.cells.register",
            )
        )


def refuse_other_ends(call: Any, off: float, off_at_the_end: float) -> None:
    """Judge the states after the last step, where the outputs on the way there are right.

    Raises
    ------
    UnsupportedError
        If the layer returned them in another order, or others.
    """
    if _is_beyond_rounding(call, off_at_the_end) and not _is_beyond_rounding(call, off):
        raise UnsupportedError(
            message(
                f"{type(call.cell).__name__} has other states than {call.cell.registered_for} in {call.layer!r}.",
                got=f"states after the last step that differ by {off_at_the_end:.2g} (relative)",
                expected=f"{', '.join(call.cell.states)}, in this order",
                hint="the layer's states in the order of its cell, its output first",
            )
        )


def refuse_other_states(call: Any) -> None:
    """Refuse a layer whose states are not those of its cell.

    Raises
    ------
    UnsupportedError
        If their number or sizes differ.
    """
    sizes = tuple(int(s.shape[-1]) for s in call.initial_state)
    if call.cell.registered_for and sizes != tuple(call.cell.state_sizes):
        raise UnsupportedError(
            message(
                f"{type(call.cell).__name__} has other states than {call.cell.registered_for} in {call.layer!r}.",
                got=f"states of sizes {sizes}",
                expected=f"{', '.join(call.cell.states)} of sizes {tuple(call.cell.state_sizes)}",
                hint="the layer's states in the order of its cell, its output first; state_sizes in the class",
            )
        )


def _is_beyond_rounding(call: Any, off: float) -> bool:
    bound = _ROUNDING.get(str(call.compute_dtype or call.output.dtype).rpartition(".")[2])
    return bound is not None and not off <= bound
