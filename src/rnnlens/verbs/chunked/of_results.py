"""``rl.jacobian``, ``rl.weights`` and ``rl.trace`` of lazy data: the verb itself on each chunk, scaled and combined."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from ...adapters.protocol import Adapter, Batch
from ...adapters.registry import adapter_for
from ...errors import UnsupportedError
from ...results.array import RECORD, LazyArray
from ...vocabulary import SAMPLE
from .graph import ChunkGraph, ChunkValues, Padding
from .of_gradients import finish_sum, refuse_other_loss, template_of
from .samples import ChunkRows, SampleChunks

#: Verb of one batch: model and batch to its result.
Verb = Callable[[Any, Batch], Any]


@dataclass(frozen=True)
class JacobianWork:
    """Time Jacobian of one chunk, or its part of the mean over samples; ``by_sample`` is the verb without that mean."""

    verb: Verb
    by_sample: Verb
    mean: bool
    padding: Padding | None
    combine: str | None = None

    def __call__(self, model: Any, batch: Batch, rows: ChunkRows, size: int) -> ChunkValues:
        """Differentiate one chunk."""
        padded = size > rows.count
        found = (self.by_sample if padded else self.verb)(model, batch)
        record = json.loads(found.attrs[RECORD])
        values = ChunkValues({}, checks=record["checks"], certificate=certificate_of(record.get("certificate")))
        if not self.mean:
            values.kept["jacobian"] = found.values[: rows.count]
        elif padded:
            values.sums["jacobian"] = found.values[: rows.count].sum(axis=0, dtype=np.float64)
        else:
            values.sums["jacobian"] = found.values.astype(np.float64) * rows.count
        return values


def lazy_jacobian(model: Any, chunks: SampleChunks, work: JacobianWork, ends: str) -> LazyArray:
    """Return a lazy time Jacobian of each sample, or its lazy mean over samples."""
    template = template_of(partial(work.verb, model), chunks)
    graph = ChunkGraph(model, chunks, work, f"jacobian-{ends}")
    if not work.mean:
        return LazyArray.of(graph.kept("jacobian", template), graph)
    template.attrs["samples"] = chunks.total
    finish = partial(finish_sum, scale=1.0, samples=chunks.total)
    return LazyArray.of(graph.total("jacobian", template, finish), graph)


@dataclass(frozen=True)
class DatasetWork:
    """Datasets of one chunk by layer: gradients scaled to the loss of all samples.

    ``verb`` computes weights (``sums_samples``, gradients are summed over chunks) or a trace (samples are kept).
    """

    verb: Verb
    combine: str | None
    sums_samples: bool
    padding: Padding | None

    def __call__(self, model: Any, batch: Batch, rows: ChunkRows, size: int) -> ChunkValues:
        """Compute one chunk."""
        if self.combine is not None:
            refuse_other_loss(adapter_for(model), model, batch, self.combine)
        found = self.verb(model, batch)
        record, of_mean = found._meta(), self.combine == "mean"
        values = ChunkValues({}, checks=record["checks"], certificate=certificate_of(record["certificate"]))
        for layer in found.layers:
            for name, array in found.dataset(layer).data_vars.items():
                key, numbers, is_gradient = f"{layer}/{name}", array.values, str(name).endswith("_grad")
                if self.sums_samples and is_gradient:
                    values.sums[key] = numbers.astype(np.float64) * (size if of_mean else 1)
                elif not self.sums_samples:
                    if is_gradient and of_mean:
                        numbers = numbers * numbers.dtype.type(size / rows.total)
                    values.kept[key] = np.take(numbers, range(rows.count), axis=array.dims.index(SAMPLE))
        if found.loss is not None:
            values.value = np.asarray(found.loss * size / rows.count if of_mean else found.loss)
        values.weight = float(rows.count)
        return values


def lazy_datasets(
    adapter: Adapter, model: Any, chunks: SampleChunks, verb: Verb, title: str, *, sums: bool, with_loss: bool
) -> tuple[Any, dict[str, xr.Dataset], ChunkGraph]:
    """Return the result of stand-in data, lazy datasets by layer, and the graph of tasks.

    Raise UnsupportedError if the loss of all samples does not follow from that of each chunk.
    """
    template = template_of(partial(verb, model), chunks)
    combine = _combination(adapter, model, chunks) if with_loss else None
    padding: Padding | None = "repeated"
    if with_loss:
        padding = "weightless" if adapter.ignores_weight_zero(model, chunks.template()) else None
    graph = ChunkGraph(model, chunks, DatasetWork(verb, combine, sums, padding), title)
    scale = 1.0 / chunks.total if combine == "mean" else 1.0
    datasets = {}
    for layer in template.layers:
        dataset = template.dataset(layer)
        found: dict[str, xr.DataArray] = {}
        for name, array in dataset.data_vars.items():
            key = f"{layer}/{name}"
            if sums and key.endswith("_grad"):
                found[str(name)] = graph.total(key, array, partial(finish_sum, scale=scale, samples=1))
            elif sums and "_grad_" in key:
                found[str(name)] = _count(found, str(name), array)
            elif sums:  # the weights themselves
                found[str(name)] = array
            elif not sums:
                found[str(name)] = graph.kept(key, array)
        coords = [coord for coord in dataset.coords.values() if SAMPLE not in coord.dims]
        datasets[layer] = xr.Dataset(found, attrs=dataset.attrs).assign_coords(
            {str(c.name): c.variable for c in coords}
        )
    return template, datasets, graph


def _count(found: Mapping[str, xr.DataArray], name: str, template: xr.DataArray) -> xr.DataArray:
    """Return the lazy number of NaN or infinite values of a gradient, labelled as the template."""
    of, _, kind = name.removesuffix("_count").rpartition("_")
    gradient = found[of]
    test = np.isnan if kind == "nan" else np.isinf
    flags: Any = test(gradient)
    counted: xr.DataArray = flags.sum([str(dim) for dim in gradient.dims if dim not in template.dims])
    counted.attrs = dict(template.attrs)
    return counted


def _combination(adapter: Adapter, model: Any, chunks: SampleChunks) -> str | None:
    if len(chunks.bounds) == 1:
        return None
    how = adapter.combination(model, chunks.template())
    if how is None:
        raise UnsupportedError(
            "The loss of all samples does not follow from that of each chunk.",
            got=f"{len(chunks.bounds)} chunks, and a loss that is no known mean or sum over samples",
            expected="a loss of the framework with reduction mean or sum",
            hint='rl.gradients(..., combine="mean") where it is a mean; or one batch in memory: x.compute()',
        )
    return how


def certificate_of(stored: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a stored certificate, or None if the chunk was not certified."""
    return None if stored is None or stored["state"] == "off" else stored
