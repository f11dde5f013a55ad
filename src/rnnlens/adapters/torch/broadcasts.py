"""Notices a target of shape (n,) that is compared with outputs of shape (n, 1): n x n differences, and no error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import InputError, message

#: Elementwise operations by which a loss compares its arguments.
_ELEMENTWISE = {
    "sub", "subtract", "rsub", "__sub__", "__rsub__", "mul", "multiply", "__mul__", "__rmul__", "add", "__add__",
    "div", "__truediv__", "where", "maximum", "minimum", "square", "squared_difference",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss", "poisson_nll_loss",
}  # fmt: skip


class Broadcasts(TorchFunctionMode):  # type: ignore[misc]
    """Within the block, an outer product of outputs and targets of another rank raises ``InputError``."""

    def __init__(self, outputs: Iterable[Any], targets: Iterable[Any]) -> None:
        super().__init__()
        self.outputs = {tuple(t.shape) for t in outputs if isinstance(t, Tensor)}
        self.targets = {tuple(t.shape) for t in targets if isinstance(t, Tensor)} - self.outputs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the shapes, then do what was asked."""
        if self.targets and getattr(func, "__name__", "") in _ELEMENTWISE:
            shapes = [tuple(t.shape) for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)]
            for output in self.outputs.intersection(shapes):
                for target in self.targets.intersection(shapes):
                    _check(output, target)
        return func(*args, **(kwargs or {}))


def _check(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    try:
        both = tuple(torch.broadcast_shapes(output, target))
    except RuntimeError:
        return
    if len(output) != len(target) and math.prod(both) > max(math.prod(output), math.prod(target)):
        raise InputError(
            message(
                "The loss would broadcast the target against the output, every sample with every other.",
                got=f"output {output} and target {target}: {both}",
                expected=f"a target of shape {output}",
                hint="y[:, None], or output.squeeze(-1) in the loss",
            )
        )
