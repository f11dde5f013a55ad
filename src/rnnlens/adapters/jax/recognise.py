"""Known cells recognised by their numbers: a step is run on random values, and must obey the cell's equations.

Neither the library nor its order of gates nor the sign of an update gate has to be declared: an LSTM is a step with
c = f c' + i g and h = o tanh(c) for some sigmoids f, i, o and a tanh g among its variables; a GRU one with
h = u h' + (1 - u) n. Their weights follow, exactly, from unit vectors in the place of the input and the state. In the
end the cell with these weights is run, and must give the new states of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var

from ...recurrence.activations import ACTIVATIONS
from ...recurrence.cells import GRU, LSTM, Cell, SimpleRNN
from ...typing import Array
from .jaxprs import MOVES, dependent, is_inexact, variables
from .loops import Loop
from .numeric import evaluate

_LINEAR = ("add", "sub", "neg", "add_any", "concatenate")


@dataclass(frozen=True)
class Gate:
    """One gate: the variable that holds it, the equation of its activation, and -1 if the cell uses its complement."""

    variable: Var
    activation: int | None
    sign: int = 1


@dataclass(frozen=True)
class Condition:
    """A boolean variable of the body, one number for each sample, and the value at which something happens."""

    variable: Var
    value: bool


@dataclass(frozen=True, eq=False)
class KnownCell:
    """The step of a loop as a cell with known equations.

    ``states``: numbers of the carried values, the cell's output first. ``starts``: the variables from which the step
    computes, which differ from the carried ones where the step may start anew. ``inputs``: variables whose entries
    together are the cell's input.
    """

    kind: type[Cell]
    states: tuple[int, ...]
    starts: tuple[Var, ...]
    gates: Mapping[str, Gate]
    inputs: tuple[Var, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    reset: Condition | None = None
    mask: Condition | None = None
    #: Aliases of the reset gate of a GRU, which are set to a constant to separate the terms that it multiplies.
    reset_gate: tuple[Var, ...] = ()


class StepValues:
    """One step of a loop on random values, and its structure."""

    def __init__(self, loop: Loop, sample_axes: Mapping[Any, int], samples: int) -> None:
        self.loop, self.jaxpr, self.samples = loop, loop.body.jaxpr, samples
        self.axes = sample_axes
        self.defined = {v: i for i, e in enumerate(self.jaxpr.eqns) for v in e.outvars}
        constants, carried, inputs = loop.split(self.jaxpr.invars)
        data = [*carried, *inputs, *(v for v, fixed in zip(constants, loop.fixed, strict=True) if not fixed)]
        self.of_data = dependent(self.jaxpr, data)
        self.of_state = dependent(self.jaxpr, [v for v in carried if is_inexact(v.aval)])
        rng = np.random.default_rng(0)
        self.known = {v: _random(v.aval, rng) for v in self.jaxpr.invars}
        floats = [v for v in self.defined if _is_float(v) and v.aval.ndim <= 2]
        wanted = [v for v in floats if any(v.aval.shape == s.aval.shape for s in carried)]
        self.values = dict(zip(wanted, evaluate(loop.body, self.known, wanted), strict=True)) | self.known

    def root(self, atom: Any) -> Any:
        """Return the variable that an atom consists of entries of."""
        while isinstance(atom, Var) and atom in self.defined:
            equation = self.jaxpr.eqns[self.defined[atom]]
            if equation.primitive.name not in MOVES or isinstance(equation.invars[0], Literal):
                break
            atom = equation.invars[0]
        return atom

    def equation(self, atom: Any) -> Any:
        """Return the equation that computes the root of an atom, or None."""
        index = self.root_index(atom)
        return None if index is None else self.jaxpr.eqns[index]

    def root_index(self, atom: Any) -> int | None:
        """Return the index of the equation that computes the root of an atom, or None."""
        return self.defined.get(self.root(atom)) if isinstance(atom, Var) else None

    def rows(self, variable: Var, value: Any) -> Array:
        """Return a value as a matrix with one row for each sample."""
        axis = self.axes.get(variable)
        value = np.asarray(value)
        return value.reshape(1, -1) if axis is None else np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)

    def from_rows(self, variable: Var, rows: Array) -> Array:
        """Return a matrix with one row for each sample in the layout of a variable."""
        axis, shape = self.axes.get(variable), tuple(variable.aval.shape)
        if axis is None:
            return np.reshape(rows, shape)
        return np.moveaxis(np.reshape(rows, (shape[axis], *shape[:axis], *shape[axis + 1 :])), 0, axis)

    def activations(self, state: Var, primitive: str) -> dict[Var, Array]:
        """Return the variables shaped as a state whose numbers come from an activation, with their values."""
        return {
            v: self.values[v]
            for v in self.values
            if v in self.defined
            and v.aval.shape == state.aval.shape
            and self.axes.get(v) == self.axes.get(state)
            and (equation := self.equation(v)) is not None
            and equation.primitive.name == primitive
        }

    def starts_of(self, slot: int) -> list[tuple[Var, Condition | None]]:
        """Return the variables from which a state may start: one set anew under a condition, or the carried one."""
        carried = self.loop.carried[slot]
        selected = []
        for v in self.values:
            found = self._selection(v, carried) if v in self.defined else None
            if found is not None and v.aval.shape == carried.aval.shape:
                condition, _ = found
                selected.append((v, Condition(condition.variable, not condition.value)))
        return [*selected, (carried, None)]

    def _selection(self, atom: Any, carried: Var) -> tuple[Condition, Any] | None:
        """Return the condition under which a select returns a carried value, and its other case; None if it is none."""
        equation = self.equation(atom)
        if equation is None or equation.primitive.name != "select_n" or len(equation.invars) != 3:
            return None
        which, *cases = equation.invars
        kept = [i for i, case in enumerate(cases) if self.root(case) is carried]
        condition = self.per_sample(which)
        if len(kept) != 1 or condition is None:
            return None
        return Condition(condition, bool(kept[0])), cases[1 - kept[0]]

    def per_sample(self, atom: Any) -> Var | None:
        """Return the boolean variable with one number for each sample that a condition is broadcast from, or None."""
        found = None
        while isinstance(atom, Var):
            axis = self.axes.get(atom)
            is_one_each = atom.aval.size == self.samples and (axis == 0 or (axis is None and self.samples == 1))
            if is_one_each and str(atom.aval.dtype) == "bool":
                found = atom
            index = self.defined.get(atom)
            equation = None if index is None else self.jaxpr.eqns[index]
            if equation is None or equation.primitive.name not in ("broadcast_in_dim", "reshape", "squeeze"):
                break
            atom = equation.invars[0]
        return found

    def masked(self, slot: int) -> tuple[Any, Condition | None]:
        """Return the result that becomes a new state where a step is real, and the condition for that, if any."""
        result = self.loop.carried_after[slot]
        found = self._selection(result, self.loop.carried[slot])
        if found is None:
            return result, None
        condition, computed = found
        return computed, Condition(condition.variable, not condition.value)


def recognise(loop: Loop, sample_axes: Mapping[Any, int], samples: int) -> KnownCell | None:
    """Return the known cell that the steps of a loop are, or None."""
    slots = [j for j, v in enumerate(loop.carried) if _is_float(v) and v is not loop.carried_after[j]]
    if not 1 <= len(slots) <= 2 or any(len(loop.carried[j].aval.shape) > 2 for j in slots):
        return None
    try:
        step = StepValues(loop, sample_axes, samples)
        readers = [_gru, _simple] if len(slots) == 1 else [_lstm]
        candidates = (cell for reader in readers for cell in reader(step, slots))
        return next((cell for cell in candidates if _is_confirmed(step, cell)), None)
    except Exception:  # an operation that cannot be run on random values: the step has no known equations then
        return None


def _lstm(step: StepValues, slots: Sequence[int]) -> Iterator[KnownCell]:
    for h, c in permutations(slots):
        (new_h, mask), (new_c, other_mask) = step.masked(h), step.masked(c)
        sigmoids, tanhs = (step.activations(step.loop.carried[c], name) for name in ("logistic", "tanh"))
        values = _values_of(step, new_h, new_c)
        outputs = [o for o, a in sigmoids.items() if _same(values[0], a * np.tanh(values[1]))]
        if mask != other_mask or not outputs:
            continue
        for start, reset in step.starts_of(c):
            start_h = next((v for v, condition in step.starts_of(h) if condition == reset), None)
            for f, i in permutations(sigmoids, 2):
                for g in tanhs:
                    cell_value = sigmoids[f] * step.values[start] + sigmoids[i] * tanhs[g]
                    if start_h is not None and _same(values[1], cell_value):
                        roles = {"input": i, "forget": f, "candidate": g, "output": outputs[0]}
                        gates = {name: Gate(v, step.root_index(v)) for name, v in roles.items()}
                        yield from _with_inputs(
                            step, KnownCell(LSTM, (h, c), (start_h, start), gates, reset=reset, mask=mask)
                        )


def _gru(step: StepValues, slots: Sequence[int]) -> Iterator[KnownCell]:
    (h,) = slots
    new, mask = step.masked(h)
    (value,) = _values_of(step, new)
    sigmoids, tanhs = (step.activations(step.loop.carried[h], name) for name in ("logistic", "tanh"))
    for start, reset in step.starts_of(h):
        before = step.values[start]
        for u, n in ((u, n) for u in sigmoids for n in tanhs):
            share = sigmoids[u]
            sign = next(
                (s for s, a in ((1, share), (-1, 1 - share)) if _same(value, a * before + (1 - a) * tanhs[n])), None
            )
            for r in sigmoids if sign is not None else ():
                if r is u or _same(sigmoids[r], share):
                    continue
                aliases = tuple(v for v in sigmoids if _same(sigmoids[v], sigmoids[r]))
                gates = {
                    "update": Gate(u, step.root_index(u), sign or 1),
                    "reset": Gate(r, step.root_index(r)),
                    "candidate": Gate(n, step.root_index(n)),
                }
                cell = KnownCell(GRU, (h,), (start,), gates, (), {}, reset, mask, aliases)
                yield from _with_reset_order(step, cell)


def _with_reset_order(step: StepValues, cell: KnownCell) -> Iterator[KnownCell]:
    """Yield a GRU with its inputs, and with the reset gate before or after the recurrent product, if it is either."""
    for found in _with_inputs(step, cell):
        factor = np.random.default_rng(1).uniform(size=step.loop.carried[cell.states[0]].aval.shape)
        known = {v: step.values[v] for v in found.inputs} | _weights_of(step)
        start = {found.starts[0]: step.values[found.starts[0]]}
        scaled_start = {found.starts[0]: factor * step.values[found.starts[0]]}

        def candidate(found: KnownCell, state: Any, gate: Any, known: Any = known) -> Array:
            return _preactivation(step, found, "candidate", known | state, gate)

        without, full, scaled = (candidate(found, start, gate) for gate in (0.0, 1.0, factor))
        if _same(scaled, without + factor * (full - without)):
            yield _with_options(found, reset_after=True)
        elif _same(scaled, candidate(found, scaled_start, 1.0)):
            yield _with_options(found, reset_after=False)


def _simple(step: StepValues, slots: Sequence[int]) -> Iterator[KnownCell]:
    (h,) = slots
    new, mask = step.masked(h)
    (value,) = _values_of(step, new)
    for start, reset in step.starts_of(h):
        index = step.root_index(new)
        if index is None or not isinstance(new, Var):
            continue
        for activation in (index, None):
            cell = KnownCell(SimpleRNN, (h,), (start,), {"candidate": Gate(new, activation)}, reset=reset, mask=mask)
            for found in _with_inputs(step, cell):
                known = _weights_of(step) | {v: step.values[v] for v in (*found.inputs, start)}
                z = _preactivation(step, found, "candidate", known, None)
                for name, function in ACTIVATIONS.items():
                    if function.slope is not None and _same(function.value(z, np), value):
                        yield _with_options(found, activation=name)


def _with_options(cell: KnownCell, **options: Any) -> KnownCell:
    return KnownCell(
        cell.kind, cell.states, cell.starts, cell.gates, cell.inputs, options, cell.reset, cell.mask, cell.reset_gate
    )


def _values_of(step: StepValues, *atoms: Any) -> list[Array]:
    return evaluate(step.loop.body, step.known, atoms)


def _weights_of(step: StepValues) -> dict[Var, Any]:
    """Return the random values of the constants that consist of parameters."""
    constants = step.loop.split(step.jaxpr.invars)[0]
    return {v: step.known[v] for v, fixed in zip(constants, step.loop.fixed, strict=True) if fixed}


def _with_inputs(step: StepValues, cell: KnownCell) -> Iterator[KnownCell]:
    """Yield the cell with the variables that its gates are affine functions of, besides the state; nothing if not."""
    search = _InputSearch(step, cell)
    for gate in cell.gates.values():
        atoms = [gate.variable] if gate.activation is None else step.jaxpr.eqns[gate.activation].invars[:1]
        if not all(search.visit(atom, False) for atom in atoms):
            return
    leaves = tuple(search.found)
    if step.samples > 1 and any(v not in step.axes for v in leaves):
        return
    if all(_is_float(v) for v in leaves):
        yield KnownCell(
            cell.kind,
            cell.states,
            cell.starts,
            cell.gates,
            leaves,
            cell.options,
            cell.reset,
            cell.mask,
            cell.reset_gate,
        )


class _InputSearch:
    """Search from a pre-activation through affine operations down to the state, the weights, and other variables."""

    def __init__(self, step: StepValues, cell: KnownCell) -> None:
        self.step, self.start, self.reset_gate = step, cell.starts[0], set(cell.reset_gate)
        self.found: dict[Var, None] = {}
        self.visited: set[tuple[Any, bool]] = set()

    def visit(self, atom: Any, multiplied: bool) -> bool:
        """Follow an atom; ``multiplied``: it is multiplied by a kernel. Return False if the state is not affine."""
        step = self.step
        if not isinstance(atom, Var) or atom is self.start or atom not in step.of_data:
            return True
        if (atom, multiplied) in self.visited:
            return True
        self.visited.add((atom, multiplied))
        index = step.defined.get(atom)
        equation = None if index is None else step.jaxpr.eqns[index]
        name = "" if equation is None else equation.primitive.name
        has_state = atom in step.of_state
        next_atoms = None if equation is None else self._operands(equation, name, multiplied and not has_state)
        if next_atoms is None:
            if not has_state:
                self.found[atom] = None
            return not has_state
        return all(self.visit(v, multiplied or name == "dot_general") for v in next_atoms)

    def _operands(self, equation: Any, name: str, only_moves: bool) -> list[Any] | None:
        """Return the operands in which an equation is affine; None if it is not, or is part of the input."""
        operands = equation.invars
        if name in MOVES:
            return None if not _is_float(operands[0]) else operands[:1]
        if name == "concatenate":
            return list(operands)
        if only_moves:
            return None
        if name in _LINEAR:
            return list(operands)
        of_data = [v for v in variables(operands) if v in self.step.of_data]
        if name == "dot_general" and len(of_data) == 1:
            return of_data
        if name == "mul":
            others = [v for v in of_data if v not in self.reset_gate]
            return others if len(others) == 1 else None
        return None


def _preactivation(step: StepValues, cell: KnownCell, name: str, known: Mapping[Var, Any], reset_gate: Any) -> Array:
    """Return a gate before its activation, with the reset gate set to ``reset_gate`` if that is given."""
    gate = cell.gates[name]
    is_free = reset_gate is None or name == "reset"
    fixed = {} if is_free else {v: np.broadcast_to(reset_gate, v.aval.shape) for v in cell.reset_gate}
    without = () if gate.activation is None else (gate.activation,)
    return np.asarray(evaluate(step.loop.body, {**known, **fixed}, [gate.variable], without=without)[0])


def extract_weights(step: StepValues, cell: KnownCell, constants: Mapping[Var, Any]) -> dict[str, Array]:
    """Return the weights of a known cell by their names, for given constants of the body.

    Every entry is the pre-activation at a unit vector, less that at zero: an entry of the library's kernel unchanged,
    because all other products are zero.
    """
    state = cell.starts[0]
    widths = [step.rows(v, np.zeros(v.aval.shape)).shape[1] for v in (*cell.inputs, state)]
    samples, total = (step.rows(state, np.zeros(state.aval.shape)).shape[0], sum(widths))
    cuts = np.cumsum(widths)[:-1]

    def at(name: str, rows: Array, gate: Any) -> Array:
        known = dict(constants)
        for v, part in zip((*cell.inputs, state), np.split(rows, cuts, axis=1), strict=True):
            known[v] = step.from_rows(v, part)
        return cell.gates[name].sign * step.rows(
            cell.gates[name].variable, _preactivation(step, cell, name, known, gate)
        )

    def affine(name: str, gate: Any) -> tuple[Array, Array]:
        """Return the matrix (feature + unit, unit) and the vector of a pre-activation."""
        units = np.eye(total)
        padded = np.concatenate([units, np.zeros((-total % samples, total))])
        offset = at(name, np.zeros((samples, total)), gate)
        rows = [at(name, padded[i : i + samples], gate) - offset for i in range(0, len(padded), samples)]
        return np.concatenate(rows)[:total], offset[0]

    features = total - widths[-1]
    kernels, recurrent, biases, recurrent_biases = [], [], [], []
    for name in cell.kind.gates:
        matrix, bias = affine(name, 1.0 if cell.reset_gate else None)
        if cell.options.get("reset_after") and name == "candidate":
            _, bias_without = affine(name, 0.0)
            recurrent_biases.append(bias - bias_without)
            bias = bias_without
        else:
            recurrent_biases.append(np.zeros_like(bias))
        kernels.append(matrix[:features])
        recurrent.append(matrix[features:])
        biases.append(bias)
    weights = {
        "kernel": np.concatenate(kernels, axis=1),
        "recurrent_kernel": np.concatenate(recurrent, axis=1),
        "bias": np.concatenate(biases),
    }
    if cell.options.get("reset_after"):
        weights["recurrent_bias"] = np.concatenate(recurrent_biases)
    return weights


def make_cell(cell: KnownCell, weights: Mapping[str, Array]) -> Cell:
    """Return the cell of rnnlens with these weights."""
    return cell.kind(**weights, **cell.options)


def _is_confirmed(step: StepValues, cell: KnownCell) -> bool:
    """Return whether the cell, with the weights found, gives the new states of the step on random values."""
    weights = extract_weights(step, cell, _weights_of(step))
    known_cell = make_cell(cell, weights)
    parts = [step.rows(v, step.values[v] if v in step.values else _values_of(step, v)[0]) for v in cell.inputs]
    states = [step.rows(v, step.values[v]) for v in cell.starts]
    x = np.concatenate(parts, axis=1) if parts else np.zeros((len(states[0]), 0))
    _, after = known_cell.taken(known_cell.project(x, None, np), states, None, np)
    expected = _values_of(step, *(step.masked(slot)[0] for slot in cell.states))
    return all(
        _same(a, step.rows(step.loop.carried[slot], b)) for slot, a, b in zip(cell.states, after, expected, strict=True)
    )


def _same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-9, atol=1e-12))


def _is_float(variable: Any) -> bool:
    return bool(jax.numpy.issubdtype(variable.aval.dtype, jax.numpy.floating))


def _random(aval: Any, rng: np.random.Generator) -> Any:
    """Return random values for a variable: numbers of ordinary size, no integers but zero."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return jax.random.split(jax.random.key(0), aval.shape) if aval.shape else jax.random.key(0)
    if aval.dtype == np.bool_:
        return rng.uniform(size=aval.shape) < 0.5
    if jax.numpy.issubdtype(aval.dtype, jax.numpy.complexfloating):
        return rng.normal(size=aval.shape) + 1j * rng.normal(size=aval.shape)
    if jax.numpy.issubdtype(aval.dtype, jax.numpy.floating):
        return 0.5 * rng.normal(size=aval.shape)
    return np.zeros(aval.shape, dtype=aval.dtype)


def watched_variables(cell: KnownCell) -> Iterable[Var]:
    """Return the variables of the body that a capture of the cell records: its starts, reset and mask."""
    conditions = [condition.variable for condition in (cell.reset, cell.mask) if condition is not None]
    starts = cell.starts if cell.reset is not None else ()
    return (*starts, *conditions)
