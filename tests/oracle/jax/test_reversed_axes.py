"""Reversed data: a loop runs backward only where its steps are reversed, and its states are in the order of time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax_programs import B, D, H, T, double, mse, numbers
from unrolled_jax import difference

import rnnlens as rl
from rnnlens.errors import ModelError


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


def cell(features, seed):
    return nnx.GRUCell(features, H, rngs=nnx.Rngs(seed), **double())


class Tagger(nnx.Module):
    """Two directions over sequences of unequal lengths, which Flax reverses within their lengths, and a layer above."""

    def __init__(self):
        self.both = nnx.Bidirectional(nnx.RNN(cell(D, 0)), nnx.RNN(cell(D, 1)))
        self.above = nnx.RNN(cell(2 * H, 2))

    def __call__(self, x, lengths):
        return self.above(self.both(x, seq_lengths=lengths), seq_lengths=lengths)


def test_a_half_over_sequences_reversed_within_their_lengths_is_named_as_not_looked_into():
    model, x = Tagger(), (numbers(B, T, D), np.array([T, 2, 4]))
    trace = rl.trace(model, x, numbers(B, T, H, seed=1), loss=mse)
    assert list(trace) == ["both.forward_rnn.cell", "above.cell"]
    assert any("both.backward_rnn.cell, within an order of steps" in note for note in trace.notes)
    output = nnx.clone(model)(jnp.asarray(x[0]), x[1])
    assert difference(trace["above.cell"].hidden, output) < 1e-12
    with pytest.raises(ModelError, match="reverse or sort the sequences before the call"):
        rl.layers(nnx.RNN(cell(D, 0), reverse=True), {"inputs": x[0], "seq_lengths": x[1]})
