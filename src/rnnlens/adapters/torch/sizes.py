"""Finds axes that gradients cannot distinguish, by running the model on a batch with one step fewer.

An example is the time axis above attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..protocol import Batch, Port
from .inputs import as_tensors, leaves_of, on_leaves

Shape = tuple[int, ...]


#: Function from a batch to the (samples, steps) of every recurrent call, and the shapes of tensors by port.
Look = Callable[[Batch], tuple[list[tuple[int, int]], Mapping[Port, Shape]]]


def shrinking(
    model: nn.Module, batch: Batch, ports: Sequence[Port], known: Mapping[Port, int], look: Look, counts: bool
) -> dict[Port, tuple[int, ...]]:
    """Find the axes of each port that are shorter when the batch has one step (or one sample) fewer.

    Parameters
    ----------
    known
        Axis that counts steps (or samples) of each input, as far as it is known. If none is known and there is only one
        input, each of its axes is tried.
    counts
        True for samples, False for steps.
    """
    x = as_tensors(batch.x, model, "x")
    calls, shapes = look(replace(batch, x=x))
    for axes in _ways(leaves_of(x), known):
        try:
            fewer, found = look(replace(batch, x=_shorter(x, axes)))
        except Exception:
            continue
        if len(fewer) == len(calls) and _moved(calls, fewer, counts):
            return _shorter_axes(ports, shapes, found)
    return {}


def _ways(leaves: Sequence[Any], known: Mapping[Port, int]) -> Iterator[dict[int, int]]:
    """Yield choices of axes to shorten, by input index: the known ones, else each axis of a single input in turn."""
    told = {i: known[port] for i in range(len(leaves)) if (port := Port("input", index=i)) in known}
    if told:
        yield told
    elif len(leaves) == 1 and isinstance(leaves[0], Tensor):
        yield from ({0: axis} for axis, size in enumerate(leaves[0].shape) if size > 1)


def _shorter(x: Any, axes: Mapping[int, int]) -> Any:
    index = -1

    def one(leaf: Any) -> Any:
        nonlocal index
        if not isinstance(leaf, Tensor):
            return leaf
        index += 1
        return torch.narrow(leaf, axes[index], 0, leaf.shape[axes[index]] - 1) if index in axes else leaf

    return on_leaves(x, one)


def _moved(before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]], counts: bool) -> bool:
    """Return whether the calls changed in the intended size only.

    Samples must decrease in every call; steps must decrease in at least one.
    """
    fewer, same = (0, 1) if counts else (1, 0)
    changed = [b[fewer] < a[fewer] for a, b in zip(before, after, strict=True)]
    kept = all(b[same] == a[same] for a, b in zip(before, after, strict=True))
    return kept and (all(changed) if counts else any(changed))


def _shorter_axes(
    ports: Sequence[Port], before: Mapping[Port, Shape], after: Mapping[Port, Shape]
) -> dict[Port, tuple[int, ...]]:
    found = {}
    for port in ports:
        if port in before and port in after and len(before[port]) == len(after[port]):
            pairs = enumerate(zip(before[port], after[port], strict=True))
            if axes := tuple(i for i, (a, b) in pairs if b == a - 1):
                found[port] = axes
    return found
