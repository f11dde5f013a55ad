"""Weights of recurrent layers that are also used elsewhere: in a penalty of the loss, or in the model."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

X, Y = torch.randn(4, 5, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)


class Stack(nn.Module):
    """An LSTM, a bidirectional GRU and a GRUCell in a loop."""

    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(3, 4, batch_first=True), nn.GRU(4, 2, bidirectional=True, batch_first=True)
        self.cell, self.head = nn.GRUCell(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        y = self.gru(self.lstm(x)[0])[0]
        h = y.new_zeros(len(y), 4)
        for t in range(y.shape[1]):
            h = self.cell(y[:, t], h)
        return self.head(h)


class Tied(Stack):
    """A stack whose output also depends directly on weights of the LSTM and of the cell."""

    def forward(self, x):
        return nn.functional.linear(super().forward(x), self.lstm.weight_hh_l0[:2, :2]) + self.cell.weight_ih.sum()


def penalised(model):
    return lambda out, y: ((out - y) ** 2).mean() + 0.3 * sum((weight**2).sum() for weight in model.parameters())


def unpenalised(model):
    return lambda out, y: ((out - y) ** 2).mean()


#: Weight name in rnnlens -> torch's parameter, positions of its gates in torch's order, number of units.
PAIRS = {
    "lstm/recurrent_kernel": ("lstm.weight_hh_l0", (0, 1, 2, 3), 4),
    "cell/kernel": ("cell.weight_ih", (1, 0, 2), 4),
    "head/weight": ("head.weight", None, 2),
}


@pytest.fixture(params=[Stack, Tied])
def model(request):
    torch.manual_seed(0)
    return request.param().double()


@pytest.mark.parametrize("loss", [unpenalised, penalised])
def test_gradients_are_those_of_autograd(model, loss):
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(loss(model)(model(X), Y), list(parameters.values()))
    expected = dict(zip(parameters, grads, strict=True))
    gradients = rl.gradients(model, X, Y, loss=loss(model))
    assert gradients.certificate.state == "passed"
    for weight_path, (parameter_name, gates, units) in PAIRS.items():
        expected_grad = expected[parameter_name].numpy()
        if gates is not None:
            expected_grad = expected_grad.reshape(len(gates), units, -1)[list(gates)].transpose(2, 0, 1)
        np.testing.assert_allclose(
            gradients[weight_path].values, expected_grad, rtol=1e-9, atol=1e-12, err_msg=weight_path
        )


@pytest.mark.filterwarnings("ignore::rnnlens.errors.SelfCheckWarning")
def test_no_sample_has_a_share_of_a_penalty(model):
    gradients = rl.gradients(model, X, Y, loss=penalised(model), per_sample=True)
    assert gradients.certificate.state == "could not"
    assert "cannot be divided among samples" in gradients.certificate.why
    assert rl.gradients(model, X, Y, loss=unpenalised(model), per_sample=True).certificate.state == "passed"
