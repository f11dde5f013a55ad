"""Certificates that compare some of the samples: those of all traces of a model but the first on data of one shape.

A reference run of all samples costs as much as the capture. Once a trace of a model was certified with all samples, the
next ones run the model on a few consecutive samples, a different part at each call, given the capture's dL/dy of these
samples. The outputs, the gradients at the inputs and the gradients of the recurrent weights that these samples alone
explain are compared. If they differ, for instance because a layer mixes the samples of its batch, the trace is computed
again with a certificate of all samples, and so is every later one.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import data
from ...adapters.protocol import Batch, Capture
from ...results.schema import to_host
from ...settings import current
from ...typing import Array

#: Smallest batch of which only a part is compared, and the share of its samples in that part.
FEWEST, SHARE = 16, 16


@dataclass(frozen=True)
class SamplePart:
    """Consecutive samples of a batch of ``count`` samples: ``start`` up to, but without, ``stop``."""

    start: int
    stop: int
    count: int

    def __str__(self) -> str:
        last = self.stop - 1
        return (
            f"sample {last} of {self.count}"
            if last == self.start
            else f"samples {self.start} to {last} of {self.count}"
        )

    @property
    def slice(self) -> slice:
        """The slice that selects these samples."""
        return slice(self.start, self.stop)

    def of(self, array: Any) -> Any:
        """Return these samples of an array with samples first."""
        return array[self.slice]

    def batch(self, batch: Batch) -> Batch:
        """Return the inputs of these samples, without targets."""
        return replace(batch.without_loss(), x=data.take(batch.x, self.start, self.stop))

    def cotangents(self, capture: Capture) -> list[Array | None]:
        """Return dL/dy of these samples, one array or None per output."""
        return [None if grad is None else self.of(to_host(grad)) for grad in capture.output_grads]


@dataclass
class _Calls:
    """Certified traces of one model and shapes: how many there were, and whether a part of the samples suffices."""

    number: int = 0
    divisible: bool = True


_known: weakref.WeakKeyDictionary[Any, dict[Hashable, _Calls]] = weakref.WeakKeyDictionary()


def part_to_compare(model: Any, batch: Batch, key: Hashable) -> SamplePart | None:
    """Return the samples to compare in a certified trace; None for all of them.

    ``key`` distinguishes requests. All samples are compared at the first call for a model, key and shapes, in training
    mode, of fewer than ``FEWEST`` samples, and under ``rl.options(certify=)`` other than ``"auto"``.
    """
    count = _samples(batch)
    if count is None or current().certify != "auto":
        return None
    calls = _known.get(model, {}).get(_key(batch, key))
    if calls is None or not calls.divisible:
        return None
    calls.number += 1
    size = max(count // SHARE, 2)
    start = int(np.random.default_rng(calls.number).integers(count - size + 1))
    return SamplePart(start, start + size, count)


def remember_passed(model: Any, batch: Batch, key: Hashable, capture: Capture) -> None:
    """Store that a trace was certified with all samples, if the next one can be certified with a part of them."""
    count = _samples(batch)
    if count is None or not any(grad is not None for grad in capture.output_grads):
        return
    sizes = [call.output.shape[0] for call in capture.calls]
    sizes += [np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in capture.output_grads if leaf is not None]
    if all(size == count for size in sizes):
        _known.setdefault(model, {}).setdefault(_key(batch, key), _Calls())


def remember_difference(model: Any, batch: Batch, key: Hashable) -> None:
    """Store that a part of the samples differed from all of them, so that further traces compare all."""
    _known[model][_key(batch, key)].divisible = False


def _samples(batch: Batch) -> int | None:
    """Return the number of samples; None if a part of them cannot be run by itself, or is not worth it."""
    leaves = data.leaves_of(batch.x)
    if batch.training or batch.initial_state or batch.frozen or any(data.is_packed(leaf) for leaf in leaves):
        return None
    counts = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in leaves}
    return counts.pop() if len(counts) == 1 and min(counts) >= FEWEST else None


def _key(batch: Batch, key: Hashable) -> Hashable:
    leaves: Sequence[Any] = data.leaves_of(batch.x)
    return key, tuple((tuple(np.shape(leaf)), str(getattr(leaf, "dtype", ""))) for leaf in leaves)
