"""Cost of verbs on models of JAX itself, against the user's own compiled pass, as ratios in one run.

    python benchmarks/jax_programs.py [--small]

An LSTM of Flax NNX with 256 units on 64 samples of 200 steps, and an Equinox GRU of about a millisecond. First calls
include all compilation, of rnnlens and of the user's function alike; later ones are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _summary import Row, collect
from flax import nnx

import rnnlens as rl

SECTION = "JAX itself"


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of one call, until its arrays are computed."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def first_and_median(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return seconds of the first call and the median of later ones by name; the later ones take turns."""
    first = {name: seconds(call) for name, call in calls.items()}
    for call in calls.values():
        seconds(call)
    later: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            later[name].append(seconds(call))
    return {name: (first[name], statistics.median(later[name])) for name in calls}


def mse(output, target):
    """Return the mean squared error."""
    return jnp.mean((output - target) ** 2)


class Network(nnx.Module):
    """An LSTM whose last output is read."""

    def __init__(self, features: int, units: int) -> None:
        self.rnn = nnx.RNN(nnx.LSTMCell(features, units, rngs=nnx.Rngs(0)))
        self.head = nnx.Linear(units, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.rnn(x)[:, -1])


class Small(eqx.Module):
    """A GRU whose output is read at every step, one sample at a time."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __call__(self, xs):
        return jax.vmap(self.head)(jax.lax.scan(lambda h, x: (self.cell(x, h),) * 2, jnp.zeros(8), xs)[1])


def numbers(*shape: int) -> np.ndarray:
    """Return random numbers in float32."""
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def trace_of_an_lstm(is_small: bool) -> list[Row]:
    """Measure traces against the user's jitted value_and_grad."""
    units, samples, steps = (32, 8, 50) if is_small else (256, 64, 200)
    net, x, y = Network(16, units), numbers(samples, steps, 16), numbers(samples, 1)
    graph, state, rest = nnx.split(net, nnx.Param, ...)
    run = jax.jit(jax.value_and_grad(lambda state: mse(nnx.merge(graph, state, rest, copy=True)(x), y)))
    calls = {
        "user": lambda: run(state),
        "certified": lambda: _trace(net, x, y),
        "not certified": partial(_uncertified, net, x, y),
    }
    times = first_and_median(calls, 3 if is_small else 5)
    size = f"LSTM {units}, B {samples}, T {steps}"
    user = times["user"]
    return [
        Row(SECTION, f"the user's value_and_grad, {size}", user[1] * 1e3, "ms"),
        Row(SECTION, f"rl.trace, certified, {size}", times["certified"][1] / user[1], "x", "value_and_grad", 3.0),
        Row(SECTION, f"rl.trace, not certified, {size}", times["not certified"][1] / user[1], "x", "value_and_grad"),
        Row(
            SECTION, f"rl.trace, first call, {size}", times["certified"][0] / user[0], "x", "first value_and_grad", 2.0
        ),
    ]


def _trace(net, x, y):
    return rl.trace(net, x, y, loss=mse).loss


def _uncertified(net, x, y):
    with rl.options(certify="never"):
        return rl.trace(net, x, y, loss=mse).loss


def small_calls() -> list[Row]:
    """Measure verbs on a network with almost no computation, in milliseconds."""
    net = Small(eqx.nn.GRUCell(4, 8, key=jax.random.key(0)), eqx.nn.Linear(8, 1, key=jax.random.key(1)))
    x, y = numbers(2, 10, 4), numbers(2, 10, 1)
    model = rl.jax.model(net, example=x)
    verbs = {
        "rl.layers": lambda: rl.layers(model),
        "rl.trace": lambda: rl.trace(net, x, y, loss=mse),
        "rl.gradients by weights": lambda: rl.gradients(net, x, y, loss=mse),
        "rl.weights": lambda: rl.weights(net, x, y, loss=mse),
        "rl.jacobian": lambda: rl.jacobian(net, x),
    }
    times = first_and_median({name: partial(_without_result, call) for name, call in verbs.items()}, 20)
    return [
        Row(SECTION, f"small network, {name}", later * 1e3, "ms", "", 1.0 if name == "rl.layers" else 5.0)
        for name, (_, later) in times.items()
    ]


def _without_result(call: Callable[[], Any]) -> None:
    call()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    for row in [*trace_of_an_lstm(arguments.small), *small_calls()]:
        bar = "" if row.bar is None else f"   bar {row.bar:g}: {'met' if row.is_met else 'MISSED'}"
        print(f"{row.call:60} {row.value:8.3g} {row.unit}{bar}", flush=True)
        collect(row)
