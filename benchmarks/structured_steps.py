"""Sweeps of recurrences with diagonal steps, against dense products of the same numbers: time and memory.

    OMP_NUM_THREADS=1 python benchmarks/structured_steps.py [--small] [--rounds 5]

The dense sweep is that of a cell of unknown structure: the unit vectors are pulled back through each step, which gives
its product matrix, and rows are multiplied by it. 256 states, 100 steps, float32, 8 input features:

adjoint
    gradient of a loss at every step, with respect to input and states, of 16 samples
norms
    Frobenius norm of the time Jacobian of all states, for every pair of steps, of 2 samples
projected
    the time Jacobian of the mean over the states, of 16 samples; without a bar, since most of it is the product of each
    row with B, which both sweeps compute

Times are medians of interleaved rounds after one warm-up. Memory is the peak of one job's process above its start, for
one sample of a diagonal recurrence of 4096 states at 1000 steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import array_api_compat.numpy as anp
import numpy as np

from rnnlens.recurrence import linear, structured
from rnnlens.recurrence.arrays import Workspace, one_thread_each
from rnnlens.recurrence.jacobian import Taps, reverse
from rnnlens.recurrence.reductions import REDUCTIONS, Collector, Extent, FieldCollector, Reduction
from rnnlens.recurrence.sweep_rows import FieldRows, PointRows, Units

BAR, FEATURES = 20.0, 8
SAMPLES = {"adjoint": 16, "norms": 2, "projected": 16}
STRUCTURES = ("diagonal", "complex")


def system_of(name: str, samples: int, states: int, steps: int) -> structured.StructuredSystem:
    """Return a random recurrence whose states neither explode nor vanish quickly."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.uniform(0.95, 1.0, size=(samples, steps, *shape)).astype("float32")

    input_kernels = structured.Kernels(draw(2, states), rng.normal(size=(2, FEATURES, states)).astype("float32"))
    if name == "complex":
        turn = draw(states // 2)
        transition = structured.ComplexDiagonal(Workspace(anp, turn), 0.8 * turn, 0.6 * turn)
        return structured.StructuredSystem(transition, input_kernels, samples, steps)
    return structured.diagonal(draw(states), input_kernels)


class DenseSystem(linear.ProductSystem):
    """The same recurrence as dense product matrices, built in blocks of steps during a sweep."""

    def __init__(self, system: structured.StructuredSystem) -> None:
        self.system, self.work, self.batch, self.time = system, system.work, system.batch, system.time
        self.rows = self.columns = system.rows
        self.features, self.order, self.state_sizes = system.features, system.order, system.state_sizes

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> linear.ProductSteps:
        """Build product matrices by pulling back unit vectors."""
        count, width = len(range(self.batch)[samples]), self.rows + (self.features if inputs else 0)
        product = self.work.empty(count, stop - first, self.rows, width)
        unit = np.broadcast_to(self.work.eye(self.rows), (count, self.rows, self.rows))
        for i, step in enumerate(self.system.build(first, stop, samples, inputs=inputs)):
            step.pull(unit, product[:, i], inputs=inputs)
        return linear.ProductSteps(self.work, product)


def adjoint(system: linear.System) -> None:
    """Compute the gradient of a loss at every step."""
    size = system.state_sizes[0]
    cotangents = np.ones((system.batch, 1, system.time, size), dtype="float32")
    by_input = np.zeros((system.batch, 1, system.time, FEATURES), dtype="float32")
    taps = Taps(FieldCollector(by_input), {0: FieldCollector(np.zeros_like(cotangents))})
    reverse(system, FieldRows({0: cotangents}), taps)


def norms(system: linear.System) -> None:
    """Compute the norm of the time Jacobian of all units, for every pair of steps."""
    size, times = system.state_sizes[0], range(system.time)
    row_of_step = {t: t for t in times}
    sink = Collector(
        system.work, Extent(system.batch, len(times), size, FEATURES), row_of_step, Reduction(REDUCTIONS["norm"])
    )
    if system.pattern(0) is not None:
        reverse(system, Units(times, 0, size), Taps(input=sink))
    else:
        reverse(system, PointRows(times, {0: system.work.eye(size)[None, None]}), Taps(input=sink))


def projected(system: linear.System) -> None:
    """Compute the time Jacobian of the mean over the units."""
    size, times = system.state_sizes[0], range(system.time)
    sink = Collector(system.work, Extent(system.batch, len(times), 1, FEATURES), {t: t for t in times})
    reverse(system, PointRows(times, {0: np.full((1, 1, 1, size), 1 / size, dtype="float32")}), Taps(input=sink))


JOBS: dict[str, Callable[[linear.System], None]] = {"adjoint": adjoint, "norms": norms, "projected": projected}


def seconds(job: Callable[[linear.System], None], system: linear.System) -> float:
    """Return the seconds of one run."""
    with one_thread_each():
        start = time.perf_counter()
        job(system)
        return time.perf_counter() - start


def compare(name: str, states: int, steps: int, rounds: int) -> bool:
    """Print the time ratios of one structure; return whether the bar is met."""
    bars_met = True
    for title, job in JOBS.items():
        system = system_of(name, SAMPLES[title], states, steps)
        peer = DenseSystem(system)
        job(system)
        job(peer)
        times = [(seconds(job, system), seconds(job, peer)) for _ in range(rounds)]
        sparse, dense = (statistics.median(column) for column in zip(*times, strict=True))
        barred = name == "diagonal" and title != "projected"
        bar = f"(bar {BAR:.0f} x)" if barred else ""
        print(
            f"{name:15} {title:10} {sparse * 1e3:9.1f} ms   dense {dense * 1e3:9.1f} ms   {dense / sparse:7.1f} x {bar}"
        )
        bars_met &= not barred or dense / sparse >= BAR
    return bars_met


def status(field: str) -> int:
    """Return a memory field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak(title: str, states: int, steps: int) -> int:
    """Return the peak memory of one job in this process, above its start, in bytes."""
    JOBS[title](system_of("diagonal", 1, 16, 10))
    system = system_of("diagonal", 1, states, steps)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which includes the imports
    before = status("VmRSS")
    JOBS[title](system)
    return status("VmHWM") - before


def main() -> int:
    """Measure and print; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a toy size: to see that it runs, not how fast")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", choices=JOBS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    states, steps = (256, 50) if options.small else (4096, 1000)
    if options.peak:
        print(json.dumps(peak(options.peak, states, steps)))
        return 0
    small, short = (64, 20) if options.small else (256, 100)
    bars_met = [compare(name, small, short, options.rounds) for name in STRUCTURES]
    unit = steps * states * 4
    for title in JOBS:
        command = [sys.executable, __file__, "--peak", title, *(["--small"] if options.small else [])]
        highest = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"memory  {title:10} of {states} states at {steps} steps: {highest / unit:5.1f} x the states of all steps"
        )
    return 0 if all(bars_met) or options.small else 1


if __name__ == "__main__":
    sys.exit(main())
