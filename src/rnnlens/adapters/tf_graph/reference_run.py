"""Reference runs of the user's graph, for certificates: a separate copy without taps, and one ``tf.gradients``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from ...errors import CertificateError
from ...typing import Array, leaves_of
from ..protocol import Batch, Cotangents, ReferenceRun
from .blocks import is_variable, read
from .graph_copy import GraphCopy, cone, dense
from .inputs import fed, fed_in, names_of_inputs
from .losses import feed_of_loss, key_of, loss_in
from .open_net import OpenNet, open_net
from .public import Net
from .weights import all_weights, block

_GRAPHS: weakref.WeakKeyDictionary[Any, dict[Any, _ReferenceGraph]] = weakref.WeakKeyDictionary()
_MOST = 4


class _ReferenceGraph:
    """Copy of the graph without taps, with the gradients of the loss or of the outputs."""

    def __init__(self, net: Net, batch: Batch, *, of_loss: bool, gradients: bool) -> None:
        self.copy = GraphCopy(net.session, batch.seed or 0)
        with self.copy.graph.as_default():
            get = self.copy.tensor
            self.outputs = [get(tensor.name) for tensor in net.outputs.values()]
            self.loss = loss_in(net, self.copy, batch).tensor if of_loss else None
            self.ends = [*self.outputs, *([] if self.loss is None else [self.loss])]
            self.variables = {op.name: op for op in cone(self.ends) if is_variable(op)}
            self.inputs = {name: [get(t.name) for t in alike] for name, alike in net.inputs.items()}
            self.given = [tf.placeholder(t.dtype.base_dtype, t.shape) for t in self.outputs]
            self.asked: dict[Any, Any] = self._differentiated() if gradients else {}
        self.asked |= {("output", i): tensor for i, tensor in enumerate(self.outputs)}
        self.asked |= {} if self.loss is None else {"loss": self.loss}

    def _differentiated(self) -> dict[Any, Any]:
        sources: dict[Any, Any] = {("weight", name): op.outputs[0] for name, op in self.variables.items()}
        for name, alike in self.inputs.items():
            sources |= {("input", name, i): tensor for i, tensor in enumerate(alike)}
        sources = {key: t for key, t in sources.items() if t.dtype.base_dtype.is_floating or t.dtype == tf.resource}
        floats = [i for i, t in enumerate(self.outputs) if t.dtype.base_dtype.is_floating]
        starts = [self.outputs[i] for i in floats] if self.loss is None else [self.loss]
        given = [self.given[i] for i in floats] if self.loss is None else None
        found = tf.gradients(starts, list(sources.values()), grad_ys=given)
        pairs = zip(sources, map(dense, found), strict=True)
        return {key: gradient for key, gradient in pairs if gradient is not None}


def _refuse_other_draws(
    found: OpenNet, batch: Batch, bare: _ReferenceGraph, feed: Mapping[Any, Any], values: Any
) -> None:
    """Raise ``CertificateError`` if results depend on random numbers that a rewritten loop draws in another order."""
    given, ends = fed(found, batch), list(found.outputs)
    if bare.loss is not None:
        ends.append(loss_in(found.net, found.copy, batch).tensor)
    if found.copy.is_steady(ends, given):
        return
    mine = found.copy.run(dict(enumerate(ends)), given, found.variables(ends, given))
    outputs = bare.copy.run(dict(enumerate(bare.ends)), feed, values)
    if not all(np.allclose(mine[i], outputs[i], rtol=1e-3, atol=1e-5) for i in outputs):
        raise CertificateError("dropout within a loop draws other numbers when the loop is looked into")


def prepared(
    net: Net, batch: Batch, cotangents: Cotangents | None = None, *, gradients: bool = True
) -> Callable[[], ReferenceRun]:
    """Build the reference copy, its feeds and the values of its variables; return a function that runs it."""
    if batch.initial_state:
        raise CertificateError("the graph by itself starts from the states that it is fed or makes")
    found = open_net(net, batch.seed)
    has_loss = bool(leaves_of(batch.y)) or batch.loss is not None or net.has_own_loss
    of_loss = cotangents is None and has_loss
    bare = _bare(net, batch, of_loss, gradients)
    feed = fed_in(net, bare.copy, batch) | (feed_of_loss(net, bare.copy, batch) if of_loss else {})
    values = read(net.session, bare.variables)
    if any(loop.redrawn for loop in found.loops):
        _refuse_other_draws(found, batch, bare, feed, values)

    def run() -> ReferenceRun:
        given = {}
        if cotangents is not None:
            outputs = list(bare.copy.run(dict(enumerate(bare.outputs)), feed, values).values())
            wanted = cotangents(list(map(np.asarray, outputs))) if callable(cotangents) else cotangents
            for place, cotangent, output in zip(bare.given, wanted, outputs, strict=True):
                given[place] = np.zeros_like(output) if cotangent is None else np.asarray(cotangent, output.dtype)
        got = bare.copy.run(bare.asked, feed | given, values)
        names = names_of_inputs(net, batch.x)
        parts = [[got.get(("input", name, i)) for i in range(len(bare.inputs[name]))] for name in names]
        present = [[np.asarray(part) for part in alike if part is not None] for alike in parts]
        return ReferenceRun(
            [np.asarray(got["output", i]) for i in range(len(bare.outputs))],
            float(got["loss"]) if "loss" in got else None,
            [np.sum(alike, axis=0) if alike else None for alike in present],
            _weights(found, got, values) if gradients else {},
            tuple(names) if isinstance(batch.x, Mapping) else (),
        )

    return run


def _bare(net: Net, batch: Batch, of_loss: bool, gradients: bool) -> _ReferenceGraph:
    kept = _GRAPHS.setdefault(net.graph, {})
    ends = tuple(tensor.name for tensor in net.outputs.values())
    inputs = tuple((name, tuple(t.name for t in alike)) for name, alike in net.inputs.items())
    loss = (None if net.loss is None else net.loss.name, key_of(batch)) if of_loss else None
    key = (net.graph.version, ends, inputs, loss, gradients, batch.seed or 0)
    for stale in [other for other in kept if other[0] != net.graph.version]:
        del kept[stale]
    if key not in kept:
        while len(kept) >= _MOST:
            del kept[next(iter(kept))]
        kept[key] = _ReferenceGraph(net, batch, of_loss=of_loss, gradients=gradients)
    return kept[key]


def _weights(found: Any, got: Mapping[Any, Any], values: Mapping[str, Array]) -> dict[str, Array | None]:
    """Return gradients of all weights, by :func:`weights.name_of`, as blocks of the gradients of variables."""
    made: dict[str, Array | None] = {}
    for name, pieces in all_weights(found).items():
        parts = {piece.variable: got.get(("weight", piece.variable)) for piece in pieces}
        whole = {n: np.zeros_like(values[n]) if g is None else np.asarray(g) for n, g in parts.items()}
        made[name] = None if all(g is None for g in parts.values()) else block(pieces, whole)
    return made
