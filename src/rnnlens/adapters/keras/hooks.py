"""Hooks on layers while a model runs: they record inputs and outputs, and tap the tensors that are differentiated.

The dialect chooses which method of a recurrent layer is hooked: one that receives mask, initial state and dropout, and
whose result is the layer's output. Any other layer is hooked at its ``call``.

A loop of the model's own code over a cell, or over a layer with one step a call, is recorded as one recurrence. At each
call two tensors are tapped: the state as the cell made it (its *total* gradient), and the state as the user's code
receives it (its *direct* gradient). The next call gets the first in place of the second, so that nothing that goes from
step to step counts as direct. Where the user's code changes the states between the steps, as a mask does, no tensor is
put in the place of another, and the gradient at the state that the code receives is the total one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...autodiff import Tap
from ...errors import InputError, RnnlensError, UnsupportedError
from ..protocol import Batch
from ..shared import substitute_in_this_thread
from .dialect import Dialect, dialect_of
from .discover import RecurrentSite, refuse_random
from .inputs import prepare
from .restore import overriding

#: Numbers of the calls of each cell that start a recurrence, by the cell's name; all other calls continue one.
Starts = Mapping[str, frozenset[int]]
#: Function of (x, y, outputs, sample weights) that returns the loss as a scalar tensor.
Loss = Callable[[Any, Any, Any, Any], Any]


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

    def all(self, kind: str) -> tuple[Any, ...]:
        """Return the recorded tensors whose names start with ``kind``, such as all final states."""
        return tuple(tensor for name, tensor in self.arrays.items() if name.startswith(f"{kind}/"))


class ChangedStateError(RnnlensError):
    """Signal that a cell received a state that it did not return; which calls start a recurrence must be found out."""


class SteppedLayerError(ChangedStateError):
    """Signal that the user's code calls a layer one step at a time; its calls must be recorded as one recurrence."""

    def __init__(self, layer: str) -> None:
        super().__init__(layer)
        self.layer = layer


@dataclass
class CellRun:
    """One recurrence over a cell: its record, the states given to the user's code, and those that the cell made.

    ``early``: the cell state that the running step computed, and the tapped one that its hidden state is computed from.
    """

    call: LayerCall
    received: list[Any] = field(default_factory=list)
    produced: list[Any] = field(default_factory=list)
    masks: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    early: tuple[Any, Any] | None = None


@dataclass
class RunRequest:
    """One request: what to run, which layers to hook and which tensors to tap. It is never cached.

    ``sites`` and ``plain`` are the hooked layers, and ``weights`` the variables to tap by key. ``wanted`` contains what
    to tap: a kind of tensor (``"output"``) at every call, or one tensor of one call (``"lstm|0|1|final_state/0"``), at
    every step of a loop over a cell. ``keep`` contains the kinds to record besides the tapped ones. ``starts`` and
    ``spoiled`` are for loops over cells, see :class:`StepRecorder`. ``stepped`` names the layers whose calls with one
    step are joined, ``apart`` those whose calls with one step do not continue each other. ``calls`` are those of the
    last run, in the order in which they happened.
    """

    model: Any
    batch: Batch
    sites: Sequence[RecurrentSite] = ()
    plain: Mapping[str, Any] = field(default_factory=dict)
    loss: Loss | None = None
    gradients: bool = True
    wanted: frozenset[str] = frozenset()
    keep: frozenset[str] = frozenset()
    weights: Mapping[str, Any] = field(default_factory=dict)
    starts: Starts = field(default_factory=dict)
    spoiled: str = ""
    stepped: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    calls: list[LayerCall] = field(default_factory=list)

    @cached_property
    def data(self) -> dict[str, Any]:
        """The batch as tensors, checked against the model."""
        return prepare(self.model, self.batch)

    @cached_property
    def keras(self) -> Dialect:
        """The dialect of the Keras package that the model belongs to."""
        return dialect_of(self.model)

    @cached_property
    def variables(self) -> list[Any]:
        """All variables that the run may read, except those that are created during the run."""
        return self.keras.variables(self.model)

    def arguments(self) -> dict[str, Any]:
        """Return all values that may differ between runs as one tree of tensors: batch, variables, seeds."""
        values = self.keras.values(self.variables)
        return {**self.data, "values": values, "seeds": self.keras.seeds(self.model, self.batch.seed)}


class LayerRecorder:
    """Recorder of the layer calls of one run; ``initial_state`` has the user's states as tensors, by layer."""

    def __init__(self, job: RunRequest, tap: Tap, initial_state: Mapping[str, Sequence[Any]]) -> None:
        self.job, self.tap, self.initial_state = job, tap, initial_state
        self.keras, self.training = job.keras, job.batch.training
        self.is_inside_a_layer = False
        self._recorders: dict[str, StepRecorder] = {}
        self._returned: set[str] = set()
        job.calls.clear()

    @contextmanager
    def inside_a_layer(self) -> Iterator[None]:
        """Switch off the recording of cell calls within the block, in which a recurrent layer calls its own cell."""
        before, self.is_inside_a_layer = self.is_inside_a_layer, True
        try:
            yield
        finally:
            self.is_inside_a_layer = before

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook the layers of the request within the block: methods are overridden on the instances."""
        halves: dict[str, int] = {}
        with overriding() as put:

            def override(layer: Any, name: str, method: Any) -> None:
                put(layer, name, substitute_in_this_thread(method, getattr(layer, name)))

            for site in self.job.sites:
                half = halves[site.name] = halves.get(site.name, -1) + 1
                if site.is_loop:
                    refuse_random(site, self.training)
                    override(site.layer.cell, "call", own_errors_unchanged()(self._cell(site)))
                else:
                    site.keras.hook(self, site, half, override)
            for name, layer in self.job.plain.items():
                override(layer, "call", self._plain(name, layer))
            self.keras.switch_cudnn_off(self.job.model, put)
            yield

    def _steps_of(self, site: RecurrentSite) -> StepRecorder:
        if site.name not in self._recorders:
            self._recorders[site.name] = StepRecorder(self, site)
        return self._recorders[site.name]

    def steps_of(self, site: RecurrentSite, sequence: Any, states: Any) -> StepRecorder | None:
        """Return the ``StepRecorder`` of a call of one step of a layer that returns its states; None for other calls.

        SteppedLayerError is raised at the second such call of a layer that neither ``stepped`` nor ``apart``
        names.
        """
        layer = site.layer
        random = self.training and any(getattr(layer.cell, name, 0.0) for name in ("dropout", "recurrent_dropout"))
        apart = site.name in self.job.apart or site.bidirectional or layer.stateful or random
        if apart or not layer.return_state or sequence.shape[1] != 1 or len(sequence.shape) != 3:
            return None
        if site.name in self.job.stepped:
            return self._steps_of(site)
        if site.name in self._returned:
            raise SteppedLayerError(site.name)
        return None

    def starts_call(self, place: str, half: int = 0, *, is_loop: bool = False) -> LayerCall:
        """Add a record for a new call of a layer, and return it; ``half`` is 1 for the second of two directions."""
        index = sum(call.place == place and call.half == half for call in self.job.calls)
        call = LayerCall(place, half, index, is_loop=is_loop)
        self.job.calls.append(call)
        return call

    def record(self, call: LayerCall, name: str, tensor: Any) -> Any:
        """Tap and record ``tensor`` if that is requested; return the tapped tensor, which replaces it in the run."""
        every = name.partition("@")[0]
        kind, key = every.split("/")[0], f"{call.key}|{every}"
        tapped = self.keras.is_float(tensor) and not self.job.wanted.isdisjoint((kind, key))
        if tapped:
            tensor = self.tap(f"{call.key}|{name}", tensor)
        if tapped or not self.job.keep.isdisjoint((kind, key)):
            call.arrays[name] = tensor
        return tensor

    def record_all(self, call: LayerCall, name: str, tree: Any) -> Any:
        """Tap and record each tensor of a nested structure; return the structure with the tapped tensors.

        A tensor that occurs twice, such as h as output and state, is tapped once for each place and stays one
        tensor.
        """
        flat = self.keras.tree.flatten(tree)
        tapped: dict[int, Any] = {}
        for i, tensor in enumerate(flat):
            tapped[id(tensor)] = self.record(call, f"{name}/{i}", tapped.get(id(tensor), tensor))
        return self.keras.tree.pack_sequence_as(tree, [tapped[id(tensor)] for tensor in flat])

    def enters(
        self, site: RecurrentSite, half: int, sequence: Any, initial_state: Any, mask: Any
    ) -> tuple[LayerCall, Any, Any]:
        """Start the record of a recurrent call; return it with the tapped input and initial state.

        ``half`` is 1 for the second of two directions.
        """
        initial_state = self.given_state(site, half, initial_state)
        call = self.starts_call(site.name, half)
        sequence = self.record(call, "input", sequence)
        # h and c may start as one tensor, and have gradients of their own.
        flat = self.keras.tree.flatten(initial_state)
        flat = [self.record(call, f"initial_state/{i}", state) for i, state in enumerate(flat)]
        initial_state = self.keras.tree.pack_sequence_as(initial_state, flat)
        if "mask" in self.job.keep and mask is not None:
            call.arrays["mask"] = mask
        return call, sequence, initial_state

    def leaves(self, site: RecurrentSite, call: LayerCall, output: Any, states: Any, training: Any) -> tuple[Any, Any]:
        """Record the dropout, the output and the final states of a recurrent call; return the latter two, tapped."""
        if "dropout" in self.job.keep and training:
            call.arrays.update(self.keras.dropout(site.layer))
        output = self.record(call, "output", output)
        if site.layer.return_state:
            states = self.record_all(call, "final_state", states)
            self._returned.add(site.name)
        return output, states

    def given_state(self, site: RecurrentSite, half: int, state: Any) -> Any:
        """Return the user's ``initial_state`` for one direction of a layer, cast and nested as its own ``state``.

        Returns the layer's own state if none was given, and raises InputError if the shapes differ.
        """
        given = self.initial_state.get(site.name)
        if given is None:
            return state
        own = self.keras.tree.flatten(state)
        if site.bidirectional and len(given) == 2 * len(own):
            given = given[half * len(own) : (half + 1) * len(own)]
        shapes = [tuple(s.shape) for s in given]
        if any(len(s) < 1 for s in shapes) or [s[1:] for s in shapes] != [tuple(s.shape)[1:] for s in own]:
            raise InputError(
                f"The initial state given for {site.name!r} has another shape than the layer's states.",
                got=f"shapes {shapes}",
                expected=f"shapes {[tuple(s.shape) for s in own]}",
            )
        cast = [self.keras.ops.cast(new, old.dtype) for new, old in zip(given, own, strict=True)]
        return self.keras.tree.pack_sequence_as(state, cast)

    def _cell(self, site: RecurrentSite) -> Callable[..., Any]:
        """Return a replacement of a cell's ``call`` that records each call from outside of a layer as one step."""
        steps, original = self._steps_of(site), site.layer.cell.call
        names = list(inspect.signature(original).parameters)[:2]

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
            if self.is_inside_a_layer or len(given) < 2:
                return original(*args, **kwargs)
            run, x, states = steps.enter(*(given[name] for name in names))
            with steps.inside(run):
                result = original(x, states, *args[2:], **{k: v for k, v in kwargs.items() if k not in names})
            if not isinstance(result, tuple | list) or len(result) != 2:
                raise UnsupportedError(
                    f"Cell {site.name!r} did not return an output and its states.",
                    got=type(result).__name__,
                    expected="(output, states), as keras.layers.LSTMCell returns them",
                )
            return steps.leave(run, *result)

        return call

    def _plain(self, name: str, layer: Any) -> Callable[..., Any]:
        original = layer.call

        def call(*args: Any, **kwargs: Any) -> Any:
            record = self.starts_call(name)
            if args:
                record.shape = tuple(getattr(args[0], "shape", ()))
                args = (self.record_all(record, "input", args[0]), *args[1:])
            return self.record_all(record, "output", original(*args, **kwargs))

        return call


class StepRecorder:
    """Recorder of single steps of one cell or layer, joined to recurrences; see the module's text.

    ``_starts`` are the numbers of the calls that start a recurrence if the user's code changes states, else None.
    ``_spoiled``: replace the states that the user's code receives by NaN, to find out which calls depend on them.
    """

    def __init__(self, recorder: LayerRecorder, site: RecurrentSite) -> None:
        self._recorder, self._site = recorder, site
        self._starts, self._spoiled = recorder.job.starts.get(site.name), recorder.job.spoiled == site.name
        self._keras: Dialect = site.keras
        self._context = self._keras.engine.context()
        self._runs: list[CellRun] = []
        self._count = 0

    def enter(self, x: Any, states: Any) -> tuple[CellRun, Any, Any]:
        """Record and tap the input (sample, feature) and the states of a step.

        Return the loop that the step belongs to, the tapped input and the tapped states.
        """
        if self._keras.engine.context() != self._context:
            raise UnsupportedError(
                f"Cell {self._site.name!r} is called in a loop that the framework compiles, whose steps rnnlens "
                "cannot record.",
                got="a cell called inside scan, while_loop, fori_loop, tf.while_loop, map_fn or another function",
                expected="a Python loop over the steps, or a keras.layers.RNN around the cell",
                hint="keras.layers.RNN(cell, return_sequences=True)",
            )
        flat = self._keras.tree.flatten(states)
        run, record = self._run_of(flat), self._recorder.record
        self._count += 1
        t = run.steps
        if t == 0:
            flat = self._recorder.given_state(self._site, 0, flat)
            flat = [record(run.call, f"initial_state/{i}", s) for i, s in enumerate(flat)]
        elif self._starts is None:
            flat = run.produced
        if self._starts is not None:
            run.call.arrays.update({f"received/{i}@{t}": s for i, s in enumerate(flat)})
        return run, record(run.call, f"input@{t}", x), self._keras.tree.pack_sequence_as(states, flat)

    @contextmanager
    def inside(self, run: CellRun) -> Iterator[None]:
        """Tap the cell state of an LSTM before its hidden state is computed from it, within the block.

        The total gradient of c_t includes the path through h_t. Keras' cell applies its activation to c_t last.
        """
        cell, applied = self._site.layer.cell, 0
        if type(cell) is not self._keras.layers.LSTMCell:
            yield
            return
        original = cell.activation

        def activation(tensor: Any) -> Any:
            nonlocal applied
            applied += 1
            if applied == 2:
                run.early = tensor, self._recorder.record(run.call, f"total/1@{run.steps}", tensor)
                tensor = run.early[1]
            return original(tensor)

        vars(cell)["activation"] = substitute_in_this_thread(activation, original)
        try:
            yield
        finally:
            vars(cell)["activation"] = original

    def leave(self, run: CellRun, output: Any, states: Any) -> tuple[Any, Any]:
        """Record and tap the output and the new states of a step; return the tapped tensors, for the user's code."""
        if self._recorder.training:
            self._dropout(run)
        record, t = self._recorder.record, run.steps
        flat = self._keras.tree.flatten(states)
        self._refuse_paths_within(run, output, flat)
        made, run.early = {} if run.early is None else {id(run.early[0]): run.early[1]}, None
        made |= {id(s): record(run.call, f"total/{i}@{t}", s) for i, s in enumerate(flat) if id(s) not in made}
        run.produced = [made[id(s)] for s in flat]
        kept = {id(output): record(run.call, f"output@{t}", made.get(id(output), output))}
        for i, state in enumerate(flat):
            if id(state) not in kept:
                kept[id(state)] = record(run.call, f"state/{i}@{t}", made[id(state)])
        run.received = [kept[id(s)] for s in flat]
        run.call.arrays.update({f"final_state/{i}": s for i, s in enumerate(run.received)})
        run.steps += 1
        if self._spoiled:
            kept = {key: tensor + float("nan") for key, tensor in kept.items()}
        return kept[id(output)], self._keras.tree.pack_sequence_as(states, [kept[id(s)] for s in flat])

    def _run_of(self, states: Sequence[Any]) -> CellRun:
        """Return the recorded loop of which a cell's call from these states is the next step; a new one if none is."""
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

    def _refuse_paths_within(self, run: CellRun, output: Any, states: Sequence[Any]) -> None:
        """Raise UnsupportedError if gradients by a state are requested that the cell may read again within the step.

        The cell may compute its output or its other states from it.
        """
        cell, wanted = self._site.layer.cell, self._recorder.job.wanted
        asked = [i for i in range(len(states)) if f"{run.call.key}|total/{i}" in wanted]
        if type(cell) in self._keras.cells:
            is_open = 1 in asked and run.early is None
        else:
            is_open = bool(asked) and (len(states) > 1 or output is not states[0])
        if is_open:
            raise UnsupportedError(
                f"{self._site.name!r} may compute its output or another state from this one within a step, which "
                "gradients by the state must include and this loop does not show.",
                got=f"a {type(cell).__name__} with {len(states)} states, called step by step by the model's own code",
                expected="a cell whose output is its only state, or one of Keras",
                hint="rl.trace(model, x, y), whose gradients of the loss include it; or keras.layers.RNN(cell)",
            )

    def _dropout(self, run: CellRun) -> None:
        """Record the cell's dropout multipliers; raise UnsupportedError if they differ from those of earlier steps."""
        found = self._keras.dropout(self._site.layer)
        if run.steps and any(found.get(name) is not mask for name, mask in run.masks.items()):
            raise UnsupportedError(
                f"Cell {self._site.name!r} draws new dropout at each step of the model's own loop.",
                expected="one mask for all steps",
                hint="training=False, or keras.layers.RNN(cell)",
            )
        run.masks = found
        if "dropout" in self._recorder.job.keep:
            run.call.arrays.update(found)


@contextmanager
def own_errors_unchanged() -> Iterator[None]:
    """Mark errors of rnnlens so that Keras does not append the layer's arguments to them."""
    try:
        yield
    except RnnlensError as error:
        error._keras_call_info_injected = True  # type: ignore[attr-defined]
        raise
