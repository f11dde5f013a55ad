"""What ``rl.diagnose`` costs, by part, in forward and backward passes of torch; the Lyapunov spectrum against its QR.

python benchmarks/diagnosis_cost.py [--small]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import rnnlens as rl
from rnnlens.diagnosis.carried import measure_carried
from rnnlens.diagnosis.experiment import Experiment, read_samples
from rnnlens.diagnosis.layers import measure_layers
from rnnlens.diagnosis.memory import measure_memory
from rnnlens.diagnosis.missed import measure_missed
from rnnlens.measures import lyapunov_spectrum
from rnnlens.recurrence.cells import SimpleRNN
from rnnlens.recurrence.run import replay

BAR, QR_BAR = 12.0, 2.0


class Stack(nn.Module):
    """Two LSTM layers and a readout of the last step."""

    def __init__(self, units: int, features: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(features, units, 2, batch_first=True), nn.Linear(units, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(sample, time, feature) to (sample, class)."""
        return self.head(self.rnn(x)[0][:, -1])


def seconds(function: Callable[[], object]) -> float:
    """One run."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def diagnosis(units: int, batch: int, steps: int, rounds: int) -> None:
    """The whole of it and its parts, each as a multiple of a training pass in the same rounds."""
    torch.manual_seed(0)
    net, rng = Stack(units, 32), np.random.default_rng(0)
    x, y = rng.normal(size=(batch, steps, 32)).astype("float32"), rng.integers(0, 10, batch)
    given, wanted = torch.as_tensor(x), torch.as_tensor(y)

    def framework() -> None:
        net.zero_grad()
        nn.functional.cross_entropy(net(given), wanted).backward()

    def experiment() -> Experiment:
        made = Experiment(net, read_samples(x, y, 512))
        _ = made.runs, made.prediction
        return made

    ready = experiment()
    parts: dict[str, Callable[[], object]] = {
        "capture and replay": experiment,
        "use, benefit, skill": lambda: measure_memory(ready),
        "missed": lambda: measure_missed(ready),
        "state transfer, adjoint, attribution": lambda: measure_layers(ready),
        "memory carried by each layer": lambda: measure_carried(ready),
        "rl.diagnose": lambda: rl.diagnose(net, x, y),
    }
    times: dict[str, list[float]] = {name: [] for name in ("framework", *parts)}
    framework()
    for _ in range(rounds):
        times["framework"].append(seconds(framework))
        for name, part in parts.items():
            times[name].append(seconds(part))
    unit = statistics.median(times["framework"])
    print(f"\nLSTM 2 x {units}, B = {batch}, T = {steps}; one forward and backward pass of torch: {unit:.3f} s")
    for name in parts:
        median = statistics.median(times[name])
        bar = f"   bar {BAR:g}: {'met' if median <= BAR * unit else 'MISSED'}" if name == "rl.diagnose" else ""
        print(f"{name:40}{median:9.3f} s{median / unit:9.2f} passes{bar}")


def lyapunov(units: int, steps: int, samples: int, rounds: int) -> None:
    """The spectrum against the QR factorisations that it contains."""
    rng = np.random.default_rng(0)
    kernel = 1.5 / units**0.5 * rng.normal(size=(units, units))
    cell = SimpleRNN(rng.normal(size=(1, units)), kernel)
    run = replay(cell, rng.normal(size=(samples, steps, 1)), (np.zeros((samples, units)),), xp=np)
    matrices = rng.normal(size=(samples, units, units))

    def factorisations() -> None:
        for _ in range(steps):
            np.linalg.qr(matrices)

    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(seconds(factorisations))
        ours.append(seconds(lambda: lyapunov_spectrum(run)))
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"\nLyapunov spectrum of {units} units, {steps} steps, {samples} samples")
    verdict = "met" if a <= QR_BAR * b else "MISSED"
    print(f"ours {a:.2f} s, its QR factorisations {b:.2f} s: {a / b:.2f}   bar {QR_BAR:g}: {verdict}")


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a toy size, to see that it runs")
    small = parser.parse_args().small
    warnings.simplefilter("ignore")
    diagnosis(*((16, 64, 20, 1) if small else (256, 64, 500, 3)))
    lyapunov(*((8, 50, 2, 1) if small else (64, 1000, 16, 3)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
