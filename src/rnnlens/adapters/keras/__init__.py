"""The Keras adapter: Keras 3 on TensorFlow, JAX and torch, and ``tf_keras``, each in its own :mod:`.dialect`.

``discover`` finds the recurrent layers, ``hooks`` records tensors at them, and ``run`` runs the model once and restores
it. ``capture`` and ``pullback`` convert the recorded tensors to the arrays of the contract. Differences between the
engines are in :mod:`rnnlens.autodiff`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ...errors import FileError
from ...typing import Array
from ..protocol import (
    Adapter,
    Batch,
    Capture,
    CaptureRequest,
    ChainLink,
    Cotangents,
    LayerInfo,
    LayerWeights,
    ModelFacts,
    Outputs,
    Port,
    Pullback,
    ReferenceRun,
    WeightLocation,
)
from ..shared.registered_cells import with_composed
from . import discover
from .boundaries import put_together
from .capture import capture, copy_of
from .dialect import dialect, dialect_of
from .losses import combination, ignores_weight_zero, loss_of, mixes_samples, outputs_of
from .model_facts import facts, provenance, reduction
from .pullback import KerasPullback, differentiate
from .reference_run import coarsest_dtype, place, reference_run
from .variants import between, chain, perturbed_port, reinitialised
from .weights import layer_weights


class KerasAdapter(Adapter):
    """Adapter of the models and layers of one Keras package: Keras 3 by default, ``tf_keras`` by ``name``."""

    def __init__(self, name: str = "keras") -> None:
        self.name = name

    @property
    def engine(self) -> str:
        """Name of the engine on which this Keras computes in this process, such as ``"jax"``."""
        return dialect(self.name).engine.name

    def owns(self, model: Any) -> bool:
        """Return whether ``model`` is a layer or model of this Keras package that does not build a session's graph."""
        in_graphs = any(base.__module__.endswith("base_layer_v1") for base in type(model).__mro__)
        return isinstance(model, dialect(self.name).Layer) and not in_graphs

    def facts(self, model: Any) -> ModelFacts:
        """Return layers and roles, names of inputs and outputs, loss and optimizer of a model, without running it."""
        return facts(model)

    def reduction(self, model: Any, loss: Any) -> str | None:
        """Return how a loss reduces the values of all samples to one number; ``loss=None`` means the compiled loss."""
        return reduction(model, loss)

    def describe(self, model: Any) -> list[LayerInfo]:
        """Return the recurrent layers, in the order of the graph or of a subclassed model's attributes."""
        return discover.describe(model)

    def capture(self, model: Any, batch: Batch, request: CaptureRequest) -> Capture:
        """Run one forward pass and, if gradients are requested, one backward pass, and record the requested tensors."""
        return capture(model, batch, request)

    def load_weights(self, model: Any, path: Path, *, unsafe: bool = False) -> None:
        """Load a Keras weights file into the model.

        ``unsafe`` is ignored, because such a file contains no code. Raises FileError if the file does not fit.
        """
        del unsafe
        try:
            model.load_weights(path)
        except Exception as error:  # Keras raises many types of errors; users get one
            raise FileError("The shapes of these weights do not match the model.", got=f"{path}: {error}") from error

    def reinitialised(self, model: Any, seed: int) -> Any:
        """Return a copy of the model with freshly drawn weights."""
        return reinitialised(model, seed)

    def provenance(self, model: Any) -> Mapping[str, str]:
        """Return framework, engine, dtypes and device as plain strings."""
        return provenance(model)

    def pullback(
        self, model: Any, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> Pullback:
        """Run the model once and return a pullback from any port of ``of`` to any port of ``wrt``.

        No gradient flows through the ports of ``cut``.
        """
        return with_composed(
            lambda ends, starts: KerasPullback(model, batch, ends, starts, cut), of, wrt, put_together(model)
        )

    def outputs_of(self, model: Any, batch: Batch) -> Outputs:
        """Return the outputs of the model for one batch, with their masks."""
        return outputs_of(model, batch)

    def loss_of(self, model: Any, batch: Batch, outputs: Outputs) -> tuple[float, list[Array | None]]:
        """Return the loss of outputs computed before, and its gradient with respect to each of them.

        A gradient is None if the loss does not depend on that output.
        """
        return loss_of(model, batch, outputs)

    def combination(self, model: Any, batch: Batch) -> str | None:
        """Return how the losses of batches combine to that of the data set: ``"mean"``, ``"sum"`` or None (unknown)."""
        return combination(model, batch)

    def ignores_weight_zero(self, model: Any, batch: Batch) -> bool:
        """Return whether a sample of weight zero adds nothing to the loss, and a mean still divides by all samples."""
        return ignores_weight_zero(model, batch)

    def mixes_samples(self, model: Any, training: bool) -> str | None:
        """Return the name of a layer that uses batch statistics, ``"?"`` if unknown, or None if there is none."""
        return mixes_samples(model, training)

    def chain(self, model: Any, *, training: bool) -> list[ChainLink] | None:
        """Return the layers of a model that is a chain of well-known layers, or None for any other model."""
        return chain(model, training=training)

    def subnetwork(
        self, model: Any, of: Port, wrt: Port
    ) -> Callable[[Array], tuple[Array, Callable[[Array], list[Array]]]] | None:
        """Return a function that runs and differentiates the layers between two tensors of a chain.

        Returns None if the model is no chain or a port is not an output of one of its layers.
        """
        return between(model, of, wrt)

    def reference_run(
        self,
        model: Any,
        batch: Batch,
        cotangents: Cotangents | None = None,
        *,
        gradients: bool = True,
        regularised: bool = False,
    ) -> ReferenceRun:
        """Run and differentiate the user's own model without hooks."""
        return reference_run(model, batch, cotangents, gradients=gradients, regularised=regularised)

    def coarsest_dtype(self, model: Any, batch: Batch) -> str:
        """Return the coarsest float dtype of the operations of the user's unmodified model, loss included."""
        return coarsest_dtype(model, batch)

    def place(self, model: Any, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Return the Keras variable that contains the weight ``key`` of a layer, or None if there is no single one."""
        return place(model, layer, direction, key)

    def weights(self, model: Any) -> Mapping[str, LayerWeights]:
        """Return copies of the weights of all layers by node name.

        Both directions of a bidirectional layer are under its name. A layer whose variables are all another layer's
        has no entry: one variable, one name.
        """
        found = discover.places(model)
        sites: dict[str, dict[str, Any]] = {}
        layers: dict[str, Any] = {}
        for site in found.sites:
            sites.setdefault(site.name, {})[site.direction] = site.layer
            layers[site.name] = site.owner
        inner = {name for name in found.plain if any(other.startswith(name + "/") for other in found.names())}
        layers.update({name: layer for name, layer in found.plain.items() if name not in inner | layers.keys()})
        loops = {site.name for site in found.sites if site.is_loop}
        seen: set[int] = set()
        kept: list[str] = []
        for name in sorted(layers, key=loops.__contains__):  # a layer before a loop over its cell
            own = {id(variable) for variable in layers[name].weights}
            kept += [name] if own - seen else []
            seen |= own
        return {name: layer_weights(layers[name], sites.get(name, {}), copy_of) for name in layers if name in kept}

    def differentiate(
        self, function: Callable[..., Any], arrays: Sequence[Array], model: Any
    ) -> tuple[Array, Callable[[Array], list[Array]]]:
        """Return the value of a user's function of tensors, and a function that pulls its cotangents back."""
        return differentiate(function, arrays, dialect_of(model))

    def perturbed_port(self, model: Any, port: Port, size: float) -> AbstractContextManager[bool]:
        """Perturb a weight or a layer's output within the block; yield False if that is not possible."""
        return perturbed_port(model, port, size)


adapter = KerasAdapter()
legacy = KerasAdapter("tf_keras")
