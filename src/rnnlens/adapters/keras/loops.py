"""Loops of the model's own code over a recurrent cell, or over a layer with one step a call: one recurrence.

At each call two tensors are tapped: the state as the cell made it (its *total* gradient), and the state as the user's
code receives it (its *direct* gradient). The next call gets the first in place of the second, so that nothing that goes
from step to step counts as direct. Where the user's code changes the states between the steps, as a mask does, no
tensor is put in the place of another, and the gradient at the state that the code receives is the total one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...errors import RnnlensError, UnsupportedError
from .dialect import Dialect
from .discover import RecurrentSite

#: Numbers of the calls of each cell that start a recurrence, by the cell's name; all other calls continue one.
Starts = Mapping[str, frozenset[int]]


@dataclass
class LayerCall:
    """One call of one layer: ``arrays`` maps names to tensors, and ``key`` starts the name of each tap.

    ``shape`` is that of the first argument of a layer that is hooked at its ``call``.
    """

    place: str
    half: int
    index: int
    arrays: dict[str, Any] = field(default_factory=dict)
    is_loop: bool = False
    shape: tuple[int | None, ...] = ()

    @property
    def key(self) -> str:
        """Prefix of the call's tap keys: ``"lstm|0|1"`` is the second call of the first (or only) direction."""
        return f"{self.place}|{self.half}|{self.index}"


class CallRecorder(Protocol):
    """What a hook on a cell needs of the recorder of layer calls, :class:`.hooks.LayerRecorder`."""

    training: bool
    is_inside_a_layer: bool
    keep: frozenset[str]

    def starts_call(self, place: str, half: int = 0, *, is_loop: bool = False) -> LayerCall:
        """Add the record of a call."""

    def record(self, call: LayerCall, name: str, tensor: Any) -> Any:
        """Record a tensor of a call under a name, and return the tapped one."""

    def given_state(self, site: RecurrentSite, half: int, state: Any) -> Any:
        """Return the user's ``initial_state`` for a layer, else ``state``."""


class ChangedStateError(RnnlensError):
    """Signal that a cell received a state that it did not return; which calls start a recurrence must be found out."""


class SteppedLayerError(ChangedStateError):
    """Signal that the user's code calls a layer one step at a time; its calls must be recorded as one recurrence."""

    def __init__(self, layer: str) -> None:
        super().__init__(layer)
        self.layer = layer


@dataclass
class CellRun:
    """One recurrence over a cell: its record, the states given to the user's code, and those that the cell made."""

    call: LayerCall
    received: list[Any] = field(default_factory=list)
    produced: list[Any] = field(default_factory=list)
    masks: dict[str, Any] = field(default_factory=dict)
    steps: int = 0


class StepRecorder:
    """Recorder of single steps of one cell or layer, joined to recurrences; see the module.

    ``starts`` are the numbers of the calls that start a recurrence if the user's code changes states, else None.
    ``spoiled``: replace the states that the user's code receives by NaN, to find out which calls depend on them.
    """

    def __init__(
        self, recorder: CallRecorder, site: RecurrentSite, starts: frozenset[int] | None, spoiled: bool
    ) -> None:
        self._recorder, self._site, self._starts, self._spoiled = recorder, site, starts, spoiled
        self._keras: Dialect = site.keras
        self._context = self._keras.engine.context()
        self._runs: list[CellRun] = []
        self._count = 0

    def enter(self, x: Any, states: Any) -> tuple[CellRun, Any, Any]:
        """Record and tap the input (sample, feature) and the states of a step; return its run and the tapped ones."""
        self._refuse_compiled_loop()
        flat = self._keras.tree.flatten(states)
        run = self._run_of(flat)
        self._count += 1
        x, flat = self._enter(run, x, flat)
        return run, x, self._keras.tree.pack_sequence_as(states, flat)

    def leave(self, run: CellRun, output: Any, states: Any) -> tuple[Any, Any]:
        """Record and tap the output and the new states of a step; return those that the user's code receives."""
        if self._recorder.training:
            self._dropout(run)
        output, states = self._leave(run, output, states)
        run.steps += 1
        return output, states

    def _refuse_compiled_loop(self) -> None:
        if self._keras.engine.context() != self._context:
            raise UnsupportedError(
                f"Cell {self._site.name!r} is called in a loop that the framework compiles, whose steps rnnlens "
                "cannot record.",
                got="a cell called inside scan, while_loop, fori_loop, tf.while_loop, map_fn or another function",
                expected="a Python loop over the steps, or a keras.layers.RNN around the cell",
                hint="keras.layers.RNN(cell, return_sequences=True)",
            )

    def _run_of(self, states: Sequence[Any]) -> CellRun:
        """Return the recurrence that a call with these states continues, or a new one."""
        if self._starts is not None:
            if self._count not in self._starts and self._runs:
                return self._runs[-1]
        else:
            for run in reversed(self._runs):
                if len(states) == len(run.received) and all(a is b for a, b in zip(states, run.received, strict=True)):
                    return run
            if self._runs:
                raise ChangedStateError(self._site.name)
        self._runs.append(CellRun(self._recorder.starts_call(self._site.name, is_loop=True)))
        return self._runs[-1]

    def _enter(self, run: CellRun, x: Any, states: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Record the input and the states of a call; return those to continue with."""
        record, t = self._recorder.record, run.steps
        if t == 0:
            found = list(self._recorder.given_state(self._site, 0, list(states)))
            found = [record(run.call, f"initial_state/{i}", s) for i, s in enumerate(found)]
        else:
            found = list(states) if self._starts is not None else run.produced
        if self._starts is not None:
            run.call.arrays.update({f"received/{i}@{t}": s for i, s in enumerate(found)})
        return record(run.call, f"input@{t}", x), found

    def _leave(self, run: CellRun, output: Any, states: Any) -> tuple[Any, Any]:
        """Record and tap the output and the new states of a call; return those that the user's code receives."""
        record, t = self._recorder.record, run.steps
        flat = self._keras.tree.flatten(states)
        made = {id(s): record(run.call, f"total/{i}@{t}", s) for i, s in enumerate(flat)}
        run.produced = [made[id(s)] for s in flat]
        kept = {id(output): record(run.call, f"output@{t}", made.get(id(output), output))}
        for i, state in enumerate(flat):
            if id(state) not in kept:
                kept[id(state)] = record(run.call, f"state/{i}@{t}", made[id(state)])
        run.received = [kept[id(s)] for s in flat]
        run.call.arrays.update({f"final_state/{i}": s for i, s in enumerate(run.received)})
        if self._spoiled:
            kept = {key: tensor + float("nan") for key, tensor in kept.items()}
        return kept[id(output)], self._keras.tree.pack_sequence_as(states, [kept[id(s)] for s in flat])

    def _dropout(self, run: CellRun) -> None:
        """Record the cell's dropout multipliers, which have to be the same at each step."""
        found = self._keras.dropout(self._site.layer)
        if run.steps and any(found.get(name) is not mask for name, mask in run.masks.items()):
            raise UnsupportedError(
                f"Cell {self._site.name!r} draws new dropout at each step of the model's own loop.",
                expected="one mask for all steps",
                hint="training=False, or keras.layers.RNN(cell)",
            )
        run.masks = found
        if "dropout" in self._recorder.keep:
            run.call.arrays.update(found)


class CellCallHook:
    """Hook on the ``call`` of a cell: its calls from outside of a recurrent layer are steps of a recurrence."""

    def __init__(self, recorder: CallRecorder, site: RecurrentSite, steps: StepRecorder) -> None:
        self._recorder, self._site, self._steps = recorder, site, steps
        self._original = site.layer.cell.call
        self._names = list(inspect.signature(self._original).parameters)[:2]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the cell's own ``call``, and record and tap its input, states and output."""
        given = dict(zip(self._names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in self._names}
        if self._recorder.is_inside_a_layer or len(given) < 2:
            return self._original(*args, **kwargs)
        run, x, states = self._steps.enter(*(given[name] for name in self._names))
        kwargs = {k: v for k, v in kwargs.items() if k not in self._names}
        result = self._original(x, states, *args[2:], **kwargs)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise UnsupportedError(
                f"Cell {self._site.name!r} did not return an output and its states.",
                got=type(result).__name__,
                expected="(output, states), as keras.layers.LSTMCell returns them",
            )
        return self._steps.leave(run, *result)


def stacked(keras: Dialect, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Join tensors of single steps, named ``"output@3"``, along a time axis: ``"output"`` (sample, time, unit)."""
    steps: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        steps.setdefault(name.partition("@")[0], []).append(tensor)
    return {
        name: keras.ops.stack(parts, axis=1) if f"{name}@0" in tensors else parts[0] for name, parts in steps.items()
    }


def starts_of(names: Iterable[str], spoil: Callable[[str], Sequence[Any]]) -> dict[str, frozenset[int]]:
    """Return the calls of each cell or layer that start a recurrence: no state of theirs depends on an earlier call.

    ``spoil(name)`` runs the model with NaN in all that the cell ``name`` returns, and returns its received states.
    """
    found = {}
    for name in names:
        spoiled = [bool(any(map(_has_nan, states))) for states in spoil(name)]
        found[name] = frozenset(number for number, is_spoiled in enumerate(spoiled) if not is_spoiled)
    return found


def _has_nan(array: Any) -> bool:
    return bool((array != array).any())
