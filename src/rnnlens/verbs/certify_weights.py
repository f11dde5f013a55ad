"""Holds the gradients of ``rl.weights``, as they are labelled, against those of the model run plainly."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr

from ..adapters.protocol import Adapter, Batch, Capture, LayerWeights
from ..results.certificate import Certificate
from ..typing import Array
from ..vocabulary import GATE, TIME
from .certify import LOSS, WEIGHTS, Comparisons
from .differentiation.certify import named_pairs
from .names import TensorName
from .reference_run import attempt, steadied
from .weight_gradients import FoundGradients


def certify_weights(
    adapter: Adapter,
    model: object,
    batch: Batch,
    found: Mapping[str, LayerWeights],
    datasets: Mapping[str, xr.Dataset],
    gradients: FoundGradients,
) -> Certificate:
    """Compare every gradient that has a number of its own; norms of single steps rest on their sum."""
    engine, capture, loss = adapter.engine, gradients.capture, gradients.loss
    run, why = attempt(lambda: adapter.reference_run(model, batch))
    if run is None:
        return Certificate("could not", engine, why=why)
    if capture is not None and capture.altered:
        return Certificate("could not", engine, why=capture.altered)
    comparisons = Comparisons(_steps(datasets, capture), _dtype(capture))
    comparisons.compare(LOSS, "", [(loss, run.loss)] if loss is not None else [])
    beside = {} if capture is None else {n: g for n, g in capture.beside.items() if n not in capture.whole}
    norms = []
    for layer, dataset in datasets.items():
        pairs = []
        for name, variable in dataset.data_vars.items():
            key = _key(str(name), found[layer])
            if key is None or key in found[layer].penalties:
                continue
            tensor = TensorName(f"{layer}/{key}", "weight", layer, key=key)
            mine, dims = _in_our_order(variable, found[layer])
            around = beside if found[layer].cells else {}
            pairs += list(named_pairs(adapter, model, run, tensor, mine, dims, around))
        comparisons.compare(WEIGHTS, layer, pairs, scale=gradients.scales.get(layer, 0.0))
        norms += [str(name) for name in dataset.data_vars if str(name).endswith("_grad_norm")]
    certified = ("loss", *(["gradients of weights"] if any(c.name == WEIGHTS for c in comparisons.checks) else []))
    open_ends = ("norms of single steps",) if norms else ()
    certificate = comparisons.certificate(engine, certified=certified, uncertified=open_ends)
    return steadied(certificate, adapter, model, batch, run) if certificate.state == "failed" else certificate


def _key(name: str, weights: LayerWeights) -> str | None:
    """The weight whose gradient a variable is; None for anything else."""
    if not name.endswith("_grad") or name == "bias_total_grad":
        return None
    stem = name.removesuffix("_grad")
    return stem if weights.cells else next((key for key in weights.values if key.replace("/", ".") == stem), None)


def _in_our_order(variable: xr.DataArray, weights: LayerWeights) -> tuple[Array, tuple[str, ...]]:
    """Values with gates in the order of the cell, by their labels."""
    if GATE in variable.dims and variable[GATE].dtype.kind in "UO":
        variable = variable.sel({GATE: list(next(iter(weights.cells.values())).gates)})
    return np.asarray(variable.values), tuple(map(str, variable.dims))


def _steps(datasets: Mapping[str, xr.Dataset], capture: Capture | None) -> int:
    lengths = [int(call.input.shape[1]) for call in (capture.calls if capture else [])]
    lengths += [int(dataset.sizes[TIME]) for dataset in datasets.values() if TIME in dataset.sizes]
    return max([*lengths, 64])


def _dtype(capture: Capture | None) -> str:
    return next((call.compute_dtype for call in (capture.calls if capture else []) if call.compute_dtype), "")
