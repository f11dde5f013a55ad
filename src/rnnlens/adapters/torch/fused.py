"""Runs torch's fused recurrent kernels one layer at a time, so that every boundary between layers is recorded.

Each layer runs on torch's own kernel with the layer's own weights. Dropout between layers is drawn at the same place
and in the same way as torch draws it on a CPU, so the outputs equal those of the undivided call. Every kernel runs in
its training mode: with a single layer and no dropout inside, that changes no value, and cuDNN can be differentiated in
this mode only.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from ...recurrence.cells import GRU, LSTM, Cell, SimpleRNN
from .cells import as_tuple
from .discover import RequestedLayers
from .inputs import check_features
from .lineage import StateLink, follows
from .record import CallOwner, CallRecord, CallRecorder, LayerRecord, Packing, refuse_transformed
from .weights import slots

_VF: Any = torch._VF

#: torch function -> (cell class of rnnlens, activation)
FUSED: dict[Any, tuple[type[Cell], str]] = {
    _VF.lstm: (LSTM, "tanh"),
    _VF.gru: (GRU, "tanh"),
    _VF.rnn_tanh: (SimpleRNN, "tanh"),
    _VF.rnn_relu: (SimpleRNN, "relu"),
}
CELLS: dict[Any, tuple[type[Cell], str]] = {
    _VF.lstm_cell: (LSTM, "tanh"),
    _VF.gru_cell: (GRU, "tanh"),
    _VF.rnn_tanh_cell: (SimpleRNN, "tanh"),
    _VF.rnn_relu_cell: (SimpleRNN, "relu"),
}


@dataclass
class FusedCall:
    """Named arguments of one fused call; ``batch_sizes`` is None unless the input is packed."""

    input: Tensor
    state: tuple[Tensor, ...]
    weights: Sequence[Tensor]
    bias: bool
    layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool = False
    batch_sizes: Tensor | None = None

    @property
    def is_divisible(self) -> bool:
        """Whether one call per step computes the same numbers as this call of all steps.

        It does not with dropout between layers, which would draw other masks.
        """
        drops_out = self.training and self.dropout > 0 and self.layers > 1
        return self.batch_sizes is None and not self.bidirectional and not drops_out

    def weights_of(self, layer: int) -> Sequence[Tensor]:
        """Return the weights of one stacked layer, all directions."""
        each = len(self.weights) // self.layers
        return self.weights[layer * each : (layer + 1) * each]

    @classmethod
    def of(cls, args: Sequence[Any]) -> FusedCall:
        """Build a call from the positional arguments of either of torch's two overloads."""
        if isinstance(args[3], (list, tuple)):
            data, sizes, state, weights, bias, layers, dropout, training, both = args
            return cls(data, as_tuple(state), weights, bias, layers, dropout, training, both, batch_sizes=sizes)
        data, state, weights, *rest = args
        return cls(data, as_tuple(state), weights, *rest)


class KernelInterceptor(TorchFunctionMode):  # type: ignore[misc]
    """Function mode that records calls of torch's recurrent kernels and runs every other function unchanged."""

    def __init__(self, recorder: CallRecorder, owners: CallOwners) -> None:
        super().__init__()
        self.recorder, self.owners = recorder, owners
        #: Whether the model's forward used ``torch.no_grad``.
        self.cut_gradients = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder.paused:
            return func(*args, **(kwargs or {}))
        kernel = FUSED.get(func) or CELLS.get(func)
        if kernel is not None:
            found = self.owners.find(*kernel, args)
            if found is not None:
                owner, order = found
                refuse_transformed(owner.name, args)
                if func in CELLS:
                    return _cell(self.recorder, func, owner, *args)
                return _fused(self.recorder, func, owner, order, FusedCall.of(args))
        elif func is torch._C._set_grad_enabled and not args[0]:
            self.cut_gradients = True
            if self.recorder.rules.keep_gradients:
                return None
        result = func(*args, **(kwargs or {}))
        for trail in self.recorder.trails.values():
            trail.see(args, result)
        return result


def _fused(recorder: CallRecorder, func: Any, owner: CallOwner, order: Tensor | None, call: FusedCall) -> Any:
    if owner.key in recorder.rules.by_step and call.is_divisible and call.input.shape[int(call.batch_first)] > 1:
        return _step_by_step(recorder, func, owner, call)
    packing = None if call.batch_sizes is None else Packing.of(call.batch_sizes, order, call.input.device)
    x = call.input.transpose(0, 1) if call.batch_first and packing is None else call.input
    tail, before = recorder.tail(owner), None
    if packing is None and not call.bidirectional and tail is not None and tail.packing is None:
        before = recorder.continued(owner, call.state, rowwise=False)
    given = call.state
    if before is None and not _goes_on(tail, given):
        given = _overridden(recorder, owner, call, packing)
    fed = recorder.started(given, before)
    directions = 2 if call.bidirectional else 1
    pieces: list[LayerRecord] = []
    for layer in range(call.layers):
        states = tuple(state[layer * directions : (layer + 1) * directions] for state in fed)
        pieces.append(_one_layer(recorder, func, owner, call, layer, x, states))
        x = pieces[-1].output
        if call.dropout and call.training and layer < call.layers - 1:
            x = torch.dropout(x, call.dropout, True)
    raw = tuple(torch.cat([piece.finals[i] for piece in pieces]) for i in range(len(fed)))
    taps = tuple(
        torch.cat([recorder.handed(owner, piece.finals[i]) for piece in pieces]).clone() for i in range(len(fed))
    )
    handed = tuple(state.clone() for state in taps)
    link = StateLink(call.state, fed, raw, handed, taps, before, x)
    visit = CallRecord(pieces, taps, link, packing=packing, divisible=call.is_divisible)
    recorder.add(owner, visit, continues=before is not None)
    output = x.clone()
    return (output.transpose(0, 1) if call.batch_first and packing is None else output, *handed)


def _step_by_step(recorder: CallRecorder, func: Any, owner: CallOwner, call: FusedCall) -> Any:
    """Run one call as calls of one step each."""
    state, outputs = call.state, []
    for x in call.input.split(1, dim=int(call.batch_first)):
        output, *new = _fused(recorder, func, owner, None, replace(call, input=x, state=state))
        state = tuple(new)
        outputs.append(output)
    return (torch.cat(outputs, dim=int(call.batch_first)), *state)


def _goes_on(tail: CallRecord | None, given: tuple[Tensor, ...]) -> bool:
    """Return whether a call's initial states are, or were computed from, the states that the call before returned."""
    if tail is None:
        return False
    pairs = zip(given, tail.link.kept, strict=True)
    return follows(given, tail.link) or all(torch.equal(new, old) for new, old in pairs)


def _overridden(
    recorder: CallRecorder, owner: CallOwner, call: FusedCall, packing: Packing | None
) -> tuple[Tensor, ...]:
    """Return the initial states of a call, replaced by the user's ``initial_state`` for its layer if there is one."""
    states = [state.clone() for state in call.state]
    directions = 2 if call.bidirectional else 1
    for layer in range(call.layers):
        name = f"{owner.name}[{layer}]" if call.layers > 1 else owner.name
        if name not in recorder.initial_state:
            continue
        own = [state[layer * directions + direction] for direction in range(directions) for state in states]
        given = recorder.given_state(name, own)
        for i, value in enumerate(given):
            direction, which = divmod(i, len(states))
            if packing is not None and packing.order is not None:
                value = torch.empty_like(value).index_copy(0, packing.order, value)
            states[which][layer * directions + direction] = value
    return tuple(states) if recorder.initial_state else call.state


def _one_layer(
    recorder: CallRecorder,
    func: Any,
    owner: CallOwner,
    call: FusedCall,
    layer: int,
    x: Tensor,
    states: tuple[Tensor, ...],
) -> LayerRecord:
    x = recorder.fed(x)
    directions = 2 if call.bidirectional else 1
    weights = call.weights_of(layer)
    each = len(weights) // directions
    names = slots(each)
    stand_ins = [
        {
            name: recorder.leaf(owner, f"{name}/{layer}/{direction}", weights[direction * each + i])
            for i, name in enumerate(names)
        }
        for direction in range(directions)
    ]
    flat = [weight for weights in stand_ins for weight in weights.values()]
    if call.layers > 1 and x.is_cuda:
        # cuDNN must not take the weights of one layer for all those of a module in the memory that its layers share.
        flat = [weight.clone() for weight in flat]
    hx: Any = states if len(states) > 1 else states[0]
    with warnings.catch_warnings():  # advice on the speed of kernels that the user did not choose
        warnings.filterwarnings("ignore", message=".*(oneDNN|contiguous chunk of memory).*", category=UserWarning)
        if call.batch_sizes is not None:
            output, *finals = func(x, call.batch_sizes, hx, flat, call.bias, 1, 0.0, True, call.bidirectional)
        else:
            output, *finals = func(x, hx, flat, call.bias, 1, 0.0, True, call.bidirectional, False)
    return LayerRecord(x, x.detach().clone(), states, recorder.handed(owner, output), tuple(finals), stand_ins)


def _cell(recorder: CallRecorder, func: Any, owner: CallOwner, x: Tensor, state: Any, *weights: Tensor | None) -> Any:
    """Run and record one call of a single cell; its weights are in torch's order, without or with biases."""
    given = as_tuple(state)
    tail, before, start = recorder.tail(owner), recorder.continued(owner, given), given
    if before is None and owner.name in recorder.initial_state and not _goes_on(tail, given):
        start = recorder.given_state(owner.name, given)
    fed = recorder.started(start, before)
    stand_ins = {
        name: recorder.leaf(owner, f"{name}/0/0", w)
        for name, w in zip(slots(4), weights, strict=False)
        if w is not None
    }
    x = recorder.fed(x)
    raw = as_tuple(func(x, fed if len(fed) > 1 else fed[0], *(stand_ins.get(name) for name in slots(4))))
    handed = recorder.add_step(owner, x, (given, fed, before), raw, raw, stand_ins)
    return tuple(handed[id(state)] for state in raw) if len(raw) > 1 else handed[id(raw[0])]


class CallOwners:
    """Table of the module behind each kernel call: it tracks which module is running."""

    def __init__(self, asked: RequestedLayers) -> None:
        self.asked = {id(module): (path, module) for path, module in asked.recurrent}
        self.everything = asked.names is None
        #: Recurrent modules that own a first weight, by the weight's identity.
        self.holders: dict[int, list[nn.Module]] = {}
        for _, module in asked.modules:
            first = getattr(module, "weight_ih_l0", getattr(module, "weight_ih", None))
            if isinstance(first, nn.Parameter):
                self.holders.setdefault(id(first), []).append(module)
        self.entered: nn.Module | None = None
        self.order: Tensor | None = None
        self.known: dict[int, CallOwner] = {}
        self.ran = asked.ran

    def entering(self, path: str) -> Any:
        """Return a forward pre-hook that checks the input and stores the running module."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else kwargs.get("input")
            check_features(path, module, value)
            if not isinstance(module, nn.Linear):
                self.entered = module
                self.ran.add(path)
                self.order = value.unsorted_indices if isinstance(value, PackedSequence) else None

        return hook

    def find(self, cell: type[Cell], activation: str, args: tuple[Any, ...]) -> tuple[CallOwner, Tensor | None] | None:
        """Return the owner of a kernel call and its sample order; None if the layer was not requested."""
        module, order = self.entered, self.order
        self.entered = self.order = None
        first = args[3] if isinstance(args[3], (list, tuple)) else args[2]
        stacked = isinstance(first, (list, tuple))
        first = first[0] if stacked else first
        # A direct call of ``forward`` runs no hook, so that the module is identified by its weights.
        holders = self.holders.get(id(first), [])
        if holders and not any(holder is module for holder in holders):
            module = holders[0] if len(holders) == 1 else None
        if module is None:
            return (self._bare(cell, activation, args, first, stacked), None) if self.everything else None
        if id(module) not in self.asked:
            return None
        if id(module) not in self.known:
            path, module = self.asked[id(module)]
            layers = int(getattr(module, "num_layers", 1))
            directions = 2 if getattr(module, "bidirectional", False) else 1
            self.known[id(module)] = CallOwner(id(module), path, cell, activation, layers, directions, stacked)
        return self.known[id(module)], order

    def _bare(self, cell: type[Cell], activation: str, args: Any, first: Tensor, stacked: bool) -> CallOwner:
        """Return the owner of a call of a recurrent kernel whose weights belong to no registered module."""
        if id(first) not in self.known:
            unnamed = sum(owner.name.startswith("unnamed_") for owner in self.known.values())
            rest = args[4:] if stacked and isinstance(args[3], (list, tuple)) else args[3:]
            layers, both = (int(rest[1]), bool(rest[4])) if stacked else (1, False)
            name = f"unnamed_{cell.kind}_{unnamed}"
            self.known[id(first)] = CallOwner(id(first), name, cell, activation, layers, 1 + both, stacked)
        return self.known[id(first)]
