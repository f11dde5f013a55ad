"""Known properties of the zoo's networks, computed without rnnlens: data, memory, and states on many samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from _zoo_entries import FOLLOWS, Entry, train_or_load
from _zoo_nets import Net
from _zoo_tasks import Task, needed_memory, white

Array = np.ndarray[Any, Any]


def data_for(entry: Entry, net: Any, task: Task | None, samples: int, stream: int = 0) -> tuple[Array, Array]:
    """Return held-out samples (x, y) of a stream; a network without a task is its own teacher, plus noise."""
    seed = 10**6 + 1000 * stream + entry.seed
    if task is not None:
        x = task.draw(samples, seed)
        return x, task.ideal(x)
    o = entry.options
    x = add_flaw(white(o["steps"], o.get("features", 1))(samples, seed), o.get("dress", ""))
    if entry.name == "latch":
        x *= 0.02
        x[:, 0, 0] = np.where(np.random.default_rng(seed).uniform(size=samples) < 0.5, -1, 1)
    if o.get("how") == "input":
        x[seed % 7, o["steps"] // 2] = np.nan
    y = predict(net, x)
    noise = np.random.default_rng(seed + 1).normal(size=y.shape)
    y = y + entry.noise * y.std() * noise if np.isfinite(y).all() else noise
    return x, y.astype(np.float32)


def predict(net: Any, x: Array) -> Array:
    """Return the network's output."""
    with torch.no_grad():
        output: Array = net(torch.as_tensor(x)).numpy()
    return output


def add_flaw(x: Array, dress: str) -> Array:
    """Apply one named flaw to the inputs."""
    kind, _, share = dress.rpartition(" ")
    steps = x.shape[1]
    if kind == "padded before":
        x[:, : round(float(share) * steps)] = 0
    elif kind == "padded behind":
        x[:, steps - round(float(share) * steps) :] = 0
    elif dress == "constant":
        x[:, :, 1] = 0.7
    elif dress == "static":
        x[:] = x[:, :1]
    elif dress == "nearly static":
        x[:] = x[:, :1] + 0.01 * x
    elif dress == "silence":
        x[:, 5:] = 0
    return x


def known_memory(entry: Entry, net: Any, task: Task | None, steps: int) -> int | None:
    """Return the known n: as given, in closed form, or by exchanging prefixes in the task."""
    if entry.memory != FOLLOWS:
        return entry.memory
    if entry.name == "linear":
        return int(net.memory(steps))
    if task is not None:
        return needed_memory(task)
    energy = np.exp(-2 * np.arange(steps) / entry.options["tau"])
    return int(np.argmax(1 - np.cumsum(energy) / energy.sum() <= 0.05)) + 1


def truth_of(entry: Entry, net: Any, task: Task | None) -> dict[str, bool]:
    """Return the right findings of a network by code; dead units and chaos are measured."""
    truth = dict(entry.truth)
    if "DEAD_UNITS" in truth and entry.make is train_or_load and task is not None and not task.sequence:
        truth["DEAD_UNITS"] = really_dead(net, task, entry.seed)
    if entry.name in ("random tanh", "random gru"):
        growth = separation(net, white(entry.options["steps"])(16, 77 + entry.seed))
        truth["CHAOTIC"] = bool(growth > np.log(100))
        if 0.3 < growth / np.log(100) < 2:
            truth = {}  # too near the threshold to count as either
    return truth


def really_dead(net: Any, task: Task, seed: int) -> bool:
    """Whether some unit is constant over all steps of 2048 other samples."""
    with torch.no_grad():
        h = net.rnn(torch.as_tensor(task.draw(2048, 77 + seed)))[0]
    return bool((h.amax(dim=(0, 1)) == h.amin(dim=(0, 1))).any())


def separation(net: Net, x: Array) -> float:
    """Return how much two nearby states separate until the last step, as a log; rescaled after each step.

    Benettin, Galgani, Strelcyn 1976, doi:10.1103/PhysRevA.14.2338. In float64, by torch only.
    """
    rnn, inputs = net.rnn.double(), torch.as_tensor(x).double()
    state = torch.zeros(1, len(x), rnn.hidden_size).double()
    difference = torch.randn(state.shape, generator=torch.Generator().manual_seed(0)).double()
    total = torch.zeros(len(x)).double()
    with torch.no_grad():
        for t in range(x.shape[1]):
            near = state + 1e-7 * difference / difference.norm(dim=-1, keepdim=True)
            state, near = (rnn(inputs[:, t : t + 1], s)[1] for s in (state, near))
            difference = near - state
            if t >= x.shape[1] // 10:
                total += torch.log(difference.norm(dim=-1)[0] / 1e-7)
    net.float()
    return float(total.mean()) * x.shape[1] / (x.shape[1] - x.shape[1] // 10)
