"""One call of the user's model on a batch: the only place that borrows a model to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from ..protocol import Batch
from .inputs import as_tensors, with_gradient_leaves
from .record import PassRules, RunAgainError
from .restore import BorrowedModel, borrowed_model

Recorded = TypeVar("Recorded")


@dataclass
class ForwardPass:
    """A borrowed model and its input, within :func:`forward_pass`.

    ``sources`` has for each leaf of the input the tensor to differentiate by; it is empty if the input is not
    differentiated. ``state`` is the model's state before the pass.
    """

    model: nn.Module
    batch: Batch
    x: Any
    sources: list[Tensor]
    state: BorrowedModel


@contextmanager
def forward_pass(
    model: nn.Module, batch: Batch, *, by_inputs: bool = False, by_frozen: bool = False, library_only: bool = False
) -> Iterator[ForwardPass]:
    """Borrow an unwrapped model for one call on a batch, with gradients on; restore everything after the block.

    ``by_inputs``: the float tensors of the input are differentiable leaves. ``by_frozen``: frozen weights require
    gradients, too. ``library_only``: see :func:`borrowed_model`.
    """
    x = as_tensors(batch.x, model, "x")
    with borrowed_model(
        model,
        training=batch.training,
        seed=batch.seed,
        loss=batch.loss,
        differentiable=by_frozen,
        library_only=library_only,
    ) as state:
        x, sources = with_gradient_leaves(x) if by_inputs else (x, [])
        yield ForwardPass(model, batch, x, sources, state)


def run_until_recorded(run_pass: Callable[[PassRules], Recorded]) -> Recorded:
    """Repeat the forward pass ``run_pass``, with the rules that each failed pass adds, until all is recorded."""
    rules = PassRules()
    while True:
        try:
            return run_pass(rules)
        except RunAgainError:
            continue
