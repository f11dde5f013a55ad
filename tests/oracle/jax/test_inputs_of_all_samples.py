"""Loops whose steps read floats that all samples share: the time of a step, beside the data or joined to them."""

import jax
import jax.numpy as jnp
import pytest
from jax_programs import A, B, D, H, T, mse, numbers
from unrolled_jax import difference, unrolled

import rnnlens as rl


def leaky(params, h, x, time):
    return h + 0.3 * jnp.tanh(x @ params["w"][:D] + h @ params["u"] + jnp.sin(time) * params["b"])


def simple(params, h, x, time):
    x = jnp.concatenate([x, jnp.broadcast_to(time, (x.shape[0], 1))], -1)
    return jnp.tanh(x @ params["w"] + h @ params["u"] + params["b"])


@pytest.mark.parametrize("cell", [leaky, simple])
def test_states_and_gradients_are_those_of_the_unrolled_program(cell):
    def function(params, x):
        def step(h, inputs):
            h = cell(params["rnn"], h, *inputs)
            return h, h

        xs = jnp.swapaxes(x, 0, 1), 0.3 * jnp.arange(x.shape[1])
        states = jax.lax.scan(step, jnp.zeros((x.shape[0], H)), xs)[1]
        return jnp.swapaxes(states, 0, 1) @ params["head"]

    params = {"rnn": {"w": numbers(D + 1, H), "u": 0.5 * numbers(H, H, seed=1), "b": numbers(H, seed=2)}}
    params["head"] = numbers(H, A, seed=3)
    x, y = numbers(B, T, D, seed=4), numbers(B, T, A, seed=5)
    trace = rl.trace(rl.jax.model(function, params), x, y, loss=mse)
    assert trace.certificate.state == "passed"
    states, totals = unrolled(lambda: mse(function(params, jnp.asarray(x)), y))
    assert difference(trace["rnn"].hidden, jnp.swapaxes(states[0][0], 0, 1)) < 1e-12
    assert difference(trace["rnn"].hidden_grad, jnp.swapaxes(totals[0][0], 0, 1)) < 1e-12
    by_input = jax.grad(lambda x: mse(function(params, x), y))(jnp.asarray(x))
    assert difference(trace["rnn"].input_grad[..., :D], by_input) < 1e-12
