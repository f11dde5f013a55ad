"""Tensors outside of recurrences and the segments between them.

Of a chain of known layers they are computed from weights and values. Of any other model they are found by probing the
framework's differentiation: unit cotangents give the matrices, and random cotangents on subsets of the steps test
whether steps are independent. A segment with independent steps is one small matrix per step, which is cheap to apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ... import data
from ...adapters.protocol import ChainLink, Port, Pullback
from ...autodiff.tensors import like
from ...layout import Layout, canonical_order
from ...results.schema import to_host
from ...typing import Array
from ...vocabulary import SAMPLE, TIME
from ..axes import patterns, reached, coupled_samples_error
from ..chain import dense, pull_dense_rows
from ..recurrent_layers import ReplayedLayers
from .request import JacobianRequest


@dataclass(frozen=True)
class OuterTensor:
    """A tensor outside the recurrences as (sample, [time,] feature), samples in the order of the recurrent layers."""

    port: Port
    #: Shape in the framework.
    shape: tuple[int, ...]
    #: Roles of the framework's axes; None for samples first, then time.
    layout: Layout | None = None
    #: Number of samples in the batch, if there is a layout.
    count: int = 0

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.shape[0] if self.layout is None else self._sizes.get(SAMPLE, 1)

    @property
    def times(self) -> int | None:
        """Number of time steps of the tensor; None if it has no time axis."""
        if self.layout is not None:
            return self._sizes.get(TIME)
        return self.shape[1] if len(self.shape) > 2 else None

    @property
    def features(self) -> int:
        """Number of features per sample and step."""
        return math.prod(self.shape) // (self.samples * (self.times or 1))

    @property
    def _sizes(self) -> dict[str, int]:
        assert self.layout is not None
        return dict(zip(self.layout.names, self.layout.sizes(self.shape, self.count), strict=True))

    def closed(self, rows: Array) -> Array:
        """Convert rows (row, sample, [time,] feature) to the framework's layout."""
        if self.layout is not None:
            rows = rows[:, list(self.layout.order)] if self.layout.order else rows
            order = canonical_order(self.layout.names)
            sizes = list(self._sizes.values())
            rows = rows.reshape((rows.shape[0], *(sizes[i] for i in order)))
            rows = _permuted(rows, [order.index(i) for i in range(len(order))])
        return rows.reshape((rows.shape[0], *self.shape))

    def opened(self, rows: Array) -> Array:
        """Convert rows from the framework's layout to (row, sample, [time,] feature)."""
        if self.layout is not None:
            rows = _permuted(self.layout.opened(rows, self.count, leading_axes=1), canonical_order(self.layout.names))
        steps = () if self.times is None else (self.times,)
        rows = rows.reshape((rows.shape[0], self.samples, *steps, self.features))
        return (
            rows[:, np.argsort(self.layout.order).tolist()] if self.layout is not None and self.layout.order else rows
        )


def _permuted(rows: Array, order: Sequence[int]) -> Array:
    """Permute all axes except the first one."""
    axes = (0, *(1 + i for i in order))
    return np.transpose(rows, axes) if isinstance(rows, np.ndarray) else rows.permute(axes)


def moved(array: Array, origin: int, target: int) -> Array:
    """Move one axis of an array to another position."""
    return np.moveaxis(array, origin, target) if isinstance(array, np.ndarray) else array.movedim(origin, target)


#: Pulls rows (row, sample, [time,] feature) of a tensor back to all tensors directly below it, in the same form.
Pull = Callable[[Port, Array], Mapping[Port, Array | None]]


@dataclass
class Segment:
    """Derivative of a tensor by one of the tensors directly below it."""

    #: ``"local"``: steps are independent; ``"flat"``: from a tensor without time; ``"step"``: from a tensor without
    #: time to one step of a tensor with time; ``"through"``: anything else, pulled back by the framework each time.
    kind: Literal["local", "flat", "step", "through"]
    above: OuterTensor
    below: OuterTensor
    #: Matrix of a local segment, (sample or 1, time or 1, feature above, feature below), None for the identity; of a
    #: flat one (sample, feature above, all entries below), of one step (sample or 1, feature above, feature below);
    #: None for ``"through"``.
    block: Array | None = None
    #: Step that a ``"step"`` segment reads.
    step: int = 0

    def apply(self, rows: Array) -> Array:
        """Pull cotangent rows (sample, row, [time,] feature) through a segment of any kind but ``"through"``."""
        if self.kind == "step":
            one = rows if self.block is None else rows @ like(self.block, rows)
            whole = np.zeros if isinstance(rows, np.ndarray) else rows.new_zeros
            field = whole((*one.shape[:2], self.below.times, self.below.features), dtype=one.dtype)
            field[:, :, self.step] = one
            return field
        if self.block is None:
            return rows
        if self.kind == "flat":
            flat = rows @ like(self.block, rows)
            tail = (self.below.features,) if self.below.times is None else (self.below.times, self.below.features)
            return flat.reshape((*rows.shape[:2], *tail))
        # (sample, time, row, above) @ (sample, time, above, below)
        return moved(moved(rows, 1, 2) @ like(self.block, rows), 2, 1)

    def at_every_step(self, rows: Array) -> Array:
        """Pull rows (sample or 1, time or 1, row, feature above) through a local segment or one of a single step."""
        rows = rows[:, 0] if self.kind == "step" else rows
        rows = rows if self.block is None else like(rows, self.block) @ self.block
        return rows[:, None] if self.kind == "step" else rows


#: Largest number of features of which all unit cotangents are pulled at once with the others.
_MANY = 64


def probe(pull: Pull, top: OuterTensor, tensors: Mapping[Port, OuterTensor]) -> dict[Port, Segment]:
    """Find the derivatives of a tensor by all tensors directly below it, by pulling probe cotangents back."""
    (steps, on_steps), (samples, on_samples) = _subset_rows(top, 1), _subset_rows(top, 0)
    found: Mapping[Port, Array | None] = {}
    units = np.zeros((0, *steps.shape[1:]))
    if top.features > _MANY and len(steps):
        found = pull(top.port, np.concatenate([steps, samples]))
    # Rows that start at some steps are the first of those found: a segment may be local if they come from these alone.
    if not found or any(
        rows is not None and tensors[port].times == top.times and _vanishes_elsewhere(rows[: len(on_steps)], on_steps)
        for port, rows in found.items()
    ):
        n = top.features
        units = np.zeros((n, top.samples, top.times or 1, n))  # one cotangent for each feature, on at all steps
        units[np.arange(n), :, :, np.arange(n)] = 1
        units = units if top.times is not None else units[:, :, 0]
        found = pull(top.port, np.concatenate([units, steps, samples]))
    _refuse_coupled(found, on_samples)
    segments = {top.port: Segment("local", top, top)} if top.port in found else {}
    for port, rows in found.items():
        if port == top.port or rows is None or not bool((rows != 0).any()):
            continue
        own, apart = rows[: len(units)], rows[len(units) : len(units) + len(steps)]
        segments[port] = _probed(top, tensors[port], own, _vanishes_elsewhere(apart, on_steps))
    return segments


def _probed(above: OuterTensor, below: OuterTensor, rows: Array, each_step_by_itself: bool) -> Segment:
    """Return the derivative (segment) of one tensor by another from pulled-back unit cotangents, and classify it."""
    if above.times is None:
        first = moved(rows, 0, 1)
        return Segment("flat", above, below, first.reshape((first.shape[0], first.shape[1], -1)))
    if below.times != above.times or not each_step_by_itself:
        return Segment("through", above, below)
    block = moved(rows, 0, 2)
    if above.features == below.features and bool((to_host(block) == np.eye(above.features)).all()):
        return Segment("local", above, below)
    same = block[:1, :1]
    return Segment("local", above, below, same if bool((block == same).all()) else block)


def _vanishes_elsewhere(rows: Array, on: Array) -> bool:
    """Return whether rows reach only the steps at which they started; False without a time axis."""
    return rows.ndim == 4 and rows.shape[2] == on.shape[1] and not bool((to_host(rows) * ~on[:, None, :, None]).any())


def _refuse_coupled(found: Mapping[Port, Array | None], on: Array) -> None:
    for port, rows in found.items():
        if rows is not None and len(on):
            hit = reached(to_host(rows[len(rows) - len(on) :]), 0, 1)
            if hit.shape == on.shape and bool((hit & ~on).any()):
                raise coupled_samples_error("The time Jacobian", port)


def _subset_rows(top: OuterTensor, axis: int) -> tuple[Array, Array]:
    """Return random rows on subsets of the samples (axis 0) or steps (1), and the subsets, which separate any two."""
    shape = (top.samples, *(() if top.times is None else (top.times,)), top.features)
    size = top.samples if axis == 0 else top.times or 1
    on = patterns(size) if size > 1 else np.zeros((0, size), dtype=bool)
    rows = np.random.default_rng(axis).normal(size=(len(on), *shape))
    return rows * on.reshape(len(on), *(size if i == axis else 1 for i in range(len(shape)))), on


@dataclass
class SegmentGraph:
    """Segments between the tensors of one run outside of its recurrences, found when they are needed."""

    #: Values of the tensors by port, in the framework's layout.
    values: dict[Port, Array] = field(default_factory=dict)
    #: The framework's own differentiation; None if all segments are known.
    pullback: Pullback | None = None
    tensors: dict[Port, OuterTensor] = field(default_factory=dict)
    #: Known segments, by the upper port, then by the lower port.
    segments: dict[Port, dict[Port, Segment]] = field(default_factory=dict)
    _uncoupled: set[Port] = field(default_factory=set)

    def below(self, port: Port) -> Mapping[Port, Segment]:
        """Return the derivatives (segments) of a tensor by the tensors directly below it; they are probed once."""
        if port not in self.segments:
            known = self.pullback is not None
            self.segments[port] = probe(self.pull, self.tensors[port], self.tensors) if known else {}
        return self.segments[port]

    def pull(self, port: Port, rows: Array) -> Mapping[Port, Array | None]:
        """Let the framework pull rows (row, sample, [time,] feature) of a tensor back to all ``wrt`` ports."""
        return self.pull_all({port: rows})

    def pull_all(self, rows: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Let the framework pull cotangent rows of several tensors back together; gradients at a port are summed."""
        assert self.pullback is not None
        cotangents = {port: like(self.tensors[port].closed(some), self.values[port]) for port, some in rows.items()}
        found = self.pullback.vjp(cotangents)
        return {port: None if a is None else self.tensors[port].opened(a) for port, a in found.items()}

    def through(self, port: Port, rows: Array, only: Collection[Port] | None = None) -> dict[Port, Array]:
        """Pull cotangent rows (sample, row, [time,] feature) of a tensor back to the tensors directly below it."""
        segments = {p: segment for p, segment in self.below(port).items() if only is None or p in only}
        found = {below: segment.apply(rows) for below, segment in segments.items() if segment.kind != "through"}
        rest = [below for below, segment in segments.items() if segment.kind == "through"]
        if rest:
            pulled = self.pull(port, moved(rows, 0, 1))
            arrived = {below: pulled[below] for below in rest}
            found |= {below: like(moved(a, 0, 1), rows) for below, a in arrived.items() if a is not None}
        return found

    def refuse_coupled(self, port: Port) -> None:
        """Raise if cotangents of some samples of a tensor reach other samples; tested once."""
        if port not in self._uncoupled:
            rows, on = _subset_rows(self.tensors[port], 0)
            if len(on):
                _refuse_coupled(self.pull(port, rows), on)
            self._uncoupled.add(port)


def known_chain(
    request: JacobianRequest, inside: ReplayedLayers, of: Port | None, wrt: Port | None
) -> SegmentGraph | None:
    """Return the derivatives between recurrences of a known chain that gives the captured values; else None."""
    layers = inside.chain or request.adapter.chain(request.model, training=request.batch.training)
    if layers is None or any(len(both) != 1 for both in inside.by_layer.values()):
        return None
    chain = _Chain(layers, inside, data.leaves_of(request.batch.x))
    return chain.graph(of, wrt) if chain.fits(inside.output) else None


class _Chain:
    """A chain of known layers, with the values before and after every layer, computed from the captured outputs."""

    def __init__(self, layers: Sequence[ChainLink], inside: ReplayedLayers, leaves: Sequence[Any]) -> None:
        self.layers, self.calls = list(layers), {one.call.layer: one for one in inside.calls}
        first = to_host(leaves[0]) if len(leaves) == 1 else None
        self.input = None if first is None or first.dtype.kind != "f" or not self._is_plain(0) else first
        self.before: list[Any] = []
        self.after: list[Any] = []

    def fits(self, output: Any) -> bool:
        """Compute the values of all layers; return whether they equal the captured inputs and output."""
        if not self.calls or [e.name for e in self.layers if e.kind == "recurrent"] != list(self.calls):
            return False
        dtype = to_host(next(iter(self.calls.values())).call.input).dtype
        value = self.input = None if self.input is None else self.input.astype(dtype, copy=False)
        for i, layer in enumerate(self.layers):
            self.before.append(value)
            if layer.kind == "recurrent":
                call = self.calls[layer.name].call
                self.before[-1] = to_host(call.input)
                if value is not None and not _is_close(self.before[-1], value):
                    return False
                for at in range(i - 1, -1, -1):  # an embedding returns what the layer above it is fed
                    if self.after[at] is not None or self.layers[at].kind not in ("table", "same"):
                        break
                    self.after[at] = self.before[-1]
                    if self.layers[at].kind == "table":
                        break
                value = to_host(call.output)
            elif layer.kind == "table":
                value = None
            elif value is not None and layer.kind == "dense":
                value = dense(layer, value)[1]
            elif value is not None and layer.kind == "step":
                value = value[:, layer.step]
            self.after.append(value)
        return value is None or output is None or not self._is_plain(-1) or _is_close(to_host(output), value)

    def _is_plain(self, place: int) -> bool:
        """Return whether the framework's tensor after a layer has samples first, then time."""
        axes = self.layers[place].axes
        return axes[:1] in ((), (SAMPLE,)) and (TIME not in axes or axes[1] == TIME)

    def graph(self, of: Port | None, wrt: Port | None) -> SegmentGraph | None:
        """Return the derivatives of the upper end and of each recurrent layer's input; None if a value is unknown."""
        layers = list(enumerate(self.layers))
        if wrt is not None and any(
            above.is_state and wrt == Port("output", self.layers[i - 1].name) for i, above in layers
        ):
            return None  # its final state is read instead
        starts = {} if of is None else {of: self._place(of)}
        found, outputs = SegmentGraph({}), []
        for i, layer in layers:
            if layer.kind == "recurrent":
                below, *initial = self.calls[layer.name].below()
                starts[below] = i - 1
                outputs.append(self.calls[layer.name].above()[0])
                found.segments |= {port: {} for port in initial}
        for port in [*starts, *([] if wrt is None else [wrt]), *outputs]:
            place = self._place(port)
            value = None if place is None else self.input if place < 0 else self.after[place]
            if value is None:
                return None
            found.tensors[port] = OuterTensor(port, tuple(value.shape))
            found.values[port] = value
        for port, place in starts.items():
            assert place is not None
            segments = self._segments(found.tensors, port, place, wrt)
            if segments is None:
                return None
            found.segments[port] = segments
        return found

    def _place(self, port: Port) -> int | None:
        """Return the index of the one layer with this output port, -1 for the model's input; else None."""
        if port.index != 0:
            return None
        if port.layer is None:
            place = -1 if port.kind == "input" else len(self.layers) - 1
            return place if self._is_plain(max(place, 0)) else None
        places = [i for i, layer in enumerate(self.layers) if layer.name == port.layer]
        if len(places) != 1 or (self.layers[places[0]].kind != "recurrent" and not self._is_plain(places[0])):
            return None
        return places[0] - (0 if port.kind == "output" else 1)

    def _segments(
        self, tensors: Mapping[Port, OuterTensor], top: Port, place: int, wrt: Port | None
    ) -> dict[Port, Segment] | None:
        """Return a tensor's derivatives down to the next recurrent layer; None if a value is unknown."""
        block, found, step = None, {}, None
        end = None if wrt is None else self._place(wrt)  # what one layer returns the next is fed: one place, two names
        for i in range(place, -2, -1):
            layer = self.layers[i] if i >= 0 else None
            recurrent = layer is not None and layer.kind == "recurrent"
            reached = [wrt] if wrt is not None and i == end else []
            reached += [Port("output", layer.name)] if layer is not None and recurrent else []
            for port in reached:
                above, below, matrix = tensors[top], tensors[port], block
                kind: Literal["step", "local", "flat"] = "step" if step is not None else "local"
                if step is None and above.times is None:
                    kind, matrix = "flat", np.eye(above.features)[None] if block is None else block
                    matrix = np.broadcast_to(matrix, (above.samples, *matrix.shape[1:]))
                found[port] = Segment(kind, above, below, matrix, step or 0)
            if layer is None or recurrent or layer.kind == "table":
                break
            before = self.before[i]
            if layer.kind == "dense":
                if before is None:
                    return None
                block = pull_dense_rows(layer, before if step is None else before[:, step], block)
            step = layer.step if layer.kind == "step" else step
        return found


def _is_close(value: Array, computed: Array) -> bool:
    return value.shape == computed.shape and np.allclose(value, computed, rtol=1e-4, atol=1e-5, equal_nan=True)
