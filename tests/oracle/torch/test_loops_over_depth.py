"""Blocks that are called on their own output, against autograd with retained gradients on the plain model."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.errors import ModelError

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


class Stack(DepthModel):
    """A stack of blocks called several times in turn, with a signal of the loop."""

    def __init__(self, block, *blocks):
        super().__init__(nn.ModuleList([block, *blocks]))

    def loop(self, h):
        for k in range(LOOPS):
            h = h + self.step_signal[k]
            for i, block in enumerate(self.block):
                h = self.keep(f"block.{i}", block(h))
        return h


class Relay(Stack):
    """Two blocks that alternate on one state; the input is added for the first, and the second gets a mask."""

    def loop(self, x):
        (first, second), h = self.block, x
        mask = torch.zeros(POSITIONS, POSITIONS, dtype=torch.bool).triu(1)
        for _ in range(LOOPS):
            h = self.keep("block.0", first(x + h))
            h = self.keep("block.1", second(h, src_mask=mask))
        return h


class DeepHuginn(Stack):
    """The core of a recurrent-depth model of several layers: an adapter of state and prelude, then the blocks."""

    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.adapter = nn.Linear(2 * UNITS, UNITS)

    def loop(self, prelude):
        h = torch.full_like(prelude, 0.1)
        for _ in range(LOOPS):
            h = self.adapter(torch.cat([h, prelude], -1))
            for i, block in enumerate(self.block):
                h = self.keep(f"block.{i}", block(h))
        return h


class LastLoopsOnly(Stack):
    """A stack whose first loop has no gradient."""

    def loop(self, h):
        for k in range(LOOPS):
            with torch.set_grad_enabled(k > 0):
                for i, block in enumerate(self.block):
                    h = block(h)
                    if k:
                        self.keep(f"block.{i}#1", h)
        return h


class Levels(DepthModel):
    """The two levels of a hierarchical reasoning model: low runs twice for each run of high (arXiv:2506.21734)."""

    def __init__(self, block):
        super().__init__(block)
        self.low, self.high = block, type(block)()

    def loop(self, x):
        high, low = self.step_signal[0].expand_as(x), self.step_signal[1].expand_as(x)
        for _ in range(3):
            for _ in range(2):
                low = self.keep("block", self.low(low + high + x))
            high = self.keep("high", self.high(high + low))
        return high


def library_layer():
    return nn.TransformerEncoderLayer(UNITS, 2, 2 * UNITS, dropout=0.0, batch_first=True)


MODELS = {
    "stack": (lambda block: Stack(block, Block(), Block()), Block),
    "blocks of linear layers": (
        lambda block: Stack(block, nn.Sequential(nn.Linear(UNITS, UNITS), nn.Linear(UNITS, UNITS))),
        lambda: nn.Sequential(nn.Linear(UNITS, UNITS), nn.Linear(UNITS, UNITS)),
    ),
    "relay": (lambda block: Relay(block, library_layer()), Block),
    "deep huginn": (lambda block: DeepHuginn(block, Block()), Block),
    "last loops of a stack": (lambda block: LastLoopsOnly(block, Block()), Block),
    "levels": (Levels, Block),
    "universal": (Universal, Block),
    "universal with steps": (UniversalWithSteps, Block),
    "deep equilibrium": (AddedInput, Block),
    "a layer of torch": (LibraryLayer, library_layer),
    "huginn": (Huginn, WithInjection),
    "recursive": (Recursive, Added),
    "last cycle only": (LastCycleOnly, Added),
}


def model_of(kind):
    torch.manual_seed(0)
    make, block = MODELS[kind]
    return make(block()).double()


@pytest.mark.product(
    keep=("stack", "deep huginn", "universal", "universal with steps", "huginn", "recursive", "last cycle only")
)
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


class Mixing(DepthModel):
    """Two modules in turn with an operation between them that is no sum; ``by_step`` takes the line of the hint."""

    by_step = False

    def __init__(self, block):
        super().__init__(block)
        self.other = nn.Linear(UNITS, UNITS)

    def loop(self, x):
        h = x
        for _ in range(LOOPS):
            if self.by_step:
                h = rl.torch.step(lambda x, h: torch.tanh(self.other(torch.sin(self.block(h + x)))), x, h)
            else:
                h = self.keep("loop", torch.tanh(self.other(torch.sin(self.block(h + x)))))
        return h


def test_what_cannot_be_told_is_refused_with_a_line_that_works():
    torch.manual_seed(0)
    model = Mixing(nn.Linear(UNITS, UNITS)).double()
    with pytest.raises(ModelError) as caught:
        rl.trace(model, X, Y, loss=LOSS)
    assert "got:      block: 4 calls, other: 4 calls" in str(caught.value)
    assert "h = rl.torch.step(lambda x, h: ..., x, h)" in str(caught.value)
    LOSS(model(X), Y).backward()
    states, grads = (torch.stack([getattr(h, part) for h in model.states["loop"]], 1) for part in ("data", "grad"))
    model.by_step = True
    trace = rl.trace(model, X, Y, loss=LOSS)
    assert trace.certificate.state == "passed"
    np.testing.assert_allclose(np.ravel(trace["loop"]["hidden"]), states.ravel(), atol=1e-12)
    np.testing.assert_allclose(np.ravel(trace["loop"]["hidden_grad"]), grads.ravel(), atol=1e-12)


def test_modules_that_a_loop_over_time_calls_are_no_loop_over_depth():
    """A readout whose output is the next input of a cell goes through the cell, which is the recurrence."""

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.read, self.embed = (
                nn.GRUCell(UNITS, UNITS),
                nn.Linear(UNITS, UNITS),
                nn.Linear(UNITS, UNITS),
            )

        def forward(self, x):
            h, y, outputs = x.new_zeros(len(x), UNITS), self.embed(x), []
            for _ in range(5):
                h = self.cell(y, h)
                y = self.embed(self.read(h))
                outputs.append(y)
            return torch.stack(outputs, 1)

    torch.manual_seed(0)
    model, x = Generator().double(), torch.randn(3, UNITS, dtype=torch.float64)
    assert [info.name for info in rl.layers(model, x)] == ["cell"]
