"""Loops over time of packages, in functions that have no module of one step: recorded as by ``rl.torch.step``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..shared import substitute_in_this_thread
from .public import LISTENER

_MODULE, _FUNCTION = "xlstm.blocks.slstm.cell", "slstm_forward"


@contextmanager
def package_loops_by_step() -> Iterator[None]:
    """Run the loop of an sLSTM of the package xlstm, within the block, with each step recorded."""
    module: Any = sys.modules.get(_MODULE)
    original = getattr(module, _FUNCTION, None)
    if original is None:
        yield
        return
    setattr(module, _FUNCTION, substitute_in_this_thread(partial(_slstm, original), original))
    try:
        yield
    finally:
        setattr(module, _FUNCTION, original)


def _slstm(
    original: Callable[..., Any],
    x: Tensor,
    states: Tensor,
    kernel: Tensor,
    bias: Tensor,
    pointwise: Callable[..., tuple[Tensor, Tensor]],
    constants: Mapping[str, float],
) -> Any:
    """Run an sLSTM of four states (y, c, n, m), each (sample, unit); Beck et al. 2024, arXiv:2405.04517, eqs. 8-18."""
    listener = LISTENER.get()
    if listener is None or len(states) != 4:
        return original(x, states, kernel, bias, pointwise, constants=constants)
    heads, _, width = kernel.shape
    by_head = kernel.mT.reshape(1, heads, width, -1)

    def step(inputs: Tensor, y: Tensor, c: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        samples = len(y)
        recurrent = (y.reshape(samples, heads, 1, width) @ by_head).reshape(samples, heads, -1, width)
        recurrent = recurrent.transpose(1, 2).reshape(samples, -1)
        later = pointwise(inputs, recurrent, bias, torch.stack([y, c, n, m]), constants=constants)[0]
        # The package takes a branch of its own where n is 0 in all rows: each row here takes its own branch.
        start = torch.stack([y, c, n - n.detach(), m])
        first = pointwise(inputs, recurrent, bias, start, constants=constants)[0]
        new = torch.where(n == 0, first, later).unbind(0)
        return new[0], new

    state, outputs = states.unbind(0), [states]
    for inputs in x.unbind(0):
        _, state = listener(step, inputs, state, None)
        outputs.append(torch.stack(list(state)))
    return torch.stack(outputs, 1), outputs[-1], None
