"""Values and gradients through the well-known layers of a chain (:class:`~rnnlens.adapters.protocol.ChainLink`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from array_api_compat import array_namespace

from ..adapters.protocol import ChainLink
from ..recurrence.activations import ACTIVATIONS
from ..typing import Array


def dense(link: ChainLink, value: Array) -> tuple[Array, Array]:
    """Return pre-activation and output of a dense layer."""
    z = value if link.kernel is None else value @ link.kernel
    z = z if link.bias is None else z + link.bias
    return z, ACTIVATIONS[link.activation].value(z, array_namespace(z))


def pull_dense_rows(link: ChainLink, before: Array, block: Array | None) -> Array:
    """Pull rows (sample or 1, [time or 1,] row, unit) back from a dense layer's output to its input."""
    if block is None:
        units = before.shape[-1] if link.kernel is None else link.kernel.shape[1]
        block = np.eye(units, dtype=before.dtype)[(None,) * (before.ndim - 1)]
    if link.activation != "linear":
        z, a = (v[..., None, :] for v in dense(link, before))
        block = ACTIVATIONS[link.activation].vjp(z, a, block, array_namespace(z))
    return block if link.kernel is None else block @ link.kernel.T


def pull_back(links: Sequence[ChainLink], value: Array, cotangent: Array) -> Array:
    """Pull a cotangent (sample, time, unit) back through dense and unchanging layers to their input ``value``."""
    layers = [link for link in links if link.kind == "dense"]
    values = [value]
    for link in layers[:-1]:
        values.append(dense(link, values[-1])[1])
    for link, before in zip(reversed(layers), reversed(values[: len(layers)]), strict=True):
        if link.activation != "linear":
            z, a = dense(link, before)
            cotangent = ACTIVATIONS[link.activation].vjp(z, a, cotangent, array_namespace(z))
        cotangent = cotangent if link.kernel is None else cotangent @ link.kernel.T
    return cotangent
