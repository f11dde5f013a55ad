"""Networks with errors other than a missed dependency: overfitted, wrong scale, weighted classes, best forecasts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from _zoo_nets import Net
from torch import nn

Array = np.ndarray[Any, Any]
STEPS, LAG = 16, 4


@dataclass
class SampledTask:
    """A task with random targets: ``draw`` stores them and ``ideal`` returns them."""

    kind: str
    rho: float = 0.0
    horizon: int = 0
    features: int = 1
    outputs: int = 1
    sequence: bool = False
    targets: list[Array] = field(default_factory=list)

    def draw(self, samples: int, seed: int) -> Array:
        """Draw inputs (sample, time, feature), and the targets that :meth:`ideal` returns."""
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(samples, STEPS, 1)).astype(np.float32)
        signal = x[:, -1 - LAG]
        if self.kind == "forecast":
            x, y = self._windows(rng, samples)
        elif self.kind == "noise":
            y = rng.normal(size=(samples, 1))
        elif self.kind == "classes":
            y = (rng.uniform(size=(samples, 1)) < 1 / (1 + np.exp(6.0 - 4.0 * signal))).astype(np.float32)
        else:
            y = signal + 0.7 * rng.normal(size=(samples, 1))
            y = y + 0.8 * x[:, -1 - 2 * LAG] if self.kind == "two lags" else y
        self.targets = [np.asarray(y, dtype=np.float32)]
        return x

    def ideal(self, x: Array) -> Array:
        """Return the targets of the inputs drawn last."""
        return self.targets[0]

    def _windows(self, rng: np.random.Generator, samples: int) -> tuple[Array, Array]:
        series = rng.normal(size=samples + STEPS + self.horizon + 300)
        for t in range(1, len(series)):
            series[t] += self.rho * series[t - 1]
        series = series[300:].astype(np.float32)
        x = np.lib.stride_tricks.sliding_window_view(series, STEPS)[:samples, :, None].copy()
        return x, series[STEPS + self.horizon - 1 :][:samples, None]


def train_overfitted(task: SampledTask, seed: int) -> Net:
    """Train a GRU on so few samples that it memorises their noise."""
    torch.manual_seed(seed)
    count = 96 if task.kind == "noise" else 256
    x = torch.as_tensor(task.draw(count, seed))
    y, net = torch.as_tensor(task.ideal(x)), Net("gru", 1, 1, 20)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150 if task.kind == "noise" else 200):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return net.eval()


class Tap(nn.Module):
    """An almost linear network: ``scale`` times the input ``lag`` steps ago, plus ``offset``."""

    def __init__(self, lag: int, scale: float, offset: float = 0.0) -> None:
        super().__init__()
        units = 2 * LAG + 4
        self.rnn, self.head = nn.RNN(1, units, batch_first=True), nn.Linear(units, 1)
        with torch.no_grad():
            for weight in self.parameters():
                weight.zero_()
            self.rnn.weight_hh_l0.copy_(torch.diag(torch.ones(units - 1), -1))
            self.rnn.weight_ih_l0[0, 0] = 0.01
            self.head.weight[0, lag] = 100 * scale
            self.head.bias.fill_(offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (sample, time, feature) to (sample, 1)."""
        return self.head(self.rnn(x)[0][:, -1])
