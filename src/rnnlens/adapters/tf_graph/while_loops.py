"""While loops of both kinds of control flow as one class: variables, invariants, body and dependences in it.

Control flow v1 is a ring of Enter, Merge, Switch, NextIteration and Exit within the graph; v2 one operation whose body
is a function. All other modules read :class:`Frame`, which is the same for both.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import function_def_to_graph, tensor_util
from tensorflow.python.ops import handle_data_util

from .blocks import Source, behind_identities, reached

_ENTERS = frozenset({"Enter", "RefEnter"})
_WHILES = frozenset({"While", "StatelessWhile"})


@dataclass(frozen=True, eq=False)
class Variable:
    """One loop variable of a while loop.

    Attributes
    ----------
    entry, exit
        Tensors outside of the loop: the initial and the final value; ``exit`` is None if the graph has no final value.
    before, after
        Tensors of the body: the values at the beginning and at the end of a step.
    reader
        The operation, and the number of its input, by which the loop reads ``entry``.
    read
        Whether the requested tensors depend on the variable.
    """

    entry: Any
    before: Any
    after: Any
    exit: Any
    reader: tuple[Any, int]
    read: bool = True


@dataclass(frozen=True, eq=False)
class Frame:
    """One while loop of control flow v1 or v2.

    ``outer`` maps invariants of the body to tensors outside. ``built`` is the number of its first operation, by which
    loops are sorted. ``bounds`` are the exclusive upper limits of its counters from 0, as tensors outside or numbers;
    empty if the loop ends by another condition or the limits are unknown.
    """

    name: str
    kind: Literal["v1", "v2"]
    built: int
    variables: tuple[Variable, ...]
    outer: Source
    graph: Any
    ops: tuple[Any, ...]
    bounds: tuple[Any, ...] = ()

    @property
    def in_condition(self) -> bool:
        """True if the loop is inside a branch of a condition of control flow v1."""
        context = self.variables[0].reader[0]._get_control_flow_context() if self.variables else None
        while context is not None and not context.IsCondContext():
            context = context.outer_context
        return context is not None

    @property
    def nested(self) -> bool:
        """True if the body contains another loop."""
        return any(op.type in _ENTERS or op.type in _WHILES for op in self.ops)


def frames_of(graph: Any, ends: Iterable[Any]) -> Iterator[Frame]:
    """Yield all while loops among the ancestors of ``ends``, in the order in which they were built.

    Each frame is built when the iterator reaches it, since rewriting an earlier loop may change what a later one reads.
    """
    ops = ancestors(ends)
    old: dict[str, list[Any]] = defaultdict(list)
    found: list[tuple[int, Callable[[], Frame]]] = []
    functions: dict[str, Any] = {}
    for op in ops:
        if op.type in _ENTERS:
            old[op.get_attr("frame_name").decode()].append(op)
        elif op.type in _WHILES:
            functions = functions or {f.signature.name: f for f in graph.as_graph_def().library.function}
            found.append((op._id, partial(_new_frame, op, functions)))
    every: dict[str, list[Any]] = defaultdict(list)
    for op in graph.get_operations() if old else ():
        if op.type in _ENTERS:
            every[op.get_attr("frame_name").decode()].append(op)
    inner = _inner(old)
    for name, enters in old.items():
        if name in inner:
            continue  # part of the loop around it
        found.append((_first(enters), partial(_old_frame, name, enters, every[name])))
    for _, make in sorted(found, key=lambda pair: pair[0]):
        yield make()


def ancestors(ends: Iterable[Any]) -> list[Any]:
    """Return all operations that the tensors are computed from, in the order in which they were built."""
    return in_built_order(reached((t.op for t in ends), lambda op: [t.op for t in op.inputs]))


def in_built_order(operations: Iterable[Any]) -> list[Any]:
    """Sort operations by their number in the graph."""
    return sorted(operations, key=lambda op: int(op._id))


def conditions_with_loops(graph: Any, ends: Iterable[Any]) -> list[Any]:
    """Return the v2 conditions (If) among the ancestors of ``ends`` of which a branch contains a loop."""
    conditions = [op for op in ancestors(ends) if op.type in ("If", "StatelessIf")]
    functions = {f.signature.name: f for f in graph.as_graph_def().library.function} if conditions else {}

    def has_loop(name: str) -> bool:
        nodes = functions[name].node_def
        called = [a.func.name for node in nodes for a in node.attr.values() if a.func.name in functions]
        return any(node.op in _WHILES for node in nodes) or any(map(has_loop, called))

    branches = ("then_branch", "else_branch")
    return [op for op in conditions if any(has_loop(op.get_attr(which).name) for which in branches)]


def scope_of(name: str) -> str:
    """Return the scope in which a loop was built, without the loop's own suffix such as ``/while_1``."""
    scope = re.sub(r"/?while(_\d+)?(/while_context)?$", "", name) or name.partition("/")[0]
    return re.sub(r"/(fw|bw)/\1$", r"/\1", scope)  # bw/bw -> bw: scope of the direction and of its loop


def _inner(old: dict[str, list[Any]]) -> set[str]:
    """Return the names of loops inside the body of another loop."""
    found: set[str] = set()
    for name, enters in old.items():
        within = {e.get_attr("frame_name").decode() for e in _old_frame(name, enters).ops if e.type in _ENTERS}
        found |= within - {name}
    return found


def _old_frame(name: str, enters: Sequence[Any], every: Sequence[Any] = ()) -> Frame:
    """Build the ``Frame`` of a v1 loop.

    ``enters`` are its Enter operations that the requested tensors depend on; ``every`` has all of its Enter operations.
    """
    variables, outer = [], {}
    asked, entered = set(enters), sorted({*enters, *every}, key=lambda op: op._id)
    for enter in entered:
        (out,) = enter.outputs
        if enter.get_attr("is_constant"):
            outer[id(out)] = enter.inputs[0]
            continue
        merge = next((op for op in out.consumers() if op.type in ("Merge", "RefMerge")), None)
        if merge is not None:
            variables.append(replace(_old_variable(enter, merge), read=enter in asked))
    kept = _needed(variables)
    ops = _inside([v.after for v in kept], {v.before.op.name for v in kept} | {e.name for e in entered})
    return Frame(scope_of(name), "v1", _first(enters), kept, Source(outer), enters[0].graph, ops)


def _needed(variables: Sequence[Variable]) -> tuple[Variable, ...]:
    """Return the loop variables that are needed: those read, stacked outputs, and copies of the previous output."""
    writes = [v for v in variables if behind_identities(v.after).op.type == "TensorArrayWriteV3"]
    put_out = {id(behind_identities(behind_identities(v.after).op.inputs[2])) for v in writes}
    return tuple(v for v in variables if v.read or v in writes or id(behind_identities(v.after)) in put_out)


def _first(ops: Iterable[Any]) -> int:
    return min(int(op._id) for op in ops)


def _old_variable(enter: Any, merge: Any) -> Variable:
    switch = next(op for op in merge.outputs[0].consumers() if op.type in ("Switch", "RefSwitch"))
    following = next(t for t in merge.inputs if t.op.type in ("NextIteration", "RefNextIteration"))
    out = next((op.outputs[0] for op in switch.outputs[0].consumers() if op.type in ("Exit", "RefExit")), None)
    return Variable(enter.inputs[0], switch.outputs[1], following.op.inputs[0], out, (enter, 0))


def _inside(after: list[Any], boundary: set[str]) -> tuple[Any, ...]:
    def behind(operations: Iterable[Any]) -> list[Any]:
        return [op for op in operations if op.name not in boundary]

    return tuple(in_built_order(reached(behind(t.op for t in after), lambda op: behind(t.op for t in op.inputs))))


def _new_frame(op: Any, functions: dict[str, Any]) -> Frame:
    body, starts, ends = body_graph(functions[op.get_attr("body").name], op.inputs, op.graph)
    variables, outer = [], {}
    for i, (before, after) in enumerate(zip(starts, ends, strict=True)):
        if behind_identities(after) is before:
            outer[id(before)] = op.inputs[i]
        else:
            variables.append(Variable(op.inputs[i], before, after, op.outputs[i], (op, i)))
    ops = tuple(inner for inner in body.get_operations() if inner.type != "Placeholder")
    bounds = _bounds(op, functions[op.get_attr("cond").name], {v.reader[1] for v in variables})
    return Frame(scope_of(op.name), "v2", op._id, tuple(variables), Source(outer), body, ops, bounds)


def _bounds(loop: Any, condition: Any, changing: set[int]) -> tuple[Any, ...]:
    """Return upper bounds of a While's counters; empty if it ends otherwise. ``changing``: inputs that change."""
    _, given, (goes_on,) = body_graph(condition, loop.inputs, loop.graph)
    place = {id(tensor): i for i, tensor in enumerate(given)}
    found, waiting = [], [goes_on]
    while waiting:
        op = behind_identities(waiting.pop()).op
        if op.type == "LogicalAnd":
            waiting.extend(op.inputs)
            continue
        if op.type != "Less":
            return ()
        counter, bound = (behind_identities(t) for t in op.inputs)
        i, k = (place.get(id(t)) for t in (counter, bound))
        value = tensor_util.constant_value(bound) if k is None else loop.inputs[k]
        if i is None or tensor_util.constant_value(loop.inputs[i]) != 0 or value is None or k in changing:
            return ()
        found.append(value)
    return tuple(found)


class CannotCopyError(Exception):
    """Error with the reason why a body cannot be copied."""


def function_of(graph: Any, name: str) -> tuple[Any, Any]:
    """Return the function of this name, and the graph that defines it: the given graph or one around it."""
    while graph is not None:
        for function in graph.as_graph_def().library.function:
            if function.signature.name == name:
                return function, graph
        graph = getattr(graph, "outer_graph", None)
    raise CannotCopyError(f"a function that the graph does not have ({name!r})")


def body_graph(function: Any, inputs: Sequence[Any], home: Any) -> tuple[Any, list[Any], list[Any]]:
    """Copy a function into a graph of its own; return the graph, its placeholders and its results.

    ``home`` is the graph that defines the function and those that it calls. Shapes, also those of variables behind
    handles, are taken from ``inputs``, since the definition of a function does not contain them.
    """
    shapes = [t.shape for t in inputs]
    with home.as_default():
        definition, names = function_def_to_graph.function_def_to_graph_def(function, shapes, True)
    graph = tf.Graph()
    with graph.as_default():
        given = [tf.placeholder(t.dtype, t.shape) for t in inputs]
        for tensor, placeholder in zip(inputs, given, strict=True):
            if tensor.dtype.name in ("resource", "variant"):
                data = handle_data_util.get_resource_handle_data(tensor)
                handle_data_util.set_handle_data(placeholder, data)
        taken = {f"{arg.name}:0": p for arg, p in zip(function.signature.input_arg, given, strict=True)}
        wanted = [names[function.ret[arg.name]] for arg in function.signature.output_arg]
        returned = tf.import_graph_def(definition, taken, wanted, name="")
    return graph, given, list(returned)


_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank"})


#: Operations of conditions.
_BRANCHES = frozenset({"Switch", "Merge", "If", "StatelessIf"})


def _is_random(op: Any) -> bool:
    draws = op.type.startswith(("Random", "Stateful", "Truncated", "Multinomial"))
    return bool(op.op_def.is_stateful and draws)


class Paths:
    """Dependences in a loop's body: which tensors depend on the states, and which change from step to step.

    An operation that only reads the shape of a tensor does not depend on it. Random numbers change from step to step.
    """

    def __init__(self, frame: Frame, states: Sequence[Variable]) -> None:
        self.frame = frame
        self._variables = {id(v.before): v for v in frame.variables}
        self._states = {id(v.before) for v in states}
        while more := {i for i, v in self._variables.items() if i not in self._states and self.by_state(v.after)}:
            self._states |= more

    def by_state(self, tensor: Any) -> bool:
        """Return whether a tensor depends on the states before the step."""
        return any(id(t) in self._states for t in self.behind([tensor]))

    def by_step(self, tensor: Any) -> bool:
        """Return whether a tensor changes from step to step."""
        return any(self.is_variable(t) or _is_random(t.op) for t in self.behind([tensor]))

    def is_variable(self, tensor: Any) -> bool:
        """Return whether a tensor is a loop variable's value at the beginning of a step."""
        return id(tensor) in self._variables

    def new_at_each_step(self, targets: Iterable[Any]) -> list[Any]:
        """Return the step's inputs: the tensors behind the targets that change per step and depend on no state.

        Of such tensors, those nearest to the targets are returned. A condition that changes from step to step is
        replaced by the numbers that it is computed from.
        """
        found: dict[int, Any] = {}
        waiting, seen = list(targets), set()
        while waiting:
            tensor = waiting.pop(0)
            if id(tensor) in seen or self.frame.outer.get(tensor) is not None:
                continue
            seen.add(id(tensor))
            if not self.by_state(tensor):
                if self.by_step(tensor):
                    behind = [] if tensor.dtype.is_floating else [t for t in tensor.op.inputs if self.by_step(t)]
                    if behind and not self.is_variable(tensor):
                        waiting.extend(behind)
                    else:
                        found[id(tensor)] = tensor
            elif not self.is_variable(tensor) and tensor.op.type not in _SHAPES:
                waiting.extend(tensor.op.inputs)
        return list(found.values())

    def only_read(self, targets: Iterable[Any], reads: Sequence[Any]) -> list[Any]:
        """Return the step-by-step inputs on which the targets depend, if besides weights they depend on nothing else.

        Empty if the targets depend on random numbers, the number of the step, or a condition.
        """
        ids, found = {id(read) for read in reads}, set()
        for tensor in self.behind(targets, stop=ids):
            if id(tensor) in ids:
                found.add(id(tensor))
            elif self.is_variable(tensor) or tensor.op.type in _BRANCHES or _is_random(tensor.op):
                return []
        return [read for read in reads if id(read) in found]

    def chance(self, tensor: Any, reads: Sequence[Any]) -> Any:
        """Return the random operation behind a tensor; None without one, or if it depends on inputs too."""
        every = list(self.behind([tensor]))
        if any(t is read for t in every for read in reads):
            return None
        return next((t.op for t in every if _is_random(t.op)), None)

    def carried(self, targets: Iterable[Any]) -> list[Variable]:
        """Return the loop variables on which the targets depend, within one step or over several steps."""
        found: dict[int, Variable] = {}
        waiting = list(targets)
        while waiting:
            for variable in self.directly(waiting.pop()):
                if id(variable) not in found:
                    found[id(variable)] = variable
                    waiting.append(variable.after)
        return [v for v in self.frame.variables if id(v) in found]

    def directly(self, target: Any) -> list[Variable]:
        """Return the loop variables on which a tensor depends within one step."""
        return [self._variables[id(t)] for t in self.behind([target]) if id(t) in self._variables]

    def behind(self, targets: Iterable[Any], stop: Container[int] = ()) -> Iterator[Any]:
        """Yield the tensors of the body from which the targets are computed, the targets included.

        The search ends at tensors whose id is in ``stop``. Operations that only read the shape of a tensor are not
        followed.
        """
        waiting, seen = list(targets), set()
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in seen or self.frame.outer.get(tensor) is not None:
                continue
            seen.add(id(tensor))
            yield tensor
            if id(tensor) not in stop and not self.is_variable(tensor) and tensor.op.type not in _SHAPES:
                waiting.extend(tensor.op.inputs)
