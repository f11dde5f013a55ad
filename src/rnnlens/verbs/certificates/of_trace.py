"""Certificates of traces: weight gradients recomputed from labelled arrays, compared with the reference run."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...adapters.protocol import RecurrentCall
from ...recurrence.cells import affine
from ...results.schema import LabelledLayer, to_host
from ...typing import Array
from ...vocabulary import DIRECTION, FEATURE, GATE, SAMPLE, STATE, TIME

_NEEDED = {"input", "hidden", "gate_grad", "gates"}


def weight_sums(layer: LabelledLayer, call: RecurrentCall, probes: int, samples: slice) -> dict[str, Array] | None:
    """Compute dL/dW of one direction of a layer by the names of ``Cell.weights``; None if data for it are missing.

    ``samples``: those of the labelled arrays that are summed.
    """
    cell = call.cell
    scaled = call.input_scale is not None or call.state_scale is not None
    if (
        cell.by_framework
        or scaled
        or not layer.variables.keys() >= _NEEDED
        or layer.coords[GATE].dtype.kind not in "UO"
    ):
        return None
    dz, x = _of(layer, "gate_grad", call)[samples], _of(layer, "input", call)[samples]
    known = call.received is not None
    before = _of(layer, "previous_hidden" if known else "hidden", call)[samples]
    before = before if known else _before(before, call)
    terms = cell.recurrent_terms(dz, _of(layer, "gates", call)[samples], before)
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


def _of(layer: LabelledLayer, name: str, call: RecurrentCall) -> Array:
    """Return one direction of a variable as (sample, time, ..., unit), with gates in the order of the cell."""
    variable = layer.variables[name]
    if DIRECTION in variable.dims:
        variable = variable.isel({DIRECTION: _labels(layer, DIRECTION).index(call.direction)})
    if GATE in variable.dims:
        labels = _labels(layer, GATE)
        if labels != list(call.cell.gates):
            variable = variable.isel({GATE: [labels.index(gate) for gate in call.cell.gates]})
        return np.asarray(variable.transpose(SAMPLE, TIME, GATE, ...).values)
    return np.asarray(variable.transpose(SAMPLE, TIME, ...).values)


def _labels(layer: LabelledLayer, dim: str) -> list[str]:
    """Return the labels of a dimension, by which values are selected."""
    return [str(label) for label in layer.coords[dim].values]


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


def input_gradient(layer: LabelledLayer) -> Array | None:
    """Return the gradient at a layer's input, (sample, time, feature); None if there is none."""
    found = layer.variables.get("input_grad")
    return None if found is None else np.asarray(found.transpose(SAMPLE, TIME, ..., FEATURE).values)


def initial_state_gradients(layer: LabelledLayer, call: RecurrentCall, names: Any) -> list[Array] | None:
    """Return the gradients at a layer's initial states, (sample, unit) each; None if one is missing."""
    found = []
    for name in names:
        lone = f"initial_{name}_grad"
        if lone in layer.variables:
            variable = layer.variables[lone]
        elif "initial_state_grad" in layer.variables:
            variable = layer.variables["initial_state_grad"]
            variable = variable.isel({STATE: _labels(layer, STATE).index(str(name))})
        else:
            return None
        if DIRECTION in variable.dims:
            variable = variable.isel({DIRECTION: _labels(layer, DIRECTION).index(call.direction)})
        found.append(np.asarray(variable.transpose(SAMPLE, ...).values))
    return found
