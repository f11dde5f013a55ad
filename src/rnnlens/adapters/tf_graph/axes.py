"""Which axis of a tensor counts samples and which steps, in graphs that are fed with time first."""

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

#: Where inputs of such a graph have their steps and their samples.
_AXES = {TIME: 0, SAMPLE: 1}


def layouts(net: Net, batch: Batch, ports: Sequence[Port]) -> dict[Port, Layout]:
    """The layouts of inputs and outputs of a graph with time first, found by feeding it one step or sample more.

    An axis that grows with them counts them. Where the graph does not take more, since a shape is fixed or lengths are
    fed beside, the axes of inputs are those that its loops read; axes of which nothing is known are called ``axis_0``.
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
            return {}  # the loop has its axes in another order than was told from the graph: samples first
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
    """The shapes of tensors by port; by None that of what a loop reads, (time, sample, feature)."""
    spots, feed = PortTensors(found, batch), fed(found, batch)
    tensors: dict[Any, Any] = {port: spots(port).value for port in ports}
    tensors[None] = next(loop.input.tensors[0] for loop in found.loops if loop.input.stacked)
    values = found.copy.run(tensors, feed, found.variables(list(tensors.values()), feed))
    return {port: np.shape(value) for port, value in values.items()}


def _one_more(leaf: Any, axis: int) -> Any:
    array = np.asarray(leaf)
    return np.concatenate([array, np.take(array, [-1], axis)], axis) if array.ndim > axis else leaf


def _samples_by_size(shapes: Mapping[Port, tuple[int, ...]], known: dict[Port, dict[int, tuple[str, ...]]]) -> None:
    """The axis of samples of a (sample, unit) output, where the number of samples could not be changed."""
    first = next(iter(shapes.values()))
    steps, samples = first[:2]
    for port, shape in shapes.items():
        if (SAMPLE,) not in known[port].values() and len(shape) == 2 and shape[0] == samples != steps:
            known[port][0] = (SAMPLE,)
