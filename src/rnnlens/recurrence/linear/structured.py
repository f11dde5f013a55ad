"""A_t by structure: one class each, for all steps of a system, which :meth:`at` narrows to one step of some samples.

Each holds arrays ``(sample or 1, time or 1, ...)``, or without the time of a single step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..arrays import Array, Workspace
from .products import transposed
from .protocol import Pattern


class Transition(Protocol):
    """A_t of all steps, or of one. ``rows``, ``out``: (sample, row, state), which must not overlap."""

    work: Workspace

    @property
    def states(self) -> int:
        """Number of entries of a row."""

    def at(self, samples: slice, t: int) -> Transition:
        """Return one step of some samples."""

    def masked(self, mask: Array) -> Transition:
        """Return A_t with the identity where ``mask`` (sample, time) is False."""

    def pull(self, rows: Array, out: Array) -> None:
        """Compute rows @ A."""

    def push(self, rows: Array, out: Array) -> None:
        """Compute rows @ A^T."""

    def after(self, earlier: Any) -> Transition:
        """Return A_self A_earlier, of single steps."""

    def multiplications(self) -> int:
        """Return the multiplications of one row at one step."""

    def numbers(self) -> int:
        """Return how many numbers one step of one sample holds."""

    def moduli(self) -> Array | None:
        """Return |eigenvalue| (sample or 1, time or 1, state) of steps with the same eigenvectors; else None."""

    def pattern(self, columns: slice) -> Pattern | None:
        """Return which units of a state never meet; ``columns`` is where the state lies in a row."""


def _at(values: Array, samples: slice, t: int) -> Array:
    at = values[:, 0 if values.shape[1] == 1 else t]
    return at if at.shape[0] == 1 else at[samples]


def _where(work: Workspace, mask: Array, values: Array, otherwise: float) -> Array:
    """Replace values at masked steps by a constant."""
    fill = work.zeros(*[1] * len(values.shape)) + otherwise
    return work.xp.where(mask[(..., *[None] * (len(values.shape) - 2))], values, fill)


@dataclass
class Diagonal:
    """diag(values); values : (sample, time, state)."""

    work: Workspace
    values: Array

    @property
    def states(self) -> int:
        """Number of states."""
        return int(self.values.shape[-1])

    def at(self, samples: slice, t: int) -> Diagonal:
        """Return a view of one step."""
        return Diagonal(self.work, _at(self.values, samples, t))

    def masked(self, mask: Array) -> Diagonal:
        """Return ones at masked steps."""
        return Diagonal(self.work, _where(self.work, mask, self.values, 1.0))

    def pull(self, rows: Array, out: Array) -> None:
        """Multiply rows with the diagonal."""
        self.work.multiply(rows, self.values[:, None, :], out)

    push = pull

    def after(self, earlier: Diagonal) -> Diagonal:
        """Multiply both diagonals."""
        return Diagonal(self.work, self.values * earlier.values)

    def multiplications(self) -> int:
        """Return one multiplication per state."""
        return self.states

    def numbers(self) -> int:
        """Return one number per state."""
        return self.states

    def moduli(self) -> Array | None:
        """Return the magnitudes of the diagonal."""
        return self.work.xp.abs(self.values)

    def pattern(self, columns: slice) -> Pattern:
        """Return a single colour: no unit reaches another."""
        return _one_colour(columns)


@dataclass
class ComplexDiagonal:
    """diag(real + i imaginary) of complex states that lie in a row as [real parts | imaginary parts].

    As a real matrix [[diag(real), -diag(imaginary)], [diag(imaginary), diag(real)]]; both (sample, time, unit).
    """

    work: Workspace
    real: Array
    imaginary: Array

    @property
    def states(self) -> int:
        """Number of real and imaginary parts."""
        return 2 * int(self.real.shape[-1])

    def at(self, samples: slice, t: int) -> ComplexDiagonal:
        """Return a view of one step."""
        return ComplexDiagonal(self.work, _at(self.real, samples, t), _at(self.imaginary, samples, t))

    def masked(self, mask: Array) -> ComplexDiagonal:
        """Return the number one at masked steps."""
        real, imaginary = _where(self.work, mask, self.real, 1.0), _where(self.work, mask, self.imaginary, 0.0)
        return ComplexDiagonal(self.work, real, imaginary)

    def pull(self, rows: Array, out: Array) -> None:
        """Multiply rows with the conjugate: the transpose of a rotation is its inverse."""
        self._turn(rows, out, -self.imaginary)

    def push(self, rows: Array, out: Array) -> None:
        """Multiply rows with the complex number."""
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
        """Multiply both complex diagonals."""
        real = self.real * earlier.real - self.imaginary * earlier.imaginary
        return ComplexDiagonal(self.work, real, self.real * earlier.imaginary + self.imaginary * earlier.real)

    def multiplications(self) -> int:
        """Return four multiplications per complex state."""
        return 2 * self.states

    def numbers(self) -> int:
        """Return two numbers per complex state."""
        return self.states

    def moduli(self) -> Array | None:
        """Return the modulus of each complex number, once for each of its two parts."""
        modulus = self.work.xp.sqrt(self.real**2 + self.imaginary**2)
        return self.work.xp.concat([modulus, modulus], axis=-1)

    def pattern(self, columns: slice) -> Pattern:
        """Return the pattern in which a part of a unit reaches only the two parts of the same unit."""
        units, column = self.states // 2, np.arange(columns.start, columns.stop)
        imaginary = column >= units
        colour = imaginary.astype(int) if imaginary.any() and not imaginary.all() else 0 * column
        return Pattern(colour, np.stack([column % units, column % units + units], axis=1))


@dataclass
class PerHead:
    """One number for all states of a head, which lie side by side; values : (sample, time, head)."""

    work: Workspace
    values: Array
    size: int

    @property
    def states(self) -> int:
        """Number of states of all heads."""
        return int(self.values.shape[-1]) * self.size

    def at(self, samples: slice, t: int) -> PerHead:
        """Return a view of one step."""
        return PerHead(self.work, _at(self.values, samples, t), self.size)

    def masked(self, mask: Array) -> PerHead:
        """Return ones at masked steps."""
        return PerHead(self.work, _where(self.work, mask, self.values, 1.0), self.size)

    def pull(self, rows: Array, out: Array) -> None:
        """Multiply all states of a head with its number."""
        xp, shape = self.work.xp, (*rows.shape[:2], self.values.shape[-1], self.size)
        # Of one axis in two: views, however the rows lie in memory.
        self.work.multiply(xp.reshape(rows, shape), self.values[:, None, :, None], xp.reshape(out, shape))

    push = pull

    def after(self, earlier: PerHead) -> PerHead:
        """Multiply the numbers of both steps."""
        return PerHead(self.work, self.values * earlier.values, self.size)

    def multiplications(self) -> int:
        """Return one multiplication per state."""
        return self.states

    def numbers(self) -> int:
        """Return one number per head."""
        return int(self.values.shape[-1])

    def moduli(self) -> Array | None:
        """Return for each state the magnitude of its head's number."""
        xp, wide = self.work.xp, (*self.values.shape, self.size)
        spread = xp.broadcast_to(xp.abs(self.values)[..., None], wide)
        return xp.reshape(spread, (*self.values.shape[:-1], self.states))

    def pattern(self, columns: slice) -> Pattern:
        """Return a single colour: no unit reaches another."""
        return _one_colour(columns)


@dataclass
class MinusLowRank:
    """diag(decay) - sum_r left_r right_r^T for the keys of each head, the same for each of its values.

    The state of a head is a matrix (key, value); heads, keys and values lie in a row in this order, values innermost.
    A step of a delta rule has rank one; steps in a row have as many as they are, until that fills the head.

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
        decay, left, right = (_at(part, samples, t) for part in (self.decay, self.left, self.right))
        return MinusLowRank(self.work, decay, left, right, self.size)

    def masked(self, mask: Array) -> MinusLowRank:
        """Return the identity at masked steps: decay one, nothing subtracted."""
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
        """Return one multiplication per state for the decay, and two per state and rank."""
        return self.states * (1 + 2 * int(self.left.shape[-1]))

    def numbers(self) -> int:
        """Return one number per key for the decay, and two per key and rank."""
        return self.states // self.size * (1 + 2 * int(self.left.shape[-1]))

    def moduli(self) -> Array | None:
        """Return None: each step has eigenvectors of its own."""
        return None

    def pattern(self, columns: slice) -> Pattern | None:
        """Return one colour per key: a unit reaches only the keys of its own head and value."""
        head = int(self.decay.shape[-1]) * self.size
        if columns.start % head or columns.stop % head:
            return None
        keys, column = int(self.decay.shape[-1]), np.arange(columns.start, columns.stop)
        first = column // (keys * self.size) * keys * self.size + column % self.size
        return Pattern(column // self.size % keys, first[:, None] + np.arange(keys) * self.size)


def _one_colour(columns: slice) -> Pattern:
    column = np.arange(columns.start, columns.stop)
    return Pattern(0 * column, column[:, None])
