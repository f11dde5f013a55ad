"""ProductSteps that are one *product* matrix per sample, built once and shared by all cotangents (or tangents).

``gated`` (LSTM)
    only two H x H blocks of A_t are full, the rest is diagonal. With dc the total gradient of c_t,
    ``[dc | dh] @ product = [dh_{t-1} | dx]``, ``dc_{t-1} = keep * dc``, and ``dc = lambda_c + lift * dh`` on arrival.
    Rows of ``product``: unit of c, then unit of h. ``keep`` is the forget gate, ``lift`` is o * act'(c).
dense (all others)
    ``lambda @ product = [lambda_{t-1} | dx]``, all diagonals folded in.

A masked step carries the state over and has no input: that too is only a matter of what stands in these matrices, so
that a sweep needs no branches. Columns of ``product``: the state before, then the input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..arrays import Array, Workspace
from .protocol import Pattern


@dataclass
class ProductSteps:
    """The dense or gated steps ``first ... first + n - 1`` (chronological), a :class:`Dense` or :class:`Gated` each.

    product : (sample, step, row, column); keep, lift : (sample, step, unit) of a gated system, else None.
    produced : gives (sample, step, row, column): what leaves a step by each state as it is produced, of a dense system
        in which a step computes one of its states from another.
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
        """Do nothing: every diagonal is in the matrix."""

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
        """Write the input's columns of the product, or a block multiplied with them."""
        into = transposed(self.input_matrix())
        out[...] = into if block is None else self.work.xp.matmul(block, into)

    def spread(self, rows: Array, state: int, columns: slice) -> None:
        """Carry a change of one produced state to all that leaves the step, as from c_t to h_t."""
        if self.whole is not None:
            rows[...] = transposed(self.whole()[:, :, columns])

    def produced(self, rows: Array, state: int, columns: slice) -> Array:
        """Return cotangents of a state as produced; the total gradient of c_t includes the path through h_t."""
        if self.whole is not None:
            return self.work.xp.matmul(rows, self.whole()[:, :, columns])
        return rows[:, :, columns]

    def after(self, earlier: Dense) -> Dense:
        """Return the product of both steps as one dense step."""
        xp, size = self.work.xp, self.product.shape[1]
        return Dense(self.work, xp.matmul(self.product[:, :, :size], earlier.product[:, :, :size]))

    def input_matrix(self) -> Array:
        """Return the columns of the input."""
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
        """Add lift * dh to dc, which makes its total."""
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
        """Push h by one product; c follows element by element."""
        units = self._units
        self.work.matmul(rows[:, :, units:], transposed(self.product[:, :, :units]), out)
        self.work.add_product(out[:, :, :units], rows[:, :, :units], self.keep)
        self.work.add_product(out[:, :, units:], out[:, :, :units], self.lift)

    def inject(self, block: Array | None, out: Array) -> None:
        """Write changes of the input to c by three gates, to h by the output gate and by c."""
        units = self._units
        into = transposed(self.product[:, :, units:])
        out[...] = into if block is None else self.work.xp.matmul(block, into)
        self.work.add_product(out[:, :, units:], out[:, :, :units], self.lift)

    def spread(self, rows: Array, state: int, columns: slice) -> None:
        """Carry a change of c_t to h_t."""
        units = self._units
        if state == 1:
            rows[:, :, units:] = rows[:, :, :units] * self.lift

    def produced(self, rows: Array, state: int, columns: slice) -> Array:
        """Return cotangents of a state, which :meth:`arrive` has made total already."""
        return rows[:, :, columns]

    def after(self, earlier: Gated) -> Dense:
        """Return the product of both steps as a dense step: their diagonals do not remain."""
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
        """Return B_t from the input to [c | h]."""
        units = self._units
        lifted = self.product[:, :, units:] * 1
        self.work.add_product(lifted[:, units:], lifted[:, :units], self.work.xp.permute_dims(self.lift, (0, 2, 1)))
        return lifted


class ProductSystem:
    """Base of all systems of product matrices: sizes and costs.

    Attributes
    ----------
    rows, columns
        Shape of a product matrix without its input columns.
    gated
        Which of the two forms of this module.
    """

    gated = False
    rows: int
    columns: int
    features: int
    state_sizes: tuple[int, ...]

    @property
    def layout(self) -> tuple[int, ...]:
        """Order of the states in a row: [c | h] in a gated one, [states] in a dense one."""
        return (1, 0) if self.gated else tuple(range(len(self.state_sizes)))

    @property
    def scratch(self) -> int:
        """Numbers per row for the product that :meth:`Gated.arrive` adds."""
        return self.columns if self.gated else 0

    def multiplications(self, inputs: bool) -> int:
        """Return the entries of the product matrix; element-wise multiplications are not counted."""
        return self.rows * (self.columns + (self.features if inputs else 0))

    def numbers(self, inputs: bool) -> int:
        """Return the entries of the product matrix."""
        return self.multiplications(inputs)

    def pattern(self, state: int) -> Pattern | None:
        """Return None: every unit reaches every other."""
        return None

    def moduli(self) -> Array | None:
        """Return None: each step has eigenvectors of its own."""
        return None


def transposed(matrices: Any) -> Array:
    """Transpose (..., n, m) to (..., m, n), as a view."""
    turned: Array = matrices.mT if hasattr(matrices, "mT") else matrices.swapaxes(-1, -2)
    return turned
