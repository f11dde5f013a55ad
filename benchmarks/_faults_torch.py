"""Torch networks with one planted fault of known origin each, and healthy networks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

MSE = nn.functional.mse_loss
LARGEST = float(np.finfo(np.float32).max)


@dataclass
class Fault:
    """A call of ``rl.find_nonfinite`` with its expected result: attributes, index, and words of ``fed_by``."""

    kind: str
    model: Any
    x: Any
    y: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()


class Net(nn.Module):
    """Linear, recurrent, linear; the data layout follows ``batch_first``."""

    def __init__(self, rng: np.random.Generator, cell: Any = None, end: Any = None, **options: Any) -> None:
        super().__init__()
        self.batch_first = bool(rng.random() < 0.7)
        cell_name = cell or rng.choice(["RNN", "LSTM", "GRU"])
        options = {"num_layers": int(rng.integers(1, 3)), "bidirectional": bool(rng.random() < 0.3)} | options
        units = int(rng.integers(3, 9))
        self.inp = nn.Linear(3, 4)
        self.rnn = getattr(nn, str(cell_name))(4, units, batch_first=self.batch_first, **options)
        self.head = nn.Linear(units * (2 if options["bidirectional"] else 1), 2)
        self.end = end

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = self.inp(x)
        if mask is not None:
            h = h * mask[:, :, None]
        h = self.rnn(h)[0]
        y = self.head(h[:, -1] if self.batch_first else h[-1])
        return y if self.end is None else self.end(y)


class Cell(nn.Module):
    """A user-defined cell that divides by its input."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(3, units), nn.Linear(units, units)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.w(x) + self.u(h)) + 0.1 / x[:, :1]


class Loop(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.cell, self.units, self.head = Cell(units), units, nn.Linear(units, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(len(x), self.units)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


def make_data(
    rng: np.random.Generator, batch_first: bool = True, features: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    samples, steps = int(rng.integers(3, 9)), int(rng.integers(10, 31))
    if samples == steps:
        steps += 1
    x = rng.normal(size=(samples, steps, features) if batch_first else (steps, samples, features))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(rng.normal(size=(samples, 2)), dtype=torch.float32)


def random_index(rng: np.random.Generator, x: torch.Tensor, batch_first: bool) -> tuple[int, int, int]:
    """Return a random (sample, step, feature)."""
    samples, steps = x.shape[:2] if batch_first else x.shape[:2][::-1]
    return int(rng.integers(samples)), int(rng.integers(steps)), int(rng.integers(x.shape[2]))


def bad_input(rng: np.random.Generator) -> Fault:
    net = Net(rng)
    x, y = make_data(rng, net.batch_first)
    sample, step, feature = random_index(rng, x, net.batch_first)
    x[(sample, step, feature) if net.batch_first else (step, sample, feature)] = float(
        rng.choice([np.nan, np.inf, -np.inf])
    )
    expected = {"phase": "data", "layer": "input", "sample": sample, "step": step, "feature": feature}
    return Fault("bad input value", net, x, y, {"loss": MSE}, expected)


def bad_weight(rng: np.random.Generator) -> Fault:
    net = Net(rng)
    x, y = make_data(rng, net.batch_first)
    names = [name for name, p in net.named_parameters() if p.ndim == 2]
    name = str(rng.choice(names))
    weight = dict(net.named_parameters())[name]
    with torch.no_grad():
        weight[int(rng.integers(len(weight))), int(rng.integers(weight.shape[1]))] = float(rng.choice([np.nan, np.inf]))
    module, _, weight_key = name.rpartition(".")
    layer = (
        module
        if not weight_key.startswith("weight_") or net.rnn.num_layers == 1
        else f"rnn[{weight_key.partition('_l')[2][0]}]"
    )
    return Fault("weight not finite", net, x, y, {"loss": MSE}, {"phase": "weights", "layer": layer})


def exploding_state(rng: np.random.Generator) -> Fault:
    """Return a relu RNN whose recurrent kernel makes its state overflow, at the step that float64 gives."""
    net = Net(rng, "RNN", nonlinearity="relu", num_layers=1, bidirectional=False)
    x, y = make_data(rng, net.batch_first)
    with torch.no_grad():
        gain = float(10 ** rng.uniform(3, 5))
        net.rnn.weight_hh_l0.copy_(gain * torch.eye(net.rnn.hidden_size))
    h = np.zeros((x.shape[0 if net.batch_first else 1], net.rnn.hidden_size))
    w = {name: p.detach().double().numpy() for name, p in net.named_parameters()}
    steps = x.shape[1 if net.batch_first else 0]
    for step in range(steps):
        projected = (x[:, step] if net.batch_first else x[step]).double().numpy() @ w["inp.weight"].T + w["inp.bias"]
        z = (
            projected @ w["rnn.weight_ih_l0"].T
            + h @ w["rnn.weight_hh_l0"].T
            + w["rnn.bias_ih_l0"]
            + w["rnn.bias_hh_l0"]
        )
        h = np.maximum(z, 0)
        overflowed = (np.abs(z) > LARGEST).any(axis=1)
        if overflowed.any():
            break
    else:
        return exploding_state(rng)
    expected = {"phase": "forward", "layer": "rnn", "step": step, "sample": int(np.argmax(overflowed))}
    return Fault("exploding weights", net, x, y, {"loss": MSE}, expected, ("recurrent_kernel",))


class ZeroStateRNN(nn.Module):
    """A relu RNN with states near 0 and the recurrent kernel ``gain`` times identity: only the gradient grows large."""

    def __init__(self, gain: float, units: int) -> None:
        super().__init__()
        self.rnn = nn.RNN(3, units, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(units, 2)
        with torch.no_grad():
            self.rnn.weight_ih_l0.mul_(1e-30)
            self.rnn.weight_hh_l0.copy_(gain * torch.eye(units))
            self.rnn.bias_ih_l0.fill_(1e-30)
            self.rnn.bias_hh_l0.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def exploding_adjoint(rng: np.random.Generator) -> Fault:
    """Return an RNN with finite states whose gradient overflows backwards, at the step that float64 gives."""
    gain, units = float(10 ** rng.uniform(2.5, 3.5)), int(rng.integers(3, 7))
    net = ZeroStateRNN(gain, units)
    with torch.no_grad():
        net.head.weight.fill_(1.0)
    x, _ = make_data(rng)
    # As many steps as the state, which starts at 1e-30 and grows by the gain, stays finite; the loss adds the rest.
    steps = int(min(x.shape[1], np.log(1e38 / 1e-29) / np.log(gain)))
    x = torch.abs(x[:, :steps])
    y = torch.zeros(len(x), 2)
    scale = float(LARGEST / gain ** int(rng.integers(2, steps - 1)) * 0.9)

    def loss(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((p - p.detach()) * scale).sum()

    lam, steps_back = 2.0 * scale, 0
    while lam <= LARGEST:
        lam, steps_back = lam * gain, steps_back + 1
    expected = {"phase": "backward", "layer": "rnn", "step": steps - 1 - steps_back, "sample": 0}
    return Fault("exploding adjoint", net, x, y, {"loss": loss}, expected, ("recurrent_kernel",))


def half_overflow(rng: np.random.Generator) -> Fault:
    """Return a half-precision network with an input whose product with a weight is beyond float16."""
    net = Net(rng, num_layers=1, bidirectional=False).half()
    x, y = make_data(rng, net.batch_first)
    sample, step, feature = random_index(rng, x, net.batch_first)
    with torch.no_grad():
        net.inp.weight.copy_(torch.full_like(net.inp.weight, 2.0))
    x[(sample, step, feature) if net.batch_first else (step, sample, feature)] = float(rng.uniform(4e4, 6e4))
    expected = {"phase": "forward", "layer": "inp", "sample": sample, "step": step}
    return Fault("overflow in half", net, x.half(), y.half(), {"loss": MSE}, expected, (f"feature {feature}",))


def autocast_overflow(rng: np.random.Generator) -> Fault:
    """Return a network under autocast whose first layer's product is beyond float16."""

    class Cast(Net):
        def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                return super().forward(x).float()

    net = Cast(rng, num_layers=1, bidirectional=False)
    x, y = make_data(rng, net.batch_first)
    sample, step, feature = random_index(rng, x, net.batch_first)
    x[(sample, step, feature) if net.batch_first else (step, sample, feature)] = 3.2e5
    expected = {"phase": "forward", "layer": "inp", "sample": sample, "step": step}
    return Fault("overflow in half", net, x, y, {"loss": MSE}, expected, (f"feature {feature}",))


def log_of_zero(rng: np.random.Generator) -> Fault:
    net = Net(rng)
    x, y = make_data(rng, net.batch_first)
    sample, unit = int(rng.integers(len(y))), int(rng.integers(2))
    gate = torch.ones(len(y), 2)
    gate[sample, unit] = 0.0
    net.end = lambda out: torch.sigmoid(out) * gate
    operation = str(rng.choice(["log", "divide", "root"]))
    losses = {
        "log": lambda p, y: -(torch.log(p)).mean(),
        "divide": lambda p, y: (y.abs() / p).mean(),
        "root": lambda p, y: torch.sqrt(p).mean(),
    }
    cause = {"log": "log of 0", "divide": "division by 0", "root": "root of 0"}[operation]
    phase = "backward" if operation == "root" else "loss"
    expected = {"phase": phase, "layer": "loss", "sample": sample, "unit": unit}
    return Fault("log 0 and the like", net, x, y, {"loss": losses[operation]}, expected, (cause,))


def division_in_a_cell(rng: np.random.Generator) -> Fault:
    net = Loop(int(rng.integers(3, 7)))
    x, y = make_data(rng)
    sample, step, _ = random_index(rng, x, True)
    x[sample, step, 0] = 0.0
    expected = {"phase": "forward", "layer": "cell", "sample": sample, "step": step}
    return Fault("division in a custom cell", net, x, y, {"loss": MSE}, expected, ("division by 0", "feature 0"))


def mask_of_a_sample(rng: np.random.Generator) -> Fault:
    """Return a network with a NaN in a float mask that multiplies its hidden input."""
    net = Net(rng)
    net.batch_first = True
    net.rnn.batch_first = True
    x, y = make_data(rng)
    sample, step, _ = random_index(rng, x, True)
    mask = torch.ones(x.shape[:2])
    mask[sample, step:] = 0.0
    mask[sample, step] = torch.nan
    expected = {"phase": "data", "layer": "input[1]", "sample": sample, "step": step}
    return Fault("NaN in a sample's mask", net, (x, mask), y, {"loss": MSE}, expected)


def healthy(rng: np.random.Generator) -> Fault:
    """Return a healthy network, also with large or masked inputs, large weights, half precision or a user cell."""
    kind = str(rng.choice(["plain", "large", "cell", "half", "masked", "trained-like"]))
    if kind == "cell":
        net: Any = Loop(5)
        x, y = make_data(rng)
        x = x + torch.sign(x) * 0.1
        return Fault("healthy", net, x, y, {"loss": MSE})
    net = Net(rng)
    if kind == "masked":
        net.batch_first = net.rnn.batch_first = True
    x, y = make_data(rng, net.batch_first)
    if kind == "large":
        x = x * 1e6
    if kind == "trained-like":
        with torch.no_grad():
            for p in net.rnn.parameters():
                p.mul_(3.0)
    if kind == "masked":
        mask = torch.ones(x.shape[:2])
        mask[0, 5:] = 0.0
        return Fault("healthy", net, (x, mask), y, {"loss": MSE})
    if kind == "half":
        return Fault("healthy", net.half(), x.half(), y.half(), {"loss": MSE})
    return Fault("healthy", net, x, y, {"loss": MSE, "training": bool(rng.random() < 0.3)})


FAULTS = (
    bad_input,
    bad_weight,
    exploding_state,
    exploding_adjoint,
    half_overflow,
    autocast_overflow,
    log_of_zero,
    division_in_a_cell,
    mask_of_a_sample,
)
