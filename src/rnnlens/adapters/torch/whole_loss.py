"""The loss of a data set as one function of what the model returned for all of its batches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence

from ...errors import UnsupportedError, message
from ...typing import Array
from ..protocol import Batch, Outputs
from .boundaries import leaves_of
from .discover import named_modules, unwrapped
from .inputs import on_leaves
from .loss_weights import label, option, reduction
from .losses import evaluate, resolved
from .pullback import TorchPullback
from .restore import borrowed

#: Losses whose mean is over all values (or all samples): means of equal batches are the mean of the whole.
_PLAIN = {
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "poisson_nll_loss", "kl_div",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "multilabel_soft_margin_loss", "hinge_embedding_loss",
    "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss", "PoissonNLLLoss", "KLDivLoss",
    "BCELoss", "BCEWithLogitsLoss", "MultiLabelSoftMarginLoss", "HingeEmbeddingLoss",
}  # fmt: skip
_BY_CLASS = {"cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss"}


def combination(model: nn.Module, batch: Batch) -> str | None:
    """How losses of batches make up that of the data set: ``"mean"``, ``"sum"``; None where that is not known."""
    loss = resolved(batch.loss)
    name, how = label(loss), reduction(loss)
    if not _is_torchs_own(loss) or option(loss, "weight") is not None or not hasattr(batch.y, "shape"):
        return None
    if name in _PLAIN and how in ("mean", "sum", "batchmean"):
        return "sum" if how == "sum" else "mean"
    if name in _BY_CLASS and how in ("mean", "sum"):
        ignored = how == "mean" and bool(np.any(_plain(batch.y) == option(loss, "ignore_index", -100)))
        return None if ignored else str(how)
    return None


def _is_torchs_own(loss: Any) -> bool:
    if isinstance(loss, functools.partial):
        loss = loss.func
    module = type(loss).__module__ if isinstance(loss, nn.Module) else getattr(loss, "__module__", "")
    return str(module).startswith("torch.")


def mixes_samples(model: nn.Module, training: bool) -> str | None:
    """The name of a layer that uses statistics of its batch; ``"?"`` where a forward of the user's own may do it."""
    for name, module in named_modules(unwrapped(model)):
        in_use = training or not getattr(module, "track_running_stats", True)
        if isinstance(module, _BatchNorm) and in_use:
            return name
    return "?"


def outputs_of(model: nn.Module, batch: Batch) -> Outputs:
    """What the model returns for one batch."""
    with TorchPullback(model, batch, [], []) as pullback:
        tree = pullback.returned
    leaves = leaves_of(tree)
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise UnsupportedError(
            message(
                "The model returns packed sequences, and those of several batches cannot be joined.",
                hint="pad_packed_sequence(..., total_length=x.shape[1]) in the model, or all samples as one batch",
            )
        )
    return Outputs([_plain(leaf) for leaf in leaves], tree)


def loss_of(model: nn.Module, batch: Batch, outputs: Outputs) -> tuple[float, list[Array | None]]:
    """The loss of joined outputs, and its gradient at each of them; None where it does not depend on one.

    Raises
    ------
    UnsupportedError
        If the loss reads the model's weights itself: those paths do not pass the outputs.
    """
    model = unwrapped(model)
    like = leaves_of(outputs.tree)
    leaves = [torch.as_tensor(new).to(old) for new, old in zip(outputs.leaves, like, strict=True)]
    weights = [p for p in model.parameters() if p.requires_grad]
    with borrowed(model, training=batch.training, seed=batch.seed):
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in leaves]
        rest = iter(leaves)
        tree = on_leaves(outputs.tree, lambda value: next(rest) if isinstance(value, Tensor) else value)
        loss = evaluate(batch, tree, model)
        assert loss is not None
        sources = [t for t in leaves if t.requires_grad]
        wanted = [*sources, *weights]
        found = iter(
            torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else [None] * len(wanted)
        )
        grads = [next(found) if t.requires_grad else None for t in leaves]
        if any(grad is not None for grad in found):
            raise UnsupportedError(
                message(
                    "The loss depends on the weights of the model themselves, not only on its outputs.",
                    got=f"{label(batch.loss)} over several batches",
                    expected='combine="mean" or "sum", or all samples as one batch',
                    hint="differentiate the penalty on the weights by itself: it needs no data",
                )
            )
    return float(loss.detach()), [None if grad is None else _plain(grad) for grad in grads]


def _plain(value: Any) -> Array:
    if not isinstance(value, Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    return (value.float() if value.dtype in (torch.float16, torch.bfloat16) else value).numpy()
