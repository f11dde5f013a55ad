"""Traces of packed sequences have torch's gradients, and a shuffling loader leaves torch's random state unchanged."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rnnlens as rl

pytestmark = pytest.mark.check


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[1][0][-1])


def test_every_trace_of_a_packed_input_has_torchs_gradients():
    torch.manual_seed(0)
    model, y = Last(), torch.ones(16, 2)
    x = nn.utils.rnn.pack_sequence([torch.randn(n, 3) for n in range(18, 2, -1)])
    nn.functional.mse_loss(model(x), y).backward()
    expected = model.head.weight.grad.numpy()
    for _ in range(3):  # from the second on, certificates may compare a part of the samples
        trace = rl.trace(model, x, y, loss=nn.functional.mse_loss)
        assert trace.certificate.state == "passed"
        gradients = rl.gradients(model, x, y, loss=nn.functional.mse_loss)
        np.testing.assert_allclose(gradients["head"]["weight"].values, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("verb", [rl.gradients, rl.diagnose])
def test_a_loader_that_shuffles_leaves_the_generator_as_it_was(verb):
    torch.manual_seed(0)
    model = Last()
    data = TensorDataset(torch.randn(64, 5, 3), torch.randn(64, 2))
    before = torch.get_rng_state()
    verb(model, DataLoader(data, batch_size=32, shuffle=True), loss=nn.functional.mse_loss)
    assert torch.equal(torch.get_rng_state(), before)
