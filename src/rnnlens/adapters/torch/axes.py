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

from ...layout import Axis, Layout, named
from ...vocabulary import FEATURE, SAMPLE, TIME, UNIT
from ..protocol import Batch, Port
from .axis_probe import AxisPlace, AxisProbe, DirectedCall, Shape, Values, binary_patterns, order_of
from .inputs import as_tensors, leaves_of, on_leaves


def layouts(model: nn.Module, batch: Batch, ports: Sequence[Port]) -> dict[Port, Layout]:
    """Return the layouts of requested ports and model inputs.

    An unknown axis is named ``axis_0``, ``axis_1``, ... The result is empty for a model that runs no recurrent layer.
    """
    inputs = [Port("input", index=i) for i in range(len(leaves_of(as_tensors(batch.x, model, "x"))))]
    wanted = list(dict.fromkeys([*ports, *inputs]))
    with AxisProbe(model, batch, wanted, cut=True) as probe:
        if not probe.calls:
            return {}
        counts = {call.samples for call in probe.calls}
        samples, coupled = _find_samples(probe, wanted)
        times, unclear = _find_times(probe, wanted, samples)
        shapes = probe.shapes(wanted)
    if len(counts) > 1:  # samples are folded with another axis in some calls: propagate through the recurrences
        with AxisProbe(model, batch, wanted, cut=False) as whole:
            samples, coupled = _find_samples(whole, wanted)
    single = all(sequence.steps == 1 for sequence in _sequences(probe.calls))
    for port in wanted if single else ():  # an axis of size 1 is the one step, except of a tensor of two axes
        shape, sample = shapes.get(port, ()), samples.get(port)
        lone = [axis for axis, size in enumerate(shape) if size == 1 and (sample is None or axis != sample.axis)]
        if lone and len(shape) > 2 and port not in times:
            times[port] = AxisPlace(lone[0], 1, 1, 1)
    known = _KnownAxes(shapes, samples, coupled, times, min(counts), unclear)
    _find_by_size(model, batch, [port for port in ports if port in shapes], known, single=single)
    return {port: _layout(port, known) for port in shapes}


@dataclass
class _KnownAxes:
    """Axes found so far: the shapes of all requested tensors, their sample axes and their time axes.

    ``coupled`` holds the ports at which every sample depends on other samples. ``count`` is the smallest number of
    samples of any recurrent call. ``unclear`` holds, for tensors without a clear time axis, the axes that follow steps:
    several, or one that holds features as well.
    """

    shapes: Mapping[Port, Shape]
    samples: dict[Port, AxisPlace]
    coupled: set[Port]
    times: dict[Port, AxisPlace]
    count: int
    unclear: dict[Port, tuple[int, ...]]


def _find_by_size(model: nn.Module, batch: Batch, asked: Sequence[Port], known: _KnownAxes, *, single: bool) -> None:
    """Find the remaining axes by running the model on a smaller batch and comparing the shapes of tensors.

    Gradients cannot decide where all values depend on all others. The axes found are added to ``known``.
    """
    shapes, samples, times = known.shapes, known.samples, known.times
    rest = {port: len(shape) - (port in samples) for port, shape in shapes.items()}
    without = [port for port in asked if port not in times and port not in known.unclear and rest[port] > 1]
    if without and not single:
        for port, shorter in _shrinking(model, batch, without, shapes, times, counts=False).items():
            of_steps = [axis for axis in shorter if axis != getattr(samples.get(port), "axis", None)]
            if len(of_steps) == 1:
                times[port] = AxisPlace(of_steps[0], 1, shapes[port][of_steps[0]], 1)
            elif of_steps:
                known.unclear[port] = tuple(of_steps)
    mixed = [port for port in asked if port not in samples and len(shapes[port]) > 1]
    if mixed and known.count > 1:
        found = _shrinking(model, batch, mixed, shapes, samples, counts=True)
        alone = {port: shorter[0] for port, shorter in found.items() if len(shorter) == 1}
        fitting = {port: axis for port, axis in alone.items() if shapes[port][axis] == known.count}
        samples |= {port: AxisPlace(axis, 1, known.count, 1) for port, axis in fitting.items()}


def _shrinking(
    model: nn.Module,
    batch: Batch,
    ports: Sequence[Port],
    every: Collection[Port],
    places: Mapping[Port, AxisPlace],
    *,
    counts: bool,
) -> dict[Port, tuple[int, ...]]:
    """Find the axes of each port that are shorter when the batch has one step (or, with ``counts``, sample) fewer.

    ``places``: the axes that count steps (or samples), as far as they are known. If that of no input is known and there
    is only one input, each of its axes is tried. ``every``: ports whose shapes are compared.
    """

    def sizes(x: Any) -> tuple[Values, Mapping[Port, Shape]]:
        with AxisProbe(model, replace(batch, x=x), list(every), cut=True) as probe:
            return np.array([(call.samples, call.steps) for call in probe.calls]), probe.shapes(list(every))

    x = as_tensors(batch.x, model, "x")
    leaves, (calls, shapes) = leaves_of(x), sizes(x)
    of_inputs = {i: places.get(Port("input", index=i)) for i in range(len(leaves))}
    ways = [{i: place.axis for i, place in of_inputs.items() if place is not None}]
    if not ways[0]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] if len(leaves) == 1 else []
        ways = [{0: axis} for leaf in tensors for axis, size in enumerate(leaf.shape) if size > 1]
    for axes in ways:
        try:
            fewer, found = sizes(_shorter(x, axes))
        except Exception:
            continue
        if len(fewer) != len(calls) or (fewer != calls)[:, int(counts)].any():
            continue  # the calls changed in the other size, too
        smaller = (fewer < calls)[:, 1 - int(counts)]
        if smaller.all() if counts else smaller.any():
            both = [port for port in ports if port in found and len(shapes[port]) == len(found[port])]
            pairs = {port: enumerate(zip(shapes[port], found[port], strict=True)) for port in both}
            shorter = {port: tuple(i for i, (a, b) in several if b == a - 1) for port, several in pairs.items()}
            return {port: axes_of for port, axes_of in shorter.items() if axes_of}
    return {}


def _shorter(x: Any, axes: Mapping[int, int]) -> Any:
    """Remove one entry along an axis of each input; ``axes`` maps the position of an input to the axis."""
    numbers = count()

    def one(leaf: Any) -> Any:
        axis = axes.get(next(numbers)) if isinstance(leaf, Tensor) else None
        return leaf if axis is None else torch.narrow(leaf, axis, 0, leaf.shape[axis] - 1)

    return on_leaves(x, one)


def _candidates(shape: tuple[int, ...], samples: int) -> list[AxisPlace]:
    """Return the axes that could count samples: axes of that size, and axes with samples folded into them."""
    plain = [AxisPlace(axis, 1, samples, 1) for axis, size in enumerate(shape) if size == samples]
    if samples == 1:
        return plain
    folded = [(axis, size // samples) for axis, size in enumerate(shape) if size > samples and size % samples == 0]
    both = [(AxisPlace(axis, 1, samples, rest), AxisPlace(axis, rest, samples, 1)) for axis, rest in folded]
    return plain + [place for pair in both for place in pair]


def _find_samples(probe: AxisProbe, ports: Sequence[Port]) -> tuple[dict[Port, AxisPlace], set[Port]]:
    """Find sample axes, and the ports at which every sample depends on others.

    It starts at the recurrent calls with the fewest samples and goes on from the axes found.
    """
    count = min(call.samples for call in probe.calls)
    first = AxisPlace(0, 1, count, 1)
    fewest = [call for call in probe.calls if call.samples == count]
    known = {port: first for call in fewest for port in (call.input, call.output, *call.states)}
    patterns = binary_patterns(count)
    coupled: set[Port] = set()
    waiting = [port for port in ports if port in probe.values]
    progress = True
    while waiting and progress:
        found: dict[Port, AxisPlace] = {}
        arrived = probe.nonzero_gradients({p: (place, patterns) for p, place in known.items()})
        for port in waiting:
            if port in arrived:
                _store_place(found, coupled, port, _passing_as_sink(arrived[port], count, patterns))
        for port in waiting:
            if port not in found:
                _store_place(found, coupled, port, _passing_as_source(probe, port, count, patterns, known))
        known |= found
        waiting, progress = [port for port in waiting if port not in found], bool(found)
    alone = coupled - set(known) if count > 1 else set()
    return {port: place for port, place in known.items() if port in ports}, alone


def _store_place(found: dict[Port, AxisPlace], coupled: set[Port], port: Port, passing: list[AxisPlace] | None) -> None:
    """Store the axis of a port if exactly one candidate passed the test.

    If none passed, mark its samples as coupled.
    """
    if passing:
        plain = [place for place in passing if place.before == place.after == 1]
        if len(passing) == 1 or passing[0].size == 1 or len(plain) == 1:
            found[port] = (plain or passing)[0]
    elif passing is not None:
        coupled.add(port)


def _passing_as_sink(arrived: Values, count: int, patterns: Values) -> list[AxisPlace]:
    supports = [(place, place.support(arrived)) for place in _candidates(arrived.shape[1:], count)]
    passing = [place for place, support in supports if not (support & ~patterns).any()]
    return passing or [replace(p, order=order) for p, support in supports if (order := order_of(support, patterns))]


def _passing_as_source(
    probe: AxisProbe, port: Port, count: int, patterns: Values, known: Mapping[Port, AxisPlace]
) -> list[AxisPlace] | None:
    """Return the axes along which cotangents of some samples reach only the same samples of known ports, if any."""
    passing, ordered, reached = [], [], False
    shape = tuple(probe.values[port].shape)
    for place in _candidates(shape, count):
        arrived = probe.nonzero_gradients({port: (place, patterns)})
        sinks = {sink: rows for sink, rows in arrived.items() if sink in known}
        reached = reached or bool(sinks)
        supports = [known[sink].support(rows) for sink, rows in sinks.items()]
        if sinks and not any((support & ~patterns).any() for support in supports):
            passing.append(place)
        elif len(orders := {order_of(support, patterns) for support in supports}) == 1 and (found := orders.pop()):
            ordered.append(replace(place, order=tuple(np.argsort(found).tolist())))
    return passing or ordered if reached else None


def _find_times(
    probe: AxisProbe, ports: Sequence[Port], samples: Mapping[Port, AxisPlace]
) -> tuple[dict[Port, AxisPlace], dict[Port, tuple[int, ...]]]:
    """Find the axis of each tensor that corresponds to the steps of a recurrence, else the axes that could."""
    moving: dict[Port, list[_MovingAxis]] = {port: [] for port in ports if port in probe.values}

    @cache
    def pulled(port: Port, place: AxisPlace) -> dict[Port, Values]:
        return probe.nonzero_gradients({port: (place, _patterns(place.size))})

    for sequence in (sequence for sequence in _sequences(probe.calls) if sequence.steps > 1):
        below = probe.nonzero_gradients(sequence.placed(_patterns(sequence.steps)))
        for port, found in moving.items():
            axes, is_below = _rest(tuple(probe.values[port].shape), samples.get(port)), port in below
            supports = (
                (place, place.support(below[port]) if is_below else sequence.support(pulled(port, place)))
                for place in axes
            )
            found += _moving_along(supports, sequence, is_below=is_below)
    for found in moving.values():
        found.sort(key=lambda one: not one.is_below)
    return _choose_times(probe, moving, samples)


def _choose_times(
    probe: AxisProbe, moving: Mapping[Port, Sequence[_MovingAxis]], samples: Mapping[Port, AxisPlace]
) -> tuple[dict[Port, AxisPlace], dict[Port, tuple[int, ...]]]:
    """Choose the time axis of each tensor: the one that follows steps and contains nothing else.

    List unclear axes by tensor.
    """
    found: dict[Port, AxisPlace] = {}
    unclear: dict[Port, tuple[int, ...]] = {}
    for port, several in moving.items():
        places = sorted({one.place.axis for one in several})
        chosen = next((one for one in several if one.is_exact), several[0] if several else None)
        if chosen is None:
            continue
        if len(places) > 1 or (not chosen.is_exact and _holds_more(probe, port, chosen, port in samples)):
            unclear[port] = tuple(places)
        else:
            found[port] = chosen.place
    return found, unclear


@dataclass(frozen=True)
class _MovingAxis:
    """Axis that follows the steps of a recurrence, one by one (``is_exact``) or in order."""

    place: AxisPlace
    is_exact: bool
    sequence: _StepSequence
    is_below: bool


def _holds_more(probe: AxisProbe, port: Port, moving: _MovingAxis, has_samples: bool) -> bool:
    """Return whether a time axis also contains features: several entries of one step, or entries out of order.

    Where a tensor has another axis for features, entries in order are steps of a finer sequence.
    """
    shape, sequence = tuple(probe.values[port].shape), moving.sequence
    if moving.is_below:
        arrived = probe.nonzero_gradients(sequence.placed(np.eye(sequence.steps, dtype=bool)))
        reach: Values | None = moving.place.support(arrived[port]).T
    else:
        reach = sequence.support(probe.nonzero_gradients({port: (moving.place, np.eye(moving.place.size, dtype=bool))}))
    if reach is None:
        return False
    reach = reach[reach.any(1)]
    first, last = reach.argmax(1), reach.shape[1] - 1 - reach[:, ::-1].argmax(1)
    ends = np.diff(np.stack([first, last]))
    in_order = bool((ends >= 0).all() or (ends <= 0).all())
    single = bool((first == last).all())
    if len(shape) - has_samples > 1:
        return single and not in_order
    return not in_order or (single and len(set(first.tolist())) < len(first))


@dataclass(frozen=True)
class _StepSequence:
    """Calls whose steps follow each other: one call, or all calls of a layer whose state is reset in between."""

    calls: tuple[DirectedCall, ...]

    @property
    def steps(self) -> int:
        return sum(call.steps for call in self.calls)

    def placed(self, patterns: Values) -> dict[Port, tuple[AxisPlace, Values]]:
        """Split patterns (row, step) over the calls.

        Return the time axis and the part of the patterns by input port.
        """
        found, start = {}, 0
        for call in self.calls:
            found[call.input] = AxisPlace(1, 1, call.steps, 1), patterns[:, start : start + call.steps]
            start += call.steps
        return found

    def support(self, arrived: Mapping[Port, Values]) -> Values | None:
        """Return the output steps at which any gradient is non-zero, (row, step) of bool.

        Returns None if all gradients are zero.
        """
        rows = next((len(arrived[call.output]) for call in self.calls if call.output in arrived), None)
        if rows is None:
            return None
        parts = [
            AxisPlace(1, 1, call.steps, 1).support(arrived[call.output])
            if call.output in arrived
            else np.zeros((rows, call.steps), dtype=bool)
            for call in self.calls
        ]
        return np.concatenate(parts, axis=1)


def _sequences(calls: Sequence[DirectedCall]) -> list[_StepSequence]:
    layers: dict[tuple[str, str | None], list[DirectedCall]] = {}
    for call in calls:
        layers.setdefault((str(call.output.layer).partition("#")[0], call.output.direction), []).append(call)
    together = [_StepSequence(tuple(several)) for several in layers.values() if len(several) > 1]
    return [*(_StepSequence((call,)) for call in calls), *together]


def _patterns(size: int) -> Values:
    """Return test patterns (row, index) of bool: the binary digits of each index, then its first and second half."""
    halves = np.repeat(np.eye(2, dtype=bool), [size // 2, size - size // 2], axis=1)
    return np.concatenate([binary_patterns(size), halves])


def _rest(shape: tuple[int, ...], sample: AxisPlace | None) -> list[AxisPlace]:
    """Return all axes that do not count samples, and the remaining factor of an axis with samples folded into it."""
    axes = [AxisPlace(axis, 1, size, 1) for axis, size in enumerate(shape) if size > 1]
    if sample is None:
        return axes
    others = [place for place in axes if place.axis != sample.axis]
    if sample.before > 1:
        return [*others, AxisPlace(sample.axis, 1, sample.before, sample.size)]
    return [*others, AxisPlace(sample.axis, sample.size, sample.after, 1)] if sample.after > 1 else others


def _moving_along(
    supports: Iterable[tuple[AxisPlace, Values | None]], sequence: _StepSequence, *, is_below: bool
) -> list[_MovingAxis]:
    """Return the axes of a tensor that follow the steps of a recurrence: the one that does so step by step.

    If there is no such axis, return those whose first and second half reach different steps, in order.
    """
    exact, apart = [], []
    for place, support in supports:
        if support is None:
            continue
        if place.size == sequence.steps and not (support & ~_patterns(place.size)).any():
            exact.append(place)
        if support[-1].any() and support[-2].any() and _ordered(*support[-2:]):
            apart.append(place)
    is_exact = len(exact) == 1
    return [_MovingAxis(place, is_exact, sequence, is_below) for place in (exact if is_exact else apart)]


def _ordered(first: Values, second: Values) -> bool:
    """Return whether the True entries of one boolean array start and end no later than the other's, but differ."""
    a, b = np.flatnonzero(first), np.flatnonzero(second)
    forward = a[0] <= b[0] and a[-1] <= b[-1]
    backward = a[0] >= b[0] and a[-1] >= b[-1]
    return bool((forward or backward) and (a[0] != b[0] or a[-1] != b[-1]))


def _layout(port: Port, found: _KnownAxes) -> Layout:
    shape, count = found.shapes[port], found.count
    sample, time, coupled = found.samples.get(port), found.times.get(port), port in found.coupled
    if sample is None and coupled:
        same = [axis for axis, size in enumerate(shape) if size == count and (time is None or axis != time.axis)]
        sample = AxisPlace(same[0], 1, count, 1) if len(same) == 1 else None
    known: dict[int, Axis] = {}
    if time is not None:
        known[time.axis] = (TIME,)
    if sample is not None:
        rest = TIME if time is not None and time.axis == sample.axis else f"axis_{sample.axis}"
        folds = {(True, False): (rest, SAMPLE), (False, True): (SAMPLE, rest), (False, False): (SAMPLE,)}
        known[sample.axis] = folds[sample.before > 1, sample.after > 1]
    unclear = found.unclear.get(port, ()) if time is None else ()
    known |= {axis: (f"axis_{axis}",) for axis in unclear if axis not in known}
    last = FEATURE if port.kind == "input" else UNIT
    names = tuple(f"axis_{axis}" for axis in unclear)
    order = () if sample is None else sample.order
    return Layout(named(len(shape), known, last).axes, coupled, count, names, order)
