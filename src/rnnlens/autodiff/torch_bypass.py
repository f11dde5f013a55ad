"""Gradients of a torch training step with and without the operations that cut the graph, at fixed weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .cuts import CutSite, UserCall, user_call
from .torch_cuts import VALUELESS

#: Operations that return their argument's value without its gradient; the argument takes the place of the result.
_DETACHING = frozenset(("detach", "detach_", "data"))
#: Operations whose result is no tensor any more.
_LEAVING = frozenset(("numpy", "__array__", "item", "tolist", "__float__", "__int__", "__bool__", "__format__"))
#: Of these, those whose result is an array, and the functions that make tensors of arrays.
_TO_ARRAYS, _FROM_ARRAYS = frozenset(("numpy", "__array__")), frozenset(("tensor", "as_tensor", "from_numpy"))
_OPTIMIZERS = os.path.join(os.path.dirname(torch.__file__), "optim")


class StepRun(TorchFunctionMode):  # type: ignore[misc]
    """One run of a training step that records its losses in place of their backward passes, and bypasses cuts.

    Optimizers then find no gradients, and leave the weights as they are.

    Parameters
    ----------
    bypassed
        Cuts to pass over, by their call in the user's code: the gradient goes on as if the operation were not there.
    every
        Of the bypassed calls, every ``every``-th execution still cuts, from the first on; None for none of them.
    ignored
        Function that returns whether the present execution does not count, and cuts.
    """

    def __init__(
        self,
        bypassed: Sequence[UserCall] = (),
        every: int | None = None,
        ignored: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.sites: dict[UserCall, CutSite] = {}
        self.losses: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._left: list[torch.Tensor] = []
        self._bypassed, self._every, self._ignored = frozenset(bypassed), every, ignored

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name == "backward" and args and isinstance(args[0], torch.Tensor):
            self.losses.append((args[0], args[1] if len(args) > 1 else kwargs.get("gradient")))
            return None
        if name in _FROM_ARRAYS and self._left:
            return self._with_gradient_of_left(func(*args, **kwargs))
        has_gradient = name not in VALUELESS and any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))
        )
        if not has_gradient:
            return func(*args, **kwargs)
        if name in _LEAVING:  # a bypassed tensor has a gradient still, which NumPy and numbers of Python refuse
            if name in _TO_ARRAYS:
                self._leave(args[0], user_call())
            return func(args[0].detach(), *args[1:], **kwargs)
        operation = _operation(func, name)
        call = user_call(_OPTIMIZERS) if operation in _DETACHING or not torch.is_grad_enabled() else None
        if call is None or self._ignored():
            return func(*args, **kwargs)
        site = self._count(call, operation)
        if self._passes(site):
            if operation in _DETACHING:
                return args[0]
            with torch.enable_grad():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not results or any(leaf.requires_grad for leaf in results):
            site.count -= 1  # a view of a weight, or the gradient of a weight that has none: nothing was cut
        return result

    def _count(self, call: UserCall, operation: str) -> CutSite:
        site = self.sites.setdefault(call, CutSite(call, operation))
        site.count += 1
        return site

    def _passes(self, site: CutSite) -> bool:
        """Return whether the present execution of a cut is passed over."""
        return site.call in self._bypassed and (self._every is None or bool((site.count - 1) % self._every))

    def _leave(self, tensor: torch.Tensor, call: UserCall | None) -> None:
        """Record a tensor that becomes an array of NumPy; keep it if this cut is passed over."""
        if call is not None and tensor.dim() and self._passes(self._count(call, "numpy")):
            self._left.append(tensor)

    def _with_gradient_of_left(self, result: Any) -> Any:
        """Substitute in a tensor made of an array the vectors along its last axis that left torch before."""
        size = result.shape[-1] if isinstance(result, torch.Tensor) and result.dim() and result.numel() else 0
        vectors = {
            vector.tobytes(): original
            for tensor in self._left
            if tensor.shape[-1] == size > 1
            for original in tensor.reshape(-1, size)
            if (vector := original.detach().to(result.dtype).cpu().numpy()).any()
        }
        if not vectors or not result.is_floating_point():
            return result
        rows = [vectors.get(row.cpu().numpy().tobytes(), row) for row in result.detach().reshape(-1, size)]
        with torch.enable_grad():
            return torch.stack([row.to(result) for row in rows]).reshape(result.shape)

    def gradients(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the gradients of the sum of all losses by the weights; zeros where no path leads."""
        pairs = [(loss, cotangent) for loss, cotangent in self.losses if loss.requires_grad]
        grads: Sequence[torch.Tensor | None] = [None] * len(weights)
        if pairs:
            losses, cotangents = zip(*pairs, strict=True)
            grads = torch.autograd.grad(losses, list(weights.values()), cotangents, allow_unused=True)
        return {
            name: torch.zeros_like(weight) if grad is None else grad.detach()
            for (name, weight), grad in zip(weights.items(), grads, strict=True)
        }


def _operation(func: Any, name: str) -> str:
    """Return the name of an operation; that of an attribute for its getter."""
    if name != "__get__":
        return name.strip("_") if name != "detach_" else name
    return str(getattr(getattr(func, "__self__", None), "__name__", "attribute"))


def run_step(step: Callable[[], Any], bypassed: Sequence[UserCall] = (), every: int | None = None) -> StepRun:
    """Run a training step under :class:`StepRun` and return it."""
    run = StepRun(bypassed, every)
    with run:
        step()
    return run
