"""Memory in use, benefit, skill and residual test of a whole model, with 95 % intervals."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .. import data
from ..adapters.protocol import Batch, Taps
from ..measures.intervention import (
    USED,
    Probes,
    cycle,
    interval,
    memory_length,
    resampling_weights,
    score,
    search,
    skill,
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
MOST_TESTED = 1024
#: Rule of MISSED_DEPENDENCY: smallest share of the variance of y, and largest p value.
EFFECT, P_VALUE = 0.02, 0.01
#: Share of the variance of y that the test should be able to find.
SOUGHT = 0.1
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
    """Mean loss and skill of a prediction, its skill after recalibration on other samples, and the gain."""

    loss: Interval
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
    length, rare_length, needed_length : Interval
        Memory n at 5 % and at 1 % of the variance of the prediction, and at 5 % of the score.
    skill : Skill or None
        None without a target.
    later_steps
        Number of steps after the examined one that the prediction uses, and number of all steps after it.
    count_matters
        Whether the number of steps changes the prediction, independently of their inputs.
    samples
        Number of samples between which prefixes were exchanged, or were too few for it; 0 without an exchange.
    of_distribution
        Whether changes are divergences of a predicted distribution instead of squares.
    is_known
        Whether n may be reported.
    reason
        Reason why n is not known; empty if it is.
    """

    steps: int
    skill: Skill | None
    is_known: bool
    reason: str = ""
    context: Array = field(default_factory=lambda: np.empty((0,)))
    use: Array = field(default_factory=lambda: np.empty((0,)))
    use_band: Array = field(default_factory=lambda: np.empty((0, 2)))
    benefit: Array = field(default_factory=lambda: np.empty((0,)))
    benefit_band: Array = field(default_factory=lambda: np.empty((0, 2)))
    length: Interval = UNKNOWN
    rare_length: Interval = UNKNOWN
    needed_length: Interval = UNKNOWN
    change: Array = field(default_factory=lambda: np.empty((0, 0)))
    later_steps: tuple[int, int] = (0, 0)
    count_matters: bool = False
    samples: int = 0
    of_distribution: bool = False

    @property
    def scale(self) -> str:
        """Name of what changes of the prediction are shares of."""
        return "the divergence of unrelated samples" if self.of_distribution else "its variance"

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
        shorter_contexts = np.flatnonzero(self.context < self.length.value)
        return float(self.benefit[shorter_contexts[-1]]) if shorter_contexts.size else float("nan")


def measure_memory(experiment: Experiment) -> Memory:
    """Replace the first steps of each sample by another sample's, and measure how much the prediction changes."""
    prediction, steps = experiment.prediction, experiment.max_examined_length
    if not np.isfinite(prediction).all():
        return Memory(steps, None, False, "the prediction is not finite")
    variation = experiment.variation
    leaf = data.leaves_of(experiment.samples.x)[experiment.samples.sequences[0]]
    windows = overlapping_windows(np.asarray(leaf)[: experiment.samples.count])
    measured_skill = _measure_skill(experiment, windows)
    if len(prediction) < FEWEST:
        reason = f"{len(prediction)} samples are too few, at least {FEWEST} are needed"
        return Memory(steps, measured_skill, False, reason, samples=len(prediction))
    later_steps = _count_later_steps(experiment)
    if steps < 2:
        return Memory(steps, measured_skill, False, "the output has seen one step only", later_steps=later_steps)
    if not variation.between_samples:
        return Memory(steps, measured_skill, False, "the prediction does not vary over the samples")
    probes = search(experiment.predict_exchanged, steps, variation.between_samples, (USED, RARE), decreasing=True)
    reason = _unknown_reason(measured_skill)
    return _summarise(experiment, probes, windows, measured_skill, reason, later_steps)


def _measure_skill(experiment: Experiment, windows: Windows | None) -> Skill | None:
    target = experiment.target
    if target is None:
        return None
    loss, constant_loss = target.loss(experiment.prediction), target.constant_loss()
    weights = _weights(len(loss), windows, experiment.seed)
    mean_loss = Interval(float(loss.mean()), *interval(weights @ loss))
    if not constant_loss.mean() > 0:
        return Skill(mean_loss, UNKNOWN, UNKNOWN, UNKNOWN)
    order = np.random.default_rng(0).permutation(len(experiment.prediction)) if windows is None else windows.order
    halves = np.array_split(order, 2)
    recalibrated = experiment.prediction.copy()
    for half, other_half in (halves, halves[::-1]):  # each half by a fit on the other one
        fit = target.select_samples(other_half).calibration(experiment.prediction[other_half])
        recalibrated[half] = fit.apply(experiment.prediction[half])
    recalibrated_loss = target.loss(recalibrated)
    scale = np.maximum(weights @ constant_loss, 1e-300)
    gain = float((loss - recalibrated_loss).mean() / constant_loss.mean())
    return Skill(
        mean_loss,
        Interval(skill(loss, constant_loss), *interval(1 - (weights @ loss) / scale)),
        Interval(skill(recalibrated_loss, constant_loss), *interval(1 - (weights @ recalibrated_loss) / scale)),
        Interval(gain, *interval(weights @ (loss - recalibrated_loss) / scale)),
    )


def _weights(samples: int, windows: Windows | None, seed: int) -> Array:
    if windows is None:
        return resampling_weights(samples, seed=seed)
    return resampling_weights(samples, order=windows.order, block=max(4, windows.overlap), seed=seed)


def _unknown_reason(measured_skill: Skill | None) -> str:
    if measured_skill is None:
        return ""
    if not np.isfinite(measured_skill.raw.value):
        return "the target does not vary over the samples"
    if not measured_skill.proven:
        raw_skill = measured_skill.raw
        return (
            f"no better than a constant prediction (skill {raw_skill.value:.2f}, "
            f"95 % CI {raw_skill.low:.2f} to {raw_skill.high:.2f})"
        )
    return ""


def _summarise(
    experiment: Experiment,
    probes: Probes,
    windows: Windows | None,
    measured_skill: Skill | None,
    reason: str,
    later_steps: tuple[int, int],
) -> Memory:
    # A sample's change depends on its lender too; for overlapping windows, on its neighbours far more.
    order = cycle(experiment.lender) if windows is None else windows.order
    block = 4 if windows is None else max(4, windows.overlap)
    weights = resampling_weights(len(experiment.prediction), order=order, block=block, seed=experiment.seed)
    context = np.array(sorted(probes.change))
    change = np.stack([probes.change[k] for k in context])
    use = change.mean(axis=1) / experiment.variation.between_samples
    resampled_use = (change @ weights.T) / np.maximum(experiment.variation.resampled(weights), 1e-300)
    benefit, resampled_benefit = _benefit(experiment, np.stack([probes.score[k] for k in context]), weights)
    steps = probes.steps

    def length_with_interval(curve: Array, repeats: Array, level: float) -> Interval:
        n = memory_length(dict(zip(context.tolist(), curve.tolist(), strict=True)), steps, level)
        return Interval(n, *_length_interval(context, repeats, steps, level))

    memory_in_use = length_with_interval(use, resampled_use, USED)
    return Memory(
        steps,
        measured_skill,
        not reason,
        reason,
        context,
        use,
        _band(resampled_use),
        benefit,
        _band(resampled_benefit),
        memory_in_use,
        length_with_interval(use, resampled_use, RARE),
        length_with_interval(benefit, resampled_benefit, USED),
        change,
        later_steps,
        _count_matters(experiment, int(memory_in_use.value)),
        len(experiment.prediction),
        experiment.predicts_distribution,
    )


def _benefit(experiment: Experiment, exchanged_scores: Array, weights: Array) -> tuple[Array, Array]:
    """Compute the benefit B(k) (context,) and its resamples (context, resample) from scores; NaN without a target."""
    target = experiment.target
    if target is None:
        return np.full(len(exchanged_scores), np.nan), np.full((len(exchanged_scores), len(weights)), np.nan)
    own_scores = score(target.values, experiment.prediction)
    mean_score, resampled_scores = float(own_scores.mean()), weights @ own_scores
    with np.errstate(divide="ignore", invalid="ignore"):
        benefit = 1 - exchanged_scores.mean(axis=1) / (mean_score if mean_score > 0 else float("nan"))
        return benefit, 1 - (exchanged_scores @ weights.T) / np.where(resampled_scores > 0, resampled_scores, np.nan)


def _length_interval(context: Array, repeats: Array, steps: int, level: float) -> tuple[float, float]:
    """Return the 95 % interval of n from resampled curves (context, resample).

    A curve is known at some k only. n lies between the last k whose value is above the level, plus 1, and the next k.
    The low end of the interval uses the former, the high end the latter.
    """
    last_above = np.where(repeats > level, context[:, None], 0).max(axis=0)
    next_context = np.append(context, steps)[np.searchsorted(context, last_above, side="right")]
    is_finite = np.isfinite(repeats).all(axis=0)
    low, _ = interval(np.where(is_finite, last_above + 1, np.nan))
    _, high = interval(np.where(is_finite, next_context, np.nan))
    return (float(np.floor(low)), float(np.ceil(high))) if np.isfinite(low) else (low, high)


def _band(repeats: Array) -> Array:
    return np.array([interval(row) for row in repeats]).reshape(-1, 2)


def _count_later_steps(experiment: Experiment) -> tuple[int, int]:
    """Count the steps after the examined one: those that the prediction uses, and all."""
    n_later = experiment.samples.steps - experiment.max_examined_length
    scale = experiment.variation.between_samples
    if n_later < 1 or not scale or (experiment.examined_lengths != experiment.max_examined_length).any():
        return 0, max(n_later, 0)

    def probe(n_kept: int) -> tuple[Array, Array]:
        change, _ = experiment.predict_changed(
            experiment.samples.with_later_exchanged(experiment.max_examined_length + n_kept, experiment.lender)
        )
        return change, change

    # The search counts context lengths from 1, so k = 1 keeps no later step.
    probes = search(lambda k: probe(k - 1), n_later + 1, scale, (USED,), decreasing=True)
    curve = {k: float(change.mean()) / scale for k, change in probes.change.items()}
    return memory_length(curve, n_later + 1) - 1, n_later


def _count_matters(experiment: Experiment, used_steps: int) -> bool:
    """Return whether the prediction changes if half of the steps are left out, although all used ones remain."""
    lengths = np.maximum(experiment.lengths // 2, 1)
    if (lengths < max(used_steps, _LEAST_STEPS)).any() or (experiment.examined_lengths != experiment.lengths).any():
        return False
    short_prediction = experiment.predict_shortened(lengths)
    if short_prediction is None:
        return False
    return float(experiment.variation.change(short_prediction).mean()) > USED * experiment.variation.between_samples


def measure_missed(experiment: Experiment) -> Missed | None:
    """Apply the residual test to the rescaling that inputs explain least; None without a target that varies."""
    target, x = experiment.target, _tested_inputs(experiment)
    if target is None or x is None or not np.isfinite(experiment.prediction).all():
        return None
    sample_indices = np.arange(len(x))
    selected_target, prediction = target.select_samples(sample_indices), experiment.prediction[sample_indices]
    candidates = [prediction, *selected_target.partly_calibrated(prediction, _SHARES)]
    residuals = [selected_target.values - candidate for candidate in candidates]
    return missed_dependency(residuals, x, target.variance, target=selected_target.values, seed=experiment.seed)


def measure_relation(experiment: Experiment) -> Missed | None:
    """Apply the residual test to the target itself, as the errors of a constant prediction."""
    target, x = experiment.target, _tested_inputs(experiment)
    if target is None or x is None:
        return None
    values = target.select_samples(np.arange(len(x))).values
    return missed_dependency(values, x, target.variance, seed=experiment.seed)


def _tested_inputs(experiment: Experiment) -> Array | None:
    """Return the inputs of the residual test (sample, time, feature); None without a target that varies."""
    if experiment.target is None or not experiment.target.variance > 0:
        return None
    x = _input_numbers(experiment)
    return None if x is None or not np.isfinite(x).all() else _align_at_end(x, experiment)[:MOST_TESTED]


def finds_nothing(residual_test: Missed) -> bool:
    """Return whether no step is associated with the errors, in a test that would have seen ``SOUGHT``."""
    return residual_test.p_value >= P_VALUE and residual_test.detectable <= SOUGHT


def is_missed(residual_test: Missed | None, memory: Memory) -> bool:
    """Return whether the residual test meets the rule of MISSED_DEPENDENCY.

    The rule is not met if the prediction is miscalibrated and already depends on the step: an overfitted model
    overestimates the effect of the step, so that the step explains errors again.
    """
    if residual_test is None or residual_test.effect < EFFECT or residual_test.p_value >= P_VALUE:
        return False
    return not (memory.miscalibrated and residual_test.learned > LEARNED)


def _input_numbers(experiment: Experiment) -> Array | None:
    """Return the first sequence of x, (sample, time, feature); for ids, the input of the first recurrent layer.

    Returns None if that layer has another number of steps. In a model of whole-sequence layers alone, ids are
    embedded.
    """
    leaf = data.leaves_of(experiment.samples.x)[experiment.samples.sequences[0]]
    if leaf.dtype.kind == "f":
        return leaf.reshape(*leaf.shape[:2], -1)
    if not experiment.replays:
        return experiment.embed(experiment.samples.x)
    batch = Batch(experiment.in_model_order(experiment.samples.x))
    calls = experiment.adapter.run(experiment.model, batch, Taps.states()).capture.calls
    embedded = to_host(calls[0].input)
    return embedded if embedded.shape[1] == experiment.samples.steps else None


def _align_at_end(x: Array, experiment: Experiment) -> Array:
    """Return the input steps up to the examined one, aligned at the end of each sample, with zeros before."""
    lengths, longest = experiment.examined_lengths, experiment.max_examined_length
    if (lengths == longest).all():
        return x[:, :longest]
    position = np.arange(longest)[None, :] - (longest - lengths)[:, None]
    aligned = np.take_along_axis(x, np.maximum(position, 0)[:, :, None], axis=1)
    return np.where(position[:, :, None] >= 0, aligned, 0.0)
