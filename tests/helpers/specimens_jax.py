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
from specimen import NO_TRAINING, Declared, Specimen, generators

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


class Private(nnx.Module):
    """A module with properties that raise an error, and a table."""

    def __init__(self):
        self.table = nnx.Embed(7, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=nnx.Rngs(0))

    @property
    def activation(self):
        raise ValueError("not here")

    def __call__(self, ids):
        return self.norm(self.table(ids))


class Carrying(Tagger):
    """A tagger of ids, with attributes called as facts are."""

    def __init__(self):
        super().__init__()
        self.private, self.optimizer = Private(), "mine"

    def __call__(self, ids):
        return super().__call__(self.private(ids))


def declared():
    return Declared(
        Carrying(),
        {"x": np.arange(10).reshape(2, 5) % 7, "y": np.ones((2, 5, 2), "float32"), "loss": mse},
        {"lstm.cell"},
        {"inputs": (), "outputs": ()},
        statistics={"private.norm": {"mean", "var"}, "lstm.rngs": {"count"}},
    )


TRAININGS = NO_TRAINING


def guarded():
    return Carrying(), np.arange(10).reshape(2, 5) % 7, set()


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


class Stateful(nnx.Module):
    """A model with statistics and dropout, of which an ``LSTM`` runs from the last step to the first."""

    def __init__(self):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.lstm = nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(1)), reverse=True, keep_order=True)
        self.drop, self.head = nnx.Dropout(0.3, rngs=nnx.Rngs(2)), nnx.Linear(4, 2, rngs=nnx.Rngs(3))
        self.raised = None

    def __call__(self, x):
        if self.raised is not None:
            raise self.raised("in the forward pass")
        return self.head(self.drop(self.lstm(self.norm(x))))


def stateful():
    model = Stateful()
    return Specimen(model, data, mse, layer="lstm.cell", trap=model)


def change(model, x):
    x += 1
    nnx.update(model, jax.tree.map(lambda leaf: 2 * leaf, nnx.state(model, nnx.Param)))


def forget():
    jax.clear_caches()


def state_of(model, *arrays):
    leaves = jax.tree.leaves(nnx.state(model))
    is_key = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    values = [jax.random.key_data(leaf) if key else leaf for leaf, key in zip(leaves, is_key, strict=True)]
    return {
        "variables": [np.asarray(value).tobytes() for value in values],
        "arrays": [array.tobytes() for array in arrays],
        "attributes": [list(map(str, vars(part))) for _, part in nnx.iter_graph(model) if isinstance(part, nnx.Module)],
        "flags": (model.norm.use_running_average, model.drop.deterministic) if hasattr(model, "norm") else (),
        "generators": generators(),
    }
