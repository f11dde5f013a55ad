"""Lazy gradients on a LocalCluster against the plain streaming call: equality, overhead, scaling, memory, bytes.

    python benchmarks/dask_scaling.py [--small] [--only torch ...]     # one table, about 6 minutes on two idle cores
    python benchmarks/dask_scaling.py --only full-size                 # 9600 sequences of 1403 steps, stateful

Two LSTM layers of 64 units, 6000 sequences of 100 steps and 8 features in chunks of 125, the gradient of the loss with
respect to the input. Every part runs in its own process, with one thread; the plain call, one worker and two workers
alternate, and ratios are medians over rounds.

equality
    Largest difference from the plain call, relative to the largest number. Bars: 0 on torch, 1e-6 on Keras.
overhead, scaling
    One worker at most 1.15 times the plain call, with Dask's default settings and with a ``worker-saturation`` of 8, by
    which the scheduler sends data-loading tasks ahead; two workers at least 1.6 times as fast as one on torch, 1.4 on
    JAX.
memory
    Largest resident memory of the client, including the scheduler, while 20,000 sequences are reduced over samples,
    relative to 1,000. Bar: 1.1.
bytes
    Bytes of the model that each worker unpickles, relative to the size of its weights. Bar: 1.05.
"""

import argparse
import importlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from _summary import COLLECT, Row, collect, read_rows

HERE = Path(__file__).parent
FEATURES, UNITS, CHUNK = 8, 64, 125
ENGINES = ("torch", "jax", "keras-torch", "tensorflow", "tf_keras")
#: Key of the client whose one worker is sent data-loading tasks ahead; other keys are numbers of workers.
AHEAD = "ahead"
#: Bars of the time of one worker over that of two; other engines are compared only in their numbers.
SCALING = {"torch": 1.6, "jax": 1.4}
PARTS = (*ENGINES, "memory", "bytes")
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONWARNINGS": "ignore",
}


def torch_model(units=UNITS):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(FEATURES, units, num_layers=2, batch_first=True)
            self.out = torch.nn.Linear(units, 1)

        def forward(self, x):
            return self.out(self.lstm(x)[0][:, -1])

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return Net(), {"loss": torch.nn.functional.mse_loss, "wrt": "input"}


def keras_model(package, steps):
    keras = importlib.import_module(package)
    keras.utils.set_random_seed(0)
    lstm = keras.layers.LSTM
    layers = [keras.layers.Input((steps, FEATURES)), lstm(UNITS, return_sequences=True), lstm(UNITS)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(loss="mse")
    return model, {"wrt": "input"}


def lazy_data(count, steps):
    """Return (x, y) as Dask arrays drawn chunk by chunk on the workers, never as a whole."""
    import dask.array as da

    rng = da.random.default_rng(1)
    x = rng.normal(size=(count, steps, FEATURES), chunks=(CHUNK, steps, FEATURES)).astype("float32")
    return x, rng.normal(size=(count, 1), chunks=(CHUNK, 1)).astype("float32")


def run_timed(run):
    start = time.perf_counter()
    return run(), time.perf_counter() - start


def clusters(stack, *workers, saturation=1.1):
    """Return a client for each number of workers, closed with ``stack``; idle workers cost nothing.

    ``saturation``: number of data-loading tasks that a worker is sent at a time, per thread; Dask's default is 1.1.
    """
    import dask
    from dask.distributed import Client, LocalCluster

    clients = []
    with dask.config.set({"distributed.scheduler.worker-saturation": saturation}):
        for count in workers:
            cluster = stack.enter_context(LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=":0"))
            clients.append(stack.enter_context(Client(cluster, set_as_default=False)))
    return clients


def compare_engine(name, small):
    """Compare numbers on one engine and, if it has a bar, time in interleaved rounds."""
    import rnnlens as rl

    timed = name in SCALING
    count, steps, rounds = (500, 10, 1) if small else (6000, 100, 3) if timed else (500, 20, 1)
    count += 3  # a smaller last chunk
    model, keywords = (
        torch_model() if name == "torch" else keras_model("tf_keras" if name == "tf_keras" else "keras", steps)
    )
    x, y = lazy_data(count, steps)
    arrays = x.compute(scheduler="synchronous"), y.compute(scheduler="synchronous")
    timings, mismatches = {}, []
    with ExitStack() as stack:
        clients = dict(zip((1, 2), clusters(stack, 1, 2), strict=True))
        if timed:
            clients |= {AHEAD: clusters(stack, 1, saturation=8)[0]}
        lazy = {}
        for workers, client in clients.items():
            with client.as_current():
                lazy[workers] = rl.gradients(model, x, y, **keywords)
                lazy[workers][: CHUNK * 8].compute()  # workers import, rebuild and compile before timing
        rl.gradients(model, arrays[0][:CHUNK], arrays[1][:CHUNK], **keywords)
        for _ in range(rounds):
            reference, reference_seconds = run_timed(
                lambda: rl.gradients(model, *arrays, batch_size=CHUNK, **keywords).values
            )
            timings.setdefault(0, []).append(reference_seconds)
            for workers, client in clients.items():
                with client.as_current():
                    values, seconds = run_timed(lambda workers=workers: lazy[workers].compute().values)
                timings.setdefault(workers, []).append(seconds)
                mismatches.append(float(np.abs(values - reference).max() / np.abs(reference).max()))
    collect(
        Row(name, "largest difference", max(mismatches), "", "the plain call", bar=0.0 if name == "torch" else 1e-6)
    )
    if timed:
        reference, single_worker = timings[0], timings[1]

        def median_ratio(slow, fast):
            return statistics.median(a / b for a, b in zip(slow, fast, strict=True))

        per_sequence = statistics.median(single_worker) / count
        bytes_per_sequence = arrays[0].nbytes * 2 / count
        collect(
            Row(name, "one worker", median_ratio(single_worker, reference), "x", "the plain call", bar=1.15),
            Row(
                name,
                "one worker, data sent ahead",
                median_ratio(timings[AHEAD], reference),
                "x",
                "the plain call",
                bar=1.15,
            ),
            Row(
                name,
                "two workers",
                median_ratio(single_worker, timings[2]),
                "x",
                "one worker, times as fast",
                bar=SCALING[name],
                at_least=True,
            ),
            Row(
                name,
                "a sequence on one worker",
                1000 * per_sequence,
                "ms",
                f"{bytes_per_sequence / 1000:.1f} kB read and written",
            ),
        )


def compare_memory(small):
    """Compare the client's resident memory between reductions of few and of many sequences."""
    import psutil

    import rnnlens as rl

    model, keywords = torch_model()
    process, largest = psutil.Process(), {}

    def watch():
        while not done.wait(0.02):
            largest[count] = max(largest.get(count, 0), process.memory_info().rss)

    with ExitStack() as stack:
        (client,) = clusters(stack, 2)
        stack.enter_context(client.as_current())
        for count in (0, 1000, 2000 if small else 20_000):
            x, y = lazy_data(count or 1000, 20 if small else 100)
            done = threading.Event()
            watcher = threading.Thread(target=watch)
            watcher.start()
            rl.gradients(model, x, y, measure="norm", across="mean", **keywords).compute()
            done.set()
            watcher.join()
    few, many = largest[1000], largest[count]
    label = f"client, {count:,} sequences ({many / 2**20:.0f} MiB)"
    collect(Row("memory", label, many / few, "x", "1,000 sequences", bar=1.1))


def count_models():
    """Make this worker record the size of every model that it unpickles."""
    from rnnlens import cluster

    def unpickled(self, state):
        cluster.sizes.append(len(state["_bytes"]))
        self.__dict__.update(state)

    cluster.sizes, cluster.TravellingModel.__setstate__ = [], unpickled


def sizes_of_models():
    from rnnlens import cluster

    return cluster.sizes


def model_bytes(small):
    """Compare the bytes of the model that a worker unpickles with the size of its weights.

    Dask's memory manager is off, because it drops copies that no waiting task needs and sends them again.
    """
    import dask

    import rnnlens as rl

    model, keywords = torch_model(units=64 if small else 512)
    with ExitStack() as stack:
        stack.enter_context(dask.config.set({"distributed.scheduler.active-memory-manager.start": False}))
        (client,) = clusters(stack, 2)
        stack.enter_context(client.as_current())
        client.run(count_models)
        x, y = lazy_data(16 * CHUNK, 4)
        lazy = rl.gradients(model, x, y, **keywords)
        lazy.compute()
        received = max(sum(sizes) for sizes in client.run(sizes_of_models).values())
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    collect(Row("bytes", f"model of {size / 1e6:.1f} MB, by worker", received / size, "x", "its weights", bar=1.05))


def full_size():
    """Compute the gradient of 9600 sequences of 1403 steps of a stateful model, one norm per step."""
    import dask.array as da
    from dask.distributed import Client, LocalCluster

    import rnnlens as rl

    path = next((HERE.parent / "examples").glob("a_*.py"))
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("example_a", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.build(1403, 100, 200)
    ids = da.random.default_rng(1).integers(0, example.VOCABULARY, (9600, 1403), chunks=(example.BATCH, 1403))
    target = {"of": "rnn.hidden", "at": {"time": -1}, "reduce": "mean", "per_sample": True}
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster):
        start = time.perf_counter()
        lazy = rl.gradients(model, ids, **target, wrt="embedding.output", measure="norm", across="mean")
        mean_norms = lazy.compute()
        seconds = time.perf_counter() - start
    assert mean_norms.dims == ("time",)
    assert np.isfinite(mean_norms.values).all()
    streamed = rl.gradients(model, ids[:64].compute(), **target, wrt="embedding.output", measure="norm", batch_size=32)
    chunked = rl.gradients(model, ids[:64], **target, wrt="embedding.output", measure="norm").compute(scheduler="sync")
    mismatch = float(np.abs(streamed.values - chunked.values).max() / np.abs(streamed.values).max())
    collect(
        Row("full size", "9600 x 1403, 200 units, two workers", seconds, "s"),
        Row("full size", "largest difference, 64 sequences", mismatch, "", "the plain call", bar=1e-6),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="toy sizes, to see that it runs")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "full-size"], default=PARTS, help="these parts")
    parser.add_argument("--part", choices=[*PARTS, "full-size"], help="this part, in this process")
    args = parser.parse_args()
    if args.part:
        runners = {"memory": compare_memory, "bytes": model_bytes, "full-size": lambda small: full_size()}
        runners.get(args.part, lambda small: compare_engine(args.part, small))(args.small)
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(os.environ.setdefault(COLLECT, str(Path(folder) / "rows")))
        before = len(read_rows(path))
        for part in args.only:
            backend = {"keras-torch": "torch", "tf_keras": "tensorflow", "tensorflow": "tensorflow"}.get(part, "jax")
            environment = {**os.environ, **ONE_THREAD, "KERAS_BACKEND": backend}
            command = [sys.executable, __file__, "--part", part, *(["--small"] if args.small else [])]
            print(f"\n{part}", flush=True)
            failed += subprocess.run(command, env=environment, check=False).returncode != 0
        from speed import show

        show(read_rows(path)[before:])
    return failed


if __name__ == "__main__":
    sys.exit(main())
