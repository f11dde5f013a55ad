"""Reversed data: a loop runs backward only where its steps are reversed, and its states are in the order of time."""

import jax
import jax.numpy as jnp
import pytest
from jax_programs import B, D, H, T, numbers

import rnnlens as rl


def run(params, x):
    """Run a simple cell over (time, sample, feature)."""

    def step(h, x):
        h = jnp.tanh(x @ params["w"] + h @ params["u"])
        return h, h

    return jax.lax.scan(step, jnp.zeros((x.shape[1], H)), x)[1]


def reversed_features(params, x):
    states = run(params["first"], jnp.swapaxes(x[..., ::-1], 0, 1))
    return [states]


def forward_above_backward(params, x):
    first = jnp.flip(run(params["first"], jnp.flip(jnp.swapaxes(x, 0, 1), 0)), 0)
    return [first, run(params["second"], first)]


def forward_above_backward_and_dense(params, x):
    first = run(params["first"], jnp.flip(jnp.swapaxes(x, 0, 1), 0))
    dense = jnp.flip(jnp.tanh(first @ params["second"]["u"]), 0)
    return [first[::-1], run(params["second"], dense)]


def reversed_before_remat(params, x):
    return [jnp.flip(jax.checkpoint(run)(params["first"], jnp.flip(jnp.swapaxes(x, 0, 1), 0)), 0)]


@pytest.mark.parametrize(
    ("function", "directions"),
    [
        (reversed_features, ["forward"]),
        (forward_above_backward, ["backward", "forward"]),
        (forward_above_backward_and_dense, ["backward", "forward"]),
        (reversed_before_remat, ["backward"]),
    ],
)
def test_direction_and_states_are_those_of_time(function, directions):
    params = {"first": {"w": numbers(D, H), "u": 0.3 * numbers(H, H, seed=1)}}
    if len(directions) > 1:
        params["second"] = {"w": numbers(H, H, seed=2), "u": 0.3 * numbers(H, H, seed=3)}
    x = numbers(B, T, D, seed=4)
    model = rl.jax.model(lambda params, x: jnp.swapaxes(function(params, x)[-1], 0, 1), params)
    assert [layer.direction for layer in rl.layers(model, x)] == directions
    trace = rl.trace(model, x)
    for name, states in zip(trace, function(params, jnp.asarray(x)), strict=True):
        assert abs(trace[name].hidden.values - jnp.swapaxes(states, 0, 1)).max() < 1e-12
