"""``on_nonfinite="report"`` in torch: loss and gradients are tested before every update of the weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...adapters.protocol import Batch
from ...adapters.registry import adapter_for
from ...adapters.shared import hook_in_this_thread
from ...adapters.torch.training_capture import ModuleHook, entries
from ...verbs.find_nonfinite import find_nonfinite
from ..incidents import Incidents, is_finite, told


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
        self._handle = model.register_forward_pre_hook(
            ModuleHook(model, hook_in_this_thread(self._remember), _ignore), with_kwargs=True
        )

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
        return self.incidents.written is None

    def check(self, when: Mapping[str, Any], reported: Any, target: Any) -> None:
        """Test loss and gradients before the weights change; write the batch if one is not finite.

        ``reported`` is the input as a trainer reports it, used if only a submodule of the model is called.
        """
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


def _ignore(error: Exception) -> None:
    """Do nothing: the report then lacks the input."""
