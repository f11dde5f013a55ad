"""A question put to a data set, batch after batch; the answer is that of the whole data set as one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ... import data
from ...adapters.protocol import Batch
from ...arguments.data import is_source, refuse_large
from ...errors import UnsupportedError, message
from ...results.certificate import Certificate
from ...results.checks import warn_about
from ...settings import Progress
from ...typing import Array
from ..axes import Axes
from ..certify import wanted
from ..cuts import layouts_of_inputs, layouts_to_cut
from ..names import TensorName, read
from .accumulate import Accumulator, combination
from .certify import certify_answer
from .pull import answer
from .question import Answer, Question, SeveralOutputs
from .reasons.explain import Explanation, explain
from .whole_loss import Layouts, WholeLoss, output_layouts


@dataclass(frozen=True)
class Feed:
    """Where batches come from, and what they have in common."""

    x: Any
    y: Any
    sample_weight: Any
    batch_size: int | None
    axes: Axes
    template: Batch
    with_loss: bool

    def batches(self) -> Iterator[Batch]:
        """The data, batch by batch; what only a loss takes is left out where there is none."""
        start = 0
        bare: dict[str, Any] = {} if self.with_loss else {"loss": None, "class_weight": None}
        for number, piece in enumerate(self._pieces()):
            stop = start + self.axes.samples(replace(self.template, x=piece.x))
            yield replace(
                self.template,
                x=piece.x,
                y=piece.y if self.with_loss else None,
                sample_weight=piece.sample_weight if self.with_loss else None,
                initial_state=data.take(self.template.initial_state, start, stop),
                seed=self._seed(number),
                **bare,
            )
            start = stop

    def _seed(self, number: int) -> int | None:
        """The seed of a batch: in training mode no two batches draw the same."""
        if self.template.seed is not None:
            return self.template.seed + number
        return number if self.template.training and number else None

    def _pieces(self) -> Iterable[data.DataBatch]:
        """Batches, each cut along the axis of samples; a whole batch goes through as it is."""
        axes, whole = self.axes, data.DataBatch(self.x, self.y, self.sample_weight)
        if not is_source(self.x) and not data.is_cut(self.x, self.batch_size):
            refuse_large("The batch", [self.x, self.y], "batch_size=, fewer samples at a time")
        if not axes.adapter.samples_first and not data.is_cut(self.x, self.batch_size):
            if self.template.initial_state is not None:  # one row may serve all samples: how many are they?
                axes.inputs, axes.is_cut = layouts_of_inputs(axes, self.template, self.x), True
            return [whole]
        layouts = None
        if not is_source(self.x):
            layouts = layouts_to_cut(axes, self.template, *whole)
            axes.inputs, axes.is_cut = None if layouts is None else layouts["x"], True
        batches = data.batches(
            self.x,
            self.y,
            sample_weight=self.sample_weight,
            batch_size=self.batch_size,
            as_numpy=axes.adapter.name == "keras",
            layouts=layouts,
        )
        return self._lying_as_the_first(batches)

    def _lying_as_the_first(self, batches: Iterable[data.DataBatch]) -> Iterator[data.DataBatch]:
        """The batches; those of a source are counted as its first one lies."""
        for batch in batches:
            if not self.axes.is_cut:
                self.axes.inputs, self.axes.is_cut = layouts_of_inputs(self.axes, self.template, batch.x), True
            yield batch

    @property
    def count(self) -> int | None:
        """How many batches there are, where that is known."""
        if not self.axes.adapter.samples_first and not self.axes.is_cut:
            return None if data.is_cut(self.x, self.batch_size) else 1  # not known yet how the inputs lie
        inputs = self.axes.inputs
        layouts = None if inputs is None else {"x": inputs, "y": [], "sample_weight": []}
        return data.count_batches(self.x, self.batch_size, layouts)

    def whole(self, batches: list[Batch]) -> tuple[Any, Any]:
        """Targets and weights of all samples, of arrays as they were given."""
        if not is_source(self.x):
            return (self.y, self.sample_weight) if self.with_loss else (None, None)
        if self.axes.inputs is not None and any(layout is not None and layout.sample for layout in self.axes.inputs):
            raise UnsupportedError(
                message(
                    "The loss of this data set needs the targets of all batches, and it is not known how they lie.",
                    got="a source of batches in which samples do not come first",
                    expected='combine="mean" or "sum", or arrays',
                )
            )
        return data.join([batch.y for batch in batches]), data.join([batch.sample_weight for batch in batches])

    @property
    def read_again(self) -> bool:
        """Whether the data can be read from the start a second time."""
        return not hasattr(self.x, "__next__")

    def again(self) -> Iterator[Batch]:
        """The data from the start once more."""
        if not self.read_again:
            raise UnsupportedError(
                message(
                    "The loss of a data set does not follow from the losses of its batches, and a generator can be "
                    "read only once.",
                    expected='combine="mean" or "sum" if it is one of these over samples',
                    hint="arrays, or a data set that can be read twice: this loss needs the outputs of all batches",
                )
            )
        return self.batches()


@dataclass
class Gathered:
    """All batches together, and the explanations found on the first."""

    gradients: dict[TensorName, Array]
    dims: dict[TensorName, tuple[str, ...]]
    value: Array
    explanation: Explanation
    certificate: Certificate = Certificate()  # noqa: RUF009 - it is frozen


def gather(question: Question, feed: Feed, combine: str | None, across: str | None) -> tuple[Question, Gathered]:
    """Answer batch by batch; explain on the first batch what has no gradient there.

    Also returns the question as it had to be put once the outputs of the model were seen.

    Raises
    ------
    UnsupportedError
        If the answers to batches do not make up that of the whole data set.
    """
    stream = feed.batches()
    first, second = next(stream), next(stream, None)
    loss_alone = feed.with_loss and question.function is None
    if second is None:
        total = Accumulator(None, across)
        return _finished(_streamed(question, [first], total, feed), feed, first, total)
    layouts = output_layouts(question, first, second)
    stream = chain([first, second], stream)
    if combine is None and loss_alone:
        return _of_loss(question, stream, feed, across, layouts)
    total = Accumulator(combination(question.target, question.function is not None, combine), across)
    return _finished(_streamed(_counted(question, feed), stream, total, feed), feed, first, total)


def _of_loss(
    question: Question, stream: Iterator[Batch], feed: Feed, across: str | None, layouts: Layouts | None
) -> tuple[Question, Gathered]:
    """The loss of several batches: their mean or sum where it is known to be that, else from the outputs of all."""
    first = next(stream)
    how = question.adapter.combination(question.model, first)
    if how is not None:
        total = Accumulator(how, across)  # type: ignore[arg-type]
        same = _while_combining(question, chain([first], stream), how)
        try:
            return _finished(_streamed(question, same, total, feed), feed, first, total)
        except _AnotherLossError:
            pass
    whole = WholeLoss.of(question, feed.again(), layouts, feed.whole)
    total = Accumulator("sum", across)
    answered, shapes = question, set()
    for batch, put in whole.questions(question, feed.again()):
        shapes.add(_shapes(batch))
        total.even = len(shapes) == 1
        answered, found = _answer(put, batch)
        _certify(answered, batch, found, total)
        total.add(found)
    question = replace(question, known=answered.known)
    return _finished(question, feed, first, total, whole.value)


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


def _counted(question: Question, feed: Feed) -> Question:
    """The same question, with a target that knows which samples a batch holds."""
    total = None if is_source(feed.x) else data.len_of(feed.x, question.axes.inputs)
    return replace(question, target=replace(question.target, total=total, rows=(0, 0)))


def _streamed(question: Question, batches: Iterable[Batch], total: Accumulator, feed: Feed) -> Question:
    """Add up the answers to batches."""
    start = 0
    shapes = set()
    with Progress("gradients", feed.count) as progress:
        for batch in batches:
            stop = start + question.axes.samples(batch)
            shapes.add(_shapes(batch))
            total.even = len(shapes) == 1
            put, found = _answer(replace(question, target=question.target.of_rows(start, stop)), batch)
            question = replace(put, target=question.target)
            _certify(put, batch, found, total)
            found.weight = put.target.picked
            total.add(found)
            start = stop
            progress.advance()
    return question


def _shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """The shapes of the samples of a batch."""
    return tuple(tuple(leaf.shape[1:]) for leaf in data.leaves_of(batch.x) if hasattr(leaf, "shape"))


def _finished(
    question: Question, feed: Feed, first: Batch, total: Accumulator, base: Array | None = None
) -> tuple[Question, Gathered]:
    """``base``: the part of the target that is known apart from the answers to batches."""
    found = total.result()
    value = total.value() if base is None else base + total.value()
    explanation = explain(question, first, found, total.dims, feed.batches if feed.read_again else lambda: ())
    warn_about(total.certificate.checks)
    return question, Gathered(found, total.dims, value, explanation, total.certificate)


def _certify(question: Question, batch: Batch, found: Answer, total: Accumulator) -> None:
    """Hold the answer of the first batch against the plain run of the model."""
    if total.batches == 0 and wanted(question.model, "gradients", batch):
        engine = question.adapter.provenance(question.model).get("engine", question.adapter.name)
        total.certificate = certify_answer(question, batch, found, engine.partition(" ")[0])
    found.swept = {}


def _answer(question: Question, batch: Batch) -> tuple[Question, Answer]:
    """The answer, and the question as it had to be put once the outputs of the model were seen."""
    try:
        return question, answer(question, batch)
    except SeveralOutputs as several:
        known = replace(question.known, outputs=tuple(map(str, range(several.count))))
        question = replace(question, known=known)
        if question.every_output:
            assert question.function is not None
            leaves = tuple(read("output", known))
            question = replace(question, leaves=leaves, function=on_list(question.function))
        return question, answer(question, batch)


def on_list(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one list as a function of its items."""

    def of_list(*tensors: Any) -> Any:
        return function(list(tensors))

    return of_list
