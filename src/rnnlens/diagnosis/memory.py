"""The headline: memory in use, benefit and skill of a whole model, with their intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..measures.intervention import USED, Probes, cycle, memory_length, search, skill, total_variance
from ..measures.resampling import interval, resampled_variance, resampling_weights
from ..typing import Array
from .experiment import Experiment

#: Fewer samples than this say nothing about memory; below ``ENOUGH`` the interval is wider than it says.
FEWEST, ENOUGH = 64, 128
#: The second level that is printed: what few samples or little variance need.
RARE = 0.01


@dataclass(frozen=True)
class Interval:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Memory:
    """What a model uses of its past.

    Attributes
    ----------
    steps
        How many steps the output can have seen.
    context : (context,)
        The k at which prefixes were exchanged.
    use, benefit : (context,), with bands (context, 2)
    length, rare, needed : Interval
        n at 5 % and 1 % of the variance of the prediction, and at 5 % of what was learned.
    censored
        Whether even the first step is in use: n is at least ``steps``.
    skill : Interval or None
        None without a target.
    known
        Whether n may be spoken of.
    why
        Why not.
    """

    steps: int
    context: Array
    use: Array
    use_band: Array
    benefit: Array
    benefit_band: Array
    length: Interval
    rare: Interval
    needed: Interval
    skill: Interval | None
    change: Array
    loss: Array
    known: bool
    why: str = ""

    @property
    def censored(self) -> bool:
        """Whether the memory is at least as long as the data."""
        return self.length.value >= self.steps

    @property
    def lost_without(self) -> float:
        """Share of what was learned that is lost where the inputs from n steps back on are another sample's."""
        shorter = np.flatnonzero(self.context < self.length.value)
        return float(self.benefit[shorter[-1]]) if shorter.size else float("nan")


def measure_memory(experiment: Experiment) -> Memory:
    """Exchange prefixes until it is known where the prediction stops to notice."""
    prediction, steps = experiment.prediction, experiment.reach
    if not np.isfinite(prediction).all():
        return _unknown(steps, None, "the prediction is not finite")
    variance = total_variance(prediction)
    found = _skill(experiment)
    if steps < 2:
        return _unknown(steps, found, "the output has seen one step only")
    if not variance:
        return _unknown(steps, found, "the prediction does not vary over the samples")
    probes = search(experiment.exchanged, steps, 2 * variance, (USED, RARE))
    # A sample's change is shared with the one that lends it its prefix.
    order = cycle(experiment.lender)
    weights = resampling_weights(len(prediction), order=order, seed=experiment.seed)
    why = _doubt(len(prediction), found)
    return _summary(experiment, probes, variance, weights, found, why)


def _skill(experiment: Experiment) -> Interval | None:
    target = experiment.target
    if target is None:
        return None
    loss, constant = target.loss(experiment.prediction), target.constant_loss()
    if not constant.mean() > 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    weights = resampling_weights(len(loss), seed=experiment.seed)
    return Interval(skill(loss, constant), *interval(1 - (weights @ loss) / np.maximum(weights @ constant, 1e-300)))


def _doubt(samples: int, found: Interval | None) -> str:
    if samples < FEWEST:
        return f"{samples} samples are too few, {FEWEST} are needed"
    if found is None:
        return "without a target it is not known whether anything was learned"
    if not np.isfinite(found.value):
        return "the target does not vary over the samples"
    if not found.low > 0:
        return (
            f"it predicts no better than a constant (skill {found.value:.2f}, "
            f"95 % CI {found.low:.2f} to {found.high:.2f})"
        )
    return ""


def _summary(
    experiment: Experiment, probes: Probes, variance: float, weights: Array, found: Interval | None, why: str
) -> Memory:
    context = np.array(sorted(probes.change))
    change = np.stack([probes.change[k] for k in context])
    swapped = np.stack([probes.loss[k] for k in context])
    use = change.mean(axis=1) / (2 * variance)
    resampled = (change @ weights.T) / np.maximum(2 * resampled_variance(experiment.prediction, weights), 1e-300)
    learned, again = _learned(experiment, weights)
    loss = np.zeros(change.shape[1]) if experiment.target is None else experiment.target.loss(experiment.prediction)
    with np.errstate(divide="ignore", invalid="ignore"):
        benefit = (swapped - loss).mean(axis=1) / learned
        gained = (swapped - loss) @ weights.T / again
    steps = probes.steps

    def length(curve: Array, repeats: Array, level: float) -> Interval:
        n = memory_length(dict(zip(context.tolist(), curve.tolist(), strict=True)), steps, level)
        return Interval(n, *_length_interval(context, repeats, steps, level))

    return Memory(
        steps,
        context,
        use,
        _band(resampled),
        benefit,
        _band(gained),
        length(use, resampled, USED),
        length(use, resampled, RARE),
        length(benefit, gained, USED),
        found,
        change,
        swapped,
        not why,
        why,
    )


def _length_interval(context: Array, repeats: Array, steps: int, level: float) -> tuple[float, float]:
    """Of n, from resampled curves (context, resample).

    A curve is known at some k only: n lies after the last of them that is above the level, at the latest at the next.
    The low end is taken from the earliest it can be, the high end from the latest.
    """
    above = np.where(repeats > level, context[:, None], 0).max(axis=0)
    following = np.append(context, steps)[np.searchsorted(context, above, side="right")]
    finite = np.isfinite(repeats).all(axis=0)
    low, _ = interval(np.where(finite, above + 1, np.nan))
    _, high = interval(np.where(finite, following, np.nan))
    return (float(np.floor(low)), float(np.ceil(high))) if np.isfinite(low) else (low, high)


def _learned(experiment: Experiment, weights: Array) -> tuple[float, Array]:
    """Best constant loss minus loss, over all samples and in each resample; NaN where nothing was learned."""
    target = experiment.target
    if target is None:
        return float("nan"), np.full(len(weights), np.nan)
    difference = target.constant_loss() - target.loss(experiment.prediction)
    whole, again = float(difference.mean()), weights @ difference
    return (whole if whole > 0 else float("nan")), np.where(again > 0, again, np.nan)


def _band(repeats: Array) -> Array:
    return np.array([interval(row) for row in repeats]).reshape(-1, 2)


def _unknown(steps: int, found: Interval | None, why: str) -> Memory:
    nothing, band = np.empty(0), np.empty((0, 2))
    unknown = Interval(float("nan"), float("nan"), float("nan"))
    empty = np.empty((0, 0))
    return Memory(
        steps, nothing, nothing, band, nothing, band, unknown, unknown, unknown, found, empty, empty, False, why
    )
