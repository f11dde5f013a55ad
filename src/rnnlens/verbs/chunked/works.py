"""Work of one chunk for each verb, and its lazy results, which are added up or keep their samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from ... import data
from ...adapters.protocol import Adapter, Batch
from ...adapters.registry import adapter_for
from ...cluster import cached_result
from ...errors import UnsupportedError
from ...results.array import RECORD, LazyArray
from ...results.checks import Certificate
from ...settings import options
from ...vocabulary import PROBE, SAMPLE
from ..axes import refuse_unknown
from ..certificates.of_gradients import certificate_of_batch
from ..differentiation.gather import Accumulator, DataSetGradients, combination
from ..differentiation.missing_gradient import Explanation, explain
from ..differentiation.pull import batch_gradients
from ..differentiation.request import GradientArguments, GradientRequest, read_request
from .graph import ChunkGraph, ChunkValues, ChunkWork, Padding
from .samples import ChunkRows, SampleChunks


@dataclass(frozen=True)
class GradientWork(ChunkWork):
    """Gradients of one chunk, and how they combine to those of all ``total`` samples."""

    arguments: GradientArguments
    total: int
    layouts: data.DataLayouts | None
    of_loss: bool

    def __call__(self, model: Any, batch: Batch, rows: ChunkRows, size: int) -> ChunkValues:
        """Compute the gradients of the target on the batch of one chunk."""
        request = cached_result(
            model, repr(self.arguments), partial(_request, model, batch, self.arguments, self.layouts)
        )
        if self.of_loss and self.arguments.combine is None and self.combine is not None:
            refuse_other_loss(request.adapter, model, batch, self.combine)
        target = request.target
        if not self.of_loss:
            target = replace(target, total=rows.total, rows=(0, 0)).of_rows(rows.start, rows.stop)
            if size > rows.count:
                target = replace(target, at={**target.at, SAMPLE: slice(0, rows.count)})
        batch = batch if request.with_loss else batch.without_loss()
        batch_request = replace(request.of_batch(batch, target), partial=rows.count < rows.total)
        gradients = batch_gradients(batch_request)
        certificate = certificate_of_batch(batch_request, gradients)
        gradients.swept = {}
        total = Accumulator(self.combine, self.arguments.measure, self.arguments.across)  # type: ignore[arg-type]
        total.add(gradients, count=size if self.of_loss else rows.count)
        return self._values(total, certificate, rows, size)

    def _values(self, total: Accumulator, certificate: Certificate, rows: ChunkRows, size: int) -> ChunkValues:
        arrays, sums = total.parts()
        scale = _scale(self.combine, self.total)
        kept_arrays = {}
        for name, array in arrays.items():
            sample_axis = total.dims[name].index(SAMPLE)
            scaled = array if scale == 1.0 else array * array.dtype.type(scale)
            kept_arrays[name.text] = np.take(scaled, range(rows.count), sample_axis) if size > rows.count else scaled
        value = np.asarray(total.value())
        return ChunkValues(
            kept_arrays,
            {name.text: array for name, array in sums.items()},
            certificate=certificate_of(certificate.to_dict()),
            value=value * size / rows.count if self.of_loss and self.combine == "mean" else value,
            weight=float(rows.count),
        )


def _request(
    model: Any, batch: Batch, arguments: GradientArguments, layouts: data.DataLayouts | None
) -> GradientRequest:
    """Resolve the arguments on a batch that was cut along known axes."""
    request = read_request(model, batch, arguments)
    request.axes.inputs, request.axes.is_cut = (None if layouts is None else layouts["x"]), True
    return request


def gradients_of_chunks(
    model: Any,
    chunks: SampleChunks,
    arguments: GradientArguments,
    label: Callable[[GradientRequest, Any, DataSetGradients, Mapping[str, str]], xr.DataArray],
    provenance: Mapping[str, str],
) -> tuple[GradientRequest, dict[str, xr.DataArray], Explanation, ChunkGraph]:
    """Return lazy gradients by name, reasons for those that do not exist, and the graph of tasks."""
    if arguments.clip is not None:
        hint = "compute the gradients of all weights, then clip; or x.compute()"
        raise UnsupportedError("clip= needs the norm over all samples.", got="clip= and lazy data", hint=hint)
    if SAMPLE in arguments.at:
        hint = "select the samples of x and y before: x.isel(sample=...), or x[...] of a dask array"
        raise UnsupportedError("at= selects no samples of lazy data.", got=f"at={dict(arguments.at)!r}", hint=hint)
    request, template = template_of(lambda batch: _gradients_of_template(model, chunks, arguments, batch), chunks)
    combine = _combination(request, chunks)
    work = GradientWork(_padding(request), combine, arguments, chunks.total, chunks.layouts, request.of_loss)
    layers = dict.fromkeys(str(name.layer or name.kind) for name in request.requested)
    graph = ChunkGraph(model, chunks, work, f"gradients-{next(iter(layers)) if len(layers) == 1 else ''}")
    lazy = {}
    for name in request.requested:
        if name in template.gradients:
            array = label(request, name, template, provenance)
            if SAMPLE in array.dims:
                lazy[name.text] = graph.kept(name.text, array)
            else:
                reduction = arguments.across if name.kind != "weight" or arguments.per_sample else None
                scale, samples = _scale(combine, chunks.total), chunks.total if reduction == "mean" else 1
                lazy[name.text] = graph.total(name.text, array, scale, samples)
    return request, lazy, template.explanation, graph


def template_of(make: Callable[[Batch], Any], chunks: SampleChunks) -> Any:
    """Call ``make`` on random substitute data of the same shapes: of few samples, or as many as a whole chunk."""
    with options(certify="never", progress=False):
        try:
            return make(chunks.template())
        except Exception:  # a model built for one batch size
            return make(chunks.template(few=False))


def _gradients_of_template(
    model: Any, chunks: SampleChunks, arguments: GradientArguments, batch: Batch
) -> tuple[GradientRequest, DataSetGradients]:
    request = _request(model, batch, arguments, chunks.layouts)
    target = request.target
    if not request.of_loss:
        count = data.sample_count(batch.x, request.axes.inputs)
        target = replace(target, total=chunks.total, rows=(0, 0)).of_rows(0, count)
    few_request = request.of_batch(batch if request.with_loss else batch.without_loss(), target)
    gradients = batch_gradients(few_request)
    total = Accumulator(None, arguments.measure, arguments.across)
    total.add(gradients)
    missing = tuple(name for name in request.wrt if gradients.gradients.get(name) is None)
    explanation = explain(replace(few_request, wrt=missing), {}, {}, ()) if missing else Explanation()
    for name, dims in total.dims.items():
        if arguments.measure is not None and SAMPLE not in gradients.dims[name]:
            raise UnsupportedError(
                f"The norm of the gradient with respect to {name.text!r} is that of the sum over all samples.",
                got="measure= and lazy data",
                hint="leave measure= out, compute, and take the norm: numpy.linalg.norm(g)",
            )
        if name.kind != "weight" and SAMPLE not in gradients.dims[name]:
            refuse_unknown("Putting chunks together", name.text, dims)
    return request, DataSetGradients(total.result(), total.dims, gradients.value, explanation, Certificate())


def _combination(request: GradientRequest, chunks: SampleChunks) -> str | None:
    """Return how the targets of chunks combine, ``"mean"`` or ``"sum"``; None for a single chunk."""
    if len(chunks.bounds) == 1:
        return None
    arguments = request.arguments
    if request.of_loss and arguments.combine is None:
        combine = request.facts.combination()
    else:
        combine = combination(request.target, request.function is not None, arguments.combine)
    if combine is None:
        raise UnsupportedError(
            f"{request.target.text} of all samples does not follow from that of each chunk.",
            got=f"{len(chunks.bounds)} chunks, and a loss or reduction that is no known mean or sum over samples",
            expected='combine="mean" or combine="sum" if it is one of these over samples; or per_sample=True',
            hint="x.compute() and batch_size=, which evaluates any loss on the outputs of all samples",
        )
    return combine


def _padding(request: GradientRequest) -> Padding | None:
    """Return how chunks can be padded; None for a function of the user, which may depend on the padding."""
    if request.function is not None:
        return None
    if not request.with_loss:
        return "repeated"
    has_own_combine = request.arguments.combine is not None
    return None if has_own_combine or not request.facts.ignores_weight_zero() else "weightless"


def refuse_other_loss(adapter: Adapter, model: Any, batch: Batch, combine: str) -> None:
    """Raise if the losses of chunks do not combine as on the substitute data, because of ignored labels for example."""
    chunk_combine = adapter.facts(model, batch).combination()
    if chunk_combine != combine:
        raise UnsupportedError(
            "The loss of this chunk does not combine with the others: it is no plain mean or sum over its samples.",
            got="targets that the loss ignores or weights" if chunk_combine is None else f"a {chunk_combine}",
            expected=f"a {combine} over samples",
            hint="x.compute() and batch_size=, which evaluates any loss on the outputs of all samples",
        )


def _scale(combine: str | None, total: int) -> float:
    """Return the factor by which a chunk's gradient enters the gradient of the target over all samples."""
    return 1.0 / total if combine == "mean" else 1.0


#: Verb of one batch: model and batch to its result.
Verb = Callable[[Any, Batch], Any]


@dataclass(frozen=True)
class JacobianWork(ChunkWork):
    """Time Jacobian of one chunk, or its part of the mean over samples; ``by_sample`` is the verb without that mean."""

    verb: Verb
    by_sample: Verb
    mean: bool

    def __call__(self, model: Any, batch: Batch, rows: ChunkRows, size: int) -> ChunkValues:
        """Compute the time Jacobian of the batch of one chunk, or its part of the mean over all samples."""
        is_padded = size > rows.count
        jacobian = (self.by_sample if is_padded else self.verb)(model, batch)
        record = json.loads(jacobian.attrs[RECORD])
        values = ChunkValues({}, checks=record["checks"], certificate=certificate_of(record.get("certificate")))
        if not self.mean:
            values.kept["jacobian"] = jacobian.values[: rows.count]
        elif is_padded:
            values.sums["jacobian"] = jacobian.values[: rows.count].sum(axis=0, dtype=np.float64)
        else:
            values.sums["jacobian"] = jacobian.values.astype(np.float64) * rows.count
        return values


def lazy_jacobian(model: Any, chunks: SampleChunks, work: JacobianWork, ends: str) -> LazyArray:
    """Return a lazy time Jacobian of each sample, or its lazy mean over samples."""
    template = template_of(partial(work.verb, model), chunks)
    graph = ChunkGraph(model, chunks, work, f"jacobian-{ends}")
    if not work.mean:
        return LazyArray.of(graph.kept("jacobian", template), graph)
    template.attrs["samples"] = chunks.total
    return LazyArray.of(graph.total("jacobian", template, samples=chunks.total), graph)


@dataclass(frozen=True)
class DatasetWork(ChunkWork):
    """Datasets of one chunk by layer: gradients scaled to the loss of all samples."""

    #: Computes weights, whose gradients are summed over chunks, or a trace, which keeps the samples.
    verb: Verb
    sums_samples: bool

    def __call__(self, model: Any, batch: Batch, rows: ChunkRows, size: int) -> ChunkValues:
        """Compute the trace or the weight gradients of the batch of one chunk, scaled to the loss of all samples."""
        if self.combine is not None:
            refuse_other_loss(adapter_for(model), model, batch, self.combine)
        result = self.verb(model, batch)
        record, is_mean = result._meta(), self.combine == "mean"
        values = ChunkValues({}, checks=record["checks"], certificate=certificate_of(record["certificate"]))
        for layer in result.layers:
            for name, array in result.dataset(layer).data_vars.items():
                key, numbers, is_gradient = f"{layer}/{name}", array.values, str(name).endswith("_grad")
                if self.sums_samples and is_gradient:
                    values.sums[key] = numbers.astype(np.result_type(numbers, np.float64)) * (size if is_mean else 1)
                elif not self.sums_samples:
                    if is_gradient and is_mean:
                        numbers = numbers * numbers.dtype.type(size / rows.total)
                    values.kept[key] = np.take(numbers, range(rows.count), axis=array.dims.index(SAMPLE))
        if result.loss is not None:
            values.value = np.asarray(result.loss * size / rows.count if is_mean else result.loss)
        values.weight = float(rows.count)
        return values


def lazy_datasets(
    adapter: Adapter, model: Any, chunks: SampleChunks, verb: Verb, title: str, *, sums: bool, with_loss: bool
) -> tuple[Any, dict[str, xr.Dataset], ChunkGraph]:
    """Return the result on substitute data, lazy datasets by layer, and the graph of tasks."""
    template = template_of(partial(verb, model), chunks)
    combine = _combination_of_loss(adapter, model, chunks) if with_loss else None
    padding: Padding | None = "repeated"
    if with_loss:
        padding = "weightless" if adapter.facts(model, chunks.template()).ignores_weight_zero() else None
    graph = ChunkGraph(model, chunks, DatasetWork(padding, combine, verb, sums), title)
    datasets = {}
    for layer in template.layers:
        dataset = template.dataset(layer)
        lazy_arrays: dict[str, xr.DataArray] = {}
        for name, array in dataset.data_vars.items():
            key = f"{layer}/{name}"
            if not sums:
                lazy_arrays[str(name)] = graph.kept(key, array)
            elif key.endswith("_grad"):
                lazy_arrays[str(name)] = graph.total(key, array, _scale(combine, chunks.total))
            elif "_grad_" in key:
                lazy_arrays[str(name)] = _nonfinite_count(lazy_arrays, str(name), array)
            else:  # the weights themselves
                lazy_arrays[str(name)] = array
        # Pairs of a sample and a step are those of the first run, which has other samples.
        coords = [coord for coord in dataset.coords.values() if not {SAMPLE, PROBE} & set(coord.dims)]
        datasets[layer] = xr.Dataset(lazy_arrays, attrs=dataset.attrs).assign_coords(
            {str(c.name): c.variable for c in coords}
        )
    return template, datasets, graph


def _nonfinite_count(lazy_arrays: Mapping[str, xr.DataArray], name: str, template: xr.DataArray) -> xr.DataArray:
    """Return the lazy number of NaN or infinite values of a gradient, labelled as the template."""
    gradient_name, _, kind = name.removesuffix("_count").rpartition("_")
    gradient = lazy_arrays[gradient_name]
    test = np.isnan if kind == "nan" else np.isinf
    flags: Any = test(gradient)
    count: xr.DataArray = flags.sum([str(dim) for dim in gradient.dims if dim not in template.dims])
    count.attrs = dict(template.attrs)
    return count


def _combination_of_loss(adapter: Adapter, model: Any, chunks: SampleChunks) -> str | None:
    if len(chunks.bounds) == 1:
        return None
    combine = adapter.facts(model, chunks.template()).combination()
    if combine is None:
        raise UnsupportedError(
            "The loss of all samples does not follow from that of each chunk.",
            got=f"{len(chunks.bounds)} chunks, and a loss that is no known mean or sum over samples",
            expected="a loss of the framework with reduction mean or sum",
            hint='rl.gradients(..., combine="mean") where it is a mean; or one batch in memory: x.compute()',
        )
    return combine


def certificate_of(stored: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a stored certificate, or None if the chunk was not certified."""
    return None if stored is None or stored["state"] == "off" else stored
