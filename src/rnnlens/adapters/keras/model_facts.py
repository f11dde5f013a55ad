"""Facts of a model that need no run: layers and roles, loss, optimizer, names of inputs and outputs, versions."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..protocol import ModelFacts, Role, Submodule
from .dialect import Dialect, dialect_of
from .discover import locate_layers
from .inputs import output_names

_RELUS = ("relu", "relu6")
_DROPOUTS = ("Dropout", "AlphaDropout", "GaussianDropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D")


def facts(model: Any) -> ModelFacts:
    """Return layers and roles, names of inputs and outputs, loss, optimizer, clipping and loss scale of a model."""
    layers = locate_layers(model).layers()
    outer, optimizer = optimizers(model)
    return ModelFacts(
        submodules={n: Submodule(_roles(la), str(getattr(la, "compute_dtype", ""))) for n, la in layers.items()},
        inputs=_names(model, "input_names", "inputs"),
        outputs=output_names(model) or _names(model, "output_names", "outputs"),
        loss=getattr(model, "loss", None),
        optimizer="" if optimizer is None else type(optimizer).__name__,
        clipping=_clipping(optimizer),
        clips_lookups_apart=dialect_of(model).engine.name == "tensorflow",
        loss_scale=1.0 if optimizer is outer else _scale(outer),
    )


def reduction(model: Any, loss: Any) -> str | None:
    """Return how a loss reduces the values of samples.

    Returns None if it is unknown or if the parts of a loss differ. A compiled loss and a loss given by name are
    averaged unless their ``reduction`` is another.
    """
    compiled = loss is None
    given = getattr(model, "loss", None) if compiled else loss
    parts = list(given.values()) if isinstance(given, dict) else given if isinstance(given, list | tuple) else [given]
    found = set()
    for part in parts:
        mean = "sum_over_batch_size" if compiled or isinstance(part, str) else None
        says = getattr(part, "reduction", None) or mean
        if part is not None:
            found.add("sum_over_batch_size" if says == "auto" else says)
    return found.pop() if len(found) == 1 else None


def _roles(layer: Any) -> frozenset[Role]:
    keras = dialect_of(layer)
    roles: dict[Role, bool] = {
        "embedding": isinstance(layer, keras.layers.Embedding),
        "dropout": isinstance(layer, tuple(getattr(keras.layers, name) for name in _DROPOUTS)),
        "relu": _is_relu(keras, layer),
    }
    return frozenset(role for role, has_role in roles.items() if has_role)


def _is_relu(keras: Dialect, layer: Any) -> bool:
    """Return whether a layer's activation is ReLU or ReLU6; a leaky ReLU is not counted."""
    if isinstance(layer, keras.layers.ReLU):
        return not layer.negative_slope
    # Read the instance's attribute, not a property of a user's class, which may run any code.
    activation = vars(layer.cell if isinstance(layer, keras.layers.RNN) else layer).get("activation")
    return getattr(activation, "__name__", "") in _RELUS


def _names(model: Any, names: str, tensors: str) -> tuple[str, ...]:
    """Return the names of a model's inputs or outputs; () if it has none."""
    listed = getattr(model, names, None)
    if listed is None:
        listed = [getattr(t, "name", str(i)) for i, t in enumerate(getattr(model, tensors, None) or ())]
    return tuple(map(str, listed)) if isinstance(listed, list | tuple) else ()


def optimizers(model: Any) -> tuple[Any, Any]:
    """Return a model's optimizer, and the one inside it if it is a LossScaleOptimizer of mixed precision."""
    outer = getattr(model, "optimizer", None)
    return outer, getattr(outer, "inner_optimizer", outer)


def _clipping(optimizer: Any) -> tuple[str, float] | None:
    thresholds = {kind: getattr(optimizer, kind, None) for kind in ("clipvalue", "clipnorm", "global_clipnorm")}
    return next(((kind, float(threshold)) for kind, threshold in thresholds.items() if threshold), None)


def _scale(optimizer: Any) -> float:
    """Return the present loss scale of a ``LossScaleOptimizer``; the initial one before its first step."""
    scale = getattr(optimizer, "dynamic_scale", None) if getattr(optimizer, "built", False) else None
    return float(np.asarray(scale)) if scale is not None else float(getattr(optimizer, "initial_scale", 1.0))


def provenance(model: Any) -> Mapping[str, str]:
    """Return framework, engine, dtypes of computation and weights, and device, as plain strings."""
    keras = dialect_of(model)
    engine = keras.engine.name
    version = getattr(importlib.import_module(engine), "__version__", "unknown")
    values = [keras.ops.convert_to_tensor(variable) for variable in (model.variables[:1] if model.built else ())]
    device = str(getattr(values[0], "device", "cpu")) if values else "cpu"
    return {
        "framework": f"{keras.name} {keras.version}",
        "engine": f"{engine} {version}",
        "dtype": _coarsest(keras, model),
        "weights_dtype": str(getattr(model, "variable_dtype", keras.floatx())),
        "device": device or "cpu",
        "adapter": "keras",
    }


def _coarsest(keras: Dialect, model: Any) -> str:
    """Return the least precise dtype in which the model or one of its layers computes."""
    own = str(getattr(model, "compute_dtype", keras.floatx()))
    declared = {own, *(str(getattr(layer, "compute_dtype", own)) for layer in model._flatten_layers())}
    computed = {keras.computed(dtype) if dtype.startswith("float") else dtype for dtype in declared}
    return next((dtype for dtype in ("bfloat16", "float16", "float32") if dtype in computed), own)
