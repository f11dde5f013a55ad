"""Faults planted in rnnlens that its self-checks pass: the certificate has to notice each, and nothing without them.

Each is data: what to replace by what, on which model, and which call shows it. A model is run plainly by torch in the
same call, so that the faulty part and the certificate never agree by being the same code.
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
pull, inside, jacobian, calls, datasets, weights = (
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
    """A bidirectional LSTM, two GRUs of one size, a Dense layer at every step; 5 samples, 5 steps, 4 features."""

    def __init__(self):
        super().__init__()
        self.both = nn.LSTM(4, 3, bidirectional=True, batch_first=True)
        self.lower, self.upper = nn.GRU(6, 6, batch_first=True), nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.upper(self.lower(self.both(x)[0])[0])[0])


class Plain(nn.Module):
    """One LSTM and a Dense layer at every step."""

    def __init__(self):
        super().__init__()
        self.rnn, self.drop, self.head = nn.LSTM(4, 4, batch_first=True), nn.Dropout(0.5), nn.Linear(4, 4)
        self.start = nn.Parameter(torch.randn(2, 1, 1, 4))

    def forward(self, x):
        h, c = (s.expand(1, x.shape[0], 4).contiguous() for s in self.start)
        return self.head(self.drop(self.rnn(x, (h, c))[0]))


class Loop(nn.Module):
    """An LSTM cell in a loop that fades the state a little at every step."""

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
    """Two inputs of one shape into one LSTM."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, a, b):
        return self.head(self.rnn(a - 0.5 * b)[0])


MODELS = {"stack": Stack, "plain": Plain, "loop": Loop, "two": Two}


def made(name):
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
    """``plant(original)`` in place of ``owner.name`` while ``call`` runs on ``model``."""

    what: str
    owner: Any
    name: str
    plant: Callable[[Any], Any]
    model: str = "plain"
    call: str = "trace"


def result(change):
    """What the original returns, changed."""
    return lambda original: lambda *args, **kwargs: change(original(*args, **kwargs))


def argument(index, change):
    """The original, fed another argument."""

    def plant(original):
        def fed(*args, **kwargs):
            return original(*(change(a) if i == index else a for i, a in enumerate(args)), **kwargs)

        return fed

    return plant


def variable(name, change):
    """One variable of every labelled layer, changed."""

    def changed(layer):
        if name in layer.variables:
            layer.variables[name] = layer.variables[name].copy(data=change(layer.variables[name].values))
        return layer

    return result(changed)


def label(name, order):
    """The labels of one axis in another order."""

    def changed(layer):
        if name in layer.coords:
            layer.coords[name] = layer.coords[name].copy(data=layer.coords[name].values[::order])
        return layer

    return result(changed)


def gradients_of_capture(change):
    """All that the captured backward pass brought, changed."""

    def plant(original):
        def faulty(*args, **options):
            gradient = original(*args, **options)
            return lambda tap: None if gradient(tap) is None else change(gradient(tap))

        return faulty

    return plant


def both_sides(factor):
    """What arrives at outputs and weights of recurrent layers, changed alike."""

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


def nothing_before(steps):
    """A sequence whose first steps are nothing."""

    def change(values):
        values = np.array(values)
        values[:, :steps] = 0
        return values

    return change


def doubled_end(values):
    values = np.array(values)
    values[:, -1] *= 2
    return values


def scaled(index):
    return argument(index, lambda t: t * 1.01)


def flip(axis):
    return lambda values: np.flip(values, axis).copy()


def swapped_axes(values):
    return np.swapaxes(values, 0, 1).copy()


def arrived(change):
    """Gradients at every port, changed."""
    return result(lambda found: {port: None if g is None else change(g) for port, g in found.items()})


def port_order(found):
    """Gradients of the two inputs of a model, exchanged."""
    inputs = sorted((p for p in found if p.kind == "input"), key=lambda p: p.index)
    return {**found, inputs[0]: found[inputs[1]], inputs[1]: found[inputs[0]]}


def of_adjoint(**changes):
    """A sweep's result, changed."""
    return result(lambda a: replace(a, **{name: change(getattr(a, name)) for name, change in changes.items()}))


def last_step_twice(original):
    """The gradient at the last output is counted again at the last state."""

    def faulty(self, states, came):
        output = came.get(self.port("output"))
        extra = {0: torch.zeros_like(torch.as_tensor(np.asarray(self.run.states[0])))}
        if output is not None:
            extra[0][:, -1] = torch.as_tensor(np.asarray(output))[:, -1]
        return original(self, {**states, **extra}, came)

    return faulty


def exchanged_layers(original):
    def faulty(runs):
        return [
            ["upper" if n == "lower" else "lower" if n == "upper" else n for n in names] for names in original(runs)
        ]

    return faulty


def exchanged_directions(halves_of):
    def plant(original):
        return lambda by_direction: original(halves_of(by_direction))

    return plant


def other_values(factor, slots=()):
    """Weights that layers run with, and are replayed with, are not the user's."""

    def plant(original):
        def faulty(self, owner, slot, weight):
            leaf = original(self, owner, slot, weight)
            if slots and not slot.startswith(slots):
                return leaf
            return (leaf.detach() * factor).requires_grad_()

        return faulty

    return plant


def other_mode(original):
    return lambda model, training, seed: original(model, training=True, seed=seed)


def other_loss(change):
    """The loss that is captured is not the user's."""
    return result(lambda value: None if value is None else change(value))


def other_gates(original):
    def faulty(grads, cells, **kwargs):
        found = original(grads, cells, **kwargs)
        for key, entry in found.items():
            if "gate" in entry.dims:
                found[key] = entry._replace(values=np.flip(entry.values, entry.dims.index("gate")).copy())
        return found

    return faulty


def labelled_weights(change):
    def plant(original):
        def faulty(*args, **kwargs):
            return {key: e._replace(values=change(e.values, e.dims)) for key, e in original(*args, **kwargs).items()}

        return faulty

    return plant


def along(dim, change):
    return lambda values, dims: change(values, dims.index(dim)) if dim in dims else values


def of_jacobian(change):
    return result(lambda array: array.copy(data=np.ascontiguousarray(change(array.values))))


_TRACE, _WEIGHTS, _JACOBIAN = (datasets, "labelled_layer"), (weights, "label_cell"), (jacobian, "execute")
FAULTS = [
    # The captured run is another one.
    Fault("input 1 % larger", capture, "call_model", scaled(1)),
    Fault("input shifted", capture, "call_model", argument(1, lambda x: x + 0.01)),
    Fault("input backwards", capture, "call_model", argument(1, lambda x: x.flip(1))),
    Fault("samples in another order", capture, "call_model", argument(1, lambda x: x.flip(0))),
    Fault("samples taken for steps", capture, "call_model", argument(1, lambda x: x.transpose(0, 1))),
    Fault("features in another order", capture, "call_model", argument(1, lambda x: x.flip(2))),
    Fault("last step left out", capture, "call_model", argument(1, lambda x: torch.cat([x[:, :-1], 0 * x[:, -1:]], 1))),
    Fault("inputs in another order", capture, "call_model", argument(1, lambda x: (x[1], x[0])), "two"),
    Fault("second input lost", capture, "call_model", argument(1, lambda x: (x[0], 0 * x[1])), "two"),
    Fault("input rounded to half", capture, "as_tensors", result(lambda x: x.half().float())),
    Fault("output 1 % larger", capture, "call_model", result(lambda o: o * 1.01)),
    Fault("output cut off", capture, "call_model", result(lambda o: o * 0.5 + 0.5 * o.detach())),
    Fault(
        "path of one step lost", capture, "call_model", result(lambda o: torch.cat([o[:, :1].detach(), o[:, 1:]], 1))
    ),
    Fault("training mode", capture, "borrowed_model", other_mode),
    Fault("weights 1 % larger", record.CallRecorder, "weight_substitute", other_values(1.01), "stack"),
    Fault(
        "recurrent weights 1 % larger",
        record.CallRecorder,
        "weight_substitute",
        other_values(1.01, ("weight_hh",)),
        "stack",
    ),
    Fault("biases left out", record.CallRecorder, "weight_substitute", other_values(0.0, ("bias",)), "stack"),
    Fault("initial states left out", fused, "_initial_states", result(lambda s: tuple(0 * t for t in s))),
    Fault("initial states exchanged", fused, "_initial_states", result(lambda s: (s[1], s[0]))),
    # The loss, or what it brought, is another one.
    Fault("loss doubled", capture, "evaluate", other_loss(lambda v: 2 * v)),
    Fault("loss 1 % larger", capture, "evaluate", other_loss(lambda v: 1.01 * v)),
    Fault("loss half detached", capture, "evaluate", other_loss(lambda v: 0.5 * v + 0.5 * v.detach())),
    Fault("loss squared", capture, "evaluate", other_loss(lambda v: v * v)),
    Fault("loss negated", capture, "evaluate", other_loss(lambda v: -v)),
    Fault("loss of a loop halved", capture, "evaluate", other_loss(lambda v: v / 2), "loop"),
    Fault("captured gradients 1 % larger", capture, "_gradients", gradients_of_capture(lambda g: g * 1.01)),
    Fault("gradients of the wrong sign", capture, "_gradients", gradients_of_capture(lambda g: -g), "stack"),
    Fault("gradients of a loop doubled", capture, "_gradients", gradients_of_capture(lambda g: 2 * g), "loop"),
    Fault("both sides 1 % larger", assemble.Assembler, "calls", both_sides(1.01), "stack"),
    Fault("both sides halved", assemble.Assembler, "calls", both_sides(0.5), "loop"),
    # The sweep.
    Fault("sweep: input gradient 1 % larger", calls, "sweep", of_adjoint(input_grad=lambda g: g * 1.01)),
    Fault("sweep: input gradient lost", calls, "sweep", of_adjoint(input_grad=lambda g: g * 0), "stack"),
    Fault(
        "sweep: input gradient late", calls, "sweep", of_adjoint(input_grad=lambda g: g[:, [-1, 0, 1, 2, 3]]), "stack"
    ),
    Fault(
        "sweep: initial gradient lost", calls, "sweep", of_adjoint(initial_state_grad=lambda s: tuple(0 * g for g in s))
    ),
    Fault("sweep: initial gradients exchanged", calls, "sweep", of_adjoint(initial_state_grad=lambda s: s[::-1])),
    # Labels.
    Fault("names of layers exchanged", assemble, "node_names", exchanged_layers, "stack"),
    Fault("directions exchanged", datasets, "join_directions", exchanged_directions(lambda h: h[::-1]), "stack"),
    Fault("label: directions", *_TRACE, label("direction", -1), "stack"),
    Fault("label: gates", *_TRACE, label("gate", -1), "stack"),
    Fault("label: states", *_TRACE, label("state", -1)),
    Fault("gate gradient 1 % larger", *_TRACE, variable("gate_grad", lambda v: v * 1.01)),
    Fault("gate gradient: samples for steps", *_TRACE, variable("gate_grad", swapped_axes)),
    Fault("gate gradient backwards", *_TRACE, variable("gate_grad", flip(1))),
    Fault("gate gradient: units", *_TRACE, variable("gate_grad", flip(3)), "stack"),
    Fault("gate gradient: gates", *_TRACE, variable("gate_grad", flip(2))),
    Fault("gate gradient: last step twice", *_TRACE, variable("gate_grad", doubled_end)),
    Fault("gate gradient: first step lost", *_TRACE, variable("gate_grad", nothing_before(1)), "loop"),
    Fault("hidden: one step late", *_TRACE, variable("hidden", lambda v: np.roll(v, 1, axis=1))),
    Fault("hidden: another sample's", *_TRACE, variable("hidden", flip(0)), "stack"),
    Fault("input: samples for steps", *_TRACE, variable("input", swapped_axes)),
    Fault("input: features", *_TRACE, variable("input", flip(2)), "stack"),
    Fault("input gradient: samples for steps", *_TRACE, variable("input_grad", swapped_axes)),
    Fault("input gradient 1 % larger", *_TRACE, variable("input_grad", lambda v: v * 1.01), "loop"),
    Fault("input gradient: last step twice", *_TRACE, variable("input_grad", doubled_end), "stack"),
    Fault("initial gradient doubled", *_TRACE, variable("initial_state_grad", lambda v: 2 * v)),
    # Gradients of weights.
    Fault("weights: gates", *_WEIGHTS, other_gates, "stack", "weights"),
    Fault("weights: units", *_WEIGHTS, labelled_weights(along("unit", np.flip)), "stack", "weights"),
    Fault("weights: directions", *_WEIGHTS, labelled_weights(along("direction", np.flip)), "stack", "weights"),
    Fault("gradients of weights 1 % larger", *_WEIGHTS, labelled_weights(lambda v, d: v * 1.01), "plain", "weights"),
    Fault("weights: rows", *_WEIGHTS, labelled_weights(along("feature", np.flip)), "plain", "weights"),
    Fault("weights by time: gates", *_WEIGHTS, other_gates, "plain", "weights by time"),
    Fault("weights: loss doubled", capture, "evaluate", other_loss(lambda v: 2 * v), "stack", "weights"),
    # Gradients by pull-back.
    Fault("pull-back 1 % larger", pullback.TorchPullback, "vjp", arrived(lambda g: g * 1.01), "plain", "of inputs"),
    Fault("pull-back of weights", pullback.TorchPullback, "vjp", arrived(lambda g: g * 0.5), "stack", "of weights"),
    Fault("pull-back backwards", pullback.TorchPullback, "vjp", arrived(lambda g: g.flip(1)), "stack", "of inputs"),
    Fault("pull-back: inputs", pullback.TorchPullback, "vjp", result(port_order), "two", "of two inputs"),
    Fault("pull-back of outputs", pullback.TorchPullback, "vjp", arrived(lambda g: -g), "plain", "of outputs"),
    Fault("pull-back by sample", pullback.TorchPullback, "vjp", arrived(lambda g: g * 1.01), "plain", "by sample"),
    Fault("pull-back: another input", capture, "call_model", scaled(1), "plain", "of inputs"),
    Fault("pull-back: another loss", capture, "evaluate", other_loss(lambda v: 2 * v), "stack", "of weights"),
    Fault(
        "pull-back: halves stacked twice",
        pull,
        "stack_first_cotangents",
        result(lambda g: 2 * g),
        "plain",
        "of inputs",
    ),
    Fault("states: last step twice", inside.ReplayedCall, "sweep", last_step_twice, "plain", "of states"),
    Fault("states: sweep 1 % larger", inside, "sweep", of_adjoint(gate_grad=lambda g: g * 1.01), "plain", "of states"),
    # The time Jacobian.
    Fault("jacobian 1 % larger", *_JACOBIAN, of_jacobian(lambda v: v * 1.01), "plain", "jacobian"),
    Fault("jacobian: output steps", *_JACOBIAN, of_jacobian(flip(1)), "plain", "jacobian"),
    Fault("jacobian: input steps", *_JACOBIAN, of_jacobian(flip(3)), "plain", "jacobian"),
    Fault("jacobian: units", *_JACOBIAN, of_jacobian(flip(2)), "stack", "jacobian"),
    Fault("jacobian: features", *_JACOBIAN, of_jacobian(flip(4)), "stack", "jacobian"),
    Fault("jacobian: samples", *_JACOBIAN, of_jacobian(flip(0)), "plain", "jacobian"),
    Fault("jacobian: times transposed", *_JACOBIAN, of_jacobian(lambda v: v.swapaxes(1, 3)), "plain", "jacobian"),
    Fault("jacobian of a loop", *_JACOBIAN, of_jacobian(lambda v: v * 0.99), "loop", "jacobian"),
    Fault("sum of a jacobian", *_JACOBIAN, of_jacobian(lambda v: v * 1.01), "plain", "sum of jacobian"),
    Fault("mean of jacobians", *_JACOBIAN, of_jacobian(flip(0)), "plain", "mean jacobian"),
]


def certificate_of(found):
    """(sentence, whether the self-checks passed)."""
    if isinstance(found, xr.DataArray):
        return found.attrs["certificate"], found.attrs.get("replay_residual", 0.0) < 1e-4
    return found.certificate.sentence, all(check.ok for check in found._self_checks)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_noticed(fault, monkeypatch):
    model, x, y = made(fault.model)
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
    made_of = made(model)
    with rl.options(certify="always"):
        if "jacobian" in call and model == "two":
            return
        sentence, passed = certificate_of(CALLS[call](*made_of))
    assert passed
    assert sentence.startswith("certified against torch"), sentence


def test_how_many():
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)
    assert len(FAULTS) >= 60
    print(f"{len(FAULTS)} faults are planted on torch")
