"""The Keras adapter: Keras 3 on TensorFlow, JAX and torch, and ``tf_keras``, each in its own :mod:`.dialect`.

``discover`` finds the recurrent layers, ``hooks`` records tensors at them, and ``run`` runs the model once and restores
it. ``capture`` and ``pullback`` convert the recorded tensors to the arrays of the contract. Differences between the
engines are in :mod:`rnnlens.autodiff`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import FileError
from ...typing import Array
from ..protocol import Adapter, LayerWeights
from . import discover, losses, variants
from .dialect import dialect, dialect_of
from .model_facts import KerasFacts
from .model_run import run as run_model
from .pullback import differentiate
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
