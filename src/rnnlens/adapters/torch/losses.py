"""Evaluates the user's loss as a scalar, with torch's order of arguments: (output, target)."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ...autodiff.torch import backward_pass, pull_gradients
from ...errors import InputError, UnsupportedError, did_you_mean, raised_by
from ...typing import Array, named_constants
from ..protocol import Batch, Outputs
from ..shared.call_errors import explain_loss
from .cells import at_least_float32
from .discover import named_modules, unwrap
from .inputs import as_tensors, leaves_of, map_leaves, returned_leaves, tensors_of
from .lineage import upstream_nodes
from .restore import borrowed_model

#: Elementwise operations with which a loss compares output and target.
_ELEMENTWISE = {
    "sub", "subtract", "rsub", "__sub__", "__rsub__", "mul", "multiply", "__mul__", "__rmul__", "add", "__add__",
    "div", "__truediv__", "where", "maximum", "minimum", "square", "squared_difference",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss", "poisson_nll_loss",
}  # fmt: skip
#: Losses whose mean divides by the sum of the class weights of the counted labels, not by their number.
_BY_CLASS = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")
_BY_WEIGHT = ("mse_loss", "l1_loss", "huber_loss")
_BY_LENGTH = ("ctc_loss", "CTCLoss")
#: Losses whose mean is over all values (or samples): the mean over equal batches is the mean over the data set.
_PLAIN = {
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "poisson_nll_loss", "kl_div",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "multilabel_soft_margin_loss", "hinge_embedding_loss",
    "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss", "PoissonNLLLoss", "KLDivLoss",
    "BCELoss", "BCEWithLogitsLoss", "MultiLabelSoftMarginLoss", "HingeEmbeddingLoss",
}  # fmt: skip


def evaluate(batch: Batch, outputs: Any, model: nn.Module) -> torch.Tensor | None:
    """Return the loss as a scalar tensor; None if the batch has no loss."""
    if batch.loss is None:
        if batch.y is not None:
            raise InputError(
                "A target was given, but no loss: torch models have no compiled loss.",
                expected="loss=callable(output, target)",
                hint=f"loss=torch.nn.functional.{_usual_loss(batch.y)}",
            )
        return None
    loss = resolve_loss(batch.loss)
    if batch.y is None:
        arguments = signature_parameters(loss.forward if isinstance(loss, nn.Module) else loss).values()
        positional = [p for p in arguments if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if sum(p.default is p.empty for p in positional) >= 2:
            raise InputError(
                "The loss takes a target and none was given.",
                got=f"loss={loss_name(loss)}, y=None",
                expected="y, or a loss of the output alone",
                hint="rl.trace(model, x, y, loss=...) or loss=lambda output: output.sum()",
            )
        return _as_scalar(loss(outputs), loss)
    predicted = tensors_of(outputs)
    target = as_tensors(batch.y, model, "y", predicted[0].device if predicted else None)
    with BroadcastCheck(leaves_of(outputs), leaves_of(target)):
        if batch.sample_weight is None and batch.class_weight is None:
            return _as_scalar(loss(outputs, target), loss)
        return _as_scalar(weighted_loss(loss, outputs, target, batch, model), loss)


def _usual_loss(y: Any) -> str:
    """Return the name of the usual loss of a target: of classes, or of measured values."""
    return "cross_entropy" if "int" in str(getattr(y, "dtype", "")) else "mse_loss"


def loss_errors(batch: Batch, outputs: Any) -> AbstractContextManager[None]:
    """Convert exceptions of the user's loss within the block, explained by what it was called with."""
    explain = functools.partial(explain_loss, batch.loss, outputs, batch.y, output_first=True, x=batch.x)
    return raised_by("Your loss", explain)


def gradients_of(loss: Tensor, tensors: Iterable[Tensor], *, retain_graph: bool = False) -> dict[int, Tensor]:
    """Return the gradients of a loss by the identity of tensors, without those that no path leads to."""
    sources = list({id(tensor): tensor for tensor in tensors if tensor.requires_grad}.values())
    if not loss.requires_grad or not sources:
        return {}
    with raised_by("The backward pass of your model or loss"):
        grads = backward_pass([loss], sources, retain_graph=retain_graph)
    return {id(source): grad.detach() for source, grad in zip(sources, grads, strict=True) if grad is not None}


def reaches(loss: Tensor, targets: Iterable[Tensor], *, without: Iterable[Tensor]) -> bool:
    """Return whether a path of the graph leads from a loss to one of ``targets``, but not through ``without``."""
    target_list = list(targets)
    nodes, leaves = {tensor.grad_fn for tensor in target_list}, {id(tensor) for tensor in target_list}
    searched_nodes = upstream_nodes([loss.grad_fn], {tensor.grad_fn for tensor in without}) if target_list else ()
    return any(node in nodes or id(getattr(node, "variable", None)) in leaves for node in searched_nodes)


def resolve_loss(loss: Any) -> Callable[..., Any]:
    """Return a loss as a callable: itself, or the function of that name in ``torch.nn.functional``."""
    if not isinstance(loss, str):
        if not callable(loss):
            raise InputError("The loss is not callable.", got=repr(loss), expected="loss(output, target)")
        return loss  # type: ignore[no-any-return]
    known = [name for name in dir(nn.functional) if name.endswith("loss") or "entropy" in name]
    name = loss if loss in known else f"{loss}_loss"
    if name not in known:
        raise InputError(
            "torch.nn.functional has no loss of that name.", got=repr(loss), hint=did_you_mean(loss, known)
        )
    return getattr(nn.functional, name)  # type: ignore[no-any-return]


def _as_scalar(value: Any, loss: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(
            "The loss is not a scalar.",
            got=f"{loss_name(loss)} returned {'shape ' if isinstance(shape, tuple) else ''}{shape}",
            expected="a tensor with one value",
            hint=_scalar_hint(value),
        )
    return value.reshape(())


def _scalar_hint(value: Any) -> str:
    if value is None:
        return "return the loss from the function: lambda output, y: criterion(output, y)"
    if isinstance(value, int | float):
        return "leave out .item() or float(): a tensor can be differentiated, a number cannot"
    return "reduce it: .mean() or .sum(), or reduction='mean'"


class BroadcastCheck(TorchFunctionMode):  # type: ignore[misc]
    """Function mode that raises ``InputError`` if output and target of different ranks broadcast to a larger shape."""

    def __init__(self, outputs: Iterable[Any], targets: Iterable[Any]) -> None:
        super().__init__()
        self.outputs = {tuple(t.shape) for t in outputs if isinstance(t, Tensor)}
        self.targets = {tuple(t.shape) for t in targets if isinstance(t, Tensor)} - self.outputs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the shapes of an elementwise operation, then run it."""
        if self.targets and getattr(func, "__name__", "") in _ELEMENTWISE:
            shapes = [tuple(t.shape) for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)]
            for output in self.outputs.intersection(shapes):
                for target in self.targets.intersection(shapes):
                    _refuse_larger(output, target)
        return func(*args, **(kwargs or {}))


def _refuse_larger(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    try:
        broadcast_shape = tuple(torch.broadcast_shapes(output, target))
    except RuntimeError:
        return
    if len(output) != len(target) and math.prod(broadcast_shape) > max(math.prod(output), math.prod(target)):
        raise InputError(
            "The loss would broadcast the target against the output, every sample with every other.",
            got=f"output {output} and target {target}: {broadcast_shape}",
            expected=f"a target of shape {output}",
            hint="y[:, None], or output.squeeze(-1) in the loss",
        )


def weighted_loss(loss: Any, outputs: Any, target: Any, batch: Batch, model: nn.Module) -> Tensor:
    """Return sum(weight * value) / divisor of a weighted loss, with the divisor 1 for a sum, the count for a mean."""
    values, reduced = _unreduced_values(loss, outputs, target), loss(outputs, target)
    weight = values.new_ones(())
    if batch.sample_weight is not None:
        sample_weight = as_tensors(batch.sample_weight, model, "sample_weight").to(values)
        weight = weight * _broadcastable(sample_weight, values, "sample_weight")
    if batch.class_weight is not None:
        weight = weight * _broadcastable(
            _class_weights(target, outputs, batch.class_weight).to(values), values, "class_weight"
        )
    divisor = _divisor(loss, values, outputs, target)
    tolerance = 1e3 * torch.finfo(reduced.dtype).eps
    unweighted, reduced_value = (t.detach().to(reduced).reshape(()) for t in (values.sum() / divisor, reduced))
    if loss_name(loss) in _BY_LENGTH or not torch.allclose(
        unweighted, reduced_value, rtol=tolerance, atol=tolerance, equal_nan=True
    ):
        raise UnsupportedError(
            "The averaging of this loss is unknown, so weights cannot be applied.",
            got=f"{loss_name(loss)} with reduction={reduction(loss)!r}",
            expected='reduction="sum" or a mean over values, or your own weighting inside the loss',
        )
    return (weight * values).sum() / divisor


def signature_parameters(loss: Any) -> Mapping[str, Any]:
    """Return the parameters of a callable's signature; empty if the signature cannot be read."""
    try:
        return inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return {}


def loss_name(loss: Any) -> str:
    """Return the name of a loss: of the function, of the function inside a partial, or of the class."""
    if isinstance(loss, functools.partial):
        return loss_name(loss.func)
    return str(getattr(loss, "__name__", type(loss).__name__))


def reduction(loss: Any) -> str | None:
    """Return the reduction of a loss, such as ``"mean"`` or ``"sum"``; None for a callable without one."""
    value = getattr(loss, "reduction", None)
    if value is None and not isinstance(loss, nn.Module) and "reduction" in signature_parameters(loss):
        value = signature_parameters(loss)["reduction"].default
    return value if isinstance(value, str) else None


def loss_option(loss: Any, name: str, default: Any = None) -> Any:
    """Return an option of a loss: a module's attribute or a partial's keyword; ``default`` if it has none."""
    if isinstance(loss, nn.Module):
        return getattr(loss, name, default)
    parameter = signature_parameters(loss).get(name)
    return default if parameter is None or parameter.default is parameter.empty else parameter.default


def _unreduced_values(loss: Any, outputs: Any, target: Any) -> Tensor:
    """Return the unreduced values of a loss; raise ``UnsupportedError`` if it cannot be evaluated without reduction."""
    values = None
    if reduction(loss) not in (None, "none") and isinstance(loss, nn.Module):
        unreduced_loss = copy.copy(loss)
        unreduced_loss.reduction = "none"
        values = unreduced_loss(outputs, target)
    elif reduction(loss) is not None and not isinstance(loss, nn.Module):
        values = loss(outputs, target, reduction="none")
    if not isinstance(values, Tensor):
        raise UnsupportedError(
            "sample_weight and class_weight need a loss that can be computed per sample.",
            got=loss_name(loss),
            expected="a loss of torch.nn with reduction=, or your own weighting inside the loss",
        )
    return values


def _divisor(loss: Any, values: Tensor, outputs: Any, target: Any) -> Tensor | float:
    """Return the number by which a loss divides the sum of its values: of samples, of values, or of their weights."""
    loss_reduction = reduction(loss)
    if loss_reduction == "sum":
        return 1.0
    if loss_reduction == "batchmean":
        return float(outputs.shape[0])
    if loss_name(loss) in _BY_CLASS and not target.is_floating_point():
        class_weights, ignored_label = loss_option(loss, "weight"), loss_option(loss, "ignore_index", -100)
        is_counted = target != ignored_label
        if class_weights is None:
            return is_counted.sum().to(values)
        return class_weights.to(values)[target.clamp(min=0)][is_counted].sum()
    if loss_name(loss) in _BY_CLASS:
        return float(target.numel() / target.shape[1]) if target.dim() > 1 else 1.0
    if loss_name(loss) in _BY_WEIGHT and loss_option(loss, "weight") is not None:
        return loss_option(loss, "weight").to(values).sum()
    return float(max(values.numel(), 1))


def _broadcastable(weight: Tensor, values: Tensor, name: str) -> Tensor:
    """Reshape sample weights, one per sample or per sample and step, to broadcast over the values of a loss."""
    if weight.dim() > 1 and weight.dim() == values.dim() + 1 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    fits = weight.dim() <= values.dim() and all(
        weight_size in (1, size) for weight_size, size in zip(weight.shape, values.shape, strict=False)
    )
    if not fits or weight.dim() == 0 or (weight.shape[0] != values.shape[0]):
        raise InputError(
            f"{name} does not match the shape of the loss values.",
            got=f"shape {tuple(weight.shape)}",
            expected=f"the first axes of {tuple(values.shape)}: one weight per sample, or per sample and step",
        )
    return weight.reshape(*weight.shape, *([1] * (values.dim() - weight.dim())))


def _class_weights(target: Tensor, outputs: Any, weight_by_label: Mapping[Any, Any]) -> Tensor:
    """Return the class weight of each label; 1 for labels that the table does not contain."""
    labels, has_class_axis, is_one_hot = target, False, False
    if target.is_floating_point():
        has_class_axis = target.dim() > 1 and target.shape == outputs.shape and target.shape[1] > 1
        is_one_hot = (
            has_class_axis and bool(((target == 0) | (target == 1)).all()) and bool((target.sum(dim=1) == 1).all())
        )
        labels = target.argmax(dim=1) if is_one_hot else target
    if (has_class_axis and not is_one_hot) or not torch.equal(labels, labels.round()):
        raise InputError(
            "class_weight needs class labels.", got="targets that are not whole numbers", hint="sample_weight="
        )
    weight = torch.ones(labels.shape, device=labels.device, dtype=torch.float64)
    for key, value in weight_by_label.items():
        weight[labels == int(key)] = float(value)
    return weight


def combination(model: nn.Module, batch: Batch) -> str | None:
    """Return how batch losses combine to that of the data set: ``"mean"``, ``"sum"``, or None if unknown."""
    loss = resolve_loss(batch.loss)
    name, loss_reduction = loss_name(loss), reduction(loss)
    unbound_loss = loss.func if isinstance(loss, functools.partial) else loss
    module_name = (
        type(unbound_loss).__module__
        if isinstance(unbound_loss, nn.Module)
        else getattr(unbound_loss, "__module__", "")
    )
    if (
        not str(module_name).startswith("torch.")
        or loss_option(loss, "weight") is not None
        or not hasattr(batch.y, "shape")
    ):
        return None
    if name in _PLAIN and loss_reduction in ("mean", "sum", "batchmean"):
        return "sum" if loss_reduction == "sum" else "mean"
    if name in _BY_CLASS and loss_reduction in ("mean", "sum"):
        has_ignored = loss_reduction == "mean" and bool(
            np.any(host_array(batch.y) == loss_option(loss, "ignore_index", -100))
        )
        return None if has_ignored else str(loss_reduction)
    return None


def mixes_samples(model: nn.Module, training: bool) -> str | None:
    """Return the name of a layer that uses batch statistics; ``"?"`` if the user's own forward may mix samples.

    Returns None otherwise.
    """
    for name, module in named_modules(unwrap(model)):
        uses_batch = training or not getattr(module, "track_running_stats", True)
        if isinstance(module, _BatchNorm) and uses_batch:
            return name
    return "?"


def loss_of(model: nn.Module, batch: Batch, outputs: Outputs) -> tuple[float, list[Array | None]]:
    """Return the loss of joined outputs, and its gradient at each; None where the loss does not depend on one."""
    model = unwrap(model)
    constants = named_constants(outputs.tree)
    if constants:
        name, value = next(iter(constants.items()))
        raise UnsupportedError(
            "The loss needs the outputs of several batches joined, and the model returns more than tensors.",
            got=f"output[{name}], {type(value).__name__}",
            expected='combine="mean" or "sum", or all samples as one batch',
        )
    model_leaves = returned_leaves(outputs.tree)
    leaves = [torch.as_tensor(new).to(old) for new, old in zip(outputs.leaves, model_leaves, strict=True)]
    weights = [p for p in nn.Module.parameters(model) if p.requires_grad]
    with borrowed_model(model, training=batch.training, seed=batch.seed, loss=batch.loss):
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in leaves]
        remaining = iter(leaves)
        tree = map_leaves(
            outputs.tree, lambda old: next(remaining) if isinstance(old, Tensor) else next(remaining).numpy()
        )
        loss = evaluate(batch, tree, model)
        assert loss is not None
        grads_in_order = iter(pull_gradients([loss], [*(t for t in leaves if t.requires_grad), *weights]))
        grads = [next(grads_in_order) if t.requires_grad else None for t in leaves]
        if any(grad is not None for grad in grads_in_order):
            raise UnsupportedError(
                "The loss depends directly on weights of the model, not only on its outputs.",
                got=f"{loss_name(batch.loss)} over several batches",
                expected='combine="mean" or "sum", or all samples as one batch',
                hint="differentiate the weight penalty separately: it needs no data",
            )
    return float(loss.detach()), [None if grad is None else host_array(grad) for grad in grads]


def host_array(value: Any) -> Array:
    """Return a value as a NumPy array, half precision widened to float32."""
    if not isinstance(value, Tensor):
        return np.asarray(value)
    return at_least_float32(value.detach().cpu()).resolve_conj().numpy()
