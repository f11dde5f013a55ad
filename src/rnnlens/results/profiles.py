"""One curve per layer that summarises a result, for its table, its notebook page and its JSON."""

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

#: Name of the dimension of a training's records.
STEP = "step"
#: Number of decades below the peak that a logarithmic curve shows.
DECADES = 6
#: Largest number of samples, evenly chosen, in the median of a curve.
_SAMPLES = 64


@dataclass(frozen=True)
class Profile:
    """Curve over steps.

    Attributes
    ----------
    label
        Name of the curve, such as ``"|dL/dh_t|"``.
    over
        Name of the horizontal axis: ``"time step"``, ``"lag"``, ``"training step"``.
    peak
        Largest value before the curve was divided by it.
    log
        Whether the curve is drawn on a logarithmic scale.
    """

    label: str
    over: str
    values: Array
    peak: float
    log: bool = True

    def blocks(self, width: int = 32) -> str:
        """Draw the curve as a line of block characters."""
        return sparkline.blocks(self.values, width, decades=DECADES if self.log else None)

    def svg(self) -> str:
        """Draw the curve as inline SVG."""
        scale = f", {DECADES} decades" if self.log else ""
        return sparkline.svg(
            self.values, f"{self.label} over {self.over}{scale}", decades=DECADES if self.log else None
        )

    def to_json(self) -> dict[str, Any]:
        """Return the curve as plain numbers, with None for values that are not finite."""
        rounded = [float(f"{v:.6g}") if np.isfinite(v) else None for v in self.values]
        return {"label": self.label, "over": self.over, "peak": _finite(self.peak), "values": rounded}


def of_dataset(dataset: xr.Dataset) -> dict[str, Profile]:
    """Return the curve of a layer by direction: its gradient over time, else its states, else its curve by lag."""
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
    """Return the curves of a training: the gradient over time in the last record, and the reach in every record."""
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
    """Return the curve of an array.

    For a time Jacobian it is the last output step by input step, else the norm over time.
    """
    if IN_TIME in array.dims:
        last = array.isel({OUT_TIME: -1}) if OUT_TIME in array.dims else array
        return {"": _profile(last, "last output step by input step", IN_TIME)}
    if array.dims == (STEP,):
        return {"": _over_training(array, str(array.name))}
    if TIME in array.dims and array.dtype.kind == "f":
        return _each_direction(array, f"|{array.name}|" if array.name else "norm")
    return {}


def of(part: xr.Dataset | xr.DataArray | None) -> dict[str, Profile]:
    """Return the curve of a layer's Dataset or of an array; empty for None."""
    if part is None:
        return {}
    return of_dataset(part) if isinstance(part, xr.Dataset) else of_array(part)


def _each_direction(array: xr.DataArray, label: str, dim: str = TIME) -> dict[str, Profile]:
    if DIRECTION not in array.dims:
        return {"": _profile(array, label, dim)}
    names = [str(d) for d in array[DIRECTION].values] if DIRECTION in array.coords else ["forward", "backward"]
    return {name: _profile(array.isel({DIRECTION: i}), label, dim) for i, name in enumerate(names)}


def _profile(array: xr.DataArray, label: str, dim: str) -> Profile:
    """Compute norms over all axes but sample and ``dim``, divide each sample by its peak, and take the median."""
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
