"""Rewriting of while loops with several cells, or an unknown one, as loops whose boundaries can all be read."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow.compat.v1 as tf

from rnnlens.errors import message

from .blocks import value_source, width_of
from .cells import Match
from .loop_analysis import LoopAnalysis, flat_mask, unknown_reason
from .loop_recorder import CannotRecordError, LoopRecorder, rewire
from .recurrences import Loop, LoopBoundary, LoopCell
from .sequences import SequenceRead, find_user_tensor, mask_of
from .step_graph import StepGraph
from .while_loops import Frame, LoopVariable, is_random


def split(analysis: LoopAnalysis, *, as_one: bool = False) -> list[Loop]:
    """Split a while loop into one recurrence per known cell, or with ``as_one`` into a single one.

    Where that is impossible, the loop is returned with the reason.
    """
    try:
        return _LoopSplitter(analysis).loops(as_one=as_one)
    except CannotRecordError as reason:
        return [refused_loop(analysis.frame, analysis.states, analysis.reads, str(reason), reason.hint)]


def refused_loop(
    frame: Frame, states: Sequence[LoopVariable], all_reads: Sequence[SequenceRead], reason: str, hint: str = ""
) -> Loop:
    """Create the ``Loop`` of a while loop whose steps cannot be run one by one, which an error then states."""
    text = message(
        f"The loop {frame.name!r} is run by a cell that rnnlens does not know, and its steps cannot be run one by one.",
        got=reason,
        expected="a step that is a function of its input, the states before it and weights, sample by sample",
        hint=hint or 'dynamic_rnn with a cell of tf.nn.rnn_cell or of your own; other layers by layers=["..."]',
    )
    float_reads = [sequence_read for sequence_read in all_reads if sequence_read.value.dtype.is_floating]
    readers = tuple(sequence_read.reader for sequence_read in float_reads[:1] if sequence_read.reader is not None)
    input_boundary = (
        LoopBoundary((float_reads[0].sequence,), (readers,), is_sequence=True) if readers else LoopBoundary(())
    )
    course_arguments = find_user_tensor(float_reads[0].sequence)[1] if float_reads else {}
    return Loop(
        frame.name,
        frame.kind,
        LoopCell("unknown", width_of(states[0].previous_value) or 0, refusal=text),
        tuple(LoopBoundary((v.entry,), ((v.reader,),)) for v in states),
        tuple(LoopBoundary((v.exit,)) for v in states if v.exit is not None),
        input_boundary,
        None,
        **course_arguments,
    )


class _LoopSplitter:
    """Records a loop's parts one after the other: the operations before a cell, the cell, those after the last one."""

    def __init__(self, analysis: LoopAnalysis) -> None:
        self.analysis = analysis
        float_reads = [sequence_read for sequence_read in analysis.reads if sequence_read.value.dtype.is_floating]
        if not float_reads:
            raise CannotRecordError("no tensor with time in front that it reads step by step")
        self.sequence = float_reads[0].sequence
        with self.sequence.graph.as_default():
            self.recorder = LoopRecorder(analysis.frame, tf.shape(self.sequence)[0])
        for sequence_read in analysis.reads:
            self.recorder.steps[id(sequence_read.value)] = sequence_read.sequence
        self.replacements: dict[str, Any] = {}
        self.final_values: dict[int, Any] = {}
        self.start_values = {id(v): self._tap(v.entry) for v in analysis.states}
        self.mask_arguments = analysis.mask_arguments
        if analysis.condition is not None and not self.mask_arguments:
            condition, keeps_where = analysis.condition
            self._record_steps([condition])
            self.mask_arguments = {"mask": flat_mask(self.recorder.steps[id(condition)], keeps_where)}

    def loops(self, *, as_one: bool) -> list[Loop]:
        """Return one loop per known cell, in the order of their dependence; or a single loop of unknown equations."""
        analysis, quantities = self.analysis, list(self.analysis.probe.by_key)
        order = sorted(analysis.matches, key=lambda match: quantities.index(match.new_states[0]))
        if not analysis.is_covered:
            loops = [self._unknown_cell_loop("")]
        elif as_one or not self._can_run_in_turn(order):
            loops = [self._unknown_cell_loop("its cells read previous states of one another")]
        else:
            name = analysis.frame.name
            names = [f"{name}/cell_{i}" for i in range(len(order))] if len(order) > 1 else [name]
            loops = [self._known_cell_loop(match, name) for match, name in zip(order, names, strict=True)]
            self._rebuild_outputs()
        cell = replace(loops[0].cell, conditions=analysis.full_length_conditions(self.sequence))
        loops[0] = replace(
            loops[0], cell=cell, replaced_tensors=self.replacements, is_redrawn=bool(self.recorder.run_of_draw)
        )
        return loops

    def _can_run_in_turn(self, order: Sequence[Match]) -> bool:
        """Return whether a loop's cells can be run one after another: none reads another's state of the step before."""
        analysis, recorded_ids = self.analysis, set(self.recorder.steps)
        states = {id(v.previous_value) for v in analysis.states}

        def reads_no_state(targets: Sequence[Any]) -> bool:
            dependences = analysis.paths.tensors_behind(
                [*targets, *(v.next_value for v in self._other_variables(targets, recorded_ids))], stop_ids=recorded_ids
            )
            return not any(id(t) in states for t in dependences if id(t) not in recorded_ids)

        for match in order:
            if not reads_no_state(analysis.probe.tensors[match.source][:1]):
                return False
            recorded_ids |= {id(t) for key in match.new_states for t in analysis.probe.tensors[key]}
        return reads_no_state([w.value for w in analysis.writes if w.sequence is not None and w.variable.is_read])

    def _other_variables(self, targets: Sequence[Any], recorded_ids: Container[int]) -> list[LoopVariable]:
        """Return the loop variables, other than states, that ``targets`` depend on, up to ``recorded_ids``."""
        paths = self.analysis.paths
        read_tensors = [
            t for t in paths.tensors_behind(targets, recorded_ids) if paths.is_variable(t) and id(t) not in recorded_ids
        ]
        counters = [
            v
            for v in self.analysis.frame.variables
            if v.previous_value.dtype.is_integer and v.previous_value.shape.rank == 0
        ]
        return [v for v in paths.variables_behind(read_tensors) if v not in (*self.analysis.states, *counters)]

    def _tap(self, tensor: Any) -> Any:
        """Return an identity of a tensor that only the rewritten loops read, so that gradients there come from them."""
        with tensor.graph.as_default(), tf.control_dependencies(None):
            return tf.identity(tensor, name=f"rnnlens/{self.analysis.frame.name}/boundary")

    def _record_steps(self, tensors: Sequence[Any]) -> dict[int, Any]:
        """Compute all steps of ``tensors``; return the last values of the variables, states apart, that they read."""
        missing_tensors = [t for t in tensors if id(t) not in self.recorder.steps]
        if not missing_tensors:
            return {}
        analysis, other_variables = self.analysis, self._other_variables(missing_tensors, self.recorder.steps)
        substitutes: dict[int, Sequence[Any]] = {id(v.previous_value): (i,) for i, v in enumerate(other_variables)}
        substitutes |= {id(v.previous_value): (v.entry,) for v in analysis.states}  # only the shape is used
        _, _, final_values = self.recorder.run(
            missing_tensors, [(v.entry, v.next_value) for v in other_variables], substitutes
        )
        return {id(v): final_value for v, final_value in zip(other_variables, final_values, strict=True)}

    def _record_cell(
        self, cell: LoopCell, names: tuple[str, str], sources: Mapping[int, Any], tap: Any, states: Any, output: Any
    ) -> tuple[Loop, list[Any], list[Any]]:
        """Run one cell as a loop of its own; return the recurrence, all steps of its states, and their last values.

        ``names`` are those of the recurrence and of its scope. ``sources`` has the steps of the input ``tap`` by id
        of the tensor of the body, for this cell alone. ``states`` are the start values, the new values in the body and
        the substitutes for the previous ones. ``output`` is a tensor of the body, or None for the first state.
        """
        analysis, recorder = self.analysis, self.recorder
        start_values, new_states, substitutes = states
        keep_condition = None if analysis.condition is None else (analysis.condition[0], not analysis.condition[1])
        outer_steps = {key: recorder.steps[key] for key in sources}
        recorder.steps |= sources
        output_tensors = [] if output is None else [output]
        state_updates = list(zip(start_values, new_states, strict=True))
        outputs, steps, final_states = recorder.run(output_tensors, state_updates, substitutes, keep_condition)
        recorder.steps |= outer_steps
        loop = Loop(
            names[0],
            analysis.frame.kind,
            cell,
            tuple(_loop_boundary(start_value) for start_value in start_values),
            tuple(LoopBoundary((final_state,)) for final_state in final_states),
            _loop_boundary(tap, is_sequence=True),
            LoopBoundary(((outputs or steps)[0],), is_sequence=True),
            masked_output="state" if output is None else "zero",
            scope=names[1],
            **self.mask_arguments,
            **find_user_tensor(self.sequence)[1],
        )
        return loop, steps, final_states

    def _known_cell_loop(self, match: Match, name: str) -> Loop:
        analysis, recorder = self.analysis, self.recorder
        state_indices = analysis.state_indices(match)
        tensor_groups = [analysis.probe.tensors[key] for key in (match.source, *match.new_states)]
        if not all(tensor_groups):
            raise CannotRecordError("a value that no tensor of its body holds")
        source, *new_states = (tensors[0] for tensors in tensor_groups)
        self._record_steps([source])
        source_steps, source_ids = recorder.steps[id(source)], list(map(id, tensor_groups[0]))
        recorder.steps |= dict.fromkeys(source_ids, source_steps)
        tap = self._tap(source_steps)
        substitutes: dict[int, list[Any]] = {}  # numbers of the cell's own states; of others only the shape is used
        for i, (variable, _) in enumerate(analysis.pair_owners):
            substitutes.setdefault(id(variable.previous_value), []).append(
                state_indices.index(i) if i in state_indices else self._start_value(i)
            )
        states = [self._start_value(i) for i in state_indices], new_states, substitutes
        loop, steps, final_states = self._record_cell(
            match.cell, (name, match.scope), dict.fromkeys(source_ids, tap), tap, states, None
        )
        for tensors, state_steps in zip(tensor_groups[1:], steps, strict=True):
            recorder.steps |= dict.fromkeys(map(id, tensors), state_steps)
        self.final_values |= dict(zip(state_indices, final_states, strict=True))
        for variable in (analysis.pair_owners[i][0] for i in state_indices):
            indices = [i for i, (v, _) in enumerate(analysis.pair_owners) if v is variable]
            if variable.exit is not None and self.final_values.keys() >= set(indices):  # all states in it are recorded
                with self.sequence.graph.as_default():
                    final_parts = [self.final_values[i] for i in indices]
                    self._replace(
                        variable.exit, final_parts[0] if len(indices) == 1 else tf.concat(final_parts, axis=-1)
                    )
        return loop

    def _start_value(self, index: int) -> Any:
        """Return the start value of a state; it is a part of a loop variable that joins several states."""
        variable, columns = self.analysis.pair_owners[index]
        start = self.start_values[id(variable)]
        if columns is None:
            return start
        with start.graph.as_default():
            return self._tap(start[:, columns[0] : columns[1]])

    def _rebuild_outputs(self) -> None:
        """Rebuild all stacked outputs of the loop from the recorded steps of its cells."""
        frame = self.analysis.frame
        writes = [w for w in self.analysis.writes if w.sequence is not None and w.variable.is_read]
        if self.mask_arguments and any(not self._hidden_where_masked(w.value) for w in writes):
            raise CannotRecordError("an output that counts at steps where the states are kept")
        final_values = self._record_steps([w.value for w in writes])
        for variable in frame.variables:
            if id(variable) in final_values and variable.exit is not None:
                self._replace(variable.exit, final_values[id(variable)])
        for write in writes:
            steps = self.recorder.steps[id(write.value)]
            with steps.graph.as_default():  # or every step writes to the same single position
                self._replace(write.sequence, steps if frame.is_time(write.index) else steps[-1:])

    def _hidden_where_masked(self, value: Any) -> bool:
        """Return whether an output is replaced at masked steps, by the same condition that keeps the states."""
        op, analysis = value_source(value).op, self.analysis
        if op.type not in ("Select", "SelectV2") or analysis.condition is None:
            return False
        loop_mask, output_mask = analysis.mask, mask_of(op.inputs[0], analysis.frame, analysis.reads)
        return op.inputs[0] is analysis.condition[0] or (loop_mask is not None and loop_mask.agrees(output_mask))

    def _replace(self, old: Any, new: Any) -> None:
        rewire(old, new)
        self.replacements[old.name] = new

    def _unknown_cell_loop(self, reason: str) -> Loop:
        """Return one loop of a cell of unknown equations, with all states and with the loop's body as its step."""
        analysis, recorder = self.analysis, self.recorder
        new_states = [analysis.new_values[id(v)] for v in analysis.states]
        previous_states = [v.previous_value for v in analysis.states]
        writes = [
            w for w in analysis.writes if w.sequence is not None and w.variable.is_read and w.value.dtype.is_floating
        ]
        output = writes[0].value if writes else new_states[0]
        if writes and analysis.condition is not None and self._hidden_where_masked(output):
            output = value_source(output).op.inputs[2 if analysis.condition[1] else 1]
        step_inputs = self._step_inputs([output, *new_states])
        sample_counts = {t.shape.as_list()[0] for t in (*previous_states, *step_inputs) if t.shape.rank}
        if not all(map(_is_row, previous_states)) or len(sample_counts - {None}) > 1:
            raise CannotRecordError("a state that is not (sample, unit)")
        ranks = {t.shape.rank for t in (*previous_states, *step_inputs, output)}
        spaces = {tuple(t.shape.as_list()[1:-1]) for t in step_inputs}
        if len(ranks) > 1 or len(spaces) > 1:
            raise CannotRecordError("images beside vectors, or inputs of several sizes")
        step = StepGraph(step_inputs, previous_states, output, new_states, analysis.frame.outer)
        self._record_steps(step_inputs)
        with self.sequence.graph.as_default():
            concatenated = (
                tf.concat([recorder.steps[id(t)] for t in step_inputs], axis=-1) if len(step_inputs) > 1 else None
            )
            tap = self._tap(recorder.steps[id(step_inputs[0])] if concatenated is None else concatenated)
            input_parts = (
                [tap] if concatenated is None else tf.split(tap, [int(t.shape[-1]) for t in step_inputs], axis=-1)
            )
        name = step.scope or analysis.frame.name
        cell = LoopCell(
            name, int(previous_states[0].shape[-1]), body=step, unknown_reason=reason or unknown_reason(analysis)
        )
        start_values = [self.start_values[id(v)] for v in analysis.states]
        substitutes = {id(t): [i] for i, t in enumerate(previous_states)}
        sources, names = dict(zip(map(id, step_inputs), input_parts, strict=True)), (analysis.frame.name, step.scope)
        loop, _, final_states = self._record_cell(
            cell, names, sources, tap, (start_values, new_states, substitutes), output
        )
        for variable, final_state in zip(analysis.states, final_states, strict=True):
            if variable.exit is not None:
                self._replace(variable.exit, final_state)
        if writes:
            self._rebuild_outputs()
        return loop

    def _step_inputs(self, targets: Sequence[Any]) -> list[Any]:
        """Return the tensors of the body that are new at each step, which are the input of the step.

        Raise ``CannotRecordError`` unless they are (sample, feature) numbers that are not drawn at random.
        """
        paths, reads = self.analysis.paths, [sequence_read.value for sequence_read in self.analysis.reads]
        step_inputs = paths.nearest_step_inputs(targets)
        step_inputs = paths.sole_sequences(step_inputs, reads) or step_inputs
        for dependences in (paths.tensors_behind([tensor]) for tensor in step_inputs):
            random_op = next((t.op for t in dependences if is_random(t.op)), None)
            if random_op is not None and not any(t is sequence_read for t in dependences for sequence_read in reads):
                raise CannotRecordError(
                    f"its states are changed by random numbers that are drawn anew at each step ({random_op.name!r})",
                    "a keep probability of 1, set by feed= of rl.tf1.graph, as evaluation has it; or "
                    "DropoutWrapper(variational_recurrent=True); rl.gradients by inputs and weights as it is",
                )
        if not step_inputs or not all(_is_row(t) and t.dtype.is_floating for t in step_inputs):
            tensor_names = ", ".join(repr(t.op.name) for t in step_inputs) or "nothing"
            raise CannotRecordError(
                f"what is new to it at each step is not floating (sample, feature) numbers: {tensor_names}"
            )
        return step_inputs


def _is_row(tensor: Any) -> bool:
    """Return whether a tensor has one vector or one image of a known size per sample: (sample, *space, unit)."""
    rank = tensor.shape.rank
    return rank is not None and 2 <= rank <= 5 and tensor.shape[1:].is_fully_defined()


def _loop_boundary(tap: Any, *, is_sequence: bool = False) -> LoopBoundary:
    return LoopBoundary((tap.op.inputs[0],), (((tap.op, 0),),), is_sequence=is_sequence)
