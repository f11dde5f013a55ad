"""Weights of samples, steps and classes in a torch loss: they multiply its values, and ones change nothing."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError, UnsupportedError, message
from ..protocol import Batch
from .inputs import as_tensors

#: Losses whose mean is over the weights of the classes that count, not over their number.
_BY_CLASS = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")
_BY_WEIGHT = ("mse_loss", "l1_loss", "huber_loss")
_BY_LENGTH = ("ctc_loss", "CTCLoss")


def weighted(loss: Any, outputs: Any, target: Any, batch: Batch, model: nn.Module) -> Tensor:
    """Sum of weight times value, over what the loss itself divides by: 1 for a sum, the count for a mean.

    Raises
    ------
    InputError
        If the weights fit neither the samples nor the values of the loss.
    UnsupportedError
        If the loss cannot be had value by value, or divides by what is not known here.
    """
    values, whole = _values(loss, outputs, target), loss(outputs, target)
    weight = values.new_ones(())
    if batch.sample_weight is not None:
        given = as_tensors(batch.sample_weight, model, "sample_weight").to(values)
        weight = weight * _beside(given, values, "sample_weight")
    if batch.class_weight is not None:
        weight = weight * _beside(_of_classes(target, outputs, batch.class_weight).to(values), values, "class_weight")
    divisor = _divisor(loss, values, outputs, target)
    _must_agree(loss, values.detach().sum() / divisor, whole.detach())
    return (weight * values).sum() / divisor


def parameters(loss: Any) -> Mapping[str, Any]:
    """The parameters of a callable; none where its signature cannot be read."""
    try:
        return inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return {}


def label(loss: Any) -> str:
    """What a loss is called: the name of a function, of what a partial calls, or of a class."""
    if isinstance(loss, functools.partial):
        return label(loss.func)
    return str(getattr(loss, "__name__", type(loss).__name__))


def reduction(loss: Any) -> str | None:
    """``"mean"``, ``"sum"``, ... as a loss of torch says it; None for a callable that does not."""
    found = getattr(loss, "reduction", None)
    if found is None and not isinstance(loss, nn.Module) and "reduction" in parameters(loss):
        found = parameters(loss)["reduction"].default
    return found if isinstance(found, str) else None


def option(loss: Any, name: str, default: Any = None) -> Any:
    """An argument that a loss was made with, as a module's attribute or a partial's keyword."""
    if isinstance(loss, nn.Module):
        return getattr(loss, name, default)
    parameter = parameters(loss).get(name)
    return default if parameter is None or parameter.default is parameter.empty else parameter.default


def _values(loss: Any, outputs: Any, target: Any) -> Tensor:
    """The loss before its reduction."""
    values = None
    if reduction(loss) not in (None, "none") and isinstance(loss, nn.Module):
        single = copy.copy(loss)
        single.reduction = "none"
        values = single(outputs, target)
    elif reduction(loss) is not None and not isinstance(loss, nn.Module):
        values = loss(outputs, target, reduction="none")
    if not isinstance(values, Tensor):
        raise UnsupportedError(
            message(
                "sample_weight and class_weight need a loss that can be had per sample.",
                got=label(loss),
                expected="a loss of torch.nn with reduction=, or your own weighting inside the loss",
            )
        )
    return values


def _divisor(loss: Any, values: Tensor, outputs: Any, target: Any) -> Tensor | float:
    """What the loss divides the sum of its values by."""
    how = reduction(loss)
    if how == "sum":
        return 1.0
    if how == "batchmean":
        return float(outputs.shape[0])
    if label(loss) in _BY_CLASS and not target.is_floating_point():
        classes, ignored = option(loss, "weight"), option(loss, "ignore_index", -100)
        counted = target != ignored
        if classes is None:
            return counted.sum().to(values)
        return classes.to(values)[target.clamp(min=0)][counted].sum()
    if label(loss) in _BY_CLASS:
        return float(target.numel() / target.shape[1]) if target.dim() > 1 else 1.0
    if label(loss) in _BY_WEIGHT and option(loss, "weight") is not None:
        return option(loss, "weight").to(values).sum()
    return float(max(values.numel(), 1))


def _must_agree(loss: Any, ours: Tensor, own: Tensor) -> None:
    """With weights of 1 the loss must be the user's own; otherwise its reduction is not understood."""
    slack = 1e3 * torch.finfo(own.dtype).eps
    if label(loss) in _BY_LENGTH or not torch.allclose(
        ours.to(own).reshape(()), own.reshape(()), rtol=slack, atol=slack, equal_nan=True
    ):
        raise UnsupportedError(
            message(
                "How this loss averages its values is not known, so weights cannot be put into it.",
                got=f"{label(loss)} with reduction={reduction(loss)!r}",
                expected='reduction="sum" or a mean over values, or your own weighting inside the loss',
            )
        )


def _beside(weight: Tensor, values: Tensor, name: str) -> Tensor:
    """Weights with the first axes of the values: one per sample, or one per sample and step."""
    if weight.dim() > 1 and weight.dim() == values.dim() + 1 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    fits = weight.dim() <= values.dim() and all(
        mine in (1, size) for mine, size in zip(weight.shape, values.shape, strict=False)
    )
    if not fits or weight.dim() == 0 or (weight.shape[0] != values.shape[0]):
        raise InputError(
            message(
                f"{name} does not fit the values of the loss.",
                got=f"shape {tuple(weight.shape)}",
                expected=f"the first axes of {tuple(values.shape)}: one weight per sample, or per sample and step",
            )
        )
    return weight.reshape(*weight.shape, *([1] * (values.dim() - weight.dim())))


def _of_classes(target: Tensor, outputs: Any, table: Mapping[Any, Any]) -> Tensor:
    """The weight of each label; 1 for labels that the table does not name."""
    labels, several, one_hot = target, False, False
    if target.is_floating_point():
        several = target.dim() > 1 and target.shape == outputs.shape and target.shape[1] > 1
        one_hot = several and bool(((target == 0) | (target == 1)).all()) and bool((target.sum(dim=1) == 1).all())
        labels = target.argmax(dim=1) if one_hot else target
    if (several and not one_hot) or not torch.equal(labels, labels.round()):
        raise InputError(
            message("class_weight needs class labels.", got="targets that are not whole numbers", hint="sample_weight=")
        )
    weight = torch.ones(labels.shape, device=labels.device, dtype=torch.float64)
    for key, value in table.items():
        weight[labels == int(key)] = float(value)
    return weight
