"""Faults planted in rnnlens that self-checks pass: the certificate must fail for each, and pass without them.

Each fault is data: what to replace by what, on which model, and which call shows it. The reference run of the model by
torch happens in the same call, and shares no code with the faulty part.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from torch.nn import functional

import rnnlens as rl

ADAPTER, VERBS = "rnnlens.adapters.torch", "rnnlens.verbs"
assemble, capture, fused, pullback, record = (
    importlib.import_module(f"{ADAPTER}.{name}") for name in ("assemble", "capture", "fused", "pullback", "record")
)
pull, recurrent_layers, jacobian, calls, datasets, weights = (
    importlib.import_module(f"{VERBS}.{name}")
    for name in (
        "differentiation.pull",
        "recurrent_layers",
        "jacobian",
        "traced_layers",
        "traced_layers",
        "weights",
    )
)


class Stack(nn.Module):
    """A bidirectional LSTM, two GRUs of one size, a Dense layer at every step; for 5 samples, 5 steps, 4 features."""

    def __init__(self):
        super().__init__()
        self.both = nn.LSTM(4, 3, bidirectional=True, batch_first=True)
        self.lower, self.upper = nn.GRU(6, 6, batch_first=True), nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.upper(self.lower(self.both(x)[0])[0])[0])


class Plain(nn.Module):
    """An LSTM with learned initial states, dropout, and a Dense layer at every step."""

    def __init__(self):
        super().__init__()
        self.rnn, self.drop, self.head = nn.LSTM(4, 4, batch_first=True), nn.Dropout(0.5), nn.Linear(4, 4)
        self.start = nn.Parameter(torch.randn(2, 1, 1, 4))

    def forward(self, x):
        h, c = (s.expand(1, x.shape[0], 4).contiguous() for s in self.start)
        return self.head(self.drop(self.rnn(x, (h, c))[0]))


class Loop(nn.Module):
    """An LSTM cell in a loop, with a Dense layer at every step."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], 4)
        outputs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outputs.append(self.head(h))
        return torch.stack(outputs, 1)


class Two(nn.Module):
    """An LSTM that reads a weighted difference of two inputs of one shape."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, a, b):
        return self.head(self.rnn(a - 0.5 * b)[0])


MODELS = {"stack": Stack, "plain": Plain, "loop": Loop, "two": Two}


def model_and_data(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(5, 5, 4)
    return model, (x, torch.randn(5, 5, 4)) if name == "two" else x, torch.randn(5, 5, 4)


def loss(output, target):
    return functional.mse_loss(output, target)


CALLS: dict[str, Callable[..., Any]] = {
    "trace": lambda m, x, y: rl.trace(m, x, y, loss=loss),
    "weights": lambda m, x, y: rl.weights(m, x, y, loss=loss),
    "weights by time": lambda m, x, y: rl.weights(m, x, y, loss=loss, by_time=True),
    "of weights": lambda m, x, y: rl.gradients(m, x, y, loss=loss),
    "of inputs": lambda m, x, y: rl.gradients(m, x, y, loss=loss, wrt=["input", "weights"]),
    "of two inputs": lambda m, x, y: rl.gradients(m, x, y, loss=loss, wrt=["input[0]", "input[1]"]),
    "of states": lambda m, x, y: rl.gradients(m, x, y, loss=loss, wrt="rnn.hidden"),
    "of outputs": lambda m, x, y: rl.gradients(
        m, x, of="output", at={"time": 3}, reduce="sum", wrt=["input", "weights"]
    ),
    "by sample": lambda m, x, y: rl.gradients(m, x, y, loss=loss, wrt=["input", "weights"], per_sample=True),
    "jacobian": lambda m, x, y: rl.jacobian(m, x),
    "sum of jacobian": lambda m, x, y: rl.jacobian(m, x, measure="sum"),
    "mean jacobian": lambda m, x, y: rl.jacobian(m, x, across="mean"),
}


@dataclass(frozen=True)
class Fault:
    """One fault: ``plant(original)`` replaces ``owner.name`` while ``call`` runs on ``model``."""

    description: str
    owner: Any
    name: str
    plant: Callable[[Any], Any]
    model: str = "plain"
    call: str = "trace"


def change_result(change):
    """Return a fault that changes the result of the original function."""
    return lambda original: lambda *args, **kwargs: change(original(*args, **kwargs))


def change_argument(index, change):
    """Return a fault that changes one argument of the original function."""

    def plant(original):
        def faulty(*args, **kwargs):
            return original(*(change(a) if i == index else a for i, a in enumerate(args)), **kwargs)

        return faulty

    return plant


def change_variable(name, change):
    """Return a fault that changes one variable of every labelled layer."""

    def edit_layer(layer):
        if name in layer.variables:
            layer.variables[name] = layer.variables[name].copy(data=change(layer.variables[name].values))
        return layer

    return change_result(edit_layer)


def reorder_label(name, order):
    """Return a fault that reorders the labels of one axis."""

    def edit_layer(layer):
        if name in layer.coords:
            layer.coords[name] = layer.coords[name].copy(data=layer.coords[name].values[::order])
        return layer

    return change_result(edit_layer)


def change_captured(change):
    """Return a fault that changes all gradients of the captured backward pass."""

    def plant(original):
        def faulty(*args, **options):
            gradient = original(*args, **options)
            return lambda tap: None if gradient(tap) is None else change(gradient(tap))

        return faulty

    return plant


def scale_both_sides(factor):
    """Return a fault that scales the gradients at outputs, final states and weights of recurrent layers alike."""

    def plant(original):
        def faulty(self):
            calls = original(self)
            for call in calls:
                call.output_grad = call.output_grad * factor
                call.final_state_grad = tuple(g * factor for g in call.final_state_grad)
                call.weight_grads = {key: g * factor for key, g in call.weight_grads.items()}
            return calls

        return faulty

    return plant


def zero_first_steps(steps):
    """Return a function that sets the first steps of a sequence to zero."""

    def change(values):
        values = np.array(values)
        values[:, :steps] = 0
        return values

    return change


def double_last_step(values):
    values = np.array(values)
    values[:, -1] *= 2
    return values


def scale_argument(index):
    return change_argument(index, lambda t: t * 1.01)


def flip(axis):
    return lambda values: np.flip(values, axis).copy()


def swap_axes(values):
    return np.swapaxes(values, 0, 1).copy()


def change_grads(change):
    """Return a fault that changes the gradients at every port."""
    return change_result(lambda grads: {port: None if g is None else change(g) for port, g in grads.items()})


def exchange_inputs(grads):
    """Exchange the gradients of the two inputs of a model."""
    inputs = sorted((p for p in grads if p.kind == "input"), key=lambda p: p.index)
    return {**grads, inputs[0]: grads[inputs[1]], inputs[1]: grads[inputs[0]]}


def change_adjoint(**changes):
    """Return a fault that changes fields of a sweep's result."""
    return change_result(lambda a: replace(a, **{name: change(getattr(a, name)) for name, change in changes.items()}))


def repeat_last_step(original):
    """Return a fault that adds the gradient at the last output also at the last state."""

    def faulty(self, states, upper_grads):
        output = upper_grads.get(self.port("output"))
        extra = {0: torch.zeros_like(torch.as_tensor(np.asarray(self.run.states[0])))}
        if output is not None:
            extra[0][:, -1] = torch.as_tensor(np.asarray(output))[:, -1]
        return original(self, {**states, **extra}, upper_grads)

    return faulty


def exchange_layers(original):
    def faulty(runs):
        return [
            ["upper" if n == "lower" else "lower" if n == "upper" else n for n in names] for names in original(runs)
        ]

    return faulty


def exchange_directions(reorder):
    def plant(original):
        return lambda by_direction, space: original(reorder(by_direction), space)

    return plant


def scale_weights(factor, slots=()):
    """Return a fault that scales the weights of layers in the captured run and in the replay."""

    def plant(original):
        def faulty(self, owner, slot, weight):
            leaf = original(self, owner, slot, weight)
            if slots and not slot.startswith(slots):
                return leaf
            return (leaf.detach() * factor).requires_grad_()

        return faulty

    return plant


def force_training(original):
    return lambda model, batch, **options: original(model, replace(batch, training=True), **options)


def change_loss(change):
    """Return a fault that changes the captured loss."""
    return change_result(lambda value: None if value is None else change(value))


def reverse_gates(original):
    def faulty(grads, cells, **kwargs):
        entries = original(grads, cells, **kwargs)
        for key, entry in entries.items():
            if "gate" in entry.dims:
                entries[key] = entry._replace(values=np.flip(entry.values, entry.dims.index("gate")).copy())
        return entries

    return faulty


def change_weights(change):
    def plant(original):
        def faulty(*args, **kwargs):
            return {key: e._replace(values=change(e.values, e.dims)) for key, e in original(*args, **kwargs).items()}

        return faulty

    return plant


def apply_along(dim, change):
    return lambda values, dims: change(values, dims.index(dim)) if dim in dims else values


def change_jacobian(change):
    return change_result(lambda array: array.copy(data=np.ascontiguousarray(change(array.values))))


_TRACE, _WEIGHTS, _JACOBIAN = (datasets, "labelled_layer"), (weights, "label_cell"), (jacobian, "execute")
FAULTS = [
    # The captured run.
    Fault("input 1 % larger", capture, "call_model", scale_argument(1)),
    Fault("input shifted", capture, "call_model", change_argument(1, lambda x: x + 0.01)),
    Fault("input backwards", capture, "call_model", change_argument(1, lambda x: x.flip(1))),
    Fault("samples in another order", capture, "call_model", change_argument(1, lambda x: x.flip(0))),
    Fault("samples taken for steps", capture, "call_model", change_argument(1, lambda x: x.transpose(0, 1))),
    Fault("features in another order", capture, "call_model", change_argument(1, lambda x: x.flip(2))),
    Fault(
        "last step left out",
        capture,
        "call_model",
        change_argument(1, lambda x: torch.cat([x[:, :-1], 0 * x[:, -1:]], 1)),
    ),
    Fault("inputs in another order", capture, "call_model", change_argument(1, lambda x: (x[1], x[0])), "two"),
    Fault("second input lost", capture, "call_model", change_argument(1, lambda x: (x[0], 0 * x[1])), "two"),
    Fault("input rounded to half", capture, "call_model", change_argument(1, lambda x: x.half().float())),
    Fault("output 1 % larger", capture, "call_model", change_result(lambda o: o * 1.01)),
    Fault("output cut off", capture, "call_model", change_result(lambda o: o * 0.5 + 0.5 * o.detach())),
    Fault(
        "path of one step lost",
        capture,
        "call_model",
        change_result(lambda o: torch.cat([o[:, :1].detach(), o[:, 1:]], 1)),
    ),
    Fault("training mode", capture, "forward_pass", force_training),
    Fault("weights 1 % larger", record.CallRecorder, "weight_substitute", scale_weights(1.01), "stack"),
    Fault(
        "recurrent weights 1 % larger",
        record.CallRecorder,
        "weight_substitute",
        scale_weights(1.01, ("weight_hh",)),
        "stack",
    ),
    Fault("biases left out", record.CallRecorder, "weight_substitute", scale_weights(0.0, ("bias",)), "stack"),
    Fault("initial states left out", fused, "_initial_states", change_result(lambda s: tuple(0 * t for t in s))),
    Fault("initial states exchanged", fused, "_initial_states", change_result(lambda s: (s[1], s[0]))),
    # The loss and its captured gradients.
    Fault("loss doubled", capture, "evaluate", change_loss(lambda v: 2 * v)),
    Fault("loss 1 % larger", capture, "evaluate", change_loss(lambda v: 1.01 * v)),
    Fault("loss half detached", capture, "evaluate", change_loss(lambda v: 0.5 * v + 0.5 * v.detach())),
    Fault("loss squared", capture, "evaluate", change_loss(lambda v: v * v)),
    Fault("loss negated", capture, "evaluate", change_loss(lambda v: -v)),
    Fault("loss of a loop halved", capture, "evaluate", change_loss(lambda v: v / 2), "loop"),
    Fault("captured gradients 1 % larger", capture, "_gradients", change_captured(lambda g: g * 1.01)),
    Fault("gradients of the wrong sign", capture, "_gradients", change_captured(lambda g: -g), "stack"),
    Fault("gradients of a loop doubled", capture, "_gradients", change_captured(lambda g: 2 * g), "loop"),
    Fault("both sides 1 % larger", assemble.Assembler, "calls", scale_both_sides(1.01), "stack"),
    Fault("both sides halved", assemble.Assembler, "calls", scale_both_sides(0.5), "loop"),
    # The sweep.
    Fault("sweep: input gradient 1 % larger", calls, "sweep", change_adjoint(input_grad=lambda g: g * 1.01)),
    Fault("sweep: input gradient lost", calls, "sweep", change_adjoint(input_grad=lambda g: g * 0), "stack"),
    Fault(
        "sweep: input gradient late",
        calls,
        "sweep",
        change_adjoint(input_grad=lambda g: g[:, [-1, 0, 1, 2, 3]]),
        "stack",
    ),
    Fault(
        "sweep: initial gradient lost",
        calls,
        "sweep",
        change_adjoint(initial_state_grad=lambda s: tuple(0 * g for g in s)),
    ),
    Fault("sweep: initial gradients exchanged", calls, "sweep", change_adjoint(initial_state_grad=lambda s: s[::-1])),
    # Labels.
    Fault("names of layers exchanged", assemble, "node_names", exchange_layers, "stack"),
    Fault("directions exchanged", datasets, "join_directions", exchange_directions(lambda h: h[::-1]), "stack"),
    Fault("label: directions", *_TRACE, reorder_label("direction", -1), "stack"),
    Fault("label: gates", *_TRACE, reorder_label("gate", -1), "stack"),
    Fault("label: states", *_TRACE, reorder_label("state", -1)),
    Fault("gate gradient 1 % larger", *_TRACE, change_variable("gate_grad", lambda v: v * 1.01)),
    Fault("gate gradient: samples for steps", *_TRACE, change_variable("gate_grad", swap_axes)),
    Fault("gate gradient backwards", *_TRACE, change_variable("gate_grad", flip(1))),
    Fault("gate gradient: units", *_TRACE, change_variable("gate_grad", flip(3)), "stack"),
    Fault("gate gradient: gates", *_TRACE, change_variable("gate_grad", flip(2))),
    Fault("gate gradient: last step twice", *_TRACE, change_variable("gate_grad", double_last_step)),
    Fault("gate gradient: first step lost", *_TRACE, change_variable("gate_grad", zero_first_steps(1)), "loop"),
    Fault("hidden: one step late", *_TRACE, change_variable("hidden", lambda v: np.roll(v, 1, axis=1))),
    Fault("hidden: another sample's", *_TRACE, change_variable("hidden", flip(0)), "stack"),
    Fault("input: samples for steps", *_TRACE, change_variable("input", swap_axes)),
    Fault("input: features", *_TRACE, change_variable("input", flip(2)), "stack"),
    Fault("input gradient: samples for steps", *_TRACE, change_variable("input_grad", swap_axes)),
    Fault("input gradient 1 % larger", *_TRACE, change_variable("input_grad", lambda v: v * 1.01), "loop"),
    Fault("input gradient: last step twice", *_TRACE, change_variable("input_grad", double_last_step), "stack"),
    Fault("initial gradient doubled", *_TRACE, change_variable("initial_state_grad", lambda v: 2 * v)),
    # Gradients of weights.
    Fault("weights: gates", *_WEIGHTS, reverse_gates, "stack", "weights"),
    Fault("weights: units", *_WEIGHTS, change_weights(apply_along("unit", np.flip)), "stack", "weights"),
    Fault("weights: directions", *_WEIGHTS, change_weights(apply_along("direction", np.flip)), "stack", "weights"),
    Fault("gradients of weights 1 % larger", *_WEIGHTS, change_weights(lambda v, d: v * 1.01), "plain", "weights"),
    Fault("weights: rows", *_WEIGHTS, change_weights(apply_along("feature", np.flip)), "plain", "weights"),
    Fault("weights by time: gates", *_WEIGHTS, reverse_gates, "plain", "weights by time"),
    Fault("weights: loss doubled", capture, "evaluate", change_loss(lambda v: 2 * v), "stack", "weights"),
    # Gradients by pull-back.
    Fault(
        "pull-back 1 % larger", pullback.TorchPullback, "pull", change_grads(lambda g: g * 1.01), "plain", "of inputs"
    ),
    Fault(
        "pull-back of weights", pullback.TorchPullback, "pull", change_grads(lambda g: g * 0.5), "stack", "of weights"
    ),
    Fault(
        "pull-back backwards", pullback.TorchPullback, "pull", change_grads(lambda g: g.flip(1)), "stack", "of inputs"
    ),
    Fault("pull-back: inputs", pullback.TorchPullback, "pull", change_result(exchange_inputs), "two", "of two inputs"),
    Fault("pull-back of outputs", pullback.TorchPullback, "pull", change_grads(lambda g: -g), "plain", "of outputs"),
    Fault(
        "pull-back by sample", pullback.TorchPullback, "pull", change_grads(lambda g: g * 1.01), "plain", "by sample"
    ),
    Fault("pull-back: another input", capture, "call_model", scale_argument(1), "plain", "of inputs"),
    Fault("pull-back: another loss", capture, "evaluate", change_loss(lambda v: 2 * v), "stack", "of weights"),
    Fault(
        "pull-back: halves stacked twice",
        pull,
        "stack_first_cotangents",
        change_result(lambda g: 2 * g),
        "plain",
        "of inputs",
    ),
    Fault("states: last step twice", recurrent_layers.ReplayedCall, "sweep", repeat_last_step, "plain", "of states"),
    Fault(
        "states: sweep 1 % larger",
        recurrent_layers,
        "sweep",
        change_adjoint(gate_grad=lambda g: g * 1.01),
        "plain",
        "of states",
    ),
    # The time Jacobian.
    Fault("jacobian 1 % larger", *_JACOBIAN, change_jacobian(lambda v: v * 1.01), "plain", "jacobian"),
    Fault("jacobian: output steps", *_JACOBIAN, change_jacobian(flip(1)), "plain", "jacobian"),
    Fault("jacobian: input steps", *_JACOBIAN, change_jacobian(flip(3)), "plain", "jacobian"),
    Fault("jacobian: units", *_JACOBIAN, change_jacobian(flip(2)), "stack", "jacobian"),
    Fault("jacobian: features", *_JACOBIAN, change_jacobian(flip(4)), "stack", "jacobian"),
    Fault("jacobian: samples", *_JACOBIAN, change_jacobian(flip(0)), "plain", "jacobian"),
    Fault("jacobian: times transposed", *_JACOBIAN, change_jacobian(lambda v: v.swapaxes(1, 3)), "plain", "jacobian"),
    Fault("jacobian of a loop", *_JACOBIAN, change_jacobian(lambda v: v * 0.99), "loop", "jacobian"),
    Fault("sum of a jacobian", *_JACOBIAN, change_jacobian(lambda v: v * 1.01), "plain", "sum of jacobian"),
    Fault("mean of jacobians", *_JACOBIAN, change_jacobian(flip(0)), "plain", "mean jacobian"),
]


def certificate_of(result):
    """Return (sentence of the certificate, whether the self-checks passed)."""
    if isinstance(result, xr.DataArray):
        return result.attrs["certificate"], result.attrs.get("replay_residual", 0.0) < 1e-4
    return result.certificate.sentence, all(check.ok for check in result._self_checks)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.description)
def test_noticed(fault, monkeypatch):
    model, x, y = model_and_data(fault.model)
    monkeypatch.setattr(fault.owner, fault.name, fault.plant(getattr(fault.owner, fault.name)))
    with warnings.catch_warnings(), rl.options(certify="always"):
        warnings.simplefilter("ignore", rl.errors.SelfCheckWarning)
        sentence, passed = certificate_of(CALLS[fault.call](model, x, y))
    assert passed, "the self-checks notice it by themselves"
    assert sentence.startswith("NOT certified"), sentence


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("call", CALLS)
def test_nothing_noticed_without_a_fault(call, model):
    if (call == "of two inputs") != (model == "two") or (call == "of states" and model in ("stack", "loop")):
        return
    arguments = model_and_data(model)
    with rl.options(certify="always"):
        if "jacobian" in call and model == "two":
            return
        sentence, passed = certificate_of(CALLS[call](*arguments))
    assert passed
    assert sentence.startswith("certified against torch"), sentence


def test_how_many():
    assert len({fault.description for fault in FAULTS}) == len(FAULTS)
    assert len(FAULTS) >= 60
    print(f"{len(FAULTS)} faults are planted on torch")
