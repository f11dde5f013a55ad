"""Keras on torch: taps are nodes of their own in the autograd graph; the user's parameters are never touched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ....typing import Array
from . import Memo, Program, Tap


class Torch:
    """See :class:`rnnlens.adapters.keras.engines.Engine`."""

    name = "torch"
    compiles = False

    def to_array(self, tensor: Any) -> Array:
        """A NumPy array (torch off the CPU: a torch tensor); halves become float32."""
        tensor = torch.as_tensor(tensor).detach()
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor = tensor.to(torch.float32)
        return tensor if tensor.device.type != "cpu" else tensor.resolve_conj().numpy()

    def like(self, array: Array, other: Array) -> Array:
        """A NumPy array as the kind of array that ``other``, a result of :meth:`to_array`, is."""
        return torch.as_tensor(array, device=other.device) if isinstance(other, torch.Tensor) else array

    def join(self, arrays: Sequence[Array]) -> Array:
        """Results of :meth:`to_array` joined along their first axis."""
        return torch.cat(list(arrays)) if isinstance(arrays[0], torch.Tensor) else np.concatenate(list(arrays))

    def own(self, array: Any) -> Any:
        """A copy where the engine would otherwise share memory with the user's array."""
        if isinstance(array, torch.Tensor):
            return array.detach().clone()
        return np.array(array)

    def values(self, variables: Sequence[Any]) -> list[Any] | None:
        """What to run with in place of the variables; None where the program may read them itself."""
        # Detached twins share memory with the parameters and leave requires_grad and grad alone.
        return [v._value.detach() for v in variables]

    def gradients(self, program: Program) -> tuple[Any, Any, dict[str, Any]]:
        """Loss, aux and the gradient of the loss with respect to every tap (zeros where there is no path)."""
        points: dict[str, Any] = {}
        with torch.enable_grad():
            loss, aux = program(_tapping(points))
            found = _grad([loss], list(points.values()), None)
        zeros = (torch.zeros_like(p) if g is None else g for p, g in zip(points.values(), found, strict=True))
        return loss.detach(), aux, dict(zip(points, zeros, strict=True))

    def forward(self, program: Program) -> tuple[Any, Any]:
        """Loss and aux, without gradients."""
        with torch.no_grad():
            return program(lambda key, tensor: tensor)

    def compile(self, function: Callable[..., Any], arguments: Sequence[Any], memo: Memo) -> Callable[..., Any]:
        """``function`` itself: nothing is compiled."""
        del arguments, memo
        return function

    def settings(self) -> Hashable:
        """The engine's own settings that what is compiled depends on."""
        return ()

    @contextmanager
    def preserved(self, seed: int | None = None) -> Iterator[None]:
        """Torch's own generators, which Keras' unseeded dropout draws from, are put back on exit."""
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=list(devices)):
            if seed is not None:
                torch.manual_seed(seed)
            yield

    def linearise(
        self,
        program: Callable[[Any, Tap], tuple[dict[str, Any], Any]],
        arguments: Any,
        memo: Memo,
    ) -> Any:
        """Run ``program(arguments, tap) -> (targets, aux)``, and keep what is needed to differentiate it."""
        del memo  # nothing is compiled
        return _Linearised(program, arguments)

    def per_step(self, function: Callable[..., Any]) -> _PerStep:
        """``step``, ``vjp`` and ``jacobian`` of a pure function of (x, states, weights); see ``cells.py``."""
        return _PerStep(function)


def _tapping(points: dict[str, Any]) -> Tap:
    def tap(key: str, tensor: Any) -> Any:
        mask = getattr(tensor, "_keras_mask", None)
        # view_as gives a tensor that the graph knows apart, also where the same tensor is tapped twice.
        points[key] = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
        if mask is not None:
            points[key]._keras_mask = mask
        return points[key]

    return tap


def _grad(targets: list[Any], points: list[Any], cotangents: list[Any] | None, **options: Any) -> Any:
    live = [i for i, t in enumerate(targets) if t.requires_grad]
    if not live or not points:
        return [None] * len(points)
    given = None if cotangents is None else [cotangents[i] for i in live]
    return torch.autograd.grad([targets[i] for i in live], points, given, allow_unused=True, **options)


class _Linearised:
    """The autograd graph of one run, kept until this object goes."""

    def __init__(self, program: Callable[[Any, Tap], tuple[dict[str, Any], Any]], arguments: Any) -> None:
        self._points: dict[str, Any] = {}
        with torch.enable_grad():
            self.targets, self.aux = program(arguments, _tapping(self._points))

    def vjp(self, cotangents: Mapping[str, Any]) -> dict[str, Any | None]:
        """Pull cotangents back; see the contract in ``engines/__init__.py``."""
        targets = [self.targets[name] for name in cotangents]
        given = [
            torch.as_tensor(c, dtype=t.dtype, device=t.device)
            for c, t in zip(cotangents.values(), targets, strict=True)
        ]
        points = list(self._points.values())
        try:
            found = _grad(targets, points, given, is_grads_batched=True, retain_graph=True)
        except RuntimeError:  # an operation without a batching rule: one cotangent at a time
            found = self._one_by_one(targets, points, given)
        return dict(zip(self._points, found, strict=True))

    @staticmethod
    def _one_by_one(targets: list[Any], points: list[Any], given: list[Any]) -> list[Any]:
        rows = [_grad(targets, points, [c[k] for c in given], retain_graph=True) for k in range(len(given[0]))]
        return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]


class _PerStep:
    """A step function and its derivatives."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def step(self, x: Any, states: Any, weights: Any) -> Any:
        """Output and new states."""
        with torch.no_grad():
            return self._function(x, states, weights)

    def vjp(self, inputs: Any, cotangents: Any) -> Any:
        """Pull cotangents back; see the contract in ``engines/__init__.py``."""
        x, states, weights = inputs
        leaves = [t.detach().requires_grad_() for t in (x, *states, *weights.values())]
        count = len(states)
        with torch.enable_grad():
            named = dict(zip(weights, leaves[1 + count :], strict=True))
            output, new = self._function(leaves[0], leaves[1 : 1 + count], named)
            found = _grad([output, *new], leaves, [cotangents[0], *cotangents[1]])
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, found, strict=True)]
        return filled[0], filled[1 : 1 + count], dict(zip(weights, filled[1 + count :], strict=True))

    def produced(self, inputs: Any, cotangents: Any) -> Any:
        """Pull cotangents back to each new state at its own node of the graph."""
        x, states, weights = inputs
        leaves = [t.detach().requires_grad_() for t in (x, *states)]
        with torch.enable_grad():
            output, new = self._function(leaves[0], leaves[1:], weights)
            targets, given = [output, *new], [cotangents[0], *cotangents[1]]
            return [self._at(state, targets, given, leaves) for state in new]

    @staticmethod
    def _at(state: Any, targets: list[Any], given: list[Any], leaves: list[Any]) -> Any:
        if not state.requires_grad or any(state is leaf for leaf in leaves):  # passed on, not produced
            return sum(c for target, c in zip(targets, given, strict=True) if target is state)
        return _grad(targets, [state], given, retain_graph=True)[0]

    def jacobian(self, inputs: Any) -> Any:
        """Rows of [new states, output] by states and by input."""
        x, states, weights = inputs
        sizes = [s.shape[-1] for s in states]
        x = x.detach().requires_grad_()
        joined = torch.cat([s.detach() for s in states], dim=-1).requires_grad_()
        with torch.enable_grad():
            output, new = self._function(x, list(torch.split(joined, sizes, dim=-1)), weights)
            stacked = torch.cat([*new, output], dim=-1)
        rows = []
        for j in range(stacked.shape[-1]):
            # Samples do not mix within a step, so the sum over them has the rows of all.
            found = _grad([stacked[:, j].sum()], [joined, x], None, retain_graph=True)
            rows.append([torch.zeros_like(p) if g is None else g for p, g in zip((joined, x), found, strict=True)])
        return torch.stack([r[0] for r in rows], dim=1), torch.stack([r[1] for r in rows], dim=1)


engine = Torch()
