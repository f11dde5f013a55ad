"""A step of a loop of unknown equations, as a cell on rows that JAX runs and differentiates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from ...recurrence.cells import StepCell
from ...typing import Array
from .emit import Emission
from .jaxprs import is_inexact
from .layers import RecurrentLayer

#: Largest integer below which each integer is a float32.
_EXACT = 2**24


@dataclass(frozen=True)
class Column:
    """A variable of the body that is no float, as columns of the input: ``halves`` of 16 bits if large."""

    variable: Var
    width: int
    halves: bool


class ScanCell(StepCell):
    """One step of a loop on rows (n, size).

    The body was traced for a number of samples; rows are taken in groups of that many. What a step reads but floats of
    each sample, such as random keys, counters, flags and times, are further columns of the input, without a gradient.
    """

    def __init__(
        self, layer: RecurrentLayer, constants: Sequence[Any], columns: Sequence[Column], functions: dict[Any, Any]
    ) -> None:
        super().__init__()
        self.layer, self.constants, self.columns, self._functions = layer, list(constants), tuple(columns), functions
        self.state_sizes, self.names = layer.sizes, layer.state_names
        self.output_size = sum(map(layer.width, layer.output_variables))
        self.output_is_state = not layer.own_outputs

    @classmethod
    def of(cls, layer: RecurrentLayer, run: Any, floats: Array) -> tuple[ScanCell, Array]:
        """Return the cell of a recorded call, and its input (sample, time, column): ``floats``, then other columns."""
        path, loop = layer.loop.path, layer.loop
        constants = [run.record((path, f"constant{i}")) for i in range(loop.counts[0])]
        constants = [value[layer.index] if layer.index else value for value in constants]
        columns, arrays = [], [floats]
        for i, variable in enumerate(layer.other_inputs):
            column, array = _encoded(layer, variable, run.record((path, f"watch{i}")))
            columns.append(column)
            arrays.append(array.astype(floats.dtype))
        key = ("step", layer.name, tuple((c.width, c.halves) for c in columns))
        functions = run.program.memo(key).once("functions", dict)
        return cls(layer, constants, columns, functions), np.concatenate(arrays, axis=-1)

    def weights(self) -> dict[str, Array]:
        """Return no weights: those of a body have no names of a cell."""
        return {}

    @property
    def units(self) -> int:
        """Number of entries of the first state."""
        return self.state_sizes[0]

    def advance(self, x: Array, state: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
        """Compute the output and the new states of n rows."""
        new = self._call("advance", x, state)
        count = len(self.state_sizes)
        return new[0 if self.output_is_state else count], tuple(new[:count])

    def vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> tuple[Array, tuple[Array, ...]]:
        """Pull cotangents of the output and the new states back to the input and the states."""
        by_input, by_state = self._call("vjp", x, state, self._joined(output_cotangent, state_cotangent))
        return by_input, tuple(by_state)

    def weight_vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> Mapping[str, Array]:
        """Return no gradients: the weights are the model's, and JAX differentiates by them."""
        return {}

    def produced(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> tuple[Array, ...]:
        """Return the total gradient of each new state, with its paths to the others within the step."""
        return tuple(self._call("produced", x, state, self._joined(output_cotangent, state_cotangent)))

    def jacobian(self, x: Array, state: Sequence[Array]) -> tuple[Array, Array]:
        """Return the Jacobians of [new states, output] by the states and by the input, row by row of the cotangents."""
        by_state, by_input = self._call("jacobian", x, state)
        return by_state, by_input

    def _joined(self, output_cotangent: Array, state_cotangent: Sequence[Array]) -> list[Array]:
        if not self.output_is_state:
            return [*map(np.asarray, state_cotangent), np.asarray(output_cotangent)]
        first, *others = state_cotangent
        return [np.asarray(first) + np.asarray(output_cotangent), *map(np.asarray, others)]

    def _call(self, name: str, *arguments: Any) -> Any:
        """Run one of the compiled functions below; return NumPy arrays."""
        if name not in self._functions:
            self._functions[name] = jax.jit(getattr(_StepFunctions(self.layer, self.columns), name))
        arrays = jax.tree.map(jnp.asarray, [list(a) if isinstance(a, tuple) else a for a in arguments])
        return jax.tree.map(np.asarray, self._functions[name](self.constants, *arrays))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_functions": {}}


class _StepFunctions:
    """The step of a loop on rows, and its derivatives, as functions to compile."""

    def __init__(self, layer: RecurrentLayer, columns: Sequence[Column]) -> None:
        self.layer, self.columns = layer, columns
        self._opened = layer.opened()

    @cached_property
    def _batch(self) -> int:
        return self.layer.samples

    @cached_property
    def _is_shared(self) -> bool:
        """Whether something that changes from step to step is one for all samples."""
        layer, others = self.layer, (column.variable for column in self.columns)
        read = (*layer.inputs, *layer.state_variables, *others)
        return self._batch > 1 and any(v not in layer.roles.sample for v in read)

    def advance(self, constants: Sequence[Any], x: Any, state: Sequence[Any], zeros: Any = None) -> list[Any]:
        """Compute the new states of n rows, and the output if it is none; ``zeros`` are added to new states."""
        count, batch = x.shape[0], self._batch
        by_step = self._is_shared and count != batch and count % self.layer.steps == 0
        samples = count // self.layer.steps if by_step else batch
        groups = self.layer.steps if by_step else -(-count // batch)

        def grouped(rows: Any) -> Any:
            """Return rows (sample * time, n), or of one step, in groups (group, batch, n) of one step each."""
            if by_step:
                rows = jnp.swapaxes(rows.reshape(samples, groups, -1), 0, 1)
                padding = jnp.repeat(rows[:, -1:], batch - samples, axis=1)
                return jnp.concatenate([rows, padding], axis=1)
            padding = jnp.repeat(rows[-1:], groups * batch - count, axis=0)
            return jnp.concatenate([rows, padding]).reshape(groups, batch, -1)

        arguments = (grouped(x), list(map(grouped, state)), list(map(grouped, zeros or [])))
        new = jax.vmap(lambda x, state, zeros: self._group(constants, x, state, zeros))(*arguments)
        if by_step:
            return [jnp.swapaxes(rows[:, :samples], 0, 1).reshape(count, -1) for rows in new]
        return [rows.reshape(groups * batch, -1)[:count] for rows in new]

    def _group(self, constants: Sequence[Any], x: Any, state: Sequence[Any], zeros: Sequence[Any]) -> list[Any]:
        layer, loop = self.layer, self.layer.loop
        arguments = [*constants, *([None] * (len(loop.body.jaxpr.invars) - len(constants)))]
        positions = {v: i for i, v in enumerate(loop.body.jaxpr.invars)}
        start = 0
        for variable in layer.inputs:
            width = layer.width(variable)
            arguments[positions[variable]] = layer.from_step(variable, x[:, start : start + width])
            start += width
        for column in self.columns:
            arguments[positions[column.variable]] = _decoded(layer, column, x[:, start : start + column.width])
            start += column.width
        for variable, rows in zip(layer.state_variables, state, strict=True):
            arguments[positions[variable]] = layer.from_step(variable, rows)
        for i, variable in enumerate(loop.body.jaxpr.invars):
            if arguments[i] is None:  # no equation of the new states reads it
                arguments[i] = jnp.zeros(variable.aval.shape, variable.aval.dtype)
        own = {
            f"state{i}": layer.from_step(v, z)
            for i, (v, z) in enumerate(zip(layer.state_variables, zeros, strict=False))
        }
        points = [(loop.path, f"output{i}") for i in range(len(layer.own_outputs))]
        results, records = Emission({}, points).run_step(self._opened, arguments, own)
        states = [layer.at_step(v, results[slot]) for v, slot in zip(layer.state_variables, layer.states, strict=True)]
        outputs = [layer.at_step(v, records[point]) for v, point in zip(layer.own_outputs, points, strict=True)]
        return [*states, jnp.concatenate(outputs, axis=-1)] if outputs else states

    def vjp(self, constants: Sequence[Any], x: Any, state: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        """Pull cotangents of the new states back to the input and the states."""
        new, pull = jax.vjp(lambda x, state: self.advance(constants, x, state), x, state)
        return pull([c.astype(n.dtype) for c, n in zip(cotangents, new, strict=True)])

    def produced(self, constants: Sequence[Any], x: Any, state: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        """Return the gradients of zeros that are added where the new states are computed."""
        new, pull = jax.vjp(lambda zeros: self.advance(constants, x, state, zeros), [jnp.zeros_like(s) for s in state])
        return pull([c.astype(n.dtype) for c, n in zip(cotangents, new, strict=True)])[0]

    def jacobian(self, constants: Sequence[Any], x: Any, state: Sequence[Any]) -> Any:
        """Return d[new states, output]/d[states] and by the input; all rows share each unit cotangent."""
        layer, cuts = self.layer, np.cumsum(self.layer.sizes)[:-1]

        def joined(states: Any, x: Any) -> Any:
            new = self.advance(constants, x, jnp.split(states, cuts, axis=1))
            return jnp.concatenate(new if layer.own_outputs else [*new, new[0]], axis=1)

        value, pull = jax.vjp(joined, jnp.concatenate(state, axis=1), x)
        count, size = value.shape
        rows = jnp.broadcast_to(jnp.eye(size, dtype=value.dtype)[:, None], (size, count, size))
        by_state, by_input = jax.vmap(pull)(rows)
        return jnp.moveaxis(by_state, 0, 1), jnp.moveaxis(by_input, 0, 1)


def _encoded(layer: RecurrentLayer, variable: Var, value: Any) -> tuple[Column, Array]:
    """Return the columns for a variable at all steps, (sample, time, column)."""
    if _is_key(variable):
        value = jax.random.key_data(value)
    numbers = np.array(layer.to_port(variable, value))
    if is_inexact(numbers) or numbers.dtype == np.bool_ or np.abs(numbers.astype(np.float64)).max(initial=0) < _EXACT:
        return Column(variable, numbers.shape[-1], False), numbers.astype(np.float64)
    bits = numbers.astype(np.int64) & 0xFFFFFFFF
    halves = np.concatenate([bits >> 16, bits & 0xFFFF], axis=-1).astype(np.float64)
    return Column(variable, halves.shape[-1], True), halves


def _decoded(layer: RecurrentLayer, column: Column, rows: Any) -> Any:
    """Return a variable's value from the columns of one group of rows."""
    variable, rows = column.variable, jax.lax.stop_gradient(rows)
    axis = layer.roles.sample.get(variable)
    if column.halves:
        high, low = jnp.split(jnp.round(rows).astype(jnp.uint32), 2, axis=1)
        rows = (high << 16) | low
    if axis is None:
        rows = rows[:1]
    if jnp.issubdtype(variable.aval.dtype, jnp.complexfloating):
        real, imaginary = jnp.split(rows, 2, axis=-1)
        rows = real + 1j * imaginary
    shape = tuple(variable.aval.shape)
    if _is_key(variable):
        data = (rows if column.halves else jnp.round(rows)).astype(jnp.uint32)
        rest = shape if axis is None else tuple(n for i, n in enumerate(shape) if i != axis)
        data = data.reshape(*rest, -1) if axis is None else jnp.moveaxis(data.reshape(-1, *rest, 2), 0, axis)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(jnp.empty(0, variable.aval.dtype)))
    if not column.halves and not jnp.issubdtype(variable.aval.dtype, jnp.inexact):
        rows = jnp.round(rows)
    if axis is None:
        return rows.reshape(shape).astype(variable.aval.dtype)
    rest = tuple(n for i, n in enumerate(shape) if i != axis)
    return jnp.moveaxis(rows.reshape(-1, *rest), 0, axis).astype(variable.aval.dtype)


def _is_key(variable: Var) -> bool:
    return bool(jax.dtypes.issubdtype(variable.aval.dtype, jax.dtypes.prng_key))
