"""JAX models for the tests of every adapter; see ``tested_adapter.py``."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from specimen import Specimen

import rnnlens as rl
from rnnlens.adapters.jax import capture


@contextmanager
def surroundings():
    """Compare a part of the samples of small models, too."""
    with patch.object(capture, "MOST_PRODUCTS", 0):
        yield


class Stack(nnx.Module):
    """An LSTM, a GRU that reads backwards, and a head at every step."""

    def __init__(self):
        self.lower = nnx.RNN(nnx.LSTMCell(3, 5, rngs=nnx.Rngs(0)))
        self.upper = nnx.RNN(nnx.GRUCell(5, 3, rngs=nnx.Rngs(1)), reverse=True, keep_order=True)
        self.head = nnx.Linear(3, 2, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.head(self.upper(self.lower(x)))


class Centred(Stack):
    """A stack whose samples depend on each other: the mean over the batch is subtracted."""

    def __call__(self, x):
        return super().__call__(x - x.mean(0, keepdims=True))


def linen_gru():
    module = nn.RNN(nn.GRUCell(2))
    return rl.jax.model(module, module.init(jax.random.key(0), jnp.zeros((2, 5, 3))))


def mse(output, target):
    return jnp.mean((output - target) ** 2)


def absolute(output, target):
    return jnp.mean(jnp.abs(output - target))


def data(samples, steps):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((samples, steps, 3)), rng.standard_normal((samples, steps, 2))
    return {"x": x.astype("float32"), "y": y.astype("float32")}


def specimen(make):
    return Specimen(make(), data, mse, absolute)


INDEPENDENT = {"stack": partial(specimen, Stack), "linen": partial(specimen, linen_gru)}
mixing = partial(specimen, Centred)


class Tagger(nnx.Module):
    def __init__(self):
        self.lstm = nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0)))
        self.top = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.top(self.lstm(x))


def tagger():
    return Tagger(), mse


FOREIGN = {
    "an array": lambda: jnp.ones((2, 5, 3)),
    "bfloat16": lambda: jnp.ones((2, 5, 3), jnp.bfloat16),
    "complex array": lambda: jnp.ones((2, 5, 3), jnp.complex64),
    "NaN array": lambda: jnp.full((2, 5, 3), jnp.nan),
    "0-d array": lambda: jnp.array(1.0),
    "key": lambda: jax.random.key(0),
    "shape": lambda: jax.ShapeDtypeStruct((2, 5, 3), jnp.float32),
    "linen module": lambda: nn.Dense(2),
    "nnx class": lambda: nnx.LSTMCell,
    "nnx module": lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
    "random streams": lambda: nnx.Rngs(0),
    "jitted": lambda: jax.jit(mse),
    "optimizer": lambda: optax.sgd(0.1),
}


def state_of(model):
    leaves = jax.tree.leaves(nnx.state(model))
    is_key = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    arrays = [jax.random.key_data(leaf) if key else leaf for leaf, key in zip(leaves, is_key, strict=True)]
    return (
        *(np.asarray(array).tobytes() for array in arrays),
        *(len(vars(part)) for part in (model, model.lstm, model.top)),
        np.random.get_state()[1].tobytes(),  # noqa: NPY002  the global state must not change
    )
