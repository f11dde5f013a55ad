"""Executes a plan piece by piece, into memory or onto disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from typing import Any

import numpy as np

from ...results.array import ResultArray
from ...results.checks import warn_about
from ...settings import Progress
from ...vocabulary import DIRECTION, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE
from ..sweep import replay_check
from .composed import compose_piece
from .label import Labels
from .pieces import Piece
from .plan import IN_DIRECTION, Part, Plan
from .sweep import sweep_piece
from .tally import Tally
from .uncut import pull_piece

Values = np.ndarray[Any, Any]
Advance = Callable[[], None]


def execute(labels: Labels, out: str | PathLike[str] | None = None) -> ResultArray:
    """Everything that was planned, labelled; written to a file piece by piece where one is named."""
    plan, tally = labels.plan, Tally()
    checks = [replay_check(one.half.call, one.half.run) for one in plan.network.recurrences]
    if out is None:
        found = labels.array(numbers(plan, tally), tally, checks)
    else:
        from .store import ZarrTarget  # which loads Zarr

        with ZarrTarget(out, labels, tally, checks) as target, Progress("time Jacobian", plan.ticks) as progress:
            for part in plan.parts:
                _fill(target, plan, part, tally, progress.advance)
        found = target.result()
    warn_about(checks)
    return found


def numbers(plan: Plan, tally: Tally) -> Values:
    """What was planned, in memory; a single piece is taken as it is, without a copy."""
    with Progress("time Jacobian", plan.ticks) as progress:
        first = plan.parts[0]
        if len(plan.parts) == 1 and len(first.pieces) == 1:
            ((_, values),) = _results(first, tally, progress.advance)
            return np.asarray(values, dtype=plan.dtype).reshape(plan.shape)
        whole = np.zeros(plan.shape, dtype=plan.dtype)
        for part in plan.parts:
            _fill(whole, plan, part, tally, progress.advance)
        return whole


def _fill(target: Any, plan: Plan, part: Part, tally: Tally, advance: Advance) -> None:
    """Write every piece to its place."""
    for piece, values in _results(part, tally, advance):
        target[_index(plan, part, piece)] = _squeezed(part, values)


def _results(part: Part, tally: Tally, advance: Advance) -> Iterator[tuple[Piece, Values]]:
    """Each piece with its values, averaged over samples where that is wanted, once all of them are in."""
    waiting: dict[tuple[int, int], Values] = {}
    for piece in sorted(part.pieces, key=lambda p: (p.outs.start, p.ins.start, p.samples.start)):
        values = _values(part, piece, tally, advance)
        if not part.ends.average:
            yield piece, values
            continue
        key = (piece.outs.start, piece.ins.start)
        values = values if key not in waiting else waiting.pop(key) + values
        if piece.samples.stop == part.network.samples:
            yield piece, values / part.network.samples
        else:
            waiting[key] = values


def _values(part: Part, piece: Piece, tally: Tally, advance: Advance) -> Values:
    """([sample], out step, [row], in step, [feature]) of a piece, or measured."""
    if part.route == "direct":
        return sweep_piece(part, piece, tally, advance)
    advance()
    every = {"composed": compose_piece, "uncut": pull_piece}[part.route](part, piece, tally)
    return _measured(part, piece, every)


def _measured(part: Part, piece: Piece, every: Values) -> Values:
    """What is wanted of rows by every step of the lower end."""
    ends = part.ends
    rows = every.reshape(part.network.samples, piece.outs.stop - piece.outs.start, ends.rows, -1, ends.wrt.size)
    if ends.in_times is not None:
        rows = rows[:, :, :, ends.in_times]
    if ends.measured_by is not None:
        rows = np.stack([np.asarray(ends.measured_by(rows[:, :, :, k])) for k in range(rows.shape[3])], axis=2)
    return rows.sum(axis=0) if ends.average else rows


def _index(plan: Plan, part: Part, piece: Piece) -> tuple[Any, ...]:
    """Where a piece goes in the result."""
    places = {
        SAMPLE: piece.samples,
        OUT_TIME: piece.outs,
        DIRECTION: part.place.get(DIRECTION),
        OUT_UNIT: slice(None),
        IN_TIME: piece.ins,
        IN_DIRECTION: part.place.get(IN_DIRECTION),
        IN_FEATURE: slice(None),
    }
    return tuple(places[dim] for dim in plan.dims)


def _squeezed(part: Part, values: Values) -> Values:
    """Without the axes of tensors that have no time."""
    ends = part.ends
    lead = 0 if ends.average else 1
    in_axis = lead + (1 if ends.measured_by is not None else 2)
    axes = ([lead] if ends.out_times is None else []) + ([in_axis] if ends.in_times is None else [])
    return np.squeeze(values, axis=tuple(axes)) if axes else values
