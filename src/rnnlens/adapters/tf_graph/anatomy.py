"""One while loop taken apart: states, what a step makes of them, what it reads and puts out, and the cells within."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .blocks import Source
from .cells import Match, recognised
from .forms import Forms, TensorForm, Value, understood
from .found import LoopBoundary
from .frames import Frame, Paths, Variable
from .sequences import Mask, Read, Written, clocks, is_filled_with, mask_of, same, sequences, written
from .settings import NO_SETTINGS, GraphSettings


@dataclass(eq=False)
class Anatomy:
    """One while loop, taken apart.

    Attributes
    ----------
    new
        By id of a state: what a step makes of it where it is not kept.
    pairs
        Form before, and as the step makes it, of each state; a state of several blocks side by side counts as several.
    owners
        Which variable each of these is of, and which of its columns (None: all).
    condition
        A tensor of the body, and whether samples keep their states where it is True.
    mask
        What the condition says, where that is known.
    """

    frame: Frame
    forms: Forms
    paths: Paths
    reads: list[Read]
    writes: list[Written]
    states: list[Variable]
    new: dict[int, Any]
    pairs: list[tuple[TensorForm, TensorForm]]
    owners: list[tuple[Variable, tuple[int, int] | None]]
    mask: Mask | None
    condition: tuple[Any, bool] | None
    matches: list[Match]

    @property
    def masked(self) -> bool:
        """Whether some samples keep their states at some steps."""
        return self.condition is not None

    def same_condition(self, condition: Any) -> bool:
        """Whether a tensor of the body says the same as the condition under which states are kept."""
        if self.condition is None:
            return False
        mine, other = self.mask, mask_of(condition, self.frame, self.reads)
        return condition is self.condition[0] or (mine is not None and mine.agrees(other))

    @property
    def covered(self) -> bool:
        """Whether every state is one of a known cell."""
        return sorted(i for match in self.matches for i in match.states) == list(range(len(self.pairs)))

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables of its known cells."""
        blocks = (pieces for match in self.matches for pieces in match.weights.values())
        return frozenset(piece.variable for pieces in blocks for piece in pieces)

    @property
    def whole(self) -> bool:
        """Whether one known cell is all that the loop has."""
        return len(self.matches) == 1 and len(self.matches[0].states) == len(self.pairs)


def take_apart(frame: Frame, settings: GraphSettings = NO_SETTINGS) -> Anatomy:
    """Forms of all that a step makes, and the cells among them; with ``settings`` as they are at these values."""
    reads, writes = sequences(frame), written(frame)
    floats = _floats(frame)
    made = {id(v): unselected(v.after, v.before, frame.outer) for v in floats}
    states = _states(frame, floats, made, writes)
    paths = Paths(frame, states)
    condition = _condition(frame, reads, paths, [made[id(v)][1] for v in states])
    new = {id(v): made[id(v)][0] if condition is not None else v.after for v in states}
    leaves: dict[int, Any] = {id(v.before): ("state", i) for i, v in enumerate(floats)}
    leaves |= {id(read.value): ("read", i) for i, read in enumerate(reads)}
    forms = Forms(leaves, frame.outer, settings)
    pairs: list[tuple[TensorForm, TensorForm]] = []
    owners: list[tuple[Variable, tuple[int, int] | None]] = []
    for variable in states:
        for pair, columns in _aligned(forms, forms.of(variable.before), forms.of(new[id(variable)])):
            pairs.append((pair[0], pair[1]))
            owners.append((variable, columns))
    mask = None if condition is None else mask_of(condition[0], frame, reads)
    matches = recognised(forms, pairs)
    return Anatomy(frame, forms, paths, reads, writes, states, new, pairs, owners, mask, condition, matches)


def unselected(after: Any, before: Any, outer: Source) -> tuple[Any, tuple[Any, bool] | None]:
    """What a step makes of a variable, and when it is kept instead: where a tensor is True, or where it is False."""
    chosen = same(after, outer)
    if chosen.op.type in ("Select", "SelectV2"):
        condition, first, second = chosen.op.inputs
        if same(first, outer) is before:
            return second, (condition, True)
        if same(second, outer) is before:
            return first, (condition, False)
    return after, None


def _states(frame: Frame, floats: list[Variable], made: dict[int, Any], writes: list[Written]) -> list[Variable]:
    """Variables that the results of some step follow from; without those that only remember what was put out last."""
    targets = [made[id(v)][0] for v in floats]
    for write in writes:
        value = write.value
        for variable in floats:
            if same(variable.after, frame.outer) is same(value, frame.outer):
                value = made[id(variable)][0]
        targets.append(value)
    read = {id(v) for target in targets for v in Paths(frame, []).directly(target)}
    return [v for v in floats if id(v) in read]


def _condition(
    frame: Frame, reads: list[Read], paths: Paths, kept: list[tuple[Any, bool] | None]
) -> tuple[Any, bool] | None:
    """The one condition, sample by sample, under which all states are kept; None where there is no such one."""
    found = [pair for pair in kept if pair is not None]
    if not found or len(found) != len(kept):
        return None
    masks = [mask_of(tensor, frame, reads) for tensor, _ in found]
    if all(mask is not None and mask.agrees(masks[0]) for mask in masks):
        return found[0] if masks[0] is not None and all(where == masks[0].inverted for _, where in found) else None
    tensor, where = found[0]
    by_sample = tensor.shape.rank == 1 or (tensor.shape.rank == 2 and tensor.shape[1] == 1)
    if by_sample and not paths.by_state(tensor) and all(t is tensor and w == where for t, w in found):
        return tensor, where
    return None


def _aligned(forms: Forms, before: Value, after: Value) -> list[tuple[tuple[TensorForm, ...], tuple[int, int] | None]]:
    pieces: list[tuple[tuple[TensorForm, ...], tuple[int, int] | None]] = []
    at = 0
    for pair, width in forms.aligned(before, after):
        pieces.append((pair, None if width is None else (at, at + width)))
        at += width or 0
    return pieces


def read_by(anatomy: Anatomy, source: TensorForm) -> Read | None:
    """The tensor that the loop reads step by step, where a form is what it reads."""
    atom = source.atom
    if atom is None or atom[0] != "leaf" or atom[1][0] != "read" or atom[2] is not None:
        return None
    read: Read = anatomy.reads[atom[1][1]]
    return read


Output = tuple[LoopBoundary | None, Literal["state", "output", "zero"]]


def output_of(anatomy: Anatomy, hidden: TensorForm) -> Output | None:
    """Where the steps of a state are stacked, and what stands at masked steps; None where another thing is put out."""
    writes = [w for w in anatomy.writes if w.stacked is not None]
    found = _output_of(anatomy, hidden, writes) if writes else None
    return (None, "state") if found is None and not any(w.variable.read for w in writes) else found


def _output_of(anatomy: Anatomy, hidden: TensorForm, writes: Sequence[Written]) -> Output | None:
    if len(writes) > 1 or not at_present(anatomy.frame, writes[0]):
        return None
    form = anatomy.forms.form(writes[0].value)
    boundary = LoopBoundary((writes[0].stacked,), stacked=True)
    if form is hidden and not anatomy.masked:
        return boundary, "state"
    atom = form.atom
    if atom is None or atom[0] != "where" or hidden not in atom[2:] or anatomy.mask is None:
        return None
    other = atom[3] if atom[2] is hidden else atom[2]
    mask = mask_of(anatomy.forms.tensors[atom[1]], anatomy.frame, anatomy.reads)
    if mask is None or mask.inverted != (atom[2] is other) or not mask.agrees(anatomy.mask):
        return None
    instead = _instead(anatomy, other, hidden)
    return None if instead is None else (boundary, instead)


def _instead(anatomy: Anatomy, other: TensorForm, hidden: TensorForm) -> Literal["state", "output", "zero"] | None:
    """What is put out where a step is left out."""
    if other.constant == 0.0:
        return "zero"
    atom = other.atom
    if atom is None or atom[0] != "leaf" or atom[2] is not None:
        return None
    if atom[1][0] == "tensor":
        return "zero" if is_filled_with(0, anatomy.forms.tensors[atom[1][1]], anatomy.frame.outer) else None
    return _kept(anatomy, other, hidden) if atom[1][0] == "state" else None


def _kept(anatomy: Anatomy, other: TensorForm, hidden: TensorForm) -> Literal["state", "output"] | None:
    """Whether a variable is the state before, or what was put out before, which is zero at first; else None."""
    if any(old is other and new is hidden for old, new in anatomy.pairs):
        return "state"
    assert other.atom is not None
    variable = _floats(anatomy.frame)[other.atom[1][1]]
    return "output" if is_filled_with(0, variable.entry, anatomy.frame.outer) else None


def _floats(frame: Frame) -> list[Variable]:
    """The variables of a loop that hold numbers."""
    return [v for v in frame.variables if v.before.dtype.is_floating and v.before.shape.rank != 0]


def at_present(frame: Frame, write: Written) -> bool:
    """Whether each step is written to its own place."""
    return any(same(write.index, frame.outer) is v.before for v in clocks(frame))


def why_unknown(anatomy: Anatomy) -> str:
    """What of a step is in no cell that is known: its operations, or how they are put together."""
    steps = [anatomy.new[id(v)] for v in anatomy.states]
    strange = {op.type: op.name for t in anatomy.paths.behind(steps) if not understood(op := t.op)}
    if not strange:
        return "its equations are none of those of SimpleRNN, GRU and LSTM"
    return "its step has " + ", ".join(f"{kind} ({name!r})" for kind, name in list(strange.items())[:3])
