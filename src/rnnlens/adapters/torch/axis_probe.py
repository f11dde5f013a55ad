"""Experiment behind the roles of axes: which entries of other tensors cotangents reach.

The axes of a recurrent layer's input and output are known from the call itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from ...errors import RnnlensError
from ..protocol import Batch, Port
from .discover import named_modules, unwrapped
from .pullback import TorchPullback
from .record import ALL
from .scan_families import sequence_modules

Values = np.ndarray[Any, Any]
Shape = tuple[int, ...]

#: Largest number of elements of the cotangents in one pull.
ROOM = 4 * 2**20


@dataclass(frozen=True)
class AxisPlace:
    """Position of an axis in a tensor: ``axis``, reshaped to (before, size, after).

    ``order``: for each entry its number in the patterns, if the entries are in another order than those.
    """

    axis: int
    before: int
    size: int
    after: int
    order: tuple[int, ...] = ()

    def opened(self, array: Values) -> Values:
        """Reshape an array with one leading axis to (row, before, size, after, everything else)."""
        moved = np.moveaxis(array, 1 + self.axis, 1)
        return moved.reshape(len(array), self.before, self.size, self.after, -1)

    def support(self, array: Values) -> Values:
        """Return which entries of this axis contain any True, (row, size), of a boolean array (row, *shape)."""
        found = np.asarray(self.opened(array).any(axis=(1, 3, 4)))
        return found[:, np.argsort(self.order)] if self.order else found

    def masked(self, shape: tuple[int, ...], patterns: Values) -> Values:
        """Return random cotangents (row, *shape), zero outside the pattern of each row."""
        patterns = patterns[:, self.order] if self.order else patterns
        on = np.broadcast_to(patterns[:, None, :, None], (len(patterns), self.before, self.size, self.after))
        mask = on.reshape(len(patterns), *[1] * self.axis, -1, *[1] * (len(shape) - self.axis - 1))
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
        scans = [path for path, *_ in sequence_modules(named_modules(unwrapped(model)))]
        around = [Port("output", path) for path in scans]
        super().__init__(model, batch, (), (), [Port("output", ALL)] if cut else [], watch=[*ports, *around])
        found: list[Port] = []
        self.calls: list[DirectedCall] = []
        for node, (run, _) in self._found.nodes.items():
            for direction in ("forward", "backward")[: run.owner.directions]:
                side: Any = {"direction": direction if run.owner.directions > 1 else None}
                inputs, output = Port("input", node), Port("output", node, **side)
                count = len(run.visits[0].link.fed)
                kinds: Any = ("initial_state", "final_state")
                states = tuple(Port(kind, node, i, **side) for kind in kinds for i in range(count))
                shape = self._found.find(inputs).value.shape
                self.calls.append(DirectedCall(inputs, output, states, int(shape[0]), int(shape[1])))
                found += [inputs, output, *states]
        ran = [(path, counts) for path, counts in self._found.recorder.scans.ran.items() if path in scans]
        for path, (samples, steps) in [] if self.calls else ran[-1:]:
            inputs, output = Port("input", path), Port("output", path)
            self.calls.append(DirectedCall(inputs, output, (), samples, steps))
            found += [inputs, output]
        for port in ports:
            with suppress(RnnlensError):  # a port that this model does not have
                self._found.find(port)
                found.append(port)
        self.of = self.wrt = tuple(dict.fromkeys(found))
        self.keep(self._found)

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
        size = sum(self.values[port].numel() for port in {*starts, *self.wrt})
        found: dict[Port, list[Values]] = {}
        for rows in (slice(i, i + max(1, ROOM // size)) for i in range(0, count, max(1, ROOM // size))):
            placed = {
                port: torch.as_tensor(place.masked(tuple(self.values[port].shape), patterns[rows]))
                for port, (place, patterns) in starts.items()
            }
            for port, arrived in self.vjp(placed).items():
                if arrived is not None:
                    found.setdefault(port, []).append((arrived != 0).cpu().numpy())
        whole = {port: np.concatenate(parts) for port, parts in found.items()}
        return {port: rows for port, rows in whole.items() if rows.any()}


def binary_patterns(size: int) -> Values:
    """Return boolean patterns (row, size) of the binary digits of each index, and their complements.

    Any two indices differ in at least one row.
    """
    if size == 1:
        return np.ones((1, 1), dtype=bool)
    bits = (np.arange(size)[None, :] >> np.arange((size - 1).bit_length())[:, None]) & 1
    return np.concatenate([bits, 1 - bits]).astype(bool)


def order_of(support: Values, patterns: Values) -> tuple[int, ...]:
    """Return, for each entry, the number of the only entry that reaches it; empty if one is reached by several or none.

    Examples
    --------
    >>> order_of(binary_patterns(3)[:, [1, 2, 0]], binary_patterns(3))
    (1, 2, 0)
    """
    same = (support[:, :, None] == patterns[:, None, :]).all(axis=0)
    is_one_to_one = bool((same.sum(axis=0) == 1).all() and (same.sum(axis=1) == 1).all())
    return tuple(same.argmax(axis=1).tolist()) if is_one_to_one else ()
