"""Torch cells of the user's own whose equations were registered: their weights by our names, their derivatives."""

from __future__ import annotations

from collections.abc import Mapping

import array_api_compat.torch as torch_xp
import torch
from torch import Tensor, nn

from ...autodiff import engine
from ...recurrence.cells import Cell, registered
from ...recurrence.cells.registry import Registration
from ...typing import Array
from ..composed import Composed
from ..described import differentiated
from ..protocol import LayerWeights, Port
from .values import replayable


def described(module: nn.Module, known: Registration) -> Cell:
    """The equations of a cell with the values of its weights; differentiated by torch where they are not here."""
    parameters = dict(module.named_parameters())
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    made = known.make(module, {name: replayable(p).cpu().numpy() for name, p in parameters.items()})
    made = made.with_weights(lambda array: torch.tensor(array, device=device))
    return differentiated(made, known, engine("torch"), torch_xp, _tensor)


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


def _tensor(array: Array) -> Tensor:
    """A copy of what NumPy may not let be written to."""
    return array.detach() if isinstance(array, Tensor) else torch.tensor(array)
