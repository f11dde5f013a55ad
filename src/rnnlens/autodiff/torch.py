"""torch: taps are nodes of their own in the autograd graph; the user's parameters are never touched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..typing import Array
from .protocol import Keep, Memo, Program, Tap, as_it_is


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A NumPy array, of bfloat16 one in float32; it shares the memory of a tensor on the CPU."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    array: np.ndarray[Any, Any] = tensor.resolve_conj().numpy()
    return array


def like(array: Any, reference: torch.Tensor) -> torch.Tensor:
    """An array or tensor of the kind, dtype and device of another."""
    return array.to(reference) if isinstance(array, torch.Tensor) else reference.new_tensor(np.asarray(array))


def join(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Concatenate tensors, detached from the graph."""
    return torch.cat([part.detach() for part in parts], dim=axis)


def pulled(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor] | None = None,
    **options: Any,
) -> list[torch.Tensor | None]:
    """Pull cotangents of targets (of scalars: 1) back to one gradient per source; None where no path leads."""
    live = [i for i, target in enumerate(targets) if target.requires_grad]
    if not live or not sources:
        return [None] * len(sources)
    given = None if cotangents is None else [cotangents[i] for i in live]
    return list(torch.autograd.grad([targets[i] for i in live], sources, given, allow_unused=True, **options))


class PullMany:
    """Pull-back of K cotangents per target to K gradients per source: batched unless an operation cannot be.

    The graph is kept.
    """

    def __init__(self) -> None:
        self._batched = True

    def __call__(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Pull cotangents back; they and the gradients have one leading axis K."""
        count = len(cotangents[0])
        if self._batched and count > 1:
            try:
                return pulled(targets, sources, cotangents, is_grads_batched=True, retain_graph=True)
            except RuntimeError:  # an operation without a batching rule: one cotangent at a time
                self._batched = False
        rows = [pulled(targets, sources, [c[k] for c in cotangents], retain_graph=True) for k in range(count)]
        return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]


class TorchEngine:
    """Differentiation, compilation and arrays of torch; see :class:`rnnlens.autodiff.Engine`."""

    name = "torch"
    compiles = False

    def __init__(self, keep: Keep = as_it_is) -> None:
        self._keep = keep

    def to_array(self, tensor: Any) -> Array:
        """Copy a tensor to NumPy (torch off the CPU: to a torch tensor); halves become float32."""
        tensor = torch.as_tensor(tensor).detach()
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor = tensor.to(torch.float32)
        return tensor if tensor.device.type != "cpu" else tensor.resolve_conj().numpy()

    def like(self, array: Array, other: Array) -> Array:
        """Convert a NumPy array to the kind of array of ``other``, a result of :meth:`to_array`."""
        return torch.as_tensor(array, device=other.device) if isinstance(other, torch.Tensor) else array

    def join(self, arrays: Sequence[Array]) -> Array:
        """Concatenate results of :meth:`to_array` along their first axis."""
        return torch.cat(list(arrays)) if isinstance(arrays[0], torch.Tensor) else np.concatenate(list(arrays))

    def own(self, array: Any) -> Any:
        """Copy an array where the engine would otherwise share memory with the user's."""
        if isinstance(array, torch.Tensor):
            return array.detach().clone()
        return np.array(array)

    def values(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Return tensors to substitute for the values of variables; None where the program may read them itself."""
        # Detached twins share memory with the parameters and leave requires_grad and grad alone.
        return [tensor.detach() for tensor in tensors]

    def gradients(self, program: Program) -> tuple[Any, Any, dict[str, Any]]:
        """Return loss, aux and the gradient of the loss with respect to every tap (zeros where there is no path)."""
        points: dict[str, Any] = {}
        with torch.enable_grad():
            loss, aux = program(_tapping(points, self._keep))
            found = pulled([loss], list(points.values()))
        zeros = (torch.zeros_like(p) if g is None else g for p, g in zip(points.values(), found, strict=True))
        return loss.detach(), aux, dict(zip(points, zeros, strict=True))

    def forward(self, program: Program) -> tuple[Any, Any]:
        """Return loss and aux, without gradients."""
        with torch.no_grad():
            return program(lambda key, tensor: tensor)

    def compile(self, function: Callable[..., Any], arguments: Sequence[Any], memo: Memo) -> Callable[..., Any]:
        """Return ``function`` itself: nothing is compiled."""
        del arguments, memo
        return function

    def settings(self) -> Hashable:
        """Return the engine's own settings that compiled programs depend on."""
        return ()

    @contextmanager
    def preserved(self, seed: int | None = None) -> Iterator[None]:
        """Restore torch's own generators on exit, from which Keras' unseeded dropout draws."""
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=list(devices)):
            if seed is not None:
                set_seed(seed)
            yield

    def linearise(
        self,
        program: Callable[[Any, Tap], tuple[dict[str, Any], Any]],
        arguments: Any,
        memo: Memo,
    ) -> Any:
        """Run ``program(arguments, tap) -> (targets, aux)``, and keep what is needed to differentiate it."""
        del memo  # nothing is compiled
        return _TorchProgram(program, arguments, self._keep)

    def per_step(self, function: Callable[..., Any]) -> _TorchSteps:
        """The steps of a cell, differentiated."""
        return _TorchSteps(function)


def set_seed(seed: int) -> None:
    """Seed torch's generators; that of the CPU alone where there is no other device.

    ``torch.manual_seed`` notes the whole call stack for devices that it has not met yet, a millisecond each time.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _tapping(points: dict[str, Any], keep: Keep) -> Tap:
    def tap(key: str, tensor: Any) -> Any:
        # view_as gives a tensor that the graph knows apart, also where the same tensor is tapped twice.
        point = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
        points[key] = keep(tensor, point)
        return points[key]

    return tap


class _TorchProgram:
    """The autograd graph of one run, kept until this object goes."""

    def __init__(self, program: Callable[[Any, Tap], tuple[dict[str, Any], Any]], arguments: Any, keep: Keep) -> None:
        self._points: dict[str, Any] = {}
        self._pull = PullMany()
        with torch.enable_grad():
            self.targets, self.aux = program(arguments, _tapping(self._points, keep))

    def vjp(self, cotangents: Mapping[str, Any]) -> dict[str, Any | None]:
        """Pull cotangents back; see :class:`rnnlens.autodiff.LinearisedProgram`."""
        targets = [self.targets[name] for name in cotangents]
        given = [
            torch.as_tensor(c, dtype=t.dtype, device=t.device)
            for c, t in zip(cotangents.values(), targets, strict=True)
        ]
        return dict(zip(self._points, self._pull(targets, list(self._points.values()), given), strict=True))


class _TorchSteps:
    """A step function and its derivatives."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def step(self, x: Any, states: Any, weights: Any) -> Any:
        """Compute output and new states."""
        with torch.no_grad():
            return self._function(x, states, weights)

    def vjp(self, inputs: Any, cotangents: Any) -> Any:
        """Pull cotangents back; see :class:`rnnlens.autodiff.protocol.PerStep`."""
        x, states, weights = inputs
        leaves = [t.detach().requires_grad_() for t in (x, *states, *weights.values())]
        count = len(states)
        with torch.enable_grad():
            named = dict(zip(weights, leaves[1 + count :], strict=True))
            output, new = self._function(leaves[0], leaves[1 : 1 + count], named)
            found = pulled([output, *new], leaves, [cotangents[0], *cotangents[1]])
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
        return pulled(targets, [state], given, retain_graph=True)[0]

    def jacobian(self, inputs: Any) -> Any:
        """Return rows of [new states, output] by states and by input."""
        x, states, weights = inputs
        sizes = [s.shape[-1] for s in states]
        x = x.detach().requires_grad_()
        joined = torch.cat([s.detach() for s in states], dim=-1).requires_grad_()
        with torch.enable_grad():
            output, new = self._function(x, list(torch.split(joined, sizes, dim=-1)), weights)
            stacked = torch.cat([*new, output], dim=-1)
        return tuple(rows_of(stacked, [joined, x]))


def rows_of(stacked: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The Jacobian of (n, rows) by each source (n, size): (n, rows, size). Rows along n do not depend on each other."""
    n, count = stacked.shape
    # Samples do not mix within a step, so one cotangent for each row of the Jacobian serves all of them.
    eye = torch.eye(count, dtype=stacked.dtype, device=stacked.device)[:, None, :].expand(count, n, count)
    found = PullMany()([stacked], sources, [eye])
    return [
        source.new_zeros((n, count, source.shape[1])) if grad is None else grad.transpose(0, 1)
        for source, grad in zip(sources, found, strict=True)
    ]
