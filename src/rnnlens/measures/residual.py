"""Residual test: whether the inputs of any step explain the errors of a prediction, and which step explains most.

The errors y - f are regressed on the inputs of all steps and on products within a step. Linear effects and such
products are found; a parity over two steps is not, so no finding is no proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..typing import Array

#: With more features per step than this, only squares are used as products within a step.
_ALL_PRODUCTS = 12
_FOLDS = 5
#: Ridge penalties, relative to the mean eigenvalue of the Gram matrix.
_PENALTIES = (1e-2, 1e-1, 1.0, 10.0)


@dataclass(frozen=True)
class Missed:
    """Result of the residual test.

    Attributes
    ----------
    effect
        Cross-validated share of the variance of y that ridge regression explains in the errors; can be negative.
    p_value
        Permutation p value of the strongest association of any step (maximum statistic).
    step
        The step with the strongest association, chronological from 0.
    by_step : (time,)
        Sum over outputs and features of squared covariances with the errors, divided by the variance of y.
    threshold
        The 99 % quantile of the maxima under permutation.
    overlapping
        Whether the samples are overlapping windows of one series, so that blocks of neighbours were used.
    learned
        Share of the association of y with that step that the prediction has too; NaN without ``target``.
    """

    effect: float
    p_value: float
    step: int
    by_step: Array
    threshold: float
    overlapping: bool = False
    learned: float = float("nan")


def missed_dependency(
    residual: Array | Sequence[Array],
    x: Array,
    target_variance: float,
    *,
    target: Array | None = None,
    permutations: int = 100,
    seed: int = 0,
) -> Missed:
    """Test errors for what the inputs still explain.

    Where the samples are overlapping windows of one series, folds are contiguous with a gap between them, and the
    permutations are circular shifts along the series, since errors of neighbours depend on each other.

    Parameters
    ----------
    residual : (sample, output), or a sequence of such
        y - f; one-hot minus probabilities for classes. Of several, such as those of a prediction on different scales,
        the one that the inputs explain least is tested: what a rescaling removes was not missed.
    x : (sample, time, feature)
    target_variance
        Sum over outputs of the variance of y.
    target : (sample, output), optional
        y, for ``learned``. The first residual is then that of the prediction as it is.

    References
    ----------
    Maximum statistic over permutations: Westfall, Young 1993, "Resampling-based multiple testing", section 2.2. Blocks
    of dependent samples: Politis, Romano 1992, in LePage, Billard (eds.), Exploring the limits of bootstrap, 263-270.
    """
    candidates = [residual] if isinstance(residual, np.ndarray) else list(residual)
    candidates = [np.asarray(one, dtype=np.float64) for one in candidates]
    candidates = [one - one.mean(axis=0) for one in candidates]
    prediction = None if target is None else np.asarray(target, dtype=np.float64) - np.asarray(candidates[0])
    windows = overlapping_windows(x)
    if windows is not None and prediction is not None and target is not None:
        prediction, target = prediction[windows.order], np.asarray(target)[windows.order]
    if windows is not None:
        candidates, x = [one[windows.order] for one in candidates], x[windows.order]
    gap = 0 if windows is None else windows.overlap
    features = step_features(x)
    effects = ridge_effects(candidates, features, gap=gap)
    shares = [e * float(one.var(axis=0).sum()) / target_variance for e, one in zip(effects, candidates, strict=True)]
    least = int(np.argmin(shares))
    tested = candidates[least]
    by_step = _association(features, tested[None])[0] / target_variance
    rng = np.random.default_rng(seed)
    shuffled = np.stack([_shuffled(tested, gap, rng) for _ in range(permutations)])
    maxima = (_association(features, shuffled) / target_variance).max(axis=1)
    peak, step = float(by_step.max()), int(by_step.argmax())
    learned = float("nan") if prediction is None or target is None else _learned(target, prediction, features[step])
    return Missed(
        effect=shares[least],
        p_value=float(1 + np.sum(maxima >= peak)) / (1 + permutations),
        step=step,
        by_step=by_step,
        threshold=float(np.quantile(maxima, 0.99)),
        overlapping=windows is not None,
        learned=learned,
    )


def _learned(target: Array, prediction: Array, at_step: Array) -> float:
    """Regress the covariances of a prediction with the features of a step on those of the target."""
    wanted, made = ((values - values.mean(axis=0)).T @ at_step for values in (target, prediction))
    size = float(np.sum(wanted**2))
    return float(np.sum(wanted * made)) / size if size else float("nan")


def _shuffled(residual: Array, gap: int, rng: np.random.Generator) -> Array:
    """Permute samples; shift them around a circle by more than ``gap`` where neighbours depend on each other."""
    samples = len(residual)
    if not gap:
        return residual[rng.permutation(samples)]
    return np.roll(residual, int(rng.integers(gap + 1, samples - gap)), axis=0)


def step_features(x: Array) -> Array:
    """Standardise the inputs (sample, time, feature) and their products within a step over samples; constants are 0.

    Returns (time, sample, feature').
    """
    x = np.asarray(x, dtype=np.float64)
    count = x.shape[2]
    if count <= _ALL_PRODUCTS:
        first, second = np.triu_indices(count)
        products = x[:, :, first] * x[:, :, second]
    else:
        products = x**2
    both = np.concatenate([_standardised(x), _standardised(products)], axis=2)
    return np.ascontiguousarray(both.transpose(1, 0, 2))


def _standardised(x: Array) -> Array:
    centred = x - x.mean(axis=0)
    spread = centred.std(axis=0)
    varies = spread > 1e-6 * (np.abs(x).max(axis=0) + 1e-30)
    return centred / np.where(varies, spread, np.inf)


def _association(features: Array, residuals: Array) -> Array:
    """Sum of squared covariances per step: residuals (set, sample, output) to (set, time)."""
    sets, samples, outputs = residuals.shape
    rows = residuals.transpose(0, 2, 1).reshape(sets * outputs, samples) / samples
    found = np.empty((sets, len(features)))
    for t, at_step in enumerate(features):
        found[:, t] = np.sum((rows @ at_step) ** 2, axis=1).reshape(sets, outputs).sum(axis=1)
    return found


def ridge_effects(residuals: Sequence[Array], features: Array, *, gap: int = 0) -> list[float]:
    """Cross-validated R^2 of ridge regression of each residual on the features of all steps (time, sample, feature).

    In the dual form, so that its cost depends on the number of samples. Hoerl, Kennard 1970, doi:10.2307/1267351.

    Parameters
    ----------
    gap
        With a gap, folds are contiguous, and as many samples on either side of a test fold are not trained on.
    """
    gram = sum(at_step @ at_step.T for at_step in features)
    samples = len(residuals[0])
    mean_eigenvalue = float(np.trace(gram)) / samples
    if not mean_eigenvalue:
        return [0.0] * len(residuals)
    place = np.arange(samples)
    folds = place * _FOLDS // samples if gap else place % _FOLDS
    errors = np.zeros((len(residuals), len(_PENALTIES)))
    for fold in range(_FOLDS):
        test = np.flatnonzero(folds == fold)
        near = (place >= test[0] - gap) & (place <= test[-1] + gap) if gap else folds == fold
        fit = np.flatnonzero(~near)
        values, vectors = np.linalg.eigh(gram[np.ix_(fit, fit)])
        across = gram[np.ix_(test, fit)] @ vectors
        for j, residual in enumerate(residuals):
            mean = residual[fit].mean(axis=0)
            inside = vectors.T @ (residual[fit] - mean)
            for i, penalty in enumerate(_PENALTIES):
                guess = mean + across @ (inside / (np.maximum(values, 0) + penalty * mean_eigenvalue)[:, None])
                errors[j, i] += float(np.sum((residual[test] - guess) ** 2))
    totals = [float(np.sum((residual - residual.mean(axis=0)) ** 2)) for residual in residuals]
    return [1 - float(e.min()) / total if total else 0.0 for e, total in zip(errors, totals, strict=True)]


@dataclass(frozen=True)
class Windows:
    """Samples cut from one series so that neighbours share steps.

    Attributes
    ----------
    order : (sample,)
        The samples in the order of the series.
    overlap
        How many samples after one still share steps with it, at most an eighth of all.
    """

    order: Array
    overlap: int


def overlapping_windows(x: Array) -> Windows | None:
    """Find out whether samples (sample, time, feature) are overlapping windows of one series, in any order.

    Two windows follow each other where the later half of one, or more, is the beginning of the other: exactly, or for
    neighbours in the given order also up to an offset and a factor, as after scaling each window. None where fewer than
    half of the samples are followed by another one.
    """
    x = np.asarray(x)
    samples, steps = x.shape[:2]
    if steps < 4 or samples < 16:
        return None
    after, shift = _followers(x)
    if (after >= 0).mean() < 0.5:
        stride = _scaled_stride(x)
        if not stride:
            return None
        after, shift = np.append(np.arange(1, samples), -1), np.full(samples, stride)
    sharing = np.ceil((steps - 1) / np.median(shift[after >= 0]))
    return Windows(np.array(_in_line(after)), int(np.clip(sharing, 1, max(1, samples // 8))))


def _followers(x: Array) -> tuple[Array, Array]:
    """(sample,) each: the sample that begins soonest within the first half of a window, -1 for none, and after what."""
    samples, steps = x.shape[:2]
    half = steps - steps // 2
    rows = np.ascontiguousarray(x)
    begins: dict[bytes, int] = {rows[i, :half].tobytes(): i for i in range(samples)}
    after, shift = np.full(samples, -1), np.zeros(samples, dtype=int)
    if len(begins) < 0.9 * samples:  # few distinct windows: equal ones need not be of one series
        return after, shift
    for i in range(samples):
        for t in range(1, steps - half + 1):
            j = begins.get(rows[i, t : t + half].tobytes(), i)
            if j != i and np.array_equal(rows[i, t:], rows[j, : steps - t]):
                after[i], shift[i] = j, t
                break
    return after, shift


def _scaled_stride(x: Array) -> int:
    """Smallest shift at which each window, but for scale and offset, goes on in the next sample; 0 for none."""
    values = np.asarray(x, dtype=np.float64).reshape(*x.shape[:2], -1)
    for stride in range(1, x.shape[1] // 2 + 1):
        parts = [values[:-1, stride:], values[1:, : x.shape[1] - stride]]
        a, b = (p - p.mean(axis=1, keepdims=True) for p in parts)
        sizes = np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))
        alike = (np.sum(a * b, axis=1) > 0.9999 * sizes) & (sizes > 0)
        if alike.all(axis=1).mean() > 0.9:
            return stride
    return 0


def _in_line(after: Array) -> list[int]:
    """All samples, each followed by the one that continues it."""
    begun = np.ones(len(after), dtype=bool)
    begun[after[after >= 0]] = False
    seen, line = np.zeros(len(after), dtype=bool), []
    for start in [*np.flatnonzero(begun), *range(len(after))]:
        at = int(start)
        while at >= 0 and not seen[at]:
            seen[at] = True
            line.append(at)
            at = int(after[at])
    return line
