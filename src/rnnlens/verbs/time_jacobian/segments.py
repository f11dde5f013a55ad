"""What lies between two recurrences, or between one and an end: free of recurrence, differentiated by the framework.

Found out on the data itself, never assumed: unit cotangents give the matrices, and random ones on half of the steps
tell whether these are all there is. A segment in which each step depends on the same step only is a small matrix per
step, costing almost nothing afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...adapters.protocol import Port
from ...autodiff.tensors import like
from ...results.schema import to_host
from ...typing import Array
from ..coupling import refusal
from ..outside import patterns
from .outer import OuterTensor, moved

#: Rows (row, sample, [time,] feature) at a tensor to all that lies directly below it, in the same form.
Pull = Callable[[Port, Array], Mapping[Port, Array | None]]


@dataclass
class Segment:
    """What lies between a tensor and one of those directly below it.

    Attributes
    ----------
    kind
        ``"local"``: every step by itself; ``"flat"``: from a tensor without time; ``"through"``: anything
        else, which the framework is asked for each time.
    block
        Of a local segment (sample or 1, time or 1, feature above, feature below), None for the identity; of a flat one
        (sample, feature above, everything below).
    """

    kind: Literal["local", "flat", "through"]
    above: OuterTensor
    below: OuterTensor
    block: Array | None = None

    def apply(self, rows: Array) -> Array:
        """Rows (sample, row, [time,] feature) from above to below; not for those that the framework is asked for."""
        if self.block is None:
            return rows
        if self.kind == "flat":
            flat = rows @ like(self.block, rows)
            tail = (self.below.features,) if self.below.times is None else (self.below.times, self.below.features)
            return flat.reshape((*rows.shape[:2], *tail))
        # (sample, time, row, above) @ (sample, time, above, below)
        return moved(moved(rows, 1, 2) @ like(self.block, rows), 2, 1)

    def at_every_step(self, rows: Array) -> Array:
        """Rows (sample or 1, time or 1, row, feature above) through a local segment, wherever they start."""
        return rows if self.block is None else like(rows, self.block) @ self.block


def probe(pull: Pull, top: OuterTensor, tensors: Mapping[Port, OuterTensor]) -> dict[Port, Segment]:
    """The segments that start at a tensor, by the tensor that they lead to.

    Raises
    ------
    UnsupportedError
        If what starts at some samples arrives at others.
    """
    units, (steps, on_steps), (samples, on_samples) = _unit_rows(top), _step_rows(top), _sample_rows(top)
    found = pull(top.port, np.concatenate([units, steps, samples]))
    _refuse_coupled(found, on_samples)
    segments = {top.port: Segment("local", top, top)} if top.port in found else {}
    for port, rows in found.items():
        if port == top.port or rows is None or not bool((rows != 0).any()):
            continue
        own, apart = rows[: len(units)], rows[len(units) : len(units) + len(steps)]
        segments[port] = _segment(top, tensors[port], own, _vanishes_elsewhere(apart, on_steps))
    return segments


def refuse_coupled(pull: Pull, top: OuterTensor) -> None:
    """Raise if what starts at some samples of ``top`` arrives at others: no sample then has a Jacobian of its own."""
    rows, on = _sample_rows(top)
    if len(on):
        _refuse_coupled(pull(top.port, rows), on)


def _segment(above: OuterTensor, below: OuterTensor, rows: Array, each_step_by_itself: bool) -> Segment:
    """From the rows that unit cotangents became."""
    if above.times is None:
        first = moved(rows, 0, 1)
        return Segment("flat", above, below, first.reshape((first.shape[0], first.shape[1], -1)))
    if below.times != above.times or not each_step_by_itself:
        return Segment("through", above, below)
    block = moved(rows, 0, 2)
    if above.features == below.features and bool((to_host(block) == np.eye(above.features)).all()):
        return Segment("local", above, below)
    same = block[:1, :1]
    return Segment("local", above, below, same if bool((block == same).all()) else block)


def _vanishes_elsewhere(rows: Array, on: Array) -> bool:
    """Whether nothing arrived at steps other than those at which a row started; never asked where there is no time."""
    return rows.ndim == 4 and rows.shape[2] == on.shape[1] and not bool((to_host(rows) * ~on[:, None, :, None]).any())


def _refuse_coupled(found: Mapping[Port, Array | None], on: Array) -> None:
    for port, rows in found.items():
        if rows is not None and len(on):
            arrived = to_host(rows[len(rows) - len(on) :])
            hit = np.any(arrived != 0, axis=tuple(range(2, arrived.ndim)))
            if hit.shape == on.shape and bool((hit & ~on).any()):
                raise refusal("The time Jacobian", port)


def _unit_rows(top: OuterTensor) -> Array:
    """One row per feature, on at all steps."""
    n = top.features
    rows = np.zeros((n, top.samples, top.times or 1, n))
    rows[np.arange(n), :, :, np.arange(n)] = 1
    return rows if top.times is not None else rows[:, :, 0]


def _step_rows(top: OuterTensor) -> tuple[Array, Array]:
    """Random rows on some of the steps, and on which; any two steps are told apart."""
    shape = (top.samples, *(() if top.times is None else (top.times,)), top.features)
    if top.times is None or top.times == 1:
        return np.zeros((0, *shape)), np.zeros((0, top.times or 1), dtype=bool)
    on = patterns(top.times)
    rows = np.random.default_rng(0).normal(size=(len(on), *shape))
    return rows * on[:, None, :, None], on


def _sample_rows(top: OuterTensor) -> tuple[Array, Array]:
    """Random rows on some of the samples, and on which."""
    shape = (top.samples, *(() if top.times is None else (top.times,)), top.features)
    if top.samples == 1:
        return np.zeros((0, *shape)), np.zeros((0, 1), dtype=bool)
    on = patterns(top.samples)
    rows = np.random.default_rng(1).normal(size=(len(on), *shape))
    return rows * on.reshape(*on.shape, *[1] * (len(shape) - 1)), on
