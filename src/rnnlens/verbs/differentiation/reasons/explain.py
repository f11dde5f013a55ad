"""What has no gradient, a zero one, or one that must be read with care: and for each of them the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from ....adapters.protocol import Batch
from ....results.gradients import Reason
from ....typing import Array
from ....vocabulary import SAMPLE, TIME
from ...names import TensorName
from ..question import Part, Question, is_trainable
from .causes import cause
from .trials import Trials


@dataclass
class Explanation:
    """Reasons by tensor: no gradient (or zeros throughout), and gradients to be read with care."""

    disconnected: dict[str, Reason] = field(default_factory=dict)
    flags: dict[str, Reason] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def explain(
    question: Question,
    part: Part,
    found: Mapping[TensorName, Array],
    dims: Mapping[TensorName, tuple[str, ...]],
    batches: Iterable[Batch],
) -> Explanation:
    """Look at every tensor asked for: missing, zero throughout, zero in part, frozen.

    ``part`` is the one that experiments are made on; ``batches`` are all of them, for their masks.
    """
    result = Explanation()

    @cache
    def trials() -> Trials:
        return Trials(question, part)

    for name in question.wrt:
        grad = found.get(name)
        if grad is None or not np.any(grad):
            result.disconnected[name.text] = cause(trials(), name, exists=grad is not None)
            continue
        flag = _frozen(question, name)
        if flag is None and name.what != "weight" and dims[name][:2] == (SAMPLE, TIME):
            zero = ~np.any(grad.reshape(*grad.shape[:2], -1), axis=2)
            flag = _partly_masked(zero, name, trials(), batches) if zero.any() else None
        if flag is not None:
            result.flags[name.text] = flag
    return result


def _frozen(question: Question, name: TensorName) -> Reason | None:
    """A weight that is not trained: its gradient is given all the same."""
    if name.what != "weight" or is_trainable(name, question.known):
        return None
    if name.key in question.known.weights[str(name.layer)].statistics:
        sentence = f"{name.text} is a statistic that the layer keeps, not a weight that training moves."
        return Reason(name.text, "frozen", sentence, "rl.gradients(..., training=True), where the batch has its own")
    sentence = f"{name.text} is frozen: this is its gradient, and training does not act on it."
    return Reason(name.text, "frozen", sentence, f"make {name.layer} trainable to train it")


def _partly_masked(zero: Array, name: TensorName, trials: Trials, batches: Iterable[Batch]) -> Reason | None:
    """Samples and steps at which the gradient is exactly 0 because they are masked."""
    alone = len(zero) == trials.question.axes.samples(trials.batch)
    for mask in (trials.masks if alone else _masks_of_all(trials, batches)).values():
        if mask.shape == zero.shape and not mask.all() and np.all(zero[~mask]):
            sentence = f"{int((~mask).sum())} of {mask.size} steps are masked: the gradient is exactly 0 there."
            return Reason(name.text, "masked_out", sentence, "g.where(mask) before taking means over time")
    return None


def _masks_of_all(trials: Trials, batches: Iterable[Batch]) -> dict[str, Array]:
    """Masks of all batches, by layer, where the layers mask at all."""
    if trials.masks_of_all is None:
        parts: dict[str, list[Array]] = {layer: [] for layer in trials.masks}
        for batch in batches if parts else ():
            for layer, mask in Trials(trials.question, replace(trials.part, batch=batch)).masks.items():
                parts.setdefault(layer, []).append(mask)
        alike = {layer: masks for layer, masks in parts.items() if len({mask.shape[1:] for mask in masks}) == 1}
        trials.masks_of_all = {layer: np.concatenate(masks) for layer, masks in alike.items()}
    return trials.masks_of_all
