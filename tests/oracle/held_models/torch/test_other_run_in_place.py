"""Loss and gradients equal autograd's if the user's code changes states in place between two steps."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

B, T, F, H = 3, 6, 2, 4
DONE = torch.tensor([[False, True, False], [False, False, False], [True, False, True]] * 2)


def zero_rows(h, t):
    with torch.no_grad():
        h[DONE[t]] = 0


def zero_rows_seen_by_autograd(h, t):
    h[DONE[t]] = 0


def scale(h, t):
    h.mul_(0.8)


def clamp(h, t):
    with torch.no_grad():
        h.clamp_(-0.1, 0.1)


def behind_autograd(h, t):
    h.data.mul_(0.5)


def masked_fill(h, t):
    h.masked_fill_(DONE[t][:, None], 0.0)


def zero_once(h, t):
    if t == 3:
        with torch.no_grad():
            h.zero_()


CHANGES = [zero_rows, zero_rows_seen_by_autograd, scale, clamp, behind_autograd, masked_fill, zero_once]


class OwnCell(nn.Module):
    """A custom cell whose backward pass saves none of its returned tensors."""

    def __init__(self, features, units):
        super().__init__()
        self.inner = nn.Linear(features + units, units)

    def forward(self, x, h):
        return 0.5 * h + torch.sin(self.inner(torch.cat([x, h], 1)))


class Loop(nn.Module):
    def __init__(self, cell, change):
        super().__init__()
        self.cell, self.change = cell(F, H), change
        self.head = nn.Linear(H, 1)

    def forward(self, x):
        h = x.new_zeros(B, H)
        state = (h, torch.zeros_like(h)) if isinstance(self.cell, nn.LSTMCell) else h
        total = 0
        for t in range(T):
            state = self.cell(x[:, t], state)
            for tensor in state if isinstance(state, tuple) else (state,):
                self.change(tensor, t)
            total = total + self.head(state[0] if isinstance(state, tuple) else state).sin()
        return total


def mse(output, target):
    return ((output - target) ** 2).mean()


def model_and_data(cell, change):
    torch.manual_seed(0)
    model = Loop(cell, change).double()
    if cell is OwnCell:
        rl.torch.cell(model.cell)
    return model, torch.randn(B, T, F, dtype=torch.float64), torch.randn(B, 1, dtype=torch.float64)


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, OwnCell], ids=lambda c: c.__name__)
def test_the_run_is_the_untouched_one(cell, change):
    model, x, y = model_and_data(cell, change)
    leaf = x.clone().requires_grad_()
    loss = mse(model(leaf), y)
    weights = dict(model.named_parameters())
    expected = dict(zip(["input", *weights], torch.autograd.grad(loss, [leaf, *weights.values()]), strict=True))
    traced = rl.trace(model, x, y, loss=mse)
    assert abs(traced.loss - loss.item()) <= 1e-12
    gradients = rl.gradients(model, x, y, loss=mse, wrt=["input", "head.weights"])
    assert abs(gradients.value - loss.item()) <= 1e-12
    assert np.abs(gradients["model"]["input"].values - expected["input"].numpy()).max() <= 1e-12
    assert np.abs(gradients["head"]["weight"].values - expected["head.weight"].numpy()).max() <= 1e-12
    # Each traced call covers one or more steps, so their input gradients are joined.
    steps = [traced[node].input_grad for node in traced if node.partition("#")[0] == "cell"]
    input_grad = np.concatenate([grad.values for grad in steps], axis=1)
    assert np.abs(input_grad - expected["input"].numpy()).max() <= 1e-10


def test_a_buffer_used_again_for_every_step():
    """If one buffer is overwritten at each step, a trace has the inputs and states of each step, not the last ones."""

    class Buffered(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(F, H)
            self.register_buffer("slot", torch.zeros(B, F))
            self.register_buffer("state", torch.zeros(B, H))

        def forward(self, x):
            for t in range(T):
                self.slot.copy_(x[:, t])
                self.state.copy_(self.cell(self.slot, self.state))
            return self.state * 1.0

    torch.manual_seed(0)
    model, x = Buffered().double(), torch.randn(B, T, F, dtype=torch.float64)
    with torch.no_grad():
        expected, states = [], torch.zeros(B, H, dtype=torch.float64)
        for t in range(T):
            states = model.cell(x[:, t], states)
            expected.append(states)
    with torch.no_grad():
        traced = rl.trace(model, x)
    nodes = [traced[node] for node in traced]
    hidden = np.concatenate([node.hidden.values for node in nodes], axis=1)
    inputs = np.concatenate([node.input.values for node in nodes], axis=1)
    assert np.abs(hidden - torch.stack(expected, 1).numpy()).max() <= 1e-12
    assert np.abs(inputs - x.numpy()).max() <= 1e-12
