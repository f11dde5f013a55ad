"""One model on one set of samples: predictions, exchanged prefixes, exchanged states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import Adapter, Batch, Capture, CaptureRequest, RecurrentCall
from ..adapters.registry import adapter_for
from ..arguments.data import is_source
from ..errors import InputError, ModelError, message
from ..measures.intervention import donors, squared_change
from ..recurrence.cells import KnownCell
from ..recurrence.run import Run
from ..results.schema import plain
from ..typing import Array
from .prediction import Target, read_target

#: Samples whose states are looked at; the median over them is what is reported.
LOOKED_INTO = 32


@dataclass
class Samples:
    """Data of an experiment: leaves with samples first, in NumPy.

    Attributes
    ----------
    sequences
        Which leaves of x have a time axis (their second), and are exchanged together.
    """

    x: Any
    y: Any
    steps: int
    sequences: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of samples."""
        return data.len_of(self.x)

    def with_prefix(self, keep: Array, lender: Array, lengths: Array) -> Any:
        """The data with each sample's steps before its last ``keep`` real ones taken from another sample.

        Samples of unequal length are aligned at their last real step; a shorter lender is read round and round.
        """
        position = np.arange(self.steps)[None, :]
        mine = position >= (lengths - keep)[:, None]
        from_end = lengths[:, None] - position
        borrowed = (lengths[lender][:, None] - from_end) % np.maximum(lengths[lender], 1)[:, None]
        place = -1

        def exchange(leaf: Any) -> Any:
            nonlocal place
            place += 1
            if place not in self.sequences:
                return leaf
            other = np.take_along_axis(leaf[lender], _index(borrowed, leaf.ndim), axis=1)
            return np.where(_index(mine, leaf.ndim), leaf, other)

        return data.map_leaves(exchange, self.x)


def _index(array: Array, ndim: int) -> Array:
    expanded: Array = array[(slice(None), slice(None), *([None] * (ndim - 2)))]
    return expanded


def read_samples(x: Any, y: Any, most: int, steps: int | None = None) -> Samples:
    """At most ``most`` samples of arrays, or of the first batches of a data set.

    Raises
    ------
    InputError
        If no array has a time axis.
    """
    if is_source(x):
        xs, ys, count = [], [], 0
        for batch in data.batches(x, as_numpy=True):
            xs.append(batch.x)
            ys.append(batch.y)
            count += data.len_of(batch.x)
            if count >= most:
                break
        x, y = _joined(xs), (None if ys[0] is None else _joined(ys))
    x = data.map_leaves(lambda leaf: np.asarray(plain(leaf)), x)
    if data.len_of(x) > most:
        chosen = np.sort(np.random.default_rng(0).permutation(data.len_of(x))[:most])
        x = data.map_leaves(lambda leaf: leaf[chosen], x)
        y = None if y is None else data.map_leaves(lambda leaf: np.asarray(plain(leaf))[chosen], y)
    leaves = data.leaves_of(x)
    steps = steps or next((leaf.shape[1] for leaf in leaves if leaf.ndim >= 2), None)
    sequences = tuple(i for i, leaf in enumerate(leaves) if leaf.ndim >= 2 and leaf.shape[1] == steps)
    if steps is None or not sequences or steps < 2:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        raise InputError(
            message("There is no time to look back over.", got=shapes, expected="x of shape (sample, time, ...)")
        )
    return Samples(x, y, steps, sequences)


def _joined(trees: Sequence[Any]) -> Any:
    columns = zip(*(data.leaves_of(tree) for tree in trees), strict=True)
    joined = iter([np.concatenate([np.asarray(plain(leaf)) for leaf in column]) for column in columns])
    return data.map_leaves(lambda _: next(joined), trees[0])


@dataclass
class Experiment:
    """A model, its samples, and the output step that is looked at."""

    model: Any
    samples: Samples
    step: int = -1
    output: int = 0
    task: str | None = None
    loss: Any = None
    seed: int = 0
    adapter: Adapter = field(init=False)

    def __post_init__(self) -> None:
        self.adapter = adapter_for(self.model)

    @cached_property
    def capture(self) -> Capture:
        """States of all recurrent layers, on the first few samples."""
        few = data.map_leaves(lambda leaf: leaf[:LOOKED_INTO], self.samples.x)
        capture = self.adapter.capture(self.model, Batch(few), CaptureRequest(gradients=False, weight_grads=False))
        if not capture.calls:
            raise ModelError(message("Nothing recurrent ran in this forward pass.", hint="rl.layers(model)"))
        return capture

    @cached_property
    def runs(self) -> list[tuple[Any, Run]]:
        """Every captured call and its replay."""
        return [(call, Run.from_call(in_numpy(call))) for call in self.capture.calls]

    @cached_property
    def lengths(self) -> Array:
        """(sample,): real steps of each sample; all of them where nothing is masked, or padding comes first."""
        full = np.full(self.samples.count, self.samples.steps)
        if all(call.mask is None for call in self.capture.calls):
            return full
        request = CaptureRequest(gradients=False, weight_grads=False)
        calls = self.adapter.capture(self.model, Batch(self.samples.x), request).calls
        mask = next((plain(call.mask) for call in calls if call.mask is not None), None)
        if mask is None or mask.shape[1] != self.samples.steps:
            return full
        last = self.samples.steps - mask[:, ::-1].argmax(axis=1)
        return np.where(mask.any(axis=1), last, 1)

    def outputs(self, x: Any, initial_state: Any = None) -> Array:
        """(sample, output) at the step that is looked at, as the model returns it."""
        request = CaptureRequest(inputs=False, gradients=False, weight_grads=False)
        capture = self.adapter.capture(self.model, Batch(x, initial_state=initial_state), request)
        leaves = data.leaves_of(capture.outputs)
        whole = plain(leaves[self.output])
        if whole.ndim == 1:
            whole = whole[:, None]
        at_step = self._at_step(whole) if whole.ndim >= 3 else whole
        return at_step.reshape(len(at_step), -1)

    def _at_step(self, whole: Array) -> Array:
        if self.step != -1:
            return whole[:, self.step]
        if whole.shape[1] != self.samples.steps:
            return whole[:, -1]
        return whole[np.arange(len(whole)), self.lengths[: len(whole)] - 1]

    @cached_property
    def raw(self) -> Array:
        """The model's output on its own samples."""
        return self.outputs(self.samples.x)

    @cached_property
    def target(self) -> Target | None:
        """The target at the step, or None without y."""
        if self.samples.y is None:
            return None
        y = data.leaves_of(self.samples.y)[self.output if len(data.leaves_of(self.samples.y)) > 1 else 0]
        y = np.asarray(plain(y))
        if self.step == -1 and self._is_sequence and y.ndim >= 2 and y.shape[1] == self.samples.steps:
            y, step = y[np.arange(len(y)), self.lengths - 1], None
        else:
            step = self.step if self._is_sequence and y.ndim >= 2 else None
        return read_target(y, self.raw, step, self.task, self.loss)

    @cached_property
    def _is_sequence(self) -> bool:
        return bool(plain(data.leaves_of(self.capture.outputs)[self.output]).ndim >= 3)

    @cached_property
    def prediction(self) -> Array:
        """Prediction f on the model's own samples."""
        return self.raw if self.target is None else self.target.prediction(self.raw)

    @cached_property
    def last(self) -> Array:
        """(sample,): steps up to and including the one whose output is looked at."""
        if self.step == -1:
            return self.lengths
        step = self.step if self.step >= 0 else self.samples.steps + self.step
        return np.minimum(self.lengths, step + 1) if self._is_sequence else self.lengths

    @cached_property
    def reach(self) -> int:
        """Steps that the output can have seen: of the longest sample."""
        return int(self.last.max())

    @cached_property
    def lender(self) -> Array:
        """Who lends a prefix to whom."""
        return donors(self.samples.count, lengths=self.last, seed=self.seed)

    def exchanged(self, keep: int) -> tuple[Array, Array]:
        """Change of the prediction and loss (sample,) where all but the last ``keep`` steps are another sample's."""
        kept = np.full(self.samples.count, keep)
        raw = self.outputs(self.samples.with_prefix(kept, self.lender, self.last))
        if self.target is None:
            return squared_change(self.prediction, raw), np.zeros(len(raw))
        prediction = self.target.prediction(raw)
        return squared_change(self.prediction, prediction), self.target.loss(prediction)


def in_numpy(call: RecurrentCall) -> RecurrentCall:
    """The same call with its arrays, and those of a known cell, in NumPy; a cell that the framework steps stays its."""
    if not isinstance(call.cell, KnownCell):
        return call
    weights: dict[str, Any] = {name: plain(array) for name, array in call.cell.weights().items()}
    changed = {
        f.name: _plain_tree(getattr(call, f.name)) for f in fields(call) if f.name not in ("cell", "weight_grads")
    }
    return replace(call, cell=replace(call.cell, **weights), **changed)


def _plain_tree(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain_tree(part) for part in value)
    return plain(value) if hasattr(value, "shape") else value
