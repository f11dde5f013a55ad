"""Batches of a data set, cut along the sample axis. Runs on two and on three samples find that axis."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import Batch, Capture, Port, Taps
from ..arguments.data import is_source, refuse_large
from ..errors import InputError, ModelError, RnnlensError, UnsupportedError
from ..layout import Layout
from ..typing import named_leaves
from ..vocabulary import FEATURE, SAMPLE, TIME
from .axes import ModelAxes, sample_axes_to_type

#: Largest number of combinations of sample axes that are tried.
_MAX_CHOICES = 64
_FEW, _MORE = 2, 3


def _with_samples_on(axis: int | None, count: int) -> Layout:
    """Return the layout of ``count`` axes in which only the sample axis is known."""
    return Layout.of_names(SAMPLE if i == axis else f"axis_{i}" for i in range(count))


def layouts_to_cut(axes: ModelAxes, template: Batch, x: Any, y: Any, sample_weight: Any) -> data.DataLayouts | None:
    """Return along which axes the arrays of a data set are cut; None if samples come first in all inputs."""
    if axes.samples_first:
        return None
    inputs = layouts_of_inputs(axes, template, x)
    if inputs is None:
        return None
    leaf, layout = next(
        (leaf, layout) for leaf, layout in zip(data.leaves_of(x), inputs, strict=True) if data.has_axes(leaf)
    )
    count = data.leaf_sample_count(leaf, layout)
    targets = _target_layouts(axes, template, x, inputs, y, count)
    weights = [_weight_layout(axes, leaf, y, targets, count) for leaf in data.leaves_of(sample_weight)]
    return {"x": inputs, "y": targets, "sample_weight": weights}


def layouts_of_inputs(axes: ModelAxes, template: Batch, x: Any) -> list[Layout | None] | None:
    """Return the layout of each input by its sample axis; None if samples come first."""
    if axes.samples_first:
        return None
    leaves = data.leaves_of(x)
    stated = [axes.stated.get(Port("input", index=i)) for i in range(len(leaves))]
    if all(
        (layout is not None and layout.sample is not None) or not data.has_axes(leaf)
        for leaf, layout in zip(leaves, stated, strict=True)
    ):
        return list(stated)
    failure: Exception | None = None
    for layouts in islice(_layout_choices(leaves, stated), _MAX_CHOICES):
        try:
            few, more = (_run(axes, template, _cut_inputs(x, layouts, size)) for size in (_FEW, _MORE))
        except ModelError as error:
            if "recurrent" in str(error):  # nothing to follow: the convention of torch, samples first
                return None
            failure = failure or error
        except Exception as error:
            failure = failure or error
        else:
            if _only_samples_differ(few, more):
                return list(layouts)
    axes_to_type = _axes_of_inputs_to_type(x) if len(leaves) > 1 else ""
    raise _unknown_axis_error(
        "input", [tuple(getattr(leaf, "shape", ())) for leaf in leaves], failure, axes_to_type=axes_to_type
    )


def _layout_choices(leaves: Sequence[Any], stated: Sequence[Layout | None]) -> Iterator[tuple[Layout | None, ...]]:
    """Yield each choice of a sample axis per input (None if packed) for which all have the same number of samples."""
    options: list[list[Layout | None]] = []
    for leaf, layout in zip(leaves, stated, strict=True):
        count = len(getattr(leaf, "shape", ()))
        if layout is not None and layout.sample is not None:
            options.append([layout])
        elif data.is_packed(leaf) or not count:
            options.append([None])
        else:
            options.append([_with_samples_on(axis, count) for axis in range(count)])
    for layouts in product(*options):
        pairs = [(leaf, layout) for leaf, layout in zip(leaves, layouts, strict=True) if data.has_axes(leaf)]
        if len({data.leaf_sample_count(leaf, layout) for leaf, layout in pairs}) == 1:
            yield layouts


def _cut_inputs(x: Any, layouts: Sequence[Layout | None], size: int) -> Any:
    """Cut the inputs to ``size`` samples; if there are fewer, repeat the first samples."""
    layout_iterator = iter(layouts)
    return data.map_leaves(lambda leaf: _cut_samples(leaf, next(layout_iterator), size), x)


def _cut_samples(leaf: Any, layout: Layout | None, size: int) -> Any:
    if not data.has_axes(leaf):
        return leaf
    sample_count = data.leaf_sample_count(leaf, layout)
    samples = data.samples_of(leaf, layout, 0, min(size, sample_count))
    if sample_count >= size or layout is None or layout.sample is None:
        return samples
    index = (slice(None),) * layout.sample + (np.arange(size) % sample_count,)
    return samples[index]


def _run(axes: ModelAxes, template: Batch, x: Any, y: Any = None) -> Capture:
    run_batch = replace(template, x=x, y=y, sample_weight=None, class_weight=None, initial_state=None)
    run_batch = run_batch if y is not None else replace(run_batch, loss=None)
    return axes.adapter.run(axes.model, run_batch, Taps.states()).capture


def _only_samples_differ(few: Capture, more: Capture) -> bool:
    """Return whether two captures differ only in the number of samples: same calls and steps, outputs in proportion."""
    if len(few.calls) != len(more.calls) or len(data.leaves_of(few.outputs)) != len(data.leaves_of(more.outputs)):
        return False  # a loop over the samples calls the layer once for each
    pairs = [(tuple(a.input.shape[:2]), tuple(b.input.shape[:2])) for a, b in zip(few.calls, more.calls, strict=True)]
    calls_match = all(b[0] * _FEW == a[0] * _MORE and a[1] == b[1] for a, b in pairs)
    outputs = [
        (a, b)
        for a, b in zip(data.leaves_of(few.outputs), data.leaves_of(more.outputs), strict=True)
        if getattr(a, "ndim", 0)
    ]
    return calls_match and all(
        data.is_packed(a) or any(n * _FEW == m * _MORE for m, n in zip(a.shape, b.shape, strict=True))
        for a, b in outputs
    )


def _target_layouts(
    axes: ModelAxes, template: Batch, x: Any, inputs: Sequence[Layout | None], y: Any, count: int
) -> list[Layout | None]:
    """Find the layouts of the targets: the only axis with ``count`` entries, or the one that the loss accepts."""
    leaves = data.leaves_of(y)
    if "y" in axes.data:
        return [axes.data["y"]] * len(leaves)
    layouts: list[Layout | None] = []
    for leaf in leaves:
        shape = tuple(getattr(leaf, "shape", ()))
        fitting = [_with_samples_on(axis, len(shape)) for axis, size in enumerate(shape) if size == count]
        if len(fitting) > 1 and len(leaves) == 1:
            fitting = [layout for layout in fitting if _loss_accepts(axes, template, x, inputs, y, layout)]
        if len(fitting) != 1:
            raise _unknown_axis_error("y", [shape], None, count)
        layouts.append(fitting[0])
    return layouts


def _loss_accepts(
    axes: ModelAxes, template: Batch, x: Any, inputs: Sequence[Layout | None], y: Any, layout: Layout
) -> bool:
    """Return whether the loss accepts targets cut along this layout's sample axis, and no other number of them."""
    accepted = []
    for size, targets in ((_MORE, _MORE), (_MORE, _FEW), (_FEW, _MORE)):
        try:
            with warnings.catch_warnings():  # of sizes that the user did not pass
                warnings.simplefilter("ignore")
                _run(axes, template, _cut_inputs(x, inputs, size), _cut_samples(data.leaves_of(y)[0], layout, targets))
        except Exception:
            accepted.append(False)
        else:
            accepted.append(True)
    return accepted == [True, False, False]


def _weight_layout(axes: ModelAxes, leaf: Any, y: Any, targets: Sequence[Layout | None], count: int) -> Layout:
    """Return the layout of the sample weights: one per sample, or the layout of the targets."""
    if "sample_weight" in axes.data:
        return axes.data["sample_weight"]
    shape = tuple(getattr(leaf, "shape", ()))
    if len(shape) == 1 and shape[0] == count:
        return _with_samples_on(0, 1)
    for target, layout in zip(data.leaves_of(y), targets, strict=True):
        if layout is not None and tuple(target.shape[: len(shape)]) == shape and (layout.sample or 0) < len(shape):
            return _with_samples_on(layout.sample, len(shape))
    fitting = [_with_samples_on(axis, len(shape)) for axis, size in enumerate(shape) if size == count]
    if len(fitting) != 1:
        raise _unknown_axis_error("sample_weight", [shape], None, count)
    return fitting[0]


def _unknown_axis_error(
    name: str, shapes: Sequence[tuple[int, ...]], failure: Exception | None, count: int = 0, axes_to_type: str = ""
) -> RnnlensError:
    if isinstance(failure, RnnlensError) and isinstance(failure, InputError):
        return failure
    error = InputError(
        f"rnnlens could not determine which axis of {name} counts samples, so it cannot be split into batches.",
        got=f"shape {', '.join(map(str, shapes))}",
        hint=f"name the axes: {axes_to_type or _axes_to_type(name, shapes, count)}; or leave batch_size out",
    )
    error.__cause__ = failure
    return error


def _axes_of_inputs_to_type(x: Any) -> str:
    """Return the ``axes=`` to type for several inputs, samples first and then steps."""
    counts = {
        f"input[{name}]": len(leaf.shape)
        for name, leaf in zip(named_leaves(x), data.leaves_of(x), strict=True)
        if data.has_axes(leaf) and not data.is_packed(leaf)
    }
    names = (SAMPLE, TIME, FEATURE, *(f"axis_{i}" for i in range(3, max(counts.values(), default=0))))
    axes = {name: names[:count] for name, count in counts.items()}
    return f"axes={axes} where samples come first"


def _axes_to_type(name: str, shapes: Sequence[tuple[int, ...]], count: int) -> str:
    if len(shapes) != 1 or not shapes[0]:
        return f'axes={{"{name}": ("time", "sample", ...)}}, one name for each axis'
    return sample_axes_to_type(name, shapes[0], count)


@dataclass(frozen=True)
class DataSetBatches:
    """Batches of a data set; every iteration starts from the first."""

    #: The whole data set as the user passed it, and the options of a run.
    full_batch: Batch
    batch_size: int | None
    axes: ModelAxes
    #: Whether a loss is needed; without it, targets and weights are left out.
    with_loss: bool

    def __iter__(self) -> Iterator[Batch]:
        start = 0
        omitted: dict[str, Any] = {} if self.with_loss else {"loss": None, "class_weight": None}
        for number, data_batch in enumerate(self._cut_batches()):
            seed = self.full_batch.seed  # in training mode each batch has another one
            stop = start + self.axes.samples(replace(self.full_batch, x=data_batch.x))
            yield replace(
                self.full_batch,
                x=data_batch.x,
                y=data_batch.y if self.with_loss else None,
                sample_weight=data_batch.sample_weight if self.with_loss else None,
                initial_state=data.samples_of_arrays(self.full_batch.initial_state, start, stop),
                seed=seed if seed is None or not self.full_batch.training else seed + number,
                **omitted,
            )
            start = stop

    @property
    def samples(self) -> int | None:
        """Number of samples, or None if it is not known without reading the data."""
        return None if is_source(self.full_batch.x) else data.sample_count(self.full_batch.x, self.axes.inputs)

    @property
    def count(self) -> int | None:
        """Number of batches, or None if it is not known."""
        x = self.full_batch.x
        if not self.axes.samples_first and not self.axes.is_cut:
            return None if data.is_read_in_batches(x, self.batch_size) else 1  # not known yet how the inputs lie
        inputs = self.axes.inputs
        layouts = None if inputs is None else {"x": inputs, "y": [], "sample_weight": []}
        return data.count_batches(x, self.batch_size, layouts)

    @property
    def can_be_read_again(self) -> bool:
        """Whether the data can be read from the start a second time."""
        return not hasattr(self.full_batch.x, "__next__")

    def iterate_again(self) -> Iterator[Batch]:
        """Iterate over the data from the start a second time; raise for a generator."""
        if not self.can_be_read_again:
            raise UnsupportedError(
                "The loss of the whole data set cannot be computed from the losses "
                "of its batches, and a generator can be read only once.",
                expected='combine="mean" or "sum", if the loss is a mean or a sum over samples',
                hint="arrays, or a data set that can be read twice: this loss needs the outputs of all batches",
            )
        return iter(self)

    def targets(self, batches: list[Batch]) -> tuple[Any, Any]:
        """Return targets and sample weights of all samples, as the user passed them or joined from batches."""
        if not is_source(self.full_batch.x):
            return (self.full_batch.y, self.full_batch.sample_weight) if self.with_loss else (None, None)
        if self.axes.inputs is not None and any(layout is not None and layout.sample for layout in self.axes.inputs):
            raise UnsupportedError(
                "The loss of this data set needs the targets of all batches, and rnnlens cannot determine their "
                "sample axis.",
                got="a source of batches in which samples do not come first",
                expected='combine="mean" or "sum", or arrays',
            )
        return data.join([batch.y for batch in batches]), data.join([batch.sample_weight for batch in batches])

    def _cut_batches(self) -> Iterable[data.DataBatch]:
        """Return the batches, each cut along the sample axis; without a batch size, all data are one batch."""
        axes, all_data = self.axes, data.DataBatch(self.full_batch.x, self.full_batch.y, self.full_batch.sample_weight)
        template = replace(self.full_batch, x=None, y=None, sample_weight=None)
        is_single_batch = not data.is_read_in_batches(all_data.x, self.batch_size)
        if is_single_batch and not is_source(all_data.x):
            refuse_large("The batch", [all_data.x, all_data.y], "batch_size=, fewer samples at a time")
        if is_single_batch and not axes.samples_first:
            if template.initial_state is not None:  # one row may serve all samples: how many are they?
                axes.inputs, axes.is_cut = layouts_of_inputs(axes, template, all_data.x), True
            return [all_data]
        layouts = None
        if not is_source(all_data.x):
            layouts = layouts_to_cut(axes, template, *all_data)
            axes.inputs, axes.is_cut = None if layouts is None else layouts["x"], True
        return self._with_layout_of_first(
            data.batches(
                *all_data[:2], sample_weight=all_data.sample_weight, batch_size=self.batch_size, layouts=layouts
            ),
            template,
        )

    def _with_layout_of_first(self, batches: Iterable[data.DataBatch], template: Batch) -> Iterator[data.DataBatch]:
        """Yield the batches of a source, all cut along the sample axes that are found on the first one."""
        for batch in batches:
            if not self.axes.is_cut:
                self.axes.inputs, self.axes.is_cut = layouts_of_inputs(self.axes, template, batch.x), True
            yield batch
