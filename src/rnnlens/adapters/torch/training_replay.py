"""Converts recorded calls of a training step to calls of the adapter protocol, or runs them again.

A replay uses the weights, inputs, states and dropout of the step. The layers above and below are not run. The loss of
the replay is the inner product of the direct gradients, recorded in the user's backward pass, with the tensors that the
calls return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...errors import UnsupportedError
from ..protocol import RecurrentCall
from .assemble import half
from .cells import replayable
from .discover import node_name
from .inputs import on_leaves
from .record import Packing
from .training_weights import TrainingCall, unscaled, widened
from .weights import class_of, known_cell

#: Largest allowed deviation of a replayed call, relative to the largest number: kernels round differently.
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}


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
    made = _fresh_cell(call.module) if isinstance(call.module, nn.RNNCellBase) else _fresh_layer(call)
    for (layer, direction), weights in call.weights.items():
        suffix = f"_l{layer}" + ("_reverse" if direction == "backward" else "")
        for slot, weight in weights.items():
            name = slot if isinstance(made, nn.RNNCellBase) else slot + suffix
            setattr(made, name, nn.Parameter(weight.clone()))
    made.train(call.training)
    return made


def _fresh_cell(user: Any) -> nn.Module:
    kind = next(kind for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell) if isinstance(user, kind))
    options = {"nonlinearity": user.nonlinearity} if kind is nn.RNNCell else {}
    made: nn.Module = kind(user.input_size, user.hidden_size, bias=user.bias, device="meta", **options)
    return made


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
    made: nn.Module = kind(user.input_size, user.hidden_size, device="meta", **options)
    return made


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


def direct_calls(calls: Sequence[TrainingCall], scale: float) -> list[RecurrentCall]:
    """Return one call per direction of every recorded call: output, and direct gradients of output and final states.

    Of stacked layers only the uppermost is returned: it is the one whose direct gradients were recorded.
    """
    count, seen = Counter(call.path for call in calls), Counter[str]()
    found = []
    for call in calls:
        suffix = f"#{seen[call.path]}" if count[call.path] > 1 else ""
        seen[call.path] += 1
        if isinstance(call.module, nn.RNNCellBase):
            found.append(_loop(call, call.path + suffix, scale))
            continue
        name = node_name(call.path, call.module, call.module.num_layers - 1) + suffix
        found += [_call(call, name, side, scale) for side in range(2 if call.module.bidirectional else 1)]
    return found


def _loop(call: TrainingCall, name: str, scale: float) -> RecurrentCall:
    """Return the protocol's call of a loop of cells, whose output is the first state."""
    known = class_of(call.module)
    assert known is not None
    output, *_ = [replayable(state) for state in call.returned]
    arrived, *others = [replayable(unscaled(call.grads[place], scale)) for place in range(len(call.returned))]
    return RecurrentCall(
        layer=name,
        direction="forward",
        bidirectional=False,
        cell=known_cell(known[0], call.weights[0, "forward"], known[1]),
        input=output,  # its number of steps and samples is what counts
        initial_state=tuple(torch.zeros_like(state[:, 0]) for state in call.returned),
        mask=None,
        output=output,
        output_grad=arrived,
        final_state_grad=(torch.zeros_like(arrived[:, -1]), *(grad[:, -1] for grad in others)),
        compute_dtype=_half(output),
    )


def _half(output: Tensor) -> str:
    return str(output.dtype).removeprefix("torch.") if output.dtype.itemsize == 2 else ""


def _call(call: TrainingCall, name: str, side: int, scale: float) -> RecurrentCall:
    module, top = call.module, call.module.num_layers - 1
    directions = 2 if module.bidirectional else 1
    direction = ("forward", "backward")[side]
    known = class_of(module)
    assert known is not None
    packing = _packing(call)
    output, *finals = call.returned
    arrived = [unscaled(call.grads.get(place, torch.zeros_like(t)), scale) for place, t in enumerate(call.returned)]
    mask = None if packing is None or bool(packing.mask.all()) else packing.mask.T.contiguous()
    row = top * directions + side
    return RecurrentCall(
        layer=name,
        direction=direction,  # type: ignore[arg-type]
        bidirectional=directions > 1,
        cell=known_cell(known[0], call.weights[top, direction], known[1]),
        input=_steps(call, half(output, directions, side), packing),  # its number of steps and samples is what counts
        initial_state=tuple(torch.zeros_like(_state(call, f, row, packing)) for f in finals),
        mask=mask,
        output=_steps(call, half(output, directions, side), packing),
        output_grad=_steps(call, half(arrived[0], directions, side), packing),
        final_state_grad=tuple(_state(call, grad, row, packing) for grad in arrived[1:]),
        compute_dtype=_half(output),
    )


def _packing(call: TrainingCall) -> Packing | None:
    if call.packed is None:
        return None
    return Packing.of(call.packed.batch_sizes, call.packed.unsorted_indices, call.returned[0].device)


def _steps(call: TrainingCall, value: Tensor, packing: Packing | None) -> Tensor:
    """Return values as (sample, time, unit), in chronological order and the caller's order of samples."""
    if packing is not None:
        value = packing.padded(value).transpose(0, 1)
    elif value.dim() == 2:
        value = value[None]
    elif not call.module.batch_first:
        value = value.transpose(0, 1)
    return replayable(value)


def _state(call: TrainingCall, value: Tensor, row: int, packing: Packing | None) -> Tensor:
    """Return the state (sample, unit) of one layer and direction; torch's final states are in the caller's order."""
    state = value[row]
    return replayable(state[None] if state.dim() == 1 else state)
