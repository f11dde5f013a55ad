"""One gradient of one direction over time: its shape (each sample by its own peak), its size, reach and decay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xarray as xr

from ..measures.lags import gradient_decay, gradient_reach
from ..measures.samples import peak_band, quartiles, sample_peaks
from ..recurrence.measures import real_first, safe_norm
from ..results.schema import with_mask
from ..vocabulary import BACKWARD, SAMPLE, TIME
from ._data import DirectionView, Numbers, halves, labelled, positions, require_dim, unit_dim, value_label
from ._padding import hidden, notes_of

#: What is drawn of each layer, where it is there: words, colour, line style.
LINES = {
    "hidden_grad": ("$dL/dh_t$, total", "#0072b2", "-"),
    "cell_grad": ("$dL/dc_t$, total", "#009e73", "-"),
    "output_grad": ("$\\partial{}L/\\partial{}y_t$, direct", "#d55e00", "--"),
}


@dataclass(frozen=True)
class Fading:
    """What is drawn of one gradient.

    Attributes
    ----------
    steps, median, low, high
        The shape: median and quartiles over samples of the norm, each sample by its own peak.
    size
        Lower quartile, median, upper quartile of the peaks.
    reach
        Steps back from the last that hold 95 % of the squared gradient; 0 without time.
    decay
        Factor per step back; NaN where there is none.
    zeros
        Steps at which the gradient is 0 in every sample.
    bad, padded
        Steps with a value that is not finite; steps that are padding in every sample.
    """

    gid: str
    words: str
    steps: Numbers
    median: Numbers
    low: Numbers
    high: Numbers
    size: tuple[float, float, float]
    reach: int
    decay: float
    zeros: int
    bad: Numbers
    padded: Numbers
    runs_back: bool
    time_label: str
    notes: tuple[str, ...] = ()
    colour: Any = "#0072b2"
    style: str = "-"
    _peak: int = field(default=0)

    def look(self, colour: Any, style: str) -> Fading:
        """The same in a colour and line style."""
        return replace(self, colour=colour, style=style)

    @property
    def sentence(self) -> str:
        """What stands at the end of the line."""
        count = len(self.steps) - len(self.padded)
        if self.zeros and count > 1:
            where = "0 at all steps" if self.zeros >= count else f"0 at {self.zeros} of {count} steps"
            return f"{self.words}\n{where}"
        if not self.reach:
            return self.words
        if not math.isfinite(self.decay):  # it is largest at the far end
            return f"{self.words}\nreach {self.reach}\nno decay"
        return f"{self.words}\nreach {self.reach}\nx {self.decay:.3g} a step"

    def span(self) -> tuple[float, float]:
        """First and last step of the reach."""
        ordered = self.steps if self.runs_back else self.steps[::-1]
        return float(ordered[0]), float(ordered[min(self.reach, len(ordered)) - 1])

    def falling(self) -> Numbers:
        """A line that falls from the median's peak by the decay per step; NaN before it."""
        lag = np.abs(self.steps - self.steps[self._peak])
        beyond = self.steps >= self.steps[self._peak] if self.runs_back else self.steps <= self.steps[self._peak]
        line: Numbers = np.where(beyond, self.median[self._peak] * self.decay**lag, np.nan)
        return line


def fading_of(
    dataset: xr.Dataset, quantity: str, words: str, *, as_computed: bool
) -> Iterator[tuple[str | None, Fading]]:
    """The directions of one gradient of a layer, with their names; none where it is not there."""
    if quantity not in dataset:
        return
    array = labelled(with_mask(dataset[quantity], dataset), "gradient_flow")
    require_dim(array, unit_dim(array) or "unit", "gradient_flow")
    missing, *padding = notes_of(array)
    layer = str(dataset.attrs.get("layer", ""))
    named = ", ".join(part for part in (layer, value_label(array).split(" [")[0]) if part)
    notes = (*(note for note in padding if note), *([f"{named}: {missing}"] if missing else []))
    for half in halves(array, as_computed=as_computed):
        found = _fading(quantity, half, dataset, as_computed=as_computed)
        yield half.name, replace(found, words=words, notes=notes)


def _fading(quantity: str, half: DirectionView, dataset: xr.Dataset, *, as_computed: bool) -> Fading:
    backward = BACKWARD in (half.name, dataset.attrs.get("direction"))
    flipped = as_computed and half.name == BACKWARD
    values = half.data
    norms = np.asarray(safe_norm(values.values, axis=values.get_axis_num(unit_dim(values)), xp=np), dtype=np.float64)
    norms = norms.reshape(-1, *norms.shape[1 if SAMPLE in values.dims else 0 :])
    norms = norms if TIME in values.dims else norms[:, None]
    padded = hidden(values)
    real = np.ones(norms.shape, dtype=bool) if padded is None else ~padded.transpose(SAMPLE, TIME).values
    count = dataset.sizes.get(TIME, 1)
    last = 0 if backward and not flipped else count - 1
    steps = positions(values, TIME) if TIME in values.dims else np.array([last])
    runs_back = backward and not flipped
    against = slice(None) if runs_back else slice(None, None, -1)
    by_lag = real_first(norms[:, against], real[:, against], xp=np)
    shape = peak_band(norms, real)
    nowhere = ~real.any(axis=0)
    bad = ~np.isfinite(values.values).all(axis=tuple(i for i, d in enumerate(values.dims) if d != TIME))
    bad = np.atleast_1d(bad) & ~nowhere
    median = np.where(bad, np.nan, shape.median)
    recurrent = TIME in values.dims and quantity != "output_grad"  # what comes from above has no decay of its own
    return Fading(
        gid=quantity,
        words=quantity,
        steps=steps,
        median=median,
        low=np.where(bad, np.nan, shape.low),
        high=np.where(bad, np.nan, shape.high),
        size=quartiles(sample_peaks(np.where(real, norms, 0.0))),
        reach=gradient_reach(by_lag) if recurrent else 0,
        decay=gradient_decay(by_lag) if recurrent else math.nan,
        zeros=int(((norms == 0) | ~real).all(axis=0).sum() - nowhere.sum()),
        bad=steps[bad],
        padded=steps[nowhere],
        runs_back=runs_back,
        time_label=half.time_label,
        _peak=int(np.argmax(np.where(np.isfinite(median), median, -1.0))),
    )
