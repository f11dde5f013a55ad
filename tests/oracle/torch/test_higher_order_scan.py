"""A model that calls ``torch._higher_order_ops.scan`` is a loop of recorded steps, as if it used ``rl.torch.step``."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan

import rnnlens as rl


class Scanned(nn.Module):
    """Elman cell in torch's scan, or in a loop; ``reverse``: from the last step to the first."""

    def __init__(self, reverse=False, by_hand=False):
        super().__init__()
        self.inp, self.rec = nn.Linear(3, 4), nn.Linear(4, 4)
        self.reverse, self.by_hand = reverse, by_hand

    def forward(self, x):
        def combine(h, u):
            h = torch.tanh(self.inp(u) + self.rec(h))
            return h, h.clone()

        h = x.new_zeros(len(x), 4)
        if not self.by_hand:
            return scan(combine, h, x, dim=1, reverse=self.reverse)[1]
        states = []
        for t in reversed(range(x.shape[1])) if self.reverse else range(x.shape[1]):
            h, _ = combine(h, x[:, t])
            states.append(h)
        self.taps = states
        states = states[::-1] if self.reverse else states
        return torch.stack(states, 1)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_of_torch_has_states_total_gradients_and_a_jacobian(reverse):
    torch.manual_seed(0)
    model, twin = Scanned(reverse).double(), Scanned(reverse, by_hand=True).double()
    twin.load_state_dict(model.state_dict())
    scan_module = sys.modules[scan.__module__]
    x, original = torch.randn(2, 5, 3, dtype=torch.float64), scan_module._maybe_compile_and_run_fn
    loss = lambda y: (y[:, 2] ** 2).sum() + y[:, :, 0].sum()  # noqa: E731
    trace = rl.trace(model, x, loss=loss)
    assert trace.certificate.state == "passed"
    grads = torch.autograd.grad(loss(twin(x)), twin.taps)
    layer = trace[trace.layers[0]]
    for actual, expected in ((layer.hidden, twin.taps), (layer.hidden_grad, grads)):
        expected = torch.stack([t.detach() for t in expected], 1).numpy()
        assert np.abs(actual.values - expected).max() <= 1e-12 * np.abs(expected).max()
    axes = {"input": ("sample", "time", "feature"), "output": ("sample", "time", "unit")}
    jacobian = rl.jacobian(model, x, axes=axes)
    reference = torch.autograd.functional.jacobian(twin, x).numpy()
    assert np.allclose(jacobian.values[0], reference[0, :, :, 0], rtol=1e-12, atol=1e-14)
    assert jacobian.certificate.state == "passed"
    assert scan_module._maybe_compile_and_run_fn is original
