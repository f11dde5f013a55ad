"""Recurrent layers of a program: its time loops, with the arrays at their boundaries in the layout of the protocol."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Var

from ...errors import LayerNotFoundError
from ...vocabulary import field_of, named_states
from ..protocol import Port
from .axes import AxisRoles, follows_time
from .emit import OpenedLoop, Point
from .jaxprs import dependent, is_inexact, needed_equations, variables
from .loops import Loop
from .recognise import KnownCell, recognise, watched_variables

#: Keys in JAX's name of an argument's leaf, such as ``state.soma['v'][0]``: field, key, or position.
_KEY = re.compile(r"\.(\w+)|\['([^']+)'\]|\[(\d+)\]")


@dataclass(frozen=True, eq=False)
class RecurrentLayer:
    """One time loop of a program, or one run of it within a loop around it.

    ``name``: ``"rnn"``, or ``"rnn#1"`` for the second run of one layer. ``index``: its place within the loops around
    it. ``states``: numbers of the carried values that are its states, the output first. ``inputs``: variables of the
    body that together are its input. ``own_outputs``: variables of the body that are no new states, come from a state,
    and are read by something else than the step: together its output; empty if the first state is the output.
    ``reads``: for each state whether something besides the next step reads it at each step, and whether something reads
    its last value.
    """

    name: str
    loop: Loop
    roles: AxisRoles
    states: tuple[int, ...]
    inputs: tuple[Var, ...]
    cell: KnownCell | None = None
    index: tuple[int, ...] = ()
    reads: tuple[tuple[bool, bool], ...] = ()
    own_outputs: tuple[Var, ...] = ()
    #: Lengths of the loops around this one.
    lengths_around: tuple[int, ...] = ()

    @property
    def base(self) -> str:
        """Name of the layer without the number of its run."""
        return self.loop.name

    @property
    def kind(self) -> str:
        """Kind of the cell: "lstm", "gru", "simple_rnn" or "custom"."""
        return "custom" if self.cell is None else self.cell.kind.kind

    @property
    def is_backward(self) -> bool:
        """Whether the recurrence runs from the last step to the first."""
        return self.loop.reverse != self.loop.flipped

    @property
    def steps(self) -> int:
        """Number of steps."""
        return int(self.loop.length or 0)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.roles.samples

    @property
    def last(self) -> int:
        """Index in time order of the step that runs last."""
        return 0 if self.is_backward else self.steps - 1

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states: those of their fields, where these can be names of states."""
        return named_states(self.state_fields)

    @property
    def state_fields(self) -> list[str | None]:
        """Fields and keys of the states in the carry of the user's function; None for states without any."""
        body = self.loop.equation.params.get("jaxpr") or self.loop.equation.params["body_jaxpr"]
        arguments = getattr(body.jaxpr.debug_info, "arg_names", None) or ()
        if len(arguments) != len(body.jaxpr.invars):
            return [None] * len(self.states)
        paths = [_KEY.findall(str(arguments[self.loop.counts[0] + slot])) for slot in self.states]
        return [field_of(name or key or int(i) for name, key, i in path) for path in paths]

    @property
    def state_variables(self) -> tuple[Var, ...]:
        """Variables of the body that hold the states before a step."""
        return tuple(self.loop.carried[slot] for slot in self.states)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each state of a sample."""
        return tuple(self.width(v) for v in self.state_variables)

    @property
    def starts_anew(self) -> bool:
        """Whether a step may start from another state than the step before left."""
        return self.cell is not None and self.cell.reset is not None

    @property
    def output_variables(self) -> tuple[Var, ...]:
        """Variables of the body that together are the output of a step."""
        return self.own_outputs or self.state_variables[:1]

    @property
    def other_states(self) -> range:
        """Numbers of the states that are not the output."""
        return range(0 if self.own_outputs else 1, len(self.states))

    @property
    def reads_other_states(self) -> bool:
        """Whether something reads a state other than the output at each step."""
        return any(self.reads[i][0] for i in self.other_states)

    @property
    def returns_final_states(self) -> bool:
        """Whether something reads the last value of a state other than the output."""
        return any(self.reads[i][1] for i in self.other_states) and not self.reads_other_states

    def width(self, variable: Any) -> int:
        """Return the number of entries of a variable for one sample and step; complex ones count twice."""
        shape, axis = tuple(variable.aval.shape), self.roles.sample.get(variable)
        size = int(math.prod(n for i, n in enumerate(shape) if i != axis))
        return 2 * size if jnp.issubdtype(variable.aval.dtype, jnp.complexfloating) else size

    def dtype(self, variable: Any) -> Any:
        """Return the real dtype of a variable."""
        return jnp.finfo(variable.aval.dtype).dtype

    def opened(self, *, is_cut: bool = False) -> OpenedLoop:
        """Return the loop with its points."""
        variables = self.other_inputs if self.cell is None else watched_variables(self.cell)
        watched = {f"watch{i}": v for i, v in enumerate(variables)}
        starts = self.state_variables if self.cell is None else self.cell.starts
        final_reads = tuple(number for number, (_, at_end) in enumerate(self.reads) if at_end)
        return OpenedLoop(self.loop, self.states, self.inputs, starts, watched, is_cut, final_reads, self.own_outputs)

    @property
    def other_inputs(self) -> tuple[Var, ...]:
        """Arguments of the body that a step of unknown equations reads besides floats and parameters."""
        constants, carried, inputs = self.loop.split(self.loop.body.jaxpr.invars)
        fixed = zip(constants, self.loop.fixed, strict=True)
        of_samples = [v for v, is_fixed in fixed if not is_fixed and v in self.roles.sample]
        known = {*self.inputs, *self.state_variables}
        return tuple(v for v in (*inputs, *carried, *of_samples) if v not in known and v in self.loop.read)

    def recorded_points(self) -> set[Point]:
        """Return the points that a capture of this layer records."""
        opened, path = self.opened(), self.loop.path
        names = [f"{kind}{i}" for kind in ("state", "initial") for i in range(len(self.states))]
        names += [f"input{i}" for i in range(len(self.inputs))] + list(opened.watched)
        names += [f"output{i}" for i in range(len(self.own_outputs))]
        names += [] if self.cell is not None else [f"constant{i}" for i in range(self.loop.counts[0])]
        return {(path, name) for name in names}

    # Arrays of the protocol, and those of the loop.

    def to_port(self, variable: Any, value: Any) -> Any:
        """Convert values of a variable at all steps, (time, ...), to (sample, time, size), in time order."""
        xp = _namespace(value)
        value = self.at_step(variable, value[self.index] if self.index else value, 1)
        value = xp.swapaxes(value, 0, 1)
        return xp.flip(value, 1) if self.loop.flipped else value

    def at_step(self, variable: Any, value: Any, lead: int = 0) -> Any:
        """Convert a value of a variable, with ``lead`` axes in front, to (..., sample, size)."""
        axis, xp = self.roles.sample.get(variable), _namespace(value)
        front = tuple(value.shape[:lead])
        if axis is None:
            value = xp.broadcast_to(xp.expand_dims(value, lead), (*front, self.samples, *value.shape[lead:]))
        else:
            value = xp.moveaxis(value, lead + axis, lead)
        value = value.reshape((*front, self.samples, -1))
        if jnp.issubdtype(value.dtype, jnp.complexfloating):
            value = xp.concatenate([value.real, value.imag], axis=-1)
        return value

    def from_port(self, variable: Any, value: Any) -> Any:
        """Convert values (sample, time, size) in time order to those of a variable at all steps of the loop."""
        value = jnp.flip(value, 1) if self.loop.flipped else value
        value = self.from_step(variable, jnp.swapaxes(value, 0, 1), 1)
        return self._in_place(value)

    def from_step(self, variable: Any, value: Any, lead: int = 0) -> Any:
        """Convert (..., sample, size) to the layout of a variable, the mean over samples if all share it."""
        axis, shape = self.roles.sample.get(variable), tuple(variable.aval.shape)
        front = tuple(value.shape[:lead])
        if jnp.issubdtype(variable.aval.dtype, jnp.complexfloating):
            real, imaginary = jnp.split(value, 2, axis=-1)
            value = real + 1j * imaginary
        if axis is None:
            value = value.mean(lead).reshape((*front, *shape))
        else:
            rest = tuple(n for i, n in enumerate(shape) if i != axis)
            value = jnp.moveaxis(value.reshape((*front, self.samples, *rest)), lead, lead + axis)
        return value.astype(variable.aval.dtype)

    def _in_place(self, value: Any) -> Any:
        """Return a value of this run of the loop among those of all runs, which are zero."""
        if not self.index:
            return value
        return jnp.zeros((*self.lengths_around, *value.shape), value.dtype).at[self.index].set(value)

    # Ports.

    def shape_of(self, port: Port) -> tuple[tuple[int, ...], Any]:
        """Return shape and dtype of a port of this layer."""
        if port.kind == "input":
            width = sum(map(self.width, self.inputs))
            dtype = (
                jnp.result_type(*map(self.dtype, self.inputs)) if self.inputs else self.dtype(self.state_variables[0])
            )
            return (self.samples, self.steps, width), dtype
        number = 0 if port.kind == "output" else port.index
        self.refuse_absent_state(port, number)
        variables = self.output_variables if port.kind == "output" else self.state_variables[number : number + 1]
        size, dtype = sum(map(self.width, variables)), jnp.result_type(*map(self.dtype, variables))
        has_time = port.kind in ("output", "state", "state_read") and port.key != "ending"
        return ((self.samples, self.steps, size) if has_time else (self.samples, size)), dtype

    def refuse_absent_state(self, port: Port, number: int) -> None:
        """Raise LayerNotFoundError for a state that the layer does not have, or a port of another kind."""
        kinds = ("output", "initial_state", "final_state", "state", "state_read")
        if port.kind not in kinds or number >= len(self.states) or (port.kind == "output" and port.index):
            raise LayerNotFoundError(
                f"Layer {self.name!r} has no {port.kind} number {port.index}.",
                expected=f"input, output or one of {len(self.states)} states",
            )

    def points_of(self, port: Port) -> list[tuple[Point, Any]]:
        """Return the points of a port, each with its variable."""
        path = self.loop.path
        if port.kind == "input":
            return [((path, f"input{i}"), v) for i, v in enumerate(self.inputs)]
        if port.kind == "output" and self.own_outputs:
            return [((path, f"output{i}"), v) for i, v in enumerate(self.own_outputs)]
        kinds = {"output": "state", "state_read": "state", "initial_state": "initial", "final_state": "final"}
        number = 0 if port.kind == "output" else port.index
        return [((path, f"{kinds.get(port.kind, port.kind)}{number}"), self.state_variables[number])]

    def value_at(self, port: Port, records: Mapping[Point, Any]) -> Any:
        """Return the value at a port from the recorded values of its points."""
        parts = []
        for point, variable in self.points_of(port):
            if port.kind in ("initial_state", "final_state"):
                value = records[point]
                parts.append(self.at_step(variable, value[self.index] if self.index else value))
            else:
                parts.append(self.to_port(variable, records[point]))
        if not parts:
            shape, dtype = self.shape_of(port)
            return jnp.zeros(shape, dtype)
        value = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        return value[:, self.last] if port.key == "ending" else value

    def zeros_at(self, port: Port, zero: Any) -> dict[Point, Any]:
        """Return the zeros to add at the points of a port, from one zero in the layout of the port."""
        kinds = {"output": "read", "state_read": "read"}
        is_output = port.index == 0 and not self.own_outputs
        if port.kind in ("state_read", "final_state") and is_output:  # its reader is that of the output
            return {}
        if port.key == "returned":
            kinds = {"state": "returned"}
        if port.key == "ending":
            shape, dtype = self.shape_of(replace(port, key=""))
            zero = jnp.zeros(shape, dtype).at[:, self.last].set(zero)
        zeros, start = {}, 0
        for (path, point), variable in self.points_of(port):
            width = self.width(variable)
            part = zero[..., start : start + width]
            start += width
            name = point.replace("state", kinds.get(port.kind, "state"), 1)
            if port.kind in ("initial_state", "final_state"):
                zeros[path, point] = self._in_place(self.from_step(variable, part))
            else:
                zeros[path, name] = self.from_port(variable, part)
        return zeros


def _namespace(value: Any) -> Any:
    """Return NumPy for its arrays: outside of a program each operation of JAX would be compiled by itself."""
    return np if isinstance(value, np.ndarray) else jnp


def find_layers(program: ClosedJaxpr, loops: Sequence[Loop], roles: AxisRoles) -> list[RecurrentLayer]:
    """Return the recurrent layers of a program: its time loops that carry a changing state of floats."""
    by_path = {loop.path: loop for loop in loops}
    candidates = [loop for loop in loops if not loop.obstacle and _state_slots(loop)]
    if roles.time:
        in_time = [loop for loop in candidates if follows_time(loop, roles)]
        around = {path for loop in in_time for path in loop.inside}
        rollouts = [loop for loop in candidates if loop.path not in around and _is_rollout(loop, roles)]
        candidates = [loop for loop in candidates if loop in in_time or loop in rollouts] if in_time else candidates
    paths = {loop.path for loop in candidates}
    outermost = [loop for loop in candidates if not paths & set(loop.inside)]
    layers: list[RecurrentLayer] = []
    for loop in outermost:
        lengths = tuple(int(by_path[path].length or 0) for path in loop.inside)
        layer = _layer(program, loop, roles)
        if lengths:
            places = list(np.ndindex(*lengths))
            layers += [
                replace(layer, name=f"{layer.base}#{i}", index=place, lengths_around=lengths)
                for i, place in enumerate(places)
            ]
        else:
            layers.append(layer)
    return layers


def _is_rollout(loop: Loop, roles: AxisRoles) -> bool:
    """Return whether a loop goes on from states of samples, one step at a time, without a sequence of its own.

    Its states have no axis of time, and its steps get no matrices of their own, as those of a loop over layers do.
    A vector of its own is the query or the position of a step.
    """
    _, _, inputs = loop.split(loop.equation.invars)
    states = [loop.carried[j] for j in _state_slots(loop)]
    own_matrices = [v for v in inputs if is_inexact(v.aval) and v.aval.ndim > 2 and v not in roles.sample]
    return any(v in roles.sample for v in states) and not any(v in roles.time for v in states) and not own_matrices


def _state_slots(loop: Loop) -> list[int]:
    """Return the numbers of the carried floats that a step changes."""
    return [
        j
        for j, (v, after) in enumerate(zip(loop.carried, loop.carried_after, strict=True))
        if is_inexact(v.aval) and after is not v
    ]


def _layer(program: ClosedJaxpr, loop: Loop, roles: AxisRoles) -> RecurrentLayer:
    known = None if loop.inside else recognise(loop, roles.sample, roles.samples)  # weights may differ between its runs
    if known is not None and any(_is_of_all_samples(v, roles) for v in known.inputs):
        known = None
    states = tuple(_state_slots(loop)) if known is None else known.states
    reads = {slot: _reads(program, loop, slot) for slot in states}
    if known is None:  # what others read comes first: it is the output
        states = tuple(sorted(states, key=lambda slot: (not any(reads[slot]), slot)))
    own_outputs = _own_outputs(program, loop)
    cell = None if own_outputs else known  # known cells return nothing but their states
    inputs = _float_inputs(loop, roles) if cell is None else cell.inputs
    reads_of_states = tuple(reads[slot] for slot in states)
    return RecurrentLayer(loop.name, loop, roles, states, inputs, cell, reads=reads_of_states, own_outputs=own_outputs)


def _float_inputs(loop: Loop, roles: AxisRoles) -> tuple[Var, ...]:
    """Return the float arguments of a body that differ between samples, besides its states; for one sample, all."""
    constants, _, inputs = loop.split(loop.body.jaxpr.invars)
    of_samples = [
        v for v, fixed in zip(constants, loop.fixed, strict=True) if not fixed and roles.sample.get(v) is not None
    ]
    own = [v for v in inputs if not _is_of_all_samples(v, roles)]
    return tuple(v for v in (*own, *of_samples) if is_inexact(v.aval) and v in loop.read)


def _is_of_all_samples(variable: Var, roles: AxisRoles) -> bool:
    """Return whether all samples share a variable, such as the time of a step: it has no gradient of each."""
    return bool(roles.sample) and variable not in roles.sample


def _reads(program: ClosedJaxpr, loop: Loop, slot: int) -> tuple[bool, bool]:
    """Return whether something besides the next step reads a state at each step, and whether its last value is read."""
    at_steps = loop.carried_after[slot] in _read_by_others(program, loop)
    if loop.inside:  # the loop around it decides; its result may be read
        return at_steps, True
    return at_steps, loop.equation.outvars[slot] in _read_in(program.jaxpr, program.jaxpr.outvars)


def _own_outputs(program: ClosedJaxpr, loop: Loop) -> tuple[Var, ...]:
    """Return the variables of a step, besides its new states, that come from a state and that others read.

    They are the state before the step, and what its equations compute on the way to the new states.
    """
    jaxpr, states = loop.body.jaxpr, [loop.carried[slot] for slot in _state_slots(loop)]
    own = {v for i in loop.state_equations for v in jaxpr.eqns[i].outvars} | set(states)
    others = own & _read_by_others(program, loop) & dependent(jaxpr, states) - set(variables(loop.carried_after))
    defined = [*jaxpr.invars, *(v for equation in jaxpr.eqns for v in equation.outvars)]
    return tuple(v for v in defined if v in others and is_inexact(v.aval))


def _read_by_others(program: ClosedJaxpr, loop: Loop) -> set[Var]:
    """Return the variables of a step that are results used outside, or read for these by no equation of the states."""
    stacked = slice(loop.counts[1], None)
    used = loop.body.jaxpr.outvars[stacked]
    if not loop.inside:  # the loop around it decides
        read = _read_in(program.jaxpr, program.jaxpr.outvars)
        used = [v for v, result in zip(used, loop.equation.outvars[stacked], strict=True) if result in read]
    return _read_in(loop.body.jaxpr, used, without=loop.state_equations)


def _read_in(jaxpr: Any, results: Sequence[Any], without: Collection[int] = ()) -> set[Var]:
    """Return the variables that are among the results, or that equations read on which these depend."""
    needed = needed_equations(jaxpr, results) - set(without)
    return {*variables(results), *(v for i in needed for v in variables(jaxpr.eqns[i].invars))}
