"""Time Jacobians of layers that are read both by the next layer and by the output: rows keep the requested order."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl


class Residual(nn.Module):
    """Two recurrent layers; the output is the sum of both."""

    def __init__(self, bidirectional):
        super().__init__()
        width = 8 if bidirectional else 4
        self.lower = nn.LSTM(3, 4, batch_first=True, bidirectional=bidirectional)
        self.upper = nn.LSTM(width, 4, batch_first=True, bidirectional=bidirectional)

    def forward(self, x):
        lower, _ = self.lower(x)
        return lower + self.upper(lower)[0]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("steps", [None, [4, 1], [1, 4]], ids=str)
def test_a_layer_that_is_read_by_the_next_layer_and_by_the_output(bidirectional, steps):
    torch.manual_seed(0)
    model = Residual(bidirectional).double()
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    jacobian = rl.jacobian(model, x, at=None if steps is None else {"out_time": steps})
    expected = np.stack(
        [torch.autograd.functional.jacobian(lambda s: model(s[None])[0], sample).numpy() for sample in x]
    )
    expected = expected if steps is None else expected[:, steps]
    np.testing.assert_allclose(jacobian, expected, rtol=1e-9, atol=1e-12)
    assert jacobian.certificate.state == "passed"
