"""Faults planted in rnnlens that self-checks pass: the certificate must fail for each, on every engine of Keras."""

from __future__ import annotations

import importlib
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import xarray as xr
from keras import layers

import rnnlens as rl

pytestmark = pytest.mark.one_engine

ADAPTER, VERBS = "rnnlens.adapters.keras", "rnnlens.verbs"
capture, hooks, pullback, run = (
    importlib.import_module(f"{ADAPTER}.{name}") for name in ("capture", "hooks", "pullback", "run")
)
jacobian, traced_layers, weights = (
    importlib.import_module(f"{VERBS}.{name}") for name in ("jacobian", "traced_layers", "weights")
)


def stack():
    """Return a bidirectional LSTM, a GRU and a Dense layer at each step."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5, 4)),
            layers.Bidirectional(layers.LSTM(3, return_sequences=True), name="both"),
            layers.GRU(6, return_sequences=True, name="gru"),
            layers.Dense(4, name="head"),
        ]
    )
    model.compile(loss="mse")
    return model


def twins():
    """Return two nested models, each with an LSTM of the same name and size."""
    keras.utils.set_random_seed(0)
    first, second = (
        keras.Sequential([keras.Input((5, 4)), layers.LSTM(4, return_sequences=True, name="lstm")], name=name)
        for name in ("first", "second")
    )
    inputs = keras.Input((5, 4))
    model = keras.Model(inputs, second(first(inputs)))
    model.compile(loss="mse")
    return model


MODELS = {"stack": stack, "twins": twins}
CALLS: dict[str, Callable[..., Any]] = {
    "trace": lambda m, x, y: rl.trace(m, x, y),
    "weights": lambda m, x, y: rl.weights(m, x, y),
    "gradients": lambda m, x, y: rl.gradients(m, x, y, wrt=["input", "weights"]),
    "jacobian": lambda m, x, y: rl.jacobian(m, x),
}


@dataclass(frozen=True)
class Fault:
    """One fault: ``plant(original)`` replaces ``owner.name`` while ``call`` runs on ``model``."""

    description: str
    owner: Any
    name: str
    plant: Callable[[Any], Any]
    model: str = "stack"
    call: str = "trace"


def change_result(change):
    return lambda original: lambda *args, **kwargs: change(original(*args, **kwargs))


def change_input(change):
    """Return a fault that calls the model on a changed input."""
    return lambda original: lambda model, x, training: original(model, change(x), training)


def change_loss(change):
    """Return a fault that changes the user's loss, in the capture or in the pullback only."""

    def plant(original):
        def scalar_loss(model, batch):
            loss = original.scalar_loss(model, batch)
            return lambda *args: change(loss(*args))

        return types.SimpleNamespace(scalar_loss=scalar_loss)

    return plant


def change_variable(name, change):
    def edit_layer(layer):
        if name in layer.variables:
            layer.variables[name] = layer.variables[name].copy(data=change(layer.variables[name].values))
        return layer

    return change_result(edit_layer)


def reverse_label(name):
    def edit_layer(layer):
        if name in layer.coords:
            layer.coords[name] = layer.coords[name].copy(data=layer.coords[name].values[::-1])
        return layer

    return change_result(edit_layer)


def change_grads(change):
    return change_result(
        lambda grads: {port: None if g is None else change(np.asarray(g)) for port, g in grads.items()}
    )


def reverse_gates(original):
    def faulty(grads, cells, **kwargs):
        entries = original(grads, cells, **kwargs)
        for key, entry in entries.items():
            if "gate" in entry.dims:
                entries[key] = entry._replace(values=np.flip(np.asarray(entry.values), entry.dims.index("gate")).copy())
        return entries

    return faulty


def exchange_twins(original):
    """Return a fault that exchanges the names of two layers of the same size."""

    def faulty(self, *args):
        captured = original(self, *args)
        for call in captured.calls:
            call.layer = {"first/lstm": "second/lstm", "second/lstm": "first/lstm"}.get(call.layer, call.layer)
        return captured

    return faulty


def change_jacobian(change):
    return change_result(lambda array: array.copy(data=np.ascontiguousarray(change(np.asarray(array.values)))))


_LABELS = (traced_layers, "labelled_layer")
FAULTS = [
    Fault("input 1 % larger", run, "call_model", change_input(lambda x: x * 1.01)),
    Fault("input backwards", run, "call_model", change_input(lambda x: keras.ops.flip(x, 1))),
    Fault("samples in another order", run, "call_model", change_input(lambda x: keras.ops.flip(x, 0))),
    Fault("samples for steps", run, "call_model", change_input(lambda x: keras.ops.swapaxes(x, 0, 1))),
    Fault("output 1 % larger", run, "call_model", change_result(lambda o: o * 1.01)),
    Fault(
        "output half detached", run, "call_model", change_result(lambda o: 0.5 * o + 0.5 * keras.ops.stop_gradient(o))
    ),
    Fault("loss doubled", capture, "losses", change_loss(lambda v: 2 * v)),
    Fault("loss out of date", capture, "losses", change_loss(lambda v: v + 0.25 * v * v)),
    Fault("loss half detached", capture, "losses", change_loss(lambda v: 0.5 * v + 0.5 * keras.ops.stop_gradient(v))),
    Fault("names of twins exchanged", capture._Assembly, "capture", exchange_twins, "twins"),
    Fault("label: directions", *_LABELS, reverse_label("direction")),
    Fault("label: gates", *_LABELS, reverse_label("gate")),
    Fault(
        "gate gradient: samples for steps",
        *_LABELS,
        change_variable("gate_grad", lambda v: np.swapaxes(v, 0, 1).copy()),
    ),
    Fault("hidden: one step late", *_LABELS, change_variable("hidden", lambda v: np.roll(v, 1, axis=1))),
    Fault("input gradient 1 % larger", *_LABELS, change_variable("input_grad", lambda v: v * 1.01)),
    Fault("weights: gates", weights, "label_cell", reverse_gates, "stack", "weights"),
    Fault("weights: loss doubled", capture, "losses", change_loss(lambda v: 2 * v), "stack", "weights"),
    Fault(
        "pull-back 1 % larger", pullback.KerasPullback, "pull", change_grads(lambda g: g * 1.01), "stack", "gradients"
    ),
    Fault("pull-back: loss doubled", pullback, "losses", change_loss(lambda v: 2 * v), "stack", "gradients"),
    Fault("jacobian 1 % larger", jacobian, "execute", change_jacobian(lambda v: v * 1.01), "stack", "jacobian"),
    Fault(
        "jacobian: times transposed",
        jacobian,
        "execute",
        change_jacobian(lambda v: v.swapaxes(1, 3)),
        "stack",
        "jacobian",
    ),
]


def model_and_data(name):
    rng = np.random.default_rng(0)
    return MODELS[name](), rng.normal(size=(5, 5, 4)).astype("float32"), rng.normal(size=(5, 5, 4)).astype("float32")


def certificate_of(result):
    """Return (sentence of the certificate, whether the self-checks passed)."""
    if isinstance(result, xr.DataArray):
        return result.attrs["certificate"], result.attrs.get("replay_residual", 0.0) < 1e-4
    return result.certificate.sentence, all(check.ok for check in result._self_checks)


@pytest.mark.product(keep=("output half detached", "loss out of date", "jacobian: times transposed"))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.description)
def test_noticed(fault, monkeypatch):
    model, x, y = model_and_data(fault.model)
    monkeypatch.setattr(fault.owner, fault.name, fault.plant(getattr(fault.owner, fault.name)))
    with warnings.catch_warnings(), rl.options(certify="always"):
        warnings.simplefilter("ignore", rl.errors.SelfCheckWarning)
        sentence, passed = certificate_of(CALLS[fault.call](model, x, y))
    assert passed, "the self-checks notice it by themselves"
    assert sentence.startswith("NOT certified"), sentence


@pytest.mark.compiled("jacobian-stack")
@pytest.mark.product(keep=("trace-stack", "jacobian-stack"))
@pytest.mark.parametrize(("call", "model"), [*((call, "stack") for call in CALLS), ("trace", "twins")])
def test_nothing_noticed_without_a_fault(call, model):
    with rl.options(certify="always"):
        sentence, passed = certificate_of(CALLS[call](*model_and_data(model)))
    assert passed
    assert sentence.startswith(f"certified against {keras.backend.backend()}"), sentence
