"""Reference gradients through time in float64: slow, simple, and sharing no code with the rest of rnnlens.

The equations of each cell are implemented independently, one step at a time. Jacobians of a step are computed by the
complex step (Squire, Trapp 1998, doi:10.1137/S003614459631241X): exact to rounding, with no differencing error, and
with no derivative formula that could repeat a mistake. The adjoint is dense: lambda_t = direct_t + A_{t+1}^T
lambda_{t+1}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..recurrence.cells import Cell

Matrix = np.ndarray[Any, Any]
_STEP = 1e-30


def _real_branch(test: Callable[[Matrix], Any], yes: Callable[[Any], Any], no: Callable[[Any], Any]) -> Any:
    return lambda z: np.where(test(z.real), yes(z), no(z))


def _softmax(z: Matrix) -> Matrix:
    e = np.exp(z - z.real.max(-1, keepdims=True))
    result: Matrix = e / e.sum(-1, keepdims=True)
    return result


#: Activation functions for complex arguments; piecewise ones choose the piece by the real part.
ACTIVATIONS: dict[str, Callable[[Matrix], Matrix]] = {
    "linear": lambda z: z,
    "tanh": np.tanh,
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "exponential": np.exp,
    "softplus": lambda z: np.log(1 + np.exp(z)),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "softmax": _softmax,
    "log_softmax": lambda z: np.log(_softmax(z)),
    "relu": _real_branch(lambda r: r > 0, lambda z: z, lambda z: 0 * z),
    "leaky_relu": _real_branch(lambda r: r > 0, lambda z: z, lambda z: 0.2 * z),
    "elu": _real_branch(lambda r: r > 0, lambda z: z, lambda z: np.exp(z) - 1),
    "softsign": _real_branch(lambda r: r > 0, lambda z: z / (1 + z), lambda z: z / (1 - z)),
    "hard_sigmoid": _real_branch(lambda r: np.abs(r) < 3, lambda z: z / 6 + 0.5, lambda z: 0 * z + (z.real > 0)),
}


def step(cell: Any, x: Matrix, state: Sequence[Matrix]) -> list[Matrix]:
    """Compute the new states after one step of one sample: x (feature,), states (size,) each.

    Complex arguments are allowed.

    Raises
    ------
    UnsupportedError
        For a cell without a function in ``EQUATIONS``; one with the arguments of ``step`` can be added there.
    """
    equations = EQUATIONS.get(cell.kind)
    if equations is None:
        raise UnsupportedError(
            f"The reference has no equations of the cell {cell.kind!r}.",
            expected=f"one of {', '.join(EQUATIONS)}",
            hint=f"rnnlens.testing.reference.EQUATIONS[{cell.kind!r}] = function, with the arguments of step",
        )
    return equations(cell, x, state)


def _gate_sides(cell: Any, x: Matrix) -> tuple[list[slice], Matrix, Matrix, Any]:
    """Return each gate's slice, the input side with its bias, the recurrent kernel and the recurrent bias."""
    n, weights = cell.units, {name: np.asarray(w) for name, w in cell.weights().items()}
    gate = [slice(k * n, (k + 1) * n) for k in range(len(cell.gates))]
    return (
        gate,
        x @ weights["kernel"] + weights.get("bias", 0),
        weights["recurrent_kernel"],
        weights.get("recurrent_bias", 0),
    )


def _simple_rnn(cell: Any, x: Matrix, state: Sequence[Matrix]) -> list[Matrix]:
    _, wx, u, rb = _gate_sides(cell, x)
    return [ACTIVATIONS[cell.activation](wx + state[0] @ u + rb)]


def _lstm(cell: Any, x: Matrix, state: Sequence[Matrix]) -> list[Matrix]:
    act, rec = ACTIVATIONS[cell.activation], ACTIVATIONS[cell.recurrent_activation]
    gate, wx, u, rb = _gate_sides(cell, x)
    z = wx + state[0] @ u + rb
    c = rec(z[gate[1]]) * state[1] + rec(z[gate[0]]) * act(z[gate[2]])
    out = rec(z[gate[3]]) * act(c)
    return [out if cell.projection is None else out @ np.asarray(cell.projection), c]


def _gru(cell: Any, x: Matrix, state: Sequence[Matrix]) -> list[Matrix]:
    act, rec, h = ACTIVATIONS[cell.activation], ACTIVATIONS[cell.recurrent_activation], state[0]
    gate, wx, u, rb = _gate_sides(cell, x)
    if cell.reset_after:
        uh = h @ u + rb
        r = rec(wx[gate[1]] + uh[gate[1]])
        update, candidate = rec(wx[gate[0]] + uh[gate[0]]), act(wx[gate[2]] + r * uh[gate[2]])
    else:
        r = rec(wx[gate[1]] + h @ u[:, gate[1]])
        update = rec(wx[gate[0]] + h @ u[:, gate[0]])
        candidate = act(wx[gate[2]] + (r * h) @ u[:, gate[2]])
    return [update * h + (1 - update) * candidate]


#: The step function of each kind of cell, independent of :mod:`rnnlens.recurrence.cells`.
EQUATIONS: dict[str, Callable[[Any, Matrix, Sequence[Matrix]], list[Matrix]]] = {
    "simple_rnn": _simple_rnn,
    "lstm": _lstm,
    "gru": _gru,
}


def step_jacobians(cell: Cell, x: Matrix, state: Sequence[Matrix]) -> tuple[Matrix, Matrix]:
    """Return A_t (state, state) and B_t (state, feature) of one step of one sample; states are concatenated."""
    sizes = [s.shape[0] for s in state]
    flat = np.concatenate([*state, x]).astype(complex)
    columns = []
    for i in range(flat.shape[0]):
        perturbed = flat.copy()
        perturbed[i] += 1j * _STEP
        parts = np.split(perturbed, np.cumsum(sizes))
        columns.append(np.concatenate(step(cell, parts[-1], parts[:-1])).imag / _STEP)
    jacobian = np.stack(columns, axis=1)
    return jacobian[:, : sum(sizes)], jacobian[:, sum(sizes) :]


@dataclass
class Reference:
    """Results of BPTT: states after each step, their total gradients, and the gradients of input and initial state.

    Arrays are (sample, time, ...), in chronological order. ``returned_grads`` are dL/ds_t of the states as a step
    returns them, without their paths to each other within the step.
    """

    states: list[Matrix]
    state_grads: list[Matrix]
    returned_grads: list[Matrix]
    input_grad: Matrix
    initial_state_grad: list[Matrix]


def bptt(
    cell: Cell,
    x: Matrix,
    initial_state: Sequence[Matrix],
    output_grad: Matrix,
    *,
    mask: Matrix | None = None,
    backward: bool = False,
    final_state_grad: Sequence[Matrix] | None = None,
) -> Reference:
    """Run backpropagation through time in float64, with dense Jacobians, one sample after the other.

    Parameters
    ----------
    x : (sample, time, feature)
    initial_state : one (sample, size) array per state
    output_grad : (sample, time, unit)
        Direct gradient of h_t.

    Notes
    -----
    ``state_grads[1]`` of an LSTM is the total gradient dL/dc_t, including the path through h_t = o_t act(c_t).
    """
    batch, time, _ = x.shape
    order = list(range(time))[:: -1 if backward else 1]
    sizes = [s.shape[1] for s in initial_state]
    states, grads, returned = ([np.zeros((batch, time, n)) for n in sizes] for _ in range(3))
    result = Reference(states, grads, returned, np.zeros(x.shape), [np.zeros(s.shape) for s in initial_state])
    for b in range(batch):
        trajectory, state = [], [np.asarray(s[b], dtype=float) for s in initial_state]
        for t in order:
            trajectory.append(state)
            if mask is None or mask[b, t]:
                state = [s.real for s in step(cell, x[b, t], state)]
            for target, value in zip(states, state, strict=True):
                target[b, t] = value
        lam = np.concatenate(
            [np.zeros(n) if final_state_grad is None else final_state_grad[i][b] for i, n in enumerate(sizes)]
        )
        for t, state_before in zip(order[::-1], trajectory[::-1], strict=True):
            lam[: sizes[0]] += output_grad[b, t]
            is_real = mask is None or bool(mask[b, t])
            for target, total, value in zip(returned, grads, np.split(lam, np.cumsum(sizes)[:-1]), strict=True):
                target[b, t] = total[b, t] = value
            if is_real and "cell" in cell.states:
                grads[1][b, t] += through_hidden(cell, x[b, t], state_before).T @ returned[0][b, t]
            if is_real:
                state_jacobian, input_jacobian = step_jacobians(cell, x[b, t], state_before)
                result.input_grad[b, t] = input_jacobian.T @ lam
                lam = state_jacobian.T @ lam
        for target, value in zip(result.initial_state_grad, np.split(lam, np.cumsum(sizes)[:-1]), strict=True):
            target[b] = value
    return result


def through_hidden(cell: Any, x: Matrix, before: Sequence[Matrix]) -> Matrix:
    """Return dh_t/dc_t (unit_in, unit) within one step, with gates held constant."""
    act, rec = ACTIVATIONS[cell.activation], ACTIVATIONS[cell.recurrent_activation]
    n = cell.units
    c = step(cell, x, before)[1].real
    bias = sum(np.asarray(v)[3 * n :] for v in (cell.bias, cell.recurrent_bias) if v is not None)
    z = x @ np.asarray(cell.kernel)[:, 3 * n :] + before[0] @ np.asarray(cell.recurrent_kernel)[:, 3 * n :] + bias
    o = rec(z).real
    perturbed = c[None, :] + 1j * _STEP * np.eye(n)
    slopes = np.stack([act(row).imag for row in perturbed], axis=1) / _STEP
    through = o[:, None] * slopes
    return through if cell.projection is None else np.asarray(cell.projection).T @ through


def weight_gradients(
    cell: Cell,
    x: Matrix,
    states_before: Sequence[Matrix],
    state_cotangent: Sequence[Matrix],
    *,
    mask: Matrix | None = None,
) -> Mapping[str, Matrix]:
    """Return dL/dW of each weight by complex steps, given the cotangents of the states after every step.

    ``state_cotangent`` is lambda_t, the gradient of the states as they leave the step: for an LSTM dL/dc_t *without*
    the path through h_t.
    """
    values = {name: np.asarray(w, dtype=complex) for name, w in cell.weights().items()}
    grads = {name: np.zeros(w.shape) for name, w in values.items()}
    for name, w in values.items():
        for index in np.ndindex(*w.shape):
            perturbed = w.copy()
            perturbed[index] += 1j * _STEP
            perturbed_cell = cell.holding({**values, name: perturbed})
            for b, t in np.ndindex(*x.shape[:2]):
                if mask is None or mask[b, t]:
                    states_after = step(perturbed_cell, x[b, t], [s[b, t] for s in states_before])
                    grads[name][index] += sum(
                        float(c[b, t] @ (s.imag / _STEP)) for c, s in zip(state_cotangent, states_after, strict=True)
                    )
    return grads
