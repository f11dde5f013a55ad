"""Adapters of TensorFlow-1 graphs: sessions, placeholders, while loops of control flow v1 and v2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow.compat.v1 as tf

from ...layout import Layout
from ...typing import Array
from ..protocol import (
    Adapter,
    Batch,
    Capture,
    CaptureRequest,
    Cotangents,
    LayerInfo,
    LayerWeights,
    ModelFacts,
    Obstacle,
    Port,
    Pullback,
    ReferenceRun,
    WeightLocation,
)
from . import keras_v1, model_facts
from .boundaries import find_layouts
from .capture import capture
from .missing_gradient import find_obstacle
from .open_net import open_net
from .public import Net
from .pullback import GraphPullback, differentiate
from .reference_run import prepare_reference_run
from .weights import layer_weights, perturbed_port, weight_location


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

    def facts(self, model: Any) -> ModelFacts:
        """Return the layers, inputs and outputs of the graph."""
        return model_facts.facts(net_of(model))

    def weights(self, model: Any) -> Mapping[str, LayerWeights]:
        """Return the values of all variables that the outputs or the loss depend on, by layer."""
        return layer_weights(open_net(net_of(model)))

    def provenance(self, model: Any) -> Mapping[str, str]:
        """Return TensorFlow's version, the kind of while loops, the dtype and the device."""
        return model_facts.provenance(net_of(model))

    def weight_location(self, model: Any, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Find the variable, and the block of rows and columns in it, that is a layer's weight."""
        return weight_location(open_net(net_of(model)), layer, direction, key)

    def has_own_loss(self, model: Any) -> bool:
        """Return whether the net has a loss that needs no targets from the batch."""
        return net_of(model).has_own_loss

    def capture(self, model: Any, batch: Batch, request: CaptureRequest) -> Capture:
        """Record the loops, the loss and the gradients in one run of a copy of the graph."""
        return capture(net_of(model), batch, request)

    def pullback(
        self, model: Any, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> Pullback:
        """Run a copy of the graph once, and keep it to pull cotangents of ports ``of`` back to ports ``wrt``."""
        return GraphPullback(net_of(model), batch, of, wrt, cut)

    def reference_run(
        self,
        model: Any,
        batch: Batch,
        cotangents: Cotangents | None = None,
        *,
        gradients: bool = True,
        regularised: bool = False,
    ) -> ReferenceRun:
        """Run an unmodified copy of the graph, for certificates; penalties of its loss are always included."""
        return prepare_reference_run(net_of(model), batch, cotangents, gradients=gradients)()

    def prepared_reference_run(self, model: Any, batch: Batch, *, gradients: bool = True) -> Callable[[], ReferenceRun]:
        """Build the unmodified copy of the graph, and return a function that runs it."""
        return prepare_reference_run(net_of(model), batch, gradients=gradients)

    def differentiate(
        self, function: Callable[..., Any], arrays: Sequence[Array], model: Any
    ) -> tuple[Array, Callable[[Array], list[Array]]]:
        """Return the value of a TensorFlow function, and its vector-Jacobian product, computed in a separate graph."""
        return differentiate(function, arrays)

    def find_obstacle(self, model: Any, batch: Batch, of: Sequence[Port], wrt: Port) -> Obstacle | None:
        """Find in the graph, without running it, why no gradient reaches ``wrt``."""
        return find_obstacle(open_net(net_of(model), batch.seed), batch, of, wrt)

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

    def reduction(self, model: Any, loss: Any) -> str | None:
        """Return the ``reduction`` attribute of the loss as text; None if it has none."""
        return super().reduction(model, model.loss if loss is None else loss)


def net_of(model: Any) -> Net:
    """Return the ``Net`` of a model: the net itself, or one made of a session or of a tf_keras model."""
    if isinstance(model, Net):
        return model
    if isinstance(model, tf.Session):
        return Net(model, {}, {})
    return keras_v1.net_of(model)


adapter = TfGraphAdapter()
time_major = TimeMajorGraphAdapter()
keras = KerasGraphAdapter()
