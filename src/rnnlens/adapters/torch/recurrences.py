"""Decides after the forward pass which recorded calls are recurrences, and how the user's code connects them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...autodiff.torch import pull_gradients
from ...errors import UnsupportedError
from .lineage import depends_on, probe_like, reset_rows, upstream_nodes
from .public import RAN_AS_CELL, STATES_RUN
from .record import CallRecord, CallRecorder, Recurrence, RunAgainError, StateTrail


def join_changed_states(recorder: CallRecorder) -> None:
    """Join recurrences of a cell where the user's code changes the state between the steps, or between some of them.

    A call continues the one before if both are made from the same line of the user's code, with the same number of
    samples, and its state was computed from the states that the call before returned. Raise RunAgainError if some
    calls of such a loop were joined already because their state was passed on unchanged, or have several steps. The
    owner was added to ``always_copy_states`` or ``run_by_step`` of the recorder's rules, and the pass must be run
    again.
    """
    if len({recurrence.owner.key for recurrence in recorder.recurrences}) == len(recorder.recurrences):
        return
    chains = [chain for chain in _changed_chains(recorder.recurrences) if len(chain) > 1]
    joined_owners = {chain[0].owner.key for chain in chains if any(len(recurrence.calls) > 1 for recurrence in chain)}
    multi_step_owners = {
        chain[0].owner.key
        for chain in chains
        if any(call.steps > 1 for recurrence in chain for call in recurrence.calls)
    }
    if not (joined_owners <= recorder.rules.always_copy_states and multi_step_owners <= recorder.rules.run_by_step):
        recorder.rules.always_copy_states |= joined_owners | multi_step_owners
        recorder.rules.run_by_step |= multi_step_owners
        raise RunAgainError
    for joined, *later in chains:
        for recurrence in later:
            call = recurrence.calls[0]
            call.reset_rows, is_reset = reset_rows(call.link.user_initial, joined.calls[-1].link)
            call.state_changed, call.mixes_states = True, not is_reset
            joined.calls += recurrence.calls
            recorder.recurrences.remove(recurrence)
        change = (
            "changes the state"
            if any(call.mixes_states for call in joined.calls)
            else "resets the state of some samples"
        )
        is_marked = any(call.reset_rows is not None and bool(call.reset_rows.any()) for call in joined.calls)
        marked = " (reset marks where it begins anew)" if is_marked else ""
        recorder.notes.append(
            f"{joined.owner.name}: the model's code {change} between its steps: previous_hidden is the state "
            f"that each step started from{marked}, hidden_grad the total gradient of the state that it returned."
        )


def _changed_chains(recurrences: Sequence[Recurrence]) -> list[list[Recurrence]]:
    """Group recurrences into lists in which each continues the one before with a state that the user's code changed."""
    returned_nodes: dict[int, set[Any]] = {}
    for recurrence in recurrences:
        if recurrence.owner.step_cell is None or len(recurrence.calls) > 1:
            nodes = {tensor.grad_fn for call in recurrence.calls for tensor in call.link.recorded_final}
            returned_nodes.setdefault(recurrence.owner.key, set()).update(nodes)
    chains: dict[int, list[list[Recurrence]]] = {}
    foreign_nodes: dict[int, set[Any]] = {}
    for recurrence in recurrences:
        key = recurrence.owner.key
        # A module that mixes states of another cell is no cell; a cell of torch's is one, whoever mixes its states.
        if key not in foreign_nodes:
            other_nodes = (nodes for owner, nodes in returned_nodes.items() if owner != key)
            foreign_nodes[key] = set[Any]() if recurrence.owner.step_cell is None else set[Any]().union(*other_nodes)
        owner_chains = chains.setdefault(key, [])
        if owner_chains and _continues_changed(owner_chains[-1][-1].calls[-1], recurrence.calls[0], foreign_nodes[key]):
            owner_chains[-1].append(recurrence)
        else:
            owner_chains.append([recurrence])
    return [chain for owner_chains in chains.values() for chain in owner_chains]


def _continues_changed(previous: CallRecord, call: CallRecord, foreign_nodes: set[Any]) -> bool:
    if call.call_site != previous.call_site:
        return False
    if call.packing is not None or len(call.layer_records[0].weights) > 1:
        return False
    are_segments = call.steps > 1 or previous.steps > 1
    if are_segments and not (call.is_divisible and previous.is_divisible):
        return False
    if are_segments and depends_on((call.layer_records[0].input,), previous.link):
        return False  # the output of the call before is no later part of the sequence
    same_samples = call.link.final[0].shape == previous.link.final[0].shape
    return same_samples and depends_on(call.link.user_initial, previous.link, foreign_nodes)


def mark_endings(recorder: CallRecorder) -> None:
    """Mark the samples that a mask kept at their earlier state in the last step of each recurrence."""
    for recurrence in recorder.recurrences:
        call = recurrence.calls[-1]
        if (
            call.trail is not None
            and recurrence.owner.key not in recorder.rules.never_rowwise
            and _is_masking(recurrence)
        ):
            moved_rows = [
                next(_masked_moves(call, call.trail, index), None) for index in range(len(call.link.user_final))
            ]
            if moved_rows and all(rows is not None and torch.equal(rows, moved_rows[0]) for rows in moved_rows):
                call.moved_rows = moved_rows[0]
    for call in (call for recurrence in recorder.recurrences for call in recurrence.calls):
        call.trail = None


def _is_masking(recurrence: Recurrence) -> bool:
    """Return whether the user's loop computes a new tensor from every state before the next step, as a mask does."""
    links = [call.link for call in recurrence.calls]
    pairs = [pair for a, b in pairwise(links) for pair in zip(b.user_initial, a.user_final, strict=True)]
    return (
        len(links) > 1
        and not recurrence.calls[-1].state_changed
        and all(new_initial is not returned for new_initial, returned in pairs)
    )


def _masked_moves(call: CallRecord, trail: StateTrail, index: int) -> Iterator[Tensor]:
    """Yield the rows (sample,) whose state changed at the last step, as each masking by the user's code selects them.

    A tensor is such a masking if it was computed from the last state and keeps some samples at the previous state.
    """
    samples = len(call.link.user_final[index])
    for tensor in trail.derived:
        if tensor.shape == call.link.user_final[index].shape:
            rows = call.link.unchanged_samples(tensor, index, rowwise=True)
            if rows is not None and len(rows) == samples and not bool(rows.all()):
                yield rows


def is_entangled(recurrences: list[Recurrence], outputs: Iterable[Tensor]) -> bool:
    """Return whether any recurrence is more than a plain chain of steps.

    In a plain chain the layer runs once, its inputs depend on its outputs only through the state that is passed on, and
    states other than the output are used after the last step only.
    """
    loops = [recurrence for recurrence in recurrences if len(recurrence.calls) > 1]
    owner_keys = [recurrence.owner.key for recurrence in recurrences]
    if any(
        owner_keys.count(recurrence.owner.key) > 1
        for recurrence in recurrences
        if not recurrence.owner.is_fused or recurrence in loops
    ):
        return True
    if not loops or any(recurrence.calls[-1].state_changed for recurrence in loops):
        return bool(loops)
    # States before the last step that are not the output.
    calls = [
        call
        for recurrence in loops
        for call in (recurrence.calls[:-1] if recurrence.step_mask() is None else recurrence.calls)
    ]
    inner_taps = {_node_or_id(tap) for call in calls for tap in call.state_taps if tap is not None}
    inputs = [tensor for recurrence in recurrences for tensor in _recurrence_inputs(recurrence)]
    if inner_taps & _upstream_nodes([*outputs, *inputs]):
        return True
    return any(_returned_nodes(recurrence) & _upstream_nodes(_recurrence_inputs(recurrence)) for recurrence in loops)


def _recurrence_inputs(recurrence: Recurrence) -> list[Tensor]:
    """Return the input tensors and initial states of a recurrence."""
    return [
        *(layer_record.input for call in recurrence.calls for layer_record in call.layer_records[:1]),
        *recurrence.calls[0].link.initial,
    ]


def _returned_nodes(recurrence: Recurrence) -> set[Any]:
    """Return the autograd nodes of all tensors that a recurrence returned to the user's code."""
    taps = [tap for call in recurrence.calls for tap in call.state_taps if tap is not None]
    return {_node_or_id(tensor) for tensor in [*taps, *(call.layer_records[-1].output for call in recurrence.calls)]}


def _node_or_id(tensor: Tensor) -> Any:
    """Return the autograd node that computed a tensor; for a leaf its identity."""
    return id(tensor) if tensor.grad_fn is None else tensor.grad_fn


def _upstream_nodes(tensors: Sequence[Tensor]) -> set[Any]:
    """Return every graph node and leaf that the tensors were computed from."""
    nodes = set(upstream_nodes([tensor.grad_fn for tensor in tensors], set()))
    leaves = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    return nodes | leaves | {id(tensor) for tensor in tensors if tensor.grad_fn is None}


def check_joints(recorder: CallRecorder, targets: Sequence[Tensor]) -> None:
    """Raise ``RunAgainError`` if a loss or recurrence reads a state that a mask was assumed to discard.

    The recurrence's owner was added to ``never_rowwise`` of the recorder's rules.
    """
    masked_recurrences = [recurrence for recurrence in recorder.recurrences if recurrence.step_mask() is not None]
    taps = [tap for recurrence in masked_recurrences for _, tap in _taps_by_step(recurrence)]
    if not taps:
        return
    inputs = [call.layer_records[0].input for recurrence in recorder.recurrences for call in recurrence.calls]
    differentiable = [tensor for tensor in [*targets, *inputs] if tensor.requires_grad]
    if not differentiable:
        return
    probes = [probe_like(tensor) for tensor in differentiable]
    grads = pull_gradients(differentiable, taps, probes, retain_graph=True)
    tap_grads = {id(tap): grad for tap, grad in zip(taps, grads, strict=True)}
    count_before = len(recorder.rules.never_rowwise)
    for recurrence in masked_recurrences:
        is_dropped = ~recurrence.step_mask()  # type: ignore[operator]
        masked_grads = [
            (grad, is_dropped[step])
            for step, tap in _taps_by_step(recurrence)
            if (grad := tap_grads[id(tap)]) is not None
        ]
        if any(bool((grad[:, rows[: grad.shape[1]]] != 0).any()) for grad, rows in masked_grads):
            recorder.rules.never_rowwise.add(recurrence.owner.key)
    if len(recorder.rules.never_rowwise) > count_before:
        raise RunAgainError


def _taps_by_step(recurrence: Recurrence) -> list[tuple[int, Tensor]]:
    """Return the returned tensors of a recurrence that can have gradients, each with its step number."""
    return [
        (step, tap)
        for step, call in enumerate(recurrence.calls)
        for tap in (call.layer_records[0].output, *call.state_taps)
        if tap is not None and tap.requires_grad
    ]


def remove_nested_cells(model: nn.Module, recorder: CallRecorder, *, training: bool) -> None:
    """Keep, among nested recurrences, those of declared cells, and the innermost ones that passed a state on.

    A recurrence without an input, which is a loop over depth, gives way to one around it. The names of the states are
    known of the ``model`` from then on.
    """
    loops = [recurrence for recurrence in recorder.recurrences if recurrence.owner.step_cell is not None]
    joined_names = {recurrence.owner.name for recurrence in loops if len(recurrence.calls) > 1}
    has_input = {r.owner.name for r in loops if r.owner.step_cell.form.input_shape != (0,)} & joined_names
    cell_names = {
        name
        for name in joined_names
        if not any(other.startswith(f"{name}.") for other in has_input)
        and (name in has_input or not any(name.startswith(f"{other}.") for other in joined_names))
    }

    def is_kept(recurrence: Recurrence) -> bool:
        return recurrence.owner.step_cell is None or recurrence.owner.is_declared or recurrence.owner.name in cell_names

    if joined_names:
        modules = {recurrence.owner.name: recurrence.owner.step_cell.module for recurrence in loops}
        RAN_AS_CELL.update({module: name in joined_names for name, module in modules.items()})
    removed_names = tuple(f"{recurrence.owner.name}: " for recurrence in loops if not is_kept(recurrence))
    recorder.notes = [note for note in recorder.notes if not note.startswith(removed_names)]
    recorder.recurrences = [recurrence for recurrence in recorder.recurrences if is_kept(recurrence)]
    for recurrence in recorder.recurrences:
        step_cell = recurrence.owner.step_cell
        if step_cell is not None and recurrence.owner.module is None:
            STATES_RUN.setdefault(model, {})[recurrence.owner.name] = step_cell.state_names
        if training and step_cell is not None:
            _refuse_randomness(recurrence.owner.name, step_cell.module)


def _refuse_randomness(name: str, cell: nn.Module) -> None:
    """Raise ``UnsupportedError`` for a cell with active dropout or batch statistics: another run gives other values."""
    for path, submodule in cell.named_modules():
        is_dropout = isinstance(submodule, nn.modules.dropout._DropoutNd) and submodule.p > 0
        if submodule.training and (is_dropout or isinstance(submodule, nn.modules.batchnorm._BatchNorm)):
            raise UnsupportedError(
                f"Cell {name!r} contains a {type(submodule).__name__} ({path!r}) that is active in training mode.",
                got="training=True",
                expected="a cell whose step depends only on its input, its state and its weights",
                hint="trace with training=False",
            )
