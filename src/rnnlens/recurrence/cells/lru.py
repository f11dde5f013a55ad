"""The linear recurrent unit: x_t = lambda x_{t-1} + gamma (B u_t), with complex diagonal lambda.

lambda = exp(-exp(nu) + i exp(theta)),  gamma = exp(gamma_log). Orvieto et al. 2023, arXiv:2303.06349, eqs. 4 and 7.
The state is stored as [real parts | imaginary parts], which is also the cell's output; the readout y = Re(C x) + D u
is a linear layer above it.
"""

from __future__ import annotations

from dataclasses import dataclass

from array_api_compat import array_namespace

from ...typing import Array, Namespace
from ...vocabulary import FEATURE, Quantity
from ..arrays import Workspace
from ..linear import System
from ..structured import ComplexDiagonal, Kernels, StructuredSystem
from ..trajectory import Adjoint, Gradients, Pulled, Record, Scale, States, Stepped, Trajectory
from . import affine
from .affine import Contraction
from .cell import Cell, by_name, flat_gate_grad
from .registry import built_in

_MODE_DIMS, _INPUT_DIMS = ("mode",), (FEATURE, "mode")


@built_in
@dataclass(frozen=True, eq=False)
class LRU(Cell):
    """A linear recurrent unit without its readout.

    Attributes
    ----------
    nu, theta, gamma : (mode,)
        Logarithms of the decay -log|lambda|, of the phase of lambda, and of the factor of the input.
    input_real, input_imaginary : (feature, mode)
        The two parts of B, transposed.
    """

    kind = "lru"
    parameters = by_name(
        Quantity("nu", _MODE_DIMS, "log decay", "1", "nu: |lambda| = exp(-exp(nu))"),
        Quantity("theta", _MODE_DIMS, "log phase", "1", "theta: arg lambda = exp(theta), in radians"),
        Quantity("gamma", _MODE_DIMS, "log input scale", "1", "gamma_log: the input is multiplied by exp(gamma_log)"),
        Quantity("input_real", _INPUT_DIMS, "input matrix, real part", "1", "Re B, from the input to each mode"),
        Quantity(
            "input_imaginary", _INPUT_DIMS, "input matrix, imaginary part", "1", "Im B, from the input to each mode"
        ),
    )

    nu: Array
    theta: Array
    gamma: Array
    input_real: Array
    input_imaginary: Array

    @property
    def units(self) -> int:
        """Number of real numbers in the state: two per complex mode."""
        return 2 * int(self.nu.shape[0])

    def _eigenvalues(self, xp: Namespace) -> tuple[Array, Array]:
        size, phase = xp.exp(-xp.exp(self.nu)), xp.exp(self.theta)
        return size * xp.cos(phase), size * xp.sin(phase)

    def _input_matrix(self, xp: Namespace) -> Array:
        """Return the input matrix B (feature, 2 * mode), with real and imaginary parts side by side."""
        return xp.concat([self.input_real, self.input_imaginary], axis=-1)

    def _input_scales(self, xp: Namespace) -> Array:
        return xp.exp(xp.concat([self.gamma, self.gamma], axis=-1))

    def project(self, x: Array, scale: Scale, xp: Namespace) -> Array:
        """Compute the projected input gamma (B u_t)."""
        return affine.project(x, self._input_matrix(xp), scale, 1, xp) * self._input_scales(xp)

    def step(self, projected: Array, before: States, scale: Scale, xp: Namespace) -> Stepped:
        """Multiply the state by lambda and add the projected input."""
        real, imaginary = self._eigenvalues(xp)
        re, im = self._split_parts(before[0])
        rotated = xp.concat([real * re - imaginary * im, imaginary * re + real * im], axis=-1)
        single_gate = projected[..., None, :]
        return Record(single_gate, single_gate), (rotated + projected,)

    def _split_parts(self, state: Array) -> tuple[Array, Array]:
        modes = self.units // 2
        return state[..., :modes], state[..., modes:]

    def pull_back(
        self, record: Record, before: States, after: States, cotangent: States, scale: Scale, xp: Namespace
    ) -> Pulled:
        """Pull cotangents back by multiplying them with the conjugate of lambda."""
        real, imaginary = self._eigenvalues(xp)
        re, im = self._split_parts(cotangent[0])
        carry = xp.concat([real * re + imaginary * im, real * im - imaginary * re], axis=-1)
        return cotangent[0][..., None, :], (carry,), (cotangent[0],)

    def input_gradient(self, x: Array, gate_grad: Array, scale: Scale, xp: Namespace) -> Array:
        """Pull the gradient at the state back to the input u_t: B^T gamma dL/ds_t."""
        return affine.unproject(gate_grad * self._input_scales(xp), self._input_matrix(xp), scale, 1, xp)

    def input_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return the gradients of B and gamma."""
        xp, flat = run.xp, flat_gate_grad(run, result, times)
        matrix_grad = affine.outer(run.input[:, times, :], flat * self._input_scales(xp), run.input_scale, 1, how, xp)
        real, imaginary = self._split_parts(matrix_grad)
        by_scale = self._split_parts(affine.total(flat * run.known_record.preactivation[:, times, 0, :], how, xp))
        return {"gamma": by_scale[0] + by_scale[1], "input_real": real, "input_imaginary": imaginary}

    def recurrent_gradients(self, run: Trajectory, result: Adjoint, how: Contraction, times: slice) -> Gradients:
        """Return dL/dnu and dL/dtheta, by dlambda/dnu = -exp(nu) lambda and dlambda/dtheta = i exp(theta) lambda."""
        xp, (real, imaginary) = run.xp, self._eigenvalues(run.xp)
        re, im = self._split_parts(run.before(0)[:, times, :])
        real_grad, imaginary_grad = self._split_parts(flat_gate_grad(run, result, times))
        by_real = affine.total(real_grad * re + imaginary_grad * im, how, xp)
        by_imaginary = affine.total(imaginary_grad * re - real_grad * im, how, xp)
        radial, angular = by_real * real + by_imaginary * imaginary, by_imaginary * real - by_real * imaginary
        return {"nu": -xp.exp(self.nu) * radial, "theta": xp.exp(self.theta) * angular}

    def linear_system(self, run: Trajectory, masked_output: str = "state") -> System:
        """Linearise with A_t = diag(lambda), the same at every step."""
        xp = array_namespace(run.input)
        real, imaginary = (part[None, None, :] for part in self._eigenvalues(xp))
        inputs = Kernels(self._input_scales(xp)[None, None, None, :], [self._input_matrix(xp)], run.input_scale)
        transition = ComplexDiagonal(Workspace(xp, real), real, imaginary)
        batch, time = (int(n) for n in run.input.shape[:2])
        return StructuredSystem(transition, inputs, batch, time, run.order, run.mask)
