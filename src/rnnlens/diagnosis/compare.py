"""``rl.compare``: tabulate diagnoses of checkpoints, seeds or architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from ..errors import InputError, message, shown
from ..measures.intervention import USED, memory_length
from ..measures.resampling import interval, resampling_weights
from ..results.comparison import Comparison
from ..results.diagnosis import Diagnosis
from ..typing import Array

_NONE = (float("nan"), None)
_SHARED = ("skill", "memory", "memory_1_percent", "memory_needed")


def compare(diagnoses: Mapping[str, Diagnosis]) -> Comparison:
    """Tabulate several diagnoses, with differences from the first.

    Parameters
    ----------
    diagnoses
        Diagnoses by name, of checkpoints, seeds or architectures, on the same samples in the same order.

    Returns
    -------
    Comparison
        ``print(c)`` shows a table; ``c.table`` is a Dataset over ``name``. The difference of the memory from that of
        the first diagnosis has a paired interval, from the same resamples of both. It is NaN if the numbers of samples
        differ.

    Raises
    ------
    InputError
        If there is no diagnosis, or another object among them.

    References
    ----------
    Efron 1979, "Bootstrap methods: another look at the jackknife", Annals of Statistics 7(1).
    """
    if not isinstance(diagnoses, Mapping) or not diagnoses:
        raise InputError(
            message("Nothing to compare.", got=shown(diagnoses), hint='rl.compare({"lstm": d1, "gru": d2})')
        )
    wrong = [name for name, d in diagnoses.items() if not isinstance(d, Diagnosis)]
    if wrong:
        got = ", ".join(f"{name}: {type(diagnoses[name]).__name__}" for name in wrong)
        raise InputError(message("These are no diagnoses.", got=got, expected="what rl.diagnose returns"))
    models = [d["model"] for d in diagnoses.values()]
    variables: dict[str, Any] = {}
    for key in _SHARED:
        filled = [_one(model, key) for model in models]
        variables[key] = ("name", np.array([value for value, _ in filled]))
        variables[f"{key}_interval"] = (("name", "bound"), np.stack([bounds for _, bounds in filled]))
    first = _lengths(models[0])
    samples = [model.sizes.get("sample", 0) for model in models]
    shared = [_lengths(m) if count == samples[0] else _NONE for m, count in zip(models, samples, strict=True)]
    differences = [_difference(first, lengths) for lengths in shared]
    variables["difference"] = ("name", np.array([v for v, _ in differences]))
    variables["difference_interval"] = (("name", "bound"), np.array([b for _, b in differences]))
    variables["findings"] = ("name", np.array([" ".join(d.codes) for d in diagnoses.values()]))
    variables["known"] = ("name", np.array([bool(model.attrs["known"]) for model in models]))
    table = xr.Dataset(variables, coords={"name": list(diagnoses), "bound": ["low", "high"]})
    return Comparison({"comparison": table}, provenance=next(iter(diagnoses.values())).provenance)


def _one(model: xr.Dataset, key: str) -> tuple[float, Array]:
    if key not in model or (key != "skill" and not bool(model.attrs["known"])):
        return float("nan"), np.full(2, np.nan)
    return float(model[key]), np.asarray(model[f"{key}_interval"], dtype=np.float64)


def _lengths(model: xr.Dataset) -> tuple[float, Array | None]:
    """Return n, and n in each resample; models with equal numbers of samples are resampled with the same weights."""
    if "change" not in model or not bool(model.attrs["known"]):
        return float("nan"), None
    change, context = model["change"].values, model["context"].values
    use, steps = model["use"].values, int(model["steps"])
    weights = resampling_weights(change.shape[1])
    # Use is the mean change divided by twice the variance, so this is twice the variance.
    scale = float(change.mean(axis=1)[0] / use[0]) if use[0] else float("nan")
    curves = change @ weights.T / scale
    return float(model["memory"]), np.array(
        [memory_length(dict(zip(context, curve, strict=True)), steps, USED) for curve in curves.T], dtype=float
    )


def _difference(
    first: tuple[float, Array | None], other: tuple[float, Array | None]
) -> tuple[float, tuple[float, float]]:
    if first[1] is None or other[1] is None or first[1].shape != other[1].shape:
        return float("nan"), (float("nan"), float("nan"))
    return other[0] - first[0], interval(other[1] - first[1])
