"""Differentiation of the copy: ``tf.gradients`` between any tensors, and one run kept for many cotangents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from rnnlens.adapters.protocol import Batch, Port, Run, refuse_misfits
from rnnlens.errors import InputError, UnsupportedError, raised_by, short_repr
from rnnlens.typing import Array

from .boundaries import PortTensors, ResolvedPort, combine_gradients
from .graph_copy import to_dense
from .inputs import convert_run_errors, feed_of_batch, names_of_inputs
from .losses import loss_cache_key
from .open_net import open_net
from .public import Net


def add_gradients(
    graph: Any,
    ys: Sequence[Any],
    xs: Sequence[Any],
    cotangents: Sequence[Any] | None = None,
    stop_tensors: Sequence[Any] = (),
) -> list[Any]:
    """Add ``tf.gradients`` to the copy: a dense tensor for each of ``xs``, None where there is no path."""
    differentiable = [i for i, x in enumerate(xs) if x.dtype.base_dtype.is_floating or x.dtype == tf.resource]
    dense_gradients: list[Any] = [None] * len(xs)
    sources = [xs[i] for i in differentiable]
    if not sources or not any(y.dtype.base_dtype.is_floating for y in ys):
        return dense_gradients
    with graph.as_default():
        try:
            raw_gradients = tf.gradients(
                list(ys), sources, grad_ys=cotangents, stop_gradients=list(stop_tensors) or None
            )
        except LookupError as error:
            raise UnsupportedError(
                "An operation on the way has no gradient in TensorFlow.",
                got=str(error).removesuffix("."),
                hint="tf.stop_gradient around it, or another operation for the same",
            ) from error
        for i, gradient in zip(differentiable, raw_gradients, strict=True):
            dense_gradients[i] = to_dense(gradient)
    return dense_gradients


def add_pullback(
    graph: Any,
    ys: Sequence[Any],
    resolved_ports: Mapping[Any, ResolvedPort],
    cotangents: Sequence[Any] | None = None,
    stop_tensors: Sequence[Any] = (),
) -> dict[Any, Any]:
    """Add gradients of ``ys`` to the copy, combined for each of ``resolved_ports`` to which there is a path.

    Each port at which differentiation stops elsewhere needs a pass of its own.
    """
    unrestricted = {key: resolved for key, resolved in resolved_ports.items() if not resolved.stop_tensors}
    combined: dict[Any, Any] = {}
    for group in (
        unrestricted,
        *({key: resolved} for key, resolved in resolved_ports.items() if resolved.stop_tensors),
    ):
        direction_ports = {
            (key, i): direction_port
            for key, resolved in group.items()
            for i, direction_port in enumerate(resolved.direction_ports or (resolved,))
        }
        sources = [source for direction_port in direction_ports.values() for source in direction_port.sources]
        constants = [*stop_tensors, *(tensor for resolved in group.values() for tensor in resolved.stop_tensors)]
        raw_gradients = iter(add_gradients(graph, ys, sources, cotangents, constants))
        parts = {
            key: list(islice(raw_gradients, len(direction_port.sources)))
            for key, direction_port in direction_ports.items()
        }
        for key in group:
            direction_gradients = [
                combine_gradients(direction_port, parts[part_key])
                for part_key, direction_port in direction_ports.items()
                if part_key[0] == key
            ]
            present_gradients = [gradient for gradient in direction_gradients if gradient is not None]
            combined[key] = (
                tf.add_n(present_gradients)
                if len(present_gradients) > 1
                else present_gradients[0]
                if present_gradients
                else None
            )
    return {key: gradient for key, gradient in combined.items() if gradient is not None}


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
            raise InputError("The function returned no tensor.", got=short_repr(value), expected=expected)
        result = np.asarray(session.run(value))

    def pull(cotangent: Array) -> list[Array]:
        with graph.as_default(), tf.Session(graph=graph) as session:
            cotangent_tensor = tf.constant(np.asarray(cotangent, dtype=value.dtype.as_numpy_dtype))
            tensor_gradients = add_gradients(graph, [value], tensors, [cotangent_tensor])
            values = session.run([t * 0 if g is None else g for t, g in zip(tensors, tensor_gradients, strict=True)])
        return [np.asarray(gradient) for gradient in values]

    return result, pull


_VARIANTS = (tf.resource, tf.variant, tf.string)


class _BackwardPass:
    """Backward pass in the copy from the ports ``of``: placeholders of their cotangents, and gradients by port."""

    def __init__(
        self,
        graph: Any,
        resolved_ports: Mapping[Port, ResolvedPort],
        of: Sequence[Port],
        wrt: Sequence[Port],
        stop_tensors: Any,
    ) -> None:
        old_operations = set(graph.get_operations())
        values = {port: resolved_ports[port].value for port in of}
        with graph.as_default(), tf.name_scope("rnnlens/pullback"):
            self.cotangents = {port: tf.placeholder(t.dtype.base_dtype, t.shape) for port, t in values.items()}
            sources = {port: resolved_ports[port] for port in wrt}
            self.gradients = add_pullback(
                graph, list(values.values()), sources, list(self.cotangents.values()), stop_tensors
            )
        new_operations = set(graph.get_operations()) - old_operations
        cotangent_refs = {tensor.ref() for tensor in self.cotangents.values()}
        read_tensors: dict[Any, Any] = {}
        for op in new_operations:
            read_tensors |= {
                tensor.ref(): tensor
                for tensor in op.inputs
                if tensor.op not in new_operations and tensor.ref() not in cotangent_refs
            }
        forward_tensors = list(read_tensors.values())
        is_feedable = all(
            t.dtype not in _VARIANTS and not t.dtype._is_ref_dtype and graph.is_feedable(t) for t in forward_tensors
        )
        in_control_flow = any(op._get_control_flow_context() is not None for op in new_operations)
        #: Forward tensors that the backward pass reads, kept for further cotangents; None if some cannot be fed.
        self.forward_tensors = forward_tensors if is_feedable and not in_control_flow else None


class GraphPullback(Run):
    """Vector-Jacobian products between ports of a graph."""

    def __init__(
        self, net: Net, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> None:
        self._net, self._opened = net, open_net(net, batch.seed)
        self._of, self._wrt = tuple(of), tuple(wrt)
        self._key = (
            "pullback",
            self._of,
            self._wrt,
            tuple(cut),
            loss_cache_key(batch),
            tuple(names_of_inputs(net, batch.x)),
        )
        self._feed = feed_of_batch(self._opened, batch)
        port_tensors = PortTensors(self._opened, batch)
        self._resolved_ports = self._opened.copy.build_once(
            self._key, lambda: {port: port_tensors(port) for port in (*of, *wrt, *cut)}
        )
        cut_ports = [self._resolved_ports[port] for port in cut]
        self._stop_tensors = [
            t
            for resolved in cut_ports
            for t in (resolved.boundary.tensors if resolved.boundary is not None else (resolved.value,))
        ]
        self.output_count = len(self._opened.outputs)
        fetches = {port: self._resolved_ports[port].value for port in (*of, *wrt)}
        self._variables = self._opened.variable_values(list(fetches.values()), self._feed)
        with convert_run_errors(net):
            values = self._opened.copy.run(fetches, self._feed, self._variables)
        #: Values of the kept forward tensors, by id of the ``_BackwardPass``.
        self._forward_values: dict[int, dict[Any, Array]] = {}
        self.values: Mapping[Port, Array] = {port: np.asarray(value) for port, value in values.items()}

    def pull(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """Pull cotangents back to the ``wrt`` ports; see :meth:`Run.pull`."""
        refuse_misfits(cotangents, self._of, self.values)
        cotangent_ports, copy = tuple(cotangents), self._opened.copy
        backward_pass = copy.build_once(
            (self._key, cotangent_ports),
            lambda: _BackwardPass(copy.graph, self._resolved_ports, cotangent_ports, self._wrt, self._stop_tensors),
        )
        count = len(next(iter(cotangents.values())))
        rows = [self._pull_row(backward_pass, {port: c[k] for port, c in cotangents.items()}) for k in range(count)]
        gradients = {port: np.stack([row[port] for row in rows]) for port in backward_pass.gradients}
        return {port: gradients.get(port) for port in self._wrt}

    def _pull_row(self, backward_pass: _BackwardPass, cotangents: Mapping[Port, Array]) -> dict[Any, Array]:
        cotangent_feed = {backward_pass.cotangents[port]: np.asarray(c) for port, c in cotangents.items()}
        copy = self._opened.copy
        with convert_run_errors(self._net):
            if backward_pass.forward_tensors is None:
                variables = self._opened.variable_values(list(backward_pass.gradients.values()), self._feed)
                return copy.run(backward_pass.gradients, {**self._feed, **cotangent_feed}, self._variables | variables)
            if id(backward_pass) not in self._forward_values:
                variables = self._opened.variable_values(backward_pass.forward_tensors, self._feed)
                forward_values = copy.run(
                    dict(enumerate(backward_pass.forward_tensors)), self._feed, self._variables | variables
                )
                self._forward_values[id(backward_pass)] = {
                    tensor: forward_values[i] for i, tensor in enumerate(backward_pass.forward_tensors)
                }
            return copy.run(backward_pass.gradients, {**self._forward_values[id(backward_pass)], **cotangent_feed}, {})

    def __exit__(self, *exc: object) -> None:
        self._forward_values = {}
