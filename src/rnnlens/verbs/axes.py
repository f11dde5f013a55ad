"""Roles of axes (samples, time steps): stated by the user, found by experiment, or by the framework's convention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Adapter, AxisConvention, Batch, Port
from ..errors import InputError, UnsupportedError, short_repr
from ..layout import Axis, Layout, canonical_order, dims_of
from ..results.schema import LabelledLayer, to_host
from ..typing import Array, signature
from ..vocabulary import FEATURE, SAMPLE, TIME, UNIT
from .names import Catalogue, known_model, read_one, text_of

#: Names in ``axes=`` besides the tensors of the model.
DATA = ("y", "sample_weight")

_EXAMPLE = 'axes={"input": ("time", "sample", "feature"), "output": (("time", "sample"), "unit")}'


def an_axes_table(name: str, value: Any) -> dict[str, Layout]:
    """Parse ``axes=``: axis names by tensor. Several names in a tuple are folded into one axis, outermost first."""
    if not isinstance(value, Mapping):
        raise InputError(f"{name}= names the axes of tensors.", got=short_repr(value), expected=_EXAMPLE)
    return {str(tensor): _read_layout(f"{name}[{tensor!r}]", axis_names) for tensor, axis_names in value.items()}


def _read_layout(argument: str, axis_names: Any) -> Layout:
    if isinstance(axis_names, Layout):  # of a call that runs the verb again
        return axis_names
    parts = (
        [(part,) if isinstance(part, str) else part for part in axis_names]
        if isinstance(axis_names, list | tuple)
        else []
    )
    is_valid = all(
        isinstance(part, list | tuple) and part and all(isinstance(n, str) and n for n in part) for part in parts
    )
    names = [name for part in parts for name in part] if is_valid else []
    if not names or len(set(names)) < len(names) or any(len(part) > 2 for part in parts):
        raise InputError(
            f"{argument} is not a list of distinct axis names.", got=short_repr(axis_names), expected=_EXAMPLE
        )
    folded = [part for part in parts if len(part) > 1]
    if len(folded) > 1 or any(SAMPLE not in part for part in folded):
        raise InputError(
            f"{argument} merges axes, but none of them is the sample axis.",
            got=short_repr(axis_names),
            expected=_EXAMPLE,
        )
    return Layout(tuple(tuple(part) for part in parts))


#: Largest number of input shapes for which layouts of one model are kept.
_MAX_SHAPES = 64


class ModelAxes:
    """Layouts of a model's tensors: stated by the user, else found by experiment, else by the framework's convention.

    ``stated``: by the name of a tensor, which ``catalogue`` resolves, or ``"y"`` and ``"sample_weight"``. ``rule``: the
    convention, by default that of the adapter.
    """

    def __init__(
        self,
        adapter: Adapter,
        model: Any,
        stated: Mapping[str, Layout] | None = None,
        catalogue: Catalogue | None = None,
        rule: AxisConvention | None = None,
    ) -> None:
        self.adapter, self.model, self.rule, self._catalogue = adapter, model, rule or adapter, catalogue
        tensors = {} if catalogue is None else {t: layout for t, layout in (stated or {}).items() if t not in DATA}
        self.stated = {
            _port_of_name(text, catalogue): layout for text, layout in tensors.items() if catalogue is not None
        }
        self.data = {name: layout for name, layout in (stated or {}).items() if name in DATA}
        #: Layouts found by experiment, and the ports for which an experiment was made.
        self.found_layouts: dict[Port, Layout] = {}
        self._learned_ports: set[Port] = set()
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
        layout = self.stated.get(port, self.found_layouts.get(port))
        if layout is None:
            shown_layout = self.shown_layout(port, len(shape))
            return self.rule.layout(port, shape, integer=integer) if shown_layout is None else shown_layout
        if len(layout.axes) != len(shape):
            raise InputError(
                f"axes= does not match {self.text_of(port)!r}.",
                got=f"{len(layout.axes)} axes: {', '.join(map(str, layout.names))}",
                expected=f"{len(shape)} axes, for shape {tuple(shape)}",
            )
        return layout

    def text_of(self, port: Port) -> str:
        """Return the name of a port as a user writes it, by the name of an input or output where there are several."""
        if port.layer is not None or port.kind not in ("input", "output") or self._catalogue is None:
            return text_of(port)
        names = self._catalogue.inputs if port.kind == "input" else self._catalogue.outputs
        return f"{port.kind}[{names[port.index]}]" if len(names) > 1 else text_of(port)

    def steps_to_type(self, port: Port) -> str:
        """Return the ``axes=`` to type where a tensor's steps were not told from its other axes; empty elsewhere."""
        layout = None if port in self.stated else self.found_layouts.get(port)
        if layout is None or not layout.unclear_axes:
            return ""
        return axes_to_type(self.text_of(port), layout.axes, layout.unclear_axes, self.to_write())

    def to_write(self) -> dict[str, tuple[str | Axis, ...]]:
        """Return the layouts that the user stated, as written in ``axes=``."""
        return {self.text_of(port): axes_to_write(layout.axes) for port, layout in self.stated.items()}

    def shown_layout(self, port: Port, axis_count: int | None = None) -> Layout | None:
        """Return the layout that the model's structure shows for a tensor, of ``axis_count`` axes; None elsewhere."""
        layout = self._shown_layouts.get(port)
        return layout if layout is not None and axis_count in (None, len(layout.axes)) else None

    @cached_property
    def _shown_layouts(self) -> Mapping[Port, Layout]:
        if self._catalogue is None or not self.rule.samples_first:
            return {}
        return self._catalogue.facts.layouts(self._catalogue.x)

    def learn(self, batch: Batch, ports: Iterable[Port], shown_layouts: Mapping[Port, Layout] | None = None) -> None:
        """Find and store layouts of ports without one: ``shown_layouts``, cached for these shapes, or by experiment."""
        new_ports = [
            port for port in dict.fromkeys(ports) if port not in self._learned_ports and port not in self.stated
        ]
        if not new_ports or self.samples_first or self.adapter.samples_first:
            return
        cached, layouts = self._cached_layouts(batch), shown_layouts or {}
        if cached is not None and all(port in cached for port in new_ports):
            layouts = {port: cached[port] for port in new_ports}
        elif not all(port in layouts for port in new_ports):
            forward_batch = Batch(batch.x, training=batch.training, initial_state=batch.initial_state, seed=batch.seed)
            layouts = self.adapter.layouts(self.model, forward_batch, new_ports)
        if cached is not None:
            new_layouts = {port: layouts[port] for port in new_ports if port in layouts}
            cached |= {
                port: layout
                for port, layout in new_layouts.items()
                if not (layout.is_coupled or layout.is_uncertain or layout.order)
            }
        self.found_layouts |= {port: layout for port, layout in layouts.items() if port not in self._learned_ports}
        self._learned_ports |= set(new_ports)

    def _cached_layouts(self, batch: Batch) -> dict[Port, Layout] | None:
        """Return the cache of layouts for inputs of these shapes; None for packed data, which may be reordered."""
        leaves = data.leaves_of(batch.x)
        inputs = signature(batch.x)
        if inputs is None or any(data.is_packed(leaf) or len(np.shape(leaf)) == 1 for leaf in leaves):
            return None
        known = known_model(self.adapter, self.model)
        if known.fingerprint is None:
            return None
        if len(known.layouts) > _MAX_SHAPES:
            known.layouts.clear()
        return known.layouts.setdefault((inputs, batch.training, tuple(batch.initial_state or ())), {})

    def with_samples_first(self) -> ModelAxes:
        """Return axes of the same model of which every tensor has samples first, then steps."""
        return ModelAxes(self.adapter, self.model, rule=AxisConvention())

    def samples(self, batch: Batch) -> int:
        """Return the number of samples of a batch by its known layouts, else the length of its first axis."""
        leaves = data.leaves_of(batch.x)
        if self.is_cut or self.samples_first:
            return data.sample_count(batch.x, self.inputs)
        for port, layout in {**self.found_layouts, **self.stated}.items():
            if port.kind == "input" and port.layer is None and layout.sample is not None and not layout.is_folded:
                return int(getattr(leaves[port.index], "shape", (1,))[layout.sample])
        sample_count = next((layout.samples for layout in self.found_layouts.values() if layout.samples), 0)
        return sample_count or data.leaf_sample_count(next(filter(data.has_axes, leaves), leaves[0]), None)


def _port_of_name(text: str, catalogue: Catalogue) -> Port:
    name = read_one(text, catalogue)
    if name.kind not in ("input", "output"):
        expected = f'"input", "output", "layer.output", "layer.input"; {", ".join(map(repr, DATA))}'
        raise InputError(f"axes= does not take {text!r}.", got=repr(text), expected=expected)
    return name.port()


def in_canonical_order(array: Array, names: Sequence[str], leading_axes: int = 0) -> tuple[Array, tuple[str, ...]]:
    """Transpose an array to the axis order of results: samples, steps, all other axes. Return it and the axis names."""
    order = canonical_order(names)
    if order != list(range(len(names))):
        array = np.transpose(array, [*range(leading_axes), *(leading_axes + i for i in order)])
    return array, tuple(names[i] for i in order)


def refuse_unknown(
    operation: str, name: str, names: Sequence[str], axis: str = SAMPLE, hint: str | None = None
) -> None:
    """Raise InputError, with the ``axes=`` to type, if the axis ``axis`` is not among a tensor's axis names."""
    if axis not in names:
        counts = {SAMPLE: "samples", TIME: "steps"}[axis]
        raise InputError(
            f"{operation} needs the axis of {name!r} that counts {counts}, and rnnlens could not determine it.",
            got=f"axes ({', '.join(names)})",
            hint=hint or f"name the axes: axes={{{name!r}: (..., {axis!r}, ...)}}, one name for each axis",
        )


def refuse_steps_first(axes: ModelAxes, batch: Batch, sizes: Iterable[Sequence[int]]) -> None:
    """Raise if the convention is samples first, then steps, and layers seem to step along another axis of the data.

    ``sizes``: samples and steps of each recurrent call.
    """
    if not axes.samples_first:
        return
    calls = {tuple(size) for size in sizes}
    transposed_sizes = {
        (leaf.shape[1], leaf.shape[0]) for leaf in data.leaves_of(batch.x) if getattr(leaf, "ndim", 0) > 1
    }
    if calls and all(samples != steps and (samples, steps) in transposed_sizes for samples, steps in calls):
        samples, steps = next(iter(calls))
        raise InputError(
            "The recurrent layers step along the first axis of the input, where this framework has the samples.",
            got=f"{steps} steps and {samples} samples",
            expected="samples first",
            hint='axes={"input": ("time", "sample", "feature"), "output": ("time", "sample", "unit")}',
        )
    step_counts = {steps for _, steps in calls}
    shapes = {i: leaf.shape for i, leaf in enumerate(data.leaves_of(batch.x)) if getattr(leaf, "ndim", 0) == 3}
    if len(step_counts) != 1 or any(shape[1] in step_counts for shape in shapes.values()):
        return
    for index, shape in shapes.items():
        port = Port("input", index=index)
        if shape[2] in step_counts and port not in axes.stated and axes.shown_layout(port) is None:
            name = axes.text_of(port)
            raise InputError(
                f"The recurrent layers run as many steps as {name!r} has entries on its last axis.",
                got=f"shape {tuple(shape)}, {shape[2]} steps",
                expected="axes=, which says whether that axis or the second counts steps",
                hint=f'axes={{"{name}": ("sample", "feature", "time")}}, or ("sample", "time", "feature")',
            )


def refuse_unclear_steps(operation: str, name: str, layout: Layout, others: Mapping[str, Any] | None = None) -> None:
    """Raise InputError, with the layouts to choose from, where a tensor's steps cannot be told from its other axes.

    ``others``: layouts that the user stated for other tensors, by name, which the layouts to type include.
    """
    if not layout.unclear_axes:
        return
    axes = " and ".join(layout.unclear_axes)
    choices = axes_to_type(name, layout.axes, layout.unclear_axes, others)
    if len(layout.unclear_axes) > 1:
        problem = f"{axes} of {name!r} vary with the steps of recurrent layers"
    else:
        problem = f"{axes} of {name!r} varies with the steps, but does not advance one entry per step"
        other_axis = _feature_or_unit(name)
        if other_axis not in layout.names:
            flat_axes = axes_to_write([(other_axis,) if axis == (axes,) else axis for axis in layout.axes])
            choices = (
                f"axes={dict(others or {}) | {name: flat_axes}} where it holds {other_axis}s of all steps, or {choices}"
            )
    got = f"axes ({', '.join(layout.names)})"
    raise InputError(f"{operation} needs the axis that counts steps: {problem}.", got=got, hint=f"say {choices}")


def axes_to_write(axes: Iterable[Axis]) -> tuple[str | Axis, ...]:
    """Return the axes of a layout as a user writes them in ``axes=``."""
    return tuple(axis if len(axis) > 1 else axis[0] for axis in axes)


def axes_to_type(
    name: str, axes: Sequence[Axis], unclear: Sequence[str], others: Mapping[str, Any] | None = None
) -> str:
    """Return the ``axes=`` argument to type for each choice of ``time`` among the unclear axes, besides ``others``."""
    candidates = []
    for steps in unclear:
        can_rename = len(unclear) == 2 and (_feature_or_unit(name),) not in axes
        replacements = {axis: _feature_or_unit(name) for axis in unclear} if can_rename else {}
        candidates.append(
            axes_to_write(
                tuple((replacements | {steps: TIME}).get(axis_name, axis_name) for axis_name in axis) for axis in axes
            )
        )
    return ", or ".join(
        f"axes={dict(others or {}) | {name: candidate}}"
        for candidate in candidates
        if len(set(candidate)) == len(candidate)
    )


def sample_axes_to_type(name: str, shape: Sequence[int], samples: int, steps: int = 0) -> str:
    """Return the ``axes=`` to type for a tensor whose sample axis is not known: the orders of samples and steps.

    An order in which the axis of the samples has another size is left out, if the other one fits. They are folded into
    the first axis if it has an entry for each step of each of ``samples`` samples. ``steps``: 0 if their number is not
    known.
    """
    is_folded = shape[0] == samples * steps if steps else shape[0] > samples > 1 and shape[0] % samples == 0
    others = (UNIT, *(f"axis_{i}" for i in range(3, len(shape) + 1)))
    candidates = []
    orders = ((TIME, SAMPLE), (SAMPLE, TIME))
    fitting = [order for order in orders if shape[order.index(SAMPLE) :][:1] == (samples,)]
    for order in orders if is_folded else fitting or orders:
        leading: tuple[str | Axis, ...] = (order,) if is_folded else order if len(shape) > 1 else (SAMPLE,)
        axes = {name: (*leading, *others)[: len(shape)]}
        candidates.append(f"axes={axes}")
    return " or ".join(dict.fromkeys(candidates))


def _feature_or_unit(name: str) -> str:
    return FEATURE if name.partition("[")[0].endswith("input") else UNIT


class InputCoordinates:
    """Coordinates of a call's DataArrays by role of the axis; ``layouts`` for inputs with names of their own."""

    def __init__(self, x: Any, layouts: ModelAxes) -> None:
        leaves = data.leaves_of(x)
        self.leaves = leaves if any(isinstance(leaf, xr.DataArray) for leaf in leaves) else []
        self._by_leaf = [_index_labels(leaf, index, layouts) for index, leaf in enumerate(self.leaves)]

    def find(self, dim: str, size: int, leaf: int | None = None) -> Array | None:
        """Return the labels of an axis by role and length; None if no input has them or inputs disagree."""
        leaf_labels = self._by_leaf if leaf is None else self._by_leaf[leaf : leaf + 1]
        matching_labels = [labels[dim] for labels in leaf_labels if dim in labels and len(labels[dim]) == size]
        return (
            matching_labels[0]
            if matching_labels and all(np.array_equal(matching_labels[0], other) for other in matching_labels[1:])
            else None
        )

    def assign_to(self, layer: LabelledLayer, dims: Iterable[str] = (SAMPLE, TIME), leaf: int | None = None) -> None:
        """Assign input labels to those dimensions of a layer that match in role and length."""
        for dim, labels in self.labels_of(layer.sizes, dims, leaf).items():
            layer.coords[dim] = xr.Variable((dim,), labels, layer.coords[dim].attrs)

    def labels_of(
        self, sizes: Mapping[Any, int], dims: Iterable[str] = (SAMPLE, TIME), leaf: int | None = None
    ) -> dict[str, Array]:
        """Return the input labels of those dimensions that match in role and length."""
        labels_by_dim = {dim: self.find(dim, sizes[dim], leaf) for dim in dims if dim in sizes}
        return {dim: labels for dim, labels in labels_by_dim.items() if labels is not None}

    def input_index(self, values: Array) -> int | None:
        """Return the index of the input that equals ``values``, (sample, time, feature); None if there is none."""
        for index, leaf in enumerate(self.leaves):
            if tuple(leaf.shape) == values.shape and np.array_equal(np.asarray(leaf), values):
                return index
        return None


def _index_labels(leaf: Any, index: int, layouts: ModelAxes) -> dict[str, Array]:
    """Return the index coordinates of one input by the role of their axis."""
    if not isinstance(leaf, xr.DataArray):
        return {}
    roles = (SAMPLE, TIME, FEATURE)
    dim_by_role = {str(dim): str(dim) for dim in leaf.dims if dim in roles}
    if not dim_by_role and (layouts.samples_first or Port("input", index=index) in layouts.stated):
        names = layouts.layout(Port("input", index=index), leaf.shape, integer=leaf.dtype.kind in "iu").names
        if len(names) == leaf.ndim:
            dim_by_role = {role: str(dim) for role, dim in zip(names, leaf.dims, strict=True) if role in roles}
    return {role: leaf[dim].values for role, dim in dim_by_role.items() if dim in leaf.coords and leaf[dim].ndim == 1}


class BatchAxes:
    """Converts tensors of one batch between the framework's layout and one axis per name."""

    def __init__(self, axes: ModelAxes, samples: int) -> None:
        self.axes, self.samples = axes, samples

    def layout(self, port: Port, array: Any, leading_axes: int = 0) -> Layout:
        """Return the layout of a tensor, given an array of it with ``leading_axes`` axes in front."""
        integer = np.asarray(array).dtype.kind in "iu"
        return self.axes.layout(port, array.shape[leading_axes:], integer=integer)

    def split_folded(self, port: Port, array: Array, leading_axes: int = 0) -> tuple[Array, tuple[str, ...]]:
        """Split folded axes of a tensor; return it in the framework's order, with the axis names."""
        layout = self.layout(port, array, leading_axes)
        return layout.split_folded(array, self.samples, leading_axes), layout.names

    def fold(self, port: Port, array: xr.DataArray) -> Array:
        """Fold an opened tensor back into the framework's layout."""
        layout = self.axes.stated.get(port, self.axes.found_layouts.get(port))
        return array.values if layout is None else layout.fold(array.values)

    def has_framework_layout(self, port: Port) -> bool:
        """Return whether a tensor has the framework's own layout, rather than a recurrent layer's (samples first)."""
        return port.layer is None or port in self.axes.found_layouts or port in self.axes.stated

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
            Layout.of_names(dims_of(array.shape)) if port is None else self.layout(port, array)
            for port, array in zip(ports, arrays, strict=True)
        ]

        def reached_indices(cotangent: Array, name: str) -> Array | None:
            """Return at which indices of the arguments' axis ``name`` the gradient for a cotangent is not zero."""
            reached_mask = None
            for grad, layout in zip(pull(cotangent), layouts, strict=True):
                if name in layout.names and np.any(grad):
                    reached_by_grad = reached(layout.split_folded(grad, self.samples), layout.names.index(name))
                    reached_mask = (
                        reached_by_grad
                        if reached_mask is None or len(reached_mask) != len(reached_by_grad)
                        else reached_mask | reached_by_grad
                    )
            return reached_mask

        return xr.DataArray(result, dims=_name_followed_axes(result, reached_indices))

    def mask_samples(self, port: Port, seed: Array, masks: Array) -> Array | None:
        """Return a cotangent once per mask (row, sample), zero at other samples; None if the sample axis is unknown."""
        opened, names = self.split_folded(port, seed) if self.has_framework_layout(port) else (seed, (SAMPLE,))
        if SAMPLE not in names or opened.shape[names.index(SAMPLE)] != masks.shape[1]:
            return None
        sample_axis = names.index(SAMPLE)
        mask = masks.reshape(len(masks), *[1] * sample_axis, -1, *[1] * (opened.ndim - sample_axis - 1))
        return np.where(mask, opened[None], seed.dtype.type(0)).reshape(len(masks), *seed.shape)


def reached(array: Array, *axes: int) -> Array:
    """Return at which indices of the given axes an array is not zero everywhere."""
    return np.any(array != 0, axis=tuple(i for i in range(array.ndim) if i not in axes))


def _name_followed_axes(result: Array, reached_indices: Callable[[Array, str], Array | None]) -> tuple[str, ...]:
    """Name an axis ``sample`` or ``time`` if cotangents masked along it are pulled back to the same indices only."""
    names = [f"axis_{i}" for i in range(result.ndim)]
    for name in (SAMPLE, TIME):
        fitting = [
            axis
            for axis in range(result.ndim)
            if names[axis].startswith("axis_") and _axis_matches(result, axis, name, reached_indices)
        ]
        if len(fitting) == 1 or (fitting and name == SAMPLE and result.shape[fitting[0]] == 1):
            names[fitting[0]] = name
    unnamed_axes = [axis for axis in range(result.ndim) if names[axis].startswith("axis_")]
    if unnamed_axes and unnamed_axes[-1] == result.ndim - 1 and result.ndim > 1:
        names[-1] = "unit"
    return tuple(names)


def _axis_matches(result: Array, axis: int, name: str, reached_indices: Callable[[Array, str], Array | None]) -> bool:
    size = result.shape[axis]
    noise = np.random.default_rng(0).normal(size=result.shape).astype(result.dtype)
    was_reached = False
    for pattern in patterns(size):
        mask = pattern.reshape(-1, *[1] * (result.ndim - axis - 1))
        reached_mask = reached_indices(noise * mask, name)
        if reached_mask is not None:
            if len(reached_mask) != size or bool((reached_mask & ~pattern).any()):
                return False
            was_reached = True
    return was_reached


def patterns(size: int) -> np.ndarray[Any, Any]:
    """Return masks (pattern, size), two per binary digit of an index; any two indices differ in at least one."""
    if size == 1:
        return np.ones((1, 1), dtype=bool)
    bits = (np.arange(size)[None, :] >> np.arange((size - 1).bit_length())[:, None]) & 1
    return np.concatenate([bits, 1 - bits]).astype(bool)


#: Bytes of cotangents that are pulled back at once to see whether samples are independent.
TRIED_AT_ONCE = 2**25


def refuse_coupled(
    batch_axes: BatchAxes,
    seeds: Mapping[Port, Array],
    pull: Callable[[Mapping[Port, Array]], Mapping[Port, Array | None]],
) -> None:
    """Raise UnsupportedError, with the tensor, if cotangents of some samples are pulled back to other samples."""
    experiment = frozenset(seeds), batch_axes.samples
    if batch_axes.samples < 2 or not seeds or experiment in batch_axes.axes.independent:
        return
    # Few cotangents at a time where they are large: no more memory than the gradient itself takes.
    size = max(1, TRIED_AT_ONCE // sum(seed.nbytes for seed in seeds.values()))
    masks = patterns(batch_axes.samples)
    for start in range(0, len(masks), size):
        rows = masks[start : start + size]
        masked_seeds = {port: batch_axes.mask_samples(port, seed, rows) for port, seed in seeds.items()}
        for port, gradient in pull({port: seed for port, seed in masked_seeds.items() if seed is not None}).items():
            if gradient is None or port.kind in ("weight", "loss"):
                continue
            gradient_array = to_host(gradient)
            names: tuple[str, ...] = (SAMPLE,)
            if batch_axes.has_framework_layout(port):
                gradient_array, names = batch_axes.split_folded(port, gradient_array, leading_axes=1)
            reached_samples = reached(gradient_array, 0, 1 + names.index(SAMPLE)) if SAMPLE in names else rows
            if reached_samples.shape == rows.shape and bool((reached_samples & ~rows).any()):
                raise refusal_of_coupling("per_sample=True", port)
    batch_axes.axes.independent.add(experiment)


def refusal_of_coupling(operation: str, port: Port) -> UnsupportedError:
    """Create the error for a tensor whose samples depend on each other."""
    location = "the model's " + port.kind if port.layer is None else f"{port.layer}.{port.kind}"
    return UnsupportedError(
        f"{operation}: the samples of this batch depend on each other.",
        got=f"a change of one sample changes others, at {location}",
        expected="samples that are computed independently",
        hint="batch statistics: training=False; else a batch of one sample, or the gradient of the whole batch",
    )
