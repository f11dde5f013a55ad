"""The Keras adapter: Keras 3 on TensorFlow, JAX and torch, and ``tf_keras``, each in its own :mod:`.dialect`.

``discover`` finds the recurrent layers, ``hooks`` listens to them, ``run`` runs the model once without leaving a trace,
``capture`` and ``pullback`` turn what was heard into the arrays of the contract; what differs between the engines is in
:mod:`rnnlens.autodiff`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ...errors import FileError, message
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
from .losses import combination, loss_of, mixes_samples, outputs_of
from .model_facts import facts, provenance, reduction
from .pullback import KerasPullback, differentiate
from .reference_run import place, reference_run
from .variants import between, chain, nudged, reinitialised
from .weights import layer_weights


class KerasAdapter(Adapter):
    """The adapter of ``keras.Model`` and ``keras.layers.Layer``, or of those of the package that ``name`` says."""

    def __init__(self, name: str = "keras") -> None:
        self.name = name

    @property
    def engine(self) -> str:
        """What this Keras runs on in this process."""
        return dialect(self.name).engine.name

    def owns(self, model: Any) -> bool:
        """Whether it is a layer of this Keras, as every model is."""
        return isinstance(model, dialect(self.name).Layer)

    def facts(self, model: Any) -> ModelFacts:
        """Layers, names of inputs and outputs, optimizer."""
        return facts(model)

    def reduction(self, model: Any, loss: Any) -> str | None:
        """Of the compiled loss, or of the one given."""
        return reduction(model, loss)

    def describe(self, model: Any) -> list[LayerInfo]:
        """Recurrent layers in the order of the graph, or of the attributes of a subclassed model."""
        return discover.describe(model)

    def capture(self, model: Any, batch: Batch, request: CaptureRequest) -> Capture:
        """One forward pass and, with a loss, one backward pass."""
        return capture(model, batch, request)

    def load_weights(self, model: Any, path: Path, *, unsafe: bool = False) -> None:
        """Read a weights file, which holds numbers only."""
        del unsafe
        try:
            model.load_weights(path)
        except Exception as error:  # whatever Keras says, the user meets one error
            raise FileError(message("These weights do not fit the model.", got=f"{path}: {error}")) from error

    def reinitialised(self, model: Any, seed: int) -> Any:
        """A copy with fresh weights."""
        return reinitialised(model, seed)

    def provenance(self, model: Any) -> Mapping[str, str]:
        """Framework, engine, dtype, device: plain strings."""
        return provenance(model)

    def pullback(
        self, model: Any, batch: Batch, of: Sequence[Port], wrt: Sequence[Port], cut: Sequence[Port] = ()
    ) -> Pullback:
        """Run the model once, and keep what is needed to differentiate any ``of`` with respect to any ``wrt``."""
        return with_composed(
            lambda ends, starts: KerasPullback(model, batch, ends, starts, cut), of, wrt, put_together(model)
        )

    def outputs_of(self, model: Any, batch: Batch) -> Outputs:
        """What the model returns for one batch."""
        return outputs_of(model, batch)

    def loss_of(self, model: Any, batch: Batch, outputs: Outputs) -> tuple[float, list[Array | None]]:
        """The loss of outputs that are at hand, and its gradient at each of them."""
        return loss_of(model, batch, outputs)

    def combination(self, model: Any, batch: Batch) -> str | None:
        """How losses of batches make up that of the data set, where that is known."""
        return combination(model, batch)

    def mixes_samples(self, model: Any, training: bool) -> str | None:
        """The layer that uses statistics of the batch it is in, if there is one."""
        return mixes_samples(model, training)

    def chain(self, model: Any, *, training: bool) -> list[ChainLink] | None:
        """The layers of a model that is one plain chain of well-known ones."""
        return chain(model, training=training)

    def subnetwork(
        self, model: Any, of: Port, wrt: Port
    ) -> Callable[[Array], tuple[Array, Callable[[Array], list[Array]]]] | None:
        """The layers of a chain from one output to another, run by themselves."""
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
        """The user's own model, run and differentiated as it stands."""
        return reference_run(model, batch, cotangents, gradients=gradients, regularised=regularised)

    def place(self, model: Any, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Which variable a weight of ours is, by name."""
        return place(model, layer, direction, key)

    def weights(self, model: Any) -> Mapping[str, LayerWeights]:
        """All layers that have weights, by node name; the halves of a bidirectional layer under its name."""
        found = discover.places(model)
        sites: dict[str, dict[str, Any]] = {}
        layers: dict[str, Any] = {}
        for site in found.sites:
            sites.setdefault(site.name, {})[site.direction] = site.layer
            layers[site.name] = site.owner
        inner = {name for name in found.plain if any(other.startswith(name + "/") for other in found.names())}
        layers.update({name: layer for name, layer in found.plain.items() if name not in inner | layers.keys()})
        return {
            name: layer_weights(layer, sites.get(name, {}), copy_of) for name, layer in layers.items() if layer.weights
        }

    def differentiate(
        self, function: Callable[..., Any], arrays: Sequence[Array], model: Any
    ) -> tuple[Array, Callable[[Array], list[Array]]]:
        """Value of a user's function of tensors, and its pull-back."""
        return differentiate(function, arrays, dialect_of(model))

    def perturbed_port(self, model: Any, port: Port, size: float) -> AbstractContextManager[bool]:
        """Move a weight or the output of a layer for the length of a block; False where that cannot be done."""
        return nudged(model, port, size)


adapter = KerasAdapter()
legacy = KerasAdapter("tf_keras")
