"""Reference runs of the user's graph, for certificates: a separate copy without taps, and one ``tf.gradients``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from rnnlens.adapters.protocol import Batch, Cotangents, ReferenceRun
from rnnlens.errors import CertificateError
from rnnlens.typing import Array, leaves_of

from .blocks import is_variable, read_variables
from .graph_copy import GraphCopy, dependency_cone, to_dense
from .inputs import feed_of_batch, feed_of_copy, names_of_inputs
from .losses import feed_of_loss, loss_cache_key, loss_in
from .open_net import OpenNet, open_net
from .public import Net
from .weights import all_weights, assemble_weight

_GRAPHS: weakref.WeakKeyDictionary[Any, dict[Any, _ReferenceGraph]] = weakref.WeakKeyDictionary()
_MOST = 4


class _ReferenceGraph:
    """Copy of the graph without taps, with the gradients of the loss or of the outputs."""

    def __init__(self, net: Net, batch: Batch, *, of_loss: bool, gradients: bool) -> None:
        self.copy = GraphCopy(net.session, batch.seed or 0)
        with self.copy.graph.as_default():
            get_tensor = self.copy.tensor
            self.outputs = [get_tensor(tensor.name) for tensor in net.outputs.values()]
            self.loss = loss_in(net, self.copy, batch).tensor if of_loss else None
            self.end_tensors = [*self.outputs, *([] if self.loss is None else [self.loss])]
            self.variables = {op.name: op for op in dependency_cone(self.end_tensors) if is_variable(op)}
            self.inputs = {name: [get_tensor(t.name) for t in tensors] for name, tensors in net.inputs.items()}
            self.cotangents = [tf.placeholder(t.dtype.base_dtype, t.shape) for t in self.outputs]
            self.fetches: dict[Any, Any] = self._gradient_tensors() if gradients else {}
        self.fetches |= {("output", i): tensor for i, tensor in enumerate(self.outputs)}
        self.fetches |= {} if self.loss is None else {"loss": self.loss}

    def _gradient_tensors(self) -> dict[Any, Any]:
        sources: dict[Any, Any] = {("weight", name): op.outputs[0] for name, op in self.variables.items()}
        for name, tensors in self.inputs.items():
            sources |= {("input", name, i): tensor for i, tensor in enumerate(tensors)}
        sources = {key: t for key, t in sources.items() if t.dtype.base_dtype.is_floating or t.dtype == tf.resource}
        floats = [i for i, t in enumerate(self.outputs) if t.dtype.base_dtype.is_floating]
        targets = [self.outputs[i] for i in floats] if self.loss is None else [self.loss]
        cotangents = [self.cotangents[i] for i in floats] if self.loss is None else None
        gradients = tf.gradients(targets, list(sources.values()), grad_ys=cotangents)
        pairs = zip(sources, map(to_dense, gradients), strict=True)
        return {key: gradient for key, gradient in pairs if gradient is not None}


def _refuse_other_draws(
    opened: OpenNet, batch: Batch, reference: _ReferenceGraph, feed: Mapping[Any, Any], values: Any
) -> None:
    """Raise ``CertificateError`` if results depend on random numbers that a rewritten loop draws in another order."""
    opened_feed, end_tensors = feed_of_batch(opened, batch), list(opened.outputs)
    if reference.loss is not None:
        end_tensors.append(loss_in(opened.net, opened.copy, batch).tensor)
    if opened.copy.is_steady(end_tensors, opened_feed):
        return
    opened_results = opened.copy.run(
        dict(enumerate(end_tensors)), opened_feed, opened.variable_values(end_tensors, opened_feed)
    )
    reference_results = reference.copy.run(dict(enumerate(reference.end_tensors)), feed, values)
    if not all(np.allclose(opened_results[i], reference_results[i], rtol=1e-3, atol=1e-5) for i in reference_results):
        raise CertificateError("dropout within a loop draws other numbers when the loop is looked into")


def prepare_reference_run(
    net: Net, batch: Batch, cotangents: Cotangents | None = None, *, gradients: bool = True
) -> Callable[[], ReferenceRun]:
    """Build the reference copy, its feeds and the values of its variables; return a function that runs it."""
    opened = open_net(net, batch.seed)
    has_loss = bool(leaves_of(batch.y)) or batch.loss is not None or net.has_own_loss
    of_loss = cotangents is None and has_loss
    reference = _reference_graph(net, batch, of_loss, gradients)
    feed = feed_of_copy(net, reference.copy, batch) | (feed_of_loss(net, reference.copy, batch) if of_loss else {})
    values = read_variables(net.session, reference.variables)
    if any(loop.is_redrawn for loop in opened.loops):
        _refuse_other_draws(opened, batch, reference, feed, values)

    def run() -> ReferenceRun:
        cotangent_feed = {}
        if cotangents is not None:
            outputs = list(reference.copy.run(dict(enumerate(reference.outputs)), feed, values).values())
            output_cotangents = cotangents(list(map(np.asarray, outputs))) if callable(cotangents) else cotangents
            for placeholder, cotangent, output in zip(reference.cotangents, output_cotangents, outputs, strict=True):
                cotangent_feed[placeholder] = (
                    np.zeros_like(output) if cotangent is None else np.asarray(cotangent, output.dtype)
                )
        results = reference.copy.run(reference.fetches, feed | cotangent_feed, values)
        names = names_of_inputs(net, batch.x)
        input_gradients = [
            [results.get(("input", name, i)) for i in range(len(reference.inputs[name]))] for name in names
        ]
        present_gradients = [
            [np.asarray(gradient) for gradient in tensor_gradients if gradient is not None]
            for tensor_gradients in input_gradients
        ]
        return ReferenceRun(
            [np.asarray(results["output", i]) for i in range(len(reference.outputs))],
            float(results["loss"]) if "loss" in results else None,
            [np.sum(tensor_gradients, axis=0) if tensor_gradients else None for tensor_gradients in present_gradients],
            _weight_gradients(opened, results, values) if gradients else {},
            tuple(names) if isinstance(batch.x, Mapping) else (),
        )

    return run


def _reference_graph(net: Net, batch: Batch, of_loss: bool, gradients: bool) -> _ReferenceGraph:
    reference_graphs = _GRAPHS.setdefault(net.graph, {})
    output_names = tuple(tensor.name for tensor in net.outputs.values())
    inputs = tuple((name, tuple(t.name for t in tensors)) for name, tensors in net.inputs.items())
    loss = (None if net.loss is None else net.loss.name, loss_cache_key(batch)) if of_loss else None
    key = (net.graph.version, output_names, inputs, loss, gradients, batch.seed or 0)
    for stale in [other for other in reference_graphs if other[0] != net.graph.version]:
        del reference_graphs[stale]
    if key not in reference_graphs:
        while len(reference_graphs) >= _MOST:
            del reference_graphs[next(iter(reference_graphs))]
        reference_graphs[key] = _ReferenceGraph(net, batch, of_loss=of_loss, gradients=gradients)
    return reference_graphs[key]


def _weight_gradients(opened: Any, results: Mapping[Any, Any], values: Mapping[str, Array]) -> dict[str, Array | None]:
    """Return gradients of all weights, by :func:`weights.weight_name`, as blocks of the gradients of variables."""
    weight_gradients: dict[str, Array | None] = {}
    for name, blocks in all_weights(opened).items():
        fetched_gradients = {block.variable: results.get(("weight", block.variable)) for block in blocks}
        variable_gradients = {
            n: np.zeros_like(values[n]) if g is None else np.asarray(g) for n, g in fetched_gradients.items()
        }
        weight_gradients[name] = (
            None if all(g is None for g in fetched_gradients.values()) else assemble_weight(blocks, variable_gradients)
        )
    return weight_gradients
