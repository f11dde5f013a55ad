"""The long short-term memory cell. Hochreiter, Schmidhuber 1997; Gers, Schmidhuber, Cummins 2000 (forget gate).

z = W x_t + U h_{t-1} + b,  (i, f, o) = rec_act(z_i, z_f, z_o),  g = act(z_g)
c_t = f c_{t-1} + i g,      h_t = o act(c_t), projected where the cell has a projection (arXiv:1402.1128, eq. 6)
"""

from __future__ import annotations

from collections.abc import Sequence

from ...typing import Array, Namespace
from ..activations import ACTIVATIONS
from . import KnownCell, affine
from .record import Record

_GATES = 4


def step(
    cell: KnownCell, projected: Array, before: Sequence[Array], scale: Array | None, xp: Namespace
) -> tuple[Record, tuple[Array, ...]]:
    """One step from the projected input (sample, gate * unit) and the states before."""
    record = gates(cell, projected, before[0], scale, xp)
    c = next_cell(record.gates, before[1])
    return record, (hidden(cell, record.gates, c, xp), c)


def gates(cell: KnownCell, projected: Array, h: Array, scale: Array | None, xp: Namespace) -> Record:
    """All gates from the hidden state before; of one step, or of all steps at once."""
    act, rec = ACTIVATIONS[cell.activation], ACTIVATIONS[cell.recurrent_activation]
    z = affine.project(h, cell.recurrent_kernel, scale, _GATES, xp)
    z += projected
    z = affine.split_gates(z, _GATES, xp)
    parts = [rec.value(z[..., :2, :], xp), act.value(z[..., 2:3, :], xp), rec.value(z[..., 3:, :], xp)]
    return Record(z, xp.concat(parts, axis=-2))


def next_cell(gates: Array, c: Array) -> Array:
    """c_t from the gates (..., gate, unit) and c_{t-1}."""
    return gates[..., 1, :] * c + gates[..., 0, :] * gates[..., 2, :]


def hidden(cell: KnownCell, gates: Array, c: Array, xp: Namespace) -> Array:
    """h_t from the gates and c_t."""
    h = gates[..., 3, :] * ACTIVATIONS[cell.activation].value(c, xp)
    return h if cell.projection is None else h @ cell.projection


def pull_back(
    cell: KnownCell,
    record: Record,
    before: Sequence[Array],
    after: Sequence[Array],
    cotangent: Sequence[Array],
    scale: Array | None,
    xp: Namespace,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """From dL/ds_t to dL/dz_t (gate, unit), dL/ds_{t-1} through this step, and the total gradients of the states.

    The total gradient of c_t includes the path through h_t.
    """
    act, rec = ACTIVATIONS[cell.activation], ACTIVATIONS[cell.recurrent_activation]
    lam_h, lam_c = cotangent
    inner = lam_h if cell.projection is None else lam_h @ cell.projection.T
    z, a = record.preactivation, record.gates
    i, f, g, o = (a[..., k, :] for k in range(_GATES))
    squashed = act.value(after[1], xp)
    total_c = lam_c + act.vjp(after[1], squashed, inner * o, xp)
    dz = xp.stack(
        [
            rec.vjp(z[..., 0, :], i, total_c * g, xp),
            rec.vjp(z[..., 1, :], f, total_c * before[1], xp),
            act.vjp(z[..., 2, :], g, total_c * i, xp),
            rec.vjp(z[..., 3, :], o, inner * squashed, xp),
        ],
        axis=-2,
    )
    carry_h = affine.unproject(affine.join_gates(dz, xp), cell.recurrent_kernel, scale, _GATES, xp)
    return dz, (carry_h, total_c * f), (lam_h, total_c)


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
    grads = {"recurrent_kernel": affine.outer(before, flat, scale, _GATES, how, xp)}
    if cell.recurrent_bias is not None:
        grads["recurrent_bias"] = affine.total(flat, how, xp)
    return grads
