"""Cost of ``rl.diagnose`` and its parts in forward and backward passes of torch.

python benchmarks/diagnosis_cost.py [--small] [--passes]

Also: the Lyapunov spectrum against its QR factorisations, and the fixed points of a 3-bit flip-flop.
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
from _summary import Row, collect
from torch import nn

import rnnlens as rl
from rnnlens.adapters.registry import adapter_for
from rnnlens.diagnosis.carried import measure_carried
from rnnlens.diagnosis.experiment import Experiment
from rnnlens.diagnosis.layers import measure_layers
from rnnlens.diagnosis.memory import measure_memory, measure_missed
from rnnlens.diagnosis.samples import Orientation, read_samples
from rnnlens.measures.dynamics import lyapunov_spectrum
from rnnlens.recurrence.cells import LSTM, SimpleRNN
from rnnlens.recurrence.replay import replay

BAR, QR_BAR = 8.0, 2.0


class Stack(nn.Module):
    """Two LSTM layers and a readout of the last step."""

    def __init__(self, units: int, features: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(features, units, 2, batch_first=True), nn.Linear(units, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (sample, time, feature) to (sample, class)."""
        return self.head(self.rnn(x)[0][:, -1])


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds of one run."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def time_diagnosis(units: int, batch: int, steps: int, rounds: int) -> None:
    """Time ``rl.diagnose`` and its parts, as multiples of a training pass in the same rounds."""
    torch.manual_seed(0)
    net, rng = Stack(units, 32), np.random.default_rng(0)
    x = rng.normal(size=(batch, steps, 32)).astype("float32")
    inputs = torch.as_tensor(x)
    with torch.no_grad():
        # Labels are the network's own predictions: it has skill, so every part of a diagnosis runs.
        net.head.weight *= 50
        net.head.bias -= net(inputs).mean(dim=0)
        labels = net(inputs).argmax(dim=1)
    y = labels.numpy()

    def framework() -> None:
        net.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()

    def make_experiment() -> Experiment:
        fresh = Experiment(net, read_samples(x, y, 512, lambda batch: Orientation(adapter_for(net), net, batch, None)))
        _ = fresh.replays, fresh.prediction
        return fresh

    prepared = make_experiment()
    if not measure_memory(prepared).is_known:
        raise SystemExit("The network has no skill: not all parts would be measured.")
    calls: dict[str, Callable[[], object]] = {
        "capture and replay": make_experiment,
        "use, benefit, skill": lambda: measure_memory(prepared),
        "missed": lambda: measure_missed(prepared),
        "state transfer, adjoint, attribution": lambda: measure_layers(prepared),
        "memory carried by each layer": lambda: measure_carried(prepared),
        "rl.diagnose": lambda: rl.diagnose(net, x, y),
    }
    times: dict[str, list[float]] = {name: [] for name in ("framework", *calls)}
    for function in (framework, calls["rl.diagnose"]):
        function()
    for _ in range(rounds):
        times["framework"].append(seconds(framework))
        for name, call in calls.items():
            times[name].append(seconds(call))
    pass_seconds = statistics.median(times["framework"])
    print(f"\nLSTM 2 x {units}, B = {batch}, T = {steps}; one forward and backward pass of torch: {pass_seconds:.3f} s")
    for name in calls:
        median = statistics.median(times[name])
        bar = f"   bar {BAR:g}: {'met' if median <= BAR * pass_seconds else 'MISSED'}" if name == "rl.diagnose" else ""
        print(f"{name:40}{median:9.3f} s{median / pass_seconds:9.2f} passes{bar}")
        if name == "rl.diagnose":
            collect(
                Row(
                    "Diagnosis",
                    f"{name}, T {steps}",
                    median / pass_seconds,
                    "x",
                    "forward and backward pass of torch",
                    BAR,
                )
            )


def time_lyapunov(kind: str, units: int, steps: int, samples: int, rounds: int) -> None:
    """Time the Lyapunov spectrum against the QR factorisations that it contains."""
    rng = np.random.default_rng(0)
    gates, states = {"rnn": (1, 1), "lstm": (4, 2)}[kind]
    kernels = rng.normal(size=(1, gates * units)), 1.5 / units**0.5 * rng.normal(size=(units, gates * units))
    cell = SimpleRNN(*kernels) if kind == "rnn" else LSTM(*kernels)
    start = tuple(np.zeros((samples, units)) for _ in range(states))
    run = replay(cell, rng.normal(size=(samples, steps, 1)), start)
    matrices = rng.normal(size=(samples, states * units, states * units))

    def factorisations() -> None:
        for _ in range(steps):
            np.linalg.qr(matrices)

    spectrum_times, qr_times = [], []
    for _ in range(rounds):
        qr_times.append(seconds(factorisations))
        spectrum_times.append(seconds(lambda: lyapunov_spectrum(run)))
    a, b = statistics.median(spectrum_times), statistics.median(qr_times)
    print(f"\nLyapunov spectrum, {kind} of {units} units, {steps} steps, {samples} samples")
    verdict = "met" if a <= QR_BAR * b else "MISSED"
    print(f"ours {a:.2f} s, its QR factorisations {b:.2f} s: {a / b:.2f}   bar {QR_BAR:g}: {verdict}")


class FlipFlop(nn.Module):
    """A GRU that stores three bits: each output is the sign of the last pulse of its input."""

    def __init__(self, units: int = 16) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(3, units, batch_first=True), nn.Linear(units, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (sample, time, pulse) to (sample, time, bit)."""
        return self.head(self.gru(x)[0])


def pulses(count: int, steps: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rare pulses of -1 and 1, and the last pulse of each bit, both (sample, time, bit)."""
    x = rng.choice([-1.0, 0.0, 1.0], p=[0.05, 0.9, 0.05], size=(count, steps, 3))
    x[:, 0] = rng.choice([-1.0, 1.0], size=(count, 3))
    y = x.copy()
    for t in range(1, steps):
        y[:, t] = np.where(x[:, t] == 0, y[:, t - 1], x[:, t])
    return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y, dtype=torch.float32)


def check_flip_flop(iterations: int, rounds: int) -> None:
    """Check that a trained flip-flop has one stable fixed point for each of its eight memories."""
    torch.manual_seed(0)
    net, rng = FlipFlop(), np.random.default_rng(0)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(iterations):
        x, y = pulses(64, 40, rng)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    x, y = pulses(64, 40, rng)
    error = float(nn.functional.mse_loss(net(x), y))
    times = [seconds(lambda: rl.fixed_points(net, x, input="zero", most=512)) for _ in range(rounds + 1)][1:]
    points = rl.fixed_points(net, x, input="zero", most=512)
    stable = points.states[np.asarray(points.stable)]
    with torch.no_grad():
        bits = np.sign(net.head(torch.as_tensor(np.asarray(stable), dtype=torch.float32)).numpy())
    memories = len({tuple(row) for row in bits.tolist()})
    speed = float(np.max(np.asarray(points.data.speed)[np.asarray(points.fixed)], initial=0.0))
    print(f"\nFixed points of a 3-bit flip-flop, GRU of 16 units, 512 starts (mean squared error {error:.4f})")
    print(f"{int(np.sum(points.fixed))} fixed, {len(stable)} stable, for {memories} of 8 memories, in ", end="")
    print(f"{statistics.median(times):.2f} s; largest |F(h) - h|^2 / 2 {speed:.0e}   bar 8, 1e-16: ", end="")
    print("met" if memories == 8 and speed <= 1e-16 else "MISSED")


def main() -> int:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a toy size, to see that it runs")
    parser.add_argument("--passes", action="store_true", help="only the passes of rl.diagnose")
    args = parser.parse_args()
    small = args.small
    warnings.simplefilter("ignore")
    time_diagnosis(*((16, 64, 20, 1) if small else (256, 64, 500, 3)))
    if args.passes:
        return 0
    for kind in ("rnn", "lstm"):
        time_lyapunov(kind, *((8, 50, 2, 1) if small else (64, 1000, 16, 3)))
    check_flip_flop(*((20, 1) if small else (1500, 3)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
