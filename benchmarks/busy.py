"""Duration of a call while other processes compute: the worst of 30, relative to the median on an idle machine.

    python benchmarks/busy.py [--small] [--repeat 30]

One, then two other processes compute all the time. On a machine of two cores the fair share of one thread is then a
half and a third; anything above that is waiting of threads for each other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import contextmanager

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import rnnlens as rl

BAR = 2.0


@contextmanager
def busy_processes(count):
    """Run ``count`` other processes that compute all the time, within the block."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5 if count else 0)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def timed(function, repeat):
    """Return the seconds of each call."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return seconds


def calls(samples, steps, units, features, outputs):
    """Return the verbs on one LSTM, in Keras and in torch, as functions by name."""
    x = np.random.default_rng(0).normal(size=(samples, steps, features)).astype("float32")
    y = np.zeros((samples, steps, outputs), "float32")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((steps, features)),
            keras.layers.LSTM(units, return_sequences=True, name="rnn"),
            keras.layers.Dense(outputs),
        ]
    )

    class Torch(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = torch.nn.LSTM(features, units, batch_first=True)
            self.head = torch.nn.Linear(units, outputs)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    twin, tx, ty = Torch(), torch.from_numpy(x), torch.from_numpy(y)
    return {
        "jacobian": lambda: rl.jacobian(model, x),
        "jacobian, norm": lambda: rl.jacobian(model, x, measure="norm"),
        "trace": lambda: rl.trace(model, x, y, loss="mse"),
        "jacobian, torch": lambda: rl.jacobian(twin, tx),
        "trace, torch": lambda: rl.trace(twin, tx, ty, loss=torch.nn.functional.mse_loss),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="a small shape, to see that it runs")
    arguments = parser.parse_args()
    repeat = 3 if arguments.small else arguments.repeat
    shapes = [(4, 20, 8, 2, 2)] if arguments.small else [(16, 100, 64, 8, 8), (10, 100, 32, 1, 1)]
    table = Table(title=f"while somebody else works, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for column in ("LSTM", "call", "busy cores", "median (s)", "worst (s)", "worst / idle median"):
        table.add_column(column)
    for shape in shapes:
        name = "B={} T={} H={} F={} O={}".format(*shape)
        for call, function in calls(*shape).items():
            timed(function, 2)
            idle = None
            for busy in (0, 1, 2):
                with busy_processes(busy):
                    seconds = timed(function, repeat)
                idle = idle or float(np.median(seconds))
                ratio = max(seconds) / idle
                verdict = f"{ratio:.3g}" + (f" <= {BAR:g} {'ok' if ratio <= BAR else 'MISSED'}" if busy == 1 else "")
                table.add_row(name, call, str(busy), f"{np.median(seconds):.4f}", f"{max(seconds):.4f}", verdict)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
