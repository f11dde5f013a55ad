"""Recurrent calls of a training step: their records, as calls of the adapter protocol, and run again.

A replay uses the weights, inputs, states and dropout of the step. The layers above and below are not run. The loss of
the replay is the inner product of the direct gradients, recorded in the user's backward pass, with the tensors that the
calls return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import UnsupportedError
from ..protocol import RecurrentCall
from .assemble import Assembler
from .discover import node_name
from .inputs import on_leaves
from .lineage import StateLink, upstream
from .record import CallOwner, CallRecord, CallRecorder, JoinRules, LayerRecord, Packing, Recurrence, broken_recurrences
from .training_weights import unscaled, widened
from .weights import class_of

#: Arguments of a cell: its input, and a list of its states, empty if it starts from zeros.
CellArguments = tuple[Tensor, list[Tensor]]
#: Largest allowed deviation of a replayed call, relative to the largest number: kernels round differently.
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}


@dataclass(eq=False)
class TrainingCall:
    """One call of a fused recurrent module, or the whole loop of a cell: inputs, returned tensors, gradients.

    Attributes
    ----------
    args, kwargs
        Detached copies of the arguments; empty if no replay is needed. For a loop: all inputs (sample, time, feature)
        and the initial states.
    weights
        Weights by layer index and direction, under torch's names; copies if a replay is needed, because the step
        changes the user's.
    random
        State of the random generator before dropout between stacked layers; None if no such dropout was active.
    returned
        Detached output (for a packed sequence its data), then the final states. For a loop: every state by step
        (sample, time, unit).
    grads
        Gradients by index in ``returned``, summed over backward passes. The scale of a GradScaler is not divided out.
    """

    path: str
    module: Any
    training: bool
    weights: dict[tuple[int, str], dict[str, Tensor]]
    returned: list[Tensor]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    packed: PackedSequence | None = None
    random: Tensor | None = None
    autocast: torch.dtype | None = None
    grads: dict[int, Tensor] = field(default_factory=dict)
    backwards: set[int] = field(default_factory=set)
    number: int = 0


@dataclass(eq=False)
class TrainingLoop:
    """Successive calls of one cell that pass its state on: inputs, states and gradients by step.

    Attributes
    ----------
    call
        Record of the whole loop, with the fields that are known at its first step.
    inputs, states
        Detached inputs, and lists of the cell's new states, by step. Initial states are in ``initial``.
    grads, through
        Total gradient by (state index, step), and the part of it that came through the cell itself.
    fed_itself
        Whether the state was the input as well; then the two paths of a gradient cannot be separated.
    """

    call: TrainingCall
    initial: list[Tensor]
    inputs: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    grads: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    through: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    fed_itself: bool = False

    def finished(self) -> TrainingCall:
        """Return the loop as one call: states (sample, time, unit), and their direct gradients."""
        call, count = self.call, len(self.initial)
        call.returned = [_stacked([states[place] for states in self.states]) for place in range(count)]
        call.grads = {
            place: _stacked([self._direct(place, step) for step in range(len(self))]) for place in range(count)
        }
        call.args = (_stacked(self.inputs), tuple(_rows(state) for state in self.initial)) if self.inputs else ()
        return call

    def __len__(self) -> int:
        return len(self.states)

    def _direct(self, place: int, step: int) -> Tensor:
        total, through = self.grads.get((place, step)), self.through.get((place, step))
        if total is None:
            return torch.zeros_like(self.states[step][place])
        return total if through is None else total - through


class TrainingLoops:
    """Table of the running loops: a call continues the loop that returned the very tensors it gets as its state.

    Only weak references are stored: a loop is dropped when the tensors of its last step, and their graph, are gone.
    """

    def __init__(self) -> None:
        self._at: Any = WeakTensorKeyDictionary()

    def step(self, arguments: CellArguments, new: list[Tensor], begin: Callable[[], TrainingCall]) -> TrainingLoop:
        """Record a cell call and return its loop.

        ``arguments`` are input and state, ``new`` the returned states, and ``begin`` makes the call of a new loop.
        """
        _, given = arguments
        loop = self._continued(given)
        if loop is None:
            start = given or [torch.zeros_like(state) for state in new]
            loop = TrainingLoop(begin(), [state.detach().clone() for state in start])
        for place, state in enumerate(new):
            self._at[state] = (loop, place)
        loop.states.append([state.detach() for state in new])
        return loop

    def _continued(self, given: Sequence[Tensor]) -> TrainingLoop | None:
        known = [self._at.get(state) for state in given]
        if not known or None in known or [place for _, place in known] != list(range(len(known))):
            return None
        loop: TrainingLoop = known[0][0]
        latest = all(state.data_ptr() == last.data_ptr() for state, last in zip(given, loop.states[-1], strict=True))
        return loop if latest and all(other is loop for other, _ in known) else None


def record_inner_gradients(
    loop: TrainingLoop, arguments: CellArguments, new: list[Tensor], on: Callable[[], bool]
) -> None:
    """Record the gradients that pass through a loop's last call to the states it was fed, and between its new states.

    Nothing is recorded while ``on()`` is False.

    Gradients between new states occur in an LSTM, whose hidden state is computed from its new cell state.
    """
    step, (x, given) = len(loop) - 1, arguments
    loop.fed_itself |= any(x is state for state in given)
    ends = {(state.grad_fn, state.output_nr): (place, step) for place, state in enumerate(new)}
    if step:
        ends |= {(state.grad_fn, state.output_nr): (place, step - 1) for place, state in enumerate(given)}

    def recorder(edge: int, at: tuple[int, int]) -> Any:
        def hook(inner: tuple[Tensor | None, ...], outer: Any) -> None:
            grad = inner[edge]
            if grad is not None and on():
                known = loop.through.get(at)
                loop.through[at] = grad.detach().clone() if known is None else known + grad.detach()

        return hook

    for node, edge, parent in _edges([state.grad_fn for state in new], [x.grad_fn, *(s.grad_fn for s in given)]):
        if parent in ends:
            node.register_hook(recorder(edge, ends[parent]))


def _edges(first: Iterable[Any], boundaries: Iterable[Any]) -> Iterator[tuple[Any, int, tuple[Any, int]]]:
    """Yield the edges of the graph from given nodes back to its boundaries: node, gradient index, parent edge."""
    for node in upstream(first, set(boundaries)):
        yield from ((node, edge, parent) for edge, parent in enumerate(node.next_functions))


def joined(calls: Iterable[TrainingCall | TrainingLoop]) -> tuple[list[TrainingCall], list[str]]:
    """Return all calls, with finished loops as one call each, and notes.

    Cells whose state is changed at every step, or is also their input, are left out.
    """
    calls = list(calls)
    lengths: dict[str, list[int]] = {}
    for call in calls:
        if isinstance(call, TrainingLoop):
            lengths.setdefault(call.call.path, []).append(len(call))
    changed = {path for path, found in lengths.items() if len(found) > 2 and max(found) == 1}
    itself = {call.call.path for call in calls if isinstance(call, TrainingLoop) and call.fed_itself}
    words = ((changed, "its state is changed between its steps"), (itself, "its own state is also its input"))
    notes = [
        f"{path}: {why}, so it is not recorded in batch mode. A probe records it."
        for paths, why in words
        for path in sorted(paths)
    ]
    apart = changed | itself
    notes += broken_recurrences({path: found for path, found in lengths.items() if path not in apart})
    kept = [call for call in calls if not (isinstance(call, TrainingLoop) and call.call.path in apart)]
    return [call.finished() if isinstance(call, TrainingLoop) else call for call in kept], notes


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
    recorder, grads = CallRecorder(JoinRules(), weight_grads=False), dict[int, Tensor]()
    for call in calls:
        run = _recurrence(call)
        recorder.runs.append(run)
        taps = [run.visits[0].pieces[0].output, *(tap for tap in run.visits[0].state_taps if tap is not None)]
        for place, grad in call.grads.items():
            grads[id(taps[place])] = unscaled(_time_first(call, place, grad), scale)
    return Assembler(recorder, lambda tap: grads.get(id(tap))).calls()


def _recurrence(call: TrainingCall) -> Recurrence:
    """Return a call, or its uppermost stacked layer, as a recurrence recorded in a forward pass is."""
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
    visit = CallRecord([piece], tuple(taps), StateLink(start, start, start, (), start), packing=packing)
    return Recurrence(owner, [visit])


def _time_first(call: TrainingCall, place: int, value: Tensor) -> Tensor:
    """Return a returned tensor, or its gradient, as a recorder has it.

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

    Parameters
    ----------
    calls
        Recorded calls in the order of the forward pass.
    scale
        Factor by which a GradScaler had multiplied the loss.

    Raises
    ------
    UnsupportedError
        For dropout between stacked layers on another device than the CPU, whose generator cannot be restored.
    """

    def __init__(self, calls: Sequence[TrainingCall], scale: float = 1.0) -> None:
        super().__init__()
        self._calls, self._scale = list(calls), scale
        self._modules_by_path: dict[str, Any] = {}
        self.deviation = 0.0
        for call in self._calls:
            if call.random is not None and call.returned[0].device.type != "cpu":
                raise _unseen_dropout(call)
            if call.path not in self._modules_by_path:
                self._modules_by_path[call.path] = self._put(call)

    def forward(self, *_inputs: Any) -> list[Any]:
        """Return the tensors of every call: its output, then its final states."""
        returned = []
        for call in self._calls:
            module = self._modules_by_path[call.path]
            if call.random is not None:
                torch.set_rng_state(call.random)
            with _autocast(call):
                args, kwargs = on_leaves(call.args, _same), on_leaves(call.kwargs, _same)
                if isinstance(module, nn.RNNCellBase):
                    returned.append(_looped(module, *args))
                    continue
                first, finals = module(*args, **kwargs)
            first = first.data if isinstance(first, PackedSequence) else first
            returned.append([first, finals] if isinstance(finals, Tensor) else [first, *finals])
        return returned

    def loss(self, returned: list[list[Tensor]]) -> Tensor:
        """Return the inner product of the returned tensors with their recorded gradients.

        The gradients of this loss are those of the step.
        """
        total = None
        for call, tensors in zip(self._calls, returned, strict=True):
            self._compare(call, tensors)
            for place, tensor in enumerate(tensors):
                if place in call.grads:
                    term = (widened(tensor) * unscaled(call.grads[place], self._scale)).sum()
                    total = term if total is None else total + term
        assert total is not None
        return total

    def _compare(self, call: TrainingCall, tensors: Sequence[Tensor]) -> None:
        """Compare the replayed tensors with those of the training step; raise ``UnsupportedError`` if they differ."""
        for tensor, before in zip(tensors, call.returned, strict=True):
            far = _deviation(widened(tensor.detach()), widened(before))
            self.deviation = max(self.deviation, far)
            if not far <= CLOSE.get(before.dtype, 1e-4):
                raise UnsupportedError(
                    f"Repeating the calls of {call.path!r} gives other numbers than the training step.",
                    got=f"a deviation of {far:.1g} of the largest number, from a {type(call.module).__name__}",
                    expected="a layer whose output is that of torch's own kernel",
                    hint="the direct gradients of the step are right; probe mode records the rest",
                )

    def _put(self, call: TrainingCall) -> nn.Module:
        """Add a new module with the weights of the step, under its path in the user's model."""
        module = _fresh(call)
        holder: nn.Module = self
        *above, last = call.path.split(".")
        for name in above:
            if name not in holder._modules:
                holder.add_module(name, nn.Module())
            holder = holder._modules[name]
        holder.add_module(last, module)
        return module


def _looped(cell: Any, inputs: Tensor, initial: tuple[Tensor, ...]) -> list[Tensor]:
    """Run a cell over inputs (sample, time, feature) and return each of its states as (sample, time, unit)."""
    state: Any = initial if len(initial) > 1 else initial[0]
    states = []
    for x in inputs.unbind(1):
        state = cell(x, state)
        states.append(state if isinstance(state, tuple) else (state,))
    return [torch.stack(steps, 1) for steps in zip(*states, strict=True)]


def _fresh(call: TrainingCall) -> nn.Module:
    fresh = _fresh_cell(call.module) if isinstance(call.module, nn.RNNCellBase) else _fresh_layer(call)
    for (layer, direction), weights in call.weights.items():
        suffix = f"_l{layer}" + ("_reverse" if direction == "backward" else "")
        for slot, weight in weights.items():
            name = slot if isinstance(fresh, nn.RNNCellBase) else slot + suffix
            setattr(fresh, name, nn.Parameter(weight.clone()))
    fresh.train(call.training)
    return fresh


def _fresh_cell(user: Any) -> nn.Module:
    kind = next(kind for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell) if isinstance(user, kind))
    options = {"nonlinearity": user.nonlinearity} if kind is nn.RNNCell else {}
    return kind(user.input_size, user.hidden_size, bias=user.bias, device="meta", **options)


def _fresh_layer(call: TrainingCall) -> nn.Module:
    user: Any = call.module
    kind = next(kind for kind in (nn.LSTM, nn.GRU, nn.RNN) if isinstance(user, kind))
    options: dict[str, Any] = {
        name: getattr(user, name) for name in ("num_layers", "bias", "batch_first", "dropout", "bidirectional")
    }
    if not call.training:  # the layer was in evaluation mode, but the replay sets the mode of all modules
        options["dropout"] = 0.0
    if kind is nn.LSTM:
        options["proj_size"] = user.proj_size
    elif kind is nn.RNN:
        options["nonlinearity"] = user.nonlinearity
    return kind(user.input_size, user.hidden_size, device="meta", **options)


def _deviation(again: Tensor, before: Tensor) -> float:
    """Return the largest difference relative to the largest number; NaN where only one value is finite."""
    alike = (again == before) | (again.isnan() & before.isnan())  # equal infinities and NaNs count as equal
    far = float(torch.where(alike, 0.0, (again - before).abs()).max())
    largest = float(torch.where(before.isfinite(), before.abs(), 0.0).max())
    return far / (largest or 1.0)


@contextmanager
def _autocast(call: TrainingCall) -> Iterator[None]:
    device = call.returned[0].device.type
    with torch.autocast(device, dtype=call.autocast, enabled=call.autocast is not None):
        yield


def _same(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _unseen_dropout(call: TrainingCall) -> UnsupportedError:
    return UnsupportedError(
        f"Dropout between the stacked layers of {call.path!r} was drawn by a generator of the device.",
        got=f"dropout={call.module.dropout} on {call.returned[0].device.type}",
        expected="dropout=0, or training on the CPU",
        hint="one nn module per layer with nn.Dropout between them; output_grad is recorded in any case",
    )
