"""Fixed cost of a call: verbs on a model with almost no computation, in milliseconds, in steady state.

    python benchmarks/small_calls.py [--small] [--engine torch|jax|tensorflow] [--where]

An LSTM of 8 units and a dense layer, 2 samples of 10 steps. The first calls, which compile and detect axes, are not
counted; the table shows medians of the rest, and the framework's own forward and backward pass of the same model.
``--where`` prints instead, per verb, the modules of rnnlens in which processor time is spent.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _summary import Row, collect

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from own_files import package_path

import rnnlens as rl

ENGINES = ("torch", "jax", "tensorflow")
#: Largest number of milliseconds of a verb, by engine, and of rl.layers.
BARS = {"torch": 5.0, "jax": 5.0, "tensorflow": 10.0}
LAYERS_BAR = 1.0


def torch_calls() -> dict[str, Callable[[], object]]:
    """Return calls on a torch module by name."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    model, x, y = Net(), torch.randn(2, 10, 4), torch.randn(2, 10, 1)
    loss = nn.functional.mse_loss

    def framework_pass() -> None:
        model.zero_grad()
        loss(model(x), y).backward()

    return {"the framework's pass": framework_pass, **verbs(model, (x, y), {"loss": loss})}


def keras_calls() -> dict[str, Callable[[], object]]:
    """Return calls on a Keras model by name."""
    import keras

    model = keras.Sequential([keras.Input((10, 4)), keras.layers.LSTM(8, return_sequences=True), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(2, 10, n)).astype("float32") for n in (4, 1))
    return {"the framework's pass": lambda: model.train_on_batch(x, y), **verbs(model, (x, y), {})}


def verbs(model, data, options) -> dict[str, Callable[[], object]]:
    """Return the verbs by name, with the arguments of a typical first call."""
    x, y = data
    return {
        "rl.layers": lambda: rl.layers(model),
        "rl.trace": lambda: rl.trace(model, x, y, **options),
        "rl.gradients by weights": lambda: rl.gradients(model, x, y, wrt="weights", **options),
        "rl.weights": lambda: rl.weights(model, x, y, **options),
        "rl.jacobian": lambda: rl.jacobian(model, x),
    }


def measure(engine: str, rounds: int, show_profile: bool) -> None:
    """Print the median of each call, or its profile by module."""
    calls = torch_calls() if engine == "torch" else keras_calls()
    for call in calls.values():
        for _ in range(4):
            call()
    if show_profile:
        for name, call in calls.items():
            print(f"\n{engine}: {name}\n{profile(call, rounds)}")
        return
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start))
    for name, values in times.items():
        median = statistics.median(values)
        bar = None if name == "the framework's pass" else LAYERS_BAR if name == "rl.layers" else BARS[engine]
        row = Row("Small calls", f"{name}, {engine}", median, "ms", bar=bar)
        collect(row)
        verdict = "" if bar is None else f"bar {bar:g}: {'met' if row.is_met else 'MISSED'}"
        print(
            f"{engine:12}{name:26}{median:8.2f} ms   ({min(values):.2f} to {max(values):.2f})   {verdict}", flush=True
        )


def profile(call: Callable[[], object], rounds: int) -> str:
    """Return the share of processor time in each folder of rnnlens, and in the rest, as text."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(rounds):
        call()
    profiler.disable()
    shares: Counter[str] = Counter()
    for (file, _, _), (_, _, own_seconds, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        path = package_path(file)
        shares["/".join(path.split("/")[:2]) if path else "frameworks and libraries"] += own_seconds
    total = sum(shares.values())
    return "\n".join(f"  {name:40}{100 * own_seconds / total:5.1f} %" for name, own_seconds in shares.most_common(12))


def main() -> int:
    """Measure every engine in its own process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--engine", choices=ENGINES, help="only this one, in this process")
    parser.add_argument("--where", action="store_true", help="where the time goes")
    args = parser.parse_args()
    if args.engine:
        measure(args.engine, 3 if args.small else 50, args.where)
        return 0
    failed = 0
    for engine in ENGINES:
        environment = {**os.environ, "KERAS_BACKEND": engine, "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, str(Path(__file__)), "--engine", engine, *sys.argv[1:]]
        failed += subprocess.run(command, env=environment, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
