"""Small torch networks with one everyday bug each, and healthy ones: drawn from a seed, trained in a second."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

MSE = functional.mse_loss
CELLS = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}


class Net(nn.Module):
    """A recurrent layer and a linear head, with one bug or none."""

    def __init__(self, cell, features, units, outputs, bug="", bidirectional=False):
        super().__init__()
        options = {} if bug == "SAMPLES_MIXED" else {"batch_first": True}
        self.rnn = CELLS[cell](features, units, bidirectional=bidirectional, **options)
        self.head = nn.Linear(units * (1 + bidirectional), outputs)
        self.bug, self.units, self.bidirectional, self.kept = bug, units, bidirectional, None

    def _kept_state(self, count):
        """Return the state that an earlier batch left, of the first samples; None if there is none."""
        if self.kept is None:
            return None
        states = tuple(state[:, :count].contiguous() for state in self.kept)
        return states if len(states) > 1 else states[0]

    def forward(self, x):
        start = self._kept_state(len(x))
        out, _ = self.rnn(x, start) if start is not None else self.rnn(x)
        if self.bidirectional and self.bug != "BACKWARD_HALF_AT_ITS_FIRST_STEP":
            read = torch.cat([out[:, -1, : self.units], out[:, 0, self.units :]], 1)
        else:
            read = out[:, -1]
        if self.bug == "WEIGHTS_WITHOUT_GRADIENT":
            read = read.detach()
        raw = self.head(read)
        return raw.softmax(-1) if self.bug == "OUTPUT_FORM" else raw


@dataclass
class Case:
    """A network, data of another draw than that of its training, and the arguments of its diagnosis."""

    model: Any
    x: Any
    y: Any
    loss: Any
    optimizer: Any = None


def series(rng, count, steps, features):
    return rng.normal(size=(count, steps, features)).astype("float32")


def optimizer_of(model, bug, seed):
    """Return an optimizer of the weights; of bugs of the learning rate, Adam or gradient descent far off."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    draw_rate = np.random.default_rng(9000 + seed).uniform
    if bug == "UPDATES_TOO_SMALL":
        if seed // 2 % 2:
            return torch.optim.SGD(parameters, 10 ** draw_rate(-8, -6), momentum=0.9)
        return torch.optim.AdamW(parameters, 10 ** draw_rate(-8, -6.3), weight_decay=0.0)
    if bug == "UPDATES_TOO_LARGE":
        if seed // 2 % 2:
            return torch.optim.SGD(parameters, 10 ** draw_rate(0.5, 1.5))
        return torch.optim.Adam(parameters, 10 ** draw_rate(0.0, 1.0))
    return torch.optim.Adam(parameters, 2e-2)


def train(model, x, y, loss, iterations, optimizer):
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    for i in range(iterations):
        rows = torch.arange(32) + 32 * i % (len(x) - 32)
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of targets that broadcast
            loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model.eval()


#: Bugs of networks for classes; all others predict a number.
OF_CLASSES = ("OUTPUT_FORM", "UNIFORM_OUTPUT")
BUGS = (
    *("SAMPLES_MIXED", "TARGET_SHAPE", "OUTPUT_FORM", "WEIGHTS_WITHOUT_GRADIENT", "FROZEN", "STATE_CARRIED"),
    *("BACKWARD_HALF_AT_ITS_FIRST_STEP", "LEAK", "INPUT_SCALE", "UNIFORM_OUTPUT"),
    *("UPDATES_TOO_SMALL", "UPDATES_TOO_LARGE", "TARGET_UNRELATED"),
)
#: Healthy conditions of a network without a bug.
HEALTHY = ("solved", "noise target", "bidirectional", "classes", "two layers", "untrained", "overfitted", "per step")


def draw(bug, seed):
    """Draw a network with a bug (``""`` for none of them, chosen among the healthy conditions by the seed)."""
    rng = np.random.default_rng(1000 + seed)
    torch.manual_seed(seed)
    healthy = HEALTHY[seed % len(HEALTHY)] if not bug else ""
    steps, features, units = int(rng.integers(8, 16)), int(rng.integers(1, 4)), int(rng.choice([6, 10, 16]))
    lag = int(rng.integers(1, 4))
    samples = 512 if bug == "TARGET_UNRELATED" else 192
    cell = str(rng.choice(list(CELLS)))
    classes = int(rng.integers(2, 6)) if bug in OF_CLASSES or healthy == "classes" else 0
    both = healthy == "bidirectional" or bug == "BACKWARD_HALF_AT_ITS_FIRST_STEP"
    model = Net(cell, features, units, classes or 1, bug, both)
    if healthy == "two layers":
        model.rnn = CELLS[cell](features, units, num_layers=2, batch_first=True)

    def make(count):
        x = series(rng, count, steps, features)
        value = x[:, -1 - lag, :1]
        if bug == "TARGET_UNRELATED":
            value = value[rng.permutation(count)]
        if bug == "LEAK":
            value = x[:, -1, :1]
        if healthy == "noise target":
            value = value + 0.5 * rng.normal(size=value.shape).astype("float32")
        if bug == "INPUT_SCALE":
            x = x * np.float32(10.0 ** rng.choice([-5.0, -4.0, 3.0, 4.0]))
        if classes:
            edges = np.quantile(value, np.arange(1, classes) / classes)
            return x, np.digitize(value[:, 0], edges).astype("int64")
        return x, value[:, 0] if bug == "TARGET_SHAPE" else value

    loss = functional.cross_entropy if classes else MSE
    if healthy == "per step":
        return _per_step(model, make(256)[0], make(samples)[0], lag, seed)
    iterations = 20 if bug and bug != "LEAK" else 200 if healthy == "overfitted" else 100
    if bug == "UNIFORM_OUTPUT" or healthy == "untrained" or (bug == "UPDATES_TOO_LARGE" and seed // 2 % 2):
        iterations = 0
    if bug == "FROZEN":
        model.rnn.requires_grad_(requires_grad=False)
    if bug == "UNIFORM_OUTPUT":
        with torch.no_grad():
            model.head.weight.mul_(1e-3), model.head.bias.zero_()
    optimizer = optimizer_of(model, bug, seed)
    x, y = make(64 if healthy == "overfitted" else 512)
    if bug != "SAMPLES_MIXED":
        train(model, x, y, loss, iterations, optimizer)
    x, y = make(samples)
    if bug == "STATE_CARRIED":
        start = torch.randn(1, samples, units)
        model.kept = (start, start.clone()) if cell == "lstm" else (start,)
        return Case(model, x, y, loss, optimizer)
    return Case(model.eval(), x, y, loss, optimizer)


def _per_step(model, x, held_out, lag, seed):
    class EveryStep(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = model.rnn, model.head

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    def echo(x):
        y = np.roll(x[..., :1], lag, axis=1)
        y[:, :lag] = 0
        return y

    net = EveryStep()
    optimizer = optimizer_of(net, "", seed)
    train(net, x, echo(x), MSE, 200, optimizer)
    return Case(net, held_out, echo(held_out), MSE, optimizer)
