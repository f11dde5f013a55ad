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
from .lineage import StateLink, depends_on
from .record import CallOwner, CallRecord, CallRecorder, LayerRecord, Packing, refuse_transformed
from .weights import weight_slots

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
#: Functions that differentiate.
_DIFFERENTIATES = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


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
        weights_per_layer = len(self.weights) // self.layers
        return self.weights[layer * weights_per_layer : (layer + 1) * weights_per_layer]

    @classmethod
    def of(cls, args: Sequence[Any]) -> FusedCall:
        """Build a call from the positional arguments of either of torch's two overloads."""
        if isinstance(args[3], (list, tuple)):
            data, batch_sizes, state, weights, bias, layers, dropout, training, bidirectional = args
            return cls(
                data, as_tuple(state), weights, bias, layers, dropout, training, bidirectional, batch_sizes=batch_sizes
            )
        data, state, weights, *options = args
        return cls(data, as_tuple(state), weights, *options)


class KernelInterceptor(TorchFunctionMode):  # type: ignore[misc]
    """Function mode that records calls of torch's recurrent kernels and runs every other function unchanged."""

    def __init__(self, recorder: CallRecorder, owners: CallOwners) -> None:
        super().__init__()
        self.recorder, self.owners = recorder, owners
        #: Whether the model's forward used ``torch.no_grad``.
        self.cut_gradients = False
        #: Whether the model's forward differentiated by a weight that a kernel got a substitute of.
        self.needs_weights_in_graph = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder.paused:
            return func(*args, **(kwargs or {}))
        kernel = FUSED.get(func) or CELLS.get(func)
        if kernel is not None:
            owner_and_order = self.owners.find(*kernel, args)
            if owner_and_order is not None:
                owner, order = owner_and_order
                refuse_transformed(owner.name, args)
                if func in CELLS:
                    return _run_cell(self.recorder, func, owner, *args)
                return _run_fused(self.recorder, func, owner, order, FusedCall.of(args))
        elif func is torch._C._set_grad_enabled and not args[0]:
            self.cut_gradients = True
            if self.recorder.rules.ignore_no_grad:
                return None
        elif func in _DIFFERENTIATES and not self.recorder.rules.weights_in_graph:
            by = args[1] if len(args) > 1 else (kwargs or {}).get("inputs")
            is_by_weights = any(id(tensor) in self.recorder.substitutes for tensor in as_tuple(by))
            self.needs_weights_in_graph |= is_by_weights or (by is None and bool(self.recorder.substitutes))
        result = func(*args, **(kwargs or {}))
        for trail in self.recorder.trails.values():
            trail.record(args, result)
        return result


def _run_fused(
    recorder: CallRecorder, func: Any, owner: CallOwner, sample_order: Tensor | None, call: FusedCall
) -> Any:
    if owner.key in recorder.rules.run_by_step and call.is_divisible and call.input.shape[int(call.batch_first)] > 1:
        return _run_by_step(recorder, func, owner, call)
    packing = None if call.batch_sizes is None else Packing.of(call.batch_sizes, sample_order, call.input.device)
    x = call.input.transpose(0, 1) if call.batch_first and packing is None else call.input
    last_call, continuation = recorder.last_call(owner), None
    if packing is None and not call.bidirectional and last_call is not None and last_call.packing is None:
        continuation = recorder.find_continuation(owner, call.state, rowwise=False)
    user_initial = call.state
    if continuation is None and not _continues_last(last_call, user_initial):
        user_initial = _initial_states(recorder, owner, call, packing)
    initial = recorder.start_states(user_initial, continuation)
    directions = 2 if call.bidirectional else 1
    layer_records: list[LayerRecord] = []
    for layer in range(call.layers):
        states = tuple(state[layer * directions : (layer + 1) * directions] for state in initial)
        layer_records.append(_run_layer(recorder, func, owner, call, layer, x, states))
        x = layer_records[-1].output
        if call.dropout and call.training and layer < call.layers - 1:
            x = torch.dropout(x, call.dropout, True)
    final = tuple(torch.cat([record.finals[i] for record in layer_records]) for i in range(len(initial)))
    taps = tuple(
        torch.cat([recorder.output_tap(owner, record.finals[i]) for record in layer_records]).clone()
        for i in range(len(initial))
    )
    user_final = tuple(state.clone() for state in taps)
    link = StateLink(call.state, initial, final, user_final, taps, continuation, x)
    call_record = CallRecord(layer_records, taps, link, packing=packing, is_divisible=call.is_divisible)
    recorder.add(owner, call_record, continues=continuation is not None)
    output = x.clone()
    return (output.transpose(0, 1) if call.batch_first and packing is None else output, *user_final)


def _run_by_step(recorder: CallRecorder, func: Any, owner: CallOwner, call: FusedCall) -> Any:
    """Run one call as calls of one step each."""
    state, outputs = call.state, []
    for x in call.input.split(1, dim=int(call.batch_first)):
        output, *new_states = _run_fused(recorder, func, owner, None, replace(call, input=x, state=state))
        state = tuple(new_states)
        outputs.append(output)
    return (torch.cat(outputs, dim=int(call.batch_first)), *state)


def _continues_last(last_call: CallRecord | None, user_initial: tuple[Tensor, ...]) -> bool:
    """Return whether a call's initial states are, or were computed from, the states that the call before returned."""
    if last_call is None:
        return False
    state_pairs = zip(user_initial, last_call.link.recorded_final, strict=True)
    return depends_on(user_initial, last_call.link) or all(torch.equal(new, old) for new, old in state_pairs)


def _initial_states(
    recorder: CallRecorder, owner: CallOwner, call: FusedCall, packing: Packing | None
) -> tuple[Tensor, ...]:
    """Return the initial states of a call, replaced by the user's ``initial_state`` for its layer if there is one."""
    states = [state.clone() for state in call.state]
    directions = 2 if call.bidirectional else 1
    for layer in range(call.layers):
        name = f"{owner.name}[{layer}]" if call.layers > 1 else owner.name
        if name not in recorder.initial_state:
            continue
        layer_states = [state[layer * directions + direction] for direction in range(directions) for state in states]
        user_states = recorder.user_initial_states(name, layer_states)
        for i, value in enumerate(user_states):
            direction, state_index = divmod(i, len(states))
            if packing is not None and packing.order is not None:
                value = torch.empty_like(value).index_copy(0, packing.order, value)
            states[state_index][layer * directions + direction] = value
    return tuple(states) if recorder.initial_state else call.state


def _run_layer(
    recorder: CallRecorder,
    func: Any,
    owner: CallOwner,
    call: FusedCall,
    layer: int,
    x: Tensor,
    states: tuple[Tensor, ...],
) -> LayerRecord:
    x = recorder.layer_input(x)
    directions = 2 if call.bidirectional else 1
    weights = call.weights_of(layer)
    weights_per_direction = len(weights) // directions
    names = weight_slots(weights_per_direction)
    substitutes = [
        {
            name: recorder.weight_substitute(
                owner, f"{name}/{layer}/{direction}", weights[direction * weights_per_direction + i]
            )
            for i, name in enumerate(names)
        }
        for direction in range(directions)
    ]
    flat_weights = [weight for weights in substitutes for weight in weights.values()]
    if call.layers > 1 and x.is_cuda:
        # cuDNN must not take the weights of one layer for all those of a module in the memory that its layers share.
        flat_weights = [weight.clone() for weight in flat_weights]
    initial: Any = states if len(states) > 1 else states[0]
    with warnings.catch_warnings():  # advice on the speed of kernels that the user did not choose
        warnings.filterwarnings("ignore", message=".*(oneDNN|contiguous chunk of memory).*", category=UserWarning)
        if call.batch_sizes is not None:
            output, *finals = func(
                x, call.batch_sizes, initial, flat_weights, call.bias, 1, 0.0, True, call.bidirectional
            )
        else:
            output, *finals = func(x, initial, flat_weights, call.bias, 1, 0.0, True, call.bidirectional, False)
    return LayerRecord(x, x.detach().clone(), states, recorder.output_tap(owner, output), tuple(finals), substitutes)


def _run_cell(
    recorder: CallRecorder, func: Any, owner: CallOwner, x: Tensor, state: Any, *weights: Tensor | None
) -> Any:
    """Run and record one call of a single cell; its weights are in torch's order, without or with biases."""
    user_initial = as_tuple(state)
    last_call = recorder.last_call(owner)
    continuation = recorder.find_continuation(owner, user_initial)
    start_states = user_initial
    if continuation is None and owner.name in recorder.initial_state and not _continues_last(last_call, user_initial):
        start_states = recorder.user_initial_states(owner.name, user_initial)
    initial = recorder.start_states(start_states, continuation)
    substitutes = {
        name: recorder.weight_substitute(owner, f"{name}/0/0", weight)
        for name, weight in zip(weight_slots(4), weights, strict=False)
        if weight is not None
    }
    x = recorder.layer_input(x)
    final = as_tuple(
        func(x, initial if len(initial) > 1 else initial[0], *(substitutes.get(name) for name in weight_slots(4)))
    )
    user_final = recorder.add_step(owner, x, (user_initial, initial, continuation), final, final, substitutes)
    return tuple(user_final[id(state)] for state in final) if len(final) > 1 else user_final[id(final[0])]


class CallOwners:
    """Table of the module behind each kernel call: it tracks which module is running."""

    def __init__(self, requested: RequestedLayers) -> None:
        self.requested = {id(module): (path, module) for path, module in requested.recurrent}
        self.records_all = requested.names is None
        #: Recurrent modules that own a first weight, by the weight's identity.
        self.modules_by_weight: dict[int, list[nn.Module]] = {}
        for _, module in requested.modules:
            first_weight = getattr(module, "weight_ih_l0", getattr(module, "weight_ih", None))
            if isinstance(first_weight, nn.Parameter):
                self.modules_by_weight.setdefault(id(first_weight), []).append(module)
        self.running_module: nn.Module | None = None
        self.sample_order: Tensor | None = None
        self.owners_by_id: dict[int, CallOwner] = {}
        self.ran_paths = requested.ran_paths

    def input_hook(self, path: str) -> Any:
        """Return a forward pre-hook that checks the input and stores the running module."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else kwargs.get("input")
            check_features(path, module, value)
            if not isinstance(module, nn.Linear):
                self.running_module = module
                self.ran_paths.add(path)
                self.sample_order = value.unsorted_indices if isinstance(value, PackedSequence) else None

        return hook

    def find(self, cell: type[Cell], activation: str, args: tuple[Any, ...]) -> tuple[CallOwner, Tensor | None] | None:
        """Return the owner of a kernel call and its sample order; None if the layer was not requested."""
        module, sample_order = self.running_module, self.sample_order
        self.running_module = self.sample_order = None
        first_weight = args[3] if isinstance(args[3], (list, tuple)) else args[2]
        is_fused = isinstance(first_weight, (list, tuple))
        first_weight = first_weight[0] if is_fused else first_weight
        # A direct call of ``forward`` runs no hook, so that the module is identified by its weights.
        modules = self.modules_by_weight.get(id(first_weight), [])
        if modules and not any(candidate is module for candidate in modules):
            module = modules[0] if len(modules) == 1 else None
        if module is None:
            return (
                (self._unnamed_owner(cell, activation, args, first_weight, is_fused), None)
                if self.records_all
                else None
            )
        if id(module) not in self.requested:
            return None
        if id(module) not in self.owners_by_id:
            path, module = self.requested[id(module)]
            layers = int(getattr(module, "num_layers", 1))
            directions = 2 if getattr(module, "bidirectional", False) else 1
            self.owners_by_id[id(module)] = CallOwner(id(module), path, cell, activation, layers, directions, is_fused)
        return self.owners_by_id[id(module)], sample_order

    def _unnamed_owner(
        self, cell: type[Cell], activation: str, args: Any, first_weight: Tensor, is_fused: bool
    ) -> CallOwner:
        """Return the owner of a call of a recurrent kernel whose weights belong to no registered module."""
        if id(first_weight) not in self.owners_by_id:
            unnamed_count = sum(owner.name.startswith("unnamed_") for owner in self.owners_by_id.values())
            options = args[4:] if is_fused and isinstance(args[3], (list, tuple)) else args[3:]
            layers, bidirectional = (int(options[1]), bool(options[4])) if is_fused else (1, False)
            name = f"unnamed_{cell.kind}_{unnamed_count}"
            self.owners_by_id[id(first_weight)] = CallOwner(
                id(first_weight), name, cell, activation, layers, 1 + bidirectional, is_fused
            )
        return self.owners_by_id[id(first_weight)]
