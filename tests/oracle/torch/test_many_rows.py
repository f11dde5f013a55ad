"""Sums over many rows in float32: what torch's fused kernels round is not held against right numbers."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl


class LastStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


@pytest.mark.parametrize("verb", [rl.weights, rl.trace])
def test_bias_gradients_of_many_rows_are_not_accused_of_the_rounding_of_a_fused_kernel(verb):
    torch.manual_seed(0)
    model = LastStep()
    x, y = torch.randn(4000, 50, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(4000, 1)
    is_fused = torch._C._get_mkldnn_enabled()
    result = verb(model, x, y, loss=nn.functional.mse_loss)
    assert result.certificate.state == "passed"
    assert torch._C._get_mkldnn_enabled() == is_fused
    twin = copy.deepcopy(model).double()
    nn.functional.mse_loss(twin(x.double()), y.double()).backward()
    expected = twin.lstm.bias_ih_l0.grad.numpy()
    weights = rl.weights(model, x, y, loss=nn.functional.mse_loss)["lstm"]
    np.testing.assert_allclose(weights.bias_grad.values.reshape(-1), expected, atol=3e-6 * np.abs(expected).max())
