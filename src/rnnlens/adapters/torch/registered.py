"""Torch cells of the user's own whose equations were registered: their weights by our names, their derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import array_api_compat.torch as torch_xp
import numpy as np
import torch
from torch import Tensor, nn

from ...recurrence.cells import Cell, registered
from ...recurrence.cells.registry import Registration
from ...typing import Array
from ..composed import Composed
from ..protocol import LayerWeights, Port
from .values import replayable


def described(module: nn.Module, known: Registration) -> Cell:
    """The equations of a cell with the values of its weights; differentiated by torch where they are not here."""
    parameters = dict(module.named_parameters())
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    made = known.make(module, {name: replayable(p).cpu().numpy() for name, p in parameters.items()})
    made = made.with_weights(lambda array: torch.tensor(array, device=device))
    if not known.differentiates:
        object.__setattr__(made, "autodiff", TorchAutodiff(made))
    return made


def arranged(known: Registration, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a cell's weights in our layout."""
    arrays = known.arrays({name: replayable(grad).cpu().numpy() for name, grad in grads.items()})
    device = next((grad.device for grad in grads.values()), None)
    return {name: torch.tensor(array, device=device) for name, array in arrays.items()}


def registered_weights(module: nn.Module, known: Registration) -> LayerWeights:
    """Its weights by our names."""
    cell, trainable = described(module, known), all(p.requires_grad for p in module.parameters())
    return LayerWeights(cell.weights(), dict.fromkeys(cell.weights(), trainable), {"forward": cell})


def put_together(modules: Mapping[str, nn.Module], port: Port) -> Composed | None:
    """What a weight of a registered cell is made of; None for any other weight."""
    module = modules.get(str(port.layer).partition("#")[0])
    known = None if module is None else registered(module)
    if module is None or known is None or port.key not in known.cell.parameters:
        return None
    parts = {name: name.rpartition(".") for name, _ in module.named_parameters()}
    return Composed(known, port.key, {n: (f".{path}" if path else "", key) for n, (path, _, key) in parts.items()})


class TorchAutodiff:
    """The step of a registered cell on tensors; see :class:`rnnlens.recurrence.cells.autodiff.Autodiff`."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._weights = {name: torch.as_tensor(w) for name, w in cell.weights().items()}

    def vjp(
        self, projected: Array, before: Sequence[Array], cotangent: Sequence[Array]
    ) -> tuple[Array, list[Array], Mapping[str, Array]]:
        """Pull dL/ds_t back to what was projected, to the states before and to the weights."""
        leaves, after, cotangents = self._run(projected, before, cotangent)
        found = _pulled(after, cotangents, leaves)
        back = [_like(grad, projected) for grad in found]
        count = 1 + len(before)
        return back[0], back[1:count], dict(zip(self._weights, back[count:], strict=True))

    def produced(self, projected: Array, before: Sequence[Array], cotangent: Sequence[Array]) -> list[Array]:
        """Pull dL/ds_t back to each state where the step computes it."""
        leaves, after, cotangents = self._run(projected, before, cotangent)
        kept = [any(state is leaf for leaf in leaves) or not state.requires_grad for state in after]
        found = [
            c if is_kept else _pulled(after, cotangents, [state])[0]
            for state, c, is_kept in zip(after, cotangents, kept, strict=True)
        ]
        return [_like(grad, projected) for grad in found]

    def _run(self, projected: Array, before: Sequence[Array], cotangent: Sequence[Array]) -> Any:
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [_tensor(a).requires_grad_() for a in (projected, *before)]
            weights = {name: w.to(leaves[0]).detach().requires_grad_() for name, w in self._weights.items()}
            _, after = self._cell.holding(weights).step(leaves[0], tuple(leaves[1:]), None, torch_xp)
            return [*leaves, *weights.values()], list(after), [_tensor(c) for c in cotangent]


def _pulled(targets: Sequence[Tensor], cotangents: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Tensor]:
    pairs = [(t, c) for t, c in zip(targets, cotangents, strict=True) if t.requires_grad]
    if not pairs:
        return [torch.zeros_like(s) for s in sources]
    starts, given = zip(*pairs, strict=True)
    found = torch.autograd.grad(starts, sources, given, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(s) if g is None else g for g, s in zip(found, sources, strict=True)]


def _tensor(array: Array) -> Tensor:
    return torch.tensor(array) if isinstance(array, np.ndarray) else array.detach().clone()


def _like(grad: Tensor, array: Array) -> Array:
    return grad.detach().cpu().numpy() if isinstance(array, np.ndarray) else grad.detach()
