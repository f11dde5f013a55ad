"""Recorded calls of layers that are not recurrent: those of one layer made once per step are one array over time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .record import CallRecorder, OutputRecord, Recurrence, call_numbers, node_names

#: Function from the tensors of all calls, or from their gradients, to one tensor.
Join = Callable[[Sequence[Tensor]], Tensor]


@dataclass
class LayerCall:
    """One recorded call of a layer, or its calls at all steps of the loop ``loop``."""

    name: str
    records: list[OutputRecord]
    loop: Recurrence | None = None

    @property
    def is_one_of_several(self) -> bool:
        """Whether it is a single call of a layer that was called several times."""
        return self.loop is None and "#" in self.name

    def output(self, index: int = 0) -> tuple[list[Tensor], Join] | None:
        """Return the tensors of an output, and how they are joined; None if the layer has no such output."""
        return self._joined([record.outputs for record in self.records], index)

    def input(self, index: int = 0) -> tuple[list[Tensor], Join] | None:
        """Return the tensors of an input, and how they are joined; None if the layer has none, or they differ."""
        return self._joined([record.inputs for record in self.records], index)

    def at_step(self, step: int) -> LayerCall | None:
        """Return the call at one step of the loop; None if there is no such call."""
        return LayerCall(f"{self.name}#{step}", [self.records[step]]) if step < len(self.records) else None

    def _joined(self, leaves: Sequence[Sequence[Tensor]], index: int) -> tuple[list[Tensor], Join] | None:
        if any(index >= len(tensors) for tensors in leaves):
            return None
        tensors = [values[index] for values in leaves]
        if self.loop is None:
            return tensors, lambda parts: parts[0]
        join = _join_of(tensors, _samples(self.loop))
        return None if join is None else (tensors, join)


def layer_calls(recorder: CallRecorder) -> list[LayerCall]:
    """Return the recorded calls of layers that are not recurrent, in the order of their first calls.

    A layer is joined over time only if every call of it belongs to a step of a loop of its own, before or after it.
    """
    records_by_path: dict[str, list[OutputRecord]] = {}
    for record in recorder.output_records:
        records_by_path.setdefault(record.name, []).append(record)
    calls = []
    for path, records in records_by_path.items():
        groups = _by_loop(recorder, records) or [(None, [record]) for record in records]
        numbers = call_numbers([path] * len(groups))
        calls += [LayerCall(path + number, group, loop) for number, (loop, group) in zip(numbers, groups, strict=True)]
    place = {id(record): i for i, record in enumerate(recorder.output_records)}
    return sorted(calls, key=lambda call: place[id(call.records[0])])


def loops_of_layers(recorder: CallRecorder, calls: Sequence[LayerCall]) -> list[frozenset[str]]:
    """Return the names of the layers that run in turn at the steps of each loop of several steps."""
    spans: list[tuple[int, set[str]]] = []  # the last call of a loop, and its layers
    recurrences = zip(recorder.recurrences, node_names(recorder.recurrences), strict=True)
    for loop, names in sorted(recurrences, key=lambda pair: pair[0].calls[0].number):
        if len(loop.calls) < 2:
            continue
        layers = {*names, *(call.name for call in calls if call.loop is loop)}
        if spans and loop.calls[0].number < spans[-1][0]:  # called in turn with the one before
            spans[-1] = max(spans[-1][0], loop.calls[-1].number), spans[-1][1] | layers
        else:
            spans.append((loop.calls[-1].number, layers))
    return [frozenset(layers) for _, layers in spans]


def _by_loop(recorder: CallRecorder, records: list[OutputRecord]) -> list[tuple[Recurrence | None, list[OutputRecord]]]:
    """Group the calls of a layer by the loop whose steps they belong to; return nothing if that is not clear."""
    if len(records) < 2:
        return []
    steps = sorted((call.number, i, loop) for i, loop in enumerate(recorder.recurrences) for call in loop.calls)
    numbers = [number for number, _, _ in steps]
    for offset in (0, -1):  # the step that comes next, or the one before
        places = [bisect_right(numbers, record.calls_before) + offset for record in records]
        if len(set(places)) < len(places) or not all(0 <= place < len(steps) for place in places):
            continue
        groups: dict[int, list[OutputRecord]] = {}
        for place, record in zip(places, records, strict=True):
            groups.setdefault(steps[place][1], []).append(record)
        loops = [(recorder.recurrences[i], group) for i, group in groups.items()]
        if len(loops) < len(records) and all(_is_once_per_step(loop, group) for loop, group in loops):
            return list(loops)
    return []


def _is_once_per_step(loop: Recurrence, records: Sequence[OutputRecord]) -> bool:
    """Return whether a layer was called once per step of a loop, with outputs that can be joined."""
    outputs = [record.outputs for record in records]
    return (
        len(records) == len(loop.calls)
        and all(call.steps == 1 and call.packing is None for call in loop.calls)
        and len({len(tensors) for tensors in outputs}) == 1
        and all(
            tensors[0].dim() > 1 and _join_of(tensors, _samples(loop)) is not None
            for tensors in zip(*outputs, strict=True)
        )
    )


def _samples(loop: Recurrence) -> int:
    return int(loop.calls[0].layer_records[0].input_copy.shape[1])


def _join_of(tensors: Sequence[Tensor], samples: int) -> Join | None:
    """Return the function that joins tensors of single steps to (sample, time, ...); None if the axes are not clear."""
    shape = tensors[0].shape
    if any(tensor.shape != shape for tensor in tensors) or not shape:
        return None
    if len(shape) == 3 and shape[:2] == (samples, 1):
        return lambda parts: torch.cat(list(parts), 1)
    if len(shape) == 3 and shape[:2] == (1, samples):
        return lambda parts: torch.cat(list(parts)).transpose(0, 1)
    return (lambda parts: torch.stack(list(parts), 1)) if shape[0] == samples else None
