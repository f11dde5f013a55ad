"""Which axis of what counts samples, and which steps: the one place where every verb asks.

What the user says holds; else what the adapter found out by experiment; else the rule of the framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Adapter, AxisConvention, Batch, Port
from ..errors import InputError, message, shown
from ..layout import Layout, canonical_order
from ..typing import Array
from ..vocabulary import FEATURE, SAMPLE, TIME
from .names import Catalogue, read_one

#: What ``axes=`` may name beside the tensors of the model.
DATA = ("y", "sample_weight")

_EXAMPLE = 'axes={"input": ("time", "sample", "feature"), "output": (("time", "sample"), "unit")}'


def an_axes_table(name: str, value: Any) -> dict[str, Layout]:
    """For some tensors the names of their axes; several names in a tuple are folded into one axis, outermost first."""
    if not isinstance(value, Mapping):
        raise InputError(message(f"{name}= names the axes of tensors.", got=shown(value), expected=_EXAMPLE))
    return {str(tensor): _read_layout(f"{name}[{tensor!r}]", listed) for tensor, listed in value.items()}


def _read_layout(where: str, listed: Any) -> Layout:
    parts = [(part,) if isinstance(part, str) else part for part in listed] if isinstance(listed, list | tuple) else []
    sound = all(
        isinstance(part, list | tuple) and part and all(isinstance(n, str) and n for n in part) for part in parts
    )
    names = [name for part in parts for name in part] if sound else []
    if not names or len(set(names)) < len(names) or any(len(part) > 2 for part in parts):
        raise InputError(message(f"{where} is no list of axes, each named once.", got=shown(listed), expected=_EXAMPLE))
    folded = [part for part in parts if len(part) > 1]
    if len(folded) > 1 or any(SAMPLE not in part for part in folded):
        raise InputError(message(f"{where} folds axes without samples.", got=shown(listed), expected=_EXAMPLE))
    return Layout(tuple(tuple(part) for part in parts))


class Layouts:
    """How tensors of a model lie: as the user says, else as was found out, else by the rule of the framework.

    Parameters
    ----------
    stated, found
        What the user says, and what was found out.
    rule
        That of the framework.
    """

    def __init__(
        self, stated: Mapping[Port, Layout], rule: AxisConvention, found: Mapping[Port, Layout] | None = None
    ) -> None:
        self.stated, self.found = dict(stated), dict(found or {})
        self.rule = rule
        #: Whether every tensor has its samples on the first axis, by the rule of the framework and as the user says.
        self.samples_first = rule.samples_first and all(layout.axes[0] == (SAMPLE,) for layout in stated.values())

    def layout(self, port: Port, shape: Sequence[int], *, integer: bool = False) -> Layout:
        """The axes of a tensor of that shape, in the framework's order."""
        known = self.stated.get(port, self.found.get(port))
        if known is None:
            return self.rule.layout(port, shape, integer=integer)
        if len(known.axes) != len(shape):
            raise InputError(
                message(
                    f"axes= does not fit {text_of(port)!r}.",
                    got=f"{len(known.axes)} axes: {', '.join(map(str, known.names))}",
                    expected=f"{len(shape)} axes, for shape {tuple(shape)}",
                )
            )
        return known


def learned(adapter: Adapter, model: Any, batch: Batch, ports: Iterable[Port]) -> Mapping[Port, Layout]:
    """What the adapter finds out about the layouts of some tensors of a model."""
    if adapter.samples_first:
        return {}
    quiet = Batch(batch.x, training=batch.training, initial_state=batch.initial_state, seed=batch.seed)
    return adapter.layouts(model, quiet, list(ports))


class Axes(Layouts):
    """The layouts of the tensors of one model, as far as anybody asked.

    Parameters
    ----------
    stated
        What the user says, by the name of a tensor, or ``"y"`` and ``"sample_weight"``.
    known
        What these names may refer to; None where nothing is stated.
    """

    def __init__(
        self, adapter: Adapter, model: Any, stated: Mapping[str, Layout] | None, known: Catalogue | None
    ) -> None:
        super().__init__({} if known is None else named_layouts(stated, known), adapter)
        self.adapter, self.model = adapter, model
        self.data = {name: layout for name, layout in (stated or {}).items() if name in DATA}
        #: How the inputs lie, where they are cut into batches; None where samples come first.
        self.inputs: Sequence[Layout | None] | None = None
        self.is_cut = False
        self._asked: set[Port] = set()

    def learn(self, batch: Batch, ports: Iterable[Port]) -> None:
        """Find out about those ports of which nothing is known yet."""
        new = [port for port in dict.fromkeys(ports) if port not in self._asked and port not in self.stated]
        if new and not self.samples_first:
            self.found |= learned(self.adapter, self.model, batch, new)
            self._asked |= set(new)

    def samples(self, batch: Batch) -> int:
        """How many samples a batch has, as far as it was found out; else the length of its first axis."""
        leaves = data.leaves_of(batch.x)
        if self.is_cut or self.samples_first:
            return data.len_of(batch.x, self.inputs)
        for port, layout in {**self.found, **self.stated}.items():
            if port.kind == "input" and port.layer is None and layout.sample is not None and not layout.is_folded:
                return int(getattr(leaves[port.index], "shape", (1,))[layout.sample])
        found = next((layout.samples for layout in self.found.values() if layout.samples), 0)
        return found or data.size_of(leaves[0], None)


def text_of(port: Port) -> str:
    """How a user names a port."""
    index = f"[{port.index}]" if port.index else ""
    return f"{port.kind}{index}" if port.layer is None else f"{port.layer}.{port.kind}{index}"


def named_layouts(stated: Mapping[str, Layout] | None, known: Catalogue) -> dict[Port, Layout]:
    """What the user says of the tensors of a model, by port.

    Raises
    ------
    InputError
        If a name is none of an input or output.
    """
    return {_port(text, known): layout for text, layout in (stated or {}).items() if text not in DATA}


def _port(text: str, known: Catalogue) -> Port:
    name = read_one(text, known)
    if name.what not in ("input", "output"):
        expected = f'"input", "output", "layer.output", "layer.input"; {", ".join(map(repr, DATA))}'
        raise InputError(message(f"axes= does not take {text!r}.", got=repr(text), expected=expected))
    return name.port()


def in_order(array: Array, names: Sequence[str], lead: int = 0) -> tuple[Array, tuple[str, ...]]:
    """The array with the axes of results: samples, steps, then the others."""
    order = canonical_order(names)
    if order != list(range(len(names))):
        array = np.transpose(array, [*range(lead), *(lead + i for i in order)])
    return array, tuple(names[i] for i in order)


def refuse_unknown(what: str, name: str, names: Sequence[str], wanted: str = SAMPLE) -> None:
    """Raise where an axis is needed that could not be told.

    Raises
    ------
    InputError
        With the argument that tells it.
    """
    if wanted not in names:
        counts = {SAMPLE: "samples", TIME: "steps"}[wanted]
        raise InputError(
            message(
                f"{what} needs to know which axis of {name!r} counts {counts}, and that could not be found out.",
                got=f"axes ({', '.join(names)})",
                hint=f"say so: axes={{{name!r}: (..., {wanted!r}, ...)}}, one name for each axis",
            )
        )


class InputCoordinates:
    """Coordinates of the DataArrays that a call was given, by axis: samples, steps and features.

    Parameters
    ----------
    x
        The data of the call; arrays that are no DataArray have no coordinates.
    layouts
        Roles of the axes, of inputs whose dimensions are not called ``sample``, ``time`` and ``feature``.
    """

    def __init__(self, x: Any, layouts: Layouts) -> None:
        self.leaves = data.leaves_of(x) if data_arrays_of(x) else []
        self._by_leaf = [_labels(leaf, index, layouts) for index, leaf in enumerate(self.leaves)]

    def find(self, dim: str, size: int, leaf: int | None = None) -> Array | None:
        """Return the labels of an axis of that role and length; None where no input, or more than one, has them."""
        of_leaves = self._by_leaf if leaf is None else self._by_leaf[leaf : leaf + 1]
        found = [labels[dim] for labels in of_leaves if dim in labels and len(labels[dim]) == size]
        return found[0] if found and all(np.array_equal(found[0], other) for other in found[1:]) else None

    def assign_to(self, result: Any, dims: Iterable[str] = (SAMPLE, TIME), leaf: int | None = None) -> Any:
        """Return an array or dataset with the labels of those of its dimensions that have the role and length."""
        if not self.leaves:
            return result
        coords = {}
        for dim in dims:
            labels = self.find(dim, result.sizes[dim], leaf) if dim in result.dims else None
            if labels is not None:
                coords[dim] = xr.Variable((dim,), labels, result[dim].attrs if dim in result.coords else {})
        return result.assign_coords(coords)

    def is_input(self, values: Array) -> int | None:
        """Return the number of the input that has these very values, (sample, time, feature)."""
        for index, leaf in enumerate(self.leaves):
            if tuple(leaf.shape) == values.shape and np.array_equal(np.asarray(leaf), values):
                return index
        return None


def data_arrays_of(x: Any) -> list[xr.DataArray]:
    """Return the DataArrays in the data of a call."""
    return [leaf for leaf in data.leaves_of(x) if isinstance(leaf, xr.DataArray)]


def _labels(leaf: Any, index: int, layouts: Layouts) -> dict[str, Array]:
    """Return the index coordinates of one input by the role of their axis."""
    if not isinstance(leaf, xr.DataArray):
        return {}
    roles = (SAMPLE, TIME, FEATURE)
    named = {str(dim): str(dim) for dim in leaf.dims if dim in roles}
    if not named and (layouts.samples_first or Port("input", index=index) in layouts.stated):
        names = layouts.layout(Port("input", index=index), leaf.shape, integer=leaf.dtype.kind in "iu").names
        if len(names) == leaf.ndim:
            named = {role: str(dim) for role, dim in zip(names, leaf.dims, strict=True) if role in roles}
    return {role: leaf[dim].values for role, dim in named.items() if dim in leaf.coords and leaf[dim].ndim == 1}
