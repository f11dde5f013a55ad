"""Spectra of step Jacobians and kernels: Lyapunov exponents, eigenvalues, effective rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..recurrence.replay import Replay
from ..typing import Array
from .transfer import step_jacobians


@dataclass(frozen=True)
class Lyapunov:
    """Finite-time Lyapunov spectrum.

    Attributes
    ----------
    exponents : (exponent,), descending
        Mean growth rate per step.
    stderr : (exponent,)
        Standard error: the larger of those over samples and over five blocks of time.
    kaplan_yorke
        Dimension of the attractor.
    """

    exponents: Array
    stderr: Array
    kaplan_yorke: float


def lyapunov_spectrum(run: Replay, *, count: int | None = None, burn_in: float = 0.1, seed: int = 0) -> Lyapunov:
    """Compute Lyapunov exponents by QR: Q_t R_t = A_t Q_(t-1), lambda_i = mean log |R_ii|.

    For steps with common eigenvectors, such as diagonal ones, they are the means of log |eigenvalue|.

    Parameters
    ----------
    count
        Number of exponents, the largest first; all by default.
    burn_in
        Share of the steps at the start that is left out, while Q converges.

    References
    ----------
    Benettin et al. 1980, doi:10.1007/BF02128236; for recurrent networks Vogt et al. 2022, arXiv:2006.14123, alg. 1.
    """
    samples, time = run.input.shape[:2]
    size = sum(int(s.shape[-1]) for s in run.states)
    count, burnt = size if count is None else min(count, size), round(burn_in * time)
    moduli = run.cell.linear_system(run).moduli()
    kept = _growth_by_qr(run, count, seed)[burnt:] if moduli is None else _growth(run, moduli, count, burnt)
    exponents = kept.mean(axis=(0, 1))
    blocks = np.stack([b.mean(axis=(0, 1)) for b in np.array_split(kept, 5)])
    over_samples = kept.mean(axis=0).std(axis=0, ddof=1) / np.sqrt(samples) if samples > 1 else np.zeros(count)
    stderr = np.maximum(over_samples, blocks.std(axis=0, ddof=1) / np.sqrt(len(blocks)))
    order = np.argsort(-exponents)
    return Lyapunov(exponents[order], stderr[order], kaplan_yorke_dimension(exponents[order]))


def _growth_by_qr(run: Replay, count: int, seed: int) -> Array:
    """Return log |R_ii| at each step, (step, sample, exponent), in the order of the recurrence."""
    samples, time = run.input.shape[:2]
    basis = np.random.default_rng(seed).normal(size=(samples, sum(int(s.shape[-1]) for s in run.states), count))
    q = np.linalg.qr(basis)[0]
    logs = np.empty((time, samples, count))
    for position, a in enumerate(step_jacobians(run)):
        q, r = np.linalg.qr(a @ q)
        diagonal = np.abs(np.diagonal(r, axis1=1, axis2=2))
        logs[position] = np.log(np.maximum(diagonal, 1e-300))
    return logs


def _growth(run: Replay, moduli: Array, count: int, burnt: int) -> Array:
    """Return log |a| after the first ``burnt`` steps, (step, sample, exponent), for steps with common eigenvectors."""
    order = list(run.steps())[burnt:]
    logs = np.log(np.maximum(np.asarray(moduli, dtype=np.float64)[:, order], 1e-300))
    largest = np.argsort(-logs.mean(axis=1), axis=1)[:, None, :count]
    return np.take_along_axis(logs, largest, axis=2).swapaxes(0, 1)


def step_eigenvalues(run: Replay, steps: Sequence[int]) -> Array:
    """Compute the eigenvalues of A_t = ds_t/ds_(t-1): (sample, step, mode), complex, largest modulus first.

    Parameters
    ----------
    steps
        Indices of time steps, in chronological order.
    """
    order = list(run.steps())
    wanted = {order.index(step): place for place, step in enumerate(steps)}
    found: list[Array] = [np.empty(0)] * len(wanted)
    for position, a in enumerate(step_jacobians(run)):
        if position in wanted:
            values = np.linalg.eigvals(np.asarray(a, dtype=np.float64))
            largest = np.argsort(-np.abs(values), axis=1)
            found[wanted[position]] = np.take_along_axis(values, largest, axis=1)
    return np.stack(found, axis=1)


def kaplan_yorke_dimension(exponents: Array) -> float:
    """Compute the Kaplan-Yorke dimension from Lyapunov exponents in descending order.

    It is j + (l_1 + ... + l_j) / |l_(j+1)|, with j the largest number of exponents whose sum is not negative.

    Kaplan, Yorke 1979, doi:10.1007/BFb0064319.
    """
    sums = np.cumsum(np.asarray(exponents, dtype=np.float64))
    if not np.isfinite(sums).all():
        return float("nan")
    if not len(sums) or sums[0] < 0:
        return 0.0
    j = int(np.flatnonzero(sums >= 0).max()) + 1
    return float(j) if j == len(sums) else j + float(sums[j - 1]) / abs(float(exponents[j]))


def effective_rank(matrix: Array) -> Array:
    """Compute e to the entropy of the normalised singular values of (..., n, m). Roy, Vetterli 2007, EUSIPCO."""
    values = np.linalg.svd(np.asarray(matrix, dtype=np.float64), compute_uv=False)
    total = values.sum(axis=-1, keepdims=True)
    share = values / np.where(total > 0, total, 1.0)
    return np.exp(-np.sum(np.where(share > 0, share * np.log(np.where(share > 0, share, 1.0)), 0.0), axis=-1))


@dataclass(frozen=True)
class KernelSpectrum:
    """Spectral facts of a square recurrent kernel.

    Attributes
    ----------
    radius, largest_singular_value
    departure_from_orthogonality
        Frobenius norm |W^T W - I|_F.
    departure_from_normality
        Henrici's measure sqrt(|W|_F^2 - sum |eigenvalue|^2), relative to |W|_F.
    """

    radius: float
    largest_singular_value: float
    departure_from_orthogonality: float
    departure_from_normality: float


def kernel_spectrum(kernel: Array) -> KernelSpectrum:
    """Compute spectral facts of one gate's recurrent kernel (unit_in, unit). Henrici 1962, doi:10.1007/BF01386294."""
    w = np.asarray(kernel, dtype=np.float64)
    values, norm = np.linalg.eigvals(w), float(np.linalg.norm(w))
    gap = max(norm**2 - float(np.sum(np.abs(values) ** 2)), 0.0)
    return KernelSpectrum(
        float(np.abs(values).max(initial=0.0)),
        float(np.linalg.norm(w, 2)) if w.size else 0.0,
        float(np.linalg.norm(w.T @ w - np.eye(w.shape[1]))),
        gap**0.5 / norm if norm else 0.0,
    )
