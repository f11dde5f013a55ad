"""Copy of the user's graph, to which taps and gradients are added, and the session that runs the copy.

The user's graph may be finalised, a While that ran cannot be differentiated afterwards, and runs in the user's session
would advance its random numbers, queues and iterators. The copy has its own names of functions and its own seeds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import control_flow_pb2
from tensorflow.python.framework import meta_graph

from rnnlens.errors import UnsupportedError
from rnnlens.typing import Array

from .blocks import is_variable, transitive_closure
from .recurrences import Loop, LoopBoundary
from .while_loops import RANDOM, types_of

#: Collections that are needed to differentiate loops of control flow v1.
_CONTEXTS = ("while_context", "cond_context")
#: Multiplier that gives each seed other draws: an odd number near 2^32 divided by the golden ratio.
_ANOTHER_DRAW = 0x9E3779B1
_numbers = count()


def export_definition(graph: Any) -> Any:
    """Export a graph as a ``MetaGraphDef``; raise UnsupportedError above 2 GB, the limit of a GraphDef."""
    try:
        return tf.train.export_meta_graph(graph=graph, collection_list=list(_CONTEXTS))
    except ValueError as error:
        if "2GB" not in str(error) and "2 GB" not in str(error) and "too large" not in str(error):
            raise
        raise UnsupportedError(
            "The graph is larger than the 2 GB that a GraphDef can have, so it cannot be copied.",
            got=str(error),
            hint="hold large constants (a frozen embedding) in a variable, or feed them through a placeholder",
        ) from error


def _nodes(definition: Any) -> list[Any]:
    """Return all nodes of a graph's definition, those of its functions included."""
    return [*definition.node, *(node for function in definition.library.function for node in function.node_def)]


def import_definition(meta: Any) -> Any:
    """Create a graph from a definition; its functions get new names, since all graphs share one register of them."""
    graph, graph_def, suffix = tf.Graph(), meta.graph_def, f"_copy{next(_numbers)}"
    function_names = {function.signature.name for function in graph_def.library.function}
    for node in _nodes(graph_def) if function_names else ():
        if node.op in function_names:
            node.op += suffix
        for value in node.attr.values():
            for function in (value.func, *value.list.func) if value.HasField("func") else value.list.func:
                if function.name in function_names:
                    function.name += suffix
    for function in graph_def.library.function:
        function.signature.name += suffix
    for gradient in graph_def.library.gradient:
        gradient.function_name += suffix
        gradient.gradient_func += suffix if gradient.gradient_func in function_names else ""
    with graph.as_default():
        meta_graph.import_scoped_meta_graph(meta)
    return graph


def seed_definition(meta: Any, seed: int) -> Any:
    """Return a definition with seeds and loops that run step by step, so that equal runs draw equal numbers."""
    nodes = _nodes(meta.graph_def)
    random_nodes = [node for node in nodes if node.op in RANDOM]
    if not random_nodes:
        return meta
    for i, node in enumerate(random_nodes):
        is_unset = not node.attr["seed"].i and not node.attr["seed2"].i
        if is_unset or seed:
            node.attr["seed"].i = (node.attr["seed"].i or i + 1) + seed * _ANOTHER_DRAW
    for node in nodes:
        if "parallel_iterations" in node.attr:
            node.attr["parallel_iterations"].i = 1
    # Asking for a missing entry would add it, and TensorFlow would log an error.
    contexts = meta.collection_def["while_context"].bytes_list.value if "while_context" in meta.collection_def else []
    for i, context in enumerate(contexts):
        loop = control_flow_pb2.WhileContextDef.FromString(context)
        loop.parallel_iterations = 1
        contexts[i] = bytes(loop.SerializeToString())
    return meta


K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

#: Largest number of entries in the cache of :meth:`GraphCopy.is_steady`.
_MOST_RATES = 64
#: Operations that fill tables.
_TABLES = ("InitializeTable", "LookupTableImport")
#: Operations that assign variables; those of TensorArrays and TensorLists are excluded.
_ASSIGNS = re.compile(r"(?!Tensor).*(Assign|Scatter|Apply|CountUpTo)")
#: Operations that take data from a queue or a pipeline.
_SOURCES = ("QueueDequeue", "IteratorGetNext", "ReaderRead", "Unstage", "MapUnstage", "OrderedMapUnstage")


def dependency_cone(end_tensors: Iterable[Any], fed_tensors: Iterable[Any] = ()) -> list[Any]:
    """Return all operations that ``end_tensors`` depend on, up to ``fed_tensors``."""
    fed_refs = {tensor.ref() for tensor in fed_tensors}

    def computing_operations(tensors: Iterable[Any]) -> list[Any]:
        return [tensor.op for tensor in tensors if tensor.ref() not in fed_refs]

    return transitive_closure(
        computing_operations(end_tensors), lambda op: [*computing_operations(op.inputs), *op.control_inputs]
    )


@dataclass(frozen=True)
class Dependences:
    """Dependences of tensors: names of variables, and whether the run draws random numbers or assigns variables."""

    variables: tuple[str, ...]
    draws_random: bool
    assigns_variables: bool


class GraphCopy:
    """Copy of a session's graph with taps at its loops, and a session that runs it.

    With ``seed`` 0, seeded operations draw the same as in a new session of the user's graph.
    """

    def __init__(self, session: Any, seed: int) -> None:
        self.graph = import_definition(seed_definition(export_definition(session.graph), seed))
        self.loops: tuple[Loop, ...] = ()
        #: Reasons for the recurrences that are not among the loops, by name.
        self.left_out_reasons: dict[str, str] = {}
        self._replacements: dict[str, Any] = {}
        #: Cache of tensors added to the copy; see :mod:`.boundaries` and :mod:`.capture`.
        self.built_tensors: dict[Hashable, Any] = {}
        #: Values, at which the cells were recognised, of the variables that are rates or switches.
        self.settings: dict[str, Array] = {}
        #: Configuration as the user's; if that sets no number of threads, half of the cores are used.
        self._config, self._version = tf.ConfigProto(), -1
        self._config.CopyFrom(getattr(session, "_config", None) or self._config)
        if not (self._config.inter_op_parallelism_threads or self._config.session_inter_op_thread_pool):
            self._config.use_per_session_threads = True
            self._config.inter_op_parallelism_threads = max(1, (os.cpu_count() or 1) // 2)
        self._session: Any = None
        self._steady_by_key: dict[Hashable, bool] = {}
        self._loaded_values: dict[str, Array] = {}
        self._dependences: dict[Any, Dependences] = {}
        with self.graph.as_default():
            self._assignments = {op.name: _assignment(op) for op in self.graph.get_operations() if is_variable(op)}
            self._table_operations = [op for op in self.graph.get_operations() if op.type.startswith(_TABLES)]

    def tensor(self, name: str) -> Any:
        """Return the copy's tensor that corresponds to the user's tensor of a name, or is equal to it in value."""
        return self._replacements[name] if name in self._replacements else self.graph.get_tensor_by_name(name)

    def build_once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the tensors that ``make`` adds to the copy; for each key they are added only once."""
        if key not in self.built_tensors:
            self.built_tensors[key] = make()
        tensors: T = self.built_tensors[key]
        return tensors

    def tap(self, loops: Sequence[Loop]) -> None:
        """Insert an identity at each input, initial state and fed-back state of the loops; only that loop reads it."""
        for loop in loops:
            self._replacements |= loop.replaced_tensors
        with self.graph.as_default(), tf.name_scope("rnnlens"):
            self.loops = tuple(
                replace(
                    loop,
                    input=_tap_boundary(loop.input),
                    initial=tuple(_tap_boundary(boundary, _copy_in_memory) for boundary in loop.initial),
                    carried_states=tuple(map(_tap_boundary, loop.carried_states)),
                )
                for loop in loops
            )

    def run(self, fetches: Mapping[K, Any], feed: Mapping[Any, Any], variables: Mapping[str, Array]) -> dict[K, Any]:
        """Set the variables to the given values, and return the values of tensors from one run."""
        tensors = list(fetches.values())
        dependences = self.dependences(tensors, feed)
        if self._session is None or self._version != self.graph.version:
            self._restart()
        self._load({name: value for name, value in variables.items() if name in self._assignments})
        if not tensors:
            return {}
        key, is_steady = self._steady_key(tensors, feed), not dependences.draws_random or self.is_steady(tensors, feed)
        if not is_steady:  # random operations start anew in a new session
            loaded_values = self._loaded_values
            self._restart()
            self._load(loaded_values)
        results = self._session.run(tensors, dict(feed))
        if not is_steady and key not in self._steady_by_key:
            second_results = self._session.run(tensors, dict(feed))
            if len(self._steady_by_key) >= _MOST_RATES:
                self._steady_by_key.clear()
            self._steady_by_key[key] = all(
                np.array_equal(first_result, second_result)
                for first_result, second_result in zip(results, second_results, strict=True)
            )
        if dependences.assigns_variables:
            self._loaded_values = {}
        return dict(zip(fetches, results, strict=True))

    def is_steady(self, tensors: Sequence[Any], feed: Mapping[Any, Any]) -> bool:
        """Return whether tensors did not change when the graph ran twice at these rates, so that dropout is off."""
        return self._steady_by_key.get(self._steady_key(tensors, feed), False)

    def _steady_key(self, tensors: Sequence[Any], feed: Mapping[Any, Any]) -> Hashable:
        """Return the key for :meth:`is_steady`: the tensors, and the scalars that are fed or held by variables."""
        fed_scalars = tuple((tensor.name, np.asarray(v).item()) for tensor, v in feed.items() if not np.ndim(v))
        variable_values = [(name, self._loaded_values.get(name)) for name in self.dependences(tensors, feed).variables]
        variable_scalars = tuple((name, v.item()) for name, v in variable_values if v is not None and not np.ndim(v))
        return (tuple(tensor.name for tensor in tensors), fed_scalars, variable_scalars)

    def dependences(self, tensors: Sequence[Any], feed: Mapping[Any, Any]) -> Dependences:
        """Return the dependences of tensors, cached; raise UnsupportedError for a queue or an iterator."""
        key = (self.graph.version, tuple(t.name for t in tensors), frozenset(t.name for t in feed))
        if key not in self._dependences:
            for stale in [other for other in self._dependences if other[0] != self.graph.version]:
                del self._dependences[stale]
            operations = dependency_cone(tensors, feed)
            for operation in operations:
                if operation.type.startswith(_SOURCES):
                    raise UnsupportedError(
                        f"The graph takes its data from {operation.name!r}, which our copy must not empty or wait for.",
                        got=operation.type,
                        expected="data that is fed",
                        hint=f'inputs={{"x": "{operation.name}:0"}}: the batch tensor itself can be fed',
                    )
            variables = tuple(op.name for op in operations if is_variable(op))
            types = types_of(operations)
            self._dependences[key] = Dependences(variables, bool(types & RANDOM), any(map(_ASSIGNS.match, types)))
        return self._dependences[key]

    def close(self) -> None:
        """Close the session; a later run starts another one."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _restart(self) -> None:
        """Start a new session: in a session, a While keeps the outputs that were fixed at its first run."""
        self.close()
        self._session = tf.Session(graph=self.graph, config=self._config)
        self._version, self._loaded_values = self.graph.version, {}
        if self._table_operations:
            self._session.run(self._table_operations)

    def _load(self, variables: Mapping[str, Array]) -> None:
        """Assign values to the variables of the copy, where they differ from the loaded ones."""
        loaded = self._loaded_values
        changed = {
            name: v for name, v in variables.items() if name not in loaded or not np.array_equal(v, loaded[name])
        }
        if changed:
            assignments = {name: self._assignments[name] for name in changed}
            feed = {placeholder: changed[name] for name, (placeholder, _) in assignments.items()}
            self._session.run([assign for _, assign in assignments.values()], feed)
            self._loaded_values = {**loaded, **changed}


def _assignment(operation: Any) -> tuple[Any, Any]:
    """Return a placeholder, and an operation that assigns it to a variable."""
    tensor = operation.outputs[0]
    with tf.name_scope("rnnlens/load"):
        if operation.type == "VarHandleOp":
            placeholder = tf.placeholder(operation.get_attr("dtype"), None)
            return placeholder, tf.raw_ops.AssignVariableOp(resource=tensor, value=placeholder)
        placeholder = tf.placeholder(tensor.dtype.base_dtype, None)
        return placeholder, tf.raw_ops.Assign(ref=tensor, value=placeholder, validate_shape=False)


def _copy_in_memory(tensor: Any) -> Any:
    """Copy a tensor in memory: an identity of a reference variable (control flow v1) would change with assignments."""
    with tensor.graph.gradient_override_map({"Snapshot": "Identity"}):
        return tf.raw_ops.Snapshot(input=tensor)


def _tap_boundary(boundary: LoopBoundary, make_copy: Callable[[Any], Any] = tf.identity) -> LoopBoundary:
    taps = []
    for tensor, readers in zip(boundary.tensors, boundary.readers, strict=True):
        taps.append(make_copy(tensor))
        for operation, index in readers:
            operation._update_input(index, taps[-1])
    return replace(boundary, tensors=tuple(taps))


def to_dense(gradient: Any) -> Any:
    """Return a gradient as a dense tensor; the rows of ``IndexedSlices`` are summed by index."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    row_count = tf.cast(gradient.dense_shape, tf.int64)[0]
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, row_count)
