"""Blocks that are called on their own output, against autograd with retained gradients on the plain model."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

SAMPLES, POSITIONS, UNITS, LOOPS = 4, 5, 8, 4
X = torch.tensor(np.random.default_rng(0).normal(size=(SAMPLES, POSITIONS, 3)))
Y = torch.tensor([0, 1, 1, 0])
LOSS = nn.functional.cross_entropy


class Block(nn.Module):
    """A transformer block of two heads with its norms behind the sums."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(UNITS, 2, batch_first=True)
        self.up, self.down = nn.Linear(UNITS, 2 * UNITS), nn.Linear(2 * UNITS, UNITS)
        self.norms = nn.ModuleList(nn.LayerNorm(UNITS) for _ in range(2))

    def forward(self, h):
        h = self.norms[0](h + self.attention(h, h, h, need_weights=False)[0])
        return self.norms[1](h + self.down(nn.functional.silu(self.up(h))))


class WithInjection(nn.Module):
    """The core of a recurrent-depth model: a block on state and prelude side by side (arXiv:2502.05171)."""

    def __init__(self):
        super().__init__()
        self.adapter, self.block = nn.Linear(2 * UNITS, UNITS), Block()

    def forward(self, state, prelude):
        return self.block(self.adapter(torch.cat([state, prelude], -1)))


class Added(nn.Module):
    """A network of a tiny recursive model: a block on the sum of a state and what is injected (arXiv:2510.04871)."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, hidden_states, injection):
        return self.block(hidden_states + injection)


class DepthModel(nn.Module):
    """A model around a loop over depth, which keeps the states that its block returned, by loop."""

    def __init__(self, block):
        super().__init__()
        self.encode, self.block, self.read = nn.Linear(3, UNITS), block, nn.Linear(UNITS, 2)
        self.step_signal = nn.Parameter(torch.randn(LOOPS, UNITS))
        self.states = {}

    def keep(self, name, state):
        if state.requires_grad:
            state.retain_grad()
        self.states.setdefault(name, []).append(state)
        return state

    def forward(self, x):
        self.states = {}
        return self.read(self.loop(self.encode(x)).mean(1))


class Universal(DepthModel):
    """h = block(h)."""

    def loop(self, h):
        for _ in range(LOOPS):
            h = self.keep("block", self.block(h))
        return h


class UniversalWithSteps(DepthModel):
    """h = block(h + signal of the step), as in universal transformers (arXiv:1807.03819)."""

    def loop(self, h):
        for k in range(LOOPS):
            h = self.keep("block", self.block(h + self.step_signal[k]))
        return h


class AddedInput(DepthModel):
    """z = block(z + x), the iteration of a deep equilibrium model (arXiv:1909.01377)."""

    def loop(self, x):
        z = x
        for _ in range(LOOPS):
            z = self.keep("block", self.block(x + z))
        return z


class LibraryLayer(DepthModel):
    """A layer of torch's own with a mask, called by keyword."""

    def loop(self, h):
        mask = torch.zeros(POSITIONS, POSITIONS, dtype=torch.bool).triu(1)
        for _ in range(LOOPS):
            h = self.keep("block", self.block(h, src_mask=mask))
        return h


class Huginn(DepthModel):
    def loop(self, prelude):
        state = torch.full_like(prelude, 0.1)
        for _ in range(LOOPS):
            state = self.keep("block", self.block(state, prelude))
        return state


class Recursive(DepthModel):
    """Two states in turn through one network: z = net(z, y + x) three times, then y = net(y, z)."""

    def loop(self, x):
        y, z = self.step_signal[0].expand_as(x), self.step_signal[1].expand_as(x)
        for _ in range(2):
            for _ in range(3):
                z = self.keep("block#0", self.block(z, y + x))
            y = self.keep("block#1", self.block(y, z))
        return y


class LastCycleOnly(Recursive):
    """The same network, trained through its last cycle alone."""

    def loop(self, x):
        y, z = self.step_signal[0].expand_as(x), self.step_signal[1].expand_as(x)
        with torch.no_grad():
            z = self.block(z, y + x)
            y = self.block(y, z)
        for _ in range(2):
            z = self.keep("block#2", self.block(z, y + x))
        return self.keep("block#3", self.block(y, z))


MODELS = {
    "universal": (Universal, Block),
    "universal with steps": (UniversalWithSteps, Block),
    "deep equilibrium": (AddedInput, Block),
    "a layer of torch": (
        LibraryLayer,
        lambda: nn.TransformerEncoderLayer(UNITS, 2, 2 * UNITS, dropout=0.0, batch_first=True),
    ),
    "huginn": (Huginn, WithInjection),
    "recursive": (Recursive, Added),
    "last cycle only": (LastCycleOnly, Added),
}


def model_of(kind):
    torch.manual_seed(0)
    make, block = MODELS[kind]
    return make(block()).double()


@pytest.mark.product(keep=("universal", "universal with steps", "huginn", "recursive", "last cycle only"))
@pytest.mark.parametrize("kind", MODELS)
def test_states_and_gradients_by_loop_are_those_of_autograd(kind):
    model = model_of(kind)
    LOSS(model(X), Y).backward()
    expected = {
        name: [torch.stack([getattr(h, part) for h in states], 1) for part in ("data", "grad")]
        for name, states in model.states.items()
    }
    model.zero_grad()
    trace = rl.trace(model, X, Y, loss=LOSS)
    assert trace.certificate.state == "passed", trace.certificate
    for name, (states, grads) in expected.items():
        layer = trace[name]
        assert layer["hidden"].dims == ("sample", "time", "position", "unit")
        np.testing.assert_allclose(layer["hidden"], states, atol=1e-12)
        np.testing.assert_allclose(layer["hidden_grad"], grads, atol=1e-12 * float(grads.abs().max()))
