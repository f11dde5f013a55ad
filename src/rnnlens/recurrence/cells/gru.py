"""The gated recurrent unit: h_t = u h_{t-1} + (1 - u) n, with the reset gate before or after the recurrent product.

u, r = rec_act(W x_t + U h_{t-1} + b)
reset_after:   n = act(W_n x_t + b_n + r (U_n h_{t-1} + b'_n))      (cuDNN; arXiv:1406.1078v1)
reset before:  n = act(W_n x_t + b_n + U_n (r h_{t-1}))             (Cho et al. 2014, arXiv:1406.1078v3, eqs. 5-8)
"""

from __future__ import annotations

from collections.abc import Sequence

from ...typing import Array, Namespace
from ..activations import ACTIVATIONS
from . import KnownCell, affine
from .record import Record

_GATES = 3


def _scale_of(scale: Array | None, gates: slice) -> Array | None:
    return scale if scale is None or len(scale.shape) == 2 else scale[gates]


def _kernels(cell: KnownCell) -> tuple[Array, Array]:
    """The recurrent kernel of (update, reset), and that of the candidate."""
    split = 2 * cell.units
    return cell.recurrent_kernel[:, :split], cell.recurrent_kernel[:, split:]


def _candidate_scale(scale: Array | None) -> Array | None:
    return scale if scale is None or len(scale.shape) == 2 else scale[2]


def step(
    cell: KnownCell, projected: Array, before: Sequence[Array], scale: Array | None, xp: Namespace
) -> tuple[Record, tuple[Array, ...]]:
    """One step, or all steps at once where every state before is known."""
    act, rec = ACTIVATIONS[cell.activation], ACTIVATIONS[cell.recurrent_activation]
    h, split = before[0], 2 * cell.units
    if cell.reset_after:
        recurrent = affine.project(h, cell.recurrent_kernel, scale, _GATES, xp)
        if cell.recurrent_bias is not None:
            recurrent = recurrent + cell.recurrent_bias
        z_ur = affine.split_gates(projected[..., :split] + recurrent[..., :split], 2, xp)
        ur = rec.value(z_ur, xp)
        inner = recurrent[..., split:]
        z_n = projected[..., split:] + ur[..., 1, :] * inner
    else:
        u_ur, u_n = _kernels(cell)
        recurrent = affine.project(h, u_ur, _scale_of(scale, slice(0, 2)), 2, xp)
        z_ur = affine.split_gates(projected[..., :split] + recurrent, 2, xp)
        ur = rec.value(z_ur, xp)
        inner = None
        z_n = projected[..., split:] + affine.project(ur[..., 1, :] * h, u_n, _candidate_scale(scale), 1, xp)
    n = act.value(z_n, xp)
    z = xp.concat([z_ur, z_n[..., None, :]], axis=-2)
    gates = xp.concat([ur, n[..., None, :]], axis=-2)
    return Record(z, gates, inner), (hidden(gates, h),)


def hidden(gates: Array, before: Array) -> Array:
    """h_t from the gates (..., gate, unit) and h_{t-1}."""
    return gates[..., 0, :] * before + (1 - gates[..., 0, :]) * gates[..., 2, :]


def pull_back(
    cell: KnownCell,
    record: Record,
    before: Sequence[Array],
    after: Sequence[Array],
    cotangent: Sequence[Array],
    scale: Array | None,
    xp: Namespace,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """From dL/ds_t to dL/dz_t (gate, unit), dL/ds_{t-1} through this step, and the total gradients of the states."""
    act, rec = ACTIVATIONS[cell.activation], ACTIVATIONS[cell.recurrent_activation]
    (lam,), h = cotangent, before[0]
    z, a = record.preactivation, record.gates
    u, r, n = (a[..., k, :] for k in range(_GATES))
    dz_u = rec.vjp(z[..., 0, :], u, lam * (h - n), xp)
    dz_n = act.vjp(z[..., 2, :], n, lam * (1 - u), xp)
    if cell.reset_after:
        dz_r = rec.vjp(z[..., 1, :], r, dz_n * record.inner, xp)
        recurrent = xp.concat([dz_u, dz_r, dz_n * r], axis=-1)
        carry = lam * u + affine.unproject(recurrent, cell.recurrent_kernel, scale, _GATES, xp)
    else:
        u_ur, u_n = _kernels(cell)
        into_product = affine.unproject(dz_n, u_n, _candidate_scale(scale), 1, xp)
        dz_r = rec.vjp(z[..., 1, :], r, into_product * h, xp)
        recurrent = xp.concat([dz_u, dz_r], axis=-1)
        carry = lam * u + into_product * r + affine.unproject(recurrent, u_ur, _scale_of(scale, slice(0, 2)), 2, xp)
    return xp.stack([dz_u, dz_r, dz_n], axis=-2), (carry,), (lam,)


def recurrent_gradients(
    cell: KnownCell,
    record: Record,
    before: Array,
    dz: Array,
    scale: Array | None,
    how: affine.Contraction,
    xp: Namespace,
) -> dict[str, Array]:
    """Gradients of the recurrent weights. before : (sample, time, unit_in); dz : (sample, time, gate, unit)."""
    reset = record.gates[..., 1, :]
    if cell.reset_after:
        flat = xp.concat([dz[..., 0, :], dz[..., 1, :], dz[..., 2, :] * reset], axis=-1)
        grads = {"recurrent_kernel": affine.outer(before, flat, scale, _GATES, how, xp)}
        if cell.recurrent_bias is not None:
            grads["recurrent_bias"] = affine.total(flat, how, xp)
        return grads
    ur = affine.outer(before, affine.join_gates(dz[..., :2, :], xp), _scale_of(scale, slice(0, 2)), 2, how, xp)
    n = affine.outer(reset * before, dz[..., 2, :], _candidate_scale(scale), 1, how, xp)
    return {"recurrent_kernel": xp.concat([ur, n], axis=-1)}
