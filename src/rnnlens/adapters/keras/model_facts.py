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
    training_optimizer, optimizer = optimizers(model)
    return ModelFacts(
        submodules={n: Submodule(_roles(la), str(getattr(la, "compute_dtype", ""))) for n, la in layers.items()},
        inputs=_names(model, "input_names", "inputs"),
        outputs=output_names(model) or _names(model, "output_names", "outputs"),
        loss=getattr(model, "loss", None),
        optimizer="" if optimizer is None else type(optimizer).__name__,
        clipping=_clipping(optimizer),
        clips_lookups_apart=dialect_of(model).engine.name == "tensorflow",
        loss_scale=1.0 if optimizer is training_optimizer else _loss_scale(training_optimizer),
    )


def reduction(model: Any, loss: Any) -> str | None:
    """Return how a loss reduces the values of samples.

    Returns None if it is unknown or if the parts of a loss differ. A compiled loss and a loss given by name are
    averaged unless their ``reduction`` is another.
    """
    is_compiled = loss is None
    user_loss = getattr(model, "loss", None) if is_compiled else loss
    losses = (
        list(user_loss.values())
        if isinstance(user_loss, dict)
        else user_loss
        if isinstance(user_loss, list | tuple)
        else [user_loss]
    )
    reductions = set()
    for part_loss in losses:
        default = "sum_over_batch_size" if is_compiled or isinstance(part_loss, str) else None
        declared = getattr(part_loss, "reduction", None) or default
        if part_loss is not None:
            reductions.add("sum_over_batch_size" if declared == "auto" else declared)
    return reductions.pop() if len(reductions) == 1 else None


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
    entries = getattr(model, names, None)
    if entries is None:
        entries = [getattr(t, "name", str(i)) for i, t in enumerate(getattr(model, tensors, None) or ())]
    return tuple(map(str, entries)) if isinstance(entries, list | tuple) else ()


def optimizers(model: Any) -> tuple[Any, Any]:
    """Return a model's optimizer, and the one inside it if it is a LossScaleOptimizer of mixed precision."""
    optimizer = getattr(model, "optimizer", None)
    return optimizer, getattr(optimizer, "inner_optimizer", optimizer)


def _clipping(optimizer: Any) -> tuple[str, float] | None:
    thresholds = {kind: getattr(optimizer, kind, None) for kind in ("clipvalue", "clipnorm", "global_clipnorm")}
    return next(((kind, float(threshold)) for kind, threshold in thresholds.items() if threshold), None)


def _loss_scale(optimizer: Any) -> float:
    """Return the present loss scale of a ``LossScaleOptimizer``; the initial one before its first step."""
    scale = getattr(optimizer, "dynamic_scale", None) if getattr(optimizer, "built", False) else None
    return float(np.asarray(scale)) if scale is not None else float(getattr(optimizer, "initial_scale", 1.0))


def provenance(model: Any) -> Mapping[str, str]:
    """Return framework, engine, dtypes of computation and weights, and device, as plain strings."""
    keras = dialect_of(model)
    engine = keras.engine.name
    version = getattr(importlib.import_module(engine), "__version__", "unknown")
    values = [keras.ops.convert_to_tensor(variable) for variable in (keras.weights(model)[:1] if model.built else ())]
    device = str(getattr(values[0], "device", "cpu")) if values else "cpu"
    return {
        "framework": f"{keras.name} {keras.version}",
        "engine": f"{engine} {version}",
        "dtype": _coarsest_dtype(keras, model),
        "weights_dtype": str(getattr(model, "variable_dtype", keras.floatx())),
        "device": device or "cpu",
        "adapter": "keras",
    }


def _coarsest_dtype(keras: Dialect, model: Any) -> str:
    """Return the least precise dtype in which the model or one of its layers computes."""
    model_dtype = str(getattr(model, "compute_dtype", keras.floatx()))
    declared = {model_dtype, *(str(getattr(layer, "compute_dtype", model_dtype)) for layer in model._flatten_layers())}
    computed = {keras.computation_dtype(dtype) if dtype.startswith("float") else dtype for dtype in declared}
    return next((dtype for dtype in ("bfloat16", "float16", "float32") if dtype in computed), model_dtype)
