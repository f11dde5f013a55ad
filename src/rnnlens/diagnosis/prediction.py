"""What a model predicts at one output step, and how wrong it is, as plain numbers per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import InputError, message
from ..results.schema import to_host
from ..typing import Array

Task = Literal["classes", "binary", "values"]

_ENTROPY, _DISTANCE = ("entropy", "nll", "bce"), ("squared", "mse", "absolute", "mae", "l1", "huber", "log_cosh")


@dataclass(frozen=True)
class Target:
    """The target at one output step.

    Attributes
    ----------
    values : (sample, output)
        One-hot for classes; numbers otherwise.
    """

    task: Task
    values: Array

    def of_samples(self, some: Array) -> Target:
        """The same of some samples."""
        return Target(self.task, self.values[some])

    @property
    def variance(self) -> float:
        """Sum over outputs of the variance over samples."""
        return float(self.values.var(axis=0).sum())

    def prediction(self, raw: Array) -> Array:
        """What U is of (sample, output): probabilities for classes, the output itself otherwise."""
        raw = np.asarray(raw, dtype=np.float64)
        if self.task == "values" or _are_probabilities(raw, self.task):
            return raw
        if self.task == "binary":
            return 1 / (1 + np.exp(-np.clip(raw, -500, 500)))
        shifted = np.exp(raw - raw.max(axis=-1, keepdims=True))
        probabilities: Array = shifted / shifted.sum(axis=-1, keepdims=True)
        return probabilities

    def loss(self, prediction: Array) -> Array:
        """(sample,): cross entropy of probabilities; squared error summed over outputs otherwise."""
        if self.task == "values":
            error: Array = np.sum((prediction - self.values) ** 2, axis=-1)
            return error
        p = np.clip(prediction, 1e-12, 1.0)
        if self.task == "classes":
            entropy: Array = -np.sum(self.values * np.log(p), axis=-1)
            return entropy
        q = np.clip(1 - prediction, 1e-12, 1.0)
        both: Array = -np.sum(self.values * np.log(p) + (1 - self.values) * np.log(q), axis=-1)
        return both

    def constant_loss(self) -> Array:
        """(sample,): the loss of the best prediction that is the same for all samples."""
        best = np.broadcast_to(self.values.mean(axis=0), self.values.shape)
        return self.loss(best)


def read_target(y: Any, raw: Array, step: int | None, task: str | None, loss: Any) -> Target:
    """The target in the form that the prediction has.

    Parameters
    ----------
    y
        As the loss takes it: classes as integers or one-hot, or numbers; with a time axis for sequence outputs.
    raw : (sample, output)
        What the model returns at the step that is looked at.
    step
        Which step of y, where it has a time axis; None where the output has none.
    """
    values = np.asarray(to_host(y))
    samples, outputs = raw.shape
    if values.dtype.kind not in "fiub" or values.shape[0] != samples:
        got = f"y of shape {values.shape}, dtype {values.dtype}, for {samples} samples"
        raise InputError(message("The target does not fit.", got=got, expected="numbers, one row for each sample"))
    if step is not None and values.ndim >= 2:
        if not -values.shape[1] <= step < values.shape[1]:
            got, expected = f"step {step} of y of shape {values.shape}", "a target for every step of the output"
            raise InputError(message("The target does not reach to that step.", got=got, expected=expected))
        values = values[:, step]
    words = _words(loss)
    kind = task or _guess(values, outputs, words)
    if task is None and not _tell(words) and kind == "values" and _are_logits_of(values, raw):
        kind = "binary"
    if kind == "classes":
        return Target("classes", _one_hot(values, outputs))
    flat = values.reshape(samples, -1).astype(np.float64)
    if flat.shape[1] != outputs:
        got = f"y of shape {values.shape}, output of shape {raw.shape}"
        raise InputError(message("The target does not fit the output.", got=got, hint='task="classes" or "values"'))
    return Target("binary" if kind == "binary" else "values", flat)


def _tell(words: str) -> bool:
    """Whether the words of a loss say which task it is."""
    return any(word in words for word in (*_ENTROPY, *_DISTANCE))


def _are_logits_of(values: Array, raw: Array) -> bool:
    """Whether targets of 0 and 1 are met by numbers far beyond them: logits, where a loss of distances would not go."""
    flat = values.reshape(len(values), -1)
    zero_one = flat.shape == raw.shape and bool(np.isin(flat, (0, 1)).all())
    return zero_one and float(np.mean((raw < -0.5) | (raw > 1.5))) > 0.25


def _words(loss: Any) -> str:
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", None) or type(loss).__name__
    return str(name).lower()


def _guess(values: Array, outputs: int, words: str) -> Task:
    distance = any(word in words for word in _DISTANCE)
    entropy = any(word in words for word in _ENTROPY)
    flat = values.reshape(len(values), -1)
    single = flat.shape[1] == 1
    if outputs > 1 and single and not distance and values.dtype.kind in "iub":
        return "classes"
    if outputs > 1 and not distance and _are_one_hot(flat, outputs):
        return "classes"
    zero_one = bool(np.isin(flat, (0, 1)).all())
    if zero_one and not distance and flat.shape[1] == outputs and (entropy or values.dtype.kind in "iub"):
        return "binary"
    return "values"


def _are_one_hot(flat: Array, outputs: int) -> bool:
    return flat.shape[1] == outputs and bool(np.isin(flat, (0, 1)).all() and (flat.sum(axis=1) == 1).all())


def _one_hot(values: Array, outputs: int) -> Array:
    flat = values.reshape(len(values), -1)
    if flat.shape[1] == outputs and outputs > 1:
        return flat.astype(np.float64)
    labels = flat[:, 0].astype(np.int64)
    if flat.shape[1] != 1 or labels.min() < 0 or labels.max() >= outputs:
        got = f"y of shape {values.shape}, {labels.min()} to {labels.max()}"
        raise InputError(message("The classes do not fit the output.", got=got, expected=f"0 to {outputs - 1}"))
    return np.eye(outputs)[labels]


def _are_probabilities(raw: Array, task: Task) -> bool:
    inside = bool(((raw >= -1e-6) & (raw <= 1 + 1e-6)).all())
    return inside and (task == "binary" or bool(np.allclose(raw.sum(axis=-1), 1, atol=1e-3)))
