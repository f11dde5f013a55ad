"""One step of a copy of the user's optimizer on copies of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ...errors import InputError, UnsupportedError, short_repr
from ...typing import Array
from ..protocol import WeightChange
from .discover import unwrap
from .losses import host_array


def optimizer_step(
    model: nn.Module, optimizer: Any, gradients: Mapping[str, Array | None]
) -> Mapping[str, WeightChange] | None:
    """Step a copy of the optimizer on copies of its weights: see :meth:`.protocol.ModelFacts.optimizer_step`."""
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        expected = "a torch.optim.Optimizer of the model's parameters"
        raise InputError("optimizer= is no optimizer of torch.", got=short_repr(optimizer), expected=expected)
    copied_optimizer = deepcopy(optimizer)  # a copy of its weights and of their moments
    pairs = zip(_weights_in(optimizer), _weights_in(copied_optimizer), strict=True)
    copy_by_id = {id(weight): copied_weight for weight, copied_weight in pairs}
    for copied_weight in copy_by_id.values():
        copied_weight.grad = None
    trained = {name: p for name, p in unwrap(model).named_parameters() if p.requires_grad}
    for name, weight in trained.items():
        gradient = gradients.get(name)
        if id(weight) in copy_by_id and gradient is not None:
            copy_by_id[id(weight)].grad = torch.as_tensor(gradient).to(weight)
    before = {name: host_array(weight).copy() for name, weight in trained.items()}
    try:
        copied_optimizer.step()
    except Exception as error:  # an optimizer that evaluates the loss itself
        hint = "leave optimizer= out"
        got = f"{type(optimizer).__name__}: {error}"
        raise UnsupportedError("This optimizer takes no step from given gradients.", got=got, hint=hint) from error
    return {
        name: WeightChange(before[name], host_array(copy_by_id[id(weight)]) if id(weight) in copy_by_id else None)
        for name, weight in trained.items()
    }


def _weights_in(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]
