"""Sums over many rows in float32: what torch's fused kernels round is not held against right numbers."""

import subprocess
import sys
import threading

import pytest

from rnnlens.autodiff import without_fused_sums

PROGRAM = """
import copy
import warnings

import numpy as np
import torch
from torch import nn

import rnnlens as rl


class LastStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


warnings.simplefilter("error")
torch.manual_seed(0)
model, is_fused = LastStep(), torch._C._get_mkldnn_enabled()
x, y = torch.randn(4000, 50, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(4000, 1)
trace = rl.trace(model, x, y, loss=nn.functional.mse_loss)
weights = rl.weights(model, x, y, loss=nn.functional.mse_loss)
assert trace.certificate.state == weights.certificate.state == "passed"
assert torch._C._get_mkldnn_enabled() == is_fused
twin = copy.deepcopy(model).double()
nn.functional.mse_loss(twin(x.double()), y.double()).backward()
expected = twin.lstm.bias_ih_l0.grad.numpy()
got = weights["lstm"].bias_grad.values.reshape(-1)
np.testing.assert_allclose(got, expected, atol=3e-6 * np.abs(expected).max())
"""


@pytest.mark.slow
def test_bias_gradients_of_many_rows_are_not_accused_of_the_rounding_of_a_fused_kernel():
    process = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_kernels_are_not_switched_beside_another_thread():
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    try:
        assert without_fused_sums("torch") is None
    finally:
        is_over.set()
        thread.join()
