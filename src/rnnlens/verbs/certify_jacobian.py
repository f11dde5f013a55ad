"""Holds a time Jacobian against one vector-Jacobian product of the plain run: u^T J, for random signs u."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Adapter, Batch
from ..results.certificate import Certificate
from ..typing import Array
from ..vocabulary import FEATURE, IN_FEATURE, IN_TIME, OUT_TIME, OUT_UNIT, SAMPLE, TIME, UNIT
from .axes import Axes
from .certify import Bench, attempt, outputs_of, unsteady
from .jacobian_label import Labels
from .outside import Outside

JACOBIAN = "plain jacobian"


def certify_jacobian(
    adapter: Adapter,
    model: Any,
    batch: Batch,
    jacobian: xr.DataArray,
    labels: Labels,
    axes: Axes,
    samples: int,
    dtype: str,
) -> Certificate:
    """Compare what is linear in the Jacobian, from the model's input to its output; say why anything else is not.

    ``dtype`` is the coarsest that the model computes in.
    """
    engine = labels.provenance.get("engine", adapter.name).partition(" ")[0]
    of, wrt = labels.names
    why = _why_not(labels, jacobian)
    if any(data.is_packed(leaf) for leaf in data.leaves_of(batch.x)):
        why = "a packed input has its steps in another order than the result"
    if why:
        return Certificate("could not", engine, why=why)
    outside, found = Outside(axes, samples), {}

    def cotangents(outputs: Sequence[Array]) -> Sequence[Array | None]:
        whole, dims = outside.opened(of.port(), outputs[of.index])
        opened = xr.DataArray(np.zeros_like(whole), dims=dims)
        if not {str(d) for d in dims} <= {SAMPLE, TIME, UNIT}:
            raise ValueError(f"an output with axes {', '.join(dims)} is not compared")
        found["signs"] = _signs(labels, samples, opened.dtype)
        seed = _on_units(found["signs"], labels)
        times = {} if labels.ends.out_times is None else {TIME: np.asarray(labels.ends.out_times)}
        _add_at(opened, seed, times)
        given: list[Array | None] = [None] * len(outputs)
        given[of.index] = opened.values.reshape(outputs[of.index].shape)
        return given

    run, why = attempt(lambda: adapter.plain(model, batch, cotangents))
    if run is None:
        return Certificate("could not", engine, why=why)
    arrived = run.input_grads[wrt.index]
    arrived = np.zeros_like(_leaf(batch.x, wrt.index)) if arrived is None else arrived
    whole, dims = outside.opened(wrt.port(), arrived)
    if not set(dims) <= {SAMPLE, TIME, FEATURE}:
        return Certificate("could not", engine, why=f"an input with axes {', '.join(dims)} is not compared")
    theirs = _asked(xr.DataArray(whole, dims=dims), labels)
    mine = _contracted(jacobian, found["signs"])
    bare = jacobian.drop_vars(list(jacobian.coords))
    squares = xr.dot(bare, bare, dim=[d for d in (OUT_TIME, OUT_UNIT) if d in jacobian.dims])
    spread = float(np.sqrt(squares.max()))
    bench = Bench(max(int(size) for size in (64, *jacobian.shape)), dtype)
    bench.compare(JACOBIAN, "", [(mine, theirs.transpose(*mine.dims))], scale=spread)
    certificate = Certificate.of(engine, bench.checks, certified=("random combinations of its rows",))
    reason = unsteady(adapter, model, batch, run) if certificate.state == "failed" else ""
    return Certificate("could not", engine, why=reason) if reason else certificate


def _why_not(labels: Labels, jacobian: Any) -> str:
    """Why a Jacobian has nothing that a plain run gives; "" where it has."""
    for name, what in zip(labels.names, ("output", "input"), strict=True):
        if name.layer is not None or name.what != what:
            return f"{name.text} lies inside the model, where a plain run cannot be looked at"
    if labels.kind not in (None, "sum", "mean"):
        return f"reduce={labels.kind!r} is not linear: a single product of the plain run does not give it"
    if "pruning_error" in jacobian.attrs:
        return "rtol= left out rows on purpose"
    if jacobian.dtype.kind != "f":
        return "it is not made of real numbers"
    return ""


def _signs(labels: Labels, samples: int, dtype: Any) -> xr.DataArray:
    """One random sign for every row of the Jacobian, the same for all samples where it is averaged over them."""
    ends = labels.ends
    sizes = {SAMPLE: 1 if ends.average else samples}
    sizes |= {} if ends.out_times is None else {OUT_TIME: ends.groups}
    sizes |= {OUT_UNIT: ends.rows}
    signs = 2.0 * np.random.default_rng(0).integers(0, 2, size=tuple(sizes.values())) - 1.0
    if ends.average:
        signs, sizes = np.repeat(signs, samples, axis=0), {**sizes, SAMPLE: samples}
    return xr.DataArray(signs.astype(dtype), dims=tuple(sizes))


def _on_units(signs: xr.DataArray, labels: Labels) -> xr.DataArray:
    """Cotangents of the output's units from those of the rows, which may be combinations of units."""
    weights = labels.ends.weights
    renamed = signs.rename({OUT_UNIT: UNIT, **({OUT_TIME: TIME} if OUT_TIME in signs.dims else {})})
    if weights is None:
        return renamed
    rows = xr.DataArray(np.asarray(weights)[0, 0].astype(signs.dtype), dims=("row", UNIT))
    units: xr.DataArray = xr.dot(renamed.rename({UNIT: "row"}), rows, dim="row")
    return units


def _add_at(opened: xr.DataArray, seed: xr.DataArray, times: dict[str, Array]) -> None:
    """Put cotangents at the steps asked for; a step may have been asked for twice."""
    moved = opened.transpose(*[d for d in (TIME, SAMPLE, UNIT) if d in opened.dims])
    lacking = [d for d in seed.dims if d not in moved.dims]
    placed = seed.isel(dict.fromkeys(lacking, 0)).transpose(*moved.dims).values
    values = np.zeros(moved.shape, dtype=moved.dtype)
    if times:
        np.add.at(values, times[TIME], placed)
    else:
        values += placed
    opened.values = xr.DataArray(values, dims=moved.dims).transpose(*opened.dims).values


def _asked(arrived: xr.DataArray, labels: Labels) -> xr.DataArray:
    """What of the gradient at the input the Jacobian shows, and as it shows it."""
    ends = labels.ends
    arrived = arrived if SAMPLE in arrived.dims else arrived.expand_dims(SAMPLE)
    if ends.in_times is not None:
        arrived = arrived.isel({TIME: np.asarray(ends.in_times)}).rename({TIME: IN_TIME})
    if labels.kind is not None:
        arrived = arrived.sum(FEATURE) if labels.kind == "sum" else arrived.mean(FEATURE)
    else:
        arrived = arrived.rename({FEATURE: IN_FEATURE})
    return arrived.mean(SAMPLE) if ends.average else arrived


def _contracted(jacobian: xr.DataArray, signs: xr.DataArray) -> xr.DataArray:
    """u^T J by the names of the axes."""
    plain = jacobian.drop_vars(list(jacobian.coords))
    if SAMPLE not in plain.dims:
        signs = signs.isel({SAMPLE: 0})
    if OUT_UNIT not in plain.dims:
        signs = signs.isel({OUT_UNIT: 0})
    combined: xr.DataArray = xr.dot(plain, signs, dim=[d for d in (OUT_TIME, OUT_UNIT) if d in plain.dims])
    return combined


def _leaf(x: Any, index: int) -> Array:
    return np.asarray(outputs_of(x)[index])
