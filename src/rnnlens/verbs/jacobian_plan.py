"""Which route and sweep, in which chunks, within which memory; refused before computing where nothing would fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..adapters.protocol import Port
from ..errors import TooLargeError, UnsupportedError, message
from ..recurrence.linear import System
from ..recurrence.sweep_parts import BLOCK_BUDGET
from ..settings import format_memory
from .inside import like
from .jacobian_composed import Composed, through_rows
from .jacobian_direct import Direct
from .jacobian_graph import Graph, Link
from .jacobian_target import Swept, Tensor
from .jacobian_wanted import Ends


@dataclass(frozen=True)
class Piece:
    """One chunk: which samples, which output steps and which input steps (positions among those asked for)."""

    samples: slice
    outs: slice
    ins: slice


def direct_route(graph: Graph | None, swept: list[Swept], ends: Ends) -> Direct | None:
    """The direct route, if there is one: a single recurrent call between the ends, all links local."""
    entry = _entry(graph, swept, ends)
    if entry is None:
        return None
    index, state, readout = entry
    one, wrt = swept[index], ends.wrt
    if wrt.port is None:
        return Direct(one, state, readout, None, ends) if wrt.halves[0] is one else None
    link = _below(graph, swept, one, wrt, ends)
    return None if link is None else Direct(one, state, readout, link, ends)


def _entry(graph: Graph | None, swept: list[Swept], ends: Ends) -> tuple[int, int, object] | None:
    """The one recurrent call in which rows start: its number, the state, and the readout from it."""
    of = ends.of
    if of.port is None:
        index = next(i for i, one in enumerate(swept) if one is of.halves[0])
        return index, of.state, ends.weights
    assert graph is not None
    composed = Composed(graph, swept, ends)
    useful = [
        (port, link)
        for port, link in graph.reach(of.port).items()
        if port == ends.wrt.port
        or any(port in one.half.above() and composed.is_useful(i, ends.wrt) for i, one in enumerate(swept))
    ]
    if len(useful) != 1 or useful[0][0] == ends.wrt.port:
        return None
    port, link = useful[0]
    index = next(i for i, one in enumerate(swept) if port in one.half.above())
    one = swept[index]
    if port != one.half.above()[0]:
        return None
    if link.kind == "local" and one.half.call.returns_sequences:
        identity = link.block is None and ends.weights is None
        return index, one.output, None if identity else through_rows(link, ends.rows_at(of.size))
    if link.kind == "flat" and not one.half.call.returns_sequences:
        assert link.block is not None
        return index, one.output, (like(ends.rows_at(of.size)[:, 0], link.block) @ link.block)[:, None]
    return None


def _below(graph: Graph | None, swept: list[Swept], one: Swept, wrt: Tensor, ends: Ends) -> Link | None:
    """The one local link from the layer's input to what we differentiate by."""
    assert graph is not None
    composed = Composed(graph, swept, ends)
    found: list[tuple[Port, Link]] = []
    below, *initial = one.half.below()
    for source in (below, *initial):
        for sink, link in graph.reach(source).items():
            above = [i for i, other in enumerate(swept) if sink in other.half.above()]
            if sink == wrt.port or any(composed.is_useful(i, wrt) for i in above):
                found.append((source, link))
    if len(found) != 1:
        return None
    source, link = found[0]
    return link if source == below and link.sink.port == wrt.port and link.kind == "local" else None


def choose_mode(direct: Direct | None, mode: str) -> str:
    """Forward or reverse: what was asked for, or what takes fewer operations.

    Raises
    ------
    UnsupportedError
        If a forward sweep was asked for where there is no direct route.
    """
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


def result_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Size of a result."""
    return math.prod(shape) * itemsize


def check_fits(size: int, memory: int, ends: Ends, *, reduced: bool) -> None:
    """Refuse a result that would not fit, naming cheaper calls.

    Raises
    ------
    TooLargeError
        Always if ``size`` exceeds ``memory``.
    """
    if size <= memory:
        return
    hints = []
    if not reduced:
        pairs = size // max(1, ends.rows * ends.wrt.size)
        hints.append(f'reduce="norm" ({format_memory(pairs)})')
        if ends.weights is None:
            hints.append(f'project="mean" ({format_memory(size // ends.rows)})')
    if ends.out_times is not None and len(ends.out_times) > 1:
        hints.append(f"out_times=[{ends.out_times[-1]}] ({format_memory(size // len(ends.out_times))})")
    if not ends.average:
        hints.append('average="sample"')
    hints.append('out="jacobian.zarr", which is written piece by piece')
    raise TooLargeError(
        message(
            "The time Jacobian would not fit into the memory granted.",
            got=f"a result of {format_memory(size)}",
            expected=f"at most {format_memory(memory)} (memory=)",
            hint="; or ".join(hints),
        )
    )


def direct_pieces(direct: Direct, mode: str, memory: int) -> tuple[list[Piece], int]:
    """Chunks of samples first, which cost nothing extra, then of steps; and the bytes that one of them takes."""
    ends, system = direct.ends, direct.swept.system
    outs, ins = len(direct.times), len(direct.in_times)
    groups = outs if mode == "reverse" else ins
    per_group = direct.buffer_bytes(mode, 1) + _collected(ends, outs if mode == "forward" else ins, system)
    block = min(BLOCK_BUDGET, system.time * system.numbers(True) * system.work.itemsize)
    units = direct.unit_bytes(mode)
    room = max(memory - block, per_group + units)
    samples = max(1, min(system.batch, room // max(1, per_group * groups + units)))
    count = groups if samples * (groups * per_group + units) <= room else max(1, (room - units) // per_group)
    pieces = []
    for rows in _slices(system.batch, samples):
        for part in _slices(groups, count):
            whole = slice(0, ins if mode == "reverse" else outs)
            pieces.append(Piece(rows, part, whole) if mode == "reverse" else Piece(rows, whole, part))
    return pieces, int(block * min(samples, system.batch) + samples * (count * per_group + units))


def _collected(ends: Ends, steps: int, system: System) -> int:
    """Bytes that a sweep collects per sample and group before they go to the result."""
    numbers = int(np.prod(ends.tail)) if ends.reduce is not None else ends.rows * ends.wrt.size
    return steps * numbers * system.work.itemsize


def composed_pieces(swept: list[Swept], ends: Ends, memory: int) -> tuple[list[Piece], int]:
    """Chunks of output steps, so that the fields of all rows fit."""
    system = swept[0].system
    widest = max(one.system.features + 2 * one.system.rows + one.system.columns for one in swept)
    per_step = sum(one.system.features + one.system.columns for one in swept)
    time = max(one.system.time for one in swept)
    per_row = system.batch * (time * (per_step + 2 * ends.wrt.size) + 2 * widest) * system.work.itemsize
    count = max(1, min(ends.groups, memory // max(1, per_row * ends.rows)))
    ins = 1 if ends.in_times is None else len(ends.in_times)
    pieces = [Piece(slice(0, system.batch), part, slice(0, ins)) for part in _slices(ends.groups, count)]
    return pieces, int(per_row * ends.rows * count)


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def narrowed(direct: Direct, ins: slice) -> Direct:
    """The same for some of the input steps."""
    if direct.ends.in_times is None:
        return direct
    return replace(direct, ends=replace(direct.ends, in_times=direct.ends.in_times[ins]))
