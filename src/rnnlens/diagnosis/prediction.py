"""Target and prediction at one output step as probabilities or values, with loss and calibration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np

from ..errors import InputError
from ..results.schema import to_host
from ..typing import Array

Task = Literal["classes", "binary", "values"]

_ENTROPY, _DISTANCE = ("entropy", "nll", "bce"), ("squared", "mse", "absolute", "mae", "l1", "huber", "log_cosh")
#: Names of losses that take logits; below, of those that take probabilities, and of those for values.
_OF_LOGITS = {
    *("bcewithlogitsloss", "crossentropyloss", "multilabelsoftmarginloss", "softmarginloss", "cross_entropy"),
    *("binary_cross_entropy_with_logits", "softmax_cross_entropy", "softmax_cross_entropy_with_integer_labels"),
    *("sigmoid_binary_cross_entropy", "sigmoid_cross_entropy_with_logits", "softmax_cross_entropy_with_logits"),
    "sparse_softmax_cross_entropy_with_logits",
}
_OF_PROBABILITIES = {
    *("bceloss", "binary_cross_entropy", "binary_crossentropy", "categorical_crossentropy"),
    "sparse_categorical_crossentropy",
}
#: Functions by which a loss of the user's own converts an output before it calls a well-known loss.
_TO_PROBABILITIES, _TO_LOGITS = {"sigmoid", "softmax", "expit"}, {"log", "logit"}
_OF_VALUES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "squared_error", "mean_squared_error"}
#: Factors on the logits that a calibration tries. A network that needs more than 2 has learned too little.
_FACTORS = (*np.geomspace(0.02, 2.0, 24), 1.0)
_LARGEST_SLOPE = 2.0
#: Largest number of classes per sample for which offsets are fitted.
_CLASSES_PER_SAMPLE = 0.2
_TINY = 1e-12


@dataclass(frozen=True)
class OutputForm:
    """Form in which a model predicts: its task, and whether outputs are logits; None to decide by their values."""

    task: Task
    logits: bool | None = None

    def prediction(self, raw: Array) -> Array:
        """Convert outputs (sample, output) to probabilities if the target is classes, else keep them."""
        raw = np.asarray(raw, dtype=np.float64)
        if self.task == "values":
            return raw
        if self.logits is False or (self.logits is None and _are_probabilities(raw, self.task)):
            return raw
        return _sigmoid(raw) if self.task == "binary" else _softmax(raw)

    def distribution(self, raw: Array) -> Array:
        """Convert outputs (sample, output) to the probabilities (sample, event) of all events; keep values."""
        probabilities = self.prediction(raw)
        return np.concatenate([probabilities, 1 - probabilities], axis=1) if self.task == "binary" else probabilities


def read_form(raw: Array, task: str | None, loss: Any) -> OutputForm:
    """Tell the form of outputs (sample, output) without a target: by the task, the loss, or that they sum to 1."""
    resolved_task = cast("Task", task) if task else _task_without_target(raw, _loss_names(loss))
    logits = takes_logits(loss)
    if logits is None and resolved_task != "values":
        logits = not _are_probabilities(np.asarray(raw, dtype=np.float64), resolved_task)
    return OutputForm(resolved_task, logits)


def _task_without_target(raw: Array, loss_names: str) -> Task:
    has_several = raw.shape[1] > 1
    if any(word in loss_names for word in _ENTROPY):
        return "classes" if has_several and not re.search("binary|bce", loss_names) else "binary"
    return "classes" if has_several and _are_probabilities(raw, "classes") else "values"


@dataclass(frozen=True)
class PredictionTarget:
    """Target at one output step, and the form in which the model predicts it.

    Attributes
    ----------
    values : (sample, output)
        One-hot for classes; numbers otherwise.
    logits
        Whether outputs are logits; None to decide by their values.
    """

    task: Task
    values: Array
    logits: bool | None = None

    def select_samples(self, indices: Array) -> PredictionTarget:
        """Return the target of the samples with indices ``indices``."""
        return replace(self, values=self.values[indices])

    @property
    def variance(self) -> float:
        """Variance of the target over samples, summed over outputs."""
        return float(self.values.var(axis=0).sum())

    def prediction(self, raw: Array) -> Array:
        """Convert outputs (sample, output) to probabilities if the target is classes, else keep them."""
        return OutputForm(self.task, self.logits).prediction(raw)

    def with_form(self, raw: Array) -> PredictionTarget:
        """Return the target with the decision, from model outputs, whether all outputs are logits."""
        if self.logits is not None or self.task == "values":
            return self
        return replace(self, logits=not _are_probabilities(np.asarray(raw, dtype=np.float64), self.task))

    def loss(self, prediction: Array) -> Array:
        """Compute the loss (sample,): cross-entropy of probabilities; squared error summed over outputs otherwise."""
        if self.task == "values":
            return np.sum((prediction - self.values) ** 2, axis=-1)
        p = np.clip(prediction, _TINY, 1.0)
        if self.task == "classes":
            return -np.sum(self.values * np.log(p), axis=-1)
        q = np.clip(1 - prediction, _TINY, 1.0)
        return -np.sum(self.values * np.log(p) + (1 - self.values) * np.log(q), axis=-1)

    def constant_loss(self) -> Array:
        """Compute the loss (sample,) of the best prediction that is the same for all samples."""
        mean_target = np.broadcast_to(self.values.mean(axis=0), self.values.shape)
        return self.loss(mean_target)

    def calibration(self, prediction: Array) -> Calibration:
        """Fit the rescaling of a prediction that has the smallest loss; see :class:`Calibration`."""
        if self.task == "values":
            centred = prediction - prediction.mean(axis=0)
            variance = np.maximum((centred**2).mean(axis=0), 1e-300)
            slope = np.clip((centred * self.values).mean(axis=0) / variance, 0.0, _LARGEST_SLOPE)
            return self._fit_offsets(prediction, slope)
        fits = [self._fit_offsets(prediction, np.full(self.values.shape[1], factor)) for factor in _FACTORS]
        if self.task == "classes":
            return min(fits, key=lambda fit: float(self.loss(fit.apply(prediction)).mean()))
        # Fit every output separately, since their losses add up.
        losses = [_binary_entropy(self.values, fit.apply(prediction)).mean(axis=0) for fit in fits]
        best_fit = np.argmin(losses, axis=0)
        slope, offset = (np.stack([getattr(fit, key) for fit in fits]) for key in ("slope", "offset"))
        output_indices = np.arange(len(best_fit))
        return Calibration(self.task, slope[best_fit, output_indices], offset[best_fit, output_indices])

    def partly_calibrated(self, prediction: Array, shares: Sequence[float]) -> list[Array]:
        """Rescale a prediction part of the way to its best calibration, once for each share: 0 keeps the slope 1."""
        best_fit = self.calibration(prediction)
        fits = [self._fit_offsets(prediction, 1 + share * (best_fit.slope - 1)) for share in shares]
        return [fit.apply(prediction) for fit in fits]

    def _fit_offsets(self, prediction: Array, slope: Array) -> Calibration:
        """Fit the offsets for a given slope, so that the mean prediction equals the mean target."""
        mean_target = self.values.mean(axis=0)
        if self.task == "values":
            return Calibration(self.task, slope, mean_target - slope * prediction.mean(axis=0))
        fit = Calibration(self.task, slope, np.zeros_like(slope))
        if self.task == "classes" and len(mean_target) > _CLASSES_PER_SAMPLE * len(prediction):
            return fit
        floor = 0.5 / len(prediction)
        clipped_target = np.clip(mean_target, floor, 1 - floor)
        for _ in range(30):
            mean_prediction = np.clip(fit.apply(prediction).mean(axis=0), _TINY, 1 - _TINY)
            change = np.log(clipped_target / mean_prediction)
            change = change if self.task == "classes" else change - np.log((1 - clipped_target) / (1 - mean_prediction))
            fit = replace(fit, offset=fit.offset + change)
            if np.abs(change).max() < 1e-3:
                break
        return fit


@dataclass(frozen=True)
class Calibration:
    """Rescaling of predictions: slope and offset of values, or factor and offsets of logits.

    Guo, Pleiss, Sun, Weinberger 2017, arXiv:1706.04599, section 4; Platt 1999.
    """

    task: Task
    slope: Array
    offset: Array

    def apply(self, prediction: Array) -> Array:
        """Rescale a prediction (sample, output)."""
        if self.task == "values":
            return self.slope * prediction + self.offset
        logs = np.log(np.clip(prediction, _TINY, 1.0))
        if self.task == "classes":
            return _softmax(self.slope * logs + self.offset)
        return _sigmoid(self.slope * (logs - np.log(np.clip(1 - prediction, _TINY, 1.0))) + self.offset)


def _sigmoid(logits: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(logits, -500, 500)))


def _softmax(logits: Array) -> Array:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def _binary_entropy(values: Array, prediction: Array) -> Array:
    p = np.clip(prediction, _TINY, 1 - _TINY)
    return -(values * np.log(p) + (1 - values) * np.log(1 - p))


def read_target(y: Any, raw: Array, step: int | None, task: str | None, loss: Any) -> PredictionTarget:
    """Convert a target y to the form of the prediction at one step.

    Parameters
    ----------
    y
        Target in the form for the loss: classes as integers or one-hot, or numbers; with a time axis for sequence
        outputs.
    raw : (sample, output)
        Output of the model at the examined step.
    step
        Examined step of y; None if y has no time axis.
    """
    values = np.asarray(to_host(y))
    samples, outputs = raw.shape
    if values.dtype.kind not in "fiub" or values.shape[0] != samples:
        received = f"y of shape {values.shape}, dtype {values.dtype}, for {samples} samples"
        raise InputError("The target does not fit.", got=received, expected="numbers, one row for each sample")
    if step is not None and values.ndim >= 2:
        if not -values.shape[1] <= step < values.shape[1]:
            received, expected = f"step {step} of y of shape {values.shape}", "a target for every step of the output"
            raise InputError("The target does not reach to that step.", got=received, expected=expected)
        values = values[:, step]
    loss_names = _loss_names(loss)
    resolved_task = task or _guess_task(values, outputs, loss_names)
    is_named = any(word in loss_names for word in (*_ENTROPY, *_DISTANCE))
    if task is None and not is_named and resolved_task == "values" and _are_logits_of(values, raw):
        resolved_task = "binary"
    if resolved_task == "classes":
        return PredictionTarget("classes", _to_one_hot(values, outputs), takes_logits(loss)).with_form(raw)
    flat_values = values.reshape(samples, -1).astype(np.float64)
    if flat_values.shape[1] != outputs:
        raise InputError(
            "The target does not fit the output.",
            got=f"{flat_values.shape[1]} values of y for each prediction of {outputs} values",
            expected=f'{outputs} values, or one class as a whole number with task="classes"',
            hint="rl.diagnose(model, x), without y and loss: how far back the model looks needs no target",
        )
    if resolved_task == "binary":
        return PredictionTarget("binary", flat_values, takes_logits(loss)).with_form(raw)
    return PredictionTarget("values", flat_values)


def ignored_class(loss: Any) -> int:
    """Return the class whose targets a loss ignores, as far as it declares one; -100, torch's default, otherwise."""
    declared = [getattr(loss, name, None) for name in ("ignore_index", "ignore_class")]
    declared.append(getattr(loss, "keywords", {}).get("ignore_index"))  # of a functools.partial
    return next((int(value) for value in declared if value is not None), -100)


def takes_logits(loss: Any) -> bool | None:
    """Return True if a loss takes logits, False for probabilities, None if its name and settings leave it open."""
    from_logits = getattr(loss, "from_logits", None)
    if isinstance(from_logits, bool):
        return from_logits
    loss_names = set(_loss_names(loss).split())
    of_logits, of_probabilities = bool(loss_names & _OF_LOGITS), bool(loss_names & _OF_PROBABILITIES)
    if of_logits == of_probabilities:
        return None
    called_names = set(getattr(getattr(loss, "__code__", None), "co_names", ()))
    converts = called_names & (_TO_PROBABILITIES if of_probabilities else _TO_LOGITS)
    return of_logits != bool(converts)


def _are_logits_of(values: Array, raw: Array) -> bool:
    """Return whether targets of 0 and 1 have predictions far outside of [0, 1], which must be logits."""
    flat_values = values.reshape(len(values), -1)
    is_binary = flat_values.shape == raw.shape and bool(np.isin(flat_values, (0, 1)).all())
    return is_binary and float(np.mean((raw < -0.5) | (raw > 1.5))) > 0.25


def _loss_names(loss: Any) -> str:
    """Return the name of a loss function, and the names of well-known losses that its code calls."""
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", None) or type(loss).__name__
    return " ".join([str(name).lower(), *_called_losses(loss)])


def _called_losses(loss: Any) -> list[str]:
    names = (name.lower() for name in getattr(getattr(loss, "__code__", None), "co_names", ()))
    return [name for name in names if name in _OF_LOGITS | _OF_PROBABILITIES | _OF_VALUES]


def _guess_task(values: Array, outputs: int, loss_names: str) -> Task:
    is_distance = any(word in loss_names for word in _DISTANCE)
    is_entropy = any(word in loss_names for word in _ENTROPY)
    flat_values = values.reshape(len(values), -1)
    is_integer, is_binary = values.dtype.kind in "iub", bool(np.isin(flat_values, (0, 1)).all())
    is_one_hot = flat_values.shape[1] == outputs and is_binary and bool((flat_values.sum(axis=1) == 1).all())
    if outputs > 1 and not is_distance and (is_one_hot or (flat_values.shape[1] == 1 and is_integer)):
        return "classes"
    if is_binary and not is_distance and flat_values.shape[1] == outputs and (is_entropy or is_integer):
        return "binary"
    return "values"


def _to_one_hot(values: Array, outputs: int) -> Array:
    flat_values = values.reshape(len(values), -1)
    if flat_values.shape[1] == outputs and outputs > 1:
        return flat_values.astype(np.float64)
    labels = flat_values[:, 0].astype(np.int64)
    if flat_values.shape[1] != 1 or labels.min() < 0 or labels.max() >= outputs:
        received = f"{flat_values.shape[1]} values of y for each prediction, the first {labels.min()} to {labels.max()}"
        raise InputError("The classes do not fit the output.", got=received, expected=f"one class, 0 to {outputs - 1}")
    one_hot = np.zeros((len(labels), outputs))
    one_hot[np.arange(len(labels)), labels] = 1
    return one_hot


def _are_probabilities(raw: Array, task: Task) -> bool:
    is_inside = bool(((raw >= -1e-6) & (raw <= 1 + 1e-6)).all())
    return is_inside and (task == "binary" or bool(np.allclose(raw.sum(axis=-1), 1, atol=1e-3)))
