"""Recognises models that call library modules one after the other, by tensors and nodes of torch's autograd graph.

A chain: each module was called on the tensor that the one before it returned, or on a selection of its steps; nothing
changed that tensor in between; and the model returned the last one. For a chain the modules between two tensors and the
roles of all axes are known without a second forward pass. A model that was a chain once is captured by the hooks of its
modules alone, and the pass itself shows whether it still is one.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import c_int64
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_calls

from ...layout import Axis, Layout, layout_of_axes
from ...recurrence.cells import GRU, LSTM, SimpleRNN
from ...vocabulary import FEATURE, SAMPLE, TIME, UNIT
from ..protocol import Batch, Capture, ChainLink, Port, RecurrentCall, Taps
from .discover import fingerprint
from .forward_pass import forward_pass
from .inputs import call_model
from .losses import evaluate, gradients_of, loss_errors, reaches
from .weights import NAMES, named_copies, node_name

_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
_PASSING = (nn.Dropout, nn.Identity)
_ACTIVATIONS = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}
_KNOWN = (*_RECURRENT, *_PASSING, *_ACTIVATIONS, nn.Linear, nn.Embedding)
#: Graph nodes of activation functions, and of operations that change neither values nor axes.
_ACTIVATION_NODES = {"ReluBackward0": "relu", "TanhBackward0": "tanh", "SigmoidBackward0": "sigmoid"}
_COPIES = ("CloneBackward0", "AliasBackward0")
#: Transposition of the first two axes, as a graph node.
_TRANSPOSITION = SimpleNamespace(name=lambda: "TransposeBackward0", _saved_dim0=0, _saved_dim1=1)
#: Attributes with hooks, by which a user may change the result of a module.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Context in which no function mode sees an operation: none of the user's, and many for each module.
_OWN_OPERATIONS = torch._C.DisableTorchFunction
#: Largest number of operations between two modules.
_MOST_OPERATIONS = 8
#: Axes of the model's input, whose roles show at the first recurrent layer, and the axis of stacked layers.
_POSITIONS, _LAYER = ("first", "second", "third"), "layer"


@dataclass(frozen=True)
class _ChainTensor:
    """A tensor of a chain: its version and sum, the roles of its axes, and the links from the model's input to it.

    ``steps`` is its number of steps; ``layers`` the number of stacked layers on the axis ``layer`` of a final state.
    """

    tensor: Tensor
    version_and_sum: Hashable
    axes: tuple[str, ...]
    links: tuple[ChainLink, ...]
    steps: int = 0
    layers: int = 0

    def with_link(self, link: ChainLink, axes: Sequence[str]) -> _ChainTensor:
        """Return the next tensor of the chain, after one more operation or layer ``link``, with axis roles ``axes``."""
        return replace(self, links=(*self.links, replace(link, axes=tuple(axes))), axes=tuple(axes))


@dataclass
class _LayerTensors:
    """Tensors of one call of a recurrent module at which gradients are read; its weights by slot.

    ``returned`` is the output and the final states, ``versions_and_sums`` are those after the call.
    """

    path: str
    module: Any
    input: Tensor
    initial: tuple[Tensor, ...]
    weights: dict[str, Tensor]
    returned: tuple[Tensor, ...] = ()
    versions_and_sums: tuple[Hashable, ...] = ()


class ChainRecorder:
    """Recorder that follows one tensor from module to module through a forward pass, within :meth:`watch`.

    It is made before hooks are added to the model, because hooks of the user may change what a module returns. With
    ``taps`` it keeps the tensors of recurrent modules in ``calls``, and with ``separate`` these modules get
    differentiable copies of their input and initial states.
    """

    def __init__(self, model: nn.Module, *, taps: bool = False, separate: bool = False) -> None:
        self.model, self.separate, self._thread = model, separate, threading.get_ident()
        #: Tensors of the calls of recurrent modules, if ``taps``; by path.
        self.calls: dict[str, _LayerTensors] | None = {} if taps else None
        #: The tensors that the module called last returned; empty if the model is no chain.
        self._last_returned: list[_ChainTensor] = []
        self._modules = {path: m for path, m in model.named_modules() if path and type(m) in _KNOWN}
        # A hook, a parametrisation or an own forward may change what a library module computes.
        is_changed = any(
            "forward" in vars(m) or "parametrizations" in m._modules or any(getattr(m, hooks) for hooks in _HOOKS)
            for m in self._modules.values()
        )
        is_library_model = type(model) in _KNOWN or isinstance(model, torch.jit.ScriptModule)
        self._is_chain = not is_changed and not is_library_model and not module_calls._global_forward_hooks
        self._weights = {path: [id(w) for w in m._parameters.values()] for path, m in self._modules.items()}
        #: Roles of the axes ``first``, ``second`` and ``third`` of the model's input, known after a recurrent layer.
        self._roles: dict[str, str] = {}
        self._input_axes: tuple[str, ...] = ()
        self._input_shape: tuple[int, ...] = ()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the calls of the model's library modules within the block."""
        with ExitStack() as stack:
            if self._is_chain:
                stack.callback(self.model.register_forward_pre_hook(self._start_chain, with_kwargs=True).remove)
            for path, module in self._modules.items() if self._is_chain else ():
                if self.calls is not None and isinstance(module, _RECURRENT):
                    pre_hook = partial(self._with_initial_states, path)
                    stack.callback(module.register_forward_pre_hook(pre_hook, with_kwargs=True).remove)
                stack.callback(
                    module.register_forward_hook(partial(self._record_output, path), with_kwargs=True).remove
                )
            yield

    def chain(self, outputs: Any) -> list[ChainLink] | None:
        """Return the links from the input itself to the first output; None if the model is not one plain chain."""
        output = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
        last_tensor = self._chain_tensor(output) if self._is_chain else None
        if last_tensor is None or not self._roles:
            return None
        # The axes may be in another order than the last module's.
        last_tensor = last_tensor.with_link(ChainLink("", "same"), last_tensor.axes)
        return [replace(link, axes=self._role_names(link.axes)) for link in last_tensor.links]

    def layouts(self, outputs: Any) -> dict[Port, Layout]:
        """Return the roles of the axes of the model's input and output, and of the outputs of modules in the chain."""
        links = self.chain(outputs)
        if links is None or type(outputs) is not Tensor:
            return {}
        axes_by_port = {
            Port("input"): (self._role_names(self._input_axes), FEATURE),
            Port("output"): (links[-1].axes, UNIT),
        }
        names = [link.name for link in links]
        single_links = [
            link for link in links if link.kind in ("dense", "same", "table") and names.count(link.name) == 1
        ]
        axes_by_port |= {Port("output", link.name): (link.axes, UNIT) for link in single_links if link.name}
        samples = self._input_shape[self._role_names(self._input_axes).index(SAMPLE)]
        layouts = {}
        for port, (axes, last_role) in axes_by_port.items():
            roles: dict[int, Axis] = {i: (axis,) for i, axis in enumerate(axes) if axis in (SAMPLE, TIME)}
            layouts[port] = replace(layout_of_axes(len(axes), roles, last_role), samples=samples)
        return layouts

    def _role_names(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(self._roles.get(axis, axis) for axis in axes)

    def _with_initial_states(self, path: str, module: Any, args: Any, kwargs: Any) -> Any:
        """Pass initial states of zeros to a recurrent module called without any, and record them (forward pre-hook)."""
        if threading.get_ident() != self._thread or self.calls is None:
            return None
        if len(args) != 1 or kwargs or type(args[0]) is not Tensor or args[0].dim() != 3 or path in self.calls:
            self._is_chain = False
            return None
        x: Tensor = args[0]
        if self.separate:
            x = (x if x.requires_grad else x.detach().requires_grad_()).clone()
        shape = (1, int(x.shape[0 if module.batch_first else 1]), module.hidden_size)
        state_count = 2 if isinstance(module, nn.LSTM) else 1
        zeros = tuple(x.new_zeros(shape).requires_grad_(self.separate) for _ in range(state_count))
        weights = dict(zip(NAMES, module._flat_weights, strict=False))  # without a projection, perhaps without biases
        self.calls[path] = _LayerTensors(path, module, x, zeros, weights)
        return (x, zeros if state_count == 2 else zeros[0]), {}

    def _start_chain(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._is_chain = self._is_chain and not kwargs and len(args) == 1 and type(args[0]) is Tensor
        with _OWN_OPERATIONS():
            if self._is_chain and args[0].dim() in (2, 3):
                self._input_axes = _POSITIONS[: args[0].dim()]
                self._input_shape = tuple(map(int, args[0].shape))
                start = ChainLink("", "same", axes=self._input_axes)
                self._last_returned = [_ChainTensor(args[0], _version_and_sum(args[0]), self._input_axes, (start,))]

    def _record_output(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record the output of a library module as the next tensor of the chain (forward hook)."""
        if not self._is_chain or threading.get_ident() != self._thread:
            return
        layer_tensors = None if self.calls is None else self.calls.get(path)
        is_plain = torch.is_grad_enabled() and not kwargs and len(args) == 1 + (layer_tensors is not None)
        # torch.func.functional_call runs a module with other weights.
        is_plain = is_plain and [id(weight) for weight in module._parameters.values()] == self._weights[path]
        with _OWN_OPERATIONS():
            source = self._chain_tensor(args[0]) if is_plain else None
            self._last_returned = [] if source is None else self._next_tensors(path, module, source, output)
            self._is_chain = bool(self._last_returned)
            if self._is_chain and layer_tensors is not None:
                finals = output[1] if isinstance(module, nn.LSTM) else (output[1],)
                layer_tensors.returned = (output[0], *finals)
                layer_tensors.versions_and_sums = tuple(map(_version_and_sum, layer_tensors.returned))

    def _next_tensors(self, path: str, module: nn.Module, source: _ChainTensor, output: Any) -> list[_ChainTensor]:
        """Return the outputs of a library module as tensors of the chain.

        The result is empty for a call that links cannot express.
        """
        link, axes = None, source.axes
        has_features_last = axes[-1] in (FEATURE, _POSITIONS[-1])
        if isinstance(module, _RECURRENT):
            return self._recurrent_outputs(path, module, source, output)
        if isinstance(module, _PASSING):
            link = None if module.training and isinstance(module, nn.Dropout) else ChainLink(path, "same")
        elif isinstance(module, nn.Embedding):
            link, axes = ChainLink(path, "table") if module.max_norm is None else None, (*axes, FEATURE)
            has_features_last = len(axes) == 3
        elif type(module) in _ACTIVATIONS:
            link = ChainLink(path, "dense", activation=_ACTIVATIONS[type(module)])
            link = None if getattr(module, "inplace", False) else link
        elif source.tensor.dtype == module.weight.dtype and module.weight.dtype in (torch.float32, torch.float64):
            kernel, bias = (
                None if w is None else w.detach().cpu().numpy().copy() for w in (module.weight, module.bias)
            )
            link = ChainLink(path, "dense", None if kernel is None else kernel.T, bias)
            axes = (*axes[:-1], FEATURE)
        if link is None or type(output) is not Tensor or not has_features_last:
            return []
        next_tensor = source.with_link(link, axes)
        return [_ChainTensor(output, _version_and_sum(output), axes, next_tensor.links, source.steps)]

    def _recurrent_outputs(self, path: str, module: Any, source: _ChainTensor, output: Any) -> list[_ChainTensor]:
        """Return output and final state of a recurrent module as tensors of the chain; one link per stacked layer."""
        if len(source.axes) != 3 or module.bidirectional or module.proj_size or (module.training and module.dropout):
            return []
        sequence_axes = (SAMPLE, TIME, FEATURE) if module.batch_first else (TIME, SAMPLE, FEATURE)
        if not self._roles:
            self._roles = {_POSITIONS[-1]: FEATURE} | dict(zip(source.axes, sequence_axes, strict=True))
            self._roles[FEATURE] = FEATURE
        if self._role_names(source.axes) != sequence_axes:
            return []
        for layer in range(module.num_layers):
            name = path if module.num_layers == 1 else node_name(path, module, layer)
            source = source.with_link(ChainLink(name, "recurrent"), sequence_axes)
        sequence, state = output[0], output[1][0] if isinstance(module, nn.LSTM) else output[1]
        steps = int(sequence.shape[sequence_axes.index(TIME)])
        axes = (_LAYER, SAMPLE, FEATURE)
        final = _ChainTensor(state, _version_and_sum(state), axes, source.links, steps, module.num_layers)
        return [_ChainTensor(sequence, _version_and_sum(sequence), sequence_axes, source.links, steps), final]

    def _chain_tensor(self, tensor: Any) -> _ChainTensor | None:
        """Return ``tensor`` as a tensor of the chain, if simple operations compute it from a recorded one.

        Returns None otherwise.
        """
        if type(tensor) is not Tensor or tensor._backward_hooks:
            return None
        for returned in self._last_returned:
            if _version_and_sum(returned.tensor) != returned.version_and_sum or returned.tensor._backward_hooks:
                return None
            nodes = _nodes_between(returned.tensor, tensor)
            if nodes is None:
                continue
            chain_tensor: _ChainTensor | None = replace(returned, tensor=tensor)
            for node in nodes:
                chain_tensor = None if chain_tensor is None else _apply_node(chain_tensor, node)
            return None if chain_tensor is None or _LAYER in chain_tensor.axes else chain_tensor
        return None


def _version_and_sum(tensor: Tensor) -> Hashable:
    """Return version and sum of a tensor, to detect later changes.

    A write to its values changes one of them, a write to ``.data`` the sum.
    """
    is_transformed = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor._version, "" if is_transformed else str(tensor.detach().sum().item())


def _nodes_between(start: Tensor, end: Tensor) -> list[Any] | None:
    """Return the autograd nodes on the path from one tensor to another, if each has one operand; else None.

    Without gradients a transposition is found by its memory.
    """
    if end is start:
        return []
    node, number, nodes = end.grad_fn, end.output_nr, list[Any]()
    while node is not None and len(nodes) <= _MOST_OPERATIONS:
        if (node is start.grad_fn and number == start.output_nr) or getattr(node, "variable", None) is start:
            return nodes[::-1]
        if len(node.next_functions) != 1:
            return None
        nodes.append(node)
        node, number = node.next_functions[0]
    swapped = start.transpose(0, 1) if start.dim() > 1 and not end.requires_grad and not start.requires_grad else start
    is_same_memory = (
        end.data_ptr() == start.data_ptr() and end.shape == swapped.shape and end.stride() == swapped.stride()
    )
    return [_TRANSPOSITION] if is_same_memory and end._is_view() and swapped is not start else None


def _apply_node(chain_tensor: _ChainTensor, node: Any) -> _ChainTensor | None:
    """Return the tensor of the chain after one autograd node, such as an indexing.

    Returns None for an unsupported operation.
    """
    name, axes = node.name(), list(chain_tensor.axes)  # autograd saves negative numbers as unsigned ones of 64 bits
    if name in _COPIES:
        return chain_tensor
    if name in _ACTIVATION_NODES:
        return chain_tensor.with_link(ChainLink("", "dense", activation=_ACTIVATION_NODES[name]), axes)
    if name == "TransposeBackward0":
        i, j = (c_int64(dim).value for dim in (node._saved_dim0, node._saved_dim1))
        axes[i], axes[j] = axes[j], axes[i]
        return replace(chain_tensor, axes=tuple(axes))
    if name == "PermuteBackward0":
        return replace(chain_tensor, axes=tuple(axes[c_int64(dim).value] for dim in node._saved_dims))
    if name == "SqueezeBackward1" and axes[c_int64(node._saved_dim).value] == _LAYER and chain_tensor.layers == 1:
        axis, index = _LAYER, 0
    elif name == "SelectBackward0":
        axis, index = axes[c_int64(node._saved_dim).value], c_int64(node._saved_index).value
    else:
        return None
    other_axes = [remaining for remaining in axes if remaining != axis]
    if axis == TIME:
        return chain_tensor.with_link(ChainLink("", "step", step=index % chain_tensor.steps), other_axes)
    if axis == _LAYER and index % chain_tensor.layers == chain_tensor.layers - 1:  # it is the last step of the output
        return chain_tensor.with_link(ChainLink("", "step", step=chain_tensor.steps - 1, is_state=True), other_axes)
    return None


#: Fingerprints of the models whose last pass was a chain that :func:`capture_chain` can capture.
_CHAINS: weakref.WeakKeyDictionary[nn.Module, Hashable] = weakref.WeakKeyDictionary()
_CELLS: dict[type, Any] = {nn.LSTM: LSTM, nn.GRU: GRU, nn.RNN: SimpleRNN}


def remember_chain(model: nn.Module, links: Sequence[ChainLink], layers: Sequence[str]) -> None:
    """Remember that the pass of a model was a chain through all recurrent ``layers`` that ran, for the next call."""
    names = [link.name for link in links if link.kind == "recurrent"]
    modules: list[Any] = [m for m in nn.Module.modules(model) if isinstance(m, _RECURRENT)]
    is_supported = all(type(m) in _CELLS and m.num_layers == 1 and not m.proj_size for m in modules)
    if is_supported and names == list(layers) and len(modules) == len(set(names)) == len(names):
        _CHAINS[model] = fingerprint(model)


def capture_chain(model: nn.Module, batch: Batch, request: Taps) -> Capture | None:
    """Capture a model that an earlier pass showed to be a chain; None if this pass cannot be captured like that.

    Hooks of modules alone capture a chain on a CPU, without autocast, tied or frozen weights.
    """
    if model not in _CHAINS or batch.initial_state or batch.frozen or torch.is_autocast_enabled("cpu"):
        return None
    modules = dict(model.named_modules())
    if any(not isinstance(modules.get(name), _RECURRENT) for name in request.layers or ()):
        return None
    ids = [id(parameter) for module in modules.values() for parameter in module._parameters.values()]
    weights = [w for m in modules.values() if isinstance(m, _RECURRENT) for w in m._parameters.values()]
    trainable = [w for w in weights if w is not None and w.requires_grad and ids.count(id(w)) == 1]
    on_cpu = all(w.device.type == "cpu" and w.dtype in (torch.float32, torch.float64) for w in trainable)
    if len(trainable) < len(weights) or not on_cpu or _CHAINS[model] != fingerprint(model):
        return None
    capture = _capture_pass(model, batch, request)
    if capture is None:
        del _CHAINS[model]
    return capture


def _capture_pass(model: nn.Module, batch: Batch, request: Taps) -> Capture | None:
    """Run a chain forward and, with a loss, backward; None if this pass was no chain."""
    boundaries = request.record == "everything"
    separate = boundaries and not request.topmost
    with forward_pass(model, batch, by_inputs=separate, by_frozen=boundaries, library_only=True) as borrowed:
        x = borrowed.x
        if type(x) is not Tensor:
            return None
        recorder = ChainRecorder(model, taps=True, separate=separate)
        with recorder.watch():
            outputs = call_model(borrowed.model, borrowed.x, batch)
        links, layer_tensors = recorder.chain(outputs), recorder.calls or {}
        is_changed = any(
            call.versions_and_sums != tuple(map(_version_and_sum, call.returned)) for call in layer_tensors.values()
        )
        if links is None or type(outputs) is not Tensor or is_changed:
            return None
        loss = None
        if batch.loss is not None or batch.y is not None:
            with loss_errors(batch, outputs):
                loss = evaluate(borrowed.batch, outputs, borrowed.model)
        requested = [call for path, call in layer_tensors.items() if request.layers is None or path in request.layers]
        gradients, differentiated = None, requested
        if request.topmost and loss is not None:
            differentiated, request = requested[-1:], replace(request, record="direct", weight_grads=False)
            if reaches(loss, [t for call in requested[:-1] for t in call.returned], without=requested[-1].returned):
                return None
        if loss is not None and request.gradients:
            gradients = _gradients(model, (x, outputs), loss, differentiated, request)
            if gradients is None:
                return None
    loss_value = None if loss is None else float(loss.detach())
    notes = [] if loss_value is None or math.isfinite(loss_value) else [f"The loss is {loss_value}."]
    calls = [_call(call, gradients, request) for call in requested]
    capture = Capture(calls, loss=loss_value, outputs=outputs.detach(), notes=notes, chain=links)
    capture.order = tuple(call.layer for call in calls)
    capture.topmost = request.topmost and gradients is not None
    if boundaries and gradients is not None:
        layer_weights = {id(weight) for call in requested for weight in call.weights.values()}
        parameters = dict(model.named_parameters())
        capture.input_grads, capture.output_grads = [gradients.get(id(x))], [gradients.get(id(outputs))]
        capture.outside_weight_grads = {
            name: None if id(p) in layer_weights else gradients.get(id(p)) for name, p in parameters.items()
        }
        capture.recurrent_weight_names = frozenset(name for name, p in parameters.items() if id(p) in layer_weights)
    return capture


def _gradients(
    model: nn.Module,
    model_tensors: Sequence[Tensor],
    loss: Tensor,
    calls: Sequence[_LayerTensors],
    request: Taps,
) -> dict[int, Tensor] | None:
    """Return the gradients of the loss by the identity of tensors; None if no path leads to a layer.

    ``model_tensors`` are the input and the output of the model.
    """
    returned = [t for call in calls for t in call.returned]
    taps = [*returned, *model_tensors]
    if request.weight_grads:
        taps += [weight for call in calls for weight in call.weights.values()]
    if request.record == "everything":
        taps += [t for call in calls for t in (call.input, *call.initial)]
        taps += nn.Module.parameters(model)
    gradients = gradients_of(loss, taps)
    return gradients if any(id(t) in gradients for t in returned) else None


def _call(call: _LayerTensors, gradients: Mapping[int, Tensor] | None, request: Taps) -> RecurrentCall:
    """Convert the recorded tensors of one call of a recurrent module to a ``RecurrentCall``, samples first."""
    cell_class, (output, *final_states) = _CELLS[type(call.module)], call.returned

    def samples_first(value: Tensor) -> Tensor:
        value = value.detach() if call.module.batch_first else value.detach().transpose(0, 1)
        return value.clone(memory_format=torch.contiguous_format)

    recurrent_call = RecurrentCall(
        layer=call.path,
        direction="forward",
        cell=cell_class(
            activation=getattr(call.module, "nonlinearity", "tanh"), **named_copies(cell_class, call.weights)
        ),
        input=samples_first(call.input),
        initial_state=tuple(state.detach()[0].clone() for state in call.initial),
        output=samples_first(output),
        final_state=tuple(state.detach()[0].clone() for state in final_states),
        weights_key=call.path,
    )
    if gradients is None:
        return recurrent_call

    def gradient(tensor: Tensor) -> Tensor:
        return gradients[id(tensor)] if id(tensor) in gradients else torch.zeros_like(tensor)

    recurrent_call.output_grad = samples_first(gradient(output))
    recurrent_call.final_state_grad = tuple(gradient(state)[0].clone() for state in final_states)
    if request.weight_grads:
        recurrent_call.weight_grads = named_copies(
            cell_class, {slot: gradient(weight) for slot, weight in call.weights.items()}
        )
    if request.record == "everything":
        recurrent_call.framework_input_grad = samples_first(gradient(call.input))
        recurrent_call.framework_initial_state_grad = tuple(gradient(state)[0].clone() for state in call.initial)
    return recurrent_call
