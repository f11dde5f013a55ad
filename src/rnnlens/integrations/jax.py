"""``rl.jax``: models of JAX as rnnlens takes them.

>>> import rnnlens as rl  # doctest: +SKIP
>>> trace = rl.trace(rl.jax.model(module.apply, params), x, y, loss=loss)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..adapters.jax import JaxModel

__all__ = ["model"]


def model(
    source: Any,
    params: Any = None,
    *,
    rng: Any = None,
    example: Any = None,
    batched: bool = False,
    names: Mapping[str, str] | None = None,
) -> JaxModel:
    """Describe a model of JAX to rnnlens: a function with its parameters, or a module.

    Modules of Flax NNX and Equinox are also taken as they are, without this function.

    Parameters
    ----------
    source
        A function ``apply(params, x)`` that returns the outputs; one ``loss_fn(params, x, y)`` that returns the loss; a
        module of Flax (NNX or Linen) or Equinox; a Haiku transform. It is not changed.
    params
        The parameters of a function, a Linen module or a Haiku transform, nested in any way.
    rng
        A random key for a module that draws numbers: Haiku's ``rng``, Linen's ``rngs``, Equinox' ``key``, which is
        split among the samples.
    example
        One batch of data, of which only the shapes are used: for calls without data, such as ``rl.layers(model)``.
    batched
        Whether an Equinox module takes a whole batch. By default it takes one sample, and is vectorised over the first
        axis of the data.
    names
        Other names for recurrent layers, by the name that ``rl.layers`` shows: ``{"train.py:17": "rnn"}``.

    Returns
    -------
    JaxModel
        The model, for every function of rnnlens that takes one.
    """
    return JaxModel(source, params, rng=rng, example=example, batched=batched, names=names)
