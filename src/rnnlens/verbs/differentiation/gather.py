"""Gradients of a data set, accumulated batch by batch in bounded memory, as if it were one batch; clipping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from ... import data
from ...adapters.protocol import Batch, ModelFacts
from ...arguments import number
from ...errors import InputError, ModelError, UnsupportedError, did_you_mean, short_repr
from ...results.checks import Certificate, warn_of_failed_checks
from ...settings import Progress
from ...typing import Array
from ...vocabulary import DIRECTION, SAMPLE, TIME
from ..axes import refuse_unknown
from ..batches import DataSetBatches
from ..certificates.of_gradients import certificate_of_batch
from ..names import Catalogue, TensorName
from ..weight_layout import WeightSource, sources
from .missing_gradient import Explanation, explain
from .pull import batch_gradients
from .request import BatchGradients, BatchRequest, GradientRequest
from .target import Combine, Target
from .whole_loss import OutputLayouts, WholeLoss, output_layouts

Shapes = tuple[tuple[int, ...], ...]

_NORM_DIMS = (SAMPLE, TIME, DIRECTION)


def combination(target: Target, by_function: bool, requested: Combine | None) -> Combine | None:
    """Return how targets of batches combine to that of the data set, ``"mean"`` or ``"sum"``; None if unknown."""
    if requested is not None:
        return requested
    if target.per_sample:
        return "sum"
    reduction = target.reduce if isinstance(target.reduce, str) else None
    if by_function or callable(target.reduce) or reduction == "norm":
        return None
    return "mean" if reduction == "mean" else "sum"


class Accumulator:
    """Accumulates :class:`BatchGradients`: one running sum per tensor, or all samples if they are kept.

    ``combine``: how targets of batches combine to that of the data set; None for a single batch. ``measure="norm"``
    takes the norm over units or features, or of the whole without a sample axis; ``across`` then reduces that axis.
    """

    def __init__(self, combine: Combine | None, measure: str | None = None, across: str | None = None) -> None:
        self.combine, self.measure, self.across = combine, measure, across
        self.batches, self.samples = 0, 0
        self.certificate = Certificate()
        self.dims: dict[TensorName, tuple[str, ...]] = {}
        self._sample_arrays: dict[TensorName, list[Array]] = {}
        self._value: list[Array] = []
        self._sums: dict[TensorName, Array] = {}
        self._weights: list[int] = []
        #: Shapes of samples. If all batches have one shape, only packed outputs can differ in length.
        self._shapes: set[Shapes] = set()
        #: Number of summed samples by tensor.
        self._summed: dict[TensorName, int] = {}

    def add(self, batch_gradients: BatchGradients, shapes: Shapes = (), count: int | None = None) -> None:
        """Add a batch's gradients to the sums over the batches so far; only the first ``count`` samples if given."""
        self._shapes.add(shapes)
        self.batches += 1
        self.samples += batch_gradients.samples
        if self.batches > 1 and self.combine is None:
            raise UnsupportedError(
                "The target over several batches cannot be computed from the targets of each batch.",
                got="a norm or a callable over more than one batch",
                expected=('combine="sum" or combine="mean", if it is a sum or a mean over samples; or per_sample=True'),
            )
        weight = batch_gradients.samples if count is None else count
        self._weights.append(weight)
        self._value.append(np.asarray(batch_gradients.value))
        for name, grad in batch_gradients.gradients.items():
            if grad is not None:
                self._add_gradient(name, np.asarray(grad), batch_gradients.dims[name], weight)

    def _add_gradient(self, name: TensorName, grad: Array, dims: tuple[str, ...], weight: int) -> None:
        by_sample = SAMPLE in dims
        needs_samples = self.measure is not None or self.across is not None or self.batches > 1
        if name.kind != "weight" and not by_sample and needs_samples:
            refuse_unknown("Putting samples together", name.text, dims)
        if by_sample and self.measure is not None:
            axes, kept_axes = list(range(grad.ndim)), [i for i, dim in enumerate(dims) if dim in _NORM_DIMS]
            grad = np.sqrt(np.einsum(grad, axes, grad.conj(), axes, kept_axes, dtype=_double(grad)).real)
            dims = tuple(dim for dim in dims if dim in _NORM_DIMS)
        if by_sample and self.across is not None:
            sample_axis = dims.index(SAMPLE)
            self._summed[name] = self._summed.get(name, 0) + grad.shape[sample_axis]
            grad, dims = (
                grad.sum(axis=sample_axis, dtype=_double(grad)),
                (*dims[:sample_axis], *dims[sample_axis + 1 :]),
            )
        self.dims[name] = dims
        factor = weight if self.combine == "mean" else 1
        if by_sample and self.across is None:
            self._sample_arrays.setdefault(name, []).append(grad if factor == 1 else grad * grad.dtype.type(factor))
            return
        # Many small terms are added to a large sum, so it is kept in double precision.
        weighted = grad.astype(_double(grad)) * factor
        if name not in self._sums:
            self._sums[name] = weighted
            return
        self._sums[name], weighted = self._pad_to_one_length(name, [self._sums[name], weighted])
        self._sums[name] += weighted

    def parts(self) -> tuple[dict[TensorName, Array], dict[TensorName, Array]]:
        """Return the contribution of one batch: arrays that keep samples, and terms of sums, both before division."""
        return {name: arrays[0] for name, arrays in self._sample_arrays.items()}, dict(self._sums)

    def result(self) -> dict[TensorName, Array]:
        """Return the gradients of the data set by tensor."""
        scale = 1.0 / max(sum(self._weights), 1) if self.combine == "mean" else 1.0
        gradients: dict[TensorName, Array] = {}
        for name, parts in self._sample_arrays.items():
            parts = self._pad_to_one_length(name, parts, joined=self.dims[name].index(SAMPLE))
            joined = np.concatenate(parts, axis=self.dims[name].index(SAMPLE)) if len(parts) > 1 else parts[0]
            gradients[name] = joined if scale == 1.0 else joined * joined.dtype.type(scale)
        for name, total in self._sums.items():
            gradients[name] = total * scale
            if name in self._summed:
                gradients[name] = gradients[name] / self._summed[name] if self.across == "mean" else gradients[name]
            elif self.measure is not None:
                gradients[name], self.dims[name] = np.asarray(np.linalg.norm(gradients[name])), ()
        return gradients

    def _pad_to_one_length(self, name: TensorName, parts: list[Array], joined: int | None = None) -> list[Array]:
        """Pad arrays of packed batches with zero steps to one length, to be added, or joined along ``joined``."""
        shapes = [
            part.shape[:joined] + part.shape[joined + 1 :] if joined is not None else part.shape for part in parts
        ]
        if len(set(shapes)) < 2:
            return parts
        time_axis = self.dims[name].index(TIME) if TIME in self.dims[name] else None
        other_sizes = {
            tuple(size for i, size in enumerate(part.shape) if i not in (time_axis, joined)) for part in parts
        }
        if time_axis is None or len(other_sizes) > 1 or len(self._shapes) > 1:
            first_shape = shapes[0]
            other_shape = next(part.shape for part, shape in zip(parts, shapes, strict=True) if shape != first_shape)
            raise InputError(
                f"Batches differ in shape, so their gradients with respect to {name.text!r} cannot be concatenated.",
                got=f"{parts[0].shape} and {other_shape}",
                hint="pad all batches to one length and mask the padding, or call it batch by batch",
            )
        longest = max(part.shape[time_axis] for part in parts)
        width = [
            [(0, longest - part.shape[time_axis] if i == time_axis else 0) for i in range(part.ndim)] for part in parts
        ]
        return [np.pad(part, pads) for part, pads in zip(parts, width, strict=True)]

    def value(self) -> Array:
        """Return the value of the target over the data set: a number, or one per sample."""
        if self._value[0].ndim:
            return np.concatenate(self._value)
        values = np.asarray(self._value, dtype=np.float64)
        return np.average(values, weights=self._weights) if self.combine == "mean" else values.sum()


def _double(array: Array) -> np.dtype[Any]:
    """Return the dtype of double precision in which an array is summed: complex128 for complex numbers."""
    return np.result_type(array.dtype, np.float64)


@dataclass
class DataSetGradients:
    """Gradients of a data set, the target's value, and explanations of missing gradients."""

    gradients: dict[TensorName, Array]
    dims: dict[TensorName, tuple[str, ...]]
    value: Array
    explanation: Explanation
    certificate: Certificate


def gather(request: GradientRequest, batches: DataSetBatches) -> DataSetGradients:
    """Compute the gradients of all batches; explain missing gradients by experiments on the first batch."""
    arguments, stream = request.arguments, iter(batches)
    first_batch, second_batch = next(stream), next(stream, None)
    if second_batch is None:
        return _accumulate(request, request.target, [first_batch], None, batches)
    layouts = output_layouts(request.axes, first_batch, second_batch)
    stream = chain([first_batch, second_batch], stream)
    if arguments.combine is None and request.of_loss:
        return _loss_gradients(request, stream, batches, layouts)
    combine = combination(request.target, request.function is not None, arguments.combine)
    target = replace(request.target, total=batches.samples, rows=(0, 0))
    return _accumulate(request, target, stream, combine, batches)


def _loss_gradients(
    request: GradientRequest, stream: Iterator[Batch], batches: DataSetBatches, layouts: OutputLayouts | None
) -> DataSetGradients:
    """Compute loss gradients of several batches: combine losses by mean or sum if valid, else use all outputs."""
    first_batch = next(stream)
    combine = request.adapter.facts(request.model, first_batch).combination()
    if combine is not None:
        combining_batches = _combining_batches(request, chain([first_batch], stream), combine)
        try:
            return _accumulate(request, request.target, combining_batches, combine, batches)
        except _AnotherLossError:
            pass
    loss = WholeLoss.of(request, batches.iterate_again(), layouts, batches.targets)
    total = _accumulator(request, "sum")
    for of_batch in loss.requests(request, batches.iterate_again()):
        _add_batch(of_batch, total)
    return _data_set_gradients(request.of_batch(first_batch, request.target), total, batches, loss.value)


class _AnotherLossError(Exception):
    """Error for a batch whose loss does not combine with the others in the same way."""


def _combining_batches(request: GradientRequest, batches: Iterable[Batch], combine: str) -> Iterator[Batch]:
    target_shapes = None
    for batch in batches:
        shapes = [tuple(leaf.shape)[1:] for leaf in data.leaves_of(batch.y) if hasattr(leaf, "shape")]
        if target_shapes not in (None, shapes) or request.adapter.facts(request.model, batch).combination() != combine:
            raise _AnotherLossError
        target_shapes = shapes
        yield batch


def _accumulate(
    request: GradientRequest, target: Target, stream: Iterable[Batch], combine: str | None, batches: DataSetBatches
) -> DataSetGradients:
    """Accumulate the gradients of all batches; ``combine`` as in :func:`combination`."""
    first_request, known_start, total, start = None, None, _accumulator(request, combine), 0
    with Progress("gradients", batches.count) as progress:
        for batch in stream:
            stop = start + request.axes.samples(batch)
            of_batch = request.of_batch(batch, target.of_rows(start, stop))
            if (
                first_request is not None
                and of_batch.samples == first_request.samples
                and _shapes(batch) == _shapes(first_request.batch)
            ):
                of_batch = replace(of_batch, start=known_start)
            gradients = _add_batch(of_batch, total)
            known_start, first_request, start = gradients.start or known_start, first_request or of_batch, stop
            progress.advance()
    assert first_request is not None
    return _data_set_gradients(first_request, total, batches)


def _accumulator(request: GradientRequest, combine: str | None) -> Accumulator:
    return Accumulator(combine, request.arguments.measure, request.arguments.across)  # type: ignore[arg-type]


def _add_batch(request: BatchRequest, total: Accumulator) -> BatchGradients:
    """Compute and accumulate the gradients of one batch; certify the first batch by a reference run."""
    gradients = batch_gradients(request)
    if total.batches == 0:
        total.certificate = certificate_of_batch(request, gradients)
    gradients.swept = {}
    total.add(gradients, _shapes(request.batch), request.target.picked)
    return gradients


def _shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of one sample of each input."""
    return tuple(tuple(leaf.shape[1:]) for leaf in data.leaves_of(batch.x) if hasattr(leaf, "shape"))


def _data_set_gradients(
    first_request: BatchRequest, total: Accumulator, batches: DataSetBatches, base_value: Array | None = None
) -> DataSetGradients:
    """Return accumulated gradients with explanations; ``base_value`` is the part of the value known without batches."""
    gradients = total.result()
    value = total.value() if base_value is None else base_value + total.value()
    explanation = explain(first_request, gradients, total.dims, batches if batches.can_be_read_again else ())
    warn_of_failed_checks(total.certificate.checks)
    return DataSetGradients(gradients, total.dims, value, explanation, total.certificate)


#: Keras' names for clipping every entry, the norm of every variable, and the norm of all variables together.
KINDS = ("clipvalue", "clipnorm", "global_clipnorm")

Gradients = Mapping[TensorName, Array]


def a_clipping(name: str, value: Any) -> str | dict[str, float]:
    """Check ``clip=``: ``"optimizer"``, or a dict of one kind of clipping and its threshold."""
    if isinstance(value, Mapping):
        unknown = [kind for kind in value if kind not in KINDS]
        if unknown or len(value) != 1:
            hint = did_you_mean(unknown[0] if unknown else "", KINDS)
            raise InputError(f"{name}= takes exactly one way to clip.", got=short_repr(value), hint=hint)
        return {kind: number(above=0)(f"{name}[{kind!r}]", threshold) for kind, threshold in value.items()}
    if not isinstance(value, str) or value != "optimizer":
        expected, hint = '"optimizer" or a dict', '{"global_clipnorm": 1.0}'
        raise InputError(
            f"{name}= is not a way to clip gradients.", got=short_repr(value), expected=expected, hint=hint
        )
    return value


def rule_of_clipping(clip: str | Mapping[str, float], facts: ModelFacts) -> tuple[str, float]:
    """Return kind and threshold of the clipping: the optimizer's, or the user's as ``{"global_clipnorm": 1.0}``."""
    if isinstance(clip, Mapping):
        ((kind, threshold),) = clip.items()
        return kind, threshold
    if facts.clipping is not None:
        return facts.clipping
    raise ModelError(
        "The optimizer of this model does not clip gradients.",
        got=facts.optimizer or "no optimizer",
        expected="a compiled Keras model whose optimizer has clipvalue, clipnorm or global_clipnorm",
        hint=(
            'state the clipping: clip={"global_clipnorm": 1.0}; torch clips in the training loop, not in its optimizers'
        ),
    )


def clip_gradients(
    gradients: Gradients, catalogue: Catalogue, kind: str, threshold: float
) -> tuple[dict[TensorName, Array], float]:
    """Clip the gradients of all trainable weights; also return the compared norm (the largest one per variable)."""
    if kind == "clipvalue":
        largest = max((float(np.abs(g).max()) for g in gradients.values() if g.size), default=0.0)
        return {name: np.clip(g, -threshold, threshold) for name, g in gradients.items()}, largest
    norms = {variable: np.sqrt(total) for variable, total in _squares(gradients, catalogue).items()}
    if kind == "global_clipnorm":
        counted_norms = [n for (layer, key), n in norms.items() if key not in catalogue.weights[layer].uncounted]
        norm = float(np.sqrt(sum(n**2 for n in counted_norms)))
        factor = threshold / max(norm, threshold)
        return {name: g * g.dtype.type(factor) for name, g in gradients.items()}, norm
    factors = {variable: threshold / max(norm, threshold) for variable, norm in norms.items()}
    result = {name: np.array(g) for name, g in gradients.items()}
    for name, index, variable in _pieces(result, catalogue):
        result[name][index] *= result[name].dtype.type(factors[variable])
    return result, float(max(norms.values(), default=0.0))


def _squares(gradients: Gradients, catalogue: Catalogue) -> dict[tuple[str, str], float]:
    """Return the sum of squares of the gradient by framework variable."""
    totals: dict[tuple[str, str], float] = {}
    for name, index, variable in _pieces(gradients, catalogue):
        piece = np.abs(gradients[name][index]).astype(np.float64)
        totals[variable] = totals.get(variable, 0.0) + float(np.sum(piece**2))
    return totals


def _pieces(gradients: Gradients, catalogue: Catalogue) -> Iterator[tuple[TensorName, Any, tuple[str, str]]]:
    """Yield each weight gradient in the parts in which the framework stores the weight.

    A part is one direction of a bidirectional layer, or one of torch's two biases: (name of the gradient, index of the
    part on its first axis or ``...``, (layer, key of the framework's variable)).
    """
    for name in gradients:
        weight_sources: list[WeightSource] = sources(catalogue.weights[str(name.layer)])[name.key]
        for position, source in enumerate(weight_sources):
            yield name, position if len(weight_sources) > 1 else ..., (str(name.layer), source.key)
