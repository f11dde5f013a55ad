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
from .weights import SLOTS


@contextmanager
def perturbed_port(model: nn.Module, port: Port, size: float) -> Iterator[bool]:
    """Perturb a weight or output within the block by ``size`` times its root mean square, in a fixed random pattern.

    Yield False if that is not possible.

    A weight is replaced by a perturbed copy, and the same object is restored afterwards. An output is perturbed by a
    hook.
    """
    model = unwrapped(model)
    path = str(port.layer).partition("#")[0]
    modules = dict(model.named_modules())
    module = modules.get(path, modules.get(path.partition("[")[0]))
    if module is None or port.kind not in ("weight", "output"):
        yield False
        return
    if port.kind == "weight":
        with _moved_weights(module, path, port.key, size):
            yield True
        return
    hook = hook_in_this_thread(lambda _module, _args, output: on_leaves(output, lambda v: _moved(v, size)))
    handle = module.register_forward_hook(hook)
    try:
        yield True
    finally:
        handle.remove()


@contextmanager
def _moved_weights(module: nn.Module, path: str, key: str, size: float) -> Iterator[None]:
    names = [name for name in module._parameters if _is_meant(name, path, key)]
    before = {name: module._parameters[name] for name in names}
    try:
        for name, parameter in before.items():
            if parameter is not None:
                # setattr, not ``_parameters``: a recurrent module updates a second list of its weights then.
                setattr(module, name, nn.Parameter(_moved(parameter.detach(), size), requires_grad=False))
        yield
    finally:
        for name, parameter in before.items():
            setattr(module, name, parameter)


def _is_meant(name: str, path: str, key: str) -> bool:
    """Return whether a torch name such as ``weight_ih_l0_reverse`` is the weight ``key``, such as ``backward/kernel``.

    Weights of other layers are compared by name.
    """
    direction, _, weight = key.rpartition("/")
    slot = SLOTS.get(weight)
    if slot is None or not name.startswith(slot):
        return name == key
    layer = path.partition("[")[2].rstrip("]") or "0"
    rest = name.removeprefix(slot)
    return rest in ("", f"_l{layer}{'_reverse' if direction == 'backward' else ''}")


def _moved(value: Any, size: float) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    pattern = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spread = float(value.detach().float().pow(2).mean().sqrt()) or 1.0
    return value + (size * spread * pattern).to(value)


def reinitialised(model: nn.Module, seed: int) -> nn.Module:
    """Return a deep copy in which every module with own parameters was reset by its ``reset_parameters``.

    Raise UnsupportedError if a module with parameters of its own has no ``reset_parameters``, so that its
    initialisation is unknown.
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
                    f"Module {name or type(module).__name__!r} cannot be re-initialised.",
                    got=f"{type(module).__name__} without reset_parameters()",
                    hint="pass a copy of the model from before training: baseline=that_model",
                )
            reset()
    return twin
