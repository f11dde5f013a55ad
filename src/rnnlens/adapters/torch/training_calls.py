"""Recurrent calls of a training step: their records, as calls of the adapter protocol, and run again.

A replay uses the weights, inputs, states and dropout of the step. The layers above and below are not run. The loss of
the replay is the inner product of the direct gradients, recorded in the user's backward pass, with the tensors that the
calls return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import UnsupportedError
from ..protocol import RecurrentCall
from .assemble import Assembler
from .cells import as_tuple, widened
from .inputs import with_clones
from .lineage import StateLink, upstream
from .record import CallOwner, CallRecord, CallRecorder, LayerRecord, Packing, PassRules, Recurrence, broken_recurrences
from .weights import NAMES, class_of, node_name, torch_name

#: Arguments of a cell: its input, and a list of its states, empty if it starts from zeros.
CellArguments = tuple[Tensor, list[Tensor]]
#: Largest allowed deviation of a replayed call, relative to the largest number: kernels round differently.
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
#: The same for a step computed with TF32, whose unit of rounding is 1e-3.
CLOSE_TO_TF32 = 1e-2
#: Options of torch's recurrent layers that a replay takes over.
_OPTIONS = ("num_layers", "bias", "batch_first", "dropout", "bidirectional")


@dataclass(eq=False)
class TrainingCall:
    """One call of a fused recurrent module, or successive calls of a cell that pass its state on.

    ``steps``: detached tensors that each call returned: output (for a packed sequence its data) and final states of a
    module, the new states of a cell. ``grads``: their gradients by (index of the tensor, step), summed over backward
    passes; the scale of a GradScaler is not divided out. Of a cell they are total gradients, ``through`` is the part
    that came through the cell itself, and ``fed_itself`` says that the two cannot be separated, because the state was
    the input as well.

    ``weights`` are by layer index and direction, under torch's names. If a replay is needed, they are copies, because
    the step changes the user's; ``args`` and ``kwargs`` are detached copies of a module's arguments, ``inputs`` those
    of a cell. ``random``: state of the random generator before dropout between stacked layers.
    """

    path: str
    module: Any
    training: bool
    weights: dict[tuple[int, str], dict[str, Tensor]]
    number: int
    autocast: torch.dtype | None = None
    #: Whether the step may have computed it with TF32; a replay does not.
    tf32: bool = False
    steps: list[list[Tensor]] = field(default_factory=list)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    packed: PackedSequence | None = None
    random: Tensor | None = None
    initial: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    grads: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    through: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    backwards: set[int] = field(default_factory=set)
    fed_itself: bool = False

    @property
    def is_loop(self) -> bool:
        """Whether the record is that of a cell called step by step, not of a fused module."""
        return isinstance(self.module, nn.RNNCellBase)

    @property
    def returned(self) -> list[Tensor]:
        """Tensors that a fused module returned; for a finished loop over a cell its states (sample, time, unit)."""
        return self.steps[0]

    def finished(self) -> TrainingCall:
        """Join the steps of a loop over a cell to one call with direct gradients; return any other call unchanged."""
        if not self.is_loop:
            return self
        states, grads = [], {}
        for place, by_step in enumerate(zip(*self.steps, strict=True)):
            direct = [self.grads.get((place, step), torch.zeros_like(state)) for step, state in enumerate(by_step)]
            for at in self.grads.keys() & self.through.keys():
                if at[0] == place:
                    direct[at[1]] = self.grads[at] - self.through[at]
            states.append(_stacked(by_step))
            grads[place, 0] = _stacked(direct)
        args = (_stacked(self.inputs), tuple(_rows(state) for state in self.initial)) if self.inputs else ()
        return replace(self, steps=[states], grads=grads, args=args)


class TrainingLoops:
    """Table of the running loops: a call continues the loop that returned the very tensors it gets as its state.

    Only weak references are stored: a loop is dropped when the tensors of its last step, and their graph, are gone.
    """

    def __init__(self) -> None:
        self._at: Any = WeakTensorKeyDictionary()

    def step(self, arguments: CellArguments, new: list[Tensor], begin: Callable[[], TrainingCall]) -> TrainingCall:
        """Record a call of a cell that returned the states ``new``; ``begin`` makes the record of a new loop."""
        _, given = arguments
        known = [self._at.get(state) for state in given]
        loop = known[0][0] if known and known[0] is not None else None
        if loop is not None:
            pairs = zip(given, loop.steps[-1], strict=True)
            is_next = known == [(loop, place) for place in range(len(loop.initial))]
            if not is_next or any(state.data_ptr() != last.data_ptr() for state, last in pairs):
                loop = None
        if loop is None:
            loop = begin()
            loop.initial = [state.detach().clone() for state in given or map(torch.zeros_like, new)]
        for place, state in enumerate(new):
            self._at[state] = (loop, place)
        loop.steps.append([state.detach() for state in new])
        return loop


def add_to(grads: dict[Any, Tensor], key: Any, grad: Tensor) -> None:
    """Add a gradient to those stored under a key, as a copy, since torch may reuse its memory."""
    grads[key] = grads[key] + grad.detach() if key in grads else grad.detach().clone()


def record_inner_gradients(
    loop: TrainingCall, arguments: CellArguments, new: list[Tensor], on: Callable[[], bool]
) -> None:
    """Record the gradients that pass through a loop's last call to the states it was fed, and between its new states.

    The latter occur in an LSTM, whose hidden state is computed from its new cell state. Nothing is recorded while
    ``on()`` is False.
    """
    step, (x, given) = len(loop.steps) - 1, arguments
    loop.fed_itself |= any(x is state for state in given)
    ends = {(state.grad_fn, state.output_nr): (place, step) for place, state in enumerate(new)}
    if step:
        ends |= {(state.grad_fn, state.output_nr): (place, step - 1) for place, state in enumerate(given)}

    def recorder(edge: int, at: tuple[int, int]) -> Any:
        def hook(inner: tuple[Tensor | None, ...], outer: Any) -> None:
            grad = inner[edge]
            if grad is not None and on():
                add_to(loop.through, at, grad)

        return hook

    for node in upstream([state.grad_fn for state in new], {x.grad_fn, *(state.grad_fn for state in given)}):
        for edge, parent in enumerate(node.next_functions):
            if parent in ends:
                node.register_hook(recorder(edge, ends[parent]))


def joined(calls: Sequence[TrainingCall]) -> tuple[list[TrainingCall], list[str]]:
    """Join the steps of finished loops; return all calls, and notes.

    Cells whose state is changed at every step, or is also their input, are left out.
    """
    loops: dict[str, list[TrainingCall]] = {}
    for call in calls:
        if call.is_loop:
            loops.setdefault(call.path, []).append(call)
    lengths = {path: [len(loop.steps) for loop in several] for path, several in loops.items()}
    changed = [path for path, steps in lengths.items() if len(steps) > 2 and max(steps) == 1]
    itself = [path for path, several in loops.items() if any(loop.fed_itself for loop in several)]
    words = ((changed, "its state is changed between its steps"), (itself, "its own state is also its input"))
    notes = [
        f"{path}: {why}, so it is not recorded in batch mode. A probe records it."
        for paths, why in words
        for path in sorted(paths)
    ]
    left_out = {*changed, *itself}
    notes += broken_recurrences({path: steps for path, steps in lengths.items() if path not in left_out})
    return [call.finished() for call in calls if call.path not in left_out], notes


def _rows(value: Tensor) -> Tensor:
    """Return a state as (sample, unit), also for a single sample without sample axis."""
    return value[None] if value.dim() == 1 else value


def _stacked(steps: Sequence[Tensor]) -> Tensor:
    return torch.stack([_rows(value) for value in steps], dim=1)


def direct_calls(calls: Sequence[TrainingCall], scale: float) -> list[RecurrentCall]:
    """Return one call per direction of every recorded call, assembled as the calls of a trace are.

    Of stacked layers only the uppermost is returned: it is the one whose direct gradients were recorded. Inputs and
    initial states are placeholders with the right number of samples and steps.
    """
    recorder, grads = CallRecorder(PassRules(), weight_grads=False), dict[int, Tensor]()
    for call in calls:
        run = _recurrence(call)
        recorder.runs.append(run)
        taps = [run.visits[0].pieces[0].output, *(tap for tap in run.visits[0].state_taps if tap is not None)]
        for (place, _), grad in call.grads.items():
            grads[id(taps[place])] = unscaled(_time_first(call, place, grad), scale)
    return Assembler(recorder, lambda tap: grads.get(id(tap))).calls()


def _recurrence(call: TrainingCall) -> Recurrence:
    """Convert a training call, or its uppermost stacked layer, to a ``Recurrence`` as forward passes record them."""
    known = class_of(call.module)
    assert known is not None
    stacked = isinstance(call.module, nn.RNNBase)
    top, both = (call.module.num_layers - 1, call.module.bidirectional) if stacked else (0, False)
    name = node_name(call.path, call.module, top)
    owner = CallOwner(id(call.module), name, *known, directions=1 + both, stacked=stacked)
    output, *finals = (_time_first(call, place, value) for place, value in enumerate(call.returned))
    taps = finals if stacked else [None, *finals]
    finals = finals if stacked else [output[-1:], *finals]
    packing = None
    if call.packed is not None:
        packing = Packing.of(call.packed.batch_sizes, call.packed.unsorted_indices, output.device)
    weights = [call.weights[top, direction] for direction in ("forward", "backward")[: 1 + both]]
    start = tuple(torch.zeros_like(state) for state in finals)
    piece = LayerRecord(output, output, start, output, tuple(finals), weights)
    raw = start if stacked else tuple(state[0] for state in finals)
    visit = CallRecord([piece], tuple(taps), StateLink(start, start, raw, (), start), packing=packing)
    return Recurrence(owner, [visit])


def _time_first(call: TrainingCall, place: int, value: Tensor) -> Tensor:
    """Reorder a tensor that a recurrent call returned, or its gradient, to the layout that a recorder uses.

    The output of a layer is (time, sample, unit), or the data of a packed sequence; a final state is (direction,
    sample, unit) of the uppermost layer, in the order of the packed samples. The states of a cell are (time, sample,
    unit), those behind the first at the last step only.
    """
    module = call.module
    if isinstance(module, nn.RNNCellBase):
        return value.transpose(0, 1)[-1 if place else 0 :]
    if place == 0 and call.packed is not None:
        return value
    if value.dim() == 2:  # one sample without sample axis
        value = value[:, None]
    elif place == 0 and module.batch_first:
        value = value.transpose(0, 1)
    if place == 0:
        return value
    value = value[-(2 if module.bidirectional else 1) :]
    order = None if call.packed is None else call.packed.sorted_indices
    return value if order is None else value.index_select(1, order)


class CallReplay(nn.Module):  # type: ignore[misc]
    """Model that consists of the recurrent calls of one step only; the values of its input are not used.

    ``scale`` is the factor by which a GradScaler had multiplied the loss. Raise ``UnsupportedError`` for dropout
    between stacked layers on another device than the CPU, whose generator cannot be restored.
    """

    def __init__(self, calls: Sequence[TrainingCall], scale: float = 1.0) -> None:
        super().__init__()
        self._calls, self._scale = list(calls), scale
        self.deviation = 0.0
        self.allowed = CLOSE_TO_TF32 if any(call.tf32 for call in calls) else CLOSE[torch.float32]
        paths = set[str]()
        for call in self._calls:
            device = call.returned[0].device.type
            if call.random is not None and device != "cpu":
                raise UnsupportedError(
                    f"Dropout between the stacked layers of {call.path!r} was drawn by a generator of the device.",
                    got=f"dropout={call.module.dropout} on {device}",
                    expected="dropout=0, or training on the CPU",
                    hint="one nn module per layer with nn.Dropout between them; output_grad is recorded in any case",
                )
            if call.path not in paths:
                paths.add(call.path)
                self._put(call)

    def forward(self, *_inputs: Any) -> list[Any]:
        """Return the tensors of every call: its output, then its final states."""
        returned = []
        for call in self._calls:
            module, device = self.get_submodule(call.path), call.returned[0].device.type
            if call.random is not None:
                torch.set_rng_state(call.random)
            with torch.autocast(device, dtype=call.autocast, enabled=call.autocast is not None):
                args, kwargs = with_clones((call.args, call.kwargs))
                if isinstance(module, nn.RNNCellBase):
                    returned.append(_looped(module, *args))
                    continue
                first, finals = module(*args, **kwargs)
            returned.append([first.data if isinstance(first, PackedSequence) else first, *as_tuple(finals)])
        return returned

    def loss(self, returned: list[list[Tensor]]) -> Tensor:
        """Return the inner product of the replayed tensors with their recorded gradients.

        Its gradients with respect to the weights equal those of the training step.
        """
        total = None
        for call, tensors in zip(self._calls, returned, strict=True):
            self._compare(call, tensors)
            for place, tensor in enumerate(tensors):
                if (place, 0) in call.grads:
                    term = (widened(tensor) * unscaled(call.grads[place, 0], self._scale)).sum()
                    total = term if total is None else total + term
        assert total is not None
        return total

    def _compare(self, call: TrainingCall, tensors: Sequence[Tensor]) -> None:
        """Compare the replayed tensors with those of the training step; raise ``UnsupportedError`` if they differ."""
        for tensor, before in zip(tensors, call.returned, strict=True):
            far = _deviation(widened(tensor.detach()), widened(before))
            self.deviation = max(self.deviation, far)
            if not far <= (CLOSE_TO_TF32 if call.tf32 else CLOSE.get(before.dtype, 1e-4)):
                raise UnsupportedError(
                    f"Repeating the calls of {call.path!r} gives other numbers than the training step.",
                    got=f"a deviation of {far:.1g} of the largest number, from a {type(call.module).__name__}",
                    expected="a layer whose output is that of torch's own kernel",
                    hint="the direct gradients of the step are right; probe mode records the rest",
                )

    def _put(self, call: TrainingCall) -> None:
        """Add a new module with the weights before the step to this model, under its path in the user's model."""
        holder: nn.Module = self
        *above, last = call.path.split(".")
        for name in above:
            if name not in holder._modules:
                holder.add_module(name, nn.Module())
            holder = holder._modules[name]
        holder.add_module(last, _fresh(call))


def _looped(cell: Any, inputs: Tensor, initial: tuple[Tensor, ...]) -> list[Tensor]:
    """Run a cell over inputs (sample, time, feature) and return each of its states as (sample, time, unit)."""
    state: Any = initial if len(initial) > 1 else initial[0]
    states = []
    for x in inputs.unbind(1):
        state = cell(x, state)
        states.append(as_tuple(state))
    return [torch.stack(steps, 1) for steps in zip(*states, strict=True)]


def _fresh(call: TrainingCall) -> nn.Module:
    """Create a module like that of a call, with the recorded weights, without hooks and without a user's forward."""
    user: Any = call.module
    kinds = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
    kind = next(kind for kind in kinds if isinstance(user, kind))
    names = ["bias"] if issubclass(kind, nn.RNNCellBase) else [*_OPTIONS]
    names += ["proj_size"] if kind is nn.LSTM else ["nonlinearity"] if kind in (nn.RNN, nn.RNNCell) else []
    options = {name: getattr(user, name) for name in names}
    if not call.training and "dropout" in options:  # the replay sets the mode of all modules
        options["dropout"] = 0.0
    fresh: nn.Module = kind(user.input_size, user.hidden_size, device="meta", **options)
    for (layer, direction), weights in call.weights.items():
        for slot, weight in weights.items():
            setattr(fresh, torch_name(fresh, layer, f"{direction}/{NAMES[slot]}"), nn.Parameter(weight.clone()))
    fresh.train(call.training)
    return fresh


def _deviation(again: Tensor, before: Tensor) -> float:
    """Return the largest difference of replayed values, relative to the largest one; NaN where only one is finite."""
    alike = (again == before) | (again.isnan() & before.isnan())  # equal infinities and NaNs count as equal
    far = float(torch.where(alike, 0.0, (again - before).abs()).max())
    largest = float(torch.where(before.isfinite(), before.abs(), 0.0).max())
    return far / (largest or 1.0)


def unscaled(grad: Tensor, scale: float) -> Tensor:
    """Divide a gradient by the loss scale, in at least float32."""
    return widened(grad) if scale == 1.0 else widened(grad) / scale
