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
from .samples import Ranking, ReportRequest, ReportSamples, TimeMap, losses, of_array, of_model, ranked, read
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
        over = "samples" if self.mask is None else "all steps that are not padding"
        return f" times the standard deviation of x_t over {over}"


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
    numbers: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    #: (sample,), or None with the reason in ``why_no_losses``.
    losses: Array | None = None
    why_no_losses: str = ""
    ranking: Ranking | None = None
    words: list[list[str]] | None = None
    total: int | None = None
    left_out: list[str] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)

    @property
    def padding_note(self) -> str:
        """Sentence about padding: declared by a mask, or read as input."""
        if not self.moments or self.moments[0].input is None:
            return ""
        if self.moments[0].mask is not None:
            return "Padding is hatched."
        share = padding_share(self.moments[0].input)
        if share < _REPEATED:
            return ""
        return (
            f"On average {share:.0%} of the steps repeat one value at the same end of their sample, as padding does. "
            "No mask was declared: the network reads these steps as input."
        )


#: Share of repeated steps at one end from which on they count as undeclared padding.
_REPEATED = 0.1
#: Quantities of the trace that the page draws.
_WANTED = (
    *("input", "mask", "hidden", "cell", "gates", "output"),
    *("hidden_grad", "cell_grad", "gate_grad", "output_grad", "input_grad"),
)


def look(model: Any, request: ReportRequest) -> Material:
    """Trace a model and its baseline on the same samples, rank these, and compute all contents of the report."""
    adapter = adapter_for(model)
    held, why_one = read(adapter, model, request.x, request.y, request.axes)
    material = Material(total=held.count, layers=find_layers(model))
    if why_one:
        material.left_out.append(f"Samples are not told apart: {why_one}")
    _trace(material, adapter, model, held, request)
    _rank(material, adapter, model, held, request)
    _baseline(material, adapter, model, held, request)
    material.words = _words(held, material.numbers, request.tokens)
    _weights(material, model, request)
    _time_map(material, adapter, model, held, request)
    _diagnose(material, model, held, request)
    return material


def look_at(results: Sequence[Any]) -> Material:
    """Collect the contents of a report from finished results, as far as they allow."""
    material = Material()
    for result in results:
        if isinstance(result, Trace):
            if material.trace is not None:
                material.moments.append(moment("baseline", result))
                continue
            material.trace = result
            material.moments.insert(0, moment("this model", result))
        elif isinstance(result, Diagnosis):
            material.diagnosis = result
        elif isinstance(result, Weights):
            material.weights = result
        elif isinstance(result, xr.DataArray) and "in_time" in result.dims:
            material.time_map = of_array(result)
        else:
            material.others.append(result)
    if material.moments and material.moments[0].tracks:
        tracks = material.moments[0].tracks
        material.numbers = list(range(tracks[0].samples))
        datasets = [] if material.trace is None else [material.trace.dataset(layer) for layer in material.trace.layers]
        labels = next((dataset[SAMPLE].values for dataset in datasets if SAMPLE in dataset.coords), material.numbers)
        material.labels = [str(label) for label in labels]
        material.targets = [""] * len(material.numbers)
        material.why_no_losses = "a saved result has no loss of single samples"
        material.ranking = ranked(_gradient_sizes(tracks, len(material.numbers)))
    return material


def moment(name: str, found: Trace) -> Moment:
    """Convert a trace to the form used by the report."""
    tracks = tracks_of(found)
    first = next((found.dataset(layer) for layer in found.layers if "input" in found.dataset(layer)), None)
    if first is None:
        return Moment(name, tracks, found.loss)
    gradient = first["input_grad"].values if "input_grad" in first else None
    return Moment(name, tracks, found.loss, first["input"].values, gradient)


def _trace(material: Material, adapter: Adapter, model: Any, held: ReportSamples, request: ReportRequest) -> None:
    """Trace as many samples as requested, or as fit into the memory limit."""
    count = held.count if held.count is not None else 0
    chosen = list(range(min(request.samples, count))) if held.count is not None else []
    while True:
        x, y = held.take(chosen)
        try:
            material.trace = _traced(model, x, y, request)
            break
        except TooLargeError:
            if len(chosen) < 2:
                raise
            chosen = chosen[: len(chosen) // 2]
    material.moments.append(moment("this model", material.trace))
    tracks = material.moments[0].tracks
    if held.count is None:
        chosen = list(range(tracks[0].samples if tracks else 0))
    elif len(chosen) < count:
        material.left_out.append(f"{len(chosen)} of {count} samples, the first, are shown.")
    material.numbers, material.targets = chosen, held.targets(chosen)
    material.labels = [str(i if held.labels is None else held.labels[i]) for i in chosen]


def _traced(model: Any, x: Any, y: Any, request: ReportRequest) -> Trace:
    """Trace states, gates and gradients; also states of registered cells."""
    options: dict[str, Any] = {
        "layers": request.layers,
        "loss": request.loss,
        "seed": request.seed,
        "axes": request.axes,
    }
    if all(info.cell in kinds() for info in find_layers(model)):  # other cells: the state names are unknown
        states = {state for kind in kinds().values() for state in kind.states if state in QUANTITIES}
        named = [*_WANTED, *states, *(f"{state}_grad" for state in states)]
        has_loss = y is not None or request.loss is not None
        options["quantities"] = list(dict.fromkeys(name for name in named if has_loss or not name.endswith("_grad")))
    return trace(model, x, y, **options)


def _rank(material: Material, adapter: Adapter, model: Any, held: ReportSamples, request: ReportRequest) -> None:
    tracks = material.moments[0].tracks
    if not tracks:
        return
    steps = max(track.steps for track in tracks)
    found, material.why_no_losses = losses(adapter, model, held, material.numbers, request, steps)
    material.losses = found
    material.ranking = ranked(_gradient_sizes(tracks, len(material.numbers)) if found is None else found)


def _gradient_sizes(tracks: Sequence[Track], count: int) -> Array:
    """Return the peak of each sample's gradient, (sample,); 0 without gradients."""
    for track in reversed(tracks):
        for gradient in track.gradients.values():
            return np.nan_to_num(norms(gradient), nan=np.inf).max(axis=1)
    return np.zeros(count)


def _baseline(material: Material, adapter: Adapter, model: Any, held: ReportSamples, request: ReportRequest) -> None:
    given = request.baseline
    if given is None:
        return
    if isinstance(given, Trace):
        material.moments.append(moment("baseline", given))
    elif isinstance(given, str) and given != "init":
        expected = '"init", another model, or a trace'
        raise InputError("baseline= is not understood.", got=shown(given), expected=expected)
    else:
        other = adapter.reinitialised(model, request.seed) if isinstance(given, str) else given
        x, y = held.take(material.numbers)
        name = "before training" if isinstance(given, str) else "baseline"
        material.moments.append(moment(name, _traced(other, x, y, request)))
    after, before = material.moments
    if _shape(after) != _shape(before):
        raise InputError(
            "The baseline does not fit the model.",
            got="; ".join(f"{t.title} of {t.units} units, {t.steps} steps" for t in before.tracks) or "no layers",
            expected="; ".join(f"{t.title} of {t.units} units, {t.steps} steps" for t in after.tracks),
            hint="a model with the same layers, traced on the same samples",
        )
    if isinstance(given, str):
        after.name = "after training"


def _shape(found: Moment) -> list[tuple[str, int, int, int]]:
    return [(track.title, track.units, track.steps, track.samples) for track in found.tracks]


def _words(held: ReportSamples, numbers: Sequence[int], tokens: Any) -> list[list[str]] | None:
    """Return the text of each step of each sample with integer inputs: by ``tokens``, or the number itself."""
    if held.count is None:
        return None
    leaf = np.asarray(data.leaves_of(held.x)[0])
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


def _weights(material: Material, model: Any, request: ReportRequest) -> None:
    names = [info.name for info in material.layers if request.layers is None or info.name in request.layers]
    try:
        material.weights = weights(model, layers=names) if names else None
    except RnnlensError as error:
        material.left_out.append(f"No weights: {_reason(error)}")


def _time_map(material: Material, adapter: Adapter, model: Any, held: ReportSamples, request: ReportRequest) -> None:
    if isinstance(request.jacobian, xr.DataArray):
        material.time_map = of_array(request.jacobian)
        return
    if not request.jacobian or not material.moments[0].tracks or material.ranking is None:
        return
    chosen = [material.numbers[i] for i in _healthy(material)[:8]] if held.count is not None else []
    try:
        x, _ = held.take(chosen[:1])
        capture = CaptureRequest(inputs=False, gradients=False, weight_grads=False, calls=False)
        outputs = data.leaves_of(adapter.capture(model, Batch(x, seed=request.seed), capture).outputs)
        shapes = [tuple(np.shape(to_host(leaf))) for leaf in outputs]
        material.time_map = of_model(
            model, lambda count: held.take(chosen[:count])[0], chosen, material.moments[0].tracks, shapes, request
        )
    except RnnlensError as error:
        material.left_out.append(f"No time Jacobian: {_reason(error)}")


def _healthy(material: Material) -> list[int]:
    """Return the indices of shown samples whose states are all finite."""
    telling = list(material.ranking.telling) if material.ranking is not None else []
    tracks = material.moments[0].tracks
    # A layer may have samples of its own: in a loop over the samples, or where words are folded into the batch.
    states = [s for track in tracks for s in track.states.values() if len(s) == len(material.numbers)]
    healthy = [i for i in telling if all(np.isfinite(state[i]).all() for state in states)]
    if healthy and len(healthy) < len(telling):
        material.left_out.append("The time Jacobian is that of samples whose states are finite.")
    return healthy or telling


def _diagnose(material: Material, model: Any, held: ReportSamples, request: ReportRequest) -> None:
    if isinstance(request.diagnosis, Diagnosis):
        material.diagnosis = request.diagnosis
        return
    if not request.diagnosis:
        return
    baseline = None if isinstance(request.baseline, Trace) else request.baseline
    everything = range(held.count) if held.count is not None else []
    x, y = held.take(everything)
    try:
        material.diagnosis = diagnose(
            model, x, y, baseline=baseline, loss=request.loss, seed=request.seed, axes=request.axes
        )
    except RnnlensError as error:
        material.left_out.append(f"No findings: {_reason(error)}")


def _reason(error: RnnlensError) -> str:
    """Return an error as one line, with the value that it names."""
    what, *rest = str(error).splitlines()
    got = next((line.partition("got:")[2].strip() for line in rest if line.strip().startswith("got:")), "")
    return f"{what.rstrip('.')}: {got}" if got else what
