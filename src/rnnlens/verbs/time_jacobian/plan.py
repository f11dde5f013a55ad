"""The plan of a time Jacobian: which route and sweep, in which pieces, within which memory. Data, computing nothing.

What would not fit is refused here, before computing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ...errors import TooLargeError, UnsupportedError, message
from ...settings import format_memory
from ...vocabulary import DIRECTION, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE
from .direct import Direct, direct_route
from .ends import End, Ends, ends_of
from .linearised import Linearised
from .network import Network
from .pieces import Piece, composed_pieces, direct_pieces
from .request import Options

IN_DIRECTION = "in_direction"

#: Bytes for working arrays that are taken even where the result alone fills the memory granted.
LEAST_ROOM = 64 * 2**20


@dataclass(frozen=True)
class Part:
    """What is computed in one go, but for its pieces: one direction at either end.

    Attributes
    ----------
    route
        ``"direct"``: through one recurrence; ``"composed"``: from one to the next; ``"uncut"``: by the framework.
    mode
        ``"forward"`` or ``"reverse"``.
    working_bytes
        What one piece takes beside its result.
    place
        Where it goes along the axes of direction.
    """

    route: Literal["direct", "composed", "uncut"]
    mode: str
    network: Network
    ends: Ends
    direct: Direct | None
    pieces: tuple[Piece, ...]
    working_bytes: int
    place: Mapping[str, int]
    rtol: float | None = None

    @property
    def ticks(self) -> int:
        """How often progress is told."""
        return len(self.pieces) * (1 if self.direct is None else self.direct.one.system.time)

    @property
    def result_bytes(self) -> int:
        """Largest result of one piece."""
        numbers = self.pieces[0].count() * (self.ends.rows * self.ends.wrt.size if self.ends.measured_by is None else 1)
        return int(numbers * _dtype(self.network.recurrences[0]).itemsize)

    def __str__(self) -> str:
        where = "".join(f", {axis} {index}" for axis, index in self.place.items())
        return f"{self.route}, {self.mode}{where}: " + "; ".join(map(str, self.pieces))


@dataclass(frozen=True)
class Plan:
    """How a time Jacobian is computed.

    Attributes
    ----------
    dims, shape
        Of the result; a sketch has two numbers for each of its elements.
    peak_bytes
        What is taken at most, the result included where it is kept in memory.
    """

    network: Network
    ends: Ends
    parts: tuple[Part, ...]
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    peak_bytes: int

    @property
    def route(self) -> str:
        """That of the first part."""
        return self.parts[0].route

    @property
    def mode(self) -> str:
        """That of the first part."""
        return self.parts[0].mode

    @property
    def ticks(self) -> int:
        """How often progress is told."""
        return sum(part.ticks for part in self.parts)

    def __str__(self) -> str:
        sizes = ", ".join(f"{dim} {size}" for dim, size in zip(self.dims, self.shape, strict=False))
        head = f"d {self.ends.of.name.text} / d {self.ends.wrt.name.text}: {sizes}; {format_memory(self.peak_bytes)}"
        return "\n".join([head, *(f"  {part}" for part in self.parts)])


def make_plan(options: Options, network: Network) -> Plan:
    """How to compute what was asked for.

    Raises
    ------
    InputError
        If steps or projections do not fit the two ends.
    TooLargeError
        If the result would not fit into the memory granted, with cheaper calls.
    UnsupportedError
        If ``mode="forward"`` or ``rtol=`` was asked for where no single recurrence is swept.
    """
    ends = ends_of(network.of, network.wrt, options, network.samples)
    mode = "reverse" if options.sketch is not None else options.mode
    return plan_for(network, ends, mode, options.rtol, options.memory, streamed=options.out is not None)


def plan_for(network: Network, ends: Ends, mode: str, rtol: float | None, memory: int, *, streamed: bool) -> Plan:
    """How to compute what is wanted of two ends; ``streamed``: to where the result takes no memory."""
    dims, dtype = _dims(ends), _dtype(network.recurrences[0])
    shape = (*(_sizes(ends, network.samples)[dim] for dim in dims), *ends.tail)
    size = math.prod(shape) * dtype.itemsize
    if not streamed:
        _refuse_too_large(size, memory, ends)
    room = memory if streamed else max(memory - size, LEAST_ROOM)
    parts = tuple(_part(network, pair, place, mode, rtol, room) for pair, place in _by_direction(ends))
    taken = max(part.result_bytes for part in parts) if streamed else size
    peak = max(part.working_bytes for part in parts) + taken
    return Plan(network, ends, parts, dims, shape, dtype, peak)


def _dims(ends: Ends) -> tuple[str, ...]:
    """Dimensions of the result."""
    found = [] if ends.average else [SAMPLE]
    found += [OUT_TIME] if ends.out_times is not None else []
    found += [DIRECTION] if ends.of.bidirectional else []
    found += [OUT_UNIT] if ends.measure is None else []
    found += [IN_TIME] if ends.in_times is not None else []
    found += [IN_DIRECTION] if ends.wrt.bidirectional else []
    return tuple(found + ([IN_FEATURE] if ends.measure is None else []))


def _sizes(ends: Ends, samples: int) -> dict[str, int]:
    return {
        SAMPLE: samples,
        OUT_TIME: ends.groups,
        DIRECTION: 2,
        OUT_UNIT: ends.rows,
        IN_TIME: ends.in_count,
        IN_DIRECTION: 2,
        IN_FEATURE: ends.wrt.size,
    }


def _by_direction(ends: Ends) -> Iterator[tuple[Ends, dict[str, int]]]:
    """One pair of ends for each direction of a state of a bidirectional layer, and its place along these axes."""
    for of, above in _directions(ends.of, DIRECTION):
        for wrt, below in _directions(ends.wrt, IN_DIRECTION):
            yield replace(ends, of=of, wrt=wrt), {**above, **below}


def _directions(end: End, axis: str) -> list[tuple[End, dict[str, int]]]:
    if not end.bidirectional:
        return [(end, {})]
    return [(replace(end, within=(one,)), {axis: i}) for i, one in enumerate(end.within)]


def _part(network: Network, ends: Ends, place: Mapping[str, int], mode: str, rtol: float | None, memory: int) -> Part:
    """The route between one pair of ends, the cheaper mode, and pieces that fit."""
    network = replace(network, of=ends.of, wrt=ends.wrt)
    direct = direct_route(network, ends) if network.is_cut else None
    mode = _chosen_mode(direct, mode)
    if direct is not None:
        pieces, size = direct_pieces(direct, mode, memory)
        return Part("direct", mode, network, ends, direct, tuple(pieces), size, place, rtol)
    if rtol is not None:
        raise UnsupportedError(
            message(
                "rtol= prunes sweeps through one recurrent layer with nothing but time-local layers around it.",
                got=f"rtol={rtol}",
                hint="leave rtol= out, or of= and wrt= that enclose one recurrent layer",
            )
        )
    pieces, size = composed_pieces(network.recurrences, ends, memory)
    route: Literal["composed", "uncut"] = "composed" if network.is_cut else "uncut"
    return Part(route, mode, network, ends, None, tuple(pieces), size, place)


def _chosen_mode(direct: Direct | None, mode: str) -> str:
    """Forward or reverse: what was asked for, or what takes fewer operations."""
    if direct is None:
        if mode == "forward":
            raise UnsupportedError(
                message(
                    "A forward sweep goes through one recurrent layer with nothing but time-local layers around it.",
                    got='mode="forward"',
                    hint='mode="reverse", or of= and wrt= that enclose one recurrent layer',
                )
            )
        return "reverse"
    if mode != "auto":
        return mode
    return "forward" if direct.flops("forward") < direct.flops("reverse") else "reverse"


def _refuse_too_large(size: int, memory: int, ends: Ends) -> None:
    """Refuse a result that would not fit, naming cheaper calls."""
    if size <= memory:
        return
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
    hints.append('out="jacobian.zarr", which is written piece by piece')
    raise TooLargeError(
        message(
            "The time Jacobian would not fit into the memory granted.",
            got=f"a result of {format_memory(size)}",
            expected=f"at most {format_memory(memory)} (memory=)",
            hint="; or ".join(hints),
        )
    )


def _dtype(one: Linearised) -> np.dtype[Any]:
    found: np.dtype[Any] = one.work.numpy(one.half.run.input[:0]).dtype
    return found
