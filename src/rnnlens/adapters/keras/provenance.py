"""Where numbers come from: versions, engine, dtype, device."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from .dialect import Dialect, dialect_of


def provenance(model: Any) -> Mapping[str, str]:
    """Plain strings: framework, engine, compute dtype, dtype of the weights, device of the first of them."""
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
    """The compute dtype with the fewest digits among those of the model and its layers."""
    own = str(getattr(model, "compute_dtype", keras.floatx()))
    dtypes = {own, *(str(getattr(layer, "compute_dtype", own)) for layer in model._flatten_layers())}
    return next((dtype for dtype in ("bfloat16", "float16") if dtype in dtypes), own)
