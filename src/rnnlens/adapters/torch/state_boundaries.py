"""Ports of states that the user's own loop hands from step to step.

The state that a cell returned is one tensor, read by the next step and by the user's copy of it alike: what arrives at
it is the total gradient, whatever the loop does with it. What arrives at the copy alone is the direct gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .assemble import last_steps, sequence
from .boundary import Boundary
from .record import Run, Visit


def state_boundary(run: Run, index: int) -> Boundary:
    """A state of a cell after every step, (sample, time, unit), with its total gradient.

    A sample that a mask holds back has the state that it holds, and the gradient that comes back to it through the
    next step.
    """
    visits, valid = run.visits, run.valid()
    slopes = [_within_step(v) for v in visits] if _is_cut_off_cell_state(run, index) else []
    raw = [v.link.raw[index] for v in visits]
    fed = [v.link.fed[index] for v in visits[1:]] if valid is not None else []
    hidden = [v.link.raw[0] for v in visits] if slopes else []

    def gather(parts: Sequence[Tensor]) -> Tensor:
        count = len(visits)
        steps = [part.flatten(1) for part in parts[:count]]
        held = [*(part.flatten(1) for part in parts[count : count + len(fed)]), None]
        if slopes:  # c_t as it is produced also reaches h_t
            by_hidden = parts[count + len(fed) :]
            steps = [c + h * slope for c, h, slope in zip(steps, by_hidden, slopes, strict=True)]
        if valid is not None:
            steps = [_chosen(valid[t], step, held[t]) for t, step in enumerate(steps)]
        return sequence(run, [step.unsqueeze(0) for step in steps])

    return Boundary([*raw, *fed, *hidden], gather, lambda: torch.stack(_carried(run, index), dim=1))


def ending_boundary(run: Run, index: int) -> Boundary:
    """The state that each sample ends with, (sample, unit), with its total gradient: that of its own last real step."""
    whole, valid = state_boundary(run, index), run.valid()
    if valid is None:
        return Boundary(whole.tensors, lambda parts: whole.gather(parts)[:, -1])
    last = last_steps(valid)
    return Boundary(whole.tensors, lambda parts: whole.gather(parts)[torch.arange(len(last)), last])


def final_boundary(run: Run, index: int) -> Boundary:
    """A state of a cell after the last step, (sample, unit), with its direct gradient.

    The first state is the output: its gradient is found there.
    """
    tap = run.visits[-1].state_taps[index]
    last = run.visits[-1].link.raw[index].flatten(1)
    return Boundary(
        [] if tap is None else [tap],
        lambda parts: parts[0][0] if parts else torch.zeros_like(last),
        lambda: _carried(run, index)[-1],
    )


def read_boundary(run: Run, layer: int, index: int) -> Boundary:
    """A state of one stacked layer wherever the user's code gets hold of it, (sample, time, unit), zero elsewhere."""
    taps = [visit.state_taps[index] for visit in run.visits]

    def gather(parts: Sequence[Tensor]) -> Tensor:
        arrived = iter(parts)
        found = [None if tap is None else next(arrived)[layer : layer + 1] for tap in taps]
        return sequence(
            run, [_at_end(visit, layer, index, part) for visit, part in zip(run.visits, found, strict=True)]
        )

    return Boundary([tap for tap in taps if tap is not None], gather)


def _is_cut_off_cell_state(run: Run, index: int) -> bool:
    """Whether a state is c_t out of a fused kernel, where no path of the graph leads from it to h_t."""
    if run.owner.step_cell is not None or index != 1:
        return False
    hidden, cell = run.visits[0].link.raw
    return cell.grad_fn is None or cell.grad_fn is hidden.grad_fn


def _within_step(visit: Visit) -> Tensor:
    """dh_t/dc_t within one step of an LSTM: o (1 - tanh(c)^2)."""
    piece, (hidden, cell) = visit.pieces[0], visit.link.raw
    weights = {name: w[3 * hidden.shape[1] :].to(hidden.dtype) for name, w in piece.weights[0].items()}
    with torch.no_grad():
        x, before = piece.input.to(hidden.dtype), visit.link.fed[0].to(hidden.dtype)
        gate = x @ weights["weight_ih"].T + before @ weights["weight_hh"].T
        if "bias_ih" in weights:
            gate = gate + weights["bias_ih"] + weights["bias_hh"]
        return torch.sigmoid(gate) * (1 - torch.tanh(cell) ** 2)


def _carried(run: Run, index: int) -> list[Tensor]:
    """The state after each step, in the graph: that of before where a sample did not move on."""
    valid = run.valid()
    if valid is None:
        return [visit.link.raw[index].flatten(1) for visit in run.visits]
    state = run.visits[0].link.fed[index].flatten(1)
    found = []
    for visit, real in zip(run.visits, valid, strict=True):
        new = visit.link.raw[index].flatten(1)
        state = torch.cat([_chosen(real, new, state[: len(new)]), state[len(new) :]])
        found.append(state)
    return found


def _chosen(real: Tensor, new: Tensor, held: Tensor | None) -> Tensor:
    """Rows of ``new`` where a step was real, else of ``held``, zero where there is none."""
    count = len(new)
    old = torch.zeros_like(new)
    if held is not None:
        old = torch.cat([held, old[len(held) :]])[:count]
    return torch.where(real[:count, None], new, old)


def _at_end(visit: Visit, layer: int, index: int, part: Tensor | None) -> Tensor:
    """(time, sample, unit) of one call: zero but at its last step."""
    final = visit.pieces[layer].finals[index].detach()
    zero = torch.zeros_like(final[:1]) if part is None else torch.zeros_like(part)
    last = zero if part is None else part
    return torch.cat([zero] * (visit.steps - 1) + [last])
