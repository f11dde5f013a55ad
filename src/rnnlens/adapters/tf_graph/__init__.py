"""TensorFlow-1 graphs: sessions, placeholders, while loops of control flow v1 and v2."""

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
from . import model_facts
from .axes import layouts
from .capture import capture
from .missing_gradient import blocked
from .opened import opened
from .public import Net
from .pullback import GraphPullback, differentiate
from .reference_run import prepared, reference_run
from .weights import listed, nudged, place_of


class TfGraphAdapter(Adapter):
    """See :class:`rnnlens.adapters.protocol.Adapter`; one object serves all graphs."""

    name = "tf_graph"

    @property
    def engine(self) -> str:
        """What computes and differentiates."""
        return "tensorflow"

    def owns(self, model: Any) -> bool:
        """A net of ``rl.tf1.graph``, or a session."""
        return isinstance(model, Net | tf.Session)

    def describe(self, model: Any) -> list[LayerInfo]:
        """The recurrences of the graph, by scope."""
        return model_facts.describe(net_of(model))

    def facts(self, model: Any) -> ModelFacts:
        """Layers, inputs and outputs."""
        return model_facts.facts(net_of(model))

    def weights(self, model: Any) -> Mapping[str, LayerWeights]:
        """All variables that outputs or loss depend on, by layer."""
        return listed(opened(net_of(model)))

    def provenance(self, model: Any) -> Mapping[str, str]:
        """TensorFlow's version, how loops are run, dtype, device."""
        return model_facts.provenance(net_of(model))

    def place(self, model: Any, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Our weights are blocks of variables."""
        return place_of(opened(net_of(model)), layer, direction, key)

    def reduction(self, model: Any, loss: Any) -> str | None:
        """A graph does not say."""
        return None

    def has_own_loss(self, model: Any) -> bool:
        """A loss of a net without targets, or with targets that are fed in every run."""
        return net_of(model).has_own_loss

    def capture(self, model: Any, batch: Batch, request: CaptureRequest) -> Capture:
        """One run of our copy."""
        return capture(net_of(model), batch, request)

    def pullback(
        self, model: Any, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> Pullback:
        """One run of our copy, and gradients added to it."""
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
        """Another copy, as it stands."""
        return reference_run(net_of(model), batch, cotangents, gradients=gradients, regularised=regularised)

    def prepared_reference_run(self, model: Any, batch: Batch, *, gradients: bool = True) -> Callable[[], ReferenceRun]:
        """The other copy, ready to run."""
        return prepared(net_of(model), batch, gradients=gradients)

    def differentiate(
        self, function: Callable[..., Any], arrays: Sequence[Array], model: Any
    ) -> tuple[Array, Callable[[Array], list[Array]]]:
        """In a graph of its own."""
        return differentiate(function, arrays)

    def find_obstacle(self, model: Any, batch: Batch, of: Sequence[Port], wrt: Port) -> Obstacle | None:
        """Read off the graph, without running it."""
        return blocked(opened(net_of(model), batch.seed), batch, of, wrt)

    def perturbed_port(self, model: Any, port: Port, size: float) -> AbstractContextManager[bool]:
        """Another value for a variable, in our copy alone."""
        return nudged(net_of(model), port, size)

    def mixes_samples(self, model: Any, training: bool) -> str | None:
        """Not known: whether a graph uses statistics of the batch depends on what its phase is fed."""
        return "?"


class TimeMajorGraphAdapter(TfGraphAdapter):
    """The same for graphs that are fed (time, sample, ...)."""

    samples_first = False

    def layouts(self, model: Any, batch: Batch, ports: Sequence[Port]) -> Mapping[Port, Layout]:
        """Found by feeding the graph one step, or one sample, more."""
        return layouts(model, batch, ports)


class KerasGraphAdapter(TfGraphAdapter):
    """The same for tf_keras models that were built with eager execution disabled."""

    def owns(self, model: Any) -> bool:
        """A model of the engine that builds graphs."""
        return any(base.__module__.endswith("base_layer_v1") for base in type(model).__mro__)

    def reduction(self, model: Any, loss: Any) -> str | None:
        """As the loss says."""
        says = getattr(model.loss if loss is None else loss, "reduction", None)
        return None if says is None else str(says)


def net_of(model: Any) -> Net:
    """The net itself, a session as one, or a tf_keras model as one."""
    if isinstance(model, Net):
        return model
    if isinstance(model, tf.Session):
        return Net(model, {}, {})
    from . import keras_v1

    return keras_v1.net_of(model)


adapter = TfGraphAdapter()
time_major = TimeMajorGraphAdapter()
keras = KerasGraphAdapter()
