"""The time Jacobian against TensorFlow's batch_jacobian and JAX: ratios in one run, medians.

    python benchmarks/time_jacobian.py [--small] [--repeat 5] [--only NAME]

Measured is the whole call, ``rl.jacobian(model, x)``, on a Keras model on TensorFlow (on torch where stated): running
the model, linearising, sweeping, labelling. JAX runs a hand-written cell in ``lax.scan``, its fastest form.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import keras
import numpy as np
import psutil
import tensorflow as tf
import torch
from _summary import Row, collect
from rich.console import Console
from rich.table import Table

import rnnlens as rl

GATES = {"lstm": 4, "gru": 3, "simple_rnn": 1}


def timed(function, repeat):
    """Return the median seconds of repeated calls."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def extra_memory(function):
    """Return the highest resident memory during a call, above that before it, in bytes."""
    process, stop, highest = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def watch():
        while not stop.wait(0.002):
            highest[0] = max(highest[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        function()
    finally:
        stop.set()
        thread.join()
    return max(highest[0] - before, 0)


class Case:
    """One model with the same weights in Keras and JAX; the torch model has its own."""

    def __init__(self, kind, samples, steps, units, features, outputs):
        self.kind, self.units, self.outputs = kind, units, outputs
        self.x = np.random.default_rng(0).normal(size=(samples, steps, features)).astype("float32")
        keras.utils.set_random_seed(0)
        cell = {"lstm": keras.layers.LSTM, "gru": keras.layers.GRU, "simple_rnn": keras.layers.SimpleRNN}[kind]
        self.keras = keras.Sequential(
            [
                keras.Input((steps, features)),
                cell(units, return_sequences=True, name="rnn"),
                keras.layers.Dense(outputs),
            ]
        )
        self.weights = [jnp.asarray(w) for w in self.keras.get_weights()]
        self.name = f"{kind} B={samples} T={steps} H={units} F={features} O={outputs}"

    def torch_model(self):
        cell = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "simple_rnn": torch.nn.RNN}[self.kind]
        torch.manual_seed(0)

        class Model(torch.nn.Module):
            def __init__(self, features, units, outputs):
                super().__init__()
                self.rnn = cell(features, units, batch_first=True)
                self.head = torch.nn.Linear(units, outputs)

            def forward(self, x):
                return self.head(self.rnn(x)[0])

        return Model(self.x.shape[2], self.units, self.outputs)

    def jax_function(self):
        """Return a function from (time, feature) to (time, output), for one sample."""
        kind, units = self.kind, self.units
        W, U, b, C, d = self.weights

        def lstm(state, x):
            h, c = state
            i, f, g, o = jnp.split(x + h @ U, 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        def gru(state, x):
            (h,) = state
            inner = h @ U + b[1]
            u, r = jax.nn.sigmoid(x[: 2 * units] + inner[: 2 * units]).reshape(2, units)
            h = u * h + (1 - u) * jnp.tanh(x[2 * units :] + r * inner[2 * units :])
            return (h,), h

        def simple_rnn(state, x):
            h = jnp.tanh(x + state[0] @ U)
            return (h,), h

        step = {"lstm": lstm, "gru": gru, "simple_rnn": simple_rnn}[kind]

        def run(x):
            start = (jnp.zeros(units),) * (2 if kind == "lstm" else 1)
            _, h = jax.lax.scan(step, start, x @ W + (b[0] if kind == "gru" else b))
            return h @ C + d

        return run

    def jax_jacobian(self, transform, norm=False):
        run = self.jax_function()

        def sample_jacobian(x):
            full = transform(run)(x)
            return jnp.sqrt((full**2).sum((1, 3))) if norm else full

        return jax.jit(jax.vmap(sample_jacobian))


def jax_best(case, repeat, norm, transforms=("jacfwd", "jacrev")):
    """Return steady-state seconds, compile seconds, mode and result of the faster of JAX's two modes."""
    best = None
    x = jnp.asarray(case.x)
    for name in transforms:
        function = case.jax_jacobian(getattr(jax, name), norm)
        start = time.perf_counter()
        result = jax.block_until_ready(function(x))
        first_call = time.perf_counter() - start
        steady = timed(lambda function=function: jax.block_until_ready(function(x)), repeat)
        if best is None or steady < best[0]:
            best = (steady, first_call, name, np.asarray(result))
    return best


def products_only(case, repeat):
    """Time only the matrix products of one reverse sweep: same shapes, same library."""
    samples, steps, features = case.x.shape
    units, rows = case.units, case.outputs
    inner = 2 * units if case.kind == "lstm" else units
    old = np.ones((samples, steps * rows, inner), "float32")
    new = np.empty((samples, steps * rows, units + features), "float32")
    product = np.ones((samples, inner, units + features), "float32")

    def sweep():
        for k in range(steps - 1, -1, -1):
            first = k * rows
            np.matmul(old[:, first:], product, out=new[:, first:])

    return timed(sweep, repeat)


def ratio_with_bar(value, bar, larger=True):
    """Return a ratio with its bar and verdict as text."""
    good = value >= bar if larger else value <= bar
    return f"{value:.3g} {'>=' if larger else '<='} {bar:g} {'ok' if good else 'MISSED'}"


def _speed_up(case, value, peer, bar):
    return Row("Time Jacobian", f"rl.jacobian, {case.name}: times faster", value, "x", peer, bar, at_least=True)


def batch_jacobian(model, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reshape(model(x), (x.shape[0], -1))
    return tape.batch_jacobian(y, x)


def memory_in_process(implementation, samples, steps):
    """Return the extra memory of one call in its own process, after a first call on a single sample."""
    command = [sys.executable, __file__, "--memory-of", implementation, str(samples), str(steps)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def jax_seconds_alone(case):
    """Return JAX's steady-state seconds in its own process: other frameworks' threads stall it at times."""
    shape = (*case.x.shape[:2], case.units, case.x.shape[2], case.outputs)
    command = [sys.executable, __file__, "--jax-of", case.kind, *map(str, shape)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_jax(kind, *shape):
    case = Case(kind, *map(int, shape))
    print(jax_best(case, 51, norm=False, transforms=("jacfwd",))[0])


def print_memory(implementation, samples, steps):
    case = Case("lstm", int(samples), int(steps), 32, 1, 1)
    call = {
        "ours": lambda x: rl.jacobian(case.keras, x),
        "theirs": lambda x: batch_jacobian(case.keras, tf.constant(x)),
    }
    call[implementation](case.x[:1])
    print(extra_memory(lambda: call[implementation](case.x)))


def compare_batch_jacobian(case, repeat, rows):
    model, x = case.keras, tf.constant(case.x)

    def peer_call():
        return batch_jacobian(model, x)

    reference = peer_call().numpy()
    jacobian = rl.jacobian(model, case.x)
    check_agreement(jacobian.values, reference.reshape(jacobian.shape))
    seconds, peer_seconds = timed(lambda: rl.jacobian(model, case.x), max(repeat, 11)), timed(peer_call, repeat)
    collect(_speed_up(case, peer_seconds / seconds, "TensorFlow's batch_jacobian", 200))
    memory, peer_memory = (
        memory_in_process(implementation, *case.x.shape[:2]) for implementation in ("ours", "theirs")
    )
    rows.append((case.name, "TF batch_jacobian", peer_seconds, seconds, ratio_with_bar(peer_seconds / seconds, 200)))
    share = memory / max(peer_memory, 1)
    text = f"extra memory {memory / 2**20:.1f} / {peer_memory / 2**20:.1f} MiB"
    rows.append((case.name, text, None, None, ratio_with_bar(share, 0.1, larger=False)))
    return seconds


def compare_jax(case, repeat, rows, bar, *, norm=False, first_call=False, also_torch=False):
    options = {"measure": "norm"} if norm else {}
    rl.jacobian(case.keras, case.x, **options)
    jacobian = rl.jacobian(case.keras, case.x, **options)
    steady, first, name, result = jax_best(case, repeat, norm, ("jacfwd",) if first_call else ("jacfwd", "jacrev"))
    check_agreement(jacobian.values, result)
    if first_call:
        steady = jax_seconds_alone(case)
    seconds = timed(lambda: rl.jacobian(case.keras, case.x, **options), repeat)
    if first_call:
        rows.append((case.name, f"JAX {name}, first call", first, seconds, ratio_with_bar(first / seconds, 5)))
        name += ", by itself"
    collect(_speed_up(case, steady / seconds, f"JAX {name}", bar))
    rows.append(
        (
            case.name,
            f"JAX {name}",
            steady,
            seconds,
            ratio_with_bar(steady / seconds, bar) if bar else f"{steady / seconds:.3g}",
        )
    )
    if also_torch:
        model, x = case.torch_model(), torch.from_numpy(case.x)
        rl.jacobian(model, x, **options)
        torch_seconds = timed(lambda: rl.jacobian(model, x, **options), repeat)
        rows.append((case.name + " torch", f"JAX {name}", steady, torch_seconds, f"{steady / torch_seconds:.3g}"))
    return seconds


def check_agreement(actual, expected):
    """Raise if float32 results differ by more than 2e-4, relative to the largest entry."""
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    if not error < 2e-4:
        raise SystemExit(f"results differ by {error:.2g}")


def compare_products(case, repeat, rows):
    rl.jacobian(case.keras, case.x, measure="norm", mode="reverse")
    seconds = timed(lambda: rl.jacobian(case.keras, case.x, measure="norm", mode="reverse"), repeat)
    product_seconds = products_only(case, repeat)
    rows.append(
        (
            case.name,
            "its matrix products alone",
            product_seconds,
            seconds,
            ratio_with_bar(seconds / product_seconds, 2, larger=False),
        )
    )


def double_steps(repeat, rows):
    timings = []
    for steps in (200, 400):
        case = Case("lstm", 4, steps, 64, 8, 8)
        result = rl.jacobian(case.keras, case.x, measure="norm")
        timings.append(
            (timed(lambda case=case: rl.jacobian(case.keras, case.x, measure="norm"), repeat), result.nbytes)
        )
    (short, small), (long, large) = timings
    rows.append(
        ("lstm B=4 T=200 to 400 H=64", "itself: time", short, long, ratio_with_bar(long / short, 4.4, larger=False))
    )
    rows.append(
        (
            "lstm B=4 T=200 to 400 H=64",
            "itself: memory of the result",
            None,
            None,
            ratio_with_bar(large / small, 4.4, larger=False),
        )
    )


def long_sketch(rows, steps):
    case = Case("lstm", 1, steps, 128, 8, 1)
    result = []

    def call():
        start = time.perf_counter()
        result.append(rl.jacobian(case.keras, case.x, of="rnn.hidden", sketch=8, memory="1 GiB"))
        result.append(time.perf_counter() - start)

    memory = extra_memory(call)
    name = f"lstm B=1 T={steps} H=128 F=8 of hidden, sketch=8"
    rows.append(
        (name, f"{memory / 2**20:.0f} MiB extra", None, result[1], ratio_with_bar(memory / 2**30, 1, larger=False))
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--only", default="", help="part of the name of a block: small, medium, large, sketch, doubled")
    parser.add_argument("--memory-of", nargs=3, metavar=("WHO", "SAMPLES", "STEPS"), help=argparse.SUPPRESS)
    parser.add_argument("--jax-of", nargs=6, metavar=("KIND", "B", "T", "H", "F", "O"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.jax_of:
        return print_jax(*arguments.jax_of)
    if arguments.memory_of:
        return print_memory(*arguments.memory_of)
    repeat, rows = (1 if arguments.small else arguments.repeat), []
    divisor = 4 if arguments.small else 1

    def is_selected(name):
        return arguments.only in name

    if is_selected("small"):
        small = Case("lstm", 10, 100 // divisor, 32, 1, 1)
        compare_jax(small, max(repeat, 11), rows, 1, first_call=True, also_torch=True)
        compare_batch_jacobian(small, repeat, rows)
        for kind in ("gru", "simple_rnn"):
            compare_jax(Case(kind, 10, 100 // divisor, 32, 1, 1), max(repeat, 11), rows, None, first_call=True)
    if is_selected("medium"):
        for kind in GATES:
            case = Case(kind, 16, 100 // divisor, 64, 8, 8)
            compare_jax(case, repeat, rows, 3 if kind == "lstm" else None, also_torch=True)
    if is_selected("large"):
        for kind in GATES:
            case = Case(kind, 8, 200 // divisor, 128, 16, 16)
            compare_jax(case, repeat, rows, 4 if kind == "lstm" else None, norm=True, also_torch=True)
            compare_products(case, repeat, rows)
    if is_selected("doubled"):
        double_steps(repeat, rows)
    if is_selected("sketch"):
        long_sketch(rows, 2000 // divisor**2)
    return show(rows)


def show(rows):
    table = Table(title=f"time Jacobian, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for column in ("case", "against", "theirs (s)", "ours (s)", "ratio and bar"):
        table.add_column(column)
    for name, peer, peer_seconds, our_seconds, ratio in rows:
        table.add_row(name, peer, *("" if s is None else f"{s:.4f}" for s in (peer_seconds, our_seconds)), ratio)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
