"""Recurrent calls of a training step: their records, as calls of the adapter protocol, and run again.

A replay uses the weights, inputs, states and dropout of the step. The layers above and below are not run. The loss of
the replay is the inner product of the direct gradients, recorded in the user's backward pass, with the tensors that the
calls return.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import UnsupportedError
from ..protocol import RecurrentCall
from .assemble import Assembler
from .cells import as_tuple, at_least_float32
from .inputs import clone_tensors
from .lineage import StateLink, upstream_nodes
from .record import CallOwner, CallRecord, CallRecorder, LayerRecord, Packing, PassRules, Recurrence, broken_recurrences
from .training_cells import CellArguments, direct_call, replayed_cell, without_fed_back_outputs
from .weights import NAMES, class_of, node_name, torch_name

#: Arguments of a step of torch's own modules: its input, and a list of its states, empty if it starts from zeros.
StepArguments = tuple[Tensor, list[Tensor]]
#: Largest allowed deviation of a replayed call, relative to the largest number: kernels round differently.
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
#: The same for a step computed with TF32, whose unit of rounding is 1e-3.
CLOSE_TO_TF32 = 1e-2
#: Options of torch's recurrent layers that a replay takes over.
_OPTIONS = ("num_layers", "bias", "batch_first", "dropout", "bidirectional")


@dataclass(eq=False)
class TrainingCall:
    """One call of a fused recurrent module, or successive single steps of a module or cell that pass the state on.

    ``steps``: detached tensors that each call returned: output (for a packed sequence its data) and final states of a
    module, the new states of a cell. ``grads``: their gradients by (index of the tensor, step), summed over backward
    passes; the scale of a GradScaler is not divided out. Of a cell they are total gradients, ``inner_grads`` is the
    part that came through the cell itself, and ``is_own_input`` says that the two cannot be separated, because the
    state was the input as well.

    ``weights`` are by layer index and direction, under torch's names. If a replay is needed, they are copies, because
    the step changes the user's; ``args`` and ``kwargs`` are detached copies of a module's arguments, ``inputs`` those
    of a cell. ``rng_state``: state of the random generator before dropout between stacked layers.
    """

    path: str
    module: Any
    training: bool
    weights: dict[tuple[int, str], dict[str, Tensor]]
    number: int
    autocast: torch.dtype | None = None
    #: Whether the step may have computed it with TF32; a replay does not.
    used_tf32: bool = False
    steps: list[list[Tensor]] = field(default_factory=list)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    packed: PackedSequence | None = None
    rng_state: Tensor | None = None
    initial: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    grads: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    inner_grads: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    backward_ids: set[int] = field(default_factory=set)
    is_own_input: bool = False
    #: Whether several calls of a fused module, of one step each, were joined.
    is_stepped: bool = False
    #: Arguments of the calls of a user's own cell; None for torch's modules.
    own_cell: CellArguments | None = None

    @property
    def is_loop(self) -> bool:
        """Whether the record is that of a cell called step by step, not of a fused module."""
        return self.own_cell is not None or isinstance(self.module, nn.RNNCellBase)

    @property
    def returned(self) -> list[Tensor]:
        """Tensors that a fused module returned; for a finished loop over a cell its states (sample, time, unit).

        For a module called step by step: its output at all steps, and its states (time, layer, sample, unit).
        """
        return self.steps[0]

    @property
    def time_axis(self) -> int:
        """Axis of time of a fused module's output."""
        return int(self.module.batch_first and self.returned[0].dim() == 3)

    def with_joined_steps(self) -> TrainingCall:
        """Join the steps of a loop to one call with direct gradients; return a single call of a module unchanged."""
        if not self.is_loop:
            return self if len(self.steps) == 1 else self._with_joined_calls()
        states, grads = [], {}
        for index, state_steps in enumerate(zip(*self.steps, strict=True)):
            direct_grads = [
                self.grads.get((index, step), torch.zeros_like(state)) for step, state in enumerate(state_steps)
            ]
            for key in self.grads.keys() & self.inner_grads.keys():
                if key[0] == index:
                    direct_grads[key[1]] = self.grads[key] - self.inner_grads[key]
            states.append(_stack_steps(state_steps))
            grads[index, 0] = _stack_steps(direct_grads)
        args = (
            (_stack_steps(self.inputs), tuple(_with_sample_axis(state) for state in self.initial))
            if self.inputs
            else ()
        )
        return replace(self, steps=[states], grads=grads, args=args)

    def _with_joined_calls(self) -> TrainingCall:
        """Join calls of a fused module with a single step each."""
        axis, returned, grads = self.time_axis, [], {}
        for index, values in enumerate(zip(*self.steps, strict=True)):
            direct_grads = [torch.zeros_like(value) for value in values]
            for step, _ in enumerate(values):
                if (grad := self.grads.get((index, step))) is not None:
                    inner = self.inner_grads.get((index, step))
                    direct_grads[step] = grad if inner is None else grad - inner
            join = partial(torch.stack, dim=0) if index else partial(torch.cat, dim=axis)
            returned.append(join(values))
            grads[index, 0] = join(direct_grads)
        args = (torch.cat(self.inputs, axis), tuple(self.initial)) if self.inputs else ()
        return replace(self, steps=[returned], grads=grads, args=args, is_stepped=True)

    def direct_grads(self) -> dict[int, Tensor]:
        """Return the direct gradients of the output and the final states, by their index in :attr:`returned`.

        Of a module called step by step the state between two steps is the output, so that its gradient is the output's.
        """
        grads = {index: grad for (index, _), grad in self.grads.items()}
        if not self.is_stepped:
            return grads
        top_states = grads[1][:-1, -1]
        earlier = torch.cat([top_states, torch.zeros_like(top_states[:1])])
        if grads[0].shape[-1] == earlier.shape[-1]:
            grads[0] = grads[0] + (earlier.transpose(0, 1) if self.time_axis else earlier)
        return {index: grad[-1] if index else grad for index, grad in grads.items()}


class TrainingLoops:
    """Table of the running loops: a call continues the loop that returned the very tensors it gets as its state.

    Only weak references are stored: a loop is dropped when the tensors of its last step, and their graph, are gone.
    """

    def __init__(self) -> None:
        self._loop_of_state: Any = WeakTensorKeyDictionary()
        # By module: a cell and the module around it may return the same tensor.
        self._loop_of_returned: defaultdict[nn.Module, Any] = defaultdict(WeakTensorKeyDictionary)

    def step(
        self,
        module: nn.Module,
        arguments: StepArguments,
        new_states: list[Tensor],
        make_loop: Callable[[], TrainingCall],
    ) -> TrainingCall:
        """Record a step of a module that returned ``new_states``; ``make_loop`` makes the record of a new loop."""
        _, states = arguments
        loop_positions = [self._loop_of_state.get(state) for state in states]
        loop = loop_positions[0][0] if loop_positions and loop_positions[0] is not None else None
        if loop is not None:
            pairs = zip(states, loop.steps[-1][-len(states) :], strict=True)
            versions = [state._version for state in states[: len(loop.initial)]]
            is_next = loop_positions == [(loop, *entry) for entry in enumerate(versions)]
            if (
                loop.module is not module
                or not is_next
                or any(state.data_ptr() != last_state.data_ptr() for state, last_state in pairs)
            ):
                loop = None
        if loop is None:
            loop = make_loop()
            loop.initial = [state.detach().clone() for state in states or map(torch.zeros_like, new_states)]
        for index, state in enumerate(new_states):
            self._loop_of_state[state] = (loop, index, state._version)
        loop.steps.append([state.detach() for state in new_states])
        return loop

    def step_of_cell(
        self,
        module: nn.Module,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        returned: list[Tensor],
        make_loop: Callable[[], TrainingCall],
    ) -> tuple[TrainingCall, dict[int, int]]:
        """Record a call of a user's cell that ``returned`` tensors; return its loop, and its states by position."""
        leaves, loops = tree_leaves(call), self._loop_of_returned[module]
        own = {i: loops[leaf] for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf in loops}
        loop = next((entry[0] for entry in own.values()), None)
        states = without_fed_back_outputs(module, *call, returned, {i: index for i, (_, index, _) in own.items()})
        if loop is not None:
            last = loop.steps[-1]
            known = loop.own_cell.states if loop.own_cell is not None and len(loop.steps) > 1 else states
            is_next = all(
                own[i] == (loop, index, leaves[i]._version) and leaves[i].data_ptr() == last[index].data_ptr()
                for i, index in states.items()
            )
            if not is_next or known != states or [t.shape for t in last] != [t.shape for t in returned]:
                loop = None
        if loop is None:
            loop, states = make_loop(), {}
        for index, tensor in enumerate(returned):
            loops[tensor] = (loop, index, tensor._version)
        loop.steps.append([tensor.detach() for tensor in returned])
        return loop, states


def add_gradient(grads: dict[Any, Tensor], key: Any, grad: Tensor) -> None:
    """Add a gradient to those stored under a key, as a copy, since torch may reuse its memory."""
    grads[key] = grads[key] + grad.detach() if key in grads else grad.detach().clone()


def record_step_gradients(
    loop: TrainingCall, arguments: StepArguments, new_states: list[Tensor], is_recording: Callable[[], bool]
) -> None:
    """Record the inner gradients of a step of torch's own modules."""
    x, states = arguments
    offset = len(loop.steps[-1]) - len(loop.initial)  # a fused module returns its output before its states
    record_inner_gradients(loop, [x], dict(enumerate(states, start=offset)), new_states, is_recording)


def record_inner_gradients(
    loop: TrainingCall,
    inputs: Sequence[Tensor],
    states: Mapping[int, Tensor],
    new_states: list[Tensor],
    is_recording: Callable[[], bool],
) -> None:
    """Record the gradients that pass through a loop's last call to the states it was fed, and between its new states.

    The latter occur in an LSTM, whose hidden state is computed from its new cell state. Nothing is recorded while
    ``is_recording()`` is False. ``states``: by their positions among the tensors that the call before returned.
    """
    step = len(loop.steps) - 1
    loop.is_own_input |= any(x is state for x in inputs for state in states.values())
    state_edges = {(state.grad_fn, state.output_nr): (index, step) for index, state in enumerate(new_states)}
    if step:
        state_edges |= {(state.grad_fn, state.output_nr): (index, step - 1) for index, state in states.items()}

    def recorder(edge: int, tensor_and_step: tuple[int, int]) -> Any:
        def hook(grad_inputs: tuple[Tensor | None, ...], grad_outputs: Any) -> None:
            grad = grad_inputs[edge]
            if grad is not None and is_recording():
                add_gradient(loop.inner_grads, tensor_and_step, grad)

        return hook

    for node in upstream_nodes(
        [state.grad_fn for state in new_states], {tensor.grad_fn for tensor in (*inputs, *states.values())}
    ):
        for edge, parent in enumerate(node.next_functions):
            if parent in state_edges:
                node.register_hook(recorder(edge, state_edges[parent]))


def join_loops(calls: Sequence[TrainingCall]) -> tuple[list[TrainingCall], list[str]]:
    """Join the steps of finished loops; return all calls, and notes.

    Cells whose state is changed at every step, or is also their input, are left out.
    """
    loops: dict[str, list[TrainingCall]] = {}
    for call in calls:
        if call.is_loop or len(call.steps) > 1:
            loops.setdefault(call.path, []).append(call)
    lengths = {path: [len(loop.steps) for loop in path_loops] for path, path_loops in loops.items()}
    changed_paths = [path for path, steps in lengths.items() if len(steps) > 2 and max(steps) == 1]
    fed_to_itself = [path for path, path_loops in loops.items() if any(loop.is_own_input for loop in path_loops)]
    reasons = (
        (changed_paths, "its state is changed between its steps (a view or copy of it is another tensor)"),
        (fed_to_itself, "its own state is also its input"),
    )
    notes = [
        f"{path}: {reason}, so it is not recorded in batch mode. A probe records it."
        for paths, reason in reasons
        for path in sorted(paths)
    ]
    omitted_paths = {*changed_paths, *fed_to_itself}
    notes += broken_recurrences({path: steps for path, steps in lengths.items() if path not in omitted_paths})
    return [call.with_joined_steps() for call in calls if call.path not in omitted_paths], notes


def _with_sample_axis(value: Tensor) -> Tensor:
    """Return a state as (sample, unit), also for a single sample without sample axis."""
    return value[None] if value.dim() == 1 else value


def _stack_steps(steps: Sequence[Tensor]) -> Tensor:
    return torch.stack([_with_sample_axis(value) for value in steps], dim=1)


def direct_calls(calls: Sequence[TrainingCall], scale: float) -> list[RecurrentCall]:
    """Return one call per direction of every recorded call, assembled as the calls of a trace are.

    Of stacked layers only the uppermost is returned: it is the one whose direct gradients were recorded. Inputs and
    initial states are placeholders with the right number of samples and steps.
    """
    recorder, grads = CallRecorder(PassRules(), weight_grads=False), dict[int, Tensor]()
    counts, own_calls = Counter(call.path for call in calls), list[RecurrentCall]()
    for call in calls:
        if call.own_cell is not None:
            number = sum(own.layer.partition("#")[0] == call.path for own in own_calls)
            name = f"{call.path}#{number}" if counts[call.path] > 1 else call.path
            own_grads = {index: unscale(grad, scale) for (index, _), grad in call.grads.items()}
            own_calls.append(direct_call(name, call.module, call.own_cell, call.returned, own_grads))
            continue
        recurrence = _as_recurrence(call)
        recorder.recurrences.append(recurrence)
        taps = [
            recurrence.calls[0].layer_records[0].output,
            *(tap for tap in recurrence.calls[0].state_taps if tap is not None),
        ]
        for index, grad in call.direct_grads().items():
            grads[id(taps[index])] = unscale(_time_first(call, index, grad), scale)
    return [*Assembler(recorder, lambda tap: grads.get(id(tap))).calls(), *own_calls]


def _as_recurrence(call: TrainingCall) -> Recurrence:
    """Convert a training call, or its uppermost stacked layer, to a ``Recurrence`` as forward passes record them."""
    cell_and_activation = class_of(call.module)
    assert cell_and_activation is not None
    is_fused = isinstance(call.module, nn.RNNBase)
    top_layer, bidirectional = (call.module.num_layers - 1, call.module.bidirectional) if is_fused else (0, False)
    name = node_name(call.path, call.module, top_layer)
    owner = CallOwner(id(call.module), name, *cell_and_activation, directions=1 + bidirectional, is_fused=is_fused)
    returned = [value[-1] if index and call.is_stepped else value for index, value in enumerate(call.returned)]
    output, *finals = (_time_first(call, index, value) for index, value in enumerate(returned))
    taps = finals if is_fused else [None, *finals]
    finals = finals if is_fused else [output[-1:], *finals]
    packing = None
    if call.packed is not None:
        packing = Packing.of(call.packed.batch_sizes, call.packed.unsorted_indices, output.device)
    weights = [call.weights[top_layer, direction] for direction in ("forward", "backward")[: 1 + bidirectional]]
    zeros = tuple(torch.zeros_like(state) for state in finals)
    layer_record = LayerRecord(output, output, zeros, output, tuple(finals), weights)
    final_states = zeros if is_fused else tuple(state[0] for state in finals)
    record = CallRecord([layer_record], tuple(taps), StateLink(zeros, zeros, final_states, (), zeros), packing=packing)
    return Recurrence(owner, [record])


def _time_first(call: TrainingCall, index: int, value: Tensor) -> Tensor:
    """Reorder a tensor that a recurrent call returned, or its gradient, to the layout that a recorder uses.

    The output of a layer is (time, sample, unit), or the data of a packed sequence; a final state is (direction,
    sample, unit) of the uppermost layer, in the order of the packed samples. The states of a cell are (time, sample,
    unit), those behind the first at the last step only.
    """
    module = call.module
    if isinstance(module, nn.RNNCellBase):
        return value.transpose(0, 1)[-1 if index else 0 :]
    if index == 0 and call.packed is not None:
        return value
    if value.dim() == 2:  # one sample without sample axis
        value = value[:, None]
    elif index == 0 and module.batch_first:
        value = value.transpose(0, 1)
    if index == 0:
        return value
    value = value[-(2 if module.bidirectional else 1) :]
    sample_order = None if call.packed is None else call.packed.sorted_indices
    return value if sample_order is None else value.index_select(1, sample_order)


class CallReplay(nn.Module):  # type: ignore[misc]
    """Model that consists of the recurrent calls of one step only; the values of its input are not used.

    ``scale`` is the factor by which a GradScaler had multiplied the loss. Raise ``UnsupportedError`` for dropout
    between stacked layers on another device than the CPU, whose generator cannot be restored.
    """

    def __init__(self, calls: Sequence[TrainingCall], scale: float = 1.0) -> None:
        super().__init__()
        self._calls, self._scale = list(calls), scale
        self.deviation = 0.0
        self.allowed = CLOSE_TO_TF32 if any(call.used_tf32 for call in calls) else CLOSE[torch.float32]
        paths = set[str]()
        for call in self._calls:
            device = call.returned[0].device.type
            if call.rng_state is not None and device != "cpu":
                raise UnsupportedError(
                    f"Dropout between the stacked layers of {call.path!r} was drawn by a generator of the device.",
                    got=f"dropout={call.module.dropout} on {device}",
                    expected="dropout=0, or training on the CPU",
                    hint="one nn module per layer with nn.Dropout between them; output_grad is recorded in any case",
                )
            if call.own_cell is not None and not call.own_cell.is_whole:
                raise UnsupportedError(
                    f"The arguments of {call.path!r} were changed in place before it proved to be a cell.",
                    got="x[...] = ... after the call",
                    expected="arguments that stay as they were until the next call",
                    hint="later batches are recorded whole; output_grad is recorded in any case",
                )
            if call.path not in paths:
                paths.add(call.path)
                self._add_module(call)

    def forward(self, *_inputs: Any) -> list[Any]:
        """Return the tensors of every call: its output, then its final states."""
        returned = []
        for call in self._calls:
            module, device = self.get_submodule(call.path), call.returned[0].device.type
            if call.rng_state is not None:
                torch.set_rng_state(call.rng_state)
            with torch.autocast(device, dtype=call.autocast, enabled=call.autocast is not None):
                if call.own_cell is not None:
                    returned.append(call.own_cell.run(module))
                    continue
                args, kwargs = clone_tensors((call.args, call.kwargs))
                if isinstance(module, nn.RNNCellBase):
                    returned.append(_run_loop(module, *args))
                    continue
                if call.is_stepped:
                    returned.append(_run_steps(module, call.time_axis, *args))
                    continue
                output, final_states = module(*args, **kwargs)
            returned.append([output.data if isinstance(output, PackedSequence) else output, *as_tuple(final_states)])
        return returned

    def loss(self, returned: list[list[Tensor]]) -> Tensor:
        """Return the inner product of the replayed tensors with their recorded gradients.

        Its gradients with respect to the weights equal those of the training step.
        """
        total = None
        for call, tensors in zip(self._calls, returned, strict=True):
            self._compare(call, tensors)
            for index, tensor in enumerate(tensors):
                if (index, 0) in call.grads:
                    term = (at_least_float32(tensor) * unscale(call.grads[index, 0], self._scale)).sum()
                    total = term if total is None else total + term
        assert total is not None
        return total

    def _compare(self, call: TrainingCall, tensors: Sequence[Tensor]) -> None:
        """Compare the replayed tensors with those of the training step; raise ``UnsupportedError`` if they differ."""
        for tensor, recorded in zip(tensors, call.returned, strict=True):
            deviation = _deviation(at_least_float32(tensor.detach()), at_least_float32(recorded))
            self.deviation = max(self.deviation, deviation)
            if not deviation <= (CLOSE_TO_TF32 if call.used_tf32 else CLOSE.get(recorded.dtype, 1e-4)):
                raise UnsupportedError(
                    f"Repeating the calls of {call.path!r} gives other numbers than the training step.",
                    got=f"a deviation of {deviation:.1g} of the largest number, from a {type(call.module).__name__}",
                    expected="a layer whose output is that of torch's own kernel",
                    hint="the direct gradients of the step are right; probe mode records the rest",
                )

    def _add_module(self, call: TrainingCall) -> None:
        """Add a new module with the weights before the step to this model, under its path in the user's model."""
        parent: nn.Module = self
        *parents, own_name = call.path.split(".")
        for name in parents:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent._modules[name]
        parent.add_module(own_name, _replay_module(call))


def _run_loop(cell: Any, inputs: Tensor, initial: tuple[Tensor, ...]) -> list[Tensor]:
    """Run a cell over inputs (sample, time, feature) and return each of its states as (sample, time, unit)."""
    state: Any = initial if len(initial) > 1 else initial[0]
    states = []
    for x in inputs.unbind(1):
        state = cell(x, state)
        states.append(as_tuple(state))
    return [torch.stack(steps, 1) for steps in zip(*states, strict=True)]


def _run_steps(module: Any, axis: int, inputs: Tensor, initial: tuple[Tensor, ...]) -> list[Tensor]:
    """Run a fused module step by step; return its output at all steps, and its states stacked over the steps."""
    state: Any = initial if len(initial) > 1 else initial[0]
    outputs, states = [], []
    for x in inputs.split(1, axis):
        output, state = module(x, state)
        outputs.append(output)
        states.append(as_tuple(state))
    return [torch.cat(outputs, axis), *(torch.stack(steps) for steps in zip(*states, strict=True))]


def is_single_step(module: Any, x: Any) -> bool:
    """Return whether a call of a fused module on ``x`` has one step forwards, so that the next may continue it."""
    if isinstance(x, PackedSequence) or module.bidirectional:
        return False
    return bool(x.shape[int(module.batch_first and x.dim() == 3)] == 1)


def _replay_module(call: TrainingCall) -> nn.Module:
    """Create a module like that of a call, with the recorded weights, without hooks and without a user's forward."""
    user_module: Any = call.module
    if call.own_cell is not None:
        return replayed_cell(user_module, call.weights[0, "forward"]).train(call.training)
    torch_classes = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
    layer_class = next(layer_class for layer_class in torch_classes if isinstance(user_module, layer_class))
    names = ["bias"] if issubclass(layer_class, nn.RNNCellBase) else [*_OPTIONS]
    names += (
        ["proj_size"] if layer_class is nn.LSTM else ["nonlinearity"] if layer_class in (nn.RNN, nn.RNNCell) else []
    )
    options = {name: getattr(user_module, name) for name in names}
    if not call.training and "dropout" in options:  # the replay sets the mode of all modules
        options["dropout"] = 0.0
    replay_module: nn.Module = layer_class(user_module.input_size, user_module.hidden_size, device="meta", **options)
    for (layer, direction), weights in call.weights.items():
        for slot, weight in weights.items():
            setattr(
                replay_module,
                torch_name(replay_module, layer, f"{direction}/{NAMES[slot]}"),
                nn.Parameter(weight.clone()),
            )
    replay_module.train(call.training)
    return replay_module


def _deviation(replayed: Tensor, recorded: Tensor) -> float:
    """Return the largest difference of replayed values, relative to the largest one; NaN where only one is finite."""
    # Equal infinities and NaNs count as equal.
    is_equal = (replayed == recorded) | (replayed.isnan() & recorded.isnan())
    difference = float(torch.where(is_equal, 0.0, (replayed - recorded).abs()).max())
    largest = float(torch.where(recorded.isfinite(), recorded.abs(), 0.0).max())
    return difference / (largest or 1.0)


def unscale(grad: Tensor, scale: float) -> Tensor:
    """Divide a gradient by the loss scale, in at least float32."""
    return at_least_float32(grad) if scale == 1.0 else at_least_float32(grad) / scale
