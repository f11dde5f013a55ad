"""``rl.torch.scan`` declares a diagonal recurrence; steps of ``rl.torch.step`` may read tensors made from weights."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl


def parallel_scan(a, b):
    """Return the states by prefix products in log space, without a loop over steps."""
    total = torch.cumsum(torch.log(a), 1)
    return torch.exp(total) * torch.cumsum(b * torch.exp(-total), 1)


class MinGRU(nn.Module):
    """The minGRU h_t = (1 - z_t) h_{t-1} + z_t n_t of Feng et al. 2024, arXiv:2410.01201, section 3.1."""

    def __init__(self, function=None, by_hand=False):
        super().__init__()
        self.gate, self.new, self.head = nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(5, 2)
        self.function, self.by_hand, self.taps = function, by_hand, []

    def forward(self, x):
        z, n = torch.sigmoid(self.gate(x)), torch.tanh(self.new(x))
        if not self.by_hand:
            return self.head(rl.torch.scan(1 - z, z * n, function=self.function, name="memory"))
        h, self.taps = x.new_zeros(len(x), 5), []
        for t in range(x.shape[1]):
            h = (1 - z[:, t]) * h + z[:, t] * n[:, t]
            self.taps.append(h)
        return self.head(torch.stack(self.taps, 1))


def last_step_loss(outputs):
    return (outputs[:, -1] ** 2).sum()


@pytest.mark.parametrize("function", [None, parallel_scan], ids=["sequential", "parallel"])
def test_states_and_total_gradients_are_those_of_a_loop(function):
    torch.manual_seed(0)
    model, x = MinGRU(function).double(), torch.randn(2, 40, 3, dtype=torch.float64)
    twin = MinGRU(by_hand=True).double()
    twin.load_state_dict(model.state_dict())
    trace = rl.trace(model, x, loss=last_step_loss)
    assert trace.certificate.state == "passed"
    grads = torch.autograd.grad(last_step_loss(twin(x)), twin.taps)
    layer = trace["memory"]
    for actual, expected in ((layer.state, twin.taps), (layer.state_grad, grads)):
        expected = torch.stack([t.detach() for t in expected], 1).numpy()
        assert np.abs(actual.values - expected).max() <= 1e-12 * np.abs(expected).max()
    assert "5 units" in repr(rl.layers(model))
    gradients = rl.gradients(model, x, loss=last_step_loss, wrt="weights")
    assert gradients.certificate.state == "passed"


def test_a_wrong_function_is_named():
    torch.manual_seed(0)
    model = MinGRU(lambda a, b: 1.1 * parallel_scan(a, b))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = rl.trace(model, torch.randn(2, 8, 3), loss=last_step_loss)
    assert any("memory: the replayed output differs" in str(warning.message) for warning in caught)
    assert trace.certificate.state == "failed"


def test_time_jacobian_total_and_frozen():
    torch.manual_seed(0)
    model, x = MinGRU().double(), torch.randn(2, 7, 3, dtype=torch.float64)
    axes = {"input": ("sample", "time", "feature"), "output": ("sample", "time", "unit")}
    jacobian = rl.jacobian(model, x, axes=axes)
    expected = torch.autograd.functional.jacobian(model, x).numpy()
    for sample in range(2):
        assert np.allclose(jacobian.values[sample], expected[sample, :, :, sample], rtol=1e-12, atol=1e-14)
    assert jacobian.certificate.state == "passed"
    frozen = rl.jacobian(model, x, axes=axes, frozen=True)
    assert not np.allclose(frozen, jacobian)


def test_shapes_are_checked():
    with pytest.raises(rl.errors.InputError, match="two tensors of one shape"):
        rl.torch.scan(torch.ones(1, 3, 1), torch.ones(1, 3, 2))
    with pytest.raises(rl.errors.InputError, match="initial= is one state"):
        rl.torch.scan(torch.ones(1, 3, 1), torch.ones(1, 3, 1), torch.ones(2))
    decay = torch.full((1, 3, 1), 0.5)
    assert rl.torch.scan(decay, torch.ones(1, 3, 1), torch.full((1, 1), 2.0)).flatten().tolist() == [2.0, 2.0, 2.0]


class Decaying(nn.Module):
    """A loop whose step reads the tensor A = -exp(A_log), computed from the parameter A_log."""

    def __init__(self):
        super().__init__()
        self.A_log, self.inp, self.head = nn.Parameter(torch.randn(4) * 0.3), nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        rate, h = -torch.exp(self.A_log), x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = rl.torch.step(lambda u, h: torch.exp(rate * 0.1) * h + self.inp(u), x[:, t], h)
        return self.head(h)


def test_a_step_may_read_tensors_made_from_weights():
    torch.manual_seed(0)
    model, x = Decaying(), torch.randn(2, 6, 3)
    trace = rl.trace(model, x, loss=torch.sum)
    assert trace.certificate.state == "passed"
    assert trace["loop"].hidden_grad.sizes["time"] == 6
    (expected,) = torch.autograd.grad(model(x).sum(), model.A_log)
    gradient = rl.gradients(model, x, loss=torch.sum, wrt="decaying/A_log")
    assert np.allclose(gradient, expected.numpy(), rtol=1e-5)
