"""Runs a flat program with zeros added at points of its loops, and returns the values at these points at all steps.

A loop is emitted as a scan of the same body. Its *points* are variables of a step: the gradient by a zero that is
added at a point at every step is the gradient of that variable, at every step. What reads the sum decides which
gradient it is:

=============  ==========================================  =================================================
point          added for                                   gradient
=============  ==========================================  =================================================
``state0``     everything that reads the new state         total, dL/dh_t
``read0``      what is no part of the step's new states    direct, without the recurrence
``returned0``  that, and the next step                     of the state as the step returns it
``input0``     the equations of the new states             of the input, through this recurrence alone
``start0``     the equations of the new states             of the state that the step starts from
``initial0``   the first step                              of the initial state
``final0``     what reads the state after the last step    direct, of the final state
``output0``    what is no part of the step's new states    direct, of a value on the way to these
=============  ==========================================  =================================================

An output of the program has a point as well, without a path: the gradient of what only the loss reads.

All are exact, in one backward pass for all loops; nothing is subtracted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Var

from .jaxprs import bind, is_inexact, needed_equations
from .loops import Loop

#: Path of a loop, and the name of one of its points.
Point = tuple[str, str]


@dataclass(frozen=True, eq=False)
class OpenedLoop:
    """A loop with its points: ``states`` numbers carried values, the others are variables of the body by number."""

    loop: Loop
    states: tuple[int, ...] = ()
    inputs: tuple[Var, ...] = ()
    starts: tuple[Var, ...] = ()
    #: Further variables of the body whose values are recorded, by point.
    watched: Mapping[str, Var] = field(default_factory=dict)
    #: Whether differentiation by what reads the states stops there.
    is_cut: bool = False
    #: Numbers of states whose final values are read as states of the last step.
    final_reads: tuple[int, ...] = ()
    #: Variables of the body that are no new states and are read by what is no part of these.
    own_outputs: tuple[Var, ...] = ()

    @property
    def own(self) -> set[int]:
        """Indices of the equations that compute the new states."""
        return self.loop.state_equations


@dataclass(frozen=True)
class Emission:
    """A program to emit: the loops to open by path, and the points whose values are recorded."""

    opened: Mapping[str, OpenedLoop]
    recorded: Collection[Point]

    def run(
        self, program: ClosedJaxpr, arguments: Sequence[Any], zeros: Mapping[Point, Any], outputs: Sequence[Any] = ()
    ) -> tuple[list[Any], Any]:
        """Run a flat program; return its results, and the recorded values by point, stacked over steps.

        ``outputs``: the results that are outputs of the model. What they do not depend on belongs to the loss.
        """
        by_output = {v: zeros["", f"output{i}"] for i, v in enumerate(outputs) if ("", f"output{i}") in zeros}
        values = _ProgramValues(needed_equations(program.jaxpr, outputs), by_output)
        return self._run(program, arguments, zeros, "", values)

    def run_step(
        self, opened: OpenedLoop, arguments: Sequence[Any], zeros: Mapping[str, Any]
    ) -> tuple[list[Any], dict[Point, Any]]:
        """Run one step of a loop; return its results, and the values at its points."""
        return self._run(opened.loop.body, arguments, {}, f"{opened.loop.path}/", _StepValues(opened, zeros))

    def _run(
        self,
        program: ClosedJaxpr,
        arguments: Sequence[Any],
        zeros: Mapping[Point, Any],
        prefix: str,
        values: _ProgramValues,
    ) -> tuple[list[Any], dict[Point, Any]]:
        jaxpr, records = program.jaxpr, dict[Point, Any]()
        values.write([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *arguments])
        for index, equation in enumerate(jaxpr.eqns):
            path = f"{prefix}{index}"
            operands = [values.read(atom, index) for atom in equation.invars]
            below = {point: z for point, z in zeros.items() if point[0] == path or point[0].startswith(f"{path}/")}
            if path in self.opened:
                results, found = self._run_loop(self.opened[path], operands, below)
                records |= found
            else:
                results = bind(equation, operands)
            values.write(equation.outvars, results)
        if isinstance(values, _StepValues):
            return values.step_results(self, records)
        return [values.read(atom, -1) for atom in jaxpr.outvars], records

    def _run_loop(
        self, opened: OpenedLoop, operands: Sequence[Any], zeros: Mapping[Point, Any]
    ) -> tuple[list[Any], dict[Point, Any]]:
        """Run a loop as a scan that also returns the values at its points, and at those of loops in its body."""
        loop, path = opened.loop, opened.loop.path
        constants, initial, inputs = map(list, loop.split(operands))
        for number, slot in enumerate(opened.states):
            given = zeros.get((path, f"given{number}"), initial[slot])
            initial[slot] = _plus(given, zeros.get((path, f"initial{number}")))
        at_ends = {f"{kind}{j}" for kind in ("given", "initial", "final") for j in range(len(opened.states))}
        stepwise = {point: z for point, z in zeros.items() if not (point[0] == path and point[1] in at_ends)}

        def step(carried: Any, slices: Any) -> Any:
            inputs_t, zeros_t = slices
            own = {name: z for (where, name), z in zeros_t.items() if where == path}
            inner = {point: z for point, z in zeros_t.items() if point[0] != path}
            arguments = [*constants, *carried, *inputs_t]
            results, records = self._run(loop.body, arguments, inner, f"{path}/", _StepValues(opened, own))
            count = loop.counts[1]
            return results[:count], (results[count:], records)

        if loop.remat is not None:
            step = jax.checkpoint(step, policy=loop.remat["policy"], prevent_cse=loop.remat["prevent_cse"])
        last, (outputs, records) = lax.scan(step, initial, (inputs, stepwise), length=loop.length, reverse=loop.reverse)
        last_step = 0 if loop.reverse else -1
        for number, slot in enumerate(opened.states):
            if (path, f"ending{number}") in records:
                ending = records.pop((path, f"ending{number}"))[last_step]
                last[slot] = _plus(ending, zeros.get((path, f"final{number}")))
            if (path, f"initial{number}") in self.recorded:
                records[path, f"initial{number}"] = initial[slot]
            if (path, f"final{number}") in self.recorded:
                records[path, f"final{number}"] = last[slot]
        for number, value in enumerate(constants):
            if (path, f"constant{number}") in self.recorded:
                records[path, f"constant{number}"] = value
        return [*last, *outputs], records


class _ProgramValues:
    """Values of the variables of a program; what is not ``own`` reads them with the zeros added ``for_others``."""

    def __init__(self, own: Collection[int] = (), for_others: Mapping[Var, Any] | None = None) -> None:
        self.own, self.for_others = own, for_others or {}
        self.values: dict[Var, Any] = {}

    def write(self, variables: Sequence[Var], values: Sequence[Any]) -> None:
        self.values.update(zip(variables, values, strict=True))

    def read(self, atom: Any, index: int) -> Any:
        """Return the value that the equation ``index`` reads; -1 stands for the program's results."""
        if isinstance(atom, Literal):
            return atom.val
        value = self.values[atom]
        return value if index in self.own else _plus(value, self.for_others.get(atom))


class _StepValues(_ProgramValues):
    """Values of the variables of one step of an opened loop."""

    def __init__(self, opened: OpenedLoop, zeros: Mapping[str, Any]) -> None:
        super().__init__(opened.own)
        self.opened, self.zeros = opened, zeros
        self.states: dict[Var, list[int]] = {}
        after, passed = opened.loop.carried_after, opened.loop.body.jaxpr.invars
        for number, slot in enumerate(opened.states):
            if isinstance(after[slot], Var) and after[slot] not in passed:
                self.states.setdefault(after[slot], []).append(number)
        self.outputs = {v: f"output{i}" for i, v in enumerate(opened.own_outputs)}
        self.read_by_step = {v: f"start{i}" for i, v in enumerate(opened.starts)}
        self.read_by_step |= {v: f"input{i}" for i, v in enumerate(opened.inputs)}

    def write(self, variables: Sequence[Var], values: Sequence[Any]) -> None:
        for v, value in zip(variables, values, strict=True):
            for number in self.states.get(v, ()):
                value = _plus(value, self.zeros.get(f"state{number}"))
            self.values[v] = value

    def read(self, atom: Any, index: int) -> Any:
        """Return the value that the equation ``index`` reads; -1 stands for the program's results."""
        if isinstance(atom, Literal):
            return atom.val
        value = self.values[atom]
        if index in self.own:
            return _plus(value, self.zeros.get(self.read_by_step.get(atom, "")))
        return self._outer(atom, value)

    def _outer(self, atom: Var, value: Any) -> Any:
        """Return the value as what is no part of the new states reads it."""
        numbers, output = self.states.get(atom, ()), self.outputs.get(atom)
        if (numbers or output) and self.opened.is_cut and is_inexact(value):
            value = lax.stop_gradient(value)
        if output:
            value = _plus(value, self.zeros.get(output))
        for number in numbers:
            value = _plus(_plus(value, self.zeros.get(f"read{number}")), self.zeros.get(f"returned{number}"))
        return value

    def step_results(self, emission: Emission, records: dict[Point, Any]) -> tuple[list[Any], dict[Point, Any]]:
        """Return what the step carries on and returns, and the values at its points."""
        opened = self.opened
        jaxpr, path, count = opened.loop.body.jaxpr, opened.loop.path, opened.loop.counts[1]
        results = [self.read(atom, -1) for atom in jaxpr.outvars]
        for number, slot in enumerate(opened.states):
            atom = jaxpr.outvars[slot]
            if isinstance(atom, Var):
                results[slot] = _plus(self.values[atom], self.zeros.get(f"returned{number}"))
                if number in opened.final_reads:
                    records[path, f"ending{number}"] = self._outer(atom, self.values[atom])
        named = {f"state{number}": jaxpr.outvars[slot] for number, slot in enumerate(opened.states)}
        named |= {f"input{i}": v for i, v in enumerate(opened.inputs)}
        named |= {f"output{i}": v for i, v in enumerate(opened.own_outputs)}
        named |= {f"start{i}": v for i, v in enumerate(opened.starts)} | dict(opened.watched)
        for point, atom in named.items():
            if (path, point) in emission.recorded:
                records[path, point] = atom.val if isinstance(atom, Literal) else self.values[atom]
        return [*results[:count], *results[count:]], records


def _plus(value: Any, zero: Any) -> Any:
    return value if zero is None else value + zero
