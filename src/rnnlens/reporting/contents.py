"""Computation of all contents of a report; the other modules only draw and write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Adapter, Batch, Taps
from ..adapters.registry import adapter_for
from ..diagnosis import diagnose
from ..errors import InputError, RnnlensError, TooLargeError, short_repr
from ..measures.facts import padding_share
from ..measures.profiles import attribution
from ..recurrence.cells import kinds
from ..results.diagnosis import Diagnosis
from ..results.gradients import Weights
from ..results.schema import to_host
from ..results.trace import Trace
from ..results.training_run import TrainingRun
from ..typing import Array
from ..verbs.trace import trace
from ..verbs.weights import layers as find_layers
from ..verbs.weights import weights
from ..vocabulary import SAMPLE, SPACE
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
    #: First layer whose input is (sample, time, feature), its input, and the gradient of the loss by it.
    input_layer: str = ""
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
class ReportContents:
    """All contents of a report."""

    #: The model itself, and the baseline if there is one.
    moments: list[Moment] = field(default_factory=list)
    trace: Trace | None = None
    diagnosis: Diagnosis | None = None
    weights: Weights | None = None
    time_map: TimeMap | None = None
    run: TrainingRun | None = None
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


def contents_of_model(model: Any, request: ReportRequest) -> ReportContents:
    """Trace a model and its baseline on the same samples, rank these, and compute all contents of the report."""
    adapter = adapter_for(model)
    report_samples, inseparable_reason = read_report_samples(adapter, model, request.x, request.y, request.axes)
    contents = ReportContents(total_samples=report_samples.count, layers=find_layers(model))
    if inseparable_reason:
        contents.left_out.append(f"Samples are not told apart: {inseparable_reason}")
    _add_trace(contents, adapter, model, report_samples, request)
    _add_ranking(contents, adapter, model, report_samples, request)
    _add_baseline(contents, adapter, model, report_samples, request)
    contents.token_texts = _token_texts(report_samples, contents.sample_positions, request.tokens)
    _add_weights(contents, model, request)
    _add_time_map(contents, adapter, model, report_samples, request)
    _add_diagnosis(contents, model, report_samples, request)
    return contents


def contents_of_results(results: Sequence[Any]) -> ReportContents:
    """Collect the contents of a report from finished results, as far as they allow."""
    contents = ReportContents()
    for result in results:
        if isinstance(result, Trace):
            if contents.trace is not None:
                contents.moments.append(moment_of("baseline", result))
                continue
            contents.trace = result
            contents.moments.insert(0, moment_of("this model", result))
            contents.left_out += _undrawn_layers(result, contents.moments[0].tracks)
        elif isinstance(result, Diagnosis):
            contents.diagnosis = result
        elif isinstance(result, Weights):
            contents.weights = result
        elif isinstance(result, TrainingRun) and contents.run is None:
            contents.run = result
        elif isinstance(result, xr.DataArray) and "in_time" in result.dims:
            contents.time_map = map_of_array(result)
        else:
            contents.other_results.append(result)
    if contents.moments and contents.moments[0].tracks:
        tracks = contents.moments[0].tracks
        contents.sample_positions = list(range(tracks[0].samples))
        datasets = [] if contents.trace is None else [contents.trace.dataset(layer) for layer in contents.trace.layers]
        labels = next(
            (dataset[SAMPLE].values for dataset in datasets if SAMPLE in dataset.coords), contents.sample_positions
        )
        contents.labels = [str(label) for label in labels]
        contents.targets = [""] * len(contents.sample_positions)
        contents.why_no_losses = "a saved result has no loss of single samples"
        contents.ranking = rank_samples(_gradient_sizes(tracks, len(contents.sample_positions)))
    return contents


def moment_of(name: str, trace: Trace) -> Moment:
    """Convert a trace to the form used by the report."""
    tracks = tracks_of(trace)
    for layer in trace.layers:
        dataset = trace.dataset(layer)
        if "input" in dataset and dataset["input"].ndim == 3:  # the input of a convolutional layer is an image
            gradient = dataset["input_grad"].values if "input_grad" in dataset else None
            return Moment(name, tracks, trace.loss, layer, dataset["input"].values, gradient)
    return Moment(name, tracks, trace.loss)


def _undrawn_layers(trace: Trace, tracks: Sequence[Track]) -> list[str]:
    """Return a sentence about each layer that has no track because its states have axes of space."""
    sentences, drawn_layers = [], {track.layer for track in tracks}
    for layer in trace.layers:
        dataset = trace.dataset(layer)
        space = [dim for dim in SPACE[3] if dim in dataset.dims]
        if space and layer not in drawn_layers:
            sentences.append(
                f"Layer {layer!r} is not drawn: its states have axes of space ({', '.join(space)}), and the maps here "
                f"are of units over time. rl.plot.maps(trace[{layer!r}].hidden) draws them as pictures."
            )
    return sentences


def _add_trace(
    contents: ReportContents, adapter: Adapter, model: Any, report_samples: ReportSamples, request: ReportRequest
) -> None:
    """Trace as many samples as requested, or as fit into the memory limit."""
    sample_count = report_samples.count if report_samples.count is not None else 0
    sample_indices = list(range(min(request.samples, sample_count))) if report_samples.count is not None else []
    while True:
        x, y = report_samples.select(sample_indices)
        try:
            contents.trace = _trace_quantities(model, x, y, request)
            break
        except TooLargeError:
            if len(sample_indices) < 2:
                raise
            sample_indices = sample_indices[: len(sample_indices) // 2]
    contents.moments.append(moment_of("this model", contents.trace))
    tracks = contents.moments[0].tracks
    contents.left_out += _undrawn_layers(contents.trace, tracks)
    if report_samples.count is None:
        sample_indices = list(range(tracks[0].samples if tracks else 0))
    elif len(sample_indices) < sample_count:
        contents.left_out.append(f"{len(sample_indices)} of {sample_count} samples, the first, are shown.")
    contents.sample_positions, contents.targets = sample_indices, report_samples.targets(sample_indices)
    contents.labels = [str(i if report_samples.labels is None else report_samples.labels[i]) for i in sample_indices]


def _trace_quantities(model: Any, x: Any, y: Any, request: ReportRequest) -> Trace:
    """Trace what the page draws; all quantities where a cell has states of other names than hidden and cell."""
    trace_options: dict[str, Any] = {
        "layers": request.layers,
        "loss": request.loss,
        "seed": request.seed,
        "axes": request.axes,
    }
    cells = [kinds().get(info.cell) for info in find_layers(model)]
    # A trace in which the layer of a state does not run refuses the state's name, unless it is hidden or cell.
    if all(cell is not None and {"hidden", "cell"} >= set(cell.states) for cell in cells):
        has_loss = y is not None or request.loss is not None
        trace_options["quantities"] = [name for name in _DRAWN_QUANTITIES if has_loss or not name.endswith("_grad")]
    return trace(model, x, y, **trace_options)


def _add_ranking(
    contents: ReportContents, adapter: Adapter, model: Any, report_samples: ReportSamples, request: ReportRequest
) -> None:
    tracks = contents.moments[0].tracks
    if not tracks:
        return
    steps = max(track.steps for track in tracks)
    sample_losses, contents.why_no_losses = losses(
        adapter, model, report_samples, contents.sample_positions, request, steps
    )
    contents.losses = sample_losses
    contents.ranking = rank_samples(
        _gradient_sizes(tracks, len(contents.sample_positions)) if sample_losses is None else sample_losses
    )


def _gradient_sizes(tracks: Sequence[Track], count: int) -> Array:
    """Return the peak of each sample's gradient, (sample,); 0 without gradients."""
    for track in reversed(tracks):
        for gradient in track.gradients.values():
            return np.nan_to_num(norms(gradient), nan=np.inf).max(axis=1)
    return np.zeros(count)


def _add_baseline(
    contents: ReportContents, adapter: Adapter, model: Any, report_samples: ReportSamples, request: ReportRequest
) -> None:
    baseline = request.baseline
    if baseline is None:
        return
    if isinstance(baseline, Trace):
        contents.moments.append(moment_of("baseline", baseline))
    elif isinstance(baseline, str) and baseline != "init":
        expected = '"init", another model, or a trace'
        raise InputError("baseline= is not understood.", got=short_repr(baseline), expected=expected)
    else:
        other_model = adapter.reinitialised(model, request.seed) if isinstance(baseline, str) else baseline
        x, y = report_samples.select(contents.sample_positions)
        name = "re-initialised" if isinstance(baseline, str) else "baseline"
        contents.moments.append(moment_of(name, _trace_quantities(other_model, x, y, request)))
    model_moment, baseline_moment = contents.moments
    if _track_sizes(model_moment) != _track_sizes(baseline_moment):
        raise InputError(
            "The baseline does not fit the model.",
            got="; ".join(f"{t.title} of {t.units} units, {t.steps} steps" for t in baseline_moment.tracks)
            or "no layers",
            expected="; ".join(f"{t.title} of {t.units} units, {t.steps} steps" for t in model_moment.tracks),
            hint="a model with the same layers, traced on the same samples",
        )
    if isinstance(baseline, str):
        model_moment.name = "as given"


def _track_sizes(moment: Moment) -> list[tuple[str, int, int, int]]:
    return [(track.title, track.units, track.steps, track.samples) for track in moment.tracks]


def _token_texts(report_samples: ReportSamples, sample_positions: Sequence[int], tokens: Any) -> list[list[str]] | None:
    """Return the input of each sample and step as text: ``tokens`` of the integer, or the integer; None for floats."""
    if report_samples.count is None:
        return None
    leaf = np.asarray(data.leaves_of(report_samples.x)[0])
    if leaf.dtype.kind not in "iu" or leaf.ndim != 2:
        if tokens is not None:
            got = f"{leaf.dtype} of shape {leaf.shape}"
            raise InputError("tokens= is for inputs of integers.", got=got, expected="(sample, time) of int")
        return None
    rows = leaf[np.asarray(sample_positions, dtype=int)]
    if callable(tokens):
        return [[str(tokens(int(i))) for i in row] for row in rows]
    if tokens is None:
        return [[str(int(i)) for i in row] for row in rows]
    try:
        return [[str(tokens[int(i)]) for i in row] for row in rows]
    except (KeyError, IndexError, TypeError) as error:
        expected = "a list or mapping from number to text, or a function"
        raise InputError("tokens= has no text for a token.", got=short_repr(error), expected=expected) from error


def _add_weights(contents: ReportContents, model: Any, request: ReportRequest) -> None:
    names = [info.name for info in contents.layers if request.layers is None or info.name in request.layers]
    try:
        contents.weights = weights(model, layers=names) if names else None
    except RnnlensError as error:
        contents.left_out.append(f"No weights: {_one_line_reason(error)}")


def _add_time_map(
    contents: ReportContents, adapter: Adapter, model: Any, report_samples: ReportSamples, request: ReportRequest
) -> None:
    if isinstance(request.jacobian, xr.DataArray):
        contents.time_map = map_of_array(request.jacobian)
        return
    if not request.jacobian:
        return
    if not contents.moments[0].tracks or contents.ranking is None:
        contents.left_out.append("No time Jacobian: no layer is drawn over time.")
        return
    finite_samples = (
        [contents.sample_positions[i] for i in _finite_indices(contents)[:8]]
        if report_samples.count is not None
        else []
    )
    try:
        x, _ = report_samples.select(finite_samples[:1])
        outputs = data.leaves_of(adapter.run(model, Batch(x, seed=request.seed), Taps()).returned)
        shapes = [tuple(np.shape(to_host(leaf))) for leaf in outputs]
        contents.time_map = map_of_model(
            model,
            lambda count: report_samples.select(finite_samples[:count])[0],
            finite_samples,
            contents.moments[0].tracks,
            shapes,
            request,
        )
    except RnnlensError as error:
        contents.left_out.append(f"No time Jacobian: {_one_line_reason(error)}")


def _finite_indices(contents: ReportContents) -> list[int]:
    """Return the indices of shown samples whose states are all finite."""
    ordered_samples = list(contents.ranking.priority_order) if contents.ranking is not None else []
    tracks = contents.moments[0].tracks
    # A layer may have samples of its own: in a loop over the samples, or where words are folded into the batch.
    states = [s for track in tracks for s in track.states.values() if len(s) == len(contents.sample_positions)]
    finite_samples = [i for i in ordered_samples if all(np.isfinite(state[i]).all() for state in states)]
    if finite_samples and len(finite_samples) < len(ordered_samples):
        contents.left_out.append("The time Jacobian is that of samples whose states are finite.")
    return finite_samples or ordered_samples


def _add_diagnosis(contents: ReportContents, model: Any, report_samples: ReportSamples, request: ReportRequest) -> None:
    if isinstance(request.diagnosis, Diagnosis):
        contents.diagnosis = request.diagnosis
        return
    if not request.diagnosis:
        return
    baseline = None if isinstance(request.baseline, Trace) else request.baseline
    x, y = report_samples.select(range(report_samples.count or 0))
    try:
        contents.diagnosis = diagnose(
            model, x, y, baseline=baseline, loss=request.loss, seed=request.seed, axes=request.axes
        )
    except RnnlensError as error:
        contents.left_out.append(f"No findings: {_one_line_reason(error)}")


def _one_line_reason(error: RnnlensError) -> str:
    """Return an error as one line, with the value that it names."""
    return f"{error.problem.rstrip('.')}: {error.got}" if error.got else error.problem
