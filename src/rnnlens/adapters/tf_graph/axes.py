"""Axis names of inputs and outputs of graphs whose inputs are (time, sample, ...)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...errors import RnnlensError
from ...layout import Layout, named
from ...trees import map_leaves
from ...vocabulary import FEATURE, SAMPLE, TIME, UNIT
from ..protocol import Batch, Port
from .boundaries import PortTensors
from .inputs import fed
from .opened import Opened, opened
from .public import Net

#: Axes of steps and samples in the inputs of a time-first graph.
_AXES = {TIME: 0, SAMPLE: 1}


def layouts(net: Net, batch: Batch, ports: Sequence[Port]) -> dict[Port, Layout]:
    """Return the axis names of inputs and outputs of a time-first graph, found by feeding one more step or sample.

    An axis that becomes longer by one is the axis of steps, or of samples. If the graph rejects the longer input (a
    shape is fixed, or lengths are fed separately), inputs are (time, sample, ...). The last unknown axis is ``feature``
    or ``unit``, the others are ``axis_0`` and so on. The result is empty if the loops turn out to read (sample, time,
    ...).
    """
    found = opened(net, batch.seed)
    wanted = [Port("input", index=i) for i in range(len(net.inputs))]
    wanted += [port for port in ports if port.kind == "output" and not found.first_call(str(port.layer))]
    shapes = _shapes(found, batch, wanted)
    known: dict[Port, dict[int, tuple[str, ...]]] = {port: {} for port in wanted}
    for name, axis in _AXES.items():
        try:
            longer = _shapes(found, replace(batch, x=map_leaves(partial(_one_more, axis=axis), batch.x)), wanted)
        except RnnlensError:
            longer = shapes
        if longer[None][1 - axis] != shapes[None][1 - axis]:
            return {}  # the loop reads samples first, against what the graph suggested
        for port in wanted:
            grown = [i for i, (old, new) in enumerate(zip(shapes[port], longer[port], strict=True)) if old != new]
            if len(grown) == 1:
                known[port][grown[0]] = (name,)
            elif port.kind == "input" and len(shapes[port]) > axis:
                known[port][axis] = (name,)
    _samples_by_size({port: shapes[port] for port in wanted}, known)
    last = {port: FEATURE if port.kind == "input" else UNIT for port in wanted}
    return {port: named(len(shapes[port]), known[port], last[port]) for port in wanted}


def _shapes(found: Opened, batch: Batch, ports: Sequence[Port]) -> dict[Any, tuple[int, ...]]:
    """Return the shapes of tensors by port.

    The key None has the shape (time, sample, feature) of a tensor that a loop reads.
    """
    spots, feed = PortTensors(found, batch), fed(found, batch)
    tensors: dict[Any, Any] = {port: spots(port).value for port in ports}
    tensors[None] = next(loop.input.tensors[0] for loop in found.loops if loop.input.stacked)
    values = found.copy.run(tensors, feed, found.variables(list(tensors.values()), feed))
    return {port: np.shape(value) for port, value in values.items()}


def _one_more(leaf: Any, axis: int) -> Any:
    array = np.asarray(leaf)
    return np.concatenate([array, np.take(array, [-1], axis)], axis) if array.ndim > axis else leaf


def _samples_by_size(shapes: Mapping[Port, tuple[int, ...]], known: dict[Port, dict[int, tuple[str, ...]]]) -> None:
    """Find the sample axis of a (sample, unit) output by its size, where feeding one more sample was impossible."""
    first = next(iter(shapes.values()))
    steps, samples = first[:2]
    for port, shape in shapes.items():
        if (SAMPLE,) not in known[port].values() and len(shape) == 2 and shape[0] == samples != steps:
            known[port][0] = (SAMPLE,)
