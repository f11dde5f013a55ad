"""Chunks of a recurrence of matrices in matrix products: forward, adjoint, states and total gradients at chosen steps.

For a state S_t (key, value), one decay per head or per key, and writes of rank one,

    S_t = (I - l_t r_t^T) diag(e^{g_t}) S_{t-1} + w_t v_t^T,      y_t = q_t^T S_t,

C steps cost a few products of C x C, C x key and C x value matrices, and no state is stored but the one before them.
With G_t, the sum of g up to step t of the chunk, and pair(x, y)_ts = sum_k x_tk y_sk e^{G_tk - G_sk} for s <= t,

    u_t = r_t^T e^{g_t} S_{t-1}:     (I + L) U = (r e^G) S_0 + M V        L, M: pair(r, l), pair(r, w) for s < t
    z_t = l_t^T dL/dS_t:             (I + L)^T Z = pair(q, l)^T dY + (l e^{G_C - G}) N,

where N is the gradient at S_C from later steps. Every exponent is <= 0, so that no decay is too strong, and G is summed
in float64, since differences of large sums lose digits.

References
----------
WY representation of products of I - l r^T: Bischof, Van Loan 1987, doi:10.1137/0908009; in chunks of a delta rule:
Yang et al. 2024, arXiv:2406.06484, section 3, and with decays arXiv:2412.06464, section 3.3; one decay per key:
arXiv:2312.06635, section 4. The adjoint is the same triangular system, transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..typing import Array
from .arrays import namespace

#: Steps of a block in which decays per key are multiplied out; between blocks both factors are at most 1.
_BLOCK = 16

#: Log decay of a reset: e^-800 is 0 in float64.
_RESET = -800.0


@dataclass
class Coefficients:
    """Coefficients of consecutive steps: arrays (..., step, key) or (..., step, value), by the names of the equations.

    ``g`` has one log decay per head, (..., step, 1), or per key. ``left`` and ``right`` are l and r, or None;
    ``left`` is ``write`` itself for a delta rule, whose gradient then has both roles.
    """

    g: Array
    write: Array
    value: Array
    read: Array
    left: Array | None
    right: Array | None


class MatrixChunk:
    """The matrices of consecutive steps, and their forward and backward pass from given states and gradients."""

    def __init__(self, coefficients: Coefficients, start: Callable[[], Array]) -> None:
        self.coefficients, self._compute_start = coefficients, start
        self.is_tied = coefficients.left is coefficients.write
        xp = self.xp = namespace(coefficients.value)
        self.dtype = coefficients.value.dtype
        logs = xp.clip(xp.astype(coefficients.g, xp.float64), min=_RESET)
        self.sums = xp.cumulative_sum(logs, axis=-2)
        self.steps = int(self.sums.shape[-2])
        self.from_start, self.to_end = self._exp(self.sums), self._exp(self.sums[..., -1:, :] - self.sums)
        #: e^{G_C}, (..., key or 1, 1)
        self.whole = xp.matrix_transpose(self.from_start[..., -1:, :])
        self.pairs: _Pairs = (_HeadPairs if self.sums.shape[-1] == 1 else _KeyPairs)(self)

    def _exp(self, exponents: Array) -> Array:
        return self.xp.astype(self.xp.exp(exponents), self.dtype)

    @cached_property
    def start(self) -> Array:
        """State before the first step, (..., key, value), computed where it is needed."""
        return self._compute_start()

    @cached_property
    def _system(self) -> Array:
        """L: pair(r, l) for s < t."""
        return self.xp.tril(self.pairs.products(self.coefficients.right, self.coefficients.left), k=-1)

    @cached_property
    def _writes_seen(self) -> Array:
        """M: pair(r, w) for s < t."""
        if self.is_tied:
            return self._system
        return self.xp.tril(self.pairs.products(self.coefficients.right, self.coefficients.write), k=-1)

    @cached_property
    def _read_writes(self) -> Array:
        return self.pairs.products(self.coefficients.read, self.coefficients.write)

    @cached_property
    def _read_lefts(self) -> Array:
        return (
            self._read_writes if self.is_tied else self.pairs.products(self.coefficients.read, self.coefficients.left)
        )

    @cached_property
    def removed(self) -> Array:
        """u_t = r_t^T e^{g_t} S_{t-1}, (..., step, value); needs ``right``."""
        c = self.coefficients
        right_side = (c.right * self.from_start) @ self.start + self._writes_seen @ c.value
        return _solve_unit_triangular(self._system, right_side, upper=False)

    @cached_property
    def net_value(self) -> Array:
        """v_t - u_t of a delta rule, whose writes and removals have one direction."""
        return self.coefficients.value - self.removed

    def last_state(self) -> Array:
        """Return the state after the last step."""
        c, transpose = self.coefficients, self.xp.matrix_transpose
        written = self.net_value if self.is_tied else c.value
        state = self.whole * self.start + transpose(c.write * self.to_end) @ written
        return state if c.left is None or self.is_tied else state - transpose(c.left * self.to_end) @ self.removed

    def outputs(self) -> Array:
        """Return y_t, (..., step, value)."""
        c = self.coefficients
        y = (c.read * self.from_start) @ self.start + self._read_writes @ (self.net_value if self.is_tied else c.value)
        return y if c.left is None or self.is_tied else y - self._read_lefts @ self.removed

    def pull_back(self, direct: Array, later: Array) -> Array:
        """Return dL/dS before the chunk, from dL/dy_t and the gradient ``later`` at the last state from later steps."""
        self.direct, self.later, c, transpose = direct, later, self.coefficients, self.xp.matrix_transpose
        self._value_grad = transpose(self._read_writes) @ direct + (c.write * self.to_end) @ later
        earlier = transpose(c.read * self.from_start) @ direct + self.whole * later
        if c.left is None:
            return earlier
        right_side = self._value_grad
        if not self.is_tied:
            right_side = transpose(self._read_lefts) @ direct + (c.left * self.to_end) @ later
        #: z_t = l_t^T dL/dS_t, (..., step, value)
        self.pulled = _solve_unit_triangular(transpose(self._system), right_side, upper=True)
        self._value_grad = (
            self.pulled if self.is_tied else self._value_grad - transpose(self._writes_seen) @ self.pulled
        )
        return earlier - transpose(c.right * self.from_start) @ self.pulled

    def carry_back(self, later: Array) -> Array:
        """Pull cotangents (..., key, n) at the last state back to the state before the chunk, of any number n.

        The map from state to state acts on the key axis alone, so that the identity as cotangent gives all of it.
        """
        c, earlier = self.coefficients, self.whole * later
        if c.left is None:
            return earlier
        transpose = self.xp.matrix_transpose
        pulled = _solve_unit_triangular(transpose(self._system), (c.left * self.to_end) @ later, upper=True)
        return earlier - transpose(c.right * self.from_start) @ pulled

    def influence(self, gramian: Array) -> tuple[Array, Array]:
        """Return w_t^T O_t w_t, (..., step), and the Gramian O (..., key, key) before the chunk, from that after it."""
        c, transpose = self.coefficients, self.xp.matrix_transpose
        #: What each step writes, in the outputs of the chunk and in its last state; its first state in the outputs.
        in_outputs, in_end, of_start = self._read_writes, transpose(c.write * self.to_end), c.read * self.from_start
        if c.left is not None:
            removed = _solve_unit_triangular(self._system, self._writes_seen, upper=False)
            in_outputs = in_outputs - self._read_lefts @ removed
            in_end = in_end - transpose(c.left * self.to_end) @ removed
            removed = _solve_unit_triangular(self._system, c.right * self.from_start, upper=False)
            of_start = of_start - self._read_lefts @ removed
        energies = (in_outputs**2).sum(-2) + (in_end * (gramian @ in_end)).sum(-2)
        return energies, transpose(of_start) @ of_start + self.carry_back(transpose(self.carry_back(gramian)))

    def gradients(self) -> Coefficients:
        """Return the gradients of all coefficients, after :meth:`pull_back`."""
        c, xp, pairs = self.coefficients, self.xp, self.pairs
        transpose = xp.matrix_transpose
        from_start_grad = self.from_start * (self.direct @ transpose(self.start))
        values_used = self.net_value if self.is_tied else c.value
        to_end_grad = self.to_end * (values_used @ transpose(self.later))
        #: Terms of sum_t,s weight_ts pair(x, y)_ts: rows x, columns y, weights, whether s = t is one of them.
        terms = [(c.read, c.write, xp.tril(self.direct @ transpose(values_used)))]
        if c.left is not None:
            terms.append((c.right, c.write, -xp.tril(self.pulled @ transpose(values_used), k=-1)))
            if not self.is_tied:
                terms.append((c.read, c.left, -xp.tril(self.direct @ transpose(self.removed))))
                terms.append((c.right, c.left, xp.tril(self.pulled @ transpose(self.removed), k=-1)))
        row_grads = [pairs.row_grad(weights, column) for _, column, weights in terms]
        column_grads = [pairs.column_grad(weights, row) for row, _, weights in terms]
        read, write = row_grads[0], column_grads[0]
        right_boundary, left_boundary = None, None
        right = left = None
        if c.left is not None:
            right, write = row_grads[1], write + column_grads[1]
            right_boundary = -self.from_start * (self.pulled @ transpose(self.start))
            if not self.is_tied:
                read, right = read + row_grads[2], right + row_grads[3]
                left_boundary = -self.to_end * (self.removed @ transpose(self.later))
                left = column_grads[2] + column_grads[3]
        # dL/dg_t: all terms in which step t lies between a write and its use.
        g = pairs.decay_grad(terms, row_grads, column_grads)
        rows = c.read * from_start_grad + (0.0 if right_boundary is None else c.right * right_boundary)
        columns = c.write * to_end_grad + (0.0 if left_boundary is None else c.left * left_boundary)
        corner = self.whole * (self.start * self.later).sum(-1)[..., None]
        if self.sums.shape[-1] == 1:
            rows, columns, corner = (x.sum(axis)[..., None] for x, axis in ((rows, -1), (columns, -1), (corner, -2)))
        g = g + _sum_from(xp, rows) + xp.cumulative_sum(columns, axis=-2) - columns + transpose(corner)
        return Coefficients(
            g,
            write + to_end_grad,
            self._value_grad,
            read + from_start_grad,
            left if left is None else left + left_boundary,
            right if right is None else right + right_boundary,
        )

    def state(self, step: int) -> Array:
        """Return S_t (..., key, value) of one step of the chunk; of step -1 the state before."""
        if step < 0:
            return self.start
        c, transpose = self.coefficients, self.xp.matrix_transpose
        scale = self._exp(self.sums[..., step : step + 1, :] - self.sums[..., : step + 1, :])
        values = (self.net_value if self.is_tied else c.value)[..., : step + 1, :]
        state = transpose(self.from_start[..., step : step + 1, :]) * self.start
        state = state + transpose(c.write[..., : step + 1, :] * scale) @ values
        if c.left is None or self.is_tied:
            return state
        return state - transpose(c.left[..., : step + 1, :] * scale) @ self.removed[..., : step + 1, :]

    def grad(self, step: int) -> Array:
        """Return dL/dS_t (..., key, value), total, of one step of the chunk, after :meth:`pull_back`."""
        c, transpose = self.coefficients, self.xp.matrix_transpose
        scale = self._exp(self.sums[..., step:, :] - self.sums[..., step : step + 1, :])
        grad = transpose(self.to_end[..., step : step + 1, :]) * self.later
        grad = grad + transpose(c.read[..., step:, :] * scale) @ self.direct[..., step:, :]
        if c.right is None:
            return grad
        return grad - transpose(c.right[..., step + 1 :, :] * scale[..., 1:, :]) @ self.pulled[..., step + 1 :, :]


class _Pairs:
    """The map pair(x, y)_ts = sum_k x_tk y_sk e^{G_tk - G_sk} for s <= t, and its adjoints."""

    def products(self, x: Any, y: Any) -> Array:
        """Return pair(x, y), (..., step, step), zero above the diagonal."""
        raise NotImplementedError

    def row_grad(self, weights: Array, y: Any) -> Array:
        """Return the gradient of sum_ts weights_ts pair(x, y)_ts by x; ``weights`` are zero above the diagonal."""
        raise NotImplementedError

    def column_grad(self, weights: Array, x: Any) -> Array:
        """Return the gradient of sum_ts weights_ts pair(x, y)_ts by y."""
        raise NotImplementedError

    def decay_grad(self, terms: Sequence[Any], row_grads: Sequence[Array], column_grads: Sequence[Array]) -> Array:
        """Return the gradient of the sum of all terms by g_t."""
        raise NotImplementedError


class _HeadPairs(_Pairs):
    """Pairs with one decay per head: a matrix of decays for each head."""

    def __init__(self, chunk: MatrixChunk) -> None:
        self.xp = xp = chunk.xp
        differences = chunk.sums - xp.matrix_transpose(chunk.sums)
        # Masked before exp: above the diagonal it might overflow.
        self.decays = xp.tril(xp.astype(xp.exp(xp.tril(differences)), chunk.dtype))

    def products(self, x: Any, y: Any) -> Array:
        return (x @ self.xp.matrix_transpose(y)) * self.decays

    def row_grad(self, weights: Array, y: Any) -> Array:
        return (weights * self.decays) @ y

    def column_grad(self, weights: Array, x: Any) -> Array:
        return self.xp.matrix_transpose(weights * self.decays) @ x

    def decay_grad(self, terms: Sequence[Any], row_grads: Sequence[Array], column_grads: Sequence[Array]) -> Array:
        """Sum the terms of all pairs s < t' <= t over their steps t'; no large numbers cancel."""
        xp = self.xp
        by_pair: Any = sum(self.products(row, column) * weights for row, column, weights in terms)
        before = xp.cumulative_sum(by_pair, axis=-1)
        before = xp.concat([xp.zeros_like(before[..., :1]), before[..., :-1]], axis=-1)
        return xp.tril(before).sum(-2)[..., None]


class _KeyPairs(_Pairs):
    """Pairs with one decay per key: multiplied out within blocks, relative to the start of the later block between."""

    def __init__(self, chunk: MatrixChunk) -> None:
        self.xp = xp = chunk.xp
        self.blocks = [slice(i, min(i + _BLOCK, chunk.steps)) for i in range(0, chunk.steps, _BLOCK)]
        self.within, self.to_reference, self.from_reference = [], [], []
        for block in self.blocks:
            sums = chunk.sums[..., block, :]
            size = int(sums.shape[-2])
            is_later = xp.tril(xp.ones((size, size), dtype=xp.bool, device=sums.device))[..., None]
            differences = sums[..., :, None, :] - sums[..., None, :, :]
            decays = xp.exp(xp.where(is_later, differences, -xp.inf))
            self.within.append(xp.astype(decays, chunk.dtype))
            first = block.start
            reference = chunk.sums[..., first - 1 : first, :] if first else xp.zeros_like(sums[..., :1, :])
            self.to_reference.append(chunk._exp(sums - reference))
            self.from_reference.append(chunk._exp(reference - chunk.sums[..., :first, :]))

    def products(self, x: Any, y: Any) -> Array:
        rows = []
        for i, block in enumerate(self.blocks):
            own = ((x[..., block, None, :] * self.within[i]) * y[..., None, block, :]).sum(-1)
            earlier = y[..., : block.start, :] * self.from_reference[i]
            past = (x[..., block, :] * self.to_reference[i]) @ self.xp.matrix_transpose(earlier)
            after_shape = (*own.shape[:-1], x.shape[-2] - block.stop)
            after = self.xp.zeros(after_shape, dtype=own.dtype, device=own.device)
            rows.append(self.xp.concat([past, own, after], axis=-1))
        return self.xp.concat(rows, axis=-2)

    def row_grad(self, weights: Array, y: Any) -> Array:
        rows = []
        for i, block in enumerate(self.blocks):
            own = (weights[..., block, block, None] * self.within[i] * y[..., None, block, :]).sum(-2)
            past = weights[..., block, : block.start] @ (y[..., : block.start, :] * self.from_reference[i])
            rows.append(own + self.to_reference[i] * past)
        return self.xp.concat(rows, axis=-2)

    def column_grad(self, weights: Array, x: Any) -> Array:
        transpose, grads = self.xp.matrix_transpose, []
        for i, block in enumerate(self.blocks):
            grad = (weights[..., block, block, None] * self.within[i] * x[..., block, None, :]).sum(-3)
            for j, later in enumerate(self.blocks[i + 1 :], i + 1):
                scaled = transpose(weights[..., later, block]) @ (x[..., later, :] * self.to_reference[j])
                grad = grad + self.from_reference[j][..., block, :] * scaled
            grads.append(grad)
        return self.xp.concat(grads, axis=-2)

    def decay_grad(self, terms: Sequence[Any], row_grads: Sequence[Array], column_grads: Sequence[Array]) -> Array:
        """Sum x dx - y dy over later steps, without the pairs s = t, which do not decay."""
        total: Any = 0.0
        for (row, column, weights), row_grad, column_grad in zip(terms, row_grads, column_grads, strict=True):
            own = self.xp.linalg.diagonal(weights)[..., None]
            total = total + row * (row_grad - own * column) - column * (column_grad - own * row)
        return _sum_from(self.xp, total)


def _sum_from(xp: Any, values: Array) -> Array:
    """Return the sums over this and all later steps."""
    return xp.flip(xp.cumulative_sum(xp.flip(values, axis=-2), axis=-2), axis=-2)


def _solve_unit_triangular(matrix: Array, right_side: Array, *, upper: bool) -> Array:
    """Solve (I + matrix) x = right_side for a strictly triangular matrix, by substitution where the library has it."""
    xp = namespace(matrix)
    solve = getattr(xp.linalg, "solve_triangular", None)
    if solve is not None:
        return solve(matrix, right_side, upper=upper, unitriangular=True)
    return xp.linalg.solve(matrix + xp.eye(matrix.shape[-1], dtype=matrix.dtype), right_side)
