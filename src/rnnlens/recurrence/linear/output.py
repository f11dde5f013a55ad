"""An output that is no state, y_t = C s_t + D x_t, carried along as one more state that nothing depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arrays import Array
from ..inplace import Workspace
from .inputs import InputAt, Inputs, Matrices, as_inputs
from .protocol import Pattern, Step, Stretch, System


def with_output(
    system: System, c: Array, d: Array | Inputs | None = None, *, mask: Array | None = None, repeats: bool = False
) -> System:
    """The same recurrence with its output as a last state.

    Parameters
    ----------
    c : (sample or 1, time or 1, output, state)
        dy_t/ds_t: of LRU [Re C | -Im C].
    d : (sample or 1, time or 1, output, feature), or Kernels, optional
        dy_t/dx_t besides the way through the states.
    mask : (sample, time) of bool, optional
        False where the layer does not put out y_t, but zeros, or with ``repeats`` the output before.
    """
    return _WithOutput(system, c, None if d is None else as_inputs(d), mask, repeats)


class _WithOutput:
    """See :func:`with_output`."""

    def __init__(self, system: System, c: Array, d: Inputs | None, mask: Array | None, repeats: bool) -> None:
        self.system, self.work, self.features, self.order = system, system.work, system.features, system.order
        self.batch, self.time = system.batch, system.time
        self.outputs, self.states = int(c.shape[2]), system.rows
        self.rows = self.columns = self.states + self.outputs
        self.state_sizes = (*system.state_sizes, self.outputs)
        self.layout = (*system.layout, len(system.state_sizes))
        self.scratch = max(system.scratch, 1)
        self.hold = None
        if mask is not None:
            c = self.work.xp.where(mask[:, :, None, None], c, self.work.zeros(1, 1, 1, 1))
            d = None if d is None else d.masked(self.work, mask)
            self.hold = mask if repeats else None
        self.c, self.d = Matrices(c), d

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> Stretch:
        """Those of the recurrence, each with its C and D."""
        inner = self.system.build(first, stop, samples, inputs=inputs)
        return [self._step(inner[t - first], t, samples, inputs) for t in range(first, stop)]

    def _step(self, inner: Step, t: int, samples: slice, inputs: bool) -> _StepWithOutput:
        held = None
        if self.hold is not None:
            held = self.work.asarray(~self.hold[samples, t])[:, None, None]
        d = self.d.at(self.work, samples, t) if inputs and self.d is not None else None
        return _StepWithOutput(self.work, inner, self.states, self.c.at(self.work, samples, t), d, held)

    def multiplications(self, inputs: bool) -> int:
        """Those of the recurrence, and of D; C is passed only by what enters at a step."""
        return self.system.multiplications(inputs) + (self.d.multiplications() if inputs and self.d else 0)

    def numbers(self, inputs: bool) -> int:
        """Those of the recurrence, C and D."""
        return self.system.numbers(inputs) + self.c.numbers() + (self.d.numbers() if inputs and self.d else 0)

    def pattern(self, state: int) -> Pattern | None:
        """That of the recurrence; all outputs meet in the states."""
        return self.system.pattern(state) if state < len(self.system.state_sizes) else None

    def moduli(self) -> Array | None:
        """Those of the recurrence: nothing depends on the output."""
        return self.system.moduli()


@dataclass
class _StepWithOutput:
    """Rows are [states | output]. held : (sample, 1, 1), one where the output repeats itself."""

    work: Workspace
    inner: Step
    states: int
    c: InputAt
    d: InputAt | None
    held: Array | None

    def arrive(self, rows: Array, fresh: int) -> None:
        """What came to the output belongs to the states that it is made of."""
        fresh = int(rows.shape[1]) if self.held is not None else fresh
        if fresh:
            into = self.work.empty(int(rows.shape[0]), fresh, self.states)
            self.c.pull(rows[:, :fresh, self.states :], into)
            rows[:, :fresh, : self.states] += into
        self.inner.arrive(rows[:, :, : self.states], fresh)

    def pull(self, rows: Array, out: Array, *, inputs: bool) -> None:
        """The states by the recurrence, what came to the output by D; the output itself leads no further back."""
        own, states = slice(self.states, int(rows.shape[2])), self.states
        features = int(out.shape[2]) - own.stop
        inner = self.work.empty(int(rows.shape[0]), int(rows.shape[1]), states + (features if inputs else 0))
        self.inner.pull(rows[:, :, :states], inner, inputs=inputs)
        out[:, :, :states] = inner[:, :, :states]
        out[:, :, own] = 0 if self.held is None else rows[:, :, own] * self.held
        if not inputs:
            return
        out[:, :, own.stop :] = inner[:, :, states:]
        if self.d is not None:
            self.d.pull(rows[:, :, own], inner[:, :, states:])
            out[:, :, own.stop :] += inner[:, :, states:]

    def push(self, rows: Array, out: Array) -> None:
        """The states by the recurrence, the output by C."""
        self.inner.push(rows[:, :, : self.states], out[:, :, : self.states])
        self.c.push(out[:, :, : self.states], out[:, :, self.states :])
        if self.held is not None:
            out[:, :, self.states :] += rows[:, :, self.states :] * self.held

    def inject(self, block: Array | None, out: Array) -> None:
        """Into the states by B, into the output by C and D."""
        self.inner.inject(block, out[:, :, : self.states])
        self.c.push(out[:, :, : self.states], out[:, :, self.states :])
        if self.d is not None:
            by_input = self.work.empty(int(out.shape[0]), int(out.shape[1]), int(out.shape[2]) - self.states)
            self.d.push(block, by_input)
            out[:, :, self.states :] += by_input

    def spread(self, rows: Array, state: int, columns: slice) -> None:
        """A change of a state moves the output."""
        if columns.start < self.states:
            self.inner.spread(rows[:, :, : self.states], state, columns)
            self.c.push(rows[:, :, : self.states], rows[:, :, self.states :])

    def produced(self, rows: Array, state: int, columns: slice) -> Array:
        """As the recurrence has it; the output as it came."""
        if columns.start >= self.states:
            return rows[:, :, columns]
        return self.inner.produced(rows[:, :, : self.states], state, columns)

    def after(self, earlier: Any) -> Step:
        """The output is the later one's, or where that repeats itself the earlier one's."""
        c, held = self.c, None
        if self.held is not None:
            c = Matrices((c.matrix() + self.held * earlier.c.matrix())[:, None]).at(self.work, slice(None), 0)
            held = None if earlier.held is None else self.held * earlier.held
        return _StepWithOutput(self.work, self.inner.after(earlier.inner), self.states, c, None, held)

    def input_matrix(self) -> Array:
        """From the input to [states | output]."""
        b = self.inner.input_matrix()
        rows = self.work.xp.matmul(self.c.matrix(), b)
        if self.d is not None:
            rows = rows + self.d.matrix()
        return self.work.xp.concat([b, rows], axis=1)
