"""Example a at full sequence length: memory for any number of sequences, and throughput against JAX.

    python benchmarks/example_a.py [--small] [--sequences 960] [--rounds 5]

A stateful SimpleRNN of 200 units over a frozen embedding, 1403 steps, 100 dimensions, batches of 32, random initial
state. Computed: the gradient of the mean hidden state with respect to the embedded input, one norm per step.

memory
    Peak memory of a process that streams all sequences through ``rl.gradients``, and of one that streams a third of
    them. Bar: below 4 GiB, and at most 1.1 times as much for all as for a third (the first batches allocate buffers).
throughput
    Sequences per second of ``rl.gradients`` over a data set of ten batches, the first of which is certified, against
    JAX's compiled gradient of the same number over the same batches, in one process, after one round that compiles.
    Bar: 1.5 times as long.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from _summary import Row, collect

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LIMIT = 4 * 1024**3
BATCHES = 10


def load_example():
    """Import and return the example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    path = next(EXAMPLES.glob("a_*.py"))
    spec = importlib.util.spec_from_file_location("example_a", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sizes(small: bool) -> tuple[int, int, int]:
    return (60, 10, 16) if small else (1403, 100, 200)


def stream(count: int, small: bool) -> None:
    """Stream ``count`` sequences and print this process's peak memory."""
    import numpy as np

    a = load_example()
    steps, dimensions, units = sizes(small)
    model = a.build(steps, dimensions, units)
    start = np.random.default_rng(2).normal(size=(1, units)).astype("float32")
    began = time.perf_counter()
    a.gradient(model, a.sequences(count, steps), start)
    seconds = time.perf_counter() - began
    print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "seconds": seconds}))


def stream_in_process(count: int, small: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--stream", str(count), *(["--small"] if small else [])]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(completed.stdout.splitlines()[-1])


def throughput(small: bool, rounds: int) -> tuple[float, float]:
    """Return seconds per batch over ``BATCHES`` batches, of rnnlens and of JAX, as medians of interleaved rounds."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    a = load_example()
    steps, dimensions, units = sizes(small)
    model = a.build(steps, dimensions, units)
    start = np.random.default_rng(2).normal(size=(1, units)).astype("float32")
    data = list(a.sequences(BATCHES * a.BATCH, steps))
    kernel, recurrent, bias = (jnp.asarray(w) for w in model.get_layer("rnn").get_weights())
    table = jnp.asarray(model.get_layer("embedding").get_weights()[0])

    @jax.jit
    def jax_gradient(ids):
        def mean_hidden(embedded):
            def step(h, x):
                h = jnp.tanh(x @ kernel + h @ recurrent + bias)
                return h, h

            h = jnp.broadcast_to(jnp.asarray(start), (embedded.shape[0], units))
            _, states = jax.lax.scan(step, h, jnp.swapaxes(embedded, 0, 1))
            return states.mean(axis=(0, 2)).sum()

        return jnp.linalg.norm(jax.grad(mean_hidden)(table[ids]), axis=-1).mean(axis=0)

    def rnnlens_norms():
        return a.gradient(model, iter(data), start).values

    def jax_norms():
        return np.mean([np.asarray(jax_gradient(ids)) for ids in data], axis=0)

    reference, computed = jax_norms(), rnnlens_norms()
    np.testing.assert_allclose(computed, reference, rtol=1e-3, atol=1e-3 * reference.max())
    times = {"ours": [], "own": []}
    for _ in range(rounds):
        for name, call in (("ours", rnnlens_norms), ("own", jax_norms)):
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return statistics.median(times["ours"]) / BATCHES, statistics.median(times["own"]) / BATCHES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a toy, to see that it runs")
    parser.add_argument("--sequences", type=int, default=960)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stream", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stream:
        stream(args.stream, args.small)
        return 0
    count = 96 if args.small else args.sequences
    third, full = stream_in_process(count // 3, args.small), stream_in_process(count, args.small)
    rl_seconds, jax_seconds = throughput(args.small, args.rounds)
    batch = load_example().BATCH
    gib = 1024**3
    fits = full["peak"] < LIMIT and full["peak"] < 1.1 * third["peak"]
    print(f"memory, {count // 3} sequences   {third['peak'] / gib:5.2f} GiB")
    verdict = f"bar: < 4 GiB and flat: {'met' if fits else 'MISSED'}"
    print(f"memory, {count} sequences   {full['peak'] / gib:5.2f} GiB   {verdict}")
    print(f"streamed             {count / full['seconds']:8.1f} sequences/s, compilation included")
    print(f"rl.gradients         {batch / rl_seconds:8.1f} sequences/s")
    print(
        f"JAX's own, compiled  {batch / jax_seconds:8.1f} sequences/s   ratio of times {rl_seconds / jax_seconds:.2f}"
    )
    name = f"rl.gradients, {count} sequences of 1403 steps, Keras on JAX"
    collect(
        Row("Streaming", name, rl_seconds / jax_seconds, "x", "the same gradient in compiled JAX", 1.5),
        Row("Streaming", f"{name}: memory", full["peak"] / gib, "GiB", "", 1.0),
    )
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
