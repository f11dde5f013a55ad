"""Structured matrices A_t, one class per structure: products with rows without building a dense matrix.

An object has the matrices of all steps, with arrays ``(sample or 1, time or 1, ...)``; the method ``at`` selects one
step, with arrays ``(sample or 1, ...)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..arrays import Array, Workspace, at_step
from .steps import Pattern, transposed


class Transition(Protocol):
    """Interface of a structured A_t, of all steps or of one. Rows and ``out`` (sample, row, state) must not overlap."""

    work: Workspace

    @property
    def states(self) -> int:
        """Number of states: the length of a row."""

    def at(self, samples: slice, t: int) -> Transition:
        """Return A of one step of some samples."""

    def masked(self, mask: Array) -> Transition:
        """Return A_t with the identity where ``mask`` (sample, time) is False."""

    def pull(self, rows: Array, out: Array) -> None:
        """Compute rows @ A."""

    def push(self, rows: Array, out: Array) -> None:
        """Compute rows @ A^T."""

    def after(self, earlier: Any) -> Transition:
        """Return A_self A_earlier for two single steps."""

    def multiplications(self) -> int:
        """Return the number of multiplications per row and step."""

    def numbers(self) -> int:
        """Return how many numbers are stored per step and sample."""

    def moduli(self) -> Array | None:
        """Return |eigenvalue| (sample or 1, time or 1, state) if all steps have the same eigenvectors; else None."""

    def pattern(self, columns: slice) -> Pattern | None:
        """Return which units of the state at ``columns`` of a row never meet in a reverse sweep."""


def _where(work: Workspace, mask: Array, values: Array, otherwise: float) -> Array:
    """Replace values at masked steps by a constant."""
    fill = work.zeros(*[1] * len(values.shape)) + otherwise
    return work.xp.where(mask[(..., *[None] * (len(values.shape) - 2))], values, fill)


@dataclass
class Diagonal:
    """Diagonal A_t = diag(values); values : (sample, time, state)."""

    work: Workspace
    values: Array

    @property
    def states(self) -> int:
        """Number of states."""
        return int(self.values.shape[-1])

    def at(self, samples: slice, t: int) -> Diagonal:
        """Return a view of one step."""
        return Diagonal(self.work, at_step(self.values, samples, t))

    def masked(self, mask: Array) -> Diagonal:
        """Return a copy with ones at masked steps."""
        return Diagonal(self.work, _where(self.work, mask, self.values, 1.0))

    def pull(self, rows: Array, out: Array) -> None:
        """Multiply rows by the diagonal."""
        self.work.multiply(rows, self.values[:, None, :], out)

    push = pull

    def after(self, earlier: Diagonal) -> Diagonal:
        """Return the product of two diagonals."""
        return Diagonal(self.work, self.values * earlier.values)

    def multiplications(self) -> int:
        """Return the number of states: one multiplication each."""
        return self.states

    def numbers(self) -> int:
        """Return the number of states: one stored number each."""
        return self.states

    def moduli(self) -> Array | None:
        """Return the magnitudes of the diagonal."""
        return self.work.xp.abs(self.values)

    def pattern(self, columns: slice) -> Pattern:
        """Return a single colour: no unit reaches another."""
        return _one_colour(columns)


@dataclass
class ComplexDiagonal:
    """Diagonal A_t = diag(real + i imaginary) of complex states, in rows of [real parts | imaginary parts].

    As a real matrix [[diag(real), -diag(imaginary)], [diag(imaginary), diag(real)]]; both (sample, time, unit).
    """

    work: Workspace
    real: Array
    imaginary: Array

    @property
    def states(self) -> int:
        """Number of real and imaginary parts: two per complex state."""
        return 2 * int(self.real.shape[-1])

    def at(self, samples: slice, t: int) -> ComplexDiagonal:
        """Return a view of one step."""
        return ComplexDiagonal(self.work, at_step(self.real, samples, t), at_step(self.imaginary, samples, t))

    def masked(self, mask: Array) -> ComplexDiagonal:
        """Return a copy with 1 + 0i at masked steps."""
        real, imaginary = _where(self.work, mask, self.real, 1.0), _where(self.work, mask, self.imaginary, 0.0)
        return ComplexDiagonal(self.work, real, imaginary)

    def pull(self, rows: Array, out: Array) -> None:
        """Multiply rows by the conjugate diagonal, which is the transposed real matrix."""
        self._turn(rows, out, -self.imaginary)

    def push(self, rows: Array, out: Array) -> None:
        """Multiply rows by the complex diagonal."""
        self._turn(rows, out, self.imaginary)

    def _turn(self, rows: Array, out: Array, imaginary: Array) -> None:
        units, work = int(self.real.shape[-1]), self.work
        real, imaginary = self.real[:, None, :], imaginary[:, None, :]
        x, y = rows[:, :, :units], rows[:, :, units:]
        work.multiply(x, real, out[:, :, :units])
        work.add_product(out[:, :, :units], y, -imaginary)
        work.multiply(y, real, out[:, :, units:])
        work.add_product(out[:, :, units:], x, imaginary)

    def after(self, earlier: ComplexDiagonal) -> ComplexDiagonal:
        """Return the product of two complex diagonals."""
        real = self.real * earlier.real - self.imaginary * earlier.imaginary
        return ComplexDiagonal(self.work, real, self.real * earlier.imaginary + self.imaginary * earlier.real)

    def multiplications(self) -> int:
        """Return four times the number of complex states."""
        return 2 * self.states

    def numbers(self) -> int:
        """Return how many real numbers are stored per step and sample: two for each complex state."""
        return self.states

    def moduli(self) -> Array | None:
        """Return the modulus of each complex number, repeated for its real and imaginary part."""
        modulus = self.work.xp.sqrt(self.real**2 + self.imaginary**2)
        return self.work.xp.concat([modulus, modulus], axis=-1)

    def pattern(self, columns: slice) -> Pattern:
        """Return a pattern in which each part reaches only the real and imaginary part of its own unit."""
        units, column = self.states // 2, np.arange(columns.start, columns.stop)
        imaginary = column >= units
        colour = imaginary.astype(int) if imaginary.any() and not imaginary.all() else 0 * column
        return Pattern(colour, np.stack([column % units, column % units + units], axis=1))


@dataclass
class PerHead:
    """A_t with one number for all states of a head, which are adjacent in a row; values : (sample, time, head)."""

    work: Workspace
    values: Array
    size: int

    @property
    def states(self) -> int:
        """Number of states of all heads."""
        return int(self.values.shape[-1]) * self.size

    def at(self, samples: slice, t: int) -> PerHead:
        """Return a view of one step."""
        return PerHead(self.work, at_step(self.values, samples, t), self.size)

    def masked(self, mask: Array) -> PerHead:
        """Return a copy with ones at masked steps."""
        return PerHead(self.work, _where(self.work, mask, self.values, 1.0), self.size)

    def pull(self, rows: Array, out: Array) -> None:
        """Multiply the states of each head by its number."""
        xp, shape = self.work.xp, (*rows.shape[:2], self.values.shape[-1], self.size)
        # Splits one axis into two, which gives views for any memory layout of the rows.
        self.work.multiply(xp.reshape(rows, shape), self.values[:, None, :, None], xp.reshape(out, shape))

    push = pull

    def after(self, earlier: PerHead) -> PerHead:
        """Return the product of two steps: the product of their numbers."""
        return PerHead(self.work, self.values * earlier.values, self.size)

    def multiplications(self) -> int:
        """Return the number of states: one multiplication each."""
        return self.states

    def numbers(self) -> int:
        """Return the number of heads: one stored number each."""
        return int(self.values.shape[-1])

    def moduli(self) -> Array | None:
        """Return the magnitude of each head's number, repeated for all states of the head."""
        xp, wide = self.work.xp, (*self.values.shape, self.size)
        spread = xp.broadcast_to(xp.abs(self.values)[..., None], wide)
        return xp.reshape(spread, (*self.values.shape[:-1], self.states))

    def pattern(self, columns: slice) -> Pattern:
        """Return a single colour: no unit reaches another."""
        return _one_colour(columns)


@dataclass
class MinusLowRank:
    """A_t = diag(decay) - sum_r left_r right_r^T on the keys of each head, the same for each of its values.

    The state of a head is a matrix (key, value); the columns of a row are ordered by head, key and value, values
    innermost. A step of a delta rule has rank one; a product of n steps has rank n, up to the number of keys.

    Attributes
    ----------
    decay : (sample, time, head, key)
    left, right : (sample, time, head, key, rank)
    """

    work: Workspace
    decay: Array
    left: Array
    right: Array
    size: int

    @property
    def states(self) -> int:
        """Number of states of all heads: keys times values."""
        heads, keys = self.decay.shape[-2:]
        return int(heads) * int(keys) * self.size

    def at(self, samples: slice, t: int) -> MinusLowRank:
        """Return a view of one step."""
        decay, left, right = (at_step(part, samples, t) for part in (self.decay, self.left, self.right))
        return MinusLowRank(self.work, decay, left, right, self.size)

    def masked(self, mask: Array) -> MinusLowRank:
        """Return a copy with the identity at masked steps: decay one, ``left`` zero."""
        decay, left = _where(self.work, mask, self.decay, 1.0), _where(self.work, mask, self.left, 0.0)
        return MinusLowRank(self.work, decay, left, self.right, self.size)

    def pull(self, rows: Array, out: Array) -> None:
        """Compute row * decay - right (left . row)."""
        self._apply(rows, out, self.left, self.right)

    def push(self, rows: Array, out: Array) -> None:
        """Compute row * decay - left (right . row)."""
        self._apply(rows, out, self.right, self.left)

    def _apply(self, rows: Array, out: Array, seen: Array, written: Array) -> None:
        xp, shape = self.work.xp, (*rows.shape[:2], *self.decay.shape[-2:], self.size)
        state, target = xp.reshape(rows, shape), xp.reshape(out, shape)
        read = xp.matmul(transposed(seen[:, None]), state)
        self.work.multiply(state, self.decay[:, None, :, :, None], target)
        target -= xp.matmul(written[:, None], read)

    def after(self, earlier: MinusLowRank) -> MinusLowRank:
        """Return the product D2 D1 - [D2 U1 | U2] [V1 | D1 V2 - V1 U1^T V2]^T of (D2 - U2 V2^T) and (D1 - U1 V1^T)."""
        xp = self.work.xp
        carried = self.decay[..., None] * earlier.left
        reread = earlier.decay[..., None] * self.right
        reread = reread - xp.matmul(earlier.right, xp.matmul(transposed(earlier.left), self.right))
        left, right = (carried, self.left), (earlier.right, reread)
        return MinusLowRank(
            self.work, self.decay * earlier.decay, xp.concat(left, axis=-1), xp.concat(right, axis=-1), self.size
        )

    def multiplications(self) -> int:
        """Return the number of multiplications: one per state for the decay, two per state and rank."""
        return self.states * (1 + 2 * int(self.left.shape[-1]))

    def numbers(self) -> int:
        """Return the number of stored numbers: one per key for the decay, two per key and rank."""
        return self.states // self.size * (1 + 2 * int(self.left.shape[-1]))

    def moduli(self) -> Array | None:
        """Return None: the eigenvectors of A_t differ from step to step."""
        return None

    def pattern(self, columns: slice) -> Pattern | None:
        """Return a pattern with one colour per key: a unit reaches only the keys of its own head and value."""
        head = int(self.decay.shape[-1]) * self.size
        if columns.start % head or columns.stop % head:
            return None
        keys, column = int(self.decay.shape[-1]), np.arange(columns.start, columns.stop)
        first = column // (keys * self.size) * keys * self.size + column % self.size
        return Pattern(column // self.size % keys, first[:, None] + np.arange(keys) * self.size)


def _one_colour(columns: slice) -> Pattern:
    column = np.arange(columns.start, columns.stop)
    return Pattern(0 * column, column[:, None])
