"""When an optimizer steps, given or found, and the scale on the gradients that it is given."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...adapters.torch.training_capture import TrainingCapture
from ...errors import InputError, UnsupportedError, message

#: How far above the hook of an optimizer its GradScaler may be found on the stack.
_DEPTH = 12


class Steps:
    """Tells of the steps of a training: before the weights move, and after.

    One optimizer counts: the first that was given; else the first to step that holds weights of a recurrent layer, or
    of anything else in the model where none does. The others are looked at for the gradients that they are given.

    Parameters
    ----------
    model, heard
        Whose optimizers are meant, and the ids of the weights of its recurrent layers.
    optimizers
        As the user gave them; empty to find them as they step.
    before, after
        Called with the scale on the gradients at the start of every step, and after every step that counts.
    """

    def __init__(
        self,
        model: nn.Module,
        heard: Collection[int],
        optimizers: Iterable[Any],
        *,
        before: Callable[[torch.optim.Optimizer, float], None],
        after: Callable[[], None],
    ) -> None:
        self._own, self._heard = {id(p) for p in model.parameters()}, frozenset(heard)
        self._before, self._after = before, after
        self._known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self.counting: Any = None
        self._passed = False
        self.counted = False
        #: Whether the step that begins runs the batch itself, by a closure.
        self.runs_batch = False
        given = [_plain(optimizer) for optimizer in optimizers]
        for optimizer in given:
            self._listen(optimizer)
        self.counting = weakref.ref(given[0]) if given else None
        if not given:
            self._handles.append(register_optimizer_step_pre_hook(self._found))

    def remove(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def moved(self) -> frozenset[int] | None:
        """Ids of the weights that the optimizer that counts holds; None where there is none."""
        counting = None if self.counting is None else self.counting()
        return None if counting is None else frozenset(weights_in(counting))

    def _found(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Some optimizer of the process steps: listen to it if it moves weights of the model."""
        if optimizer in self._known:
            return
        theirs = weights_in(optimizer)
        if not theirs & self._own:
            self._known[optimizer] = False
            return
        self._listen(optimizer)
        counting = None if self.counting is None else self.counting()
        better = theirs & self._heard and not (counting is not None and self._known.get(counting))
        if counting is None or better:
            self.counting = weakref.ref(optimizer)
            self._passed = counting is not None  # this step was counted already, by the one before it
        self._known[optimizer] = bool(theirs & self._heard)

    def _listen(self, optimizer: Any) -> None:
        self._known[optimizer] = True
        self._handles.append(optimizer.register_step_pre_hook(self._begins))
        self._handles.append(optimizer.register_step_post_hook(self._ended))

    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # The optimizer itself is the first of the arguments that its hooks are told.
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
    """Ids of the weights that an optimizer holds."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def steps_taken(optimizers: Iterable[Any]) -> int:
    """How many steps optimizers have taken, as far as they keep count, as Adam does."""
    states = (state for optimizer in optimizers for state in _plain(optimizer).state.values())
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def applied_scale(optimizer: Any) -> float:
    """The scale that ``.grad`` still carries when an optimizer is given it: fused ones divide it out themselves."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def scaler_on_stack() -> Any:
    """Return the GradScaler that called the optimizer's step, if one did.

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
    """The torch optimizer inside the wrappers of Lightning and Accelerate."""
    while not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__name__ == "AcceleratedOptimizer":
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise InputError(
                message(
                    "optimizer= holds what is no optimizer.",
                    got=type(optimizer).__name__,
                    expected="a torch.optim.Optimizer, a list of them, or None to find them as they step",
                    hint="a loop without one tells its steps by watch.step()",
                )
            )
        optimizer = inner
    return optimizer


NO_STEP = "no optimizer that holds weights of the model has stepped; watch.step() tells the steps of other loops"


def why_unheard(listener: TrainingCapture) -> str:
    """Why no gradient of a recurrent layer was heard in a batch that was due."""
    names = ", ".join(path for path, _ in listener.heard)
    if listener.differentiates_gradients:
        return (
            "the step differentiates a gradient again (create_graph=True, as a gradient penalty does), so that what "
            f"arrives at {names} is no gradient of the loss alone; a probe can be followed"
        )
    if listener.forwards == 0:
        return f"{names} did not run in Python in the batches that were due"
    if listener.evaluations == listener.forwards:
        return "the model was in evaluation mode, as in a validation: model.train()"
    if listener.without_graph:
        return f"what {names} returned needs no gradient (torch.no_grad, or frozen weights and inputs)"
    return f"no gradient arrived at {names}: no path leads there from what was differentiated"


def refuse_unheard(listener: TrainingCapture) -> None:
    """Raise if there is nothing among the layers watched that batch mode can hear."""
    if not listener.heard:
        raise UnsupportedError(
            message(
                "Batch mode hears nn.RNN, nn.LSTM, nn.GRU and their cells, and there is none among the layers watched.",
                got=", ".join(listener.others) or "no recurrent layer of torch's own",
                hint="a probe shows every layer: rl.torch.watch(model, path, probe=(x, y), loss=loss)",
            )
        )
