"""Converts measures to labelled variables: one Dataset for the model, and one for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from ..measures.residual import Missed
from ..typing import Array
from .carried import Carried
from .layers import Attribution, LayerFacts
from .memory import Interval, Memory

BOUNDS = ["low", "high"]


def model_dataset(
    memory: Memory, missed: Missed | None, attributed: Attribution | None, before: Memory | None, samples: Array
) -> xr.Dataset:
    """Label the measures of the model: curves over ``context``, lengths with intervals, skill, residual test by lag.

    ``samples`` are the labels of the samples in the user's data.
    """
    variables = {
        "use": _v(("context",), memory.use, "use of older inputs", "share of variance", "U(k), total Sobol index"),
        "use_interval": _v(("context", "bound"), memory.use_band, "95 % interval of use", "share of variance"),
        "benefit": _v(("context",), memory.benefit, "benefit of older inputs", "share of the score", "B(k)"),
        "benefit_interval": _v(("context", "bound"), memory.benefit_band, "95 % interval of benefit", "share"),
        "steps": _v((), memory.steps, "steps that the output can have seen", "step"),
        **_interval("memory", memory.length, "memory in use, n at 5 %"),
        **_interval("memory_1_percent", memory.rare, "memory in use, n at 1 %"),
        **_interval("memory_needed", memory.needed, "memory by benefit, n at 5 %"),
    }
    if memory.change.size:
        variables["change"] = _v(("context", "sample"), memory.change, "squared change of the prediction", "1")
    if memory.skill is not None:
        variables |= _interval("skill", memory.skill.raw, "skill: 1 - loss / best constant loss", "1")
        variables |= _interval("skill_recalibrated", memory.skill.recalibrated, "skill, recalibrated", "1")
    if memory.later[1]:
        variables["later_steps_used"] = _v((), memory.later[0], "steps after the output's own step in use", "step")
    if missed is not None:
        variables["missed"] = _v(
            ("lag",), missed.by_step[::-1], "association of the errors with the input", "share of Var y"
        )
        variables["missed_threshold"] = _v((), missed.threshold, "99 % of permuted maxima", "share of Var y")
        variables["missed_learned"] = _v((), missed.learned, "share of the association that the prediction has", "1")
        variables["missed_effect"] = _v((), missed.effect, "share of Var y that ridge explains in the errors", "1")
    if attributed is not None:
        variables["attributed_memory"] = _v((), attributed.memory, "steps that hold 95 % of the attribution", "step")
    if before is not None:
        variables |= _interval("memory_before", before.length, "memory in use before training, n at 5 %")
        variables["use_before"] = _v(("context_before",), before.use, "use of older inputs before training", "share")
    dataset = xr.Dataset(variables, attrs={"known": memory.known, "why": memory.why, "censored": memory.censored})
    coords = {"context": memory.context, "bound": BOUNDS}
    if memory.change.size:
        coords["sample"] = samples
    if before is not None:
        coords["context_before"] = before.context
    return dataset.assign_coords(coords)


def layer_dataset(parts: Sequence[LayerFacts], carried: Carried | None = None) -> xr.Dataset:
    """Label the measures of a layer, by direction: state transfer, adjoint, leading exponent, gates, units."""
    datasets = _as_long([_one(part) for part in parts])
    whole = datasets[0] if len(parts) == 1 else xr.concat(datasets, dim="direction", combine_attrs="override")
    if carried is not None:
        words = f"use of the layer's state by {'the prediction' if carried.of == 'prediction' else 'its last state'}"
        whole["carried"] = _v(("context",), carried.use, words, "share of variance", "U(k), its state exchanged")
        whole["carried_memory"] = _v((), carried.length, "memory carried by the layer, n at 5 %", "step")
        whole = whole.assign_coords(context=carried.context)
    return whole.assign_attrs(cell=parts[0].cell)


def _as_long(datasets: Sequence[xr.Dataset]) -> list[xr.Dataset]:
    """Pad the profiles of all directions with NaN to the longest."""
    found = list(datasets)
    for dim in ("lag", "lag_out"):
        longest = max(d.sizes.get(dim, 0) for d in found)
        found = [d.pad({dim: (0, longest - d.sizes[dim])}) if d.sizes.get(dim, longest) < longest else d for d in found]
    return found


def _one(part: LayerFacts) -> xr.Dataset:
    rate, error = part.transfer.leading_exponent()
    low, high = part.transfer.quartiles()
    variables = {
        "kappa": _v(
            ("lag",), part.transfer.kappa, "state transfer", "1", "share of a cotangent on the final state left"
        ),
        "kappa_low": _v(("lag",), low, "state transfer, lower quartile", "1"),
        "kappa_high": _v(("lag",), high, "state transfer, upper quartile", "1"),
        "lambda_1": _v((), rate, "leading exponent", "1 / step"),
        "lambda_1_stderr": _v((), error, "standard error of the leading exponent", "1 / step"),
        "growth": _v((), part.growth, "growth of the output's adjoint", "decades"),
        "decay": _v((), part.decay, "Theil-Sen slope of the adjoint", "1 / step"),
        "nan": _v((), part.states.nan / part.states.count, "share of the states that is NaN", "1"),
        "infinite": _v((), part.states.infinite / part.states.count, "share of the states that is infinite", "1"),
        "subnormal": _v((), part.states.underflow / part.states.count, "share of the states that is subnormal", "1"),
        **part.scan,
    }
    if part.dead.size:
        variables["dead"] = _v(("unit",), part.dead, "dead units", "1")
    if part.adjoint_norms is not None:
        variables["adjoint_size"] = _v((), part.adjoint_size, "largest norm of the adjoint of a sample, median", "1")
    if part.adjoint is not None:
        variables["adjoint"] = _v(("lag_out",), part.adjoint.median, "adjoint of the output by own peak, median", "1")
        variables["adjoint_low"] = _v(("lag_out",), part.adjoint.low, "lower quartile", "1")
        variables["adjoint_high"] = _v(("lag_out",), part.adjoint.high, "upper quartile", "1")
    if part.timescale is not None:
        variables["timescale"] = _v(("cell_unit",), part.timescale, "gate time constant", "step")
    if part.shut is not None and part.open is not None:
        variables["stuck_shut"] = _v(("gate", "cell_unit"), part.shut, "gates nearly always shut", "1")
        variables["stuck_open"] = _v(("gate", "cell_unit"), part.open, "gates nearly always open", "1")
    return xr.Dataset(variables)


def _v(dims: tuple[str, ...], values: object, long_name: str, units: str, definition: str = "") -> xr.Variable:
    attrs = {"long_name": long_name, "units": units}
    return xr.Variable(dims, np.asarray(values), {**attrs, "definition": definition} if definition else attrs)


def _interval(name: str, found: Interval, long_name: str, units: str = "step") -> dict[str, xr.Variable]:
    return {
        name: _v((), found.value, long_name, units),
        f"{name}_interval": _v(("bound",), _bounds(found), f"95 % interval of {long_name}", units),
    }


def _bounds(found: Interval) -> Array:
    return np.array([found.low, found.high])
