"""Weights of Keras layers, by name and as known cells. The gates have Keras' own order: i, f, c, o and z, r, h."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np

from ...autodiff import Engine
from ...errors import UnsupportedError
from ...recurrence.cells import Cell, registered
from ...recurrence.cells.registry import Registration
from ...typing import Array
from ..protocol import LayerWeights
from ..shared.registered_cells import ComposedWeight, with_step_autodiff
from .dialect import dialect_of, is_layer, loaded_dialects

#: Names of variables that a layer updates itself, without the optimizer.
_STATISTICS = ("moving_mean", "moving_variance")


def known_class(cell: Any) -> type[Cell] | None:
    """Return the class with the equations of a cell of Keras' own type and activations; None for any other cell."""
    equations = next((d.cells[type(cell)] for d in loaded_dialects() if type(cell) in d.cells), None)
    if isinstance(equations, Mapping):  # a convolution: number of spatial axes -> class
        equations = equations[cell.rank] if cell.data_format == "channels_last" else None
    if equations is None or "call" in vars(cell):
        return None
    return equations if all(_activation(cell, role) is not None for role in _roles(cell)) else None


def class_of(cell: Any) -> type[Cell] | None:
    """Return the class with the equations of a Keras cell, built in or registered by the user; None if unknown."""
    registration = registration_of(cell)
    return known_class(cell) if registration is None else registration.cell


def kind_of(cell: Any) -> str:
    """Return the kind of a cell in one word, such as ``"lstm"``, or its own class name if its equations are unknown."""
    # A layer of cuDNN has a named tuple for a cell.
    cell_class = class_of(cell) if hasattr(cell, "__dict__") else None
    return type(cell).__name__ if cell_class is None else cell_class.kind


def computation_dtype(layer: Any) -> str:
    """Return the dtype in which a recurrent layer computes, which may be less precise than ``compute_dtype``.

    On JAX and torch, Keras' operations round float64 to float32 by default. Some kernels of an engine also have
    single-precision constants, such as torch's slope of ``hard_sigmoid``.
    """
    keras, cell = dialect_of(layer), layer.cell
    dtype = keras.computation_dtype(layer.compute_dtype)
    imprecise = keras.single_precision
    if dtype == "float64" and known_class(cell) and any(_activation(cell, role) in imprecise for role in _roles(cell)):
        return "float32"
    return dtype


def copy_of(variable: Any) -> Array:
    """Return the value of a variable as an array that shares no memory with it."""
    keras = dialect_of(variable)
    value = keras.engine.to_array(keras.ops.convert_to_tensor(variable))
    return value.clone() if hasattr(value, "clone") else np.array(value)


def cell_with_equations(cell: Any, engine: Engine | None = None) -> Cell | None:
    """Return a known cell with its weights; ``engine`` differentiates the step of a registered one."""
    registration = registration_of(cell)
    if registration is None:
        return None if known_class(cell) is None else _known_cell(cell)
    known_cell = registration.make(cell, {name: copy_of(v) for name, v in attribute_variables(cell).items()})
    if engine is None:
        return known_cell
    keras = dialect_of(cell)

    def as_tensor(array: Array) -> Any:
        return keras.ops.convert_to_tensor(array, dtype=str(array.dtype).rpartition(".")[2])

    return with_step_autodiff(known_cell, registration, engine, keras.namespace(), as_tensor)


def layer_signature(layer: Any) -> tuple[Any, ...]:
    """Return kind, state sizes and biases of a recurrent layer.

    The directions of a bidirectional layer must share them.
    """
    cell = layer.cell
    sizes = (cell.filters,) if hasattr(cell, "filters") else tuple(dialect_of(layer).tree.flatten(cell.state_size))
    details = (cell.bias is not None, getattr(cell, "reset_after", None)) if known_class(cell) else ()
    return (kind_of(cell), ", ".join(map(str, sizes)), details)


def _known_cell(cell: Any) -> Cell:
    cell_class: Any = known_class(cell)
    arrays = known_arrays(cell, {name: copy_of(variable) for name, variable in cell_variables(cell).items()})
    options: dict[str, Any] = {role: _activation(cell, role) or "" for role in _roles(cell)}
    if hasattr(cell, "reset_after"):
        options["reset_after"] = bool(cell.reset_after)
    if cell_class.space:
        options |= {"strides": cell.strides, "dilation": cell.dilation_rate, "padding": cell.padding}
    known_cell: Cell = cell_class(**options, **arrays)
    return known_cell


def known_arrays(cell: Any, by_variable: Mapping[str, Any]) -> dict[str, Any]:
    """Rename arrays from Keras' variable names to the names of the rnnlens cell: its weights, or their gradients."""
    registration = registration_of(cell)
    if registration is not None:
        return registration.arrays(by_variable)
    arrays = dict(by_variable)
    if has_two_biases(cell):
        biases = arrays["bias"]
        arrays["bias"], arrays["recurrent_bias"] = biases[0], biases[1]
    return arrays


def has_two_biases(cell: Any) -> bool:
    """Return whether a known cell has both biases in one variable, as a GRU with ``reset_after=True``."""
    return known_class(cell) is not None and cell.bias is not None and bool(getattr(cell, "reset_after", False))


def cell_variables(cell: Any) -> dict[str, Any]:
    """Return the variables of a cell by the names that ``weight_grads`` and ``weight_vjp`` use."""
    if known_class(cell) is not None:
        names = ("kernel", "recurrent_kernel", *(["bias"] if cell.bias is not None else []))
        return {name: getattr(cell, name) for name in names}
    if not is_layer(cell):
        return {}  # Keras tracks no variables of such a cell
    return named_variables(cell) if registration_of(cell) is None else attribute_variables(cell)


def named_variables(layer: Any) -> dict[str, Any]:
    """Return the variables of any layer by unique names: the last part of the path, or else the path in the layer.

    Of variables with one path the second has ``#2`` appended, and so on; those of sublayers come last.
    """
    named = [(dialect_of(v).variable_name(v), v) for v in dialect_of(layer).weights(layer)]
    weights = [v for name, v in named if name != "rnn_state"]
    by_name = {name: v for name, v in named if name != "rnn_state"}
    if len(by_name) == len(weights):
        return by_name
    by_path: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    own_ids = set(map(id, dialect_of(layer).own_variables(layer)))
    for variable in sorted(weights, key=lambda v: id(v) not in own_ids):  # those of sublayers later
        path = _path_within(layer, dialect_of(variable).path(variable))
        counts[path] += 1
        by_path[path if counts[path] == 1 else f"{path}#{counts[path]}"] = variable
    return by_path


def layer_weights(layer: Any, recurrent_layers: Mapping[str, Any], excluded_ids: Container[int] = ()) -> LayerWeights:
    """Return the weights of a layer, without variables whose ids are in ``excluded_ids``.

    ``recurrent_layers`` are the layer's recurrent layers by direction.
    """
    keras = dialect_of(layer)
    variables = {name: v for name, v in named_variables(layer).items() if id(v) not in excluded_ids}
    is_alike = len({layer_signature(recurrent_layer) for recurrent_layer in recurrent_layers.values()}) == 1
    similar_layers = recurrent_layers.items() if is_alike else ()
    known_cells = {
        direction: cell_with_equations(recurrent_layer.cell) for direction, recurrent_layer in similar_layers
    }
    cells = {direction: cell for direction, cell in known_cells.items() if cell is not None}
    composed_by_name = composed_weights(variables, recurrent_layers) if cells else {}
    if composed_by_name:
        return _registered_weights(layer, variables, composed_by_name, cells)
    penalties = keras.regularizers(layer)
    return LayerWeights(
        values={name: copy_of(v) for name, v in variables.items()},
        trainable={name: bool(v.trainable) for name, v in variables.items()},
        cells=cells,
        penalties={name: penalties[id(v)] for name, v in variables.items() if id(v) in penalties},
        statistics=frozenset(name for name, v in variables.items() if keras.variable_name(v) in _STATISTICS),
        tables=frozenset(name for name, v in variables.items() if keras.variable_name(v) == "embeddings"),
    )


def _registered_weights(
    layer: Any, variables: Mapping[str, Any], weights: Mapping[str, ComposedWeight], cells: dict[str, Cell]
) -> LayerWeights:
    """Return the weights of a layer with a registered cell, under the names that the registration declares."""
    penalties = dialect_of(layer).regularizers(layer)
    for name, variable in variables.items():
        if id(variable) in penalties:  # it could not be divided among the variables that compose a weight
            raise UnsupportedError(
                f"Layer {layer.name!r}: weight {name!r} of its registered cell has a regularizer, which "
                "registered cells do not support.",
                expected="add the penalty to the loss, or do not register the cell",
            )
    arrays = {key: copy_of(v) for key, v in variables.items()}
    values, trainable = {}, {}
    for key, weight in weights.items():
        values[key] = weight.registration.arrays(
            {name: arrays[part_key] for name, (_, part_key) in weight.keys.items()}
        )[weight.name]
        trainable[key] = all(variables[part_key].trainable for _, part_key in weight.keys.values())
    return LayerWeights(values, trainable, cells)


def _roles(cell: Any) -> tuple[str, ...]:
    return tuple(role for role in ("activation", "recurrent_activation") if hasattr(cell, role))


def _activation(cell: Any, role: str) -> str | None:
    function = getattr(cell, role)
    if function is None:
        return "linear"
    try:
        return next((d.known_activations[function] for d in loaded_dialects() if function in d.known_activations), None)
    except TypeError:  # an unhashable callable is the user's own
        return None


def _path_within(layer: Any, path: str) -> str:
    marker = f"{layer.name}/"
    return path[path.index(marker) + len(marker) :] if marker in path else path


#: Largest depth of nested layers within a cell that is searched for weights.
_SEARCH_DEPTH = 4


def registration_of(cell: Any) -> Registration | None:
    """Return the registration of a cell's class; None if there is none, or if its instance overrides ``call``."""
    return None if cell is None or "call" in vars(cell) else registered(cell)


def attribute_variables(cell: Any) -> dict[str, Any]:
    """Return the variables of a cell by attribute: ``"u"``, ``"dense.kernel"``; others by their own names."""
    by_attribute = dict(_walk_attributes(cell, "", _SEARCH_DEPTH))
    found_ids = {id(v) for v in by_attribute.values()}
    other_variables = {
        dialect_of(v).variable_name(v): v for v in dialect_of(cell).weights(cell) if id(v) not in found_ids
    }
    return {
        name: v for name, v in (by_attribute | other_variables).items() if "seed" not in dialect_of(v).variable_name(v)
    }


def _walk_attributes(layer: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    keras = dialect_of(layer)
    visited_ids: set[int] = set()
    for name, value in vars(layer).items():
        name = name.lstrip("_") if prefix or isinstance(value, keras.Variable) else name
        if isinstance(value, keras.Variable) and id(value) not in visited_ids:
            visited_ids.add(id(value))
            yield prefix + name, value
        elif isinstance(value, keras.Layer) and depth:
            yield from _walk_attributes(value, f"{prefix}{name}.", depth - 1)


def composed_weights(variables: Mapping[str, Any], recurrent_layers: Mapping[str, Any]) -> dict[str, ComposedWeight]:
    """Return the composed weights of a layer with registered cells; ``variables`` has its variables by key."""
    keys = {id(v): key for key, v in variables.items()}
    weights: dict[str, ComposedWeight] = {}
    for direction, recurrent_layer in recurrent_layers.items():
        registration = registration_of(recurrent_layer.cell)
        if registration is None:
            return {}
        part_keys = {name: keys[id(v)] for name, v in attribute_variables(recurrent_layer.cell).items()}
        prefix = f"{direction}/" if len(recurrent_layers) > 1 else ""
        arrays = registration.arrays(
            {name: dialect_of(variables[key]).value_of(variables[key]) for name, key in part_keys.items()}
        )
        weights |= {
            prefix + name: ComposedWeight(
                registration, name, {part_name: ("", key) for part_name, key in part_keys.items()}
            )
            for name in arrays
        }
    return weights
