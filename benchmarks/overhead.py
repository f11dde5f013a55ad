"""Cost of watching a training, relative to the same training without a watch.

    python benchmarks/overhead.py [--small] [--engine torch-loop|torch|jax|tensorflow]

An LSTM of 256 units on batches of 64 sequences of 200 steps: a plain loop in torch, and ``fit`` of Keras on each
engine, each in its own process, of at most four minutes. Trainings alternate, after one round that compiles: each
watched training runs between two plain ones, and a ratio is its time per batch over their mean. Ratios of processor
time, which other processes disturb less, are computed in the same way. A training has 20 batches (Keras on torch, where
one takes seconds: 2); opening the run and compiling the step again count. The training with a probe makes three
records, as one of 100 batches does with ``every=50``. Its ratio is extrapolated to 100 batches, where the record before
the first batch is a third of the cost, and to 1000, where it is one of 21: a third of the time that the three records
and the opening took beyond a plain training, times the number of records, divided by the number of batches.

Bars: a probe every 50 steps at most 1.05 for 100 batches and 1.02 for 1000; direct gradients of the layer, of every
batch, at most 1.5 (torch and TensorFlow; only reported for JAX); ``every=0`` within the noise of the plain training
between two others, which the first row shows.
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

from _summary import Row, collect

import rnnlens as rl

ENGINES = ("torch-loop", "torch", "jax", "tensorflow")
ROUNDS = 3
PROBE = "probe, every=50, of 100"
LONG = "probe, every=50, of 1000"
BARS = {"plain": None, "every=0": None, PROBE: 1.05, LONG: 1.02, "output_grad of every batch": 1.5}

#: Wall-clock seconds and processor seconds of one batch.
Seconds = tuple[float, float]
#: Function that trains for a number of batches.
Training = Callable[[int], None]


def sizes(small: bool, engine: str) -> dict[str, int]:
    """Return model and batch sizes, batches per training, and per plain training next to it ("beside")."""
    if small:
        return {"units": 8, "batch": 4, "time": 10, "steps": 4, "beside": 2}
    steps = 2 if engine == "torch" else 20
    return {"units": 256, "batch": 64, "time": 200, "steps": steps, "beside": steps // 2}


def torch_loop(size: dict[str, int], folder: Path) -> dict[str, Training]:
    """Return trainings of one module by a plain torch loop, by name."""
    import torch

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

    def watched_training(path: str | None, **options) -> Training:
        def run(steps: int) -> None:
            store = None if path is None else folder / path
            with rl.torch.watch(model, store, resume=False, step=0, **options):
                loop(steps)

        return run

    return {
        "plain": loop,
        "every=0": watched_training("never.zarr", every=0),
        PROBE: watched_training("probe.zarr", every=size["steps"] // 2, probe=(x, y), loss=loss),
        "output_grad of every batch": watched_training(
            None, every=1, quantities="output_grad", on_batch=lambda batch: batch["lstm"].output_grad
        ),
    }


def keras_fit(size: dict[str, int], folder: Path) -> dict[str, Training]:
    """Return trainings of one compiled model by ``fit``, by name."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((size["time"], 8)), keras.layers.LSTM(size["units"], name="lstm"), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size["batch"] * size["steps"], size["time"], 8)).astype("float32")
    y = x.mean((1, 2))[:, None]
    probe = x[: size["batch"]], y[: size["batch"]]

    def fit(steps: int, *callbacks) -> None:
        rows = slice(0, steps * size["batch"])
        model.fit(x[rows], y[rows], batch_size=size["batch"], epochs=1, verbose=0, callbacks=list(callbacks))

    def read_direct(batch) -> None:
        batch.traced(layers="lstm", quantities="output_grad")["lstm"].output_grad  # noqa: B018  the access computes it

    def fit_with_probe(steps: int) -> None:
        fit(steps, rl.keras.Watch(folder / "probe.zarr", probe=probe, every=size["steps"] // 2, resume=False))

    return {
        "plain": fit,
        "every=0": lambda steps: fit(steps, rl.keras.Watch(folder / "never.zarr", probe=probe, every=0)),
        PROBE: fit_with_probe,
        "output_grad of every batch": lambda steps: fit(
            steps, rl.keras.Watch(every=1, on_batch=read_direct, direct="lstm")
        ),
    }


def seconds_per_batch(run: Training, steps: int) -> Seconds:
    """Return the time per batch of a training of ``steps`` batches."""
    clock, processor = time.perf_counter(), time.process_time()
    run(steps)
    return (time.perf_counter() - clock) / steps, (time.process_time() - processor) / steps


def ratio(watched: Seconds, before: Seconds, after: Seconds) -> Seconds:
    """Return the times of a watched training over the mean of the plain ones before and after it."""
    return 2 * watched[0] / (before[0] + after[0]), 2 * watched[1] / (before[1] + after[1])


def extrapolate(ratios: Seconds, steps: int, batches: int) -> Seconds:
    """Extrapolate ratios of a training with three records to one of ``batches`` batches with ``every=50``."""
    records = (batches // 50 + 1) / 3
    return 1 + (ratios[0] - 1) * steps * records / batches, 1 + (ratios[1] - 1) * steps * records / batches


def measure(engine: str, small: bool) -> None:
    """Time all trainings of an engine in turn, and print a row for each."""
    folder = Path(tempfile.mkdtemp(prefix="overhead-"))
    size = sizes(small, engine)
    try:
        runs = (torch_loop if engine == "torch-loop" else keras_fit)(size, folder)
        unwatched = runs.pop("plain")
        ratios: dict[str, list[Seconds]] = {name: [] for name in BARS}
        for run in (unwatched, *runs.values()):
            run(size["steps"] // 2)
        for _ in range(2 if small else ROUNDS):
            unwatched_times = [seconds_per_batch(unwatched, size["beside"])]
            for name, run in runs.items():
                watched_time = seconds_per_batch(run, size["steps"])
                unwatched_times.append(seconds_per_batch(unwatched, size["beside"]))
                pair = ratio(watched_time, *unwatched_times[-2:])
                ratios[name].append(extrapolate(pair, size["steps"], 100) if name == PROBE else pair)
                if name == PROBE:
                    ratios[LONG].append(extrapolate(pair, size["steps"], 1000))
            ratios["plain"].append(ratio(unwatched_times[1], unwatched_times[0], unwatched_times[2]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, pairs in ratios.items():
        bar = None if small or (engine == "jax" and "every batch" in name) else BARS[name]
        clock, processor = ([pair[i] for pair in pairs] for i in (0, 1))
        median = statistics.median(clock)
        verdict = "" if bar is None else f"at most {bar}: {'met' if median <= bar else 'NOT MET'}"
        spread = f"({min(clock):.3f} to {max(clock):.3f})"
        print(
            f"{engine:12}{name:28}{median:8.3f}  {spread:18}{statistics.median(processor):10.3f}  {verdict}", flush=True
        )
        if name != "plain":
            collect(Row("Watching", f"{name}, {engine}", median, "x", "the same training, not watched", bar))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a toy, to see that it runs")
    parser.add_argument("--engine", choices=ENGINES, help="only this one, in this process")
    args = parser.parse_args()
    if args.engine:
        measure(args.engine, args.small)
        return 0
    print(f"{'':40}{'ratio':>8}  {'(rounds)':18}{'processor':>10}")
    failed = 0
    for engine in ENGINES:
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        if engine != "torch-loop":
            environment["KERAS_BACKEND"] = engine
        command = [sys.executable, __file__, "--engine", engine, *(["--small"] if args.small else [])]
        failed += subprocess.run(command, env=environment, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
