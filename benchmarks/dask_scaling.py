"""Lazy gradients on a LocalCluster against the plain streaming call: equality, overhead, scaling, memory of the client.

    python benchmarks/dask_scaling.py --engine torch                 # or jax, tensorflow, keras-torch, tf_keras
    python benchmarks/dask_scaling.py --engine torch --sequences 600 --steps 20 --most 1000   # a quick look

Bars: equal bit for bit on torch, to 1e-6 on Keras; one worker at most 1.15 times the plain call; two workers at least
1.6 times one on torch, 1.4 on JAX, on two idle cores; client memory flat within 10 % from 1,000 sequences to --most.
"""

import argparse
import importlib
import os
import time

import numpy as np

FEATURES, UNITS, CHUNK = 8, 64, 125


def torch_model(steps):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(FEATURES, UNITS, num_layers=2, batch_first=True)
            self.out = torch.nn.Linear(UNITS, 1)

        def forward(self, x):
            return self.out(self.lstm(x)[0][:, -1])

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return Net(), {"loss": torch.nn.functional.mse_loss}


def keras_model(package, steps):
    keras = importlib.import_module(package)
    keras.utils.set_random_seed(0)
    lstm = keras.layers.LSTM
    layers = [keras.layers.Input((steps, FEATURES)), lstm(UNITS, return_sequences=True), lstm(UNITS)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(loss="mse")
    return model, {}


def blocks(count, steps):
    """Sequences drawn on the workers, chunk by chunk: they are nowhere held whole."""
    import dask.array as da

    rng = da.random.default_rng(1)
    x = rng.normal(size=(count, steps, FEATURES), chunks=(CHUNK, steps, FEATURES)).astype("float32")
    return x, rng.normal(size=(count, 1), chunks=(CHUNK, 1)).astype("float32")


def timed(run):
    start = time.perf_counter()
    return run(), time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="torch", choices=["torch", "jax", "tensorflow", "keras-torch", "tf_keras"])
    parser.add_argument("--sequences", type=int, default=6000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--most", type=int, default=20_000, help="sequences of the largest run of the memory test")
    asked = parser.parse_args()
    os.environ.setdefault("KERAS_BACKEND", asked.engine.removeprefix("keras-").replace("tf_keras", "tensorflow"))
    package = "tf_keras" if asked.engine == "tf_keras" else "keras"
    model, keywords = torch_model(asked.steps) if asked.engine == "torch" else keras_model(package, asked.steps)
    measure(model, {**keywords, "wrt": "input"}, asked)


def measure(model, keywords, asked):
    import psutil
    from dask.distributed import Client, LocalCluster

    import rnnlens as rl

    x, y = blocks(asked.sequences, asked.steps)
    here = x.compute(scheduler="synchronous"), y.compute(scheduler="synchronous")
    rl.gradients(model, here[0][:CHUNK], here[1][:CHUNK], **keywords)  # compiles
    plain, alone = timed(lambda: rl.gradients(model, *here, batch_size=CHUNK, **keywords).values)
    print(f"plain streaming call: {alone:.2f} s")
    seconds = {}
    for workers in (1, 2):
        with (
            LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0") as cluster,
            Client(cluster) as client,
        ):
            lazy = rl.gradients(model, x, y, **keywords)
            lazy[: CHUNK * 4 * workers].compute()  # workers import, rebuild and compile
            client.run(lambda: None)
            found, seconds[workers] = timed(lambda lazy=lazy: lazy.compute().values)
            apart = float(np.abs(found - plain).max() / np.abs(plain).max())
            print(f"{workers} worker(s): {seconds[workers]:.2f} s, largest relative difference {apart:.1e}")
            if workers == 2:
                memory(psutil.Process(), model, keywords, asked)
    print(f"one worker / plain: {seconds[1] / alone:.2f}; two workers / one: {seconds[1] / seconds[2]:.2f}")


def memory(process, model, keywords, asked):
    """Print the resident memory of the client after runs of more and more sequences, reduced over samples."""
    import rnnlens as rl

    for count in (1000, asked.most):
        x, y = blocks(count, asked.steps)
        rl.gradients(model, x, y, measure="norm", across="mean", **keywords).compute()
        print(f"client after {count} sequences: {process.memory_info().rss / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
