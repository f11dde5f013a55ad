"""Tensors outside of the recurrences, with samples first, then steps, then one axis of all the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...adapters.protocol import Port
from ...layout import Layout, canonical_order
from ...typing import Array
from ...vocabulary import SAMPLE, TIME


@dataclass(frozen=True)
class OuterTensor:
    """A tensor outside the recurrences, seen as (sample, time, feature) or (sample, feature).

    Attributes
    ----------
    shape
        The framework's own.
    layout
        How it lies in there: None for samples first, then time.
    count
        Number of samples in the batch, where there is a layout.
    """

    port: Port
    shape: tuple[int, ...]
    layout: Layout | None = None
    count: int = 0

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.shape[0] if self.layout is None else self._sizes.get(SAMPLE, 1)

    @property
    def times(self) -> int | None:
        """Number of steps; None where there is no time."""
        if self.layout is not None:
            return self._sizes.get(TIME)
        return self.shape[1] if len(self.shape) > 2 else None

    @property
    def features(self) -> int:
        """Numbers per sample and step."""
        return math.prod(self.shape) // (self.samples * (self.times or 1))

    @property
    def _sizes(self) -> dict[str, int]:
        assert self.layout is not None
        return dict(zip(self.layout.names, self.layout.sizes(self.shape, self.count), strict=True))

    def closed(self, rows: Array) -> Array:
        """(row, sample, [time,] feature) as the framework wants it."""
        if self.layout is not None:
            order = canonical_order(self.layout.names)
            sizes = list(self._sizes.values())
            rows = rows.reshape((rows.shape[0], *(sizes[i] for i in order)))
            rows = _permuted(rows, [order.index(i) for i in range(len(order))])
        return rows.reshape((rows.shape[0], *self.shape))

    def opened(self, rows: Array) -> Array:
        """From the framework, as (row, sample, [time,] feature)."""
        if self.layout is not None:
            rows = _permuted(self.layout.opened(rows, self.count, lead=1), canonical_order(self.layout.names))
        steps = () if self.times is None else (self.times,)
        return rows.reshape((rows.shape[0], self.samples, *steps, self.features))


def _permuted(rows: Array, order: Sequence[int]) -> Array:
    """Every axis but the first one in another order."""
    axes = (0, *(1 + i for i in order))
    return np.transpose(rows, axes) if isinstance(rows, np.ndarray) else rows.permute(axes)


def moved(array: Array, origin: int, target: int) -> Array:
    """The array with one axis in another place."""
    return np.moveaxis(array, origin, target) if isinstance(array, np.ndarray) else array.movedim(origin, target)
