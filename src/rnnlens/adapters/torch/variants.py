"""Variants of a model: one tensor perturbed within a block, or a copy with re-initialised weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import UnsupportedError
from ..protocol import Port
from ..shared import hook_in_this_thread
from .discover import unwrapped
from .inputs import on_leaves
from .weights import torch_name


@contextmanager
def perturbed_port(model: nn.Module, port: Port, size: float) -> Iterator[bool]:
    """Perturb a weight or output within the block by ``size`` times its root mean square, in a fixed random pattern.

    Yield False if that is not possible. A weight is replaced by a perturbed copy, and the same object is restored
    afterwards. An output is perturbed by a hook.
    """
    path, modules = str(port.layer).partition("#")[0], dict(unwrapped(model).named_modules())
    path, _, layer = (path, "", "") if path in modules else path.partition("[")
    module = modules.get(path)
    if module is None or port.kind not in ("weight", "output"):
        yield False
        return
    if port.kind == "output":
        hook = hook_in_this_thread(lambda _module, _args, output: on_leaves(output, lambda v: _moved(v, size)))
        handle = module.register_forward_hook(hook)
        try:
            yield True
        finally:
            handle.remove()
        return
    name = torch_name(module, int(layer.rstrip("]") or 0), port.key)
    parameter = module._parameters.get(name)
    try:
        if parameter is not None:
            # setattr, not ``_parameters``: a recurrent module updates a second list of its weights then.
            setattr(module, name, nn.Parameter(_moved(parameter.detach(), size), requires_grad=False))
        yield True
    finally:
        if parameter is not None:
            setattr(module, name, parameter)


def _moved(value: Any, size: float) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    pattern = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spread = float(value.detach().float().pow(2).mean().sqrt()) or 1.0
    return value + (size * spread * pattern).to(value)


def reinitialised(model: nn.Module, seed: int) -> nn.Module:
    """Return a deep copy in which every module with own parameters was reset by its ``reset_parameters``."""
    twin = copy.deepcopy(model)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for name, module in twin.named_modules():
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            reset = getattr(module, "reset_parameters", None)
            if reset is None:
                raise UnsupportedError(
                    f"Module {name or type(module).__name__!r} cannot be re-initialised.",
                    got=f"{type(module).__name__} without reset_parameters()",
                    hint="pass a copy of the model from before training: baseline=that_model",
                )
            reset()
    return twin
