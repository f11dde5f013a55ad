"""One curve per layer that sums up what a result holds: what its table, its page in a notebook and its JSON show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ..measures.profiles import own_peak
from ..recurrence.measures import safe_norm
from ..typing import Array
from ..vocabulary import DIRECTION, IN_TIME, OUT_TIME, SAMPLE, TIME
from . import sparkline

#: The dimension of records of a training.
STEP = "step"
#: Gradients are shown over so many decades below their peak.
DECADES = 6
#: A curve is the median over at most so many samples, evenly chosen.
_SAMPLES = 64


@dataclass(frozen=True)
class Profile:
    """A curve over steps.

    Attributes
    ----------
    label
        What it is, such as ``"|dL/dh_t|"``.
    over
        What it goes over: ``"time step"``, ``"lag"``, ``"training step"``.
    peak
        Its size: the largest value before it was made relative to it.
    log
        Whether it is a size, to be looked at in decades.
    """

    label: str
    over: str
    values: Array
    peak: float
    log: bool = True

    def blocks(self, width: int = 32) -> str:
        """It as blocks."""
        return sparkline.blocks(self.values, width, decades=DECADES if self.log else None)

    def svg(self) -> str:
        """It as inline SVG."""
        scale = f", {DECADES} decades" if self.log else ""
        return sparkline.svg(
            self.values, f"{self.label} over {self.over}{scale}", decades=DECADES if self.log else None
        )

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; null for what is not finite."""
        rounded = [float(f"{v:.6g}") if np.isfinite(v) else None for v in self.values]
        return {"label": self.label, "over": self.over, "peak": _finite(self.peak), "values": rounded}


def of_dataset(dataset: xr.Dataset) -> dict[str, Profile]:
    """The curve of a layer, one for each direction: its gradient over time, else its states, else what is by lag."""
    if STEP in dataset.dims:
        return _of_training(dataset)
    for name, label in (
        ("hidden_grad", "|dL/dh_t|"),
        ("output_grad", "|∂L/∂y_t|"),
        ("hidden", "|h_t|"),
        ("output", "|y_t|"),
    ):
        if name in dataset and TIME in dataset[name].dims:
            return _each_direction(dataset[name], label)
    if "kappa" in dataset:
        return _each_direction(dataset["kappa"], "state transfer", dim="lag")
    if "use" in dataset:
        values = np.asarray(dataset["use"].values, dtype=np.float64)
        return {"": Profile("use of what is older", "steps kept", values, _largest(values), log=False)}
    timed = (array for array in dataset.data_vars.values() if TIME in array.dims and array.dtype.kind == "f")
    first = next(timed, None)
    return {} if first is None else _each_direction(first, str(first.attrs.get("long_name", first.name)))


def _of_training(dataset: xr.Dataset) -> dict[str, Profile]:
    """Of the records of a training: the gradient over time at the last, and how far it reached at each."""
    found = {}
    if "adjoint_profile" in dataset and dataset.sizes[STEP]:
        last = dataset["adjoint_profile"].isel({STEP: -1})
        found = {f"last record{f', {way}' if way else ''}": p for way, p in _each_direction(last, "|dL/dh_t|").items()}
    if "reach" in dataset and dataset["reach"].dims == (STEP,):
        found["training"] = _over_training(dataset["reach"], "reach in steps")
    return found


def _over_training(array: xr.DataArray, label: str) -> Profile:
    values = np.asarray(array.values, dtype=np.float64)
    return Profile(label, "training step", values, _largest(values), log=False)


def of_array(array: xr.DataArray) -> dict[str, Profile]:
    """The curve of an array: of a time Jacobian how far its last output step looks back, else the norm over time."""
    if IN_TIME in array.dims:
        last = array.isel({OUT_TIME: -1}) if OUT_TIME in array.dims else array
        return {"": _profile(last, "last output step by input step", IN_TIME)}
    if array.dims == (STEP,):
        return {"": _over_training(array, str(array.name))}
    if TIME in array.dims and array.dtype.kind == "f":
        return _each_direction(array, f"|{array.name}|" if array.name else "norm")
    return {}


def of(part: xr.Dataset | xr.DataArray | None) -> dict[str, Profile]:
    """The curve of a layer, of an array, or of nothing."""
    if part is None:
        return {}
    return of_dataset(part) if isinstance(part, xr.Dataset) else of_array(part)


def _each_direction(array: xr.DataArray, label: str, dim: str = TIME) -> dict[str, Profile]:
    if DIRECTION not in array.dims:
        return {"": _profile(array, label, dim)}
    names = [str(d) for d in array[DIRECTION].values] if DIRECTION in array.coords else ["forward", "backward"]
    return {name: _profile(array.isel({DIRECTION: i}), label, dim) for i, name in enumerate(names)}


def _profile(array: xr.DataArray, label: str, dim: str) -> Profile:
    """Norm over everything but samples and steps; each sample by its own peak; their median."""
    if SAMPLE in array.dims and array.sizes[SAMPLE] > _SAMPLES:
        array = array.isel({SAMPLE: np.linspace(0, array.sizes[SAMPLE] - 1, _SAMPLES).astype(int)})
    rest = [str(d) for d in array.dims if d not in (SAMPLE, dim)]
    lead = [SAMPLE] if SAMPLE in array.dims else []
    values = np.asarray(array.transpose(*lead, dim, *rest).values, dtype=np.float64)
    shape = (*values.shape[: len(lead) + 1], -1)
    norms = safe_norm(values.reshape(shape), axis=-1) if rest else np.abs(values)
    norms = norms if lead else norms[None]
    peak = _largest(norms)
    relative = own_peak(norms)
    if not len(relative):
        return Profile(label, _words(dim), np.zeros(norms.shape[1]), peak)
    curve = np.full(relative.shape[1], np.nan)
    known = np.isfinite(relative).any(axis=0)
    curve[known] = np.nanmedian(relative[:, known], axis=0)
    broken = ~np.isfinite(norms).all(axis=0)
    return Profile(label, _words(dim), np.where(broken, np.nan, curve), peak)


def _words(dim: str) -> str:
    return {TIME: "time step", IN_TIME: "input step", "lag": "lag"}.get(dim, dim)


def _largest(values: Array) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else float("nan")


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
