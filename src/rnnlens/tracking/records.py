"""``TrainingRecord``: measures of one step; ``Sink``: their receiver; ``Probe``: a batch traced between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import xarray as xr

from ..adapters.registry import adapter_for
from ..errors import LayerNotFoundError
from ..measures.facts import dead_units
from ..recurrence.measures import masked_mean, real_steps_first, safe_norm, saturation_share
from ..results.gradient_lags import layer_decay, layer_reach, norms_by_lag
from ..results.schema import proposals_of, state_of
from ..results.trace import Trace
from ..results.training_run import Alert
from ..settings import options
from ..typing import Array
from ..verbs.trace import trace
from ..verbs.weights import weight_norms
from ..vocabulary import BACKWARD, DIRECTION, FORWARD, GATE, LAG, QUANTITIES, SAMPLE, TIME, UNIT
from .weight_updates import trained_shares

#: ``"probe"``: a fixed held-out batch, traced between two steps. ``"batch"``: the batch of the training step itself.
Kind = Literal["probe", "batch"]
KINDS = ("probe", "batch")


@dataclass(frozen=True)
class TrainingRecord:
    """Measures of one training step: scalars, and labelled arrays by layer.

    Attributes
    ----------
    step
        Number of batches trained on so far. A probe at step 0 measures the weights before training; a batch record of
        step n measures the n-th batch with the weights *before* its update.
    epoch
        Epoch of the step, from 0.
    kind
        ``"probe"`` or ``"batch"``.
    scalars
        Numbers by name: ``"loss"``; ``"lstm/reach"``, ``"lstm/decay"``, ``"lstm/adjoint"``, ``"lstm/dead_units"``,
        ``"lstm/forget/near_0"``, ``"lstm/forget/near_1"``, ``"lstm/weight_norm/kernel"``, ``"lstm/trained"``. In a
        bidirectional layer the direction follows the layer: ``"bi/forward/reach"``. Of the step that ended in the
        record: ``"update_ratio"`` and its kin, see :func:`.weight_updates.update_scalars`.
    layers
        Labelled arrays by layer and name, without a ``step`` dimension: ``adjoint_profile``, ``lag_profile``, ``gates``
        (over time), and the quantities of ``keep=``.
    notes
        Sentences on how to read the numbers.
    time
        Time of the record in seconds since 1970.
    """

    step: int
    epoch: int
    kind: Kind
    scalars: Mapping[str, float]
    layers: Mapping[str, Mapping[str, xr.DataArray]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    time: float = field(default_factory=time.time)

    def with_scalars(self, scalars: Mapping[str, float]) -> TrainingRecord:
        """Return the record with further scalars."""
        return replace(self, scalars={**self.scalars, **scalars})


@runtime_checkable
class Sink(Protocol):
    """Receiver of records: the store of a run, a logger, an alert."""

    def write(self, record: TrainingRecord) -> None:
        """Write one record; it must be complete on return."""

    def close(self, reason: str) -> None:
        """End the records. ``reason`` is ``"finished"``, ``"interrupted"``, or the name of an error."""


@runtime_checkable
class AlertSink(Protocol):
    """Receiver of records that has a place for alerts of their own."""

    def alert(self, alert: Alert) -> None:
        """Pass one alert on."""


_PROFILE_ATTRS = {
    "adjoint_profile": (
        "total gradient of the hidden state by step",
        "loss",
        "RMS over units of dL/dh_t, mean over samples whose step t is not padding",
    ),
    "lag_profile": (
        "total gradient of the hidden state by lag",
        "loss",
        "RMS over units of dL/dh, by steps back from the last real step of each sample (the first, in the backward "
        "direction), mean over samples",
    ),
    "gates": (
        "gate activation over time",
        "1",
        "gate values, mean over units and over samples whose step t is not padding",
    ),
}


def summary(trace: Trace, *, keep: Collection[str] = ()) -> tuple[dict[str, float], dict[str, dict[str, xr.DataArray]]]:
    """Return the scalars of a trace by name, and its profiles and the arrays of ``keep`` by layer and name."""
    scalars = {} if trace.loss is None else {"loss": float(trace.loss)}
    layers: dict[str, dict[str, xr.DataArray]] = {}
    for name in trace:
        layer = trace[name]
        mask = np.asarray(layer.dataset["mask"].values, dtype=bool) if "mask" in layer.dataset else None
        profiles: dict[str, list[xr.DataArray]] = {}
        state = state_of(layer.dataset.attrs)
        shown = {"hidden": state, "hidden_grad": f"{state}_grad"}
        for direction in (FORWARD, BACKWARD) if DIRECTION in layer.dataset.dims else (None,):
            dataset = layer.dataset if direction is None else layer.dataset.sel({DIRECTION: direction})
            values = {str(quantity): array for quantity, array in dataset.data_vars.items()}
            values |= {name: values[own] for name, own in shown.items() if own in values}
            prefix = name if direction is None else f"{name}/{direction}"
            measures, direction_profiles = _measures(values, mask, direction or dataset.attrs.get(DIRECTION))
            by_lag = norms_by_lag(layer.dataset, direction, mask)
            if by_lag:
                measures |= {"reach": float(layer_reach(by_lag)), "decay": layer_decay(by_lag)}
            for kind, profile in direction_profiles.items():
                profiles.setdefault(kind, []).append(profile)
            scalars |= {f"{prefix}/{key}": number for key, number in measures.items()}
        layers[name] = {kind: _join_directions(arrays) for kind, arrays in profiles.items()}
        kept = (shown.get(quantity, quantity) for quantity in keep)
        layers[name] |= {quantity: layer.dataset[quantity] for quantity in kept if quantity in layer}
    return scalars, layers


def missing_quantities(trace: Trace, keep: Iterable[str]) -> tuple[str, ...]:
    """Return a note for each quantity of ``keep`` that no layer of a trace has."""
    present = {str(name) for layer in trace for name in trace.dataset(layer).data_vars}
    missing = sorted(set(keep) - present - QUANTITIES.keys())
    return tuple(f"keep: no layer has {name!r}; there are {', '.join(sorted(present))}." for name in missing)


def _measures(
    values: Mapping[str, xr.DataArray], mask: Array | None, direction: str | None
) -> tuple[dict[str, float], dict[str, xr.DataArray]]:
    """Return the scalars and the profiles of one layer, or of one direction of it, by name."""
    scalars: dict[str, float] = {}
    profiles: dict[str, xr.DataArray] = {}
    gradient, hidden, gates = (values.get(name) for name in ("hidden_grad", "hidden", "gates"))
    if gradient is not None and gradient.dims == (SAMPLE, TIME, UNIT):
        norm = np.asarray(safe_norm(gradient.values, axis=-1), dtype=np.float64)
        adjoint = norm / np.sqrt(gradient.sizes[UNIT])
        step_mask = np.ones(adjoint.shape, dtype=bool) if mask is None else mask
        adjoint_by_lag, lag_mask = _reorder_by_lag(adjoint, step_mask, direction)
        real_adjoints = adjoint[step_mask]
        scalars["adjoint"] = (
            float(safe_norm(real_adjoints, axis=0) / np.sqrt(real_adjoints.size))
            if real_adjoints.size
            else float("nan")
        )
        profiles["adjoint_profile"] = _labelled_profile(
            "adjoint_profile", masked_mean(adjoint, step_mask, axis=0), (TIME,)
        )
        profiles["lag_profile"] = _labelled_profile(
            "lag_profile", masked_mean(adjoint_by_lag, lag_mask, axis=0), (LAG,)
        )
    if hidden is not None and hidden.dims == (SAMPLE, TIME, UNIT):
        scalars["dead_units"] = float(dead_units(hidden.values, mask).mean())
    if gates is not None and gates.dims[:3] == (SAMPLE, TIME, GATE) and gates.ndim == 4:  # units, or cell units
        unit_mean = gates.values.mean(axis=-1).astype(np.float64)
        step_mask = np.ones(unit_mean.shape[:2], dtype=bool) if mask is None else mask
        gates_over_time = np.moveaxis(np.asarray(masked_mean(unit_mean, step_mask[:, :, None], axis=0)), 0, -1)
        profiles["gates"] = _labelled_profile("gates", gates_over_time, (GATE, TIME), {GATE: gates[GATE].values})
        scalars |= _saturation_scalars(gates, mask)
    return scalars, profiles


def _reorder_by_lag(adjoint: Array, step_mask: Array, direction: str | None) -> tuple[Array, Array]:
    """Reorder the adjoint by lag from the last processed step, (sample, lag); and a mask of the lags of each sample."""
    is_backward = direction == BACKWARD
    ordered_adjoint, ordered_mask = (adjoint, step_mask) if is_backward else (adjoint[:, ::-1], step_mask[:, ::-1])
    adjoint_by_lag = np.asarray(real_steps_first(ordered_adjoint, ordered_mask))
    lag_mask = np.arange(adjoint_by_lag.shape[1])[None, :] < ordered_mask.sum(axis=1, keepdims=True)
    return adjoint_by_lag, lag_mask


def _saturation_scalars(gates: xr.DataArray, mask: Array | None) -> dict[str, float]:
    gate_mask = None if mask is None else mask[:, :, None, None]
    shares_near_0, shares_near_1 = saturation_share(gates.values, axis=(0, 1, 3), where=gate_mask)
    scalars: dict[str, float] = {}
    for name, share_near_0, share_near_1 in zip(gates[GATE].values, shares_near_0, shares_near_1, strict=True):
        if str(name) not in proposals_of(gates):
            scalars |= {f"{name}/near_0": float(share_near_0), f"{name}/near_1": float(share_near_1)}
    return scalars


def _labelled_profile(
    name: str, values: Any, dims: tuple[str, ...], coords: Mapping[str, Any] | None = None
) -> xr.DataArray:
    long_name, units, definition = _PROFILE_ATTRS[name]
    attrs = {"long_name": long_name, "units": units, "definition": definition}
    positions = {dim: np.arange(size) for dim, size in zip(dims, np.shape(values), strict=True)}
    return xr.DataArray(values, dims=dims, coords={**positions, **(coords or {})}, name=name, attrs=attrs)


def _join_directions(arrays: list[xr.DataArray]) -> xr.DataArray:
    """Join the arrays of both directions; the direction is the last axis."""
    if len(arrays) == 1:
        return arrays[0]
    joined_array = xr.concat(arrays, dim=xr.Variable((DIRECTION,), [FORWARD, BACKWARD]), combine_attrs="override")
    return joined_array.transpose(..., DIRECTION)


#: Quantities from which the profiles and scalars of a record are computed.
NEEDED = ("hidden", "hidden_grad", "cell_grad", "gates", "mask")


@dataclass(frozen=True)
class Probe:
    """A held-out batch, and the layers and quantities to record of it.

    Attributes
    ----------
    x, y, sample_weight
        As in :func:`rnnlens.trace`.
    layers
        Names of the layers; all recurrent ones where None.
    keep
        Quantities that are recorded as whole arrays, such as ``"hidden_grad"``.
    loss
        As in :func:`rnnlens.trace`.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    layers: Sequence[str] | None = None
    keep: tuple[str, ...] = ()
    loss: str | Callable[..., Any] | None = None

    def bound(self, model: Any) -> Any:
        """Return a model bound to the shapes of the batch, where its framework needs them."""
        return adapter_for(model).bind(model, self.x, self.y if self.loss is None else None)

    def record(self, model: Any, step: int, epoch: int) -> TrainingRecord:
        """Trace the batch with the current weights in evaluation mode; return the record. The model is restored."""
        model = self.bound(model)
        with options(certify="first"):
            probe_trace = trace(
                model,
                self.x,
                self.y,
                layers=self.layers,
                quantities=None if self.keep else summary_quantities(self.y is not None or self.loss is not None),
                loss=self.loss,
                sample_weight=self.sample_weight,
            )
        scalars, layers = summary(probe_trace, keep=self.keep)
        names = list(probe_trace)
        scalars |= norms_of_weights(model, names) | trained_shares(model, names)
        notes = (*probe_trace.notes, *missing_quantities(probe_trace, self.keep))
        return TrainingRecord(step, epoch, "probe", scalars, layers, notes)


def summary_quantities(has_loss: bool) -> list[str]:
    """Return the names of the quantities that a record needs; without a loss there are no gradients."""
    return [name for name in NEEDED if has_loss or not name.endswith("_grad")]


def norms_of_weights(model: Any, layers: Sequence[str]) -> dict[str, float]:
    """Return the Frobenius norm of each weight of ``layers`` by name: ``"lstm/weight_norm/kernel"``."""
    names = dict.fromkeys(layer.partition("#")[0] for layer in layers)
    try:
        norms = weight_norms(model, layers=[*names])
    except LayerNotFoundError:  # a cell that a layer and a loop share is listed once, with the layer
        norms = weight_norms(model)
    scalars = {}
    for name, norm in norms.data_vars.items():
        layer, _, weight = str(name).rpartition("/")
        if layer in names:
            scalars[f"{layer}/weight_norm/{weight}"] = float(norm.values[-1])
    return scalars
