"""Streamed gradients on every framework, against the framework's own gradient of the same number over the same batches.

    python benchmarks/streaming.py [--small] [--batches 10] [--rounds 3] [--engine NAME]

A SimpleRNN of 200 units over a frozen embedding of 100 dimensions, 1403 steps, batches of 32, random initial state, as
in `example_a.py`, which measures JAX and the memory. Computed: the gradient of the mean state with respect to the
embedded input, as one norm per step. Each framework runs in its own process. The first batch, which is certified and
swept, is counted; one round that compiles is not. Medians of interleaved rounds, after the two results are compared.
Bar: 1.5.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _summary import Row, collect
from example_a import load_example

ENGINES = {
    "tensorflow": "Keras on TensorFlow",
    "torch": "Keras on torch",
    "tf_keras": "tf_keras",
    "module": "a torch module",
}
BATCH, VOCABULARY, BAR = 32, 500, 1.5

BatchGradient = Callable[[np.ndarray], np.ndarray]


def keras_model(keras: Any, steps: int, dimensions: int, units: int) -> Any:
    """Return a stateful SimpleRNN over a frozen embedding."""
    ids = keras.Input(batch_shape=(BATCH, steps), dtype="int32")
    embedded = keras.layers.Embedding(VOCABULARY, dimensions, trainable=False, name="embedding")(ids)
    rnn = keras.layers.SimpleRNN(units, stateful=True, return_sequences=True, name="rnn")
    return keras.Model(ids, rnn(embedded))


def tensorflow_case(keras: Any, sizes: tuple[int, int, int], start: np.ndarray) -> tuple[Any, BatchGradient]:
    """Return a Keras model on TensorFlow, and a function for the compiled gradient of one batch."""
    import tensorflow as tf

    model = keras_model(keras, *sizes)
    state = tf.tile(tf.constant(start), (BATCH, 1))

    @tf.function
    def gradient(ids):
        embedded = model.get_layer("embedding")(ids)
        with tf.GradientTape() as tape:
            tape.watch(embedded)
            states = model.get_layer("rnn")(embedded, initial_state=state)
            value = tf.reduce_sum(tf.reduce_mean(states, (1, 2)))
        return tf.reduce_mean(tf.norm(tape.gradient(value, embedded), axis=-1), 0)

    def batch_gradient(ids: np.ndarray) -> np.ndarray:
        if keras.__name__ == "tf_keras":  # uses initial_state only where the recorded state is zero
            model.get_layer("rnn").reset_states()
        return gradient(tf.constant(ids)).numpy()

    return model, batch_gradient


def torch_case(model: Any, embed: Callable[[Any], Any], states_of: Callable[[Any], Any]) -> tuple[Any, BatchGradient]:
    """Return a torch model, and a function for the gradient of one batch."""
    import torch

    def batch_gradient(ids: np.ndarray) -> np.ndarray:
        embedded = embed(torch.as_tensor(ids)).detach().requires_grad_()
        (grad,) = torch.autograd.grad(states_of(embedded).mean((1, 2)).sum(), embedded)
        return grad.norm(dim=-1).mean(0).numpy()

    return model, batch_gradient


def build(engine: str, sizes: tuple[int, int, int], start: np.ndarray) -> tuple[Any, BatchGradient]:
    """Return the model of an engine, and the framework's own gradient of one batch as a function."""
    if engine == "tf_keras":
        import tf_keras

        return tensorflow_case(tf_keras, sizes, start)
    if engine == "tensorflow":
        import keras

        return tensorflow_case(keras, sizes, start)
    import torch

    state = torch.as_tensor(start).expand(BATCH, -1).contiguous()
    if engine == "torch":
        import keras

        model = keras_model(keras, *sizes)
        return torch_case(model, model.get_layer("embedding"), lambda e: model.get_layer("rnn")(e, initial_state=state))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(VOCABULARY, sizes[1]).requires_grad_(False)
            self.rnn = torch.nn.RNN(*sizes[1:], batch_first=True)

        def forward(self, ids):
            return self.rnn(self.embedding(ids))[0]

    net = Net()
    return torch_case(net, net.embedding, lambda e: net.rnn(e, state[None])[0])


def measure(engine: str, small: bool, batches: int, rounds: int) -> None:
    """Print and collect the ratio of rnnlens' time to the framework's."""
    sizes = (60, 10, 16) if small else (1403, 100, 200)
    start = np.random.default_rng(2).normal(size=(1, sizes[2])).astype("float32")
    random = np.random.default_rng(1)
    kind = np.int64 if engine == "module" else np.int32
    data = [random.integers(0, VOCABULARY, (BATCH, sizes[0])).astype(kind) for _ in range(batches)]
    model, batch_gradient = build(engine, sizes, start)
    gradient = load_example().gradient

    def rnnlens_norms() -> np.ndarray:
        return gradient(model, iter(data), start).values

    def framework_norms() -> np.ndarray:
        return np.mean([batch_gradient(ids) for ids in data], axis=0)

    calls, reference = {"ours": rnnlens_norms, "own": framework_norms}, framework_norms()
    np.testing.assert_allclose(rnnlens_norms(), reference, rtol=1e-3, atol=1e-3 * reference.max())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    a, b = (statistics.median(times) / batches for times in seconds.values())
    print(f"{ENGINES[engine]:20} {1000 * a:7.0f} ms a batch, own {1000 * b:7.0f} ms, ratio {a / b:.2f}", flush=True)
    name = f"rl.gradients, {batches} batches of {BATCH} x {sizes[0]} steps, {ENGINES[engine]}"
    collect(Row("Streaming", name, a / b, "x", "the framework's own gradient", BAR))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a toy, to see that it runs")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=list(ENGINES))
    args = parser.parse_args()
    if args.engine:
        measure(args.engine, args.small, args.batches, args.rounds)
        return 0
    failed = 0
    for engine in ENGINES:
        backend = engine if engine in ("tensorflow", "torch") else "tensorflow"
        environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, *sys.argv, "--engine", engine]
        failed += subprocess.run(command, env=environment, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
