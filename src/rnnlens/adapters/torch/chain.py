"""Recognises models that call library modules one after the other, by the identity of tensors.

A chain: each module was called on the tensor that the one before it returned, nothing changed that tensor in between,
and the model returned the last one. For a chain the modules between two tensors are known without a second forward
pass, with samples on the first axis and steps on the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_calls

from ..protocol import ChainLink

_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
_PASSING = (nn.Dropout, nn.Identity)
_KNOWN = (*_RECURRENT, *_PASSING, nn.Linear, nn.Embedding)
#: Attributes with hooks, by which a user may change the result of a module.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ChainRecorder:
    """Recorder that follows one tensor from module to module through a forward pass, within :meth:`watch`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.links: list[ChainLink] = []
        self._current: Tensor | None = None
        self._version = 0
        self._is_chain = type(model) not in _KNOWN and not module_calls._global_forward_hooks

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the calls of the model's library modules within the block."""
        modules = {path: m for path, m in self.model.named_modules() if path and type(m) in _KNOWN}
        self._is_chain = self._is_chain and not any(map(_is_changed, modules.values()))
        handles = []
        if self._is_chain:
            handles = [self.model.register_forward_pre_hook(self._enter, with_kwargs=True)]
            handles += [m.register_forward_hook(self._noted(path), with_kwargs=True) for path, m in modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def chain(self, outputs: Any) -> list[ChainLink] | None:
        """Return the modules from input to output, or None if the model is not one plain chain."""
        return self.links if self._is_chain and self.links and self._holds(outputs) else None

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._is_chain = self._is_chain and not kwargs and len(args) == 1 and type(args[0]) is Tensor
        if self._is_chain:
            self._take(args[0])

    def _take(self, tensor: Tensor) -> None:
        self._current, self._version = tensor, tensor._version

    def _holds(self, tensor: Any) -> bool:
        """Return whether a tensor is the last module's output, not changed in place and without tensor hooks."""
        current = self._current
        if current is None or tensor is not current:
            return False
        return current._version == self._version and not current._backward_hooks

    def _noted(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            link = None
            if self._is_chain and torch.is_grad_enabled() and not kwargs and len(args) == 1 and self._holds(args[0]):
                link = _link(path, module, args[0])
            value = output[0] if isinstance(output, tuple) else output
            self._is_chain = link is not None and type(value) is Tensor
            if link is not None and self._is_chain:
                self.links.append(link)
                self._take(value)

        return hook


def _is_changed(module: nn.Module) -> bool:
    """Return whether a hook, a parametrisation or an own forward may change what a library module computes."""
    return "forward" in vars(module) or "parametrizations" in module._modules or any(getattr(module, h) for h in _HOOKS)


def _link(path: str, module: nn.Module, value: Tensor) -> ChainLink | None:
    """Return the chain link of one module call, or None for a call that a link cannot express."""
    if isinstance(module, _RECURRENT):
        plain = module.batch_first and module.num_layers == 1 and not module.bidirectional and not module.proj_size
        return ChainLink(path, "recurrent") if plain and value.dim() == 3 else None
    if isinstance(module, _PASSING):
        return None if module.training and isinstance(module, nn.Dropout) else ChainLink(path, "same")
    if isinstance(module, nn.Embedding):
        return ChainLink(path, "table") if module.max_norm is None else None
    if module.weight.dtype not in (torch.float32, torch.float64) or value.dtype != module.weight.dtype:
        return None
    kernel, bias = (None if w is None else w.detach().cpu().numpy().copy() for w in (module.weight, module.bias))
    return ChainLink(path, "dense", None if kernel is None else kernel.T, bias)
