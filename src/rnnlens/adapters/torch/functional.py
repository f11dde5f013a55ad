"""A user's function of tensors, differentiated by itself, outside of any model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import InputError, message, raised_by
from ...typing import Array
from .inputs import home_of

#: Takes a cotangent of the function's value back to one cotangent per argument.
Pull = Callable[[Array], list[Array]]


def differentiate(function: Callable[..., Any], arrays: Sequence[Array], model: torch.nn.Module) -> tuple[Array, Pull]:
    """Value of ``function(*tensors)`` on the model's device, and its pull-back.

    Raises
    ------
    InputError
        If the function does not return a tensor of floats that depends on what it was given.
    """
    device, _ = home_of(model)
    with torch.inference_mode(False), torch.enable_grad():
        tensors = [torch.tensor(np.asarray(a), device=device, requires_grad=True) for a in arrays]
        with raised_by("Your function"):
            value = function(*tensors)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise InputError(
            message(
                "The function must return one tensor of floats, made with the framework's own operations.",
                got=f"{type(value).__name__}",
                expected="a torch.Tensor, such as output.mean()",
            )
        )

    def pull(cotangent: Array) -> list[Array]:
        if not value.requires_grad:
            raise InputError(
                message(
                    "The function's value does not depend on its tensors in a way that can be differentiated.",
                    hint="use the framework's own differentiable operations: no NumPy, no argmax, no conversion to int",
                )
            )
        seed = torch.as_tensor(np.asarray(cotangent), dtype=value.dtype, device=value.device)
        with raised_by("The backward pass of your function"):
            found = torch.autograd.grad(value, tensors, seed, allow_unused=True, retain_graph=True)
        return [np.zeros_like(a) if g is None else g.detach().cpu().numpy() for g, a in zip(found, arrays, strict=True)]

    return value.detach().cpu().numpy(), pull
