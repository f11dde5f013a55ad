"""Operations of a loop's body made once more, in another place: in a loop of our own, or in a graph for one step.

Conditions and calls of functions within the body are made anew as well, so that all of it can be differentiated where
it is; loops within it are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from .blocks import VARIABLES, Source
from .frames import body_graph

_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_CONDITIONS = frozenset({"If", "StatelessIf"})
_LOOPS = frozenset({"While", "StatelessWhile", "Enter", "RefEnter", "NextIteration", "LoopCond"})


class CannotCopyError(Exception):
    """Why a body cannot be made once more, in words."""


class Copier:
    """Makes the operations behind tensors of a body once more, in the graph and context that are the default.

    Parameters
    ----------
    given
        By id of a tensor of the body: what stands in its place.
    outer
        The invariants of the loop.
    outside
        From a tensor outside of the loop to what is to be read in its place.
    """

    def __init__(self, given: dict[int, Any], outer: Source, outside: Callable[[Any], Any]) -> None:
        self._made, self._outer, self._outside = dict(given), outer, outside
        #: Names of the operations that drew random numbers.
        self.random: set[str] = set()

    def __call__(self, tensor: Any) -> Any:
        """The tensor, made once more; what was made before is not made again."""
        waiting = [tensor]
        while waiting:
            current = waiting[-1]
            if id(current) in self._made:
                waiting.pop()
                continue
            needed = [t for t in self._needs(current) if id(t) not in self._made]
            if needed:
                waiting.extend(needed)
                continue
            self._make(current)
            waiting.pop()
        return self._made[id(tensor)]

    def _needs(self, tensor: Any) -> list[Any]:
        if self._outer.get(tensor) is not None:
            return []
        op = tensor.op
        if op.type in _LOOPS:
            raise CannotCopyError(f"a loop within its body ({op.name!r})")
        if op.type in ("Switch", "Placeholder"):
            raise CannotCopyError(f"a variable of the loop other than its states ({op.name!r})")
        if op.type == "ReadVariableOp" or op.type in VARIABLES:
            return []
        return _boundary_of(op) if op.type == "Merge" else list(op.inputs)

    def _make(self, tensor: Any) -> None:
        outside = self._outer.get(tensor)
        op = tensor.op
        if outside is not None:
            self._made[id(tensor)] = self._outside(outside)
        elif op.type in VARIABLES:
            self._made[id(tensor)] = self._outside(tensor)
        elif op.type == "ReadVariableOp":
            self._made[id(tensor)] = self._outside(read_of(self._outer.settled(_handle(op, self._outer)), tensor.dtype))
        elif op.type == "Merge":
            self._made[id(tensor)] = self._condition(op)
        elif op.type in _CONDITIONS:
            self._keep(op, self._condition_of_functions(op))
        elif op.type in _CALLS:
            self._keep(op, self._call(op, op.get_attr("f").name, list(op.inputs)))
        else:
            self._keep(op, self._operation(op))

    def _keep(self, op: Any, outputs: Sequence[Any]) -> None:
        for old, new in zip(op.outputs, outputs, strict=True):
            self._made[id(old)] = new

    def _operation(self, op: Any) -> list[Any]:
        if op.op_def.is_stateful and op.outputs and op.outputs[0].dtype.name != "resource":
            self.random.add(op.name)
        attrs = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
        made = tf.get_default_graph().create_op(
            op.type,
            [self._made[id(t)] for t in op.inputs],
            [t.dtype for t in op.outputs],
            attrs=attrs,
            name=op.name.rpartition("/")[2],
        )
        return list(made.outputs)

    def _condition(self, merge: Any) -> Any:
        """One output of a condition of control flow v1; both branches are made in branches of a new one."""
        pred = self._made[id(_context(merge).pred)]
        inside = {id(t): self._made[id(t)] for t in _boundary_of(merge)}

        def branch(index: int) -> Any:
            copier = _Branch(inside, self._outer, self._outside)
            return lambda: tf.identity(copier(merge.inputs[index]))

        return tf.cond(pred, branch(1), branch(0))

    def _condition_of_functions(self, op: Any) -> list[Any]:
        inputs = list(op.inputs[1:])

        def branch(which: str) -> Callable[[], list[Any]]:
            name = op.get_attr(which).name
            return lambda: [tf.identity(t) for t in self._call(op, name, inputs)]

        found = tf.cond(self._made[id(op.inputs[0])], branch("then_branch"), branch("else_branch"))
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def _call(self, op: Any, name: str, inputs: list[Any]) -> list[Any]:
        function, home = function_of(op.graph, name)
        _, taken, returned = body_graph(function, inputs, home)
        given = {id(p): self._made[id(t)] for p, t in zip(taken, inputs, strict=True)}
        copier = Copier(given, Source(), lambda t: t)
        found = [copier(t) for t in returned]
        self.random |= copier.random
        return found


def _handle(read: Any, outer: Source) -> Any:
    tensor = outer.settled(read.inputs[0])
    while tensor.op.type in ("Identity", "Switch", "Enter"):
        tensor = outer.settled(tensor.op.inputs[0])
    return tensor


def read_of(handle: Any, dtype: Any) -> Any:
    """The value of a resource variable, read outside of any loop."""
    graph = handle.graph
    name = f"rnnlens_read/{handle.op.name}"
    try:
        return graph.get_tensor_by_name(f"{name}:0")
    except KeyError:
        with graph.as_default(), tf.control_dependencies(None):
            return graph.create_op(
                "ReadVariableOp", [handle], [dtype], name=f"{name}/", attrs={"dtype": _type(dtype)}
            ).outputs[0]


def _type(dtype: Any) -> Any:
    return tf.AttrValue(type=dtype.as_datatype_enum)


class _Branch(Copier):
    """Within one branch of a condition of control flow v1: a Switch is what it lets in."""

    def _needs(self, tensor: Any) -> list[Any]:
        if tensor.op.type == "Switch":
            return []
        return super()._needs(tensor)

    def _make(self, tensor: Any) -> None:
        if tensor.op.type == "Switch" and id(tensor) not in self._made:
            source = tensor.op.inputs[0]
            self._made[id(tensor)] = self._made[id(source)]
            return
        super()._make(tensor)


def _context(merge: Any) -> Any:
    context = merge.inputs[1].op._get_control_flow_context()
    if getattr(context, "pred", None) is None:
        raise CannotCopyError(f"a condition that the graph no longer describes ({merge.name!r})")
    return context


def _boundary_of(merge: Any) -> list[Any]:
    """What the two branches of a condition read from around them, and the condition itself."""
    context = _context(merge)
    found, waiting, seen = [context.pred], [t.op for t in merge.inputs], set()
    while waiting:
        op = waiting.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.type == "Switch" and op.inputs[1] is context.pred:
            found.append(op.inputs[0])
        else:
            waiting.extend(t.op for t in op.inputs)
    return found


def function_of(graph: Any, name: str) -> tuple[Any, Any]:
    """A function, and the graph that knows it; the graph of a function asks the one around it."""
    while graph is not None:
        for function in graph.as_graph_def().library.function:
            if function.signature.name == name:
                return function, graph
        graph = getattr(graph, "outer_graph", None)
    raise CannotCopyError(f"a function that the graph does not have ({name!r})")
