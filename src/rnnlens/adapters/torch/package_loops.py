"""Loops over time in functions that have no module of one step, recorded as by ``rl.torch.step``.

Those of packages, and torch's higher-order ``scan``, whose compiled form calls no hook and no function mode.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..shared import substitute_in_this_thread
from .public import LISTENER


@contextmanager
def package_loops_by_step() -> Iterator[None]:
    """Run the loops of an sLSTM of the package xlstm and of an SRU, within the block, with each step recorded.

    Each call of a loop is a layer of its own, ``slstm_loop``, ``slstm_loop_1``, ..., since it has its own weights.
    """
    loop_counts: Counter[str] = Counter()

    def next_name(kind: str) -> str:
        loop_counts[kind] += 1
        return f"{kind}_loop_{loop_counts[kind] - 1}".removesuffix("_0")

    with ExitStack() as stack:
        for (module_name, name), loop in LOOPS.items():
            module: Any = sys.modules.get(module_name)
            original = getattr(module, name, None)
            if original is not None:
                setattr(module, name, substitute_in_this_thread(partial(loop, original, next_name), original))
                stack.callback(setattr, module, name, original)
        yield


def _slstm(
    original: Callable[..., Any],
    next_name: Callable[[str], str],
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

    state, outputs, name = states.unbind(0), [states], next_name("slstm")
    for inputs in x.unbind(0):
        _, state = listener(step, inputs, state, name)
        outputs.append(torch.stack(list(state)))
    return torch.stack(outputs, 1), outputs[-1], None


def _sru(
    original: Callable[..., Any],
    next_name: Callable[[str], str],
    projected: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    initial: Tensor,
    activation_type: int,
    units: int,
    bidirectional: bool,
    has_skip_term: bool,
    scale_x: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    padding: Tensor | None = None,
) -> Any:
    """Run an SRU of one direction; Lei et al. 2018, arXiv:1709.02755, eqs. 3-7. Tensors have steps before samples."""
    listener = LISTENER.get()
    is_plain = x.dim() == 3 and weight.dim() == 1 and dropout_mask is None and padding is None and not bidirectional
    if listener is None or not is_plain:
        arguments = (activation_type, units, bidirectional, has_skip_term, scale_x, dropout_mask, padding)
        return original(projected, x, weight, bias, initial, *arguments)
    parts = projected.reshape(*x.shape[:2], units, -1)
    shortcuts = parts[..., 3] if parts.shape[-1] == 4 else x if scale_x is None else x * scale_x
    shortcuts = shortcuts if has_skip_term else torch.zeros_like(parts[..., 0])
    (forget_weight, reset_weight), (forget_bias, reset_bias) = weight.view(2, units), bias.view(2, units)

    def step(inputs: Tensor, c: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        candidate, forget, reset, shortcut = inputs.chunk(4, -1)
        forget = torch.sigmoid(forget + forget_bias + c * forget_weight)
        reset = torch.sigmoid(reset + reset_bias + c * reset_weight)
        c = candidate + (c - candidate) * forget
        return shortcut + ((c.tanh() if activation_type == 1 else c) - shortcut) * reset, (c,)

    state, outputs, name = (initial,), [], next_name("sru")
    for inputs in torch.cat([*parts[..., :3].unbind(-1), shortcuts], -1):
        output, state = listener(step, inputs, state, name)
        outputs.append(output)
    return torch.stack(outputs), state[0]


#: Loops of packages, by module and function.
LOOPS: dict[tuple[str, str], Callable[..., Any]] = {
    ("xlstm.blocks.slstm.cell", "slstm_forward"): _slstm,
    ("sru.modules", "elementwise_recurrence_naive"): _sru,
}


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
