"""Whole-sequence layers: states, coefficients and total gradients at the requested steps, and measures of a scan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import prod
from typing import Any

import numpy as np
import xarray as xr

from ..adapters.protocol import LayerInfo, SequenceCall
from ..arguments import axes_by_name, kept_steps
from ..errors import InputError, did_you_mean, short_repr
from ..measures.dynamics import effective_rank
from ..measures.intervention import bootstrap_interval
from ..measures.transfer import effective_state_size, half_life_from_sums, log_decay_sums
from ..recurrence.sequence import SequenceCell, SequenceChunk, carried_share, chunks, later_influence, state_energy
from ..results.checks import REPLAY, Check, rounding_bound
from ..results.schema import LabelledLayer, labelled_layer, to_host
from ..settings import must_fit
from ..typing import Array
from ..vocabulary import LAG, SAMPLE, TIME
from .traced_layers import TraceSelection

#: Quantities of a whole-sequence layer; those of the second row need a loss.
VALUES = ("state", "decay", "write", "read", "gate", "output")
GRADIENTS = ("state_grad", "decay_grad", "write_grad", "read_grad", "output_grad")
#: Resamples of an interval of each step and head: of 4,096 steps and 16 heads they are 13 million numbers.
_RESAMPLES = 200


def chosen_positions(name: str, value: Any) -> dict[str, Any]:
    """Check ``at=`` of a trace: positions by dimension."""
    return {dim: kept_steps(f"{name}[{dim!r}]", steps) for dim, steps in axes_by_name(name, value).items()}


def sequence_datasets(
    layer_infos: Mapping[str, LayerInfo],
    calls: Sequence[SequenceCall],
    requested: TraceSelection,
    provenance: Mapping[str, str],
    at: Mapping[str, Any],
) -> tuple[dict[str, LabelledLayer], list[Check]]:
    """Return the labelled arrays of each scan, and the comparisons with the model's own outputs."""
    datasets, checks = {}, []
    for call in calls:
        info = layer_infos.get(call.layer) or layer_infos.get(call.layer.rpartition("#")[0])
        datasets[call.layer] = _label_scan(call, info, requested, provenance, at)
        bound = rounding_bound(call.compute_dtype, call.cell.steps)
        checks.append(Check(REPLAY, call.layer, call.mismatch, bound))
    return datasets, checks


def _label_scan(
    call: SequenceCall,
    info: LayerInfo | None,
    requested: TraceSelection,
    provenance: Mapping[str, str],
    at: Mapping[str, Any],
) -> LabelledLayer:
    selection = SequenceSelection.of(call, at)
    names = [name for name in (*VALUES, *(GRADIENTS if call.output_grad is not None else ())) if requested.has(name)]
    absent_names = [
        *(["gate"] if call.gate is None else []),
        *(["read", "read_grad"] if call.cell.read is None else []),
    ]
    names = [name for name in names if name not in absent_names]
    selection.refuse_large(call, names)
    pieces: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in names}
    has_sweep = any(name in GRADIENTS for name in names)
    for chunk in _reversed_chunks(call, min(selection.times, default=0), has_sweep=has_sweep):
        kept_times = [t - chunk.steps.start for t in selection.times if chunk.steps.start <= t < chunk.steps.stop]
        if kept_times:
            for name in names:
                pieces[name].append(selection.take(_values(call, chunk, kept_times, name), len(kept_times)))
    arrays = {name: np.concatenate(pieces_of_name[::-1], axis=1) for name, pieces_of_name in pieces.items()}
    dims = {name: (SAMPLE, TIME, *selection.axes(call, name)) for name in names}
    attributes = {**(vars(info) if info else {}), "name": call.layer, "direction": "forward"}
    layer = labelled_layer(arrays, info=attributes, provenance=provenance, bidirectional=False, dims=dims)
    for dim, positions in selection.positions.items():
        if dim in layer.coords:
            layer.coords[dim] = xr.Variable((dim,), positions, layer.coords[dim].attrs)
    return layer


def select_positions(dataset: xr.Dataset, at: Mapping[str, Any]) -> xr.Dataset:
    """Select the positions ``at`` of the variables of a layer that runs step by step; each dimension is kept."""
    sizes = {str(dim): int(size) for dim, size in dataset.sizes.items()}
    return dataset.isel({dim: resolve_positions(dim, steps, sizes) for dim, steps in at.items() if dim in sizes})


def _reversed_chunks(call: SequenceCall, first: int, *, has_sweep: bool) -> Iterator[SequenceChunk]:
    """Yield chunks of steps, the last one first, back to the one with step ``first``."""
    run = call.forward_run()
    swept = run.sweep(call.output_grad, call.last_state_grad) if has_sweep else zip(run.chunks(), repeat(None))
    for chunk, _ in swept:
        yield chunk
        if chunk.steps.start <= first:
            return


def _values(call: SequenceCall, chunk: SequenceChunk, at: list[int], name: str) -> Any:
    """Return a quantity at positions of a chunk, (sample or 1, position or 1, ...)."""
    steps = [chunk.steps.start + t for t in at]
    readers: dict[str, Callable[[], Any]] = {
        "state": lambda: chunk.states(at),
        "decay": lambda: chunk.cell.at(at).decays(),
        "write": lambda: chunk.cell.at(at).writes(),
        "read": lambda: chunk.cell.at(at).read,
        "gate": lambda: call.gate[:, steps],  # type: ignore[index]
        "output": lambda: call.output[:, steps],
        "state_grad": lambda: chunk.grads(at),
        "write_grad": lambda: chunk.grads(at),
        "decay_grad": lambda: chunk.decay_grad(at),
        "read_grad": lambda: chunk.read_grad(at),
        "output_grad": lambda: chunk.direct[:, at],
    }
    return readers[name]()


@dataclass(frozen=True)
class SequenceSelection:
    """Positions to keep by dimension, and the sizes of all dimensions of one scan."""

    positions: Mapping[str, list[int]]
    sizes: Mapping[str, int]
    contracted: str | None

    @classmethod
    def of(cls, call: SequenceCall, at: Mapping[str, Any]) -> SequenceSelection:
        """Resolve ``at=``; raise ``InputError`` for an unknown dimension or a position outside."""
        cell = call.cell
        sizes = dict(zip((SAMPLE, TIME, *cell.axes), map(int, cell.shape), strict=True))
        contracted = None if cell.read is None else cell.axes[cell.contracted]
        return cls({dim: resolve_positions(dim, steps, sizes) for dim, steps in at.items()}, sizes, contracted)

    @property
    def times(self) -> list[int]:
        """Steps of the recurrence that the result keeps."""
        return self.positions.get(TIME, list(range(self.sizes[TIME])))

    def axes(self, call: SequenceCall, name: str) -> tuple[str, ...]:
        """Return the dimensions of a quantity after sample and time."""
        cell = call.cell
        if name in ("state", "state_grad", "write", "write_grad"):
            return cell.axes
        if name.startswith(("output", "gate")):
            return tuple(axis for axis in cell.axes if axis != self.contracted)
        factors = cell.decay if name.startswith("decay") else (cell.read,)
        shape = [max(sizes) for sizes in zip(*(f.shape for f in factors if f is not None), strict=True)]
        return tuple(dim for dim, size in zip(cell.axes, shape[2:], strict=True) if size == self.sizes[dim])

    def take(self, values: Array, count: int) -> np.ndarray[Any, Any]:
        """Return the chosen positions of a quantity at ``count`` steps as a NumPy array."""
        array = to_host(values)
        if array.shape[1] == 1 and count != 1:
            array = np.repeat(array, count, axis=1)
        array = np.broadcast_to(array, (self.sizes[SAMPLE], *array.shape[1:]))
        dims = [dim for dim in self.sizes if array.ndim == len(self.sizes) or dim != self.contracted]
        for axis, dim in reversed(list(enumerate(dims))):
            if dim not in (SAMPLE, TIME) and array.shape[axis] != self.sizes[dim]:
                array = np.squeeze(array, axis=axis)
            elif dim in self.positions and dim != TIME:
                array = np.take(array, self.positions[dim], axis=axis)
        return np.ascontiguousarray(array)

    def refuse_large(self, call: SequenceCall, names: Sequence[str]) -> None:
        """Raise ``TooLargeError`` if the requested arrays would not fit into the memory granted."""
        kept_sizes = {dim: len(self.positions.get(dim, ())) or size for dim, size in self.sizes.items()}
        counts_by_name = {
            name: prod(kept_sizes[dim] for dim in (SAMPLE, TIME, *self.axes(call, name))) for name in names
        }
        size = sum(counts_by_name.values()) * int(np.dtype(str(call.output.dtype).rpartition(".")[2]).itemsize)
        largest = max(counts_by_name, key=counts_by_name.__getitem__, default="")
        message = f"The trace of {call.layer!r} would not fit into the memory granted."
        hint = f'at={{"time": [{self.sizes[TIME] - 1}]}}, or quantities= without {largest!r}'
        must_fit(message, size, hint, got=f"{{}} for {', '.join(names)}")


def resolve_positions(dim: str, steps: Any, sizes: Mapping[str, int]) -> list[int]:
    """Return the positions, from 0 and in order, that ``at=`` selects along a dimension."""
    if dim not in sizes:
        message = f"at= has no dimension {dim!r} in a whole-sequence layer."
        raise InputError(message, got=short_repr({dim: steps}), hint=did_you_mean(dim, sizes))
    size = sizes[dim]
    if isinstance(steps, slice):
        return list(range(*steps.indices(size)))
    step_list = [steps] if isinstance(steps, int) else list(steps)
    outside_steps = [step for step in step_list if not -size <= step < size]
    if outside_steps:
        expected = f"{-size} to {size - 1}"
        raise InputError(f"at={{{dim!r}: ...}} lies outside.", got=short_repr(outside_steps[0]), expected=expected)
    return sorted({step % size for step in step_list})


def scan_measures(cell: SequenceCell, last_state: Array) -> dict[str, xr.Variable]:
    """Return ``half_life``, ``state_rank`` of the last state (sample, *axes) and ``state_size`` of a scan.

    Each has the axes of a state along which it differs. ``state_rank`` needs two axes, ``state_size`` a readout, and
    ``half_life`` states that are not relative to a running maximum, since its change is part of their decay.
    """
    measures = {}
    if not cell.relative:
        parts = [log_decay_sums(to_host(cell.at(steps).decays())) for steps in chunks(cell.steps)]
        half_life = half_life_from_sums(sum(total for total, _ in parts), sum(count for _, count in parts))
        measures["half_life"] = _measure(cell.axes, half_life, "half-life of the decay", "step")
    if len(cell.axes) > 1:
        rank = np.median(effective_rank(last_state), axis=0)
        description = "effective rank of the last state, median over samples"
        measures["state_rank"] = xr.Variable(cell.axes[:-2], rank, {"long_name": description, "units": "1"})
    if cell.read is not None and cell.steps > 1:
        description = "effective state size in the middle of the first sample"
        axes = [axis for axis in cell.axes if axis != cell.axes[cell.contracted]]
        measures["state_size"] = _measure(axes, _state_size(cell), description, "1")
    return measures


def carried_by_lag(cell: SequenceCell) -> tuple[xr.Variable, xr.Variable] | None:
    """Return the share of an earlier state that the last one holds, (lag, *heads), median over samples; and the lags.

    None for states relative to a running maximum, whose change is part of the decay, and for a part of rank one
    without matrix form.
    """
    measured = None if cell.relative else carried_share(cell)
    if measured is None:
        return None
    lags, shares = measured
    heads = cell.axes[:-2] if len(cell.axes) > 2 else cell.axes[:-1]
    values = np.median(to_host(shares), axis=0)
    kept = [i for i, size in enumerate(values.shape[1:], 1) if size > 1]
    values = values.reshape(values.shape[0], *(values.shape[i] for i in kept))
    attributes = {"long_name": "share of the state k steps before that the last state holds", "units": "1"}
    lag = xr.Variable((LAG,), np.array(lags), {"long_name": "steps back", "units": "step"})
    return xr.Variable((LAG, *(heads[i - 1] for i in kept)), values, attributes), lag


def token_influence(cell: SequenceCell) -> dict[str, xr.Variable]:
    """Return the influence of each step on all later outputs, (time, *heads), over the samples, and its interval.

    Root of the mean over samples of the energy of :func:`later_influence`. Empty for states relative to a running
    maximum, whose outputs are rescaled from step to step. The interval needs two samples.
    """
    measured = None if cell.relative else later_influence(cell)
    if measured is None:
        return {}
    samples = max(measured.shape[0], int(cell.shape[0]))
    energy = to_host(measured).astype(np.float64)
    heads = cell.axes[:-2]
    energy = np.broadcast_to(energy, (samples, *energy.shape[1:]))
    attributes = {"long_name": "influence of a step on all later outputs", "units": "output"}
    variables = {"token_influence": xr.Variable((TIME, *heads), np.sqrt(energy.mean(axis=0)), attributes)}
    if samples > 1:
        bounds = np.sqrt(bootstrap_interval(energy, resamples=_RESAMPLES))
        attributes = {"long_name": "95 % interval of the influence, over samples", "units": "output"}
        variables["token_influence_interval"] = xr.Variable(("bound", TIME, *heads), bounds, attributes)
    return variables


def kept_masks(call: SequenceCall, shares: Sequence[float]) -> tuple[xr.Variable, list[Array]]:
    """Rank the entries of a state by what they add to the outputs; return that, and the masks of the entries kept."""
    cell = call.cell
    energy = to_host(state_energy(call.forward_run())).astype(np.float64)
    axes = [axis for axis, size in zip(cell.axes, energy.shape[2:], strict=True) if size > 1]
    attributes = {"long_name": "mean square that an entry of the state adds to an output", "units": "output²"}
    ranks = np.argsort(np.argsort(-energy, axis=None, kind="stable"), kind="stable").reshape(energy.shape)
    masks = [(ranks < round(share * energy.size)).astype(np.float64) for share in shares]
    return xr.Variable(axes, energy.reshape([size for size in energy.shape[2:] if size > 1]), attributes), masks


def _state_size(cell: SequenceCell) -> Array:
    """Count the used directions of the state along the axis that the output sums over, in the middle of sample 0."""
    sample_cell = cell.with_parts(lambda part: to_host(part)[:1])
    summed = sample_cell.axis
    writes = [part for part in sample_cell.write if part.shape[summed] > 1] or list(sample_cell.write)
    left = None if sample_cell.right is None else sample_cell.left_vector
    arrays = [sample_cell.decays(), writes[0], sample_cell.read, left, sample_cell.right]

    def first_sample(array: Array) -> Array:
        """Return the values of sample 0 at each step, with the summed axis last."""
        return np.moveaxis(np.broadcast_to(array[0], (sample_cell.steps, *array.shape[2:])), summed, -1)

    decay, write, read, left, right = (None if a is None else first_sample(np.asarray(a)) for a in arrays)
    assert decay is not None
    assert write is not None
    assert read is not None
    return effective_state_size(decay, write, read, sample_cell.steps // 2, left=left, right=right)


def _measure(axes: Sequence[str], values: Array, long_name: str, units: str) -> xr.Variable:
    """Label an array of a layer as an ``xarray.Variable`` with description and units, without axes of size 1."""
    kept_axes = [axis for axis, size in zip(axes, values.shape, strict=True) if size > 1]
    return xr.Variable(kept_axes, np.squeeze(values), {"long_name": long_name, "units": units})
