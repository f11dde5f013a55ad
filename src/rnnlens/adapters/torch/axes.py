"""Finds the sample axis and the time axis of torch tensors, by experiments that start at the recurrent calls.

The axes of a recurrent layer's input and output are known from the call itself. Cotangents at some of its samples, or
at some of its steps, give non-zero gradients at another tensor only along the axis that counts the same thing. Neither
the rank of a tensor nor the equality of two sizes is used as evidence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...layout import Axis, Layout, image_axes, layout_of_axes
from ...vocabulary import CHANNEL, FEATURE, SAMPLE, TIME, UNIT
from ..protocol import Batch, Port
from .axis_probe import AxisPlace, AxisProbe, DirectedCall, Shape, Values, binary_patterns, entry_order
from .inputs import as_tensors, leaves_of, map_leaves


def layouts(model: nn.Module, batch: Batch, ports: Sequence[Port]) -> dict[Port, Layout]:
    """Return the layouts of requested ports and model inputs.

    The layout of a port does not depend on which other ports are requested. An unknown axis is named ``axis_0``,
    ``axis_1``, ... Of a model that runs no recurrent layer the result is empty unless its steps come first.
    """
    with AxisProbe(model, batch, ports, cut=True) as probe:
        if not probe.calls:
            return {} if batch.training else _steps_first(probe, ports)  # batch normalisation would join samples
        requested_ports = list(dict.fromkeys([*probe.model_inputs, *ports]))
        if set(requested_ports) <= set(probe.layouts):  # a chain of library modules, whose pass shows the roles
            return {port: probe.layouts[port] for port in requested_ports}
        counts = {call.samples for call in probe.calls}
        sample_axes, coupled_ports = _find_samples(probe, requested_ports)
        time_axes, unclear_axes = _find_times(probe, requested_ports, sample_axes)
        shapes, images = probe.shapes(requested_ports), probe.images
    if len(counts) > 1:  # samples are folded with another axis in some calls: propagate through the recurrences
        with AxisProbe(model, batch, ports, cut=False) as uncut_probe:
            sample_axes, coupled_ports = _find_samples(uncut_probe, requested_ports)
    if set(probe.model_inputs) & coupled_ports:  # no number of samples of the layers: perhaps sequences are cut
        with AxisProbe(model, batch, ports, cut=False) as uncut_probe:
            shared_axes = _shared_samples(uncut_probe, time_axes)
        sample_axes |= {port: place for port, place in shared_axes.items() if port in requested_ports}
        coupled_ports -= set(shared_axes)
    is_single_step = all(sequence.steps == 1 for sequence in _step_sequences(probe.calls))
    # An axis of size 1 is the one step, except of a tensor of two axes.
    for port in requested_ports if is_single_step else ():
        shape, sample_axis = shapes.get(port, ()), sample_axes.get(port)
        unit_axes = [
            axis for axis, size in enumerate(shape) if size == 1 and (sample_axis is None or axis != sample_axis.axis)
        ]
        if unit_axes and len(shape) > 2 and port not in time_axes:
            time_axes[port] = AxisPlace(unit_axes[0], 1, 1, 1)
    known_axes = _KnownAxes(shapes, sample_axes, coupled_ports, time_axes, min(counts), unclear_axes, images)
    _find_by_size(model, batch, [port for port in ports if port in shapes], known_axes, is_single_step=is_single_step)
    return {port: _layout(port, known_axes) for port in shapes} | dict(probe.layouts)


def _steps_first(probe: AxisProbe, ports: Sequence[Port]) -> dict[Port, Layout]:
    """Return layouts for a model without recurrent layers that keeps entries of its input's second axis apart.

    The result is empty unless entries of the first axis meet, of an only input (step, sample, feature): samples come
    first then, as is the convention.
    """
    sources = [port for port in probe.model_inputs if len(probe.values[port].shape) == 3]
    if len(sources) != 1 or len(probe.model_inputs) != 1 or min(probe.values[sources[0]].shape[:2]) < 2:
        return {}
    (source,) = sources
    steps, samples = (int(size) for size in probe.values[source].shape[:2])

    def is_kept_apart(output: Port, axis: int, port: Port, port_axis: int) -> bool:
        """Return whether the first and the last entry of an axis depend on the same entries of ``port`` only."""
        shape, port_shape = probe.values[output].shape, probe.values[port].shape
        size = port_shape[port_axis] if port_axis < len(port_shape) else 0
        if axis >= len(shape) or shape[axis] != size:
            return False
        ends = np.eye(size, dtype=bool)[[0, -1]]
        nonzero = probe.nonzero_gradients({output: (AxisPlace(axis, 1, size, 1), ends)})
        return port in nonzero and not (AxisPlace(port_axis, 1, size, 1).support(nonzero[port]) & ~ends).any()

    sample_axes: dict[Port, int] = {}
    for output in probe.model_outputs:
        if is_kept_apart(output, 0, source, 0):
            return {}
        axes = [axis for axis in (1, 0) if is_kept_apart(output, axis, source, 1)]
        if not axes:
            return {}
        sample_axes |= {source: 1, output: axes[0]}
    for port in set(ports) - set(sample_axes) if sample_axes else ():
        end = probe.model_outputs[0]
        axis = next((axis for axis in (1, 0) if is_kept_apart(end, sample_axes[end], port, axis)), None)
        if axis is not None:
            sample_axes[port] = axis

    def layout(port: Port) -> Layout:
        shape, sample_axis = probe.values[port].shape, sample_axes.get(port)
        axes: dict[int, Axis] = {} if sample_axis is None else {sample_axis: (SAMPLE,)}
        if sample_axis == 1 and shape[0] == steps:
            axes[0] = (TIME,)
        named = layout_of_axes(len(shape), axes, FEATURE if port.kind == "input" else UNIT)
        return Layout(named.axes, samples=samples)

    return {port: layout(port) for port in dict.fromkeys([*sample_axes, *ports]) if port in probe.values}


@dataclass
class _KnownAxes:
    """Axes found so far: the shapes of all requested tensors, their sample axes and their time axes.

    ``coupled_ports`` holds the ports at which every sample depends on other samples. ``sample_count`` is the smallest
    number of samples of any recurrent call. ``unclear_axes`` holds, for tensors without a clear time axis, the axes
    that follow steps: several, or one that holds features as well. ``images``: shapes (channel, *space) of inputs and
    states of cells.
    """

    shapes: Mapping[Port, Shape]
    sample_axes: dict[Port, AxisPlace]
    coupled_ports: set[Port]
    time_axes: dict[Port, AxisPlace]
    sample_count: int
    unclear_axes: dict[Port, tuple[int, ...]]
    images: set[Shape]


def _find_by_size(
    model: nn.Module, batch: Batch, requested_ports: Sequence[Port], known_axes: _KnownAxes, *, is_single_step: bool
) -> None:
    """Find the remaining axes by running the model on a smaller batch and comparing the shapes of tensors.

    Gradients cannot decide where all values depend on all others. The axes found are added to ``known_axes``.
    """
    shapes, sample_axes, time_axes = known_axes.shapes, known_axes.sample_axes, known_axes.time_axes
    other_axis_counts = {port: len(shape) - (port in sample_axes) for port, shape in shapes.items()}
    untimed_ports = [
        port
        for port in requested_ports
        if port not in time_axes and port not in known_axes.unclear_axes and other_axis_counts[port] > 1
    ]
    if untimed_ports and not is_single_step:
        for port, axes in _shrinking_axes(model, batch, untimed_ports, shapes, time_axes, by_samples=False).items():
            step_axes = [axis for axis in axes if axis != getattr(sample_axes.get(port), "axis", None)]
            if len(step_axes) == 1:
                time_axes[port] = AxisPlace(step_axes[0], 1, shapes[port][step_axes[0]], 1)
            elif step_axes:
                known_axes.unclear_axes[port] = tuple(step_axes)
    unsampled_ports = [port for port in requested_ports if port not in sample_axes and len(shapes[port]) > 1]
    if unsampled_ports and known_axes.sample_count > 1:
        shrinking = _shrinking_axes(model, batch, unsampled_ports, shapes, sample_axes, by_samples=True)
        only_axes = {port: axes[0] for port, axes in shrinking.items() if len(axes) == 1}
        fitting = {port: axis for port, axis in only_axes.items() if shapes[port][axis] == known_axes.sample_count}
        sample_axes |= {port: AxisPlace(axis, 1, known_axes.sample_count, 1) for port, axis in fitting.items()}


def _shrinking_axes(
    model: nn.Module,
    batch: Batch,
    ports: Sequence[Port],
    all_ports: Collection[Port],
    known_axes: Mapping[Port, AxisPlace],
    *,
    by_samples: bool,
) -> dict[Port, tuple[int, ...]]:
    """Find the axes of each port that are shorter when the batch has one step (or, with ``by_samples``, sample) fewer.

    ``known_axes``: the axes that count steps (or samples), as far as they are known. If that of no input is known and
    there is only one input, each of its axes is tried. ``all_ports``: ports whose shapes are compared.
    """

    def sizes(x: Any) -> tuple[Values, Mapping[Port, Shape]]:
        with AxisProbe(model, replace(batch, x=x), list(all_ports), cut=True) as probe:
            return np.array([(call.samples, call.steps) for call in probe.calls]), probe.shapes(list(all_ports))

    x = as_tensors(batch.x, model, "x")
    leaves, (calls, shapes) = leaves_of(x), sizes(x)
    input_axes = {i: known_axes.get(Port("input", index=i)) for i in range(len(leaves))}
    attempts = [{i: place.axis for i, place in input_axes.items() if place is not None}]
    if not attempts[0]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] if len(leaves) == 1 else []
        attempts = [{0: axis} for leaf in tensors for axis, size in enumerate(leaf.shape) if size > 1]
    for axes in attempts:
        try:
            fewer_calls, fewer_shapes = sizes(_shortened_inputs(x, axes))
        except Exception:
            continue
        if len(fewer_calls) != len(calls) or (fewer_calls != calls)[:, int(by_samples)].any():
            continue  # the calls changed in the other size, too
        smaller = (fewer_calls < calls)[:, 1 - int(by_samples)]
        if smaller.all() if by_samples else smaller.any():
            same_rank = [
                port for port in ports if port in fewer_shapes and len(shapes[port]) == len(fewer_shapes[port])
            ]
            sizes_by_port = {port: enumerate(zip(shapes[port], fewer_shapes[port], strict=True)) for port in same_rank}
            shorter = {
                port: tuple(i for i, (a, b) in sizes_by_axis if b == a - 1)
                for port, sizes_by_axis in sizes_by_port.items()
            }
            return {port: port_axes for port, port_axes in shorter.items() if port_axes}
    return {}


def _shortened_inputs(x: Any, axes: Mapping[int, int]) -> Any:
    """Remove one entry along an axis of each input; ``axes`` maps the position of an input to the axis."""
    numbers = count()

    def shorten(leaf: Any) -> Any:
        axis = axes.get(next(numbers)) if isinstance(leaf, Tensor) else None
        return leaf if axis is None else torch.narrow(leaf, axis, 0, leaf.shape[axis] - 1)

    return map_leaves(x, shorten)


def _sample_candidates(shape: tuple[int, ...], samples: int) -> list[AxisPlace]:
    """Return the axes that could count samples: axes of that size, and axes with samples folded into them.

    Behind an axis of size 1 nothing is folded: that axis counts the samples, of which the model may cut pieces.
    """
    whole_axes = [AxisPlace(axis, 1, samples, 1) for axis, size in enumerate(shape) if size == samples]
    if samples == 1:
        return whole_axes
    folded = [
        (axis, size // samples)
        for axis, size in enumerate(shape)
        if size > samples and size % samples == 0 and 1 not in shape[:axis]
    ]
    folded_pairs = [
        (AxisPlace(axis, 1, samples, factor), AxisPlace(axis, factor, samples, 1)) for axis, factor in folded
    ]
    return whole_axes + [place for pair in folded_pairs for place in pair]


def _find_samples(probe: AxisProbe, ports: Sequence[Port]) -> tuple[dict[Port, AxisPlace], set[Port]]:
    """Find sample axes, and the ports at which every sample depends on others.

    It starts at the recurrent calls with the fewest samples. From these the axes of the model's inputs are found, then
    each port by itself; what is not connected to either is found from the model's outputs.
    """
    sample_count = min(call.samples for call in probe.calls)
    call_axis = AxisPlace(0, 1, sample_count, 1)
    fewest = [call for call in probe.calls if call.samples == sample_count]
    known_axes = {port: call_axis for call in fewest for port in (call.input, call.output, *call.states)}
    coupled: set[Port] = set()

    def find(ports: Iterable[Port]) -> dict[Port, AxisPlace]:
        """Return the sample axes of those ports that gradients connect to tensors with a known one."""
        axes: dict[Port, AxisPlace] = {}
        patterns = binary_patterns(sample_count)
        missing_ports = [port for port in ports if port in probe.values and port not in known_axes]
        if missing_ports:
            nonzero = probe.nonzero_gradients({port: (place, patterns) for port, place in known_axes.items()})
        for port in missing_ports:
            if port in nonzero:
                _store_axis(axes, coupled, port, _passing_as_sink(nonzero[port], sample_count, patterns))
            if port not in axes:
                _store_axis(axes, coupled, port, _passing_as_source(probe, port, sample_count, patterns, known_axes))
        return axes

    known_axes |= find(probe.model_inputs)
    found_axes = find(ports)
    missing_ports = [port for port in (*probe.model_inputs, *ports) if port not in (found_axes | known_axes)]
    if missing_ports:
        known_axes |= find(probe.model_outputs)
        found_axes |= find(missing_ports)
    known_axes |= found_axes
    coupled_only = coupled - set(known_axes) if sample_count > 1 else set()
    return {port: place for port, place in known_axes.items() if port in ports}, coupled_only


def _shared_samples(probe: AxisProbe, time_axes: Mapping[Port, AxisPlace]) -> dict[Port, AxisPlace]:
    """Return the axes along which each entry of an output depends on the same entry of an input alone.

    The result is empty unless there is one such pair of axes, besides those of the steps.
    """
    pairs = []
    for output in probe.model_outputs:
        for axis, size in enumerate(probe.values[output].shape):
            place, patterns = AxisPlace(axis, 1, size, 1), binary_patterns(size)
            if size == 1 or place.axis == getattr(time_axes.get(output), "axis", None):
                continue
            nonzero = probe.nonzero_gradients({output: (place, patterns)})
            pairs += [
                {output: place, port: input_place}
                for port in probe.model_inputs
                for input_place in _sample_candidates(tuple(probe.values[port].shape), size)
                if port in nonzero
                and input_place.size_before == input_place.size_after == 1
                and input_place.axis != getattr(time_axes.get(port), "axis", None)
                and not (input_place.support(nonzero[port]) & ~patterns).any()
            ]
    return pairs[0] if len(pairs) == 1 else {}


def _store_axis(
    sample_axes: dict[Port, AxisPlace], coupled: set[Port], port: Port, candidates: list[AxisPlace] | None
) -> None:
    """Store the axis of a port if exactly one candidate passed the test.

    If none passed, mark its samples as coupled.
    """
    if candidates:
        unfolded = [place for place in candidates if place.size_before == place.size_after == 1]
        if len(candidates) == 1 or candidates[0].size == 1 or len(unfolded) == 1:
            sample_axes[port] = (unfolded or candidates)[0]
    elif candidates is not None:
        coupled.add(port)


def _passing_as_sink(nonzero: Values, sample_count: int, patterns: Values) -> list[AxisPlace]:
    supports = [(place, place.support(nonzero)) for place in _sample_candidates(nonzero.shape[1:], sample_count)]
    passing = [place for place, support in supports if not (support & ~patterns).any()]
    return passing or [replace(p, order=order) for p, support in supports if (order := entry_order(support, patterns))]


def _passing_as_source(
    probe: AxisProbe, port: Port, sample_count: int, patterns: Values, known_axes: Mapping[Port, AxisPlace]
) -> list[AxisPlace] | None:
    """Return the axes along which cotangents of some samples reach only the same samples of known ports, if any."""
    passing, ordered, reaches_any = [], [], False
    shape = tuple(probe.values[port].shape)
    for place in _sample_candidates(shape, sample_count):
        nonzero = probe.nonzero_gradients({port: (place, patterns)})
        reached_ports = {sink: rows for sink, rows in nonzero.items() if sink in known_axes}
        reaches_any = reaches_any or bool(reached_ports)
        supports = [known_axes[sink].support(rows) for sink, rows in reached_ports.items()]
        if reached_ports and not any((support & ~patterns).any() for support in supports):
            passing.append(place)
        elif len(orders := {entry_order(support, patterns) for support in supports}) == 1 and (
            only_order := orders.pop()
        ):
            ordered.append(replace(place, order=tuple(np.argsort(only_order).tolist())))
    return passing or ordered if reaches_any else None


def _find_times(
    probe: AxisProbe, ports: Sequence[Port], sample_axes: Mapping[Port, AxisPlace]
) -> tuple[dict[Port, AxisPlace], dict[Port, tuple[int, ...]]]:
    """Find the axis of each tensor that corresponds to the steps of a recurrence, else the axes that could."""
    moving_axes: dict[Port, list[_MovingAxis]] = {port: [] for port in ports if port in probe.values}

    @cache
    def port_gradients(port: Port, place: AxisPlace) -> dict[Port, Values]:
        return probe.nonzero_gradients({port: (place, _step_patterns(place.size))})

    for sequence in (sequence for sequence in _step_sequences(probe.calls) if sequence.steps > 1):
        input_gradients = probe.nonzero_gradients(sequence.input_patterns(_step_patterns(sequence.steps)))
        if len(sequence.calls) > 1 and not _reads_in_turn(probe, sequence, input_gradients, sample_axes):
            continue
        for port, port_axes in moving_axes.items():
            axes = _other_axes(tuple(probe.values[port].shape), sample_axes.get(port))
            is_below = port in input_gradients
            supports = (
                (
                    place,
                    place.support(input_gradients[port]) if is_below else sequence.support(port_gradients(port, place)),
                )
                for place in axes
            )
            port_axes += _axes_along_steps(supports, sequence, is_below=is_below)
    for port_axes in moving_axes.values():
        port_axes.sort(key=lambda moving: not moving.is_below)
    return _choose_times(probe, moving_axes, sample_axes)


def _reads_in_turn(
    probe: AxisProbe,
    sequence: _StepSequence,
    input_gradients: Mapping[Port, Values],
    sample_axes: Mapping[Port, AxisPlace],
) -> bool:
    """Return whether the calls of a sequence read one part of an input after the other, as far as gradients show.

    Several calls on the same steps, or on different inputs, are no sequence: their results are features.
    """
    reached_inputs = [port for port in probe.model_inputs if port in input_gradients]
    moving_axes = [
        _axes_along_steps([(place, place.support(input_gradients[port]))], sequence, is_below=True)
        for port in reached_inputs
        for place in _other_axes(tuple(probe.values[port].shape), sample_axes.get(port))
    ]
    return any(moving_axes) or not reached_inputs


def _choose_times(
    probe: AxisProbe, moving_axes: Mapping[Port, Sequence[_MovingAxis]], sample_axes: Mapping[Port, AxisPlace]
) -> tuple[dict[Port, AxisPlace], dict[Port, tuple[int, ...]]]:
    """Choose the time axis of each tensor: the one that follows steps and contains nothing else.

    List unclear axes by tensor.
    """
    time_axes: dict[Port, AxisPlace] = {}
    unclear_axes: dict[Port, tuple[int, ...]] = {}
    for port, candidates in moving_axes.items():
        axes = sorted({candidate.place.axis for candidate in candidates})
        best = next(
            (candidate for candidate in candidates if candidate.is_exact), candidates[0] if candidates else None
        )
        if best is None:
            continue
        if len(axes) > 1 or (not best.is_exact and _contains_features(probe, port, best, port in sample_axes)):
            unclear_axes[port] = tuple(axes)
        else:
            time_axes[port] = best.place
    return time_axes, unclear_axes


@dataclass(frozen=True)
class _MovingAxis:
    """Axis that follows the steps of a recurrence, one by one (``is_exact``) or in order."""

    place: AxisPlace
    is_exact: bool
    sequence: _StepSequence
    is_below: bool


def _contains_features(probe: AxisProbe, port: Port, moving_axis: _MovingAxis, has_samples: bool) -> bool:
    """Return whether a time axis also contains features: several entries of one step, or entries out of order.

    Where a tensor has another axis for features, entries in order are steps of a finer sequence.
    """
    shape, sequence = tuple(probe.values[port].shape), moving_axis.sequence
    if moving_axis.is_below:
        nonzero = probe.nonzero_gradients(sequence.input_patterns(np.eye(sequence.steps, dtype=bool)))
        reached: Values | None = moving_axis.place.support(nonzero[port]).T
    else:
        reached = sequence.support(
            probe.nonzero_gradients({port: (moving_axis.place, np.eye(moving_axis.place.size, dtype=bool))})
        )
    if reached is None:
        return False
    reached = reached[reached.any(1)]
    first_reached, last_reached = reached.argmax(1), reached.shape[1] - 1 - reached[:, ::-1].argmax(1)
    end_shifts = np.diff(np.stack([first_reached, last_reached]))
    in_order = bool((end_shifts >= 0).all() or (end_shifts <= 0).all())
    is_single_entry = bool((first_reached == last_reached).all())
    if len(shape) - has_samples > 1:
        return is_single_entry and not in_order
    return not in_order or (is_single_entry and len(set(first_reached.tolist())) < len(first_reached))


@dataclass(frozen=True)
class _StepSequence:
    """Calls whose steps follow each other: one call, or all calls of a layer whose state is reset in between."""

    calls: tuple[DirectedCall, ...]

    @property
    def steps(self) -> int:
        return sum(call.steps for call in self.calls)

    def input_patterns(self, patterns: Values) -> dict[Port, tuple[AxisPlace, Values]]:
        """Split patterns (row, step) over the calls.

        Return the time axis and the part of the patterns by input port.
        """
        by_input, start = {}, 0
        for call in self.calls:
            by_input[call.input] = AxisPlace(1, 1, call.steps, 1), patterns[:, start : start + call.steps]
            start += call.steps
        return by_input

    def support(self, nonzero: Mapping[Port, Values]) -> Values | None:
        """Return the output steps at which any gradient is non-zero, (row, step) of bool.

        Returns None if all gradients are zero.
        """
        rows = next((len(nonzero[call.output]) for call in self.calls if call.output in nonzero), None)
        if rows is None:
            return None
        parts = [
            AxisPlace(1, 1, call.steps, 1).support(nonzero[call.output])
            if call.output in nonzero
            else np.zeros((rows, call.steps), dtype=bool)
            for call in self.calls
        ]
        return np.concatenate(parts, axis=1)


def _step_sequences(calls: Sequence[DirectedCall]) -> list[_StepSequence]:
    layers: dict[tuple[str, str | None], list[DirectedCall]] = {}
    for call in calls:
        layers.setdefault((str(call.output.layer).partition("#")[0], call.output.direction), []).append(call)
    joined_sequences = [_StepSequence(tuple(layer_calls)) for layer_calls in layers.values() if len(layer_calls) > 1]
    return [*(_StepSequence((call,)) for call in calls), *joined_sequences]


def _step_patterns(size: int) -> Values:
    """Return test patterns (row, index) of bool: the binary digits of each index, then its first and second half."""
    halves = np.repeat(np.eye(2, dtype=bool), [size // 2, size - size // 2], axis=1)
    return np.concatenate([binary_patterns(size), halves])


def _other_axes(shape: tuple[int, ...], sample_axis: AxisPlace | None) -> list[AxisPlace]:
    """Return all axes that do not count samples, and the remaining factor of an axis with samples folded into it."""
    axes = [AxisPlace(axis, 1, size, 1) for axis, size in enumerate(shape) if size > 1]
    if sample_axis is None:
        return axes
    other_axes = [place for place in axes if place.axis != sample_axis.axis]
    if sample_axis.size_before > 1:
        return [*other_axes, AxisPlace(sample_axis.axis, 1, sample_axis.size_before, sample_axis.size)]
    return (
        [*other_axes, AxisPlace(sample_axis.axis, sample_axis.size, sample_axis.size_after, 1)]
        if sample_axis.size_after > 1
        else other_axes
    )


def _axes_along_steps(
    supports: Iterable[tuple[AxisPlace, Values | None]], sequence: _StepSequence, *, is_below: bool
) -> list[_MovingAxis]:
    """Return the axes of a tensor that follow the steps of a recurrence: the one that does so step by step.

    If there is no such axis, return those whose first and second half reach different steps, in order.
    """
    exact_axes, ordered_axes = [], []
    for place, support in supports:
        if support is None:
            continue
        if place.size == sequence.steps and not (support & ~_step_patterns(place.size)).any():
            exact_axes.append(place)
        if support[-1].any() and support[-2].any() and _is_shifted(*support[-2:]):
            ordered_axes.append(place)
    is_exact = len(exact_axes) == 1
    return [_MovingAxis(place, is_exact, sequence, is_below) for place in (exact_axes if is_exact else ordered_axes)]


def _is_shifted(first: Values, second: Values) -> bool:
    """Return whether the True entries of one boolean array start and end no later than the other's, but differ."""
    a, b = np.flatnonzero(first), np.flatnonzero(second)
    forward = a[0] <= b[0] and a[-1] <= b[-1]
    backward = a[0] >= b[0] and a[-1] >= b[-1]
    return bool((forward or backward) and (a[0] != b[0] or a[-1] != b[-1]))


def _layout(port: Port, known_axes: _KnownAxes) -> Layout:
    shape, sample_axis = known_axes.shapes[port], known_axes.sample_axes.get(port)
    count = known_axes.sample_count if sample_axis is None else sample_axis.size
    time_axis = known_axes.time_axes.get(port)
    is_coupled = port in known_axes.coupled_ports
    axes: dict[int, Axis] = {}
    if time_axis is not None:
        axes[time_axis.axis] = (TIME,)
    if sample_axis is not None:
        folded_axis = (
            TIME if time_axis is not None and time_axis.axis == sample_axis.axis else f"axis_{sample_axis.axis}"
        )
        folds = {(True, False): (folded_axis, SAMPLE), (False, True): (SAMPLE, folded_axis), (False, False): (SAMPLE,)}
        axes[sample_axis.axis] = folds[sample_axis.size_before > 1, sample_axis.size_after > 1]
    unclear = known_axes.unclear_axes.get(port, ()) if time_axis is None else ()
    axes |= {axis: (f"axis_{axis}",) for axis in unclear if axis not in axes}
    last_role = FEATURE if port.kind == "input" else UNIT
    axes |= _image_axes(shape, axes, known_axes.images, FEATURE if port.kind == "input" else CHANNEL)
    names = tuple(f"axis_{axis}" for axis in unclear)
    order = () if sample_axis is None else sample_axis.order
    return Layout(layout_of_axes(len(shape), axes, last_role).axes, is_coupled, count, names, order)


def _image_axes(
    shape: Shape, known_axes: Mapping[int, Axis], images: Iterable[Shape], first_name: str
) -> dict[int, Axis]:
    """Return the names of the axes that are left, in a model whose cells take images: ``first_name`` for the channels.

    Where they are as many as an image has but their roles do not show, they have numbers: the last one need not hold
    features.
    """
    others = [axis for axis in range(len(shape)) if axis not in known_axes]
    alike = [image for image in images if 2 < len(image) == len(others)]
    for image in images:
        if names := image_axes([shape[axis] for axis in others], image):
            return {axis: (name,) for axis, name in zip(others, (first_name, *names[1:]), strict=True)}
    return {axis: (f"axis_{axis}",) for axis in others} if alike else {}
