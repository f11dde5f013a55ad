"""Tracks: arrays of a trace by layer and direction, over one time axis."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import xarray as xr

from ..measures.facts import gate_timescale
from ..recurrence.measures import finite_mean, mean_lag, safe_norm, saturation_share
from ..results.schema import proposals_of
from ..results.trace import Trace, describe_layer
from ..typing import Array
from ..vocabulary import BACKWARD, DIRECTION, GATE, SAMPLE, TIME

#: Variables that tracks leave out: they are shown once for all tracks, or follow from others.
_EXCLUDED_VARIABLES = ("input", "input_grad", "mask", "output", "output_grad", "gate_preactivation", "gate_grad")
_SYMBOLS = {"hidden": "h", "cell": "c"}


@dataclass
class Track:
    """Arrays of one direction of one layer."""

    layer: str
    direction: str
    description: str
    #: (sample, time, unit) by name of the state: its values, and the total gradient of the loss by them.
    states: dict[str, Array] = field(default_factory=dict)
    gradients: dict[str, Array] = field(default_factory=dict)
    #: (sample, time, gate, unit), or None: values, and the gradient of the loss by their pre-activations.
    gates: Array | None = None
    gate_gradients: Array | None = None
    gate_names: tuple[str, ...] = ()
    #: Name of the gate that is the share of the state that a step keeps, or None.
    keeping_gate: str | None = None
    #: Names of the gates whose value is a proposal for the new state, not a share.
    proposals: tuple[str, ...] = ()
    #: Whether the recurrence runs from the last step to the first.
    is_backward: bool = False
    #: (sample, time) of bool, False where a step is padding, or None.
    mask: Array | None = None
    #: Name of the last axis of the arrays.
    row_name: str = "unit"
    #: Axes of a whole-sequence layer's state over which its norm is taken, one number for each channel or head.
    normed_axes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Layer name, with the direction if there are two."""
        return f"{self.layer} · {self.direction}" if self.direction else self.layer

    @property
    def steps(self) -> int:
        """Number of time steps."""
        return int(next(iter(self._arrays())).shape[1])

    @property
    def units(self) -> int:
        """Number of units of the first state."""
        return int(next(iter(self._arrays())).shape[-1])

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(next(iter(self._arrays())).shape[0])

    def _arrays(self) -> list[Array]:
        return [*self.states.values(), *self.gradients.values(), *([] if self.gates is None else [self.gates])]


def symbol(state: str) -> str:
    """Return the symbol of a state in formulas (h, c), or its name if it has none."""
    return _SYMBOLS.get(state, state.replace("_", " "))


def tracks_of(trace: Trace) -> list[Track]:
    """Return one track for each layer and direction of a trace, layers in the order of their calls.

    A layer whose states have axes of space has none: no map of units over time holds them.
    """
    tracks = []
    for name in trace.layers:
        dataset = trace.dataset(name)
        is_bidirectional = DIRECTION in dataset.dims
        for direction in [str(d) for d in dataset[DIRECTION].values] if is_bidirectional else [""]:
            track = _track(name, dataset.sel(direction=direction) if is_bidirectional else dataset, direction)
            if track._arrays():
                tracks.append(track)
    return tracks


def _track(name: str, dataset: xr.Dataset, direction: str) -> Track:
    track = Track(name, direction, describe_layer(dataset))
    track.is_backward = BACKWARD in (direction, dataset.attrs.get(DIRECTION))
    if {"state", "decay"} & set(dataset.data_vars):  # a whole-sequence layer
        for name, arrays_by_state in (("state", track.states), ("state_grad", track.gradients)):
            if name in dataset:  # the norm for each channel or head
                track.row_name, *normed_dims = (str(dim) for dim in dataset[name].dims[2:])
                track.normed_axes, values = tuple(normed_dims), dataset[name].values
                arrays_by_state["state"] = (
                    safe_norm(values.reshape(*values.shape[:3], -1), axis=-1) if normed_dims else values
                )
        return track
    for key, array in dataset.data_vars.items():
        variable, is_sample_time = str(key), array.dims[:2] == (SAMPLE, TIME)
        is_by_gate = array.dims[:3] == (SAMPLE, TIME, GATE) and array.ndim == 4
        if variable == "gates" and is_by_gate:
            track.gates, track.gate_names = array.values, tuple(map(str, dataset[GATE].values))
            track.keeping_gate, track.proposals = array.attrs.get("keeping"), tuple(proposals_of(array))
        elif variable == "gate_grad" and is_by_gate:
            track.gate_gradients = array.values
        elif variable == "mask":
            track.mask = np.asarray(array.values, dtype=bool)
        elif is_sample_time and array.ndim == 3 and variable not in _EXCLUDED_VARIABLES:
            arrays_by_name = track.gradients if variable.endswith("_grad") else track.states
            arrays_by_name[variable.removesuffix("_grad")] = array.values
    if not track._arrays():  # a non-recurrent layer has only its output
        for variable, arrays_by_name in (("output", track.states), ("output_grad", track.gradients)):
            if variable in dataset and dataset[variable].dims[:2] == (SAMPLE, TIME) and dataset[variable].ndim == 3:
                arrays_by_name["output"] = dataset[variable].values
    if track.mask is not None and bool(track.mask.all()):
        track.mask = None
    return track


def norms(values: Array) -> Array:
    """Return the norm over units, (sample, time), of (sample, time, unit)."""
    return safe_norm(np.asarray(values, dtype=np.result_type(values, np.float32)), axis=-1)


def sort_keys(track: Track, kernels: Array | None) -> dict[str, Array]:
    """Return the keys by which units can be sorted, one number per unit each, whichever exist.

    ``mean_lag``: mean distance in steps, from the end at which the recurrence of the layer ends, of the gradient of
    the hidden state; ``saturation``: share of (sample, time, gate) below 0.1 or above 0.9, without proposals;
    ``norm`` of the unit's weights, ``kernels`` (unit,); ``timescale`` of the gate that keeps its state.
    """
    keys: dict[str, Array] = {}
    state = next(iter(track.gradients), None)
    if state is not None:
        magnitudes = np.abs(np.asarray(track.gradients[state], dtype=np.float64))
        peak = np.where(np.isfinite(magnitudes), magnitudes, 0.0).max(axis=(1, 2), keepdims=True)
        profile = finite_mean(magnitudes / np.where(peak > 0, peak, 1.0), axis=0)
        keys["mean_lag"] = mean_lag(profile if track.is_backward else profile[::-1], axis=0)
    if track.gates is not None:
        step_mask = None if track.mask is None else track.mask[:, :, None, None]
        share_indices = [i for i, gate in enumerate(track.gate_names) if gate not in track.proposals]
        if share_indices:
            shares = np.asarray(track.gates)[:, :, share_indices]
            low_share, high_share = saturation_share(shares, axis=(0, 1, 2), where=step_mask)
            keys["saturation"] = low_share + high_share
        if track.keeping_gate in track.gate_names:  # a trace may have only some of the gates, selected by at=
            kept_shares = np.asarray(track.gates)[:, :, track.gate_names.index(track.keeping_gate)]
            keys["timescale"] = gate_timescale(kept_shares, track.mask)
    if kernels is not None and len(kernels) == track.units:
        keys["norm"] = kernels
    return {name: value for name, value in keys.items() if len(value) == track.units}


def merge_steps(values: Array, step_count: int, *, as_rms: bool = False) -> Array:
    """Merge ``step_count`` steps of (sample, time, ...): mean, RMS if ``as_rms``; NaN where any value is not finite."""
    if step_count == 1:
        return np.asarray(values, dtype=np.float64)
    values = np.asarray(values, dtype=np.float64)
    starts = np.arange(0, values.shape[1], step_count)
    counts = np.diff([*starts, values.shape[1]]).reshape(-1, *[1] * (values.ndim - 2))
    if not as_rms:
        return np.add.reduceat(values, starts, axis=1) / counts
    step_peak = np.maximum.reduceat(np.abs(values), starts, axis=1)  # scaling prevents under- and overflow of squares
    step_scale = np.where(np.isfinite(step_peak) & (step_peak > 0), step_peak, 1.0)
    scaled = values / np.repeat(step_scale, counts.ravel(), axis=1)
    return np.sqrt(np.add.reduceat(scaled**2, starts, axis=1) / counts) * step_scale
