"""Certificates of time Jacobians between ends inside the model: wrong ends fail, and right ones pass.

The Jacobian from output to input is right under each of these faults: only a pullback between the ends shows them.
"""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.adapters.protocol import Port
from rnnlens.adapters.torch import pullback
from rnnlens.verbs.time_jacobian import network

B, T, U = 3, 5, 4


class Chain(nn.Module):
    """Two library layers of one size, a Linear layer between them and one after them."""

    def __init__(self):
        super().__init__()
        self.lower, self.upper = nn.LSTM(U, U, batch_first=True), nn.GRU(U, U, batch_first=True)
        self.between, self.head = nn.Linear(U, U), nn.Linear(U, U)

    def forward(self, x):
        return self.head(self.upper(torch.tanh(self.between(self.lower(x)[0])))[0])


class Attentive(nn.Module):
    """A decoder cell that reads attention over the encoder's outputs and its own previous output."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.GRU(U, U, batch_first=True), nn.LSTMCell(2 * U, U)
        self.head = nn.Linear(U, U)

    def forward(self, x):
        out, _ = self.encoder(x)
        h = c = x.new_zeros(len(x), U)
        output, outputs = h, []
        for _ in range(T):
            context = (torch.softmax((out * h[:, None]).sum(-1), 1)[..., None] * out).sum(1)
            h, c = self.decoder(torch.cat([output, context], 1), (h, c))
            output = self.head(h)
            outputs.append(output)
        return torch.stack(outputs, 1)


class Residual(nn.Module):
    """A model with an identity layer whose input is also used directly, and a loop that changes its state in place."""

    def __init__(self):
        super().__init__()
        self.embed, self.same, self.cell, self.head = nn.Linear(U, U), nn.Identity(), nn.GRUCell(U, U), nn.Linear(U, U)

    def forward(self, x):
        x = self.embed(x)
        x = x + torch.tanh(self.same(x))
        h, states = x.new_zeros(len(x), U), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            h *= 0.9
            states.append(h.clone())
        return self.head(torch.stack(states, 1))


def certified_jacobian(model, of, wrt, **options):
    torch.manual_seed(0)
    with rl.options(certify="always"):
        return rl.jacobian(model().double(), torch.randn(B, T, U, dtype=torch.float64), of=of, wrt=wrt, **options)


ENDS = [
    (Chain, "upper.output", "lower.output"),
    (Chain, "output", "between.output"),
    (Chain, "upper.hidden", "input"),
    (Chain, "upper.final_hidden", "lower.output"),
    (Attentive, "decoder.hidden", "encoder.output"),
    (Attentive, "decoder.cell", "decoder.hidden"),
    (Attentive, "decoder.final_cell", "encoder.output"),
    (Attentive, "encoder.final_hidden", "input"),
    (Residual, "cell.hidden", "same.output"),
    (Residual, "cell.hidden", "cell.hidden"),
]


@pytest.mark.parametrize("measure", [None, "norm"])
@pytest.mark.parametrize(("model", "of", "wrt"), ENDS, ids=lambda v: getattr(v, "__name__", v))
def test_a_right_jacobian_is_certified_between_its_own_ends(model, of, wrt, measure):
    certificate = certified_jacobian(model, of, wrt, measure=measure).certificate
    assert certificate.state == "passed"
    assert not any("recurrences" in quantity for quantity in certificate.certified)


def earlier_states(original):
    """Return a fault that replaces the state of a loop at step t by that of step t - 1."""

    def earlier_boundary(run, layer, port):
        boundary = original(run, layer, port)
        if port.kind != "state":
            return boundary
        value, gather = boundary.value, boundary.gather
        return replace(
            boundary, gather=lambda tensors: gather(tensors).roll(1, 1), compute_value=lambda: value.roll(1, 1)
        )

    return earlier_boundary


def lower_layer_output(port):
    """Return a fault that replaces a layer's output by that of the layer below."""
    below = {"upper": "lower", "between": "lower"}
    return lambda kind, layer, index: port(kind, below.get(layer, layer), index)


def lower_layer_states(original):
    def swapped_end(name, replayed_layers, role):
        swapped = {"upper": "lower"}.get(name.layer, name.layer)
        end = original(replace(name, layer=swapped), replayed_layers, role)
        return None if end is None else replace(end, name=name)

    return swapped_end


def reversed_steps(original):
    """Return a fault that reverses the steps of the gradients at the encoder's outputs."""

    def find(self, port):
        if port == Port("output", "encoder"):
            boundary = original(self, port)
            gather = boundary.gather
            return replace(
                boundary, gather=lambda tensors: gather(tensors).flip(1), compute_value=lambda: boundary.value
            )
        return original(self, port)

    return find


FAULTS = {
    "states one step earlier": (pullback, "boundary_of", earlier_states, Attentive, "decoder.hidden", "encoder.output"),
    "by states one step earlier": (pullback, "boundary_of", earlier_states, Attentive, "output", "decoder.hidden"),
    "another layer's output": (network, "Port", lower_layer_output, Chain, "output", "between.output"),
    "another layer's states": (network, "_inner_end", lower_layer_states, Chain, "upper.hidden", "input"),
    "steps in reverse": (pullback.PortTable, "find", reversed_steps, Attentive, "output", "encoder.output"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_end_is_found(fault, monkeypatch):
    owner, name, plant, model, of, wrt = FAULTS[fault]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        certified_jacobian(model, of, wrt)
    monkeypatch.setattr(owner, name, plant(getattr(owner, name)))
    with pytest.warns(rl.errors.SelfCheckWarning, match="differ from the reference run of the model"):
        certified_jacobian(model, of, wrt)
