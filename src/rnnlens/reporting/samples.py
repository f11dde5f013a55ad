"""Samples of a report, read once and sorted by loss, and its time Jacobian on as many steps as ten seconds allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Adapter, Batch, CaptureRequest
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
FROM_SOURCE = 512


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

    def take(self, chosen: Sequence[int]) -> tuple[Any, Any]:
        """Return inputs x and targets y of the samples ``chosen``."""
        if self.count is None:
            return self.x, self.y
        rows = np.asarray(chosen)
        x = data.map_leaves(lambda leaf: leaf[rows], self.x)
        y = None if self.y is None else data.map_leaves(lambda leaf: leaf[rows], self.y)
        if self.orientation is None or self.orientation.inputs is None:
            return x, y
        return self.orientation.as_given(x), None if y is None else self.orientation.target_as_given(y)

    def targets(self, chosen: Sequence[int]) -> list[str]:
        """Return each sample's target as text; "" if it is more than one number."""
        if self.count is None or self.y is None:
            return [""] * len(chosen)
        leaves = data.leaves_of(self.y)
        y = np.asarray(leaves[0])
        if len(leaves) > 1 or y.shape[0] != self.count or y.size != self.count:
            return [""] * len(chosen)
        return [f"{y.reshape(-1)[i]:.4g}" for i in chosen]


def read(adapter: Adapter, model: Any, x: Any, y: Any, axes: Any) -> tuple[ReportSamples, str]:
    """Read the data; also return the reason if samples cannot be separated."""
    most = FROM_SOURCE if is_source(x) else 2**40
    orientation: list[Orientation] = []

    def orient(batch: Any) -> Orientation:
        orientation.append(Orientation(adapter, model, batch, axes))
        return orientation[0]

    try:
        found = read_samples(x, y, most, orient)
    except (InputError, UnsupportedError) as error:
        if is_source(x):
            raise
        leaves = data.leaves_of(x)
        if not adapter.samples_first and any(data.is_packed(leaf) for leaf in leaves):
            return ReportSamples(x, y, None), str(error).splitlines()[0]
        counts = {(shape_of(leaf) or (0,))[0] for leaf in (*leaves, *data.leaves_of(y))}
        if len(counts) > 1 or not counts.pop():
            raise
        return ReportSamples(_numpy(x), _numpy(y), len(leaves[0])), ""
    return ReportSamples(found.x, found.y, found.count, orientation[0], found.labels), ""


def _numpy(tree: Any) -> Any:
    return None if tree is None else data.map_leaves(lambda leaf: np.asarray(to_host(leaf)), tree)


def losses(
    adapter: Adapter, model: Any, held: ReportSamples, chosen: Sequence[int], request: ReportRequest, steps: int
) -> tuple[Array | None, str]:
    """Return the loss of each chosen sample, (sample,), or None and the reason why it is not defined.

    It is evaluated on the outputs of one forward pass of all samples, if the losses of two samples that are run alone
    follow from it within the float32 rounding of ``steps`` steps. They do not where the model mixes samples or adds a
    loss of its own; then each sample is run alone.
    """
    if held.count is None:
        return None, "samples cannot be separated"
    if held.y is None and request.loss is None:
        return None, "no target was given"
    only_loss = CaptureRequest(inputs=False, gradients=False, weight_grads=False, loss=True)

    def batch_of(samples: Sequence[int]) -> Batch:
        x, y = held.take(samples)
        return Batch(x, y, loss=request.loss, seed=request.seed)

    alone: dict[int, float | None] = {}
    try:
        for i in dict.fromkeys((*chosen[:1], *chosen[-1:])):
            alone[i] = adapter.capture(model, batch_of([i]), only_loss).loss
        if None in alone.values():
            return None, "the model gave none"
        together = _losses_of_outputs(adapter, model, batch_of, chosen) if len(chosen) > len(alone) + 1 else None
        if together is not None:
            known = np.array(list(alone.values()), dtype=float)
            found = np.array([together[chosen.index(i)] for i in alone])
            if residual(found, known) <= rounding_bound("float32", steps):
                return together, ""
        for i in chosen:
            alone[i] = alone[i] if i in alone else adapter.capture(model, batch_of([i]), only_loss).loss
    except RnnlensError as error:
        return None, str(error).splitlines()[0]
    return np.array([alone[i] for i in chosen], dtype=float), ""


def _losses_of_outputs(
    adapter: Adapter, model: Any, batch_of: Callable[[Sequence[int]], Batch], chosen: Sequence[int]
) -> Array | None:
    """Evaluate the loss on the outputs of each sample; None where the outputs do not have samples first."""
    try:
        whole = adapter.outputs_of(model, batch_of(chosen).without_loss())
        if any(np.shape(leaf)[:1] != (len(chosen),) for leaf in whole.leaves):
            return None
        found = []
        for place, sample in enumerate(chosen):
            one = slice(place, place + 1)
            masks = [None if mask is None else mask[one] for mask in whole.masks]
            outputs = replace(whole, leaves=[leaf[one] for leaf in whole.leaves], masks=masks)
            found.append(adapter.loss_of(model, batch_of([sample]), outputs)[0])
    except Exception:  # a loss of the user may raise anything for outputs that are cut along another axis
        return None
    return np.array(found)


@dataclass(frozen=True)
class Ranking:
    """Samples in the order of their losses, the smallest first; one without a finite loss counts as the hardest."""

    order: tuple[int, ...]
    typical: int
    hardest: int
    easiest: int

    @property
    def telling(self) -> tuple[int, ...]:
        """All samples in display order: typical, hardest, easiest, quartiles, then ever finer quantiles."""
        count = len(self.order)
        places = [(count - 1) // 2, count - 1, 0]
        for parts in (4, 8, 16, 32, 64, 128):
            places += [round((count - 1) * k / parts) for k in range(1, parts)]
        places += range(count)
        return tuple(self.order[place] for place in dict.fromkeys(places))


def ranked(sizes: Array) -> Ranking:
    """Rank samples by loss or, if it is not known, by the size of their gradient."""
    order = np.argsort(np.where(np.isfinite(sizes), sizes, np.inf), kind="stable")
    return Ranking(tuple(int(i) for i in order), int(order[(len(order) - 1) // 2]), int(order[-1]), int(order[0]))


#: Largest number of FLOPs: about ten seconds of one core.
_OPERATIONS = 3e11
#: Largest number of output units; random probes replace more.
_PROBES = 16
#: Largest number of output steps: more rows would not be visible.
_ROWS = 128


@dataclass(frozen=True)
class TimeMap:
    """Norms of the time Jacobian, (output step, input step), averaged over samples."""

    norms: Array
    #: Steps of the rows and of the columns, chronological.
    out_times: Array
    in_times: Array
    #: Text on the two ends and the reduction.
    words: str
    #: Call that returns the same; "" if it is not known.
    code: str
    #: Whether no output depends on a later input, so that the upper triangle is zero by construction.
    causal: bool
    #: Number of samples averaged.
    samples: int


def of_model(
    model: Any,
    take: Callable[[int], Any],
    samples: Sequence[int],
    tracks: Sequence[Track],
    outputs: Sequence[tuple[int, ...]],
    request: ReportRequest,
) -> TimeMap:
    """Compute the norms of the time Jacobian of outputs by inputs, averaged over samples.

    For a model with one output step, it is the time Jacobian of the last layer's states by inputs. ``take(n)``
    returns the first n of the ``samples`` in the layout that the model takes; there are none if they cannot be
    separated. ``outputs`` are the shapes of the outputs of one sample.
    """
    last = tracks[-1]
    every_step = any(len(shape) >= 3 and last.steps in shape[:2] for shape in outputs) and last.steps > 1
    of = "output" if every_step else f"{last.layer}.{next(iter(last.states), 'hidden')}"
    width = outputs[0][-1] if every_step else last.units
    rows = min(width, _PROBES)
    below = [1, *(track.units for track in tracks)]
    step_cost = sum(8 * track.units * (track.units + width) for track, width in zip(tracks, below, strict=False))
    per_row = 0.5 * last.steps * rows * step_cost
    count = int(np.clip(_OPERATIONS / (per_row * min(last.steps, _ROWS)), 1, max(len(samples), 1)))
    kept = int(np.clip(_OPERATIONS / (per_row * count), 8, min(last.steps, _ROWS)))
    steps = np.unique(np.linspace(0, last.steps - 1, kept).round().astype(int))
    asked: dict[str, Any] = {"measure": "norm", "across": "mean", "axes": request.axes, "seed": request.seed}
    if len(steps) < last.steps:
        asked["at"] = {OUT_TIME: steps.tolist()}
    if width > _PROBES:
        asked["sketch"] = _PROBES
    x = take(count)
    with options(certify="first"):
        try:
            found, wrt = jacobian(model, x, of=of, wrt="input", **asked), "input"
        except InputError:  # integer input: differentiate by the input of the first layer
            wrt = f"{tracks[0].layer}.input"
            found = jacobian(model, x, of=of, wrt=wrt, **asked)
    shown = {key: value for key, value in asked.items() if value is not None and key not in ("seed", "at")}
    thinned = ", at={...}" if "at" in asked else ""
    arguments = "".join(f", {key}={value!r}" for key, value in shown.items())
    given = f"x[{list(samples[:count])}]" if samples else "x"
    code = f'rl.jacobian(model, {given}, of="{of}", wrt="{wrt}"{arguments}{thinned})'
    return _labelled(found, code, count, asked.get("sketch", 0), [track.direction for track in tracks])


def of_array(found: xr.DataArray) -> TimeMap:
    """Convert a finished time Jacobian to a map of the report; raise InputError without an axis of input steps."""
    if IN_TIME not in found.dims:
        got = f"dimensions ({', '.join(map(str, found.dims))})"
        raise InputError("jacobian= is no time Jacobian.", got=got, expected="what rl.jacobian returned")
    return _labelled(found, "", int(found.sizes.get(SAMPLE, 0)), 0, [])


def _labelled(found: xr.DataArray, code: str, samples: int, probes: int, directions: Sequence[str]) -> TimeMap:
    values: xr.DataArray = found
    rest = [dim for dim in values.dims if dim not in (SAMPLE, OUT_TIME, IN_TIME)]
    if rest:  # norm over units and both directions
        values = (abs(values) ** 2).sum(rest) ** 0.5
    if SAMPLE in values.dims:
        values = values.mean(SAMPLE)
    if OUT_TIME not in values.dims:
        values = values.expand_dims({OUT_TIME: [int(values[IN_TIME][-1])]})
    norms = np.asarray(to_host(values.transpose(OUT_TIME, IN_TIME).values), dtype=np.float64)
    words = str(found.attrs.get("long_name", "time Jacobian"))
    if samples:
        words += f", mean over {samples} {'sample' if samples == 1 else 'samples'}"
    if probes:
        words += f", estimated from {probes} random probes"
    causal = DIRECTION not in found.dims and not any(d for d in directions)
    later = values[IN_TIME].values[None, :] > values[OUT_TIME].values[:, None]
    causal = causal and not np.nan_to_num(norms)[later].any()
    return TimeMap(norms, values[OUT_TIME].values, values[IN_TIME].values, words, code, causal, samples)
