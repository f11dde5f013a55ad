"""Cells of unknown equations: the engine runs and differentiates their step on many samples and steps at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...autodiff.tensors import join
from ...errors import cell_rerun_errors
from ...recurrence.cells import StepCell
from ...typing import Array
from .dialect import Dialect
from .restore import borrowed
from .run import compiled_cell
from .weights import cell_variables

#: Largest size in bytes of the Jacobians of one chunk of steps.
_CHUNK_BYTES = 256 * 2**20


class KerasStepCell(StepCell):
    """A Keras cell as a pure function, with the present values of its weights and ``training=False``."""

    def __init__(self, cell: Any, keras: Dialect) -> None:
        self._cell, self._keras, self._array = cell, keras, keras.engine.to_array
        self.state_sizes = tuple(int(output_size) for output_size in keras.tree.flatten(keras.state_template(cell)))
        output_size = keras.output_size(cell)
        self.output_size = self.state_sizes[0] if output_size is None else int(output_size)
        # Of stacked cells, the state that Keras on JAX returns at masked steps: the first one of the last cell.
        is_stacked = isinstance(cell, keras.layers.StackedRNNCells)
        self.output_state = len(keras.tree.flatten(keras.state_template(cell)[:-1])) if is_stacked else 0
        tensor = keras.ops.convert_to_tensor  # of copies, which later updates do not change
        self._weights = {n: tensor(keras.value_of(v), dtype=v.dtype) for n, v in cell_variables(cell).items()}
        self._dtype = getattr(cell, "compute_dtype", keras.floatx())
        self._steps = compiled_cell(keras, cell, lambda: _CellStep(cell, keras))

    @property
    def output_is_state(self) -> bool:  # type: ignore[override]
        """Whether the output is the first new state; False before the first step."""
        return self._steps.output_is_state

    def advance(self, x: Array, state: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
        """Run one step: x (n, feature) and states (n, size) to output (n, output_size) and new states."""
        with self._state_restored():
            output, new_states = self._steps.per_step.step(*self._inputs(x, state))
        return self._array(output), tuple(map(self._array, new_states))

    def vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> tuple[Array, tuple[Array, ...]]:
        """Multiply dL/dy_t and dL/ds_t by the transposed step Jacobians: dL/dx_t (n, feature), dL/ds_{t-1}."""
        by_x, by_state, _ = self._pull(self._steps.per_step.vjp, x, state, output_cotangent, state_cotangent)
        return self._array(by_x), tuple(map(self._array, by_state))

    def weight_vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> Mapping[str, Array]:
        """Return the gradients of the weights, summed over ``n``, by the names used in ``weight_grads``."""
        _, _, by_weight = self._pull(self._steps.per_step.vjp, x, state, output_cotangent, state_cotangent)
        return {name: self._array(g) for name, g in by_weight.items()}

    def produced(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> tuple[Array, ...]:
        """Return the total gradient of each new state, given dL/dy_t and dL/ds_t, separately for each row.

        It includes paths through other results of the same step, as of c_t through h_t.
        """
        grads = self._pull(self._steps.per_step.produced, x, state, output_cotangent, state_cotangent)
        return tuple(map(self._array, grads))

    def jacobian(self, x: Array, state: Sequence[Array]) -> tuple[Array, Array]:
        """Return the Jacobians (n, S + output_size, size) of [new states, output] by the states and by the input."""
        state_total, chunks = sum(self.state_sizes), []
        chunk_size = max(1, _CHUNK_BYTES // (8 * (state_total + self.output_size) * (state_total + int(x.shape[1]))))
        for start in range(0, int(x.shape[0]), chunk_size):
            rows = slice(start, start + chunk_size)
            with self._state_restored():
                jacobians = self._steps.per_step.jacobian(self._inputs(x[rows], [s[rows] for s in state]))
            chunks.append([self._array(jacobian) for jacobian in jacobians])
        by_state, by_input = (join(column, axis=0) for column in zip(*chunks, strict=True))
        return by_state, by_input

    def _pull(
        self, derivative: Any, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Any
    ) -> Any:
        cotangents = (self._tensor(output_cotangent), [self._tensor(c) for c in state_cotangent])
        with self._state_restored():
            return derivative(self._inputs(x, state), cotangents)

    def _inputs(self, x: Array, state: Sequence[Array]) -> tuple[Any, list[Any], dict[str, Any]]:
        return self._tensor(x), [self._tensor(s) for s in state], self._weights

    def _tensor(self, array: Array) -> Any:
        return self._keras.ops.convert_to_tensor(array, dtype=self._dtype)

    @contextmanager
    def _state_restored(self) -> Iterator[None]:
        with borrowed(self._cell, self._keras), cell_rerun_errors(type(self._cell).__name__):
            yield


class _CellStep:
    """The step of a Keras cell as a pure function of (x, states, weights), and its derivatives."""

    def __init__(self, cell: Any, keras: Dialect) -> None:
        self._cell, self._keras = cell, keras
        self._template, self._variables = keras.state_template(cell), cell_variables(cell)
        self.per_step = keras.engine.per_step(self._pure_step)
        self.output_is_state = False

    def _pure_step(self, x: Any, states: Sequence[Any], weights: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        keras = self._keras
        mapping = [(self._variables[name], value) for name, value in weights.items()]
        with keras.cell_weights_substituted(self._cell, mapping):
            output, new_states = keras.step(self._cell, x, keras.tree.pack_sequence_as(self._template, list(states)))
        flat = keras.tree.flatten(new_states)
        self.output_is_state = output is flat[0]
        return output, flat


def initial_state_weights(keras: Dialect, cell: Any) -> set[str]:
    """Return the names of the weights that a user's ``get_initial_state`` reads.

    Such a weight also has a gradient through the initial state. The function sets each weight to NaN and tests whether
    the initial state contains NaN.
    """
    method = getattr(cell, "get_initial_state", None)
    if method is None or keras.is_from_keras(getattr(method, "__func__", method)):
        return set()
    names = set()
    for name, variable in cell_variables(cell).items():
        value = keras.ops.convert_to_tensor(np.full(tuple(variable.shape), np.nan), dtype=variable.dtype)
        with borrowed(cell, keras), keras.cell_weights_substituted(cell, [(variable, value)]):
            states = keras.tree.flatten(keras.initial_state(cell, 1))
        if any(bool(np.isnan(keras.value_of(state)).any()) for state in states):
            names.add(name)
    return names
