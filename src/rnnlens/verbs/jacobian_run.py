"""Computes a planned time Jacobian piece by piece, into memory or onto disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
import xarray as xr

from ..errors import InputError, UnsupportedError, message
from ..results.checks import REPLAY, Check, rounding_bound, warn_about
from ..settings import Progress
from .jacobian_composed import Composed
from .jacobian_direct import Direct
from .jacobian_graph import Graph
from .jacobian_label import Labels
from .jacobian_plan import (
    Piece,
    check_fits,
    choose_mode,
    composed_pieces,
    direct_pieces,
    direct_route,
    narrowed,
    result_bytes,
)
from .jacobian_sweep import DirectSweep
from .jacobian_target import Swept
from .jacobian_uncut import Uncut
from .jacobian_wanted import Ends, Tally

Values = np.ndarray[Any, Any]

#: Bytes for working arrays that are taken even where the result alone fills the memory granted.
LEAST_ROOM = 64 * 2**20


def compute(
    graph: Graph | None,
    swept: list[Swept],
    ends: Ends,
    labels: Labels,
    mode: str,
    rtol: float | None,
    memory: int,
    out: str | PathLike[str] | None,
) -> xr.DataArray:
    """Everything that was asked for, labelled."""
    checks = [_check(one) for one in swept]
    samples, dtype = swept[0].system.batch, _dtype(swept[0])
    shape = (*labels.shape(samples), *ends.tail) if ends.reduce is sketch_of(labels) else labels.shape(samples)
    size = result_bytes(shape, dtype.itemsize)
    if out is None:
        check_fits(size, memory, ends, reduced=ends.reduce is not None)
    elif labels.sketch is not None:
        raise InputError(message("A sketch cannot be written piece by piece.", got="sketch= and out=", hint="save it"))
    tally = Tally()
    room = memory if out is not None else max(memory - size, LEAST_ROOM)
    parts = [_Part(graph, swept, pair, mode, rtol, room, labels, i, j) for i, j, pair in pairs(ends)]
    tally.mode, tally.route = parts[0].mode, parts[0].route
    tally.peak_bytes = max(p.bytes for p in parts) + (size if out is None else max(p.piece_bytes(dtype) for p in parts))
    with Progress("time Jacobian", sum(p.steps for p in parts)) as progress:
        if out is not None:
            from .jacobian_store import ZarrTarget  # which loads Zarr

            with ZarrTarget(out, labels, samples, dtype, tally, checks) as target:
                for part in parts:
                    part.fill(target, tally, progress.advance)
            warn_about(checks)
            return target.result()
        values = _gathered(parts, shape, dtype, tally, progress.advance)
    warn_about(checks)
    return labels.array(values, tally, checks)


def sketch_of(labels: Labels) -> Any:
    """The reduction that leaves two numbers, if it is the one in use."""
    return labels.ends.reduce if labels.sketch is not None else ()


def pairs(ends: Ends) -> list[tuple[int | None, int | None, Ends]]:
    """One pair of ends for each direction of a state of a bidirectional layer, and its places along these axes."""
    starts = [
        (i if ends.of.bidirectional else None, replace(ends.of, halves=[h])) for i, h in enumerate(ends.of.halves)
    ]
    stops = [
        (i if ends.wrt.bidirectional else None, replace(ends.wrt, halves=[h])) for i, h in enumerate(ends.wrt.halves)
    ]
    return [
        (i, j, replace(ends, of=a, wrt=b))
        for i, a in starts or [(None, ends.of)]
        for j, b in stops or [(None, ends.wrt)]
    ]


def _gathered(parts: list[_Part], shape: tuple[int, ...], dtype: Any, tally: Tally, advance: Any) -> Values:
    """In memory; a single piece is taken as it is, without a copy."""
    if len(parts) == 1 and len(parts[0].pieces) == 1:
        ((_, values),) = parts[0].results(tally, advance)
        return np.asarray(values, dtype=dtype).reshape(shape)
    whole = np.zeros(shape, dtype=dtype)
    for part in parts:
        part.fill(whole, tally, advance)
    return whole


class _Part:
    """One pair of ends: its route, its pieces, and where they go."""

    def __init__(
        self,
        graph: Graph | None,
        swept: list[Swept],
        ends: Ends,
        mode: str,
        rtol: float | None,
        memory: int,
        labels: Labels,
        of_direction: int | None,
        wrt_direction: int | None,
    ) -> None:
        self.swept, self.ends, self.rtol, self.labels = swept, ends, rtol, labels
        self.of_direction, self.wrt_direction = of_direction, wrt_direction
        uncut = graph is not None and not graph.cut
        self.direct: Direct | None = None if uncut else direct_route(graph, swept, ends)
        self.composed: Composed | Uncut = Composed(graph, swept, ends)
        if graph is not None and not graph.cut:
            self.composed = Uncut(graph, swept, ends)
        self.mode = choose_mode(self.direct, "reverse" if labels.sketch is not None else mode)
        self.route = "uncut" if uncut else "composed" if self.direct is None else "direct"
        if self.direct is None and rtol is not None:
            raise UnsupportedError(
                message(
                    "rtol= prunes sweeps through one recurrent layer with nothing but time-local layers around it.",
                    got=f"rtol={rtol}",
                    hint="leave rtol= out, or of= and wrt= that enclose one recurrent layer",
                )
            )
        if self.direct is not None:
            self.pieces, self.bytes = direct_pieces(self.direct, self.mode, memory)
        else:
            self.pieces, self.bytes = composed_pieces(swept, ends, memory)

    @property
    def steps(self) -> int:
        """Ticks of the progress bar."""
        return len(self.pieces) * (1 if self.direct is None else self.direct.swept.system.time)

    def piece_bytes(self, dtype: Any) -> int:
        """Largest result of one piece."""
        ends, piece = self.ends, self.pieces[0]
        numbers = (piece.samples.stop - piece.samples.start) * (piece.outs.stop - piece.outs.start)
        numbers *= (piece.ins.stop - piece.ins.start) * (ends.rows * ends.wrt.size if ends.reduce is None else 1)
        return int(numbers * dtype.itemsize)

    def results(self, tally: Tally, advance: Any) -> Iterator[tuple[Piece, Values]]:
        """Each piece with its values: ([sample], out step, [row], in step, [feature]) or reduced."""
        waiting: dict[tuple[int, int], tuple[Piece, Values]] = {}
        samples = self.swept[0].system.batch
        for piece in sorted(self.pieces, key=lambda p: (p.outs.start, p.ins.start, p.samples.start)):
            values = self._values(piece, tally, advance)
            if not self.ends.average:
                yield piece, values
                continue
            key = (piece.outs.start, piece.ins.start)
            before = waiting.pop(key, None)
            values = values if before is None else before[1] + values
            if piece.samples.stop == samples:
                yield piece, values / samples
            else:
                waiting[key] = (piece, values)

    def fill(self, target: Any, tally: Tally, advance: Any) -> None:
        """Write every piece to its place."""
        for piece, values in self.results(tally, advance):
            index = self._index(piece)
            target[index] = self._squeezed(values)

    def _index(self, piece: Piece) -> tuple[Any, ...]:
        places = {
            "sample": piece.samples,
            "out_time": piece.outs,
            "direction": self.of_direction,
            "out_unit": slice(None),
            "in_time": piece.ins,
            "in_direction": self.wrt_direction,
            "in_feature": slice(None),
        }
        return tuple(places[dim] for dim in self.labels.dims)

    def _squeezed(self, values: Values) -> Values:
        """Without the axes of tensors that have no time."""
        lead = 0 if self.ends.average else 1
        in_axis = lead + (1 if self.ends.reduce is not None else 2)
        axes = ([lead] if self.ends.out_times is None else []) + ([in_axis] if self.ends.in_times is None else [])
        return np.squeeze(values, axis=tuple(axes)) if axes else values

    def _values(self, piece: Piece, tally: Tally, advance: Any) -> Values:
        if self.direct is None:
            advance()
            return self._composed(piece, tally)
        direct = narrowed(self.direct, piece.ins)
        times = direct.times[piece.outs]
        return DirectSweep(direct, self.mode, piece.samples, times, self.rtol).values(tally, advance)

    def _composed(self, piece: Piece, tally: Tally) -> Values:
        ends = self.ends
        times = None if ends.out_times is None else ends.out_times[piece.outs]
        found = self.composed.pull(ends.of, ends.wrt, times, tally)
        batch, groups = self.swept[0].system.batch, 1 if times is None else len(times)
        rows = found[0]
        rows = rows.reshape(batch, groups, ends.rows, -1, ends.wrt.size)
        if ends.in_times is not None:
            rows = rows[:, :, :, ends.in_times]
        if ends.reduce is not None:
            rows = np.stack([np.asarray(ends.reduce(rows[:, :, :, k])) for k in range(rows.shape[3])], axis=2)
        return rows.sum(axis=0) if ends.average else rows


def _check(one: Swept) -> Check:
    call, run = one.half.call, one.half.run
    bound = rounding_bound(call.compute_dtype or call.output.dtype, int(call.input.shape[1]))
    return Check(REPLAY, call.layer, run.residual, bound)


def _dtype(one: Swept) -> np.dtype[Any]:
    found: np.dtype[Any] = one.work.numpy(one.half.run.input[:0]).dtype
    return found
