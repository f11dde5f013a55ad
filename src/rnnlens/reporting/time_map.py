"""The time Jacobian of a report, on fewer steps so that it takes about ten seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ..errors import InputError
from ..results.schema import to_host
from ..settings import options
from ..typing import Array
from ..verbs.jacobian import jacobian
from ..vocabulary import DIRECTION, IN_TIME, OUT_TIME, SAMPLE
from .samples import ReportRequest
from .tracks import Track

#: Largest number of FLOPs: about ten seconds of one core.
_OPERATIONS = 3e11
#: Largest number of output units; random probes replace more.
_PROBES = 16
#: Largest number of output steps: more rows would not be visible.
_ROWS = 128


@dataclass(frozen=True)
class TimeMap:
    """Norms of the time Jacobian, averaged over samples.

    Attributes
    ----------
    norms : (output step, input step)
    out_times, in_times
        Steps of the rows and columns, chronological.
    words
        Text on the two ends and the reduction.
    code
        Call that returns the same.
    causal
        Whether no output depends on a later input, so that the upper triangle is zero by construction.
    estimated
        Number of random probes; 0 for an exact norm.
    samples
        Number of samples averaged.
    """

    norms: Array
    out_times: Array
    in_times: Array
    words: str
    code: str
    causal: bool = True
    estimated: int = 0
    samples: int = 0


def of_model(
    model: Any,
    take: Callable[[int], Any],
    samples: Sequence[int],
    tracks: Sequence[Track],
    outputs: Sequence[tuple[int, ...]],
    request: ReportRequest,
) -> TimeMap:
    """Compute the time Jacobian of outputs by inputs; with one output step, of the last layer's states by inputs.

    ``take(n)`` returns the first n of the ``samples`` in the layout that the model takes; there are none if they cannot
    be separated. ``outputs`` are the shapes of the outputs of one sample.
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
    """Convert a finished time Jacobian to a map of the report.

    Raise InputError if the array has no axis of input steps.
    """
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
    return TimeMap(norms, values[OUT_TIME].values, values[IN_TIME].values, words, code, causal, probes, samples)
