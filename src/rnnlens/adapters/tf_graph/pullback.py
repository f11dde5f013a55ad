"""Differentiation of the copy: ``tf.gradients`` between any tensors, and one run kept for many cotangents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from ...errors import InputError, UnsupportedError, raised_by, shown
from ...typing import Array
from ..protocol import Batch, Port, Pullback, refuse_misfits
from .boundaries import PortTensors, Spot, joined
from .graph_copy import dense
from .inputs import clear_errors, fed, names_of_inputs
from .losses import key_of
from .open_net import open_net
from .public import Net


def gradients(
    graph: Any, ys: Sequence[Any], xs: Sequence[Any], given: Sequence[Any] | None = None, stop: Sequence[Any] = ()
) -> list[Any]:
    """Add ``tf.gradients`` to the copy: a dense tensor for each of ``xs``, None where there is no path."""
    usable = [i for i, x in enumerate(xs) if x.dtype.base_dtype.is_floating or x.dtype == tf.resource]
    found: list[Any] = [None] * len(xs)
    sources = [xs[i] for i in usable]
    if not sources or not any(y.dtype.base_dtype.is_floating for y in ys):
        return found
    with graph.as_default():
        try:
            made = tf.gradients(list(ys), sources, grad_ys=given, stop_gradients=list(stop) or None)
        except LookupError as error:
            raise UnsupportedError(
                "An operation on the way has no gradient in TensorFlow.",
                got=str(error).removesuffix("."),
                hint="tf.stop_gradient around it, or another operation for the same",
            ) from error
        for i, gradient in zip(usable, made, strict=True):
            found[i] = dense(gradient)
    return found


def pulled_back(
    graph: Any,
    ys: Sequence[Any],
    spots: Mapping[Any, Spot],
    given: Sequence[Any] | None = None,
    stop: Sequence[Any] = (),
) -> dict[Any, Any]:
    """Add gradients of ``ys`` to the copy, combined for each port of ``spots`` to which there is a path.

    Each port at which differentiation stops elsewhere needs a pass of its own.
    """
    together = {key: spot for key, spot in spots.items() if not spot.stop}
    found: dict[Any, Any] = {}
    for group in (together, *({key: spot} for key, spot in spots.items() if spot.stop)):
        halves = {(key, h): half for key, spot in group.items() for h, half in enumerate(spot.halves or (spot,))}
        sources = [source for half in halves.values() for source in half.sources]
        constants = [*stop, *(tensor for spot in group.values() for tensor in spot.stop)]
        made = iter(gradients(graph, ys, sources, given, constants))
        parts = {key: list(islice(made, len(half.sources))) for key, half in halves.items()}
        for key in group:
            whole = [joined(half, parts[of]) for of, half in halves.items() if of[0] == key]
            present = [gradient for gradient in whole if gradient is not None]
            found[key] = tf.add_n(present) if len(present) > 1 else present[0] if present else None
    return {key: gradient for key, gradient in found.items() if gradient is not None}


def differentiate(
    function: Callable[..., Any], arrays: Sequence[Array]
) -> tuple[Array, Callable[[Array], list[Array]]]:
    """Return the value and the vector-Jacobian product of a function, in a graph of its own; see :class:`Adapter`."""
    graph = tf.Graph()
    with graph.as_default(), tf.Session(graph=graph) as session:
        tensors = [tf.constant(array) for array in arrays]
        with raised_by("the function that was given"):
            value = function(*tensors)
        if not isinstance(value, tf.Tensor) or value.graph is not graph:
            expected = "a tensor, made of its arguments by TensorFlow"
            raise InputError("The function returned no tensor.", got=shown(value), expected=expected)
        result = np.asarray(session.run(value))

    def pull(cotangent: Array) -> list[Array]:
        with graph.as_default(), tf.Session(graph=graph) as session:
            given = tf.constant(np.asarray(cotangent, dtype=value.dtype.as_numpy_dtype))
            found = gradients(graph, [value], tensors, [given])
            made = session.run([t * 0 if g is None else g for t, g in zip(tensors, found, strict=True)])
        return [np.asarray(one) for one in made]

    return result, pull


_VARIANTS = (tf.resource, tf.variant, tf.string)


class _BackwardPass:
    """Backward pass in the copy from the ports ``of``: placeholders of their cotangents, and gradients by port."""

    def __init__(
        self, graph: Any, spots: Mapping[Port, Spot], of: Sequence[Port], wrt: Sequence[Port], stop: Any
    ) -> None:
        before = set(graph.get_operations())
        values = {port: spots[port].value for port in of}
        with graph.as_default(), tf.name_scope("rnnlens/pullback"):
            self.given = {port: tf.placeholder(t.dtype.base_dtype, t.shape) for port, t in values.items()}
            sources = {port: spots[port] for port in wrt}
            self.found = pulled_back(graph, list(values.values()), sources, list(self.given.values()), stop)
        added, own = set(graph.get_operations()) - before, {tensor.ref() for tensor in self.given.values()}
        read: dict[Any, Any] = {}
        for op in added:
            read |= {tensor.ref(): tensor for tensor in op.inputs if tensor.op not in added and tensor.ref() not in own}
        forward = list(read.values())
        plain = all(t.dtype not in _VARIANTS and not t.dtype._is_ref_dtype and graph.is_feedable(t) for t in forward)
        inside = any(op._get_control_flow_context() is not None for op in added)
        #: Forward tensors that the backward pass reads, kept for further cotangents; None if some cannot be fed.
        self.kept = forward if plain and not inside else None


class GraphPullback:
    """Vector-Jacobian products of a graph: implements :class:`rnnlens.adapters.protocol.Pullback`."""

    def __init__(
        self, net: Net, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> None:
        self._net, self._opened = net, open_net(net, batch.seed)
        self._of, self._wrt = tuple(of), tuple(wrt)
        self._key = ("pullback", self._of, self._wrt, tuple(cut), key_of(batch), tuple(names_of_inputs(net, batch.x)))
        self._feed = fed(self._opened, batch)
        spots = PortTensors(self._opened, batch)
        self._spots = self._opened.copy.once(self._key, lambda: {port: spots(port) for port in (*of, *wrt, *cut)})
        ends = [self._spots[port] for port in cut]
        self._stop = [t for x in ends for t in (x.boundary.tensors if x.boundary is not None else (x.value,))]
        self.outputs = len(self._opened.outputs)
        fetches = {port: self._spots[port].value for port in (*of, *wrt)}
        self._variables = self._opened.variables(list(fetches.values()), self._feed)
        with clear_errors(net):
            values = self._opened.copy.run(fetches, self._feed, self._variables)
        #: Values of the kept forward tensors, by id of the ``_BackwardPass``.
        self._forward: dict[int, dict[Any, Array]] = {}
        self.values: Mapping[Port, Array] = {port: np.asarray(value) for port, value in values.items()}

    def vjp(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Pull cotangents back to the ``wrt`` ports; see :meth:`Pullback.vjp`."""
        refuse_misfits(cotangents, self._of, self.values)
        chosen, copy = tuple(cotangents), self._opened.copy
        built = copy.once(
            (self._key, chosen), lambda: _BackwardPass(copy.graph, self._spots, chosen, self._wrt, self._stop)
        )
        count = len(next(iter(cotangents.values())))
        rows = [self._row(built, {port: c[k] for port, c in cotangents.items()}) for k in range(count)]
        found = {port: np.stack([row[port] for row in rows]) for port in built.found}
        return {port: found.get(port) for port in self._wrt}

    def _row(self, built: _BackwardPass, cotangents: Mapping[Port, Array]) -> dict[Any, Array]:
        given = {built.given[port]: np.asarray(c) for port, c in cotangents.items()}
        copy = self._opened.copy
        with clear_errors(self._net):
            if built.kept is None:
                variables = self._opened.variables(list(built.found.values()), self._feed)
                return copy.run(built.found, {**self._feed, **given}, self._variables | variables)
            if id(built) not in self._forward:
                variables = self._opened.variables(built.kept, self._feed)
                left = copy.run(dict(enumerate(built.kept)), self._feed, self._variables | variables)
                self._forward[id(built)] = {tensor: left[i] for i, tensor in enumerate(built.kept)}
            return copy.run(built.found, {**self._forward[id(built)], **given}, {})

    def __enter__(self) -> Pullback:
        return self

    def __exit__(self, *exc: object) -> None:
        self._forward = {}
