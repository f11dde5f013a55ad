"""A loss that is not finite of outputs that are: which sample, which output, and what the loss cannot take of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ... import data
from ...adapters.protocol import Outputs, Port
from ...results.nonfinite import Origin
from ...results.schema import to_host
from ...typing import Array
from ...vocabulary import SAMPLE
from .causes import singularity, slope
from .looked import Looked

#: Outputs of one sample that are tried, the most suspicious first.
_TRIED = 12


class Loss:
    """The loss as a function of what the model returned, of all samples or of some."""

    def __init__(self, looked: Looked) -> None:
        self.looked, self.outputs = looked, looked.outputs
        self.leaves = [np.asarray(leaf) for leaf in self.outputs.leaves]

    def __call__(self, leaves: Sequence[Array], some: slice = slice(None), **changed: Any) -> tuple[float, list[Any]]:
        """Value and gradients of these outputs, which are those of some of the samples."""
        batch = replace(self.looked.batch, **changed)
        if some != slice(None):
            own = {name: data.take(getattr(batch, name), some.start, some.stop) for name in ("y", "sample_weight")}
            batch = replace(batch, **own)
        masks = [None if mask is None else mask[some] for mask in self.outputs.masks]
        told = Outputs(list(leaves), self.outputs.tree, masks)
        return self.looked.adapter.loss_of(self.looked.model, batch, told)

    def of(self, some: slice) -> tuple[float, list[Any]]:
        """Of some of the samples."""
        return self([leaf[some] for leaf in self.leaves], some)

    def guilty(self) -> int | None:
        """The first sample whose loss, taken alone, is not finite; None where it takes several, or cannot be told."""
        sizes = {len(leaf) for leaf in self.leaves if leaf.ndim}
        first = [self.looked.names(Port("output", index=i), leaf)[:1] for i, leaf in enumerate(self.leaves)]
        if len(sizes) != 1 or any(names != (SAMPLE,) for names in first):
            return None
        low, high = 0, sizes.pop()
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if not math.isfinite(self.of(slice(low, middle))[0]) else (middle, high)
        return low if not math.isfinite(self.of(slice(low, low + 1))[0]) else None


def in_the_loss(looked: Looked) -> Iterator[Origin]:
    """The loss, where the outputs are finite and it is not."""
    value = looked.capture.loss
    if value is None or math.isfinite(value):
        return
    found = looked.attempt(lambda: _located(looked))
    yield found or Origin("loss", "loss", "value", value, fed_by="outputs that are finite")


def _located(looked: Looked) -> Origin | None:
    loss = Loss(looked)
    value, gradients = loss(loss.leaves)
    if math.isfinite(value):
        return Origin(
            "loss", "loss", "value", float(looked.capture.loss or 0), fed_by="what the model adds to its loss"
        )
    sample = loss.guilty()
    some = slice(None) if sample is None else slice(sample, sample + 1)
    if sample is not None:
        value, gradients = loss.of(some)
    for leaf, place in _suspects(loss, some, gradients):
        why = _why(loss, some, leaf, place)
        if why:
            return _origin(looked, loss, sample, leaf, place, value, why)
    return _of_sample(looked, sample, value)


def _suspects(loss: Loss, some: slice, gradients: Sequence[Any]) -> list[tuple[int, tuple[int, ...]]]:
    """Elements of the outputs: those whose gradient is not finite before others, zeros and the largest first."""
    found: list[tuple[float, int, tuple[int, ...]]] = []
    for i, (leaf, gradient) in enumerate(zip(loss.leaves, gradients, strict=True)):
        part = leaf[some]
        if gradient is None or part.dtype.kind != "f":
            continue
        sick = ~np.isfinite(np.asarray(gradient))
        with np.errstate(all="ignore"):
            oddness = np.abs(np.log10(np.maximum(np.abs(part.astype(np.float64)), 1e-300))) + 1e6 * sick
        for flat in np.argsort(-oddness, axis=None, kind="stable")[:_TRIED]:
            place = tuple(map(int, np.unravel_index(int(flat), part.shape)))
            found.append((float(oddness[place]), i, place))
    found.sort(key=lambda one: -one[0])
    return [(i, place) for _, i, place in found[:_TRIED]]


def _why(loss: Loss, some: slice, leaf: int, place: tuple[int, ...]) -> str:
    leaves = [array[some].copy() for array in loss.leaves]

    def moved(value: float) -> float:
        leaves[leaf][place] = value
        return loss(leaves, some)[0]

    at = float(leaves[leaf][place])
    why = singularity(moved, at)
    leaves[leaf][place] = at
    return why


def _origin(
    looked: Looked, loss: Loss, sample: int | None, leaf: int, place: tuple[int, ...], value: float, why: str
) -> Origin:
    array = loss.leaves[leaf]
    whole = place if sample is None else (sample, *place[1:])
    index = dict(looked.element(Port("output", index=leaf), array, whole))
    name = "output" if len(loss.leaves) == 1 else f"output[{leaf}]"
    said = f"{why} in the loss: {name} {float(array[whole]):.3g}"
    target = _target(looked, array, whole)
    return Origin("loss", "loss", "value", value, index, fed_by=said + target)


def _target(looked: Looked, output: Array, place: tuple[int, ...]) -> str:
    leaves = [to_host(leaf) for leaf in data.leaves_of(looked.batch.y)]
    if len(leaves) == 1 and leaves[0].shape == output.shape:
        return f", target {float(leaves[0][place]):.3g}"
    if len(leaves) == 1 and leaves[0].shape[:1] == output.shape[:1] and leaves[0][0].size == 1:
        return f", target {float(leaves[0][place[0]].reshape(())):.3g}"
    return ""


def _of_sample(looked: Looked, sample: int | None, value: float) -> Origin:
    """No single output tells: what else goes into the loss, or that several outputs are large."""
    some = slice(None) if sample is None else slice(sample, sample + 1)
    sizes = [float(np.max(np.abs(leaf[some]), initial=0.0)) for leaf in looked.returned if leaf.ndim]
    why = f"outputs that are finite, up to {max(sizes, default=0.0):.3g}"
    given = [to_host(leaf)[some] for leaf in data.leaves_of(looked.batch.sample_weight)]
    if math.isnan(value) and given and not any(np.any(leaf) for leaf in given):
        why = "0 divided by 0 in the loss: all its sample weights are 0"
    return Origin("loss", "loss", "value", value, {} if sample is None else {SAMPLE: sample}, fed_by=why)


def gradient_at_the_outputs(looked: Looked) -> Iterator[Origin]:
    """Where the loss has a value and no derivative."""
    told = looked.attempt(lambda: _slopes(looked))
    if told is not None:
        yield told


def _slopes(looked: Looked) -> Origin | None:
    loss = Loss(looked)
    _, gradients = loss(loss.leaves)
    for i, gradient in enumerate(gradients):
        sick = None if gradient is None else looked.first(Port("output", index=i), "output_grad", np.asarray(gradient))
        if sick is None:
            continue
        place = tuple(int(n) for n in np.argwhere(~np.isfinite(np.asarray(gradient)))[0])
        leaves = [leaf.copy() for leaf in loss.leaves]

        def derivative(value: float, i: int = i, place: Any = place, leaves: Any = leaves) -> float:
            leaves[i][place] = value
            return float(np.asarray(loss(leaves)[1][i])[place])

        at = float(loss.leaves[i][place])
        why = slope(derivative, at) or "the derivative of the loss"
        name = "output" if len(gradients) == 1 else f"output[{i}]"
        index = looked.element(Port("output", index=i), loss.leaves[i], place)
        value = float(np.asarray(gradient)[place])
        return Origin("backward", "loss", "output_grad", value, index, fed_by=f"{why} in the loss: {name} {at:.3g}")
    return None
