"""Certificates pass for returned dataclasses, shared and computed weights, and a layer in half precision."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import rnnlens as rl

B, T, N, H = 3, 5, 4, 6


@dataclass(frozen=True)
class Returned:
    logits: torch.Tensor
    hidden: torch.Tensor


class Head(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(H, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class ReturnsDataclass(Head):
    def forward(self, x):
        hidden, _ = self.rnn(x)
        return Returned(self.head(hidden[:, -1]), hidden)


class Scaled(Head):
    def forward(self, x):
        weights = {name: 0.9 * weight for name, weight in self.rnn.named_parameters()}
        return self.head(torch.func.functional_call(self.rnn, weights, (x,))[0][:, -1])


class Coarse(Head):
    def __init__(self, rnn):
        super().__init__(rnn)
        self.middle = nn.Linear(H, H).bfloat16()

    def forward(self, x):
        return self.head(self.middle(self.rnn(x)[0][:, -1].bfloat16()).float())


class Itself(nn.Module):
    def forward(self, weight):
        return weight


def tied_model(names):
    rnn = nn.LSTM(H, H, 2, batch_first=True)
    for name in names:
        setattr(rnn, f"{name}_l1", getattr(rnn, f"{name}_l0"))
    return Head(rnn)


def parametrised_model():
    rnn = nn.GRU(N, H, batch_first=True)
    nn.utils.parametrize.register_parametrization(rnn, "weight_hh_l0", Itself())
    return Head(rnn)


MODELS = {
    "dataclass": lambda: ReturnsDataclass(nn.LSTM(N, H, batch_first=True)),
    "one weight in two layers": lambda: tied_model(["weight_hh"]),
    "all weights in two layers": lambda: tied_model(["weight_ih", "weight_hh", "bias_ih", "bias_hh"]),
    "functional_call": lambda: Scaled(nn.GRU(N, H, batch_first=True)),
    "parametrisation that returns the parameter": parametrised_model,
    "half precision": lambda: Coarse(nn.GRU(N, H, batch_first=True)),
}


#: Models with a parameter that has one name in torch and two in rnnlens.
TWO_NAMES = ("one weight in two layers", "all weights in two layers", "parametrisation that returns the parameter")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("error")
def test_every_certificate_passes(name):
    torch.manual_seed(0)
    model, y = MODELS[name](), torch.randn(B, 2)
    x = torch.randn(B, T, model.rnn.input_size)
    loss = (lambda out, target: mse_loss(out.logits, target)) if name == "dataclass" else mse_loss
    with rl.options(certify="always"):
        assert rl.trace(model, x, y, loss=loss).certificate.state == "passed"
        assert rl.weights(model, x, y, loss=loss).certificate.state == "passed"
        gradients = rl.gradients(model, x, y, loss=loss, wrt="weights")
        assert gradients.certificate.state == "passed"
        options = {"of": "output[0]"} if name == "dataclass" else {}
        assert rl.jacobian(model, x, **options).attrs["certificate"].startswith("certified against torch")
    model.zero_grad()
    loss(model(x), y).backward()
    if name not in TWO_NAMES:
        expected = sorted(float(p.grad.norm()) for p in model.parameters())
        norms = sorted(float(np.linalg.norm(a.values)) for layer in gradients for a in gradients[layer].values())
        np.testing.assert_allclose(norms, expected, rtol=1e-2 if name == "half precision" else 1e-5)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(N + H, H)
        self.calls, self.log, self.stats = 0, [], {"calls": [0]}
        self.recent, self.kinds = deque(maxlen=3), Counter()

    def forward(self, x, h):
        self.calls += 1
        self.log.append(self.calls)
        self.stats["calls"][0] += 1
        self.recent.append(self.calls)
        self.kinds["step"] += 1
        return torch.tanh(self.mix(torch.cat([x, h], 1)))


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Counting()

    def forward(self, x):
        h = x.new_zeros(len(x), H)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h


@pytest.mark.parametrize(
    "verb",
    [
        lambda model, x, y: rl.trace(model, x, y, loss=mse_loss),
        lambda model, x, y: rl.gradients(model, x, y, loss=mse_loss, wrt="cell.hidden"),
        lambda model, x, y: rl.weights(model, x, y, loss=mse_loss),
        lambda model, x, y: rl.jacobian(model, x),
    ],
    ids=["trace", "gradients", "weights", "jacobian"],
)
def test_counters_and_containers_of_a_cell_are_restored(verb):
    model = Loop()
    verb(model, torch.randn(B, T, N), torch.randn(B, H))
    cell = model.cell
    assert (cell.calls, cell.log, cell.stats, list(cell.recent), dict(cell.kinds)) == (0, [], {"calls": [0]}, [], {})
