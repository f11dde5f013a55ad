"""Certificates of a trace of some layers or quantities: they pass without a warning and name what they omit."""

import itertools
import warnings

import pytest
import torch
from torch import nn

import rnnlens as rl

LAYERS = [None, ["rnn[1]"], ["rnn[0]"], ["rnn"], ["below"], ["below", "rnn[1]"], ["loop"], ["head"], ["head", "rnn"]]
QUANTITIES = [
    None,
    ["output_grad"],
    ["output"],
    ["hidden_grad"],
    ["gates"],
    ["input_grad", "gates"],
    ["initial_state_grad"],
]


class Stack(nn.Module):
    def __init__(self, *, bidirectional=False, weight_norm=False):
        super().__init__()
        self.below = nn.GRU(3, 4, batch_first=True)
        if weight_norm:
            nn.utils.parametrizations.weight_norm(self.below, "weight_hh_l0")
        self.rnn = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.loop = nn.GRUCell(5 * (1 + bidirectional), 2)
        self.head = nn.Linear(2, 1)

    def forward(self, x):
        y = self.rnn(self.below(x)[0])[0]
        h = y.new_zeros(len(y), 2)
        for t in range(y.shape[1]):
            h = self.loop(y[:, t], h)
        return self.head(h)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("weight_norm", [False, True])
def test_a_part_is_not_accused(bidirectional, weight_norm):
    torch.manual_seed(0)
    model = Stack(bidirectional=bidirectional, weight_norm=weight_norm).double()
    x, y = torch.randn(2, 4, 3).double(), torch.randn(2, 1).double()
    for layers, quantities in itertools.product(LAYERS, QUANTITIES):
        if layers == ["head"] and quantities not in (None, ["output"], ["output_grad"]):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trace = rl.trace(model, x, y, loss=nn.functional.mse_loss, layers=layers, quantities=quantities)
        assert trace.certificate.state == "passed", (layers, quantities, trace.certificate.sentence)


def test_what_was_not_followed_is_named():
    model = Stack()
    x, y = torch.randn(2, 4, 3), torch.randn(2, 1)
    full_trace = rl.trace(model, x, y, loss=nn.functional.mse_loss)
    partial_trace = rl.trace(model, x, y, loss=nn.functional.mse_loss, quantities="output_grad")
    assert not full_trace.certificate.uncertified
    assert "not certified: weights of recurrent layers" in partial_trace.certificate.sentence
