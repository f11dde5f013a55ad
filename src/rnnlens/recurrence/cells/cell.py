"""Base class of recurrent cells: names, equations, and defaults for all methods that follow from a step.

A cell is one class; a variant from the same paper may share its file. It declares the names of its gates, states and
weights, and defines one step. All other
methods have a default here, which a cell may override with a faster one. If a cell does not define ``pull_back``, the
framework of its layer differentiates its step (:attr:`Cell.autodiff`).

Shapes: ``(sample, ..., n)``. All methods broadcast over axes between the first and the last: none for one step, time
for all steps at once. ``scale`` are dropout multipliers, see :mod:`rnnlens.recurrence.cells.affine`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from ...errors import UnsupportedError
from ...typing import Array, Namespace
from ...vocabulary import GATE, Quantity
from ..activations import ACTIVATIONS, Activation
from ..linear import System
from ..trajectory import Adjoint, Gradients, Pulled, Record, RecurrentTerms, Scale, States, Stepped, Trajectory
from . import affine
from .affine import Contraction, UnitVectorSystem


class StepDerivatives(Protocol):
    """Derivatives of one cell's step, computed by a framework.

    Arrays (n, size) are of the same library as the arguments.
    """

    def vjp(
        self, projected: Array, before: States, cotangent: States
    ) -> tuple[Array, list[Array], Mapping[str, Array]]:
        """Pull dL/ds_t back to the projected input and the previous states, row by row, and to the weights, summed."""

    def produced(self, projected: Array, before: States, cotangent: States) -> list[Array]:
        """Return the total gradient of each new state, given dL/ds_t, row by row.

        Paths through other states of the same step are included, as of c_t through h_t.
        """


class Cell:
    """One recurrent cell with the values of its weights.

    Attributes
    ----------
    kind
        Name of the cell in results, one word.
    gates
        Names of the gates, in the order of their blocks in every kernel; empty for a cell without gates.
    states
        Names of the states; the first is the layer's output.
    parameters
        Weights by name, each with its dimensions and definition. A weight with a dimension ``gate`` is stored as
        (..., gate * unit).
    keeping
        Name of the gate whose value is the share of the state that a step keeps; None if there is no such gate.
    proposals
        Names of gates whose value is a proposal for the new state, not a share between 0 and 1. A name that is not
        among the cell's gates means nothing.
    space
        Names of the spatial axes of input and states, (sample, time, *space, channel); empty for (sample, time, unit).
    against_vanishing
        Advice for users whose gradients vanish in this cell.
    by_framework
        Whether the framework runs and differentiates the cell, because its equations are unknown.
    at_once
        Whether all gates follow from the input and the first state alone. The gates of all steps are then computed at
        once if that state is known. It requires :meth:`hidden`, and :meth:`others` for several states.
    """

    kind: ClassVar[str] = "custom"
    gates: ClassVar[tuple[str, ...]] = ()
    states: ClassVar[tuple[str, ...]] = ("hidden",)
    parameters: ClassVar[Mapping[str, Quantity]] = {}
    keeping: ClassVar[str | None] = None
    proposals: ClassVar[tuple[str, ...]] = ("candidate",)
    space: ClassVar[tuple[str, ...]] = ()
    against_vanishing: ClassVar[str] = (
        "an LSTM or GRU, or an orthogonal recurrent kernel (Saxe et al. 2014, arXiv:1312.6120); with relu the identity "
        "(arXiv:1504.00941)."
    )
    by_framework: ClassVar[bool] = False
    at_once: ClassVar[bool] = False
    #: Derivatives of :meth:`step` by the framework; set by the adapter for a cell without ``pull_back``.
    autodiff: StepDerivatives | None = None
    #: Name of the framework's class that the cell was registered for; empty for cells built into an adapter.
    registered_for: str = ""
    #: Index of the state that the layer returns at masked steps, if it returns a state there.
    output_state: int = 0
    #: Whether the cell's output is that state.
    output_is_state: bool = True

    def __init__(self, **given: Any) -> None:
        for name in given:
            if name not in self.parameters and not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no weight or option {name!r}")
        for name in self.parameters:
            setattr(self, name, given.get(name))
        for name in given.keys() - self.parameters.keys():
            setattr(self, name, given[name])

    def weights(self) -> Gradients:
        """Return the weights that are not None, by name."""
        return {name: value for name in self.parameters if (value := getattr(self, name, None)) is not None}

    def with_weights(self, convert: Callable[[Array], Array]) -> Self:
        """Return a copy of the cell with ``convert`` applied to every weight, such as to change the precision."""
        changed = copy(self)
        for name, value in self.weights().items():
            object.__setattr__(changed, name, convert(value))
        return changed

    def holding(self, weights: Mapping[str, Array]) -> Self:
        """Return a copy of the cell with the given weights in place of its own."""
        changed = copy(self)
        for name, value in weights.items():
            object.__setattr__(changed, name, value)
        return changed

    def gate(self, array: Array, name: str) -> Array:
        """Select the block of one gate from an array (..., gate * unit)."""
        index, units = self.gates.index(name), array.shape[-1] // self.parts
        return array[..., index * units : (index + 1) * units]

    def record(self, preactivations: Sequence[Array], gates: Sequence[Array], xp: Namespace) -> Record:
        """Stack one (..., unit) array per gate, before and after its activation, into a :class:`Record`."""
        return Record(xp.stack(list(preactivations), axis=-2), xp.stack(list(gates), axis=-2))

    @property
    def parts(self) -> int:
        """Number of blocks of units that :meth:`project` returns side by side: one per gate, at least one."""
        return max(1, len(self.gates))

    @property
    def units(self) -> int:
        """Number of units per gate."""
        return int(self.weights()["kernel"].shape[1]) // self.parts

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Size of each state."""
        return (self.units,) * len(self.states)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the cell's states in order, such as ``hidden`` and ``cell``."""
        return self.states

    @property
    def keeps_inner(self) -> bool:
        """Whether :meth:`step` fills ``Record.inner``."""
        return False

    @property
    def biases_add_up(self) -> bool:
        """Whether the cell has two biases of which only the sum matters."""
        weights = self.weights()
        return "bias" in weights and "recurrent_bias" in weights

    # One step.

    @cached_property
    def activations(self) -> list[Activation]:
        """Activation of each gate of a built-in cell: ``activation`` of the candidate, or ``recurrent_activation``."""
        names = ["activation" if gate == "candidate" else "recurrent_activation" for gate in self.gates]
        return [ACTIVATIONS[getattr(self, name)] for name in names]

    def through_activations(self, record: Record, grads: Sequence[Array], xp: Namespace) -> Array:
        """Pull dL/dgate, one (..., unit) array per gate, back through the activations to dL/dz (..., gate, unit)."""
        z, a = record.preactivation, record.gates
        gate_terms = [k.vjp(z[..., g, :], a[..., g, :], grads[g], xp) for g, k in enumerate(self.activations)]
        return xp.stack(gate_terms, axis=-2)

    def project(self, x: Array, scale: Scale, xp: Namespace) -> Array:
        """Compute the input side of all pre-activations, with biases: (sample, ..., n) to (sample, ..., gate * unit).

        A pre-activation is this input side plus the states' contribution. The default is linear in ``x``; a cell that
        overrides it must also override :meth:`input_gradient` and :meth:`input_gradients`.
        """
        weights = self.weights()
        z = affine.project(x, weights["kernel"], scale, self.parts, xp)
        bias, recurrent_bias = weights.get("bias"), weights.get("recurrent_bias")
        if bias is not None or recurrent_bias is not None:
            z += recurrent_bias if bias is None else bias if recurrent_bias is None else bias + recurrent_bias
        return z

    def step(self, projected: Array, before: States, scale: Scale, xp: Namespace) -> Stepped:
        """Compute the gates, and the states after a step, from the projected input and the states before."""
        raise NotImplementedError(f"{type(self).__name__}.step")

    def taken(self, projected: Array, before: States, scale: Scale, xp: Namespace) -> Stepped:
        """Run :meth:`step`; if the framework differentiates the step, store the projected input in the record."""
        record, states_after = self.step(projected, before, scale, xp)
        return (record if self.autodiff is None else record._replace(inner=projected)), tuple(states_after)

    def pull_back(
        self, record: Record, before: States, after: States, cotangent: States, scale: Scale, xp: Namespace
    ) -> Pulled:
        """Pull dL/ds_t back through :meth:`step`: to dL/dz_t (..., gate, unit) and dL/ds_{t-1}.

        The third result is the total gradients of the new states, including paths through other states of the
        same step.
        """
        dz, carry, _ = self._differentiator.vjp(*flatten_rows(record, before, cotangent, xp))
        leading_shape = tuple(cotangent[0].shape[:-1])
        total = tuple(cotangent)
        if len(self.states) > 1:
            produced = self._differentiator.produced(*flatten_rows(record, before, cotangent, xp))
            total = tuple(xp.reshape(part, (*leading_shape, -1)) for part in produced)
        previous_grads = tuple(xp.reshape(part, (*leading_shape, -1)) for part in carry)
        return xp.reshape(dz, (*leading_shape, self.parts, -1)), previous_grads, total

    @property
    def _differentiator(self) -> StepDerivatives:
        if self.autodiff is None:
            raise UnsupportedError(
                f"The cell {self.kind!r} has no derivative outside of a framework's layer.",
                got=f"{type(self).__name__} without pull_back, outside of a framework's layer",
                expected="a cell whose class defines pull_back, or a cell in a traced model",
                hint="write pull_back in its class, or rl.cells.register it for the framework's cell",
            )
        return self.autodiff

    def hidden(self, gates: Array, before: Array, others: States, xp: Namespace) -> Array:
        """Compute the first state from the gates (..., gate, unit), its previous value, and the other new states."""
        raise NotImplementedError(f"{type(self).__name__}.hidden")

    def others(self, gates: Array, before: States) -> tuple[Array, ...]:
        """Compute the states after a step, except the first, element-wise from the gates and their previous values."""
        return ()

    def all_gates(self, projected: Array, hidden: Array, scale: Scale, xp: Namespace) -> Record:
        """Compute the gates of all steps at once, given the first state before each step."""
        return self.step(projected, (hidden,), scale, xp)[0]

    # Gradients of the input and the weights, from the results of a sweep.

    def input_gradient(self, x: Array, gate_grad: Array, scale: Scale, xp: Namespace) -> Array:
        """Pull dL/dz (sample, ..., gate * unit) back through :meth:`project` to dL/dx (sample, ..., feature)."""
        return affine.unproject(gate_grad, self.weights()["kernel"], scale, self.parts, xp)

    def input_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return dL/dW of the weights used in :meth:`project`, except the recurrent bias, summed as in ``how``."""
        weights, flat = self.weights(), flat_gate_grad(run, result, times)
        grads = {"kernel": affine.outer(run.input[:, times, :], flat, run.input_scale, self.parts, how, run.xp)}
        biases = ["bias"] if "bias" in weights else []
        biases += ["recurrent_bias"] if "recurrent_bias" in weights and type(self).project is Cell.project else []
        return grads | dict.fromkeys(biases, affine.total(flat, how, run.xp) if biases else None)

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return dL/dW of the weights used in :meth:`step`, by default differentiated by the framework.

        ``result.gate_grad`` is zero at masked steps; ``result.state_grads`` is not: take ``run.at_real_steps`` of it.
        """
        xp, steps = run.xp, range(run.input.shape[1])[times]
        assert result.returned_grads is not None
        cotangent = [run.at_real_steps(grad) for grad in result.returned_grads]
        states_before = run.states_before()

        def pull_weights(index: tuple[slice, slice | int]) -> Mapping[str, Array]:
            step_values = run.known_record.at(index), [b[index] for b in states_before], [c[index] for c in cotangent]
            return self._differentiator.vjp(*flatten_rows(*step_values, xp))[2]

        if not how.by_time:
            grads = pull_weights((slice(None), times))
        else:
            step_grads = [pull_weights((slice(None), t)) for t in steps]
            grads = {name: xp.stack([one_step[name] for one_step in step_grads]) for name in step_grads[0]}
        return {name: _reduce_rows(grad, how) for name, grad in grads.items()}

    def weight_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return dL/dW of all weights by name, summed according to ``how``."""
        grads = self.input_gradients(run, result, how, times)
        for name, grad in self.recurrent_gradients(run, result, how, times).items():
            grads[name] = grads[name] + grad if name in grads else grad
        return grads

    def recurrent_terms(self, gate_grad: Array, gates: Array, before: Array) -> RecurrentTerms | None:
        """Return the two factors of the recurrent kernel's gradient, computed from a result's arrays; by default None.

        The first factor is the gradient (sample, time, gate, unit) at the recurrent side of each gate. The second is a
        list of (slice of gates, input of their recurrent side). The result is None if more than the gates and the first
        state are needed.
        """
        return None

    def gate_gradient(self, run: Trajectory, result: Adjoint) -> Array:
        """Return dL/dgate (sample, time, gate, unit), after the activation, at real steps.

        It is computed from the equations of the states, since dividing dL/dz by the activation's slope is inaccurate in
        saturated gates.
        """
        raise UnsupportedError(
            f"The cell {self.kind!r} has no gradient by gate values.",
            got=f"{type(self).__name__} without gate_gradient",
            expected="gate_preactivation, hidden, output or weights",
            hint="write gate_gradient(run, result) in its class",
        )

    # Linear systems and maps derived from the step.

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise the recurrence around a trajectory; by default by pulling unit cotangents through each step."""
        return UnitVectorSystem(self, run)

    def pull_rows(self, run: Trajectory, t: int, rows: Sequence[Array]) -> list[Array]:
        """Pull cotangents of the states, one (sample, row, size) array per state, back through step t of a run."""

        def with_row_axis(array: Array) -> Array:
            return array[:, None]

        record = run.known_record.map(lambda array: with_row_axis(array[:, t]))
        states_before = [with_row_axis(s) for s in run.state_before(t)]
        states_after = [with_row_axis(s[:, t]) for s in run.states]
        return list(self.pull_back(record, states_before, states_after, rows, run.state_scale, run.xp)[1])

    def map_at(self, x: Array, xp: Namespace) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
        """Return one step with constant input x (feature,) as two float64 functions of s (n, S).

        F(s) and dF/ds (n, S, S).
        """
        cell, sizes = self.with_weights(lambda w: np.asarray(w, dtype=np.float64)), self.state_sizes
        projected = cell.project(np.asarray(x, dtype=np.float64)[None], None, np)
        boundaries, total = np.cumsum(sizes)[:-1], sum(sizes)
        basis = np.split(np.eye(total)[None], boundaries, axis=2)

        def run_step(s: Array) -> tuple[list[Array], Record, tuple[Array, ...]]:
            states_before = np.split(s, boundaries, 1)
            return states_before, *cell.taken(
                np.broadcast_to(projected, (len(s), projected.shape[1])), states_before, None, np
            )

        def step(s: Array) -> Array:
            return np.concatenate(run_step(s)[2], axis=1)

        def jacobian(s: Array) -> Array:
            states_before, record, states_after = run_step(s)
            step_record = record.map(lambda part: part[:, None])
            rows = [np.broadcast_to(b, (len(s), *b.shape[1:])) for b in basis]
            step_states = [b[:, None] for b in states_before], [a[:, None] for a in states_after]
            pulled: tuple[Any, ...] = cell.pull_back(step_record, *step_states, rows, None, np)[1]
            return np.concatenate(pulled, axis=2)

        return step, jacobian


def recurrent_kernel_gradient(
    cell: Cell, run: Trajectory, result: Adjoint, how: Contraction, times: slice
) -> Gradients:
    """Return the gradient of a recurrent kernel by which every gate multiplies h_{t-1}."""
    previous_hidden, flat = run.before(0)[:, times, :], flat_gate_grad(run, result, times)
    return {"recurrent_kernel": affine.outer(previous_hidden, flat, run.state_scale, cell.parts, how, run.xp)}


def flatten_rows(
    record: Record, states_before: States, cotangent: States, xp: Namespace
) -> tuple[Array, list[Array], list[Array]]:
    """Return W x_t, the states before the step and the cotangents of the step as matrices (n, size).

    The rows are all combinations of the cotangents' leading axes, along which W x_t and the states are repeated.
    """
    leading_shape = tuple(cotangent[0].shape[:-1])

    def flatten(array: Array) -> Array:
        return xp.reshape(xp.broadcast_to(array, (*leading_shape, array.shape[-1])), (-1, array.shape[-1]))

    return flatten(record.inner), [flatten(b) for b in states_before], [flatten(c) for c in cotangent]


def _reduce_rows(grad: Array, contraction: Contraction) -> Array:
    """Return a weight gradient, reduced to random combinations of its rows if ``contraction`` requests probes."""
    is_matrix = len(grad.shape) - int(contraction.by_time) == 2
    if not contraction.probes or not is_matrix:
        return grad
    return affine.probe_rows(grad.shape[-2], grad, contraction) @ grad


def flat_gate_grad(run: Trajectory, result: Adjoint, times: slice) -> Array:
    """Return dL/dz of some steps with gates concatenated: (sample, time, gate * unit)."""
    gate_grad: Any = result.gate_grad
    return affine.join_gates(gate_grad[:, times, ...], run.xp)


def by_name(*parameters: Quantity) -> Mapping[str, Quantity]:
    """Return a dict of quantities by their names, as a cell's ``parameters``."""
    return {parameter.name: parameter for parameter in parameters}


def has_gates(quantity: Quantity) -> bool:
    """Return whether a weight has one block of units per gate."""
    return GATE in quantity.dims
