"""Samples of a report, read once and sorted by loss, and its time Jacobian on as many steps as ten seconds allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Adapter, Batch, Taps
from ..arguments.data import is_source
from ..diagnosis.samples import Orientation, read_samples
from ..errors import InputError, RnnlensError, UnsupportedError, shape_of
from ..results.checks import residual, rounding_bound
from ..results.schema import to_host
from ..settings import options
from ..typing import Array
from ..verbs.jacobian import jacobian
from ..vocabulary import DIRECTION, IN_TIME, OUT_TIME, SAMPLE
from .tracks import Track

#: Number of samples that are read from a source of batches.
MAX_SOURCE_SAMPLES = 512


@dataclass(frozen=True)
class ReportRequest:
    """Checked arguments of ``rl.report``; see its docstring."""

    x: Any = None
    y: Any = None
    baseline: Any = None
    loss: Any = None
    layers: Any = None
    samples: int = 64
    diagnosis: Any = True
    jacobian: Any = True
    tokens: Any = None
    seed: int = 0
    axes: Any = None


@dataclass
class ReportSamples:
    """Samples in the layout that the model takes."""

    #: All samples, on the axis where the model has them.
    x: Any
    y: Any
    #: Number of samples; None if samples cannot be separated, such as in a packed sequence.
    count: int | None
    orientation: Orientation | None = None
    #: Coordinate of the samples where x is a DataArray that has one, else their positions; None if they are not known.
    labels: Array | None = None

    def select(self, indices: Sequence[int]) -> tuple[Any, Any]:
        """Return inputs x and targets y of the samples at ``indices``."""
        if self.count is None:
            return self.x, self.y
        # A slice is a view: data on disk are not read.
        rows = slice(None) if indices == range(self.count) else np.asarray(indices)
        x = data.select(self.x, rows)
        y = None if self.y is None else data.select(self.y, rows)
        if self.orientation is None:
            return x, y
        return self.orientation.as_given(x), None if y is None else self.orientation.target_as_given(y)

    def targets(self, indices: Sequence[int]) -> list[str]:
        """Return each sample's target as text; "" if it is more than one number."""
        if self.count is None or self.y is None:
            return [""] * len(indices)
        leaves = data.leaves_of(self.y)
        y = np.asarray(leaves[0])
        if len(leaves) > 1 or y.shape[0] != self.count or y.size != self.count:
            return [""] * len(indices)
        return [f"{y.reshape(-1)[i]:.4g}" for i in indices]


def read_report_samples(adapter: Adapter, model: Any, x: Any, y: Any, axes: Any) -> tuple[ReportSamples, str]:
    """Read the data; also return the reason if samples cannot be separated."""
    max_samples = MAX_SOURCE_SAMPLES if is_source(x) else 2**40
    orientations: list[Orientation] = []

    def orient(batch: Any) -> Orientation:
        orientations.append(Orientation(adapter, model, batch, axes))
        return orientations[0]

    try:
        samples_read = read_samples(x, y, max_samples, orient)
    except (InputError, UnsupportedError) as error:
        if is_source(x):
            raise
        leaves = data.leaves_of(x)
        if not adapter.samples_first and any(data.is_packed(leaf) for leaf in leaves):
            return ReportSamples(x, y, None), str(error).splitlines()[0]
        leaf_lengths = {(shape_of(leaf) or (0,))[0] for leaf in (*leaves, *data.leaves_of(y))}
        if len(leaf_lengths) > 1 or not leaf_lengths.pop():
            raise
        return ReportSamples(_to_numpy(x), _to_numpy(y), len(leaves[0])), ""
    return ReportSamples(samples_read.x, samples_read.y, samples_read.count, orientations[0], samples_read.labels), ""


def _to_numpy(tree: Any) -> Any:
    return None if tree is None else data.map_leaves(lambda leaf: np.asarray(to_host(leaf)), tree)


def losses(
    adapter: Adapter,
    model: Any,
    report_samples: ReportSamples,
    indices: Sequence[int],
    request: ReportRequest,
    steps: int,
) -> tuple[Array | None, str]:
    """Return the loss of each chosen sample, (sample,), or None and the reason why it is not defined.

    It is evaluated on the outputs of one forward pass of all samples, if the losses of two samples that are run alone
    follow from it within the float32 rounding of ``steps`` steps. They do not where the model mixes samples or adds a
    loss of its own; then each sample is run alone.
    """
    if report_samples.count is None:
        return None, "samples cannot be separated"
    if report_samples.y is None and request.loss is None:
        return None, "no target was given"

    def batch_of(samples: Sequence[int]) -> Batch:
        x, y = report_samples.select(samples)
        return Batch(x, y, loss=request.loss, seed=request.seed)

    def loss_alone(sample: int) -> float | None:
        return adapter.run(model, batch_of([sample]), Taps("outputs", loss=True)).capture.loss

    losses_alone: dict[int, float | None] = {}
    try:
        for i in dict.fromkeys((*indices[:1], *indices[-1:])):
            losses_alone[i] = loss_alone(i)
        if None in losses_alone.values():
            return None, "the model gave none"
        losses_of_outputs = (
            _losses_of_outputs(adapter, model, batch_of, indices) if len(indices) > len(losses_alone) + 1 else None
        )
        if losses_of_outputs is not None:
            known_losses = np.array(list(losses_alone.values()), dtype=float)
            same_losses = np.array([losses_of_outputs[indices.index(i)] for i in losses_alone])
            if residual(same_losses, known_losses) <= rounding_bound("float32", steps):
                return losses_of_outputs, ""
        for i in indices:
            losses_alone[i] = losses_alone[i] if i in losses_alone else loss_alone(i)
    except RnnlensError as error:
        return None, str(error).splitlines()[0]
    return np.array([losses_alone[i] for i in indices], dtype=float), ""


def _losses_of_outputs(
    adapter: Adapter, model: Any, batch_of: Callable[[Sequence[int]], Batch], indices: Sequence[int]
) -> Array | None:
    """Evaluate the loss on the outputs of each sample; None where the outputs do not have samples first."""
    try:
        all_outputs = adapter.run(model, batch_of(indices).without_loss(), Taps()).outputs
        if any(np.shape(leaf)[:1] != (len(indices),) for leaf in all_outputs.leaves):
            return None
        sample_losses = []
        for position, sample in enumerate(indices):
            sample_slice = slice(position, position + 1)
            masks = [None if mask is None else mask[sample_slice] for mask in all_outputs.masks]
            outputs = replace(all_outputs, leaves=[leaf[sample_slice] for leaf in all_outputs.leaves], masks=masks)
            sample_losses.append(adapter.loss_of(model, batch_of([sample]), outputs)[0])
    except Exception:  # a loss of the user may raise anything for outputs that are cut along another axis
        return None
    return np.array(sample_losses)


@dataclass(frozen=True)
class Ranking:
    """Samples in the order of their losses, the smallest first; one without a finite loss counts as the hardest."""

    order: tuple[int, ...]
    typical: int
    hardest: int
    easiest: int

    @property
    def priority_order(self) -> tuple[int, ...]:
        """All samples in display order: typical, hardest, easiest, quartiles, then ever finer quantiles."""
        sample_count = len(self.order)
        ranks = [(sample_count - 1) // 2, sample_count - 1, 0]
        for divisions in (4, 8, 16, 32, 64, 128):
            ranks += [round((sample_count - 1) * k / divisions) for k in range(1, divisions)]
        ranks += range(sample_count)
        return tuple(self.order[rank] for rank in dict.fromkeys(ranks))


def rank_samples(difficulties: Array) -> Ranking:
    """Rank samples by loss or, if it is not known, by the size of their gradient."""
    order = np.argsort(np.where(np.isfinite(difficulties), difficulties, np.inf), kind="stable")
    return Ranking(tuple(int(i) for i in order), int(order[(len(order) - 1) // 2]), int(order[-1]), int(order[0]))


#: Largest number of FLOPs: about ten seconds of one core.
_MAX_FLOPS = 3e11
#: Largest number of output units; random probes replace more.
_MAX_PROBES = 16
#: Largest number of output steps: more rows would not be visible.
_MAX_ROWS = 128


@dataclass(frozen=True)
class TimeMap:
    """Norms of the time Jacobian, (output step, input step), averaged over samples."""

    norms: Array
    #: Steps of the rows and of the columns, chronological.
    out_times: Array
    in_times: Array
    #: Text on the two ends and the reduction.
    description: str
    #: Call that returns the same; "" if it is not known.
    code: str
    #: Whether no output depends on a later input, so that the upper triangle is zero by construction.
    causal: bool
    #: Number of samples averaged.
    samples: int


def map_of_model(
    model: Any,
    select: Callable[[int], Any],
    samples: Sequence[int],
    tracks: Sequence[Track],
    outputs: Sequence[tuple[int, ...]],
    request: ReportRequest,
) -> TimeMap:
    """Compute the norms of the time Jacobian of outputs by inputs, averaged over samples.

    It is that of the first output with a row for every step, also if the model folds samples and steps into one axis;
    of a model with one output step, that of the last layer's states. ``select(n)`` returns the first n of the
    ``samples`` in the layout that the model takes; there are none if they cannot be separated. ``outputs`` are the
    shapes of the outputs of one sample.
    """
    last_track = tracks[-1]
    index = next((i for i, shape in enumerate(outputs) if _has_every_step(shape, last_track.steps)), None)
    if index is None:
        output_name, width = f"{last_track.layer}.{next(iter(last_track.states), 'hidden')}", last_track.units
    else:
        output_name, width = f"output[{index}]" if len(outputs) > 1 else "output", outputs[index][-1]
    row_count = min(width, _MAX_PROBES)
    input_widths = [1, *(track.units for track in tracks)]
    step_cost = sum(8 * track.units * (track.units + width) for track, width in zip(tracks, input_widths, strict=False))
    row_cost = 0.5 * last_track.steps * row_count * step_cost
    sample_count = int(np.clip(_MAX_FLOPS / (row_cost * min(last_track.steps, _MAX_ROWS)), 1, max(len(samples), 1)))
    step_count = int(np.clip(_MAX_FLOPS / (row_cost * sample_count), 8, min(last_track.steps, _MAX_ROWS)))
    steps = np.unique(np.linspace(0, last_track.steps - 1, step_count).round().astype(int))
    jacobian_options: dict[str, Any] = {"measure": "norm", "across": "mean", "axes": request.axes, "seed": request.seed}
    if len(steps) < last_track.steps:
        jacobian_options["at"] = {OUT_TIME: steps.tolist()}
    if width > _MAX_PROBES:
        jacobian_options["sketch"] = _MAX_PROBES
    x = select(sample_count)
    with options(certify="first"):
        time_jacobian, input_name = None, "input"
        with suppress(InputError):  # an input of integers, or several inputs
            time_jacobian = jacobian(model, x, of=output_name, wrt=input_name, **jacobian_options)
        if time_jacobian is None or IN_TIME not in time_jacobian.dims:  # of ids and a state, only the state is a float
            input_name = f"{tracks[0].layer}.input"
            time_jacobian = jacobian(model, x, of=output_name, wrt=input_name, **jacobian_options)
    shown_options = {
        key: value for key, value in jacobian_options.items() if value is not None and key not in ("seed", "at")
    }
    at_text = ", at={...}" if "at" in jacobian_options else ""
    arguments = "".join(f", {key}={value!r}" for key, value in shown_options.items())
    input_code = f"x[{list(samples[:sample_count])}]" if samples else "x"
    code = f'rl.jacobian(model, {input_code}, of="{output_name}", wrt="{input_name}"{arguments}{at_text})'
    return _time_map(
        time_jacobian, code, sample_count, jacobian_options.get("sketch", 0), [track.direction for track in tracks]
    )


def _has_every_step(shape: tuple[int, ...], steps: int) -> bool:
    """Return whether the output of one sample, of this shape, has a row for each of several steps."""
    return steps > 1 and (steps in shape[:2] if len(shape) >= 3 else len(shape) == 2 and shape[0] == steps)


def map_of_array(time_jacobian: xr.DataArray) -> TimeMap:
    """Convert a finished time Jacobian to a map of the report; raise InputError without an axis of input steps."""
    if IN_TIME not in time_jacobian.dims:
        got = f"dimensions ({', '.join(map(str, time_jacobian.dims))})"
        raise InputError("jacobian= is no time Jacobian.", got=got, expected="what rl.jacobian returned")
    return _time_map(time_jacobian, "", int(time_jacobian.sizes.get(SAMPLE, 0)), 0, [])


def _time_map(time_jacobian: xr.DataArray, code: str, samples: int, probes: int, directions: Sequence[str]) -> TimeMap:
    values: xr.DataArray = time_jacobian
    other_dims = [dim for dim in values.dims if dim not in (SAMPLE, OUT_TIME, IN_TIME)]
    if other_dims:  # norm over units and both directions
        values = (abs(values) ** 2).sum(other_dims) ** 0.5
    if SAMPLE in values.dims:
        values = values.mean(SAMPLE)
    if OUT_TIME not in values.dims:
        values = values.expand_dims({OUT_TIME: [int(values[IN_TIME][-1])]})
    norms = np.asarray(to_host(values.transpose(OUT_TIME, IN_TIME).values), dtype=np.float64)
    description = str(time_jacobian.attrs.get("long_name", "time Jacobian"))
    if samples:
        description += f", mean over {samples} {'sample' if samples == 1 else 'samples'}"
    if probes:
        description += f", estimated from {probes} random probes"
    is_causal = DIRECTION not in time_jacobian.dims and not any(direction for direction in directions)
    is_later = values[IN_TIME].values[None, :] > values[OUT_TIME].values[:, None]
    is_causal = is_causal and not np.nan_to_num(norms)[is_later].any()
    return TimeMap(norms, values[OUT_TIME].values, values[IN_TIME].values, description, code, is_causal, samples)
