"""From a batch that was heard to a record."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from ...errors import UnsupportedError
from ...results.trace import Trace
from ...vocabulary import DIRECTION, SAMPLE, TIME, UNIT
from ..records import TrainingRecord, summary
from .heard_batch import HeardBatch
from .plan import Plan

_WORDS = {
    "long_name": "direct gradient of the layer's output by step",
    "units": "loss",
    "definition": "RMS over units and samples of the gradient of the loss by y_t",
}


def record_of(batch: HeardBatch, plan: Plan) -> TrainingRecord:
    """What the batch computed by itself, and the replay where more is asked for."""
    scalars, layers = direct_profiles(batch.direct)
    notes = list(batch.notes)
    if plan.only_direct:
        for name in layers:
            layers[name] |= {key: batch.direct.dataset(name)[key] for key in plan.keep}
    else:
        try:
            replayed = batch.traced(layers=plan.layers, quantities=plan.recorded)
        except UnsupportedError as error:  # what the step computed by itself is recorded all the same
            notes.append(" ".join(str(error).split()))
        else:
            more, profiles = summary(replayed, keep=tuple(plan.keep))
            scalars |= {**more, **batch.weight_norms()}
            layers = {name: {**layers.get(name, {}), **found} for name, found in profiles.items()}
    if batch.loss is not None:
        scalars = {"loss": batch.loss, **scalars}
    scalars |= {**batch.norms(), "backward_passes": float(batch.passes)}
    return TrainingRecord(batch.step, batch.epoch, "batch", scalars, layers, tuple(notes))


def direct_profiles(found: Trace) -> tuple[dict[str, float], dict[str, dict[str, xr.DataArray]]]:
    """``lstm/direct``, the RMS of all direct gradients of a layer, and ``direct_profile``, that of every step."""
    scalars: dict[str, float] = {}
    layers: dict[str, dict[str, xr.DataArray]] = {}
    for name in found:
        layers[name] = {}
        grad: Any = found.dataset(name).get("output_grad")
        if grad is None:
            continue
        wide = grad.astype(np.float64)  # squares of float32 vanish below 1e-22
        square: Any = (wide * wide).mean([dim for dim in (SAMPLE, UNIT) if dim in grad.dims])
        sides = [None] if DIRECTION not in square.dims else [str(side) for side in square[DIRECTION].values]
        for side in sides:
            half = square if side is None else square.sel({DIRECTION: side})
            prefix = name if side is None else f"{name}/{side}"
            scalars[f"{prefix}/direct"] = float(np.sqrt(half.mean()))
        if TIME in grad.dims:
            layers[name]["direct_profile"] = np.sqrt(square).assign_attrs(_WORDS)
    return scalars, layers
