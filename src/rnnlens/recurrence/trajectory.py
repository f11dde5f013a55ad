"""Arrays of one recurrent call: the trajectory of its cell, and the total gradients along it.

Arrays are sample-first and chronological. ``order`` is the direction of the recurrence; no array is ever reversed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from ..typing import Array, Namespace


class Scales(NamedTuple):
    """Dropout multipliers of input and state: (sample, n) or (gate, sample, n) each, None without dropout."""

    input: Array | None = None
    state: Array | None = None


#: Multipliers without dropout.
UNSCALED = Scales()

#: Dropout multipliers (sample, n) of all gates or (gate, sample, n) of each; None without dropout.
Scale = Array | None
#: One array (sample, ..., size) per state.
States = Sequence[Array]
#: Gradients of weights by name.
Gradients = dict[str, Array]


class Record(NamedTuple):
    """Gates of a cell before and after their activation, (..., gate, unit) each.

    ``inner`` is a further value that is needed to differentiate a step, or None. In a GRU with ``reset_after`` it is
    the recurrent part of the candidate before the reset gate multiplies it. In a cell that a framework differentiates
    it is the projected input.
    """

    preactivation: Array
    gates: Array
    inner: Array | None = None

    def at(self, index: tuple[object, ...]) -> Record:
        """Return the record of some entries: each array indexed by ``index`` on its leading axes."""
        return self.map(lambda part: part[index])

    def map(self, function: Callable[[Array], Array]) -> Record:
        """Apply a function to each array of the record."""
        inner = None if self.inner is None else function(self.inner)
        return Record(function(self.preactivation), function(self.gates), inner)


#: Gates of a step, and the states after it.
Stepped = tuple[Record, tuple[Array, ...]]
#: Gradients of the pre-activations, of the previous states, and of the states as the step produces them.
Pulled = tuple[Array, tuple[Array, ...], tuple[Array, ...]]
#: dL/dz at the recurrent side of each gate, and for slices of gates the input of that side.
RecurrentTerms = tuple[Array, list[tuple[slice, Array]]]


@dataclass
class Trajectory:
    """One recurrent layer, or one direction of it, on one batch: input, states and gates at all steps.

    Attributes
    ----------
    states : one (sample, time, size) array per state, after step t
    record : gates of all steps, (sample, time, gate, unit); None if the framework runs the cell
    step_output : (sample, time, unit) or None
        Output at each step, before masking, of a cell run by the framework; None for cells with known equations.
    mask : (sample, time) of bool, or None; False where the states are carried over
    start_states : one (sample, time, size) array per state, or None
        States that each step started from, if the user's code changes them between the steps; None if each step
        started from the states after the step before it.
    reset : (sample, time) of bool, or None
        True where a step started from a new state, if the user's code does nothing else to the states between the
        steps; None if it does, or if no step did.
    """

    xp: Namespace
    input: Array
    initial_state: tuple[Array, ...]
    states: tuple[Array, ...] = ()
    record: Record | None = None
    step_output: Array | None = None
    mask: Array | None = None
    order: Literal["forward", "backward"] = "forward"
    input_scale: Array | None = None
    state_scale: Array | None = None
    start_states: tuple[Array, ...] | None = None
    reset: Array | None = None

    @property
    def preactivation(self) -> Array | None:
        """Pre-activations (sample, time, gate, unit); None if the gates are unknown."""
        return None if self.record is None else self.record.preactivation

    @property
    def gates(self) -> Array | None:
        """Gates (sample, time, gate, unit); None if the gates are unknown."""
        return None if self.record is None else self.record.gates

    @property
    def known_record(self) -> Record:
        """Gates before and after their activation, for a cell with known equations.

        Raise TypeError if the framework runs the cell, so that gates are unknown.
        """
        if self.record is None:
            raise TypeError("a cell without equations has no recorded gates")
        return self.record

    def of_samples(self, samples: slice | np.ndarray[Any, Any]) -> Self:
        """Return the trajectory of some samples, of a slice as views where the library supports them."""
        names = ("input", "initial_state", "states", "record", "step_output", "mask", "start_states", "reset")
        return replace(
            self,
            **{name: _of_samples(getattr(self, name), samples) for name in names},
            input_scale=scale_of_samples(self.input_scale, samples),
            state_scale=scale_of_samples(self.state_scale, samples),
        )

    def steps(self, *, reverse: bool = False) -> Iterator[int]:
        """Return the time indices in the order of the recurrence, or reversed."""
        return steps(self.input.shape[1], self.order, reverse=reverse)

    def state_before(self, t: int) -> tuple[Array, ...]:
        """Return the states before step t, one (sample, size) array each."""
        if self.start_states is not None:
            return tuple(s[:, t, ...] for s in self.start_states)
        previous = t - 1 if self.order == "forward" else t + 1
        if 0 <= previous < self.input.shape[1]:
            return tuple(s[:, previous, ...] for s in self.states)
        return self.initial_state

    def states_before(self) -> tuple[Array, ...]:
        """Return the states before each step, one (sample, time, size) array each."""
        return tuple(self.before(state) for state in range(len(self.states)))

    def before(self, state: int) -> Array:
        """Return the values (sample, time, size) of the state number ``state`` before each step."""
        if self.start_states is not None:
            return self.start_states[state]
        return shift(self.states[state], self.initial_state[state], self.order, self.xp)

    def at_real_steps(self, values: Array) -> Array:
        """Set values (sample, time, ...) to zero at masked steps."""
        if self.mask is None:
            return values
        return self.xp.where(over_time(self.mask, values), values, self.xp.zeros_like(values))


@dataclass
class Adjoint:
    """Total gradients along a trajectory; arrays are sample-first and chronological.

    Attributes
    ----------
    state_grads : one (sample, time, size) array per state
        dL/ds_t of each state as the step produces it, including paths through other results of the same step, such as
        from an LSTM's c_t through h_t.
    gate_grad : (sample, time, gate, unit), None for a cell run by the framework
        dL/dz_t with respect to the pre-activations; for a cell without gates, to the projected input.
    input_grad : (sample, time, feature)
    initial_state_grad : one (sample, size) array per state
    output_cotangent : (sample, time, unit), only for cells run by a framework
        Direct gradient of each step's output, moved from masked steps to the steps whose output they repeat.
    returned_grads : same shapes as ``state_grads``, only for cells that a framework differentiates
        dL/ds_t of the states as a step returns them, without their paths to each other within the step.
    """

    state_grads: tuple[Array, ...]
    gate_grad: Array | None
    input_grad: Array
    initial_state_grad: tuple[Array, ...]
    output_cotangent: Array | None = None
    returned_grads: tuple[Array, ...] | None = None

    def of_samples(self, samples: slice) -> Adjoint:
        """Return the gradients of some samples, as views where the library supports them."""
        return Adjoint(
            **{attribute.name: _of_samples(getattr(self, attribute.name), samples) for attribute in fields(self)}
        )


def _of_samples(values: Any, samples: slice | np.ndarray[Any, Any]) -> Any:
    """Select samples from an array, a record or a tuple of arrays; None stays None."""
    if values is None:
        return None
    if isinstance(values, Record):
        return values.at((samples, ...))
    if isinstance(values, tuple):
        return tuple(array[samples, ...] for array in values)
    return values[samples, ...]


def steps(count: int, order: str, *, reverse: bool = False) -> Iterator[int]:
    """Return the time indices 0 ... count-1 in the order of a recurrence, or reversed."""
    chronological = (order == "forward") != reverse
    return iter(range(count) if chronological else range(count - 1, -1, -1))


def shift(states_after: Array, initial: Array, order: str, xp: Namespace) -> Array:
    """Convert states after each step to states before each step."""
    first_state = initial[:, None, ...]
    if order == "forward":
        return xp.concat([first_state, states_after[:, :-1, ...]], axis=1)
    return xp.concat([states_after[:, 1:, ...], first_state], axis=1)


def over_time(mask: Array, like: Array) -> Array:
    """Reshape a mask (sample, time) or (sample,) so that it broadcasts against ``like``."""
    return mask[(..., *[None] * (like.ndim - mask.ndim))]


def carry_masked(new_state: Array, old_state: Array, mask_t: Array | None, xp: Namespace) -> Array:
    """Return the state after a step: the new state at real steps, the old state at masked steps."""
    return new_state if mask_t is None else xp.where(over_time(mask_t, new_state), new_state, old_state)


def scale_of_samples(scale: Array | None, samples: slice | np.ndarray[Any, Any]) -> Array | None:
    """Select samples from dropout multipliers (sample, n) or (gate, sample, n); None stays None."""
    if scale is None:
        return None
    return scale[samples, ...] if len(scale.shape) == 2 else scale[:, samples, :]
