"""Keras' activation functions and their derivatives, for any array namespace.

Each activation has ``value(x, xp)``, always a new array, and ``vjp(x, a, g, xp)``, where ``a = value(x)`` and ``g`` is
dL/da. At a kink the derivative is that of the frameworks: 0 at the boundary of a constant piece. Element-wise
activations also have the derivative ``slope(x, a, xp)``; activations that mix the units of a layer (softmax,
log_softmax) do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from array_api_compat import is_jax_namespace, is_numpy_namespace, is_torch_namespace

from ..typing import Array, Namespace

_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


@dataclass(frozen=True)
class Activation:
    """One activation function: its value, its vector-Jacobian product and, if element-wise, its derivative."""

    name: str
    value: Callable[[Array, Namespace], Array]
    slope: Callable[[Array, Array, Namespace], Array] | None = None
    mixed_vjp: Callable[[Array, Array, Array, Namespace], Array] | None = None

    def vjp(self, x: Array, a: Array, g: Array, xp: Namespace) -> Array:
        """Pull the cotangent ``g`` = dL/da of ``a = value(x)`` back to dL/dx."""
        if self.slope is not None:
            return g * self.slope(x, a, xp)
        assert self.mixed_vjp is not None
        return self.mixed_vjp(x, a, g, xp)


def sigmoid(z: Array, xp: Namespace) -> Array:
    """Return 1 / (1 + exp(-z)), without overflow, by operations that every framework can differentiate.

    Values near 0 keep their relative precision in NumPy, torch and JAX; elsewhere the absolute one.
    """
    if is_torch_namespace(xp) or is_jax_namespace(xp) or is_numpy_namespace(xp):
        return _sigmoid(z, xp)
    return 0.5 * xp.tanh(0.5 * z) + 0.5


def _relu(x: Array, xp: Namespace) -> Array:
    return xp.where(x > 0, x, xp.zeros_like(x))


def _as_number(condition: Array, like: Array, xp: Namespace) -> Array:
    return xp.astype(condition, like.dtype)


def _sigmoid(x: Array, xp: Namespace) -> Array:
    # Not by tanh, which loses values below the precision of 1: a gate of 1e-18 would be closed.
    if is_torch_namespace(xp):
        return xp.sigmoid(x)
    if is_jax_namespace(xp):
        return xp.exp(-xp.logaddexp(xp.zeros_like(x), -x))  # whose derivative is finite where exp(-x) is not
    with np.errstate(over="ignore", under="ignore"):  # exp(-x) = inf gives 0, as it should
        a = xp.exp(-x)
    a += 1
    return 1 / a


def _softplus(x: Array, xp: Namespace) -> Array:
    return _relu(x, xp) + xp.log1p(xp.exp(-xp.abs(x)))


def _erf(x: Array, xp: Namespace) -> Array:
    """Compute the error function, which the array-API standard does not have."""
    if is_torch_namespace(xp):
        return xp.erf(x)
    from scipy.special import erf  # imported here because the import takes half a second and few networks need it

    return xp.asarray(erf(np.asarray(x)), dtype=x.dtype)


def _gelu_slope(x: Array, a: Array, xp: Namespace) -> Array:
    return 0.5 * (1 + _erf(x / math.sqrt(2), xp)) + x * xp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _elu(x: Array, xp: Namespace) -> Array:
    return xp.where(x > 0, x, xp.expm1(xp.where(x > 0, xp.zeros_like(x), x)))


def _elu_slope(x: Array, a: Array, xp: Namespace) -> Array:
    return xp.where(x > 0, xp.ones_like(x), a + 1)


def _indicator(x: Array, low: float, high: float, xp: Namespace) -> Array:
    return _as_number((x > low) & (x < high), x, xp)


def _softmax(x: Array, xp: Namespace) -> Array:
    e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)


def _log_softmax(x: Array, xp: Namespace) -> Array:
    shifted = x - xp.max(x, axis=-1, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))


def _softmax_vjp(x: Array, a: Array, g: Array, xp: Namespace) -> Array:
    return a * (g - xp.sum(g * a, axis=-1, keepdims=True))


def _log_softmax_vjp(x: Array, a: Array, g: Array, xp: Namespace) -> Array:
    return g - xp.exp(a) * xp.sum(g, axis=-1, keepdims=True)


_TABLE = (
    Activation("linear", lambda x, xp: x * 1, lambda x, a, xp: xp.ones_like(x)),
    Activation("tanh", lambda x, xp: xp.tanh(x), lambda x, a, xp: 1 - a * a),
    Activation("sigmoid", _sigmoid, lambda x, a, xp: a * (1 - a)),
    Activation("relu", _relu, lambda x, a, xp: _as_number(x > 0, x, xp)),
    Activation(
        "leaky_relu",
        lambda x, xp: xp.where(x > 0, x, 0.2 * x),
        lambda x, a, xp: 0.2 + 0.8 * _as_number(x > 0, x, xp),
    ),
    Activation("relu6", lambda x, xp: xp.clip(x, 0.0, 6.0), lambda x, a, xp: _indicator(x, 0.0, 6.0, xp)),
    Activation("elu", _elu, _elu_slope),
    Activation("celu", _elu, _elu_slope),
    Activation(
        "selu",
        lambda x, xp: _SELU_SCALE * xp.where(x > 0, x, _SELU_ALPHA * xp.expm1(xp.where(x > 0, xp.zeros_like(x), x))),
        lambda x, a, xp: xp.where(x > 0, _SELU_SCALE * xp.ones_like(x), a + _SELU_SCALE * _SELU_ALPHA),
    ),
    Activation("softplus", _softplus, lambda x, a, xp: _sigmoid(x, xp)),
    Activation("softsign", lambda x, xp: x / (1 + xp.abs(x)), lambda x, a, xp: (1 - xp.abs(a)) ** 2),
    Activation(
        "squareplus",
        lambda x, xp: 0.5 * (x + xp.sqrt(x * x + 4)),
        lambda x, a, xp: 0.5 * (1 + x / xp.sqrt(x * x + 4)),
    ),
    Activation(
        "soft_shrink",
        lambda x, xp: _relu(x - 0.5, xp) - _relu(-x - 0.5, xp),
        lambda x, a, xp: _as_number(xp.abs(x) > 0.5, x, xp),
    ),
    Activation(
        "hard_shrink",
        lambda x, xp: xp.where(xp.abs(x) > 0.5, x, xp.zeros_like(x)),
        lambda x, a, xp: _as_number(xp.abs(x) > 0.5, x, xp),
    ),
    Activation("tanh_shrink", lambda x, xp: x - xp.tanh(x), lambda x, a, xp: (x - a) ** 2),
    Activation(
        "sparse_plus",
        lambda x, xp: xp.where(x >= 1, x, 0.25 * _relu(xp.clip(x, -1.0, 1.0) + 1, xp) ** 2),
        lambda x, a, xp: 0.5 * (xp.clip(x, -1.0, 1.0) + 1),
    ),
    Activation(
        "silu",
        lambda x, xp: x * _sigmoid(x, xp),
        lambda x, a, xp: _sigmoid(x, xp) + a * (1 - _sigmoid(x, xp)),
    ),
    Activation("gelu", lambda x, xp: 0.5 * x * (1 + _erf(x / math.sqrt(2), xp)), _gelu_slope),
    Activation(
        "sparse_sigmoid",
        lambda x, xp: 0.5 * (xp.clip(x, -1.0, 1.0) + 1),
        lambda x, a, xp: 0.5 * _indicator(x, -1.0, 1.0, xp),
    ),
    Activation("exponential", lambda x, xp: xp.exp(x), lambda x, a, xp: a),
    Activation(
        "hard_sigmoid",
        lambda x, xp: xp.clip(x / 6 + 0.5, 0.0, 1.0),
        lambda x, a, xp: _indicator(x, -3.0, 3.0, xp) / 6,
    ),
    Activation(  # the hard_sigmoid of Keras 2, a different function of the same name
        "hard_sigmoid_keras2",
        lambda x, xp: xp.clip(0.2 * x + 0.5, 0.0, 1.0),
        lambda x, a, xp: _indicator(x, -2.5, 2.5, xp) * 0.2,
    ),
    Activation(
        "hard_silu",
        lambda x, xp: x * xp.clip(x / 6 + 0.5, 0.0, 1.0),
        lambda x, a, xp: xp.where(x >= 3, xp.ones_like(x), _indicator(x, -3.0, 3.0, xp) * (x / 3 + 0.5)),
    ),
    Activation("hard_tanh", lambda x, xp: xp.clip(x, -1.0, 1.0), lambda x, a, xp: _indicator(x, -1.0, 1.0, xp)),
    Activation(
        "mish",
        lambda x, xp: x * xp.tanh(_softplus(x, xp)),
        lambda x, a, xp: xp.tanh(_softplus(x, xp)) + x * (1 - xp.tanh(_softplus(x, xp)) ** 2) * _sigmoid(x, xp),
    ),
    Activation("log_sigmoid", lambda x, xp: -_softplus(-x, xp), lambda x, a, xp: 1 - xp.exp(a)),
    Activation("softmax", _softmax, None, _softmax_vjp),
    Activation("log_softmax", _log_softmax, None, _log_softmax_vjp),
)

#: Activations by their Keras names. ``glu`` and ``threshold`` are left out because they cannot be activations of a
#: recurrent cell: ``glu`` halves the number of units and ``threshold`` needs arguments.
ACTIVATIONS: dict[str, Activation] = {a.name: a for a in _TABLE}
