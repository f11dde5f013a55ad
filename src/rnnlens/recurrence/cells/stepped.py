"""A cell of unknown equations, whose steps the framework runs and differentiates.

Each adapter implements a subclass. Batches have sample and time folded into one axis ``n``: steps are independent once
the states are known, so that all of them are differentiated in one vectorised call.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
from array_api_compat import device

from ...typing import Array, Namespace
from ...vocabulary import unnamed_states
from ..arrays import on_cpu
from ..linear import DenseStep, LinearStep, ProductSteps, System
from ..trajectory import States, Trajectory
from .affine import TrajectorySystem
from .cell import Cell


class StepCell(Cell):
    """Base class of cells of unknown equations; states are flat tuples of (n, size) arrays, also of nested ones."""

    by_framework = True
    #: Whether the framework compiles a pull-back anew for every number of rows.
    compiles_pull_backs = True
    _sizes: tuple[int, ...] = ()
    #: Names of the states in the user's code; empty if they have none there.
    names: tuple[str, ...] = ()
    output_size: int

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Size of each state."""
        return self._sizes

    @state_sizes.setter
    def state_sizes(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of "input" and each state, without the samples, where these are flattened; by default empty."""
        return {}

    @property
    def state_axes(self) -> tuple[str, ...]:
        """Names of the axes in ``shapes``; empty for (channel, *space)."""
        return ()

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states: those that they have in the user's code, else hidden, state_1, state_2, ..."""
        return self.names or unnamed_states(len(self.state_sizes))

    @abstractmethod
    def advance(self, x: Array, state: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
        """Compute the output (n, output_size) and the new states from x (n, feature) and states (n, size)."""

    @abstractmethod
    def vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: States
    ) -> tuple[Array, tuple[Array, ...]]:
        """Pull dL/dy_t and dL/ds_t back to dL/dx_t (n, feature) and dL/ds_{t-1}, row by row."""

    @abstractmethod
    def weight_vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: States
    ) -> Mapping[str, Array]:
        """Pull dL/dy_t and dL/ds_t back to the weights, summed over ``n``."""

    @abstractmethod
    def produced(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: States
    ) -> tuple[Array, ...]:
        """Return the total gradient of each new state, given dL/dy_t and dL/ds_t.

        The result includes paths through other results of the same step: the output, or a state computed from
        another, such as h_t from c_t. A state that is passed on unchanged receives only its own cotangents.
        """

    @abstractmethod
    def jacobian(self, x: Array, state: Sequence[Array]) -> tuple[Array, Array]:
        """Return Jacobians of [new states, output] per step, with concatenated states of size S = sum(state_sizes).

        The first is ``(n, S + output_size, S)`` with respect to the states, the second ``(n, S + output_size,
        feature)`` with respect to the input.
        """

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise the cell around a trajectory, with step Jacobians computed by the framework."""
        return StepCellSystem(self, run, masked_output)

    def pull_rows(self, run: Trajectory, t: int, rows: Sequence[Array]) -> list[Array]:
        """Pull rows of cotangents back through step t, one row after the other."""
        xp = run.xp
        x, state = run.input[:, t, :], run.state_before(t)
        zero_output_grad = xp.zeros((x.shape[0], self.output_size), dtype=x.dtype, device=device(x))
        row_grads = []
        for k in range(rows[0].shape[1]):
            row_cotangents = [xp.asarray(np.ascontiguousarray(r[:, k]), dtype=x.dtype, device=device(x)) for r in rows]
            row_grads.append(self.vjp(x, state, zero_output_grad, row_cotangents)[1])
        return [np.stack([on_cpu(f[i]) for f in row_grads], axis=1) for i in range(len(rows))]

    def map_at(self, x: Array, xp: Namespace) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
        """Return one step with constant x (feature,), and its Jacobian, in the framework's precision."""
        boundaries, total = np.cumsum(self.state_sizes)[:-1], sum(self.state_sizes)
        input_row, input_device = on_cpu(x), device(x)

        def step_arguments(s: Array) -> tuple[Array, list[Array]]:
            states = [
                xp.asarray(np.ascontiguousarray(p, dtype=input_row.dtype), device=input_device)
                for p in np.split(s, boundaries, 1)
            ]
            return xp.asarray(np.repeat(input_row[None], len(s), axis=0), device=input_device), states

        def step(s: Array) -> Array:
            _, states_after = self.advance(*step_arguments(s))
            return np.concatenate([on_cpu(a).astype(np.float64) for a in states_after], axis=1)

        def jacobian(s: Array) -> Array:
            by_state, _ = self.jacobian(*step_arguments(s))
            return on_cpu(by_state).astype(np.float64)[:, :total]

        return step, jacobian


#: Multiplications for the matrices of one step from which on a few rows are pulled back without them: they take some
#: milliseconds, as long as a few pull-backs by the framework.
WORTH_PULLING = 2**25
#: Units of the state per row below which rows are few.
UNITS_PER_ROW = 8


class StepCellSystem(TrajectorySystem):
    """Linear system of a cell of unknown equations, with step Jacobians computed by the framework.

    An output that is not a state is added as one more state, on which nothing depends, so that masked steps can repeat
    it. Sample and time are folded into one batch for the framework.
    """

    def __init__(self, cell: StepCell, run: Trajectory, masked_output: str) -> None:
        super().__init__(run)
        self.cell, self.masked_output = cell, masked_output
        self.has_own_output = run.step_output is not None and not cell.output_is_state
        if self.has_own_output:
            self.state_sizes = (*self.state_sizes, int(self.cell.output_size))
            self.rows = self.columns = sum(self.state_sizes)

    def build(self, first_step: int, stop: int, samples: slice, *, inputs: bool) -> StepCellSteps:
        """Return the steps ``first_step ... stop - 1``, which become dense matrices once these are needed."""
        return StepCellSteps(self, first_step, stop, samples, inputs)

    def build_dense(self, first_step: int, stop: int, samples: slice, *, inputs: bool) -> ProductSteps:
        """Linearise the steps ``first_step ... stop - 1`` as dense matrices."""
        run, xp, index = self.run, self.run.xp, (samples, slice(first_step, stop))
        states = sum(int(s.shape[-1]) for s in run.states)
        x = run.input[index]
        folded_states = [xp.reshape(s[index], (-1, s.shape[-1])) for s in run.states_before()]
        # The count is given: without an input x has no features, and -1 would be ambiguous.
        by_state, by_input = self.cell.jacobian(xp.reshape(x, (math.prod(x.shape[:2]), x.shape[-1])), folded_states)
        product = self.empty(first_step, stop, samples, inputs)
        leading_shape = product.shape[:2]
        product[:, :, :, states : self.columns] = 0
        product[:, :, :, :states] = xp.reshape(by_state[:, : self.rows], (*leading_shape, self.rows, states))
        if inputs:
            product[:, :, :, self.columns :] = xp.reshape(
                by_input[:, : self.rows], (*leading_shape, self.rows, self.features)
            )
        self.mask_product(product, index)
        if self.has_own_output and run.mask is not None and self.masked_output != "output":
            self._write_masked_rows(product, states, ~run.mask[index])
        return ProductSteps(
            self.work, product, produced_jacobian=cache(lambda: self._produced_jacobian(first_step, stop, samples))
        )

    def _produced_jacobian(self, first_step: int, stop: int, samples: slice) -> Array:
        """Return Jacobians of [new states, output] by each new state at the operation that computes it.

        Each row of the Jacobians is computed by one pull-back of a unit cotangent.
        """
        run, xp, index = self.run, self.run.xp, (samples, slice(first_step, stop))
        x = run.input[index]
        leading_shape = x.shape[:2]
        states_before = [xp.reshape(s[index], (-1, s.shape[-1])) for s in run.states_before()]
        x, cell = xp.reshape(x, (math.prod(leading_shape), x.shape[-1])), self.cell
        sizes = (*(int(s.shape[-1]) for s in run.states), int(cell.output_size))
        rows = []
        for row in self.work.eye(sum(sizes))[: self.rows]:
            cotangents, start = [], 0
            for size in sizes:
                cotangents.append(xp.broadcast_to(row[start : start + size], (x.shape[0], size)))
                start += size
            state_grads = cell.produced(x, states_before, cotangents[-1], cotangents[:-1])
            rows.append(xp.concat([xp.reshape(f, (*leading_shape, f.shape[-1])) for f in state_grads], axis=-1))
        produced = xp.stack(rows, axis=2)
        return produced if run.mask is None else self._replace_masked(produced, run.mask[index])

    def _replace_masked(self, produced: Array, mask: Array) -> Array:
        """Replace Jacobians at masked steps: states are carried over there, and the output may repeat a state."""
        xp, states = self.run.xp, int(produced.shape[-1])
        carried = xp.zeros_like(produced)
        carried[:, :, :states] = self.work.eye(states)
        if self.has_own_output and self.masked_output == "state":
            start = sum(self.state_sizes[: self.cell.output_state])
            size = self.state_sizes[-1]
            carried[:, :, states:, start : start + size] = self.work.eye(size)
        return xp.where(mask[:, :, None, None], produced, carried)

    def _write_masked_rows(self, product: Array, states: int, masked: Array) -> None:
        """Write the output's Jacobian rows at masked steps, where the layer returns a carried state or a constant."""
        xp, rows = self.run.xp, product[:, :, states:, :]
        output_rows = xp.zeros_like(rows)
        if self.masked_output == "state":
            start = sum(self.state_sizes[: self.cell.output_state])
            size = self.state_sizes[-1]
            output_rows[:, :, :, start : start + size] = self.work.eye(size)
        product[:, :, states:, :] = xp.where(masked[:, :, None, None], output_rows, rows)


@dataclass
class StepCellSteps:
    """Consecutive steps of a cell of unknown equations in chronological order."""

    system: StepCellSystem
    first_step: int
    stop: int
    samples: slice
    inputs: bool

    def __getitem__(self, position: int) -> StepCellStep:
        return StepCellStep(self, position)

    @cached_property
    def dense(self) -> ProductSteps:
        """The steps as dense matrices, each of which takes one pull-back per unit of the state."""
        return self.system.build_dense(self.first_step, self.stop, self.samples, inputs=self.inputs)

    def are_few(self, samples: int, rows: int) -> bool:
        """Return whether the framework pulls so many rows of a sample back sooner than it computes the matrices."""
        system = self.system
        if "dense" in vars(self) or system.run.mask is not None or system.cell.compiles_pull_backs:
            return False
        is_large = samples * system.rows**2 * (system.columns + system.features) >= WORTH_PULLING
        return is_large and rows * UNITS_PER_ROW <= system.rows


@dataclass
class StepCellStep(LinearStep):
    """One step of a cell of unknown equations: a matrix, but a few rows of a large cell are pulled back without it."""

    steps: StepCellSteps
    position: int

    @property
    def dense(self) -> DenseStep:
        """The step as a dense matrix."""
        return self.steps.dense[self.position]  # type: ignore[return-value]

    def pull(self, rows: Array, out: Array, *, inputs: bool) -> None:
        """Pull cotangent rows back through a step: by its matrix, or all of them in one call of the framework."""
        system, (samples, count, _) = self.steps.system, map(int, rows.shape)
        if not self.steps.are_few(samples, count):
            self.dense.pull(rows, out, inputs=inputs)
            return
        xp, states = system.run.xp, sum(int(state.shape[-1]) for state in system.run.states)
        by_input, by_state = system.cell.vjp(*self._pull_arguments(rows))
        out[:, :, :states] = xp.reshape(xp.concat(by_state, axis=-1), (samples, count, states))
        out[:, :, states : system.rows] = 0
        if inputs:
            out[:, :, system.rows :] = xp.reshape(by_input, (samples, count, system.features))

    def _pull_arguments(self, rows: Array) -> tuple[Array, list[Array], Array, list[Array]]:
        """Return input, states before, cotangents of the output and of the states, with each row as a sample."""
        system, t = self.steps.system, self.steps.first_step + self.position
        run, xp, (samples, count, width) = system.run, system.run.xp, map(int, rows.shape)

        def for_each_row(array: Array) -> Array:
            size = array.shape[-1]
            of_samples = array[self.steps.samples][:, None, :]
            return xp.reshape(xp.broadcast_to(of_samples, (samples, count, size)), (samples * count, size))

        flat_rows = xp.reshape(rows, (samples * count, width))
        boundaries = [0, *np.cumsum([int(state.shape[-1]) for state in run.states])]
        state_cotangents = [flat_rows[:, a:b] for a, b in pairwise(boundaries)]
        output_cotangent = flat_rows[:, boundaries[-1] :]
        if not system.has_own_output:
            size = (samples * count, int(system.cell.output_size))
            output_cotangent = xp.zeros(size, dtype=rows.dtype, device=device(rows))
        states = [for_each_row(state) for state in run.state_before(t)]
        return for_each_row(run.input[:, t, :]), states, output_cotangent, state_cotangents

    def push(self, rows: Array, out: Array) -> None:
        """Push tangent rows forward through a step."""
        self.dense.push(rows, out)

    def inject(self, block: Array | None, out: Array) -> None:
        """Map input tangents to state tangents."""
        self.dense.inject(block, out)

    def add_state_effects(self, rows: Array, state: int, columns: slice) -> None:
        """Add the effect of one new state's tangents on the other states of the same step."""
        self.dense.add_state_effects(rows, state, columns)

    def state_gradients(self, rows: Array, state: int, columns: slice) -> Array:
        """Return the total gradients of one new state."""
        system, (samples, count, _) = self.steps.system, map(int, rows.shape)
        if state >= len(system.run.states) or not self.steps.are_few(samples, count):
            return self.dense.state_gradients(rows, state, columns)
        total = system.cell.produced(*self._pull_arguments(rows))[state]
        return system.run.xp.reshape(total, (samples, count, columns.stop - columns.start))

    def input_matrix(self) -> Array:
        """Return B = ds_t/dx_t as a matrix (sample, state, feature)."""
        return self.dense.input_matrix()
