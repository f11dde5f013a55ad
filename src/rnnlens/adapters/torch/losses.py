"""The scalar to be differentiated: the user's loss on the model's output, in torch's order (output, target)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...errors import InputError, UnsupportedError, did_you_mean, message
from ..protocol import Batch
from .inputs import as_tensors


def evaluate(batch: Batch, outputs: Any, model: nn.Module) -> torch.Tensor | None:
    """The loss as a scalar tensor; None where the batch names no loss.

    Raises
    ------
    InputError
        If a target is given without a loss, the loss needs a target that is not given, or it is not a scalar.
    """
    if batch.loss is None:
        if batch.y is not None:
            raise InputError(
                message(
                    "A target was given, but no loss: a torch model does not carry one.",
                    expected="loss=callable(output, target)",
                    hint="loss=torch.nn.functional.mse_loss",
                )
            )
        return None
    loss = _resolve(batch.loss)
    if batch.y is None:
        if _required(loss) >= 2:
            raise InputError(
                message(
                    "The loss takes a target and none was given.",
                    got=f"loss={_label(loss)}, y=None",
                    expected="y, or a loss of the output alone",
                    hint="rl.trace(model, x, y, loss=...) or loss=lambda output: output.sum()",
                )
            )
        return _scalar(loss(outputs), loss)
    target = as_tensors(batch.y, model, "y")
    if batch.sample_weight is None and batch.class_weight is None:
        return _scalar(loss(outputs, target), loss)
    return _weighted(loss, outputs, target, batch, model)


def _resolve(loss: Any) -> Callable[..., Any]:
    if not isinstance(loss, str):
        if not callable(loss):
            raise InputError(message("The loss is not callable.", got=repr(loss), expected="loss(output, target)"))
        return loss  # type: ignore[no-any-return]
    known = [name for name in dir(nn.functional) if name.endswith("loss") or "entropy" in name]
    name = loss if loss in known else f"{loss}_loss"
    if name not in known:
        raise InputError(
            message("No loss of that name in torch.nn.functional.", got=repr(loss), hint=did_you_mean(loss, known))
        )
    return getattr(nn.functional, name)  # type: ignore[no-any-return]


def _required(loss: Any) -> int:
    """How many positional arguments a loss cannot do without; 1 where its signature cannot be read."""
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
    except (TypeError, ValueError):
        return 1
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _label(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _scalar(value: Any, loss: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(
            message(
                "The loss is not a scalar.",
                got=f"{_label(loss)} returned {'shape ' if isinstance(shape, tuple) else ''}{shape}",
                expected="a tensor with one value",
                hint="reduce it: .mean() or .sum(), or reduction='mean'",
            )
        )
    return value.reshape(())


def _weighted(loss: Any, outputs: Any, target: Any, batch: Batch, model: nn.Module) -> torch.Tensor:
    """Mean over samples of weight * loss of the sample, the loss of a sample being the mean over its other axes."""
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        single = copy.copy(loss)
        single.reduction = "none"
        values = single(outputs, target)
    elif not isinstance(loss, nn.Module) and "reduction" in _parameters(loss):
        values = loss(outputs, target, reduction="none")
    else:
        raise UnsupportedError(
            message(
                "sample_weight and class_weight need a loss that can be had per sample.",
                got=_label(loss),
                expected="a loss of torch.nn with reduction=, or your own weighting inside the loss",
            )
        )
    per_sample = values.flatten(1).mean(dim=1) if values.dim() > 1 else values
    weight = torch.ones_like(per_sample)
    if batch.sample_weight is not None:
        weight = weight * as_tensors(batch.sample_weight, model, "sample_weight").to(weight).reshape(-1)
    if batch.class_weight is not None:
        table = {int(key): float(value) for key, value in batch.class_weight.items()}
        weight = weight * weight.new_tensor([table.get(int(label), 1.0) for label in target.reshape(-1)])
    return (weight * per_sample).mean()


def _parameters(loss: Any) -> Any:
    try:
        return inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return {}
