"""Labels for plain arrays: dimensions, coordinates and descriptions of each quantity; no array is copied."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import numpy as np
import xarray as xr

from .. import __version__
from ..autodiff.tensors import dtype_name, to_numpy
from ..errors import InputError
from ..layout import direction_axis, with_space
from ..recurrence.cells import Cell, cell_of_kind, kinds
from ..vocabulary import (
    BACKWARD,
    CHANNEL,
    DIRECTION,
    FEATURE,
    FORWARD,
    GATE,
    IN_FEATURE,
    IN_TIME,
    OUT_TIME,
    OUT_UNIT,
    QUANTITIES,
    SAMPLE,
    SPACE,
    STATE,
    TIME,
    UNIT,
    UNIT_IN,
    Quantity,
    leading_state,
    state_quantity,
    unnamed_states,
)

#: Version of the layout of files; increased when older and newer versions could misread each other's files.
SCHEMA_VERSION = 1

_DIMENSION_WORDS: dict[str, tuple[str, str]] = {
    SAMPLE: ("sample", "index in the batch, from 0"),
    TIME: ("time step", "chronological: 0 is the first input step, whatever the direction of the layer"),
    FEATURE: ("input feature", "position in the layer input, from 0"),
    UNIT: ("unit", "position in the layer, from 0"),
    CHANNEL: ("channel", "position among the channels of a state, from 0"),
    UNIT_IN: ("previous hidden unit", "unit of h_{t-1} that a recurrent weight reads"),
    GATE: ("gate", "gate names of rnnlens, the same for every framework"),
    STATE: ("state", "states carried from step to step"),
    DIRECTION: ("direction", "direction of a bidirectional layer; both are in chronological time"),
    OUT_TIME: ("output time step", "chronological, from 0"),
    OUT_UNIT: ("output unit", "position in the output, from 0"),
    IN_TIME: ("input time step", "chronological, from 0"),
    IN_FEATURE: ("input feature", "position in the input, from 0"),
}

_QUANTITY_POSITIONS = {name: position for position, name in enumerate(QUANTITIES)}

_BORDER_STATE_NAME = re.compile(r"(?P<when>initial|final)_(?P<state>.+?)(_grad)?")


def quantity(name: str, cell: str = "") -> Quantity:
    """Return the quantity with that name: of a trace, a weight of a kind of cell, their gradients, or a custom state.

    >>> quantity("hidden_grad").dims
    ('sample', 'time', 'unit')
    >>> quantity("recurrent_kernel_grad", "gru").dims
    ('unit_in', 'gate', 'unit')
    >>> quantity("initial_state_1_grad").long_name
    'gradient of the initial state 1'
    """
    if name in QUANTITIES:
        return QUANTITIES[name]
    stem, is_gradient = name.removesuffix("_grad"), name.endswith("_grad")
    weight = weight_quantity_of(stem, cell)
    if weight is not None:
        return weight_quantity(weight, gradient=is_gradient)
    border_match = _BORDER_STATE_NAME.fullmatch(name)  # used where the states of a cell differ in size
    if border_match is None:
        return state_quantity(stem, gradient=is_gradient)
    description = f"{border_match['when']} {border_match['state'].replace('_', ' ')}"
    symbol = f"{border_match['state']}_{'0' if border_match['when'] == 'initial' else 'T'}"
    if not is_gradient:
        return Quantity(
            name, (SAMPLE, UNIT), description, "1", f"{symbol}, chronologically by the layer's own direction"
        )
    return Quantity(name, (SAMPLE, UNIT), f"gradient of the {description}", "loss", f"dL/d{symbol}", True)


def weight_quantity_of(name: str, cell: str = "") -> Quantity | None:
    """Return the weight quantity of that name for a kind of cell, or of any cell if the kind is unknown; else None."""
    cells = kinds()
    for cell_kind in [cells[cell]] if cell in cells else cells.values():
        if name in cell_kind.parameters:
            return cell_kind.parameters[name]
    return None


def weight_quantity(weight: Quantity, *, gradient: bool) -> Quantity:
    """Return the quantity of a weight, or of its gradient."""
    if not gradient:
        return weight
    definition = f"dL/d{weight.name}, summed over samples (and over time where there is no time axis)"
    return Quantity(f"{weight.name}_grad", weight.dims, f"gradient of the {weight.long_name}", "loss", definition, True)


@dataclass
class LabelledLayer:
    """Labelled arrays of one layer, from which :meth:`dataset` makes an xarray Dataset when one is asked for.

    A Dataset builds an index for each dimension, which takes as long as the replay of a small layer.
    """

    variables: dict[str, xr.Variable]
    coords: dict[Hashable, xr.Variable]
    attrs: dict[str, Any]

    @property
    def sizes(self) -> dict[Hashable, int]:
        """Length of each dimension."""
        labelled_arrays = (*self.variables.values(), *self.coords.values())
        return {dim: size for variable in labelled_arrays for dim, size in variable.sizes.items()}

    def dataset(self) -> xr.Dataset:
        """Return all arrays of the layer as an xarray Dataset."""
        return xr.Dataset(self.variables, self.coords, self.attrs)


def layer_dataset(arrays: Mapping[str, Any], **options: Any) -> xr.Dataset:
    """Label the arrays of one layer, as :func:`labelled_layer` does, and return them as a Dataset."""
    return labelled_layer(arrays, **options).dataset()


def labelled_layer(
    arrays: Mapping[str, Any],
    *,
    info: Any,
    provenance: Mapping[str, str] | None = None,
    bidirectional: bool | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
) -> LabelledLayer:
    """Label the arrays of one layer.

    Parameters
    ----------
    arrays
        Arrays by quantity name (``vocabulary.QUANTITIES``, names of custom states, weights and their ``_grad``); None
        is skipped. Axes are sample first, then time, chronological. Variables are sorted as in the vocabulary.
    info
        A :class:`~rnnlens.adapters.protocol.LayerInfo` or a mapping with its fields; ``name`` is required. ``cell``
        gives the gate and state names, ``gates`` and ``states`` override them.
    provenance
        Strings by name, stored as one line of text in every variable.
    bidirectional
        True if arrays may have a direction axis (forward first), after time, or after sample where there is no time.
        Default: the direction in ``info``. Arrays without that axis (input, mask) are recognised by their rank.
    dims
        Dimensions of single arrays, by name, which replace those found by rank.

    Returns
    -------
    LabelledLayer
        ``unit`` has the size of the hidden state (of the output, where there is none). Variables of another size, such
        as the cell state of an LSTM with a projection, get a dimension of their own: ``cell_unit``.

    Raises
    ------
    InputError
        If the rank of an array does not fit its quantity.
    """
    info_fields = info_mapping(info)
    is_bidirectional = info_fields.get("direction") == "bidirectional" if bidirectional is None else bidirectional
    host_arrays = {
        name: to_host(arrays[name])
        for name in sorted(arrays, key=lambda name: _QUANTITY_POSITIONS.get(name, len(_QUANTITY_POSITIONS)))
        if arrays[name] is not None
    }
    cell = str(info_fields.get("cell", ""))
    dims_by_name = {
        name: tuple((dims or {}).get(name) or _dims(name, array, is_bidirectional, cell))
        for name, array in host_arrays.items()
    }
    states = info_fields.get("states")
    dims_by_name = _separate_units(dims_by_name, host_arrays, leading_state(states) if states else "hidden")
    common_attrs = {
        "layer": str(info_fields["name"]),
        "schema": SCHEMA_VERSION,
        "provenance": provenance_line(provenance),
        # Of a layer that runs backward, the direction stands beside every array: its recurrence ends at the first step.
        **({DIRECTION: BACKWARD} if info_fields.get("direction") == BACKWARD else {}),
    }
    variables = {
        name: xr.Variable(
            dims_by_name[name],
            array,
            {**quantity_attrs(name, cell), **common_attrs, **_dtype_attrs(arrays[name], array)},
        )
        for name, array in host_arrays.items()
    }
    if "gates" in variables:
        cell_class = cell_of_kind(cell)
        proposals = [gate for gate in cell_class.gates if gate in cell_class.proposals]
        variables["gates"].attrs |= {"proposals": " ".join(proposals)} if cell_class.gates else {}
        variables["gates"].attrs |= {"keeping": cell_class.keeping} if cell_class.keeping else {}
    size_by_dim = {dim: size for variable in variables.values() for dim, size in variable.sizes.items()}
    return LabelledLayer(variables, coordinates(size_by_dim, info_fields), _layer_attrs(info_fields))


def info_mapping(info: Any) -> dict[str, Any]:
    """Return the fields of a LayerInfo, or of a mapping, as a new dict."""
    if is_dataclass(info) and not isinstance(info, type):
        return asdict(info)
    return dict(info)


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """Return a NumPy view; floats that files cannot store (bfloat16) become float32, which represents them exactly."""
    values = to_numpy(array)
    return values.astype(np.float32) if values.dtype.kind == "V" else values


def state_of(attrs: Mapping[str, Any]) -> str:
    """Return the name of the state that curves and records of a layer show, from the layer's attributes."""
    return leading_state(json.loads(attrs.get("details", "{}")).get("states") or ())


def quantity_attrs(name: str, cell: str = "") -> dict[str, str]:
    """Return the descriptive attributes of a quantity: long_name, units, definition and, where there is one, source."""
    described_quantity = quantity(name, cell)
    attrs = {
        "long_name": described_quantity.long_name,
        "units": described_quantity.units,
        "definition": described_quantity.definition,
    }
    return {**attrs, "source": described_quantity.source} if described_quantity.source else attrs


def provenance_line(provenance: Mapping[str, str] | None) -> str:
    """Format the provenance as one line of text for an attribute.

    >>> provenance_line({"framework": "keras 3.15.1", "dtype": "float32", "rnnlens": "0.1.0"})
    'framework: keras 3.15.1; dtype: float32; rnnlens: 0.1.0'
    """
    return "; ".join(f"{key}: {value}" for key, value in with_version(provenance).items())


def provenance_of(line: str) -> dict[str, str]:
    """Parse the line of text that :func:`provenance_line` returns.

    >>> provenance_of("framework: keras 3.15.1; dtype: float32")
    {'framework': 'keras 3.15.1', 'dtype': 'float32'}
    """
    pairs = (part.partition(": ") for part in line.split("; ") if part)
    return {key: value for key, _, value in pairs}


def format_provenance(provenance: Mapping[str, str]) -> str:
    """Format the provenance for display: each distinct value once, without adapter and loss reduction, rnnlens last."""
    hidden_keys = ("rnnlens", "loss_reduction", "adapter")
    shown_values = dict.fromkeys(value for key, value in provenance.items() if key not in hidden_keys)
    version = provenance.get("rnnlens")
    return ", ".join(shown_values if version is None else [*shown_values, f"rnnlens {version}"])


def with_version(provenance: Mapping[str, str] | None) -> dict[str, str]:
    """Return the provenance with the rnnlens version added, unless it has one."""
    return {**(provenance or {}), "rnnlens": (provenance or {}).get("rnnlens", __version__)}


def coordinates(sizes: Mapping[Any, int], info: Mapping[str, Any]) -> dict[Hashable, xr.Variable]:
    """Return one coordinate per dimension: names for gates, states and directions, positions from 0 for all others."""
    return {str(dim): _coordinate(str(dim), size, info) for dim, size in sizes.items()}


def proposals_of(gates: xr.DataArray) -> list[str]:
    """Return the names of the gates whose value is a proposal for the new state, such as an LSTM's candidate.

    Arrays that are no result of rnnlens have the names of :class:`~rnnlens.recurrence.cells.Cell` by default.
    """
    return str(gates.attrs.get("proposals", " ".join(Cell.proposals))).split()


def concat_directions(datasets: Sequence[xr.Dataset]) -> xr.Dataset:
    """Concatenate a layer's datasets, forward first, along a first axis ``direction``; return a lone one unchanged."""
    if len(datasets) == 1:
        return datasets[0]
    concatenated = xr.concat(datasets, dim=DIRECTION, combine_attrs="override")
    return concatenated.assign_coords(coordinates({DIRECTION: len(datasets)}, {}))


def with_mask(dataset: xr.Dataset, name: str) -> xr.DataArray:
    """Return a variable of a layer, with the layer's mask as a coordinate if some of its steps are padding."""
    if name == "mask" or "mask" not in dataset.data_vars or bool(dataset.variables["mask"].all()):
        return dataset[name]
    return dataset.set_coords("mask")[name]  # without the mask where the variable lacks its dimensions


def labelled_array(
    values: Any,
    dims: Sequence[str],
    *,
    name: str,
    attrs: Mapping[str, Any],
    coords: Mapping[str, Any] | None = None,
    provenance: Mapping[str, str] | None = None,
    info: Mapping[str, Any] | None = None,
) -> xr.DataArray:
    """Label one array that belongs to no layer, such as a time Jacobian; ``coords`` override positions."""
    variable, all_coords = labelled_variable(values, dims, attrs=attrs, coords=coords, provenance=provenance, info=info)
    return xr.DataArray(variable, coords=all_coords, name=name)


def labelled_variable(
    values: Any,
    dims: Sequence[str],
    *,
    attrs: Mapping[str, Any],
    coords: Mapping[str, Any] | None = None,
    provenance: Mapping[str, str] | None = None,
    info: Mapping[str, Any] | None = None,
) -> tuple[xr.Variable, dict[Hashable, xr.Variable]]:
    """Return a labelled variable and its coordinates by dimension, the parts of :func:`labelled_array`."""
    array = to_host(values)
    all_coords = coordinates(dict(zip(dims, array.shape, strict=True)), info or {})
    for dim, labels in (coords or {}).items():
        position_coord = all_coords.get(dim)
        all_coords[dim] = xr.Variable(
            (dim,), np.asarray(labels), position_coord.attrs if position_coord is not None else {}
        )
    common_attrs = {"schema": SCHEMA_VERSION, "provenance": provenance_line(provenance)}
    return xr.Variable(tuple(dims), array, {**attrs, **common_attrs}), all_coords


def _coordinate(dim: str, size: int, info: Mapping[str, Any]) -> xr.Variable:
    long_name, definition = _DIMENSION_WORDS.get(dim, (dim.replace("_", " "), "position, from 0"))
    cell = cell_of_kind(str(info.get("cell", "")))
    names_by_dim: dict[str, Callable[[], Sequence[str]]] = {
        GATE: lambda: info.get("gates") or cell.gates,
        STATE: lambda: info.get("states") or (cell.states if len(cell.states) == size else unnamed_states(size)),
        DIRECTION: lambda: (FORWARD, BACKWARD),
    }
    labels = list(names_by_dim[dim]()) if dim in names_by_dim else []
    values = np.array(labels) if len(labels) == size else np.arange(size)
    return xr.Variable((dim,), values, {"long_name": long_name, "definition": definition})


def _dims(name: str, array: np.ndarray[Any, Any], bidirectional: bool, cell: str) -> tuple[str, ...]:
    """Return the dimensions of an array by quantity and rank: with or without direction and time."""
    space = cell_of_kind(cell).space
    full_dims: tuple[str, ...] = quantity(name, cell).dims
    last_step_dims: tuple[str, ...] = (SAMPLE, UNIT)
    if space:
        full_dims, last_step_dims = with_space(full_dims, space), with_space(last_step_dims, space)
    candidates = [full_dims]
    if name in ("output", "output_grad"):
        candidates = [full_dims, last_step_dims, (SAMPLE,)]
        candidates += [(SAMPLE, *(f"axis_{i}" for i in range(1, array.ndim - 1)), UNIT)]
    elif weight_quantity_of(name.removesuffix("_grad"), cell) is not None:
        candidates = [full_dims, (TIME, *full_dims)]
    if bidirectional:  # the direction comes after time, else after sample, else first
        dims_with_axis = [(dims, direction_axis(dims)) for dims in candidates]
        candidates = [*((*dims[:axis], DIRECTION, *dims[axis:]) for dims, axis in dims_with_axis), *candidates]
    for candidate in candidates:
        if len(candidate) == array.ndim:
            return candidate
    raise InputError(
        f"{name!r} has a wrong number of axes.",
        got=f"shape {array.shape}",
        expected=" or ".join(f"({', '.join(c)})" for c in candidates),
    )


def _separate_units(
    dims_by_name: Mapping[str, tuple[str, ...]], arrays: Mapping[str, np.ndarray[Any, Any]], state: str
) -> dict[str, tuple[str, ...]]:
    """Rename the unit dimension of variables whose last axis is not as long as that of ``state``."""
    of_units = (state, f"{state}_grad", "output", "gates")
    hidden_size = next((arrays[n].shape[-1] for n in of_units if n in arrays), None)
    separated_dims = {}
    state_shape = next((arrays[n].shape for n in of_units[:2] if n in arrays), ())
    for name, dims in dims_by_name.items():
        dims = _separate_space(dims, arrays[name].shape, state_shape)
        if hidden_size is not None and dims[-1:] == (UNIT,) and arrays[name].shape[-1] != hidden_size:
            # Gates have the units of the cell, a gradient those of its variable.
            base_name = re.sub(r"^(initial|final)_(?!state$)", "", name.removesuffix("_grad"))
            unit_owner = "cell" if base_name in ("gates", "gate_preactivation", "gate") else base_name
            dims = (*dims[:-1], f"{unit_owner}_unit")
        separated_dims[name] = dims
    return separated_dims


def _separate_space(dims: tuple[str, ...], shape: tuple[int, ...], state_shape: tuple[int, ...]) -> tuple[str, ...]:
    """Rename the spatial axes of an input to ``input_height`` ... if their sizes differ from those of the states."""
    space_dims = SPACE.get(len([dim for dim in dims if dim in SPACE[3]]), ())
    if not space_dims or FEATURE not in dims or not state_shape:
        return dims
    first_axis = dims.index(space_dims[0])
    if shape[first_axis : first_axis + len(space_dims)] == state_shape[-1 - len(space_dims) : -1]:
        return dims
    return tuple(f"input_{dim}" if dim in space_dims else dim for dim in dims)


def _dtype_attrs(array: Any, stored_array: np.ndarray[Any, Any]) -> dict[str, str]:
    """Return the dtype of the computation as an attribute, if the array is stored in another dtype."""
    if array is stored_array or not hasattr(array, "dtype"):
        return {}
    dtype = dtype_name(array)
    return {} if dtype == dtype_name(stored_array) else {"computed_dtype": dtype}


def _layer_attrs(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a layer: texts unchanged, all other fields as one JSON text."""
    text_fields = {"layer": "name", "kind": "kind", "cell": "cell", "direction": "direction"}
    attrs: dict[str, Any] = {attr: str(info[key]) for attr, key in text_fields.items() if info.get(key)}
    other_fields = {key: value for key, value in info.items() if key not in text_fields.values()}
    return {**attrs, "details": json.dumps(other_fields, default=str), "schema": SCHEMA_VERSION}
