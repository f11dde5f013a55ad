"""Rewriting of while loops with several cells, or an unknown one, as loops whose boundaries can all be read."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow.compat.v1 as tf

from ...errors import message
from .blocks import same, width_of
from .cells import Match
from .loop_analysis import LoopAnalysis, flat_mask, why_unknown
from .loop_recorder import CannotRecordError, LoopRecorder, rewire
from .recurrences import Loop, LoopBoundary, LoopCell
from .sequences import Read, course_of, mask_of
from .step_graph import StepGraph
from .while_loops import Frame, Variable, is_random


def split(analysis: LoopAnalysis, *, as_one: bool = False) -> list[Loop]:
    """Split a while loop into one recurrence per known cell, or with ``as_one`` into a single one.

    Where that is impossible, the loop is returned with the reason.
    """
    try:
        return _LoopSplitter(analysis).loops(as_one=as_one)
    except CannotRecordError as reason:
        return [refused(analysis.frame, analysis.states, analysis.reads, str(reason), reason.hint)]


def refused(frame: Frame, states: Sequence[Variable], found: Sequence[Read], reason: str, hint: str = "") -> Loop:
    """Create the ``Loop`` of a while loop whose steps cannot be run one by one, which an error then states."""
    words = message(
        f"The loop {frame.name!r} is run by a cell that rnnlens does not know, and its steps cannot be run one by one.",
        got=reason,
        expected="a step that is a function of its input, the states before it and weights, sample by sample",
        hint=hint or 'dynamic_rnn with a cell of tf.nn.rnn_cell or of your own; other layers by layers=["..."]',
    )
    reads = [read for read in found if read.value.dtype.is_floating]
    readers = tuple(read.reader for read in reads[:1] if read.reader is not None)
    source = LoopBoundary((reads[0].stacked,), (readers,), stacked=True) if readers else LoopBoundary(())
    course = course_of(reads[0].stacked)[1] if reads else {}
    return Loop(
        frame.name,
        frame.kind,
        LoopCell("unknown", width_of(states[0].before) or 0, refused=words),
        tuple(LoopBoundary((v.entry,), ((v.reader,),)) for v in states),
        tuple(LoopBoundary((v.exit,)) for v in states if v.exit is not None),
        source,
        None,
        **course,
    )


class _LoopSplitter:
    """Records a loop's parts one after the other: the operations before a cell, the cell, those after the last one."""

    def __init__(self, analysis: LoopAnalysis) -> None:
        self.analysis = analysis
        floats = [read for read in analysis.reads if read.value.dtype.is_floating]
        if not floats:
            raise CannotRecordError("no tensor with time in front that it reads step by step")
        self.stacked = floats[0].stacked
        with self.stacked.graph.as_default():
            self.recorder = LoopRecorder(analysis.frame, tf.shape(self.stacked)[0])
        for read in analysis.reads:
            self.recorder.steps[id(read.value)] = read.stacked
        self.replaced: dict[str, Any] = {}
        self.ends: dict[int, Any] = {}
        self.starts = {id(v): self._tapped(v.entry) for v in analysis.states}
        self.mask = analysis.mask_words
        if analysis.condition is not None and not self.mask:
            condition, where = analysis.condition
            self._known([condition])
            self.mask = {"mask": flat_mask(self.recorder.steps[id(condition)], where)}

    def loops(self, *, as_one: bool) -> list[Loop]:
        """Return one loop per known cell, in the order of their dependence; or a single loop of unknown equations."""
        analysis, computed = self.analysis, list(self.analysis.probe.by_key)
        order = sorted(analysis.matches, key=lambda match: computed.index(match.after[0]))
        if not analysis.covered:
            found = [self._native("")]
        elif as_one or not self._in_turn(order):
            found = [self._native("its cells read previous states of one another")]
        else:
            name = analysis.frame.name
            names = [f"{name}/cell_{i}" for i in range(len(order))] if len(order) > 1 else [name]
            found = [self._cell(match, name) for match, name in zip(order, names, strict=True)]
            self._rebuild_outputs()
        cell = replace(found[0].cell, conditions=analysis.runs_through(self.stacked))
        found[0] = replace(found[0], cell=cell, replaced=self.replaced, redrawn=bool(self.recorder.drawn))
        return found

    def _in_turn(self, order: Sequence[Match]) -> bool:
        """Return whether a loop's cells can be run one after another: none reads another's state of the step before."""
        analysis, known = self.analysis, set(self.recorder.steps)
        states = {id(v.before) for v in analysis.states}

        def reads_no_state(targets: Sequence[Any]) -> bool:
            behind = analysis.paths.behind([*targets, *(v.after for v in self._beside(targets, known))], stop=known)
            return not any(id(t) in states for t in behind if id(t) not in known)

        for match in order:
            if not reads_no_state(analysis.probe.tensors[match.source][:1]):
                return False
            known |= {id(t) for key in match.after for t in analysis.probe.tensors[key]}
        return reads_no_state([w.value for w in analysis.writes if w.stacked is not None and w.variable.read])

    def _beside(self, targets: Sequence[Any], known: Container[int]) -> list[Variable]:
        """Return the loop variables, other than states, that ``targets`` depend on, up to the tensors ``known``."""
        paths = self.analysis.paths
        read = [t for t in paths.behind(targets, known) if paths.is_variable(t) and id(t) not in known]
        counts = [v for v in self.analysis.frame.variables if v.before.dtype.is_integer and v.before.shape.rank == 0]
        return [v for v in paths.carried(read) if v not in (*self.analysis.states, *counts)]

    def _tapped(self, tensor: Any) -> Any:
        """Return an identity of a tensor that only the rewritten loops read, so that gradients there come from them."""
        with tensor.graph.as_default(), tf.control_dependencies(None):
            return tf.identity(tensor, name=f"rnnlens/{self.analysis.frame.name}/boundary")

    def _known(self, tensors: Sequence[Any]) -> dict[int, Any]:
        """Compute all steps of ``tensors``; return the last values of the variables, states apart, that they read."""
        missing = [t for t in tensors if id(t) not in self.recorder.steps]
        if not missing:
            return {}
        analysis, beside = self.analysis, self._beside(missing, self.recorder.steps)
        before: dict[int, Sequence[Any]] = {id(v.before): (i,) for i, v in enumerate(beside)}
        before |= {id(v.before): (v.entry,) for v in analysis.states}  # only the shape is used
        _, _, ends = self.recorder.run(missing, [(v.entry, v.after) for v in beside], before)
        return {id(v): end for v, end in zip(beside, ends, strict=True)}

    def _recorded(
        self, cell: LoopCell, names: tuple[str, str], sources: Mapping[int, Any], tap: Any, states: Any, output: Any
    ) -> tuple[Loop, list[Any], list[Any]]:
        """Run one cell as a loop of its own; return the recurrence, all steps of its states, and their last values.

        ``names`` are those of the recurrence and of its scope. ``sources`` has the steps of the input ``tap`` by id
        of the tensor of the body, for this cell alone. ``states`` are the start values, the new values in the body and
        the substitutes for the previous ones. ``output`` is a tensor of the body, or None for the first state.
        """
        analysis, recorder = self.analysis, self.recorder
        starts, after, before = states
        kept = None if analysis.condition is None else (analysis.condition[0], not analysis.condition[1])
        around = {key: recorder.steps[key] for key in sources}
        recorder.steps |= sources
        wanted, carried = [] if output is None else [output], list(zip(starts, after, strict=True))
        outputs, steps, ends = recorder.run(wanted, carried, before, kept)
        recorder.steps |= around
        loop = Loop(
            names[0],
            analysis.frame.kind,
            cell,
            tuple(_boundary(start) for start in starts),
            tuple(LoopBoundary((end,)) for end in ends),
            _boundary(tap, stacked=True),
            LoopBoundary(((outputs or steps)[0],), stacked=True),
            masked_output="state" if output is None else "zero",
            scope=names[1],
            **self.mask,
            **course_of(self.stacked)[1],
        )
        return loop, steps, ends

    def _cell(self, match: Match, name: str) -> Loop:
        analysis, recorder = self.analysis, self.recorder
        numbers = analysis.numbers(match)
        held = [analysis.probe.tensors[key] for key in (match.source, *match.after)]
        if not all(held):
            raise CannotRecordError("a value that no tensor of its body holds")
        source, *after = (tensors[0] for tensors in held)
        self._known([source])
        whole, alike = recorder.steps[id(source)], list(map(id, held[0]))
        recorder.steps |= dict.fromkeys(alike, whole)
        tap = self._tapped(whole)
        before: dict[int, list[Any]] = {}  # numbers of the cell's own states; of others only the shape is used
        for i, (variable, _) in enumerate(analysis.owners):
            before.setdefault(id(variable.before), []).append(numbers.index(i) if i in numbers else self._start(i))
        states = [self._start(i) for i in numbers], after, before
        loop, steps, ends = self._recorded(
            match.cell, (name, match.scope), dict.fromkeys(alike, tap), tap, states, None
        )
        for tensors, stacked in zip(held[1:], steps, strict=True):
            recorder.steps |= dict.fromkeys(map(id, tensors), stacked)
        self.ends |= dict(zip(numbers, ends, strict=True))
        for variable in (analysis.owners[i][0] for i in numbers):
            parts = [i for i, (v, _) in enumerate(analysis.owners) if v is variable]
            if variable.exit is not None and self.ends.keys() >= set(parts):  # all states in it are recorded
                with self.stacked.graph.as_default():
                    joined = [self.ends[i] for i in parts]
                    self._replace(variable.exit, joined[0] if len(parts) == 1 else tf.concat(joined, axis=-1))
        return loop

    def _start(self, index: int) -> Any:
        """Return the start value of a state; it is a part of a loop variable that joins several states."""
        variable, columns = self.analysis.owners[index]
        start = self.starts[id(variable)]
        if columns is None:
            return start
        with start.graph.as_default():
            return self._tapped(start[:, columns[0] : columns[1]])

    def _rebuild_outputs(self) -> None:
        """Rebuild all stacked outputs of the loop from the recorded steps of its cells."""
        frame = self.analysis.frame
        writes = [w for w in self.analysis.writes if w.stacked is not None and w.variable.read]
        if self.mask and any(not self._hidden_where_masked(w.value) for w in writes):
            raise CannotRecordError("an output that counts at steps where the states are kept")
        ends = self._known([w.value for w in writes])
        for variable in frame.variables:
            if id(variable) in ends and variable.exit is not None:
                self._replace(variable.exit, ends[id(variable)])
        for write in writes:
            steps = self.recorder.steps[id(write.value)]
            with steps.graph.as_default():  # or every step writes to the same single position
                self._replace(write.stacked, steps if frame.is_time(write.index) else steps[-1:])

    def _hidden_where_masked(self, value: Any) -> bool:
        """Return whether an output is replaced at masked steps, by the same condition that keeps the states."""
        op, analysis = same(value).op, self.analysis
        if op.type not in ("Select", "SelectV2") or analysis.condition is None:
            return False
        mine, other = analysis.mask, mask_of(op.inputs[0], analysis.frame, analysis.reads)
        return op.inputs[0] is analysis.condition[0] or (mine is not None and mine.agrees(other))

    def _replace(self, old: Any, new: Any) -> None:
        rewire(old, new)
        self.replaced[old.name] = new

    def _native(self, why: str) -> Loop:
        """Return one loop of a cell of unknown equations, with all states and with the loop's body as its step."""
        analysis, recorder = self.analysis, self.recorder
        after, before = [analysis.new[id(v)] for v in analysis.states], [v.before for v in analysis.states]
        writes = [w for w in analysis.writes if w.stacked is not None and w.variable.read and w.value.dtype.is_floating]
        output = writes[0].value if writes else after[0]
        if writes and analysis.condition is not None and self._hidden_where_masked(output):
            output = same(output).op.inputs[2 if analysis.condition[1] else 1]
        fed = self._fed([output, *after])
        samples = {t.shape.as_list()[0] for t in (*before, *fed) if t.shape.rank}
        if not all(map(_is_row, before)) or len(samples - {None}) > 1:
            raise CannotRecordError("a state that is not (sample, unit)")
        ranks, spaces = {t.shape.rank for t in (*before, *fed, output)}, {tuple(t.shape.as_list()[1:-1]) for t in fed}
        if len(ranks) > 1 or len(spaces) > 1:
            raise CannotRecordError("images beside vectors, or inputs of several sizes")
        step = StepGraph(fed, before, output, after, analysis.frame.outer)
        self._known(fed)
        with self.stacked.graph.as_default():
            joined = tf.concat([recorder.steps[id(t)] for t in fed], axis=-1) if len(fed) > 1 else None
            tap = self._tapped(recorder.steps[id(fed[0])] if joined is None else joined)
            pieces = [tap] if joined is None else tf.split(tap, [int(t.shape[-1]) for t in fed], axis=-1)
        name = step.scope or analysis.frame.name
        cell = LoopCell(name, int(before[0].shape[-1]), body=step, unknown=why or why_unknown(analysis))
        starts, places = [self.starts[id(v)] for v in analysis.states], {id(t): [i] for i, t in enumerate(before)}
        sources, names = dict(zip(map(id, fed), pieces, strict=True)), (analysis.frame.name, step.scope)
        loop, _, ends = self._recorded(cell, names, sources, tap, (starts, after, places), output)
        for variable, end in zip(analysis.states, ends, strict=True):
            if variable.exit is not None:
                self._replace(variable.exit, end)
        if writes:
            self._rebuild_outputs()
        return loop

    def _fed(self, targets: Sequence[Any]) -> list[Any]:
        """Return the tensors of the body that are new at each step, which are the input of the step.

        Raise ``CannotRecordError`` unless they are (sample, feature) numbers that are not drawn at random.
        """
        paths, reads = self.analysis.paths, [read.value for read in self.analysis.reads]
        fed = paths.new_at_each_step(targets)
        fed = paths.only_read(fed, reads) or fed
        for behind in (paths.behind([tensor]) for tensor in fed):
            drawn = next((t.op for t in behind if is_random(t.op)), None)
            if drawn is not None and not any(t is read for t in behind for read in reads):
                raise CannotRecordError(
                    f"its states are changed by random numbers that are drawn anew at each step ({drawn.name!r})",
                    "a keep probability of 1, set by feed= of rl.tf1.graph, as evaluation has it; or "
                    "DropoutWrapper(variational_recurrent=True); rl.gradients by inputs and weights as it is",
                )
        if not fed or not all(_is_row(t) and t.dtype.is_floating for t in fed):
            what = ", ".join(repr(t.op.name) for t in fed) or "nothing"
            raise CannotRecordError(f"what is new to it at each step is not floating (sample, feature) numbers: {what}")
        return fed


def _is_row(tensor: Any) -> bool:
    """Return whether a tensor has one vector or one image of a known size per sample: (sample, *space, unit)."""
    rank = tensor.shape.rank
    return rank is not None and 2 <= rank <= 5 and tensor.shape[1:].is_fully_defined()


def _boundary(tap: Any, *, stacked: bool = False) -> LoopBoundary:
    return LoopBoundary((tap.op.inputs[0],), (((tap.op, 0),),), stacked=stacked)
