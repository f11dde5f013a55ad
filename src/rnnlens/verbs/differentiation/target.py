"""The target of a gradient: a tensor, a selection of its entries, and a reduction to one number (or one per sample).

Selection and reduction are applied to the value, and their transposes to the cotangent at which differentiation starts.
So only the selected entries are differentiated, and neither needs the framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import xarray as xr

from ...arguments import as_list, as_numbers, as_numpy, either, kept_steps, number, refuse_without_order
from ...errors import InputError, did_you_mean, has_attribute, message, short_repr
from ...results.layers import sizes_of
from ...typing import Array
from ...vocabulary import DIRECTION, SAMPLE, TIME
from ..axes import axes_to_type

Reduction = Any
#: How targets of batches combine to that of the data set.
Combine = Literal["mean", "sum"]
#: Evaluates a user's function on framework tensors: maps arrays to (value, function that pulls a cotangent back).
Differentiate = Callable[[Callable[..., Any], Sequence[Array]], tuple[Array, Callable[[Array], Sequence[Array]]]]

REDUCTIONS = ("sum", "mean", "norm")


def a_reduction(name: str, value: Any) -> Reduction:
    """Check ``reduce=``: the name of a reduction, a function, or weights."""
    if isinstance(value, str):
        if value not in REDUCTIONS:
            raise InputError(f"No reduction named {value!r}.", hint=did_you_mean(value, REDUCTIONS))
        return value
    if callable(value) and not isinstance(value, type) and not hasattr(value, "dtype"):
        return value
    if isinstance(value, xr.DataArray):
        return value.copy(data=as_numbers(name, value.values))
    expected = f"{', '.join(REDUCTIONS)}, a callable, or weights as numbers"
    return either(as_numbers, number(), expected=expected)(name, value)


@dataclass(frozen=True)
class Target:
    """A target as a user specifies it: selected steps and units, and their reduction.

    For a data set in batches, ``rows`` are the first sample of a batch and the one after its last, and ``total`` is the
    number of all samples. ``picked`` samples of the batch are selected; ``chosen`` are their positions in the
    selection.
    """

    text: str
    at: Mapping[str, Any]
    reduce: Reduction
    per_sample: bool
    rows: tuple[int, int] | None = None
    total: int | None = None
    picked: int | None = None
    chosen: tuple[int, ...] | None = None

    @property
    def is_linear(self) -> bool:
        """Whether the cotangent depends on the shape of the tensor alone: not on its values, nor on the batch."""
        is_sum_or_mean = self.reduce is None or (isinstance(self.reduce, str) and self.reduce in ("sum", "mean"))
        return is_sum_or_mean and SAMPLE not in self.at

    def of_rows(self, start: int, stop: int) -> Target:
        """Return the target's part on a batch with samples ``start`` to ``stop`` of ``total``."""
        if self.rows is None:
            return self
        rows = (start, stop)
        if SAMPLE not in self.at:
            return replace(self, rows=rows)
        if self.total is None:
            raise InputError(
                "Samples can be selected only from data of known length.",
                got=f"at={dict(self.at)!r} of a source of batches",
                hint="at= without sample, and per_sample=True",
            )
        samples = xr.DataArray(np.zeros(self.total), dims=SAMPLE)
        positions = np.arange(self.total)[_positions(samples, SAMPLE, self.at[SAMPLE])]
        is_single = np.ndim(positions) == 0
        positions = np.atleast_1d(positions)
        is_in_batch = (positions >= start) & (positions < stop)
        if is_single and is_in_batch.any():
            return replace(self, at={**self.at, SAMPLE: int(positions[0]) - start}, rows=rows, picked=1)
        at = {**self.at, SAMPLE: (positions - start)[is_in_batch]}
        selected = tuple(map(int, np.flatnonzero(is_in_batch)))
        return replace(self, at=at, rows=rows, picked=len(selected), chosen=selected)

    def evaluate(self, value: xr.DataArray, differentiate: Differentiate) -> tuple[Array, Array]:
        """Return the target's value, a scalar or (sample,), and the cotangent of ``value``."""
        if self.picked == 0:
            return np.zeros((0,) if self.per_sample else ()), np.zeros(value.shape, np.result_type(value, np.float32))
        indices = indices_of(value, self.at, self.text)
        selection = value.drop_vars(value.coords).isel(indices)
        target_value, cotangent = self._reduce(selection, differentiate)
        dtype = np.result_type(value.dtype, np.float32)
        if not indices:
            return target_value, np.asarray(cotangent, dtype)
        full_cotangent = xr.zeros_like(value, dtype)
        full_cotangent[indices] = np.asarray(cotangent, dtype).reshape(selection.shape)
        return target_value, full_cotangent.values

    def _reduce(self, selection: xr.DataArray, differentiate: Differentiate) -> tuple[Array, Array]:
        kept_dims = (SAMPLE,) if self.per_sample and SAMPLE in selection.dims else ()
        axes = tuple(i for i, dim in enumerate(selection.dims) if dim not in kept_dims)
        values = selection.values
        count = int(np.prod([values.shape[i] for i in axes], dtype=int))
        if callable(self.reduce):
            return self._reduce_by_call(values, selection.sizes[SAMPLE] if kept_dims else None, differentiate)
        if self.reduce is None:
            if count != 1:
                raise InputError(self._not_one_number_text(selection, count))
            return values.sum(axis=axes), np.ones_like(values)
        if isinstance(self.reduce, str):
            return _reduce_by_name(values, axes, self.reduce, count)
        weights = self._weights(selection)
        return (values * weights).sum(axis=axes), np.broadcast_to(weights, values.shape)

    def _reduce_by_call(self, values: Array, samples: int | None, differentiate: Differentiate) -> tuple[Array, Array]:
        value, pull = differentiate(self.reduce, [values])
        expected = () if samples is None else (samples,)
        if value.shape != expected:
            raise InputError(
                "reduce= must leave one number" + (" per sample." if expected else "."),
                got=f"shape {value.shape} from a selection of shape {values.shape}",
                expected=f"shape {expected}",
            )
        return value, pull(np.ones_like(value))[0]

    def _weights(self, subset: xr.DataArray) -> Array:
        """Return the weights of the reduction, broadcast to the selection; labelled ones by dimension."""
        batch_weights = self._weights_of_batch(subset)
        try:
            if isinstance(batch_weights, xr.DataArray) and set(batch_weights.dims) <= set(subset.dims):
                return (
                    batch_weights.drop_vars(batch_weights.coords).broadcast_like(subset).transpose(*subset.dims).values
                )
            weights = np.asarray(batch_weights, dtype=subset.dtype)
            np.broadcast_shapes(weights.shape, subset.shape)
            if weights.ndim > subset.ndim:
                raise ValueError
        except (TypeError, ValueError):
            raise InputError(
                "The weights of reduce= do not match the shape of the target.",
                got=f"shape {np.shape(self.reduce)}",
                expected=f"what broadcasts to ({sizes_of(subset)}); or one of {', '.join(REDUCTIONS)}, or a callable",
            ) from None
        return weights

    def _weights_of_batch(self, selection: xr.DataArray) -> Any:
        """Return the user's weights of the samples of this batch."""
        is_by_sample = SAMPLE in selection.dims and np.ndim(self.reduce) == selection.ndim
        is_labelled = isinstance(self.reduce, xr.DataArray)
        if self.rows is None or not (SAMPLE in self.reduce.dims if is_labelled else is_by_sample):
            return self.reduce
        rows = slice(*self.rows) if self.chosen is None else list(self.chosen)
        if is_labelled:
            return self.reduce.isel({SAMPLE: rows})
        weights = np.asarray(self.reduce)
        return weights if weights.shape[0] == 1 else weights[rows]

    def _not_one_number_text(self, selection: xr.DataArray, count: int) -> str:
        suffix = " per sample" if self.per_sample else ""
        return message(
            f"{self.text} is not one number{suffix}. A gradient needs one number, and rnnlens does not sum outputs "
            "unless told to.",
            got=f"({sizes_of(selection)}), {count} numbers{suffix}",
            expected='reduce="sum", "mean", "norm", weights or a callable; or at= to select steps and units',
            hint=f'rl.jacobian(model, x, of="{self.text}") for the derivative of each number separately'
            if not self.text.startswith("<")
            else "rl.jacobian(model, x) for the derivative of each number separately",
        )


def indices_of(value: xr.DataArray, at: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the positions that ``at`` selects, by dimension."""
    indices = {}
    for dim, index in at.items():
        if dim not in value.dims:
            names = [str(axis) for axis in value.dims]
            unnamed = [axis for axis in names if axis.startswith("axis_")]
            is_unnamed_time = dim == TIME and unnamed and not name.startswith("<")
            raise InputError(
                f"The target has no dimension {dim!r}.",
                got=f"at={dict(at)!r}",
                expected=f"({sizes_of(value)})",
                hint=f"name the axis that counts steps: {axes_to_type(name, [(axis,) for axis in names], unnamed)}"
                if is_unnamed_time
                else did_you_mean(dim, names),
            )
        indices[dim] = _positions(value, dim, index)
    return indices


def _positions(value: xr.DataArray, dim: str, index: Any) -> Any:
    """Convert a selection along ``dim`` (number, list, slice, boolean mask, labels) into integer positions."""
    size = value.sizes[dim]
    if isinstance(index, slice):
        positions = np.arange(size)[kept_steps(f"at[{dim!r}]", index)]
    else:
        refuse_without_order(f"at[{dim!r}]", index)
        positions = as_numpy(index) if has_attribute(index, "dtype") else np.asarray(as_list(index) or index)
    if positions.dtype.kind in "US":
        labels = {DIRECTION: ["forward", "backward"]}.get(dim, [])
        unknown = [label for label in np.atleast_1d(positions) if label not in labels]
        if unknown:
            raise InputError(f"{dim!r} has no {unknown[0]!r}.", expected=", ".join(labels) or "numbers")
        positions = np.vectorize(labels.index)(positions)
    if positions.dtype == bool and positions.ndim == 1 and positions.size == size:
        positions = np.flatnonzero(positions)
    are_integers = positions.dtype.kind in "iu" and positions.ndim <= 1
    if not are_integers or not positions.size or positions.min() < -size or positions.max() >= size:
        raise InputError(
            f"at= selects {'nothing of' if not positions.size else 'beyond'} the target along {dim!r}.",
            got=f"{dim}={short_repr(index)}",
            expected=f"whole numbers from {-size} to {size - 1}",
        )
    if np.unique(positions % size).size < positions.size:
        text = f"at= selects a position along {dim!r} twice."
        raise InputError(text, got=f"{dim}={short_repr(index)}", expected="each one once")
    return int(positions) if positions.ndim == 0 else positions


def _reduce_by_name(values: Array, axes: tuple[int, ...], reduction: str, count: int) -> tuple[Array, Array]:
    if reduction == "sum":
        return values.sum(axis=axes), np.ones_like(values)
    if reduction == "mean":
        return values.mean(axis=axes), np.full_like(values, 1.0 / max(count, 1))
    norm = np.sqrt((values**2).sum(axis=axes, keepdims=True))
    # At exactly 0 the norm has no derivative; frameworks use the subgradient 0.
    cotangent = np.divide(values, norm, out=np.zeros_like(values), where=norm > 0)
    return np.squeeze(norm, axis=axes), cotangent
