"""While loops of both kinds of control flow as one class: variables, invariants, body and dependences in it.

Control flow v1 is a ring of Enter, Merge, Switch, NextIteration and Exit; v2 one operation, whose body is a function.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import function_def_to_graph, tensor_util
from tensorflow.python.ops import control_flow_util, handle_data_util

from .blocks import NO_LOOP, Outer, constant_of, transitive_closure, value_source

_ENTERS = frozenset({"Enter", "RefEnter"})
#: v2 loops.
WHILES = frozenset({"While", "StatelessWhile"})
#: Operations that begin a loop of either kind.
LOOPS = _ENTERS | WHILES
_MERGES = frozenset({"Merge", "RefMerge"})
#: Operations that draw new random numbers at every run.
RANDOM = frozenset(
    {"RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "ParameterizedTruncatedNormal"}
    | {"RandomShuffle", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "Multinomial"}
)
#: v2 conditions.
CONDITIONS = frozenset({"If", "StatelessIf"})


@dataclass(frozen=True, eq=False)
class LoopVariable:
    """One loop variable of a while loop."""

    #: Tensor outside of the loop: the initial value.
    entry: Any
    #: Tensors of the body: the values at the beginning and at the end of a step.
    previous_value: Any
    next_value: Any
    #: Tensor outside of the loop: the final value; None if the graph has none.
    exit: Any
    #: The operation, and the number of its input, by which the loop reads ``entry``.
    reader: tuple[Any, int]
    #: Whether the requested tensors depend on the variable.
    is_read: bool = True


@dataclass(frozen=True, eq=False)
class Frame:
    """One while loop of control flow v1 or v2."""

    name: str
    kind: Literal["v1", "v2"]
    #: Number of its first operation, by which loops are sorted.
    first_op_number: int
    variables: tuple[LoopVariable, ...]
    #: From invariants of the body to tensors outside.
    outer: Outer
    graph: Any
    ops: tuple[Any, ...]
    #: Exclusive upper limits of its counters from 0, as tensors outside or numbers; empty if it ends otherwise.
    bounds: tuple[Any, ...] = ()

    @cached_property
    def floats(self) -> list[LoopVariable]:
        """Loop variables that are floating-point and no scalars."""
        return [v for v in self.variables if v.previous_value.dtype.is_floating and v.previous_value.shape.rank != 0]

    @cached_property
    def clocks(self) -> list[LoopVariable]:
        """Step counters: integer variables that start at 0 and grow by one."""

        def counts(v: LoopVariable) -> bool:
            sides = v.next_value.op.inputs if v.next_value.op.type in ("Add", "AddV2") else ()
            steps = [constant_of(t, self.outer) for t in sides if value_source(t, self.outer) is not v.previous_value]
            return len(sides) == 2 and steps == [1] and constant_of(v.entry, NO_LOOP) == 0

        return [v for v in self.variables if v.previous_value.dtype.is_integer and counts(v)]

    def is_time(self, tensor: Any) -> bool:
        """Return whether a tensor of the body is the number of the step."""
        return any(value_source(tensor, self.outer) is v.previous_value for v in self.clocks)


def frames_of(graph: Any, end_tensors: Iterable[Any]) -> Iterator[Frame]:
    """Yield all while loops among the ancestors of ``end_tensors``, in the order in which they were built.

    Each frame is built when the iterator reaches it, since rewriting an earlier loop may change what a later one reads.
    """
    ops = ancestors(end_tensors)
    enters_by_loop = _enters_by_frame(ops)
    all_enters = _enters_by_frame(graph.get_operations()) if enters_by_loop else {}
    frame_makers = [(op._id, partial(_v2_frame, op)) for op in ops if op.type in WHILES]
    for name, enters in enters_by_loop.items():
        merges = [op for enter in enters for op in enter.outputs[0].consumers() if op.type in _MERGES]
        context = merges[0]._get_control_flow_context() if merges else None
        # A loop in the body of another one is a part of that.
        if context is None or control_flow_util.GetContainingWhileContext(context.outer_context) is None:
            frame_makers.append((enters[0]._id, partial(_v1_frame, name, enters, all_enters[name])))
    for _, make_frame in sorted(frame_makers, key=lambda pair: pair[0]):
        yield make_frame()


def _enters_by_frame(operations: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the Enter operations by the name of their loop."""
    enters: dict[str, list[Any]] = defaultdict(list)
    for op in operations:
        if op.type in _ENTERS:
            enters[op.get_attr("frame_name").decode()].append(op)
    return enters


def ancestors(end_tensors: Iterable[Any]) -> list[Any]:
    """Return all operations that the tensors are computed from, in the order in which they were built."""
    return in_built_order(transitive_closure((t.op for t in end_tensors), lambda op: [t.op for t in op.inputs]))


def in_built_order(operations: Iterable[Any]) -> list[Any]:
    """Sort operations by their number in the graph."""
    return sorted(operations, key=lambda op: int(op._id))


def types_of(operations: Iterable[Any]) -> frozenset[str]:
    """Return the types of operations of a graph, including those inside of functions that they call."""
    op_list = list(operations)
    seen_functions = set[str]()

    def called_nodes(node: Any) -> list[Any]:
        functions = [f.name for value in node.attr.values() for f in (value.func, *value.list.func)]
        new_names = set(functions) - seen_functions - {""}
        seen_functions.update(new_names)
        return [n for name in new_names for n in op_list[0].graph._get_function(name).cached_definition.node_def]

    return frozenset(node.op for node in transitive_closure((op.node_def for op in op_list), called_nodes))


def loop_scope(name: str) -> str:
    """Return the scope in which a loop was built, without the loop's own suffix such as ``/while_1``."""
    scope = re.sub(r"/?while(_\d+)?(/while_context)?$", "", name) or name.partition("/")[0]
    return re.sub(r"/(fw|bw)/\1$", r"/\1", scope)  # bw/bw -> bw: scope of the direction and of its loop


def _v1_frame(name: str, read_enters: Sequence[Any], all_enters: Sequence[Any]) -> Frame:
    """Build the ``Frame`` of a v1 loop from its Enter operations: those behind the requested tensors, and all."""
    variables, outer = [], {}
    for enter in all_enters:
        (out,) = enter.outputs
        merge = next((op for op in out.consumers() if op.type in _MERGES), None)
        if enter.get_attr("is_constant"):
            outer[id(out)] = enter.inputs[0]
        elif merge is not None:
            switch = next(op for op in merge.outputs[0].consumers() if op.type in ("Switch", "RefSwitch"))
            next_iteration = next(t for t in merge.inputs if t.op.type in ("NextIteration", "RefNextIteration"))
            exits = [op.outputs[0] for op in switch.outputs[0].consumers() if op.type in ("Exit", "RefExit")]
            body_and_exit = switch.outputs[1], next_iteration.op.inputs[0], exits[0] if exits else None
            variables.append(LoopVariable(enter.inputs[0], *body_and_exit, (enter, 0), enter in read_enters))
    # Besides the variables that are read, stacked outputs and copies of the previous output are needed.
    writes = [v for v in variables if value_source(v.next_value).op.type == "TensorArrayWriteV3"]
    written_ids = {id(value_source(value_source(v.next_value).op.inputs[2])) for v in writes}
    kept_variables = tuple(
        v for v in variables if v.is_read or v in writes or id(value_source(v.next_value)) in written_ids
    )
    boundary_ops = {v.previous_value.op for v in kept_variables} | set(all_enters)

    def inner_operations(tensors: Iterable[Any]) -> list[Any]:
        return [t.op for t in tensors if t.op not in boundary_ops]

    ops = in_built_order(
        transitive_closure(
            inner_operations(v.next_value for v in kept_variables), lambda op: inner_operations(op.inputs)
        )
    )
    return Frame(loop_scope(name), "v1", read_enters[0]._id, kept_variables, outer, all_enters[0].graph, tuple(ops))


def _v2_frame(op: Any) -> Frame:
    body, body_inputs, body_results = body_graph(op.graph, op.get_attr("body").name, op.inputs)
    variables, outer = [], {}
    for i, (previous, result) in enumerate(zip(body_inputs, body_results, strict=True)):
        if value_source(result) is previous:
            outer[id(previous)] = op.inputs[i]
        else:
            variables.append(LoopVariable(op.inputs[i], previous, result, op.outputs[i], (op, i)))
    ops = tuple(inner for inner in body.get_operations() if inner.type != "Placeholder")
    bounds = _counter_bounds(op, {v.reader[1] for v in variables})
    return Frame(loop_scope(op.name), "v2", op._id, tuple(variables), outer, body, ops, bounds)


def _counter_bounds(loop: Any, changing_inputs: set[int]) -> tuple[Any, ...]:
    """Return the upper bounds of a While's step counters; empty if it ends otherwise, or if a bound changes."""
    _, placeholders, (continues,) = body_graph(loop.graph, loop.get_attr("cond").name, loop.inputs)
    input_index = {id(tensor): i for i, tensor in enumerate(placeholders)}
    bounds, waiting_tensors = [], [continues]
    while waiting_tensors:
        op = value_source(waiting_tensors.pop()).op
        if op.type == "LogicalAnd":
            waiting_tensors.extend(op.inputs)
            continue
        if op.type != "Less":
            return ()
        counter, bound = map(value_source, op.inputs)
        i, k = (input_index.get(id(t)) for t in (counter, bound))
        value = tensor_util.constant_value(bound) if k is None else loop.inputs[k]
        if i is None or tensor_util.constant_value(loop.inputs[i]) != 0 or value is None or k in changing_inputs:
            return ()
        bounds.append(value)
    return tuple(bounds)


def body_graph(outer_graph: Any, name: str, inputs: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
    """Copy a function into a graph of its own, with the shapes of ``inputs``; return it, placeholders and results."""
    function = outer_graph._get_function(name).cached_definition
    with outer_graph.as_default():
        definition, names = function_def_to_graph.function_def_to_graph_def(function, [t.shape for t in inputs], True)
    graph = tf.Graph()
    with graph.as_default():
        placeholders = [tf.placeholder(t.dtype, t.shape) for t in inputs]
        for tensor, placeholder in zip(inputs, placeholders, strict=True):
            if tensor.dtype.name in ("resource", "variant"):
                data = handle_data_util.get_resource_handle_data(tensor)
                handle_data_util.set_handle_data(placeholder, data)
        input_map = {f"{arg.name}:0": p for arg, p in zip(function.signature.input_arg, placeholders, strict=True)}
        result_names = [names[function.ret[arg.name]] for arg in function.signature.output_arg]
        returned = tf.import_graph_def(definition, input_map, result_names, name="")
    return graph, placeholders, list(returned)


_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank"})
#: Operations of conditions.
_BRANCHES = CONDITIONS | {"Switch", "Merge"}


def is_random(op: Any) -> bool:
    """Return whether an operation, or a function that it calls, draws random numbers."""
    return op.type in RANDOM or ("PartitionedCall" in op.type and bool(RANDOM & types_of([op])))


class LoopPaths:
    """Dependences in a loop's body: which tensors depend on the states, and which change from step to step.

    An operation that only reads the shape of a tensor does not depend on it. Random numbers change from step to step.
    """

    def __init__(self, frame: Frame, states: Sequence[LoopVariable]) -> None:
        self.frame = frame
        self._variables = {id(v.previous_value): v for v in frame.variables}
        self._states = {id(v.previous_value) for v in states}
        while dependent_ids := {
            i for i, v in self._variables.items() if i not in self._states and self.depends_on_state(v.next_value)
        }:
            self._states |= dependent_ids

    def depends_on_state(self, tensor: Any) -> bool:
        """Return whether a tensor of the body depends on the states before the step."""
        return any(id(t) in self._states for t in self.tensors_behind([tensor]))

    def varies_by_step(self, tensor: Any) -> bool:
        """Return whether a tensor of the body changes from step to step."""
        return any(self.is_variable(t) or is_random(t.op) for t in self.tensors_behind([tensor]))

    def is_variable(self, tensor: Any) -> bool:
        """Return whether a tensor is a loop variable's value at the beginning of a step."""
        return id(tensor) in self._variables

    def nearest_step_inputs(self, targets: Iterable[Any]) -> list[Any]:
        """Return the tensors nearest to the targets that change from step to step and depend on no state."""
        nearest: dict[int, Any] = {}
        waiting_tensors, seen_ids = list(targets), set()
        while waiting_tensors:
            tensor = waiting_tensors.pop(0)
            if id(tensor) in seen_ids or id(tensor) in self.frame.outer:
                continue
            seen_ids.add(id(tensor))
            if not self.depends_on_state(tensor):
                if self.varies_by_step(tensor):  # a condition is replaced by the numbers that it is computed from
                    step_inputs = (
                        [] if tensor.dtype.is_floating else [t for t in tensor.op.inputs if self.varies_by_step(t)]
                    )
                    if step_inputs and not self.is_variable(tensor):
                        waiting_tensors.extend(step_inputs)
                    else:
                        nearest[id(tensor)] = tensor
            elif not self.is_variable(tensor) and tensor.op.type not in _SHAPES:
                waiting_tensors.extend(tensor.op.inputs)
        return list(nearest.values())

    def sole_sequences(self, targets: Iterable[Any], reads: Sequence[Any]) -> list[Any]:
        """Return the sequences whose current step the targets depend on; empty if other than weights matter too."""
        ids, used_ids = {id(read) for read in reads}, set()
        for tensor in self.tensors_behind(targets, stop_ids=ids):
            if id(tensor) in ids:
                used_ids.add(id(tensor))
            elif self.is_variable(tensor) or tensor.op.type in _BRANCHES or is_random(tensor.op):
                return []
        return [read for read in reads if id(read) in used_ids]

    def variables_behind(self, targets: Iterable[Any]) -> list[LoopVariable]:
        """Return the loop variables on which the targets depend, within one step or over several steps."""
        starts = [v for target in targets for v in self.variables_within_step(target)]
        variable_ids = {id(v) for v in transitive_closure(starts, lambda v: self.variables_within_step(v.next_value))}
        return [v for v in self.frame.variables if id(v) in variable_ids]

    def variables_within_step(self, target: Any) -> list[LoopVariable]:
        """Return the loop variables on which a tensor depends within one step."""
        return [self._variables[id(t)] for t in self.tensors_behind([target]) if id(t) in self._variables]

    def tensors_behind(self, targets: Iterable[Any], stop_ids: Container[int] = ()) -> list[Any]:
        """Return the targets and the tensors of the body behind them, up to ``stop_ids`` and reads of a shape."""

        def inner_inputs(tensor: Any) -> list[Any]:
            is_end = id(tensor) in stop_ids or self.is_variable(tensor) or tensor.op.type in _SHAPES
            return [] if is_end else [t for t in tensor.op.inputs if id(t) not in self.frame.outer]

        return transitive_closure((t for t in targets if id(t) not in self.frame.outer), inner_inputs)
