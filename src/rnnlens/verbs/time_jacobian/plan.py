"""The plan of a time Jacobian as data: route, sweep mode, pieces and memory; results that are too large are refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np

from ...adapters.protocol import Port
from ...autodiff.tensors import converted_like
from ...errors import TooLargeError, UnsupportedError
from ...recurrence.jacobian import forward_flops, reverse_flops, unit_flops
from ...recurrence.linear import Pattern
from ...recurrence.sweep_reverse import plan_blocks
from ...recurrence.sweep_rows import BLOCK_BUDGET
from ...settings import format_memory, must_fit
from ...typing import Array
from ...vocabulary import DIRECTION, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE
from ..recurrent_layers import ReplayedCall
from .network import JacobianNetwork
from .request import JacobianEnd, JacobianEnds, JacobianOptions, ends_of
from .segments import Segment


@dataclass
class WorkCount:
    """Work counted during the computation: FLOPs, and rows and error of pruning."""

    flops: float = 0.0
    #: Whether rows were pruned on request.
    pruned: bool = False
    #: Number of pruned rows, and estimated square of the error by pruning.
    pruned_rows: int = 0
    pruned_error_square: float = 0.0


@dataclass(frozen=True)
class DirectRoute:
    """One recurrence that rows enter at single steps, to be read at its input or at a state."""

    replayed: ReplayedCall
    #: Index of the state that rows enter.
    state: int
    #: (sample or 1, time or 1, row, size): matrix from the state to the rows; None for the state itself.
    readout: Array | None
    #: The local segment below the layer's input; None if the lower end is a state of the layer.
    below: Segment | None
    ends: JacobianEnds
    #: Steps at which rows enter.
    times: list[int]
    #: Requested input steps; -1 for the initial state.
    in_times: list[int]
    #: Sharing pattern for rows of all state units that never mix; None with a readout or without a pattern.
    pattern: Pattern | None

    def active_rows(self) -> np.ndarray[Any, Any]:
        """Return the number of active rows at each step of a reverse sweep, in the order of the sweep."""
        run, ends = self.replayed.run, self.ends
        position = {t: i for i, t in enumerate(run.steps())}
        out_positions = sorted(position[t] for t in self.times)
        in_positions = [position.get(t, -1) for t in self.in_times]
        steps = np.arange(max(min(in_positions), 0), out_positions[-1] + 1)
        counts: np.ndarray[Any, Any] = ends.rows * (len(out_positions) - np.searchsorted(out_positions, steps))
        return counts[::-1]

    def flops(self, mode: str) -> float:
        """Return the FLOPs of a sweep in a mode, ``"forward"`` or ``"reverse"``."""
        run, system, ends = self.replayed.run, self.replayed.system, self.ends
        if mode == "reverse" and self.pattern is not None:
            features = 1 if self.below is None or ends.measured_by is not None else ends.wrt.size
            return unit_flops(system, self.state, self.active_rows() // ends.rows, features)
        if mode == "reverse":
            return reverse_flops(system, self.active_rows(), self.below is not None)
        position = {t: i for i, t in enumerate(run.steps())}
        last_position = max(position[t] for t in self.times)
        in_positions = sorted(position.get(t, -1) for t in self.in_times)
        active_rows = ends.wrt.size * np.searchsorted(in_positions, np.arange(in_positions[0] + 1, last_position + 1))
        return forward_flops(system, int(active_rows.sum()), 0 if self.readout is None else ends.rows)

    def buffer_bytes(self, mode: str) -> int:
        """Return the buffer bytes per sample for one output step (reverse) or input step (forward)."""
        system = self.replayed.system
        if mode == "forward":
            return self.ends.wrt.size * (2 * system.rows + system.scratch) * system.work.itemsize
        rows, features = (self.ends.rows, system.features) if self.pattern is None else (self.pattern.count, 0)
        return rows * (3 * system.rows + 2 * features + system.scratch) * system.work.itemsize

    def unit_bytes(self, mode: str) -> int:
        """Return the extra bytes per sample of a blocked reverse sweep, independent of the number of output steps."""
        system = self.replayed.system
        if mode == "forward" or self.below is None or self.pattern is not None:
            return 0
        length = plan_blocks(system, self.active_rows(), system.features).length
        width = 3 * system.rows + (2 + length) * system.features + system.scratch
        return system.rows * width * system.work.itemsize if length else 0


def direct_route(network: JacobianNetwork, ends: JacobianEnds) -> DirectRoute | None:
    """Return the route of a single sweep; None unless one recurrence with time-local layers is on the path."""
    start = _start_of_rows(network, ends)
    if start is None:
        return None
    replayed, state, readout, step = start
    below = None
    if ends.wrt.port is not None:  # only one local segment leads from the layer's input to the lower end
        own_input, wrt = replayed.lower_ports()[0], ends.wrt.port
        lower_segments = [
            (port, *segment) for port in replayed.lower_ports() for segment in _on_path(network, port, wrt)
        ]
        if (
            len(lower_segments) != 1
            or lower_segments[0][:2] != (own_input, wrt)
            or lower_segments[0][2].kind != "local"
        ):
            return None
        below = lower_segments[0][2]
    elif ends.wrt.within[0] is not replayed:
        return None
    times = ends.out_times or [replayed.last_step if step is None else step]
    pattern = replayed.system.pattern(state) if readout is None else None
    return DirectRoute(replayed, state, readout, below, ends, times, ends.in_times or [-1], pattern)


def _start_of_rows(
    network: JacobianNetwork, ends: JacobianEnds
) -> tuple[ReplayedCall, int, Array | None, int | None] | None:
    """Find the recurrence, state, readout and fixed step at which cotangent rows start; None if there is none."""
    of = ends.of
    if of.port is None:
        return of.within[0], of.state, ends.weights, None
    segments_on_path = _on_path(network, of.port, ends.wrt.port)
    if len(segments_on_path) != 1 or segments_on_path[0][0] == ends.wrt.port:
        return None
    port, segment = segments_on_path[0]
    replayed = network.recurrences[network.returned_by[port]]
    if port != replayed.upper_ports()[0]:
        return None
    rows, has_sequences = ends.rows_pulled, replayed.call.returns_sequences
    if segment.kind == "local" and has_sequences:
        identity = segment.block is None and ends.weights is None
        return replayed, replayed.run.output_state, None if identity else segment.at_every_step(rows), None
    if segment.kind == "step" and has_sequences:
        return replayed, replayed.run.output_state, segment.at_every_step(rows), segment.step
    if segment.kind == "flat" and not has_sequences:
        assert segment.block is not None
        return (
            replayed,
            replayed.run.output_state,
            (converted_like(rows[:, 0], segment.block) @ segment.block)[:, None],
            None,
        )
    return None


def _on_path(network: JacobianNetwork, port: Port, wrt: Port | None) -> list[tuple[Port, Segment]]:
    """Return the derivatives (segments) of a tensor by those tensors below it that lead to the lower end."""
    return [
        (below, segment)
        for below, segment in network.segment_graph.lower_segments(port).items()
        if below == wrt or network.returned_by.get(below) in network.path.recurrences
    ]


@dataclass(frozen=True)
class JacobianPiece:
    """One chunk: slices of the samples and of the requested output and input steps."""

    samples: slice
    outs: slice
    ins: slice

    def count(self) -> int:
        """Return the number of (sample, output step, input step) triples."""
        return math.prod(int(part.stop - part.start) for part in (self.samples, self.outs, self.ins))

    def __str__(self) -> str:
        parts = {"samples": self.samples, "outs": self.outs, "ins": self.ins}
        return ", ".join(f"{name} {part.start}:{part.stop}" for name, part in parts.items())


def direct_pieces(direct: DirectRoute, mode: str, memory: int) -> tuple[list[JacobianPiece], int]:
    """Split the direct route into chunks of samples, then of steps; also return the bytes of one chunk."""
    ends, system = direct.ends, direct.replayed.system
    outs, ins = len(direct.times), len(direct.in_times)
    groups, other_count = (outs, ins) if mode == "reverse" else (ins, outs)
    collected = math.prod(ends.tail) if ends.measured_by is not None else ends.rows * ends.wrt.size
    per_group = direct.buffer_bytes(mode) + other_count * collected * system.work.itemsize
    block = min(BLOCK_BUDGET, system.time * system.numbers(True) * system.work.itemsize)
    units = direct.unit_bytes(mode)
    available_bytes = max(memory - block, per_group + units)
    samples = max(1, min(system.batch, available_bytes // max(1, per_group * groups + units)))
    count = (
        groups
        if samples * (groups * per_group + units) <= available_bytes
        else max(1, (available_bytes - units) // per_group)
    )
    pieces = []
    for rows in _slices(system.batch, samples):
        for part in _slices(groups, count):
            all_others = slice(0, other_count)
            pieces.append(
                JacobianPiece(rows, part, all_others) if mode == "reverse" else JacobianPiece(rows, all_others, part)
            )
    return pieces, int(block * min(samples, system.batch) + samples * (count * per_group + units))


def composed_pieces(
    recurrences: Sequence[ReplayedCall], ends: JacobianEnds, memory: int, samples: int
) -> tuple[list[JacobianPiece], int]:
    """Split the output steps into chunks whose cotangents fit into memory; also return the bytes of one chunk."""
    if recurrences:
        systems = [replayed.system for replayed in recurrences]
        widest = max(system.features + 2 * system.rows + system.columns for system in systems)
        per_step = sum(system.features + system.columns for system in systems) + 2 * ends.wrt.size
        numbers = max(system.time for system in systems) * per_step + 2 * widest
        samples, per_row, copies = systems[0].batch, systems[0].batch * numbers * systems[0].work.itemsize, 1
    else:  # by the framework alone: an estimate from the sizes of both ends
        numbers = (ends.of.times or 1) * ends.of.size + (ends.wrt.times or 1) * ends.wrt.size
        per_row, copies = 8 * samples * numbers, 4
    count = max(1, min(ends.groups, memory // max(1, copies * per_row * ends.rows)))
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
    """The pieces for one direction at either end, with their route and mode."""

    #: ``"direct"``: through one recurrence; ``"composed"``: from one recurrence to the next; ``"uncut"``: by the
    #: framework.
    route: Literal["direct", "composed", "uncut"]
    #: ``"forward"`` or ``"reverse"``.
    mode: str
    network: JacobianNetwork
    ends: JacobianEnds
    direct: DirectRoute | None
    pieces: tuple[JacobianPiece, ...]
    #: Memory of one piece besides its result.
    working_bytes: int
    #: Index along each direction axis of the result.
    direction_index: Mapping[str, int]
    rtol: float | None = None

    def __str__(self) -> str:
        place_text = "".join(f", {axis} {index}" for axis, index in self.direction_index.items())
        return f"{self.route}, {self.mode}{place_text}: " + "; ".join(map(str, self.pieces))


@dataclass(frozen=True)
class JacobianPlan:
    """Plan of a time Jacobian: parts, dimensions, shape and memory."""

    network: JacobianNetwork
    ends: JacobianEnds
    parts: tuple[JacobianPart, ...]
    #: Dimensions and shape of the result; a sketch adds a last axis of two numbers to the shape.
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    #: Peak memory, including the result if it is kept in memory.
    peak_bytes: int
    #: Number of progress updates.
    ticks: int

    def __str__(self) -> str:
        sizes = ", ".join(f"{dim} {size}" for dim, size in zip(self.dims, self.shape, strict=False))
        title = f"d {self.ends.of.name.text} / d {self.ends.wrt.name.text}: {sizes}; {format_memory(self.peak_bytes)}"
        return "\n".join([title, *(f"  {part}" for part in self.parts)])


def make_plan(options: JacobianOptions, network: JacobianNetwork) -> JacobianPlan:
    """Choose route, mode and pieces for a time Jacobian between two ends of a network."""
    ends = ends_of(network.of, network.wrt, options, network.samples)
    mode = "reverse" if options.sketch is not None else options.mode
    return plan_for(network, ends, mode, options.rtol, options.memory, streamed=options.out is not None)


def plan_for(
    network: JacobianNetwork, ends: JacobianEnds, mode: str, rtol: float | None, memory: int, *, streamed: bool
) -> JacobianPlan:
    """Plan the time Jacobian between two ends; ``streamed`` results are written to disk and take no memory."""
    possible_sizes = {
        SAMPLE: None if ends.average else network.samples,
        OUT_TIME: None if ends.out_times is None else len(ends.out_times),
        DIRECTION: 2 if len(ends.of.within) > 1 else None,
        OUT_UNIT: ends.rows if ends.measure is None else None,
        IN_TIME: None if ends.in_times is None else len(ends.in_times),
        IN_DIRECTION: 2 if len(ends.wrt.within) > 1 else None,
        IN_FEATURE: ends.wrt.size if ends.measure is None else None,
    }
    sizes, dtype = {dim: size for dim, size in possible_sizes.items() if size is not None}, network.dtype
    shape = (*sizes.values(), *ends.tail)
    size = math.prod(shape) * dtype.itemsize
    if size > memory and not streamed:
        raise _too_large_error(size, memory, ends)
    available_bytes = memory if streamed else max(memory - size, LEAST_ROOM)
    # One part per direction of a bidirectional end.
    ends_by_direction: list[list[tuple[JacobianEnd, dict[str, int]]]] = [
        [(replace(end, within=(replayed,)), {axis: i}) for i, replayed in enumerate(end.within)]
        if len(end.within) > 1
        else [(end, {})]
        for end, axis in ((ends.of, DIRECTION), (ends.wrt, IN_DIRECTION))
    ]
    parts = tuple(
        _plan_part(network, replace(ends, of=of, wrt=wrt), {**out_place, **in_place}, mode, rtol, available_bytes)
        for (of, out_place), (wrt, in_place) in product(*ends_by_direction)
    )
    if streamed:  # the largest result of one piece
        numbers = ends.rows * ends.wrt.size if ends.measured_by is None else 1
        size = max(part.pieces[0].count() for part in parts) * numbers * dtype.itemsize
    peak = max(part.working_bytes for part in parts) + size
    steps = [len(part.pieces) * (1 if part.direct is None else part.direct.replayed.system.time) for part in parts]
    return JacobianPlan(network, ends, parts, tuple(sizes), shape, dtype, peak, sum(steps))


def _plan_part(
    network: JacobianNetwork,
    ends: JacobianEnds,
    direction_index: Mapping[str, int],
    mode: str,
    rtol: float | None,
    memory: int,
) -> JacobianPart:
    """Choose route, mode and pieces that fit into memory for the Jacobian between one direction of either end."""
    network = replace(network, of=ends.of, wrt=ends.wrt)
    for replayed in network.recurrences:
        size = replayed.system.numbers(True) * replayed.system.work.itemsize
        if size > memory:  # one step of one sample, as of a convolutional cell
            message = f"The Jacobian of one step of {replayed.call.layer!r} is larger than the memory limit."
            hint = "rl.gradients(model, x, of=..., wrt=...) of single outputs needs no such matrix"
            states = f"{replayed.system.rows} by {replayed.system.columns} states: {{}}"
            must_fit(message, size, hint, got=states, limit=memory)
    direct = direct_route(network, ends) if network.is_cut else None
    if direct is not None:
        if mode == "auto":
            mode = "forward" if direct.flops("forward") < direct.flops("reverse") else "reverse"
        pieces, size = direct_pieces(direct, mode, memory)
        return JacobianPart("direct", mode, network, ends, direct, tuple(pieces), size, direction_index, rtol)
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
    return JacobianPart(route, "reverse", network, ends, None, tuple(pieces), size, direction_index)


def _too_large_error(size: int, memory: int, ends: JacobianEnds) -> TooLargeError:
    """Return the error for a result that would not fit into memory, with cheaper calls as a hint."""
    hints = []
    if ends.measured_by is None:
        pairs = size // max(1, ends.rows * ends.wrt.size)
        hints.append(f'measure="norm" ({format_memory(pairs)})')
        if ends.weights is None:
            hints.append(f'reduce="mean" ({format_memory(size // ends.rows)})')
    if ends.out_times is not None and len(ends.out_times) > 1:
        last_step_only = f'at={{"out_time": [{ends.out_times[-1]}]}}'
        hints.append(f"{last_step_only} ({format_memory(size // len(ends.out_times))})")
    if not ends.average:
        hints.append('across="mean"')
    hints.append('out="jacobian.zarr", which is written in chunks')
    return TooLargeError(
        "The time Jacobian is larger than the memory limit.",
        got=f"a result of {format_memory(size)}",
        expected=f"at most {format_memory(memory)} (memory=)",
        hint="; or ".join(hints),
    )
