"""Memory in use, benefit, skill and residual test of a whole model, with 95 % intervals."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .. import data
from ..adapters.protocol import Batch, CaptureRequest
from ..measures.intervention import (
    USED,
    Probes,
    cycle,
    interval,
    memory_length,
    resampled_variance,
    resampling_weights,
    score,
    search,
    skill,
    squared_change,
    total_variance,
)
from ..measures.residual import Missed, Windows, missed_dependency, overlapping_windows
from ..results.schema import to_host
from ..typing import Array
from .experiment import Experiment

#: Below ``FEWEST`` samples no memory is reported; below ``ENOUGH`` the interval is too narrow.
FEWEST, ENOUGH = 64, 128
#: Second level of the memory: dependencies of few samples, or of little variance.
RARE = 0.01
#: Largest number of samples in the residual test.
MOST = 1024
#: Rule of MISSED_DEPENDENCY: smallest share of the variance of y, and largest p value.
EFFECT, P_VALUE = 0.02, 0.01
#: Share of the target's association with a step above which a miscalibrated prediction has learned the step.
LEARNED = 0.2
#: Gain of skill by recalibration above which a prediction is miscalibrated.
MISCALIBRATED = 0.02
#: Shares of the way from the prediction to its best calibration that the residual test tries.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Smallest number of steps in the test whether the number of steps matters.
_LEAST_STEPS = 4


@dataclass(frozen=True)
class Interval:
    """Number with its 95 % interval."""

    value: float
    low: float
    high: float


UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))


@dataclass(frozen=True)
class Skill:
    """Skill of a prediction, its skill after recalibration on other samples, and the gain."""

    raw: Interval
    recalibrated: Interval
    gain: Interval

    @property
    def proven(self) -> bool:
        """Whether the 95 % interval of the skill is above 0, with or without recalibration."""
        return self.raw.low > 0 or self.recalibrated.low > 0


@dataclass(frozen=True)
class Memory:
    """Memory in use of a model, with skill and benefit.

    Attributes
    ----------
    steps
        Number of input steps up to the examined output step, in the longest sample.
    context : (context,)
        Context lengths k at which prefixes were exchanged.
    use, benefit : (context,), with bands (context, 2)
    length, rare, needed : Interval
        Memory n at 5 % and at 1 % of the variance of the prediction, and at 5 % of the score.
    skill : Skill or None
        None without a target.
    later
        Number of steps after the examined one that the prediction uses, and number of all steps after it.
    count_matters
        Whether the number of steps changes the prediction, independently of their inputs.
    known
        Whether n may be reported.
    why
        Reason why n is not known; empty if it is.
    """

    steps: int
    skill: Skill | None
    known: bool
    why: str = ""
    context: Array = field(default_factory=lambda: np.empty((0,)))
    use: Array = field(default_factory=lambda: np.empty((0,)))
    use_band: Array = field(default_factory=lambda: np.empty((0, 2)))
    benefit: Array = field(default_factory=lambda: np.empty((0,)))
    benefit_band: Array = field(default_factory=lambda: np.empty((0, 2)))
    length: Interval = UNKNOWN
    rare: Interval = UNKNOWN
    needed: Interval = UNKNOWN
    change: Array = field(default_factory=lambda: np.empty((0, 0)))
    later: tuple[int, int] = (0, 0)
    count_matters: bool = False

    @property
    def miscalibrated(self) -> bool:
        """Whether the 95 % interval of the gain by recalibration is above ``MISCALIBRATED``."""
        return self.skill is not None and self.skill.gain.low > MISCALIBRATED

    @property
    def censored(self) -> bool:
        """Whether even the first step is in use, so that n is at least ``steps``."""
        return self.length.value >= self.steps

    @property
    def lost_without(self) -> float:
        """Share of the score that is lost when the n-th step from the end and everything older are exchanged."""
        shorter = np.flatnonzero(self.context < self.length.value)
        return float(self.benefit[shorter[-1]]) if shorter.size else float("nan")


def measure_memory(experiment: Experiment) -> Memory:
    """Replace the first steps of each sample by another sample's, and measure how much the prediction changes."""
    prediction, steps = experiment.prediction, experiment.reach
    if not np.isfinite(prediction).all():
        return Memory(steps, None, False, "the prediction is not finite")
    variance = total_variance(prediction)
    leaf = data.leaves_of(experiment.samples.x)[experiment.samples.sequences[0]]
    windows = overlapping_windows(np.asarray(leaf)[: experiment.samples.count])
    skills = _skill(experiment, windows)
    later = _later(experiment, variance)
    if steps < 2:
        return Memory(steps, skills, False, "the output has seen one step only", later=later)
    if not variance:
        return Memory(steps, skills, False, "the prediction does not vary over the samples")
    probes = search(experiment.exchanged, steps, 2 * variance, (USED, RARE), decreasing=True)
    why = _doubt(len(prediction), skills)
    return _summary(experiment, probes, variance, windows, skills, why, later)


def _skill(experiment: Experiment, windows: Windows | None) -> Skill | None:
    target = experiment.target
    if target is None:
        return None
    loss, constant = target.loss(experiment.prediction), target.constant_loss()
    if not constant.mean() > 0:
        return Skill(UNKNOWN, UNKNOWN, UNKNOWN)
    weights = _weights(len(loss), windows, experiment.seed)
    order = np.random.default_rng(0).permutation(len(experiment.prediction)) if windows is None else windows.order
    halves = np.array_split(order, 2)
    recalibrated = experiment.prediction.copy()
    for own, other in (halves, halves[::-1]):  # each half by a fit on the other one
        fit = target.of_samples(other).calibration(experiment.prediction[other])
        recalibrated[own] = fit.apply(experiment.prediction[own])
    again = target.loss(recalibrated)
    scale = np.maximum(weights @ constant, 1e-300)
    gain = float((loss - again).mean() / constant.mean())
    return Skill(
        Interval(skill(loss, constant), *interval(1 - (weights @ loss) / scale)),
        Interval(skill(again, constant), *interval(1 - (weights @ again) / scale)),
        Interval(gain, *interval(weights @ (loss - again) / scale)),
    )


def _weights(samples: int, windows: Windows | None, seed: int) -> Array:
    if windows is None:
        return resampling_weights(samples, seed=seed)
    return resampling_weights(samples, order=windows.order, block=max(4, windows.overlap), seed=seed)


def _doubt(samples: int, found: Skill | None) -> str:
    if samples < FEWEST:
        return f"{samples} samples are too few, at least {FEWEST} are needed"
    if found is None:
        return "without a target it is not known whether anything was learned"
    if not np.isfinite(found.raw.value):
        return "the target does not vary over the samples"
    if not found.proven:
        raw = found.raw
        return f"no better than a constant prediction (skill {raw.value:.2f}, 95 % CI {raw.low:.2f} to {raw.high:.2f})"
    return ""


def _summary(
    experiment: Experiment,
    probes: Probes,
    variance: float,
    windows: Windows | None,
    skills: Skill | None,
    why: str,
    later: tuple[int, int],
) -> Memory:
    # A sample's change depends on its lender too; for overlapping windows, on its neighbours far more.
    order = cycle(experiment.lender) if windows is None else windows.order
    block = 4 if windows is None else max(4, windows.overlap)
    weights = resampling_weights(len(experiment.prediction), order=order, block=block, seed=experiment.seed)
    context = np.array(sorted(probes.change))
    change = np.stack([probes.change[k] for k in context])
    use = change.mean(axis=1) / (2 * variance)
    resampled = (change @ weights.T) / np.maximum(2 * resampled_variance(experiment.prediction, weights), 1e-300)
    benefit, gained = _benefit(experiment, np.stack([probes.score[k] for k in context]), weights)
    steps = probes.steps

    def length(curve: Array, repeats: Array, level: float) -> Interval:
        n = memory_length(dict(zip(context.tolist(), curve.tolist(), strict=True)), steps, level)
        return Interval(n, *_length_interval(context, repeats, steps, level))

    found = length(use, resampled, USED)
    return Memory(
        steps,
        skills,
        not why,
        why,
        context,
        use,
        _band(resampled),
        benefit,
        _band(gained),
        found,
        length(use, resampled, RARE),
        length(benefit, gained, USED),
        change,
        later,
        _count_matters(experiment, int(found.value), variance),
    )


def _benefit(experiment: Experiment, swapped: Array, weights: Array) -> tuple[Array, Array]:
    """Compute the benefit B(k) (context,) and its resamples (context, resample) from scores; NaN without a target."""
    target = experiment.target
    if target is None:
        return np.full(len(swapped), np.nan), np.full((len(swapped), len(weights)), np.nan)
    own = score(target.values, experiment.prediction)
    gained, again = float(own.mean()), weights @ own
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = 1 - swapped.mean(axis=1) / (gained if gained > 0 else float("nan"))
        return whole, 1 - (swapped @ weights.T) / np.where(again > 0, again, np.nan)


def _length_interval(context: Array, repeats: Array, steps: int, level: float) -> tuple[float, float]:
    """Return the 95 % interval of n from resampled curves (context, resample).

    A curve is known at some k only. n lies between the last k whose value is above the level, plus 1, and the next k.
    The low end of the interval uses the former, the high end the latter.
    """
    above = np.where(repeats > level, context[:, None], 0).max(axis=0)
    following = np.append(context, steps)[np.searchsorted(context, above, side="right")]
    finite = np.isfinite(repeats).all(axis=0)
    low, _ = interval(np.where(finite, above + 1, np.nan))
    _, high = interval(np.where(finite, following, np.nan))
    return (float(np.floor(low)), float(np.ceil(high))) if np.isfinite(low) else (low, high)


def _band(repeats: Array) -> Array:
    return np.array([interval(row) for row in repeats]).reshape(-1, 2)


def _later(experiment: Experiment, variance: float) -> tuple[int, int]:
    """Count the steps after the examined one: those that the prediction uses, and all."""
    rest = experiment.samples.steps - experiment.reach
    if rest < 1 or not variance or (experiment.last != experiment.reach).any():
        return 0, max(rest, 0)

    def probe(keep: int) -> tuple[Array, Array]:
        change, _ = experiment.changed(experiment.samples.with_suffix(experiment.reach + keep, experiment.lender))
        return change, change

    # The search counts context lengths from 1, so k = 1 keeps no later step.
    probes = search(lambda k: probe(k - 1), rest + 1, 2 * variance, (USED,), decreasing=True)
    curve = {k: float(change.mean()) / (2 * variance) for k, change in probes.change.items()}
    return memory_length(curve, rest + 1) - 1, rest


def _count_matters(experiment: Experiment, used: int, variance: float) -> bool:
    """Return whether the prediction changes if half of the steps are left out, although all used ones remain."""
    lengths = np.maximum(experiment.lengths // 2, 1)
    if (lengths < max(used, _LEAST_STEPS)).any() or (experiment.last != experiment.lengths).any():
        return False
    shorter = experiment.answer_shorter(lengths)
    if shorter is None:
        return False
    return float(squared_change(experiment.prediction, shorter).mean()) / (2 * variance) > USED


def measure_missed(experiment: Experiment) -> Missed | None:
    """Apply the residual test to the rescaling that inputs explain least; None without a target that varies."""
    target = experiment.target
    if target is None or not target.variance > 0 or not np.isfinite(experiment.prediction).all():
        return None
    x = _numbers(experiment)
    if x is None or not np.isfinite(x).all():
        return None
    kept = np.arange(min(MOST, len(experiment.prediction)))
    some, prediction = target.of_samples(kept), experiment.prediction[kept]
    candidates = [prediction, *some.between(prediction, _SHARES)]
    residuals = [some.values - candidate for candidate in candidates]
    x = _aligned(x, experiment)[kept]
    return missed_dependency(residuals, x, target.variance, target=some.values, seed=experiment.seed)


def is_missed(missed: Missed | None, memory: Memory) -> bool:
    """Return whether the residual test meets the rule of MISSED_DEPENDENCY.

    The rule is not met if the prediction is miscalibrated and already depends on the step: an overfitted model
    overestimates the effect of the step, so that the step explains errors again.
    """
    if missed is None or missed.effect < EFFECT or missed.p_value >= P_VALUE:
        return False
    return not (memory.miscalibrated and missed.learned > LEARNED)


def _numbers(experiment: Experiment) -> Array | None:
    """Return the first sequence of x, (sample, time, feature); for ids, the input of the first recurrent layer.

    Returns None if that layer has another number of steps. In a model of whole-sequence layers alone, ids are
    embedded.
    """
    leaf = data.leaves_of(experiment.samples.x)[experiment.samples.sequences[0]]
    if leaf.dtype.kind == "f":
        return leaf.reshape(*leaf.shape[:2], -1)
    if not experiment.runs:
        return experiment.embedded(experiment.samples.x)
    request = CaptureRequest(gradients=False, weight_grads=False)
    calls = experiment.adapter.capture(experiment.model, Batch(experiment.given(experiment.samples.x)), request).calls
    embedded = to_host(calls[0].input)
    return embedded if embedded.shape[1] == experiment.samples.steps else None


def _aligned(x: Array, experiment: Experiment) -> Array:
    """Return the input steps up to the examined one, aligned at the end of each sample, with zeros before."""
    last, reach = experiment.last, experiment.reach
    if (last == reach).all():
        return x[:, :reach]
    position = np.arange(reach)[None, :] - (reach - last)[:, None]
    taken = np.take_along_axis(x, np.maximum(position, 0)[:, :, None], axis=1)
    return np.where(position[:, :, None] >= 0, taken, 0.0)
