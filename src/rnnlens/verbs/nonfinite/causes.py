"""What a function does where it is not finite, told by moving an argument: a pole, a logarithm, an overflow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ...recurrence.nonfinite import NonfiniteValue, on_cpu
from ...recurrence.replay import Replay
from ...typing import Array
from ...vocabulary import SAMPLE, TIME

#: How far an argument is moved, each ten times nearer: far enough for single precision, near enough for the pole.
_DISTANCES = (1e-1, 1e-2, 1e-3)
#: How far, where nothing near is finite: out of what a function has no values for, or back to what it can hold.
_FAR = (1.0, 10.0, 100.0)


def singularity(function: Callable[[float], float], at: float) -> str:
    """What makes a function of one number not finite at a place; ``""`` where nothing that moves it tells.

    Nearer to a pole of order p values grow by 10 to the p at each of the distances 1e-1, 1e-2, 1e-3; at the end of a
    logarithm they grow by the same amount each time.

    >>> singularity(lambda v: -math.log(v) if v > 0 else math.inf, 0.0)
    'log of 0'
    >>> singularity(lambda v: 1 / v if v else math.inf, 0.0)
    'division by 0'
    >>> singularity(lambda v: math.sqrt(v) if v >= 0 else math.nan, -4.0)
    'log, root or power of a negative number'
    >>> singularity(lambda v: v * v if abs(v) < 1e19 else math.inf, 1e30)
    'overflow'
    """
    scale = max(1.0, abs(at))
    for side in (1.0, -1.0):
        values = [function(at + side * distance * scale) for distance in _DISTANCES]
        if all(map(math.isfinite, values)):
            return _by_growth(values)
    far = [function(at + side * distance * scale) for distance in _FAR for side in (1.0, -1.0)]
    if not any(map(math.isfinite, far)):
        return ""
    return "log, root or power of a negative number" if math.isnan(function(at)) else "overflow"


def _by_growth(values: Sequence[float]) -> str:
    first, second = abs(values[1] - values[0]), abs(values[2] - values[1])
    if first == 0.0 or second < 0.5 * first:
        return ""
    return "log of 0" if second < 2.0 * first else "division by 0"


def slope(gradient: Callable[[float], float], at: float) -> str:
    """What has no derivative at a place where it has a value, by how the derivative grows towards it.

    >>> slope(lambda v: 0.5 / math.sqrt(v) if v > 0 else math.inf, 0.0)
    'root of 0, which has no derivative there'
    """
    for side in (1.0, -1.0):
        values = [abs(gradient(at + side * distance)) for distance in _DISTANCES]
        if all(math.isfinite(v) and v > 0 for v in values):
            power = math.log10(values[2] / values[1])
            if 0.2 < power < 0.8:
                return "root of 0, which has no derivative there"
            return "log of 0" if 0.8 <= power < 1.5 else "division by 0" if power >= 1.5 else ""
    return ""


def in_a_cell(run: Replay, spot: NonfiniteValue) -> str:
    """Which number of its input or state a cell of unknown equations cannot take, told by moving one after the other.

    The cell runs once on all of the numbers moved one by one.
    """
    sample, t = spot.index[SAMPLE], spot.index[TIME]
    x = on_cpu(run.input)[sample, t]
    states = [on_cpu(s)[sample] for s in run.state_before(t)]
    parts = [("input", "feature", x), *((n, "unit", s) for n, s in zip(run.cell.state_names, states, strict=True))]
    before = " and ".join(f"{name} up to {np.max(np.abs(v), initial=0.0):.3g}" for name, _, v in parts)
    for name, dim, values in parts:
        for position in _suspects(values):
            function = _moving(run, spot, x, states, name, position)
            found = singularity(function, float(values[position]))
            if found:
                return f"{found} in the cell, with {name} {values[position]:.3g} at {dim} {position}; {before}"
    return f"what the cell makes of {before}"


def _suspects(values: Array) -> list[int]:
    """Zeros first, then the largest: at most a few."""
    order = np.argsort(np.abs(values))
    return [int(i) for i in dict.fromkeys([*order[:4], *order[::-1][:4]])]


def _moving(
    run: Replay, spot: NonfiniteValue, x: Array, states: Sequence[Array], name: str, position: int
) -> Callable[[float], float]:
    """The number at a spot as a function of one number that the cell is fed."""
    names = list(run.cell.state_names)

    def function(value: float) -> float:
        fed, held = x.copy(), [s.copy() for s in states]
        target = fed if name == "input" else held[names.index(name)]
        target[position] = value
        output, new = run.cell.advance(_like(fed[None], run), [_like(s[None], run) for s in held])  # type: ignore[attr-defined]
        made = output if spot.quantity == "output" else new[names.index(spot.quantity)]
        return float(on_cpu(made)[0, spot.index["unit"]])

    return function


def _like(array: Array, run: Replay) -> Array:
    return run.xp.asarray(array, dtype=run.input.dtype, device=getattr(run.input, "device", None))
