"""Residual test: do the inputs of any step explain the errors of a prediction, and which step explains most.

The errors y - f are regressed on the inputs of all steps and on products within a step. Linear effects and such
products are detected. A parity over two steps is not, so a test without finding proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..typing import Array

#: Largest number of features for which all products within a step are used; above it only squares.
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
        Cross-validated share of the variance of y that ridge regression explains in the errors: on all steps, or on the
        one step that the other folds choose, whichever explains more; can be negative.
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
        Share of the association of y with ``step`` that the prediction has too; NaN without ``target``.
    samples
        Number of samples.
    left
        Variance of the errors by that of y: no effect that they hold is larger.
    """

    effect: float
    p_value: float
    step: int
    by_step: Array
    threshold: float
    overlapping: bool = False
    learned: float = float("nan")
    samples: int = 0
    left: float = 1.0

    @property
    def exceeds_chance(self) -> bool:
        """Whether the strongest association exceeds the threshold, as a figure of ``by_step`` shows it."""
        return bool(self.by_step.max() > self.threshold)

    @property
    def detectable(self) -> float:
        """Smallest share of the variance of y by one feature of one step that exceeds the threshold on average.

        Such a share r adds r to the association of its step, whose value by chance is about the median over steps.
        """
        return max(self.threshold - float(np.median(self.by_step)), 0.0)

    @property
    def largest_possible(self) -> float:
        """Largest share of the variance of y that one input can explain of the errors."""
        return min(self.left, 1.0)

    def samples_for(self, effect: float) -> int:
        """Return the number of samples from which on a share ``effect`` exceeds the threshold on average.

        Associations by chance shrink with one over the number of samples.
        """
        return int(np.ceil(self.samples * self.detectable / effect))


def missed_dependency(
    residual: Array | Sequence[Array],
    x: Array,
    target_variance: float,
    *,
    target: Array | None = None,
    permutations: int = 100,
    seed: int = 0,
) -> Missed:
    """Test whether the inputs explain the errors of a prediction.

    If the samples are overlapping windows of one series, errors of neighbours are dependent. Folds are then contiguous
    with a gap between them, and permutations are circular shifts along the series.

    Parameters
    ----------
    residual : (sample, output), or a sequence of such
        Errors y - f; for classes one-hot minus probabilities. Of several, such as those of a prediction on different
        scales, the one that the inputs explain least is tested, since errors that a rescaling removes are no missed
        dependency.
    x : (sample, time, feature)
    target_variance
        Variance of y, summed over outputs.
    target : (sample, output), optional
        Target y, to compute ``learned``. The first residual must then be that of the prediction without rescaling.

    References
    ----------
    Maximum statistic over permutations: Westfall, Young 1993, "Resampling-based multiple testing", section 2.2. Blocks
    of dependent samples: Politis, Romano 1992, in LePage, Billard (eds.), Exploring the limits of bootstrap, 263-270.

    Examples
    --------
    >>> x = np.random.default_rng(0).normal(size=(300, 5, 1))
    >>> residual = x[:, 1]  # the prediction ignores the second step
    >>> missed = rl.measures.missed_dependency(residual, x, target_variance=1.0)
    >>> missed.step, bool(missed.p_value < 0.05)
    (1, True)
    """
    candidates = [residual] if isinstance(residual, np.ndarray) else list(residual)
    candidates = [np.asarray(errors, dtype=np.float64) for errors in candidates]
    candidates = [errors - errors.mean(axis=0) for errors in candidates]
    prediction = None if target is None else np.asarray(target, dtype=np.float64) - np.asarray(candidates[0])
    windows = overlapping_windows(x)
    if windows is not None and prediction is not None and target is not None:
        prediction, target = prediction[windows.order], np.asarray(target)[windows.order]
    if windows is not None:
        candidates, x = [errors[windows.order] for errors in candidates], x[windows.order]
    candidates = [_in_fewest_outputs(errors) for errors in candidates]
    gap = 0 if windows is None else windows.overlap
    features = step_features(x)
    joint = ridge_effects(candidates, features, gap=gap)
    effects = [
        max(all_steps, one_step)
        for all_steps, one_step in zip(joint, single_step_effects(candidates, features, gap=gap), strict=True)
    ]
    shares = [
        effect * float(errors.var(axis=0).sum()) / target_variance
        for effect, errors in zip(effects, candidates, strict=True)
    ]
    least_explained = int(np.argmin(shares))
    tested = candidates[least_explained]
    by_step = _association(features, tested[None])[0] / target_variance
    rng = np.random.default_rng(seed)
    shuffled = np.stack([_shuffle(tested, gap, rng) for _ in range(permutations)])
    maxima = (_association(features, shuffled) / target_variance).max(axis=1)
    peak, step = float(by_step.max()), int(by_step.argmax())
    learned = (
        float("nan") if prediction is None or target is None else _learned_share(target, prediction, features[step])
    )
    return Missed(
        effect=shares[least_explained],
        p_value=float(1 + np.sum(maxima >= peak)) / (1 + permutations),
        step=step,
        by_step=by_step,
        threshold=float(np.quantile(maxima, 0.99)),
        overlapping=windows is not None,
        learned=learned,
        samples=len(tested),
        left=float(tested.var(axis=0).sum()) / target_variance,
    )


def _in_fewest_outputs(errors: Array) -> Array:
    """Rotate errors (sample, output) so that at most as many outputs as samples are not zero, and return these.

    All statistics of the test sum squares over the outputs, which a rotation keeps: of a vocabulary of 10,000 and 512
    samples it needs 512 columns.
    """
    samples, outputs = errors.shape
    return errors if outputs <= samples else np.asarray(np.linalg.qr(errors.T, mode="r")).T


def single_step_effects(residuals: Sequence[Array], features: Array, *, gap: int = 0) -> list[float]:
    """Compute the cross-validated R^2 of ridge regression of each residual on one step, which each fold chooses anew.

    The step is the one with the strongest association in the training samples, so that the search for it is part of
    what is validated (nested cross-validation: Stone 1974, J. R. Stat. Soc. B 36). With many steps and features it
    finds a single step that ridge regression on all of them cannot tell from noise. Arguments are as in
    :func:`ridge_effects`.
    """
    scores = []
    for residual in residuals:
        errors = np.zeros(len(_PENALTIES))
        for test, training in _folds(len(residual), gap):
            mean = residual[training].mean(axis=0)
            centred = residual[training] - mean
            step = int(_association(features[:, training], centred[None])[0].argmax())
            values, vectors = np.linalg.eigh(features[step][training].T @ features[step][training])
            projected = vectors.T @ (features[step][training].T @ centred)
            for i, penalty in enumerate(_PENALTIES):
                scale = np.maximum(values, 0) + penalty * max(float(values.mean()), 1e-300)
                predicted = mean + features[step][test] @ (vectors @ (projected / scale[:, None]))
                errors[i] += float(np.sum((residual[test] - predicted) ** 2))
        total = float(np.sum((residual - residual.mean(axis=0)) ** 2))
        scores.append(1 - float(errors.min()) / total if total else 0.0)
    return scores


def _folds(samples: int, gap: int) -> Iterator[tuple[Array, Array]]:
    """Yield the indices of test and training samples of each fold; with a ``gap`` contiguous folds, apart by it."""
    sample_index = np.arange(samples)
    folds = sample_index * _FOLDS // samples if gap else sample_index % _FOLDS
    for fold in range(_FOLDS):
        test = np.flatnonzero(folds == fold)
        is_near = (sample_index >= test[0] - gap) & (sample_index <= test[-1] + gap) if gap else folds == fold
        yield test, np.flatnonzero(~is_near)


def _learned_share(target: Array, prediction: Array, step_values: Array) -> float:
    """Regress the prediction's covariances with one step's features on those of the target; return the slope."""
    target_covariance, predicted_covariance = (
        (values - values.mean(axis=0)).T @ step_values for values in (target, prediction)
    )
    size = float(np.sum(target_covariance**2))
    return float(np.sum(target_covariance * predicted_covariance)) / size if size else float("nan")


def _shuffle(residual: Array, gap: int, rng: np.random.Generator) -> Array:
    """Permute the samples at random; with a ``gap`` shift them circularly by more, as neighbours are dependent."""
    samples = len(residual)
    if not gap:
        return residual[rng.permutation(samples)]
    return np.roll(residual, int(rng.integers(gap + 1, samples - gap)), axis=0)


def step_features(x: Array) -> Array:
    """Standardise over samples the inputs (sample, time, feature) and their products within a step.

    The result is (time, sample, feature and product). Constant columns are 0. With more than 12 features, squares are
    the only products.
    """
    x = np.asarray(x, dtype=np.float64)
    count = x.shape[2]
    if count <= _ALL_PRODUCTS:
        first, second = np.triu_indices(count)
        products = x[:, :, first] * x[:, :, second]
    else:
        products = x**2
    all_features = np.concatenate([_standardise(x), _standardise(products)], axis=2)
    return np.ascontiguousarray(all_features.transpose(1, 0, 2))


def _standardise(x: Array) -> Array:
    centred = x - x.mean(axis=0)
    spread = centred.std(axis=0)
    is_varying = spread > 1e-6 * (np.abs(x).max(axis=0) + 1e-30)
    return centred / np.where(is_varying, spread, np.inf)


def _association(features: Array, residuals: Array) -> Array:
    """Sum the squared covariances of residuals and the features of each step, over features and outputs.

    ``features`` is (time, sample, feature) and ``residuals`` (set, sample, output); the result is (set, time).
    """
    sets, samples, outputs = residuals.shape
    rows = residuals.transpose(0, 2, 1).reshape(sets * outputs, samples) / samples
    association = np.empty((sets, len(features)))
    for t, step_values in enumerate(features):
        association[:, t] = np.sum((rows @ step_values) ** 2, axis=1).reshape(sets, outputs).sum(axis=1)
    return association


def ridge_effects(residuals: Sequence[Array], features: Array, *, gap: int = 0) -> list[float]:
    """Compute the cross-validated R^2 of ridge regression of each residual on the features of all steps.

    ``features`` is (time, sample, feature), and a residual is (sample, output). The dual form is used, whose cost
    depends on the number of samples (Hoerl, Kennard 1970, doi:10.2307/1267351). The best of several penalties counts.

    Parameters
    ----------
    gap
        If it is not 0, folds are contiguous, and this number of samples on either side of a test fold is left out of
        training.
    """
    gram = sum(step_values @ step_values.T for step_values in features)
    samples = len(residuals[0])
    mean_eigenvalue = float(np.trace(gram)) / samples
    if not mean_eigenvalue:
        return [0.0] * len(residuals)
    errors = np.zeros((len(residuals), len(_PENALTIES)))
    for test, training in _folds(samples, gap):
        values, vectors = np.linalg.eigh(gram[np.ix_(training, training)])
        test_projection = gram[np.ix_(test, training)] @ vectors
        for j, residual in enumerate(residuals):
            mean = residual[training].mean(axis=0)
            projected = vectors.T @ (residual[training] - mean)
            for i, penalty in enumerate(_PENALTIES):
                predicted = mean + test_projection @ (
                    projected / (np.maximum(values, 0) + penalty * mean_eigenvalue)[:, None]
                )
                errors[j, i] += float(np.sum((residual[test] - predicted) ** 2))
    totals = [float(np.sum((residual - residual.mean(axis=0)) ** 2)) for residual in residuals]
    return [1 - float(e.min()) / total if total else 0.0 for e, total in zip(errors, totals, strict=True)]


@dataclass(frozen=True)
class Windows:
    """Samples that were cut from one series so that neighbours share steps.

    Attributes
    ----------
    order : (sample,)
        The samples in the order of the series.
    overlap
        Number of following samples that share steps with a sample, at most an eighth of all samples.
    """

    order: Array
    overlap: int


def overlapping_windows(x: Array) -> Windows | None:
    """Detect whether samples (sample, time, feature) are overlapping windows of one series, in any order.

    A window follows another if it begins within the other's first half and repeats all of the rest. The values must be
    equal; for neighbours in the given order they may also differ by an offset and a factor, as after scaling each
    window. The result is None if fewer than half of the samples are followed by another one, and for fewer than 16
    samples or 4 steps.
    """
    x = np.asarray(x)
    samples, steps = x.shape[:2]
    if steps < 4 or samples < 16:
        return None
    follower, shift = _followers(x)
    if (follower >= 0).mean() < 0.5:
        stride = _scaled_stride(x)
        if not stride:
            return None
        follower, shift = np.append(np.arange(1, samples), -1), np.full(samples, stride)
    overlap_count = np.ceil((steps - 1) / np.median(shift[follower >= 0]))
    return Windows(np.array(_series_order(follower)), int(np.clip(overlap_count, 1, max(1, samples // 8))))


def _followers(x: Array) -> tuple[Array, Array]:
    """Return for each sample the window that continues its first half, -1 for none, and the shift to it in steps."""
    samples, steps = x.shape[:2]
    half = steps - steps // 2
    rows = np.ascontiguousarray(x)
    by_beginning: dict[bytes, int] = {rows[i, :half].tobytes(): i for i in range(samples)}
    follower, shift = np.full(samples, -1), np.zeros(samples, dtype=int)
    if len(by_beginning) < 0.9 * samples:  # few distinct windows, so equal parts are no evidence of one series
        return follower, shift
    for i in range(samples):
        for t in range(1, steps - half + 1):
            j = by_beginning.get(rows[i, t : t + half].tobytes(), i)
            if j != i and np.array_equal(rows[i, t:], rows[j, : steps - t]):
                follower[i], shift[i] = j, t
                break
    return follower, shift


def _scaled_stride(x: Array) -> int:
    """Return the shift in steps between successive samples that overlap up to scale and offset; 0 if none do."""
    values = np.asarray(x, dtype=np.float64).reshape(*x.shape[:2], -1)
    pairs, steps = len(values) - 1, values.shape[1]
    block = pairs // 10 + 1  # one block without windows that continue rules a shift out
    for stride in range(1, steps // 2 + 1):
        mismatches = 0
        for start in range(0, pairs, block):
            stop = min(start + block, pairs)
            windows = values[start:stop, stride:], values[start + 1 : stop + 1, : steps - stride]
            a, b = (window - window.mean(axis=1, keepdims=True) for window in windows)
            norms = np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))
            is_alike = ((np.sum(a * b, axis=1) > 0.9999 * norms) & (norms > 0)).all(axis=1)  # up to scale and offset
            mismatches += int((~is_alike).sum())
            if mismatches >= 0.1 * pairs:
                break
        else:
            return stride
    return 0


def _series_order(follower: Array) -> list[int]:
    """Return a permutation of the samples in which a window comes directly before the window that continues it."""
    is_start = np.ones(len(follower), dtype=bool)
    is_start[follower[follower >= 0]] = False
    is_placed, order = np.zeros(len(follower), dtype=bool), []
    for start in [*np.flatnonzero(is_start), *range(len(follower))]:
        sample = int(start)
        while sample >= 0 and not is_placed[sample]:
            is_placed[sample] = True
            order.append(sample)
            sample = int(follower[sample])
    return order
