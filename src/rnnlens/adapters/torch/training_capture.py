"""Records the recurrent calls of a training step while it runs, without running or replacing anything.

A forward hook records the input and output of each call. A hook on the returned tensors records their gradient in the
user's own backward pass. For a fused kernel this is the direct gradient. The state that a cell in a loop returns is one
tensor, used by the next step and by the user's code, so its gradient is the *total* gradient. The part that came
through the next step, and from h_t to c_t, is recorded at the nodes of the cell in the autograd graph. The difference
is the direct gradient, with the rounding error of the total one.

Of the recurrent weights three gradients are copied: of the backward passes themselves, accumulated in ``.grad``, and as
applied by the optimizer.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten

from .cells import as_tuple, has_own_forward
from .discover import cell_candidates, describe, is_state_name, recurrent_modules, unwrap
from .inputs import detach_tensors
from .public import RAN_AS_CELL
from .record import autocast_around, may_use_tf32
from .roles import state_fields
from .training_calls import (
    TrainingCall,
    TrainingLoops,
    add_gradient,
    is_single_step,
    join_loops,
    record_inner_gradients,
    record_step_gradients,
    unscale,
)
from .training_cells import CellArguments, returned_tensors
from .weights import NAMES, cell_weights, class_of, from_torch, node_name

#: Number for no backward pass: torch counts them from 0.
NO_PASS = -1


class ModuleHook:
    """Torch hook of one module that calls ``hook``, or ``failed`` with its exception, and returns nothing.

    A copy or a pickle of the module gets a hook without effect.
    """

    def __init__(self, module: nn.Module, hook: Callable[..., None], failed: Callable[[Exception], None]) -> None:
        self._module, self._hook, self._failed = weakref.ref(module), hook, failed

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        """Run the hook, except on a shallow copy of the module or while torch traces it."""
        if module is not self._module() or torch.jit.is_tracing():
            return
        try:
            self._hook(module, *arguments)
        except Exception as error:
            self._failed(error)

    def __deepcopy__(self, memo: Any) -> Any:
        return nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # a picklable callable that takes any arguments and returns None


@dataclass(frozen=True)
class WeightSlot:
    """Position of a parameter: layer name in a result, direction, and torch's name of the weight."""

    layer: str
    direction: str
    slot: str
    cell: Any

    @property
    def key(self) -> str:
        """Name of the weight within its layer in results, such as ``kernel``; in a user's own cell the parameter's."""
        return self.slot if self.cell is None else NAMES[self.slot]


@dataclass
class WeightGradients:
    """Gradients of a step by parameter, with any loss scale divided out.

    ``own`` is of the recorded forward passes, as this process computed it. ``accumulated`` is ``.grad`` after the last
    backward pass of the step: summed with earlier passes, and averaged over processes in distributed training.
    ``applied`` is the gradient that the optimizer used, after clipping. ``model_norms`` is the gradient norm of every
    weight of the model by its id, before and after clipping.
    """

    own: dict[WeightSlot, Tensor] = field(default_factory=dict)
    accumulated: dict[WeightSlot, Tensor] = field(default_factory=dict)
    applied: dict[WeightSlot, Tensor] = field(default_factory=dict)
    model_norms: dict[str, dict[int, float]] = field(default_factory=dict)

    def norms(self, moved: Collection[int] | None = None) -> dict[str, float]:
        """Return Euclidean norms by the name of a scalar.

        The names are ``grad_norm`` and ``grad_norm_clipped`` for the weights whose ids are in ``moved`` (all of the
        model if None), and ``lstm/weight_grad_norm/kernel`` and ``lstm/weight_grad_norm_clipped/kernel`` for one
        weight. Clipped norms are of the gradients that the optimizer used.
        """
        norms_by_name = {
            norm_name: math.hypot(*(norm for key, norm in norms.items() if moved is None or key in moved))
            for norm_name, norms in self.model_norms.items()
        }
        for norm_name, grads in (("weight_grad_norm", self.accumulated), ("weight_grad_norm_clipped", self.applied)):
            for slot, grad in grads.items():
                bidirectional = any(other.layer == slot.layer and other.direction != slot.direction for other in grads)
                name = f"{slot.layer}/{slot.direction}" if bidirectional else slot.layer
                norms_by_name[f"{name}/{norm_name}/{slot.key}"] = float(torch.linalg.vector_norm(grad.double()))
        return norms_by_name

    def clipped(self, tolerance: float = 1e-5) -> bool:
        """Return whether the optimizer used other gradients than the accumulated ones."""
        return any(
            slot in self.applied and not torch.allclose(self.applied[slot], grad, rtol=tolerance, atol=0.0)
            for slot, grad in self.accumulated.items()
        )

    def by_layer(self, which: str = "own") -> dict[str, dict[str, dict[str, Tensor]]]:
        """Return gradients by layer, direction and weight name, in the layout of rnnlens."""
        gradients: dict[str, dict[str, dict[str, Tensor]]] = {}
        for slot, grad in getattr(self, which).items():
            direction_gradients = gradients.setdefault(slot.layer, {}).setdefault(slot.direction, {})
            if slot.cell is not None:
                grad = from_torch(slot.cell, slot.slot, grad).contiguous()
            direction_gradients[slot.key] = grad
        return gradients


class WeightGradientCapture:
    """Recorder of the gradients of recurrent weights while a model trains; of ``all_parameters`` only norms.

    Frozen weights, and weights computed from others, are left out.
    """

    def __init__(self, modules: Iterable[tuple[str, Any]], all_parameters: Iterable[nn.Parameter]) -> None:
        self.is_recording = False
        self._all_parameters = list(all_parameters)
        self._norms: dict[int, float] = {}
        self.slots: dict[int, WeightSlot] = {}
        self.parameters: dict[int, nn.Parameter] = {}
        self.backward_gradients: dict[int, Tensor] = {}  # of the last forward pass of the step
        #: Parameters with gradients of this step; ``.grad`` of others may be old.
        self.reached_parameters: set[int] = set()
        self._accumulated: dict[int, Tensor] = {}
        for path, module in modules:
            cell_and_activation = class_of(module)
            assert cell_and_activation is not None
            for layer, direction, weights in cell_weights(module):
                for slot, weight in weights.items():
                    if isinstance(weight, nn.Parameter) and weight.requires_grad:
                        name = node_name(path, module, layer)
                        self.slots.setdefault(id(weight), WeightSlot(name, direction, slot, cell_and_activation[0]))
                        self.parameters[id(weight)] = weight
        self._handles = [p.register_hook(self._gradient_hook(key)) for key, p in self.parameters.items()]

    def add_cell(self, path: str, cell: nn.Module) -> None:
        """Record the gradients of the weights of a user's own cell as well."""
        for name, weight in cell.named_parameters():
            if weight.requires_grad and id(weight) not in self.parameters:
                layer, _, key = f"{path}.{name}".rpartition(".")
                self.slots[id(weight)] = WeightSlot(layer, "forward", key, None)
                self.parameters[id(weight)] = weight
                self._handles.append(weight.register_hook(self._gradient_hook(id(weight))))

    def remove(self) -> None:
        """Remove the hooks and drop all records."""
        for handle in self._handles:
            handle.remove()
        self.reset()

    def reset(self) -> None:
        """Delete the records of a finished training step, so that its tensors can be freed."""
        self.backward_gradients, self._accumulated = {}, {}
        self.reached_parameters.clear()

    def is_fresh(self, module: nn.Module) -> bool:
        """Return whether a module has no accumulated gradient: each ``.grad`` is None, or the smallest is all zeros."""
        captured = (p for p in nn.Module.parameters(module) if id(p) in self.parameters)
        grads = [p.grad for p in captured if p.grad is not None]
        return not grads or not bool(min(grads, key=Tensor.numel).any())

    def record_accumulated(self) -> None:
        """Record the content of ``.grad`` after a backward pass, unless recording was switched off meanwhile."""
        if self.is_recording:
            self._accumulated, self._norms = self._current_gradients(), self._gradient_norms()

    def read(self, scale: float, applied_scale: float = 1.0) -> WeightGradients:
        """Return the gradients of the step, divided by the loss scale.

        ``applied_scale`` is the part of the loss scale that the optimizer's gradients still have.
        """
        return WeightGradients(
            self._by_slot(self.backward_gradients, scale),
            self._by_slot(self._accumulated, scale),
            self._by_slot(self._current_gradients(), applied_scale),
            {
                "grad_norm": {key: norm / scale for key, norm in self._norms.items()},
                "grad_norm_clipped": {key: norm / applied_scale for key, norm in self._gradient_norms().items()},
            },
        )

    def _gradient_norms(self) -> dict[int, float]:
        """Return the norm of ``.grad`` of every weight of the model, by the weight's id."""
        grads = {id(p): stored_values(p.grad.detach()) for p in self._all_parameters if p.grad is not None}
        widened = {key: grad.to(torch.promote_types(grad.dtype, torch.float32)) for key, grad in grads.items()}
        norms = [torch.linalg.vector_norm(grad).cpu().double() for grad in widened.values()]
        return dict(zip(grads, torch.stack(norms).tolist() if norms else [], strict=True))

    def _current_gradients(self) -> dict[int, Tensor]:
        grads = {key: self.parameters[key].grad for key in self.parameters if key in self.reached_parameters}
        return {key: grad.detach().clone() for key, grad in grads.items() if grad is not None}

    def _by_slot(self, grads: Mapping[int, Tensor], scale: float) -> dict[WeightSlot, Tensor]:
        return {self.slots[key]: unscale(grad, scale) for key, grad in grads.items()}

    def _gradient_hook(self, key: int) -> Any:
        def hook(grad: Tensor) -> None:
            if self.is_recording:
                self.reached_parameters.add(key)
                add_gradient(self.backward_gradients, key, grad)

        return hook


class TrainingCapture:
    """Recorder of torch's own recurrent layers and cells, and of the user's cells, of a model while it trains.

    Parameters
    ----------
    model
        Model to which hooks are added; :meth:`remove` removes them.
    layers
        Names of layers, or None for all.
    whole
        Whether to store the data of a replay: inputs, weights, the state of the random generator.
    failed
        Called with an exception of a hook, so that the user's training does not stop.

    Attributes
    ----------
    calls
        Calls that received a gradient since :meth:`reset`. A forward pass that is not differentiated, as in
        validation, is not included.
    last_backward_id
        Torch's number of the last backward pass that reached a recorded layer; :data:`NO_PASS` before the first.
    passes, has_earlier_gradients
        Number of backward passes accumulated in ``.grad``; whether ``.grad`` contained gradients from before this step.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[str] | None,
        *,
        whole: bool,
        failed: Callable[[Exception], None],
    ) -> None:
        self.model, self.whole, self._failed = unwrap(model), whole, failed
        self.calls: list[TrainingCall] = []
        self.forward_calls = self.evaluation_calls = self.calls_without_graph = self.calls_without_state = 0
        self.passes, self.has_earlier_gradients = 0, False
        self._call_count, self.last_backward_id = 0, NO_PASS
        #: Whether a backward pass of this step built a graph (``create_graph=True``), as a gradient penalty does.
        self.differentiates_gradients = False
        self._rng_states: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        self._loops = TrainingLoops()
        # A cell subclass with its own forward is left out: it may take its arguments in any order.
        self.modules = [
            (path, submodule)
            for path, submodule in recurrent_modules(self.model)
            if not (isinstance(submodule, nn.RNNCellBase) and has_own_forward(submodule))
        ]
        #: Modules that may be cells of the user's own, and those that proved to be, with their states.
        self.candidates = [
            (path, module)
            for path, module in cell_candidates(self.model)
            if not isinstance(module, torch.jit.ScriptModule)  # it takes no hooks
        ]
        self._proved: dict[nn.Module, dict[int, int]] = {}
        self._without_record: set[nn.Module] = set()
        known_paths = dict(self.modules)
        self._other_layers = [row.name for row in describe(self.model) if row.name.partition("[")[0] not in known_paths]
        if layers is not None:
            requested_paths = {name.partition("[")[0] for name in layers}
            self.modules = [(path, submodule) for path, submodule in self.modules if path in requested_paths]
            self.candidates = [(path, module) for path, module in self.candidates if path in requested_paths]
        self.weights = WeightGradientCapture(self.modules, nn.Module.parameters(self.model))
        for _, module in self.modules:
            if isinstance(module, nn.RNNBase):
                pre_hook = ModuleHook(module, self._store_rng_state, failed)
                self._handles.append(module.register_forward_pre_hook(pre_hook, prepend=True))
        for path, module in [*self.modules, *self.candidates]:
            forward_hook = ModuleHook(module, partial(self._record_call, path), failed)
            self._handles.append(module.register_forward_hook(forward_hook, with_kwargs=True))

    @property
    def unrecorded_layers(self) -> list[str]:
        """Names of recurrent layers that are not torch's own and have not proved to be cells."""
        proved = {path for path, module in self.candidates if module in self._proved}
        return [name for name in self._other_layers if name not in proved]

    @property
    def is_recording(self) -> bool:
        """Whether calls and gradients are recorded; if False, every hook returns at once."""
        return self.weights.is_recording

    @is_recording.setter
    def is_recording(self, value: bool) -> None:
        self.weights.is_recording = value

    def recorded_calls(self) -> tuple[list[TrainingCall], list[str]]:
        """Return the calls recorded since :meth:`forget`, in the order of the forward pass, and notes about them."""
        calls = [call for call in self.calls if call.module not in self._without_record]
        for call in calls:
            if call.own_cell is not None:
                RAN_AS_CELL[call.module] = True
                call.own_cell.states = call.own_cell.states or self._proved[call.module]
        return join_loops(sorted(calls, key=lambda call: call.number))

    def remove(self) -> None:
        """Remove every hook and drop all records."""
        for handle in self._handles:
            handle.remove()
        self.weights.remove()
        self.is_recording = False
        self.reset()

    def reset(self) -> None:
        """Delete the records of a finished training step, so that its tensors can be freed."""
        self.calls, self.passes, self.has_earlier_gradients = [], 0, False
        self.weights.reset()
        self.forward_calls = self.evaluation_calls = self.calls_without_graph = self.calls_without_state = 0
        self.differentiates_gradients = False

    def _store_rng_state(self, module: Any, args: Any) -> None:
        """Store the random state before a layer that draws dropout between its stacked layers, to replay the draws."""
        if self.is_recording and self.whole and module.training and module.dropout and module.num_layers > 1:
            self._rng_states[id(module)] = torch.get_rng_state()

    def _record_call(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self.is_recording:
            # A subclass that computes a step of its own is a cell of the user's.
            is_torch_cell = isinstance(module, nn.RNNCellBase) and class_of(module) is not None
            record = self._record_cell if is_torch_cell else self._record_own_cell
            if isinstance(module, nn.RNNBase):
                record = self._record_layer
            record(path, module, args, kwargs, output)

    def _is_training_call(self, returned: Iterable[Tensor]) -> bool:
        """Count a call, and return whether it belongs to training: model in training mode, output with a graph."""
        self.forward_calls += 1
        self.evaluation_calls += not self.model.training
        has_graph = any(tensor.requires_grad for tensor in returned)
        self.calls_without_graph += self.model.training and not has_graph
        return self.model.training and has_graph

    def _new_call(self, path: str, module: Any, returned: Sequence[Tensor]) -> TrainingCall:
        """Return the record of a new call, with the fields common to fused layers and loops of cells."""
        self._call_count += 1
        weights = {(layer, direction): weights for layer, direction, weights in cell_weights(module)}
        weights = detach_tensors(weights, copy=self.whole)
        output = returned[0]
        return TrainingCall(
            path,
            module,
            bool(module.training),
            weights,
            self._call_count,
            autocast_around(output),
            may_use_tf32(output),
        )

    def _record_cell(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        new_states = list(as_tuple(output))
        if not self._is_training_call(new_states):
            return
        named_arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        state = named_arguments.get("hx")
        arguments = named_arguments["input"], [] if state is None else list(as_tuple(state))
        loop = self._loops.step(module, arguments, new_states, lambda: self._new_call(path, module, new_states))
        if self.whole:
            loop.inputs.append(arguments[0].detach().clone())
        capture = weakref.ref(self)
        record_step_gradients(
            loop, arguments, new_states, lambda: (recorder := capture()) is not None and recorder.is_recording
        )
        for index, tensor in enumerate(new_states):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_hook(loop, (index, len(loop.steps) - 1)))

    def _record_own_cell(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        returned, has_proved = returned_tensors(output), module in self._proved
        if (has_proved or not self.model.training) and not self._is_training_call(returned):
            return
        self.calls_without_state += not has_proved
        if module in self._without_record or not self.model.training or not any(t.requires_grad for t in returned):
            return
        leaves, spec = tree_flatten((args, kwargs))
        if any(tensor is leaf for tensor in returned for leaf in leaves):
            return  # a state handed on unchanged: its gradient would be counted at both steps

        def new_call() -> TrainingCall:
            self._call_count += 1
            call = TrainingCall(
                path,
                module,
                module.training,
                {},
                self._call_count,
                autocast_around(returned[0]),
                may_use_tf32(returned[0]),
                own_cell=CellArguments(),
            )
            if has_proved:
                call.weights = self._weights_of(module)
            return call

        loop, states = self._loops.step_of_cell(module, (args, kwargs), returned, new_call)
        assert loop.own_cell is not None
        if states and not has_proved:
            self._prove(path, module, states)
        if states and not loop.own_cell.states:
            loop.own_cell.states = states
            loop.own_cell.fields = state_fields((args, kwargs), sorted(states))
            if not loop.weights:
                loop.own_cell.copy_tensors()
                loop.weights = self._weights_of(module)
        if self.whole:
            loop.own_cell.add(leaves, spec, states, copied=bool(loop.weights))
        fed = {index: leaves[position] for position, index in states.items()}
        inputs = [leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in states]
        capture = weakref.ref(self)
        record_inner_gradients(
            loop, inputs, fed, returned, lambda: (recorder := capture()) is not None and recorder._records(loop)
        )
        for index, tensor in enumerate(returned):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_hook(loop, (index, len(loop.steps) - 1)))

    def _prove(self, path: str, module: nn.Module, states: dict[int, int]) -> None:
        """Note that a module is a cell; of the modules that contain it nothing is recorded."""
        self._proved[module] = states
        self._without_record |= {
            other for _, other in self.candidates if other is not module and module in set(other.modules())
        }
        self.weights.add_cell(path, module)

    def _weights_of(self, cell: nn.Module) -> dict[tuple[int, str], dict[str, Tensor]]:
        tensors = {**dict(cell.named_parameters()), **dict(cell.named_buffers())}
        return {(0, "forward"): detach_tensors(tensors, copy=self.whole)}

    def _records(self, call: TrainingCall) -> bool:
        """Return whether the gradients of a call are recorded: not those of a module that is no cell."""
        return self.is_recording and (call.own_cell is None or call.module in self._proved)

    def _record_layer(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        rng_state = self._rng_states.pop(id(module), None)
        if not isinstance(output, tuple) or len(output) != 2:
            return  # a subclass whose own forward returns something else
        output_value, final_states = output
        tensors = [
            output_value.data if isinstance(output_value, PackedSequence) else output_value,
            *as_tuple(final_states),
        ]
        if not self._is_training_call(tensors):
            return
        arguments = _kernel_arguments(module, args, kwargs)
        if rng_state is None and is_single_step(module, arguments[0]):
            states = [] if len(arguments) == 1 else list(as_tuple(arguments[1]))
            inputs = arguments[0], states
            call = self._loops.step(module, inputs, tensors[1:], lambda: self._new_call(path, module, tensors))
            call.steps[-1] = [tensor.detach() for tensor in tensors]
            if self.whole:
                call.inputs.append(arguments[0].detach().clone())
            capture = weakref.ref(self)
            record_step_gradients(
                call, inputs, tensors, lambda: (recorder := capture()) is not None and recorder.is_recording
            )
        else:
            call = self._new_call(path, module, tensors)
            call.steps, call.rng_state = [[tensor.detach() for tensor in tensors]], rng_state
            call.packed = output_value if isinstance(output_value, PackedSequence) else None
        if self.whole and len(call.steps) == 1:
            call.args = detach_tensors(arguments, copy=True)
        for index, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_hook(call, (index, len(call.steps) - 1)))

    def _gradient_hook(self, call: TrainingCall, tensor_and_step: tuple[int, int]) -> Any:
        # Only the tensor hook refers to the call: without a backward pass the call is freed with the graph.
        capture = weakref.ref(self)

        def hook(grad: Tensor | None) -> None:
            recorder = capture()
            # None: only another returned tensor of this call has a gradient.
            if grad is None or recorder is None or not recorder._records(call):
                return
            if torch.is_grad_enabled():  # within a backward pass with create_graph=True
                recorder.differentiates_gradients = True
                return
            try:
                recorder._add_gradient(call, tensor_and_step, grad)
            except Exception as error:
                recorder._failed(error)

        return hook

    def _add_gradient(self, call: TrainingCall, tensor_and_step: tuple[int, int], grad: Tensor) -> None:
        backward_id = torch._C._current_graph_task_id()
        if backward_id != self.last_backward_id:
            self._begin_backward(backward_id, call)
        if call not in self.calls:
            self.calls.append(call)
        call.backward_ids.add(backward_id)
        add_gradient(call.grads, tensor_and_step, grad)

    def _begin_backward(self, backward_id: int, call: TrainingCall) -> None:
        """Start recording the gradients of a backward pass when its first gradient reaches a recorded layer.

        A training step may have several backward passes.
        """
        self.last_backward_id = backward_id
        is_fresh = self.weights.is_fresh(call.module)
        self.has_earlier_gradients = not is_fresh if not self.passes else self.has_earlier_gradients and not is_fresh
        self.passes = 1 if is_fresh else self.passes + 1
        if is_fresh:
            self.weights.reached_parameters.clear()
        if self.calls and call not in self.calls and call.number > self.calls[-1].number:
            self.calls = []
            self.weights.backward_gradients = {}
        # Queue twice, to run after the callbacks in which distributed training averages gradients.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self.weights.record_accumulated))


def _kernel_arguments(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the input and the initial states, if given, of a call of a torch recurrent layer or of its subclass.

    The forward of a subclass may take more; whether it computes what torch's layer does is seen when the call is
    repeated.
    """
    arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    (_, x), *others = arguments.items()
    state = next((value for name, value in others if is_state_name(name) and value is not None), None)
    return (x,) if state is None else (x, state)


def stored_values(grad: Tensor) -> Tensor:
    """Return the values of a gradient; for a sparse one, as of embeddings, those of its stored rows."""
    return grad.coalesce().values() if grad.is_sparse else grad
