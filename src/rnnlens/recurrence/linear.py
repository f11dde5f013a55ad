"""A recurrence as a linear time-varying system around its trajectory: delta s_t = A_t delta s_{t-1} + B_t delta x_t.

A sweep calls a :class:`LinearStep` for the products with A_t and B_t. Only the step depends on the structure of A_t,
and only a dense step stores A_t as a matrix:

======================== ============================================== ================ =====================
made by                  A_t                                            numbers per step recurrences
======================== ============================================== ================ =====================
:class:`ProductSteps`    dense, or gated: two dense blocks and diagonals S^2              RNN, GRU; LSTM
``structured.diagonal``  diag(a)                                        S                minGRU, minLSTM, IndRNN
``ComplexDiagonal``      diag(a), a complex                             2 S              LRU
======================== ============================================== ================ =====================

A dense or gated step has one *product* matrix [A | B] per sample, built once and shared by all cotangents or tangents.

gated (LSTM)
    Only two unit x unit blocks of A_t are dense, the rest is diagonal. :meth:`GatedStep.to_total_gradients` computes
    the total gradient of c_t, ``dc = lambda_c + lift * dh``. Then ``[dc | dh] @ product = [dh_{t-1} | dx]`` and
    ``dc_{t-1} = keep * dc``.
    Rows of ``product`` are the units of c, then those of h. ``keep`` is the forget gate, ``lift`` is o * act'(c).
dense (all others)
    ``lambda @ product = [lambda_{t-1} | dx]``; the product contains all diagonals.

A masked step carries the state over and has no input; its matrices are [identity | 0], so that a sweep needs no
branches. Columns of ``product``: the state before, then the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from ..typing import Array
from .arrays import Workspace, raise_if_cancelled


class LinearStep(Protocol):
    """Interface of one linear step of some samples: ds_t = A ds_{t-1} + B dx_t.

    ``rows`` are (sample, row, state), with the columns of each state given by :func:`state_columns`. A row is a
    cotangent in a reverse sweep and a tangent in a forward sweep. ``out`` is written to, and must not overlap the
    arguments. Masked steps have A = I and B = 0.
    """

    def to_total_gradients(self, rows: Array, fresh: int) -> None:
        """Convert cotangents of the states after the step to total gradients, in place.

        In an LSTM, c_t also changes h_t of the same step, so that the total gradient of c_t includes a path through
        h_t. Only the first ``fresh`` rows received new cotangents at this step. By default nothing is to do.
        """
        return

    def pull(self, rows: Array, out: Array, *, inputs: bool) -> None:
        """Pull cotangent rows back: write rows @ A and, with ``inputs``, rows @ B to out.

        The rows are results of :meth:`to_total_gradients`. out : (sample, row, state [+ feature]).
        """

    def push(self, rows: Array, out: Array) -> None:
        """Push tangents of the states before the step forward: write rows @ A^T to out (sample, row, state)."""

    def inject(self, block: Array | None, out: Array) -> None:
        """Map tangents of the input to tangents of the new states: write block @ B^T to out (sample, row, state).

        block : (sample or 1, row, feature) tangents of the input, or None for its unit vectors
        """

    def add_state_effects(self, rows: Array, state: int, columns: slice) -> None:
        """Add to tangent rows how one new state, with tangents at ``columns``, changes other results of the step."""
        return

    def state_gradients(self, rows: Array, state: int, columns: slice) -> Array:
        """Return the total gradients (sample, row, size) of one new state, after :meth:`to_total_gradients`."""
        return rows[:, :, columns]

    def input_matrix(self) -> Array:
        """Return B = ds_t/dx_t as a dense matrix (sample, state, feature)."""


class LinearSteps(Protocol):
    """Sequence of consecutive steps in chronological order."""

    def __getitem__(self, position: int, /) -> LinearStep:
        """Return the linearised step at a position, counted from 0."""


@dataclass(frozen=True)
class Pattern:
    """Colouring of a state's units: cotangents of units of one colour never reach the same columns, at any step.

    Therefore a sweep can pull back the sum of the units of one colour as a single row.
    Curtis, Powell, Reid 1974, "On the estimation of sparse Jacobian matrices", doi:10.1093/imamat/13.1.117.

    Attributes
    ----------
    colour : (unit,)
        Colour of each unit of the state, counted from 0.
    reach : (unit, column)
        Columns of a row that the cotangent of a unit can reach, ascending. The sets of columns of two units are equal
        or disjoint, and each set is reached by the same number of units.
    """

    colour: np.ndarray[Any, Any]
    reach: np.ndarray[Any, Any]

    @property
    def count(self) -> int:
        """Number of colours of the units."""
        return int(self.colour.max()) + 1

    @property
    def entries(self) -> int:
        """Number of pairs of a unit and a column that the unit's cotangent can reach."""
        return int(self.reach.size)

    def merged_units(self) -> Pattern:
        """Return a coarser colouring: one unit for each distinct set of reached columns, all of one colour."""
        _, first_units = np.unique(self.reach[:, 0], return_index=True)
        return Pattern(np.zeros(first_units.size, dtype=int), self.reach[first_units])


class System(Protocol):
    """Interface of one recurrent call, linearised around its trajectory on demand.

    Attributes
    ----------
    state_sizes
        Size of each state.
    rows
        Total size of the states: the length of a row.
    columns
        Columns of a step's matrix product without the input: all states of a dense system, h of a gated one. The other
        columns are computed element by element.
    scratch
        Numbers of temporary memory per row, besides the rows and the result.
    """

    work: Workspace
    batch: int
    time: int
    features: int
    order: Literal["forward", "backward"]
    state_sizes: tuple[int, ...]
    rows: int
    columns: int

    @property
    def layout(self) -> tuple[int, ...]:
        """State indices in the order of their columns in a row: by default their own order."""
        return tuple(range(len(self.state_sizes)))

    @property
    def scratch(self) -> int:
        """Temporary memory of a sweep, in numbers per row, besides the rows and the result."""
        return 1

    def build(self, first_step: int, stop: int, samples: slice, *, inputs: bool) -> LinearSteps:
        """Return A_t = ds_t/ds_{t-1} and B_t = ds_t/dx_t at chronological steps ``first_step ... stop - 1``.

        Both are those of some samples; B_t is left out unless ``inputs``.
        """

    def multiplications(self, inputs: bool) -> int:
        """Return the number of multiplications per cotangent row, step and sample: by A and, with ``inputs``, by B."""

    def numbers(self, inputs: bool) -> int:
        """Return how many numbers the linearisation stores per step and sample."""

    def pattern(self, state: int) -> Pattern | None:
        """Return the colouring of a state's units whose cotangents never meet in a reverse sweep; by default None."""
        return None

    def moduli(self) -> Array | None:
        """Return |eigenvalue| of A_t (sample, time, state) if all A_t have the same eigenvectors; by default None."""
        return None


def state_columns(system: System, state: int) -> slice:
    """Return a state's columns in a row of a sweep: [c | h] in gated systems, otherwise the states in their order."""
    start = 0
    for other in system.layout:
        if other == state:
            break
        start += system.state_sizes[other]
    return slice(start, start + system.state_sizes[state])


def walk(
    system: System, samples: slice, *, reverse: bool, inputs: bool, budget: int, steps: Sequence[int] | None = None
) -> Iterator[tuple[int, LinearStep]]:
    """Yield (time index, linear step) in the order of the recurrence, or with ``reverse`` in the opposite order.

    Steps are built in blocks that fit into ``budget`` bytes. ``steps`` restricts the iteration to consecutive steps,
    given in either order; None for all steps.
    """
    count = len(range(*samples.indices(system.batch)))
    per_step = max(1, count * system.numbers(inputs) * system.work.itemsize)
    length = max(1, min(system.time, budget // per_step))
    chronological = (system.order == "forward") != reverse
    first_step, last_stop = (0, system.time) if steps is None else (min(steps), max(steps) + 1)
    starts = range(first_step, last_stop, length)
    for start in starts if chronological else reversed(starts):
        stop = min(start + length, last_stop)
        block = system.build(start, stop, samples, inputs=inputs)
        block_steps = range(start, stop) if chronological else range(stop - 1, start - 1, -1)
        for t in block_steps:
            raise_if_cancelled()
            yield t, block[t - start]


@dataclass
class ProductSteps:
    """Consecutive steps in chronological order, each a :class:`DenseStep` or a :class:`GatedStep`.

    product : (sample, step, row, column); keep, lift : (sample, step, unit) of a gated system, else None.
    produced_jacobian : function without arguments that returns Jacobians (sample, step, row, column) of the states
        after a step by the states as they are produced; None unless one state of a step is computed from another.
    """

    work: Workspace
    product: Array
    keep: Array | None = None
    lift: Array | None = None
    produced_jacobian: Callable[[], Array] | None = None

    def __getitem__(self, position: int) -> DenseStep | GatedStep:
        product = self.product[:, position]
        if self.keep is not None and self.lift is not None:
            return GatedStep(self.work, product, self.keep[:, position][:, None, :], self.lift[:, position][:, None, :])
        produced_jacobian = self.produced_jacobian
        return DenseStep(
            self.work, product, None if produced_jacobian is None else lambda: produced_jacobian()[:, position]
        )


@dataclass
class DenseStep(LinearStep):
    """One dense step: ``product`` (sample, state, state before + feature) is [A | B]."""

    work: Workspace
    product: Array
    produced_jacobian: Callable[[], Array] | None = None

    def pull(self, rows: Array, out: Array, *, inputs: bool) -> None:
        """Pull cotangent rows back through a step by one matrix product: rows @ [A | B] = [states before | dx]."""
        if inputs:
            self.work.matmul(rows, self.product, out)
        else:
            self.work.matmul(rows, self.product[:, :, : self.product.shape[1]], out)

    def push(self, rows: Array, out: Array) -> None:
        """Push tangent rows forward through a step: [states before] @ A^T = [states after]."""
        self.work.matmul(rows, transpose(self.product[:, :, : self.product.shape[1]]), out)

    def inject(self, block: Array | None, out: Array) -> None:
        """Map input tangents to state tangents: write block @ B^T to ``out``, or B^T if the block is None."""
        input_transposed = transpose(self.input_matrix())
        out[...] = input_transposed if block is None else self.work.xp.matmul(block, input_transposed)

    def add_state_effects(self, rows: Array, state: int, columns: slice) -> None:
        """Add the effect of one new state's tangents on the other states of the same step, such as of c_t on h_t."""
        if self.produced_jacobian is not None:
            rows[...] = transpose(self.produced_jacobian()[:, :, columns])

    def state_gradients(self, rows: Array, state: int, columns: slice) -> Array:
        """Return the total gradients of one new state; for c_t they include the path through h_t."""
        if self.produced_jacobian is not None:
            return self.work.xp.matmul(rows, self.produced_jacobian()[:, :, columns])
        return rows[:, :, columns]

    def input_matrix(self) -> Array:
        """Return B = ds_t/dx_t as a matrix (sample, state, feature)."""
        return self.product[:, :, self.product.shape[1] :]


@dataclass
class GatedStep(LinearStep):
    """One step of an LSTM. keep, lift : (sample, 1, unit); ``product`` (sample, [c | h], h before + feature)."""

    work: Workspace
    product: Array
    keep: Array
    lift: Array

    def to_total_gradients(self, rows: Array, fresh: int) -> None:
        """Add lift * dh to dc, in place, so that dc is the total gradient of c_t."""
        units = self.keep.shape[2]
        self.work.add_product(rows[:, :, :units], rows[:, :, units:], self.lift)

    def pull(self, rows: Array, out: Array, *, inputs: bool) -> None:
        """Pull cotangents [dc | dh] back: the path through h by one matrix product, c_{t-1} element by element."""
        units = self.keep.shape[2]
        if inputs:
            self.work.matmul(rows, self.product, out[:, :, units:])
        else:
            self.work.matmul(rows, self.product[:, :, :units], out[:, :, units:])
        self.work.multiply(rows[:, :, :units], self.keep, out[:, :, :units])

    def push(self, rows: Array, out: Array) -> None:
        """Push tangents [c | h] forward: h by one matrix product, c element by element."""
        units = self.keep.shape[2]
        self.work.matmul(rows[:, :, units:], transpose(self.product[:, :, :units]), out)
        self.work.add_product(out[:, :, :units], rows[:, :, :units], self.keep)
        self.work.add_product(out[:, :, units:], out[:, :, :units], self.lift)

    def inject(self, block: Array | None, out: Array) -> None:
        """Write the tangents of [c | h] for a block of input tangents, or for unit vectors if the block is None."""
        units = self.keep.shape[2]
        input_transposed = transpose(self.product[:, :, units:])
        out[...] = input_transposed if block is None else self.work.xp.matmul(block, input_transposed)
        self.work.add_product(out[:, :, units:], out[:, :, :units], self.lift)

    def add_state_effects(self, rows: Array, state: int, columns: slice) -> None:
        """Add the effect of tangents of c_t on h_t, in place."""
        units = self.keep.shape[2]
        if state == 1:
            rows[:, :, units:] = rows[:, :, :units] * self.lift

    def input_matrix(self) -> Array:
        """Return B = ds_t/dx_t of an LSTM's states as a matrix (sample, [c | h], feature)."""
        units = self.keep.shape[2]
        lifted = self.product[:, :, units:] * 1
        self.work.add_product(lifted[:, units:], lifted[:, :units], self.work.xp.permute_dims(self.lift, (0, 2, 1)))
        return lifted


class ProductSystem(System):
    """Base class of systems with product matrices: sizes and costs.

    Attributes
    ----------
    rows, columns
        Shape of a product matrix without its input columns.
    gated
        Whether steps are :class:`GatedStep` rather than :class:`DenseStep`.
    """

    gated = False

    @property
    def layout(self) -> tuple[int, ...]:
        """State indices in the order of their columns in a row: [c | h] in a gated system, [states] in a dense one."""
        return (1, 0) if self.gated else super().layout

    @property
    def scratch(self) -> int:
        """Temporary memory that :meth:`GatedStep.to_total_gradients` needs, in numbers per row."""
        return self.columns if self.gated else 0

    def multiplications(self, inputs: bool) -> int:
        """Return the multiplications per row: the entries of the product matrix [A | B], without element-wise ones."""
        return self.rows * (self.columns + (self.features if inputs else 0))

    def numbers(self, inputs: bool) -> int:
        """Return the number of entries of the product matrix [A | B] of one step of one sample."""
        return self.multiplications(inputs)


def transpose(matrices: Any) -> Array:
    """Transpose (..., n, m) to (..., m, n), as a view."""
    return matrices.mT if hasattr(matrices, "mT") else matrices.swapaxes(-1, -2)
