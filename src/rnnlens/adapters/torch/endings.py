"""What became of a state after the last step: a loop that masks does so there too, and no next call shows it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from .record import Recorder, Run, Trail, Visit


def mark_endings(recorder: Recorder) -> None:
    """Note the samples that a mask held back at the last step of a recurrence."""
    for run in recorder.runs:
        trail = run.visits[-1].trail
        if trail is not None and run.owner.key not in recorder.never_by_row and _is_masking(run):
            _mark(run.visits[-1], trail)
    for visit in (visit for run in recorder.runs for visit in run.visits):
        visit.trail = None


def _is_masking(run: Run) -> bool:
    """Whether the user's loop makes a new tensor of every state before it passes it on."""
    links = [visit.link for visit in run.visits]
    return len(links) > 1 and all(
        given is not handed
        for before, link in pairwise(links)
        for given, handed in zip(link.given, before.handed, strict=True)
    )


def _mark(visit: Visit, trail: Trail) -> None:
    moved: Tensor | None = None
    for index in range(len(visit.link.handed)):
        rows = next(_moved_on(visit, trail, index), None)
        if rows is None or (moved is not None and not torch.equal(rows, moved)):
            return
        moved = rows
    visit.rows = moved


def _moved_on(visit: Visit, trail: Trail, index: int) -> Iterator[Tensor]:
    """Rows that moved on, for everything made of the last state that keeps some samples at the one before."""
    count = len(visit.link.handed[index])
    for tensor in trail.made:
        if tensor.shape != visit.link.handed[index].shape:
            continue
        rows = visit.link.passed_on(tensor, index, rowwise=True)
        if rows is not None and len(rows) == count and not bool(rows.all()):
            yield rows
