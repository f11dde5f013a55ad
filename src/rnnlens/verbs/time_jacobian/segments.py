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
from ...adapters.protocol import ChainLink, Port, Run
from ...autodiff.tensors import converted_like
from ...layout import Layout, canonical_order
from ...results.schema import to_host
from ...settings import current
from ...typing import Array
from ...vocabulary import SAMPLE, TIME
from ..axes import patterns, reached, refusal_of_coupling
from ..chain import dense_values, pull_dense_rows, rows_below
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

    def to_framework(self, rows: Array) -> Array:
        """Convert rows (row, sample, [time,] feature) to the framework's layout."""
        if self.layout is not None:
            rows = rows[:, list(self.layout.order)] if self.layout.order else rows
            order = canonical_order(self.layout.names)
            sizes = list(self._sizes.values())
            rows = rows.reshape((rows.shape[0], *(sizes[i] for i in order)))
            rows = _permute_rows(rows, [order.index(i) for i in range(len(order))])
        return rows.reshape((rows.shape[0], *self.shape))

    def from_framework(self, rows: Array) -> Array:
        """Convert rows from the framework's layout to (row, sample, [time,] feature)."""
        if self.layout is not None:
            rows = _permute_rows(self.layout.split_folded(rows, self.count, lead=1), canonical_order(self.layout.names))
        steps = () if self.times is None else (self.times,)
        rows = rows.reshape((rows.shape[0], self.samples, *steps, self.features))
        return (
            rows[:, np.argsort(self.layout.order).tolist()] if self.layout is not None and self.layout.order else rows
        )


def _permute_rows(rows: Array, order: Sequence[int]) -> Array:
    """Permute all axes except the first one."""
    axes = (0, *(1 + i for i in order))
    return np.transpose(rows, axes) if isinstance(rows, np.ndarray) else rows.permute(axes)


def move_axis(array: Array, origin: int, target: int) -> Array:
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
            step_rows = rows if self.block is None else rows @ converted_like(self.block, rows)
            zeros = np.zeros if isinstance(rows, np.ndarray) else rows.new_zeros
            field = zeros((*step_rows.shape[:2], self.below.times, self.below.features), dtype=step_rows.dtype)
            field[:, :, self.step] = step_rows
            return field
        if self.block is None:
            return rows
        if self.kind == "flat":
            flat_rows = rows @ converted_like(self.block, rows)
            lower_axes = (self.below.features,) if self.below.times is None else (self.below.times, self.below.features)
            return flat_rows.reshape((*rows.shape[:2], *lower_axes))
        # (sample, time, row, above) @ (sample, time, above, below)
        return move_axis(move_axis(rows, 1, 2) @ converted_like(self.block, rows), 2, 1)

    def at_every_step(self, rows: Array) -> Array:
        """Pull rows (sample or 1, time or 1, row, feature above) through a local segment or one of a single step."""
        rows = rows[:, 0] if self.kind == "step" else rows
        rows = rows if self.block is None else converted_like(rows, self.block) @ self.block
        return rows[:, None] if self.kind == "step" else rows


#: Largest number of features of which all unit cotangents are pulled at once with the others.
_MANY = 64


def probe(pull: Pull, top: OuterTensor, tensors: Mapping[Port, OuterTensor]) -> dict[Port, Segment]:
    """Find the derivatives of a tensor by all tensors directly below it, by pulling probe cotangents back.

    Where a cotangent for each feature does not fit into memory, as of the scores of a vocabulary, no matrix is found:
    the framework pulls the rows that are asked for.
    """
    if 8 * top.features * math.prod(top.shape) > current().memory // 2:
        return _framework_segments(pull, top, tensors)
    (steps, on_steps), (samples, on_samples) = _subset_rows(top, 1), _subset_rows(top, 0)
    pulled_rows: Mapping[Port, Array | None] = {}
    unit_rows = np.zeros((0, *steps.shape[1:]))
    if top.features > _MANY and len(steps):
        pulled_rows = pull(top.port, np.concatenate([steps, samples]))
    # Rows that start at some steps are the first of those found: a segment may be local if they come from these alone.
    if not pulled_rows or any(
        rows is not None and tensors[port].times == top.times and _vanishes_elsewhere(rows[: len(on_steps)], on_steps)
        for port, rows in pulled_rows.items()
    ):
        features = top.features
        # One cotangent for each feature, on at all steps.
        unit_rows = np.zeros((features, top.samples, top.times or 1, features))
        unit_rows[np.arange(features), :, :, np.arange(features)] = 1
        unit_rows = unit_rows if top.times is not None else unit_rows[:, :, 0]
        pulled_rows = pull(top.port, np.concatenate([unit_rows, steps, samples]))
    _refuse_coupled(pulled_rows, on_samples)
    segments = {top.port: Segment("local", top, top)} if top.port in pulled_rows else {}
    for port, rows in pulled_rows.items():
        if port == top.port or rows is None or not bool((rows != 0).any()):
            continue
        pulled_units, pulled_steps = rows[: len(unit_rows)], rows[len(unit_rows) : len(unit_rows) + len(steps)]
        segments[port] = _classified_segment(
            top, tensors[port], pulled_units, _vanishes_elsewhere(pulled_steps, on_steps)
        )
    return segments


def _framework_segments(pull: Pull, top: OuterTensor, tensors: Mapping[Port, OuterTensor]) -> dict[Port, Segment]:
    """Return segments without a matrix to all tensors that random cotangents reach; one cotangent is kept at a time."""
    subsets = patterns(top.samples) if top.samples > 1 else np.ones((1, 1), dtype=bool)
    rng, segments = np.random.default_rng(0), dict[Port, Segment]()
    for subset in subsets:
        rows = rng.normal(size=(1, top.samples, *(() if top.times is None else (top.times,)), top.features))
        rows *= subset.reshape(-1, *[1] * (rows.ndim - 2))
        pulled_rows = pull(top.port, rows)
        _refuse_coupled(pulled_rows, subset[None])
        for port, lower_rows in pulled_rows.items():
            if port == top.port:
                segments[port] = Segment("local", top, top)
            elif lower_rows is not None and bool((lower_rows != 0).any()):
                segments[port] = Segment("through", top, tensors[port])
    return segments


def _classified_segment(above: OuterTensor, below: OuterTensor, rows: Array, each_step_by_itself: bool) -> Segment:
    """Return the derivative (segment) of one tensor by another from pulled-back unit cotangents, and classify it."""
    if above.times is None:
        flat_rows = move_axis(rows, 0, 1)
        return Segment("flat", above, below, flat_rows.reshape((flat_rows.shape[0], flat_rows.shape[1], -1)))
    if below.times != above.times or not each_step_by_itself:
        return Segment("through", above, below)
    block = move_axis(rows, 0, 2)
    if above.features == below.features and bool((to_host(block) == np.eye(above.features)).all()):
        return Segment("local", above, below)
    one_block = block[:1, :1]
    return Segment("local", above, below, one_block if bool((block == one_block).all()) else block)


def _vanishes_elsewhere(rows: Array, is_start: Array) -> bool:
    """Return whether rows reach only the steps at which they started; False without a time axis."""
    return (
        rows.ndim == 4
        and rows.shape[2] == is_start.shape[1]
        and not bool((to_host(rows) * ~is_start[:, None, :, None]).any())
    )


def _refuse_coupled(pulled_rows: Mapping[Port, Array | None], is_start: Array) -> None:
    for port, rows in pulled_rows.items():
        if rows is not None and len(is_start):
            reached_samples = reached(to_host(rows[len(rows) - len(is_start) :]), 0, 1)
            if reached_samples.shape == is_start.shape and bool((reached_samples & ~is_start).any()):
                raise refusal_of_coupling("The time Jacobian", port)


def _subset_rows(top: OuterTensor, axis: int) -> tuple[Array, Array]:
    """Return random rows on subsets of the samples (axis 0) or steps (1), and the subsets, which separate any two."""
    shape = (top.samples, *(() if top.times is None else (top.times,)), top.features)
    size = top.samples if axis == 0 else top.times or 1
    subsets = patterns(size) if size > 1 else np.zeros((0, size), dtype=bool)
    rows = np.random.default_rng(axis).normal(size=(len(subsets), *shape))
    return rows * subsets.reshape(len(subsets), *(size if i == axis else 1 for i in range(len(shape)))), subsets


@dataclass
class SegmentGraph:
    """Segments between the tensors of one run outside of its recurrences, found when they are needed."""

    #: Values of the tensors by port, in the framework's layout.
    values: dict[Port, Array] = field(default_factory=dict)
    #: The framework's own differentiation; None if all segments are known.
    run: Run | None = None
    tensors: dict[Port, OuterTensor] = field(default_factory=dict)
    #: Known segments, by the upper port, then by the lower port.
    segments: dict[Port, dict[Port, Segment]] = field(default_factory=dict)
    _uncoupled: set[Port] = field(default_factory=set)

    def lower_segments(self, port: Port) -> Mapping[Port, Segment]:
        """Return the derivatives (segments) of a tensor by the tensors directly below it; they are probed once."""
        if port not in self.segments:
            has_run = self.run is not None
            self.segments[port] = probe(self.pull, self.tensors[port], self.tensors) if has_run else {}
        return self.segments[port]

    def pull(self, port: Port, rows: Array) -> Mapping[Port, Array | None]:
        """Let the framework pull rows (row, sample, [time,] feature) of a tensor back to all ``wrt`` ports."""
        return self.pull_all({port: rows})

    def pull_all(self, rows: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Let the framework pull cotangent rows of several tensors back together; gradients at a port are summed."""
        assert self.run is not None
        cotangents = {
            port: converted_like(self.tensors[port].to_framework(cotangent_rows), self.values[port])
            for port, cotangent_rows in rows.items()
        }
        gradients = self.run.pull(cotangents)
        return {port: None if a is None else self.tensors[port].from_framework(a) for port, a in gradients.items()}

    def pull_through(self, port: Port, rows: Array, only: Collection[Port] | None = None) -> dict[Port, Array]:
        """Pull cotangent rows (sample, row, [time,] feature) of a tensor back to the tensors directly below it."""
        segments = {p: segment for p, segment in self.lower_segments(port).items() if only is None or p in only}
        pulled_rows = {below: segment.apply(rows) for below, segment in segments.items() if segment.kind != "through"}
        through_ports = [below for below, segment in segments.items() if segment.kind == "through"]
        if through_ports:
            pulled = self.pull(port, move_axis(rows, 0, 1))
            lower_rows = {below: pulled[below] for below in through_ports}
            pulled_rows |= {
                below: converted_like(move_axis(a, 0, 1), rows) for below, a in lower_rows.items() if a is not None
            }
        return pulled_rows

    def refuse_coupled(self, port: Port) -> None:
        """Raise if cotangents of some samples of a tensor reach other samples; tested once."""
        if port not in self._uncoupled:
            rows, subsets = _subset_rows(self.tensors[port], 0)
            if len(subsets):
                _refuse_coupled(self.pull(port, rows), subsets)
            self._uncoupled.add(port)


def known_chain(
    request: JacobianRequest, replayed_layers: ReplayedLayers, of: Port | None, wrt: Port | None
) -> SegmentGraph | None:
    """Return the derivatives between recurrences of a known chain that gives the captured values; else None."""
    layers = replayed_layers.chain or request.facts.chain(training=request.batch.training)
    if layers is None or any(len(directions) != 1 for directions in replayed_layers.by_layer.values()):
        return None
    chain = _Chain(layers, replayed_layers, data.leaves_of(request.batch.x))
    return chain.graph(of, wrt) if chain.fits(replayed_layers.output) else None


class _Chain:
    """A chain of known layers, with the values before and after every layer, computed from the captured outputs."""

    def __init__(self, layers: Sequence[ChainLink], replayed_layers: ReplayedLayers, leaves: Sequence[Any]) -> None:
        self.layers, self.calls = list(layers), {replayed.call.layer: replayed for replayed in replayed_layers.calls}
        first_input = to_host(leaves[0]) if len(leaves) == 1 else None
        self.input = (
            None
            if first_input is None or first_input.dtype.kind != "f" or not self._has_samples_first(0)
            else first_input
        )
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []

    def fits(self, output: Any) -> bool:
        """Compute the values of all layers; return whether they equal the captured inputs and output."""
        if not self.calls or [e.name for e in self.layers if e.kind == "recurrent"] != list(self.calls):
            return False
        dtype = to_host(next(iter(self.calls.values())).call.input).dtype
        value = self.input = None if self.input is None else self.input.astype(dtype, copy=False)
        pairs: list[tuple[Array, Array]] = []  # captured, computed
        for i, layer in enumerate(self.layers):
            self.inputs.append(value)
            if layer.kind == "recurrent":
                call = self.calls[layer.name].call
                self.inputs[-1] = to_host(call.input)
                if value is not None:
                    pairs.append((self.inputs[-1], value))
                for lower_index in range(i - 1, -1, -1):  # an embedding returns what the layer above it is fed
                    if self.outputs[lower_index] is not None or self.layers[lower_index].kind not in ("table", "same"):
                        break
                    self.outputs[lower_index] = self.inputs[-1]
                    if self.layers[lower_index].kind == "table":
                        break
                value = to_host(call.output)
            elif layer.kind == "table":
                value = None
            elif value is not None and layer.kind == "dense":
                value = dense_values(layer, value)[1]
            elif value is not None and layer.kind == "step":
                value = value[:, layer.step]
            self.outputs.append(value)
        if value is not None and output is not None and self._has_samples_first(-1):
            pairs.append((to_host(output), value))
        return all(a.shape == b.shape and np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) for a, b in pairs)

    def _has_samples_first(self, position: int) -> bool:
        """Return whether the framework's tensor after a layer has samples first, then time."""
        axes = self.layers[position].axes
        return axes[:1] in ((), (SAMPLE,)) and (TIME not in axes or axes[1] == TIME)

    def graph(self, of: Port | None, wrt: Port | None) -> SegmentGraph | None:
        """Return the derivatives of the upper end and of each recurrent layer's input; None if a value is unknown."""
        layers = list(enumerate(self.layers))
        if wrt is not None and any(
            above.is_state and wrt == Port("output", self.layers[i - 1].name) for i, above in layers
        ):
            return None  # its final state is read instead
        start_positions = {} if of is None else {of: self._layer_position(of)}
        segment_graph, outputs = SegmentGraph({}), []
        for i, layer in layers:
            if layer.kind == "recurrent":
                below, *initial = self.calls[layer.name].lower_ports()
                start_positions[below] = i - 1
                outputs.append(self.calls[layer.name].upper_ports()[0])
                segment_graph.segments |= {port: {} for port in initial}
        for port in [*start_positions, *([] if wrt is None else [wrt]), *outputs]:
            position = self._layer_position(port)
            value = None if position is None else self.input if position < 0 else self.outputs[position]
            if value is None:
                return None
            segment_graph.tensors[port] = OuterTensor(port, tuple(value.shape))
            segment_graph.values[port] = value
        for port, position in start_positions.items():
            assert position is not None
            segments = self._segments(segment_graph.tensors, port, position, wrt)
            if segments is None:
                return None
            segment_graph.segments[port] = segments
        return segment_graph

    def _layer_position(self, port: Port) -> int | None:
        """Return the index of the one layer with this output port, -1 for the model's input; else None."""
        if port.index != 0:
            return None
        if port.layer is None:
            position = -1 if port.kind == "input" else len(self.layers) - 1
            return position if self._has_samples_first(max(position, 0)) else None
        positions = [i for i, layer in enumerate(self.layers) if layer.name == port.layer]
        if len(positions) != 1 or (
            self.layers[positions[0]].kind != "recurrent" and not self._has_samples_first(positions[0])
        ):
            return None
        return positions[0] - (0 if port.kind == "output" else 1)

    def _segments(
        self, tensors: Mapping[Port, OuterTensor], top: Port, position: int, wrt: Port | None
    ) -> dict[Port, Segment] | None:
        """Return a tensor's derivatives down to the next recurrent layer.

        Return None if a value is unknown, or if the derivatives exceed the memory.
        """
        block, segments, step = None, {}, None
        # The output of one layer is the input of the next: one position, two names.
        end_position = None if wrt is None else self._layer_position(wrt)
        for i in range(position, -2, -1):
            layer = self.layers[i] if i >= 0 else None
            is_recurrent = layer is not None and layer.kind == "recurrent"
            reached_ports = [wrt] if wrt is not None and i == end_position else []
            reached_ports += [Port("output", layer.name)] if layer is not None and is_recurrent else []
            for port in reached_ports:
                above, below, matrix = tensors[top], tensors[port], block
                kind: Literal["step", "local", "flat"] = "step" if step is not None else "local"
                if step is None and above.times is None:
                    kind, matrix = "flat", np.eye(above.features)[None] if block is None else block
                    matrix = np.broadcast_to(matrix, (above.samples, *matrix.shape[1:]))
                segments[port] = Segment(kind, above, below, matrix, step or 0)
            if layer is None or is_recurrent or layer.kind == "table":
                break
            layer_input = self.inputs[i]
            if layer.kind == "dense":
                if layer_input is None:
                    return None
                layer_input = layer_input if step is None else layer_input[:, step]
                size = rows_below(layer, layer_input, block) * layer_input.itemsize
                if size > current().memory // 2:
                    return None  # of the scores of a vocabulary: the framework pulls the rows that are asked for
                block = pull_dense_rows(layer, layer_input, block)
            step = layer.step if layer.kind == "step" else step
        return segments
