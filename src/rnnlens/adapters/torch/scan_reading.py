"""A scan call as a linear recurrence: families of whole-sequence layers, and what their readers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...recurrence.sequence import SequenceCell

Hold = Callable[[Tensor], Tensor]


@dataclass
class Reading:
    """A scan call read by its family: the cell, the gate, and what the replaced function returns for outputs y_t.

    ``values``: the call's own input x_t, shaped as y_t, a view of the tensor that the layer computes the coefficients
    from; y is linear in it while these are held. None in families whose coefficients come from other tensors.
    """

    cell: SequenceCell
    finish: Callable[[Tensor, Tensor], Any]
    gate: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class Family:
    """Layers that share a scan function.

    Attributes
    ----------
    name
        Name in results, as ``LayerInfo.cell``.
    axes
        Axes of a state.
    sizes
        Names of the module's attributes that may have the size of each axis; or a function from the module to sizes.
    read
        Reader of a call, given its arguments by name; ``hold`` is applied to the coefficients of the recurrence.
    is_quadratic
        Whether the time of the model's own backward pass grows with the square of the number of steps.
    arguments
        Names of arguments without which a function of the same name is another one.
    may_decline
        Whether the function returns None where its kernel cannot run, and the layer then computes the same by others.
    is_read
        Whether a layer of the class is one that ``read`` reads.
    """

    name: str
    axes: tuple[str, ...]
    sizes: tuple[tuple[str, ...], ...] | Callable[[Any], Sequence[int]]
    read: Callable[..., Reading]
    is_quadratic: bool = False
    arguments: frozenset[str] = frozenset()
    may_decline: bool = False
    is_read: Callable[[Any], bool] = lambda layer: True


def widen_tensors(*tensors: Tensor) -> list[Tensor]:
    """Convert tensors to the widest dtype among them, at least float32, in which the models' own scans compute."""
    widest = torch.float32
    for tensor in tensors:
        widest = torch.promote_types(widest, tensor.dtype)
    return [tensor.to(widest) for tensor in tensors]


def unit_norm(x: Tensor) -> Tensor:
    """Divide vectors by their length; the square of the length is at least about 1e-6, as in the models' kernels."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def normalised_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    write: Tensor,
    forget: Tensor,
    initial_maximum: Tensor,
    initial: Tensor | None = None,
) -> tuple[SequenceCell, Tensor]:
    """Return the cell of an mLSTM's matrix and normaliser, relative to a running maximum m_t, and m_t of all steps.

    ``write`` and ``forget`` are the logarithms of the gates. Beck et al. 2024, arXiv:2405.04517, eqs. 19-27.
    """
    running_maxima = [initial_maximum]
    for t in range(forget.shape[1]):
        running_maxima.append(torch.maximum(forget[:, t] + running_maxima[-1], write[:, t]))
    previous_maxima, new_maxima = torch.stack(running_maxima[:-1], 1), torch.stack(running_maxima[1:], 1)
    cell = SequenceCell(
        ("head", "key", "value"),
        decay=((forget + previous_maxima - new_maxima)[..., None, None],),
        write=(
            (torch.exp(write - new_maxima)[..., None] * key)[..., None],
            torch.cat([value, torch.ones_like(value[..., :1])], -1)[..., None, :],
        ),
        read=query[..., None],
        contracted=-2,
        initial=initial,
        relative=True,
    )
    return cell, new_maxima


def by_steps(cell: SequenceCell) -> tuple[Tensor, Tensor]:
    """Run a cell step by step in torch operations; return y_t of all steps and the last state."""
    state, outputs = cell.start(), []
    for t in range(cell.steps):
        step = cell.at(slice(t, t + 1))
        state = step.decays()[:, 0] * state
        if step.right is not None:
            removed = (step.right[:, 0] * state).sum(cell.axis, keepdim=True)
            state = state - step.left_vector[:, 0] * removed
        state = state + step.writes()[:, 0]
        outputs.append(step.outputs(state[:, None])[:, 0])
    return torch.stack(outputs, 1), state
