"""A layer that the forward pass does not call has weights and no gradients."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

pytestmark = pytest.mark.check

B, T, F, H = 3, 5, 3, 4


class WithSpares(nn.Module):
    """One recurrent layer that runs, and a spare decoder, a cell and another task's head that do not."""

    def __init__(self, spare):
        super().__init__()
        self.lstm, self.head = nn.LSTM(F, H, batch_first=True), nn.Linear(H, 2)
        self.spare, self.cell, self.other = spare, nn.GRUCell(F, H), nn.Linear(H, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


SPARES = {
    "lstm": lambda: nn.LSTM(H, H, batch_first=True),
    "both ways": lambda: nn.GRU(H, H, bidirectional=True),
    "stacked": lambda: nn.RNN(H, H, num_layers=2),
    "projected": lambda: nn.LSTM(H, H, proj_size=2),
}


@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize("spare", list(SPARES))
def test_weights_of_a_model_with_layers_that_do_not_run(spare, by_time):
    model = WithSpares(SPARES[spare]())
    x, y = torch.randn(B, T, F), torch.randn(B, T, 2)
    weights = rl.weights(model, x, y, loss=nn.functional.mse_loss, by_time=by_time)
    nn.functional.mse_loss(model(x), y).backward()
    total = weights["lstm"].kernel_grad.sum("time") if by_time else weights["lstm"].kernel_grad
    np.testing.assert_allclose(total.values.reshape(F, -1), model.lstm.weight_ih_l0.grad.numpy().T, atol=1e-6)
    for name in weights:
        has_gradient = any(variable.endswith("_grad") for variable in weights[name])
        assert has_gradient == (name in ("lstm", "head")), name
    assert weights.certificate.state == "passed", weights.certificate
