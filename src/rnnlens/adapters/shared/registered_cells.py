"""Registered cells: weights composed of several framework weights, and steps differentiated by the framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ...autodiff import Engine
from ...autodiff.tensors import converted_like, to_numpy
from ...recurrence.cells import Cell
from ...recurrence.cells.registry import Registration
from ...typing import Array, Namespace
from ..protocol import Port, Run


@dataclass(frozen=True)
class ComposedWeight:
    """One weight composed of several framework weights.

    ``keys`` maps each weight of the framework's cell to the path of its sublayer and its key there.
    """

    registration: Registration
    name: str
    keys: Mapping[str, tuple[str, str]]


class ComposedRun(Run):
    """A run with composed weights among its ports."""

    def __init__(
        self, inner_run: Run, composed_ports: Mapping[Port, tuple[ComposedWeight, Mapping[str, Port]]]
    ) -> None:
        self._inner_run = inner_run
        self._composed_ports = composed_ports
        self.output_count, self.layouts = inner_run.output_count, inner_run.layouts
        self.recurrent_sizes = inner_run.recurrent_sizes
        self.values: Mapping[Port, Array] = dict(inner_run.values) | {
            port: weight.registration.arrays({n: inner_run.values[p] for n, p in ports.items()})[weight.name]
            for port, (weight, ports) in composed_ports.items()
        }

    def pull(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Pull cotangents back to all ports, composed weights included; see :meth:`Run.pull`."""
        gradients = dict(self._inner_run.pull(cotangents))
        count = len(next(iter(cotangents.values())))
        for weight_port, (weight, ports) in self._composed_ports.items():
            part_gradients = {}
            for name, port in ports.items():
                value, grad = to_numpy(self._inner_run.values[port]), gradients.get(port)
                part_gradients[name] = np.zeros((count, *value.shape), value.dtype) if grad is None else to_numpy(grad)
            rows = [
                weight.registration.arrays({n: g[k] for n, g in part_gradients.items()})[weight.name]
                for k in range(count)
            ]
            gradients[weight_port] = (
                None if all(gradients.get(port) is None for port in ports.values()) else np.stack(rows)
            )
        return gradients

    def __enter__(self) -> Self:
        self._inner_run.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._inner_run.__exit__(*exc)


def run_with_composed(
    make: Callable[[Sequence[Port], Sequence[Port]], Run],
    of: Sequence[Port],
    wrt: Sequence[Port],
    find_composed: Callable[[Port], ComposedWeight | None],
) -> Run:
    """Return the run ``make(of, wrt)``, with each composed weight replaced by the weights it consists of."""
    composed_ports: dict[Port, tuple[ComposedWeight, Mapping[str, Port]]] = {}
    other_ports: dict[Port, None] = {}
    for port in wrt:
        weight = find_composed(port) if port.kind == "weight" else None
        if weight is None:
            other_ports[port] = None
            continue
        ports = {
            n: replace(port, layer=f"{port.layer}{sublayer}", key=key) for n, (sublayer, key) in weight.keys.items()
        }
        composed_ports[port] = (weight, ports)
        other_ports |= dict.fromkeys(ports.values())
    inner_run = make(of, tuple(other_ports))
    return ComposedRun(inner_run, composed_ports) if composed_ports else inner_run


class StepAutodiff:
    """Autodiff of one step of a registered cell; implements :class:`.recurrence.cells.cell.StepDerivatives`.

    Parameters
    ----------
    xp
        Array functions on the engine's tensors, as :meth:`Cell.step` takes them.
    tensor
        Converts an array of the replay to a tensor of the engine.
    """

    def __init__(self, cell: Cell, engine: Engine, xp: Namespace, tensor: Callable[[Array], Any]) -> None:
        self._cell, self._array, self._xp, self._tensor = cell, engine.to_array, xp, tensor
        self._per_step = engine.per_step(self._pure_step)

    def vjp(
        self, projected: Array, before: Sequence[Array], cotangent: Sequence[Array]
    ) -> tuple[Array, list[Array], Mapping[str, Array]]:
        """Pull dL/ds_t back to the projected input, to the states before the step and to the weights."""
        dz, carry, weights = self._per_step.vjp(*self._derivative_arguments(projected, before, cotangent))
        grads = {name: self._array(grad) for name, grad in weights.items()}
        return self._array(dz), [self._array(state_gradient) for state_gradient in carry], grads

    def produced(self, projected: Array, before: Sequence[Array], cotangent: Sequence[Array]) -> list[Array]:
        """Return the total gradient of each new state, given dL/ds_t.

        Paths through other states of the step are included.
        """
        return [
            self._array(gradient)
            for gradient in self._per_step.produced(*self._derivative_arguments(projected, before, cotangent))
        ]

    def _derivative_arguments(self, projected: Array, before: Sequence[Array], cotangent: Sequence[Array]) -> Any:
        state_cotangents = [self._tensor(c) for c in cotangent]
        # The search for fixed points uses another precision than that of the weights.
        weights = {name: self._tensor(converted_like(w, projected)) for name, w in self._cell.weights().items()}
        return (self._tensor(projected), [self._tensor(b) for b in before], weights), (
            state_cotangents[0] * 0,
            state_cotangents,
        )

    def _pure_step(self, projected: Any, states: Sequence[Any], weights: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        _, new_states = self._cell.holding(weights).step(projected, tuple(states), None, self._xp)
        return new_states[0] * 1, list(new_states)


def with_step_autodiff(
    cell: Cell, registration: Registration, engine: Engine, xp: Namespace, tensor: Callable[[Array], Any]
) -> Cell:
    """Return the cell; if its class defines no derivatives, with the engine's autodiff of its step."""
    if not registration.differentiates:
        object.__setattr__(cell, "autodiff", StepAutodiff(cell, engine, xp, tensor))
    return cell
