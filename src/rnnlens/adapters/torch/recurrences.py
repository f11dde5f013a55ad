"""Decides after the forward pass which recorded calls are recurrences, and how the user's code connects them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError
from .lineage import follows, probe_like, rows_reset, upstream
from .public import RAN_AS_CELL
from .record import CallRecord, CallRecorder, Recurrence, RunAgainError, StateTrail


def join_changed_states(recorder: CallRecorder) -> None:
    """Join recurrences of a cell where the user's code changes the state between the steps, or between some of them.

    A call continues the one before if both are made from the same line of the user's code, with the same number of
    samples, and its state was computed from the states that the call before returned. Raise RunAgainError if some
    calls of such a loop were joined already because their state was passed on unchanged, or have several steps. The
    owner was added to ``never_inside`` or ``by_step`` of the recorder's rules, and the pass must be run again.
    """
    if len({run.owner.key for run in recorder.runs}) == len(recorder.runs):
        return
    chains = [chain for chain in _changed_chains(recorder.runs) if len(chain) > 1]
    partly = {chain[0].owner.key for chain in chains if any(len(run.visits) > 1 for run in chain)}
    by_step = {chain[0].owner.key for chain in chains if any(v.steps > 1 for run in chain for v in run.visits)}
    if not (partly <= recorder.rules.never_inside and by_step <= recorder.rules.by_step):
        recorder.rules.never_inside |= partly | by_step
        recorder.rules.by_step |= by_step
        raise RunAgainError
    for first, *others in chains:
        for run in others:
            call = run.visits[0]
            call.reset, is_reset = rows_reset(call.link.given, first.visits[-1].link)
            call.changed, call.mixed = True, not is_reset
            first.visits += run.visits
            recorder.runs.remove(run)
        what = "changes the state" if any(v.mixed for v in first.visits) else "resets the state of some samples"
        is_marked = any(v.reset is not None and bool(v.reset.any()) for v in first.visits)
        marked = " (reset marks where it begins anew)" if is_marked else ""
        recorder.notes.append(
            f"{first.owner.name}: the model's code {what} between its steps: previous_hidden is the state "
            f"that each step started from{marked}, hidden_grad the total gradient of the state that it returned."
        )


def _changed_chains(runs: Sequence[Recurrence]) -> list[list[Recurrence]]:
    """Group recurrences into lists in which each continues the one before with a state that the user's code changed."""
    returned: dict[int, set[Any]] = {}
    for run in runs:
        if run.owner.step_cell is None or len(run.visits) > 1:
            nodes = {tensor.grad_fn for visit in run.visits for tensor in visit.link.kept}
            returned.setdefault(run.owner.key, set()).update(nodes)
    chains: dict[int, list[list[Recurrence]]] = {}
    seen: dict[int, set[Any]] = {}
    for run in runs:
        key = run.owner.key
        # A module that mixes states of another cell is no cell; a cell of torch's is one, whoever mixes its states.
        if key not in seen:
            others = (nodes for owner, nodes in returned.items() if owner != key)
            seen[key] = set[Any]() if run.owner.step_cell is None else set[Any]().union(*others)
        known = chains.setdefault(key, [])
        if known and _continues_changed(known[-1][-1].visits[-1], run.visits[0], seen[key]):
            known[-1].append(run)
        else:
            known.append([run])
    return [chain for known in chains.values() for chain in known]


def _continues_changed(before: CallRecord, call: CallRecord, seen: set[Any]) -> bool:
    if call.site != before.site:
        return False
    if call.packing is not None or len(call.pieces[0].weights) > 1:
        return False
    are_segments = call.steps > 1 or before.steps > 1
    if are_segments and not (call.divisible and before.divisible):
        return False
    if are_segments and follows((call.pieces[0].input,), before.link):
        return False  # the output of the call before is no later part of the sequence
    same_samples = call.link.raw[0].shape == before.link.raw[0].shape
    return same_samples and follows(call.link.given, before.link, seen)


def mark_endings(recorder: CallRecorder) -> None:
    """Mark the samples that a mask kept at their earlier state in the last step of each recurrence."""
    for run in recorder.runs:
        visit = run.visits[-1]
        if visit.trail is not None and run.owner.key not in recorder.rules.never_by_row and _is_masking(run):
            moved = [next(_moved_on(visit, visit.trail, index), None) for index in range(len(visit.link.handed))]
            if moved and all(rows is not None and torch.equal(rows, moved[0]) for rows in moved):
                visit.rows = moved[0]
    for visit in (visit for run in recorder.runs for visit in run.visits):
        visit.trail = None


def _is_masking(run: Recurrence) -> bool:
    """Return whether the user's loop computes a new tensor from every state before the next step, as a mask does."""
    links = [visit.link for visit in run.visits]
    pairs = [pair for a, b in pairwise(links) for pair in zip(b.given, a.handed, strict=True)]
    return len(links) > 1 and not run.visits[-1].changed and all(given is not handed for given, handed in pairs)


def _moved_on(visit: CallRecord, trail: StateTrail, index: int) -> Iterator[Tensor]:
    """Yield the rows (sample,) whose state changed at the last step, as each masking by the user's code selects them.

    A tensor is such a masking if it was computed from the last state and keeps some samples at the previous state.
    """
    count = len(visit.link.handed[index])
    for tensor in trail.made:
        if tensor.shape == visit.link.handed[index].shape:
            rows = visit.link.passed_on(tensor, index, rowwise=True)
            if rows is not None and len(rows) == count and not bool(rows.all()):
                yield rows


def entangled(runs: list[Recurrence], outputs: Iterable[Tensor]) -> bool:
    """Return whether any recurrence is more than a plain chain of steps.

    In a plain chain the layer runs once, its inputs depend on its outputs only through the state that is passed on, and
    states other than the output are used after the last step only.
    """
    looped = [run for run in runs if len(run.visits) > 1]
    owners = [run.owner.key for run in runs]
    if any(owners.count(run.owner.key) > 1 for run in runs if not run.owner.stacked or run in looped):
        return True
    if not looped or any(run.visits[-1].changed for run in looped):
        return bool(looped)
    # States before the last step that are not the output.
    inner = [visit for run in looped for visit in (run.visits[:-1] if run.valid() is None else run.visits)]
    between = {_key(tap) for visit in inner for tap in visit.state_taps if tap is not None}
    fed = [tensor for run in runs for tensor in _fed(run)]
    if between & _upstream([*outputs, *fed]):
        return True
    return any(_returned(run) & _upstream(_fed(run)) for run in looped)


def _fed(run: Recurrence) -> list[Tensor]:
    """Return the input tensors and initial states of a recurrence."""
    return [*(piece.input for visit in run.visits for piece in visit.pieces[:1]), *run.visits[0].link.fed]


def _returned(run: Recurrence) -> set[Any]:
    """Return the autograd nodes of all tensors that a recurrence returned to the user's code."""
    taps = [tap for visit in run.visits for tap in visit.state_taps if tap is not None]
    return {_key(tensor) for tensor in [*taps, *(visit.pieces[-1].output for visit in run.visits)]}


def _key(tensor: Tensor) -> Any:
    """Return the autograd node that computed a tensor; for a leaf its identity."""
    return id(tensor) if tensor.grad_fn is None else tensor.grad_fn


def _upstream(tensors: Sequence[Tensor]) -> set[Any]:
    """Return every graph node and leaf that the tensors were computed from."""
    nodes = set(upstream([tensor.grad_fn for tensor in tensors], set()))
    leaves = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    return nodes | leaves | {id(tensor) for tensor in tensors if tensor.grad_fn is None}


def check_joints(recorder: CallRecorder, targets: Sequence[Tensor]) -> None:
    """Raise ``RunAgainError`` if a loss or recurrence reads a state that a mask was assumed to discard.

    The recurrence's owner was added to ``never_by_row`` of the recorder's rules.
    """
    masked = [run for run in recorder.runs if run.valid() is not None]
    taps = [tap for run in masked for _, tap in _taps_by_step(run)]
    if not taps:
        return
    fed = [visit.pieces[0].input for run in recorder.runs for visit in run.visits]
    live = [tensor for tensor in [*targets, *fed] if tensor.requires_grad]
    if not live:
        return
    probes = [probe_like(tensor) for tensor in live]
    pulled = torch.autograd.grad(live, taps, probes, retain_graph=True, allow_unused=True)
    found = {id(tap): grad for tap, grad in zip(taps, pulled, strict=True)}
    before = len(recorder.rules.never_by_row)
    for run in masked:
        dropped = ~run.valid()  # type: ignore[operator]
        pairs = [(grad, dropped[step]) for step, tap in _taps_by_step(run) if (grad := found[id(tap)]) is not None]
        if any(bool((grad[:, rows[: grad.shape[1]]] != 0).any()) for grad, rows in pairs):
            recorder.rules.never_by_row.add(run.owner.key)
    if len(recorder.rules.never_by_row) > before:
        raise RunAgainError


def _taps_by_step(run: Recurrence) -> list[tuple[int, Tensor]]:
    """Return the returned tensors of a recurrence that can have gradients, each with its step number."""
    return [
        (step, tap)
        for step, visit in enumerate(run.visits)
        for tap in (visit.pieces[0].output, *visit.state_taps)
        if tap is not None and tap.requires_grad
    ]


def own_cells_only(recorder: CallRecorder, *, training: bool) -> None:
    """Keep, among nested recurrences, those of declared cells, and the innermost ones that passed a state on."""
    custom = [run for run in recorder.runs if run.owner.step_cell is not None]
    joined = {run.owner.name for run in custom if len(run.visits) > 1}
    cells = {name for name in joined if not any(other.startswith(f"{name}.") for other in joined)}

    def kept(run: Recurrence) -> bool:
        return run.owner.step_cell is None or run.owner.named or run.owner.name in cells

    if joined:
        modules = {run.owner.name: run.owner.step_cell.module for run in custom}
        RAN_AS_CELL.update({module: name in joined for name, module in modules.items()})
    recorder.runs = [run for run in recorder.runs if kept(run)]
    for run in recorder.runs:
        if training and run.owner.step_cell is not None:
            _refuse_chance(run.owner.name, run.owner.step_cell.module)


def _refuse_chance(name: str, cell: nn.Module) -> None:
    """Raise ``UnsupportedError`` for a cell with active dropout or batch statistics: another run gives other values."""
    for path, inner in cell.named_modules():
        dropout = isinstance(inner, nn.modules.dropout._DropoutNd) and inner.p > 0
        if inner.training and (dropout or isinstance(inner, nn.modules.batchnorm._BatchNorm)):
            raise UnsupportedError(
                f"Cell {name!r} contains a {type(inner).__name__} ({path!r}) that is active in training mode.",
                got="training=True",
                expected="a cell whose step depends only on its input, its state and its weights",
                hint="trace with training=False",
            )
