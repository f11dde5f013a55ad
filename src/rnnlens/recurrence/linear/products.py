"""Steps with one *product* matrix [A | B] per sample, built once and shared by all cotangents or tangents.

gated (LSTM)
    Only two unit x unit blocks of A_t are dense, the rest is diagonal. :meth:`Gated.arrive` computes the total gradient
    of c_t, ``dc = lambda_c + lift * dh``. Then ``[dc | dh] @ product = [dh_{t-1} | dx]`` and ``dc_{t-1} = keep * dc``.
    Rows of ``product`` are the units of c, then those of h. ``keep`` is the forget gate, ``lift`` is o * act'(c).
dense (all others)
    ``lambda @ product = [lambda_{t-1} | dx]``; the product contains all diagonals.

A masked step carries the state over and has no input; its matrices are [identity | 0], so that a sweep needs no
branches. Columns of ``product``: the state before, then the input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..arrays import Array, Workspace
from .protocol import Pattern


@dataclass
class ProductSteps:
    """Consecutive steps in chronological order, each a :class:`Dense` or a :class:`Gated` step.

    product : (sample, step, row, column); keep, lift : (sample, step, unit) of a gated system, else None.
    produced : function without arguments that returns Jacobians (sample, step, row, column) of the states after a step
        by the states as the step produces them; None unless a step computes one of its states from another.
    """

    work: Workspace
    product: Array
    keep: Array | None = None
    lift: Array | None = None
    produced: Callable[[], Array] | None = None

    def __getitem__(self, at: int) -> Dense | Gated:
        product = self.product[:, at]
        if self.keep is not None and self.lift is not None:
            return Gated(self.work, product, self.keep[:, at][:, None, :], self.lift[:, at][:, None, :])
        whole = self.produced
        return Dense(self.work, product, None if whole is None else lambda: whole()[:, at])


@dataclass
class Dense:
    """One dense step: ``product`` (sample, state, state before + feature) is [A | B]."""

    work: Workspace
    product: Array
    whole: Callable[[], Array] | None = None

    def arrive(self, rows: Array, fresh: int) -> None:
        """Do nothing: the product matrix already contains the paths within the step."""

    def pull(self, rows: Array, out: Array, *, inputs: bool) -> None:
        """Compute [rows] @ product = [states before | dx]."""
        if inputs:
            self.work.matmul(rows, self.product, out)
        else:
            self.work.matmul(rows, self.product[:, :, : self.product.shape[1]], out)

    def push(self, rows: Array, out: Array) -> None:
        """Compute [states before] @ A^T = [states after]."""
        self.work.matmul(rows, transposed(self.product[:, :, : self.product.shape[1]]), out)

    def inject(self, block: Array | None, out: Array) -> None:
        """Write block @ B^T to ``out``, or B^T if the block is None."""
        into = transposed(self.input_matrix())
        out[...] = into if block is None else self.work.xp.matmul(block, into)

    def spread(self, rows: Array, state: int, columns: slice) -> None:
        """Add the effect of a produced state's tangents on the other states of the step, such as of c_t on h_t."""
        if self.whole is not None:
            rows[...] = transposed(self.whole()[:, :, columns])

    def produced(self, rows: Array, state: int, columns: slice) -> Array:
        """Return cotangents of a state as the step produces it; for c_t they include the path through h_t."""
        if self.whole is not None:
            return self.work.xp.matmul(rows, self.whole()[:, :, columns])
        return rows[:, :, columns]

    def after(self, earlier: Dense) -> Dense:
        """Return the composition of two steps as one dense step, without B."""
        xp, size = self.work.xp, self.product.shape[1]
        return Dense(self.work, xp.matmul(self.product[:, :, :size], earlier.product[:, :, :size]))

    def input_matrix(self) -> Array:
        """Return B (sample, state, feature)."""
        return self.product[:, :, self.product.shape[1] :]


@dataclass
class Gated:
    """One step of an LSTM. keep, lift : (sample, 1, unit); ``product`` (sample, [c | h], h before + feature)."""

    work: Workspace
    product: Array
    keep: Array
    lift: Array

    @property
    def _units(self) -> int:
        return self.keep.shape[2]

    def arrive(self, rows: Array, fresh: int) -> None:
        """Add lift * dh to dc, in place, so that dc is the total gradient of c_t."""
        units = self._units
        self.work.add_product(rows[:, :, :units], rows[:, :, units:], self.lift)

    def pull(self, rows: Array, out: Array, *, inputs: bool) -> None:
        """Compute [dc | dh] @ product = [dh before | dx], and dc before element by element."""
        units = self._units
        if inputs:
            self.work.matmul(rows, self.product, out[:, :, units:])
        else:
            self.work.matmul(rows, self.product[:, :, :units], out[:, :, units:])
        self.work.multiply(rows[:, :, :units], self.keep, out[:, :, :units])

    def push(self, rows: Array, out: Array) -> None:
        """Push tangents [c | h] forward: h by one matrix product, c element by element."""
        units = self._units
        self.work.matmul(rows[:, :, units:], transposed(self.product[:, :, :units]), out)
        self.work.add_product(out[:, :, :units], rows[:, :, :units], self.keep)
        self.work.add_product(out[:, :, units:], out[:, :, :units], self.lift)

    def inject(self, block: Array | None, out: Array) -> None:
        """Write the tangents of [c | h] for a block of input tangents, or for unit vectors if the block is None."""
        units = self._units
        into = transposed(self.product[:, :, units:])
        out[...] = into if block is None else self.work.xp.matmul(block, into)
        self.work.add_product(out[:, :, units:], out[:, :, :units], self.lift)

    def spread(self, rows: Array, state: int, columns: slice) -> None:
        """Add the effect of tangents of c_t on h_t, in place."""
        units = self._units
        if state == 1:
            rows[:, :, units:] = rows[:, :, :units] * self.lift

    def produced(self, rows: Array, state: int, columns: slice) -> Array:
        """Return the columns of one state, which :meth:`arrive` has already made total gradients."""
        return rows[:, :, columns]

    def after(self, earlier: Gated) -> Dense:
        """Return the composition of two steps as one dense step, without B."""
        return Dense(self.work, self.work.xp.matmul(self._matrix(), earlier._matrix()))

    def _matrix(self) -> Array:
        size = 2 * self._units
        unit = self.work.empty(int(self.product.shape[0]), size, size)
        unit[...] = self.work.eye(size)
        out = self.work.empty(*unit.shape)
        self.arrive(unit, size)
        self.pull(unit, out, inputs=False)
        return out

    def input_matrix(self) -> Array:
        """Return B (sample, [c | h], feature)."""
        units = self._units
        lifted = self.product[:, :, units:] * 1
        self.work.add_product(lifted[:, units:], lifted[:, :units], self.work.xp.permute_dims(self.lift, (0, 2, 1)))
        return lifted


class ProductSystem:
    """Base class of systems with product matrices: sizes and costs.

    Attributes
    ----------
    rows, columns
        Shape of a product matrix without its input columns.
    gated
        Whether steps are :class:`Gated` rather than :class:`Dense`.
    """

    gated = False
    rows: int
    columns: int
    features: int
    state_sizes: tuple[int, ...]

    @property
    def layout(self) -> tuple[int, ...]:
        """State indices in the order of their columns in a row: [c | h] in a gated system, [states] in a dense one."""
        return (1, 0) if self.gated else tuple(range(len(self.state_sizes)))

    @property
    def scratch(self) -> int:
        """Numbers of temporary memory per row, used by :meth:`Gated.arrive`."""
        return self.columns if self.gated else 0

    def multiplications(self, inputs: bool) -> int:
        """Return the number of entries of the product matrix; element-wise multiplications are not counted."""
        return self.rows * (self.columns + (self.features if inputs else 0))

    def numbers(self, inputs: bool) -> int:
        """Return the number of entries of the product matrix."""
        return self.multiplications(inputs)

    def pattern(self, state: int) -> Pattern | None:
        """Return None: in a dense system all units can meet."""
        return None

    def moduli(self) -> Array | None:
        """Return None: the eigenvectors of A_t differ from step to step."""
        return None


def transposed(matrices: Any) -> Array:
    """Transpose (..., n, m) to (..., m, n), as a view."""
    turned: Array = matrices.mT if hasattr(matrices, "mT") else matrices.swapaxes(-1, -2)
    return turned
