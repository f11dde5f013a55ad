"""Torch models drawn at random, some of which cut the gradient through time, and the gradient by torch alone."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import nn

import rnnlens as rl

STEPS, FEATURES, UNITS = 24, 2, 8
KINDS = ("gru", "lstm", "rnn", "two layers", "cell loop", "step loop", "bidirectional", "reversed", "packed")
ENDS = ("last", "mean", "first", "middle", "maximum", "gathered", "detached output", "no_grad", "rounded", "argmax")
STARTS = ("all", "recent", "old", "every second", "times zero", "where", "embedded", "detached input")


class Drawn(nn.Module):
    """A recurrence of one kind, with what its output reads, what its input is, and a detach between the steps."""

    def __init__(self, kind, end, start, detach_every):
        super().__init__()
        self.kind, self.end, self.start, self.detach_every = kind, end, start, detach_every
        layers = {"lstm": nn.LSTM, "rnn": nn.RNN}
        if "loop" in kind:
            self.cell = nn.GRUCell(FEATURES, UNITS)
        else:
            options = {"bidirectional": {"bidirectional": True}, "two layers": {"num_layers": 2}}.get(kind, {})
            self.rnn = layers.get(kind, nn.GRU)(FEATURES, UNITS, batch_first=True, **options)
        self.embedding = nn.Linear(FEATURES, FEATURES)
        self.table = nn.Embedding(UNITS * (1 + (kind == "bidirectional")), UNITS * (1 + (kind == "bidirectional")))
        self.head = nn.Linear(UNITS * (1 + (kind == "bidirectional")), 1)

    def states(self, x):
        if self.kind == "packed":
            lengths = torch.full((len(x),), x.shape[1] - 1)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
        if self.kind == "reversed":
            return self.rnn(x.flip(1))[0].flip(1)
        if "loop" not in self.kind:
            return self.rnn(x)[0]
        state, states = x.new_zeros(len(x), UNITS), []
        for t in range(x.shape[1]):
            if self.detach_every and t % self.detach_every == 0:
                state = state.detach()
            step = self.cell if self.kind == "cell loop" else partial(rl.torch.step, self.cell)
            state = step(x[:, t], state)
            states.append(state)
        return torch.stack(states, 1)

    def forward(self, x):
        starts = {
            "recent": lambda: x[:, -6:],
            "old": lambda: x[:, :9],
            "every second": lambda: x[:, ::2],
            "times zero": lambda: x * (torch.arange(x.shape[1]) > 11).float()[:, None],
            "where": lambda: torch.where((torch.arange(x.shape[1]) % 3 > 0)[:, None], x, torch.zeros(())),
            "embedded": lambda: self.embedding(x),
            "detached input": x.detach,
        }
        x = starts.get(self.start, lambda: x)()
        if self.end == "no_grad":
            with torch.no_grad():
                return self.head(self.states(x)[:, -1])
        states = self.states(x)
        read = {
            "mean": lambda: states.mean(1),
            "first": lambda: states[:, 0],
            "middle": lambda: states[:, 3],
            "maximum": lambda: states.amax(1),
            "gathered": lambda: states.gather(1, torch.full((len(states), 1, states.shape[2]), 4))[:, 0],
        }
        state = read.get(self.end, lambda: states[:, -1])()
        if self.end == "detached output":
            state = state.detach()
        elif self.end == "rounded":
            state = (state > 0).float()
        elif self.end == "argmax":
            state = self.table(state.argmax(-1))
        return self.head(state)


def draw(seed):
    """Draw a model, and data whose target is one input some steps back."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kind = str(rng.choice(KINDS))
    end = str(rng.choice(ENDS, p=[0.37, *[0.07] * 9]))
    start = str(rng.choice(STARTS, p=[0.4, 0.2, *[0.07] * 5, 0.05]))
    detach_every = int(rng.choice([0, 1, 5])) if "loop" in kind else 0
    x = rng.normal(size=(192, STEPS, FEATURES)).astype("float32")
    lag = int(rng.integers(1, STEPS - 2))
    return Drawn(kind, end, start, detach_every).eval(), x, x[:, STEPS - 1 - lag, :1], lag


def gradient_size(model, x, step):
    """Return the largest gradient of the summed output by the input at one step, by torch alone; 0 without a path."""
    inputs = torch.as_tensor(x[:32]).requires_grad_()
    output = model(inputs)
    if not output.requires_grad:
        return 0.0
    (gradient,) = torch.autograd.grad(output.sum(), inputs, allow_unused=True)
    return 0.0 if gradient is None else float(gradient[:, step].abs().max())
