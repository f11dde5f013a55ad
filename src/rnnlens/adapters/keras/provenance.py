"""Where numbers come from: versions, engine, dtype, device."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import keras


def provenance(model: Any) -> Mapping[str, str]:
    """Plain strings: framework, engine, compute dtype, dtype of the weights, device of the first of them."""
    engine = keras.backend.backend()
    version = getattr(importlib.import_module(engine), "__version__", "unknown")
    values = [variable.value for variable in model.variables[:1]]
    device = str(getattr(values[0], "device", "cpu")) if values else "cpu"
    return {
        "framework": f"keras {keras.__version__}",
        "engine": f"{engine} {version}",
        "dtype": str(getattr(model, "compute_dtype", keras.config.floatx())),
        "weights_dtype": str(getattr(model, "variable_dtype", keras.config.floatx())),
        "device": device or "cpu",
        "adapter": "keras",
    }
