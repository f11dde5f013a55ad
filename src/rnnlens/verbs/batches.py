"""A data set batch by batch, as a model is fed: each cut along the axis of samples, with its own random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .. import data
from ..adapters.protocol import Batch
from ..arguments.data import is_source, refuse_large
from ..errors import UnsupportedError, message
from .axes import Axes
from .cuts import layouts_of_inputs, layouts_to_cut


@dataclass(frozen=True)
class Batches:
    """Where batches come from; iterated over from the start each time.

    Attributes
    ----------
    whole
        The data as a caller has them, and how to run the model on them.
    with_loss
        Whether a loss is needed: what only a loss takes is left out otherwise.
    """

    whole: Batch
    batch_size: int | None
    axes: Axes
    with_loss: bool

    def __iter__(self) -> Iterator[Batch]:
        start = 0
        bare: dict[str, Any] = {} if self.with_loss else {"loss": None, "class_weight": None}
        for number, cut in enumerate(self._cut()):
            stop = start + self.axes.samples(replace(self.whole, x=cut.x))
            yield replace(
                self.whole,
                x=cut.x,
                y=cut.y if self.with_loss else None,
                sample_weight=cut.sample_weight if self.with_loss else None,
                initial_state=data.take(self.whole.initial_state, start, stop),
                seed=self._seed(number),
                **bare,
            )
            start = stop

    @property
    def samples(self) -> int | None:
        """How many samples there are, where that can be told without reading."""
        return None if is_source(self.whole.x) else data.len_of(self.whole.x, self.axes.inputs)

    @property
    def count(self) -> int | None:
        """How many batches there are, where that is known."""
        x = self.whole.x
        if not self.axes.samples_first and not self.axes.is_cut:
            return None if data.is_cut(x, self.batch_size) else 1  # not known yet how the inputs lie
        inputs = self.axes.inputs
        layouts = None if inputs is None else {"x": inputs, "y": [], "sample_weight": []}
        return data.count_batches(x, self.batch_size, layouts)

    @property
    def can_be_read_again(self) -> bool:
        """Whether the data can be read from the start a second time."""
        return not hasattr(self.whole.x, "__next__")

    def again(self) -> Iterator[Batch]:
        """The data from the start once more."""
        if not self.can_be_read_again:
            raise UnsupportedError(
                message(
                    "The loss of a data set does not follow from the losses of its batches, and a generator can be "
                    "read only once.",
                    expected='combine="mean" or "sum" if it is one of these over samples',
                    hint="arrays, or a data set that can be read twice: this loss needs the outputs of all batches",
                )
            )
        return iter(self)

    def targets(self, batches: list[Batch]) -> tuple[Any, Any]:
        """Targets and weights of all samples, of arrays as they were given."""
        if not is_source(self.whole.x):
            return (self.whole.y, self.whole.sample_weight) if self.with_loss else (None, None)
        if self.axes.inputs is not None and any(layout is not None and layout.sample for layout in self.axes.inputs):
            raise UnsupportedError(
                message(
                    "The loss of this data set needs the targets of all batches, and it is not known how they lie.",
                    got="a source of batches in which samples do not come first",
                    expected='combine="mean" or "sum", or arrays',
                )
            )
        return data.join([batch.y for batch in batches]), data.join([batch.sample_weight for batch in batches])

    def _seed(self, number: int) -> int | None:
        """The seed of a batch: in training mode no two batches draw the same."""
        return self.whole.seed if self.whole.seed is None or not self.whole.training else self.whole.seed + number

    def _cut(self) -> Iterable[data.DataBatch]:
        """Batches, each cut along the axis of samples; a whole batch goes through as it is."""
        axes, whole = self.axes, data.DataBatch(self.whole.x, self.whole.y, self.whole.sample_weight)
        template = replace(self.whole, x=None, y=None, sample_weight=None)
        one = not data.is_cut(whole.x, self.batch_size)
        if one and not is_source(whole.x):
            refuse_large("The batch", [whole.x, whole.y], "batch_size=, fewer samples at a time")
        if one and not axes.samples_first:
            if template.initial_state is not None:  # one row may serve all samples: how many are they?
                axes.inputs, axes.is_cut = layouts_of_inputs(axes, template, whole.x), True
            return [whole]
        layouts = None
        if not is_source(whole.x):
            layouts = layouts_to_cut(axes, template, *whole)
            axes.inputs, axes.is_cut = None if layouts is None else layouts["x"], True
        batches = data.batches(
            whole.x,
            whole.y,
            sample_weight=whole.sample_weight,
            batch_size=self.batch_size,
            layouts=layouts,
        )
        return self._lying_as_the_first(batches, template)

    def _lying_as_the_first(self, batches: Iterable[data.DataBatch], template: Batch) -> Iterator[data.DataBatch]:
        """The batches; those of a source are counted as its first one lies."""
        for batch in batches:
            if not self.axes.is_cut:
                self.axes.inputs, self.axes.is_cut = layouts_of_inputs(self.axes, template, batch.x), True
            yield batch
