"""Small traces with every kind of variable that a file must restore."""

from __future__ import annotations

import numpy as np
import pytest

from rnnlens.adapters.protocol import LayerInfo
from rnnlens.results.checks import Check
from rnnlens.results.schema import layer_dataset
from rnnlens.results.trace import Trace

PROVENANCE = {"framework": "keras 3.15.1", "engine": "jax 0.10.2", "dtype": "float32"}


def normal(*shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def lstm_arrays(samples=3, time=4, unit=2, feature=5):
    step = (samples, time, unit)
    gates = (samples, time, 4, unit)
    return {
        "input": normal(samples, time, feature),
        "mask": np.arange(samples * time).reshape(samples, time) % 3 != 0,
        "hidden": normal(*step),
        "cell": normal(*step, seed=1),
        "gates": normal(*gates, dtype="float16"),
        "output": normal(samples, unit),
        "hidden_grad": normal(*step, dtype="float64"),
        "initial_state_grad": normal(samples, 2, unit),
    }


def lstm_dataset(name="lstm", **sizes):
    info = LayerInfo(name, "LSTM", "lstm", sizes.get("unit", 2), "forward", return_sequences=False)
    return layer_dataset(lstm_arrays(**sizes), info=info, provenance=PROVENANCE)


def gru_dataset(name="gru"):
    info = LayerInfo(name, "Bidirectional", "gru", 3, "bidirectional", return_sequences=True)
    arrays = {"hidden": normal(3, 4, 2, 3), "gates": normal(3, 4, 2, 3, 3), "mask": np.ones((3, 4), bool)}
    return layer_dataset(arrays, info=info, provenance=PROVENANCE)


@pytest.fixture
def trace():
    nan = lstm_dataset("lstm#1")
    nan["hidden_grad"].values[0, 0, 0] = np.nan
    nan["hidden_grad"].values[0, 0, 1] = -np.inf
    return Trace(
        {"zulu/gru": gru_dataset("zulu/gru"), "lstm#0": lstm_dataset("lstm#0"), "lstm#1": nan},
        loss=float("nan"),
        quantities=["hidden", "hidden_grad"],
        provenance=PROVENANCE,
        notes=["the loss is NaN"],
        checks=[Check("replay", "lstm#0", 3e-8, 1e-5), Check("replay", "zulu/gru", float("nan"), 1e-5)],
    )
