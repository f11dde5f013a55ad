"""A question put to a data set, batch after batch; the answer is that of the whole data set as one batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from ... import data
from ...adapters.protocol import Batch
from ...results.certificate import Certificate
from ...results.checks import warn_about
from ...settings import Progress
from ...typing import Array
from ..batches import Batches
from ..certify import wanted
from ..names import TensorName
from .accumulate import Accumulator, combination
from .certify import certify_answer
from .pull import answer
from .question import Part, Question
from .reasons.explain import Explanation, explain
from .target import Target
from .whole_loss import Layouts, WholeLoss, output_layouts


@dataclass
class Gathered:
    """All batches together, and the explanations found on the first."""

    gradients: dict[TensorName, Array]
    dims: dict[TensorName, tuple[str, ...]]
    value: Array
    explanation: Explanation
    certificate: Certificate


def gather(question: Question, batches: Batches) -> Gathered:
    """Answer batch by batch; explain on the first batch what has no gradient there.

    Raises
    ------
    UnsupportedError
        If the answers to batches do not make up that of the whole data set.
    """
    request, stream = question.request, iter(batches)
    first, second = next(stream), next(stream, None)
    if second is None:
        return _added_up(question, question.target, [first], None, batches)
    layouts = output_layouts(question.axes, first, second)
    stream = chain([first, second], stream)
    if request.combine is None and question.of_loss:
        return _of_loss(question, stream, batches, layouts)
    combine = combination(question.target, question.function is not None, request.combine)
    target = replace(question.target, total=batches.samples, rows=(0, 0))
    return _added_up(question, target, stream, combine, batches)


def _of_loss(question: Question, stream: Iterator[Batch], batches: Batches, layouts: Layouts | None) -> Gathered:
    """The loss of several batches: their mean or sum where it is known to be that, else from the outputs of all."""
    first = next(stream)
    how = question.adapter.combination(question.model, first)
    if how is not None:
        alike = _while_combining(question, chain([first], stream), how)
        try:
            return _added_up(question, question.target, alike, how, batches)
        except _AnotherLossError:
            pass
    loss = WholeLoss.of(question, batches.again(), layouts, batches.targets)
    total = _accumulator(question, "sum")
    for put, part in loss.questions(question, batches.again()):
        _add(put, part, total)
    return _gathered(question, Part(first, question.target), total, batches, loss.value)


class _AnotherLossError(Exception):
    """A batch was met whose loss does not combine with the others as theirs do."""


def _while_combining(question: Question, batches: Iterable[Batch], how: str) -> Iterator[Batch]:
    size = None
    for batch in batches:
        shapes = [tuple(leaf.shape)[1:] for leaf in data.leaves_of(batch.y) if hasattr(leaf, "shape")]
        if size not in (None, shapes) or question.adapter.combination(question.model, batch) != how:
            raise _AnotherLossError
        size = shapes
        yield batch


def _added_up(
    question: Question, target: Target, stream: Iterable[Batch], combine: str | None, batches: Batches
) -> Gathered:
    """The answers to batches, added up; ``combine`` as in :func:`combination`."""
    first, total = None, _accumulator(question, combine)
    with Progress("gradients", batches.count) as progress:
        for part in _parts(question, target, stream):
            first = first or part
            _add(question, part, total)
            progress.advance()
    assert first is not None
    return _gathered(question, first, total, batches)


def _accumulator(question: Question, combine: str | None) -> Accumulator:
    return Accumulator(combine, question.request.measure, question.request.across)  # type: ignore[arg-type]


def _parts(question: Question, target: Target, stream: Iterable[Batch]) -> Iterator[Part]:
    """Every batch with the part of the target that it holds."""
    start = 0
    for batch in stream:
        stop = start + question.axes.samples(batch)
        yield Part(batch, target.of_rows(start, stop))
        start = stop


def _add(question: Question, part: Part, total: Accumulator) -> None:
    """Answer for one batch; the first is held against the plain run of the model."""
    found = answer(question, part)
    if total.batches == 0 and wanted(question.model, "gradients", part.batch):
        total.certificate = certify_answer(question, part, found)
    found.swept = {}
    total.add(found, _shapes(part.batch), part.target.picked)


def _shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """The shapes of the samples of a batch."""
    return tuple(tuple(leaf.shape[1:]) for leaf in data.leaves_of(batch.x) if hasattr(leaf, "shape"))


def _gathered(
    question: Question, first: Part, total: Accumulator, batches: Batches, base: Array | None = None
) -> Gathered:
    """``base``: the part of the target that is known apart from the answers to batches."""
    found = total.result()
    value = total.value() if base is None else base + total.value()
    explanation = explain(question, first, found, total.dims, batches if batches.can_be_read_again else ())
    warn_about(total.certificate.checks)
    return Gathered(found, total.dims, value, explanation, total.certificate)
