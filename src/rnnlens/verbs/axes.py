"""Roles of axes (samples, time steps): stated by the user, found by experiment, or by the framework's convention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Adapter, AxisConvention, Batch, Port
from ..errors import InputError, UnsupportedError, shown
from ..layout import Axis, Layout, canonical_order, dims_of
from ..results.schema import LabelledLayer, to_host
from ..typing import Array
from ..vocabulary import FEATURE, SAMPLE, TIME, UNIT
from .names import Catalogue, known_model, read_one, text_of

#: Names in ``axes=`` besides the tensors of the model.
DATA = ("y", "sample_weight")

_EXAMPLE = 'axes={"input": ("time", "sample", "feature"), "output": (("time", "sample"), "unit")}'


def an_axes_table(name: str, value: Any) -> dict[str, Layout]:
    """Parse ``axes=``: axis names by tensor. Several names in a tuple are folded into one axis, outermost first."""
    if not isinstance(value, Mapping):
        raise InputError(f"{name}= names the axes of tensors.", got=shown(value), expected=_EXAMPLE)
    return {str(tensor): _read_layout(f"{name}[{tensor!r}]", listed) for tensor, listed in value.items()}


def _read_layout(where: str, listed: Any) -> Layout:
    if isinstance(listed, Layout):  # of a call that runs the verb again
        return listed
    parts = [(part,) if isinstance(part, str) else part for part in listed] if isinstance(listed, list | tuple) else []
    sound = all(
        isinstance(part, list | tuple) and part and all(isinstance(n, str) and n for n in part) for part in parts
    )
    names = [name for part in parts for name in part] if sound else []
    if not names or len(set(names)) < len(names) or any(len(part) > 2 for part in parts):
        raise InputError(f"{where} is not a list of distinct axis names.", got=shown(listed), expected=_EXAMPLE)
    folded = [part for part in parts if len(part) > 1]
    if len(folded) > 1 or any(SAMPLE not in part for part in folded):
        raise InputError(
            f"{where} merges axes, but none of them is the sample axis.", got=shown(listed), expected=_EXAMPLE
        )
    return Layout(tuple(tuple(part) for part in parts))


#: Largest number of input shapes for which layouts of one model are kept.
_MOST_SHAPES = 64


class ModelAxes:
    """Layouts of a model's tensors: stated by the user, else found by experiment, else by the framework's convention.

    ``stated``: by the name of a tensor, which ``known`` resolves, or ``"y"`` and ``"sample_weight"``. ``rule``: the
    convention, by default that of the adapter.
    """

    def __init__(
        self,
        adapter: Adapter,
        model: Any,
        stated: Mapping[str, Layout] | None = None,
        known: Catalogue | None = None,
        rule: AxisConvention | None = None,
    ) -> None:
        self.adapter, self.model, self.rule = adapter, model, rule or adapter
        tensors = {} if known is None else {t: layout for t, layout in (stated or {}).items() if t not in DATA}
        self.stated = {_port(text, known): layout for text, layout in tensors.items() if known is not None}
        self.data = {name: layout for name, layout in (stated or {}).items() if name in DATA}
        #: Layouts found by experiment, and the ports for which an experiment was made.
        self.found: dict[Port, Layout] = {}
        self._learned: set[Port] = set()
        #: Ports and numbers of samples of the pull-backs that were seen to keep samples apart.
        self.independent: set[tuple[frozenset[Port], int]] = set()
        #: Layouts of the inputs if they are cut into batches; None if samples come first.
        self.inputs: Sequence[Layout | None] | None = None
        self.is_cut = False
        #: Whether every tensor has its samples on the first axis, by the framework's convention and by ``axes=``.
        self.samples_first = self.rule.samples_first and all(
            layout.axes[0] == (SAMPLE,) for layout in self.stated.values()
        )

    def layout(self, port: Port, shape: Sequence[int], *, integer: bool = False) -> Layout:
        """Return the layout of a tensor of the given shape, with axes in the framework's order."""
        known = self.stated.get(port, self.found.get(port))
        if known is None:
            return self.rule.layout(port, shape, integer=integer)
        if len(known.axes) != len(shape):
            raise InputError(
                f"axes= does not match {text_of(port)!r}.",
                got=f"{len(known.axes)} axes: {', '.join(map(str, known.names))}",
                expected=f"{len(shape)} axes, for shape {tuple(shape)}",
            )
        return known

    def learn(self, batch: Batch, ports: Iterable[Port], shown: Mapping[Port, Layout] | None = None) -> None:
        """Find and store the layouts of ports that have none: ``shown``, cached for these shapes, or by experiment."""
        new = [port for port in dict.fromkeys(ports) if port not in self._learned and port not in self.stated]
        if not new or self.samples_first or self.adapter.samples_first:
            return
        kept, found = self._kept(batch), shown or {}
        if kept is not None and all(port in kept for port in new):
            found = {port: kept[port] for port in new}
        elif not all(port in found for port in new):
            quiet = Batch(batch.x, training=batch.training, initial_state=batch.initial_state, seed=batch.seed)
            found = self.adapter.layouts(self.model, quiet, new)
        if kept is not None:
            kept |= {port: one for port, one in found.items() if not (one.coupled or one.is_uncertain or one.order)}
        self.found |= found
        self._learned |= set(new)

    def _kept(self, batch: Batch) -> dict[Port, Layout] | None:
        """Return the cache of layouts for inputs of these shapes; None for packed data, which may be reordered."""
        leaves = data.leaves_of(batch.x)
        if any(data.is_packed(leaf) or len(np.shape(leaf)) == 1 for leaf in leaves):
            return None
        known = known_model(self.adapter, self.model)
        if known.fingerprint is None:
            return None
        if len(known.layouts) > _MOST_SHAPES:
            known.layouts.clear()
        names = tuple(batch.x) if isinstance(batch.x, Mapping) else ()
        shapes = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)
        return known.layouts.setdefault((names, shapes, batch.training, tuple(batch.initial_state or ())), {})

    def with_samples_first(self) -> ModelAxes:
        """Return axes of the same model of which every tensor has samples first, then steps."""
        return ModelAxes(self.adapter, self.model, rule=AxisConvention())

    def samples(self, batch: Batch) -> int:
        """Return the number of samples of a batch by its known layouts, else the length of its first axis."""
        leaves = data.leaves_of(batch.x)
        if self.is_cut or self.samples_first:
            return data.len_of(batch.x, self.inputs)
        for port, layout in {**self.found, **self.stated}.items():
            if port.kind == "input" and port.layer is None and layout.sample is not None and not layout.is_folded:
                return int(getattr(leaves[port.index], "shape", (1,))[layout.sample])
        found = next((layout.samples for layout in self.found.values() if layout.samples), 0)
        return found or data.size_of(leaves[0], None)


def _port(text: str, known: Catalogue) -> Port:
    name = read_one(text, known)
    if name.what not in ("input", "output"):
        expected = f'"input", "output", "layer.output", "layer.input"; {", ".join(map(repr, DATA))}'
        raise InputError(f"axes= does not take {text!r}.", got=repr(text), expected=expected)
    return name.port()


def in_order(array: Array, names: Sequence[str], lead: int = 0) -> tuple[Array, tuple[str, ...]]:
    """Transpose an array to the axis order of results: samples, steps, all other axes. Return it and the axis names."""
    order = canonical_order(names)
    if order != list(range(len(names))):
        array = np.transpose(array, [*range(lead), *(lead + i for i in order)])
    return array, tuple(names[i] for i in order)


def refuse_unknown(what: str, name: str, names: Sequence[str], wanted: str = SAMPLE) -> None:
    """Raise InputError, with the ``axes=`` to type, if the axis ``wanted`` is not among a tensor's axis names."""
    if wanted not in names:
        counts = {SAMPLE: "samples", TIME: "steps"}[wanted]
        raise InputError(
            f"{what} needs the axis of {name!r} that counts {counts}, and rnnlens could not determine it.",
            got=f"axes ({', '.join(names)})",
            hint=f"name the axes: axes={{{name!r}: (..., {wanted!r}, ...)}}, one name for each axis",
        )


def refuse_steps_first(axes: ModelAxes, batch: Batch, sizes: Iterable[Sequence[int]]) -> None:
    """Raise if the convention is samples first, and layers of ``sizes`` (samples, steps) step along the first axis."""
    if not axes.samples_first:
        return
    calls = {tuple(size) for size in sizes}
    turned = {(leaf.shape[1], leaf.shape[0]) for leaf in data.leaves_of(batch.x) if getattr(leaf, "ndim", 0) > 1}
    if calls and all(samples != steps and (samples, steps) in turned for samples, steps in calls):
        samples, steps = next(iter(calls))
        raise InputError(
            "The recurrent layers step along the first axis of the input, where this framework has the samples.",
            got=f"{steps} steps and {samples} samples",
            expected="samples first",
            hint='axes={"input": ("time", "sample", "feature"), "output": ("time", "sample", "unit")}',
        )


def refuse_unclear_steps(what: str, name: str, layout: Layout) -> None:
    """Raise InputError, with the layouts to choose from, where a tensor's steps cannot be told from its other axes."""
    if not layout.unclear:
        return
    axes, ways = " and ".join(layout.unclear), axes_to_type(name, layout.axes, layout.unclear)
    if len(layout.unclear) > 1:
        problem = f"{axes} of {name!r} vary with the steps of recurrent layers"
    else:
        problem = f"{axes} of {name!r} varies with the steps, but does not advance one entry per step"
        other = _feature_or_unit(name)
        flat = tuple(other if axis == (axes,) else axis[0] if len(axis) == 1 else axis for axis in layout.axes)
        ways = f"axes={{{name!r}: {flat}}} where it holds {other}s of all steps, or {ways}"
    got = f"axes ({', '.join(layout.names)})"
    raise InputError(f"{what} needs the axis that counts steps: {problem}.", got=got, hint=f"say {ways}")


def axes_to_type(name: str, axes: Sequence[Axis], unclear: Sequence[str]) -> str:
    """Return the ``axes=`` argument to type for each choice of ``time`` among the unclear axes."""
    found = []
    for steps in unclear:
        other = {axis: _feature_or_unit(name) for axis in unclear} if len(unclear) == 2 else {}
        called = [tuple((other | {steps: TIME}).get(one, one) for one in axis) for axis in axes]
        found.append(tuple(axis if len(axis) > 1 else axis[0] for axis in called))
    return ", or ".join(f"axes={{{name!r}: {way}}}" for way in found if len(set(way)) == len(way))


def _feature_or_unit(name: str) -> str:
    return FEATURE if name.partition("[")[0].endswith("input") else UNIT


class InputCoordinates:
    """Coordinates of a call's DataArrays by role of the axis; ``layouts`` for inputs with names of their own."""

    def __init__(self, x: Any, layouts: ModelAxes) -> None:
        leaves = data.leaves_of(x)
        self.leaves = leaves if any(isinstance(leaf, xr.DataArray) for leaf in leaves) else []
        self._by_leaf = [_labels(leaf, index, layouts) for index, leaf in enumerate(self.leaves)]

    def find(self, dim: str, size: int, leaf: int | None = None) -> Array | None:
        """Return the labels of an axis by role and length; None if no input has them or inputs disagree."""
        of_leaves = self._by_leaf if leaf is None else self._by_leaf[leaf : leaf + 1]
        found = [labels[dim] for labels in of_leaves if dim in labels and len(labels[dim]) == size]
        return found[0] if found and all(np.array_equal(found[0], other) for other in found[1:]) else None

    def assign_to(self, layer: LabelledLayer, dims: Iterable[str] = (SAMPLE, TIME), leaf: int | None = None) -> None:
        """Assign input labels to those dimensions of a layer that match in role and length."""
        for dim, labels in self.labels_of(layer.sizes, dims, leaf).items():
            layer.coords[dim] = xr.Variable((dim,), labels, layer.coords[dim].attrs)

    def labels_of(
        self, sizes: Mapping[Any, int], dims: Iterable[str] = (SAMPLE, TIME), leaf: int | None = None
    ) -> dict[str, Array]:
        """Return the input labels of those dimensions that match in role and length."""
        found = {dim: self.find(dim, sizes[dim], leaf) for dim in dims if dim in sizes}
        return {dim: labels for dim, labels in found.items() if labels is not None}

    def is_input(self, values: Array) -> int | None:
        """Return the index of the input that equals ``values``, (sample, time, feature); None if there is none."""
        for index, leaf in enumerate(self.leaves):
            if tuple(leaf.shape) == values.shape and np.array_equal(np.asarray(leaf), values):
                return index
        return None


def _labels(leaf: Any, index: int, layouts: ModelAxes) -> dict[str, Array]:
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


class BatchAxes:
    """Converts tensors of one batch between the framework's layout and one axis per name."""

    def __init__(self, axes: ModelAxes, samples: int) -> None:
        self.axes, self.samples = axes, samples

    def layout(self, port: Port, array: Any, lead: int = 0) -> Layout:
        """Return the layout of a tensor, given an array of it with ``lead`` axes in front."""
        integer = np.asarray(array).dtype.kind in "iu"
        return self.axes.layout(port, array.shape[lead:], integer=integer)

    def opened(self, port: Port, array: Array, lead: int = 0) -> tuple[Array, tuple[str, ...]]:
        """Split folded axes of a tensor; return it in the framework's order, with the axis names."""
        layout = self.layout(port, array, lead)
        return layout.opened(array, self.samples, lead), layout.names

    def closed(self, port: Port, whole: xr.DataArray) -> Array:
        """Fold an opened tensor back into the framework's layout."""
        layout = self.axes.stated.get(port, self.axes.found.get(port))
        return whole.values if layout is None else layout.closed(whole.values)

    def is_here(self, port: Port) -> bool:
        """Return whether a tensor has the framework's own layout, rather than a recurrent layer's (samples first)."""
        return port.layer is None or port in self.axes.found or port in self.axes.stated

    def named_result(
        self,
        result: Array,
        pull: Callable[[Array], Sequence[Array]],
        ports: Sequence[Port | None],
        arrays: Sequence[Array],
    ) -> xr.DataArray:
        """Return a function's result with its sample and time axes named by how it depends on its arguments."""
        if result.ndim == 0 or self.axes.samples_first:
            return xr.DataArray(result, dims=self.axes.rule.layout(Port("output"), result.shape).names)
        layouts = [
            Layout.plain(dims_of(array.shape)) if port is None else self.layout(port, array)
            for port, array in zip(ports, arrays, strict=True)
        ]

        def arrives(cotangent: Array, name: str) -> Array | None:
            """Return at which indices of the arguments' axis ``name`` the gradient for a cotangent is not zero."""
            found = None
            for grad, layout in zip(pull(cotangent), layouts, strict=True):
                if name in layout.names and np.any(grad):
                    hit = reached(layout.opened(grad, self.samples), layout.names.index(name))
                    found = hit if found is None or len(found) != len(hit) else found | hit
            return found

        return xr.DataArray(result, dims=_followed(result, arrives))

    def of_samples(self, port: Port, seed: Array, masks: Array) -> Array | None:
        """Return a cotangent once per mask (row, sample), zero at other samples; None if the sample axis is unknown."""
        opened, names = self.opened(port, seed) if self.is_here(port) else (seed, (SAMPLE,))
        if SAMPLE not in names or opened.shape[names.index(SAMPLE)] != masks.shape[1]:
            return None
        at = names.index(SAMPLE)
        mask = masks.reshape(len(masks), *[1] * at, -1, *[1] * (opened.ndim - at - 1))
        return np.where(mask, opened[None], seed.dtype.type(0)).reshape(len(masks), *seed.shape)


def reached(array: Array, *axes: int) -> Array:
    """Return at which indices of the given axes an array is not zero everywhere."""
    return np.any(array != 0, axis=tuple(i for i in range(array.ndim) if i not in axes))


def _followed(result: Array, arrives: Callable[[Array, str], Array | None]) -> tuple[str, ...]:
    """Name an axis ``sample`` or ``time`` if cotangents masked along it are pulled back to the same indices only."""
    names = [f"axis_{i}" for i in range(result.ndim)]
    for name in (SAMPLE, TIME):
        fitting = [
            axis
            for axis in range(result.ndim)
            if names[axis].startswith("axis_") and _fits(result, axis, name, arrives)
        ]
        if len(fitting) == 1 or (fitting and name == SAMPLE and result.shape[fitting[0]] == 1):
            names[fitting[0]] = name
    rest = [axis for axis in range(result.ndim) if names[axis].startswith("axis_")]
    if rest and rest[-1] == result.ndim - 1 and result.ndim > 1:
        names[-1] = "unit"
    return tuple(names)


def _fits(result: Array, axis: int, name: str, arrives: Callable[[Array, str], Array | None]) -> bool:
    size = result.shape[axis]
    noise = np.random.default_rng(0).normal(size=result.shape).astype(result.dtype)
    seen = False
    for pattern in patterns(size):
        mask = pattern.reshape(-1, *[1] * (result.ndim - axis - 1))
        found = arrives(noise * mask, name)
        if found is not None:
            if len(found) != size or bool((found & ~pattern).any()):
                return False
            seen = True
    return seen


def patterns(size: int) -> np.ndarray[Any, Any]:
    """Return masks (pattern, size), two per binary digit of an index; any two indices differ in at least one."""
    if size == 1:
        return np.ones((1, 1), dtype=bool)
    bits = (np.arange(size)[None, :] >> np.arange((size - 1).bit_length())[:, None]) & 1
    return np.concatenate([bits, 1 - bits]).astype(bool)


#: Bytes of cotangents that are pulled back at once to see whether samples are independent.
TRIED_AT_ONCE = 2**25


def refuse_coupled(
    outside: BatchAxes, seeds: Mapping[Port, Array], pull: Callable[[Mapping[Port, Array]], Mapping[Port, Array | None]]
) -> None:
    """Raise UnsupportedError, with the tensor, if cotangents of some samples are pulled back to other samples."""
    tried = frozenset(seeds), outside.samples
    if outside.samples < 2 or not seeds or tried in outside.axes.independent:
        return
    # Few cotangents at a time where they are large: no more memory than the gradient itself takes.
    size = max(1, TRIED_AT_ONCE // sum(seed.nbytes for seed in seeds.values()))
    every = patterns(outside.samples)
    for start in range(0, len(every), size):
        rows = every[start : start + size]
        placed = {port: outside.of_samples(port, seed, rows) for port, seed in seeds.items()}
        for port, found in pull({port: seed for port, seed in placed.items() if seed is not None}).items():
            if found is None or port.kind in ("weight", "loss"):
                continue
            arrived = to_host(found)
            names: tuple[str, ...] = (SAMPLE,)
            if outside.is_here(port):
                arrived, names = outside.opened(port, arrived, lead=1)
            hit = reached(arrived, 0, 1 + names.index(SAMPLE)) if SAMPLE in names else rows
            if hit.shape == rows.shape and bool((hit & ~rows).any()):
                raise refusal("per_sample=True", port)
    outside.axes.independent.add(tried)


def refusal(what: str, port: Port) -> UnsupportedError:
    """Create the error for a tensor whose samples depend on each other."""
    where = "the model's " + port.kind if port.layer is None else f"{port.layer}.{port.kind}"
    return UnsupportedError(
        f"{what}: the samples of this batch depend on each other.",
        got=f"a change of one sample changes others, at {where}",
        expected="samples that are computed independently",
        hint="batch statistics: training=False; else a batch of one sample, or the gradient of the whole batch",
    )
