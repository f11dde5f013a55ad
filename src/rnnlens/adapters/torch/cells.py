"""A custom cell, run and differentiated by torch's own autograd, with sample and time folded into one axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...autodiff.torch import pulled, rows_of
from ...errors import runs_again
from ...recurrence.cells import StepCell
from .restore import eagerly


@dataclass(frozen=True)
class Form:
    """How a cell is called and what it returns.

    Attributes
    ----------
    call
        From an input (n, feature) and the state tensors to the positional and keyword arguments, in the user's nesting.
    shapes
        Shape of each state tensor without its leading sample axis.
    output_is_state
        Whether the cell returns its state only.
    """

    call: Callable[[Tensor, Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    shapes: tuple[tuple[int, ...], ...]
    output_is_state: bool


def leaves(value: Any) -> list[Tensor]:
    """All tensors within nested tuples, lists and dicts, in torch's order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


class TorchStepCell(StepCell):
    """A module as a cell that torch runs.

    Rows must be independent of each other: a cell that mixes samples (batch statistics in training mode) is refused by
    the adapter before it comes here.

    Parameters
    ----------
    module
        The user's cell; not copied, not changed.
    form
        How it is called.
    dtype
        The dtype that it computes in; results are widened to at least float32.
    autocast
        The dtype of the autocast that was on around it; None for none.
    """

    def __init__(
        self,
        module: nn.Module,
        form: Form,
        output_shape: tuple[int, ...],
        dtype: torch.dtype,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.module, self.form, self.output_shape, self.dtype = module, form, output_shape, dtype
        self.autocast = autocast
        self.modes = [(inner, inner.training) for inner in module.modules()]
        self.state_sizes = tuple(_size(shape) for shape in form.shapes)
        self.output_size = _size(output_shape)
        self.output_state, self.output_is_state = 0, form.output_is_state

    def advance(self, x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step of (n, feature) from states (n, size)."""
        with self._as_captured(), torch.no_grad():
            output, new = self._run(x, state)
        return _widened(output), tuple(_widened(s) for s in new)

    def vjp(
        self, x: Tensor, state: Sequence[Tensor], output_cotangent: Tensor, state_cotangent: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Pull cotangents back to the input and the states before the step."""
        with self._as_captured():
            sources = [t.detach().requires_grad_() for t in (x, *state)]
            output, new = self._run(sources[0], sources[1:])
            by_input, *by_state = _pull([output, *new], sources, [output_cotangent, *state_cotangent])
        return by_input, tuple(by_state)

    def weight_vjp(
        self, x: Tensor, state: Sequence[Tensor], output_cotangent: Tensor, state_cotangent: Sequence[Tensor]
    ) -> Mapping[str, Tensor]:
        """Pull cotangents back to the trainable weights, summed over rows."""
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not named:
            return {}
        with self._as_captured():
            output, new = self._run(x.detach(), [s.detach() for s in state])
            found = _pull([output, *new], list(named.values()), [output_cotangent, *state_cotangent])
        return dict(zip(named, found, strict=True))

    def produced(
        self, x: Tensor, state: Sequence[Tensor], output_cotangent: Tensor, state_cotangent: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Cotangents of the new states as they are produced: with their paths to what else the step returns."""
        with self._as_captured():
            given = [s.detach().requires_grad_() for s in self._shaped(state)]
            returned = self._called(x.detach().to(self.dtype).requires_grad_(), given)
            new = returned if self.form.output_is_state else returned[1:]
            # Of one tensor that is returned twice, as output and as state, both cotangents are meant.
            both = zip((returned[0], *new), (output_cotangent, *state_cotangent), strict=True)
            pairs = [(tensor, c.to(tensor.dtype).reshape(tensor.shape)) for tensor, c in both if tensor.requires_grad]
            starts, cotangents = zip(*pairs, strict=True)
            # A state that is passed on is not produced: what else the step makes of it, it made of the state before.
            made = [s.requires_grad and not any(s is g for g in given) for s in new]
            ends = [s for s, is_made in zip(new, made, strict=True) if is_made]
            found = iter(torch.autograd.grad(starts, ends, cotangents, allow_unused=True) if ends else ())
        grads = [next(found) if is_made else None for is_made in made]
        kept = zip(grads, state_cotangent, strict=True)
        return tuple(c if g is None else _widened(g.flatten(1)) for g, c in kept)

    def jacobian(self, x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Per-row Jacobians of [new states, output] with respect to the states and to the input."""
        with self._as_captured():
            sources = [t.detach().requires_grad_() for t in (x, *state)]
            output, new = self._run(sources[0], sources[1:])
            rows = rows_of(torch.cat([*new, output], dim=1), sources)
        by_input, *by_state = (_widened(part) for part in rows)
        return torch.cat(by_state, dim=2), by_input

    def _run(self, x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        returned = self._returned(x, state)
        new = returned if self.form.output_is_state else returned[1:]
        self.output_is_state = returned[0] is new[0]
        return returned[0].flatten(1), tuple(s.flatten(1) for s in new)

    def _returned(self, x: Tensor, state: Sequence[Tensor]) -> list[Tensor]:
        """All tensors that one step returns, as it returns them."""
        return self._called(x.to(self.dtype), self._shaped(state))

    def _shaped(self, state: Sequence[Tensor]) -> list[Tensor]:
        return [s.to(self.dtype).reshape(-1, *shape) for s, shape in zip(state, self.form.shapes, strict=True)]

    def _called(self, x: Tensor, state: Sequence[Tensor]) -> list[Tensor]:
        args, kwargs = self.form.call(x, state)
        with torch.autocast(x.device.type, self.autocast) if self.autocast is not None else nullcontext():
            return leaves(self.module(*args, **kwargs))

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        """The cell in the mode in which it ran, eagerly, with gradients; as found afterwards."""
        before = [(inner, inner.training) for inner, _ in self.modes]
        try:
            for inner, flag in self.modes:
                inner.training = flag
            with torch.enable_grad(), eagerly(), runs_again(type(self.module).__name__):
                yield
        finally:
            for inner, flag in before:
                inner.training = flag


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _widened(value: Tensor) -> Tensor:
    value = value.detach()
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _pull(outputs: Sequence[Tensor], sources: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """One gradient per source, zeros where no path leads."""
    given = [c.to(out.dtype) for out, c in zip(outputs, cotangents, strict=True)]
    found = pulled(outputs, sources, given)
    return [_widened(torch.zeros_like(s) if g is None else g) for g, s in zip(found, sources, strict=True)]
