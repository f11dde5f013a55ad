"""What following a training costs, beside the same training that nobody follows.

    python benchmarks/overhead.py [--small] [--engine torch-loop|torch|jax|tensorflow]

An LSTM of 256 units on batches of 64 sequences of 200 steps: a plain loop in torch, and ``fit`` of Keras on each
engine, each in a process of its own. Within a process the plain training and each way of following it take turns, after
one round that compiles; a ratio is the median over rounds of a round's time by that of the plain training before it.
Trainings have 20 batches, that with a probe 100 and three records; the opening of the run counts.

Bars: a probe every 50 steps at most 1.05; direct gradients of the layer, of every batch, at most 1.5 (torch and
TensorFlow; stated for JAX); ``every=0`` within the noise of the plain training against itself, in the first row.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ENGINES = ("torch-loop", "torch", "jax", "tensorflow")
ROUNDS = 5
PROBE = "probe, every=50"
BARS = {"plain again": None, "every=0": None, PROBE: 1.05, "output_grad of every batch": 1.5}


#: A training of so many batches.
Training = Callable[[int], None]


def sizes(small: bool) -> dict[str, int]:
    """Units, samples per batch, steps in time; batches per training, and of the one with a probe; every."""
    if small:
        return {"units": 8, "batch": 4, "time": 10, "steps": 4, "probed": 10, "every": 5}
    return {"units": 256, "batch": 64, "time": 200, "steps": 20, "probed": 100, "every": 50}


def torch_loop(size: dict[str, int], folder: Path) -> dict[str, Training]:
    """Trainings of the same module by one plain loop."""
    import torch

    import rnnlens as rl

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(8, size["units"], batch_first=True)
            self.head = torch.nn.Linear(size["units"], 1)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(size["batch"], size["time"], 8)
    y = x.mean((1, 2))[:, None]
    loss = torch.nn.functional.mse_loss

    def loop(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

    def watched(path: str | None, **options) -> Training:
        def run(steps: int) -> None:
            where = None if path is None else folder / path
            with rl.torch.watch(model, where, resume=False, step=0, **options):
                loop(steps)

        return run

    return {
        "plain": loop,
        "plain again": loop,
        "every=0": watched("never.zarr", every=0),
        PROBE: watched("probe.zarr", every=size["every"], probe=(x, y), loss=loss),
        "output_grad of every batch": watched(
            None, every=1, quantities="output_grad", on_batch=lambda batch: batch["lstm"].output_grad
        ),
    }


def keras_fit(size: dict[str, int], folder: Path) -> dict[str, Training]:
    """Trainings of the same compiled model by ``fit``."""
    import keras
    import numpy as np

    import rnnlens as rl

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((size["time"], 8)), keras.layers.LSTM(size["units"], name="lstm"), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size["batch"] * size["probed"], size["time"], 8)).astype("float32")
    y = x.mean((1, 2))[:, None]
    probe = x[: size["batch"]], y[: size["batch"]]

    def fit(steps: int, *callbacks) -> None:
        rows = slice(0, steps * size["batch"])
        model.fit(x[rows], y[rows], batch_size=size["batch"], epochs=1, verbose=0, callbacks=list(callbacks))

    def direct(batch) -> None:
        batch.traced(layers="lstm", quantities="output_grad")["lstm"].output_grad  # noqa: B018  it is looked at

    def probed(steps: int) -> None:
        fit(steps, rl.keras.Watch(folder / "probe.zarr", probe=probe, every=size["every"], resume=False))

    return {
        "plain": fit,
        "plain again": fit,
        "every=0": lambda steps: fit(steps, rl.keras.Watch(folder / "never.zarr", probe=probe, every=0)),
        PROBE: probed,
        "output_grad of every batch": lambda steps: fit(steps, rl.keras.Watch(every=1, on_batch=direct, direct="lstm")),
    }


def timed(run: Training, steps: int) -> float:
    start = time.perf_counter()
    run(steps)
    return time.perf_counter() - start


def measure(engine: str, small: bool) -> None:
    """All trainings in turn; a row for each."""
    folder = Path(tempfile.mkdtemp(prefix="overhead-"))
    size, rounds = sizes(small), 2 if small else ROUNDS
    try:
        runs = (torch_loop if engine == "torch-loop" else keras_fit)(size, folder)
        ratios: dict[str, list[float]] = {name: [] for name in runs if name != "plain"}
        for number in range(rounds + 1):
            for name, found in ratios.items():
                steps = size["probed" if name == PROBE else "steps"]
                plain = timed(runs["plain"], steps)
                ratio = timed(runs[name], steps) / plain
                if number:
                    found.append(ratio)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, found in ratios.items():
        bar = None if small or (engine == "jax" and "every batch" in name) else BARS[name]
        middle = statistics.median(found)
        said = "" if bar is None else f"at most {bar}: {'met' if middle <= bar else 'NOT MET'}"
        print(f"{engine:12}{name:30}{middle:8.3f}  ({min(found):.3f} to {max(found):.3f})  {said}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a toy, to see that it runs")
    parser.add_argument("--engine", choices=ENGINES, help="only this one, in this process")
    asked = parser.parse_args()
    if asked.engine:
        measure(asked.engine, asked.small)
        return 0
    print(f"{'':12}{'':30}{'ratio':>8}  (least to most of {ROUNDS} rounds)")
    failed = 0
    for engine in ENGINES:
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        if engine != "torch-loop":
            environment["KERAS_BACKEND"] = engine
        command = [sys.executable, __file__, "--engine", engine, *(["--small"] if asked.small else [])]
        failed += subprocess.run(command, env=environment, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
