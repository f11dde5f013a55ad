"""Runs and differentiates the user's unmodified model: no kernel of rnnlens, torch's own autograd.

A certificate compares a result with this run. It shares with the capture only the code that prepares the user's data,
evaluates the user's loss and restores the model. Names and layouts of weights are read here independently, and so are
module, call, step and state of the ends of a Jacobian inside the model: forward hooks record what the modules return.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ...autodiff.torch import backward_pass
from ...errors import CertificateError
from ...recurrence.cells import GRU, LSTM, Cell, SimpleRNN, registered
from ...typing import Array, container_of, named_leaves
from ..protocol import Batch, Cotangents, EndPort, ReferenceRun, WeightLocation
from .assemble import PortTensors
from .cells import RECORDED_FORMS, CellForm, has_own_forward, has_own_step, tensor_leaves
from .discover import named_modules, unwrap
from .forward_pass import ForwardPass, forward_pass
from .inputs import call_model, returned_tensors, tensors_of
from .losses import evaluate, host_array
from .scan_families import sequence_modules, state_sizes

#: Torch's order of gates, from the documentation of its modules.
_GATES: dict[Any, tuple[type[Cell], tuple[str, ...]]] = {
    nn.LSTM: (LSTM, ("input", "forget", "candidate", "output")),
    nn.GRU: (GRU, ("reset", "update", "candidate")),
    nn.RNN: (SimpleRNN, ("candidate",)),
}
_CELLS = {nn.LSTMCell: nn.LSTM, nn.GRUCell: nn.GRU, nn.RNNCell: nn.RNN}
_WEIGHTS = {
    "kernel": "weight_ih",
    "recurrent_kernel": "weight_hh",
    "bias": "bias_ih",
    "recurrent_bias": "bias_hh",
    "projection": "weight_hr",
}


def reference_run(
    model: nn.Module,
    batch: Batch,
    cotangents: Cotangents | None = None,
    *,
    gradients: bool = True,
) -> ReferenceRun:
    """Run the model for a certificate: see :meth:`rnnlens.adapters.protocol.Run.reference`."""
    model = unwrap(model)
    with _quiet_pass(model, batch, by_frozen=gradients) as borrowed:
        sources = borrowed.sources
        if gradients:
            _refuse_quadratic(model, borrowed.x)
        outputs = call_model(borrowed.model, borrowed.x)
        loss = None if cotangents is not None else evaluate(borrowed.batch, outputs, borrowed.model)
        leaves = returned_tensors(outputs)
        values, starts = [_copied_array(leaf) for leaf in leaves], [(loss, None)]
        if cotangents is not None:
            output_cotangents = cotangents(values) if callable(cotangents) else cotangents
            leaf_cotangents = [
                (leaf, cotangent)
                for leaf, cotangent in zip(leaves, output_cotangents, strict=True)
                if cotangent is not None
            ]
            starts = [(leaf, torch.as_tensor(cotangent).to(leaf)) for leaf, cotangent in leaf_cotangents]
        weights = dict(model.named_parameters())
        grads = _pull_back(starts, [*sources, *weights.values()]) if gradients else None
    loss_value = None if loss is None else float(loss.detach())
    if grads is None:
        return ReferenceRun(values, loss_value)
    by_name = dict(zip(weights, grads[len(sources) :], strict=True))
    names = named_leaves(borrowed.x) if container_of(borrowed.x) is not None else ()
    return ReferenceRun(values, loss_value, grads[: len(sources)], by_name, names)


@contextmanager
def _quiet_pass(model: nn.Module, batch: Batch, *, by_frozen: bool) -> Iterator[ForwardPass]:
    """Borrow a model without the warnings that its own run gave already."""
    with warnings.catch_warnings(), forward_pass(model, batch, by_inputs=True, by_frozen=by_frozen) as borrowed:
        warnings.simplefilter("ignore")
        yield borrowed


#: Largest number of operations of a backward pass that grows with the square of the steps: some 15 s of one core.
QUADRATIC = 2e10


def _refuse_quadratic(model: nn.Module, x: Any) -> None:
    """Raise ``CertificateError`` if the model's own scans would take too long to differentiate.

    Hugging Face's selective scan indexes ``discrete_A[:, :, t]`` in a loop, and the backward pass of each index fills
    an array of all steps with zeros.
    """
    shapes = [leaf.shape for leaf in tensors_of(x) if leaf.dim() > 1]
    samples, steps = max(((s[0], s[1]) for s in shapes), key=lambda shape: shape[1], default=(0, 0))
    axes = [state_sizes(m, family) for _, m, family in sequence_modules(named_modules(model)) if family.is_quadratic]
    operations = float(samples * steps**2 * sum(math.prod(size for _, size in sizes) for sizes in axes))
    if operations > QUADRATIC:
        raise CertificateError(
            f"the backward pass of the model's own scan grows with the square of the {steps} steps: "
            f"{operations:.0e} operations, more than {QUADRATIC:.0e}; a shorter x can be certified"
        )


class WeightLocations:
    """Parameters of a model by weight, for :meth:`rnnlens.adapters.protocol.ModelFacts.weight_location`."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(named_modules(unwrap(model)))
        self._names: dict[int, list[str]] = {}
        for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)

    def find(self, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Find the parameter behind a weight; None if there is none."""
        path, _, number = layer.partition("#")[0].partition("[")
        module = self._modules.get(path)
        if module is None:
            return None
        parameter_and_order = _find_parameter(module, int(number.rstrip("]") or 0), direction, key)
        if parameter_and_order is None:
            return None
        parameter, reorder = parameter_and_order
        names = self._names.get(id(parameter), [])
        return WeightLocation(names[0], reorder, tied=len(names) > 1) if names else None


def _find_parameter(
    module: Any, layer: int, direction: str | None, key: str
) -> tuple[Any, Callable[[Array], Array]] | None:
    """Find the parameter of a module behind a weight, and the function that reorders its gradient; None if absent."""
    registration = registered(module)
    if registration is not None:
        parameter_name = registration.single(key)
        parameter = None if parameter_name is None else dict(module.named_parameters()).get(parameter_name[0])
        is_transposed = parameter_name is not None and parameter_name[1]
        return None if parameter is None else (parameter, lambda array: array.T if is_transposed else array)
    layer_class = next((candidate for candidate in _GATES if isinstance(module, candidate)), None)
    torch_cell = next((candidate for candidate in _CELLS if isinstance(module, candidate)), None)
    slot = _WEIGHTS.get(key.rpartition("/")[2], "")
    if (layer_class is None and torch_cell is None) or has_own_step(module):
        return dict(module.named_parameters()).get(key), lambda array: array
    name = slot if torch_cell is not None else f"{slot}_l{layer}" + ("_reverse" if direction == "backward" else "")
    parameter = module._parameters.get(name)
    if parameter is None:
        return None
    cell_class, order = _GATES[layer_class or _CELLS[torch_cell]]
    if slot == "weight_hr":
        return parameter, lambda array: array.T
    gate_positions = [order.index(gate) for gate in cell_class.gates]

    def reorder(array: Array) -> Array:
        """Reorder (gate * unit, ...) in torch's gate order to (..., gate * unit) in the order of rnnlens."""
        by_gate = array.reshape(len(gate_positions), -1, *array.shape[1:])[gate_positions]
        return by_gate.reshape(array.shape).T

    return parameter, reorder


def _pull_back(starts: Sequence[tuple[Any, Any]], sources: Sequence[Tensor]) -> list[Array | None]:
    """Pull cotangents back to the sources, given pairs (tensor, cotangent); None where no path leads."""
    pairs = [(start, cotangent) for start, cotangent in starts if start is not None and start.requires_grad]
    differentiable = [s for s in sources if s.requires_grad]
    if not pairs or not differentiable:
        return [None] * len(sources)
    grads = backward_pass([s for s, _ in pairs], differentiable, [cotangent for _, cotangent in pairs])
    by_source = {id(s): g for s, g in zip(differentiable, grads, strict=True)}
    return [None if by_source.get(id(s)) is None else _copied_array(by_source[id(s)]) for s in sources]


def _copied_array(tensor: Any) -> Array:
    return host_array(tensor).copy()


def reference_between(
    model: nn.Module, batch: Batch, of: EndPort, wrt: EndPort, cotangent: Callable[[Array], Array]
) -> ReferenceRun:
    """Run the model for a certificate: see :meth:`rnnlens.adapters.protocol.Run.between`."""
    model = unwrap(model)
    modules = dict(named_modules(model))
    with _quiet_pass(model, batch, by_frozen=True) as borrowed, _returned_values(modules, (of, wrt)) as returned:
        outputs = returned_tensors(call_model(borrowed.model, borrowed.x))
        upper, lower = (_end_tensors(end, modules, returned, borrowed.sources, outputs) for end in (of, wrt))
        value = upper.value
        if not value.requires_grad or not all(t.requires_grad for t in lower.tensors):
            raise CertificateError("an end is not part of torch's graph")
        upper_cotangent = torch.as_tensor(cotangent(_copied_array(value))).to(value)
        lower_grads = backward_pass([value], lower.tensors, [upper_cotangent])
    full_grads = [torch.zeros_like(t) if g is None else g for t, g in zip(lower.tensors, lower_grads, strict=True)]
    return ReferenceRun(
        [_copied_array(output) for output in outputs], input_grads=[_copied_array(lower.gather(full_grads))]
    )


@contextmanager
def _returned_values(modules: dict[str, nn.Module], ends: Sequence[EndPort]) -> Iterator[dict[str, list[Any]]]:
    """Record within the block what the modules at the ends of a Jacobian return, one value for each call.

    The model gets copies, so that operations in place do not change the recorded tensors.
    """
    returned: dict[str, list[Any]] = {path: [] for path in map(_module_path, ends) if path}
    recurrent = {_module_path(end) for end in ends if end.states}

    def hook(path: str) -> Callable[..., Any]:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if isinstance(output[0] if type(output) is tuple else output, PackedSequence):
                raise CertificateError(f"{path} returns a packed sequence")
            argument_ids = {id(leaf) for leaf in tensor_leaves((args, kwargs))}
            output_tensors = {id(leaf): leaf for leaf in tensor_leaves(output)}
            if path in recurrent and argument_ids & output_tensors.keys():
                raise CertificateError(f"{path} returns a tensor that it was given")
            if path not in recurrent:  # nn.Identity returns its input, which other layers may read as well
                output_tensors = {key: leaf.clone() for key, leaf in output_tensors.items()}
            returned[path].append(pytree.tree_map(lambda leaf: output_tensors.get(id(leaf), leaf), output))
            copies = {key: leaf.clone() for key, leaf in output_tensors.items()}
            return pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), output)

        return record

    with ExitStack() as stack:
        for path in returned:
            module = modules.get(path)
            if module is None or isinstance(module, torch.jit.ScriptModule):
                raise CertificateError(f"{path} is no Python module")
            stack.callback(module.register_forward_hook(hook(path), with_kwargs=True).remove)
        yield returned


def _module_path(end: EndPort) -> str:
    """Return the path of the module that returns the tensor of an end; "" for an input or output of the model.

    An end is the output or the input side of a time Jacobian.
    """
    return "" if end.port.layer is None else end.port.layer.partition("#")[0].partition("[")[0]


def _end_tensors(
    end: EndPort,
    modules: dict[str, nn.Module],
    returned: dict[str, list[Any]],
    sources: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> PortTensors:
    """Return the tensors at one end of a Jacobian; raise ``CertificateError`` if no module returns them."""
    port, path = end.port, _module_path(end)
    if not path:
        return PortTensors([(sources if port.kind == "input" else outputs)[port.index]])
    returned_calls, module = returned[path], modules[path]
    if port.kind not in ("output", "state", "final_state"):
        raise CertificateError(f"no module returns {port.kind}")
    if not end.states:
        number = port.layer.partition("#")[2] if port.layer else ""
        if len(returned_calls) > 1 and not number:
            raise CertificateError(f"{path} was called more than once")
        return PortTensors([tensors_of(returned_calls[int(number or 0)])[port.index]])
    if isinstance(module, nn.RNNBase):
        return _library_layer_end(end, module, returned_calls)
    return _cell_end(end, returned_calls, RECORDED_FORMS.get(module))


def _cell_end(end: EndPort, returned_calls: Sequence[Any], form: CellForm | None) -> PortTensors:
    """Find one end of a Jacobian among the tensors that a cell returned: output, then states, at each call.

    The end is (sample, time, unit) over all calls, or (sample, unit) for a final state. ``form``: which of the returned
    tensors are which, where the cell was recorded.
    """
    if not returned_calls:
        raise CertificateError("the step is no call of a module")
    call_tensors = [tensor_leaves(call) for call in returned_calls]
    if form is not None:
        if end.is_lower and end.port.kind == "output" and len(form.outputs) > 1:
            raise CertificateError("the output of the cell is several tensors")
        call_tensors = [form.results(tensors) for tensors in call_tensors]
    if end.port.kind == "output" and end.is_lower:
        raise CertificateError("the state of a cell is also its output")  # torch has one tensor for both
    if any(len(call) not in (end.states, end.states + 1) for call in call_tensors):
        raise CertificateError("the cell returns other tensors than its states and an output")
    index = 0 if end.port.kind == "output" else end.port.index - end.states
    step_tensors = [call[index] for call in call_tensors]
    if end.port.kind == "final_state":
        return PortTensors(step_tensors[-1:], lambda parts: parts[0].flatten(1))
    if (
        end.port.kind == "state"
        and index == -1
        and end.states == 2
        and call_tensors[0][-1].grad_fn is call_tensors[0][-2].grad_fn
    ):
        raise CertificateError("a fused kernel has no path from its cell state to its hidden state")
    sizes = {(len(step), math.prod(step.shape[1:])) for step in step_tensors}
    if len(step_tensors) != end.steps or len(sizes) != 1:
        raise CertificateError("the cell ran on another number of steps or samples")
    return PortTensors(step_tensors, lambda parts: torch.stack([part.flatten(1) for part in parts], 1))


def _library_layer_end(end: EndPort, module: nn.RNNBase, returned_calls: Sequence[Any]) -> PortTensors:
    """Find one end of a Jacobian among the tensors that nn.RNN, nn.LSTM or nn.GRU returned: output or state."""
    layer = str(end.port.layer).partition("[")[2].partition("]")[0]
    is_top = int(layer or module.num_layers - 1) == module.num_layers - 1
    if has_own_forward(module) or not all(
        isinstance(call[0], Tensor) and call[0].dim() == 3 for call in returned_calls
    ):
        raise CertificateError("the module returns other tensors than torch's layer")
    if end.port.kind == "final_state":
        final_states = returned_calls[-1][1] if isinstance(returned_calls[-1][1], tuple) else (returned_calls[-1][1],)
        if module.bidirectional:
            raise CertificateError("two directions in one tensor")
        layer_row = int(layer or 0)
        return PortTensors([final_states[end.port.index]], lambda parts: parts[0][layer_row])
    is_output = end.port.kind == "output" or (end.port.index == 0 and not module.bidirectional and not module.proj_size)
    if not is_top or not is_output or (end.is_lower and (end.port.kind == "state" or len(returned_calls) > 1)):
        raise CertificateError("a state within a fused kernel")
    outputs = [call[0] if module.batch_first else call[0].transpose(0, 1) for call in returned_calls]
    if sum(part.shape[1] for part in outputs) != end.steps:
        raise CertificateError("the layer ran on another number of steps")
    if end.is_lower:
        return PortTensors(
            [returned_calls[0][0]], lambda parts: parts[0] if module.batch_first else parts[0].transpose(0, 1)
        )
    return PortTensors([torch.cat(outputs, 1)])
