"""The two ends of a time Jacobian, inside or outside of a linearised recurrence, with their steps and rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...adapters.protocol import Port
from ...autodiff.tensors import like
from ...errors import InputError, TooLargeError, message
from ...recurrence.arrays import Workspace
from ...recurrence.linear import System
from ...recurrence.reductions import REDUCTIONS, probe_signs, sketched
from ...recurrence.sweep_rows import PointRows
from ...results.schema import to_host
from ...settings import format_memory
from ...typing import Array
from ...vocabulary import IN_TIME, OUT_TIME
from ..names import TensorName
from ..recurrent_layers import ReplayedCall
from .request import JacobianOptions


@dataclass
class LinearisedCall:
    """One direction of one recurrent call, linearised around its replayed states.

    Attributes
    ----------
    output
        Index of the state that the layer returns.
    """

    replayed: ReplayedCall
    system: System
    output: int

    @classmethod
    def of(cls, replayed: ReplayedCall) -> LinearisedCall:
        """Linearise a replayed call."""
        return cls(
            replayed, replayed.run.linear_system(masked_output=replayed.call.masked_output), replayed.run.output_state
        )

    @property
    def layer(self) -> str:
        """Name of the node in results."""
        return self.replayed.call.layer

    @property
    def work(self) -> Workspace:
        """Workspace that allocates its arrays."""
        return self.system.work

    def output_moves(self) -> Array | None:
        """Return a mask (sample, time) of where the output depends on the state; None for everywhere."""
        call = self.replayed.call
        if call.masked_output == "zero" and call.mask is not None and self.output < len(self.replayed.run.states):
            return call.mask
        return call.output_from_state

    def points(self, state: int, times: Sequence[int], block: Array) -> PointRows:
        """Return cotangents (sample or 1, time or 1, row, size) that enter a state at single steps."""
        return PointRows(list(times), {state: like(block, self.replayed.run.input)}, self.system.order)

    def output_points(self, times: Sequence[int], block: Array) -> PointRows:
        """Return cotangents of the layer's output, zero where it is a constant."""
        moves = self.output_moves()
        block = like(block, self.replayed.run.input)
        if moves is not None:
            xp = self.work.xp
            block = xp.where(moves[:, :, None, None], block, xp.zeros_like(block))
        return self.points(self.output, times, block)


Reduce = Callable[[Array], Array]
Rows = np.ndarray[Any, Any]


@dataclass(frozen=True)
class JacobianEnd:
    """One end of a time Jacobian: a state or output inside recurrences, or a tensor of the framework.

    Attributes
    ----------
    within
        The recurrences that contain it, one for each direction; empty if it lies outside of all.
    port
        The port of its framework tensor; None inside a recurrence.
    what, state
        Inside a recurrence: ``"state"``, ``"final_state"``, ``"initial_state"`` or ``"output"``, and the index of the
        state.
    size, times
        Size per step, and number of steps; None without a time axis.
    """

    name: TensorName
    within: tuple[LinearisedCall, ...]
    port: Port | None
    what: str
    state: int
    size: int
    times: int | None

    @property
    def bidirectional(self) -> bool:
        """Whether the end has a forward and a backward direction."""
        return len(self.within) > 1


@dataclass(frozen=True)
class JacobianEnds:
    """The two ends of a time Jacobian, their steps, and the reductions.

    Attributes
    ----------
    out_times, in_times
        Requested steps in the requested order; None without a time axis.
    projection : (1, 1, row, unit) or None
        Combinations of the output units that the user requested.
    weights : (sample or 1, time or 1, row, unit) or None
        Rows to pull back instead of single output units: the projection, or its contraction by a linear reduction.
    measure
        Name of the reduction; None for the whole matrix of every pair of steps.
    sketch
        Number of random probes that estimate the norm; None for the exact value.
    average
        Whether to average over samples.
    """

    of: JacobianEnd
    wrt: JacobianEnd
    out_times: list[int] | None
    in_times: list[int] | None
    projection: Rows | None
    weights: Rows | None
    measure: str | None
    sketch: int | None
    average: bool

    @property
    def measured_by(self) -> Reduce | None:
        """Function that reduces a block (sample, group, out, in); None to keep it."""
        if self.sketch is not None:
            return sketched
        return None if self.measure is None else REDUCTIONS[self.measure]

    @property
    def tail(self) -> tuple[int, ...]:
        """Extra axes of the reduction: (2,) for a sketch, its estimate and variance."""
        return () if self.sketch is None else (2,)

    @property
    def rows(self) -> int:
        """Rows per output step."""
        return self.of.size if self.weights is None else int(self.weights.shape[2])

    @property
    def groups(self) -> int:
        """Number of output steps."""
        return 1 if self.out_times is None else len(self.out_times)

    @property
    def in_count(self) -> int:
        """Number of input steps."""
        return 1 if self.in_times is None else len(self.in_times)

    def rows_at(self, size: int) -> Rows:
        """Return the pulled rows, (sample or 1, time or 1, row, unit); the identity without weights."""
        return np.eye(size)[None, None] if self.weights is None else self.weights


def ends_of(of: JacobianEnd, wrt: JacobianEnd, options: JacobianOptions, samples: int) -> JacobianEnds:
    """Return the two ends with the steps, rows and reductions of a request.

    Raises
    ------
    InputError
        If a step does not exist, or ``reduce=`` does not fit the units.
    TooLargeError
        If the probes of a sketch would not fit into the memory.
    """
    projection = _projection(options.reduce, of.size)
    measure = "norm" if options.sketch is not None else options.measure
    weights = projection
    if options.sketch is not None:
        _refuse_many_probes(options.sketch, of, samples, options.memory)
        weights = probe_signs(options.sketch, of.size, of.times or 1, samples, seed=0)
    elif measure in ("sum", "mean"):
        weights = _contracted(measure, projection, of.size)
    outs = _chosen_times(options.at, OUT_TIME, of.times)
    ins = _chosen_times(options.at, IN_TIME, wrt.times)
    return JacobianEnds(of, wrt, outs, ins, projection, weights, measure, options.sketch, options.across is not None)


def _contracted(measure: str, projection: Rows | None, size: int) -> Rows:
    """Return the one row (1, 1, 1, unit) that sums or averages the output rows before differentiation."""
    count = size if projection is None else int(projection.shape[2])
    ones = np.ones((1, size)) if projection is None else np.ones((1, count)) @ projection[0, 0]
    found: Rows = ((1.0 if measure == "sum" else 1.0 / count) * ones)[None, None]
    return found


def _projection(reduce: Any, size: int) -> Rows | None:
    """Return rows (1, 1, k, unit) that contract the output units before differentiation; None to keep all units."""
    if reduce is None:
        return None
    if isinstance(reduce, str):
        return np.full((1, 1, 1, size), 1.0 / size if reduce == "mean" else 1.0)
    matrix = np.atleast_2d(np.asarray(to_host(reduce), dtype=float))
    if matrix.ndim != 2 or matrix.shape[1] != size or not np.isfinite(matrix).all():
        raise InputError(
            message(
                "reduce= does not match the number of output units.",
                got=f"shape {np.shape(to_host(reduce))}",
                expected=f"({size},) or (k, {size}), finite",
            )
        )
    found: Rows = matrix[None, None]
    return found


def _chosen_times(at: Mapping[str, Any], dim: str, count: int | None) -> list[int] | None:
    """Return the requested step indices; negative ones count from the end. None without a time axis."""
    times, argument = at.get(dim), f"at[{dim!r}]"
    if count is None:
        if times is not None:
            raise InputError(
                message(f"There is no {dim} to choose from: the tensor has no time axis.", got=f"at={dict(at)!r}")
            )
        return None
    if times is None:
        return list(range(count))
    if isinstance(times, slice):
        chosen = list(range(count))[times]
        if not chosen:
            raise InputError(
                message(f"{argument} names no steps.", got=repr(times), expected=f"some of the {count} steps from 0")
            )
        return chosen
    asked = np.atleast_1d(np.asarray(times))
    if asked.ndim != 1 or not np.issubdtype(asked.dtype, np.integer) or asked.size == 0:
        raise InputError(
            message(f"{argument} names no steps.", got=repr(times), expected="an int, a list of int, a slice")
        )
    if ((asked < -count) | (asked >= count)).any():
        raise InputError(
            message(f"{argument} names a step that does not exist.", got=repr(times), expected=f"0 to {count - 1}")
        )
    found = [int(t) % count for t in asked]
    if len(set(found)) < len(found):
        raise InputError(message(f"{argument} names a step twice.", got=repr(times)))
    return found


def _refuse_many_probes(sketch: int, of: JacobianEnd, samples: int, limit: int) -> None:
    """Raise if the probes for all samples, steps and units exceed the memory limit."""
    each = 2 * 8 * of.size * (of.times or 1) * samples
    if sketch * each > limit:
        raise TooLargeError(
            message(
                "The random probes of sketch= is larger than the memory limit.",
                got=f"sketch={sketch}: {format_memory(sketch * each)}",
                expected=f"at most {format_memory(limit)} (memory=)",
                hint=f"sketch={max(2, min(100, limit // each))}; without sketch= the norm is exact and often cheaper",
            )
        )
