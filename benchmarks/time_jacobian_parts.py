"""Time of the parts of a sweep, against the matrix-product peak of this machine: CPU time of one thread.

    OMP_NUM_THREADS=1 python benchmarks/time_jacobian_parts.py [--small]

CPU time of a single thread is counted, so that other work on the machine does not change the shares.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import sys
import time
from collections import Counter
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.table import Table

from rnnlens.recurrence.arrays import Workspace
from rnnlens.recurrence.cells import kinds
from rnnlens.recurrence.cells.affine import GateSystem
from rnnlens.recurrence.jacobian import Taps, reverse
from rnnlens.recurrence.reductions import REDUCTIONS, Collector, Extent, Reduction
from rnnlens.recurrence.replay import replay
from rnnlens.recurrence.sweep_rows import PointRows

GATES = {"lstm": 4, "gru": 3, "simple_rnn": 1}
PARTS = {
    "matrix products": [(Workspace, "matmul")],
    "element-wise": [(Workspace, "multiply"), (Workspace, "add_product")],
    "flushing": [(Workspace, "flush")],
    "reducing": [(Collector, "take")],
    "linearising": [(GateSystem, "build")],
}


def peak(size=1536, repeat=7):
    """Return the speed of one large float32 matrix product in GFlop/s."""
    a, out = np.ones((size, size), "float32"), np.empty((size, size), "float32")
    seconds = []
    for _ in range(repeat):
        start = time.thread_time()
        np.matmul(a, a, out=out)
        seconds.append(time.thread_time() - start)
    return 2 * size**3 / min(seconds) / 1e9


@contextmanager
def count_seconds(seconds):
    """Add up the time in each part within the block; nested parts count only for the outer one."""
    originals, active = [], []

    def wrap(part, function):
        def timed(*args, **kwargs):
            if active:
                return function(*args, **kwargs)
            active.append(part)
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.thread_time() - start
                active.pop()

        return timed

    for part, methods in PARTS.items():
        for owner, name in methods:
            originals.append((owner, name, getattr(owner, name)))
            setattr(owner, name, wrap(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def make_run(kind, samples, steps, units, features):
    """Return a replay with default initial weights, of zero mean and the variance of Glorot's rule."""
    rng, gates = np.random.default_rng(0), GATES[kind]

    def draw(*shape):
        return (rng.normal(size=shape) * np.sqrt(2 / (shape[0] + shape[1] // gates))).astype("float32")

    bias = np.zeros(gates * units, "float32")
    if kind == "lstm":
        bias[units : 2 * units] = 1
    second = bias if kind == "gru" else None
    cell = kinds()[kind](draw(features, gates * units), draw(units, gates * units), bias, second)
    x = rng.normal(size=(samples, steps, features)).astype("float32")
    start = tuple(np.zeros((samples, units), "float32") for _ in cell.states)
    return replay(cell, x, start)


def measure(kind, samples, steps, units, features, outputs):
    run = make_run(kind, samples, steps, units, features)
    head = np.random.default_rng(1).normal(size=(1, 1, outputs, units)).astype("float32")
    part_seconds = Counter()

    def sweep():
        system = run.linear_system()
        sink = Collector(
            system.work,
            Extent(samples, steps, outputs, features),
            {t: t for t in range(steps)},
            Reduction(REDUCTIONS["norm"]),
        )
        return reverse(system, PointRows(range(steps), {0: head}), Taps(input=sink))

    sweep()
    start = time.thread_time()
    cost = sweep()
    total = time.thread_time() - start
    with count_seconds(part_seconds):
        sweep()
    return total, cost.flops, part_seconds


def main():
    shrink = 4 if "--small" in sys.argv else 1
    peak_speed = peak()
    table = Table(
        title=f"reverse sweep, measure='norm', one thread; matrix-product peak {peak_speed:.0f} GFlop/s (float32)"
    )
    for column in ("case", "CPU s", "GFlop/s", "of peak", *PARTS):
        table.add_column(column)
    for kind in GATES:
        for shape in ((10, 100, 32, 1, 1), (16, 100, 64, 8, 8), (8, 200, 128, 16, 16)):
            samples, steps, units, features, outputs = shape[0], shape[1] // shrink, *shape[2:]
            total, flops, part_seconds = measure(kind, samples, steps, units, features, outputs)
            speed, counted = flops / total / 1e9, sum(part_seconds.values())
            shares = [f"{100 * part_seconds[part] / counted:.0f} %" for part in PARTS]
            name = f"{kind} B={samples} T={steps} H={units} F=O={features}"
            table.add_row(name, f"{total:.4f}", f"{speed:.0f}", f"{100 * speed / peak_speed:.0f} %", *shares)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
