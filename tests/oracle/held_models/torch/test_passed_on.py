"""Gradients of a custom cell's second state that is passed on unchanged: taken where the state leaves the step."""

import pytest
import torch
from torch import nn

import rnnlens as rl

STEP = 1e-6


class PassingCell(nn.Module):
    """A cell whose second state is the incoming one ("kept"), or the first state of the previous step ("delayed")."""

    def __init__(self, second_state):
        super().__init__()
        self.read, self.recur, self.second_state = nn.Linear(2, 3), nn.Linear(3, 3), second_state
        self.bump = None

    def forward(self, x, states):
        h, m = states
        new = torch.tanh(self.read(x) + self.recur(h) * (1 + m))
        second = m if self.second_state == "kept" else h
        return new, (new, second if self.bump is None else second + self.bump)


class Loop(nn.Module):
    def __init__(self, second_state, last):
        super().__init__()
        self.cell, self.head, self.last, self.bumps = PassingCell(second_state), nn.Linear(6, 2), last, {}

    def forward(self, x):
        states, outputs = (x.new_full((len(x), 3), 0.1), x.new_full((len(x), 3), 0.2)), []
        for t in range(x.shape[1]):
            self.cell.bump = self.bumps.get(t)
            out, states = self.cell(x[:, t], states)
            outputs.append(torch.cat([out, states[1]], 1))
        return self.head(outputs[-1] if self.last else torch.stack(outputs, 1))


def total(out):
    return (torch.sin(out) * torch.tensor([1.0, 2.0], dtype=out.dtype)).sum()


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("second_state", ["kept", "delayed"])
def test_a_state_that_is_passed_on(second_state, last):
    torch.manual_seed(0)
    model, x = Loop(second_state, last).double(), torch.randn(2, 4, 2, dtype=torch.float64)
    state_grad = rl.trace(model, x, torch.zeros(1), loss=lambda out, y: total(out))["cell"]["state_1_grad"]
    for t, sample, unit in [(0, 0, 1), (1, 1, 0), (2, 0, 2), (3, 1, 1)]:
        losses = []
        for size in (STEP, -STEP):
            bump = torch.zeros(2, 3, dtype=torch.float64)
            bump[sample, unit] = size
            model.bumps = {t: bump}
            losses.append(total(model(x)).item())
        model.bumps = {}
        expected = (losses[0] - losses[1]) / (2 * STEP)
        assert float(state_grad[sample, t, unit]) == pytest.approx(expected, rel=1e-6, abs=1e-8), t
