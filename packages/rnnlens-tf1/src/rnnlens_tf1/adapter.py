"""Adapters of TensorFlow-1 graphs: sessions, placeholders, while loops of control flow v1 and v2."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow.compat.v1 as tf

from rnnlens.adapters.protocol import Adapter, Batch, LayerInfo, LayerWeights, ModelFacts, Port, Run, Taps
from rnnlens.layout import Layout
from rnnlens.typing import Array

from . import model_facts
from .boundaries import find_layouts
from .model_facts import net_of
from .open_net import open_net
from .public import Net
from .pullback import differentiate
from .run import run
from .weights import layer_weights, perturbed_port


class TfGraphAdapter(Adapter):
    """Adapter of TensorFlow-1 graphs; see :class:`rnnlens.adapters.protocol.Adapter`. One object serves all graphs."""

    name = "tf_graph"

    @property
    def engine(self) -> str:
        """Name of the autodiff engine."""
        return "tensorflow"

    def owns(self, model: Any) -> bool:
        """Return whether the model is a net of ``rl.tf1.graph`` or a session."""
        return isinstance(model, Net | tf.Session)

    def describe(self, model: Any) -> list[LayerInfo]:
        """Return one ``LayerInfo`` per recurrent layer of the graph, named by its scope."""
        return model_facts.describe(net_of(model))

    def fingerprint(self, model: Any) -> Hashable:
        """Return the version of the graph, which every added operation changes, and its copy, which settings change."""
        opened = open_net(net_of(model))
        return (id(opened.net.session), opened.net.graph.version, opened.net.keras, id(opened.copy))

    def facts(self, model: Any, batch: Batch | None = None) -> ModelFacts:
        """Return layers, inputs, outputs and weights of the graph, and why a gradient is missing."""
        return model_facts.GraphFacts(model, batch)

    def weights(self, model: Any) -> Mapping[str, LayerWeights]:
        """Return the values of all variables that the outputs or the loss depend on, by layer."""
        return layer_weights(open_net(net_of(model)))

    def run(self, model: Any, batch: Batch, taps: Taps) -> Run:
        """Run a copy of the graph, and record what ``taps`` say."""
        return run(net_of(model), batch, taps)

    def differentiate(
        self, function: Callable[..., Any], arrays: Sequence[Array], model: Any
    ) -> tuple[Array, Callable[[Array], list[Array]]]:
        """Return the value of a TensorFlow function, and its vector-Jacobian product, computed in a separate graph."""
        return differentiate(function, arrays)

    def perturbed_port(self, model: Any, port: Port, size: float) -> AbstractContextManager[bool]:
        """Perturb a variable in the copy of the graph, not in the user's session, while the context is active."""
        return perturbed_port(net_of(model), port, size)


class TimeMajorGraphAdapter(TfGraphAdapter):
    """Adapter of TensorFlow-1 graphs whose inputs are (time, sample, ...)."""

    samples_first = False

    def layouts(self, model: Any, batch: Batch, ports: Sequence[Port]) -> Mapping[Port, Layout]:
        """Find the axis names of inputs and outputs by running the graph on one more step, then on one more sample."""
        return find_layouts(model, batch, ports)


class KerasGraphAdapter(TfGraphAdapter):
    """Adapter of tf_keras models that were built with eager execution disabled."""

    def owns(self, model: Any) -> bool:
        """Return whether the model is a tf_keras model that builds graphs (``base_layer_v1``)."""
        return any(base.__module__.endswith("base_layer_v1") for base in type(model).__mro__)


adapter = TfGraphAdapter()
time_major = TimeMajorGraphAdapter()
keras = KerasGraphAdapter()
