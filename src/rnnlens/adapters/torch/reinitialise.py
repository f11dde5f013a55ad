"""A copy of a module with fresh weights."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ...errors import UnsupportedError, message


def reinitialised(model: nn.Module, seed: int) -> nn.Module:
    """A deep copy in which every module with parameters of its own was initialised again by its author's rule.

    Raises
    ------
    UnsupportedError
        If a module with parameters of its own has no ``reset_parameters``: what it started from cannot be known.
    """
    twin = copy.deepcopy(model)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for name, module in twin.named_modules():
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            reset = getattr(module, "reset_parameters", None)
            if reset is None:
                raise UnsupportedError(
                    message(
                        f"Module {name or type(module).__name__!r} cannot be initialised again.",
                        got=f"{type(module).__name__} without reset_parameters()",
                        hint="pass a copy of the model from before training: baseline=that_model",
                    )
                )
            reset()
    return twin
