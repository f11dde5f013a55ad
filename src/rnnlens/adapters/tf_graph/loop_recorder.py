"""Rewriting of parts of a loop's body as separate loops, so that the tensors between the parts can be read.

A loop with ``MultiRNNCell``, dropout, residual connections or projections becomes several: one for operations before
the first cell, one for each cell, one for the rest. Each reads the stacked outputs of the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from .blocks import NO_LOOP, Outer, Plan, evaluated, is_variable, reached, same
from .while_loops import CONDITIONS, LOOPS, Frame, body_graph

_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_LOOPS = LOOPS | {"NextIteration", "LoopCond"}


class CannotRecordError(Exception):
    """Error with the reason why a loop cannot be rewritten; ``hint`` is a remedy."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


class Copier:
    """Copies the operations behind tensors of a loop's body into the default graph and context.

    ``given`` has substitutes for tensors of the body, by id. ``outside`` returns the substitute of a tensor outside of
    the loop. ``in_branch``: the tensors are those of one branch of a v1 condition, whose Switch becomes its input.
    """

    def __init__(
        self, given: dict[int, Any], outer: Outer, outside: Callable[[Any], Any], *, in_branch: bool = False
    ) -> None:
        self._made, self._outer, self._outside, self._in_branch = dict(given), outer, outside, in_branch
        #: Names of the operations that drew random numbers.
        self.random: set[str] = set()

    def __call__(self, tensor: Any) -> Any:
        """Return a copy of a tensor; operations that are already copied are used again."""
        return evaluated(tensor, self._made, self._plan)

    def _plan(self, tensor: Any) -> Plan:
        """Return the tensors that must be copied before this one, and a function that copies it."""
        outside, op = self._outer.get(id(tensor)), tensor.op
        if outside is not None:
            return [], lambda: self._outside(outside)
        if op.type in _LOOPS:
            raise CannotRecordError(f"a loop within its body ({op.name!r})")
        if op.type == "Switch" and self._in_branch:
            return [op.inputs[0]], lambda: self._made[id(op.inputs[0])]
        if op.type in ("Switch", "Placeholder"):
            raise CannotRecordError(f"a variable of the loop other than its states ({op.name!r})")
        if is_variable(op):
            return [], lambda: self._outside(tensor)
        if op.type == "ReadVariableOp":
            handle = same(op.inputs[0], self._outer, ("Identity", "Switch", "Enter"))
            return [], lambda: self._outside(_read_of(handle, tensor.dtype))
        if op.type == "Merge":
            return _boundary_of(op), lambda: self._condition(op)
        return list(op.inputs), lambda: self._outputs(op)[tensor.value_index]

    def _outputs(self, op: Any) -> list[Any]:
        """Copy an operation, or the function that it calls; return all outputs of the copy."""
        if op.type in CONDITIONS:
            pred = self._made[id(op.inputs[0])]
            found = tf.cond(pred, self._branch(op, "then_branch"), self._branch(op, "else_branch"))
            copied = list(found) if isinstance(found, (list, tuple)) else [found]
        elif op.type in _CALLS:
            copied = self._call(op, op.get_attr("f").name, op.inputs)
        else:
            copied = self._operation(op)
        self._made |= {id(old): new for old, new in zip(op.outputs, copied, strict=True)}
        return copied

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
        """Copy one output of a v1 condition as a new ``tf.cond`` with copies of both branches."""
        pred, *others = _boundary_of(merge)
        inside = {id(t): self._made[id(t)] for t in (pred, *others)}

        def branch(index: int) -> Any:
            copier = Copier(inside, self._outer, self._outside, in_branch=True)
            return lambda: tf.identity(copier(merge.inputs[index]))

        return tf.cond(inside[id(pred)], branch(1), branch(0))

    def _branch(self, op: Any, which: str) -> Callable[[], list[Any]]:
        """Return a function that copies one branch of a v2 condition."""
        return lambda: [tf.identity(t) for t in self._call(op, op.get_attr(which).name, op.inputs[1:])]

    def _call(self, op: Any, name: str, inputs: Sequence[Any]) -> list[Any]:
        _, taken, returned = body_graph(op.graph, name, inputs)
        copier = Copier({id(p): self._made[id(t)] for p, t in zip(taken, inputs, strict=True)}, NO_LOOP, lambda t: t)
        found = [copier(t) for t in returned]
        self.random |= copier.random
        return found


def _read_of(handle: Any, dtype: Any) -> Any:
    """Return the value of a resource variable, read outside of any loop."""
    name = f"rnnlens_read/{handle.op.name}"
    try:
        return handle.graph.get_tensor_by_name(f"{name}:0")
    except KeyError:
        with handle.graph.as_default(), tf.control_dependencies(None):
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype, name=f"{name}/")


def _boundary_of(merge: Any) -> list[Any]:
    """Return the predicate of a v1 condition, and the tensors outside of it that its two branches read."""
    context, found = merge.inputs[1].op._get_control_flow_context(), []
    if getattr(context, "pred", None) is None:
        raise CannotRecordError(f"a condition that the graph no longer describes ({merge.name!r})")

    def before(op: Any) -> list[Any]:
        if op.type == "Switch" and op.inputs[1] is context.pred:
            found.append(op.inputs[0])
            return []
        return [t.op for t in op.inputs]

    reached((t.op for t in merge.inputs), before)
    return [context.pred, *found]


class LoopRecorder:
    """Runs parts of the body of one loop as new loops of ``count`` steps, a scalar tensor, in the same graph."""

    def __init__(self, frame: Frame, count: Any) -> None:
        self.frame, self.count, self.graph = frame, count, count.graph
        #: All steps of recorded tensors, (time, sample, ...), by id of the tensor of the body.
        self.steps: dict[int, Any] = {}
        #: Number of the run in which each random operation was copied.
        self.drawn: dict[str, int] = {}
        self._runs = 0

    def run(
        self,
        wanted: Sequence[Any],
        carried: Sequence[tuple[Any, Any]],
        before: Mapping[int, Sequence[Any]],
        kept: tuple[Any, bool] | None = None,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Build a loop; return all steps of some tensors, all steps of its states, and the final states.

        ``carried`` has the start value of each state, and the tensor of the body that is its new value. ``before`` has
        substitutes for the previous states in the body, by id: numbers of ``carried``, or tensors of which only the
        shape is used; several are concatenated. ``kept``: the condition under which a sample keeps its states, and
        whether False (instead of True) keeps them.
        """
        self._runs += 1
        with self.graph.as_default(), tf.control_dependencies(None), tf.name_scope(f"rnnlens/{self.frame.name}/"):
            used = self._used([*wanted, *(after for _, after in carried), *([] if kept is None else kept[:1])])
            known = {key: self._array(self.steps[key].dtype).unstack(self.steps[key]) for key in used}
            starts = [start for start, _ in carried]
            targets = (*wanted, *starts)
            outs = [self._array(t.dtype) for t in targets]
            _, outs, ends = tf.while_loop(
                lambda i, *_: i < self.count,
                self._body(wanted, [after for _, after in carried], known, before, kept),
                (tf.constant(0), outs, starts),
                parallel_iterations=1,  # so that random numbers are drawn in the order of the steps
                return_same_structure=True,
            )
            stacked = [array.stack() for array in outs]
            for tensor, steps in zip(targets, stacked, strict=True):
                steps.set_shape([None, *tensor.shape] if tensor.shape.rank is not None else None)
        for tensor, steps in zip(wanted, stacked, strict=False):
            self.steps.setdefault(id(tensor), steps)
        return stacked[: len(wanted)], stacked[len(wanted) :], list(ends)

    def _used(self, targets: Sequence[Any]) -> set[int]:
        """Return the ids of the already recorded tensors on which ``targets`` depend."""
        variables = {id(v.before) for v in self.frame.variables}

        def following(tensor: Any) -> Sequence[Any]:
            is_end = id(tensor) in self.steps or id(tensor) in variables or id(tensor) in self.frame.outer
            return () if is_end else tensor.op.inputs

        return {id(t) for t in reached(targets, following)} & self.steps.keys()

    def _array(self, dtype: Any) -> Any:
        return tf.TensorArray(dtype, size=self.count, infer_shape=False)

    def _body(
        self,
        wanted: Sequence[Any],
        new: Sequence[Any],
        known: Mapping[int, Any],
        before: Mapping[int, Sequence[Any]],
        kept: tuple[Any, bool] | None,
    ) -> Callable[..., Any]:
        times = [v.before for v in self.frame.clocks]

        def step(i: Any, outs: list[Any], states: list[Any]) -> Any:
            present = {id(t): tf.cast(i, t.dtype) for t in times}
            for key, parts in before.items():
                values = [states[p] if isinstance(p, int) else p for p in parts]
                present[key] = values[0] if len(values) == 1 else tf.concat(values, axis=-1)
            for key, array in known.items():
                present[key] = array.read(i)
                present[key].set_shape(self.steps[key].shape[1:])
            copier = Copier(present, self.frame.outer, lambda t: t)
            after = []
            for tensor, old in zip(new, states, strict=True):
                value = copier(tensor)
                if kept is not None:
                    condition = copier(kept[0])
                    if condition.shape.rank == 1:
                        condition = tf.reshape(condition, [-1, *[1] * (old.shape.rank - 1)])
                    value = tf.where_v2(condition, *((value, old) if kept[1] else (old, value)))
                after.append(tf.identity(value))
                after[-1].set_shape(old.shape)
            values = [*(copier(t) for t in wanted), *after]
            for name in copier.random:
                if self.drawn.setdefault(name, self._runs) != self._runs:
                    raise CannotRecordError(f"random numbers that are used in several places ({name!r})")
            return i + 1, [array.write(i, value) for array, value in zip(outs, values, strict=True)], after

        return step


def rewire(old: Any, new: Any) -> None:
    """Replace one tensor by another in all operations that read it."""
    for op in old.consumers():
        if op.name != new.op.name:
            for index, tensor in enumerate(op.inputs):
                if tensor is old:
                    op._update_input(index, new)
