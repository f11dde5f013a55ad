"""Cells by kind, and the equations that users register for cell classes of a framework."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from array_api_compat import array_namespace

from ...errors import InputError, UnsupportedError, did_you_mean
from ...typing import Array
from ...vocabulary import GATE, QUANTITIES
from .cell import Cell

#: Function from the weights (or gradients) of a framework's cell to those of the rnnlens cell, both by name.
Layout = Callable[[Mapping[str, Array]], Mapping[str, Array]]
#: For each weight the name in the framework's cell, ``"w.T"`` for its transpose, or a list with one name per gate; or
#: a function of all arrays by name.
Weights = Mapping[str, str | Sequence[str]] | Layout

_NAME = re.compile(r"[a-z][a-z0-9_]*")

_KINDS: dict[str, type[Cell]] = {}

KnownCell = TypeVar("KnownCell", bound=type[Cell])


def built_in(cell: KnownCell) -> KnownCell:
    """Decorate a cell class of rnnlens, so that :func:`kinds` contains it."""
    _KINDS[cell.kind] = cell
    return cell


def kinds() -> dict[str, type[Cell]]:
    """Return a dict from the name of each kind of cell to its class."""
    return dict(_KINDS)


def cell_of_kind(kind: str) -> type[Cell]:
    """Return the cell class of a kind; :class:`Cell` itself, without gates, for an unknown kind."""
    return _KINDS.get(kind, Cell)


@dataclass(frozen=True, eq=False)
class Registration:
    """Equations, weights and options that a user registered for a framework's cell class."""

    cell: type[Cell]
    weights: Weights | None
    options: Callable[[Any], Mapping[str, Any]]

    def arrays(self, by_name: Mapping[str, Array]) -> dict[str, Array]:
        """Rename weights or gradients from the names of a framework's layer to those of the registered cell."""
        if callable(self.weights):
            return {name: array for name, array in self.weights(by_name).items() if array is not None}
        sources = self.weights if self.weights is not None else {n: n for n in self.cell.parameters if n in by_name}
        used: set[str] = set()
        arrays = {name: self._select_array(name, source, by_name, used) for name, source in sources.items()}
        if unused := sorted(set(by_name) - used):
            raise InputError(
                f"The registration of {self.cell.kind!r} leaves out a weight of the framework's cell.",
                got=f"weights= without {', '.join(map(repr, unused))}",
                expected="every weight of the cell",
            )
        return arrays

    def _select_array(
        self, name: str, source: str | Sequence[str], by_name: Mapping[str, Array], used: set[str]
    ) -> Array:
        if isinstance(source, str):
            return self._single_array(name, source, by_name, used)
        gate_arrays = [self._single_array(name, part_source, by_name, used) for part_source in source]
        return array_namespace(*gate_arrays).concat(gate_arrays, axis=-1)

    def single(self, name: str) -> tuple[str, bool] | None:
        """Return the framework weight that alone is the cell's weight ``name``, and whether it is transposed.

        Returns None otherwise.
        """
        if callable(self.weights):
            return None
        source = name if self.weights is None else self.weights.get(name)
        if not isinstance(source, str):
            return None
        return source.removesuffix(".T"), source.endswith(".T")

    @staticmethod
    def _single_array(name: str, source: str, by_name: Mapping[str, Array], used: set[str]) -> Array:
        key, is_transposed = (source[:-2], True) if source.endswith(".T") and source not in by_name else (source, False)
        if key not in by_name:
            raise InputError(
                f"The registration maps weight {name!r} to {key!r}, which the framework's cell does not have.",
                hint=did_you_mean(key, by_name),
            )
        used.add(key)
        return by_name[key].T if is_transposed else by_name[key]

    def make(self, layer: Any, by_name: Mapping[str, Array]) -> Cell:
        """Create the cell with the weights and options of a framework's cell."""
        arguments = {**self.arrays(by_name), **self.options(layer)}
        cell_class: Any = self.cell
        try:
            cell: Cell = cell_class(**arguments)
        except TypeError as error:
            raise InputError(
                f"{self.cell.__name__} does not accept the options registered for {type(layer).__name__}.",
                got=str(error),
                expected=", ".join(arguments),
            ) from error
        _check_shapes(cell, type(layer).__name__)
        object.__setattr__(cell, "registered_for", type(layer).__name__)
        return cell

    @property
    def differentiates(self) -> bool:
        """Whether the cell defines its own derivatives."""
        return self.cell.pull_back is not Cell.pull_back


_REGISTERED: weakref.WeakKeyDictionary[type, Registration] = weakref.WeakKeyDictionary()


def registered(layer: Any) -> Registration | None:
    """Return the registration of the exact class of a framework's cell, or None; subclasses are not included."""
    return _REGISTERED.get(type(layer))


def register(
    layer: type,
    cell: type[Cell],
    *,
    weights: Weights | None = None,
    options: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None = None,
) -> None:
    """Register that a framework's cell class computes the equations of ``cell``.

    Layers with cells of this class then have gates, named weights, gradients per gate and step, and plots, like
    built-in cells. The registered equations are compared with the layer's output at every call, and their weight
    gradients with those of the framework.

    Parameters
    ----------
    layer
        A class of Keras cells, as they go into ``keras.layers.RNN``, or of torch modules that the user's loop calls
        with input and state. Subclasses are not included, because they may compute anything.
    cell
        A subclass of :class:`Cell`: a built-in one or the user's own.
    weights
        For each weight of ``cell`` the name in the framework's cell: ``"u"``, transposed ``"linear.weight.T"``, or a
        sequence of these, one per gate. Or a function from all framework weights by name to those of ``cell``, linear
        in each, such as a slice or a transposition, because it is applied to gradients too. By default the names are
        the same.
    options
        Keyword arguments of ``cell`` in addition to the weights, or a function that returns them for a framework's
        cell.

    Raises
    ------
    InputError
        If ``layer`` is no class, ``cell`` lacks a required attribute, or a weight has a function of its own.

    Examples
    --------
    >>> from rnnlens.recurrence.cells import LSTM
    >>> class MyCell: ...
    >>> register(MyCell, LSTM, weights={"kernel": "w", "recurrent_kernel": "u", "bias": "b"})
    """
    if not isinstance(layer, type):
        raise InputError("rl.cells.register takes a class.", got=repr(layer), expected="the class of the cells")
    _check_class(cell)
    for name, source in weights.items() if isinstance(weights, Mapping) else ():
        entries = (source,) if isinstance(source, str) else source
        if not isinstance(entries, Sequence) or not all(isinstance(entry, str) for entry in entries):
            raise InputError(
                f"The source of weight {name!r} in weights= is no name.",
                got=f"{{{name!r}: {source!r}}}",
                expected="a name, a transposed name such as 'linear.weight.T', or a sequence of names, one per gate",
                hint=f"one function for all weights: weights=lambda w: {{{name!r}: w['linear.weight'].T, ...}}",
            )
    fixed_options = dict(options) if isinstance(options, Mapping) else {}
    options_of: Callable[[Any], Mapping[str, Any]] = options if callable(options) else lambda _: fixed_options
    _KINDS[cell.kind] = cell
    _REGISTERED[layer] = Registration(cell, weights, options_of)


def _check_class(cell: Any) -> None:
    """Raise an error for a cell class that lacks a required attribute, or that reuses another cell's kind."""
    if not (isinstance(cell, type) and issubclass(cell, Cell)):
        raise InputError("The equations must be a subclass of rl.cells.Cell.", got=repr(cell))
    problems = [
        (cell.step is Cell.step, "no step", "def step(self, projected, before, scale, xp)"),
        (not _NAME.fullmatch(cell.kind) or cell.kind == Cell.kind, f"kind = {cell.kind!r}", "one word of its own"),
        (not cell.parameters, "no parameters", "parameters = rl.cells.by_name(rl.cells.KERNEL, ...)"),
        (len(set(cell.gates)) < len(cell.gates), f"gates = {cell.gates}", "names that differ"),
        (
            cell.keeping is not None and cell.keeping not in cell.gates,
            f"keeping = {cell.keeping!r}",
            f"a name in gates = {cell.gates}, or None",
        ),
        (
            not cell.states
            or cell.states[0] != "hidden"
            or bool(set(cell.states) & (set(QUANTITIES) - {"hidden", "cell"})),
            f"states = {cell.states}",
            'names, "hidden" first: what the layer returns',
        ),
        (
            cell.project is not Cell.project and cell.input_gradients is Cell.input_gradients,
            "project without its adjoint",
            "input_gradient and input_gradients beside it",
        ),
        (
            cell.pull_back is not Cell.pull_back and cell.recurrent_gradients is Cell.recurrent_gradients,
            "pull_back without recurrent_gradients",
            "define both, or neither: the framework then differentiates the step",
        ),
    ]
    for is_wrong, got, expected in problems:
        if is_wrong:
            raise InputError(f"{cell.__name__} is not a complete cell.", got=got, expected=expected)
    existing = _KINDS.get(cell.kind)
    if existing is not None and (existing.__module__, existing.__qualname__) != (cell.__module__, cell.__qualname__):
        message = f"A cell of kind {cell.kind!r} is already registered."
        raise InputError(message, got=cell.__qualname__, expected=f"another kind than that of {existing.__qualname__}")


def _check_shapes(cell: Cell, layer: str) -> None:
    """Raise an error for weights whose rank or number of gate blocks does not fit their declared dimensions."""
    for name, value in cell.weights().items():
        quantity = cell.parameters[name]
        rank = len(quantity.dims) - int(GATE in quantity.dims)
        has_uneven_gates = GATE in quantity.dims and int(value.shape[-1]) % len(cell.gates)
        if len(value.shape) != rank or has_uneven_gates:
            raise UnsupportedError(
                f"Weight {name!r} of {layer} does not have the shape that {type(cell).__name__} declares.",
                got=f"shape {tuple(value.shape)}",
                expected=f"({', '.join(quantity.dims)})".replace("gate, ", "gate * "),
                hint='in weights= of register: "name.T" for a transposed one, a tuple of names for one per gate',
            )
