"""Runs and differentiates a custom cell by torch's autograd, with samples and steps folded into one axis."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import array_api_compat.torch as torch_xp
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...autodiff import engine
from ...autodiff.torch import jacobian_rows, pull_gradients
from ...errors import cell_rerun_errors
from ...recurrence.cells import Cell, StepCell, registered
from ...recurrence.cells.registry import Registration
from ...typing import Array
from ...vocabulary import POSITION, UNIT, named_states
from ..protocol import Port
from ..shared.registered_cells import ComposedWeight, with_step_autodiff
from .restore import borrowed_model

#: Torch's kernels of one step, by the class of the cell.
_KERNELS: dict[type[nn.Module], tuple[Any, ...]] = {
    nn.LSTMCell: (torch._VF.lstm_cell,),
    nn.GRUCell: (torch._VF.gru_cell,),
    nn.RNNCell: (torch._VF.rnn_tanh_cell, torch._VF.rnn_relu_cell),
}
#: Whether a subclass with its own forward computes the same step as torch's cell.
_STEPS_AS_TORCH: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class CellForm:
    """Call signature and return form of a cell.

    ``call`` maps an input (n, feature) and the state tensors to positional and keyword arguments in the user's nesting.
    ``shapes`` and ``input_shape`` are those of states and input without the leading sample axis: (feature,), or
    (channel, *space) of a convolutional cell. ``states`` and ``outputs``: positions of the new states, and of the other
    results, among the returned tensors.
    """

    call: Callable[[Tensor, Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    shapes: tuple[tuple[int, ...], ...]
    input_shape: tuple[int, ...]
    states: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def output_is_state(self) -> bool:
        """Whether the cell returns nothing but its states, of which the first is its output."""
        return not self.outputs

    def results(self, returned: Sequence[Tensor]) -> list[Tensor]:
        """Return the output, unless it is a state, and the new states, from the tensors that the cell returned.

        Several outputs are one, (sample, unit), side by side.
        """
        outputs = [returned[position] for position in self.outputs]
        output = outputs if len(outputs) < 2 else [torch.cat([part.flatten(1) for part in outputs], 1)]
        return [*output, *(returned[position] for position in self.states)]


#: Form of the calls of each module that was last recorded as a cell.
RECORDED_FORMS: weakref.WeakKeyDictionary[nn.Module, CellForm] = weakref.WeakKeyDictionary()


def tensor_leaves(value: Any) -> list[Tensor]:
    """Return all tensors within nested tuples, lists and dicts, in torch's order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


class TorchStepCell(StepCell):
    """Cell whose step is the forward of a torch module, which is not copied and not changed.

    Rows must be independent of each other. ``dtype`` is that of the computation; results are widened to at least
    float32. ``autocast`` is the autocast dtype that was active during the capture. ``owner``: the module that
    a step may change, where it is a function of a model.
    """

    compiles_pull_backs = False

    def __init__(
        self,
        module: nn.Module,
        form: CellForm,
        output_shape: tuple[int, ...],
        dtype: torch.dtype,
        autocast: torch.dtype | None = None,
        owner: nn.Module | None = None,
    ) -> None:
        self.module, self.form, self.output_shape, self.dtype = module, form, output_shape, dtype
        self.autocast, self.owner = autocast, module if owner is None else owner
        self.modes = [(submodule, submodule.training) for submodule in nn.Module.modules(self.owner)]
        self.state_sizes = tuple(math.prod(shape) for shape in form.shapes)
        self.output_size = math.prod(output_shape)
        self.output_state, self.output_is_state = 0, form.output_is_state

    def name_states(self, fields: Sequence[str | None]) -> None:
        """Call the states by the fields in which the user's code holds them, where there are any."""
        if any(fields):
            self.names = named_states(fields, [name for name, _ in self.module.named_parameters()])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes (channel, *space) or (position, unit) of input and states of several axes; empty for flat states."""
        state_shapes = dict(zip(self.state_names, self.form.shapes, strict=True))
        if len(self.form.input_shape) > 1:
            return {"input": self.form.input_shape, **state_shapes}
        return state_shapes if self.state_axes else {}

    @property
    def state_axes(self) -> tuple[str, ...]:
        """(position, unit) if the last of two axes of every state has no place in space.

        The input has as many positions but other features there, or weights without axes of space act on it.
        """
        if len(self.form.input_shape) == 2 and any(
            shape[-1] != self.form.input_shape[-1] for shape in self.form.shapes
        ):
            return (POSITION, UNIT)
        shapes = [tuple(parameter.shape) for parameter in nn.Module.parameters(self.module)]
        widths = {shape[-1] for shape in shapes if shape}
        is_row_wise = all(len(shape) == 2 and shape[1] in widths for shape in self.form.shapes)
        return (POSITION, UNIT) if is_row_wise and all(len(shape) < 3 for shape in shapes) else ()

    def advance(self, x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute one step from inputs (n, feature) and states (n, size); return the output and the new states."""
        with self._capture_mode(), torch.no_grad():
            output, new_states = self._run(x, state)
        return at_least_float32(output.detach()), tuple(at_least_float32(s.detach()) for s in new_states)

    def vjp(
        self, x: Tensor, state: Sequence[Tensor], output_cotangent: Tensor, state_cotangent: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Pull cotangents of the output and the new states back to the input and the previous states."""
        with self._capture_mode():
            sources = [t.detach().requires_grad_() for t in (x, *state)]
            output, new_states = self._run(sources[0], sources[1:])
            by_input, *by_state = _pull([output, *new_states], sources, [output_cotangent, *state_cotangent])
        return by_input, tuple(by_state)

    def weight_vjp(
        self, x: Tensor, state: Sequence[Tensor], output_cotangent: Tensor, state_cotangent: Sequence[Tensor]
    ) -> Mapping[str, Tensor]:
        """Pull cotangents back to the trainable weights, by name and summed over rows."""
        trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not trainable:
            return {}
        with self._capture_mode():
            output, new_states = self._run(x.detach(), [s.detach() for s in state])
            grads = _pull([output, *new_states], list(trainable.values()), [output_cotangent, *state_cotangent])
        return dict(zip(trainable, grads, strict=True))

    def produced(
        self, x: Tensor, state: Sequence[Tensor], output_cotangent: Tensor, state_cotangent: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the total gradient of each new state, given cotangents of the output and the new states.

        It includes paths through other results of the same step, as of c_t through h_t.
        """
        with self._capture_mode():
            previous = [s.detach().requires_grad_() for s in self._reshaped_states(state)]
            results = self._call_module(x.detach().to(self.dtype).requires_grad_(), previous)
            new_states = results if self.form.output_is_state else results[1:]
            # A tensor returned twice, as output and as state, gets both cotangents.
            all_pairs = zip((results[0], *new_states), (output_cotangent, *state_cotangent), strict=True)
            pairs = [
                (tensor, c.to(tensor.dtype).reshape(tensor.shape)) for tensor, c in all_pairs if tensor.requires_grad
            ]
            starts, cotangents = zip(*pairs, strict=True)
            # A state that is returned unchanged is not new: its other paths belong to the state before the step.
            is_new = [s.requires_grad and not any(s is g for g in previous) for s in new_states]
            computed = [s for s, is_made in zip(new_states, is_new, strict=True) if is_made]
            new_grads = iter(pull_gradients(starts, computed, cotangents))
        grads = [next(new_grads) if is_made else None for is_made in is_new]
        with_cotangents = zip(grads, state_cotangent, strict=True)
        return tuple(c if g is None else at_least_float32(g.flatten(1)) for g, c in with_cotangents)

    def jacobian(self, x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return per-row Jacobians of [new states, output] with respect to the states and to the input."""
        with self._capture_mode():
            sources = [t.detach().requires_grad_() for t in (x, *state)]
            output, new_states = self._run(sources[0], sources[1:])
            jacobians = jacobian_rows(torch.cat([*new_states, output], dim=1), sources)
        by_input, *by_state = (at_least_float32(jacobian.detach()) for jacobian in jacobians)
        return torch.cat(by_state, dim=2), by_input

    def _run(self, x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        returned = self._call_module(x.to(self.dtype), self._reshaped_states(state))
        new_states = returned if self.form.output_is_state else returned[1:]
        self.output_is_state = returned[0] is new_states[0]
        return returned[0].flatten(1), tuple(s.flatten(1) for s in new_states)

    def _reshaped_states(self, state: Sequence[Tensor]) -> list[Tensor]:
        return [s.to(self.dtype).reshape(-1, *shape) for s, shape in zip(state, self.form.shapes, strict=True)]

    def _call_module(self, x: Tensor, state: Sequence[Tensor]) -> list[Tensor]:
        args, kwargs = self.form.call(x.reshape(len(x), *self.form.input_shape), state)
        with torch.autocast(x.device.type, self.autocast) if self.autocast is not None else nullcontext():
            return self.form.results(tensor_leaves(self.module(*args, **kwargs)))

    @contextmanager
    def _capture_mode(self) -> Iterator[None]:
        """Borrow the cell, in the training modes of the capture."""
        with borrowed_model(self.owner), cell_rerun_errors(type(self.module).__name__):
            for submodule, flag in self.modes:
                submodule.training = flag
            yield


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor in at least float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _pull(outputs: Sequence[Tensor], sources: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """Pull cotangents of the outputs back; return one gradient per source, zeros where no path leads."""
    typed_cotangents = [c.to(out.dtype) for out, c in zip(outputs, cotangents, strict=True)]
    # A step function may read tensors that the model computed from its weights; their graph is needed again.
    grads = pull_gradients(outputs, sources, typed_cotangents, retain_graph=True)
    return [
        at_least_float32(torch.zeros_like(s) if g is None else g.detach()) for g, s in zip(grads, sources, strict=True)
    ]


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a subclass of a torch recurrent layer or cell defines its own ``forward``."""
    torch_classes = (nn.LSTM, nn.GRU, nn.RNN, *_KERNELS)
    base = next((torch_class for torch_class in torch_classes if isinstance(module, torch_class)), None)
    return base is not None and getattr(module.forward, "__func__", None) is not base.forward


def has_own_step(module: nn.Module) -> bool:
    """Return whether a subclass of a torch cell computes another step than torch's cell.

    Its forward is run once on two random samples: it must call torch's kernel once, on the input and the state, and
    return the kernel's result.
    """
    torch_class = next((torch_class for torch_class in _KERNELS if isinstance(module, torch_class)), None)
    if torch_class is None or not has_own_forward(module):
        return False
    if module not in _STEPS_AS_TORCH:
        _STEPS_AS_TORCH[module] = _computes_torch_step(module, torch_class)
    return not _STEPS_AS_TORCH[module]


def _computes_torch_step(module: Any, torch_class: type[nn.Module]) -> bool:
    weight = module.weight_ih
    if weight.is_meta:
        return True
    random_values = torch.rand(
        2, module.input_size + 2 * module.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    x, h, c = random_values.to(weight).split([module.input_size, module.hidden_size, module.hidden_size], dim=1)
    state: Any = (h, c) if torch_class is nn.LSTMCell else h
    for args in ((x, state), (state, x)):
        kernel_recorder = _KernelCalls(_KERNELS[torch_class])
        try:
            with borrowed_model(module, training=False, seed=0), torch.no_grad(), kernel_recorder:
                returned = module.forward(*args)
        except Exception:  # the user's forward may expect other arguments
            continue
        if len(kernel_recorder.calls) == 1:
            kernel_args, result = kernel_recorder.calls[0]
            given_sums, kernel_sums = (
                sorted(float(value.sum()) for value in (x_value, *as_tuple(states)))
                for x_value, states in ((x, state), kernel_args[:2])
            )
            own_results, kernel_results = as_tuple(returned), as_tuple(result)
            is_same = (
                len(own_results) == len(kernel_results)
                and all(map(torch.is_tensor, own_results))
                and all(map(torch.equal, own_results, kernel_results))
            )
            return is_same and kernel_sums == given_sums
    return False


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the states or results of a call as a tuple, also where they are one tensor."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


class _KernelCalls(TorchFunctionMode):  # type: ignore[misc]
    """Recorder of the calls of given torch kernels: arguments and result."""

    def __init__(self, kernels: Sequence[Any]) -> None:
        super().__init__()
        self.kernels = kernels
        self.calls: list[tuple[Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.kernels:
            self.calls.append((args, result))
        return result


def build_cell(module: nn.Module, registration: Registration) -> Cell:
    """Create the rnnlens cell of a module whose class was registered; torch computes derivatives that it lacks."""
    parameters = dict(module.named_parameters())
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    cell = registration.make(
        module, {name: at_least_float32(p.detach()).cpu().numpy().copy() for name, p in parameters.items()}
    )
    cell = cell.with_weights(lambda array: torch.tensor(array, device=device))
    return with_step_autodiff(cell, registration, engine("torch"), torch_xp, _to_tensor)


def arrange_gradients(registration: Registration, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert gradients of a registered cell's parameters to the layout of rnnlens."""
    arrays = registration.arrays({name: at_least_float32(grad).cpu().numpy() for name, grad in grads.items()})
    device = next((grad.device for grad in grads.values()), None)
    return {name: torch.tensor(array, device=device) for name, array in arrays.items()}


def composed_weight(modules: Mapping[str, nn.Module], port: Port) -> ComposedWeight | None:
    """Return the parameters that make up a weight of a registered cell; None for any other weight."""
    module = modules.get(str(port.layer).partition("#")[0])
    registration = None if module is None else registered(module)
    if module is None or registration is None or port.key not in registration.cell.parameters:
        return None
    name_parts = {name: name.rpartition(".") for name, _ in module.named_parameters()}
    return ComposedWeight(
        registration, port.key, {n: (f".{path}" if path else "", key) for n, (path, _, key) in name_parts.items()}
    )


def _to_tensor(array: Array) -> Tensor:
    """Return an array as a tensor; a NumPy array is copied, because it may be read-only."""
    return array.detach() if isinstance(array, Tensor) else torch.tensor(array)
