"""The data of an experiment: a few samples as arrays, samples first, and prefixes exchanged between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import data
from ..arguments.data import is_source
from ..errors import InputError, UnsupportedError, message, shown
from ..results.schema import to_host
from ..typing import Array
from .orientation import Orientation

#: Finds out how a batch of data lies.
Orient = Callable[[Any], Orientation]


@dataclass
class Samples:
    """Data of an experiment: leaves with samples first, in NumPy.

    Attributes
    ----------
    sequences
        Which leaves of x have a time axis (their second), and are exchanged together.
    lie
        How the model wants them; with samples first where None.
    """

    x: Any
    y: Any
    steps: int
    sequences: tuple[int, ...]
    lie: Orientation | None = None

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


def read_samples(x: Any, y: Any, most: int, orient: Orient | None = None) -> Samples:
    """At most ``most`` samples of arrays, or of the first batches of a data set.

    Parameters
    ----------
    orient
        Finds out how a batch of the model's data lies; samples come first without it.

    Raises
    ------
    InputError
        If no array has a time axis.
    """
    pairs = _batches(x, most) if is_source(x) else [(x, y)]
    refuse_without_time(pairs[0][0])
    lie = None if orient is None else orient(pairs[0][0])
    turned = [(_numpy(x), _numpy(y)) if lie is None else lie.turned(x, y) for x, y in pairs]
    x, y = turned[0] if len(turned) == 1 else (_joined([x for x, _ in turned]), _joined([y for _, y in turned]))
    count = data.len_of(x)
    if y is not None and any(leaf.shape[:1] != (count,) for leaf in data.leaves_of(y)):
        got = f"y of shape {', '.join(str(leaf.shape) for leaf in data.leaves_of(y))} for {count} samples"
        raise InputError(message("The target does not fit.", got=got, expected="one row for each sample"))
    if count > most:
        chosen = np.sort(np.random.default_rng(0).permutation(count)[:most])
        x = data.map_leaves(lambda leaf: leaf[chosen], x)
        y = None if y is None else data.map_leaves(lambda leaf: leaf[chosen], y)
    leaves = data.leaves_of(x)
    steps = next(leaf.shape[1] for leaf in leaves if leaf.ndim >= 2)
    sequences = tuple(i for i, leaf in enumerate(leaves) if leaf.ndim >= 2 and leaf.shape[1] == steps)
    return Samples(x, y, steps, sequences, lie)


def refuse_without_time(x: Any, *, least: int = 2) -> None:
    """Raise where no array has ``least`` samples of ``least`` steps, or they cannot be told apart."""
    leaves = data.leaves_of(x)
    if any(data.is_packed(leaf) for leaf in leaves):
        raise UnsupportedError(
            message(
                "Prefixes are exchanged between samples, and a packed sequence does not say which is whose.",
                got="PackedSequence",
                hint="pass padded arrays, and pack within the model",
            )
        )
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    if not all(shapes):
        raise InputError(message("x holds what has no axes.", got=shown(x), expected="arrays with samples first"))
    if not any(len(shape) >= 2 and min(shape[:2]) >= least for shape in shapes):
        got = ", ".join(map(str, shapes))
        what = "There is no time to look back over" + (", or no other sample to compare with." if least > 1 else ".")
        expected = f"x of shape (sample, time, ...), at least {least} of each"
        raise InputError(message(what, got=got, expected=expected))


def _batches(source: Any, most: int) -> list[tuple[Any, Any]]:
    """(x, y) of as many batches as hold so many samples, if their first axis counts those."""
    found, count = [], 0
    for batch in data.batches(source, as_numpy=True):
        found.append((batch.x, batch.y))
        count += data.len_of(batch.x)
        if count >= most:
            break
    return found


def _numpy(tree: Any) -> Any:
    return None if tree is None else data.map_leaves(lambda leaf: np.asarray(to_host(leaf)), tree)


def _joined(trees: Sequence[Any]) -> Any:
    if trees[0] is None:
        return None
    columns = zip(*(data.leaves_of(tree) for tree in trees), strict=True)
    joined = iter([np.concatenate([np.asarray(to_host(leaf)) for leaf in column]) for column in columns])
    return data.map_leaves(lambda _: next(joined), trees[0])
