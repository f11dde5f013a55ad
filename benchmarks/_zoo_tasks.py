"""Tasks with known dependencies: generators of x, and the outputs of a perfect network.

``ideal(x)`` of a task is the output of a perfect network for any input, also one with an exchanged prefix. The memory
that the task needs follows from it by that exchange, without a network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Task:
    """A task with known dependencies.

    Attributes
    ----------
    draw
        Maps (count, seed) to x (sample, time, feature).
    ideal
        Maps x to the target (sample, ...): integers for classes.
    kind
        "classes" or "values".
    outputs
        Number of classes or values.
    lag
        The largest lag that matters, if there is one.
    """

    draw: Callable[[int, int], Array]
    ideal: Callable[[Array], Array]
    kind: str
    features: int
    outputs: int
    steps: int
    lag: int
    sequence: bool = False


SYMBOLS = 4


def recall(lag: int, steps: int = 60) -> Task:
    """Return a task: recall the flagged symbol, ``lag`` steps before the last; all others are distractors."""

    def draw(count: int, seed: int) -> Array:
        symbols = np.random.default_rng(seed).integers(0, SYMBOLS, (count, steps))
        x = np.zeros((count, steps, SYMBOLS + 1), np.float32)
        x[np.arange(count)[:, None], np.arange(steps), symbols] = 1
        x[:, steps - 1 - lag, SYMBOLS] = 1
        return x

    def ideal(x: Array) -> Array:
        return x[:, steps - 1 - lag, :SYMBOLS].argmax(axis=1)

    return Task(draw, ideal, "classes", SYMBOLS + 1, SYMBOLS, steps, lag)


def adding(steps: int = 50) -> Task:
    """Return a task: add two marked numbers, one in each half (Hochreiter, Schmidhuber 1997, experiment 4)."""

    def draw(count: int, seed: int) -> Array:
        rng = np.random.default_rng(seed)
        x = np.zeros((count, steps, 2), np.float32)
        x[:, :, 0] = rng.uniform(0, 1, (count, steps))
        x[np.arange(count), rng.integers(0, steps // 2, count), 1] = 1
        x[np.arange(count), rng.integers(steps // 2, steps, count), 1] = 1
        return x

    def ideal(x: Array) -> Array:
        return (x[:, :, :1] * x[:, :, 1:]).sum(axis=1)

    return Task(draw, ideal, "values", 2, 1, steps, steps - 1)


def white(steps: int, features: int = 1) -> Callable[[int, int], Array]:
    """Return a generator of Gaussian noise (sample, time, feature)."""
    return lambda count, seed: np.random.default_rng(seed).normal(size=(count, steps, features)).astype(np.float32)


def exponential_mean(alpha: float, steps: int = 60) -> Task:
    """Return a task with output sum_tau alpha^tau x_(T - tau), whose lag profile has a closed form."""
    weights = (alpha ** np.arange(steps)[::-1] * np.sqrt(1 - alpha**2)).astype(np.float32)
    return Task(white(steps), lambda x: x[:, :, 0] @ weights[:, None], "values", 1, 1, steps, steps - 1)


def last_step(steps: int = 60, smooth: float = 0.0, classes: bool = False) -> Task:
    """Return a task with the last value of white or autocorrelated input as output: no older input is needed."""

    def draw(count: int, seed: int) -> Array:
        x = white(steps)(count, seed)
        for t in range(1, steps):
            x[:, t] = smooth * x[:, t - 1] + np.sqrt(1 - smooth**2) * x[:, t]
        return x

    if classes:
        return Task(draw, lambda x: (x[:, -1, 0] > 0).astype(int), "classes", 1, 2, steps, 0)
    return Task(draw, lambda x: x[:, -1], "values", 1, 1, steps, 0)


def two_lags(near: int = 2, far: int = 40, steps: int = 60) -> Task:
    """Return a task: add the inputs at two lags, one near and one far."""
    scale = np.float32(0.5**0.5)
    return Task(white(steps), lambda x: scale * (x[:, -1 - near] + x[:, -1 - far]), "values", 1, 1, steps, far)


def echo(lag: int, steps: int = 40) -> Task:
    """Return a task: output at every step the input ``lag`` steps before."""

    def ideal(x: Array) -> Array:
        y = np.zeros_like(x)
        y[:, lag:] = x[:, :-lag]
        return y

    return Task(white(steps), ideal, "values", 1, 1, steps, lag, sequence=True)


def padded(task: Task, share: float, *, before: bool) -> Task:
    """Return a task with zeros added at the beginning or the end of the inputs, up to a share of the whole length."""
    extra = round(task.steps * share / (1 - share))

    def pad(x: Array) -> Array:
        width = ((0, 0), (extra, 0) if before else (0, extra), (0, 0))
        return np.pad(x, width)

    def unpad(x: Array) -> Array:
        return x[:, extra:] if before else x[:, : task.steps]

    return Task(
        lambda count, seed: pad(task.draw(count, seed)),
        lambda x: task.ideal(unpad(x)),
        task.kind,
        task.features,
        task.outputs,
        task.steps + extra,
        task.lag + (0 if before else extra),
    )


def with_constant(task: Task) -> Task:
    """Return a task with a constant feature added to its inputs."""

    def draw(count: int, seed: int) -> Array:
        x = task.draw(count, seed)
        return np.concatenate([x, np.full_like(x[:, :, :1], 0.7)], axis=2)

    return Task(
        draw, lambda x: task.ideal(x[:, :, :-1]), task.kind, task.features + 1, task.outputs, task.steps, task.lag
    )


def static(steps: int = 30) -> Task:
    """Return a task with the same input value at every step, which is also the output."""

    def draw(count: int, seed: int) -> Array:
        x = np.random.default_rng(seed).normal(size=(count, 1, 1)).astype(np.float32)
        return np.repeat(x, steps, axis=1)

    return Task(draw, lambda x: x[:, -1], "values", 1, 1, steps, 0)


def rare(share: float = 0.1, lag: int = 30, steps: int = 50) -> Task:
    """Return a task: the last value, but for samples flagged at the last step the value ``lag`` steps before."""

    def draw(count: int, seed: int) -> Array:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(count, steps, 2)).astype(np.float32)
        x[:, :, 1] = 0
        x[:, -1, 1] = rng.uniform(size=count) < share
        return x

    def ideal(x: Array) -> Array:
        return np.where(x[:, -1, 1:] > 0.5, x[:, -1 - lag, :1], x[:, -1, :1])

    return Task(draw, ideal, "values", 2, 1, steps, lag)


def needed_memory(task: Task, count: int = 4000, level: float = 0.05) -> int:
    """Return how many steps a perfect network needs for the task, by exchanging prefixes between samples."""
    x, donors = task.draw(count, 1), task.draw(count, 2)

    def target_of(x: Array) -> Array:
        y = task.ideal(x)
        if task.sequence:
            y = y[:, -1]
        return np.eye(task.outputs)[y] if task.kind == "classes" else y

    targets = target_of(x)
    longest = 0
    for k in range(1, task.steps):
        swapped = np.concatenate([donors[:, : task.steps - k], x[:, task.steps - k :]], axis=1)
        if ((target_of(swapped) - targets) ** 2).sum(axis=1).mean() > level * 2 * targets.var(axis=0).sum():
            longest = k
    return longest + 1


def digits() -> Task:
    """Return a task: classify scikit-learn's handwritten digits, pixel by pixel (real data; needed memory unknown)."""
    from sklearn.datasets import load_digits

    pixels, names = load_digits(return_X_y=True)
    images = ((pixels - pixels.mean()) / pixels.std()).astype(np.float32)[:, :, None]

    def draw(count: int, seed: int) -> Array:
        # The last 360 images are held out, for seeds of 10**6 and above.
        indices = np.arange(len(images) - 360, len(images)) if seed >= 10**6 else np.arange(len(images) - 360)
        return images[np.random.default_rng(seed).choice(indices, count)]

    keys = {image.tobytes(): int(name) for image, name in zip(images, names, strict=True)}

    def ideal(x: Array) -> Array:
        return np.array([keys[np.ascontiguousarray(image).tobytes()] for image in x])

    return Task(draw, ideal, "classes", 1, 10, 64, 63)


def characters(steps: int = 60) -> Task:
    """Return a task: predict the next character of the documentation that ships with Python."""
    import pydoc_data.topics

    text = "".join(pydoc_data.topics.topics.values())
    alphabet = sorted(set(text), key=text.count, reverse=True)[:40]
    codes = np.array([alphabet.index(c) if c in alphabet else 39 for c in text])
    split = int(0.9 * len(codes))

    def draw(count: int, seed: int) -> Array:
        low, high = (split, len(codes)) if seed >= 10**6 else (0, split)
        first = np.random.default_rng(seed).integers(low, high - steps - 1, count)
        windows = codes[first[:, None] + np.arange(steps + 1)]
        x = np.eye(40, dtype=np.float32)[windows[:, :-1]]
        following[x.tobytes()] = windows[:, -1]
        return x

    following: dict[bytes, Array] = {}

    def ideal(x: Array) -> Array:
        return following.pop(x.tobytes())

    return Task(draw, ideal, "classes", 40, 40, steps, steps - 1)


def vowels() -> Task:
    """Return a task: classify the speaker in Japanese Vowels (Kudo, Toyama, Shimbo 1999).

    Nine speakers, 7 to 29 steps each, padded with zeros at the end. The recordings are in the package aeon
    (``pip install --no-deps aeon``), whose code is not run.
    """
    train, test = (_utterances(f"JapaneseVowels_{split}.ts") for split in ("TRAIN", "TEST"))
    names = {x.tobytes(): name for x, name in zip(*map(np.concatenate, zip(train, test, strict=True)), strict=True)}

    def draw(count: int, seed: int) -> Array:
        x = test[0] if seed >= 10**6 else train[0]
        return x[np.random.default_rng(seed).choice(len(x), count)]

    def ideal(x: Array) -> Array:
        return np.array([names[np.ascontiguousarray(utterance).tobytes()] for utterance in x])

    return Task(draw, ideal, "classes", 12, 9, 29, 28)


def _utterances(file: str, steps: int = 29) -> tuple[Array, Array]:
    """Return recordings (sample, step, coefficient) and speakers (sample,) from a file of the UEA archive."""
    package = find_spec("aeon")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("The spoken vowels lie in the package aeon: pip install --no-deps aeon")
    path = Path(package.submodule_search_locations[0], "datasets", "data", "JapaneseVowels", file)
    lines = path.read_text().partition("@data\n")[2].split()
    x, speakers = np.zeros((len(lines), steps, 12), np.float32), np.empty(len(lines), np.int64)
    for i, line in enumerate(lines):
        *series, speaker = line.split(":")
        values = np.array([coefficient.split(",") for coefficient in series], np.float32).T
        x[i, : len(values)], speakers[i] = values, int(speaker) - 1
    return x, speakers


TASKS: dict[str, Callable[..., Task]] = {
    "vowels": vowels,
    "recall": recall,
    "adding": adding,
    "exponential": exponential_mean,
    "last": last_step,
    "two lags": two_lags,
    "echo": echo,
    "rare": rare,
    "static": static,
    "digits": digits,
    "characters": characters,
    "recall, constant feature": lambda lag: with_constant(recall(lag, 40)),
    "recall, padded before": lambda lag, share: padded(recall(lag, 30), share, before=True),
    "recall, padded behind": lambda lag, share: padded(recall(lag, 20), share, before=False),
}
