"""What is noted while a model runs: runs of calls, each with the tensors at its boundary, still inside the graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...arguments import as_numpy
from ...errors import InputError, LayerNotFoundError, UnsupportedError, did_you_mean, message
from ...recurrence.cells import Cell
from .lineage import StateLink

#: In place of a layer's name: all of them.
ALL = "*"


@dataclass
class CallOwner:
    """The recurrent module (or bare function) whose calls are noted; ``name`` is its path in the model.

    ``module`` is a cell of the user's whose equations were registered. ``autocast`` is the dtype that torch was asked
    to compute in around its calls, if it was.
    """

    key: int
    name: str
    cell: type[Cell]
    activation: str = "tanh"
    layers: int = 1
    directions: int = 1
    stacked: bool = False
    step_cell: Any = None
    named: bool = False
    module: torch.nn.Module | None = None
    autocast: torch.dtype | None = None


@dataclass
class Packing:
    """How torch laid out a packed batch: ``rows[t, b]`` is the row of the caller's sample ``b`` at step t."""

    rows: Tensor
    mask: Tensor
    order: Tensor | None

    @classmethod
    def of(cls, batch_sizes: Tensor, order: Tensor | None, device: torch.device) -> Packing:
        """From torch's batch sizes per step; ``order`` holds each caller's sample's place in the sorted batch."""
        sizes = batch_sizes.to(device)
        start = torch.cumsum(sizes, 0) - sizes
        place = torch.arange(int(batch_sizes[0]), device=device) if order is None else order
        mask = place[None, :] < sizes[:, None]
        return cls(torch.where(mask, start[:, None] + place[None, :], 0), mask, order)

    def padded(self, data: Tensor) -> Tensor:
        """(row, ...) to (time, sample, ...) with zeros at padding."""
        values = data.index_select(0, self.rows.reshape(-1)).reshape(*self.rows.shape, *data.shape[1:])
        return values * self.mask.reshape(*self.mask.shape, *[1] * (data.dim() - 1)).to(values.dtype)


@dataclass
class LayerRecord:
    """What one stacked layer did in one call, time first: (time, sample, ...), states (direction, sample, unit).

    ``output`` is a tensor inside the graph at which only gradients from above arrive. ``input`` and ``fed`` are inside
    the graph too; their detached values are what the layer saw.
    """

    input: Tensor
    seen: Tensor
    fed: tuple[Tensor, ...]
    output: Tensor
    finals: tuple[Tensor, ...]
    weights: list[dict[str, Tensor]]


class StateTrail:
    """Tensors that the user's code makes of the states that a call returned, in a few operations."""

    LENGTH = 6

    def __init__(self, states: Iterable[Tensor]) -> None:
        self.states, self.made = tuple(states), list[Tensor]()
        self._depth = {id(state): 0 for state in self.states}

    def see(self, args: Any, result: Any) -> None:
        """Take in one operation; what is written into in place counts as made."""
        depths = [self._depth[id(leaf)] for leaf in _tensors(args) if id(leaf) in self._depth]
        if not depths or min(depths) >= self.LENGTH:
            return
        for tensor in _tensors(args[:1] if result is None else (result,)):
            if id(tensor) not in self._depth:
                self._depth[id(tensor)] = min(depths) + 1
                self.made.append(tensor)


def _tensors(values: Any) -> list[Tensor]:
    """Tensors among values and in lists of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


@dataclass
class CallRecord:
    """One call: a piece per stacked layer.

    ``state_taps`` are the returned final states, (layer * direction, sample, unit), at which gradients from above
    arrive; None where the state is also the output, whose tap has them. ``rows`` is False for the samples whose state
    was not passed on. ``trail``: what the user's code makes of the states, while the model runs.
    """

    pieces: list[LayerRecord]
    state_taps: tuple[Tensor | None, ...]
    link: StateLink
    rows: Tensor | None = None
    packing: Packing | None = None
    trail: StateTrail | None = None

    @property
    def steps(self) -> int:
        """Number of time steps of this call."""
        return int(self.packing.mask.shape[0]) if self.packing is not None else int(self.pieces[0].seen.shape[0])


@dataclass
class Recurrence:
    """Calls of one owner that continue each other: one recurrence through time."""

    owner: CallOwner
    visits: list[CallRecord]

    @property
    def length(self) -> int:
        """Number of time steps."""
        return sum(visit.steps for visit in self.visits)

    def valid(self) -> Tensor | None:
        """(time, sample): where a call's state lived on; None where it is everywhere.

        False where a sample had already left the batch, and where the user kept its state from before the call.
        """
        visits = self.visits
        counts = [int(visit.link.raw[0].shape[0]) for visit in visits]
        if all(visit.rows is None for visit in visits):
            return None
        mask = torch.zeros((len(visits), counts[0]), dtype=torch.bool, device=visits[0].link.raw[0].device)
        for step, visit in enumerate(visits):
            mask[step, : counts[step]] = True
            if visit.rows is not None:
                mask[step, : visit.rows.shape[0]] = visit.rows
        return mask


@dataclass
class OutputRecord:
    """One call of a layer that is not recurrent; ``output`` is inside the graph."""

    name: str
    output: Tensor


class CallRecorder:
    """Collects the runs of one forward pass.

    Parameters
    ----------
    never_by_row
        Keys of owners whose states an earlier pass found not to be passed on row by row after all.
    weight_grads
        Whether weights are to be differentiated too.
    separate
        Keep what a layer is fed apart from the user's tensors, so that a gradient there comes through the layer alone.
    cut
        Paths of the recurrent modules above which differentiation ends.
    """

    def __init__(
        self,
        never_by_row: set[int],
        *,
        weight_grads: bool = True,
        separate: bool = False,
        cut: Collection[str] = (),
    ) -> None:
        self.runs: list[Recurrence] = []
        self.plain: list[OutputRecord] = []
        #: All of both, in the order in which they were first called.
        self.order: list[Recurrence | OutputRecord] = []
        self.notes: list[str] = []
        self.never_by_row = never_by_row
        self.weight_grads = weight_grads
        self.separate, self.cut = separate, frozenset(cut)
        self.paused = False
        self.initial_state: dict[str, Any] = {}
        self.begun: set[str] = set()
        self.trails: dict[int, StateTrail] = {}
        self._tails: dict[int, Recurrence] = {}
        self._leaves: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        #: Weights that the model computed from its parameters, by owner and slot.
        self.computed: set[tuple[int, str]] = set()
        self._by_identity: dict[int, tuple[Tensor, Tensor]] = {}

    def tail(self, owner: CallOwner) -> CallRecord | None:
        """The last call of ``owner``, if the next one may continue it."""
        run = self._tails.get(owner.key)
        return None if run is None else run.visits[-1]

    def add(self, owner: CallOwner, visit: CallRecord, *, continues: bool) -> None:
        """Note one call."""
        owner.autocast = owner.autocast or autocast_around(visit.pieces[0].seen)
        if not owner.stacked:
            visit.trail = self.trails[owner.key] = StateTrail(visit.link.handed)
        if continues:
            self._tails[owner.key].visits.append(visit)
            return
        run = Recurrence(owner, [visit])
        self.runs.append(run)
        self.order.append(run)
        self._tails[owner.key] = run

    def add_plain(self, visit: OutputRecord) -> None:
        """Note one call of a layer that is not recurrent."""
        self.plain.append(visit)
        self.order.append(visit)

    def given_state(self, name: str, own: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The states that the user gave for a layer, as its ``own`` are.

        Raises
        ------
        InputError
            If they are more or fewer, or of other sizes.
        """
        self.begun.add(name)
        given = [torch.as_tensor(as_numpy(state)) for state in self.initial_state[name]]
        fit = [state.dim() == 2 and state.shape[1:] == o.shape[1:] for state, o in zip(given, own, strict=False)]
        rows = all(state.shape[0] in (1, o.shape[0]) for state, o in zip(given, own, strict=False) if state.dim())
        if len(given) != len(own) or not all(fit) or not rows:
            raise InputError(
                message(
                    f"The initial state given for {name!r} does not fit.",
                    got=f"shapes {[tuple(state.shape) for state in given]}",
                    expected=f"shapes {[tuple(o.shape) for o in own]}",
                )
            )
        return tuple(s.to(o).expand_as(o).clone() for s, o in zip(given, own, strict=True))

    def refuse_unused_states(self, known: Iterable[str]) -> None:
        """Refuse an initial state for what is no recurrent layer of torch, or never began in this forward pass."""
        for name in self.initial_state:
            if name not in self.begun:
                what = f"initial_state= names {name!r}: no recurrent layer of that name began among those looked at."
                hint = f"{did_you_mean(name, known)}; or pass the state to the model, in x"
                raise LayerNotFoundError(message(what, hint=hint))

    def fed(self, tensor: Tensor) -> Tensor:
        """What a layer is fed in place of ``tensor``."""
        return differentiable(tensor).clone() if self.separate and tensor.is_floating_point() else tensor

    def started(self, state: Tensor) -> Tensor:
        """What a recurrence starts from in place of ``state``, which the user's code may write over later on."""
        return differentiable(state).clone()

    def handed(self, owner: CallOwner, tensor: Tensor) -> Tensor:
        """What a layer returned, as a place where gradients from above arrive; they end there if it is cut."""
        is_cut = owner.name in self.cut or ALL in self.cut
        return tensor.detach().requires_grad_() if is_cut else differentiable(tensor)

    def leaf(self, owner: CallOwner, slot: str, weight: Tensor) -> Tensor:
        """The stand-in for a weight, the same one at every call, so that its gradient is the sum over them.

        A plain parameter is replaced by a leaf of its own (frozen or not, the user's stays untouched); a weight that
        is computed from others keeps its path to them.
        """
        if weight.grad_fn is not None:
            self.computed.add((owner.key, slot))
        if not self.weight_grads and not weight.requires_grad:
            return weight.detach()
        known = self._by_identity.get(id(weight)) or self._leaves.get((owner.key, slot))
        if known is not None and (known[0] is weight or torch.equal(known[0], weight)):
            return known[1]
        computed = weight.grad_fn is not None
        # Frozen as the user's is: for a frozen weight torch takes another kernel, whose last digits differ.
        live = self.weight_grads or weight.requires_grad
        stand_in = weight.clone() if computed else weight.detach().requires_grad_(live)
        self._by_identity[id(weight)] = self._leaves[owner.key, slot] = (weight, stand_in)
        return stand_in

    def behind(self, stand_in: Tensor) -> Tensor | None:
        """The user's own parameter that a leaf stands for, if gradients can arrive at it as well."""
        found = (weight for weight, leaf in self._by_identity.values() if leaf is stand_in and weight is not leaf)
        return next((weight for weight in found if weight.is_leaf and weight.requires_grad), None)

    def stand_in_for(self, weight: Tensor) -> Tensor | None:
        """Return the leaf that layers took in place of a weight; None where they took none or the weight itself."""
        leaf = self._by_identity.get(id(weight), (weight, weight))[1]
        return None if leaf is weight else leaf

    def stands_in(self, weight: Tensor) -> bool:
        """Whether layers took another tensor in place of this weight."""
        return id(weight) in self._by_identity


def differentiable(tensor: Tensor) -> Tensor:
    """``tensor`` itself if gradients can arrive at it, else a leaf with its values."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def autocast_around(tensor: Tensor) -> torch.dtype | None:
    """The dtype of the autocast that is on where a tensor lies; None where none is."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def refuse_transformed(name: str, values: Iterable[Any]) -> None:
    """Raise for a layer that runs inside ``torch.vmap`` or a transform of ``torch.func``: its tensors stand for others.

    Raises
    ------
    UnsupportedError
        With the name of the layer.
    """
    if any(isinstance(v, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(v) for v in values):
        raise UnsupportedError(
            message(
                f"Layer {name!r} runs inside torch.vmap or torch.func, where tensors cannot be recorded.",
                got="a transformed tensor",
                expected="a plain call of the layer, with samples on an axis of its input",
                hint="call the layer on the whole batch; outside of it the transform may stay",
            )
        )


def refuse_hooked(recorder: CallRecorder) -> None:
    """Raise for a state with a hook of the user's on its gradient, which acts on what flows through time.

    Raises
    ------
    UnsupportedError
        With the name of the layer.
    """
    for run in recorder.runs:
        if any(visit.link.is_hooked for visit in run.visits[:-1]):
            raise UnsupportedError(
                message(
                    f"A tensor hook on a state of {run.owner.name!r} acts on the gradient that flows through time.",
                    got="register_hook() on a state that the next step starts from",
                    expected="a recurrence whose gradient is that of its own equations",
                    hint="leave the hook out while looking; trace shows the gradients that it would have seen",
                )
            )


def node_names(runs: list[Recurrence]) -> list[list[str]]:
    """Per run, the node name of each stacked layer: ``path``, ``path[1]``, ``path#0``, ``path[1]#0``."""
    count: dict[int, int] = {}
    for run in runs:
        count[run.owner.key] = count.get(run.owner.key, 0) + 1
    seen: dict[int, int] = {}
    names = []
    for run in runs:
        index = seen.get(run.owner.key, 0)
        seen[run.owner.key] = index + 1
        suffix = f"#{index}" if count[run.owner.key] > 1 else ""
        owner = run.owner
        names.append(
            [f"{owner.name}[{i}]{suffix}" if owner.layers > 1 else owner.name + suffix for i in range(owner.layers)]
        )
    return names


def last_steps(valid: Tensor) -> Tensor:
    """(sample,): the last step at which a sample's state lived on."""
    steps = torch.arange(valid.shape[0], device=valid.device)[:, None]
    return torch.where(valid, steps, 0).amax(dim=0)
