"""Records the gradients of the recurrent weights in a training step.

Three gradients are recorded: of the backward passes themselves, accumulated in ``.grad``, and as applied by the
optimizer. They are copies; the user's ``.grad`` is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .discover import node_name
from .weights import NAMES, cell_weights, class_of, from_torch


@dataclass(frozen=True)
class WeightSlot:
    """Position of a parameter: layer name in a result, direction, and torch's name of the weight."""

    layer: str
    direction: str
    slot: str
    cell: Any

    @property
    def key(self) -> str:
        """Name of the weight in rnnlens, such as ``kernel``."""
        return NAMES[self.slot]


@dataclass
class WeightGradients:
    """Gradients of a step by parameter, with any loss scale divided out.

    ``own`` is of the recorded forward passes, as this process computed it. ``accumulated`` is ``.grad`` after the last
    backward pass of the step: summed with earlier passes, and averaged over processes in distributed training.
    ``applied`` is the gradient that the optimizer used, after clipping. ``whole`` is the gradient norm of every weight
    of the model by its id, before and after clipping.
    """

    own: dict[WeightSlot, Tensor] = field(default_factory=dict)
    accumulated: dict[WeightSlot, Tensor] = field(default_factory=dict)
    applied: dict[WeightSlot, Tensor] = field(default_factory=dict)
    whole: dict[str, dict[int, float]] = field(default_factory=dict)

    def norms(self, moved: Collection[int] | None = None) -> dict[str, float]:
        """Return Euclidean norms by the name of a scalar.

        The names are ``grad_norm`` and ``grad_norm_clipped`` for the weights whose ids are in ``moved`` (all of the
        model if None), and ``lstm/weight_grad_norm/kernel`` and ``lstm/weight_grad_norm_clipped/kernel`` for one
        weight. Clipped norms are of the gradients that the optimizer used.
        """
        found = {
            word: math.hypot(*(norm for key, norm in norms.items() if moved is None or key in moved))
            for word, norms in self.whole.items()
        }
        for word, grads in (("weight_grad_norm", self.accumulated), ("weight_grad_norm_clipped", self.applied)):
            for slot, grad in grads.items():
                both = any(other.layer == slot.layer and other.direction != slot.direction for other in grads)
                name = f"{slot.layer}/{slot.direction}" if both else slot.layer
                found[f"{name}/{word}/{slot.key}"] = float(torch.linalg.vector_norm(grad.double()))
        return found

    def clipped(self, tolerance: float = 1e-5) -> bool:
        """Return whether the optimizer used other gradients than the accumulated ones."""
        return any(
            slot in self.applied and not torch.allclose(self.applied[slot], grad, rtol=tolerance, atol=0.0)
            for slot, grad in self.accumulated.items()
        )

    def by_layer(self, which: str = "own") -> dict[str, dict[str, dict[str, Tensor]]]:
        """Return gradients by layer, direction and weight name, in the layout of rnnlens."""
        found: dict[str, dict[str, dict[str, Tensor]]] = {}
        for slot, grad in getattr(self, which).items():
            there = found.setdefault(slot.layer, {}).setdefault(slot.direction, {})
            there[slot.key] = from_torch(slot.cell, slot.slot, grad).contiguous()
        return found


class WeightGradientCapture:
    """Recorder of the gradients of recurrent weights while a model trains; of ``everything`` only norms.

    Frozen weights, and weights computed from others, are left out.
    """

    def __init__(self, modules: Iterable[tuple[str, Any]], everything: Iterable[nn.Parameter]) -> None:
        self.on = False
        self._everything = list(everything)
        self._norms: dict[int, float] = {}
        self.slots: dict[int, WeightSlot] = {}
        self.parameters: dict[int, nn.Parameter] = {}
        self._own: dict[int, Tensor] = {}
        self._reached: set[int] = set()  # parameters with gradients of this step; ``.grad`` of others may be old
        self._accumulated: dict[int, Tensor] = {}
        for path, module in modules:
            known = class_of(module)
            assert known is not None
            for layer, direction, weights in cell_weights(module):
                for slot, weight in weights.items():
                    if isinstance(weight, nn.Parameter) and weight.requires_grad:
                        name = node_name(path, module, layer)
                        self.slots.setdefault(id(weight), WeightSlot(name, direction, slot, known[0]))
                        self.parameters[id(weight)] = weight
        self._handles = [p.register_hook(self._gradient_hook(key)) for key, p in self.parameters.items()]

    def remove(self) -> None:
        """Remove the hooks and drop all records."""
        for handle in self._handles:
            handle.remove()
        self.forget()

    def forget(self) -> None:
        """Drop the records of a finished training step."""
        self._own, self._accumulated = {}, {}
        self.begin()

    def begin(self) -> None:
        """Start a new accumulation of gradients."""
        self._reached.clear()

    def forget_own(self) -> None:
        """Drop the gradients of the previous forward pass, because another one begins within the step."""
        self._own = {}

    def is_fresh(self, module: nn.Module) -> bool:
        """Return whether no gradient of a module is accumulated: all are None, or the smallest is all zeros."""
        mine = (p for p in module.parameters() if id(p) in self.parameters)
        grads = [p.grad for p in mine if p.grad is not None]
        return not grads or not bool(min(grads, key=Tensor.numel).any())

    def accumulated(self) -> None:
        """Record the content of ``.grad`` after a backward pass."""
        self._accumulated, self._norms = self._held(), self._whole()

    def read(self, scale: float, applied_scale: float = 1.0) -> WeightGradients:
        """Return the gradients; ``applied_scale`` is left of the loss scale when the optimizer gets its gradients."""
        return WeightGradients(
            self._by_slot(self._own, scale),
            self._by_slot(self._accumulated, scale),
            self._by_slot(self._held(), applied_scale),
            {
                "grad_norm": {key: norm / scale for key, norm in self._norms.items()},
                "grad_norm_clipped": {key: norm / applied_scale for key, norm in self._whole().items()},
            },
        )

    def _whole(self) -> dict[int, float]:
        """Return the norm of ``.grad`` of every weight of the model, by the weight's id."""
        grads = {id(p): entries(p.grad.detach()) for p in self._everything if p.grad is not None}
        wide = {key: grad.to(torch.promote_types(grad.dtype, torch.float32)) for key, grad in grads.items()}
        norms = [torch.linalg.vector_norm(grad).cpu().double() for grad in wide.values()]
        return dict(zip(grads, torch.stack(norms).tolist() if norms else [], strict=True))

    def _held(self) -> dict[int, Tensor]:
        held = {key: self.parameters[key].grad for key in self.parameters if key in self._reached}
        return {key: grad.detach().clone() for key, grad in held.items() if grad is not None}

    def _by_slot(self, grads: Mapping[int, Tensor], scale: float) -> dict[WeightSlot, Tensor]:
        return {self.slots[key]: unscaled(grad, scale) for key, grad in grads.items()}

    def _gradient_hook(self, key: int) -> Any:
        def hook(grad: Tensor) -> None:
            if self.on:
                self._reached.add(key)
                known = self._own.get(key)
                self._own[key] = grad.detach().clone() if known is None else known + grad.detach()

        return hook


def entries(grad: Tensor) -> Tensor:
    """Return the values of a gradient; for a sparse one, as of embeddings, those of its stored rows."""
    return grad.coalesce().values() if grad.is_sparse else grad


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in at least float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def unscaled(grad: Tensor, scale: float) -> Tensor:
    """Divide a gradient by the loss scale, in at least float32."""
    return widened(grad) if scale == 1.0 else widened(grad) / scale
