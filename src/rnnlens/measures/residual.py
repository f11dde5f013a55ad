"""What the data would have told and the network did not hear: structure in the residual, and the step it points to.

The residual r = y - f (one-hot minus probabilities) is regressed on the inputs of every step and on products within a
step. It sees linear effects and such products only: a parity over two steps is missed, and no finding is no proof.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..typing import Array

#: Features of a step beyond which products within a step are squares only.
_ALL_PRODUCTS = 12
_FOLDS = 5
#: Ridge penalties, as shares of the mean eigenvalue of the Gram matrix.
_PENALTIES = (1e-2, 1e-1, 1.0, 10.0)


@dataclass(frozen=True)
class Missed:
    """What the residual holds.

    Attributes
    ----------
    effect
        Cross-validated share of the variance of y that ridge regression finds in the residual; can be negative.
    p_value
        Of the largest association of any step, against permuted samples (maximum statistic).
    step
        The step of that association, chronological from 0.
    by_step : (time,)
        Sum over outputs and features of squared covariances with the residual, per variance of y.
    threshold
        The 99 % quantile of the permuted maxima.
    """

    effect: float
    p_value: float
    step: int
    by_step: Array
    threshold: float


def step_features(x: Array) -> Array:
    """Inputs (sample, time, feature) with products within a step, standardised over samples; constant ones are 0.

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


def missed_dependency(
    residual: Array, x: Array, target_variance: float, *, permutations: int = 100, seed: int = 0
) -> Missed:
    """Test the residual for what the inputs would still explain.

    Parameters
    ----------
    residual : (sample, output)
        y - f; one-hot minus probabilities for classes.
    x : (sample, time, feature)
    target_variance
        Sum over outputs of the variance of y.

    References
    ----------
    Maximum statistic over permutations: Westfall, Young 1993, "Resampling-based multiple testing", section 2.2.
    """
    residual = np.asarray(residual, dtype=np.float64)
    residual = residual - residual.mean(axis=0)
    features = step_features(x)
    samples = residual.shape[0]
    by_step = _association(features, residual[None])[0] / target_variance
    rng = np.random.default_rng(seed)
    shuffled = np.stack([residual[rng.permutation(samples)] for _ in range(permutations)])
    maxima = (_association(features, shuffled) / target_variance).max(axis=1)
    peak = float(by_step.max())
    return Missed(
        effect=ridge_effect(residual, features) * float(residual.var(axis=0).sum()) / target_variance,
        p_value=float(1 + np.sum(maxima >= peak)) / (1 + permutations),
        step=int(by_step.argmax()),
        by_step=by_step,
        threshold=float(np.quantile(maxima, 0.99)),
    )


def _association(features: Array, residuals: Array) -> Array:
    """Sum of squared covariances per step: residuals (set, sample, output) to (set, time)."""
    sets, samples, outputs = residuals.shape
    rows = residuals.transpose(0, 2, 1).reshape(sets * outputs, samples) / samples
    found = np.empty((sets, len(features)))
    for t, at_step in enumerate(features):
        found[:, t] = np.sum((rows @ at_step) ** 2, axis=1).reshape(sets, outputs).sum(axis=1)
    return found


def ridge_effect(residual: Array, features: Array) -> float:
    """Cross-validated R^2 of ridge regression of ``residual`` on the features of all steps (time, sample, feature).

    In the dual, so that its cost depends on the number of samples. Hoerl, Kennard 1970, doi:10.2307/1267351.
    """
    gram = sum(at_step @ at_step.T for at_step in features)
    samples = len(residual)
    folds = np.arange(samples) % _FOLDS
    mean_eigenvalue = float(np.trace(gram)) / samples
    if not mean_eigenvalue:
        return 0.0
    errors = np.zeros(len(_PENALTIES))
    for fold in range(_FOLDS):
        fit, test = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        values, vectors = np.linalg.eigh(gram[np.ix_(fit, fit)])
        mean = residual[fit].mean(axis=0)
        inside = vectors.T @ (residual[fit] - mean)
        across = gram[np.ix_(test, fit)] @ vectors
        for i, penalty in enumerate(_PENALTIES):
            guess = mean + across @ (inside / (np.maximum(values, 0) + penalty * mean_eigenvalue)[:, None])
            errors[i] += float(np.sum((residual[test] - guess) ** 2))
    total = float(np.sum((residual - residual.mean(axis=0)) ** 2))
    return 1 - float(errors.min()) / total if total else 0.0
