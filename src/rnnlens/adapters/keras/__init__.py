"""The Keras adapter: Keras 3 on TensorFlow, JAX and torch, and ``tf_keras``, each in its own :mod:`.dialect`.

``discover`` finds the recurrent layers, ``hooks`` records tensors at them, and ``run`` runs the model once and restores
it. ``capture`` and ``pullback`` convert the recorded tensors to the arrays of the contract. Differences between the
engines are in :mod:`rnnlens.autodiff`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import FileError
from ...typing import Array
from ..protocol import Adapter, Batch, Capture, Cotangents, LayerWeights, Outputs, Port, ReferenceRun, Run, Taps
from ..shared.registered_cells import run_with_composed
from . import capture as captures
from . import discover, losses, variants
from . import reference_run as reference
from .dialect import dialect, dialect_of
from .inputs import by_key
from .model_facts import KerasFacts
from .pullback import KerasPullback, differentiate, registered_weight_finder
from .weights import layer_weights


def run_model(model: Any, batch: Batch, taps: Taps) -> Run:
    """Run a model once: see :meth:`rnnlens.adapters.protocol.Adapter.run`."""
    if taps.record == "ports":
        if taps.cotangents and not any(port.kind == "weight" for port in taps.wrt):
            return KerasPullback(model, batch, taps.of, taps.wrt, cotangents=taps.cotangents)

        def pull_back(of: Sequence[Port], wrt: Sequence[Port]) -> Run:
            return KerasPullback(model, batch, of, wrt, taps.cut)

        return run_with_composed(pull_back, taps.of, taps.wrt, registered_weight_finder(model))
    return _UntouchedRun(model, batch, taps) if taps.record == "nothing" else _RecordedRun(model, batch, taps)


class _RecordedRun(Run):
    """Run whose outputs, or calls with their gradients, are recorded as soon as they are read."""

    def __init__(self, model: Any, batch: Batch, taps: Taps) -> None:
        self._model, self._batch, self._taps = model, batch, taps
        if taps.record != "outputs" or taps.needs_loss:
            self.capture: Capture = captures.capture(model, batch, taps)

    @property
    def returned(self) -> Any:
        """Outputs as the model returned them, as arrays."""
        if self._taps.record != "outputs":
            return self.capture.outputs
        keras = dialect_of(self._model)
        return by_key(keras.tree.map_structure(keras.value_of, self.outputs.tree["outputs"]))

    @cached_property
    def outputs(self) -> Outputs:  # type: ignore[override]
        """Outputs of the model, with their masks."""
        return losses.outputs_of(self._model, self._batch)


class _UntouchedRun(Run):
    """The user's model as it stands, differentiated by its engine alone, for a certificate."""

    def __init__(self, model: Any, batch: Batch, taps: Taps) -> None:
        self._model, self._batch, self._taps = model, batch, taps

    def reference(self, cotangents: Cotangents | None = None) -> ReferenceRun:
        """Run the model and differentiate its loss, or its outputs by their cotangents."""
        taps = self._taps
        return reference.reference_run(
            self._model, self._batch, cotangents, gradients=taps.gradients, regularised=taps.regularised
        )

    def coarsest_dtype(self) -> str:
        """Run the model; return the coarsest float dtype of its operations."""
        return reference.coarsest_dtype(self._model, self._batch)


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
        keras = dialect(self.name)
        return isinstance(model, keras.Layer) and not keras.builds_graph(model)

    #: Functions that are methods of the contract as they stand: see :class:`Adapter`.
    run = staticmethod(run_model)
    facts = KerasFacts
    describe = staticmethod(discover.describe)
    fingerprint = staticmethod(discover.fingerprint)
    loss_of = staticmethod(losses.loss_of)
    perturbed_port = staticmethod(variants.perturbed_port)
    reinitialised = staticmethod(variants.reinitialised)

    def load_weights(self, model: Any, path: Path, *, unsafe: bool = False) -> None:
        """Load a Keras weights file, which contains no code, or raise FileError; ``unsafe`` is ignored."""
        del unsafe
        try:
            model.load_weights(path)
        except Exception as error:  # Keras raises many types of errors; users get one
            raise FileError("The shapes of these weights do not match the model.", got=f"{path}: {error}") from error

    def weights(self, model: Any) -> Mapping[str, LayerWeights]:
        """Return copies of the weights of all layers by node name.

        Both directions of a bidirectional layer are under its name. A layer whose variables are all another layer's
        has no entry: one variable, one name. A layer made of layers has those variables that none of them has, and so
        has the model.
        """
        model_layers = discover.locate_layers(model)
        layers_by_direction: dict[str, dict[str, Any]] = {}
        layers: dict[str, Any] = {}
        for site in model_layers.sites:
            layers_by_direction.setdefault(site.name, {})[site.direction] = site.layer
            layers[site.name] = site.owner
        container_names = {
            name
            for name in model_layers.other_layers
            if any(other_name.startswith(name + "/") for other_name in model_layers.names())
        }
        layers.update(
            {
                name: layer
                for name, layer in model_layers.other_layers.items()
                if name not in container_names | layers.keys()
            }
        )
        loop_names = {site.name for site in model_layers.sites if site.is_loop}
        seen_ids: set[int] = set()
        kept_names: list[str] = []
        for name in sorted(layers, key=loop_names.__contains__):  # a layer before a loop over its cell
            own_ids = {id(variable) for variable in dialect_of(model).weights(layers[name])}
            kept_names += [name] if own_ids - seen_ids else []
            seen_ids |= own_ids
        weights_by_layer = {
            name: layer_weights(layers[name], layers_by_direction.get(name, {}))
            for name in layers
            if name in kept_names
        }
        for name in (
            *sorted(container_names - weights_by_layer.keys(), key=lambda path: -path.count("/")),
            *model_layers.root,
        ):
            holder = model_layers.holder(name)
            if any(
                id(v) not in seen_ids for v in dialect_of(model).weights(holder)
            ):  # beside those of the layers in it
                weights_by_layer[name] = layer_weights(holder, {}, excluded_ids=seen_ids)
                seen_ids |= set(map(id, dialect_of(model).weights(holder)))
        return weights_by_layer

    def differentiate(
        self, function: Callable[..., Any], arrays: Sequence[Array], model: Any
    ) -> tuple[Array, Callable[[Array], list[Array]]]:
        """Return the value of a user's function of tensors, and a function that pulls its cotangents back."""
        return differentiate(function, arrays, dialect_of(model))


adapter = KerasAdapter()
legacy = KerasAdapter("tf_keras")
