"""A cotangent pulled between two tensors that the user's own modules return, for certificates of Jacobians.

Forward hooks record what the modules at the two ends return; torch's autograd does the rest. Nothing is shared with the
recorder of a capture: which module, which call, which step and which state is read here independently.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ...autodiff.torch import backward_pass
from ...errors import CertificateError
from ...typing import Array
from ..protocol import Batch, EndPort, ReferenceRun
from .assemble import PortTensors
from .cells import has_own_forward, leaves, replayable
from .discover import named_modules, unwrapped
from .inputs import as_tensors, call_model, tensors_of, with_sources
from .restore import borrowed, differentiable_weights


def reference_between(
    model: nn.Module, batch: Batch, of: EndPort, wrt: EndPort, cotangent: Callable[[Array], Array]
) -> ReferenceRun:
    """Run the model for a certificate: see :meth:`rnnlens.adapters.protocol.Adapter.reference_between`."""
    model = unwrapped(model)
    if batch.initial_state:
        raise CertificateError("initial_state= was set by rnnlens; the model on its own starts from other states")
    modules = dict(named_modules(model))
    with warnings.catch_warnings(), borrowed(model, training=batch.training, seed=batch.seed):
        warnings.simplefilter("ignore")
        with differentiable_weights(model), _returned_values(modules, (of, wrt)) as returned:
            x, sources = with_sources(as_tensors(batch.x, model, "x"))
            outputs = tensors_of(call_model(model, x))
            upper, lower = (_tensors_at(end, modules, returned, sources, outputs) for end in (of, wrt))
            value = upper.value
            if not value.requires_grad or not all(t.requires_grad for t in lower.tensors):
                raise CertificateError("an end is not part of torch's graph")
            given = torch.as_tensor(cotangent(replayable(value).cpu().numpy())).to(value)
            found = backward_pass([value], lower.tensors, [given])
    whole = [torch.zeros_like(t) if g is None else g for t, g in zip(lower.tensors, found, strict=True)]
    values = [replayable(output).cpu().numpy() for output in outputs]
    return ReferenceRun(values, input_grads=[replayable(lower.gather(whole)).cpu().numpy()])


@contextmanager
def _returned_values(modules: dict[str, nn.Module], ends: Sequence[EndPort]) -> Iterator[dict[str, list[Any]]]:
    """Record within the block the values that the modules at the ends return, one for each call.

    The model gets copies, so that operations in place do not change the recorded tensors.
    """
    returned: dict[str, list[Any]] = {path: [] for path in map(_path, ends) if path}
    recurrent = {_path(end) for end in ends if end.states}
    handles = []

    def hook(path: str) -> Callable[..., Any]:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if isinstance(output, PackedSequence) or (isinstance(output, tuple) and _is_packed(output[:1])):
                raise CertificateError(f"{path} returns a packed sequence")
            given = {id(leaf) for leaf in leaves((args, kwargs))}
            tensors = {id(leaf): leaf for leaf in leaves(output)}
            if path in recurrent and given & tensors.keys():
                raise CertificateError(f"{path} returns a tensor that it was given")
            if path not in recurrent:  # nn.Identity returns its input, which other layers may read as well
                tensors = {key: leaf.clone() for key, leaf in tensors.items()}
            returned[path].append(pytree.tree_map(lambda leaf: tensors.get(id(leaf), leaf), output))
            copies = {key: leaf.clone() for key, leaf in tensors.items()}
            return pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), output)

        return record

    try:
        for path in returned:
            module = modules.get(path)
            if module is None or isinstance(module, torch.jit.ScriptModule):
                raise CertificateError(f"{path} is no Python module")
            handles.append(module.register_forward_hook(hook(path), with_kwargs=True))
        yield returned
    finally:
        for handle in handles:
            handle.remove()


def _is_packed(values: Sequence[Any]) -> bool:
    return any(isinstance(value, PackedSequence) for value in values)


def _path(end: EndPort) -> str:
    """Return the path of the module that returns an end; "" for an input or output of the model."""
    return "" if end.port.layer is None else end.port.layer.partition("#")[0].partition("[")[0]


def _tensors_at(
    end: EndPort,
    modules: dict[str, nn.Module],
    returned: dict[str, list[Any]],
    sources: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> PortTensors:
    """Return the tensors at an end; raise ``CertificateError`` where no tensor of the user's modules is that end."""
    port, path = end.port, _path(end)
    if not path:
        return PortTensors([(sources if port.kind == "input" else outputs)[port.index]])
    calls, module = returned[path], modules[path]
    if port.kind not in ("output", "state", "final_state"):
        raise CertificateError(f"no module returns {port.kind}")
    if not end.states:
        number = port.layer.partition("#")[2] if port.layer else ""
        if len(calls) > 1 and not number:
            raise CertificateError(f"{path} was called more than once")
        return PortTensors([tensors_of(calls[int(number or 0)])[port.index]])
    if isinstance(module, nn.RNNBase):
        return _of_library_layer(end, module, calls)
    return _of_cell(end, calls)


def _of_cell(end: EndPort, calls: Sequence[Any]) -> PortTensors:
    """Return the tensors that a cell returned, one for each step: its states stand last."""
    every = [leaves(call) for call in calls]
    if end.port.kind == "output" and end.is_lower:
        raise CertificateError("the state of a cell is also its output")  # torch has one tensor for both
    if any(len(call) not in (end.states, end.states + 1) for call in every):
        raise CertificateError("the cell returns other tensors than its states and an output")
    index = 0 if end.port.kind == "output" else end.port.index - end.states
    steps = [call[index] for call in every]
    if end.port.kind == "final_state":
        return PortTensors(steps[-1:], lambda parts: parts[0].flatten(1))
    if end.port.kind == "state" and index == -1 and end.states == 2 and every[0][-1].grad_fn is every[0][-2].grad_fn:
        raise CertificateError("a fused kernel has no path from its cell state to its hidden state")
    return _stacked(steps, end)


def _of_library_layer(end: EndPort, module: nn.RNNBase, calls: Sequence[Any]) -> PortTensors:
    """Return the output of nn.RNN, nn.LSTM or nn.GRU, or a state where that is a tensor that the module returned."""
    layer = str(end.port.layer).partition("[")[2].partition("]")[0]
    is_top = int(layer or module.num_layers - 1) == module.num_layers - 1
    if has_own_forward(module) or not all(isinstance(call[0], Tensor) and call[0].dim() == 3 for call in calls):
        raise CertificateError("the module returns other tensors than torch's layer")
    if end.port.kind == "final_state":
        last = calls[-1][1] if isinstance(calls[-1][1], tuple) else (calls[-1][1],)
        if module.bidirectional:
            raise CertificateError("two directions in one tensor")
        row = int(layer or 0)
        return PortTensors([last[end.port.index]], lambda parts: parts[0][row])
    is_output = end.port.kind == "output" or (end.port.index == 0 and not module.bidirectional and not module.proj_size)
    if not is_top or not is_output or (end.is_lower and (end.port.kind == "state" or len(calls) > 1)):
        raise CertificateError("a state within a fused kernel")
    first = [call[0] if module.batch_first else call[0].transpose(0, 1) for call in calls]
    if sum(part.shape[1] for part in first) != end.steps:
        raise CertificateError("the layer ran on another number of steps")
    if end.is_lower:
        return PortTensors([calls[0][0]], lambda parts: parts[0] if module.batch_first else parts[0].transpose(0, 1))
    return PortTensors([torch.cat(first, 1)])


def _stacked(steps: Sequence[Tensor], end: EndPort) -> PortTensors:
    """Return one tensor for each step, stacked as (sample, time, unit)."""
    sizes = {(len(step), math.prod(step.shape[1:])) for step in steps}
    if len(steps) != end.steps or len(sizes) != 1:
        raise CertificateError("the cell ran on another number of steps or samples")
    return PortTensors(list(steps), lambda parts: torch.stack([part.flatten(1) for part in parts], 1))
