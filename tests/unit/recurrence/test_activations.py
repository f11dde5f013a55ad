"""Every activation of Keras: values against Keras' formulas in torch, derivatives against torch autograd."""

import math

import array_api_compat.numpy as np_xp
import array_api_compat.torch as torch_xp
import numpy as np
import pytest
import torch
import torch.nn.functional as fn

from rnnlens.recurrence.activations import ACTIVATIONS, sigmoid

ORACLE = {
    "linear": lambda x: x,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "leaky_relu": lambda x: fn.leaky_relu(x, 0.2),
    "relu6": fn.relu6,
    "elu": fn.elu,
    "celu": fn.celu,
    "selu": fn.selu,
    "softplus": fn.softplus,
    "softsign": fn.softsign,
    "squareplus": lambda x: (x + torch.sqrt(x**2 + 4)) / 2,
    "soft_shrink": fn.softshrink,
    "hard_shrink": fn.hardshrink,
    "tanh_shrink": fn.tanhshrink,
    "sparse_plus": lambda x: torch.where(x <= -1, 0 * x, torch.where(x < 1, (x + 1) ** 2 / 4, x)),
    "silu": fn.silu,
    "gelu": fn.gelu,
    "sparse_sigmoid": lambda x: fn.hardtanh(x) / 2 + 0.5,
    "exponential": torch.exp,
    # torch.nn.functional.hardsigmoid rounds 1/6 to single precision.
    "hard_sigmoid": lambda x: torch.clip(x / 6 + 0.5, 0, 1),
    # The hard sigmoid of Keras 2 differs from that of Keras 3.
    "hard_sigmoid_keras2": lambda x: torch.clip(0.2 * x + 0.5, 0, 1),
    "hard_silu": lambda x: x * torch.clip(x / 6 + 0.5, 0, 1),
    "hard_tanh": fn.hardtanh,
    "mish": fn.mish,
    "log_sigmoid": fn.logsigmoid,
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
}
#: Points in every smooth interval of every activation, none at a kink.
POINTS = np.array([[-7.3, -3.1, -1.7, -0.8, -0.3], [0.2, 0.7, 1.9, 3.4, 7.7], [40.0, -40.0, 0.01, -0.01, 2.4]])


@pytest.mark.parametrize("name", sorted(ORACLE))
def test_value_and_derivatives(name):
    activation = ACTIVATIONS[name]
    x = torch.tensor(POINTS, requires_grad=True)
    weights = np.linspace(-1, 2, POINTS.size).reshape(POINTS.shape)
    expected = ORACLE[name](x)
    (expected * torch.tensor(weights)).sum().backward()
    value = activation.value(POINTS, np_xp)
    np.testing.assert_allclose(value, expected.detach().numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(activation.vjp(POINTS, value, weights, np_xp), x.grad.numpy(), rtol=1e-10, atol=1e-13)


def test_no_activation_goes_untested():
    assert set(ACTIVATIONS) == set(ORACLE)


def test_float32_stays_float32_and_extremes_do_not_warn():
    for activation in ACTIVATIONS.values():
        x = np.array([[-50.0, 0.0, 50.0]], dtype=np.float32)
        value = activation.value(x, np_xp)
        assert value.dtype == np.float32, activation.name
        assert activation.vjp(x, value, np.ones_like(x), np_xp).dtype == np.float32, activation.name


def test_values_are_new_arrays_that_a_cell_may_write_to():
    for activation in ACTIVATIONS.values():
        assert not np.shares_memory(activation.value(POINTS, np_xp), POINTS), activation.name


def jax_arrays():
    """Return the namespace of JAX, and its function that makes an array."""
    jax_numpy = pytest.importorskip("jax.numpy")
    return jax_numpy, jax_numpy.asarray


MAKERS = {
    "numpy": lambda: (np_xp, np.asarray),
    "torch": lambda: (torch_xp, torch.as_tensor),
    "jax": jax_arrays,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("framework", "dtype"),
    [  # JAX computes in float32 by default
        ("numpy", np.float64),
        ("numpy", np.float32),
        ("torch", np.float64),
        ("torch", np.float32),
        ("jax", np.float32),
    ],
)
def test_small_gates_keep_their_value_and_slope(framework, dtype):
    """By the closed form exp(x) / (1 + exp(x)); at the open end to the precision of 1, as every framework."""
    xp, make = MAKERS[framework]()
    points = [-80.0, -40.0, -3.0, 0.0, 2.0, 40.0]
    expected = np.array([math.exp(x) / (1 + math.exp(x)) for x in points])
    slopes = np.array([math.exp(x) / (1 + math.exp(x)) ** 2 for x in points])
    x = make(np.array(points, dtype))
    tolerance = 200 * np.finfo(dtype).eps  # exp(-80) has the rounding of its argument, 80 times that of 1
    for value in (ACTIVATIONS["sigmoid"].value(x, xp), sigmoid(x, xp)):
        assert np.asarray(value).dtype == dtype
        np.testing.assert_allclose(np.asarray(value), expected, rtol=tolerance)
        slope = np.asarray(ACTIVATIONS["sigmoid"].slope(x, value, xp))
        np.testing.assert_allclose(slope[:-1], slopes[:-1], rtol=tolerance)
        assert abs(slope[-1] - slopes[-1]) <= np.finfo(dtype).eps
    far = np.asarray(sigmoid(make(np.array([-1e4, 1e4], dtype)), xp))
    assert far.tolist() == [0.0, 1.0]


def test_the_sigmoid_of_cells_is_differentiated_at_small_gates():
    x = torch.tensor([-1e4, -80.0, -40.0, 0.0], requires_grad=True)
    sigmoid(x, torch_xp).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [0.0, math.exp(-80), math.exp(-40), 0.25], rtol=1e-5)
