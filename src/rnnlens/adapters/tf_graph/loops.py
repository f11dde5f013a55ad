"""Recurrences without a loop: a Python loop over a cell, or ``tf.nn.static_rnn``, leaves one copy of the step per step.

A step is told by its form, as in a loop; a recurrence is a chain of at least two, in which the states that one makes
are those that the next starts from, by the same blocks of the same variables. A dense layer makes no chain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import message
from .blocks import Source, behind_identities, block_of
from .cells import Match, Pair, steps_to
from .forms import Forms, TensorForm
from .found import FoundCell, Loop, LoopBoundary
from .frames import ancestors
from .labels import common_scope, known_cell

_MAKES_A_STATE = frozenset(
    {"Add", "AddV2", "AddN", "Sub", "Mul", "MatMul", "Maximum", "Minimum", "ClipByValue", "BiasAdd", "Tanh", "Sigmoid"}
    | {"Relu", "Relu6", "Elu", "Selu", "Softplus", "Softsign", "LeakyRelu"}
)

#: Operations, each with the number of its input, by which a step reads a tensor.
Readers = tuple[tuple[Any, int], ...]


@dataclass(frozen=True, eq=False)
class Step:
    """One step: what it matches, its states before and after, and their tensors after."""

    match: Match
    pairs: tuple[Pair, ...]
    tensors: tuple[Any, ...]

    @property
    def before(self) -> tuple[TensorForm, ...]:
        """The states that it starts from."""
        return tuple(old for old, _ in self.pairs)

    @property
    def after(self) -> tuple[TensorForm, ...]:
        """The states that it makes."""
        return tuple(new for _, new in self.pairs)


def unrolled(ends: Iterable[Any]) -> list[Loop]:
    """Chains of equal steps among the ancestors of some tensors."""
    ops = [op for op in ancestors(ends) if not _in_a_loop(op)]
    forms, groups = Forms({}, Source()), defaultdict(list)
    for step in _steps(forms, ops):
        match = step.match
        key = (match.cell, tuple(sorted(match.options.items(), key=str)), _frozen(match.weights))
        groups[key].append(step)
    chains = [chain for steps in groups.values() for chain in _chains(steps)]
    loops = [loop for chain in chains if (loop := _loop(forms, chain)) is not None]
    return [*loops, *_conditional(ops, {loop.scope for loop in loops}, groups.values())]


def _conditional(ops: Sequence[Any], told: set[str], groups: Iterable[Sequence[Step]]) -> list[Loop]:
    """Refused: steps that a condition passes by, as ``static_rnn(sequence_length=)`` makes them."""
    names: dict[str, int] = {}
    for steps in groups:
        scope = common_scope(p.variable for pieces in steps[0].match.weights.values() for p in pieces)
        passed = {id(step.after[0]) for step in steps if any(_by_condition(form) for form in step.before)}
        if scope not in told and len(passed) > 1:
            names[scope] = steps[0].match.units
    conditions = [op for op in ops if op.type in ("If", "StatelessIf")]
    for op in conditions:
        widths = {int(t.shape[-1]) for t in op.outputs if t.dtype.is_floating and t.shape.rank == 2 and t.shape[-1]}
        if widths and any(
            behind_identities(t).op in conditions for t in op.inputs if t.dtype.is_floating and t.shape.rank == 2
        ):
            names.setdefault(op.name.partition("/")[0], max(widths))
    outermost = [name for name in names if not any(name.startswith(f"{other}/") for other in names)]
    return [_refused(name, names[name]) for name in outermost]


def _in_a_loop(op: Any) -> bool:
    """Whether an operation is a part of the body of a loop of control flow v1."""
    context = op._get_control_flow_context()
    while context is not None and not context.IsWhileContext():
        context = context.outer_context
    return context is not None


def _by_condition(form: TensorForm) -> bool:
    atom = form.atom
    return atom is not None and atom[0] == "leaf" and atom[1][0] == "tensor" and atom[1][2] in ("Merge", "Switch")


def _refused(scope: str, units: int) -> Loop:
    words = message(
        f"The steps of {scope!r} are unrolled, and passed by under a condition.",
        got="tf.nn.static_rnn(sequence_length=), or a Python loop with tf.cond",
        expected="steps that are all run",
        hint="tf.nn.dynamic_rnn(sequence_length=), or static_rnn without sequence_length",
    )
    return Loop(
        _name(scope),
        "unrolled",
        FoundCell("unknown", units, refused=words),
        (),
        (),
        LoopBoundary(()),
        None,
        scope=scope,
    )


def _frozen(weights: Any) -> tuple[Any, ...]:
    return tuple(sorted((name, repr(pieces)) for name, pieces in weights.items()))


def _steps(forms: Forms, ops: Sequence[Any]) -> Iterable[Step]:
    seen: set[TensorForm] = set()
    for op in ops:
        if op.type not in _MAKES_A_STATE or len(op.outputs) != 1:
            continue
        tensor = op.outputs[0]
        if not tensor.dtype.is_floating or tensor.shape.rank != 2 or block_of(tensor, Source()) is not None:
            continue
        form = forms.of(tensor)
        if not isinstance(form, TensorForm) or form in seen:
            continue
        seen.add(form)
        for match, pairs in steps_to(forms, form):
            found = [forms.tensors_of(new) for _, new in pairs]
            if all(found):
                yield Step(match, pairs, tuple(tensors[0] for tensors in found))


def _chains(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps in their order; each belongs to one chain, and goes on to one step at most."""
    made = {step.after: step for step in steps}
    following: dict[tuple[TensorForm, ...], Step] = {}
    for step in steps:
        if step.before in made and made[step.before] is not step:
            following.setdefault(step.before, step)
    chains = []
    for first in steps:
        if first.before in made or first.after not in following:
            continue
        chain = [first]
        while chain[-1].after in following:
            chain.append(following[chain[-1].after])
        chains.append(chain)
    return chains


def _loop(forms: Forms, chain: Sequence[Step]) -> Loop | None:
    sources = [_tensor(forms, step.match.source) for step in chain]
    starts = [_tensor(forms, old) for old in chain[0].before]
    if any(t is None for t in (*sources, *starts)):
        return None
    edges = [_edges(forms, step) for step in chain]
    states = [LoopBoundary(tuple(step.tensors[i] for step in chain)) for i in range(len(starts))]
    match = chain[0].match
    scope = common_scope(piece.variable for pieces in match.weights.values() for piece in pieces)
    cell = known_cell(match)
    carried: tuple[LoopBoundary, ...] = ()
    hidden = {id(t) for t in states[0].tensors}
    if any(id(t) in hidden for t in _behind(sources)):  # what the cell returned is fed to it again
        others = {id(t) for boundary in states[1:] for t in boundary.tensors}
        if any(id(t) in others for t in _behind(sources, hidden)):
            cell = replace(cell, refused=_feedback_of_another_state(scope))
        carried = _carried(chain, edges)
    return Loop(
        _name(scope),
        "unrolled",
        cell,
        tuple(
            LoopBoundary((start,), (readers,))
            for start, readers in zip(starts, _start_edges(chain[0], edges[0]), strict=True)
        ),
        tuple(LoopBoundary((state.tensors[-1],)) for state in states),
        LoopBoundary(tuple(sources), tuple(edge[step.match.source] for edge, step in zip(edges, chain, strict=True))),
        states[0],
        states=tuple(states),
        carried=carried,
        steps=len(chain),
        time_major=True,
        scope=scope,
    )


def _behind(tensors: Sequence[Any], stop: Container[int] = ()) -> Iterator[Any]:
    """The tensors that others are computed from, themselves included, up to tensors given by id."""
    waiting, seen = list(tensors), set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor
            waiting.extend(tensor.op.inputs if id(tensor) not in stop else ())


def _carried(chain: Sequence[Step], edges: Sequence[dict[TensorForm, Readers]]) -> tuple[LoopBoundary, ...]:
    """The states between the steps, with the operations by which the next step reads them."""
    return tuple(
        LoopBoundary(
            tuple(step.tensors[i] for step in chain[:-1]),
            tuple(read[step.before[i]] for step, read in zip(chain[1:], edges[1:], strict=True)),
        )
        for i in range(len(chain[0].tensors))
    )


def _feedback_of_another_state(scope: str) -> str:
    return message(
        f"The steps of {scope!r} are fed what was computed from a state that is not their output.",
        expected="feedback of what the cell returns",
        hint="rl.gradients by inputs and weights",
    )


def _start_edges(first: Step, edges: dict[TensorForm, Readers]) -> list[Readers]:
    """How the first step reads each state; of one tensor that is all of them, the products read the first."""
    found = [edges[form] for form in first.before]
    if len(set(first.before)) < len(found):
        products = tuple(edge for edge in found[0] if edge[0].type in ("MatMul", "ConcatV2"))
        found = [products, tuple(edge for edge in found[0] if edge not in products)]
    return found


def _name(scope: str) -> str:
    """The scope that the cell is in: as a loop would have been called."""
    return scope.rpartition("/")[0] or scope


def _tensor(forms: Forms, form: TensorForm) -> Any:
    found = forms.tensors_of(form)
    return found[0] if found else None


def _edges(forms: Forms, step: Step) -> dict[TensorForm, Readers]:
    """By which operations, and which of their inputs, a step reads what is at its boundary."""
    boundary = {id(t): form for form in (step.match.source, *step.before) for t in forms.tensors_of(form)}
    found: dict[TensorForm, list[tuple[Any, int]]] = {form: [] for form in boundary.values()}
    waiting, seen = [t.op for t in step.tensors], set()
    while waiting:
        op = waiting.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        for index, tensor in enumerate(op.inputs):
            if id(tensor) in boundary:
                found[boundary[id(tensor)]].append((op, index))
            elif block_of(tensor, Source()) is None:
                waiting.append(tensor.op)
    return {form: tuple(edges) for form, edges in found.items()}
