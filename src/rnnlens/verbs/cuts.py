"""Along which axis a data set is cut into batches: seen by running the model on two samples, and on three.

No axis is taken for that of the samples because it comes first, or because of its size: where it is cut, every
recurrent call has fewer samples, and as many steps as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import Batch, Capture, CaptureRequest, Port
from ..errors import InputError, ModelError, RnnlensError, message
from ..layout import Layout
from ..typing import Array
from ..vocabulary import SAMPLE
from .axes import Axes

#: More ways than this to cut the inputs of a model are not tried.
_MOST_WAYS = 64
_FEW, _MORE = 2, 3


@dataclass(frozen=True)
class Cut:
    """An axis of an array along which samples lie, among so many axes; None for a packed sequence."""

    axis: int | None
    count: int

    @property
    def layout(self) -> Layout:
        """As a layout of which nothing else is known."""
        return Layout.plain(SAMPLE if i == self.axis else f"axis_{i}" for i in range(self.count))


def layouts_to_cut(axes: Axes, template: Batch, x: Any, y: Any, sample_weight: Any) -> data.Layouts | None:
    """How the arrays of a data set are cut; None where samples come first in all of them.

    Raises
    ------
    InputError
        If it cannot be told; with the argument that does.
    """
    if axes.samples_first:
        return None
    inputs = layouts_of_inputs(axes, template, x)
    if inputs is None:
        return None
    count = data.size_of(data.leaves_of(x)[0], inputs[0])
    targets = _beside(axes, template, x, inputs, y, count)
    weights = [_weight(axes, leaf, y, targets, count) for leaf in data.leaves_of(sample_weight)]
    return {"x": inputs, "y": targets, "sample_weight": weights}


def layouts_of_inputs(axes: Axes, template: Batch, x: Any) -> list[Layout | None] | None:
    """Where samples lie in each input; None where they come first in all of them."""
    if axes.samples_first:
        return None
    leaves = data.leaves_of(x)
    stated = [axes.stated.get(Port("input", index=i)) for i in range(len(leaves))]
    if all(layout is not None and layout.sample is not None for layout in stated):
        return list(stated)
    failure: Exception | None = None
    for way in islice(_ways(leaves, stated), _MOST_WAYS):
        try:
            few, more = (_run(axes, template, _short(x, way, size)) for size in (_FEW, _MORE))
        except ModelError as error:
            if "recurrent" in str(error):  # nothing to follow: the convention of torch, samples first
                return None
            failure = failure or error
        except Exception as error:
            failure = failure or error
        else:
            if _only_samples_moved(few, more):
                return [cut if isinstance(cut, Layout) else None if cut.axis is None else cut.layout for cut in way]
    raise _unknown("input", [tuple(getattr(leaf, "shape", ())) for leaf in leaves], failure)


def _ways(leaves: Sequence[Any], stated: Sequence[Layout | None]) -> Iterator[tuple[Cut | Layout, ...]]:
    """Every choice of one axis per input, of one length."""
    options: list[list[Cut | Layout]] = []
    for leaf, layout in zip(leaves, stated, strict=True):
        shape = tuple(getattr(leaf, "shape", ()))
        if layout is not None and layout.sample is not None:
            options.append([layout])
        elif data.is_packed(leaf):
            options.append([Cut(None, 0)])
        else:
            options.append([Cut(axis, len(shape)) for axis in range(len(shape))])
    for way in product(*options):
        sizes = {_size(leaf, cut) for leaf, cut in zip(leaves, way, strict=True)}
        if len(sizes) == 1:
            yield way


def _size(leaf: Any, cut: Cut | Layout) -> int:
    return data.size_of(leaf, cut if isinstance(cut, Layout) else None if cut.axis is None else cut.layout)


def _short(x: Any, way: Sequence[Cut | Layout], size: int) -> Any:
    """The inputs with so many samples only; the first are taken again where there are fewer."""
    cuts = iter(way)

    def one(leaf: Any) -> Any:
        cut = next(cuts)
        if isinstance(cut, Cut) and cut.axis is None:
            return data.samples_of(leaf, None, 0, min(size, data.size_of(leaf, None)))
        layout = cut if isinstance(cut, Layout) else cut.layout
        return _first(leaf, layout, size)

    return data.map_leaves(one, x)


def _first(leaf: Any, layout: Layout, size: int) -> Any:
    whole = data.size_of(leaf, layout)
    some = data.samples_of(leaf, layout, 0, min(size, whole))
    if whole >= size or layout.sample is None:
        return some
    index = (slice(None),) * layout.sample + (np.arange(size) % whole,)
    return some[index]


def _run(axes: Axes, template: Batch, x: Any, y: Any = None) -> Capture:
    quiet = replace(template, x=x, y=y, sample_weight=None, class_weight=None, initial_state=None)
    quiet = quiet if y is not None else replace(quiet, loss=None)
    return axes.adapter.capture(axes.model, quiet, CaptureRequest(gradients=False, weight_grads=False))


def _only_samples_moved(few: Capture, more: Capture) -> bool:
    """Whether every call has its samples in proportion, and its steps as before; outputs in proportion, too."""
    pairs = [(tuple(a.input.shape[:2]), tuple(b.input.shape[:2])) for a, b in zip(few.calls, more.calls, strict=True)]
    calls = all(b[0] * _FEW == a[0] * _MORE and a[1] == b[1] for a, b in pairs)
    outputs = [
        (a, b)
        for a, b in zip(data.leaves_of(few.outputs), data.leaves_of(more.outputs), strict=True)
        if getattr(a, "ndim", 0)
    ]
    return calls and all(_grew(a, b) for a, b in outputs)


def _grew(few: Array, more: Array) -> bool:
    if data.is_packed(few):
        return True
    return any(b * _FEW == a * _MORE for a, b in zip(few.shape, more.shape, strict=True))


def _beside(
    axes: Axes, template: Batch, x: Any, inputs: Sequence[Layout | None], y: Any, count: int
) -> list[Layout | None]:
    """Targets: the one axis that has as many entries as there are samples, or that the loss takes with fewer."""
    leaves = data.leaves_of(y)
    if "y" in axes.data:
        return [axes.data["y"]] * len(leaves)
    found: list[Layout | None] = []
    for leaf in leaves:
        shape = tuple(getattr(leaf, "shape", ()))
        fitting = [Cut(axis, len(shape)).layout for axis, size in enumerate(shape) if size == count]
        if len(fitting) > 1 and len(leaves) == 1:
            fitting = [layout for layout in fitting if _loss_takes(axes, template, x, inputs, y, layout)]
        if len(fitting) != 1:
            raise _unknown("y", [shape], None)
        found.append(fitting[0])
    return found


def _loss_takes(axes: Axes, template: Batch, x: Any, inputs: Sequence[Layout | None], y: Any, layout: Layout) -> bool:
    """Whether the loss can be had of few samples whose targets are cut like this, and of no other number of them."""
    way = [Cut(None, 0) if layout is None else layout for layout in inputs]
    works = []
    for size, targets in ((_MORE, _MORE), (_MORE, _FEW), (_FEW, _MORE)):
        try:
            _run(axes, template, _short(x, way, size), _first(data.leaves_of(y)[0], layout, targets))
        except Exception:
            works.append(False)
        else:
            works.append(True)
    return works == [True, False, False]


def _weight(axes: Axes, leaf: Any, y: Any, targets: Sequence[Layout | None], count: int) -> Layout:
    """Weights: one per sample, or lying as the targets do."""
    if "sample_weight" in axes.data:
        return axes.data["sample_weight"]
    shape = tuple(getattr(leaf, "shape", ()))
    if len(shape) == 1 and shape[0] == count:
        return Cut(0, 1).layout
    for target, layout in zip(data.leaves_of(y), targets, strict=True):
        if layout is not None and tuple(target.shape[: len(shape)]) == shape and (layout.sample or 0) < len(shape):
            return Cut(layout.sample, len(shape)).layout
    fitting = [Cut(axis, len(shape)).layout for axis, size in enumerate(shape) if size == count]
    if len(fitting) != 1:
        raise _unknown("sample_weight", [shape], None)
    return fitting[0]


def _unknown(name: str, shapes: Sequence[tuple[int, ...]], failure: Exception | None) -> RnnlensError:
    if isinstance(failure, RnnlensError) and isinstance(failure, InputError):
        return failure
    error = InputError(
        message(
            f"Which axis of {name} counts samples could not be found out, so it is not cut into batches.",
            got=f"shape {', '.join(map(str, shapes))}",
            hint=f'say so: axes={{"{name}": ("time", "sample", ...)}}, one name for each axis; or leave batch_size out',
        )
    )
    error.__cause__ = failure
    return error
