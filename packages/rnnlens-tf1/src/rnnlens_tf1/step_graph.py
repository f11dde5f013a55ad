"""Step of a cell of unknown equations: the loop's body, run by TensorFlow on rows of samples and steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from rnnlens.recurrence.cells import StepCell
from rnnlens.typing import Array

from .blocks import NO_LOOP, VARIABLES, Outer, is_variable, variable_of
from .loop_recorder import CannotRecordError, Copier
from .recurrences import common_scope
from .while_loops import ancestors

#: Bytes that the Jacobians of one chunk of steps may take.
_CHUNK = 256 * 2**20
#: Operations whose results depend on data, besides stateful ones that are not among ``_READERS``.
_DATA = frozenset({"Placeholder", "PlaceholderWithDefault", "Exit", "RefExit", "While", "StatelessWhile"})
_READERS = VARIABLES | {"ReadVariableOp"}


class StepGraph:
    """One step of a loop's body as a separate graph, with placeholders for all that it reads from outside.

    ``step_inputs`` are the tensors of the body that are new at each step, whose concatenation is the input. Raise
    CannotRecordError if the step is not a function of these, the states and the invariants, sample by sample.
    """

    def __init__(
        self,
        step_inputs: Sequence[Any],
        previous_states: Sequence[Any],
        output: Any,
        new_states: Sequence[Any],
        outer: Outer,
    ) -> None:
        #: Tensors outside that the step reads, and their placeholders, by id; those that are values of variables.
        self.outer_tensors: dict[int, Any] = {}
        self.placeholders: dict[int, Any] = {}
        self.variables: dict[str, Any] = {}
        self._batch = previous_states[0].shape[0]
        self.graph = tf.Graph()
        with self.graph.as_default():
            widths = [int(t.shape[-1]) for t in step_inputs]
            self.input = tf.placeholder(step_inputs[0].dtype, [None, *step_inputs[0].shape[1:-1], sum(widths)])
            input_parts = [self.input] if len(step_inputs) == 1 else tf.split(self.input, widths, axis=-1)
            self.previous_states = [tf.placeholder(t.dtype, [None, *t.shape[1:]]) for t in previous_states]
            substitutes = zip((*step_inputs, *previous_states), (*input_parts, *self.previous_states), strict=True)
            copier = Copier({id(t): p for t, p in substitutes}, outer, self._outside_substitute)
            self.output, self.new_states = copier(output), [copier(t) for t in new_states]
            try:
                self._differentiate()
            except LookupError as error:
                raise CannotRecordError(f"an operation without a gradient ({error})") from error
        self.scope = common_scope(self.variables)

    def _outside_substitute(self, tensor: Any) -> Any:
        """Return the substitute of a tensor outside of the loop: a placeholder, or a copy that reads variables."""
        variable = variable_of(tensor, NO_LOOP)
        if variable is not None:
            tensor = self.variables.setdefault(variable.name, tensor)
        if id(tensor) in self.placeholders:
            return self.placeholders[id(tensor)]
        operations = ancestors([tensor])
        depends_on_data = any(
            op.type in _DATA or (op.op_def.is_stateful and op.type not in _READERS) for op in operations
        )
        if variable is None and not depends_on_data and any(map(is_variable, operations)):
            return Copier({}, NO_LOOP, self._outside_substitute)(tensor)
        rank = tensor.shape.rank
        if depends_on_data and (
            rank is None or (rank > 0 and (tensor.shape[0] is None or tensor.shape[0] == self._batch != 1))
        ):
            raise CannotRecordError(f"a tensor with an axis of samples that every step reads ({tensor.op.name!r})")
        self.outer_tensors[id(tensor)] = tensor
        with self.graph.as_default():
            shape = tensor.shape if rank is not None else None
            self.placeholders[id(tensor)] = tf.placeholder(tensor.dtype.base_dtype, shape)
        return self.placeholders[id(tensor)]

    def _differentiate(self) -> None:
        self.output_grad = tf.placeholder(self.output.dtype, self.output.shape)
        self.new_state_grads = [tf.placeholder(t.dtype, t.shape) for t in self.new_states]
        targets, cotangents = [self.output, *self.new_states], [self.output_grad, *self.new_state_grads]
        sources = [self.input, *self.previous_states]
        weights = [self.placeholders[id(t)] for t in self.variables.values()]

        def pull_back(wrt: Sequence[Any]) -> list[Any]:
            gradients = tf.gradients(targets, wrt, cotangents, unconnected_gradients="zero") if wrt else []
            return [tf.convert_to_tensor(gradient) for gradient in gradients]

        self.source_grads, self.weight_grads = pull_back(sources), pull_back(weights)
        self.produced_grads = []
        for state in self.new_states:
            if any(state is t for t in sources):  # passed on, not produced
                self.produced_grads.append(
                    tf.add_n([g for t, g in zip(targets, cotangents, strict=True) if t is state])
                )
            else:
                self.produced_grads += pull_back([state])


class BodyCell(StepCell):
    """Cell of unknown equations, run by TensorFlow with the weights' values of the captured run."""

    def __init__(self, step: StepGraph, values: Iterable[Array], names: Sequence[str]) -> None:
        # The names of the weights are in the order of the variables of the step.
        self._step, self._names = step, names
        self._session = tf.Session(graph=step.graph)
        self._fixed_feed = dict(zip(step.placeholders.values(), values, strict=True))
        self.state_sizes = tuple(t.shape[1:].num_elements() for t in step.previous_states)
        self.output_size = step.output.shape[1:].num_elements()
        equal_states = [i for i, t in enumerate(step.new_states) if t is step.output]
        self.output_state, self.output_is_state = (equal_states[0] if equal_states else 0), bool(equal_states)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes (channel, *space) of input, output and states that are images; empty for a cell without space."""
        step = self._step
        tensors = {
            "input": step.input,
            "output": step.output,
            **dict(zip(self.state_names, step.previous_states, strict=True)),
        }
        sizes = {name: t.shape.as_list()[1:] for name, t in tensors.items() if step.input.shape.rank > 2}
        return {name: (channels, *space) for name, (*space, channels) in sizes.items()}

    def advance(self, x: Array, state: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
        """Compute one step: input (n, feature) and states (n, size) to output (n, output_size) and new states."""
        output, new_states = self._run([self._step.output, self._step.new_states], x, state)
        return _flatten_rows(output), tuple(map(_flatten_rows, new_states))

    def vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> tuple[Array, tuple[Array, ...]]:
        """Pull dL/dy_t and dL/ds_t back to dL/dx_t (n, feature) and dL/ds_{t-1}, separately for each of the n rows."""
        by_x, *by_state = self._run(self._step.source_grads, x, state, output_cotangent, state_cotangent)
        return _flatten_rows(by_x), tuple(map(_flatten_rows, by_state))

    def weight_vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> Mapping[str, Array]:
        """Pull dL/dy_t and dL/ds_t back to the weights by the layer's names, summed over the n rows."""
        gradients = self._run(self._step.weight_grads, x, state, output_cotangent, state_cotangent)
        return dict(zip(self._names, gradients, strict=True))

    def produced(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> tuple[Array, ...]:
        """Return each new state's gradient by row, with paths through other results of the step, as of c_t by h_t."""
        return tuple(
            map(_flatten_rows, self._run(self._step.produced_grads, x, state, output_cotangent, state_cotangent))
        )

    def jacobian(self, x: Array, state: Sequence[Array]) -> tuple[Array, Array]:
        """Return the Jacobians of [new states, output]: (n, S + output_size, S) by states, (..., feature) by input."""
        sizes, feature = [*self.state_sizes, self.output_size], int(x.shape[1])
        rows, chunks = max(1, _CHUNK // (8 * sum(sizes) * (sum(sizes) + sum(self.state_sizes) + feature))), []
        for start in range(0, int(x.shape[0]), rows):
            chunk = [np.asarray(a)[start : start + rows] for a in (x, *state)]
            n = len(chunk[0])  # each row is repeated for each unit cotangent
            basis = np.tile(np.eye(sum(sizes), dtype=x.dtype), (n, 1))
            *by_state, output = np.split(basis, np.cumsum(sizes)[:-1], axis=1)
            x_rows, *state_rows = (np.repeat(a, sum(sizes), axis=0) for a in chunk)
            by_x, by_previous = self.vjp(x_rows, state_rows, output, by_state)
            shape = (n, sum(sizes), -1)
            chunks.append((np.concatenate([b.reshape(shape) for b in by_previous], axis=2), by_x.reshape(shape)))
        by_states, by_input = (np.concatenate(column) for column in zip(*chunks, strict=True))
        return by_states, by_input

    def _run(self, fetches: Any, x: Array, state: Sequence[Array], *cotangents: Any) -> Any:
        if not fetches:
            return []
        step = self._step
        feed = {step.input: x} | dict(zip(step.previous_states, state, strict=True))
        if cotangents:
            feed |= {step.output_grad: cotangents[0]} | dict(zip(step.new_state_grads, cotangents[1], strict=True))
        for tensor, rows in feed.items():  # (n, channel * space) to images (n, *space, channel)
            *space, channels = tensor.shape.as_list()[1:]
            feed[tensor] = np.moveaxis(np.reshape(rows, (-1, channels, *space)), 1, -1) if space else rows
        return self._session.run(fetches, self._fixed_feed | feed)


def _flatten_rows(rows: Array) -> Array:
    """Flatten rows (n, *space, channel) to (n, channel * space)."""
    return rows if rows.ndim == 2 else np.moveaxis(rows, -1, 1).reshape(len(rows), -1)
