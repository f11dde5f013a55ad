"""A model that draws from the generators of Python and NumPy: every verb restores them, also one that raises."""

import random
from contextlib import suppress
from itertools import count

import equinox
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import jit, lax, vmap
from specimen import generators

import rnnlens as rl

rng = np.random.default_rng(0)
X, Y = (rng.normal(size=(3, 4, 2)).astype("float32") for _ in range(2))
numbers = count()


def draw():
    return random.random() + np.random.rand()  # noqa: NPY002


class Noisy(nnx.Module):
    def __init__(self, fail):
        self.rnn = nnx.RNN(nnx.SimpleCell(2, 2, rngs=nnx.Rngs(0)))
        self.fail = fail
        self.number = next(numbers)  # no program of another test is its program

    def __call__(self, x):
        noise = draw()
        if self.fail:
            raise ZeroDivisionError
        return self.rnn(x + noise)


def mse(output, target):
    draw()
    return jnp.mean((output - target) ** 2)


def failing_loss(output, target):
    draw()
    raise ZeroDivisionError


VERBS = {
    "trace": lambda model, loss: rl.trace(model, X, Y, loss=loss),
    "gradients": lambda model, loss: rl.gradients(model, X, Y, loss=loss, wrt="input"),
    "weights": lambda model, loss: rl.weights(model, X, Y, loss=loss),
    "jacobian": lambda model, loss: rl.jacobian(model, X),
    "find_nonfinite": lambda model, loss: rl.find_nonfinite(model, X, Y, loss=loss),
    "diagnose": lambda model, loss: rl.diagnose(model, X, Y, loss=loss),
    "layers": lambda model, loss: rl.layers(model, X),
    "fixed_points": lambda model, loss: rl.fixed_points(model, X, most=4),
    "lyapunov": lambda model, loss: rl.lyapunov(model, X),
    "step_eigenvalues": lambda model, loss: rl.step_eigenvalues(model, X),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_restores_every_generator(verb):
    for loss, is_failing in ((mse, False), (failing_loss, False), (mse, True)):
        model, before = Noisy(is_failing), generators()
        with suppress(ZeroDivisionError):
            VERBS[verb](model, loss)
        assert generators() == before


class Linear(equinox.Module):
    weight: jnp.ndarray
    generator: np.random.Generator

    def __call__(self, x):
        def step(h, x_t):
            h = jnp.tanh(h @ self.weight + x_t)
            return h, h

        return lax.scan(step, jnp.zeros(2), x + self.generator.normal())[1]


class HoldsGenerator(nnx.Module):
    def __init__(self, generator):
        self.rnn = nnx.RNN(nnx.SimpleCell(2, 2, rngs=nnx.Rngs(0)))
        self.generator = generator

    def __call__(self, x):
        return self.rnn(x + self.generator.normal())


class Plain:
    def __init__(self, generator):
        self.generators = [generator]

    def __call__(self, params, x):
        return vmap(Linear(params, self.generators[0]))(x)


MODELS = {
    "equinox": lambda generator: Linear(0.5 * jnp.eye(2), generator),
    "nnx": HoldsGenerator,
    "class": lambda generator: rl.jax.model(Plain(generator), 0.5 * jnp.eye(2)),
    "method": lambda generator: rl.jax.model(Plain(generator).__call__, 0.5 * jnp.eye(2)),
    "closure": lambda generator: rl.jax.model(lambda w, x: vmap(Linear(w, generator))(x), 0.5 * jnp.eye(2)),
    "jit": lambda generator: rl.jax.model(jit(lambda w, x: vmap(Linear(w, generator))(x)), 0.5 * jnp.eye(2)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_generator_that_the_model_holds_is_restored_and_its_results_are_certified(kind):
    for verb in ("trace", "gradients", "jacobian"):
        generator = np.random.default_rng(3)
        model, before = MODELS[kind](generator), generator.bit_generator.state
        result = VERBS[verb](model, mse)
        assert generator.bit_generator.state == before
        assert result.certificate.state == "passed"
