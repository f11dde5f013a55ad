"""``on_nonfinite="report"`` in torch: every step is looked at before its weights move, until one is not finite."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...adapters.protocol import Batch
from ...adapters.registry import adapter_for
from ...adapters.shared.threads import hook_in_this_thread
from ...adapters.torch.training_capture import ModuleHook
from ...adapters.torch.training_weights import entries
from ...verbs.find_nonfinite import find_nonfinite
from ..incidents import Incidents, is_finite, told


class Lookout:
    """Remembers what the model was fed last; writes it with the weights when loss or gradients are not finite.

    Parameters
    ----------
    model
        The plain module.
    loss
        ``loss(output, target)``, where it is known: with the target it says where in the loss a fault begins.
    incidents
        Where it is written.
    own_loss
        ``own_loss(output)``, the loss among what the model itself returns, if it does.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | str | None,
        incidents: Incidents,
        own_loss: Callable[..., Any] | None = None,
    ) -> None:
        self._model, self._loss, self._own_loss, self.incidents = model, loss, own_loss, incidents
        self._fed: Any = None
        self._handle = model.register_forward_pre_hook(
            ModuleHook(model, hook_in_this_thread(self._remember), _ignore), with_kwargs=True
        )

    def remove(self) -> None:
        """Take the hook away."""
        self._handle.remove()
        self._fed = None

    def _remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if module.training:
            self._fed = None  # stays so where the signature of the forward cannot be read
            self._fed = _as_given(module, args, kwargs)

    @property
    def looks(self) -> bool:
        """Whether no step was written yet."""
        return self.incidents.written is None

    def look(self, when: Mapping[str, Any], given: Any, target: Any) -> None:
        """A step begins, of ``step``, ``epoch`` and ``loss``; the weights have not moved yet.

        ``given`` is the input that a trainer tells, where the model itself is not called: only a part of it is.
        """
        if not self.looks:
            return
        fed, self._fed = given if self._fed is None else self._fed, None
        if is_finite(when.get("loss")) and self._gradients_are_finite():
            return
        weights = {name: value.detach().cpu() for name, value in self._model.state_dict().items()}
        found = told(lambda: self._sentence(fed, target))
        self.incidents.report(Batch(fed, target), weights, {**when, "found": found})

    def _gradients_are_finite(self) -> bool:
        """One number of all gradients, so that a device is asked once."""
        grads = [entries(p.grad.detach()) for p in self._model.parameters() if p.grad is not None]
        sums = [grad.float().sum() for grad in grads]
        whole = torch.stack([s.to(sums[0].device) for s in sums]).sum() if sums else torch.zeros(())
        if bool(torch.isfinite(whole)):
            return True
        # A sum overflows before its parts do.
        return all(bool(torch.isfinite(grad).all()) for grad in grads)

    def _sentence(self, fed: Any, target: Any) -> str:
        adapter_for(self._model)
        if fed is None:
            return "the model itself was not called, so that what it was fed is not known"
        loss = self._own_loss if target is None else self._loss
        found = find_nonfinite(self._model, fed, None if loss is None else target, loss=loss, training=True)
        if not found and loss is None:
            return "in the loss or behind it: set watch.target, and give the watch its loss, to be told where"
        return found.sentence


def _as_given(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the model was called with, as verbs take it: one argument, a tuple of them, or a dict by name."""
    if kwargs:
        return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    return args[0] if len(args) == 1 else tuple(args)


def _ignore(error: Exception) -> None:
    """Do nothing: the report then lacks the input."""
