"""The plan of a time Jacobian: route, sweep mode, pieces and memory. It contains data only and computes nothing.

A result that would not fit into memory is refused here, before the computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np

from ...errors import TooLargeError, UnsupportedError
from ...recurrence.sweep_rows import BLOCK_BUDGET
from ...settings import format_memory
from ...vocabulary import DIRECTION, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE
from ..recurrent_layers import ReplayedCall
from .direct import DirectRoute, direct_route
from .network import JacobianNetwork
from .request import JacobianEnd, JacobianEnds, JacobianOptions, ends_of


@dataclass
class WorkCount:
    """Work counted during the computation: FLOPs, and rows and error of pruning.

    Attributes
    ----------
    pruned
        Whether rows were pruned on request.
    pruned_rows, pruned_error_square
        Number of pruned rows, and estimated square of the error by pruning.
    """

    flops: float = 0.0
    pruned: bool = False
    pruned_rows: int = 0
    pruned_error_square: float = 0.0


@dataclass(frozen=True)
class JacobianPiece:
    """One chunk: slices of the samples and of the requested output and input steps."""

    samples: slice
    outs: slice
    ins: slice

    def count(self) -> int:
        """Return the number of (sample, output step, input step) triples."""
        return math.prod(part.stop - part.start for part in (self.samples, self.outs, self.ins))

    def __str__(self) -> str:
        parts = {"samples": self.samples, "outs": self.outs, "ins": self.ins}
        return ", ".join(f"{name} {part.start}:{part.stop}" for name, part in parts.items())


def direct_pieces(direct: DirectRoute, mode: str, memory: int) -> tuple[list[JacobianPiece], int]:
    """Split the direct route into chunks of samples, then of steps; also return the bytes of one chunk."""
    ends, system = direct.ends, direct.one.system
    outs, ins = len(direct.times), len(direct.in_times)
    groups, others = (outs, ins) if mode == "reverse" else (ins, outs)
    collected = math.prod(ends.tail) if ends.measured_by is not None else ends.rows * ends.wrt.size
    per_group = direct.buffer_bytes(mode, 1) + others * collected * system.work.itemsize
    block = min(BLOCK_BUDGET, system.time * system.numbers(True) * system.work.itemsize)
    units = direct.unit_bytes(mode)
    room = max(memory - block, per_group + units)
    samples = max(1, min(system.batch, room // max(1, per_group * groups + units)))
    count = groups if samples * (groups * per_group + units) <= room else max(1, (room - units) // per_group)
    pieces = []
    for rows in _slices(system.batch, samples):
        for part in _slices(groups, count):
            whole = slice(0, others)
            pieces.append(JacobianPiece(rows, part, whole) if mode == "reverse" else JacobianPiece(rows, whole, part))
    return pieces, int(block * min(samples, system.batch) + samples * (count * per_group + units))


def composed_pieces(
    recurrences: Sequence[ReplayedCall], ends: JacobianEnds, memory: int, samples: int
) -> tuple[list[JacobianPiece], int]:
    """Split the output steps into chunks whose cotangents fit into memory; also return the bytes of one chunk."""
    if not recurrences:
        return _framework_pieces(ends, memory, samples)
    system = recurrences[0].system
    widest = max(one.system.features + 2 * one.system.rows + one.system.columns for one in recurrences)
    per_step = sum(one.system.features + one.system.columns for one in recurrences)
    time = max(one.system.time for one in recurrences)
    per_row = system.batch * (time * (per_step + 2 * ends.wrt.size) + 2 * widest) * system.work.itemsize
    count = max(1, min(ends.groups, memory // max(1, per_row * ends.rows)))
    pieces = [
        JacobianPiece(slice(0, system.batch), part, slice(0, ends.in_count)) for part in _slices(ends.groups, count)
    ]
    return pieces, int(per_row * ends.rows * count)


def _framework_pieces(ends: JacobianEnds, memory: int, samples: int) -> tuple[list[JacobianPiece], int]:
    """Split the output steps of a Jacobian that the framework alone computes, by the sizes of both ends."""
    per_row = 8 * samples * ((ends.of.times or 1) * ends.of.size + (ends.wrt.times or 1) * ends.wrt.size)
    count = max(1, min(ends.groups, memory // max(1, 4 * per_row * ends.rows)))
    pieces = [JacobianPiece(slice(0, samples), part, slice(0, ends.in_count)) for part in _slices(ends.groups, count)]
    return pieces, int(per_row * ends.rows * count)


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


IN_DIRECTION = "in_direction"

#: Bytes for working arrays that are used even if the result alone fills the memory limit.
LEAST_ROOM = 64 * 2**20


@dataclass(frozen=True)
class JacobianPart:
    """The pieces for one direction at either end, with their route and mode.

    Attributes
    ----------
    route
        ``"direct"``: through one recurrence; ``"composed"``: from one recurrence to the next; ``"uncut"``: by the
        framework.
    mode
        ``"forward"`` or ``"reverse"``.
    working_bytes
        Memory of one piece besides its result.
    place
        Index along each direction axis of the result.
    """

    route: Literal["direct", "composed", "uncut"]
    mode: str
    network: JacobianNetwork
    ends: JacobianEnds
    direct: DirectRoute | None
    pieces: tuple[JacobianPiece, ...]
    working_bytes: int
    place: Mapping[str, int]
    rtol: float | None = None

    @property
    def result_bytes(self) -> int:
        """Bytes of the largest result of one piece."""
        numbers = self.pieces[0].count() * (self.ends.rows * self.ends.wrt.size if self.ends.measured_by is None else 1)
        return int(numbers * self.network.dtype.itemsize)

    def __str__(self) -> str:
        where = "".join(f", {axis} {index}" for axis, index in self.place.items())
        return f"{self.route}, {self.mode}{where}: " + "; ".join(map(str, self.pieces))


@dataclass(frozen=True)
class JacobianPlan:
    """Plan of a time Jacobian: parts, dimensions, shape and memory.

    Attributes
    ----------
    dims, shape
        Dimensions and shape of the result; a sketch adds a last axis of two numbers to the shape.
    peak_bytes
        Peak memory, including the result if it is kept in memory.
    """

    network: JacobianNetwork
    ends: JacobianEnds
    parts: tuple[JacobianPart, ...]
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    peak_bytes: int

    @property
    def ticks(self) -> int:
        """Number of progress updates."""
        steps = ((part, 1 if part.direct is None else part.direct.one.system.time) for part in self.parts)
        return sum(len(part.pieces) * each for part, each in steps)

    def __str__(self) -> str:
        sizes = ", ".join(f"{dim} {size}" for dim, size in zip(self.dims, self.shape, strict=False))
        head = f"d {self.ends.of.name.text} / d {self.ends.wrt.name.text}: {sizes}; {format_memory(self.peak_bytes)}"
        return "\n".join([head, *(f"  {part}" for part in self.parts)])


def make_plan(options: JacobianOptions, network: JacobianNetwork) -> JacobianPlan:
    """Return the plan for the requested options on a network.

    Raises
    ------
    InputError
        If steps or projections do not fit the two ends.
    TooLargeError
        If the result would not fit into the memory; the message has cheaper calls.
    UnsupportedError
        If ``mode="forward"`` or ``rtol=`` is requested although the direct route does not apply.
    """
    ends = ends_of(network.of, network.wrt, options, network.samples)
    mode = "reverse" if options.sketch is not None else options.mode
    return plan_for(network, ends, mode, options.rtol, options.memory, streamed=options.out is not None)


def plan_for(
    network: JacobianNetwork, ends: JacobianEnds, mode: str, rtol: float | None, memory: int, *, streamed: bool
) -> JacobianPlan:
    """Return the plan between two ends; ``streamed`` results are written to disk and take no memory."""
    sizes, dtype = _sizes(ends, network.samples), network.dtype
    shape = (*sizes.values(), *ends.tail)
    size = math.prod(shape) * dtype.itemsize
    if size > memory and not streamed:
        raise _too_large(size, memory, ends)
    room = memory if streamed else max(memory - size, LEAST_ROOM)
    # One part per direction of a bidirectional end.
    sides: list[list[tuple[JacobianEnd, dict[str, int]]]] = [
        [(replace(end, within=(one,)), {axis: i}) for i, one in enumerate(end.within)]
        if end.bidirectional
        else [(end, {})]
        for end, axis in ((ends.of, DIRECTION), (ends.wrt, IN_DIRECTION))
    ]
    parts = tuple(
        _part(network, replace(ends, of=of, wrt=wrt), {**above, **below}, mode, rtol, room)
        for (of, above), (wrt, below) in product(*sides)
    )
    taken = max(part.result_bytes for part in parts) if streamed else size
    peak = max(part.working_bytes for part in parts) + taken
    return JacobianPlan(network, ends, parts, tuple(sizes), shape, dtype, peak)


def _sizes(ends: JacobianEnds, samples: int) -> dict[str, int]:
    """Return the dimensions of the result with their sizes."""
    sizes = {
        SAMPLE: None if ends.average else samples,
        OUT_TIME: None if ends.out_times is None else len(ends.out_times),
        DIRECTION: 2 if ends.of.bidirectional else None,
        OUT_UNIT: ends.rows if ends.measure is None else None,
        IN_TIME: None if ends.in_times is None else len(ends.in_times),
        IN_DIRECTION: 2 if ends.wrt.bidirectional else None,
        IN_FEATURE: ends.wrt.size if ends.measure is None else None,
    }
    return {dim: size for dim, size in sizes.items() if size is not None}


def _part(
    network: JacobianNetwork, ends: JacobianEnds, place: Mapping[str, int], mode: str, rtol: float | None, memory: int
) -> JacobianPart:
    """Return the part between one pair of ends: its route, the chosen mode, and pieces that fit into memory."""
    network = replace(network, of=ends.of, wrt=ends.wrt)
    direct = direct_route(network, ends) if network.is_cut else None
    if direct is not None:
        if mode == "auto":
            mode = "forward" if direct.flops("forward") < direct.flops("reverse") else "reverse"
        pieces, size = direct_pieces(direct, mode, memory)
        return JacobianPart("direct", mode, network, ends, direct, tuple(pieces), size, place, rtol)
    if rtol is not None:
        raise UnsupportedError(
            "rtol= prunes sweeps through one recurrent layer with only time-local layers around it.",
            got=f"rtol={rtol}",
            hint="leave rtol= out, or of= and wrt= that enclose one recurrent layer",
        )
    if mode == "forward":
        raise UnsupportedError(
            "A forward sweep goes through one recurrent layer with only time-local layers around it.",
            got='mode="forward"',
            hint='mode="reverse", or of= and wrt= that enclose one recurrent layer',
        )
    pieces, size = composed_pieces(network.recurrences, ends, memory, network.samples)
    route: Literal["composed", "uncut"] = "composed" if network.is_cut else "uncut"
    return JacobianPart(route, "reverse", network, ends, None, tuple(pieces), size, place)


def _too_large(size: int, memory: int, ends: JacobianEnds) -> TooLargeError:
    """Return the error for a result that would not fit into memory, with cheaper calls as a hint."""
    hints = []
    if ends.measured_by is None:
        pairs = size // max(1, ends.rows * ends.wrt.size)
        hints.append(f'measure="norm" ({format_memory(pairs)})')
        if ends.weights is None:
            hints.append(f'reduce="mean" ({format_memory(size // ends.rows)})')
    if ends.out_times is not None and len(ends.out_times) > 1:
        one = f'at={{"out_time": [{ends.out_times[-1]}]}}'
        hints.append(f"{one} ({format_memory(size // len(ends.out_times))})")
    if not ends.average:
        hints.append('across="mean"')
    hints.append('out="jacobian.zarr", which is written in chunks')
    return TooLargeError(
        "The time Jacobian is larger than the memory limit.",
        got=f"a result of {format_memory(size)}",
        expected=f"at most {format_memory(memory)} (memory=)",
        hint="; or ".join(hints),
    )
