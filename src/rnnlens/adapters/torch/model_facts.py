"""Roles and dtypes of the modules of a torch model. A module has no optimizer and no names of inputs."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ..protocol import ModelFacts, Role, Submodule
from .discover import named_modules, node_name, unwrapped
from .public import declarations, loops_of, scans_of
from .weights import TABLES, class_of

_DROPOUTS = (nn.modules.dropout._DropoutNd,)
#: Containers of modules, which are never called themselves.
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def facts(model: nn.Module) -> ModelFacts:
    """Return the roles and dtypes of modules: see :meth:`rnnlens.adapters.protocol.Adapter.facts`."""
    return ModelFacts({name: Submodule(_roles(module), _dtype(module)) for name, module in _parts(unwrapped(model))})


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every callable module by name, once per stacked layer. A model without submodules yields itself."""
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
    """Return the dtype of a module's own first floating weight; empty if it has none."""
    floats = (p.dtype for p in module._parameters.values() if p is not None and p.is_floating_point())
    return str(next(floats, "")).removeprefix("torch.")


def fingerprint(model: nn.Module) -> Hashable:
    """Return structure, hooks, flags, attributes, forward code known loops and scans, without values of weights."""
    parts = ((path, *_state_of(module)) for path, module in model.named_modules(remove_duplicate=False))
    return (tuple(loops_of(model).items()), tuple(scans_of(model).items()), *parts)


def _state_of(module: nn.Module) -> Iterator[Any]:
    yield type(module), declarations(module)
    yield getattr(inspect.getattr_static(type(module), "forward", None), "__code__", None)
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            # A lazy module's parameters have no shape before its first batch.
            tensors = {key: tensor for key, tensor in value.items() if tensor is not None and not is_lazy(tensor)}
            yield tuple((key, tuple(t.shape), t.dtype, t.requires_grad) for key, t in tensors.items())
        elif name == "_modules" or "hook" in name:
            yield tuple((key, id(part)) for key, part in (value.items() if isinstance(value, dict) else ()))
        else:
            is_plain = isinstance(value, (int, float, str, type(None)))
            yield name, value if is_plain else (type(value), getattr(value, "__code__", None), id(value))
