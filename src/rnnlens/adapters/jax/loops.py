"""Loops of a flat program: what they carry, their names, and the equations that compute their states.

Associative scans are traced as sequential ones, whose steps have states like those of any other scan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Var

from .jaxprs import closed, flatten, inner_programs, is_inexact, line_of, needed_equations, variables

#: Equations whose inner loops are not opened, and the reason.
_OPAQUE = {
    "custom_vjp_call": "a function with its own derivative (jax.custom_vjp), which would be lost",
    "custom_jvp_call": "a function with its own derivative (jax.custom_jvp), which would be lost",
    "cond": "a branch of lax.cond or lax.switch",
    "shard_map": "a shard_map",
    "pallas_call": "a pallas kernel",
    "custom_linear_solve": "a linear solve",
}

#: Obstacle of a loop over data that the program reversed within lengths, or sorted: its steps have no fixed order.
REORDERED = "an order of steps or samples that the data give"


@dataclass(frozen=True, eq=False)
class Loop:
    """One ``scan`` or ``while`` equation of a flat program.

    ``path``: numbers of the equations that lead to it, such as ``"12"`` or ``"12/3"`` for one within another's body.
    ``weights``: indices of the parameters that its new states depend on. ``flipped``: its inputs were reversed before.
    ``inside``: paths of the loops around it. ``obstacle``: the reason why it is not opened; "" if it is.
    """

    path: str
    equation: Any
    body: ClosedJaxpr
    name: str = ""
    weights: tuple[int, ...] = ()
    flipped: bool = False
    inside: tuple[str, ...] = ()
    obstacle: str = ""
    remat: Any = None
    length: int | None = None
    #: For each constant of the body whether it depends on parameters alone.
    fixed: tuple[bool, ...] = ()

    @property
    def reverse(self) -> bool:
        """Whether the loop runs from the last entry of its inputs to the first."""
        return bool(self.equation.params.get("reverse", False))

    @property
    def line(self) -> str:
        """File and line of the user's call."""
        return line_of(self.equation)

    @property
    def counts(self) -> tuple[int, int]:
        """Number of constants and of carried values of the body."""
        params = self.equation.params
        if self.equation.primitive.name == "while":
            return params["body_nconsts"], len(self.equation.outvars)
        if "ft_in" in params:  # JAX 0.11 and later
            constants, carried, _ = params["ft_in"].unpack()
            return len(constants), len(carried)
        return params["num_consts"], params["num_carry"]

    def split(self, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Split operands of the equation, or arguments of the body, into constants, carried values and inputs."""
        constants, carried = self.counts
        if self.equation.primitive.name == "while" and len(values) > constants + carried:
            values = values[self.equation.params["cond_nconsts"] :]
        return values[:constants], values[constants : constants + carried], values[constants + carried :]

    @property
    def carried(self) -> Sequence[Var]:
        """Variables of the body that hold the carried values before a step."""
        return self.split(self.body.jaxpr.invars)[1]

    @property
    def carried_after(self) -> Sequence[Any]:
        """Results of the body that are carried to the next step."""
        results: Sequence[Any] = self.body.jaxpr.outvars
        return results[: self.counts[1]]

    @cached_property
    def state_equations(self) -> set[int]:
        """Indices of the body's equations that the new carried values depend on."""
        return needed_equations(self.body.jaxpr, self.carried_after)

    @cached_property
    def read(self) -> set[Var]:
        """Variables of the body that the equations of the new carried values read."""
        equations = self.body.jaxpr.eqns
        return {v for i in self.state_equations for v in variables(equations[i].invars)}


@dataclass
class _Origins:
    """Of variables: the parameters that they consist of (none for data), and their axes that were reversed.

    ``data``: those that depend on the data. ``reordered``: those whose entries are in an order that the data give, as
    where each sequence is reversed within its length; a second reordering restores the first.
    """

    weights: dict[Var, frozenset[int]] = field(default_factory=dict)
    flipped: dict[Var, frozenset[int]] = field(default_factory=dict)
    data: set[Var] = field(default_factory=set)
    reordered: set[Var] = field(default_factory=set)

    def of(self, atom: Any) -> frozenset[int]:
        return self.weights.get(atom, frozenset()) if isinstance(atom, Var) else frozenset()

    def follow(self, equation: Any) -> None:
        """Record the origin of an equation's results."""
        name, operands = equation.primitive.name, variables(equation.invars)
        sources = [self.of(v) for v in operands]
        if operands and all(sources):
            self.weights.update(dict.fromkeys(equation.outvars, frozenset().union(*sources)))
        data = [v for v in operands if not self.of(v)]
        if self.data.intersection(operands):
            self.data.update(equation.outvars)
        if bool(self.reordered.intersection(data)) != self._reorders(equation):
            self.reordered.update(equation.outvars)
        axes = frozenset[int]().union(*(self.flipped.get(v, frozenset()) for v in data))
        if axes or name == "rev":
            self.flipped.update((v, _flipped_after(equation, axes, v.aval.ndim)) for v in equation.outvars)

    def _reorders(self, equation: Any) -> bool:
        """Return whether an equation takes all entries of data in an order that the data give."""
        if equation.primitive.name != "gather":
            return False
        source, order = equation.invars[:2]
        is_data = isinstance(source, Var) and not self.of(source) and is_inexact(source.aval)
        return is_data and order in self.data and equation.outvars[0].aval.shape == source.aval.shape


def _flipped_after(equation: Any, axes: frozenset[int], count: int) -> frozenset[int]:
    """Return the reversed ones of a result's ``count`` axes, given those of the operands."""
    name, params = equation.primitive.name, equation.params
    if name == "rev":
        return axes ^ frozenset(params["dimensions"])
    if name == "transpose":
        return frozenset(i for i, axis in enumerate(params["permutation"]) if axis in axes)
    if name == "broadcast_in_dim":
        return frozenset(params["broadcast_dimensions"][axis] for axis in axes)
    if name == "squeeze" or (name.startswith("reduce_") and "axes" in params):
        removed = params["dimensions" if name == "squeeze" else "axes"]
        kept = [axis for axis in range(count + len(removed)) if axis not in removed]
        return frozenset(i for i, axis in enumerate(kept) if axis in axes)
    return frozenset(axis for axis in axes if axis < count)


def find_loops(program: ClosedJaxpr, weight_names: Sequence[str], renamed: Mapping[str, str]) -> list[Loop]:
    """List the loops of a flat program whose first arguments are the parameters ``weight_names``.

    ``renamed``: other names for loops, by the name or line under which they would be listed.
    """
    parameters, data = program.jaxpr.invars[: len(weight_names)], program.jaxpr.invars[len(weight_names) :]
    origins = _Origins({v: frozenset([i]) for i, v in enumerate(parameters)}, data=set(data))
    loops = _loops_of(program, origins, "", (), "")
    names: list[str] = []
    for loop in loops:
        name = _common_path([weight_names[i] for i in loop.weights]) or loop.line or loop.equation.primitive.name
        name = renamed.get(name, name)
        stem, count = name, 1
        while name in names:
            count += 1
            name = f"{stem}_{count}"
        names.append(name)
    return [replace(loop, name=name) for loop, name in zip(loops, names, strict=True)]


def _loops_of(
    program: ClosedJaxpr, origins: _Origins, prefix: str, inside: tuple[str, ...], obstacle: str
) -> list[Loop]:
    loops: list[Loop] = []
    for index, equation in enumerate(program.jaxpr.eqns):
        origins.follow(equation)
        name, path = equation.primitive.name, f"{prefix}{index}"
        if name in ("scan", "while"):
            loop = _loop(path, equation, origins, inside, obstacle)
            loops.append(loop)
            constants, initial, inputs = loop.split(equation.invars)
            operands = zip(loop.body.jaxpr.invars, [*constants, *initial, *inputs], strict=True)
            body_origins = _Origins({v: origins.of(atom) for v, atom in operands if origins.of(atom)})
            for v in loop.carried:  # what is carried changes, even if it starts as a parameter
                body_origins.weights.pop(v, None)
            reason = obstacle or ("a loop whose number of steps is not fixed" if name == "while" else "")
            loops += _loops_of(loop.body, body_origins, f"{path}/", (*inside, path), reason)
        elif name in _OPAQUE:
            for inner in inner_programs(equation) if name != "pallas_call" else ():
                inner = flatten(inner)
                operands_of = zip(inner.jaxpr.invars[::-1], equation.invars[::-1], strict=False)
                inner_origins = _Origins({v: origins.of(atom) for v, atom in operands_of if origins.of(atom)})
                loops += _loops_of(inner, inner_origins, f"{path}/", inside, obstacle or _OPAQUE[name])
    return loops


def _loop(path: str, equation: Any, origins: _Origins, inside: tuple[str, ...], obstacle: str) -> Loop:
    remats: list[Any] = []
    is_scan = equation.primitive.name == "scan"
    body = flatten(closed(equation.params["jaxpr" if is_scan else "body_jaxpr"]), remats)
    loop = Loop(path, equation, body, inside=inside, obstacle=obstacle, remat=remats[0] if remats else None)
    constants, initial, inputs = loop.split(equation.invars)
    read = _reaching_the_state(loop, [*constants, *initial, *inputs])
    weights = sorted(frozenset().union(*(origins.of(atom) for atom in read)))
    is_reordered = bool(origins.reordered.intersection(variables(inputs)))
    reason = REORDERED if is_reordered else ""
    reason = reason if is_scan else "a while loop, whose number of steps is not fixed"
    return replace(
        loop,
        length=equation.params.get("length"),
        weights=tuple(weights),
        flipped=any(0 in origins.flipped.get(v, ()) for v in variables(inputs)),
        obstacle=obstacle or reason,
        fixed=tuple(not isinstance(atom, Var) or bool(origins.of(atom)) for atom in constants),
    )


def _reaching_the_state(loop: Loop, operands: Sequence[Any]) -> Iterable[Any]:
    """Return the operands that the new states depend on: no weights of a readout, nor those of a loop within."""
    needed = set(variables(loop.carried_after))
    for equation in reversed(loop.body.jaxpr.eqns):
        if needed & set(equation.outvars):
            skipped = equation.params.get("num_consts", 0) if equation.primitive.name == "scan" else 0
            needed |= set(variables(equation.invars[skipped:]))
    return [atom for v, atom in zip(loop.body.jaxpr.invars, operands, strict=True) if v in needed]


def _common_path(names: Sequence[str]) -> str:
    """Return the longest common path of the modules of weights; "" if they have none."""
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(part for part in common if part != "params")


@contextmanager
def sequential_associative_scans() -> Iterator[None]:
    """Within the block, trace ``lax.associative_scan`` as a sequential scan over the same operator.

    Modules that imported the name are changed too, and restored at the end. The block is another trace context of JAX,
    so that functions compiled before are traced anew, and those traced here are not kept for the user.
    """
    original = lax.associative_scan
    places = [
        (module, name)
        for module in list(sys.modules.values())
        if module is not None and not getattr(module, "__name__", "").startswith("jax._src")
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is original
    ]
    for module, name in places:
        setattr(module, name, _sequential)
    try:
        with set_xla_metadata(rnnlens="sequential"):
            yield
    finally:
        for module, name in places:
            setattr(module, name, original)


def _sequential(fn: Callable[[Any, Any], Any], elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """Combine the entries of ``elems`` along an axis one after the other, not in a tree."""
    leaves, tree = jax.tree.flatten(elems)
    inputs = [jnp.moveaxis(leaf, axis, 0) for leaf in leaves]
    first = [leaf[-1 if reverse else 0] for leaf in inputs]

    def step(carried: Any, entries: Any) -> Any:
        has_started, before = carried
        combined = jax.tree.leaves(fn(jax.tree.unflatten(tree, before), jax.tree.unflatten(tree, entries)))
        after = [jnp.where(has_started, a, b) for a, b in zip(combined, entries, strict=True)]
        return (jnp.bool_(True), after), after

    _, results = lax.scan(step, (jnp.bool_(False), first), inputs, reverse=reverse)
    return jax.tree.unflatten(tree, [jnp.moveaxis(result, 0, axis) for result in results])
