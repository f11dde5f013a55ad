"""Rewriting of parts of a loop's body as separate loops, so that the tensors between the parts can be read.

A loop with ``MultiRNNCell``, dropout, residual connections or projections becomes several: one for operations before
the first cell, one for each cell, one for the rest. Each reads the stacked outputs of the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from .blocks import NO_LOOP, Outer, TensorPlan, evaluate, is_variable, transitive_closure, value_source
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

    ``substitutes``: those of tensors of the body, by id. ``substitute_outside`` returns that of a tensor outside of
    the loop. ``in_branch``: the tensors are those of one branch of a v1 condition, whose Switch becomes its input.
    """

    def __init__(
        self,
        substitutes: dict[int, Any],
        outer: Outer,
        substitute_outside: Callable[[Any], Any],
        *,
        in_branch: bool = False,
    ) -> None:
        self._copies = dict(substitutes)
        self._outer = outer
        self._substitute_outside = substitute_outside
        self._in_branch = in_branch
        #: Names of the operations that drew random numbers.
        self.random_names: set[str] = set()

    def __call__(self, tensor: Any) -> Any:
        """Return a copy of a tensor; operations that are already copied are used again."""
        return evaluate(tensor, self._copies, self._copy_plan)

    def _copy_plan(self, tensor: Any) -> TensorPlan:
        """Return the tensors that must be copied before this one, and a function that copies it."""
        outside_tensor, op = self._outer.get(id(tensor)), tensor.op
        if outside_tensor is not None:
            return [], lambda: self._substitute_outside(outside_tensor)
        if op.type in _LOOPS:
            raise CannotRecordError(f"a loop within its body ({op.name!r})")
        if op.type == "Switch" and self._in_branch:
            return [op.inputs[0]], lambda: self._copies[id(op.inputs[0])]
        if op.type in ("Switch", "Placeholder"):
            raise CannotRecordError(f"a variable of the loop other than its states ({op.name!r})")
        if is_variable(op):
            return [], lambda: self._substitute_outside(tensor)
        if op.type == "ReadVariableOp":
            handle = value_source(op.inputs[0], self._outer, ("Identity", "Switch", "Enter"))
            return [], lambda: self._substitute_outside(_variable_read(handle, tensor.dtype))
        if op.type == "Merge":
            return _condition_inputs(op), lambda: self._copy_condition(op)
        return list(op.inputs), lambda: self._copy_outputs(op)[tensor.value_index]

    def _copy_outputs(self, op: Any) -> list[Any]:
        """Copy an operation, or the function that it calls; return all outputs of the copy."""
        if op.type in CONDITIONS:
            predicate = self._copies[id(op.inputs[0])]
            branch_outputs = tf.cond(
                predicate, self._branch_copier(op, "then_branch"), self._branch_copier(op, "else_branch")
            )
            copies = list(branch_outputs) if isinstance(branch_outputs, (list, tuple)) else [branch_outputs]
        elif op.type in _CALLS:
            copies = self._copy_call(op, op.get_attr("f").name, op.inputs)
        else:
            copies = self._copy_operation(op)
        self._copies |= {id(old): new for old, new in zip(op.outputs, copies, strict=True)}
        return copies

    def _copy_operation(self, op: Any) -> list[Any]:
        if op.op_def.is_stateful and op.outputs and op.outputs[0].dtype.name != "resource":
            self.random_names.add(op.name)
        attrs = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
        copied_op = tf.get_default_graph().create_op(
            op.type,
            [self._copies[id(t)] for t in op.inputs],
            [t.dtype for t in op.outputs],
            attrs=attrs,
            name=op.name.rpartition("/")[2],
        )
        return list(copied_op.outputs)

    def _copy_condition(self, merge: Any) -> Any:
        """Copy one output of a v1 condition as a new ``tf.cond`` with copies of both branches."""
        predicate, *branch_inputs = _condition_inputs(merge)
        substitutes = {id(t): self._copies[id(t)] for t in (predicate, *branch_inputs)}

        def branch_copier(index: int) -> Any:
            copier = Copier(substitutes, self._outer, self._substitute_outside, in_branch=True)
            return lambda: tf.identity(copier(merge.inputs[index]))

        return tf.cond(substitutes[id(predicate)], branch_copier(1), branch_copier(0))

    def _branch_copier(self, op: Any, branch_attribute: str) -> Callable[[], list[Any]]:
        """Return a function that copies one branch of a v2 condition."""
        return lambda: [tf.identity(t) for t in self._copy_call(op, op.get_attr(branch_attribute).name, op.inputs[1:])]

    def _copy_call(self, op: Any, name: str, inputs: Sequence[Any]) -> list[Any]:
        _, placeholders, returned = body_graph(op.graph, name, inputs)
        copier = Copier(
            {id(p): self._copies[id(t)] for p, t in zip(placeholders, inputs, strict=True)}, NO_LOOP, lambda t: t
        )
        copies = [copier(t) for t in returned]
        self.random_names |= copier.random_names
        return copies


def _variable_read(handle: Any, dtype: Any) -> Any:
    """Return the value of a resource variable, read outside of any loop."""
    name = f"rnnlens_read/{handle.op.name}"
    try:
        return handle.graph.get_tensor_by_name(f"{name}:0")
    except KeyError:
        with handle.graph.as_default(), tf.control_dependencies(None):
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype, name=f"{name}/")


def _condition_inputs(merge: Any) -> list[Any]:
    """Return the predicate of a v1 condition, and the tensors outside of it that its two branches read."""
    context, outside_tensors = merge.inputs[1].op._get_control_flow_context(), []
    if getattr(context, "pred", None) is None:
        raise CannotRecordError(f"a condition that the graph no longer describes ({merge.name!r})")

    def operations_before(op: Any) -> list[Any]:
        if op.type == "Switch" and op.inputs[1] is context.pred:
            outside_tensors.append(op.inputs[0])
            return []
        return [t.op for t in op.inputs]

    transitive_closure((t.op for t in merge.inputs), operations_before)
    return [context.pred, *outside_tensors]


class LoopRecorder:
    """Runs parts of the body of one loop as new loops of ``step_count`` steps, a scalar tensor, in the same graph."""

    def __init__(self, frame: Frame, step_count: Any) -> None:
        self.frame, self.step_count, self.graph = frame, step_count, step_count.graph
        #: All steps of recorded tensors, (time, sample, ...), by id of the tensor of the body.
        self.steps: dict[int, Any] = {}
        #: Number of the run in which each random operation was copied.
        self.run_of_draw: dict[str, int] = {}
        self._run_count = 0

    def run(
        self,
        output_tensors: Sequence[Any],
        state_updates: Sequence[tuple[Any, Any]],
        substitutes: Mapping[int, Sequence[Any]],
        keep_condition: tuple[Any, bool] | None = None,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Build a loop; return all steps of some tensors, all steps of its states, and the final states.

        ``state_updates`` has the start value of each state, and the tensor of the body that is its new value.
        ``substitutes`` are those of the previous states in the body, by id: numbers of ``state_updates``, or tensors of
        which only the shape is used; several are concatenated. ``keep_condition``: the condition under which a sample
        keeps its states, and whether False (instead of True) keeps them.
        """
        self._run_count += 1
        with self.graph.as_default(), tf.control_dependencies(None), tf.name_scope(f"rnnlens/{self.frame.name}/"):
            used_ids = self._used_steps(
                [
                    *output_tensors,
                    *(new_value for _, new_value in state_updates),
                    *([] if keep_condition is None else keep_condition[:1]),
                ]
            )
            step_arrays = {key: self._step_array(self.steps[key].dtype).unstack(self.steps[key]) for key in used_ids}
            start_values = [start_value for start_value, _ in state_updates]
            targets = (*output_tensors, *start_values)
            output_arrays = [self._step_array(t.dtype) for t in targets]
            _, output_arrays, final_states = tf.while_loop(
                lambda i, *_: i < self.step_count,
                self._loop_body(
                    output_tensors,
                    [new_value for _, new_value in state_updates],
                    step_arrays,
                    substitutes,
                    keep_condition,
                ),
                (tf.constant(0), output_arrays, start_values),
                parallel_iterations=1,  # so that random numbers are drawn in the order of the steps
                return_same_structure=True,
            )
            stacked_tensors = [array.stack() for array in output_arrays]
            for tensor, steps in zip(targets, stacked_tensors, strict=True):
                steps.set_shape([None, *tensor.shape] if tensor.shape.rank is not None else None)
        for tensor, steps in zip(output_tensors, stacked_tensors, strict=False):
            self.steps.setdefault(id(tensor), steps)
        return stacked_tensors[: len(output_tensors)], stacked_tensors[len(output_tensors) :], list(final_states)

    def _used_steps(self, targets: Sequence[Any]) -> set[int]:
        """Return the ids of the already recorded tensors on which ``targets`` depend."""
        variables = {id(v.previous_value) for v in self.frame.variables}

        def unrecorded_inputs(tensor: Any) -> Sequence[Any]:
            is_end = id(tensor) in self.steps or id(tensor) in variables or id(tensor) in self.frame.outer
            return () if is_end else tensor.op.inputs

        return {id(t) for t in transitive_closure(targets, unrecorded_inputs)} & self.steps.keys()

    def _step_array(self, dtype: Any) -> Any:
        return tf.TensorArray(dtype, size=self.step_count, infer_shape=False)

    def _loop_body(
        self,
        output_tensors: Sequence[Any],
        new_states: Sequence[Any],
        step_arrays: Mapping[int, Any],
        substitutes: Mapping[int, Sequence[Any]],
        keep_condition: tuple[Any, bool] | None,
    ) -> Callable[..., Any]:
        clock_tensors = [v.previous_value for v in self.frame.clocks]

        def step(i: Any, output_arrays: list[Any], states: list[Any]) -> Any:
            present_values = {id(t): tf.cast(i, t.dtype) for t in clock_tensors}
            for key, substitute_parts in substitutes.items():
                values = [states[part] if isinstance(part, int) else part for part in substitute_parts]
                present_values[key] = values[0] if len(values) == 1 else tf.concat(values, axis=-1)
            for key, array in step_arrays.items():
                present_values[key] = array.read(i)
                present_values[key].set_shape(self.steps[key].shape[1:])
            copier = Copier(present_values, self.frame.outer, lambda t: t)
            new_values = []
            for tensor, old_value in zip(new_states, states, strict=True):
                value = copier(tensor)
                if keep_condition is not None:
                    condition = copier(keep_condition[0])
                    if condition.shape.rank == 1:
                        condition = tf.reshape(condition, [-1, *[1] * (old_value.shape.rank - 1)])
                    value = tf.where_v2(condition, *((value, old_value) if keep_condition[1] else (old_value, value)))
                new_values.append(tf.identity(value))
                new_values[-1].set_shape(old_value.shape)
            values = [*(copier(t) for t in output_tensors), *new_values]
            for name in copier.random_names:
                if self.run_of_draw.setdefault(name, self._run_count) != self._run_count:
                    raise CannotRecordError(f"random numbers that are used in several places ({name!r})")
            return (
                i + 1,
                [array.write(i, value) for array, value in zip(output_arrays, values, strict=True)],
                new_values,
            )

        return step


def rewire(old: Any, new: Any) -> None:
    """Replace one tensor by another in all operations that read it."""
    for op in old.consumers():
        if op.name != new.op.name:
            for index, tensor in enumerate(op.inputs):
                if tensor is old:
                    op._update_input(index, new)
