"""``StepOfWeights``: the weights of a torch model before one step of the optimizer, and their change by it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ...adapters.torch.losses import host_array
from ...adapters.torch.training_capture import stored_values
from ..weight_updates import update_scalars
from .steps import weights_in


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
