"""Experiment behind the roles of axes: which entries of other tensors cotangents reach.

The axes of a recurrent layer's input and output are known from the call itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ...errors import RnnlensError
from ..protocol import Batch, Port
from .discover import named_modules, unwrap
from .pullback import TorchPullback
from .record import ALL
from .scan_families import sequence_modules

Values = np.ndarray[Any, Any]
Shape = tuple[int, ...]

#: Largest number of elements of the cotangents in one pull.
ROOM = 4 * 2**20


@dataclass(frozen=True)
class AxisPlace:
    """Position of an axis in a tensor: ``axis``, reshaped to (size_before, size, size_after).

    ``order``: for each entry its number in the patterns, if the entries are in another order than those.
    """

    axis: int
    size_before: int
    size: int
    size_after: int
    order: tuple[int, ...] = ()

    def split_axis(self, array: Values) -> Values:
        """Reshape an array with one leading axis to (row, size_before, size, size_after, everything else)."""
        moved = np.moveaxis(array, 1 + self.axis, 1)
        return moved.reshape(len(array), self.size_before, self.size, self.size_after, -1)

    def support(self, array: Values) -> Values:
        """Return which entries of this axis contain any True, (row, size), of a boolean array (row, *shape)."""
        is_hit = np.asarray(self.split_axis(array).any(axis=(1, 3, 4)))
        return is_hit[:, np.argsort(self.order)] if self.order else is_hit

    def random_cotangents(self, shape: tuple[int, ...], patterns: Values) -> Values:
        """Return random cotangents (row, *shape), zero outside the pattern of each row."""
        patterns = patterns[:, self.order] if self.order else patterns
        selected = np.broadcast_to(
            patterns[:, None, :, None], (len(patterns), self.size_before, self.size, self.size_after)
        )
        mask = selected.reshape(len(patterns), *[1] * self.axis, -1, *[1] * (len(shape) - self.axis - 1))
        noise: Values = np.random.default_rng(0).normal(size=(1, *shape)) * mask
        return noise


@dataclass(frozen=True)
class DirectedCall:
    """One direction of a recurrent call: its ports, whose tensors are (sample, time, feature)."""

    input: Port
    output: Port
    states: tuple[Port, ...]
    samples: int
    steps: int


class AxisProbe(TorchPullback):
    """Pullback with ports at the inputs, outputs and states of every recurrent call.

    In a model without recurrent calls, of the whole-sequence layer that ran last: its input and output are (sample,
    time, feature) in every family.
    """

    def __init__(self, model: nn.Module, batch: Batch, ports: Sequence[Port], *, cut: bool) -> None:
        scan_paths = [path for path, *_ in sequence_modules(named_modules(unwrap(model)))]
        scan_outputs = [Port("output", path) for path in scan_paths]
        super().__init__(model, batch, (), (), [Port("output", ALL)] if cut else [], watch=[*ports, *scan_outputs])
        call_ports: list[Port] = []
        self.calls: list[DirectedCall] = []
        #: Shapes (channel, *space) of inputs and states of cells that take images.
        self.images: set[Shape] = set()
        for node, (recurrence, _) in self._port_table.nodes.items():
            cell = recurrence.owner.step_cell
            if cell is not None and not cell.state_axes:
                self.images |= set(cell.shapes.values())
            for direction in ("forward", "backward")[: recurrence.owner.directions]:
                direction_args: Any = {"direction": direction if recurrence.owner.directions > 1 else None}
                inputs, output = Port("input", node), Port("output", node, **direction_args)
                count = len(recurrence.calls[0].link.initial)
                kinds: Any = ("initial_state", "final_state")
                states = tuple(Port(kind, node, i, **direction_args) for kind in kinds for i in range(count))
                shape = self._port_table.find(inputs).value.shape
                self.calls.append(DirectedCall(inputs, output, states, int(shape[0]), int(shape[1])))
                call_ports += [inputs, output, *states]
        scan_sizes = [
            (path, counts) for path, counts in self._port_table.recorder.scans.scan_sizes.items() if path in scan_paths
        ]
        for path, (samples, steps) in [] if self.calls else scan_sizes[-1:]:
            names = [name for name in self._port_table.layer_calls if name.partition("#")[0] == path] or [path]
            for name in names:
                inputs, output = Port("input", name), Port("output", name)
                sizes = (samples, steps) if len(names) == 1 else self._port_table.find(output).value.shape[:2]
                self.calls.append(DirectedCall(inputs, output, (), *map(int, sizes)))
                call_ports += [inputs, output]
        #: Tensors that the model takes and returns.
        self.model_inputs = _tensor_ports("input", self._port_table.inputs)
        self.model_outputs = _tensor_ports("output", self._port_table.outputs)
        for port in (*ports, *self.model_inputs, *self.model_outputs):
            with suppress(RnnlensError):  # a port that this model does not have
                self._port_table.find(port)
                call_ports.append(port)
        self.of = self.wrt = tuple(dict.fromkeys(call_ports))
        self.store_ports(self._port_table)

    def __enter__(self) -> Self:
        return self

    def shapes(self, ports: Sequence[Port]) -> dict[Port, Shape]:
        """Return the shapes of the tensors behind ``ports``; ports that this model lacks are left out."""
        return {port: tuple(map(int, self.values[port].shape)) for port in ports if port in self.values}

    def nonzero_gradients(self, starts: Mapping[Port, tuple[AxisPlace, Values]]) -> dict[Port, Values]:
        """Pull random cotangents back and return where gradients are non-zero, (row, ...) of bool by port.

        ``starts`` gives the axis place of each cotangent and its patterns (row, index).
        """
        count = len(next(iter(starts.values()))[1])
        # No path leads to an output from another port.
        size = sum(self.values[port].numel() for port in {*starts, *self.wrt} - ({*self.model_outputs} - {*starts}))
        parts_by_port: dict[Port, list[Values]] = {}
        for rows in (slice(i, i + max(1, ROOM // size)) for i in range(0, count, max(1, ROOM // size))):
            cotangents = {
                port: torch.as_tensor(place.random_cotangents(tuple(self.values[port].shape), patterns[rows]))
                for port, (place, patterns) in starts.items()
            }
            for port, grad in self.pull(cotangents).items():
                if grad is not None:
                    parts_by_port.setdefault(port, []).append((grad != 0).cpu().numpy())
        nonzero = {port: np.concatenate(parts) for port, parts in parts_by_port.items()}
        return {port: rows for port, rows in nonzero.items() if rows.any()}


def _tensor_ports(kind: Literal["input", "output"], leaves: Sequence[Any]) -> list[Port]:
    return [Port(kind, index=i) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor | PackedSequence)]


def binary_patterns(size: int) -> Values:
    """Return boolean patterns (row, size) of the binary digits of each index, and their complements.

    Any two indices differ in at least one row.
    """
    if size == 1:
        return np.ones((1, 1), dtype=bool)
    bits = (np.arange(size)[None, :] >> np.arange((size - 1).bit_length())[:, None]) & 1
    return np.concatenate([bits, 1 - bits]).astype(bool)


def entry_order(support: Values, patterns: Values) -> tuple[int, ...]:
    """Return, for each entry, the number of the only entry that reaches it; empty if one is reached by several or none.

    Examples
    --------
    >>> entry_order(binary_patterns(3)[:, [1, 2, 0]], binary_patterns(3))
    (1, 2, 0)
    """
    is_same = (support[:, :, None] == patterns[:, None, :]).all(axis=0)
    is_one_to_one = bool((is_same.sum(axis=0) == 1).all() and (is_same.sum(axis=1) == 1).all())
    return tuple(is_same.argmax(axis=1).tolist()) if is_one_to_one else ()
