"""Roles of axes: a program is traced at two sizes of an axis of its data, which the axes that change then follow.

Nothing runs. A size that the user's function holds fixed, such as a batch in a closure, cannot be varied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from jax.extend.core import ClosedJaxpr, Var

from ...layout import Axis, Layout
from ...vocabulary import FEATURE, SAMPLE, TIME, UNIT
from .jaxprs import REMAT, flatten, inner_programs
from .loops import Loop

#: Largest number of sets of axes of one size that are tried.
_MOST_SETS = 24
#: An axis of the data: number of the leaf, number of the axis.
DataAxis = tuple[int, int]
#: The axis of each variable whose size differs in a second trace, and the loops whose length does.
Change = tuple[dict[Any, int], list[Loop]]


@dataclass
class AxisRoles:
    """Axes of all variables of a program that count samples, and those that count steps.

    ``samples``: number of samples; 1 if the data have no such axis. ``time`` includes axes of a second sequence in the
    data, such as the target of a decoder, and axes of another length that follow the first, such as pooled steps.
    """

    samples: int = 1
    sample: dict[Any, int] = field(default_factory=dict)
    time: dict[Any, int] = field(default_factory=dict)

    def layout(self, atom: Any, last: str) -> Layout:
        """Return the layout of an input or output; ``last`` names its only or last axis without a role."""
        shape = tuple(atom.aval.shape)
        sample, time = self.sample.get(atom), self.time.get(atom)
        axes: list[Axis] = [(f"axis_{i}",) for i in range(len(shape))]
        unknown = [i for i in range(len(shape)) if i not in (sample, time)]
        if len(unknown) == 1 or (unknown and unknown[-1] == len(shape) - 1):
            axes[unknown[-1]] = (last,)
        if time is not None:
            axes[time] = (TIME,)
        if sample is not None:
            is_folded = sample == time
            axes[sample] = (SAMPLE, TIME) if is_folded else (SAMPLE,)
        return Layout(tuple(axes))


def input_layout(roles: AxisRoles, atom: Any) -> Layout:
    """Return the layout of an input of the model."""
    return roles.layout(atom, FEATURE)


def output_layout(roles: AxisRoles, atom: Any) -> Layout:
    """Return the layout of an output of the model."""
    return roles.layout(atom, UNIT)


def find_roles(
    program: ClosedJaxpr,
    loops: Sequence[Loop],
    shapes: Sequence[tuple[int, ...]],
    retrace: Callable[[Sequence[tuple[int, ...]]], tuple[ClosedJaxpr, Sequence[Loop]] | None],
) -> AxisRoles:
    """Find which axes count samples and steps.

    ``shapes`` are those of the data; ``retrace`` traces the program for other shapes and returns it with its loops, or
    None where it cannot be.
    """
    roles = AxisRoles()
    if not loops or not shapes:
        return roles

    def trace_with(changed_axes: Collection[DataAxis], change: Callable[[int], int]) -> Change | None:
        other = retrace(
            [
                tuple(change(n) if (i, a) in changed_axes else n for a, n in enumerate(shape))
                for i, shape in enumerate(shapes)
            ]
        )
        changed = None if other is None else changed_axes_of(program, other[0], loops, other[1])
        if other is None or changed is None:
            return None
        longer = [a for a, b in zip(loops, other[1], strict=True) if a.length != b.length]
        return changed, longer

    time_axes: frozenset[DataAxis] = frozenset()
    first = max(range(len(shapes)), key=lambda i: len(shapes[i]))
    for axis in range(len(shapes[first])):
        if axis > 1 and roles.time:
            break
        for changed_axes in _sets_of_axes(shapes, (first, axis)):
            found = trace_with(changed_axes, _one_more) or trace_with(changed_axes, _same_remainder)
            if found is None:
                continue
            changed, longer = found
            if longer:
                roles.time, time_axes = changed, changed_axes
                break
            if axis < 2 and any(v in changed for loop in loops for v in loop.carried):  # later ones can be of an image
                roles.sample, roles.samples = changed, shapes[first][axis]
                break
    if roles.time:
        _add_other_sequences(roles, loops, shapes, time_axes, trace_with)
    return roles


def _add_other_sequences(
    roles: AxisRoles,
    loops: Sequence[Loop],
    shapes: Sequence[tuple[int, ...]],
    time_axes: Collection[DataAxis],
    trace_with: Callable[[Collection[DataAxis], Callable[[int], int]], Change | None],
) -> None:
    """Add the axes of loops over samples' data that the first sequence, one step longer, leaves as they are.

    Such a loop follows steps that are joined in groups, or an axis of other data.
    """

    def remaining() -> list[Loop]:
        return [loop for loop in loops if is_over_samples(loop, roles) and not follows_time(loop, roles)]

    lengths = {loop.length for loop in remaining()}
    axes = [(i, a) for i, shape in enumerate(shapes) for a, size in enumerate(shape) if size in lengths]
    attempts: list[tuple[Iterable[Collection[DataAxis]], Callable[[int], int]]] = [([time_axes], _same_remainder)]
    attempts += [(_sets_of_axes(shapes, axis), _one_more) for axis in axes]
    for choices, change in attempts:
        if not remaining():
            return
        traced = (trace_with(chosen, change) for chosen in choices)
        changed, longer = next((found for found in traced if found is not None), ({}, []))
        if any(loop in longer for loop in remaining()):
            roles.time = changed | roles.time


def _one_more(size: int) -> int:
    return size + 1


def _same_remainder(size: int) -> int:
    """Return a larger size: steps joined by 2, 3, 4, 6, 8 or 12 give more groups, and leave out as many."""
    return size + 24


def is_over_samples(loop: Loop, roles: AxisRoles) -> bool:
    """Return whether a step of a loop reads data of samples that it gets step by step."""
    _, _, inputs = loop.split(loop.equation.invars)
    return not loop.obstacle and any(v in roles.sample for v in inputs if is_variable(v))


def follows_time(loop: Loop, roles: AxisRoles) -> bool:
    """Return whether the steps of a loop are steps of a sequence in the data."""
    _, _, inputs = loop.split(loop.equation.invars)
    _, _, outputs = loop.split([*loop.body.jaxpr.invars[: loop.counts[0]], *loop.equation.outvars])
    return any(roles.time.get(v) == 0 for v in (*inputs, *outputs) if is_variable(v))


def _sets_of_axes(shapes: Sequence[tuple[int, ...]], first: DataAxis) -> Iterator[frozenset[DataAxis]]:
    """Yield sets of data axes of one size that may have one role: an axis counts once in each leaf."""
    size = shapes[first[0]][first[1]]
    same = [(i, a) for i, shape in enumerate(shapes) for a, n in enumerate(shape) if n == size and (i, a) != first]
    aligned = frozenset([first, *((i, a) for i, a in same if a == first[1] and i != first[0])])
    tried = {aligned}
    yield aligned
    others = [axis for axis in same if axis[0] != first[0]]
    for count in range(len(others), -1, -1):
        for chosen in combinations(others, count):
            candidate = frozenset([first, *chosen])
            if candidate in tried or len({i for i, _ in candidate}) < len(candidate):
                continue
            if len(tried) >= _MOST_SETS:
                return
            tried.add(candidate)
            yield candidate


def changed_axes_of(
    program: ClosedJaxpr, other: ClosedJaxpr, loops: Sequence[Loop], other_loops: Sequence[Loop]
) -> dict[Any, int] | None:
    """Return, for each variable of a program and its loops, the axis whose size differs; None if programs differ."""
    if len(loops) != len(other_loops):
        return None
    changed: dict[Any, int] = {}
    pairs = [(program, other), *((a.body, b.body) for a, b in zip(loops, other_loops, strict=True))]
    return changed if all(_compare(a, b, changed) for a, b in pairs) else None


def _compare(program: ClosedJaxpr, other: ClosedJaxpr, changed: dict[Any, int]) -> bool:
    first, second = program.jaxpr, other.jaxpr
    if [e.primitive for e in first.eqns] != [e.primitive for e in second.eqns]:
        return False
    atoms = zip(
        [*first.constvars, *first.invars, *(v for e in first.eqns for v in e.outvars)],
        [*second.constvars, *second.invars, *(v for e in second.eqns for v in e.outvars)],
        strict=False,
    )
    for a, b in atoms:
        shape, other_shape = getattr(a.aval, "shape", ()), getattr(b.aval, "shape", ())
        if len(shape) != len(other_shape):
            return False
        axes = [i for i, (n, m) in enumerate(zip(shape, other_shape, strict=True)) if n != m]
        if axes:
            changed[a] = axes[0]
    for a, b in zip(first.eqns, second.eqns, strict=True):
        if a.primitive.name in REMAT:
            inner = zip(inner_programs(a), inner_programs(b), strict=True)
            if not all(_compare(flatten(p), flatten(q), {}) for p, q in inner):
                return False
    return True


def is_variable(atom: Any) -> bool:
    """Return whether an atom of a jaxpr is a variable, not a literal."""
    return isinstance(atom, Var)
