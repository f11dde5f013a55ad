"""What torch knows of a model without running it: its parts. A module carries no optimizer, and names no inputs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..protocol import ModelFacts, Role, Submodule
from .discover import named_modules, node_name, unwrapped
from .weights import TABLES, class_of

_DROPOUTS = (nn.modules.dropout._DropoutNd,)
#: Modules that hold others and are never called themselves.
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def facts(model: nn.Module) -> ModelFacts:
    """See :meth:`rnnlens.adapters.protocol.Adapter.facts`."""
    return ModelFacts({name: Submodule(_roles(module), _dtype(module)) for name, module in _parts(unwrapped(model))})


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Everything that is called, one by one for layers stacked within one module; the model itself if it is all."""
    named = named_modules(model)
    for path, module in named[1:] or named:
        stacked = module.num_layers if isinstance(module, nn.RNNBase) else 1
        if not isinstance(module, _HOLDERS):
            yield from ((node_name(path, module, layer), module) for layer in range(stacked))


def _roles(module: nn.Module) -> frozenset[Role]:
    roles: set[Role] = set()
    if isinstance(module, TABLES):
        roles.add("embedding")
    if isinstance(module, _DROPOUTS):
        roles.add("dropout")
    if isinstance(module, nn.ReLU | nn.ReLU6) or (class_of(module) or ("", ""))[1] == "relu":
        roles.add("relu")
    return frozenset(roles)


def _dtype(module: nn.Module) -> str:
    """That of a module's own weights."""
    floats = (p.dtype for p in module._parameters.values() if p is not None and p.is_floating_point())
    return str(next(floats, "")).removeprefix("torch.")
