"""States that a cell of one's own hands on as they came: counted where they leave the step."""

import pytest
import torch
from torch import nn

import rnnlens as rl

STEP = 1e-6


class PassingCell(nn.Module):
    """Its second state is the one it got ("kept"), or the first state of the step before ("delayed")."""

    def __init__(self, which):
        super().__init__()
        self.read, self.recur, self.which = nn.Linear(2, 3), nn.Linear(3, 3), which
        self.bump = None

    def forward(self, x, states):
        h, m = states
        new = torch.tanh(self.read(x) + self.recur(h) * (1 + m))
        second = m if self.which == "kept" else h
        return new, (new, second if self.bump is None else second + self.bump)


class Loop(nn.Module):
    def __init__(self, which, last):
        super().__init__()
        self.cell, self.head, self.last, self.bumps = PassingCell(which), nn.Linear(6, 2), last, {}

    def forward(self, x):
        states, seen = (x.new_full((len(x), 3), 0.1), x.new_full((len(x), 3), 0.2)), []
        for t in range(x.shape[1]):
            self.cell.bump = self.bumps.get(t)
            out, states = self.cell(x[:, t], states)
            seen.append(torch.cat([out, states[1]], 1))
        return self.head(seen[-1] if self.last else torch.stack(seen, 1))


def total(out):
    return (torch.sin(out) * torch.tensor([1.0, 2.0], dtype=out.dtype)).sum()


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("which", ["kept", "delayed"])
def test_a_state_that_is_passed_on(which, last):
    torch.manual_seed(0)
    model, x = Loop(which, last).double(), torch.randn(2, 4, 2, dtype=torch.float64)
    found = rl.trace(model, x, torch.zeros(1), loss=lambda out, y: total(out))["cell"]["state_1_grad"]
    for t, sample, unit in [(0, 0, 1), (1, 1, 0), (2, 0, 2), (3, 1, 1)]:
        ends = []
        for size in (STEP, -STEP):
            bump = torch.zeros(2, 3, dtype=torch.float64)
            bump[sample, unit] = size
            model.bumps = {t: bump}
            ends.append(total(model(x)).item())
        model.bumps = {}
        expected = (ends[0] - ends[1]) / (2 * STEP)
        assert float(found[sample, t, unit]) == pytest.approx(expected, rel=1e-6, abs=1e-8), t
