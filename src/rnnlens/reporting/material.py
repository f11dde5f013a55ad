"""Computation of all contents of a report; the other modules only draw and write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Adapter, Batch, CaptureRequest
from ..adapters.registry import adapter_for
from ..diagnosis import diagnose
from ..errors import InputError, RnnlensError, TooLargeError, shown
from ..measures.facts import padding_share
from ..measures.profiles import attribution
from ..recurrence.cells import kinds
from ..results.diagnosis import Diagnosis
from ..results.gradients import Weights
from ..results.schema import to_host
from ..results.trace import Trace
from ..typing import Array
from ..verbs.trace import trace
from ..verbs.weights import layers as find_layers
from ..verbs.weights import weights
from ..vocabulary import QUANTITIES, SAMPLE
from .samples import (
    Ranking,
    ReportRequest,
    ReportSamples,
    TimeMap,
    losses,
    map_of_array,
    map_of_model,
    rank_samples,
    read_report_samples,
)
from .tracks import Track, norms, tracks_of


@dataclass
class Moment:
    """Trace of the model at one moment (trained, before training, baseline) on the samples of the report."""

    name: str
    tracks: list[Track]
    loss: float | None = None
    input: Array | None = None
    input_gradient: Array | None = None

    @property
    def sensitivity(self) -> Array | None:
        """Norm over features of dL/dx_t times the standard deviation of the input, (sample, time)."""
        if self.input_gradient is None or self.input is None:
            return None
        if not self.scaling:
            return norms(self.input_gradient)
        if self.mask is None:
            return np.sqrt(attribution(self.input_gradient, self.input))
        spread = np.asarray(self.input, dtype=np.float64)[self.mask].std(axis=0)
        return norms(self.input_gradient * spread)

    @property
    def mask(self) -> Array | None:
        """Mask of the first layer, (sample, time) of bool; None without padding."""
        return self.tracks[0].mask if self.tracks else None

    @property
    def scaling(self) -> str:
        """Text on the standard deviation of the input by which the gradient is multiplied; "" for a single sample.

        Without padding it is the standard deviation over samples at each step. With padding, where late steps
        are real in few samples, it is that over all real steps.
        """
        if self.input is None or len(self.input) == 1 or not np.isfinite(self.input).all():
            return ""
        averaged_over = "samples" if self.mask is None else "all steps that are not padding"
        return f" times the standard deviation of x_t over {averaged_over}"


@dataclass
class Material:
    """All contents of a report."""

    #: The model itself, and the baseline if there is one.
    moments: list[Moment] = field(default_factory=list)
    trace: Trace | None = None
    diagnosis: Diagnosis | None = None
    weights: Weights | None = None
    time_map: TimeMap | None = None
    layers: Any = None
    #: Positions of the samples in the data, and what the page calls them.
    sample_positions: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    #: (sample,), or None with the reason in ``why_no_losses``.
    losses: Array | None = None
    why_no_losses: str = ""
    ranking: Ranking | None = None
    token_texts: list[list[str]] | None = None
    total_samples: int | None = None
    left_out: list[str] = field(default_factory=list)
    other_results: list[Any] = field(default_factory=list)

    @property
    def padding_note(self) -> str:
        """Sentence about padding: declared by a mask, or read as input."""
        if not self.moments or self.moments[0].input is None:
            return ""
        if self.moments[0].mask is not None:
            return "Padding is hatched."
        share = padding_share(self.moments[0].input)
        if share < _PADDING_SHARE:
            return ""
        return (
            f"On average {share:.0%} of the steps repeat one value at the same end of their sample, as padding does. "
            "No mask was declared: the network reads these steps as input."
        )


#: Share of repeated steps at one end from which on they count as undeclared padding.
_PADDING_SHARE = 0.1
#: Quantities of the trace that the page draws.
_DRAWN_QUANTITIES = (
    *("input", "mask", "hidden", "cell", "gates", "output"),
    *("hidden_grad", "cell_grad", "gate_grad", "output_grad", "input_grad"),
)


def material_of_model(model: Any, request: ReportRequest) -> Material:
    """Trace a model and its baseline on the same samples, rank these, and compute all contents of the report."""
    adapter = adapter_for(model)
    report_samples, inseparable_reason = read_report_samples(adapter, model, request.x, request.y, request.axes)
    material = Material(total_samples=report_samples.count, layers=find_layers(model))
    if inseparable_reason:
        material.left_out.append(f"Samples are not told apart: {inseparable_reason}")
    _add_trace(material, adapter, model, report_samples, request)
    _add_ranking(material, adapter, model, report_samples, request)
    _add_baseline(material, adapter, model, report_samples, request)
    material.token_texts = _token_texts(report_samples, material.sample_positions, request.tokens)
    _add_weights(material, model, request)
    _add_time_map(material, adapter, model, report_samples, request)
    _add_diagnosis(material, model, report_samples, request)
    return material


def material_of_results(results: Sequence[Any]) -> Material:
    """Collect the contents of a report from finished results, as far as they allow."""
    material = Material()
    for result in results:
        if isinstance(result, Trace):
            if material.trace is not None:
                material.moments.append(moment_of("baseline", result))
                continue
            material.trace = result
            material.moments.insert(0, moment_of("this model", result))
        elif isinstance(result, Diagnosis):
            material.diagnosis = result
        elif isinstance(result, Weights):
            material.weights = result
        elif isinstance(result, xr.DataArray) and "in_time" in result.dims:
            material.time_map = map_of_array(result)
        else:
            material.other_results.append(result)
    if material.moments and material.moments[0].tracks:
        tracks = material.moments[0].tracks
        material.sample_positions = list(range(tracks[0].samples))
        datasets = [] if material.trace is None else [material.trace.dataset(layer) for layer in material.trace.layers]
        labels = next(
            (dataset[SAMPLE].values for dataset in datasets if SAMPLE in dataset.coords), material.sample_positions
        )
        material.labels = [str(label) for label in labels]
        material.targets = [""] * len(material.sample_positions)
        material.why_no_losses = "a saved result has no loss of single samples"
        material.ranking = rank_samples(_gradient_sizes(tracks, len(material.sample_positions)))
    return material


def moment_of(name: str, trace: Trace) -> Moment:
    """Convert a trace to the form used by the report."""
    tracks = tracks_of(trace)
    first_dataset = next((trace.dataset(layer) for layer in trace.layers if "input" in trace.dataset(layer)), None)
    if first_dataset is None:
        return Moment(name, tracks, trace.loss)
    gradient = first_dataset["input_grad"].values if "input_grad" in first_dataset else None
    return Moment(name, tracks, trace.loss, first_dataset["input"].values, gradient)


def _add_trace(
    material: Material, adapter: Adapter, model: Any, report_samples: ReportSamples, request: ReportRequest
) -> None:
    """Trace as many samples as requested, or as fit into the memory limit."""
    sample_count = report_samples.count if report_samples.count is not None else 0
    sample_indices = list(range(min(request.samples, sample_count))) if report_samples.count is not None else []
    while True:
        x, y = report_samples.select(sample_indices)
        try:
            material.trace = _trace_quantities(model, x, y, request)
            break
        except TooLargeError:
            if len(sample_indices) < 2:
                raise
            sample_indices = sample_indices[: len(sample_indices) // 2]
    material.moments.append(moment_of("this model", material.trace))
    tracks = material.moments[0].tracks
    if report_samples.count is None:
        sample_indices = list(range(tracks[0].samples if tracks else 0))
    elif len(sample_indices) < sample_count:
        material.left_out.append(f"{len(sample_indices)} of {sample_count} samples, the first, are shown.")
    material.sample_positions, material.targets = sample_indices, report_samples.targets(sample_indices)
    material.labels = [str(i if report_samples.labels is None else report_samples.labels[i]) for i in sample_indices]


def _trace_quantities(model: Any, x: Any, y: Any, request: ReportRequest) -> Trace:
    """Trace states, gates and gradients; also states of registered cells."""
    trace_options: dict[str, Any] = {
        "layers": request.layers,
        "loss": request.loss,
        "seed": request.seed,
        "axes": request.axes,
    }
    if all(info.cell in kinds() for info in find_layers(model)):  # other cells: the state names are unknown
        states = {state for kind in kinds().values() for state in kind.states if state in QUANTITIES}
        quantity_names = [*_DRAWN_QUANTITIES, *states, *(f"{state}_grad" for state in states)]
        has_loss = y is not None or request.loss is not None
        trace_options["quantities"] = list(
            dict.fromkeys(name for name in quantity_names if has_loss or not name.endswith("_grad"))
        )
    return trace(model, x, y, **trace_options)


def _add_ranking(
    material: Material, adapter: Adapter, model: Any, report_samples: ReportSamples, request: ReportRequest
) -> None:
    tracks = material.moments[0].tracks
    if not tracks:
        return
    steps = max(track.steps for track in tracks)
    sample_losses, material.why_no_losses = losses(
        adapter, model, report_samples, material.sample_positions, request, steps
    )
    material.losses = sample_losses
    material.ranking = rank_samples(
        _gradient_sizes(tracks, len(material.sample_positions)) if sample_losses is None else sample_losses
    )


def _gradient_sizes(tracks: Sequence[Track], count: int) -> Array:
    """Return the peak of each sample's gradient, (sample,); 0 without gradients."""
    for track in reversed(tracks):
        for gradient in track.gradients.values():
            return np.nan_to_num(norms(gradient), nan=np.inf).max(axis=1)
    return np.zeros(count)


def _add_baseline(
    material: Material, adapter: Adapter, model: Any, report_samples: ReportSamples, request: ReportRequest
) -> None:
    baseline = request.baseline
    if baseline is None:
        return
    if isinstance(baseline, Trace):
        material.moments.append(moment_of("baseline", baseline))
    elif isinstance(baseline, str) and baseline != "init":
        expected = '"init", another model, or a trace'
        raise InputError("baseline= is not understood.", got=shown(baseline), expected=expected)
    else:
        other_model = adapter.reinitialised(model, request.seed) if isinstance(baseline, str) else baseline
        x, y = report_samples.select(material.sample_positions)
        name = "before training" if isinstance(baseline, str) else "baseline"
        material.moments.append(moment_of(name, _trace_quantities(other_model, x, y, request)))
    model_moment, baseline_moment = material.moments
    if _track_sizes(model_moment) != _track_sizes(baseline_moment):
        raise InputError(
            "The baseline does not fit the model.",
            got="; ".join(f"{t.title} of {t.units} units, {t.steps} steps" for t in baseline_moment.tracks)
            or "no layers",
            expected="; ".join(f"{t.title} of {t.units} units, {t.steps} steps" for t in model_moment.tracks),
            hint="a model with the same layers, traced on the same samples",
        )
    if isinstance(baseline, str):
        model_moment.name = "after training"


def _track_sizes(moment_of: Moment) -> list[tuple[str, int, int, int]]:
    return [(track.title, track.units, track.steps, track.samples) for track in moment_of.tracks]


def _token_texts(report_samples: ReportSamples, numbers: Sequence[int], tokens: Any) -> list[list[str]] | None:
    """Return the text of each step of each sample with integer inputs: by ``tokens``, or the number itself."""
    if report_samples.count is None:
        return None
    leaf = np.asarray(data.leaves_of(report_samples.x)[0])
    if leaf.dtype.kind not in "iu" or leaf.ndim != 2:
        if tokens is not None:
            got = f"{leaf.dtype} of shape {leaf.shape}"
            raise InputError("tokens= is for inputs of integers.", got=got, expected="(sample, time) of int")
        return None
    rows = leaf[np.asarray(numbers, dtype=int)]
    if callable(tokens):
        return [[str(tokens(int(i))) for i in row] for row in rows]
    if tokens is None:
        return [[str(int(i)) for i in row] for row in rows]
    try:
        return [[str(tokens[int(i)]) for i in row] for row in rows]
    except (KeyError, IndexError, TypeError) as error:
        expected = "a list or mapping from number to text, or a function"
        raise InputError("tokens= has no text for a token.", got=shown(error), expected=expected) from error


def _add_weights(material: Material, model: Any, request: ReportRequest) -> None:
    names = [info.name for info in material.layers if request.layers is None or info.name in request.layers]
    try:
        material.weights = weights(model, layers=names) if names else None
    except RnnlensError as error:
        material.left_out.append(f"No weights: {_one_line_reason(error)}")


def _add_time_map(
    material: Material, adapter: Adapter, model: Any, report_samples: ReportSamples, request: ReportRequest
) -> None:
    if isinstance(request.jacobian, xr.DataArray):
        material.time_map = map_of_array(request.jacobian)
        return
    if not request.jacobian or not material.moments[0].tracks or material.ranking is None:
        return
    finite_samples = (
        [material.sample_positions[i] for i in _finite_indices(material)[:8]]
        if report_samples.count is not None
        else []
    )
    try:
        x, _ = report_samples.select(finite_samples[:1])
        capture = CaptureRequest(inputs=False, gradients=False, weight_grads=False, calls=False)
        outputs = data.leaves_of(adapter.capture(model, Batch(x, seed=request.seed), capture).outputs)
        shapes = [tuple(np.shape(to_host(leaf))) for leaf in outputs]
        material.time_map = map_of_model(
            model,
            lambda count: report_samples.select(finite_samples[:count])[0],
            finite_samples,
            material.moments[0].tracks,
            shapes,
            request,
        )
    except RnnlensError as error:
        material.left_out.append(f"No time Jacobian: {_one_line_reason(error)}")


def _finite_indices(material: Material) -> list[int]:
    """Return the indices of shown samples whose states are all finite."""
    ordered_samples = list(material.ranking.priority_order) if material.ranking is not None else []
    tracks = material.moments[0].tracks
    # A layer may have samples of its own: in a loop over the samples, or where words are folded into the batch.
    states = [s for track in tracks for s in track.states.values() if len(s) == len(material.sample_positions)]
    finite_samples = [i for i in ordered_samples if all(np.isfinite(state[i]).all() for state in states)]
    if finite_samples and len(finite_samples) < len(ordered_samples):
        material.left_out.append("The time Jacobian is that of samples whose states are finite.")
    return finite_samples or ordered_samples


def _add_diagnosis(material: Material, model: Any, report_samples: ReportSamples, request: ReportRequest) -> None:
    if isinstance(request.diagnosis, Diagnosis):
        material.diagnosis = request.diagnosis
        return
    if not request.diagnosis:
        return
    baseline = None if isinstance(request.baseline, Trace) else request.baseline
    all_indices = range(report_samples.count) if report_samples.count is not None else []
    x, y = report_samples.select(all_indices)
    try:
        material.diagnosis = diagnose(
            model, x, y, baseline=baseline, loss=request.loss, seed=request.seed, axes=request.axes
        )
    except RnnlensError as error:
        material.left_out.append(f"No findings: {_one_line_reason(error)}")


def _one_line_reason(error: RnnlensError) -> str:
    """Return an error as one line, with the value that it names."""
    first_line, *other_lines = str(error).splitlines()
    got = next((line.partition("got:")[2].strip() for line in other_lines if line.strip().startswith("got:")), "")
    return f"{first_line.rstrip('.')}: {got}" if got else first_line
