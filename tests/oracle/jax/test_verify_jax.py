"""``rl.verify`` of JAX modules and functions: a wrong ``custom_vjp`` is caught, a right one is not accused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rnnlens as rl


def step_with(mistake):
    """Return a step (params, state, x) -> (state, output) whose backward pass is written by hand."""

    @jax.custom_vjp
    def tanh_step(weight, recurrent, state, x):
        return jnp.tanh(x @ weight + state @ recurrent)

    def forward(weight, recurrent, state, x):
        h = tanh_step(weight, recurrent, state, x)
        return h, (weight, recurrent, state, x, h)

    def backward(saved, grad):
        weight, recurrent, state, x, h = saved
        z = grad * (1 - h * h)
        to_state = jnp.zeros_like(state) if mistake == "no state gradient" else z @ recurrent.T
        to_x = z @ weight.T
        if mistake == "first row only":
            to_x = to_x.at[1:].set(0)
        return x.T @ z, state.T @ z, to_state, to_x

    tanh_step.defvjp(forward, backward)

    def step(params, state, x):
        h = tanh_step(params["weight"], params["recurrent"], state, x)
        return h, 2 * h

    return step


def model_of(mistake):
    rng = np.random.default_rng(0)
    params = {"weight": rng.normal(size=(3, 4)), "recurrent": rng.normal(size=(4, 4)) / 2}
    return rl.jax.model(step_with(mistake), jax.tree.map(lambda p: jnp.asarray(p, "float32"), params))


def example():
    return np.random.default_rng(1).normal(size=(2, 3, 3)).astype("float32")


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [("", ""), ("no state gradient", "through the state is missing"), ("first row only", "right in 1 of 2")],
)
def test_a_step_with_a_backward_pass_by_hand(mistake, cause):
    verification = rl.verify(model_of(mistake), example(), state=np.ones((2, 4), "float32"), step=True)
    assert verification.ok == (mistake == ""), str(verification)
    assert cause in verification.cause
    assert verification.ok or "gradient of input" in {tensor.name for tensor in verification.wrong}


class Net(nnx.Module):
    """A module that runs in float32 alone: its carry is made in that dtype."""

    def __init__(self):
        self.rnn = nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)))
        self.head = nnx.Linear(4, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.rnn(x))


def test_a_module_of_flax_is_right():
    x = np.random.default_rng(1).normal(size=(2, 12, 3)).astype("float32")
    verification = rl.verify(Net(), x)
    assert verification.ok, str(verification)
    assert verification.reach >= 2


def test_gradients_are_compiled_once_for_each_length_and_dtype(monkeypatch):
    """JAX takes up to a second for each program that it compiles, so that their number decides how long it takes."""
    compiled, jit = [], jax.jit

    def counted_jit(function, *args, **options):
        compiled.append(function)
        return jit(function, *args, **options)

    monkeypatch.setattr(jax, "jit", counted_jit)
    assert rl.verify(model_of(""), example(), state=np.ones((2, 4), "float32"), step=True).ok
    # Results and gradients, of one step and of three, in float32 and float64.
    assert len(compiled) == 8
