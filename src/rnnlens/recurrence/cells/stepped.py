"""A cell of unknown equations, whose steps the framework runs and differentiates.

Each adapter implements a subclass. Batches have sample and time folded into one axis ``n``: steps are independent once
the states are known, so that all of them are differentiated in one vectorised call.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
from array_api_compat import device

from ...typing import Array, Namespace
from ...vocabulary import unnamed_states
from ..arrays import on_cpu
from ..linear import ProductSteps, System
from ..trajectory import States, Trajectory
from .affine import TrajectorySystem
from .cell import Cell


class StepCell(Cell):
    """Base class of cells of unknown equations; states are flat tuples of (n, size) arrays, also of nested ones."""

    by_framework = True
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

    def build(self, first_step: int, stop: int, samples: slice, *, inputs: bool) -> ProductSteps:
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
