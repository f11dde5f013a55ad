"""Keras cells of the user's own whose equations were registered: their weights by our names, their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...autodiff import Engine
from ...errors import UnsupportedError, message
from ...recurrence.cells import Cell, registered
from ...recurrence.cells.registry import Registration
from ...typing import Array
from ..composed import Composed
from ..described import differentiated
from .dialect import dialect_of

#: Deepest nesting of layers within a cell that is looked into for weights.
_DEPTH = 4


def registration_of(cell: Any) -> Registration | None:
    """What was registered for the class of a cell whose ``call`` is that of its class."""
    return None if cell is None or "call" in vars(cell) else registered(cell)


def attributes(cell: Any) -> dict[str, Any]:
    """The weights of a cell by the attributes that hold them: ``"u"``, ``"dense.kernel"``; else by their own names."""
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


def described(cell: Any, known: Registration, convert: Callable[[Any], Array], engine: Engine | None = None) -> Cell:
    """The equations of a cell with the values of its weights; differentiated by ``engine`` where they are not here."""
    made = known.make(cell, {name: convert(v) for name, v in attributes(cell).items()})
    if engine is None:
        return made
    keras = dialect_of(cell)

    def tensor(array: Array) -> Any:
        return keras.ops.convert_to_tensor(array, dtype=str(array.dtype).rpartition(".")[2])

    return differentiated(made, known, engine, keras.namespace(), tensor)


def composed(named: Mapping[str, Any], halves: Mapping[str, Any]) -> dict[str, Composed]:
    """Each weight of ours of a layer whose cells are registered; ``named``: the layer's variables by their keys."""
    keys = {id(v): key for key, v in named.items()}
    found: dict[str, Composed] = {}
    for direction, half in halves.items():
        known = registration_of(half.cell)
        if known is None:
            return {}
        held = {name: keys[id(v)] for name, v in attributes(half.cell).items()}
        prefix = f"{direction}/" if len(halves) > 1 else ""
        arrays = known.arrays({name: dialect_of(named[key]).value_of(named[key]) for name, key in held.items()})
        found |= {
            prefix + name: Composed(known, name, {own: ("", key) for own, key in held.items()}) for name in arrays
        }
    return found


def refuse_penalties(named: Mapping[str, Any], layer: Any) -> None:
    """A regulariser of a weight that is put together from several would not know which part is its own."""
    penalties = dialect_of(layer).regularizers(layer)
    for name, variable in named.items():
        if id(variable) in penalties:
            raise UnsupportedError(
                message(
                    f"Layer {layer.name!r}: weight {name!r} of its registered cell has a regularizer.",
                    expected="penalties in the loss, or a cell that is not registered",
                )
            )
