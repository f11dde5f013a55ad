"""Optimizer steps in torch: their detection, the loss scale, the weights before and after.

Also the test of gradients before each update.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...adapters.protocol import Batch
from ...adapters.registry import adapter_for
from ...adapters.shared import hook_in_this_thread
from ...adapters.torch.losses import host_array
from ...adapters.torch.training_capture import ModuleHook, TrainingCapture, stored_values
from ...errors import InputError, has_attribute
from ...verbs.find_nonfinite import find_nonfinite
from ..alerts import Incidents, is_finite, text_or_error
from ..weight_updates import update_scalars

#: Number of stack frames above an optimizer's hook in which its GradScaler is searched.
_DEPTH = 12

#: Wrappers around an optimizer, such as those of Lightning and Accelerate, that are looked into.
_WRAPPERS = 8


class Steps:
    """Hooks on optimizers, which call a function before the weights change and another one after.

    One optimizer counts the steps of training: the first one given; otherwise the first to step that has weights of a
    recurrent layer (``recurrent_weights``: their ids), or of any other layer as long as there is none. Steps of the
    others only call ``before_step``, with the optimizer and the scale of its gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        recurrent_weights: Collection[int],
        optimizers: Iterable[Any],
        *,
        before_step: Callable[[torch.optim.Optimizer, float], None],
        after_step: Callable[[], None],
    ) -> None:
        self._model_weights, self._recurrent_weights = (
            {id(p) for p in nn.Module.parameters(model)},
            frozenset(recurrent_weights),
        )
        self._before_step, self._after_step = before_step, after_step
        self._seen_optimizers: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self.counting_optimizer: Any = None
        self._step_is_counted = False
        self.has_counted = False
        #: True if the current step runs the batch itself, in a closure.
        self.runs_batch = False
        torch_optimizers = [_unwrap_optimizer(optimizer) for optimizer in optimizers]
        for optimizer in torch_optimizers:
            self._add_hooks(optimizer)
        self.counting_optimizer = weakref.ref(torch_optimizers[0]) if torch_optimizers else None
        if not torch_optimizers:
            self._handles.append(register_optimizer_step_pre_hook(self._follow_new))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def counted_weights(self) -> frozenset[int] | None:
        """Ids of the weights of the optimizer whose steps are counted; None before its first step."""
        counting_optimizer = None if self.counting_optimizer is None else self.counting_optimizer()
        return None if counting_optimizer is None else frozenset(weights_in(counting_optimizer))

    def is_counting(self, optimizer: Any) -> bool:
        """Return whether the steps of this optimizer are those that count."""
        return self.counting_optimizer is not None and self.counting_optimizer() is optimizer

    @property
    def known_weights(self) -> frozenset[int]:
        """Ids of the weights of all optimizers that were given or have stepped."""
        return frozenset(weight for optimizer in [*self._seen_optimizers] for weight in weights_in(optimizer))

    def _follow_new(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Add hooks to an optimizer at its first step if it has weights of the model."""
        if optimizer in self._seen_optimizers:
            return
        weights = weights_in(optimizer)
        if not weights & self._model_weights:
            self._seen_optimizers[optimizer] = False
            return
        self._add_hooks(optimizer)
        counting_optimizer = None if self.counting_optimizer is None else self.counting_optimizer()
        is_preferred = weights & self._recurrent_weights and not (
            counting_optimizer is not None and self._seen_optimizers.get(counting_optimizer)
        )
        if counting_optimizer is None or is_preferred:
            self.counting_optimizer = weakref.ref(optimizer)
            # The previous counting optimizer has counted this step.
            self._step_is_counted = counting_optimizer is not None
        self._seen_optimizers[optimizer] = bool(weights & self._recurrent_weights)

    def _add_hooks(self, optimizer: Any) -> None:
        self._seen_optimizers[optimizer] = True
        self._handles.append(optimizer.register_step_pre_hook(self._on_step_begin))
        self._handles.append(optimizer.register_step_post_hook(self._on_step_end))

    def _on_step_begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # The optimizer itself is the first argument passed to its hooks.
        arguments = [
            argument for argument in (*args, *kwargs.values()) if argument is not optimizer and argument is not None
        ]
        self.runs_batch = any(map(callable, arguments))
        self._before_step(optimizer, applied_scale(optimizer))

    def _on_step_end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_counting(optimizer):
            self.has_counted = True
            if self._step_is_counted:
                self._step_is_counted = False
                return
            self._after_step()


def weights_in(optimizer: Any) -> set[int]:
    """Return the ids of the weights of an optimizer."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def steps_taken(optimizers: Iterable[Any]) -> int:
    """Return the number of steps that optimizers have taken, from their state (as in Adam); 0 if not stored."""
    states = (state for optimizer in optimizers for state in _unwrap_optimizer(optimizer).state.values())
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def applied_scale(optimizer: Any) -> float:
    """Return the loss scale still contained in ``.grad`` at ``step``, which fused optimizers divide out; else 1."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def scaler_on_stack() -> Any:
    """Return the GradScaler that called the optimizer's step; None without one.

    Only the locals of a GradScaler's own step are read: reading those of a user's function would keep them alive.
    """
    codes = {torch.amp.GradScaler.step.__code__, torch.amp.GradScaler._maybe_opt_step.__code__}
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            return None
        if frame.f_code in codes:
            return frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _unwrap_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside the wrappers of Lightning and Accelerate."""
    type_name = type(optimizer).__name__
    for _ in range(_WRAPPERS):
        if isinstance(optimizer, torch.optim.Optimizer) and type(optimizer).__name__ != "AcceleratedOptimizer":
            return optimizer
        if not has_attribute(optimizer, "optimizer"):
            break
        optimizer = optimizer.optimizer
    raise InputError(
        "optimizer= contains an object that is not an optimizer.",
        got=type_name,
        expected="a torch.optim.Optimizer, a list of them, or None to find them as they step",
        hint="in a loop without an optimizer call watch.step()",
    )


NO_STEP = "no optimizer with weights of the model has stepped; call watch.step() in loops without an optimizer"


def uncaptured_reason(capture: TrainingCapture) -> str:
    """Return the reason why no gradient of a recurrent layer was captured in a batch that was due."""
    names = ", ".join(path for path, _ in capture.modules or capture.candidates)
    if capture.differentiates_gradients:
        return (
            "the step differentiates a gradient again (create_graph=True, as a gradient penalty does), so the "
            f"gradient at {names} is not that of the loss alone; use a probe instead"
        )
    if capture.calls_without_state and capture.evaluation_calls == capture.forward_calls:
        return (
            f"no call of {names} in training mode got, as its state, the very tensor that the call before returned; a "
            "probe records it"
        )
    if capture.forward_calls == 0:
        return (
            f"no hook of {names} ran in the batches that were due: the layer did not run, ran in compiled code, or "
            "its forward was called by name (module.forward(x), not module(x)); a probe records it"
        )
    if capture.evaluation_calls == capture.forward_calls:
        return "the model was in evaluation mode, as in a validation: model.train()"
    if capture.calls_without_graph:
        return f"the output of {names} does not require a gradient (torch.no_grad, or frozen weights and inputs)"
    return f"{names} got no gradient: the differentiated loss does not depend on it"


class NonfiniteCheck:
    """Test for non-finite loss or gradients; the first such batch is written with the weights.

    With ``loss(output, target)`` and the target, faults that begin in the loss are located. ``model_loss(output)`` is
    the loss of models that compute it themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | str | None,
        incidents: Incidents,
        model_loss: Callable[..., Any] | None = None,
    ) -> None:
        self._model, self._loss, self._model_loss, self.incidents = model, loss, model_loss, incidents
        self._input: Any = None
        # Without the input after a failure, the report lacks it.
        hook = ModuleHook(model, hook_in_this_thread(self._store_input), failed=lambda error: None)
        self._handle = model.register_forward_pre_hook(hook, with_kwargs=True)

    def remove(self) -> None:
        """Remove the hook and the stored input."""
        self._handle.remove()
        self._input = None

    def _store_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if module.training:
            self._input = None  # remains None if the signature of forward cannot be read
            if kwargs:
                self._input = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
            else:
                self._input = args[0] if len(args) == 1 else tuple(args)

    @property
    def is_active(self) -> bool:
        """True until an incident was written."""
        return self.incidents.written_path is None

    def check(self, step_info: Mapping[str, Any], reported_input: Any, target: Any) -> None:
        """Test loss and gradients before the weights change; write the batch if one is not finite."""
        if not self.is_active:
            return
        x, self._input = reported_input if self._input is None else self._input, None
        if is_finite(step_info.get("loss")) and self._gradients_are_finite():
            return
        weights = {name: value.detach().cpu() for name, value in self._model.state_dict().items()}
        sentence = text_or_error(lambda: self._origin_sentence(x, target))
        self.incidents.report(Batch(x, target), weights, {**step_info, "found": sentence})

    def _gradients_are_finite(self) -> bool:
        """Return whether all gradients are finite. Their sum is tested first, with one device synchronisation."""
        gradients = [stored_values(p.grad.detach()) for p in nn.Module.parameters(self._model) if p.grad is not None]
        sums = [gradient.float().sum() for gradient in gradients]
        total = torch.stack([partial_sum.to(sums[0].device) for partial_sum in sums]).sum() if sums else torch.zeros(())
        if bool(torch.isfinite(total)):
            return True
        # The sum may overflow although all gradients are finite.
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)

    def _origin_sentence(self, x: Any, target: Any) -> str:
        adapter_for(self._model)
        if x is None:
            return "the model itself was not called, so its input was not recorded"
        loss = self._model_loss if target is None else self._loss
        nonfinite = find_nonfinite(self._model, x, None if loss is None else target, loss=loss, training=True)
        if not nonfinite and loss is None:
            return "in the loss or after it: set watch.target and pass loss= to the watch to locate it"
        return nonfinite.sentence


class StepOfWeights:
    """Copies of the weights of one optimizer in host memory before its step, and the norms of their gradients.

    ``applied_scale`` is the loss scale that the gradients still have. ``known_weights``: ids of the weights of all
    optimizers; trained weights that none of them has are compared too. None leaves these out. ``runs_batch``: the step
    computes the gradients itself, in a closure, so that they are there after it only.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        applied_scale: float,
        known_weights: Collection[int] | None,
        *,
        runs_batch: bool,
    ) -> None:
        own = weights_in(optimizer)
        self._weights = {
            name: weight
            for name, weight in model.named_parameters()
            if weight.requires_grad
            and not isinstance(weight, nn.parameter.UninitializedParameter)
            and (id(weight) in own or (known_weights is not None and id(weight) not in known_weights))
        }
        self._left_out = [name for name, weight in self._weights.items() if id(weight) not in own]
        self._before = {name: host_array(weight).copy() for name, weight in self._weights.items()}
        self._applied_scale = applied_scale
        self._gradient_norms = None if runs_batch else self._norms_of_gradients()

    def _norms_of_gradients(self) -> dict[str, float]:
        return {name: _norm(weight.grad) / self._applied_scale for name, weight in self._weights.items()}

    def scalars(self) -> dict[str, float]:
        """Return the scalars of the step, from the weights as they are now."""
        after = {name: host_array(weight) for name, weight in self._weights.items()}
        gradient_norms = self._norms_of_gradients() if self._gradient_norms is None else self._gradient_norms
        return update_scalars(self._before, after, gradient_norms, self._left_out)


def _norm(gradient: Tensor | None) -> float:
    """Return the norm of a gradient; 0 for a missing one."""
    return 0.0 if gradient is None else float(torch.linalg.vector_norm(stored_values(gradient).detach()))
