"""Step of a cell of unknown equations: the loop's body, run and differentiated by TensorFlow.

Samples and steps are folded into one axis of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from ...recurrence.cells import StepCell
from ...typing import Array
from .blocks import NO_LOOP, VARIABLES, Source, is_variable, reached, variable_of
from .loop_recorder import CannotRecordError, Copier
from .recurrences import common_scope

#: Bytes that the Jacobians of one chunk of steps may take.
_CHUNK = 256 * 2**20
_DATA = frozenset({"Placeholder", "PlaceholderWithDefault", "Exit", "RefExit", "While", "StatelessWhile"})


class StepGraph:
    """One step of a loop's body as a separate graph, with placeholders for all that it reads from outside.

    ``fed`` are the tensors of the body that are new at each step, whose concatenation is the input. Raise
    CannotRecordError if the step is not a function of these, the states and the invariants, sample by sample.
    """

    def __init__(
        self, fed: Sequence[Any], before: Sequence[Any], output: Any, after: Sequence[Any], outer: Source
    ) -> None:
        #: Tensors outside that the step reads, and their placeholders, by id; those that are values of variables.
        self.outer: dict[int, Any] = {}
        self.fed: dict[int, Any] = {}
        self.variables: dict[str, Any] = {}
        self._batch = before[0].shape[0]
        self.graph = tf.Graph()
        with self.graph.as_default():
            widths = [int(t.shape[-1]) for t in fed]
            self.x = tf.placeholder(fed[0].dtype, [None, *fed[0].shape[1:-1], sum(widths)])
            parts = [self.x] if len(fed) == 1 else tf.split(self.x, widths, axis=-1)
            self.before = [tf.placeholder(t.dtype, [None, *t.shape[1:]]) for t in before]
            given = {id(t): p for t, p in zip(fed, parts, strict=True)} | {
                id(b): p for b, p in zip(before, self.before, strict=True)
            }
            copier = Copier(given, outer, self._read)
            self.output, self.after = copier(output), [copier(t) for t in after]
            try:
                self._differentiate()
            except LookupError as error:
                raise CannotRecordError(f"an operation without a gradient ({error})") from error

    @property
    def scope(self) -> str:
        """Common name scope of the variables of the step."""
        return common_scope(self.variables)

    def _read(self, tensor: Any) -> Any:
        """Return the substitute of a tensor outside of the loop: a placeholder, or a copy that reads variables."""
        variable = variable_of(tensor, NO_LOOP)
        if variable is not None:
            tensor = self.variables.setdefault(variable.name, tensor)
        if id(tensor) in self.fed:
            return self.fed[id(tensor)]
        names, data = sources_of(tensor)
        if names and not data and variable is None:
            return Copier({}, NO_LOOP, self._read)(tensor)
        rank = tensor.shape.rank
        if data and (rank is None or (rank > 0 and (tensor.shape[0] is None or tensor.shape[0] == self._batch != 1))):
            raise CannotRecordError(f"a tensor with an axis of samples that every step reads ({tensor.op.name!r})")
        self.outer[id(tensor)] = tensor
        with self.graph.as_default():
            shape = tensor.shape if rank is not None else None
            self.fed[id(tensor)] = tf.placeholder(tensor.dtype.base_dtype, shape)
        return self.fed[id(tensor)]

    def _differentiate(self) -> None:
        self.output_grad = tf.placeholder(self.output.dtype, self.output.shape)
        self.after_grads = [tf.placeholder(t.dtype, t.shape) for t in self.after]
        targets, given = [self.output, *self.after], [self.output_grad, *self.after_grads]
        sources = [self.x, *self.before]
        weights = [self.fed[id(t)] for t in self.variables.values()]

        def pulled(to: Sequence[Any]) -> list[Any]:
            found = tf.gradients(targets, to, given, unconnected_gradients="zero") if to else []
            return [tf.convert_to_tensor(gradient) for gradient in found]

        self.by_source, self.by_weight = pulled(sources), pulled(weights)
        self.produced = []
        for state in self.after:
            if any(state is t for t in sources):  # passed on, not produced
                self.produced.append(tf.add_n([g for t, g in zip(targets, given, strict=True) if t is state]))
            else:
                self.produced += pulled([state])


def sources_of(tensor: Any) -> tuple[set[str], bool]:
    """Return the names of the variables behind a tensor outside of the loop, and whether it also depends on data.

    Data are placeholders, results of loops and stateful operations.
    """
    operations = reached([tensor.op], lambda op: [t.op for t in op.inputs])
    plain = (*VARIABLES, "ReadVariableOp")
    data = any(op.type in _DATA or (op.op_def.is_stateful and op.type not in plain) for op in operations)
    return {op.name for op in operations if is_variable(op)}, data


class BodyCell(StepCell):
    """Cell of unknown equations, run by TensorFlow with the weights' values of the captured run.

    ``names`` has the layer's names of its weights, in the order of the variables of the step. Images are flattened, as
    (channel, *space).
    """

    def __init__(self, step: StepGraph, values: Iterable[Array], names: Sequence[str]) -> None:
        self._step, self._names = step, names
        self._session = tf.Session(graph=step.graph)
        self._fixed = dict(zip(step.fed.values(), values, strict=True))
        self.state_sizes = tuple(t.shape[1:].num_elements() for t in step.before)
        self.output_size = step.output.shape[1:].num_elements()
        same = [i for i, t in enumerate(step.after) if t is step.output]
        self.output_state, self.output_is_state = (same[0] if same else 0), bool(same)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes (channel, *space) of input, output and states that are images; empty for a cell without space."""
        step = self._step
        named = {"input": step.x, "output": step.output, **dict(zip(self.state_names, step.before, strict=True))}
        sizes = {name: t.shape.as_list()[1:] for name, t in named.items() if step.x.shape.rank > 2}
        return {name: (channels, *space) for name, (*space, channels) in sizes.items()}

    def advance(self, x: Array, state: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
        """Compute one step: input (n, feature) and states (n, size) to output (n, output_size) and new states."""
        output, new = self._run([self._step.output, self._step.after], x, state)
        return _flat(output), tuple(map(_flat, new))

    def vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> tuple[Array, tuple[Array, ...]]:
        """Pull dL/dy_t and dL/ds_t back to dL/dx_t (n, feature) and dL/ds_{t-1}, separately for each of the n rows."""
        by_x, *by_state = self._run(self._step.by_source, x, state, output_cotangent, state_cotangent)
        return _flat(by_x), tuple(map(_flat, by_state))

    def weight_vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> Mapping[str, Array]:
        """Pull dL/dy_t and dL/ds_t back to the weights by the layer's names, summed over the n rows."""
        found = self._run(self._step.by_weight, x, state, output_cotangent, state_cotangent)
        return dict(zip(self._names, found, strict=True))

    def produced(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> tuple[Array, ...]:
        """Return the total gradient of each new state, given dL/dy_t and dL/ds_t, separately for each row.

        It includes paths through other results of the same step, as of c_t through h_t.
        """
        return tuple(map(_flat, self._run(self._step.produced, x, state, output_cotangent, state_cotangent)))

    def jacobian(self, x: Array, state: Sequence[Array]) -> tuple[Array, Array]:
        """Return the Jacobians of [new states, output] by the S states and by the input.

        Their shapes are (n, S + output_size, S) and (n, S + output_size, feature).
        """
        total = sum(self.state_sizes)
        row = 8 * (total + self.output_size) * (2 * total + self.output_size + int(x.shape[1]))
        size, parts = max(1, _CHUNK // row), []
        for start in range(0, int(x.shape[0]), size):
            rows = slice(start, start + size)
            parts.append(self._jacobian(x[rows], [s[rows] for s in state]))
        by_state, by_input = (np.concatenate(column) for column in zip(*parts, strict=True))
        return by_state, by_input

    def _jacobian(self, x: Array, state: Sequence[Array]) -> tuple[Array, Array]:
        """Compute the Jacobians of n rows in one vector-Jacobian product.

        Each row is repeated for each unit cotangent; the rows of a step are independent.
        """
        sizes, n = [*self.state_sizes, self.output_size], int(x.shape[0])
        basis = np.tile(np.eye(sum(sizes), dtype=x.dtype), (n, 1))
        *by_state, output = np.split(basis, np.cumsum(sizes)[:-1], axis=1)
        many = [np.repeat(np.asarray(a), sum(sizes), axis=0) for a in (x, *state)]
        by_x, back = self.vjp(many[0], many[1:], output, by_state)
        shape = (n, sum(sizes), -1)
        return np.concatenate([b.reshape(shape) for b in back], axis=2), by_x.reshape(shape)

    def _run(self, fetches: Any, x: Array, state: Sequence[Array], *cotangents: Any) -> Any:
        if not fetches:
            return []
        step = self._step
        feed = {step.x: x} | dict(zip(step.before, state, strict=True))
        if cotangents:
            feed |= {step.output_grad: cotangents[0]} | dict(zip(step.after_grads, cotangents[1], strict=True))
        return self._session.run(fetches, self._fixed | {t: _as_images(rows, t) for t, rows in feed.items()})


def _flat(rows: Array) -> Array:
    """Flatten rows (n, *space, channel) to (n, channel * space)."""
    return rows if rows.ndim == 2 else np.moveaxis(rows, -1, 1).reshape(len(rows), -1)


def _as_images(rows: Array, tensor: Any) -> Array:
    """Reshape rows (n, channel * space) to images (n, *space, channel), with the spatial shape of ``tensor``."""
    *space, channels = tensor.shape.as_list()[1:]
    return np.moveaxis(np.reshape(rows, (-1, channels, *space)), 1, -1) if space else rows
