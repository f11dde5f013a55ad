"""torch's higher-order ``scan`` as a loop of steps: its compiled form calls no hook and no function mode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..shared import substitute_in_this_thread
from .public import LISTENER


@contextmanager
def scan_by_loop() -> Iterator[None]:
    """Run ``torch._higher_order_ops.scan`` step by step within the block, each step recorded as by ``rl.torch.step``.

    ``scan`` itself still arranges axes and directions; only the call of its compiled operator is replaced.
    """
    module: Any = sys.modules.get("torch._higher_order_ops.scan")
    original = getattr(module, "_maybe_compile_and_run_fn", None)
    if original is None:
        yield
        return
    module._maybe_compile_and_run_fn = substitute_in_this_thread(_loop, original)
    try:
        yield
    finally:
        module._maybe_compile_and_run_fn = original


def _loop(
    _operator: Any, combine: Callable[..., Any], initial: Sequence[Tensor], xs: Sequence[Tensor]
) -> tuple[Any, Any]:
    """Return the last carry and the stacked outputs of ``combine(*carry, *x)``, as trees."""
    carry, tree, outputs = list(initial), None, []

    def step(x: Tensor, *state: Tensor) -> Any:
        new_carry, output = combine(*state, x)
        return output, new_carry

    for inputs in zip(*(x.unbind(0) for x in xs), strict=True):
        listener = LISTENER.get()
        if listener is None or len(inputs) > 1 or inputs[0].dim() < 2:
            tree, output = combine(*carry, *inputs)
        else:
            output, tree = listener(step, inputs[0], carry, None)
        carry = pytree.tree_leaves(tree)
        outputs.append(output)
    return tree, pytree.tree_map(lambda *values: torch.stack(values), *outputs)
