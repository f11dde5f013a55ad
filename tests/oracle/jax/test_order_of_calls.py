"""After any other verbs, a verb returns the numbers, axes, notes and certificate that it returns on a fresh copy."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax_programs import A, B, D, H, T, double, mse, numbers
from order_of_calls import Calls

import rnnlens as rl


class Tagger(nnx.Module):
    """A Flax layer and a head at every step."""

    def __init__(self):
        self.rnn = nnx.RNN(nnx.LSTMCell(D, H, rngs=nnx.Rngs(0), **double()))
        self.head = nnx.Linear(H, A, rngs=nnx.Rngs(1), **double())

    def __call__(self, x):
        return self.head(self.rnn(x))


class Reader(eqx.Module):
    """A cell of Equinox over the steps of one sample, and a head that reads its last state."""

    rnn: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self):
        self.rnn = eqx.nn.GRUCell(D, H, key=jax.random.key(0))
        self.head = eqx.nn.Linear(H, A, key=jax.random.key(1))

    def __call__(self, x):
        def step(h, x):
            return self.rnn(x, h), None

        return self.head(jax.lax.scan(step, jnp.zeros(H), x)[0])


def scanned(params, x):
    """Run a cell written by hand over (sample, time, feature), and a head at every step."""

    def step(h, x):
        h = jnp.tanh(x @ params["w"] + h @ params["u"])
        return h, h

    return jnp.swapaxes(jax.lax.scan(step, jnp.zeros((x.shape[1], H)), x)[1], 0, 1) @ params["head"]


def from_scan():
    params = {"w": numbers(D, H), "u": 0.5 * numbers(H, H, seed=1), "head": numbers(H, A, seed=2)}
    return rl.jax.model(lambda params, x: scanned(params, jnp.swapaxes(x, 0, 1)), params)


def from_equinox():
    model = Reader()
    return rl.jax.model(lambda model, x: jax.vmap(model)(x), model)


#: A factory of models, and the shape of the targets.
KINDS = {"Flax": (Tagger, (B, T, A)), "Equinox": (from_equinox, (B, A)), "scan": (from_scan, (B, T, A))}


@pytest.fixture(params=KINDS)
def calls(request):
    make, target = KINDS[request.param]
    x = numbers(B, T, D, seed=3)
    return Calls(make, x, numbers(*target, seed=4), mse, rl.layers(make(), x).names[0])


def test_drawn_pairs(calls):
    quick = replace(calls, left_out=("diagnose",))
    quick.check([*quick.drawn(2), ("gradients by input", "jacobian")])
    replace(quick, certify="auto").check([("jacobian", "jacobian")])


@pytest.mark.full
@pytest.mark.parametrize("certify", ["always", "auto", "first"])
def test_each_verb_after_each(calls, certify):
    calls.check_each_after_each(certify)
