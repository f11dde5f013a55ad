"""Gradients equal autograd's if forward does not call one of the recurrent layers, trained or frozen."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

F, H = 3, 5


class OwnStep(nn.GRUCell):
    def forward(self, x, h):
        return torch.tanh(x @ self.weight_ih[:H].T + h @ self.weight_hh[:H].T)


class OwnInput(nn.GRUCell):
    def forward(self, x, h):
        return super().forward(torch.tanh(x), h)


class OwnLayer(nn.LSTM):
    def forward(self, x, state=None):
        return super().forward(0.9 * x, state)


USED = {
    "library": lambda: nn.GRU(F, H, batch_first=True),
    "own layer": lambda: OwnLayer(F, H, batch_first=True),
    "own step": lambda: OwnStep(F, H),
    "own input": lambda: OwnInput(F, H),
}
SPARE = {
    "gru": lambda: nn.GRU(F, 4),
    "stacked": lambda: nn.LSTM(F, 4, 2, bidirectional=True),
    "cell": lambda: nn.LSTMCell(F, 4),
    "own cell": lambda: OwnInput(F, 4),
    "own layer": lambda: OwnLayer(F, 4),
}


class Model(nn.Module):
    def __init__(self, used, spare):
        super().__init__()
        self.rnn, self.spare, self.head = USED[used](), SPARE[spare](), nn.Linear(H, 2)

    def forward(self, x):
        if isinstance(self.rnn, nn.RNNBase):
            return self.head(self.rnn(x)[0][:, -1])
        h = x.new_zeros(len(x), H)
        for t in range(x.shape[1]):
            h = self.rnn(x[:, t], h)
        return self.head(h)


@pytest.mark.pairs
@pytest.mark.parametrize("frozen", ["nothing", "spare", "rnn"])
@pytest.mark.parametrize("spare", SPARE)
@pytest.mark.parametrize("used", USED)
def test_gradients_of_all_weights(used, spare, frozen):
    torch.manual_seed(0)
    model = Model(used, spare).double()
    x, y = torch.randn(4, 6, F, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    nn.functional.mse_loss(model(x), y).backward()
    expected = {name: 0.0 if p.grad is None else float((p.grad**2).sum()) for name, p in model.named_parameters()}
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients = rl.gradients(model, x, y, loss=nn.functional.mse_loss, wrt="weights")
    for layer in ("rnn", "head"):
        total = sum(float((np.asarray(v) ** 2).sum()) for v in gradients[layer].dataset.values())
        assert total == pytest.approx(sum(v for name, v in expected.items() if name.startswith(layer)), rel=1e-10)
    assert gradients.certificate.state == "passed"
    assert gradients.disconnected
    unused = {name for name, reason in gradients.disconnected.items() if reason.code == "unused_layer"}
    assert unused
    assert all(name.startswith("spare") for name in unused)
    trace = rl.trace(model, x, y, loss=nn.functional.mse_loss)
    assert list(trace) == ["rnn"]
    assert trace.certificate.state == "passed"
    weights = rl.weights(model, x, y, loss=nn.functional.mse_loss)
    assert weights.certificate.state == "passed"
    for layer in ("rnn", "head"):
        grads = [value for name, value in weights[layer].items() if name.endswith("_grad")]
        total = sum(float((value**2).sum()) for value in grads)
        assert total == pytest.approx(sum(v for name, v in expected.items() if name.startswith(layer)), rel=1e-10)


def test_the_name_of_a_module_stands_for_all_of_its_stacked_layers():
    torch.manual_seed(0)
    model = Model("library", "stacked").double()
    model.rnn = nn.GRU(F, H, 2, batch_first=True).double()
    x = torch.randn(4, 6, F, dtype=torch.float64)

    def loss(output):
        return output.sum()

    gradients = rl.gradients(model, x, loss=loss, wrt="rnn.weights")
    assert list(gradients) == ["rnn[0]", "rnn[1]"]
    all_gradients = rl.gradients(model, x, loss=loss)
    for layer in gradients:
        assert gradients[layer].dataset.identical(all_gradients[layer].dataset)
    unused = rl.gradients(model, x, loss=loss, wrt="spare.weights").disconnected
    assert {name.partition("/")[0] for name in unused} == {"spare[0]", "spare[1]"}
    assert {reason.code for reason in unused.values()} == {"unused_layer"}
    with pytest.raises(rl.errors.InputError, match=r'expected: one of "rnn\[0\].hidden", "rnn\[1\].hidden"'):
        rl.gradients(model, x, loss=loss, wrt="rnn.hidden")
    with pytest.raises(rl.errors.InputError, match=r"'rnn\[0\].hidden', 'rnn\[1\].hidden'"):
        rl.jacobian(model, x, wrt="rnn.hidden")
