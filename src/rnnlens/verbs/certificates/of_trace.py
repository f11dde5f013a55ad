"""Certificates of traces: weight gradients recomputed from labelled arrays, compared with the reference run."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from ...adapters.protocol import RecurrentCall
from ...recurrence.cells import affine
from ...results.schema import to_host
from ...typing import Array
from ...vocabulary import DIRECTION, FEATURE, GATE, SAMPLE, STATE, TIME

_NEEDED = {"input", "hidden", "gate_grad", "gates"}


def weight_sums(dataset: xr.Dataset, call: RecurrentCall, probes: int) -> dict[str, Array] | None:
    """Compute dL/dW of one direction of a layer by the names of ``Cell.weights``; None if data for it are missing."""
    cell = call.cell
    scaled = call.input_scale is not None or call.state_scale is not None
    if cell.by_framework or scaled or not set(dataset.data_vars) >= _NEEDED or dataset[GATE].dtype.kind not in "UO":
        return None
    dz, x = _of(dataset, "gate_grad", call), _of(dataset, "input", call)
    known = call.received is not None
    before = _of(dataset, "previous_hidden", call) if known else _before(_of(dataset, "hidden", call), call)
    terms = cell.recurrent_terms(dz, _of(dataset, "gates", call), before)
    if terms is None:
        return None
    recurrent_dz, operands = terms
    products = [_outer(_probed(operand, probes), recurrent_dz[:, :, gates]) for gates, operand in operands]
    sums = {
        "kernel": _outer(_probed(x, probes), dz),
        "bias": dz.sum(axis=(0, 1)).ravel(),
        "recurrent_kernel": np.concatenate(products, axis=1),
        "recurrent_bias": recurrent_dz.sum(axis=(0, 1)).ravel(),
    }
    return {name: sums[name] for name in cell.weights()}


def _of(dataset: xr.Dataset, name: str, call: RecurrentCall) -> Array:
    """Return one direction of a variable as (sample, time, ..., unit), with gates in the order of the cell."""
    variable = dataset.variables[name]
    if DIRECTION in variable.dims:
        variable = variable.isel({DIRECTION: _labels(dataset, DIRECTION).index(call.direction)})
    if GATE in variable.dims:
        labels = _labels(dataset, GATE)
        if labels != list(call.cell.gates):
            variable = variable.isel({GATE: [labels.index(gate) for gate in call.cell.gates]})
        return np.asarray(variable.transpose(SAMPLE, TIME, GATE, ...).values)
    return np.asarray(variable.transpose(SAMPLE, TIME, ...).values)


def _labels(dataset: xr.Dataset, dim: str) -> list[str]:
    """Return the labels of a dimension, by which values are selected; as variables, without the cost of an index."""
    return [str(label) for label in dataset.variables[dim].values]


def _before(hidden: Array, call: RecurrentCall) -> Array:
    """Return the hidden state before each step, (sample, time, unit), in the direction of the recurrence."""
    start = to_host(call.initial_state[0])[:, None].astype(hidden.dtype)
    if call.direction == "backward":
        return np.concatenate([hidden[:, 1:], start], axis=1)
    return np.concatenate([start, hidden[:, :-1]], axis=1)


def _probed(x: Array, probes: int) -> Array:
    signs = affine.probe_rows(x.shape[-1], x, affine.Contraction(probes=probes))
    return x @ signs.T


def _outer(x: Array, dz: Array) -> Array:
    rows = dz.shape[0] * dz.shape[1]
    return x.reshape(rows, -1).T @ dz.reshape(rows, -1)


def input_gradient(dataset: xr.Dataset) -> Array | None:
    """Return the gradient at a layer's input, (sample, time, feature); None if it is not in the dataset."""
    if "input_grad" not in dataset:
        return None
    return np.asarray(dataset["input_grad"].transpose(SAMPLE, TIME, ..., FEATURE).values)


def initial_state_gradients(dataset: xr.Dataset, call: RecurrentCall, names: Any) -> list[Array] | None:
    """Return the gradients at a layer's initial states, (sample, unit) each; None if one is missing."""
    found = []
    for name in names:
        lone = f"initial_{name}_grad"
        if lone in dataset.variables:
            variable = dataset.variables[lone]
        elif "initial_state_grad" in dataset.variables:
            variable = dataset.variables["initial_state_grad"]
            variable = variable.isel({STATE: _labels(dataset, STATE).index(str(name))})
        else:
            return None
        if DIRECTION in variable.dims:
            variable = variable.isel({DIRECTION: _labels(dataset, DIRECTION).index(call.direction)})
        found.append(np.asarray(variable.transpose(SAMPLE, ...).values))
    return found
