"""The exact loss of a data set in batches, for any loss function.

The loss is evaluated once, on the outputs of all batches joined. Its gradient there has one row per sample, and each
batch pulls its own rows back through the model. So the reduction, masking and weighting of the loss need not be known.
The cost is a second forward pass, and memory for the outputs (not the activations) of all samples.

References
----------
Gradient caching: Gao, Zhang, Han, Callan 2021, arXiv:2101.06983, section 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import data
from ...adapters.protocol import Batch, Outputs, Port, Taps
from ...errors import UnsupportedError
from ...layout import Layout
from ...results.schema import to_host
from ...typing import Array, arrays_of
from ...vocabulary import SAMPLE
from ..axes import ModelAxes
from ..names import TensorName, read
from .request import BatchRequest, GradientRequest
from .target import Target

OutputLayouts = Sequence[Layout]


@dataclass
class WholeLoss:
    """Loss of a data set, and its gradient for each output of the model, over all samples."""

    value: Array
    outputs: list[Array]
    cotangents: list[Array | None]
    layouts: OutputLayouts
    samples: int
    own_losses: Any
    digests: list[list[bytes]]

    @classmethod
    def of(
        cls,
        request: GradientRequest,
        batches: Iterable[Batch],
        layouts: OutputLayouts | None,
        targets: Callable[[list[Batch]], tuple[Any, Any]],
    ) -> WholeLoss:
        """Run the model on every batch; evaluate the loss on all outputs and the joined ``targets``."""
        adapter, model = request.adapter, request.model
        parts: list[Outputs] = []
        without_inputs: list[Batch] = []
        digests: list[list[bytes]] = []
        counts: list[int] = []
        for batch in batches:
            part = adapter.run(model, batch.without_loss(), Taps()).outputs
            counts.append(request.axes.samples(batch))
            digests.append(_digest(batch.x))
            parts.append(part if not parts else replace(part, tree=None))
            without_inputs.append(replace(batch, x=None))
        if layouts is None:
            ports = [Port("output", index=i) for i in range(len(parts[0].leaves))]
            layouts = [adapter.layout(port, leaf.shape) for port, leaf in zip(ports, parts[0].leaves, strict=True)]
        joined = [_join_outputs([p.leaves[i] for p in parts], layout, counts, i) for i, layout in enumerate(layouts)]
        masks = [
            None if mask is None else np.concatenate([np.asarray(part.masks[i]) for part in parts])
            for i, mask in enumerate(parts[0].masks)
        ]
        y, weight = targets(without_inputs)
        full_batch = replace(without_inputs[0], y=y, sample_weight=weight)
        value, cotangents = adapter.loss_of(model, full_batch, replace(parts[0], leaves=joined, masks=masks))
        for i, (layout, cotangent) in enumerate(zip(layouts, cotangents, strict=True)):
            if layout.sample is None and cotangent is not None and np.any(cotangent):
                raise UnsupportedError(
                    "The loss uses an output without a sample axis, so it cannot be computed from batches.",
                    got=f"output {i} of the model",
                    expected='combine="mean" or "sum", or all samples as one batch',
                )
        return cls(np.asarray(value), joined, cotangents, layouts, sum(counts), parts[0].own_losses, digests)

    def requests(self, request: GradientRequest, batches: Iterable[Batch]) -> Iterator[BatchRequest]:
        """Yield one gradient request per batch, with its rows of the loss gradient as cotangents."""
        if len(self.outputs) > 1 and not request.catalogue.outputs:
            request.catalogue.outputs = tuple(map(str, range(len(self.outputs))))
        names = read("output", request.catalogue)
        indices = [i for i, cotangent in enumerate(self.cotangents) if cotangent is not None]
        has_own_losses = self.own_losses is not None and not request.target.per_sample
        start = 0
        for number, batch in enumerate(batches):
            count = request.axes.samples(batch)
            stop = start + count
            if number >= len(self.digests) or _digest(batch.x) != self.digests[number]:
                raise _changed_order_error()
            cotangents = [self.layouts[i].cut(self.cotangents[i], start, stop, self.samples) for i in indices]
            leaves = [names[i] for i in indices]
            if has_own_losses:
                cotangents.append(np.asarray(count / self.samples))
                leaves.append(TensorName("loss", "loss"))
            batch_without_loss = replace(batch, y=None, sample_weight=None, class_weight=None, loss=self.own_losses)
            of_batch = request.of_batch(batch_without_loss, Target("<loss>", {}, None, request.target.per_sample))
            yield replace(of_batch, named=tuple(leaves), cotangents=tuple(cotangents))
            start = stop
        if start != self.samples:
            raise _changed_order_error()


def output_layouts(axes: ModelAxes, first_batch: Batch, second_batch: Batch) -> OutputLayouts | None:
    """Return the layout of each model output by its sample axis; None if samples come first."""
    adapter, model = axes.adapter, axes.model
    mixing_layer = adapter.facts(model).mixes_samples(training=first_batch.training)
    if mixing_layer is None:
        return None
    if mixing_layer != "?":
        raise _coupled_error(f"layer {mixing_layer!r} uses statistics of its batch")
    few, more = _batches_of_two_sizes(axes, first_batch, second_batch)
    few_outputs, more_outputs = (adapter.run(model, batch.without_loss(), Taps()).outputs for batch in (few, more))
    ports = [Port("output", index=i) for i in range(len(few_outputs.leaves))]
    axes.learn(more, ports)
    layouts = [
        _layout_by_growth(axes.layout(port, few_rows.shape), few_rows.shape, more_rows.shape, few is more)
        for port, few_rows, more_rows in zip(ports, few_outputs.leaves, more_outputs.leaves, strict=True)
    ]
    unknown = [(port, layout) for port, layout in zip(ports, layouts, strict=True) if port not in axes.stated]
    axes.found_layouts |= {port: layout for port, layout in unknown if layout.sample is not None}
    if not first_batch.training:
        counts = axes.samples(few), axes.samples(more)
        changed_outputs = [
            i
            for i, (layout, few_rows, more_rows) in enumerate(
                zip(layouts, few_outputs.leaves, more_outputs.leaves, strict=True)
            )
            if _do_rows_change(layout, few_rows, more_rows, counts)
        ]
        if changed_outputs and _do_companions_matter(axes, more, counts, layouts, changed_outputs, more_outputs.leaves):
            raise _coupled_error("the output of a sample changes with the other samples of its batch")
    return layouts


def _layout_by_growth(layout: Layout, few: Sequence[int], more: Sequence[int], is_same_batch: bool) -> Layout:
    """Return the layout of an output; its sample axis is the one whose size changed with the number of samples."""
    grown_axes = [i for i, (size, more_size) in enumerate(zip(few, more, strict=False)) if size != more_size]
    if layout.is_folded or is_same_batch or len(grown_axes) > 1 or grown_axes == [layout.sample]:
        return layout
    other_axes = [(f"axis_{i}",) if axis == (SAMPLE,) else axis for i, axis in enumerate(layout.axes)]
    return replace(layout, axes=tuple((SAMPLE,) if i in grown_axes else axis for i, axis in enumerate(other_axes)))


def _do_rows_change(layout: Layout, few: Array, more: Array, counts: tuple[int, int]) -> bool:
    """Return whether an output of the same samples differs in a larger batch."""
    if layout.is_coupled:
        return True
    if layout.sample is None or not np.issubdtype(few.dtype, np.floating) or few.ndim != more.ndim:
        return False
    rows = layout.cut(more, 0, *counts)
    return rows.shape == few.shape and not _is_close(rows, few)


def _do_companions_matter(
    axes: ModelAxes,
    more: Batch,
    counts: tuple[int, int],
    layouts: OutputLayouts,
    changed: Sequence[int],
    outputs: Sequence[Array],
) -> bool:
    """Return whether outputs differ beside other samples in a batch of the same size, where rounding is the same."""
    kept_count, total = counts
    if any(layouts[i].is_coupled for i in changed) or any(map(data.is_packed, data.leaves_of(more.x))):
        return True
    copies = [data.samples_of_tree(more.x, axes.inputs, 0, kept_count, total)] * (1 + (total - 1) // kept_count)
    repeated_x = data.samples_of_tree(data.join(copies, axes.inputs), axes.inputs, 0, total, kept_count * len(copies))
    repeated_outputs = axes.adapter.run(axes.model, replace(more, x=repeated_x).without_loss(), Taps()).outputs.leaves
    rows = ((layouts[i].cut(outputs[i], 0, *counts), layouts[i].cut(repeated_outputs[i], 0, *counts)) for i in changed)
    return any(
        rows_before.shape != rows_after.shape or not _is_close(rows_before, rows_after)
        for rows_before, rows_after in rows
    )


def _batches_of_two_sizes(axes: ModelAxes, first_batch: Batch, second_batch: Batch) -> tuple[Batch, Batch]:
    """Return two batches of different size that share samples."""
    count = axes.samples(first_batch)
    if count > 1:
        fewer = count // 2
        x = data.samples_of_tree(first_batch.x, axes.inputs, 0, fewer, count)
        return replace(
            first_batch, x=x, initial_state=data.samples_of_arrays(first_batch.initial_state, 0, fewer)
        ), first_batch
    if any(map(data.is_packed, data.leaves_of(first_batch.x))):
        return first_batch, first_batch
    states = (
        None
        if first_batch.initial_state is None
        else data.join([first_batch.initial_state, second_batch.initial_state])
    )
    return first_batch, replace(
        first_batch, x=data.join([first_batch.x, second_batch.x], axes.inputs), initial_state=states
    )


def _is_close(first: Array, second: Array) -> bool:
    bound = 1e3 * float(np.finfo(first.dtype).eps) * max(float(np.max(np.abs(first), initial=0.0)), 1e-6)
    return bool(np.allclose(first, second, rtol=0.0, atol=bound, equal_nan=True))


def _join_outputs(parts: list[Array], layout: Layout, counts: Sequence[int], index: int) -> Array:
    """Concatenate the outputs of batches along the sample axis."""
    axis = layout.sample
    if axis is None:
        return parts[0]
    split_parts = [layout.split_folded(part, count) for part, count in zip(parts, counts, strict=True)]
    if len({part.shape[:axis] + part.shape[axis + 1 :] for part in split_parts}) > 1:
        got = " and ".join(dict.fromkeys(str(part.shape) for part in parts))
        raise UnsupportedError(
            "Outputs of batches differ in length, so they cannot be concatenated.",
            got=f"output {index} of shapes {got}",
            hint="pad all batches to one length; in torch pad_packed_sequence(..., total_length=x.shape[1])",
        )
    return layout.fold(np.concatenate(split_parts, axis=axis))


def _digest(tree: Any) -> list[bytes]:
    """Return hashes of the data of a batch."""
    arrays = (np.ascontiguousarray(to_host(leaf)) for leaf in arrays_of(tree))
    return [hashlib.blake2b(array.tobytes()).digest() for array in arrays]


def _coupled_error(reason: str) -> UnsupportedError:
    return UnsupportedError(
        "The samples depend on each other, so the result of the whole data set cannot be computed batch by batch.",
        got=reason,
        expected="a model that treats samples independently, or all samples as one batch",
        hint="training=False, or batch_size=None",
    )


def _changed_order_error() -> UnsupportedError:
    return UnsupportedError(
        "The data set returned other samples when read a second time, and this loss needs the outputs of all samples.",
        expected='combine="mean" or "sum", if the loss is a mean or a sum over samples; or data in a fixed order',
        hint="shuffle=False",
    )
