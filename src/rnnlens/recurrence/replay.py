"""Replay of a captured recurrent call: its states and gates at all steps, recomputed by rnnlens.

Arrays are sample-first and chronological. ``order`` is the direction of the recurrence; no array is ever reversed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
from array_api_compat import array_namespace, device

from ..errors import UnsupportedError, impure_cell_message
from ..typing import Array, Namespace
from .arrays import for_each, sample_chunks, walk_parts
from .cells import Cell, StepCell
from .linear import System
from .trajectory import UNSCALED, Record, Scales, Trajectory, carry_masked, over_time, scale_of_samples, shift

#: Residuals of one step, by dtype, that are too large for rounding alone.
_ROUNDING = {"float64": 1e-8, "float32": 1e-2}


@dataclass
class Replay(Trajectory):
    """One replayed recurrent call: the cell and its trajectory.

    Attributes
    ----------
    residual
        Largest difference between the recomputed and the captured values, relative to the largest captured magnitude.
    """

    cell: Cell = field(kw_only=True)
    residual: float = 0.0

    @property
    def preactivation(self) -> Array | None:
        """Pre-activations (sample, time, gate, unit); None if the gates are unknown."""
        return super().preactivation if self.cell.gates else None

    @property
    def gates(self) -> Array | None:
        """Gates (sample, time, gate, unit); None if the gates are unknown."""
        return super().gates if self.cell.gates else None

    @property
    def output_is_state(self) -> bool:
        """Whether the cell's output is one of its states, so that dL/dy_t is a gradient of that state.

        Equal values are no proof: an output ``h + gain * x`` equals the state while the gain is zero.
        """
        return self.step_output is None or self.cell.output_is_state

    @property
    def output_state(self) -> int:
        """Index of the state that is the layer's output; the number of states if the output is no state."""
        return self.cell.output_state if self.output_is_state else len(self.states)

    def linear_system(self, masked_output: str = "state") -> System:
        """Return the recurrence linearised around its trajectory, with the layer's output among its states."""
        return self.cell.linear_system(self, masked_output)

    @classmethod
    def from_call(cls, call: Any) -> Replay:
        """Replay a captured call (``adapters.protocol.RecurrentCall``) and compare it with the captured values."""
        cell, xp = call.cell, array_namespace(call.input)
        if cell.registered_for:
            refuse_other_states(call)
        run = cls.as_computed(call)
        run.reset = call.reset if call.resets_only else None
        if cell.registered_for:
            if call.returns_sequences:
                refuse_other_equations(call, _first_step_residual(run, run.states[0], call))
            refuse_other_ends(call, run.residual, _final_state_residual(run, call))
        if not call.returns_sequences:
            last_output = _with_constant_output(call, run, run.last_output(call.masked_output))
            run.residual = residual(last_output[:, None, ...], call.output[:, None, ...], None, xp)
            if cell.by_framework:
                refuse_another_function(call, run.residual)
            elif cell.registered_for:
                refuse_other_equations(call, run.residual)
        elif cell.by_framework:
            run.residual = residual(run.step_output, call.output, call.mask, xp)
            refuse_another_function(call, _first_step_residual(run, run.step_output, call))
        elif not _output_is_hidden(call, xp):
            run.residual = residual(run.states[0], call.output, call.mask & call.output_from_state, xp)
        return run

    @classmethod
    def as_computed(cls, call: Any) -> Replay:
        """Replay a captured call without a comparison, also for calls with non-finite numbers."""
        return replay(
            call.cell,
            call.input,
            call.start_states or call.initial_state,
            mask=call.mask,
            order=call.direction,
            hidden=call.output if _output_is_hidden(call, array_namespace(call.input)) else None,
            scales=Scales(call.input_scale, call.state_scale),
        )

    def last_output(self, masked_output: str = "state") -> Array:
        """Return the output (sample, unit) of a layer that returns only its last output."""
        *_, last_step = self.steps()
        state, xp = self.states[self.cell.output_state][:, last_step, ...], self.xp
        if self.step_output is None:
            if self.mask is None or masked_output != "zero":
                return state
            return carry_masked(state, xp.zeros_like(state), self.mask[:, last_step], xp)
        if self.mask is not None and masked_output == "state":
            return carry_masked(self.step_output[:, last_step, ...], state, self.mask[:, last_step], xp)
        if self.mask is None:
            return self.step_output[:, last_step, ...]
        output = self.xp.zeros_like(self.step_output[:, last_step, ...])
        for t in self.steps():
            previous_output = output if masked_output == "output" else self.xp.zeros_like(output)
            output = carry_masked(self.step_output[:, t, ...], previous_output, self.mask[:, t], self.xp)
        return output


def _with_constant_output(call: Any, run: Replay, last_output: Array) -> Array:
    """Set the replayed last output (sample, unit) to zero for samples for which the framework returned zeros."""
    if call.output_from_state is None:
        return last_output
    *_, last_step = run.steps()
    return run.xp.where(
        over_time(call.output_from_state[:, last_step], last_output), last_output, run.xp.zeros_like(last_output)
    )


def _output_is_hidden(call: Any, xp: Namespace) -> bool:
    """Return whether the output equals the hidden state at every real step."""
    if not call.returns_sequences or call.mask is None or call.output_from_state is None:
        return bool(call.returns_sequences)
    return bool(xp.all(call.output_from_state | ~call.mask))


def replay(
    cell: Cell,
    x: Array,
    initial_state: Sequence[Array],
    *,
    mask: Array | None = None,
    order: Literal["forward", "backward"] = "forward",
    hidden: Array | None = None,
    scales: Scales = UNSCALED,
) -> Replay:
    """Recompute the states of a recurrent call and, if the cell's equations are known, its gates.

    Parameters
    ----------
    x : (sample, time, feature)
    initial_state : one (sample, size) array per state
        Or (sample, time, size): the states that each step starts from.
    hidden : (sample, time, unit), optional
        The first state after each step, if it is known. If the cell allows it (``Cell.at_once``), the matrix products
        of all steps are then computed at once, and only element-wise operations run step by step. Values at masked
        steps are ignored. A cell that the framework runs makes no use of it.
    """
    xp = array_namespace(x)
    run = Replay(xp, x, tuple(initial_state), (), None, None, mask, order, scales.input, scales.state, cell=cell)
    if initial_state and initial_state[0].ndim == x.ndim:
        run.start_states, first_step = run.initial_state, next(run.steps())
        run.initial_state = tuple(s[:, first_step, ...] for s in run.start_states)
    if cell.by_framework:
        _run_by_framework(run)
    elif hidden is None or not cell.at_once or run.start_states is not None:
        _replay_in_sequence(run)
        run.residual = 0.0 if hidden is None else residual(run.states[0], hidden, mask, xp)
    else:
        hidden = hidden if mask is None else _fill_masked(hidden, run)
        run.record = _gates_at_once(run, hidden)
        run.states = (hidden, *_other_states(run, run.record.gates))
        run.residual = _one_step_residual(run)
    return run


def _run_by_framework(run: Replay) -> None:
    """Run a cell of unknown equations step by step with its framework."""
    xp, cell, state = run.xp, cast(StepCell, run.cell), run.initial_state
    states: list[tuple[Array, ...]] = []
    outputs: list[Array] = []
    for t in run.steps():
        state = state if run.start_states is None else run.state_before(t)
        output, new_state = cell.advance(run.input[:, t, ...], state)
        mask_t = None if run.mask is None else run.mask[:, t]
        state = tuple(carry_masked(n, s, mask_t, xp) for n, s in zip(new_state, state, strict=True))
        states.append(state)
        outputs.append(output)
    if run.order == "backward":
        states, outputs = states[::-1], outputs[::-1]
    run.states = tuple(xp.stack(list(column), axis=1) for column in zip(*states, strict=True))
    run.step_output = xp.stack(outputs, axis=1)


def _replay_in_sequence(run: Replay) -> None:
    xp, cell, state = run.xp, run.cell, run.initial_state
    projected = cell.project(run.input, run.input_scale, xp)
    record: Record | None = None
    states: tuple[Array, ...] = ()

    def allocate_all_steps(step_array: Array) -> Array:
        return xp.empty(
            (step_array.shape[0], run.input.shape[1], *step_array.shape[1:]),
            dtype=step_array.dtype,
            device=device(step_array),
        )

    for t in run.steps():
        state = state if run.start_states is None else run.state_before(t)
        step_record, new_state = cell.taken(projected[:, t, ...], state, run.state_scale, xp)
        mask_t = None if run.mask is None else run.mask[:, t]
        state = tuple(carry_masked(n, s, mask_t, xp) for n, s in zip(new_state, state, strict=True))
        if record is None:
            record, states = step_record.map(allocate_all_steps), tuple(map(allocate_all_steps, state))
        for target, value in zip((*record, *states), (*step_record, *state), strict=True):
            if target is not None:
                target[:, t, ...] = value
    run.record, run.states = record, states


def _gates_at_once(run: Replay, hidden: Array) -> Record:
    """Compute the gates of all steps at once, a few samples at a time to stay within the processor's cache."""
    xp, cell, (batch, time, _) = run.xp, run.cell, run.input.shape
    shape = (batch, time, cell.parts, cell.units)
    z, a = (xp.empty(shape, dtype=hidden.dtype, device=device(hidden)) for _ in range(2))
    inner = xp.empty_like(z[:, :, 0, :]) if cell.keeps_inner else None

    def compute_samples(samples: slice) -> None:
        scales = [scale_of_samples(scale, samples) for scale in (run.input_scale, run.state_scale)]
        projected = cell.project(run.input[samples, ...], scales[0], xp)
        previous_hidden = shift(hidden[samples, ...], run.initial_state[0][samples, ...], run.order, xp)
        step_record = cell.all_gates(projected, previous_hidden, scales[1], xp)
        z[samples, ...], a[samples, ...] = step_record.preactivation, step_record.gates
        if inner is not None:
            inner[samples, ...] = step_record.inner

    for_each(compute_samples, sample_chunks(batch, time * shape[2] * shape[3]), xp=xp)
    return Record(z, a, inner)


def _one_step_residual(run: Replay) -> float:
    """Return the largest difference between h_t as captured and as recomputed from gates, relative to the largest."""
    distances = [(0.0, 0.0)]

    def measure_samples(samples: slice) -> None:
        part_run = run.of_samples(samples)
        hidden, *other_states = part_run.states
        recomputed = run.cell.hidden(part_run.known_record.gates, part_run.before(0), other_states, run.xp)
        distances.append(distance(recomputed, hidden, part_run.mask, run.xp))

    batch, time, size = run.states[0].shape
    for_each(measure_samples, sample_chunks(batch, time * size), xp=run.xp)
    worst, largest = np.max(distances, axis=0).tolist()
    return float(worst / (largest or 1.0))


def _fill_masked(hidden: Array, run: Replay) -> Array:
    """Replace outputs at masked steps, which differ between frameworks, by the state carried over."""
    xp, state, filled = run.xp, run.initial_state[0], run.xp.empty_like(hidden)
    for t in run.steps():
        state = carry_masked(hidden[:, t, :], state, run.mask[:, t], xp)  # type: ignore[index]
        filled[:, t, :] = state
    return filled


def _other_states(run: Replay, gates: Array) -> tuple[Array, ...]:
    """Compute all states but the first, such as an LSTM's c_t, from known gates by an element-wise recurrence."""
    results = tuple(run.xp.empty_like(gates[:, :, 0, :]) for _ in run.initial_state[1:])

    def compute_samples(samples: slice) -> None:
        part_run = run.of_samples(samples)
        states = part_run.initial_state[1:]
        for t in run.steps():
            mask_t = None if part_run.mask is None else part_run.mask[:, t]
            new_states = run.cell.others(gates[samples, t, :, :], states)
            states = tuple(carry_masked(n, s, mask_t, run.xp) for n, s in zip(new_states, states, strict=True))
            for target, value in zip(results, states, strict=True):
                target[samples, t, :] = value

    if results:
        for_each(compute_samples, walk_parts(int(gates.shape[0]), int(gates.shape[3]), xp=run.xp), xp=run.xp)
    return results


def distance(recomputed: Array, captured: Array, mask: Array | None, xp: Namespace) -> tuple[float, float]:
    """Return the largest difference at unmasked steps, and the largest captured magnitude.

    The difference is infinite if only one side is NaN. NaN on both sides, as in a diverged network, counts as equal;
    the magnitude is then that of the finite captured numbers.
    """
    difference = recomputed - captured
    if mask is not None:
        difference = xp.where(over_time(mask, difference), difference, xp.zeros_like(difference))
    largest_difference, magnitude = _largest(difference, xp), _largest(captured, xp)
    if math.isfinite(largest_difference) and math.isfinite(magnitude):
        return largest_difference, magnitude
    both_nan = xp.isnan(recomputed) & xp.isnan(captured)
    difference = xp.where(both_nan, xp.zeros_like(difference), difference)
    finite = xp.where(xp.isfinite(captured), captured, xp.zeros_like(captured))
    return _largest(difference, xp), _largest(finite, xp)


def _largest(values: Array, xp: Namespace) -> float:
    """Return the largest magnitude of an array; infinity if it has a NaN."""
    high, low = float(xp.max(values)), float(xp.min(values))
    return math.inf if math.isnan(high) or math.isnan(low) else max(abs(high), abs(low))


def _first_step_residual(run: Replay, output: Any, call: Any) -> float:
    """Return the relative residual of the replayed output at the recurrence's first step."""
    first_step = next(run.steps())
    step_slice = slice(first_step, first_step + 1)
    mask = None if call.mask is None else call.mask[:, step_slice]
    return residual(output[:, step_slice, ...], call.output[:, step_slice, ...], mask, run.xp)


def _final_state_residual(run: Replay, call: Any) -> float:
    """Return the relative residual of the replayed final states, compared with those that the layer returned."""
    *_, last_step = run.steps()
    pairs = zip(run.states, call.final_state or (), strict=False)
    return max((residual(s[:, last_step, None], f[:, None], None, run.xp) for s, f in pairs), default=0.0)


def residual(recomputed: Array, captured: Array, mask: Array | None, xp: Namespace) -> float:
    """Return the largest difference at unmasked steps, relative to the largest captured magnitude."""
    difference, magnitude = distance(recomputed, captured, mask, xp)
    return difference / (magnitude or 1.0)


def refuse_another_function(call: Any, deviation: float) -> None:
    """Raise an error if the residual ``deviation`` of a framework-run cell's first step exceeds rounding.

    Rounding errors are not yet amplified at the first step.

    Half precision is not tested here, but by the self-checks. Raise UnsupportedError if they differ: the cell depends
    on something other than its input, state and weights, such as an attribute set by ``call`` or the training flag.
    """
    if _is_beyond_rounding(call, deviation):
        cell = f"The cell of {call.layer!r}"
        raise UnsupportedError(impure_cell_message(cell, f"outputs that differ by {deviation:.2g} (relative)"))


def refuse_other_equations(call: Any, deviation: float) -> None:
    """Raise an error if the residual ``deviation`` of registered equations at the first step exceeds rounding.

    Raise UnsupportedError if the layer's output differs from the output of the equations.
    """
    if _is_beyond_rounding(call, deviation):
        cell = call.cell
        raise UnsupportedError(
            f"The equations of {type(cell).__name__} differ from {cell.registered_for} in {call.layer!r}.",
            got=f"outputs that differ by {deviation:.2g} (relative)",
            expected="what the layer itself returns",
            hint="compare step with the layer's own; the order of gates and weights= in rl.cells.register",
        )


def refuse_other_ends(call: Any, deviation: float, final_deviation: float) -> None:
    """Raise an error if final states of registered equations differ although the outputs agree.

    Raise UnsupportedError if the layer returned its states in another order, or other states.
    """
    if _is_beyond_rounding(call, final_deviation) and not _is_beyond_rounding(call, deviation):
        raise UnsupportedError(
            f"{type(call.cell).__name__} has different states than {call.cell.registered_for} in {call.layer!r}.",
            got=f"states after the last step that differ by {final_deviation:.2g} (relative)",
            expected=f"{', '.join(call.cell.states)}, in this order",
            hint="the layer's states in the order of its cell, its output first",
        )


def refuse_other_states(call: Any) -> None:
    """Raise UnsupportedError if a layer's states differ from those of its cell in number or size."""
    sizes = tuple(int(s.shape[-1]) for s in call.initial_state)
    if sizes != tuple(call.cell.state_sizes):
        raise UnsupportedError(
            f"{type(call.cell).__name__} has different states than {call.cell.registered_for} in {call.layer!r}.",
            got=f"states of sizes {sizes}",
            expected=f"{', '.join(call.cell.states)} of sizes {tuple(call.cell.state_sizes)}",
            hint="the layer's states in the order of its cell, its output first; state_sizes in the class",
        )


def _is_beyond_rounding(call: Any, deviation: float) -> bool:
    bound = _ROUNDING.get(str(call.compute_dtype or call.output.dtype).rpartition(".")[2])
    return bound is not None and not deviation <= bound
