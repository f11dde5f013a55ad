"""The step of a registered cell, differentiated by the engine that its framework runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..autodiff import Engine
from ..recurrence.cells import Cell
from ..recurrence.cells.registry import Registration
from ..typing import Array, Namespace


class StepAutodiff:
    """Implements :class:`rnnlens.recurrence.cells.autodiff.Autodiff`.

    Parameters
    ----------
    xp
        Array functions on the engine's tensors, as :meth:`Cell.step` takes them.
    tensor
        From an array of the replay to a tensor of the engine.
    """

    def __init__(self, cell: Cell, engine: Engine, xp: Namespace, tensor: Callable[[Array], Any]) -> None:
        self._cell, self._array, self._xp, self._tensor = cell, engine.to_array, xp, tensor
        self._per_step = engine.per_step(self._pure)

    def vjp(
        self, projected: Array, before: Sequence[Array], cotangent: Sequence[Array]
    ) -> tuple[Array, list[Array], Mapping[str, Array]]:
        """Pull dL/ds_t back to what was projected, to the states before and to the weights."""
        dz, carry, weights = self._per_step.vjp(*self._given(projected, before, cotangent))
        grads = {name: self._array(grad) for name, grad in weights.items()}
        return self._array(dz), [self._array(part) for part in carry], grads

    def produced(self, projected: Array, before: Sequence[Array], cotangent: Sequence[Array]) -> list[Array]:
        """Pull dL/ds_t back to each state where the step computes it."""
        return [self._array(part) for part in self._per_step.produced(*self._given(projected, before, cotangent))]

    def _given(self, projected: Array, before: Sequence[Array], cotangent: Sequence[Array]) -> Any:
        x, states, given = (
            self._tensor(projected),
            [self._tensor(b) for b in before],
            list(map(self._tensor, cotangent)),
        )
        # A map of fixed points asks in another precision than that of the weights.
        weights = {name: self._tensor(_as(w, projected)) for name, w in self._cell.weights().items()}
        return (x, states, weights), (given[0] * 0, given)

    def _pure(self, projected: Any, states: Sequence[Any], weights: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        _, after = self._cell.holding(weights).step(projected, tuple(states), None, self._xp)
        return after[0] * 1, list(after)


def differentiated(
    cell: Cell, known: Registration, engine: Engine, xp: Namespace, tensor: Callable[[Array], Any]
) -> Cell:
    """The cell, with the engine's differentiation where its class knows none."""
    if not known.differentiates:
        object.__setattr__(cell, "autodiff", StepAutodiff(cell, engine, xp, tensor))
    return cell


def _as(weight: Array, like: Array) -> Array:
    if hasattr(like, "detach"):
        return weight.to(like)
    return (weight.detach().cpu().numpy() if hasattr(weight, "detach") else weight).astype(like.dtype)
