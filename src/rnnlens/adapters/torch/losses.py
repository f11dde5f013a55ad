"""The scalar to be differentiated: the user's loss on the model's output, in torch's order (output, target)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...errors import InputError, did_you_mean, message
from ..protocol import Batch
from .boundaries import leaves_of
from .broadcasts import Broadcasts
from .inputs import as_tensors
from .loss_weights import label, weighted


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
    loss = resolved(batch.loss)
    if batch.y is None:
        if _required(loss) >= 2:
            raise InputError(
                message(
                    "The loss takes a target and none was given.",
                    got=f"loss={label(loss)}, y=None",
                    expected="y, or a loss of the output alone",
                    hint="rl.trace(model, x, y, loss=...) or loss=lambda output: output.sum()",
                )
            )
        return _scalar(loss(outputs), loss)
    target = as_tensors(batch.y, model, "y")
    with Broadcasts(leaves_of(outputs), leaves_of(target)):
        if batch.sample_weight is None and batch.class_weight is None:
            return _scalar(loss(outputs, target), loss)
        return _scalar(weighted(loss, outputs, target, batch, model), loss)


def resolved(loss: Any) -> Callable[..., Any]:
    """The callable that a loss stands for: itself, or the function of a name."""
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


def _scalar(value: Any, loss: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(
            message(
                "The loss is not a scalar.",
                got=f"{label(loss)} returned {'shape ' if isinstance(shape, tuple) else ''}{shape}",
                expected="a tensor with one value",
                hint="reduce it: .mean() or .sum(), or reduction='mean'",
            )
        )
    return value.reshape(())
