"""States of a scan have the names of the fields and keys of the user's carry, against copies unrolled in Python."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnlens as rl
from rnnlens.errors import LayerNotFoundError

UNITS = 5


class Membrane(NamedTuple):
    """A voltage, and a trace of it."""

    voltage: jax.Array
    trace: jax.Array


#: How a carry is made of two states, how they are read, and their names.
CARRIES = {
    "fields": (Membrane, tuple, ("voltage", "trace")),
    "keys": (lambda a, b: {"slow": b, "mem": (a,)}, lambda s: (s["mem"][0], s["slow"]), ("mem_0", "slow")),
    "positions": (lambda a, b: (a, b), tuple, ("hidden", "state_1")),
    "a name that is taken": (
        lambda a, b: {"output": a, "slow": b},
        lambda s: (s["output"], s["slow"]),
        ("hidden", "slow"),
    ),
}


def network(kind):
    pack, unpack, _ = CARRIES[kind]

    def apply(params, x, taps=None):
        def step(carry, inputs):
            u, tap = inputs
            a, b = unpack(carry)
            a = 0.9 * a + u @ params["w"] + b @ params["u"] + tap[0]
            b = 0.5 * b + jnp.tanh(a) + tap[1]
            return pack(a, b), (jax.nn.sigmoid(a) @ params["o"], a, b)

        zeros = jnp.zeros((len(x), UNITS))
        taps = jnp.zeros((2, x.shape[1], len(x), UNITS)) if taps is None else taps
        outputs = jax.lax.scan(step, pack(zeros, zeros), (jnp.swapaxes(x, 0, 1), jnp.swapaxes(taps, 0, 1)))[1]
        return tuple(jnp.swapaxes(value, 0, 1) for value in outputs)

    return apply


def plain(kind):
    pack, unpack, _ = CARRIES[kind]

    def apply(params, x):
        def step(carry, u):
            a, b = unpack(carry)
            a = 0.9 * a + u @ params["w"] + b @ params["u"]
            b = 0.5 * b + jnp.tanh(a)
            return pack(a, b), jax.nn.sigmoid(a) @ params["o"]

        zeros = jnp.zeros((len(x), UNITS))
        return jnp.swapaxes(jax.lax.scan(step, pack(zeros, zeros), jnp.swapaxes(x, 0, 1))[1], 0, 1)

    return apply


def mse(output, target):
    return ((output - target) ** 2).mean()


@pytest.mark.parametrize("kind", CARRIES)
def test_fields_of_the_carry_are_the_names(kind):
    rng = np.random.default_rng(0)
    params = {
        "w": rng.normal(size=(3, UNITS)),
        "u": 0.3 * rng.normal(size=(UNITS, UNITS)),
        "o": rng.normal(size=(5, 2)),
    }
    x, y = rng.normal(size=(4, 6, 3)), rng.normal(size=(4, 6, 2))
    _, *states = network(kind)(params, x)
    taps = jnp.zeros((2, 6, 4, UNITS))
    grads = jax.grad(lambda taps: mse(network(kind)(params, x, taps)[0], y))(taps)
    model = rl.jax.model(plain(kind), params)
    (layer,) = rl.layers(model, x).names
    names = CARRIES[kind][2]
    assert {*rl.layers(model, x)[layer].states} == {*names}
    trace = rl.trace(model, x, y, loss=mse)
    gradients = rl.gradients(model, x, y, loss=mse, wrt=[f"{layer}.{name}" for name in names])
    for name, state, grad in zip(names, states, grads, strict=True):
        grad = jnp.swapaxes(grad, 0, 1)
        np.testing.assert_allclose(trace[layer][name], state, atol=1e-12)
        np.testing.assert_allclose(trace[layer][f"{name}_grad"], grad, atol=1e-12)
        np.testing.assert_allclose(gradients[f"{layer}.{name}"], grad, atol=1e-12)
    assert trace.certificate.state == gradients.certificate.state == "passed"
    assert bool(trace.notes) == (kind == "a name that is taken")
    with pytest.raises(LayerNotFoundError, match=f"{layer}.{names[1]}"):
        rl.gradients(model, x, y, loss=mse, wrt=f"{layer}.state_7")
