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
from .dialect import dialect_of, loaded_dialects

#: Names of variables that a layer updates itself, without the optimizer.
_STATISTICS = ("moving_mean", "moving_variance")


def known_class(cell: Any) -> type[Cell] | None:
    """Return the class with the equations of a cell of Keras' own type and activations; None for any other cell."""
    ours = next((d.cells[type(cell)] for d in loaded_dialects() if type(cell) in d.cells), None)
    if isinstance(ours, Mapping):  # a convolution: number of spatial axes -> class
        ours = ours[cell.rank] if cell.data_format == "channels_last" else None
    if ours is None or "call" in vars(cell):
        return None
    return ours if all(_activation(cell, role) is not None for role in _roles(cell)) else None


def class_of(cell: Any) -> type[Cell] | None:
    """Return the class with the equations of a Keras cell, built in or registered by the user; None if unknown."""
    known = registration_of(cell)
    return known_class(cell) if known is None else known.cell


def kind_of(cell: Any) -> str:
    """Return the kind of a cell in one word, such as ``"lstm"``, or its own class name if its equations are unknown."""
    # A layer of cuDNN has a named tuple for a cell.
    ours = class_of(cell) if hasattr(cell, "__dict__") else None
    return type(cell).__name__ if ours is None else ours.kind


def computed_in(layer: Any) -> str:
    """Return the dtype in which a recurrent layer computes, which may be less precise than ``compute_dtype``.

    On JAX and torch, Keras' operations round float64 to float32 by default. Some kernels of an engine also have
    single-precision constants, such as torch's slope of ``hard_sigmoid``.
    """
    keras, cell = dialect_of(layer), layer.cell
    computed = keras.computed(layer.compute_dtype)
    single = keras.single_precision
    if computed == "float64" and known_class(cell) and any(_activation(cell, role) in single for role in _roles(cell)):
        return "float32"
    return computed


def copy_of(variable: Any) -> Array:
    """Return the value of a variable as an array that shares no memory with it."""
    keras = dialect_of(variable)
    value = keras.engine.to_array(keras.ops.convert_to_tensor(variable))
    return value.clone() if hasattr(value, "clone") else np.array(value)


def cell_with_equations(cell: Any, engine: Engine | None = None) -> Cell | None:
    """Return a known cell with its weights; ``engine`` differentiates the step of a registered one."""
    known = registration_of(cell)
    if known is None:
        return None if known_class(cell) is None else _known_cell(cell)
    made = known.make(cell, {name: copy_of(v) for name, v in attributes(cell).items()})
    if engine is None:
        return made
    keras = dialect_of(cell)

    def tensor(array: Array) -> Any:
        return keras.ops.convert_to_tensor(array, dtype=str(array.dtype).rpartition(".")[2])

    return with_step_autodiff(made, known, engine, keras.namespace(), tensor)


def likeness(layer: Any) -> tuple[Any, ...]:
    """Return kind, state sizes and biases of a recurrent layer.

    The directions of a bidirectional layer must share them.
    """
    cell = layer.cell
    sizes = (cell.filters,) if hasattr(cell, "filters") else tuple(dialect_of(layer).tree.flatten(cell.state_size))
    details = (cell.bias is not None, getattr(cell, "reset_after", None)) if known_class(cell) else ()
    return (kind_of(cell), ", ".join(map(str, sizes)), details)


def _known_cell(cell: Any) -> Cell:
    ours: Any = known_class(cell)
    arrays = known_arrays(cell, {name: copy_of(variable) for name, variable in cell_variables(cell).items()})
    options: dict[str, Any] = {role: _activation(cell, role) or "" for role in _roles(cell)}
    if hasattr(cell, "reset_after"):
        options["reset_after"] = bool(cell.reset_after)
    if ours.space:
        options |= {"strides": cell.strides, "dilation": cell.dilation_rate, "padding": cell.padding}
    made: Cell = ours(**options, **arrays)
    return made


def known_arrays(cell: Any, by_variable: Mapping[str, Any]) -> dict[str, Any]:
    """Rename arrays from Keras' variable names to the names of the rnnlens cell: its weights, or their gradients."""
    known = registration_of(cell)
    if known is not None:
        return known.arrays(by_variable)
    arrays = dict(by_variable)
    if has_two_biases(cell):
        both = arrays["bias"]
        arrays["bias"], arrays["recurrent_bias"] = both[0], both[1]
    return arrays


def has_two_biases(cell: Any) -> bool:
    """Return whether a known cell has both biases in one variable, as a GRU with ``reset_after=True``."""
    return known_class(cell) is not None and cell.bias is not None and bool(getattr(cell, "reset_after", False))


def cell_variables(cell: Any) -> dict[str, Any]:
    """Return the variables of a cell by the names that ``weight_grads`` and ``weight_vjp`` use."""
    if known_class(cell) is not None:
        names = ("kernel", "recurrent_kernel", *(["bias"] if cell.bias is not None else []))
        return {name: getattr(cell, name) for name in names}
    return named_variables(cell) if registration_of(cell) is None else attributes(cell)


def named_variables(layer: Any) -> dict[str, Any]:
    """Return the variables of any layer by unique names: the last part of the path, or else the path in the layer.

    Of variables with one path the second has ``#2`` appended, and so on; those of sublayers come last.
    """
    named = [(dialect_of(v).variable_name(v), v) for v in getattr(layer, "weights", [])]
    weights = [v for name, v in named if name != "rnn_state"]
    by_name = {name: v for name, v in named if name != "rnn_state"}
    if len(by_name) == len(weights):
        return by_name
    found_by_path: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    own = set(map(id, dialect_of(layer).own_variables(layer)))
    for variable in sorted(weights, key=lambda v: id(v) not in own):  # those of sublayers later
        path = _within(layer, dialect_of(variable).path(variable))
        counts[path] += 1
        found_by_path[path if counts[path] == 1 else f"{path}#{counts[path]}"] = variable
    return found_by_path


def layer_weights(layer: Any, halves: Mapping[str, Any], left_out: Container[int] = ()) -> LayerWeights:
    """Return the weights of a layer, without variables whose ids are in ``left_out``.

    ``halves`` are the layer's recurrent layers by direction.
    """
    keras = dialect_of(layer)
    variables = {name: v for name, v in named_variables(layer).items() if id(v) not in left_out}
    alike = len({likeness(half) for half in halves.values()}) == 1
    known = halves.items() if alike else ()
    made = {direction: cell_with_equations(half.cell) for direction, half in known}
    cells = {direction: cell for direction, cell in made.items() if cell is not None}
    put_together = composed(variables, halves) if cells else {}
    if put_together:
        return _put_together(layer, variables, put_together, cells)
    penalties = keras.regularizers(layer)
    return LayerWeights(
        values={name: copy_of(v) for name, v in variables.items()},
        trainable={name: bool(v.trainable) for name, v in variables.items()},
        cells=cells,
        penalties={name: penalties[id(v)] for name, v in variables.items() if id(v) in penalties},
        statistics=frozenset(name for name, v in variables.items() if keras.variable_name(v) in _STATISTICS),
        tables=frozenset(name for name, v in variables.items() if keras.variable_name(v) == "embeddings"),
    )


def _put_together(
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
    for key, what in weights.items():
        values[key] = what.registration.arrays({name: arrays[held] for name, (_, held) in what.keys.items()})[what.name]
        trainable[key] = all(variables[held].trainable for _, held in what.keys.values())
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


def _within(layer: Any, path: str) -> str:
    marker = f"{layer.name}/"
    return path[path.index(marker) + len(marker) :] if marker in path else path


#: Largest depth of nested layers within a cell that is searched for weights.
_DEPTH = 4


def registration_of(cell: Any) -> Registration | None:
    """Return the registration of a cell's class; None if there is none, or if its instance overrides ``call``."""
    return None if cell is None or "call" in vars(cell) else registered(cell)


def attributes(cell: Any) -> dict[str, Any]:
    """Return the variables of a cell by attribute: ``"u"``, ``"dense.kernel"``; others by their own names."""
    found = dict(_attributes(cell, "", _DEPTH))
    named = {id(v) for v in found.values()}
    rest = {dialect_of(v).variable_name(v): v for v in cell.weights if id(v) not in named}
    return {name: v for name, v in (found | rest).items() if "seed" not in dialect_of(v).variable_name(v)}


def _attributes(layer: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    keras = dialect_of(layer)
    seen: set[int] = set()
    for name, value in vars(layer).items():
        name = name.lstrip("_") if prefix or isinstance(value, keras.Variable) else name
        if isinstance(value, keras.Variable) and id(value) not in seen:
            seen.add(id(value))
            yield prefix + name, value
        elif isinstance(value, keras.Layer) and depth:
            yield from _attributes(value, f"{prefix}{name}.", depth - 1)


def composed(named: Mapping[str, Any], halves: Mapping[str, Any]) -> dict[str, ComposedWeight]:
    """Return the composed weights of a layer with registered cells; ``named`` has its variables by key."""
    keys = {id(v): key for key, v in named.items()}
    found: dict[str, ComposedWeight] = {}
    for direction, half in halves.items():
        known = registration_of(half.cell)
        if known is None:
            return {}
        held = {name: keys[id(v)] for name, v in attributes(half.cell).items()}
        prefix = f"{direction}/" if len(halves) > 1 else ""
        arrays = known.arrays({name: dialect_of(named[key]).value_of(named[key]) for name, key in held.items()})
        found |= {
            prefix + name: ComposedWeight(known, name, {own: ("", key) for own, key in held.items()}) for name in arrays
        }
    return found
