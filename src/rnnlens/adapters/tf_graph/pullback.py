"""Differentiation of the copy: ``tf.gradients`` between any tensors, and one run kept for many cotangents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from ...errors import InputError, UnsupportedError, raised_by, shown
from ...typing import Array
from ..protocol import Batch, Port, Pullback, refuse_misfits
from .boundaries import PortTensors, Spot, as_run, joined
from .graph_copy import dense
from .inputs import clear_errors, fed, names_of_inputs
from .losses import key_of
from .open_net import open_net
from .public import Net
from .weights import block


def gradients(
    graph: Any, ys: Sequence[Any], xs: Sequence[Any], given: Sequence[Any] | None = None, stop: Sequence[Any] = ()
) -> list[Any]:
    """Add ``tf.gradients`` to the copy: a dense tensor for each of ``xs``, None where there is no path.

    Raise UnsupportedError if an operation between them has no gradient in TensorFlow.
    """
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


@dataclass
class _Built:
    """Tensors added to the copy for the cotangents of some ports.

    ``given``: placeholders of the cotangents. ``found``: gradients by port. ``kept``: the forward tensors that the
    backward pass reads; further cotangents then need the backward pass only. It is None if some of them cannot be fed.
    """

    given: dict[Port, Any]
    found: dict[Any, Any] = field(default_factory=dict)
    kept: list[Any] | None = None


class GraphPullback:
    """Vector-Jacobian products of a graph: implements :class:`rnnlens.adapters.protocol.Pullback`."""

    def __init__(
        self, net: Net, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> None:
        self._net, self._opened = net, open_net(net, batch.seed)
        self._key = (
            tuple(of),
            tuple(wrt),
            tuple(cut),
            key_of(batch),
            tuple(names_of_inputs(net, batch.x)),
        )
        self._feed = fed(self._opened, batch)
        self._spots: dict[Port, Spot] = self._once(
            "spots", lambda: {port: PortTensors(self._opened, batch)(port) for port in (*of, *wrt, *cut)}
        )
        self._of, self._wrt, self._cut = tuple(of), tuple(wrt), tuple(cut)
        self.outputs = len(self._opened.outputs)
        fetches = {port: self._spots[port].value for port in (*of, *wrt) if port.kind != "weight"}
        self._variables = self._opened.variables(list(fetches.values()), self._feed)
        with clear_errors(net):
            values = self._opened.copy.run(fetches, self._feed, self._variables)
        #: Values of the kept forward tensors, by id of ``_Built``.
        self._forward: dict[int, dict[Any, Array]] = {}
        weights = {port: block(self._spots[port].pieces, self._held(port)) for port in wrt if port.kind == "weight"}
        self.values: Mapping[Port, Array] = {port: np.asarray(value) for port, value in values.items()} | weights

    def _once(self, name: str, make: Any) -> Any:
        built = self._opened.copy.built
        key = ("pullback", self._key, name)
        if key not in built:
            built[key] = make()
        return built[key]

    def _held(self, port: Port) -> dict[str, Array]:
        """Return the values of the variables that a weight is part of."""
        held = self._opened.values_of([self._spots[port].pieces], self._variables)
        self._variables |= held
        return held

    def vjp(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Pull cotangents back to the ``wrt`` ports; see :meth:`Pullback.vjp`."""
        refuse_misfits(cotangents, self._of, self.values)
        chosen = tuple(cotangents)
        built: _Built = self._once(f"vjp {chosen}", lambda: self._build(chosen))
        count = len(next(iter(cotangents.values())))
        rows = [self._row(built, {port: c[k] for port, c in cotangents.items()}) for k in range(count)]
        return {port: self._stacked(port, built, rows) for port in self._wrt}

    def _build(self, of: Sequence[Port]) -> _Built:
        """Add the backward pass from some ports to the copy."""
        graph = self._opened.copy.graph
        before = set(graph.get_operations())
        ys, given, placeholders = [], [], {}
        with graph.as_default(), tf.name_scope("rnnlens/pullback"):
            for port in of:
                spot = self._spots[port]
                placeholder = tf.placeholder(spot.value.dtype.base_dtype, spot.value.shape)
                placeholders[port] = placeholder
                for tensor, part in self._starts(spot, placeholder):
                    ys.append(tensor)
                    given.append(part)
            built = _Built(placeholders)
            stop = [tensor for port in self._cut for tensor in _boundary(self._spots[port])]
            together = [port for port in self._wrt if not self._spots[port].stop]
            apart = [port for port in self._wrt if self._spots[port].stop]
            self._add(built, together, ys, given, stop)
            for port in apart:
                self._add(built, [port], ys, given, [*stop, *self._spots[port].stop])
        built.kept = self._keepable(built, set(graph.get_operations()) - before)
        return built

    def _starts(self, spot: Spot, cotangent: Any) -> list[tuple[Any, Any]]:
        """Return the tensors at which differentiation starts, with the cotangent of each."""
        spot = spot.halves[0] if spot.halves else spot
        if spot.boundary is None or spot.loop is None:
            return [(spot.value, cotangent)]
        return list(zip(spot.boundary.tensors, as_run(spot.loop, spot.boundary, cotangent), strict=True))

    def _add(self, built: _Built, ports: Sequence[Port], ys: list[Any], given: list[Any], stop: list[Any]) -> None:
        sources: dict[Any, Any] = {}
        for port in ports:
            for h, spot in enumerate(self._spots[port].halves or (self._spots[port],)):
                sources |= {(port, h, j): source for j, source in enumerate(spot.sources)}
        made = dict(
            zip(sources, gradients(self._opened.copy.graph, ys, list(sources.values()), given, stop), strict=True)
        )
        for port in ports:
            spots = self._spots[port].halves or (self._spots[port],)
            if port.kind == "weight":
                names = dict.fromkeys(piece.variable for piece in spots[0].pieces)
                parts = {name: made[port, 0, j] for j, name in enumerate(names)}
                built.found |= {(port, name): g for name, g in parts.items() if g is not None}
                continue
            halves = [joined(s, [made[port, h, j] for j in range(len(s.sources))]) for h, s in enumerate(spots)]
            present = [half for half in halves if half is not None]
            if present:
                built.found[port] = tf.add_n(present) if len(present) > 1 else present[0]

    def _keepable(self, built: _Built, added: set[Any]) -> list[Any] | None:
        """Return the forward tensors that the backward pass reads; None if it needs some that cannot be fed."""
        graph, own = self._opened.copy.graph, {tensor.ref() for tensor in built.given.values()}
        read: dict[Any, Any] = {}
        for op in added:
            read |= {tensor.ref(): tensor for tensor in op.inputs if tensor.op not in added and tensor.ref() not in own}
        boundaries = list(read.values())
        plain = all(t.dtype not in _VARIANTS and not t.dtype._is_ref_dtype and graph.is_feedable(t) for t in boundaries)
        inside = any(op._get_control_flow_context() is not None for op in added)
        return boundaries if plain and not inside else None

    def _row(self, built: _Built, cotangents: Mapping[Port, Array]) -> dict[Any, Array]:
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

    def _stacked(self, port: Port, built: _Built, rows: Sequence[Mapping[Any, Array]]) -> Array | None:
        if port.kind != "weight":
            return np.stack([row[port] for row in rows]) if port in built.found else None
        names = list(dict.fromkeys(piece.variable for piece in self._spots[port].pieces))
        if not any((port, name) in built.found for name in names):
            return None
        whole = {
            name: np.stack([row[port, name] for row in rows])
            if (port, name) in built.found
            else np.zeros((len(rows), *self._held(port)[name].shape), self._held(port)[name].dtype)
            for name in names
        }
        return block(self._spots[port].pieces, whole)

    def __enter__(self) -> Pullback:
        return self

    def __exit__(self, *exc: object) -> None:
        self._forward = {}


def _boundary(spot: Spot) -> tuple[Any, ...]:
    return spot.boundary.tensors if spot.boundary is not None else (spot.value,)
