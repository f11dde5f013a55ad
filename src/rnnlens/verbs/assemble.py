"""Arrays of one or two directions, in whatever library, to one set of NumPy arrays per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..results.schema import to_host

#: Variables of one call by name; a tuple stands for states to be stacked.
Arrays = dict[str, Any]

#: What both halves of a bidirectional layer are fed, and what they send back to it.
_SHARED, _SUMMED = frozenset({"input", "mask"}), frozenset({"input_grad"})
_WITHOUT_TIME = ("initial_", "final_")


def join_directions(halves: Sequence[Arrays]) -> dict[str, np.ndarray[Any, Any]]:
    """One half: as it is. Two halves: a direction axis after time (after sample where there is no time)."""
    ready = [{name: _stack_states(array) for name, array in half.items()} for half in halves]
    if len(ready) == 1:
        return ready[0]
    first, second = ready
    joined: dict[str, np.ndarray[Any, Any]] = {}
    for name, array in first.items():
        if name in _SHARED:
            joined[name] = array
        elif name in _SUMMED:
            joined[name] = array + second[name]
        else:
            joined[name] = np.stack([array, second[name]], axis=_direction_axis(name, array))
    return joined


def _stack_states(array: Any) -> np.ndarray[Any, Any]:
    """(sample, unit) per state to (sample, state, unit)."""
    if isinstance(array, tuple):
        return np.stack([to_host(state) for state in array], axis=1)
    return to_host(array)


def _direction_axis(name: str, array: np.ndarray[Any, Any]) -> int:
    return 1 if name.startswith(_WITHOUT_TIME) or array.ndim < 3 else 2
