"""What the recurrence asks of a cell whose equations it does not know: to be run, and differentiated, step by step.

The framework does both (its adapter implements this protocol), on batches in which sample and time are folded into one
axis ``n``: steps are independent once the states are known, so all of them are differentiated in one vectorised call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ...typing import Array


class StepCell(Protocol):
    """A cell of unknown equations. States are flat tuples of (n, size) arrays, however nested the user has them."""

    state_sizes: tuple[int, ...]
    output_size: int
    #: Which of the flat states a masked step returns, where the framework returns a state there.
    output_state: int
    #: Whether the cell puts out that very state, as most do: known once it has run.
    output_is_state: bool

    def step(self, x: Array, state: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
        """(n, feature) and states (n, size) to output (n, output_size) and new states."""

    def vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> tuple[Array, tuple[Array, ...]]:
        """Pull dL/dy_t and dL/ds_t back to dL/dx_t (n, feature) and dL/ds_{t-1}; row by row."""

    def weight_vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> Mapping[str, Array]:
        """Pull back to the weights, summed over ``n``."""

    def produced(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> tuple[Array, ...]:
        """Pull dL/dy_t and dL/ds_t, of what leaves the step, to each new state as it is produced within the step.

        A change of a state at the place where it is computed also reaches whatever the same step computes from it: the
        output, or a state computed later, as h_t from c_t. A state that is passed on unchanged is not produced.
        """

    def jacobian(self, x: Array, state: Sequence[Array]) -> tuple[Array, Array]:
        """Per-step Jacobians of the vector [new states, output], states side by side, S = sum(state_sizes).

        Returns ``(n, S + output_size, S)`` with respect to the states and ``(n, S + output_size, feature)`` with
        respect to the input.
        """
