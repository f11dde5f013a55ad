"""Optimizer steps in torch: their detection, the loss scale, and the test of gradients before each update."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...adapters.protocol import Batch
from ...adapters.registry import adapter_for
from ...adapters.shared import hook_in_this_thread
from ...adapters.torch.training_capture import ModuleHook, TrainingCapture, entries
from ...errors import InputError, has_attribute
from ...verbs.find_nonfinite import find_nonfinite
from ..alerts import Incidents, is_finite, told

#: Number of stack frames above an optimizer's hook in which its GradScaler is searched.
_DEPTH = 12

#: Wrappers around an optimizer, such as those of Lightning and Accelerate, that are looked into.
_WRAPPERS = 8


class Steps:
    """Hooks on optimizers, which call a function before the weights change and another one after.

    One optimizer counts the steps of training: the first one given; otherwise the first to step that has weights of a
    recurrent layer (``recurrent``: their ids), or of any other layer as long as there is none. Steps of the others only
    call ``before``, with the optimizer and the scale of its gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        recurrent: Collection[int],
        optimizers: Iterable[Any],
        *,
        before: Callable[[torch.optim.Optimizer, float], None],
        after: Callable[[], None],
    ) -> None:
        self._own, self._recurrent = {id(p) for p in model.parameters()}, frozenset(recurrent)
        self._before, self._after = before, after
        self._known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self.counting: Any = None
        self._passed = False
        self.counted = False
        #: True if the current step runs the batch itself, in a closure.
        self.runs_batch = False
        given = [_plain(optimizer) for optimizer in optimizers]
        for optimizer in given:
            self._add_hooks(optimizer)
        self.counting = weakref.ref(given[0]) if given else None
        if not given:
            self._handles.append(register_optimizer_step_pre_hook(self._follow_new))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def moved(self) -> frozenset[int] | None:
        """Ids of the weights of the optimizer whose steps are counted; None before its first step."""
        counting = None if self.counting is None else self.counting()
        return None if counting is None else frozenset(weights_in(counting))

    def _follow_new(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Add hooks to an optimizer at its first step if it has weights of the model."""
        if optimizer in self._known:
            return
        weights = weights_in(optimizer)
        if not weights & self._own:
            self._known[optimizer] = False
            return
        self._add_hooks(optimizer)
        counting = None if self.counting is None else self.counting()
        better = weights & self._recurrent and not (counting is not None and self._known.get(counting))
        if counting is None or better:
            self.counting = weakref.ref(optimizer)
            self._passed = counting is not None  # the previous counting optimizer has counted this step
        self._known[optimizer] = bool(weights & self._recurrent)

    def _add_hooks(self, optimizer: Any) -> None:
        self._known[optimizer] = True
        self._handles.append(optimizer.register_step_pre_hook(self._begins))
        self._handles.append(optimizer.register_step_post_hook(self._ended))

    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # The optimizer itself is the first argument passed to its hooks.
        given = [one for one in (*args, *kwargs.values()) if one is not optimizer and one is not None]
        self.runs_batch = any(map(callable, given))
        self._before(optimizer, applied_scale(optimizer))

    def _ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.counting is not None and self.counting() is optimizer:
            self.counted = True
            if self._passed:
                self._passed = False
                return
            self._after()


def weights_in(optimizer: Any) -> set[int]:
    """Return the ids of the weights of an optimizer."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def steps_taken(optimizers: Iterable[Any]) -> int:
    """Return the number of steps that optimizers have taken, from their state (as in Adam); 0 if not stored."""
    states = (state for optimizer in optimizers for state in _plain(optimizer).state.values())
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


def _plain(optimizer: Any) -> Any:
    """Return the torch optimizer inside the wrappers of Lightning and Accelerate."""
    given = type(optimizer).__name__
    for _ in range(_WRAPPERS):
        if isinstance(optimizer, torch.optim.Optimizer) and type(optimizer).__name__ != "AcceleratedOptimizer":
            return optimizer
        if not has_attribute(optimizer, "optimizer"):
            break
        optimizer = optimizer.optimizer
    raise InputError(
        "optimizer= contains an object that is not an optimizer.",
        got=given,
        expected="a torch.optim.Optimizer, a list of them, or None to find them as they step",
        hint="in a loop without an optimizer call watch.step()",
    )


NO_STEP = "no optimizer with weights of the model has stepped; call watch.step() in loops without an optimizer"


def why_not_captured(capture: TrainingCapture) -> str:
    """Return the reason why no gradient of a recurrent layer was captured in a batch that was due."""
    names = ", ".join(path for path, _ in capture.modules)
    if capture.differentiates_gradients:
        return (
            "the step differentiates a gradient again (create_graph=True, as a gradient penalty does), so the "
            f"gradient at {names} is not that of the loss alone; use a probe instead"
        )
    if capture.forwards == 0:
        return f"{names} did not run in Python in the batches that were due"
    if capture.evaluations == capture.forwards:
        return "the model was in evaluation mode, as in a validation: model.train()"
    if capture.without_graph:
        return f"the output of {names} does not require a gradient (torch.no_grad, or frozen weights and inputs)"
    return f"{names} got no gradient: the differentiated loss does not depend on it"


class NonfiniteCheck:
    """Test for non-finite loss or gradients; the first such batch is written with the weights.

    With ``loss(output, target)`` and the target, faults that begin in the loss are located. ``own_loss(output)`` is the
    loss of models that compute it themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | str | None,
        incidents: Incidents,
        own_loss: Callable[..., Any] | None = None,
    ) -> None:
        self._model, self._loss, self._own_loss, self.incidents = model, loss, own_loss, incidents
        self._input: Any = None
        # Without the input after a failure, the report lacks it.
        hook = ModuleHook(model, hook_in_this_thread(self._remember), failed=lambda error: None)
        self._handle = model.register_forward_pre_hook(hook, with_kwargs=True)

    def remove(self) -> None:
        """Remove the hook and the stored input."""
        self._handle.remove()
        self._input = None

    def _remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
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

    def check(self, when: Mapping[str, Any], reported: Any, target: Any) -> None:
        """Test loss and gradients before the weights change; write the batch if one is not finite."""
        if not self.is_active:
            return
        x, self._input = reported if self._input is None else self._input, None
        if is_finite(when.get("loss")) and self._gradients_are_finite():
            return
        weights = {name: value.detach().cpu() for name, value in self._model.state_dict().items()}
        found = told(lambda: self._sentence(x, target))
        self.incidents.report(Batch(x, target), weights, {**when, "found": found})

    def _gradients_are_finite(self) -> bool:
        """Return whether all gradients are finite. Their sum is tested first, with one device synchronisation."""
        grads = [entries(p.grad.detach()) for p in self._model.parameters() if p.grad is not None]
        sums = [grad.float().sum() for grad in grads]
        whole = torch.stack([s.to(sums[0].device) for s in sums]).sum() if sums else torch.zeros(())
        if bool(torch.isfinite(whole)):
            return True
        # The sum may overflow although all gradients are finite.
        return all(bool(torch.isfinite(grad).all()) for grad in grads)

    def _sentence(self, x: Any, target: Any) -> str:
        adapter_for(self._model)
        if x is None:
            return "the model itself was not called, so its input was not recorded"
        loss = self._own_loss if target is None else self._loss
        found = find_nonfinite(self._model, x, None if loss is None else target, loss=loss, training=True)
        if not found and loss is None:
            return "in the loss or after it: set watch.target and pass loss= to the watch to locate it"
        return found.sentence
