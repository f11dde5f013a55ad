"""Sequence cells whose state is a matrix written by vectors, in the form of :mod:`.matrix_chunk`.

The two last axes of such a state are called key, the contracted one, and value; all axes before them are heads. Decay,
read, left and right do not depend on the value axis, and each factor of the write lacks one of the two axes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import mul
from typing import Any

from ..typing import Array
from .arrays import namespace
from .matrix_chunk import Coefficients, MatrixChunk


def has_matrix_form(cell: Any) -> bool:
    """Return whether a cell can be run in matrix products: see the module; real numbers, decays that are positive."""
    if cell.read is None or len(cell.axes) < 2 or cell.axis < -2:
        return False
    value, xp = _value_axis(cell), namespace(cell.write[0])
    parts = cell.parts.values()
    if not all(str(part.dtype).rpartition(".")[2] in ("float32", "float64") for part in parts):
        return False
    vectors = [*cell.decay, *(part for part in (cell.read, cell.left, cell.right) if part is not None)]
    is_separable = all(part.shape[value] == 1 for part in vectors) and all(
        1 in (factor.shape[value], factor.shape[cell.axis]) for factor in cell.write
    )
    if cell.right is not None and cell.left is None and cell.write[0].shape[value] != 1:
        return False
    return is_separable and (cell.logarithmic or bool(xp.all(cell.decays() > 0)))


def _value_axis(cell: Any) -> int:
    return -3 - int(cell.axis)


class MatrixForm:
    """Coefficients of consecutive steps of a cell as rows of matrices, and their gradients as those of its factors."""

    def __init__(self, cell: Any) -> None:
        self.cell, self.value_axis, self.xp = cell, _value_axis(cell), namespace(cell.write[0])
        self.is_value = [factor.shape[self.value_axis] > 1 for factor in cell.write]
        if all(self.is_value) or not any(self.is_value):  # one axis of size 1: the last factor has the values
            self.is_value = [i == len(cell.write) - 1 for i in range(len(cell.write))]
        if cell.right is not None and cell.left is None:
            self.is_value[0] = False

    def chunk(self, start: Callable[[], Array]) -> MatrixChunk:
        """Return the matrices of the steps; ``start`` returns the cell's state (sample, *axes) before them."""
        cell, key, value = self.cell, self.cell.axis, self.value_axis
        logs = reduce(mul, cell.decay)
        logs = logs if cell.logarithmic else self.xp.log(logs)
        write = self._rows(self._product(is_value=False), key)
        is_tied = cell.right is not None and cell.left is None and self.is_value.count(False) == 1
        left = write if is_tied else cell.left
        if cell.right is not None and left is None:
            left = cell.write[0]
        coefficients = Coefficients(
            self._rows(logs, key),
            write,
            self._rows(self._product(is_value=True), value),
            self._rows(cell.read, key),
            left if left is write or left is None else self._rows(left, key),
            None if cell.right is None else self._rows(cell.right, key),
        )
        return MatrixChunk(coefficients, lambda: self.matrix(start()))

    def _product(self, *, is_value: bool) -> Any:
        factors = [
            factor for factor, of_value in zip(self.cell.write, self.is_value, strict=True) if of_value == is_value
        ]
        return reduce(mul, factors) if factors else self.xp.ones_like(self.cell.write[0][:1, :1])

    def _rows(self, part: Any, axis: int) -> Array:
        """Return a part as (sample, *heads, step, key or value), views where its size is 1."""
        other = -3 - axis
        part = part[..., 0] if other == -1 else part[..., 0, :]
        heads, (samples, steps) = part.shape[2:-1], self.cell.shape[:2]
        sizes = (
            samples,
            steps,
            *(max(a, b) for a, b in zip(heads, self.cell.shape[2:-2], strict=True)),
            part.shape[-1],
        )
        return self.xp.moveaxis(self.xp.broadcast_to(part, sizes), 1, -2)

    def _part(self, rows: Array, axis: int) -> Array:
        """Return rows as (sample, step, *heads, key, value), with size 1 along the axis that they lack."""
        return self.xp.expand_dims(self.xp.moveaxis(rows, -2, 1), axis=-3 - axis)

    def matrix(self, state: Array) -> Array:
        """Return a state (sample, *axes) as (sample, *heads, key, value), or the reverse: the same permutation."""
        return state if self.cell.axis == -2 else self.xp.matrix_transpose(state)

    def outputs(self, rows: Array) -> Array:
        """Return outputs (sample, *heads, step, value) as (sample, step, *heads, value)."""
        return self.xp.moveaxis(rows, -2, 1)

    def output_rows(self, outputs: Array) -> Array:
        """Return outputs (sample, step, *heads, value) as (sample, *heads, step, value)."""
        return self.xp.moveaxis(outputs, 1, -2)

    def part_grads(self, grads: Coefficients, sum_to_part: Callable[[Array, Array], Array]) -> dict[str, Array]:
        """Return the gradients of all parts of the cell but ``initial``, by name."""
        cell, key, value = self.cell, self.cell.axis, self.value_axis
        decay = self._part(grads.g, key)
        decay = decay if cell.logarithmic else decay / cell.decays()
        write, values = self._part(grads.write, key), self._part(grads.value, value)
        parts = {f"decay_{i}": (decay, _others(cell.decay, i)) for i in range(len(cell.decay))}
        for i, of_value in enumerate(self.is_value):
            group = [j for j, other in enumerate(self.is_value) if other == of_value]
            others = _others([cell.write[j] for j in group], group.index(i))
            parts[f"write_{i}"] = (values if of_value else write, others)
        parts["read"] = (self._part(grads.read, key), [])
        if grads.right is not None:
            parts["right"] = (self._part(grads.right, key), [])
        named = {
            name: sum_to_part(reduce(mul, others, grad), cell.parts[name]) for name, (grad, others) in parts.items()
        }
        if grads.left is not None:
            left, name = self._part(grads.left, key), "write_0" if cell.left is None else "left"
            total = sum_to_part(left, cell.parts[name])
            named[name] = named[name] + total if name in named else total
        return named


def _others(factors: Any, index: int) -> list[Array]:
    return [factor for i, factor in enumerate(factors) if i != index]
