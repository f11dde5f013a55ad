"""Products with kernels, shared by all cells, with dropout multipliers as in Keras and torch.

A multiplier ``scale`` is None, an array (sample, n) for all gates, or an array (gate, sample, n) with one row per gate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from array_api_compat import device

from ..arrays import Array, Namespace, namespace


def columns(kernel: Array, gate: int, gates: int) -> Array:
    """Select the columns of one gate from a kernel (n, gate * unit): (n, unit)."""
    units = kernel.shape[1] // gates
    return kernel[:, gate * units : (gate + 1) * units]


def split_gates(z: Array, gates: int, xp: Namespace) -> Array:
    """Split the last axis by gates: (..., gate * unit) to (..., gate, unit)."""
    return xp.reshape(z, (*z.shape[:-1], gates, z.shape[-1] // gates))


def join_gates(z: Array, xp: Namespace) -> Array:
    """Join the last two axes: (..., gate, unit) to (..., gate * unit)."""
    return xp.reshape(z, (*z.shape[:-2], z.shape[-2] * z.shape[-1]))


def _with_time(scale: Array, like: Array) -> Array:
    """Insert axes after the first so that a multiplier (sample, n) broadcasts against (sample, ..., n)."""
    extra = len(like.shape) - 2
    return scale[(slice(None), *([None] * extra), slice(None))]


def project(x: Array, kernel: Array, scale: Array | None, gates: int, xp: Namespace) -> Array:
    """Multiply x (sample, ..., n), scaled by dropout if there is any, by a kernel (n, gate * unit)."""
    if scale is None:
        return x @ kernel
    if len(scale.shape) == 2:
        return (x * _with_time(scale, x)) @ kernel
    parts = [(x * _with_time(scale[g], x)) @ columns(kernel, g, gates) for g in range(gates)]
    return xp.concat(parts, axis=-1)


def unproject(dz: Array, kernel: Array, scale: Array | None, gates: int, xp: Namespace) -> Array:
    """Pull cotangents (sample, ..., gate * unit) of :func:`project` back to its input (sample, ..., n)."""
    if scale is None:
        return dz @ kernel.T
    if len(scale.shape) == 2:
        product = dz @ kernel.T
        return product * _with_time(scale, product)
    first, *others = (_unproject_gate(dz, kernel, scale, gate, gates) for gate in range(gates))
    return sum(others, start=first)


def _unproject_gate(dz: Array, kernel: Array, scale: Array, gate: int, gates: int) -> Array:
    units = dz.shape[-1] // gates
    part = dz[..., gate * units : (gate + 1) * units] @ columns(kernel, gate, gates).T
    return part * _with_time(scale[gate], part)


class Contraction(NamedTuple):
    """Options for summing the terms x_t dz_t^T of a kernel's gradient.

    ``by_time`` keeps the time axis; otherwise the terms are summed over time. ``probes`` > 0 returns that many random
    combinations of the gradient's rows, which suffice for a check at a small part of the cost (Freivalds 1977).
    """

    by_time: bool = False
    probes: int = 0


def probe_rows(rows: int, like: Array, how: Contraction) -> Array:
    """Return random signs (probes, rows) with a fixed seed."""
    signs = 2.0 * np.random.default_rng(rows).integers(0, 2, size=(how.probes, rows)) - 1.0
    return namespace(like).asarray(signs, dtype=like.dtype, device=device(like))


def total(dz: Array, how: Contraction, xp: Namespace) -> Array:
    """Return the gradient of a bias (gate * unit,), with a leading time axis if ``how.by_time``."""
    return xp.sum(dz, axis=0 if how.by_time else (0, 1))


def outer(x: Array, dz: Array, scale: Array | None, gates: int, how: Contraction, xp: Namespace) -> Array:
    """Return the gradient of the kernel in :func:`project`, summed over samples.

    x : (sample, time, n); dz : (sample, time, gate * unit). The result is (n, gate * unit), or (probes, gate * unit),
    with a leading time axis if ``how.by_time``.
    """
    if scale is not None and len(scale.shape) == 3:
        units = dz.shape[-1] // gates
        parts = [
            outer(x * _with_time(scale[g], x), dz[..., g * units : (g + 1) * units], None, gates, how, xp)
            for g in range(gates)
        ]
        return xp.concat(parts, axis=-1)
    if scale is not None:
        x = x * _with_time(scale, x)
    if how.probes:
        x = x @ probe_rows(x.shape[-1], x, how).T
    if how.by_time:
        return xp.permute_dims(x, (1, 2, 0)) @ xp.permute_dims(dz, (1, 0, 2))
    rows = x.shape[0] * x.shape[1]
    return xp.reshape(x, (rows, x.shape[2])).T @ xp.reshape(dz, (rows, dz.shape[2]))
