"""What is differentiated and by what, resolved: steps, rows, and where they enter or leave a recurrent layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..adapters.protocol import Port
from ..errors import DisconnectedError, InputError, UnsupportedError, message
from ..recurrence.inplace import Workspace
from ..recurrence.linear import System
from ..recurrence.linear_cells import linear_system, output_state
from ..recurrence.sources import Points
from ..results.schema import plain
from ..typing import Array
from .inside import Half, Inside, like
from .names import Catalogue, TensorName


@dataclass
class Swept:
    """A recurrent call, ready to be swept through."""

    half: Half
    system: System
    output: int

    @classmethod
    def of(cls, half: Half) -> Swept:
        """Linearise a replayed call."""
        return cls(half, linear_system(half.run, masked_output=half.call.masked_output), output_state(half.run))

    @property
    def work(self) -> Workspace:
        """Where its arrays live."""
        return self.system.work

    def output_moves(self) -> Array | None:
        """(sample, time) of bool: where the output moves with the state; None for everywhere."""
        call = self.half.call
        if call.masked_output == "zero" and call.mask is not None and self.output < len(self.half.run.states):
            return call.mask
        return call.output_from_state

    def points(self, state: int, times: Sequence[int], block: Array) -> Points:
        """Cotangents (sample or 1, time or 1, row, size) that enter a state at single steps."""
        return Points(list(times), {state: like(block, self.half.run.input)}, self.system.order)

    def output_points(self, times: Sequence[int], block: Array) -> Points:
        """Cotangents of the layer's output."""
        moves = self.output_moves()
        block = like(block, self.half.run.input)
        if moves is not None:
            xp = self.work.xp
            block = xp.where(moves[:, :, None, None], block, xp.zeros_like(block))
        return self.points(self.output, times, block)


@dataclass
class Tensor:
    """One end of a Jacobian.

    Attributes
    ----------
    halves
        The recurrent calls inside which it lies; empty where it is at a border.
    port
        The border, else None.
    what, state
        ``"state"``, ``"final_state"``, ``"initial_state"`` or ``"output"`` within the halves, and which state.
    size, times
        Numbers per step, and number of steps; None where there is no time.
    """

    name: TensorName
    halves: list[Swept]
    port: Port | None
    what: str
    state: int
    size: int
    times: int | None

    @property
    def bidirectional(self) -> bool:
        """Whether there is one for each direction."""
        return len(self.halves) > 1


def inner_tensor(name: TensorName, swept: Sequence[Swept]) -> Tensor:
    """A state of a recurrent layer."""
    time = int(swept[0].half.run.input.shape[1])
    states = swept[0].half.run.states
    if name.index >= len(states):
        got = f"{name.text}, state number {name.index} of {len(states)}"
        raise InputError(message(f"There is no {name.text}.", got=got))
    size = int(states[name.index].shape[-1])
    return Tensor(name, list(swept), None, name.what, name.index, size, time if name.what == "state" else None)


def output_tensor(name: TensorName, swept: Swept) -> Tensor:
    """The output of a recurrent layer that runs one way: a state, or a custom cell's own output."""
    call = swept.half.call
    times = int(call.input.shape[1]) if call.returns_sequences else None
    size = int(call.output.shape[-1])
    return Tensor(name, [swept], None, "output", swept.output, size, times)


def readable(name: TensorName, known: Catalogue, role: str) -> TensorName:
    """Refuse what cannot be one end of a time Jacobian."""
    allowed = {"of": ("output", "state", "final_state"), "wrt": ("input", "output", "state", "initial_state")}[role]
    if name.what in allowed:
        return name
    examples = {
        "of": '"output", "lstm.output", "lstm.hidden", "lstm.cell" or "lstm.final_hidden"',
        "wrt": '"input", "embedding.output", "lstm.output", "lstm.hidden" or "lstm.initial_hidden"',
    }[role]
    hint = "rl.gradients differentiates the loss, and by weights and gates"
    raise UnsupportedError(message(f"{role}={name.text!r} has no time Jacobian.", expected=examples, hint=hint))


def chosen_times(times: Any, count: int | None, argument: str) -> list[int] | None:
    """Indices of steps as asked: negative ones count from the end.

    Raises
    ------
    InputError
        If a step does not exist, is named twice, or there is no time axis to choose from.
    """
    if count is None:
        if times is not None:
            what = "out_time" if argument == "out_times" else "in_time"
            raise InputError(
                message(f"There is no {what} to choose from: the tensor has no time axis.", got=f"{argument}=")
            )
        return None
    if times is None:
        return list(range(count))
    if isinstance(times, slice):
        chosen = list(range(count))[times]
        if not chosen:
            raise InputError(
                message(f"{argument} names no steps.", got=repr(times), expected=f"some of the {count} steps from 0")
            )
        return chosen
    given = np.atleast_1d(np.asarray(times))
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer) or given.size == 0:
        raise InputError(
            message(f"{argument} names no steps.", got=repr(times), expected="an int, a list of int, a slice")
        )
    if ((given < -count) | (given >= count)).any():
        raise InputError(
            message(f"{argument} names a step that is not there.", got=repr(times), expected=f"0 to {count - 1}")
        )
    found = [int(t) % count for t in given]
    if len(set(found)) < len(found):
        raise InputError(message(f"{argument} names a step twice.", got=repr(times)))
    return found


def projection(project: Any, size: int) -> np.ndarray[Any, Any] | None:
    """Rows (k, unit) that contract the output units before differentiation; None for all units as they are.

    Raises
    ------
    InputError
        If it fits no (unit,) or (k, unit).
    """
    if project is None:
        return None
    if isinstance(project, str):
        if project not in ("mean", "sum"):
            expected = '"mean", "sum", a vector of one weight per unit, a matrix (k, unit)'
            raise InputError(message("project= is not understood.", got=repr(project), expected=expected))
        return np.full((1, size), 1.0 / size if project == "mean" else 1.0)
    matrix = np.atleast_2d(np.asarray(plain(project), dtype=float))
    if matrix.ndim != 2 or matrix.shape[1] != size or not np.isfinite(matrix).all():
        raise InputError(
            message(
                "project= does not fit the output units.",
                got=f"shape {np.shape(plain(project))}",
                expected=f"({size},) or (k, {size}), finite",
            )
        )
    return matrix


def disconnected(start: Tensor, end: Tensor) -> DisconnectedError:
    """The error where nothing leads from one end to the other."""
    return DisconnectedError(
        message(
            f"Nothing leads from {end.name.text} to {start.name.text}.",
            got="a gradient that is zero for every sample, step and unit",
            expected="wrt= below of=",
            hint="rl.gradients(...) says why; rl.layers(model) lists the recurrent layers in the order of their calls",
        )
    )


def look_inside(inside: Inside) -> dict[int, Swept]:
    """Linear systems of all calls, by the identity of their half."""
    return {id(half): Swept.of(half) for both in inside.halves.values() for half in both}
