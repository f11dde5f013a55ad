"""Rewriting of while loops with several cells, or an unknown one, as loops whose boundaries can all be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow.compat.v1 as tf

from .blocks import Source
from .cells import Match
from .loop_analysis import LoopAnalysis, at_present, why_unknown
from .loop_attributes import common_scope, course_words, flat_mask, masking, recognised_cell, refused, runs_through
from .loop_recorder import CannotRecordError, CarriedState, LoopRecorder, rewire
from .probe import Key
from .recurrences import Loop, LoopBoundary, LoopCell
from .sequences import course_of, same
from .step_graph import StepGraph
from .while_loops import CannotCopyError


def split(analysis: LoopAnalysis, *, as_one: bool = False) -> list[Loop]:
    """Split a while loop into recurrences with boundaries of their own.

    Where that is impossible, a single refused loop with the reason is returned. ``as_one``: treat all cells as a single
    one, even if each of them is known.
    """
    try:
        return _LoopSplitter(analysis, as_one).loops()
    except (CannotCopyError, CannotRecordError) as reason:
        hint = getattr(reason, "hint", "")
        return [refused(analysis.frame, analysis.states, analysis.reads, str(reason), hint)]


@dataclass(eq=False)
class _LoopSplitter:
    analysis: LoopAnalysis
    as_one: bool
    replaced: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        analysis = self.analysis
        floats = [read for read in analysis.reads if read.value.dtype.is_floating]
        if not floats:
            raise CannotRecordError("no tensor with time in front that it reads step by step")
        self.stacked = floats[0].stacked
        with self.stacked.graph.as_default():
            self.recorder = LoopRecorder(analysis.frame, tf.shape(self.stacked)[0])
        for read in analysis.reads:
            self.recorder.steps[id(read.value)] = read.stacked
        self.starts = {id(v): self._tapped(v.entry) for v in analysis.states}
        self.mask = self._mask()

    def loops(self) -> list[Loop]:
        """Return one loop per known cell, in the order of their dependence; or a single loop of unknown equations."""
        analysis = self.analysis
        if analysis.covered and not self.as_one:
            computed = list(analysis.probe.by_key)
            order = sorted(analysis.matches, key=lambda match: computed.index(match.after[0]))
            found = [self._cell(match, i, len(order)) for i, match in enumerate(order)]
            self._put_out()
        else:
            found = [self._native()]
        cell = replace(found[0].cell, conditions=runs_through(analysis, self.stacked))
        found[0] = replace(found[0], cell=cell, replaced=self.replaced, redrawn=self.recorder.drew)
        return found

    # Boundaries.

    def _tapped(self, tensor: Any) -> Any:
        """Return an identity of a tensor that only the rewritten loops read."""
        with tensor.graph.as_default(), tf.control_dependencies(None):
            return tf.identity(tensor, name=f"rnnlens/{self.analysis.frame.name}/boundary")

    @staticmethod
    def _boundary(tap: Any, *, stacked: bool = False) -> LoopBoundary:
        return LoopBoundary((tap.op.inputs[0],), (((tap.op, 0),),), stacked=stacked)

    def _mask(self) -> dict[str, Any]:
        """Return the lengths or the mask of the loop as keyword arguments of ``Loop``.

        Another condition is recorded over all steps; without any, the mapping is empty.
        """
        analysis = self.analysis
        if analysis.condition is None or analysis.mask is not None:
            return masking(analysis)
        condition, where = analysis.condition
        self._known([condition])
        return {"mask": flat_mask(self.recorder.steps[id(condition)], where)}

    def _known(self, tensors: Sequence[Any]) -> None:
        """Record the given tensors over all steps, where that is not yet done."""
        missing = [t for t in tensors if id(t) not in self.recorder.steps]
        if missing:
            self._run(missing)

    def _run(self, wanted: Sequence[Any]) -> dict[int, Any]:
        """Record tensors over all steps, from recorded tensors and loop variables that are no states.

        Returns the last values of these loop variables, by id.
        """
        analysis = self.analysis
        beside = [v for v in analysis.paths.carried(self._unknown(wanted)) if not self._is_state(v)]
        carried = [CarriedState(v.entry, v.after) for v in beside]
        before: dict[int, Sequence[Any]] = {id(v.before): (i,) for i, v in enumerate(beside)}
        before |= {id(v.before): (v.entry,) for v in analysis.states}  # only the shape is used
        _, _, ends = self.recorder.run(wanted, carried, before)
        return {id(v): end for v, end in zip(beside, ends, strict=True)}

    def _unknown(self, wanted: Sequence[Any]) -> list[Any]:
        """Return the loop variables behind the given tensors, up to tensors that are already recorded."""
        found, waiting, seen = [], list(wanted), set()
        while waiting:
            tensor = waiting.pop()
            if (
                id(tensor) in seen
                or id(tensor) in self.recorder.steps
                or self.analysis.frame.outer.get(tensor) is not None
            ):
                continue
            seen.add(id(tensor))
            if self.analysis.paths.is_variable(tensor):
                found.append(tensor)
            else:
                waiting.extend(tensor.op.inputs)
        return found

    def _is_state(self, variable: Any) -> bool:
        counts = variable.before.dtype.is_integer and variable.before.shape.rank == 0
        return counts or any(variable is v for v in self.analysis.states)

    # Known cells.

    def _cell(self, match: Match, index: int, count: int) -> Loop:
        analysis, recorder = self.analysis, self.recorder
        source = self._tensor_of(match.source)
        self._known([source])
        whole = recorder.steps[id(source)]
        tap = self._tapped(whole)
        sources, numbers = analysis.probe.tensors_of(match.source), analysis.numbers(match)
        recorder.steps |= {id(tensor): tap for tensor in sources}
        starts = [self._start(i) for i in numbers]
        kept = None if analysis.condition is None else (analysis.condition[0], not analysis.condition[1])
        carried = [
            CarriedState(start, self._tensor_of(after), kept) for start, after in zip(starts, match.after, strict=True)
        ]
        _, steps, ends = recorder.run([], carried, self._before(numbers))
        recorder.steps |= {id(tensor): whole for tensor in sources}  # other readers are outside of this cell
        for i, stacked, end in zip(numbers, steps, ends, strict=True):
            self._ended(i, end)
            for tensor in analysis.probe.tensors_of(analysis.pairs[i][1]):
                recorder.steps[id(tensor)] = stacked
        return Loop(
            analysis.frame.name if count == 1 else f"{analysis.frame.name}/cell_{index}",
            analysis.frame.kind,
            recognised_cell(match),
            tuple(self._boundary(start) for start in starts),
            tuple(LoopBoundary((end,)) for end in ends),
            self._boundary(tap, stacked=True),
            LoopBoundary((steps[0],), stacked=True),
            **self.mask,
            **course_words(course_of(self.stacked)),
            masked_output="state",
            steps=self.stacked.shape[0],
            scope=common_scope(piece.variable for pieces in match.weights.values() for piece in pieces),
        )

    def _tensor_of(self, key: Key) -> Any:
        found = self.analysis.probe.tensors_of(key)
        if not found:
            raise CannotRecordError("a value that no tensor of its body holds")
        return found[0]

    def _start(self, index: int) -> Any:
        variable, columns = self.analysis.owners[index]
        start = self.starts[id(variable)]
        if columns is None:
            return start
        with start.graph.as_default():
            return self._tapped(start[:, columns[0] : columns[1]])

    def _before(self, numbers: Sequence[int]) -> dict[int, list[Any]]:
        """Return substitutes for the loop variables in the loop of one cell.

        The cell's own states are numbers of its carried states; other variables are start values of which only the
        shape is used.
        """
        before: dict[int, list[Any]] = {}
        for i, (variable, _) in enumerate(self.analysis.owners):
            part = numbers.index(i) if i in numbers else self._start(i)
            before.setdefault(id(variable.before), []).append(part)
        return before

    def _ended(self, index: int, end: Any) -> None:
        variable, columns = self.analysis.owners[index]
        ends = self.__dict__.setdefault("_ends", {})
        ends[index] = end
        of_it = [i for i, (v, _) in enumerate(self.analysis.owners) if v is variable]
        if variable.exit is not None and all(i in ends for i in of_it):
            with end.graph.as_default():
                whole = end if columns is None else tf.concat([ends[i] for i in of_it], axis=-1)
            self._replace(variable.exit, whole)

    # Outputs.

    def _put_out(self) -> None:
        """Rebuild all stacked outputs of the loop from the recorded steps of its cells."""
        analysis = self.analysis
        writes = [w for w in analysis.writes if w.stacked is not None and w.variable.read]
        values = [w.value for w in writes]
        masked = self.mask != {}
        outside = [v for v in values if id(v) not in self.recorder.steps]
        if masked and any(not self._hidden_where_masked(v) for v in values):
            raise CannotRecordError("an output that counts at steps where the states are kept")
        ends = self._run(outside) if outside else {}
        for variable in analysis.frame.variables:
            if id(variable) in ends and variable.exit is not None:
                self._replace(variable.exit, ends[id(variable)])
        for write in writes:
            self._replace(write.stacked, self._placed(write, self.recorder.steps[id(write.value)]))

    def _hidden_where_masked(self, value: Any) -> bool:
        """Return whether an output is replaced at masked steps, by the same condition that keeps the states."""
        chosen = same(value, Source())
        condition = self.analysis.condition
        if chosen.op.type not in ("Select", "SelectV2") or condition is None:
            return False
        return self.analysis.same_condition(chosen.op.inputs[0])

    def _placed(self, write: Any, steps: Any) -> Any:
        if at_present(self.analysis.frame, write):
            return steps
        with steps.graph.as_default():
            return steps[-1:]  # every step writes to the same single position

    def _replace(self, old: Any, new: Any) -> None:
        rewire(old, new)
        self.replaced[old.name] = new

    # A cell of unknown equations.

    def _native(self) -> Loop:
        """Return one loop that treats all states as those of one cell, with the body of the loop as its step."""
        analysis, recorder = self.analysis, self.recorder
        output, written = self._what_is_put_out()
        new = [analysis.new[id(v)] for v in analysis.states]
        fed = analysis.paths.new_at_each_step([output, *new])
        fed = analysis.paths.only_read(fed, [read.value for read in analysis.reads]) or fed
        self._refuse_chance(fed)
        fed = [t for t in fed if t.dtype.is_floating] if all(t.dtype.is_floating for t in fed) else fed
        if not fed or any(t.shape.rank != 2 or not t.dtype.is_floating or t.shape[1] is None for t in fed):
            what = ", ".join(repr(t.op.name) for t in fed) or "nothing"
            raise CannotRecordError(f"what is new to it at each step is not floating (sample, feature) numbers: {what}")
        before = [v.before for v in analysis.states]
        if any(t.shape.rank != 2 or t.shape[1] is None for t in before):
            raise CannotRecordError("a state that is not (sample, unit)")
        step = StepGraph(fed, before, output, new, analysis.frame.outer)
        self._known(fed)
        with self.stacked.graph.as_default():
            joined = tf.concat([recorder.steps[id(t)] for t in fed], axis=-1) if len(fed) > 1 else None
            tap = self._tapped(recorder.steps[id(fed[0])] if joined is None else joined)
            pieces = [tap] if joined is None else tf.split(tap, [int(t.shape[1]) for t in fed], axis=-1)
        around = {id(tensor): recorder.steps[id(tensor)] for tensor in fed}
        for tensor, piece in zip(fed, pieces, strict=True):
            recorder.steps[id(tensor)] = piece
        kept = None if analysis.condition is None else (analysis.condition[0], not analysis.condition[1])
        carried = [CarriedState(self.starts[id(v)], t, kept) for v, t in zip(analysis.states, new, strict=True)]
        places = {id(v.before): [i] for i, v in enumerate(analysis.states)}
        steps, _, ends = recorder.run([output], carried, places)
        recorder.steps |= around
        for variable, end in zip(analysis.states, ends, strict=True):
            if variable.exit is not None:
                self._replace(variable.exit, end)
        if written:
            self._put_out()
        name = step.scope or analysis.frame.name
        cell = LoopCell(name, int(before[0].shape[1]), body=step, unknown=why_unknown(analysis))
        return Loop(
            analysis.frame.name,
            analysis.frame.kind,
            cell,
            tuple(self._boundary(self.starts[id(v)]) for v in analysis.states),
            tuple(LoopBoundary((end,)) for end in ends),
            self._boundary(tap, stacked=True),
            LoopBoundary((steps[0],), stacked=True),
            **self.mask,
            **course_words(course_of(self.stacked)),
            masked_output="zero",
            steps=self.stacked.shape[0],
            scope=step.scope,
        )

    def _refuse_chance(self, fed: Sequence[Any]) -> None:
        """Raise ``CannotRecordError`` for random numbers drawn at each step that are not part of the input.

        An example is dropout of the states.
        """
        reads = [read.value for read in self.analysis.reads]
        drawn = next((op for t in fed if (op := self.analysis.paths.chance(t, reads)) is not None), None)
        if drawn is not None:
            raise CannotRecordError(
                f"its states are changed by random numbers that are drawn anew at each step ({drawn.name!r})",
                "a keep probability of 1, set by feed= of rl.tf1.graph, as evaluation has it; or "
                "DropoutWrapper(variational_recurrent=True); rl.gradients by inputs and weights as it is",
            )

    def _what_is_put_out(self) -> tuple[Any, bool]:
        """Return the step's output where its states are not masked, and whether the loop writes it.

        Without a written output it is the first state.
        """
        analysis = self.analysis
        writes = [w for w in analysis.writes if w.stacked is not None and w.variable.read and w.value.dtype.is_floating]
        if not writes:
            return analysis.new[id(analysis.states[0])], False
        value = writes[0].value
        if analysis.condition is not None and self._hidden_where_masked(value):
            chosen = same(value, Source())
            return chosen.op.inputs[2 if analysis.condition[1] else 1], True
        return value, True
