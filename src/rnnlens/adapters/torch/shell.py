"""TorchScript modules take no hooks; for the length of a block a plain module stands in front of each one asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class _Shell(nn.Module):  # type: ignore[misc]
    """Calls what it holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        inner = super().__getattr__("inner")
        return inner if name == "inner" else getattr(inner, name)


@contextmanager
def hookable(model: nn.Module, module: nn.Module) -> Iterator[nn.Module]:
    """A module that takes hooks and is called wherever ``module`` is called in ``model``; undone afterwards."""
    if not isinstance(module, torch.jit.ScriptModule):
        yield module
        return
    holders = [
        (parent, name)
        for parent in model.modules()
        if not isinstance(parent, torch.jit.ScriptModule)
        for name, child in parent._modules.items()
        if child is module
    ]
    shell = _Shell(module)
    try:
        for parent, name in holders:
            parent._modules[name] = shell
        yield shell
    finally:
        for parent, name in holders:
            parent._modules[name] = module
