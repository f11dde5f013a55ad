"""Records of a forward pass: recurrences as lists of calls, with the tensors at their boundaries inside the graph."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...arguments import as_numpy
from ...errors import InputError, LayerNotFoundError, UnsupportedError, did_you_mean
from ...recurrence.cells import Cell
from .lineage import Continuation, StateLink
from .roles import LastCall, StepRoles
from .scans import ScanRecorder

#: Folders of code that is not the user's.
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))

#: Used instead of a layer's name: all layers.
ALL = "*"


@dataclass
class CallOwner:
    """Recurrent module (or bare function) whose calls are recorded; ``name`` is its path in the model.

    ``module``: a cell of the user whose equations were registered. ``autocast``: the autocast dtype of its calls.
    """

    key: int
    name: str
    cell: type[Cell]
    activation: str = "tanh"
    layers: int = 1
    directions: int = 1
    is_fused: bool = False
    step_cell: Any = None
    is_declared: bool = False
    module: Any = None
    autocast: torch.dtype | None = None


@dataclass
class Packing:
    """Layout of a packed batch: ``data_rows[t, b]`` is the data row of the caller's sample ``b`` at step t."""

    data_rows: Tensor
    mask: Tensor
    order: Tensor | None

    @classmethod
    def of(cls, batch_sizes: Tensor, order: Tensor | None, device: torch.device) -> Packing:
        """Build the layout from torch's batch sizes per step.

        ``order`` (sample,) maps a caller's sample to its place in the sorted batch; None if unsorted.
        """
        sizes = batch_sizes.to(device)
        row_offsets = torch.cumsum(sizes, 0) - sizes
        sorted_position = torch.arange(int(batch_sizes[0]), device=device) if order is None else order
        mask = sorted_position[None, :] < sizes[:, None]
        return cls(torch.where(mask, row_offsets[:, None] + sorted_position[None, :], 0), mask, order)

    def padded(self, data: Tensor) -> Tensor:
        """Convert packed data (row, ...) to (time, sample, ...), with zeros at padding."""
        values = data.index_select(0, self.data_rows.reshape(-1)).reshape(*self.data_rows.shape, *data.shape[1:])
        return values * self.mask.reshape(*self.mask.shape, *[1] * (data.dim() - 1)).to(values.dtype)


@dataclass
class LayerRecord:
    """Tensors of one stacked layer in one call, (time, sample, ...), and its states (direction, sample, unit).

    ``output`` is a tensor inside the graph whose gradient is the direct gradient. ``input`` and ``initial`` (the
    initial states) are inside the graph too. ``input_copy`` is a detached copy of the input.
    """

    input: Tensor
    input_copy: Tensor
    initial: tuple[Tensor, ...]
    output: Tensor
    finals: tuple[Tensor, ...]
    weights: list[dict[str, Tensor]]


class StateTrail:
    """Tensors that the user's code computes from the returned states of a call in a few operations."""

    LENGTH = 6

    def __init__(self, states: Iterable[Tensor]) -> None:
        self.states, self.derived = tuple(states), list[Tensor]()
        self._depth = {id(state): 0 for state in self.states}

    def record(self, args: Any, result: Any) -> None:
        """Record an operation if one of its arguments is a tracked tensor.

        An operation without a result has written its first argument in place.
        """
        argument_depths = [self._depth[id(leaf)] for leaf in _tensors(args) if id(leaf) in self._depth]
        if not argument_depths or min(argument_depths) >= self.LENGTH:
            return
        for tensor in _tensors(args[:1] if result is None else (result,)):
            if id(tensor) not in self._depth:
                self._depth[id(tensor)] = min(argument_depths) + 1
                self.derived.append(tensor)


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among ``values``, and those inside tuples and lists among them."""
    items = [item for value in values for item in (value if isinstance(value, (tuple, list)) else (value,))]
    return [item for item in items if isinstance(item, Tensor)]


@dataclass(eq=False)
class CallRecord:
    """One call: a :class:`LayerRecord` per stacked layer, and the states before and after.

    ``state_taps`` are the returned final states, (layer * direction, sample, unit), whose gradients are direct
    gradients; None where the state is also the output. ``moved_rows`` (sample,) is False for samples whose state was
    not passed on. ``trail`` tracks, while the model runs, the tensors that the user's code makes of the states.
    ``call_site`` is the place in the model's code from which the call was made. ``state_changed``: the call started
    from a state that the user's code had computed from that of the call before; ``reset_rows`` (sample,) is True where
    no gradient passes there, and ``mixes_states`` is True if some other sample's state is not the returned one.
    ``is_divisible``: run step by step, the call computes the same. ``number``: its place among all recorded calls.
    """

    layer_records: list[LayerRecord]
    state_taps: tuple[Tensor | None, ...]
    link: StateLink
    moved_rows: Tensor | None = None
    packing: Packing | None = None
    trail: StateTrail | None = None
    call_site: Hashable = None
    state_changed: bool = False
    reset_rows: Tensor | None = None
    mixes_states: bool = False
    is_divisible: bool = False
    number: int = 0

    @property
    def steps(self) -> int:
        """Number of time steps of this call."""
        return (
            int(self.packing.mask.shape[0])
            if self.packing is not None
            else int(self.layer_records[0].input_copy.shape[0])
        )

    def weights(self) -> list[Tensor]:
        """Return the weights of all stacked layers and directions."""
        return [
            weight
            for layer_record in self.layer_records
            for weights in layer_record.weights
            for weight in weights.values()
        ]


@dataclass(eq=False)
class Recurrence:
    """Calls of one owner that continue each other: one recurrence through time."""

    owner: CallOwner
    calls: list[CallRecord]

    def step_mask(self) -> Tensor | None:
        """Return the mask (time, sample) of real steps; None if all are real.

        The mask is False where a sample had left the batch, and where the user kept its state from before the call.
        """
        calls = self.calls
        counts = [int(call.link.final[0].shape[0]) for call in calls]
        if all(call.moved_rows is None for call in calls):
            return None
        mask = torch.zeros((len(calls), counts[0]), dtype=torch.bool, device=calls[0].link.final[0].device)
        for step, call in enumerate(calls):
            mask[step, : counts[step]] = True
            if call.moved_rows is not None:
                mask[step, : call.moved_rows.shape[0]] = call.moved_rows
        return mask


@dataclass
class PassRules:
    """Rules for the next pass, as earlier passes of the same call found; the sets hold keys of owners.

    ``never_rowwise``: calls are not joined row by row. ``always_copy_states``: every call gets copies of its states,
    because the user's code changes some of them between the calls. ``run_by_step``: for the same reason a call of
    several steps is run step by step. ``ignore_no_grad``: ``torch.no_grad`` inside the model's forward is ignored.
    ``all_gradients``: gradients are captured at all layers, because the pass is no chain. ``no_cells``: paths of
    requested modules that have the arguments of a cell and proved to be none. ``roles``: which arguments and results of
    a cell are its state. ``weights_in_graph``: the forward itself differentiates by the model's weights, as an inner
    step of meta-learning does, so that a layer's weights must stay on the graph. ``with_loops``: loops that were not
    asked for are recorded too, because a layer that was asked for is called several times, perhaps once per step.
    """

    never_rowwise: set[int] = field(default_factory=set)
    always_copy_states: set[int] = field(default_factory=set)
    run_by_step: set[int] = field(default_factory=set)
    ignore_no_grad: bool = False
    all_gradients: bool = False
    no_cells: set[str] = field(default_factory=set)
    roles: dict[int, StepRoles] = field(default_factory=dict)
    weights_in_graph: bool = False
    with_loops: bool = False


class RunAgainError(Exception):
    """Signal that the pass must be run again, with rules that were added to the recorder's."""


@dataclass
class OutputRecord:
    """One call of a layer that is not recurrent; its tensors are inside the graph.

    ``calls_before``: number of recurrent calls that had ended when it returned.
    """

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    calls_before: int


class CallRecorder:
    """Recorder of the recurrences of one forward pass.

    ``weight_grads``: gradients of weights are needed. ``separate``: layers get copies of their input tensors, so that a
    gradient there comes through the layer alone. ``cut_layers``: paths of recurrent modules whose outputs are detached.
    ``applies_hooks``: the user's hooks on weights act on the gradients that are computed.
    """

    def __init__(
        self,
        rules: PassRules,
        *,
        weight_grads: bool = True,
        separate: bool = False,
        cut: Collection[str] = (),
        applies_hooks: bool = False,
    ) -> None:
        self.recurrences: list[Recurrence] = []
        self.output_records: list[OutputRecord] = []
        #: Items of ``recurrences`` and ``output_records``, in the order of their first calls.
        self.call_order: list[Recurrence | OutputRecord] = []
        self.notes: list[str] = []
        self.rules = rules
        self.weight_grads = weight_grads
        self.separate, self.cut_layers, self.applies_hooks = separate, frozenset(cut), applies_hooks
        self.cut_owners: set[str] = set()
        self.paused = False
        #: Whether a step that the user gave to ``rl.torch.step`` runs: methods that it calls are no steps of their own.
        self.in_declared_step = False
        #: Roles that differ from those by which cells were recorded, by owner.
        self.found_roles: dict[int, StepRoles] = {}
        #: Of modules that are called in turn: owner and roles, and the last call, by path.
        self.roles_in_turn: dict[str, tuple[int, StepRoles]] = {}
        self.last_calls: dict[str, LastCall] = {}
        #: Number of recorded calls.
        self.call_count = 0
        #: Number of calls of each module that may be a cell, by its path.
        self.entered: Counter[str] = Counter()
        #: Why calls of a module were not recorded as steps, by its path.
        self.reasons: dict[str, str] = {}
        self.initial_state: dict[str, Any] = {}
        self.started_layers: set[str] = set()
        self.trails: dict[int, StateTrail] = {}
        self._last_recurrences: dict[int, Recurrence] = {}
        self._weight_substitutes: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        #: Weights that the model computed from its parameters, by owner and slot.
        self.computed_weights: set[tuple[int, str]] = set()
        self.scans = ScanRecorder(())
        #: Weights of the user's with the tensors that layers used instead, by the identity of the weight.
        self.substitutes: dict[int, tuple[Tensor, Tensor]] = {}

    def last_call(self, owner: CallOwner) -> CallRecord | None:
        """Return the last recorded call of ``owner``; None before the first."""
        recurrence = self._last_recurrences.get(owner.key)
        return None if recurrence is None else recurrence.calls[-1]

    def find_continuation(
        self, owner: CallOwner, user_states: Sequence[Tensor], *, rowwise: bool = True
    ) -> Continuation | None:
        """Return how a call with the state ``user_states`` continues its owner's last call; None if it does not."""
        last_call = self.last_call(owner)
        if last_call is None or not user_states or owner.key in self.rules.always_copy_states:
            return None
        continuation = last_call.link.continuation_for(
            tuple(user_states), rowwise=rowwise and owner.key not in self.rules.never_rowwise
        )
        if continuation is not None:
            last_call.moved_rows = continuation.moved_rows
        return continuation or self._continue_earlier(owner, user_states)

    def _continue_earlier(self, owner: CallOwner, user_states: Sequence[Tensor]) -> Continuation | None:
        """Return how a call continues another recurrence of its owner than the last: it gets that one's states.

        So go two loops in turn through one block, as those of two states in a model of nested loops.
        """
        for recurrence in reversed(self.recurrences):
            link = recurrence.calls[-1].link
            if recurrence.owner.key == owner.key and link.is_unchanged(tuple(user_states)):
                self._last_recurrences[owner.key] = recurrence
                return Continuation(link.final, None, link)
        return None

    def add(self, owner: CallOwner, call: CallRecord, *, continues: bool) -> None:
        """Record one call of a recurrent layer. ``continues`` appends it to the last recurrence of its owner."""
        self.call_count = call.number = self.call_count + 1
        owner.autocast = owner.autocast or autocast_around(call.layer_records[0].input_copy)
        if call.steps == 1 or call.is_divisible:
            call.call_site = call_site()
        if not owner.is_fused:
            call.trail = self.trails[owner.key] = StateTrail(call.link.user_final)
        if continues:
            self._last_recurrences[owner.key].calls.append(call)
            return
        recurrence = Recurrence(owner, [call])
        self.recurrences.append(recurrence)
        self.call_order.append(recurrence)
        self._last_recurrences[owner.key] = recurrence

    def add_step(
        self,
        owner: CallOwner,
        x: Tensor,
        start: tuple[Sequence[Tensor], Sequence[Tensor], Continuation | None],
        returned: Sequence[Tensor],
        states: Sequence[Tensor],
        weights: dict[str, Tensor],
    ) -> dict[int, Tensor]:
        """Record one step of a cell; return a copy of each returned tensor for the user's code, by its identity.

        Gradients from above and from the next step thus stay separate. ``start``: the states that the user passed in,
        those that the cell computed on, and how they continue the call before. The first of ``returned`` is the output.
        """
        user_initial, initial, continuation = start
        taps = {id(leaf): self.output_tap(owner, leaf.flatten(1).unsqueeze(0).clone()) for leaf in returned}
        originals = {id(leaf): taps[id(leaf)].reshape(leaf.shape) for leaf in returned}
        user_copies = {key: tensor.clone() for key, tensor in originals.items()}
        layer_record = LayerRecord(
            x,
            x.detach().clone().flatten(1).unsqueeze(0),
            tuple(state.flatten(1).unsqueeze(0) for state in initial),
            taps[id(returned[0])],
            tuple(state.flatten(1).unsqueeze(0) for state in states),
            [weights],
        )
        user_final, recorded_final = (
            tuple(tensors[id(state)] for state in states) for tensors in (user_copies, originals)
        )
        state_link = StateLink(
            tuple(user_initial), tuple(initial), tuple(states), user_final, recorded_final, continuation
        )
        state_taps = tuple(None if state is returned[0] else taps[id(state)] for state in states)
        self.add(owner, CallRecord([layer_record], state_taps, state_link), continues=continuation is not None)
        return user_copies

    def user_initial_states(self, name: str, layer_states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the user's initial states for a layer.

        Raise ``InputError`` if their shapes differ from those of ``layer_states``.
        """
        self.started_layers.add(name)
        user_states = [torch.as_tensor(as_numpy(state)) for state in self.initial_state[name]]
        fits = [
            state.dim() == 2 and state.shape[1:] == layer_state.shape[1:]
            for state, layer_state in zip(user_states, layer_states, strict=False)
        ]
        has_samples = all(
            state.shape[0] in (1, layer_state.shape[0])
            for state, layer_state in zip(user_states, layer_states, strict=False)
            if state.dim()
        )
        if len(user_states) != len(layer_states) or not all(fits) or not has_samples:
            raise InputError(
                f"The initial state given for {name!r} has another shape than the layer's states.",
                got=f"shapes {[tuple(state.shape) for state in user_states]}",
                expected=f"shapes {[tuple(layer_state.shape) for layer_state in layer_states]}",
            )
        return tuple(
            state.to(layer_state).expand_as(layer_state).clone()
            for state, layer_state in zip(user_states, layer_states, strict=True)
        )

    def refuse_unused_states(self, layer_names: Iterable[str]) -> None:
        """Raise ``LayerNotFoundError`` if an initial state names a layer that did not start in this forward pass."""
        for name in self.initial_state:
            if name not in self.started_layers:
                message = f"initial_state= names {name!r}: no recorded recurrent layer has that name."
                hint = f"{did_you_mean(name, layer_names)}; or pass the state to the model, in x"
                raise LayerNotFoundError(message, hint=hint)

    def layer_input(self, tensor: Tensor) -> Tensor:
        """Return the tensor to pass to a layer: a copy if gradients at layer inputs are kept separate, else itself."""
        return differentiable(tensor).clone() if self.separate and tensor.is_floating_point() else tensor

    def start_states(self, states: Sequence[Tensor], continuation: Continuation | None) -> tuple[Tensor, ...]:
        """Return the states from which a call starts: those of the call it continues, or else copies of ``states``."""
        return tuple(differentiable(state).clone() for state in states) if continuation is None else continuation.states

    def output_tap(self, owner: CallOwner, tensor: Tensor) -> Tensor:
        """Return the output tensor that later layers read and that records the direct gradient.

        It is a new leaf of the graph if differentiation is cut at the layer.
        """
        if owner.name not in self.cut_layers and ALL not in self.cut_layers:
            return differentiable(tensor)
        self.cut_owners.add(owner.name)
        return tensor.detach().requires_grad_()

    def weight_substitute(self, owner: CallOwner, slot: str, weight: Tensor) -> Tensor:
        """Return the substitute of a weight. It is the same at every call, so its gradient is the sum over calls.

        A parameter is substituted by a new leaf, and the user's parameter is not changed. A weight that the model
        computes from other tensors keeps its path to them, and so does a parameter with ``weights_in_graph``, or one
        whose hooks are to be applied.
        """
        is_kept = self.rules.weights_in_graph or (self.applies_hooks and bool(weight._backward_hooks))
        is_computed = weight.grad_fn is not None or (is_kept and weight.requires_grad)
        if is_computed:
            self.computed_weights.add((owner.key, slot))
        if not self.weight_grads and not weight.requires_grad:
            return weight.detach()  # it stays frozen: torch uses another kernel for it, whose last digits differ
        earlier = self.substitutes.get(id(weight)) or self._weight_substitutes.get((owner.key, slot))
        if earlier is not None and (earlier[0] is weight or torch.equal(earlier[0], weight)):
            return earlier[1]
        hooks = weight._backward_hooks or {}
        if not is_kept and any(not str(hook.__module__).startswith(__package__) for hook in hooks.values()):
            self.notes.append(
                f"{owner.name}: the hook on {slot.partition('/')[0]} (register_hook) is not applied to its gradient; "
                'rl.gradients(..., wrt="weights") applies it.'
            )
        substitute = weight.clone() if is_computed else weight.detach().requires_grad_()
        self.substitutes[id(weight)] = self._weight_substitutes[owner.key, slot] = (weight, substitute)
        return substitute


def refuse_cells_without_state(recorder: CallRecorder, paths: Iterable[str]) -> None:
    """Raise ``RunAgainError`` if a requested module has the arguments of a cell, but carried no state between calls.

    The next pass records it as a layer that is not recurrent.
    """
    recorded = {recurrence.owner.name for recurrence in recorder.recurrences}
    if missing := set(paths) - recorded - recorder.rules.no_cells:
        recorder.rules.no_cells |= missing
        raise RunAgainError


def call_site() -> Hashable:
    """Return the lines of the user's code on the call stack of the running layer, innermost first."""
    lines, frame = [], sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "call_model":
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(lines)


def differentiable(tensor: Tensor) -> Tensor:
    """Return ``tensor`` itself if it requires a gradient, else a new leaf with its values."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def autocast_around(tensor: Tensor) -> torch.dtype | None:
    """Return the active autocast dtype for a tensor's device; None if autocast is off."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def may_use_tf32(tensor: Tensor) -> bool:
    """Return whether the user's settings let a GPU compute a float32 tensor with the 10 binary digits of TF32."""
    if not tensor.is_cuda or tensor.dtype != torch.float32:
        return False
    try:
        return bool(torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # since torch 2.9, if it was set by old and by new names
        return True


def are_transformed(values: Iterable[Any]) -> bool:
    """Return whether a tensor among ``values`` is one of ``torch.vmap`` or a ``torch.func`` transform."""
    return any(isinstance(v, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(v) for v in values)


def refuse_transformed(name: str, values: Iterable[Any]) -> None:
    """Raise ``UnsupportedError`` for a layer inside ``torch.vmap`` or a ``torch.func`` transform."""
    if are_transformed(values):
        raise UnsupportedError(
            f"Layer {name!r} runs inside torch.vmap or torch.func, where tensors cannot be recorded.",
            got="a transformed tensor",
            expected="a direct call of the layer, with samples on an axis of its input",
            hint="call the layer on the whole batch, outside of torch.vmap and torch.func",
        )


def refuse_hooked(recorder: CallRecorder) -> None:
    """Raise ``UnsupportedError`` if the user's code registered a gradient hook on a state that a next step starts from.

    Such a hook changes the gradient through time, which then is not that of the cell's equations.
    """
    for recurrence in recorder.recurrences:
        if any(state._backward_hooks for call in recurrence.calls[:-1] for state in call.link.user_final):
            raise UnsupportedError(
                f"A tensor hook on a state of {recurrence.owner.name!r} acts on the gradient that flows through time.",
                got="register_hook() on a state that the next step starts from",
                expected="a recurrence whose gradient is that of its own equations",
                hint="remove the hook for this call; rl.trace returns the gradients that the hook would receive",
            )


def refuse_inner_steps(recorder: CallRecorder) -> None:
    """Raise ``UnsupportedError`` if the forward itself differentiates by weights of a recurrent layer.

    The gradient then also passes through that backward pass, not through the steps of the recurrence alone.
    """
    if recorder.rules.weights_in_graph:
        names = ", ".join(sorted({recurrence.owner.name for recurrence in recorder.recurrences}))
        raise UnsupportedError(
            f"The model's forward differentiates by the weights of {names}, as an inner step of meta-learning does.",
            got="torch.autograd.grad within the forward",
            expected="a recurrence whose gradient is that of its own equations",
            hint='rl.gradients(model, x, y, loss=loss, wrt="weights")',
        )


def call_numbers(owners: Sequence[Hashable]) -> list[str]:
    """Return the suffix of each call's name, from the module that each call is of.

    Calls of a module that is called several times have ``#0``, ``#1``, ...; that of another module has "".
    """
    total_counts, seen_counts, numbers = Counter(owners), Counter[Hashable](), []
    for owner in owners:
        numbers.append(f"#{seen_counts[owner]}" if total_counts[owner] > 1 else "")
        seen_counts[owner] += 1
    return numbers


def node_names(recurrences: Sequence[Recurrence]) -> list[list[str]]:
    """Return for each recurrence the names of its stacked layers: ``path``, ``path[1]``, ``path#0``, ``path[1]#0``."""
    numbers = call_numbers([recurrence.owner.key for recurrence in recurrences])
    layers = [
        [f"[{i}]" for i in range(recurrence.owner.layers)] if recurrence.owner.layers > 1 else [""]
        for recurrence in recurrences
    ]
    return [
        [f"{recurrence.owner.name}{layer}{number}" for layer in suffixes]
        for recurrence, suffixes, number in zip(recurrences, layers, numbers, strict=True)
    ]


def broken_recurrences(lengths: Mapping[str, Sequence[int]]) -> list[str]:
    """Return a note on each cell whose calls form several recurrences.

    ``lengths`` are their numbers of steps by cell.
    """
    return [
        f"{name}: the state was not passed on unchanged from call to call; its {sum(steps)} calls are "
        f"{len(steps)} recurrences of {min(steps)} to {max(steps)} steps."
        for name, steps in lengths.items()
        if len(steps) > 1
    ]


def last_steps(valid: Tensor) -> Tensor:
    """Return each sample's last real step, (sample,), from a mask (time, sample)."""
    steps = torch.arange(valid.shape[0], device=valid.device)[:, None]
    return torch.where(valid, steps, 0).amax(dim=0)
