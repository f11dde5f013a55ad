"""Scorecard of one model: size, loss, memory, state and dynamics, each by the verb that measures it, or why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Batch, Capture, Taps
from ..adapters.registry import adapter_for
from ..arguments.data import is_source
from ..errors import InputError, RnnlensError, UnsupportedError
from ..measures.dynamics import effective_rank
from ..measures.intervention import bootstrap_interval
from ..recurrence.replay import Replay
from ..results.diagnosis import Diagnosis
from ..results.schema import to_host
from ..settings import options
from ..typing import Array
from ..verbs.traced_scans import scan_measures, token_influence
from ..verbs.weights import weights
from .dynamics import lyapunov, step_eigenvalues
from .experiment import call_in_numpy
from .lazy_data import is_outside_memory
from .samples import Orientation

#: Largest number of samples whose states are compared.
SAMPLES = 64
#: Shares of a state that are tried, and the loss, relative to that of the whole state, up to which one suffices.
SHARES, SUFFICIENT = (0.125, 0.25, 0.5, 0.75, 1.0), 1.05

#: Measures in the order of the table: name, unit, verb that gives the number.
MEASURES = {
    "weights": ("1", "rl.weights"),
    "loss": ("1", "rl.diagnose"),
    "prediction depends on": ("step", "rl.diagnose"),
    "state carries": ("step", "rl.diagnose"),
    "training signal reaches": ("step", "rl.diagnose"),
    "gradient in use": ("step", "rl.diagnose"),
    "state dimensions": ("1", "rl.measures.effective_rank of rl.trace"),
    "effective state size": ("1", "rl.weights"),
    "state to keep": ("share", "rl.weights(keep=...)"),
    "leading exponent": ("1 / step", "rl.lyapunov"),
    "spectral radius": ("1", "rl.step_eigenvalues"),
    "influence of first step": ("output", "rl.weights"),
}

_OF_SCANS = "only of whole-sequence layers (Mamba, delta rules)"
_OF_CELLS = "only of layers that have a step function"


@dataclass(frozen=True)
class Score:
    """One number of a scorecard with its interval, both NaN where they are not defined, and the reason why not."""

    value: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    layer: str = ""
    reason: str = ""
    verb: str = ""


def scorecard_table(scores_by_model: Mapping[Any, Mapping[str, Score]]) -> xr.Dataset:
    """Return the scores of all models as a Dataset over ``name`` and ``measure``."""
    rows = [[scores[measure] for measure in MEASURES] for scores in scores_by_model.values()]
    dims = ("name", "measure")

    def variable(values: Callable[[Score], Any], long_name: str, *more_dims: str) -> xr.Variable:
        array = np.array([[values(score) for score in row] for row in rows])
        return xr.Variable((*dims, *more_dims), array, {"long_name": long_name})

    verbs = [[score.verb or MEASURES[measure][1] for measure, score in zip(MEASURES, row, strict=True)] for row in rows]
    return xr.Dataset(
        {
            "value": variable(lambda score: float(score.value), "measure"),
            "interval": variable(lambda score: (score.low, score.high), "95 % interval of the measure", "bound"),
            "layer": variable(lambda score: score.layer, "layer with the largest value; empty for the whole model"),
            "reason": variable(lambda score: score.reason, "why the measure is not defined"),
            "verb": xr.Variable(dims, np.array(verbs), {"long_name": "verb that gives the number"}),
        },
        coords={
            "name": list(scores_by_model),
            "measure": list(MEASURES),
            "bound": ["low", "high"],
            "units": ("measure", [unit for unit, _ in MEASURES.values()]),
        },
    )


def scores_of_diagnosis(diagnosis: Diagnosis | None, error: str = "") -> dict[str, Score]:
    """Return the scores that a diagnosis has; those of the dynamics and of the weights need the model."""
    scores = {measure: Score(reason="the model is not here, only its diagnosis") for measure in MEASURES}
    of_diagnosis = [measure for measure, (_, verb) in MEASURES.items() if verb == "rl.diagnose"]
    if diagnosis is None:
        reason = error.partition("\n")[0].partition(": ")[2].rstrip(".")
        return scores | {measure: Score(reason=reason) for measure in of_diagnosis}
    model = diagnosis.dataset("model")
    scores["loss"] = Score(reason="there is no y")
    if "loss" in model:
        scores["loss"] = _with_bounds(float(model["loss"]), model["loss_interval"].values)
    no_gradient = "the gradient of the output by the input is 0, or not known"
    for measure, attribute in (("prediction depends on", "why"), ("state carries", "why_not_carried")):
        scores[measure] = Score(reason=str(model.attrs.get(attribute, "")).partition(" (")[0])  # without its numbers
    scores["training signal reaches"] = scores["gradient in use"] = Score(reason=no_gradient)
    for row in sorted(diagnosis.how_far_back, key=lambda row: row.steps):  # of several layers the longest
        bounds = [float("nan") if bound is None else bound for bound in (row.low, row.high)]
        scores[row.measure] = _with_bounds(row.steps, bounds, row.layer)
    return scores


def measure_scores(
    model: Any, diagnosis: Diagnosis | None, error: str, x: Any, y: Any, keywords: Mapping[str, Any]
) -> dict[str, Score]:
    """Measure one model.

    Parameters
    ----------
    model
        The model.
    diagnosis, error
        Its diagnosis, or None and the error that prevented it.
    x, y, keywords
        Data and options of the diagnosis.
    """
    subject = _Subject(model, x, y, keywords.get("loss"), keywords.get("axes"), diagnosis)
    measured = {
        "weights": subject.weights,
        "state dimensions": subject.state_dimensions,
        "effective state size": subject.effective_state_size,
        "state to keep": subject.state_to_keep,
        "leading exponent": subject.leading_exponent,
        "spectral radius": subject.spectral_radius,
        "influence of first step": subject.influence_of_first_step,
    }
    scores = scores_of_diagnosis(diagnosis, error)
    for measure, measure_score in measured.items():
        try:
            with options(certify="never"):
                scores[measure] = measure_score()
        except Exception as error:  # of the model, in a run of a verb; the other measures are not affected
            text = str(error) if isinstance(error, RnnlensError) else f"{type(error).__name__}: {error}"
            scores[measure] = Score(reason=text.partition("\n")[0].rstrip("."))
    return scores


def refuse_lazy(x: Any, y: Any) -> None:
    """Raise UnsupportedError for data outside of memory: most verbs of a scorecard run a model on a batch."""
    if is_source(x) or is_outside_memory(x) or is_outside_memory(y):
        raise UnsupportedError(
            "scorecard= needs arrays in memory.", got=type(x).__name__, hint="x[:512], as arrays of NumPy or tensors"
        )


@dataclass(frozen=True)
class _Subject:
    """A model with the data on which it is measured."""

    model: Any
    x: Any
    y: Any
    loss: Any
    axes: Any
    diagnosis: Diagnosis | None

    @cached_property
    def capture(self) -> Capture:
        """States and coefficients of all recurrent layers on the first samples."""
        adapter = adapter_for(self.model)
        orientation = Orientation(adapter, self.model, self.x, self.axes)
        ordered_x, _ = orientation.in_canonical_order(self.x, None)
        first_samples = orientation.as_given(data.select(ordered_x, slice(SAMPLES)))
        capture = adapter.run(self.model, Batch(first_samples), Taps.states()).capture
        if not capture.calls and not capture.sequences:
            raise InputError("No recurrent layer ran.")
        return capture

    @property
    def cells(self) -> list[str]:
        """Names of the layers with a step function."""
        return list(dict.fromkeys(call.layer for call in self.capture.calls))

    def weights(self) -> Score:
        """Count the numbers that training may change; tied weights once, running statistics not."""
        layers = adapter_for(self.model).weights(self.model).values()
        return Score(
            sum(
                np.size(to_host(value))
                for layer in layers
                for name, value in layer.values.items()
                if name not in layer.uncounted and name not in layer.statistics
            )
        )

    def state_dimensions(self) -> Score:
        """Return the effective rank of the last states of the samples, centred; of several layers the largest."""
        last_states: dict[str, list[Array]] = {}
        for call in self.capture.calls:
            run = Replay.from_call(call_in_numpy(call))
            last = next(iter(run.steps(reverse=True)))
            last_states.setdefault(call.layer, []).extend(to_host(states)[:, last] for states in run.states)
        for scan in self.capture.sequences:
            last_states.setdefault(scan.layer, []).append(to_host(scan.forward_run().last_state))
        return _largest((name, Score(_dimensions(arrays))) for name, arrays in last_states.items())

    def effective_state_size(self) -> Score:
        """Return the directions in use along the axis that the output sums over: mean over heads and channels."""
        if not self.capture.sequences:
            return Score(reason=_OF_SCANS)
        sizes = [
            (call.layer, scan_measures(call.cell, to_host(call.forward_run().last_state)).get("state_size"))
            for call in self.capture.sequences
        ]
        scores = ((name, Score(float(np.mean(size.values)))) for name, size in sizes if size is not None)
        return _largest(scores, "the output of the layer is its state")

    def state_to_keep(self) -> Score:
        """Return the smallest share of the state with which the loss grows by at most 5 %."""
        if not self.capture.sequences:
            return Score(reason=_OF_SCANS)
        if self.y is None or self.loss is None:
            return Score(reason="it needs y and loss=")
        pruned = weights(self.model, self.x, self.y, loss=self.loss, keep=SHARES)
        losses = {name: pruned.dataset(name).get("loss_after_pruning") for name in pruned}
        return _largest((name, Score(_smallest_share(v.values))) for name, v in losses.items() if v is not None)

    def leading_exponent(self) -> Score:
        """Return the largest Lyapunov exponent; of a whole-sequence layer that of its products of decays."""
        scores: list[tuple[str, Score]] = []
        for name in self.cells:
            spectrum = lyapunov(self.model, self.x, layer=name, count=1, axes=self.axes)
            pairs = zip(np.ravel(spectrum["exponent"]), np.ravel(spectrum["stderr"]), strict=True)
            scores += [(name, _with_error(*pair)) for pair in pairs]
        if self.diagnosis is None and not scores:
            return Score(reason="of a whole-sequence layer it is read from the diagnosis, which failed")
        for call in self.capture.sequences:
            if self.diagnosis is not None and call.layer in self.diagnosis:
                measures = self.diagnosis.dataset(call.layer)
                score = _with_error(float(measures["lambda_1"]), float(measures["lambda_1_stderr"]), "rl.diagnose")
                scores.append((call.layer, score))
        return _largest(scores)

    def spectral_radius(self) -> Score:
        """Return the largest modulus of an eigenvalue of a step's Jacobian, mean over steps and samples."""
        scores = []
        for name in self.cells:
            eigenvalues = step_eigenvalues(self.model, self.x, layer=name, axes=self.axes)
            radius = ((eigenvalues["eigenvalue_real"] ** 2 + eigenvalues["eigenvalue_imag"] ** 2) ** 0.5).max("mode")
            for values in radius.transpose(..., "sample", "time").values.reshape(-1, *radius.shape[-2:]):
                by_sample = values.mean(axis=1)
                bounds = bootstrap_interval(by_sample) if len(by_sample) > 1 else (np.nan, np.nan)
                scores.append((name, _with_bounds(by_sample.mean(), bounds)))
        return _largest(scores, _OF_CELLS)

    def influence_of_first_step(self) -> Score:
        """Return how strongly what the first step writes moves all outputs, of the head with most."""
        if not self.capture.sequences:
            return Score(reason=_OF_SCANS)
        scores = []
        for call in self.capture.sequences:
            measured = token_influence(call.cell)
            if not measured:
                continue
            first = np.ravel(measured["token_influence"].values[0])
            head, bounds = int(first.argmax()), [float("nan")] * 2
            with suppress(KeyError):  # of one sample there is no interval
                bounds = measured["token_influence_interval"].values[:, 0].reshape(2, -1)[:, head].tolist()
            scores.append((call.layer, _with_bounds(first[head], bounds)))
        return _largest(scores, "the states are relative to a running maximum")


def _largest(scores: Iterable[tuple[str, Score]], reason: str = "") -> Score:
    """Return the score of the layer in which it is largest, with its name; or the reason why there is none."""
    defined = [(name, score) for name, score in scores if np.isfinite(score.value)]
    if not defined:
        return Score(reason=reason or "it is not finite: all of a perturbation is lost within a few steps")
    name, score = max(defined, key=lambda entry: entry[1].value)
    return Score(score.value, score.low, score.high, name, "", score.verb)


def _with_bounds(value: float, bounds: Sequence[float] | Array, layer: str = "") -> Score:
    low, high = map(float, bounds)
    return Score(float(value), low, high, layer)


def _with_error(value: float, stderr: float, verb: str = "") -> Score:
    return Score(float(value), float(value - 1.96 * stderr), float(value + 1.96 * stderr), verb=verb)


def _smallest_share(losses: Array) -> float:
    """Return the smallest of ``SHARES`` from which on the loss stays sufficient."""
    sufficient = losses <= SUFFICIENT * losses[-1]
    first = len(SHARES) - int(np.logical_and.accumulate(sufficient[::-1]).sum())
    return SHARES[min(first, len(SHARES) - 1)]


def _dimensions(states: Sequence[Array]) -> float:
    """Return the effective rank of centred states, whose arrays (sample, ...) are concatenated."""
    flat = np.concatenate([array.reshape(len(array), -1) for array in states], axis=1)
    parts = [flat.real, flat.imag] if np.iscomplexobj(flat) else [flat]
    matrix = np.concatenate(parts, axis=1).astype(np.float64)
    return float(effective_rank(matrix - matrix.mean(axis=0)))
