"""Hooks on layers while a model runs: they record inputs and outputs, and tap the tensors that are differentiated.

The dialect chooses which method of a recurrent layer is hooked: one that receives mask, initial state and dropout, and
whose result is the layer's output. Any other layer is hooked at its ``call``.

A loop of the model's own code over a cell, or over a layer with one step a call, is recorded as one recurrence. At each
call two tensors are tapped: the state as the cell made it (its *total* gradient), and the state as the user's code
receives it (its *direct* gradient). The next call gets the first in place of the second, so that nothing that goes from
step to step counts as direct. Where the user's code changes the states between the steps, as a mask does, no tensor is
put in the place of another, and the gradient at the state that the code receives is the total one.

Any other layer that the code calls once per step of such a recurrence, such as an embedding, is one array over time.
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

    layer_name: str
    direction_index: int
    index: int
    arrays: dict[str, Any] = field(default_factory=dict)
    is_loop: bool = False
    shape: tuple[int | None, ...] = ()

    @property
    def key(self) -> str:
        """Prefix of the call's tap keys: ``"lstm|0|1"`` is the second call of the first (or only) direction."""
        return f"{self.layer_name}|{self.direction_index}|{self.index}"

    def tensors_of_kind(self, kind: str) -> tuple[Any, ...]:
        """Return the recorded tensors whose names start with ``kind``, such as all final states."""
        return tuple(tensor for name, tensor in self.arrays.items() if name.startswith(f"{kind}/"))


class ChangedStateError(RnnlensError):
    """Signal that a cell received a state that it did not return; which calls start a recurrence must be found out."""


class SteppedLayerError(ChangedStateError):
    """Signal that the user's code calls a layer one step at a time; its calls must be recorded together."""

    def __init__(self, layer: str) -> None:
        super().__init__(layer)
        self.layer = layer


class SeparateCallsError(RnnlensError):
    """Signal that the ``count`` calls of a layer are not one at each step of a recurrence: they cannot be joined."""

    def __init__(self, layer: str, count: int) -> None:
        super().__init__(layer)
        self.layer, self.count = layer, count


@dataclass
class CellRun:
    """One recurrence over a cell: its record, the states given to the user's code, and those that the cell made.

    ``early_state``: the cell state that the running step computed, and the tapped one that its hidden state is computed
    from.
    """

    call: LayerCall
    received_states: list[Any] = field(default_factory=list)
    produced_states: list[Any] = field(default_factory=list)
    dropout_masks: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    early_state: tuple[Any, Any] | None = None


@dataclass
class RunRequest:
    """One request: what to run, which layers to hook and which tensors to tap. It is never cached.

    ``sites`` and ``other_layers`` are the hooked layers, and ``weights`` the variables to tap by key. ``tap_names``
    contains what to tap: a kind of tensor (``"output"``) at every call, or one tensor of one call
    (``"lstm|0|1|final_state/0"``), at every step of a loop over a cell. ``record_names`` contains the kinds to record
    besides the tapped ones. ``starts`` and ``nan_site`` are for loops over cells, see :class:`StepRecorder`.
    ``stepped_layers`` names the layers whose calls with one step are joined, ``separate_layers`` those whose calls with
    one step do not continue each other. ``joined_layers``: those of ``other_layers`` whose calls are one array over
    time if each belongs to a step of a recurrence, which ``step_sites`` are then hooked to tell. ``calls`` are those of
    the last run, in the order in which they happened.
    """

    model: Any
    batch: Batch
    sites: Sequence[RecurrentSite] = ()
    other_layers: Mapping[str, Any] = field(default_factory=dict)
    loss: Loss | None = None
    gradients: bool = True
    tap_names: frozenset[str] = frozenset()
    record_names: frozenset[str] = frozenset()
    weights: Mapping[str, Any] = field(default_factory=dict)
    starts: Starts = field(default_factory=dict)
    nan_site: str = ""
    stepped_layers: frozenset[str] = frozenset()
    separate_layers: frozenset[str] = frozenset()
    joined_layers: frozenset[str] = frozenset()
    step_sites: Sequence[RecurrentSite] = ()
    calls: list[LayerCall] = field(default_factory=list)

    @property
    def hooked_sites(self) -> list[RecurrentSite]:
        """The recurrent layers to hook."""
        return [*self.sites, *(() if self.stepped_layers.isdisjoint(self.joined_layers) else self.step_sites)]

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
        values = self.keras.variable_values(self.variables)
        return {**self.data, "values": values, "seeds": self.keras.seed_tensors(self.model, self.batch.seed)}


class LayerRecorder:
    """Recorder of the layer calls of one run; ``initial_state`` has the user's states as tensors, by layer."""

    def __init__(self, job: RunRequest, tap: Tap, initial_state: Mapping[str, Sequence[Any]]) -> None:
        self.job, self.tap, self.initial_state = job, tap, initial_state
        self.keras, self.training = job.keras, job.batch.training
        self.is_inside_a_layer = False
        #: For each step of a recurrence, in the order in which they ran: the recurrence, and the number of samples.
        self.steps: list[tuple[LayerCall, int | None]] = []
        self._joined: dict[str, JoinedCalls] = {}
        self._recorders: dict[str, StepRecorder] = {}
        self._returned: set[str] = set()
        job.calls.clear()

    @contextmanager
    def inside_a_layer(self) -> Iterator[None]:
        """Switch off the recording of cell calls within the block, in which a recurrent layer calls its own cell."""
        was_inside, self.is_inside_a_layer = self.is_inside_a_layer, True
        try:
            yield
        finally:
            self.is_inside_a_layer = was_inside

    @contextmanager
    def layers_hooked(self) -> Iterator[None]:
        """Hook the layers of the request within the block: methods are overridden on the instances."""
        direction_counts: dict[str, int] = {}
        with overriding() as override_attribute:

            def override(layer: Any, name: str, method: Any) -> None:
                override_attribute(layer, name, substitute_in_this_thread(method, getattr(layer, name)))

            for site in self.job.hooked_sites:
                direction_index = direction_counts[site.name] = direction_counts.get(site.name, -1) + 1
                if site.is_loop:
                    refuse_random(site, self.training)
                    override(site.layer.cell, "call", own_errors_unchanged()(self._recorded_cell_call(site)))
                else:
                    site.keras.hook(self, site, direction_index, override)
            for name, layer in self.job.other_layers.items():
                override(layer, "call", self._recorded_layer_call(name, layer))
            self.keras.switch_cudnn_off(self.job.model, override_attribute)
            yield
        for joined in self._joined.values():
            if not joined.is_once_per_step(self.steps):
                raise SeparateCallsError(joined.call.layer_name, len(joined.steps_before))

    def _recorder_of(self, site: RecurrentSite) -> StepRecorder:
        if site.name not in self._recorders:
            self._recorders[site.name] = StepRecorder(self, site)
        return self._recorders[site.name]

    def step_recorder(self, site: RecurrentSite, sequence: Any, states: Any) -> StepRecorder | None:
        """Return the ``StepRecorder`` of a call of one step of a layer that returns its states; None for other calls.

        SteppedLayerError is raised at the second such call of a layer that neither ``stepped_layers`` nor
        ``separate_layers`` names.
        """
        layer = site.layer
        has_dropout = self.training and any(getattr(layer.cell, name, 0.0) for name in ("dropout", "recurrent_dropout"))
        is_separate = site.name in self.job.separate_layers or site.bidirectional or layer.stateful or has_dropout
        if is_separate or not layer.return_state or sequence.shape[1] != 1 or len(sequence.shape) != 3:
            return None
        if site.name in self.job.stepped_layers:
            return self._recorder_of(site)
        if site.name in self._returned:
            raise SteppedLayerError(site.name)
        return None

    def start_call(self, layer_name: str, direction_index: int = 0, *, is_loop: bool = False) -> LayerCall:
        """Add a record for a new call of a layer, and return it; ``direction_index`` is 1 for the second direction."""
        index = sum(
            call.layer_name == layer_name and call.direction_index == direction_index for call in self.job.calls
        )
        call = LayerCall(layer_name, direction_index, index, is_loop=is_loop)
        self.job.calls.append(call)
        return call

    def record(self, call: LayerCall, name: str, tensor: Any) -> Any:
        """Tap and record ``tensor`` if that is requested; return the tapped tensor, which replaces it in the run."""
        stepless_name = name.partition("@")[0]
        kind, key = stepless_name.split("/")[0], f"{call.key}|{stepless_name}"
        is_tapped = self.keras.is_float(tensor) and not self.job.tap_names.isdisjoint((kind, key))
        if is_tapped:
            tensor = self.tap(f"{call.key}|{name}", tensor)
        if hasattr(tensor, "row_splits"):  # rows of words, which have no array
            return tensor
        if is_tapped or not self.job.record_names.isdisjoint((kind, key)):
            call.arrays[name] = tensor
        return tensor

    def record_all(self, call: LayerCall, name: str, tree: Any, step: int | None = None) -> Any:
        """Tap and record each tensor of a nested structure; return the structure with the tapped tensors.

        A tensor that occurs twice, such as h as output and state, is tapped once for each place and stays one
        tensor. None, an input that is left out, has no array. ``step``: the number of the step that the tensors are of,
        without their time axis of one step.
        """
        flat = self.keras.tree.flatten(tree)
        tapped_by_id: dict[int, Any] = {id(None): None}
        for i, tensor in enumerate(flat):
            if tensor is None:
                continue
            tapped = tapped_by_id.get(id(tensor), tensor)
            if step is None:
                tapped = self.record(call, f"{name}/{i}", tapped)
            elif len(tensor.shape) == 3 and tensor.shape[1] == 1:
                tapped = self.keras.ops.expand_dims(self.record(call, f"{name}/{i}@{step}", tapped[:, 0]), 1)
            else:
                tapped = self.record(call, f"{name}/{i}@{step}", tapped)
            tapped_by_id[id(tensor)] = tapped
        return self.keras.tree.pack_sequence_as(tree, [tapped_by_id[id(tensor)] for tensor in flat])

    def start_recurrent_call(
        self, site: RecurrentSite, direction_index: int, sequence: Any, initial_state: Any, mask: Any
    ) -> tuple[LayerCall, Any, Any]:
        """Start the record of a recurrent call; return it with the tapped input and initial state.

        ``direction_index`` is 1 for the second of two directions.
        """
        initial_state = self.user_initial_state(site, direction_index, initial_state)
        call = self.start_call(site.name, direction_index)
        sequence = self.record(call, "input", sequence)
        # h and c may start as one tensor, and have gradients of their own.
        flat = self.keras.tree.flatten(initial_state)
        flat = [self.record(call, f"initial_state/{i}", state) for i, state in enumerate(flat)]
        initial_state = self.keras.tree.pack_sequence_as(initial_state, flat)
        if "mask" in self.job.record_names and mask is not None:
            call.arrays["mask"] = mask
        return call, sequence, initial_state

    def record_results(
        self, site: RecurrentSite, call: LayerCall, output: Any, states: Any, training: Any
    ) -> tuple[Any, Any]:
        """Record the dropout, the output and the final states of a recurrent call; return the latter two, tapped."""
        if "dropout" in self.job.record_names and training:
            call.arrays.update(self.keras.dropout_multipliers(site.layer))
        output = self.record(call, "output", output)
        if site.layer.return_state:
            states = self.record_all(call, "final_state", states)
            self._returned.add(site.name)
        return output, states

    def user_initial_state(self, site: RecurrentSite, direction_index: int, state: Any) -> Any:
        """Return the user's ``initial_state`` for one direction of a layer, cast and nested as its own ``state``.

        Returns the layer's own state if none was given, and raises InputError if the shapes differ.
        """
        user_states = self.initial_state.get(site.name)
        if user_states is None:
            return state
        layer_states = self.keras.tree.flatten(state)
        if site.bidirectional and len(user_states) == 2 * len(layer_states):
            user_states = user_states[direction_index * len(layer_states) : (direction_index + 1) * len(layer_states)]
        shapes = [tuple(s.shape) for s in user_states]
        if any(len(s) < 1 for s in shapes) or [s[1:] for s in shapes] != [tuple(s.shape)[1:] for s in layer_states]:
            raise InputError(
                f"The initial state given for {site.name!r} has another shape than the layer's states.",
                got=f"shapes {shapes}",
                expected=f"shapes {[tuple(s.shape) for s in layer_states]}",
            )
        cast_states = [
            self.keras.ops.cast(user_state, layer_state.dtype)
            for user_state, layer_state in zip(user_states, layer_states, strict=True)
        ]
        return self.keras.tree.pack_sequence_as(state, cast_states)

    def _recorded_cell_call(self, site: RecurrentSite) -> Callable[..., Any]:
        """Return a replacement of a cell's ``call`` that records each call from outside of a layer as one step."""
        step_recorder, original = self._recorder_of(site), site.layer.cell.call
        names = list(inspect.signature(original).parameters)[:2]

        def call(*args: Any, **kwargs: Any) -> Any:
            cell_arguments = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
            if self.is_inside_a_layer or len(cell_arguments) < 2:
                return original(*args, **kwargs)
            cell_run, x, states = step_recorder.start_step(*(cell_arguments[name] for name in names))
            with step_recorder.early_state_tapped(cell_run):
                result = original(x, states, *args[2:], **{k: v for k, v in kwargs.items() if k not in names})
            if not isinstance(result, tuple | list) or len(result) != 2:
                raise UnsupportedError(
                    f"Cell {site.name!r} did not return an output and its states.",
                    got=type(result).__name__,
                    expected="(output, states), as keras.layers.LSTMCell returns them",
                )
            return step_recorder.end_step(cell_run, *result)

        return call

    def _recorded_layer_call(self, name: str, layer: Any) -> Callable[..., Any]:
        original = layer.call

        def call(*args: Any, **kwargs: Any) -> Any:
            with own_errors_unchanged():
                record, step = self._start_layer_call(name)
            if args:
                record.shape = tuple(getattr(args[0], "shape", ()))
                args = (self.record_all(record, "input", args[0], step), *args[1:])
            return self.record_all(record, "output", original(*args, **kwargs), step)

        return call

    def _start_layer_call(self, name: str) -> tuple[LayerCall, int | None]:
        """Return the record of a call of a layer that is not recurrent, and its step if the calls are joined.

        SteppedLayerError is raised at the second call of a layer whose calls may be one array over time.
        """
        if name in self.job.stepped_layers:
            if name not in self._joined:
                self._joined[name] = JoinedCalls(self.start_call(name))
            joined = self._joined[name]
            joined.steps_before.append(len(self.steps))
            return joined.call, len(joined.steps_before) - 1
        if name in self.job.joined_layers - self.job.separate_layers and any(
            call.layer_name == name for call in self.job.calls
        ):
            raise SteppedLayerError(name)
        return self.start_call(name), None


@dataclass
class JoinedCalls:
    """Calls of a layer that is not recurrent, in one record; ``steps_before``: the steps run before each of them."""

    call: LayerCall
    steps_before: list[int] = field(default_factory=list)

    def is_once_per_step(self, steps: Sequence[tuple[LayerCall, int | None]]) -> bool:
        """Return whether each call is just before, or each just after, one step of the same recurrence.

        Their tensors must have samples as the first axis, and the same shapes at all steps.
        """
        for offset in (0, -1):
            places = [before + offset for before in self.steps_before]
            if len(set(places)) < len(places) or not all(0 <= place < len(steps) for place in places):
                continue
            recurrence, samples = steps[places[0]]
            if [call for call, _ in steps if call is recurrence] == [steps[place][0] for place in places]:
                return all(self._is_joinable(name, samples) for name in self.call.arrays)
        return False

    def _is_joinable(self, name: str, samples: int | None) -> bool:
        kind, _, _ = name.partition("@")
        shape = tuple(self.call.arrays[name].shape)
        has_samples = len(shape) >= (1 if kind.startswith("input/") else 2) and shape[0] == samples
        is_complete = all(f"{kind}@{step}" in self.call.arrays for step in range(len(self.steps_before)))
        return has_samples and is_complete and shape == tuple(self.call.arrays[f"{kind}@0"].shape)


class StepRecorder:
    """Recorder of single steps of one cell or layer, joined to recurrences; see the module's text.

    ``_starts`` are the numbers of the calls that start a recurrence if the user's code changes states, else None.
    ``_returns_nan``: replace the states that the user's code receives by NaN, to find out which calls depend on them.
    """

    def __init__(self, recorder: LayerRecorder, site: RecurrentSite) -> None:
        self._recorder, self._site = recorder, site
        self._starts, self._returns_nan = recorder.job.starts.get(site.name), recorder.job.nan_site == site.name
        self._keras: Dialect = site.keras
        self._context = self._keras.engine.context()
        self._runs: list[CellRun] = []
        self._count = 0

    def start_step(self, x: Any, states: Any) -> tuple[CellRun, Any, Any]:
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
        cell_run, record = self._cell_run(flat), self._recorder.record
        self._count += 1
        t = cell_run.steps
        if t == 0:
            flat = self._recorder.user_initial_state(self._site, 0, flat)
            flat = [record(cell_run.call, f"initial_state/{i}", s) for i, s in enumerate(flat)]
        elif self._starts is None:
            flat = cell_run.produced_states
        if self._starts is not None:
            cell_run.call.arrays.update({f"received/{i}@{t}": s for i, s in enumerate(flat)})
        return cell_run, record(cell_run.call, f"input@{t}", x), self._keras.tree.pack_sequence_as(states, flat)

    @contextmanager
    def early_state_tapped(self, cell_run: CellRun) -> Iterator[None]:
        """Tap the cell state of an LSTM before its hidden state is computed from it, within the block.

        The total gradient of c_t includes the path through h_t. Keras' cell applies its activation to c_t last.
        """
        cell, activation_calls = self._site.layer.cell, 0
        if type(cell) is not self._keras.layers.LSTMCell:
            yield
            return
        original = cell.activation

        def activation(tensor: Any) -> Any:
            nonlocal activation_calls
            activation_calls += 1
            if activation_calls == 2:
                cell_run.early_state = tensor, self._recorder.record(cell_run.call, f"total/1@{cell_run.steps}", tensor)
                tensor = cell_run.early_state[1]
            return original(tensor)

        vars(cell)["activation"] = substitute_in_this_thread(activation, original)
        try:
            yield
        finally:
            vars(cell)["activation"] = original

    def end_step(self, cell_run: CellRun, output: Any, states: Any) -> tuple[Any, Any]:
        """Record and tap the output and the new states of a step; return the tapped tensors, for the user's code."""
        if self._recorder.training:
            self._record_dropout(cell_run)
        record, t = self._recorder.record, cell_run.steps
        flat = self._keras.tree.flatten(states)
        self._refuse_paths_within(cell_run, output, flat)
        tapped_by_id = {} if cell_run.early_state is None else {id(cell_run.early_state[0]): cell_run.early_state[1]}
        cell_run.early_state = None
        tapped_by_id |= {
            id(s): record(cell_run.call, f"total/{i}@{t}", s) for i, s in enumerate(flat) if id(s) not in tapped_by_id
        }
        cell_run.produced_states = [tapped_by_id[id(s)] for s in flat]
        returned_by_id = {id(output): record(cell_run.call, f"output@{t}", tapped_by_id.get(id(output), output))}
        for i, state in enumerate(flat):
            if id(state) not in returned_by_id:
                returned_by_id[id(state)] = record(cell_run.call, f"state/{i}@{t}", tapped_by_id[id(state)])
        cell_run.received_states = [returned_by_id[id(s)] for s in flat]
        cell_run.call.arrays.update({f"final_state/{i}": s for i, s in enumerate(cell_run.received_states)})
        cell_run.steps += 1
        self._recorder.steps.append((cell_run.call, output.shape[0]))
        if self._returns_nan:
            returned_by_id = {key: tensor + float("nan") for key, tensor in returned_by_id.items()}
        return returned_by_id[id(output)], self._keras.tree.pack_sequence_as(
            states, [returned_by_id[id(s)] for s in flat]
        )

    def _cell_run(self, states: Sequence[Any]) -> CellRun:
        """Return the recorded loop of which a cell's call from these states is the next step; a new one if none is."""
        if self._starts is not None:
            if self._count not in self._starts and self._runs:
                return self._runs[-1]
        else:
            for cell_run in reversed(self._runs):
                if len(states) == len(cell_run.received_states) and all(
                    a is b for a, b in zip(states, cell_run.received_states, strict=True)
                ):
                    return cell_run
            if self._runs:
                raise ChangedStateError(self._site.name)
        self._runs.append(CellRun(self._recorder.start_call(self._site.name, is_loop=True)))
        return self._runs[-1]

    def _refuse_paths_within(self, cell_run: CellRun, output: Any, states: Sequence[Any]) -> None:
        """Raise UnsupportedError if gradients by a state are requested that the cell may read again within the step.

        The cell may compute its output or its other states from it.
        """
        cell, tap_names = self._site.layer.cell, self._recorder.job.tap_names
        requested_states = [i for i in range(len(states)) if f"{cell_run.call.key}|total/{i}" in tap_names]
        if type(cell) in self._keras.cells:
            is_open = 1 in requested_states and cell_run.early_state is None
        else:
            is_open = bool(requested_states) and (len(states) > 1 or output is not states[0])
        if is_open:
            raise UnsupportedError(
                f"{self._site.name!r} may compute its output or another state from this one within a step, which "
                "gradients by the state must include and this loop does not show.",
                got=f"a {type(cell).__name__} with {len(states)} states, called step by step by the model's own code",
                expected="a cell whose output is its only state, or one of Keras",
                hint="rl.trace(model, x, y), whose gradients of the loss include it; or keras.layers.RNN(cell)",
            )

    def _record_dropout(self, cell_run: CellRun) -> None:
        """Record the cell's dropout multipliers; raise UnsupportedError if they differ from those of earlier steps."""
        multipliers = self._keras.dropout_multipliers(self._site.layer)
        if cell_run.steps and any(multipliers.get(name) is not mask for name, mask in cell_run.dropout_masks.items()):
            raise UnsupportedError(
                f"Cell {self._site.name!r} draws new dropout at each step of the model's own loop.",
                expected="one mask for all steps",
                hint="training=False, or keras.layers.RNN(cell)",
            )
        cell_run.dropout_masks = multipliers
        if "dropout" in self._recorder.job.record_names:
            cell_run.call.arrays.update(multipliers)


@contextmanager
def own_errors_unchanged() -> Iterator[None]:
    """Mark errors of rnnlens so that Keras does not append the layer's arguments to them."""
    try:
        yield
    except RnnlensError as error:
        error._keras_call_info_injected = True  # type: ignore[attr-defined]
        raise
