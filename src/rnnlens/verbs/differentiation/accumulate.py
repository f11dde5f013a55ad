"""Answers of one batch after another put together as if the whole data set had been one batch, in bounded memory."""

from __future__ import annotations

import numpy as np

from ...errors import InputError, UnsupportedError, message
from ...results.certificate import Certificate
from ...typing import Array
from ...vocabulary import DIRECTION, SAMPLE, TIME
from ..axes import refuse_unknown
from ..names import TensorName
from .question import Answer
from .target import Combine, Target

Shapes = tuple[tuple[int, ...], ...]

_KEPT_BY_NORM = (SAMPLE, TIME, DIRECTION)


def combination(target: Target, by_function: bool, asked: Combine | None) -> Combine | None:
    """How a target follows from those of batches, None where that is not known: a mean is a mean, a sum is a sum."""
    if asked is not None:
        return asked
    if target.per_sample:
        return "sum"
    named = target.reduce if isinstance(target.reduce, str) else None
    if by_function or callable(target.reduce) or named == "norm":
        return None
    return "mean" if named == "mean" else "sum"


class Accumulator:
    """Takes one :class:`Answer` per batch; holds one running sum per tensor, or all samples where none is taken.

    Parameters
    ----------
    combine
        How the targets of batches make up that of the data set.
    measure
        What becomes of the units or features of a gradient: None keeps them, ``"norm"`` takes the L2 norm over them, of
        every sample and step by itself. Of a gradient without a sample axis it is the norm of the whole.
    across
        What is then done with the sample axis: None keeps it, ``"mean"`` and ``"sum"`` reduce it. A gradient without
        one is left alone.
    """

    def __init__(self, combine: Combine | None, measure: str | None = None, across: str | None = None) -> None:
        self.combine, self.measure, self.across = combine, measure, across
        self.batches, self.samples = 0, 0
        self.certificate = Certificate()
        self.dims: dict[TensorName, tuple[str, ...]] = {}
        self._kept: dict[TensorName, list[Array]] = {}
        self._value: list[Array] = []
        self._sums: dict[TensorName, Array] = {}
        self._weights: list[int] = []
        #: Shapes of samples: where there is one, only what the model packs can be shorter in some batches.
        self._shapes: set[Shapes] = set()
        #: samples that were summed
        self._summed: dict[TensorName, int] = {}

    def add(self, answer: Answer, shapes: Shapes = (), count: int | None = None) -> None:
        """Take in one batch whose samples have these shapes; ``count`` of them, all by default, made up the target."""
        self._shapes.add(shapes)
        self.batches += 1
        self.samples += answer.samples
        if self.batches > 1 and self.combine is None:
            raise UnsupportedError(
                message(
                    "The target of several batches does not follow from the targets of each.",
                    got="a norm or a callable over more than one batch",
                    expected='combine="sum" or combine="mean" if it is one of these over samples; or per_sample=True',
                )
            )
        weight = answer.samples if count is None else count
        self._weights.append(weight)
        self._value.append(np.asarray(answer.value))
        for name, grad in answer.gradients.items():
            if grad is not None:
                self._take(name, np.asarray(grad), answer.dims[name], weight)

    def _take(self, name: TensorName, grad: Array, dims: tuple[str, ...], weight: int) -> None:
        by_sample = SAMPLE in dims
        needed = self.measure is not None or self.across is not None or self.batches > 1
        if name.what != "weight" and not by_sample and needed:
            refuse_unknown("Putting samples together", name.text, dims)
        if by_sample and self.measure is not None:
            grad, dims = _norm(grad, dims)
        if by_sample and self.across is not None:
            at = dims.index(SAMPLE)
            self._summed[name] = self._summed.get(name, 0) + grad.shape[at]
            grad, dims = grad.sum(axis=at, dtype=np.float64), (*dims[:at], *dims[at + 1 :])
        self.dims[name] = dims
        factor = weight if self.combine == "mean" else 1
        if by_sample and self.across is None:
            self._kept.setdefault(name, []).append(grad if factor == 1 else grad * grad.dtype.type(factor))
            return
        # Batches are many and small next to their sum: it is held in double precision.
        weighted = grad.astype(np.float64) * factor
        if name not in self._sums:
            self._sums[name] = weighted
            return
        self._sums[name], weighted = self._evened(name, [self._sums[name], weighted])
        self._sums[name] += weighted

    def result(self) -> dict[TensorName, Array]:
        """Gradients of the data set by tensor."""
        scale = 1.0 / max(sum(self._weights), 1) if self.combine == "mean" else 1.0
        found: dict[TensorName, Array] = {}
        for name, parts in self._kept.items():
            parts = self._evened(name, parts, joined=self.dims[name].index(SAMPLE))
            whole = np.concatenate(parts, axis=self.dims[name].index(SAMPLE)) if len(parts) > 1 else parts[0]
            found[name] = whole if scale == 1.0 else whole * whole.dtype.type(scale)
        for name, total in self._sums.items():
            found[name] = self._finished(name, total * scale)
        return found

    def _evened(self, name: TensorName, parts: list[Array], joined: int | None = None) -> list[Array]:
        """Parts of one shape but for the axis along which they are joined.

        What a model packs is as long as the longest sample of its batch: zeros stand for the steps after that.
        """
        shapes = [
            part.shape[:joined] + part.shape[joined + 1 :] if joined is not None else part.shape for part in parts
        ]
        if len(set(shapes)) < 2:
            return parts
        at = self.dims[name].index(TIME) if TIME in self.dims[name] else None
        others = {tuple(size for i, size in enumerate(part.shape) if i not in (at, joined)) for part in parts}
        if at is None or len(others) > 1 or len(self._shapes) > 1:
            first = shapes[0]
            other = next(part.shape for part, shape in zip(parts, shapes, strict=True) if shape != first)
            raise InputError(_uneven(name, parts[0].shape, other))
        longest = max(part.shape[at] for part in parts)
        width = [[(0, longest - part.shape[at] if i == at else 0) for i in range(part.ndim)] for part in parts]
        return [np.pad(part, pads) for part, pads in zip(parts, width, strict=True)]

    def _finished(self, name: TensorName, total: Array) -> Array:
        if name in self._summed:
            return total / self._summed[name] if self.across == "mean" else total
        if self.measure is not None:
            self.dims[name] = ()
            return np.asarray(np.linalg.norm(total))
        return total

    def value(self) -> Array:
        """The target over the data set: a number, or one per sample."""
        if self._value[0].ndim:
            return np.concatenate(self._value)
        values = np.asarray(self._value, dtype=np.float64)
        return np.average(values, weights=self._weights) if self.combine == "mean" else values.sum()


def _norm(grad: Array, dims: tuple[str, ...]) -> tuple[Array, tuple[str, ...]]:
    """The norm over units or features, in double precision."""
    axes = tuple(i for i, dim in enumerate(dims) if dim not in _KEPT_BY_NORM)
    norm = np.sqrt(np.sum(np.square(grad, dtype=np.float64), axis=axes))
    return norm, tuple(dim for dim in dims if dim in _KEPT_BY_NORM)


def _uneven(name: TensorName, first: tuple[int, ...], other: tuple[int, ...]) -> str:
    return message(
        f"Batches differ in shape, so their gradients with respect to {name.text!r} cannot be put together.",
        got=f"{first} and {other}",
        hint="pad all batches to one length and mask the padding, or ask batch by batch",
    )
