"""Conversion of the user's arrays to labelled arrays and layers, and texts of a figure from their attributes."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ..arguments import as_numbers, as_numpy, refuse_large
from ..errors import InputError, did_you_mean, has_attribute, shape_of
from ..recurrence.measures import safe_norm
from ..results.schema import state_of, with_mask
from ..vocabulary import BACKWARD, DIRECTION, FEATURE, GATE, IN_TIME, OUT_TIME, SAMPLE, TIME, UNIT, UNIT_IN

Numbers = np.ndarray[Any, Any]

#: Dimensions of a plain array by its rank, for figures over time.
OVER_TIME = {1: (TIME,), 2: (TIME, UNIT), 3: (SAMPLE, TIME, UNIT), 4: (SAMPLE, TIME, GATE, UNIT)}

_CHUNK = 1 << 22

#: Labels of dimensions without a coordinate.
_DIM_LABELS = {
    TIME: "time step",
    OUT_TIME: "output time step",
    IN_TIME: "input time step",
    FEATURE: "input feature",
    UNIT_IN: "previous hidden unit",
}


@dataclass(frozen=True)
class DirectionView:
    """One direction of an array (or a whole array without directions), and the label of its time axis."""

    name: str | None
    data: xr.DataArray
    time_label: str


def to_real_numpy(data: Any, figure: str) -> Numbers:
    """Return an array of any framework as real NumPy numbers, detached from its graph."""
    _refuse_whole_results(data, figure)
    if isinstance(data, np.ma.MaskedArray):
        data = np.ma.filled(data.astype(np.result_type(data.dtype, np.float32)), np.nan)
    if shape_of(data) is None:
        data = as_numbers(f"What plot.{figure} is to draw", data)
    refuse_large(f"What plot.{figure} is to draw", data, "select samples or steps, or rl.options(memory=...)")
    values = as_numpy(data)
    if values.dtype.kind == "f" and values.dtype.itemsize < 4:
        return values.astype(np.float32)
    if values.dtype.kind in "biu":
        return values.astype(np.float64)
    if values.dtype.kind != "f":
        raise InputError(
            f"plot.{figure} draws real numbers.",
            got=f"dtype {values.dtype}",
            expected="an array of real numbers",
            hint="abs(data), data.real or data.imag" if values.dtype.kind == "c" else "",
        )
    return values


def label_array(
    data: Any, figure: str, *, dims: Sequence[str] | None = None, guess: Mapping[int, Sequence[str]] | None = None
) -> xr.DataArray:
    """Return a DataArray of floats; dimensions of plain arrays come from ``dims``, or by rank from ``guess``.

    Raise InputError for a whole layer or trace instead of one of its variables, an empty array, a rank without a guess,
    ``dims`` that do not fit, or anything but numbers.
    """
    if isinstance(data, xr.DataArray):
        array = data.copy(data=to_real_numpy(data.values, figure), deep=False)
    else:
        values = to_real_numpy(data, figure)
        array = xr.DataArray(values, dims=_dims_of(values, figure, dims, guess or OVER_TIME))
    if len(set(array.dims)) < array.ndim:
        raise InputError(
            f"plot.{figure} needs a name of its own for each dimension.",
            got=f"dimensions ({', '.join(map(str, array.dims))})",
        )
    if array.size == 0:
        raise InputError(f"plot.{figure} got an empty array.", got=str(dict(array.sizes)), expected="values to draw")
    return array


def _layer_of(data: Any) -> str:
    """Return the name of a layer, or of the first layer of a result; 'lstm' where it has no name."""
    name = getattr(data, "name", None) if has_attribute(data, "dataset") else None
    first = next(iter(data), None) if isinstance(data, Mapping) and not isinstance(data, xr.Dataset) else None
    return next((str(known) for known in (name, first) if isinstance(known, str)), "lstm")


def _refuse_whole_results(data: Any, figure: str) -> None:
    dataset = data.dataset if has_attribute(data, "dataset") else data
    if isinstance(dataset, xr.Dataset):
        received, needed = f"a whole layer with {', '.join(map(str, dataset.data_vars))}", "one of them"
    elif isinstance(data, Mapping) or has_attribute(data, "keys"):
        received, needed = type(data).__name__, "one variable of one layer"
    else:
        return
    hint = f'pass {needed}, such as trace["{_layer_of(data)}"].hidden_grad'
    raise InputError(f"plot.{figure} draws one variable.", got=received, expected="a DataArray or an array", hint=hint)


def _dims_of(
    values: Numbers, figure: str, dims: Sequence[str] | None, guess: Mapping[int, Sequence[str]]
) -> tuple[str, ...]:
    if dims is not None:
        if len(dims) != values.ndim:
            raise InputError(
                "dims= does not fit the array.",
                got=f"{tuple(dims)} for shape {values.shape}",
                expected=f"{values.ndim} names",
            )
        return tuple(dims)
    if values.ndim not in guess:
        known_ranks = "; ".join(f"{rank}: ({', '.join(names)})" for rank, names in guess.items())
        raise InputError(
            f"plot.{figure} cannot tell the dimensions of this array.",
            got=f"shape {values.shape}",
            expected=f"a DataArray, or an array of rank {known_ranks}",
            hint=f"name them, such as dims={tuple(guess[max(guess)])!r}",
        )
    return tuple(guess[values.ndim])


def require_dim(array: xr.DataArray, dim: str, figure: str, *, hint: str | None = None) -> None:
    """Raise InputError with the known dimensions if ``dim`` is not among them."""
    if dim not in array.dims:
        known_dims = [str(known_dim) for known_dim in array.dims]
        raise InputError(
            f"plot.{figure} needs a dimension that this array does not have.",
            got=f"dimensions ({', '.join(known_dims)})",
            expected=f"{dim!r} among them",
            hint=hint or did_you_mean(dim, known_dims),
        )


def refuse_reserved_dim(array: xr.DataArray, dim: str | None, figure: str, *reserved_dims: str) -> None:
    """Raise InputError if a dimension is chosen for one purpose that the figure needs for another."""
    if dim is not None and dim in reserved_dims:
        free_dims = [str(array_dim) for array_dim in array.dims if array_dim not in reserved_dims]
        raise InputError(
            f"plot.{figure} has a place of its own for {dim!r}.",
            got=f"{dim!r} asked for elsewhere",
            expected=f"one of {', '.join(map(repr, free_dims))}" if free_dims else "another dimension",
        )


def require_time(array: xr.DataArray, figure: str, *, hint: str | None = None) -> None:
    """Raise InputError if there is no time axis, or two, as in a time Jacobian."""
    if IN_TIME in array.dims or OUT_TIME in array.dims:
        hint = "plot.time_jacobian or plot.lag_profile draw what runs over two times"
    require_dim(array, TIME, figure, hint=hint)


def unit_dim(array: xr.DataArray) -> str | None:
    """Return the dimension that counts units: ``unit``, ``feature``, or ``cell_unit`` for a state of another size."""
    dims = [str(d) for d in array.dims]
    exact_dims = [d for d in (UNIT, FEATURE) if d in dims]
    return next(iter(exact_dims + [d for d in dims if d.endswith(("_unit", "_feature"))]), None)


def direction_views(array: xr.DataArray, *, as_computed: bool = False) -> list[DirectionView]:
    """Split an array into forward and backward direction, in chronological time or in the order ``as_computed``."""
    time_label = axis_label(array, TIME)
    if DIRECTION not in array.dims:
        return [DirectionView(None, array, time_label)]
    views: list[DirectionView] = []
    for name in names_of(array, DIRECTION):
        data = array.isel({DIRECTION: len(views)}, drop=True)
        label = time_label
        if as_computed and name == BACKWARD and TIME in data.dims:
            data = data.isel({TIME: slice(None, None, -1)}).drop_vars(TIME, errors="ignore")
            label = f"{time_label}, as computed (from the last)"
        views.append(DirectionView(name, data, label))
    return views


def names_of(array: xr.DataArray, dim: Hashable) -> list[str]:
    """Return the labels along ``dim`` as text: its coordinate, else positions."""
    if dim in array.coords:
        return [str(value) for value in array.coords[dim].values]
    return [str(i) for i in range(array.sizes[dim])]


def positions(array: xr.DataArray, dim: Hashable) -> Numbers:
    """Return the positions along ``dim`` for an axis: a numeric coordinate, else 0, 1, 2, ..."""
    if dim in array.coords and array.coords[dim].values.dtype.kind in "iuf":
        return np.asarray(array.coords[dim].values)
    return np.arange(array.sizes[dim])


def axis_label(array: xr.DataArray, dim: Hashable) -> str:
    """Return the axis label for ``dim``: long_name of its coordinate, else its name."""
    if dim in array.coords:
        return str(array.coords[dim].attrs.get("long_name", dim)).replace("_", " ")
    return _DIM_LABELS.get(str(dim), str(dim).replace("_", " "))


def numpy_by_sample(array: xr.DataArray, *dims: str) -> Numbers:
    """Return the values of an array as (sample, *dims, ...); an array without a sample axis gets one of length 1."""
    array = array if SAMPLE in array.dims else array.expand_dims(SAMPLE)
    return np.asarray(array.transpose(SAMPLE, *dims, ...).values)


def norm_over(array: xr.DataArray, dims: Iterable[Hashable]) -> xr.DataArray:
    """Return the Euclidean norm over dimensions, with attributes, and the coordinates of the other dimensions."""
    dims = list(dims)

    def norm(values: Numbers) -> Numbers:
        return np.asarray(safe_norm(values, axis=tuple(range(-len(dims), 0))))

    norms: xr.DataArray = xr.apply_ufunc(norm, array, input_core_dims=[dims], keep_attrs=True)
    return norms


def value_label(array: xr.DataArray) -> str:
    """Return the label of the values: symbol, long_name or name, and units unless they are 1."""
    label = str(array.attrs.get("long_name") or (array.name if array.name is not None else "value")).replace("_", " ")
    units = str(array.attrs.get("units", "1")).removesuffix(" / 1")  # a loss divided by a dimensionless quantity
    definition = str(array.attrs.get("definition", "")).replace("partial ", "\\partial{}").replace(" / ", "/")
    match = re.match(r"(dL/d|\\partial\{\}L/\\partial\{\})([a-z]+_[a-z0])\b", definition)
    symbol = f"${match[1]}{match[2]}$" if match else ""
    label = ", ".join(label_part for label_part in (symbol, label) if label_part)
    return label if units in ("", "1") else f"{label} [{units}]"


def position_title(array: xr.DataArray, dim: Hashable, index: int) -> str:
    """Return a panel title for one position along ``dim``: ``unit 3``, or a name such as ``before training``."""
    name = names_of(array, dim)[index]
    has_names = dim in array.coords and array.coords[dim].values.dtype.kind in "UO"
    return name if has_names else f"{axis_label(array, dim)} {name}"


def title_of(array: xr.DataArray) -> str:
    """Return a title of layer name and quantity (``long_name``), as far as they are known."""
    return layer_title(array.attrs, array.attrs.get("long_name") or array.name)


def layer_title(attrs: Mapping[str, Any], *title_parts: object) -> str:
    """Return a title that starts with the layer's name, if it is known, followed by ``title_parts``."""
    return " · ".join(str(part) for part in (attrs.get("layer"), *title_parts) if part)


def chunks(values: Numbers) -> Iterator[Numbers]:
    """Yield values in flat chunks of bounded size, so that no temporary array is as large as the data."""
    flat_values = values.reshape(-1) if values.flags.c_contiguous else None
    if flat_values is None:
        yield from (values[i].reshape(-1) for i in range(len(values))) if values.ndim > 1 else (values,)
        return
    for start in range(0, flat_values.size, _CHUNK):
        yield flat_values[start : start + _CHUNK]


def finite_range(values: Numbers) -> tuple[float, float] | None:
    """Return the smallest and largest finite value; None if no value is finite."""
    low, high = math.inf, -math.inf
    for chunk in chunks(values):
        with np.errstate(invalid="ignore"):
            lowest, highest = float(np.fmin.reduce(chunk)), float(np.fmax.reduce(chunk))
        if not (math.isfinite(lowest) and math.isfinite(highest)):
            finite_values = chunk[np.isfinite(chunk)]
            if finite_values.size == 0:
                continue
            lowest, highest = float(finite_values.min()), float(finite_values.max())
        low, high = min(low, lowest), max(high, highest)
    return None if low > high else (low, high)


def largest_magnitude(*arrays: Numbers) -> float:
    """Return the largest finite magnitude in all arrays; 0 if there is none."""
    ranges = [value_range for value_range in map(finite_range, arrays) if value_range is not None]
    return max((max(abs(low), abs(high)) for low, high in ranges), default=0.0)


def zero_note(*arrays: Numbers) -> str | None:
    """Return a note that all values are 0, which makes a picture white; None if a value is not 0 or not finite."""
    return None if any(np.any(array != 0) for array in arrays) else "every value is 0"


def nonfinite_note(values: Numbers) -> str | None:
    """Return a note with counts such as ``"NaN: 3 of 4,000 (0.075 %)"``; None if all values are finite."""
    counts = {"NaN": 0, "Inf": 0}
    for chunk in chunks(values):
        if not np.isfinite(chunk).all():
            counts["NaN"] += int(np.isnan(chunk).sum())
            counts["Inf"] += int(np.isinf(chunk).sum())
    size = values.size
    return ", ".join(f"{word}: {n:,} of {size:,} ({100 * n / size:.3g} %)" for word, n in counts.items() if n) or None


def nonfinite_by_name(names: Iterable[str], arrays: Iterable[Numbers]) -> list[str]:
    """Return notes on NaN and infinite values of several arrays, as :func:`nonfinite_note`, each after a name."""
    notes = map(nonfinite_note, arrays)
    return [f"{name}: {note}" for name, note in zip(names, notes, strict=True) if note]


def select_evenly(count: int, limit: int, items: str, *, page: int | None = None) -> tuple[list[int], str | None]:
    """Select at most ``limit`` of ``count`` items, evenly spaced or the page-th run; also return a note."""
    if page is None:
        if count <= limit:
            return list(range(count)), None
        indices = np.linspace(0, count - 1, limit).round().astype(int) if limit > 1 else np.array([0])
        return [int(i) for i in indices], f"{limit} of {count} {items}, evenly spaced"
    pages = math.ceil(count / limit)
    if not 0 <= page < pages:
        raise InputError("There is no such page.", got=f"page={page}", expected=f"0 to {pages - 1}")
    page_indices = list(range(page * limit, min(count, (page + 1) * limit)))
    return page_indices, f"{items} {page_indices[0]}-{page_indices[-1]} of {count} (page {page} of 0-{pages - 1})"


def select_largest(sizes: Numbers, limit: int, items: str, *, page: int | None = None) -> tuple[list[int], str | None]:
    """Select at most ``limit`` of the items with the largest sizes, in their order, or the page-th run; also a note."""
    if page is not None or len(sizes) <= limit:
        return select_evenly(len(sizes), limit, items, page=page)
    order = np.argsort(-np.nan_to_num(sizes, nan=np.inf), kind="stable")
    return sorted(order[:limit].tolist()), f"the {limit} largest of {len(sizes)} {items}"


def rms_along(array: xr.DataArray, dim: str, *, changes: bool = False) -> Numbers:
    """Return the RMS of the values at each position along ``dim``, or of their changes from step to step."""

    def rms(values: xr.DataArray) -> float:
        numbers = np.asarray(values.transpose(..., TIME).values, np.float64)
        numbers = np.diff(numbers, axis=-1) if changes and numbers.shape[-1] > 1 else numbers
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.sqrt(np.square(numbers).mean()))

    return np.array([rms(array.isel({dim: i})) for i in range(array.sizes[dim])])


def dataset_of(layer: Any) -> xr.Dataset | None:
    """Return the variables of one layer (a layer result or a Dataset); None for anything else."""
    if isinstance(layer, xr.Dataset):
        return layer
    dataset = layer.dataset if has_attribute(layer, "dataset") else None
    return dataset if isinstance(dataset, xr.Dataset) else None


def layers_of(result: Any, figure: str) -> dict[str, xr.Dataset]:
    """Return layers by name from a trace, a DataTree, a mapping of layers, or one layer; raise InputError for none."""
    single_layer = dataset_of(result)
    if isinstance(result, xr.DataTree):
        layers = {
            path.strip("/") or str(node.name or "layer"): node.to_dataset()
            for path, node in result.subtree_with_keys
            if node.data_vars
        }
    elif single_layer is not None:
        layers = {
            str(
                single_layer.attrs.get("layer", result.name if has_attribute(result, "name") else "layer")
            ): single_layer
        }
    else:
        names: Iterable[Any] = ()
        if hasattr(type(result), "__getitem__") and has_attribute(result, "keys"):
            names = result.keys()
        elif hasattr(type(result), "__getitem__") and has_attribute(result, "layers"):
            names = result.layers
        pairs = ((str(name), dataset_of(result[name])) for name in names)
        layers = {name: dataset for name, dataset in pairs if dataset is not None}
    if not layers:
        raise InputError(
            f"plot.{figure} draws the layers of a trace.",
            got=type(result).__name__,
            expected="a trace, one layer of it, or a Dataset",
            hint="pass what rl.trace(model, x, y) returned",
        )
    return layers


def state_gradient(dataset: xr.Dataset, name: str) -> str:
    """Return ``name``; for ``hidden_grad`` the gradient of a layer's first state where no state has the name hidden."""
    return f"{state_of(dataset.attrs)}_grad" if name == "hidden_grad" and name not in dataset else name


def layer_variable(result: Any, name: str, figure: str, *, masked: bool = False) -> Any:
    """Return one variable of a layer, ``masked`` with the layer's mask; any other object is returned unchanged."""
    dataset = dataset_of(result)
    if (
        dataset is None
        and not isinstance(result, xr.DataArray)
        and (isinstance(result, Mapping) or has_attribute(result, "layers"))
    ):
        layers = layers_of(result, figure)
        if len(layers) > 1:
            raise InputError(
                f"plot.{figure} draws one layer.",
                got=f"layers {', '.join(layers)}",
                hint=f"pass one, such as result[{next(iter(layers))!r}]",
            )
        dataset = next(iter(layers.values()))
    if dataset is None:
        return result
    name = state_gradient(dataset, name)
    if name not in dataset:
        hint = did_you_mean(name, map(str, dataset.data_vars))
        raise InputError(f"plot.{figure} needs {name!r}, which this layer does not have.", hint=hint)
    return with_mask(dataset, name) if masked else dataset[name]
