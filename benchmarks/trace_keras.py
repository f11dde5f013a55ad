"""rl.trace against the framework's own compiled forward and backward pass: time and memory, as ratios in one run.

    python benchmarks/trace_keras.py [--small] [--rounds 5] [tensorflow jax]

Two LSTM layers of 256 units, batch 64, 500 steps, 32 features, a loss at every step. What is compared:

full trace
    ``rl.trace(model, x, y)``, all quantities of both layers, against the compiled loss and its gradient with respect to
    the trainable weights; with the certificate, which is one more plain forward and backward pass, and without it.
upper output_grad
    ``rl.trace(..., layers=["upper"], quantities=["output_grad"])`` against a compiled forward pass and the gradient
    from the upper layer's output on; without the certificate.

Times are medians of interleaved rounds after one round that compiles. Memory is the peak of a process above its memory
before the first call; a full trace may need the framework's own plus 1.5 times what it returns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from _summary import Row, collect

BARS = {"full trace": 2.5, "full trace, not certified": 1.8, "upper output_grad": 1.1, "memory": 1.5}


def build(small: bool):
    """Return the model and the batch (x, y), equal in every process."""
    import keras
    import numpy as np

    units, batch, steps, features = (32, 8, 50, 4) if small else (256, 64, 500, 32)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((steps, features)),
            keras.layers.LSTM(units, return_sequences=True, name="lower"),
            keras.layers.LSTM(units, return_sequences=True, name="upper"),
            keras.layers.Dense(1, name="head"),
        ]
    )
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, steps, features), dtype="float32")
    return model, x, rng.standard_normal((batch, steps, 1), dtype="float32")


def tensorflow_peers(model, x, y):
    """Return compiled forward and backward passes in TensorFlow; each waits for its result."""
    import tensorflow as tf

    lower, upper, head = model.layers

    @tf.function
    def backward(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return tape.gradient(loss, model.trainable_weights)

    @tf.function
    def upper_gradient(x, y):
        lower_output = upper(lower(x))
        with tf.GradientTape() as tape:
            tape.watch(lower_output)
            loss = tf.reduce_mean((head(lower_output) - y) ** 2)
        return tape.gradient(loss, lower_output)

    x, y = tf.constant(x), tf.constant(y)
    return (lambda: [g.numpy() for g in backward(x, y)]), (lambda: upper_gradient(x, y).numpy())


def jax_peers(model, x, y):
    """Return compiled forward and backward passes in JAX; each waits for its result."""
    import jax

    lower, upper, head = model.layers
    values = [w.value for w in model.trainable_variables]
    non_trainable = [w.value for w in model.non_trainable_variables]

    def loss_of(values):
        return ((model.stateless_call(values, non_trainable, x)[0] - y) ** 2).mean()

    def loss_above(lower_output):
        return ((head(lower_output) - y) ** 2).mean()

    backward = jax.jit(jax.value_and_grad(loss_of))
    upper_gradient = jax.jit(lambda x: jax.grad(loss_above)(upper(lower(x))))
    return (lambda: jax.block_until_ready(backward(values))), (lambda: jax.block_until_ready(upper_gradient(x)))


def jobs(small: bool) -> dict:
    """Return the timed calls by name, on this process's engine."""
    import keras

    import rnnlens as rl

    def uncertified(call):
        with rl.options(certify="never"):
            return call()

    model, x, y = build(small)
    peers = {"tensorflow": tensorflow_peers, "jax": jax_peers}[keras.backend.backend()]
    backward, upward = peers(model, x, y)
    return {
        "framework": backward,
        "full trace": lambda: rl.trace(model, x, y),
        "full trace, not certified": lambda: uncertified(lambda: rl.trace(model, x, y)),
        "framework, from the upper layer up": upward,
        "upper output_grad": lambda: uncertified(
            lambda: rl.trace(model, x, y, layers=["upper"], quantities=["output_grad"])
        ),
    }


def time_all(small: bool, rounds: int) -> dict[str, float]:
    """Return the median seconds of each job over interleaved rounds."""
    calls = jobs(small)
    seconds = {name: [] for name in calls}
    for round_number in range(rounds + 1):
        for name, job in calls.items():
            start = time.perf_counter()
            job()
            if round_number:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def high_water(small: bool, name: str) -> dict[str, float]:
    """Return MiB of peak memory above that before the first call, and MiB returned."""
    job = jobs(small)[name]
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which includes the imports
    before = _status("VmRSS")
    result = job()
    peak = _status("VmHWM") - before
    returned = sum(result[layer].dataset.nbytes for layer in result) if "trace" in name else 0
    return {"peak": peak, "returned": returned / 2**20}


def _status(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def run_task(engine: str, small: bool, *task: str) -> dict:
    """Run one task of this file in its own process."""
    command = [sys.executable, __file__, *(["--small"] if small else []), "--task", *task]
    environment = {**os.environ, "KERAS_BACKEND": engine, "TF_CPP_MIN_LOG_LEVEL": "3"}
    completed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(completed.stdout.splitlines()[-1])


def compare(engine: str, small: bool, rounds: int) -> None:
    """Print the table of one engine."""
    seconds = run_task(engine, small, "time", str(rounds))
    framework, trace_memory = (
        run_task(engine, small, "memory", "framework"),
        run_task(engine, small, "memory", "full trace"),
    )
    pairs = {"full trace": "framework", "full trace, not certified": "framework"}
    pairs |= {"upper output_grad": "framework, from the upper layer up"}
    print(f"\n{engine}")
    print(f"{'':26}{'rnnlens':>12}{'framework':>12}{'ratio':>8}{'bar':>8}")
    for name, peer in pairs.items():
        ratio = seconds[name] / seconds[peer]
        print(f"{name:26}{seconds[name]:10.3f} s{seconds[peer]:10.3f} s{ratio:8.2f}{BARS[name]:8.1f}")
        collect(Row("Trace, LSTM 2 x 256", f"{name}, Keras on {engine}", ratio, "x", peer, BARS[name]))
    extra = (trace_memory["peak"] - framework["peak"]) / trace_memory["returned"]
    print(
        f"{'memory':26}{trace_memory['peak']:8.0f} MiB{framework['peak']:8.0f} MiB{extra:8.2f}{BARS['memory']:8.1f}"
        f"   ratio: (ours - framework's) / {trace_memory['returned']:.0f} MiB returned"
    )


def main() -> None:
    """Run one task in this process if given, else print a table for each engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", default=["tensorflow", "jax"])
    parser.add_argument("--small", action="store_true", help="a toy, to see that it runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--task", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        kind, argument = args.task
        print(json.dumps(time_all(args.small, int(argument)) if kind == "time" else high_water(args.small, argument)))
        return
    for engine in args.engines:
        compare(engine, args.small, args.rounds)


if __name__ == "__main__":
    main()
