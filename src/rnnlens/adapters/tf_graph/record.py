"""Loops taken apart into loops that show what happens within: one per cell, and one for what lies between the cells.

``MultiRNNCell``, dropout, residual connections and projections around a cell are all one loop of the user's graph, and
nothing between them can be seen or differentiated from outside. In our copy that loop is run as several, one after the
other: what comes before the first cell, each cell by itself, what comes after the last; each on the steps that the one
before it put out. The numbers are the same, random ones are drawn once and in one run, and every boundary is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from .boundaries import clocks
from .copying import Copier
from .frames import Frame


@dataclass(frozen=True, eq=False)
class Carried:
    """One state of a loop of ours: where it starts, and the tensor of the body that it becomes.

    ``kept``: the condition of the body under which a sample keeps its state, and whether that is where it is False.
    """

    start: Any
    after: Any
    kept: tuple[Any, bool] | None = None


class Recorder:
    """Runs parts of the body of one loop as loops of our own, in the same graph.

    Parameters
    ----------
    frame
        The loop.
    count
        Number of steps: a scalar tensor.
    """

    def __init__(self, frame: Frame, count: Any) -> None:
        self.frame, self.count, self.graph = frame, count, count.graph
        #: By id of a tensor of the body: all its steps, time first.
        self.steps: dict[int, Any] = {}
        self._drawn: dict[str, int] = {}
        self._runs = 0

    def run(
        self,
        wanted: Sequence[Any],
        carried: Sequence[Carried] = (),
        before: Mapping[int, Sequence[Any]] | None = None,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """All steps of some tensors of the body; all steps of the states, and the states at the end.

        Parameters
        ----------
        wanted
            Tensors of the body. Of those whose steps are known the steps are read, not computed.
        carried
            The states.
        before
            By id of a tensor of the body that stands for a state before the step: numbers of states, or tensors of
            which only the shape is asked, to be joined along the last axis.
        """
        self._runs += 1
        with self.graph.as_default(), tf.control_dependencies(None), tf.name_scope(f"rnnlens/{self.frame.name}/"):
            used = self._used([*wanted, *(c.after for c in carried), *(c.kept[0] for c in carried if c.kept)])
            known = {key: self._array(self.steps[key].dtype).unstack(self.steps[key]) for key in used}
            outs = [self._array(t.dtype) for t in (*wanted, *(c.start for c in carried))]
            _, outs, ends = tf.while_loop(
                lambda i, *_: i < self.count,
                self._body(wanted, carried, known, before or {}),
                (tf.constant(0), outs, [c.start for c in carried]),
                parallel_iterations=1,  # so that random numbers are drawn in the order of the steps
                return_same_structure=True,
            )
            shapes = [t.shape for t in (*wanted, *(c.start for c in carried))]
            stacked = [_shaped(array.stack(), shape) for array, shape in zip(outs, shapes, strict=True)]
        for tensor, steps in zip(wanted, stacked, strict=False):
            self.steps.setdefault(id(tensor), steps)
        return stacked[: len(wanted)], stacked[len(wanted) :], list(ends)

    @property
    def drew(self) -> bool:
        """Whether random numbers are drawn in the loops of ours."""
        return bool(self._drawn)

    def _used(self, targets: Sequence[Any]) -> set[int]:
        """Which of the tensors with known steps lie behind others."""
        found, waiting = set(), list(targets)
        seen = {id(v.before) for v in self.frame.variables}
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in self.steps:
                found.add(id(tensor))
            elif id(tensor) not in seen and self.frame.outer.get(tensor) is None:
                seen.add(id(tensor))
                waiting.extend(tensor.op.inputs)
        return found

    def _array(self, dtype: Any) -> Any:
        return tf.TensorArray(dtype, size=self.count, infer_shape=False)

    def _body(
        self,
        wanted: Sequence[Any],
        carried: Sequence[Carried],
        known: Mapping[int, Any],
        before: Mapping[int, Sequence[Any]],
    ) -> Callable[..., Any]:
        times = [v.before for v in clocks(self.frame)]

        def step(i: Any, outs: list[Any], states: list[Any]) -> Any:
            present = {id(t): tf.cast(i, t.dtype) for t in times}
            for key, parts in before.items():
                values = [states[p] if isinstance(p, int) else p for p in parts]
                present[key] = values[0] if len(values) == 1 else tf.concat(values, axis=-1)
            for key, array in known.items():
                present[key] = _read(array, i, self.steps[key])
            copier = Copier(present, self.frame.outer, lambda t: t)
            after = [_after(c, old, copier) for c, old in zip(carried, states, strict=True)]
            values = [*(copier(t) for t in wanted), *after]
            self._refuse_second_draws(copier)
            return i + 1, [array.write(i, value) for array, value in zip(outs, values, strict=True)], after

        return step

    def _refuse_second_draws(self, copier: Copier) -> None:
        for name in copier.random:
            if self._drawn.setdefault(name, self._runs) != self._runs:
                raise CannotRecordError(f"random numbers that are used in several places ({name!r})")


class CannotRecordError(Exception):
    """Why a loop cannot be taken apart, in words; ``hint`` is a way around."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


def _read(array: Any, i: Any, stacked: Any) -> Any:
    value = array.read(i)
    value.set_shape(stacked.shape[1:])
    return value


def _after(carried: Carried, old: Any, copier: Copier) -> Any:
    new = copier(carried.after)
    if carried.kept is not None:
        condition, contrary = copier(carried.kept[0]), carried.kept[1]
        if condition.shape.rank == 1:
            condition = tf.expand_dims(condition, -1)
        new = tf.where_v2(condition, *((new, old) if contrary else (old, new)))
    new = tf.identity(new)
    new.set_shape(old.shape)
    return new


def _shaped(stacked: Any, step: Any) -> Any:
    stacked.set_shape([None, *step] if step.rank is not None else None)
    return stacked


def rewire(old: Any, new: Any) -> None:
    """Whatever reads one tensor reads another from now on."""
    for op in old.consumers():
        if op.name != new.op.name:
            for index, tensor in enumerate(op.inputs):
                if tensor is old:
                    op._update_input(index, new)
