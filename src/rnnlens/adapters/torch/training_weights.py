"""One recorded call of a training step, and the gradients of the recurrent weights in that step.

The gradients are those of each backward pass, accumulated in ``.grad``, and as the optimizer applies them. They are
copied from where torch keeps them: ``.grad`` is the user's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .discover import node_name
from .weights import NAMES, cell_weights, class_of, ours


@dataclass(eq=False)
class TrainingCall:
    """One call of a fused recurrent module, or all of a cell's loop: what it was fed, what it returned, what came back.

    Attributes
    ----------
    args, kwargs
        Detached copies; empty where only what came back is wanted. Of a loop all inputs (sample, time, feature) and the
        initial states.
    weights
        By layer index and direction, in torch's words; copies where a replay is wanted: the step changes the user's.
    random
        State of the generator that dropout between stacked layers drew from; None where none acted.
    returned
        Detached: the output (of a packed sequence its data), then the final states. Of a loop every state by step
        (sample, time, unit).
    grads
        By the place in ``returned``: the sum over the backward passes that came through. As torch had it: times the
        scale of a GradScaler.
    """

    path: str
    module: Any
    training: bool
    weights: dict[tuple[int, str], dict[str, Tensor]]
    returned: list[Tensor]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    packed: PackedSequence | None = None
    random: Tensor | None = None
    autocast: torch.dtype | None = None
    grads: dict[int, Tensor] = field(default_factory=dict)
    backwards: set[int] = field(default_factory=set)
    number: int = 0


@dataclass(frozen=True)
class WeightSlot:
    """Where a parameter belongs: the name of the layer in a result, its direction, and torch's word for the weight."""

    layer: str
    direction: str
    slot: str
    cell: Any

    @property
    def key(self) -> str:
        """Our word for the weight."""
        return NAMES[self.slot]


@dataclass
class WeightGradients:
    """By parameter: gradients of the loss itself, any scale divided out.

    ``own``: of the forward passes that were heard, as this process computed it. ``accumulated``: what ``.grad`` held
    when the last backward pass of the step was over, with the passes before it, and averaged over processes where
    these train together. ``applied``: what the optimizer was given, after clipping.
    ``whole``: the norm of the gradient of every weight of the model by its id, before and after clipping.
    """

    own: dict[WeightSlot, Tensor] = field(default_factory=dict)
    accumulated: dict[WeightSlot, Tensor] = field(default_factory=dict)
    applied: dict[WeightSlot, Tensor] = field(default_factory=dict)
    whole: dict[str, dict[int, float]] = field(default_factory=dict)

    def norms(self, moved: Collection[int] | None = None) -> dict[str, float]:
        """Euclidean norms by the name of a scalar.

        ``grad_norm`` and ``grad_norm_clipped`` of the weights whose ids are in ``moved``, or of all of the model,
        ``lstm/weight_grad_norm/kernel`` and ``lstm/weight_grad_norm_clipped/kernel`` of one weight: before clipping,
        and as the optimizer was given them.
        """
        found = {
            word: math.hypot(*(norm for key, norm in norms.items() if moved is None or key in moved))
            for word, norms in self.whole.items()
        }
        for word, grads in (("weight_grad_norm", self.accumulated), ("weight_grad_norm_clipped", self.applied)):
            for slot, grad in grads.items():
                found[f"{_prefix(slot, grads)}/{word}/{slot.key}"] = float(torch.linalg.vector_norm(grad.double()))
        return found

    def clipped(self, tolerance: float = 1e-5) -> bool:
        """Whether the optimizer was given something else than what was accumulated."""
        return any(
            slot in self.applied and not torch.allclose(self.applied[slot], grad, rtol=tolerance, atol=0.0)
            for slot, grad in self.accumulated.items()
        )

    def by_layer(self, which: str = "own") -> dict[str, dict[str, dict[str, Tensor]]]:
        """By layer, direction and our word, in our layout."""
        found: dict[str, dict[str, dict[str, Tensor]]] = {}
        for slot, grad in getattr(self, which).items():
            there = found.setdefault(slot.layer, {}).setdefault(slot.direction, {})
            there[slot.key] = ours(slot.cell, slot.slot, grad).contiguous()
        return found


def _prefix(slot: WeightSlot, grads: Iterable[WeightSlot]) -> str:
    both = any(other.layer == slot.layer and other.direction != slot.direction for other in grads)
    return f"{slot.layer}/{slot.direction}" if both else slot.layer


class WeightGradientCapture:
    """Records the gradients of the parameters of recurrent modules while a model trains.

    Parameters
    ----------
    modules
        Recurrent modules by path, of which single gradients are kept. A weight that is computed from others, or
        frozen, has no gradient of its own here.
    everything
        All weights of the model.
    """

    def __init__(self, modules: Iterable[tuple[str, Any]], everything: Iterable[nn.Parameter]) -> None:
        self.on = False
        self._everything = list(everything)
        self._norms: dict[int, float] = {}
        self.slots: dict[int, WeightSlot] = {}
        self.parameters: dict[int, nn.Parameter] = {}
        self._own: dict[int, Tensor] = {}
        self._reached: set[int] = set()  # by what is accumulated: others may hold gradients of another step
        self._accumulated: dict[int, Tensor] = {}
        for path, module in modules:
            self._know(path, module)
        self._handles = [p.register_hook(self._arrival(key)) for key, p in self.parameters.items()]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self.forget()

    def forget(self) -> None:
        """A step is over."""
        self._own, self._accumulated = {}, {}
        self.begin()

    def begin(self) -> None:
        """Gradients are accumulated from here on."""
        self._reached.clear()

    def forget_own(self) -> None:
        """Another forward pass begins within the step."""
        self._own = {}

    def is_fresh(self, module: nn.Module) -> bool:
        """Whether nothing is accumulated at the weights of a module: no gradient anywhere, or zeros."""
        mine = (p for p in module.parameters() if id(p) in self.parameters)
        grads = [p.grad for p in mine if p.grad is not None]
        return not grads or not bool(min(grads, key=Tensor.numel).any())

    def accumulated(self) -> None:
        """A backward pass is over: note what ``.grad`` holds now."""
        self._accumulated, self._norms = self._held(), self._whole()

    def read(self, scale: float, applied_scale: float = 1.0) -> WeightGradients:
        """All three, now that the optimizer has its gradients; ``applied_scale`` is still on them."""
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
        """The norm of what ``.grad`` of every weight of the model holds, by its id."""
        grads = {id(p): entries(p.grad.detach()) for p in self._everything if p.grad is not None}
        wide = {key: grad.to(torch.promote_types(grad.dtype, torch.float32)) for key, grad in grads.items()}
        norms = [torch.linalg.vector_norm(grad).cpu().double() for grad in wide.values()]
        return dict(zip(grads, torch.stack(norms).tolist() if norms else [], strict=True))

    def _held(self) -> dict[int, Tensor]:
        held = {key: self.parameters[key].grad for key in self.parameters if key in self._reached}
        return {key: grad.detach().clone() for key, grad in held.items() if grad is not None}

    def _by_slot(self, grads: Mapping[int, Tensor], scale: float) -> dict[WeightSlot, Tensor]:
        return {self.slots[key]: unscaled(grad, scale) for key, grad in grads.items()}

    def _know(self, path: str, module: Any) -> None:
        known = class_of(module)
        assert known is not None
        for layer, direction, weights in cell_weights(module):
            for slot, weight in weights.items():
                if isinstance(weight, nn.Parameter) and weight.requires_grad:
                    self.slots.setdefault(
                        id(weight), WeightSlot(node_name(path, module, layer), direction, slot, known[0])
                    )
                    self.parameters[id(weight)] = weight

    def _arrival(self, key: int) -> Any:
        def hook(grad: Tensor) -> None:
            if self.on:
                self._reached.add(key)
                known = self._own.get(key)
                self._own[key] = grad.detach().clone() if known is None else known + grad.detach()

        return hook


def entries(grad: Tensor) -> Tensor:
    """What a gradient holds: of a sparse one, as embeddings have it, the rows that are there."""
    return grad.coalesce().values() if grad.is_sparse else grad


def widened(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def unscaled(grad: Tensor, scale: float) -> Tensor:
    """A gradient of the loss from that of the scaled loss, in float32 at least."""
    return widened(grad) if scale == 1.0 else widened(grad) / scale
