"""Gradients of the loss by states and coefficients of whole-sequence layers, for ``rl.gradients``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..adapters.protocol import Adapter
from ..errors import UnsupportedError
from ..results.array import ResultArray, record
from .names import known_model
from .trace import trace

#: Quantities of a whole-sequence layer that the loss can be differentiated by.
QUANTITIES = ("state", "decay", "write", "read")


def scan_tensor(adapter: Adapter, model: Any, wrt: Any) -> tuple[str, str] | None:
    """Return layer and quantity that ``wrt`` names in a whole-sequence layer; None for any other tensor."""
    named = re.fullmatch(rf"(?P<layer>.+)\.(?P<quantity>{'|'.join(QUANTITIES)})", wrt) if isinstance(wrt, str) else None
    if named is None:
        return None
    layers = list(known_model(adapter, model).sequences)
    found = [name for name in layers if name == named["layer"] or name.endswith(f".{named['layer']}")]
    return (found[0], named["quantity"]) if len(found) == 1 else None


def scan_gradient(model: Any, x: Any, y: Any, tensor: tuple[str, str], options: Mapping[str, Any]) -> ResultArray:
    """Return the gradient of the loss by a state or coefficient of a scan, with checks and certificate.

    ``options``: the other arguments of ``rl.gradients`` that are not at their defaults.

    Raises
    ------
    UnsupportedError
        For a target other than the loss, or a reduction of it.
    """
    (layer, quantity), known = tensor, ("loss", "sample_weight", "class_weight", "training", "seed", "axes")
    others = [name for name in options if name not in known]
    if others:
        raise UnsupportedError(
            f"A gradient with respect to the {quantity} of a whole-sequence layer is one of the loss of a batch.",
            got=", ".join(f"{name}=" for name in others),
            expected=f'rl.gradients(model, x, y, loss=..., wrt="{layer}.{quantity}")',
            hint="loss=lambda output: ..., any scalar of the output; steps are chosen by rl.trace(..., at=)",
        )
    name = f"{quantity}_grad"
    result = trace(model, x, y, layers=layer, quantities=[name], **options)
    array = ResultArray(result[layer][name])
    array.attrs |= record([check for check in result.checks if check.layer], result.certificate)
    return array
