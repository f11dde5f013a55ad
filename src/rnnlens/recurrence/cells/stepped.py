"""A cell whose equations are not known here: the framework runs and differentiates it, step by step.

Its adapter writes a class of this kind. Batches have sample and time folded into one axis ``n``: steps are independent
once the states are known, so all of them are differentiated in one vectorised call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...typing import Array, Namespace
from ...vocabulary import unnamed_states
from .cell import Cell

if TYPE_CHECKING:
    from ..linear import System
    from ..replay import Replay


class StepCell(Cell):
    """A cell of unknown equations. States are flat tuples of (n, size) arrays, however nested the user has them."""

    by_framework = True
    _sizes: tuple[int, ...] = ()
    output_size: int

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Size of each state."""
        return self._sizes

    @state_sizes.setter
    def state_sizes(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)

    @property
    def state_names(self) -> tuple[str, ...]:
        """hidden, state_1, state_2, ..."""
        return unnamed_states(len(self.state_sizes))

    @abstractmethod
    def advance(self, x: Array, state: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
        """(n, feature) and states (n, size) to output (n, output_size) and new states."""

    @abstractmethod
    def vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> tuple[Array, tuple[Array, ...]]:
        """Pull dL/dy_t and dL/ds_t back to dL/dx_t (n, feature) and dL/ds_{t-1}; row by row."""

    @abstractmethod
    def weight_vjp(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> Mapping[str, Array]:
        """Pull back to the weights, summed over ``n``."""

    @abstractmethod
    def produced(
        self, x: Array, state: Sequence[Array], output_cotangent: Array, state_cotangent: Sequence[Array]
    ) -> tuple[Array, ...]:
        """Pull dL/dy_t and dL/ds_t, of what leaves the step, to each new state as it is produced within the step.

        A change of a state at the place where it is computed also reaches whatever the same step computes from it: the
        output, or a state computed later, as h_t from c_t. A state that is passed on unchanged is not produced.
        """

    @abstractmethod
    def jacobian(self, x: Array, state: Sequence[Array]) -> tuple[Array, Array]:
        """Per-step Jacobians of the vector [new states, output], states side by side, S = sum(state_sizes).

        Returns ``(n, S + output_size, S)`` with respect to the states and ``(n, S + output_size, feature)`` with
        respect to the input.
        """

    def linear_system(self, run: Replay, masked_output: str = "state") -> System:
        """Per-step Jacobians from the framework."""
        from ..linear_cells import CustomSystem

        return CustomSystem(run, masked_output)

    def pull_rows(self, run: Replay, t: int, rows: Sequence[Array]) -> list[Array]:
        """One row after the other."""
        xp = run.xp
        x, state = run.input[:, t, :], run.state_before(t)
        nothing = xp.zeros((x.shape[0], self.output_size), dtype=x.dtype)
        found = []
        for k in range(rows[0].shape[1]):
            given = [xp.asarray(np.ascontiguousarray(r[:, k]), dtype=x.dtype) for r in rows]
            found.append(self.vjp(x, state, nothing, given)[1])
        return [np.stack([np.asarray(f[i]) for f in found], axis=1) for i in range(len(rows))]

    def map_at(self, x: Array, xp: Namespace) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
        """In the precision of the framework; ``xp`` makes the arrays that it wants."""
        cuts, total = np.cumsum(self.state_sizes)[:-1], sum(self.state_sizes)

        def given(s: Array) -> tuple[Array, list[Array]]:
            kind = np.asarray(x).dtype
            parts = [xp.asarray(np.ascontiguousarray(p, dtype=kind)) for p in np.split(s, cuts, 1)]
            return xp.asarray(np.repeat(np.asarray(x)[None], len(s), axis=0)), parts

        def step(s: Array) -> Array:
            _, after = self.advance(*given(s))
            return np.concatenate([np.asarray(a, dtype=np.float64) for a in after], axis=1)

        def jacobian(s: Array) -> Array:
            by_state, _ = self.jacobian(*given(s))
            return np.asarray(by_state, dtype=np.float64)[:, :total]

        return step, jacobian
