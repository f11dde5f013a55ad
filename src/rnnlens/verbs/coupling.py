"""Samples that depend on each other: found out on the batch, and refused where a sample is to stand for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..adapters.protocol import Port
from ..errors import UnsupportedError, message
from ..results.schema import to_host
from ..typing import Array
from ..vocabulary import SAMPLE
from .outside import Outside, patterns


def refuse_coupled(
    outside: Outside, seeds: Mapping[Port, Array], pull: Callable[[Mapping[Port, Array]], Mapping[Port, Array | None]]
) -> None:
    """Raise where what starts at some samples arrives at others.

    Raises
    ------
    UnsupportedError
        With the tensor at which it arrives.
    """
    if outside.samples < 2 or not seeds:
        return
    rows = patterns(outside.samples)
    placed = {port: _on(outside, port, seed, rows) for port, seed in seeds.items()}
    for port, found in pull({port: seed for port, seed in placed.items() if seed is not None}).items():
        if found is None or port.kind == "weight" or port.kind == "loss":
            continue
        arrived = to_host(found)
        names: tuple[str, ...] = (SAMPLE,)
        if outside.is_here(port):
            arrived, names = outside.opened(port, arrived, lead=1)
        if SAMPLE not in names:
            continue
        at = 1 + names.index(SAMPLE)
        hit = np.any(arrived != 0, axis=tuple(i for i in range(1, arrived.ndim) if i != at))
        if hit.shape == rows.shape and bool((hit & ~rows).any()):
            raise refusal("per_sample=True", port)


def refusal(what: str, port: Port) -> UnsupportedError:
    """The error for coupled samples."""
    where = "the model's " + port.kind if port.layer is None else f"{port.layer}.{port.kind}"
    return UnsupportedError(
        message(
            f"{what}: samples of this batch depend on each other, so that no sample stands for itself.",
            got=f"what starts at one sample arrives at others, at {where}",
            expected="samples that are computed each by itself",
            hint="batch statistics: training=False; else a batch of one sample, or the gradient of the whole batch",
        )
    )


def _on(outside: Outside, port: Port, seed: Array, rows: Array) -> Array | None:
    """The seed on the samples of each row."""
    opened, names = outside.opened(port, seed) if outside.is_here(port) else (seed, (SAMPLE,))
    if SAMPLE not in names or opened.shape[names.index(SAMPLE)] != rows.shape[1]:
        return None
    at = names.index(SAMPLE)
    mask = rows.reshape(len(rows), *[1] * at, -1, *[1] * (opened.ndim - at - 1))
    return (opened[None] * mask).astype(seed.dtype).reshape(len(rows), *seed.shape)
