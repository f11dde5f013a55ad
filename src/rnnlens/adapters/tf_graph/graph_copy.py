"""Our copy of the user's graph, in which taps and gradients live, and the session of ours that runs it.

The user's graph may be finalised; adding the gradient of a While that ran before is an error of TensorFlow; and his
session's random kernels, queues and iterators would move. So everything happens in a copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import tensorflow.compat.v1 as tf

from ...errors import UnsupportedError, message
from ...typing import Array
from .definition import RANDOM, imported, seeded
from .found import Border, Loop
from .variables import is_variable

K = TypeVar("K", bound=Hashable)

#: Operations that fill tables, and, below, those that take data from a queue or a pipeline.
_TABLES = ("InitializeTable", "LookupTableImport")
#: Operations that run functions of the graph.
_CALLS = ("While", "StatelessWhile", "If", "StatelessIf", "Case")
_SOURCES = ("QueueDequeue", "IteratorGetNext", "ReaderRead", "Unstage", "MapUnstage", "OrderedMapUnstage")


def cone(ends: Iterable[Any], stop: Iterable[Any] = ()) -> list[Any]:
    """All operations that some tensors depend on, but for what lies behind tensors that are fed."""
    fed = {tensor.ref() for tensor in stop}
    found: dict[Any, None] = {}
    waiting = [tensor for tensor in ends if tensor.ref() not in fed]
    operations = [tensor.op for tensor in waiting]
    while operations:
        operation = operations.pop()
        if operation in found:
            continue
        found[operation] = None
        operations += [tensor.op for tensor in operation.inputs if tensor.ref() not in fed]
        operations += operation.control_inputs
    return list(found)


@dataclass(frozen=True)
class Behind:
    """What tensors depend on: names of variables, and whether random numbers are drawn on the way."""

    variables: tuple[str, ...]
    draws: bool


class GraphCopy:
    """A copy of a graph, its loops tapped, and a session of ours.

    Parameters
    ----------
    meta
        See :func:`definition`.
    seed
        Of random operations; 0 draws what a new session of the user's would draw, where he gave seeds.
    """

    def __init__(self, meta: Any, seed: int = 0, config: Any = None) -> None:
        self.graph = imported(seeded(meta, seed))
        self.loops: tuple[Loop, ...] = ()
        self._replaced: dict[str, Any] = {}
        #: What was built once for a question: see :mod:`ports` and :mod:`capture`.
        self.built: dict[Hashable, Any] = {}
        self._config, self._version = config, -1
        self._session: Any = None
        self._drawn: tuple[int, bool] | None = None
        self._steady: dict[Hashable, bool] = {}
        self._loaded: dict[str, Array] = {}
        self._behind: dict[Any, Behind] = {}
        with self.graph.as_default():
            self._assign = {op.name: _assigned(op) for op in self.graph.get_operations() if is_variable(op)}
            self._tables = [op for op in self.graph.get_operations() if op.type.startswith(_TABLES)]

    def same(self, tensor: Any) -> Any:
        """The tensor of the copy that is a tensor of the user's graph, or has its values."""
        return self.tensor(tensor.name)

    def tensor(self, name: str) -> Any:
        """The same, by name."""
        return self._replaced[name] if name in self._replaced else self.graph.get_tensor_by_name(name)

    def tap(self, loops: Sequence[Loop]) -> None:
        """Give every input and initial state of a loop a tensor of its own, which nobody else reads."""
        for loop in loops:
            self._replaced |= loop.replaced
        with self.graph.as_default(), tf.name_scope("rnnlens"):
            self.loops = tuple(
                replace(loop, input=_tapped(loop.input), initial=tuple(map(_tapped, loop.initial))) for loop in loops
            )

    def run(self, fetches: Mapping[K, Any], feed: Mapping[Any, Any], variables: Mapping[str, Array]) -> dict[K, Any]:
        """Values of tensors, in one run, with these values of the variables."""
        asked = list(fetches.values())
        draws = self.behind(asked, feed).draws
        if self._version != self.graph.version:
            self._restart()
        self._load({name: value for name, value in variables.items() if name in self._assign})
        if not asked:
            return {}
        found = self._run(asked, dict(feed)) if draws else self._session.run(asked, dict(feed))
        return dict(zip(fetches, found, strict=True))

    def _run(self, asked: Sequence[Any], feed: dict[Any, Any]) -> list[Any]:
        """A run in which random numbers are drawn: the same as in the last such run.

        Where a second draw changes nothing (dropout at a rate that is fed as 0), that is kept in mind, for these
        switches and rates.
        """
        switches = tuple((tensor.name, np.asarray(v).item()) for tensor, v in feed.items() if not np.ndim(v))
        key = (tuple(tensor.name for tensor in asked), switches)
        if self._steady.get(key):
            return list(self._session.run(asked, feed))
        self._redraw()
        found = list(self._session.run(asked, feed))
        if key not in self._steady:
            again = self._session.run(asked, feed)
            self._steady[key] = all(np.array_equal(one, other) for one, other in zip(found, again, strict=True))
        return found

    def _redraw(self) -> None:
        """A new session, in which random kernels start anew, with the variables as they are."""
        loaded = self._loaded
        self._restart()
        self._load(loaded)

    def behind(self, asked: Sequence[Any], feed: Mapping[Any, Any]) -> Behind:
        """What some tensors depend on; walked once for equal tensors, feeds and version of the copy.

        Raises
        ------
        UnsupportedError
            If their data comes from a queue or an iterator.
        """
        key = (self.graph.version, tuple(t.name for t in asked), frozenset(t.name for t in feed))
        if key not in self._behind:
            for stale in [other for other in self._behind if other[0] != self.graph.version]:
                del self._behind[stale]
            operations = cone(asked, feed)
            _refuse_sources(operations)
            variables = tuple(op.name for op in operations if is_variable(op))
            self._behind[key] = Behind(variables, self._draws(operations))
        return self._behind[key]

    def close(self) -> None:
        """Free the session."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _restart(self) -> None:
        """A new session: in it no While that ran has fewer outputs than the graph says."""
        self.close()
        self._session = tf.Session(graph=self.graph, config=self._config)
        self._version = self.graph.version
        if self._tables:
            self._session.run(self._tables)

    def _load(self, variables: Mapping[str, Array]) -> None:
        self._loaded = dict(variables)
        given = {self._assign[name]: value for name, value in variables.items()}
        if given:
            feed = {placeholder: value for (placeholder, _), value in given.items()}
            self._session.run([assign for _, assign in given], feed)

    def _draws(self, operations: Iterable[Any]) -> bool:
        """Whether operations, or functions of the graph that they may call, draw random numbers."""
        every = list(operations)
        called = any(op.type in _CALLS or "PartitionedCall" in op.type for op in every)
        return any(op.type in RANDOM for op in every) or (called and self._functions_draw())

    def _functions_draw(self) -> bool:
        if self._drawn is None or self._drawn[0] != self.graph.version:
            functions = self.graph.as_graph_def().library.function
            drawn = any(node.op in RANDOM for function in functions for node in function.node_def)
            self._drawn = (self.graph.version, drawn)
        return self._drawn[1]


def _assigned(operation: Any) -> tuple[Any, Any]:
    """A placeholder, and the assignment of it to a variable."""
    tensor = operation.outputs[0]
    with tf.name_scope("rnnlens/load"):
        if operation.type == "VarHandleOp":
            value = tf.placeholder(operation.get_attr("dtype"), None)
            return value, tf.raw_ops.AssignVariableOp(resource=tensor, value=value)
        value = tf.placeholder(tensor.dtype.base_dtype, None)
        return value, tf.raw_ops.Assign(ref=tensor, value=value, validate_shape=False)


def _tapped(border: Border) -> Border:
    tapped = []
    for tensor, readers in zip(border.tensors, border.readers, strict=True):
        tap = tf.identity(tensor)
        for operation, index in readers:
            operation._update_input(index, tap)
        tapped.append(tap)
    return replace(border, tensors=tuple(tapped))


def _refuse_sources(operations: Iterable[Any]) -> None:
    for operation in operations:
        if operation.type.startswith(_SOURCES):
            raise UnsupportedError(
                message(
                    f"The graph takes its data from {operation.name!r}, which our copy must not empty or wait for.",
                    got=operation.type,
                    expected="data that is fed",
                    hint=f'inputs={{"x": "{operation.name}:0"}}: the batch tensor itself can be fed',
                )
            )
