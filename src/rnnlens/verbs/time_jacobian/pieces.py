"""Chunks of a time Jacobian, each small enough for the memory granted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...recurrence.linear import System
from ...recurrence.sweep_rows import BLOCK_BUDGET
from .direct import Direct
from .ends import Ends
from .linearised import Linearised


@dataclass(frozen=True)
class Piece:
    """One chunk: which samples, which output steps and which input steps (positions among those asked for)."""

    samples: slice
    outs: slice
    ins: slice

    def count(self) -> int:
        """Pairs of steps, of all its samples."""
        return math.prod(part.stop - part.start for part in (self.samples, self.outs, self.ins))

    def __str__(self) -> str:
        parts = {"samples": self.samples, "outs": self.outs, "ins": self.ins}
        return ", ".join(f"{name} {part.start}:{part.stop}" for name, part in parts.items())


def direct_pieces(direct: Direct, mode: str, memory: int) -> tuple[list[Piece], int]:
    """Chunks of samples first, which cost nothing extra, then of steps; and the bytes that one of them takes."""
    ends, system = direct.ends, direct.one.system
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
    numbers = math.prod(ends.tail) if ends.measured_by is not None else ends.rows * ends.wrt.size
    return steps * numbers * system.work.itemsize


def composed_pieces(recurrences: Sequence[Linearised], ends: Ends, memory: int) -> tuple[list[Piece], int]:
    """Chunks of output steps, so that the fields of all rows fit; and the bytes that one of them takes."""
    system = recurrences[0].system
    widest = max(one.system.features + 2 * one.system.rows + one.system.columns for one in recurrences)
    per_step = sum(one.system.features + one.system.columns for one in recurrences)
    time = max(one.system.time for one in recurrences)
    per_row = system.batch * (time * (per_step + 2 * ends.wrt.size) + 2 * widest) * system.work.itemsize
    count = max(1, min(ends.groups, memory // max(1, per_row * ends.rows)))
    pieces = [Piece(slice(0, system.batch), part, slice(0, ends.in_count)) for part in _slices(ends.groups, count)]
    return pieces, int(per_row * ends.rows * count)


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
