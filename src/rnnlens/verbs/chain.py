"""Values and gradients through the known layers of a chain (:class:`~rnnlens.adapters.protocol.ChainLink`).

In a chain the loss depends on each recurrent layer through the next one alone. The sweep of that layer gives the
gradient at its input, and pulled back through the layers in between it is dL/dy of the layer below. A capture then
needs the framework's gradients at the last layer alone, which costs no backward pass through a recurrence. The first
trace of a model and shapes captures the gradients at all layers nevertheless, and they are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..adapters.protocol import Capture, ChainLink, RecurrentCall
from ..autodiff.tensors import converted_like, dtype_name
from ..data import leaves_of
from ..recurrence.activations import ACTIVATIONS
from ..results.checks import rounding_bound
from ..results.schema import to_host
from ..typing import Array
from ..vocabulary import FEATURE, SAMPLE, TIME


def dense_values(link: ChainLink, value: Array) -> tuple[Array, Array]:
    """Return pre-activation and output of a dense layer."""
    z = value if link.kernel is None else value @ link.kernel
    z = z if link.bias is None else z + link.bias
    return z, ACTIVATIONS[link.activation].value(z, array_namespace(z))


def pull_dense_rows(link: ChainLink, layer_input: Array, block: Array | None) -> Array:
    """Pull rows (sample or 1, [time or 1,] row, unit) back from a dense layer's output to its input.

    ``block`` None is a unit row for each output.
    """
    if block is None and link.activation == "linear" and link.kernel is not None:
        return link.kernel.T[(None,) * (layer_input.ndim - 1)]
    if block is None:
        units = layer_input.shape[-1] if link.kernel is None else link.kernel.shape[1]
        block = np.eye(units, dtype=layer_input.dtype)[(None,) * (layer_input.ndim - 1)]
    if link.activation != "linear":
        z, a = (v[..., None, :] for v in dense_values(link, layer_input))
        block = ACTIVATIONS[link.activation].vjp(z, a, block, array_namespace(z))
    return block if link.kernel is None else block @ link.kernel.T


def rows_below(link: ChainLink, layer_input: Array, block: Array | None) -> int:
    """Return the number of entries of the largest array that :func:`pull_dense_rows` makes."""
    inputs = layer_input.shape[-1]
    units = inputs if link.kernel is None else link.kernel.shape[1]
    rows, lead = (units, 1) if block is None else (block.shape[-2], math.prod(block.shape[:-2]))
    if link.activation != "linear":
        return int(rows * max(units, inputs) * math.prod(layer_input.shape[:-1]))
    return int(rows * inputs * lead)


def pull_back(links: Sequence[ChainLink], value: Array, cotangent: Array) -> Array:
    """Pull a cotangent (sample, time, unit) back through dense and unchanging layers to their input ``value``."""
    layers = [link for link in links if link.kind == "dense"]
    values = [value]
    for link in layers[:-1]:
        values.append(dense_values(link, values[-1])[1])
    for link, layer_input in zip(reversed(layers), reversed(values[: len(layers)]), strict=True):
        if link.activation != "linear":
            z, a = dense_values(link, layer_input)
            cotangent = ACTIVATIONS[link.activation].vjp(z, a, cotangent, array_namespace(z))
        cotangent = cotangent if link.kernel is None else cotangent @ link.kernel.T
    return cotangent


class ChainGradients:
    """Gradients at the outputs of the recurrent layers of one captured chain, from the last layer to the first.

    ``agree``: whether all of them that could be compared are the framework's gradients.
    """

    def __init__(self, capture: Capture, links: Sequence[ChainLink], x: Any) -> None:
        self._capture, self._x, self.agree = capture, x, True
        self._output_grads_below: dict[str, Array] = {}
        self._calls = {call.layer: call for call in capture.calls}
        #: Links below a recurrent layer, down to the layer before it or to the model's input, by the layer's name.
        self._links: dict[str, list[ChainLink]] = {}
        below: list[ChainLink] = []
        for link in links:
            if link.kind == "recurrent":
                self._links[link.name], below = below, []
            else:
                below.append(link)

    @classmethod
    def of(cls, capture: Capture, x: Any) -> ChainGradients | None:
        """Return the gradients of a captured chain with the input ``x``; None for any other capture."""
        links, calls = capture.chain, capture.calls
        if links is None or not calls or calls[-1].output_grad is None or capture.other_calls or capture.sequences:
            return None
        names = [link.name for link in links if link.kind == "recurrent"]
        if names != [call.layer for call in calls] or not all(map(_is_plain, calls)):
            return None
        return cls(capture, links, x)

    def with_output_grad(self, call: RecurrentCall) -> RecurrentCall:
        """Return a call with the output gradient that the layer above gave; with the captured one if the two differ."""
        pulled = self._output_grads_below.get(call.layer)
        if pulled is None:
            return call
        if not (self._capture.topmost or _is_close(pulled, to_host(call.output_grad), int(call.input.shape[1]))):
            self.agree = False
            return call
        return replace(call, output_grad=converted_like(pulled, call.output))

    def pull(self, call: RecurrentCall, input_grad: Array) -> None:
        """Pull the gradient at a swept layer's input back to the layer below or to the model's input; store it."""
        names, links = list(self._links), self._links[call.layer]
        position = names.index(call.layer)
        if position:
            below = self._calls[names[position - 1]]
            self._output_grads_below[below.layer] = pull_back(links, to_host(below.output), to_host(input_grad))
        elif self._capture.topmost and self._capture.input_grads:
            self._capture.input_grads = [self._input_gradient(links, to_host(input_grad))]

    def _input_gradient(self, links: Sequence[ChainLink], grad: Array) -> Array | None:
        """Return the gradient at the model's input in its own layout; None for an input of integers."""
        if any(link.kind == "table" for link in links):
            return None
        axes = (links[0].axes if links else ()) or (SAMPLE, TIME, FEATURE)
        order = [axes.index(role) for role in (SAMPLE, TIME, FEATURE)]
        (leaf,) = leaves_of(self._x)
        value = to_host(leaf).astype(grad.dtype, copy=False)
        return np.transpose(pull_back(links, np.transpose(value, order), grad), np.argsort(order))


def _is_plain(call: RecurrentCall) -> bool:
    special = call.bidirectional or call.stepwise or call.reads_states_between or call.cell.by_framework
    in_half = call.compute_dtype not in ("", dtype_name(call.input))
    return not (special or in_half) and call.start_states is None and call.state_grad is None


def _is_close(pulled: Array, captured: Array, steps: int) -> bool:
    """Return whether rounding explains the difference between two gradients; False if a number is not finite."""
    difference, largest = (float(np.max(np.abs(a), initial=0.0)) for a in (pulled - captured, captured))
    return difference <= rounding_bound(str(pulled.dtype), steps) * largest < math.inf
