"""Torch networks of known condition: trained from a seed, or built by formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from _zoo_tasks import Task
from torch import nn


class Net(nn.Module):
    """A recurrent network with a linear readout of the last step (bidirectional: of the mean) or of every step."""

    def __init__(
        self,
        cell: str,
        features: int,
        outputs: int,
        units: int = 32,
        *,
        layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        sequence: bool = False,
        nonlinearity: str = "tanh",
    ) -> None:
        super().__init__()
        kind = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[cell]
        options: dict[str, Any] = {"nonlinearity": nonlinearity} if cell == "rnn" else {}
        self.rnn = kind(features, units, layers, batch_first=True, bidirectional=bidirectional, **options)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(units * (1 + bidirectional), outputs)
        self.sequence, self.pooled = sequence, bidirectional

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (sample, time, feature) to (sample, output), or to (sample, time, output) for sequences."""
        h = self.rnn(x)[0]
        if not self.sequence:
            h = h.mean(dim=1) if self.pooled else h[:, -1]
        return self.head(self.dropout(h))


class Utterances(Net):
    """A network on packed sequences of different lengths: reads the state after the last step that is not all zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (sample, time, feature), zero-padded at the end, to (sample, output)."""
        lengths = (x != 0).any(dim=2).sum(dim=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        final = self.rnn(packed)[1]
        return self.head(self.dropout((final[0] if isinstance(final, tuple) else final)[-1]))


class Stacked(Net):
    """An untrained two-layer network; the second layer's input weights are multiplied by ``coupling``."""

    def __init__(self, cell: str, coupling: float, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(cell, 1, 1, 24, layers=2)
        with torch.no_grad():
            self.rnn.weight_ih_l1.mul_(coupling)


def set_initial_weights(net: Net, cell: str, scheme: str) -> None:
    """Set initial weights: the framework's, orthogonal with a gain, or with a bias on the gate that keeps the state."""
    units = net.rnn.hidden_size
    with torch.no_grad():
        for name, weight in net.rnn.named_parameters():
            if scheme.startswith("orthogonal") and name.startswith("weight_hh"):
                for block in weight.split(units):
                    nn.init.orthogonal_(block, float(scheme.split()[1]))
            if scheme.startswith("keep") and name.startswith("bias_ih"):
                value = float(scheme.split()[1])
                gate = {"lstm": slice(units, 2 * units), "gru": slice(units, 2 * units)}.get(cell)
                if gate is not None:
                    weight[gate] = value


def loss_of(task: Task, raw: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy (classes) or the mean squared error."""
    return nn.functional.cross_entropy(raw, y) if task.kind == "classes" else nn.functional.mse_loss(raw, y)


def train(
    net: Net, task: Task, seed: int, iterations: int, *, rate: float = 5e-3, window: int | None = None, batch: int = 64
) -> None:
    """Train by Adam with clipped gradients; with ``window``, backpropagation is truncated to that many steps."""
    optimizer = torch.optim.Adam(net.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations, rate / 20)
    net.train()
    for i in range(iterations):
        x = task.draw(batch, 1000 * seed + i + 7)
        y = torch.as_tensor(task.ideal(x))
        raw = _truncated(net, torch.as_tensor(x), window) if window else net(torch.as_tensor(x))
        loss = loss_of(task, raw, y.long() if task.kind == "classes" else y.float())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    net.eval()


def _truncated(net: Net, x: torch.Tensor, window: int) -> torch.Tensor:
    if net.sequence:
        state, outputs = None, []
        for first in range(0, x.shape[1], window):
            h, state = net.rnn(x[:, first : first + window], state)
            state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
            outputs.append(net.head(h))
        return torch.cat(outputs, dim=1)
    with torch.no_grad():
        _, state = net.rnn(x[:, :-window])
    h, _ = net.rnn(x[:, -window:], state)
    return net.head(h[:, -1])


class Linear(nn.Module):
    """A linear RNN, h_t = A h_(t-1) + B x_t, y = C h_T, whose properties have closed forms."""

    def __init__(self, units: int, features: int, radius: float, seed: int, *, condition: float = 1.0) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        basis = np.linalg.qr(rng.normal(size=(units, units)))[0]
        stretch = np.diag(np.geomspace(1, condition, units))
        a = basis @ stretch @ np.linalg.qr(rng.normal(size=(units, units)))[0] @ np.linalg.inv(stretch) @ basis.T
        a *= radius / np.abs(np.linalg.eigvals(a)).max()
        self.a, self.b, self.c = a, rng.normal(size=(units, features)), rng.normal(size=(1, units)) / math.sqrt(units)
        self.cell = _LinearCell(features, units)
        self.head = nn.Linear(units, 1, bias=False)
        with torch.no_grad():
            self.cell.into.weight.copy_(torch.as_tensor(self.b))
            self.cell.again.weight.copy_(torch.as_tensor(a))
            self.head.weight.copy_(torch.as_tensor(self.c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (sample, time, feature) to (sample, 1), read after the last step."""
        h = x.new_zeros(x.shape[0], self.a.shape[0])
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)

    def memory(self, steps: int, level: float = 0.05) -> int:
        """Return n in closed form: at most ``level`` of the impulse response's energy is older than n steps."""
        response, row = [], self.c
        for _ in range(steps):
            response.append(float(np.sum((row @ self.b) ** 2)))
            row = row @ self.a
        energy = np.array(response)
        older = 1 - np.cumsum(energy) / energy.sum()
        return int(np.argmax(older <= level)) + 1


class _LinearCell(nn.RNNCellBase):
    """A user-defined linear cell, stepped by a loop."""

    def __init__(self, features: int, units: int) -> None:
        super().__init__(features, units, False, num_chunks=1)
        self.into, self.again = nn.Linear(features, units, bias=False), nn.Linear(units, units, bias=False)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.into(x) + self.again(h)


def latch(weight: float, units: int = 8, seed: int = 0) -> Net:
    """Return a tanh network that stores the sign of a strong input: two stable states without gradient between them."""
    net = Net("rnn", 1, 1, units)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        net.rnn.weight_hh_l0.copy_(weight * torch.eye(units))
        net.rnn.weight_ih_l0.copy_(torch.as_tensor(rng.uniform(4, 6, (units, 1))))
        net.rnn.bias_hh_l0.zero_()
        net.rnn.bias_ih_l0.zero_()
        net.head.weight.fill_(1 / units)
        net.head.bias.zero_()
    return net.eval()


def gated_net(cell: str, tau: float, units: int = 16, seed: int = 0, features: int = 1) -> Net:
    """Return an LSTM or GRU whose state-keeping gate is constant: its memory decays as exp(-t / tau)."""
    net = Net(cell, features, 1, units)
    keep = math.exp(-1 / tau)
    bias = math.log(keep / (1 - keep))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in net.rnn.named_parameters():
            weight.zero_()
            if name.startswith("weight_ih"):
                weight[2 * units : 3 * units] = 0.05 * torch.randn(units, features, generator=generator)
        b = net.rnn.bias_ih_l0
        if cell == "lstm":
            b[:units], b[units : 2 * units], b[3 * units :] = 4.0, bias, 4.0
        else:
            b[:units], b[units : 2 * units] = 4.0, bias
        net.head.weight.copy_(torch.randn(1, units, generator=generator))
        net.head.bias.zero_()
    return net.eval()


def random_tanh(gain: float, units: int, seed: int) -> Net:
    """Return Sompolinsky's network: recurrent weights of standard deviation gain / sqrt(units)."""
    net = Net("rnn", 1, 1, units)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        net.rnn.weight_hh_l0.copy_(gain / units**0.5 * torch.randn(units, units, generator=generator))
        net.rnn.weight_ih_l0.copy_(0.3 * torch.randn(units, 1, generator=generator))
        net.rnn.bias_hh_l0.zero_()
        net.rnn.bias_ih_l0.zero_()
        net.head.weight.copy_(torch.randn(1, units, generator=generator) / units**0.5)
    return net.eval()


def random_gru(gain: float, units: int, seed: int) -> Net:
    """Return a GRU with recurrent weights of standard deviation gain / sqrt(units)."""
    net = Net("gru", 1, 1, units)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        net.rnn.weight_hh_l0.copy_(gain / units**0.5 * torch.randn(3 * units, units, generator=generator))
        net.rnn.weight_ih_l0.copy_(0.3 * torch.randn(3 * units, 1, generator=generator))
        net.head.weight.copy_(torch.randn(1, units, generator=generator) / units**0.5)
    return net.eval()


def growing_relu(radius: float, units: int, seed: int) -> Net:
    """Return a relu network with positive weights and a given spectral radius; above 1 its states grow."""
    net = Net("rnn", 1, 1, units, nonlinearity="relu")
    rng = np.random.default_rng(seed)
    kernel = np.abs(rng.normal(size=(units, units)))
    with torch.no_grad():
        net.rnn.weight_hh_l0.copy_(torch.as_tensor(kernel * radius / np.abs(np.linalg.eigvals(kernel)).max()))
        net.rnn.weight_ih_l0.copy_(torch.as_tensor(np.abs(rng.normal(size=(units, 1)))))
        net.head.weight.copy_(torch.as_tensor(rng.normal(size=(1, units)) / units))
    return net.eval()


def kill(net: Net, share: float, seed: int) -> int:
    """Cut a share of the units off from input and state, so that they are constant; return their number."""
    units = net.rnn.hidden_size
    dead = np.random.default_rng(seed).permutation(units)[: round(share * units)]
    with torch.no_grad():
        for name, weight in net.rnn.named_parameters():
            for block in weight.split(units):
                block[dead] = -1.0 if name == "bias_ih_l0" and len(weight) == units else 0.0
    return len(dead)
