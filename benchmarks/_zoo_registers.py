"""Untrained networks that store their last inputs, one per unit, and compute a given function of them exactly.

A shift register in a relu layer: unit (lag, feature) stores the input of that lag, plus an offset that keeps it
positive. The used and the unreachable lags follow from the function and the register's length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _zoo_tasks import Task
from torch import nn

Array = np.ndarray[Any, Any]
#: Function of a window (sample, lag, feature), newest first, for arrays and tensors.
Readout = Callable[[Any], Any]

LIFT = 40.0


class Register(nn.Module):
    """A network that returns ``readout`` of its last ``length`` inputs."""

    def __init__(self, features: int, length: int, readout: Readout, *, sequence: bool = False) -> None:
        super().__init__()
        units = length * features
        self.rnn = nn.RNN(features, units, batch_first=True, nonlinearity="relu")
        self.length, self.features, self.readout, self.sequence = length, features, readout, sequence
        with torch.no_grad():
            for weight in self.rnn.parameters():
                weight.zero_()
            self.rnn.weight_ih_l0[:features] = torch.eye(features)
            self.rnn.bias_ih_l0[:features] = LIFT
            self.rnn.weight_hh_l0[features:, : units - features] = torch.eye(units - features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (sample, time, feature) to (sample, output), or to (sample, time, output) for sequences."""
        h = self.rnn(x)[0]
        if not self.sequence:
            return self.readout(h[:, -1].reshape(len(x), self.length, self.features) - LIFT)
        windows = h.reshape(-1, self.length, self.features) - LIFT
        return self.readout(windows).reshape(len(x), x.shape[1], -1)


@dataclass(frozen=True)
class Problem:
    """A task and a register's solution to it.

    Attributes
    ----------
    task
    readout
        The network's output as a function of the window: logits for classes.
    length
        Number of stored lags.
    missing
        The lag that the task needs and the network does not read, if any.
    reached
        Whether the register stores that lag.
    """

    task: Task
    readout: Readout
    length: int
    missing: int | None = None
    reached: bool = False


def signs(count: int, steps: int, seed: int) -> Array:
    """Return random -1 and 1, (sample, time, 1)."""
    return np.random.default_rng(seed).choice(np.float32([-1, 1]), (count, steps, 1))


def gaussian(count: int, steps: int, seed: int) -> Array:
    """Return Gaussian noise, (sample, time, 1)."""
    return np.random.default_rng(seed).normal(size=(count, steps, 1)).astype(np.float32)


def heavy_tailed(count: int, steps: int, seed: int) -> Array:
    """Return Student's t with 3 degrees of freedom, clipped at 35: few samples carry most of the variance."""
    x = np.random.default_rng(seed).standard_t(3, size=(count, steps, 1))
    return np.clip(x, -35, 35).astype(np.float32)


def autoregressive(count: int, steps: int, seed: int) -> Array:
    """Return an autoregressive input with coefficient 0.8 and unit variance."""
    x = gaussian(count, steps, seed)
    for t in range(1, steps):
        x[:, t] = 0.8 * x[:, t - 1] + 0.6 * x[:, t]
    return x


def _stack(first: Any, second: Any) -> Any:
    kind = torch if isinstance(first, torch.Tensor) else np
    return kind.stack([first, second], 1)


def _classes(score: Callable[[Any], Any]) -> tuple[Readout, Callable[[Array], Array]]:
    """Return the logits of two classes and the true class as functions of a window, from a score."""
    return lambda w: _stack(-score(w), score(w)), lambda w: (score(w) > 0).astype(np.int64)


def _task(
    draw: Callable[[int, int, int], Array], ideal: Callable[[Array], Array], steps: int, lag: int, **options: Any
) -> Task:
    kind, outputs = options.get("kind", "values"), options.get("outputs", 1)
    return Task(lambda count, seed: draw(count, steps, seed), lambda x: ideal(x[:, ::-1]), kind, 1, outputs, steps, lag)


def xor(near: int, far: int, steps: int) -> Problem:
    """Return a problem: classify whether the signs at two lags differ."""
    readout, ideal = _classes(lambda w: -4 * w[:, near, 0] * w[:, far, 0])
    return Problem(_task(signs, ideal, steps, far, kind="classes", outputs=2), readout, far + 1)


def parity(count: int, steps: int) -> Problem:
    """Return a problem: classify the parity of the last ``count`` signs."""
    readout, ideal = _classes(lambda w: -4 * w[:, :count, 0].prod(1))
    return Problem(_task(signs, ideal, steps, count - 1, kind="classes", outputs=2), readout, count)


def counting(count: int, steps: int) -> Problem:
    """Return a problem: count how many of the last ``count`` inputs are 1."""

    def readout(w: Any) -> Any:
        return 0.5 * (1 + w[:, :count]).sum(1)

    return Problem(_task(signs, readout, steps, count - 1), readout, count)


def value(draw: Callable[[int, int, int], Array], lag: int, steps: int) -> Problem:
    """Return a problem: reproduce the input at one lag, up to rounding."""

    def readout(w: Any) -> Any:
        return w[:, lag]

    return Problem(_task(draw, readout, steps, lag), readout, lag + 1)


def lognormal(lag: int, steps: int) -> Problem:
    """Return a problem: the exponential of the input at one lag, a target with a heavy tail."""

    def ideal(w: Array) -> Array:
        return np.exp(w[:, lag])

    return Problem(_task(gaussian, ideal, steps, lag), lambda w: w[:, lag].exp(), lag + 1)


def rare_value(lag: int, steps: int) -> Problem:
    """Return a problem: classify whether the input at one lag is among the largest 4 %."""
    readout, ideal = _classes(lambda w: 12 * (w[:, lag, 0] - 1.75))
    return Problem(_task(gaussian, ideal, steps, lag, kind="classes", outputs=2), readout, lag + 1)


def pair(near: int, far: int, steps: int) -> Problem:
    """Return a problem: output the inputs at two lags."""

    def readout(w: Any) -> Any:
        return _stack(w[:, near, 0], w[:, far, 0])

    return Problem(_task(gaussian, readout, steps, far, outputs=2), readout, far + 1)


def delayed_copy(lag: int, steps: int) -> Problem:
    """Return a problem: output the input sequence delayed by ``lag`` steps."""
    inner = value(gaussian, lag, steps)

    def ideal(x: Array) -> Array:
        y = np.zeros_like(x)
        y[:, lag:] = x[:, :-lag]
        return y

    task = Task(inner.task.draw, ideal, "values", 1, 1, steps, lag, sequence=True)
    return Problem(task, inner.readout, lag + 1)


def half_read_sum(near: int, far: int, steps: int, *, reached: bool) -> Problem:
    """Return a problem: add two lags; the network reads only the near one and stores the far one if ``reached``."""

    def ideal(w: Array) -> Array:
        return w[:, near] + w[:, far]

    task = _task(gaussian, ideal, steps, far)
    return Problem(task, lambda w: w[:, near], far + 3 if reached else near + 2, far, reached)


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "xor": xor,
    "parity": parity,
    "counting": counting,
    "value": lambda lag, steps: value(gaussian, lag, steps),
    "heavy tails": lambda lag, steps: value(heavy_tailed, lag, steps),
    "smooth input": lambda lag, steps: value(autoregressive, lag, steps),
    "lognormal": lognormal,
    "seldom": rare_value,
    "pair": pair,
    "copied": delayed_copy,
    "half heard, held": lambda near, far, steps: half_read_sum(near, far, steps, reached=True),
    "half heard, gone": lambda near, far, steps: half_read_sum(near, far, steps, reached=False),
}
