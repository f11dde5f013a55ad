"""The simple (Elman) recurrent cell: h_t = act(W x_t + U h_{t-1} + b). Elman 1990, doi:10.1207/s15516709cog1402_1."""

from __future__ import annotations

from collections.abc import Sequence

from ...typing import Array, Namespace
from ..activations import ACTIVATIONS
from . import KnownCell, affine
from .record import Record


def step(
    cell: KnownCell, projected: Array, before: Sequence[Array], scale: Array | None, xp: Namespace
) -> tuple[Record, tuple[Array, ...]]:
    """One step, or all steps at once where every state before is known."""
    z = projected + affine.project(before[0], cell.recurrent_kernel, scale, 1, xp)
    h = ACTIVATIONS[cell.activation].value(z, xp)
    z, a = affine.split_gates(z, 1, xp), affine.split_gates(h, 1, xp)
    return Record(z, a), (h,)


def hidden(gates: Array, before: Array) -> Array:
    """h_t from the gates (..., gate, unit): the only one."""
    return gates[..., 0, :]


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
    (lam,) = cotangent
    z, a = record.preactivation[..., 0, :], record.gates[..., 0, :]
    dz = ACTIVATIONS[cell.activation].vjp(z, a, lam, xp)
    carry = affine.unproject(dz, cell.recurrent_kernel, scale, 1, xp)
    return dz[..., None, :], (carry,), (lam,)


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
    flat = affine.join_gates(dz, xp)
    grads = {"recurrent_kernel": affine.outer(before, flat, scale, 1, how, xp)}
    if cell.recurrent_bias is not None:
        grads["recurrent_bias"] = affine.total(flat, how, xp)
    return grads
