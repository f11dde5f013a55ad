"""Data of an experiment: samples in one order of axes, exchanged prefixes, and conversion to the model's own order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import Adapter, Batch, CaptureRequest, Port
from ..arguments.data import is_source
from ..errors import InputError, RnnlensError, UnsupportedError, shape_of, shown
from ..layout import Layout, canonical_order
from ..results.schema import to_host
from ..typing import Array
from ..verbs.axes import DATA, InputCoordinates, ModelAxes
from ..verbs.batches import layouts_of_inputs
from ..verbs.names import Catalogue
from ..vocabulary import SAMPLE, TIME


class Orientation:
    """Order of axes of the data and outputs of one model, as the user declared it or as found by short runs.

    Parameters
    ----------
    given
        Layouts declared by the user, by the name of a tensor or ``"y"``.
    """

    def __init__(self, adapter: Adapter, model: Any, x: Any, given: Mapping[str, Layout] | None) -> None:
        self.declared = {name: layout for name, layout in (given or {}).items() if name not in DATA}
        self.axes = ModelAxes(adapter, model, given, Catalogue(adapter, model, x))
        self.inputs = self._of_inputs(x)
        self.targets: list[Layout] = []

    def _of_inputs(self, x: Any) -> list[Layout] | None:
        """Return the layout of each leaf of x; None if samples come first in all of them."""
        if self.axes.adapter.samples_first:
            return None
        failure: Exception | None = None
        if not any(name.startswith("input") for name in self.declared):
            try:
                if self._samples_lead(x):
                    return None
            except RnnlensError as error:
                failure = error
        try:
            found = layouts_of_inputs(self.axes, Batch(x), x)
        except InputError as error:
            raise failure or error from error
        if found is None or all(layout is None or layout.sample == 0 for layout in found):
            return None
        leaves = data.leaves_of(x)
        self.axes.learn(Batch(x), [Port("input", index=i) for i in range(len(leaves))])
        return [self._complete(i, leaf, layout) for i, (leaf, layout) in enumerate(zip(leaves, found, strict=True))]

    def _samples_lead(self, x: Any) -> bool:
        """Return whether the recurrent layers get one sample for each entry of the first axis of x.

        The model runs once, on a number of entries that no other axis of x has.
        """
        shapes = [shape_of(leaf) or (3,) for leaf in data.leaves_of(x)]
        others = {size for shape in shapes for size in shape[1:]}
        most = min(shape[0] for shape in shapes)
        count = next((count for count in (3, 2, *range(4, most + 1)) if count <= most and count not in others), None)
        if count is None:
            return False
        few = data.map_leaves(lambda leaf: leaf[:count], x)
        request = CaptureRequest(gradients=False, weight_grads=False, scans=False)
        capture = self.axes.adapter.capture(self.axes.model, Batch(few), request)
        return {*(int(call.input.shape[0]) for call in capture.calls), *capture.scanned.values()} <= {count}

    def _complete(self, index: int, leaf: Any, layout: Layout | None) -> Layout:
        """Return the layout of an input leaf, with a time axis.

        If the time axis is unknown, it is the first axis that does not count samples.
        """
        known = self.axes.layout(Port("input", index=index), np.shape(leaf))
        names = list(known.names if layout is None or SAMPLE in known.names else layout.names)
        free = [i for i, name in enumerate(names) if name != SAMPLE]
        if TIME not in names and free:
            names[free[0]] = TIME
        return Layout.plain(names)

    def turned(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Convert x and y to NumPy, with the sample axis first and the time axis second."""
        x, y = _numpy(x), _numpy(y)
        if self.inputs is None and "y" not in self.axes.data:
            return x, y
        first, lead = data.leaves_of(x)[0], (self.inputs or [Layout.plain((SAMPLE, TIME))])[0]
        count, steps = (first.shape[lead.names.index(name)] for name in (SAMPLE, TIME))
        self.targets = [] if y is None else [self._of_target(leaf, count, steps) for leaf in data.leaves_of(y)]
        y = None if y is None else _each_turned(_turned, y, self.targets)
        return x if self.inputs is None else _each_turned(_turned, x, self.inputs), y

    def _of_target(self, leaf: Array, count: int, steps: int) -> Layout:
        """Return the layout of a target: samples first, or steps before samples.

        Raise ``InputError`` if both or neither fit.
        """
        if "y" in self.axes.data:
            return self.axes.data["y"]
        rest = tuple(f"axis_{i}" for i in range(2, leaf.ndim))
        fits = {
            (SAMPLE, *(f"axis_{i}" for i in range(1, leaf.ndim))): leaf.shape[:1] == (count,),
            (TIME, SAMPLE, *rest): leaf.shape[:2] == (steps, count),
        }
        fitting = [names for names, fit in fits.items() if fit]
        if len(fitting) != 1:
            raise InputError(
                "rnnlens could not determine which axis of y counts samples.",
                got=f"shape {leaf.shape} for {count} samples of {steps} steps",
                hint='name the axes: axes={"y": ("time", "sample", "unit")}, one name for each axis',
            )
        return Layout.plain(fitting[0])

    def as_given(self, x: Any) -> Any:
        """Convert x from samples first to the model's own order of axes."""
        return x if self.inputs is None else _each_turned(_turned_back, x, self.inputs)

    def target_as_given(self, y: Any) -> Any:
        """Convert targets from samples first to the order in which they were given to :meth:`turned`."""
        return _each_turned(_turned_back, y, self.targets) if self.targets else y

    def output(self, array: Array, index: int, x: Any, samples: int) -> Array:
        """Convert one output of the model to (sample, time, ...) or (sample, ...).

        ``x`` is the input of the model in its own order, with ``samples`` samples. An output (sample, time) gets a last
        axis of size 1.
        """
        port = Port("output", index=index)
        if self._may_lie_otherwise(array, port, x, samples):
            few = x if self.inputs is not None else data.map_leaves(lambda leaf: leaf[:3], x)
            self.axes.learn(Batch(few), [port])
        layout = self.axes.layout(port, array.shape)
        if SAMPLE not in layout.names:
            raise InputError(
                "rnnlens could not determine which axis of the output counts samples.",
                got=f"shape {array.shape}",
                hint='name the axes: axes={"output": ("time", "sample", "unit")}',
            )
        turned = _turned(layout.opened(array, samples), Layout.plain(layout.names))
        return turned[:, :, None] if set(layout.names) == {SAMPLE, TIME} else turned

    def _may_lie_otherwise(self, array: Array, port: Port, x: Any, samples: int) -> bool:
        """Return whether an output may have axes other than (sample, unit), so that an experiment must find them."""
        lengths = {leaf.shape[1] for leaf in data.leaves_of(x) if len(leaf.shape) > 1}
        many = array.ndim > 2 or (array.ndim == 2 and array.shape[1] > 1 and array.shape[1] in lengths)
        return self.inputs is not None or port in self.axes.stated or array.shape[:1] != (samples,) or many

    def names(self, array: Array, index: int) -> Layout:
        """Return the layout of an output of the model; axes of unknown role have default names."""
        return self.axes.layout(Port("output", index=index), array.shape)


def _turned(array: Array, layout: Layout) -> Array:
    if len(layout.names) != array.ndim:
        got = f"axes ({', '.join(layout.names)}) for shape {array.shape}"
        raise InputError("axes= does not fit.", got=got, expected="one name for each axis")
    return np.ascontiguousarray(np.transpose(array, canonical_order(layout.names)))


def _turned_back(array: Array, layout: Layout) -> Array:
    return np.ascontiguousarray(np.transpose(array, np.argsort(canonical_order(layout.names))))


def _each_turned(turn: Callable[[Array, Layout], Array], tree: Any, layouts: Sequence[Layout]) -> Any:
    """Apply ``turn(leaf, layout)`` to every leaf of a nested structure with its layout."""
    each = iter(layouts)
    return data.map_leaves(lambda leaf: turn(leaf, next(each)), tree)


#: Function that changes one array of the data.
Change = Callable[[Array], Array]


@dataclass
class Samples:
    """Data of an experiment as NumPy arrays with samples first.

    Attributes
    ----------
    sequences
        Indices of the leaves of x with a time axis (their second), which are exchanged together.
    labels
        Coordinate of the samples where x is a DataArray that has one, else their positions in x.
    orientation
        Order of axes of the model's data and outputs.
    """

    x: Any
    y: Any
    steps: int
    sequences: tuple[int, ...]
    labels: Array
    orientation: Orientation

    @property
    def count(self) -> int:
        """Number of samples."""
        return data.len_of(self.x)

    def with_suffix(self, begin: int, lender: Array) -> Any:
        """Return x with the steps from ``begin`` on replaced by those of another sample."""
        after = np.broadcast_to(np.arange(self.steps) >= begin, (self.count, self.steps))
        return self.each_sequence(lambda leaf: np.where(_index(after, leaf.ndim), leaf[lender], leaf))

    def shortened(self, lengths: Array, kept: Array) -> Any:
        """Return x with only the last ``kept`` of the ``lengths`` real steps of each sample, and padding after them."""
        if (lengths == self.steps).all():
            return self.each_sequence(lambda leaf: leaf[:, -int(kept.max()) :])
        filler = int(lengths.argmin())
        place = np.arange(self.steps)[None, :]
        source = np.minimum(place + (lengths - kept)[:, None], self.steps - 1)
        real = place < kept[:, None]

        def moved(leaf: Array) -> Array:
            rows = np.take_along_axis(leaf, _index(source, leaf.ndim), axis=1)
            return np.where(_index(real, leaf.ndim), rows, leaf[filler, -1])

        def counted(leaf: Array) -> Array:
            if leaf.size == len(kept) and np.array_equal(leaf.reshape(-1), lengths):
                return kept.reshape(leaf.shape).astype(leaf.dtype)
            return leaf

        return self.each_sequence(moved, counted)

    def each_sequence(self, change: Change, otherwise: Change = lambda leaf: leaf) -> Any:
        """Apply ``change`` to the leaves of x that have a time axis, and ``otherwise`` to the leaves without one."""
        place = iter(range(len(data.leaves_of(self.x))))
        return data.map_leaves(lambda leaf: change(leaf) if next(place) in self.sequences else otherwise(leaf), self.x)

    def with_prefix(self, keep: Array, lender: Array, lengths: Array) -> Any:
        """Return x with all steps before each sample's last ``keep`` real ones replaced by another sample's.

        Samples of unequal length are aligned at their last real step. A shorter lender is repeated cyclically.
        """
        position = np.arange(self.steps)[None, :]
        own = position >= (lengths - keep)[:, None]
        from_end = lengths[:, None] - position
        borrowed = (lengths[lender][:, None] - from_end) % np.maximum(lengths[lender], 1)[:, None]

        def exchange(leaf: Array) -> Array:
            other = np.take_along_axis(leaf[lender], _index(borrowed, leaf.ndim), axis=1)
            return np.where(_index(own, leaf.ndim), leaf, other)

        return self.each_sequence(exchange)


def _index(array: Array, ndim: int) -> Array:
    return array[(slice(None), slice(None), *([None] * (ndim - 2)))]


def read_samples(x: Any, y: Any, most: int, orient: Callable[[Any], Orientation]) -> Samples:
    """Read at most ``most`` samples, from arrays or from the first batches of a data set.

    Parameters
    ----------
    orient
        Function that finds the order of axes of a batch.

    Raises
    ------
    InputError
        If no array has a time axis, the batches do not fit together, or y has another number of samples.
    """
    pairs = _batches(x, most) if is_source(x) else [(x, y)]
    refuse_without_time(pairs[0][0])
    for _, target in pairs:
        _refuse_packed(target)
    orientation = orient(pairs[0][0])
    given = None if len(pairs) > 1 else InputCoordinates(pairs[0][0], orientation.axes)
    turned = [orientation.turned(x, y) for x, y in pairs]
    x, y = turned[0] if len(turned) == 1 else map(_joined, zip(*turned, strict=True))
    count = data.len_of(x)
    if y is not None and any(leaf.shape[:1] != (count,) for leaf in data.leaves_of(y)):
        got = f"y of shape {', '.join(str(leaf.shape) for leaf in data.leaves_of(y))} for {count} samples"
        raise InputError("The target does not fit.", got=got, expected="one row for each sample")
    labels = None if given is None else given.find(SAMPLE, count)
    labels = np.arange(count) if labels is None else labels
    if count > most:
        chosen = np.sort(np.random.default_rng(0).permutation(count)[:most])
        labels = labels[chosen]
        x = data.map_leaves(lambda leaf: leaf[chosen], x)
        y = None if y is None else data.map_leaves(lambda leaf: leaf[chosen], y)
    leaves = data.leaves_of(x)
    steps = next(leaf.shape[1] for leaf in leaves if leaf.ndim >= 2)
    sequences = tuple(i for i, leaf in enumerate(leaves) if leaf.ndim >= 2 and leaf.shape[1] == steps)
    return Samples(x, y, steps, sequences, labels, orientation)


def refuse_without_time(x: Any, *, least: int = 2) -> None:
    """Raise ``InputError`` unless an array has at least ``least`` samples and ``least`` steps.

    Packed sequences raise ``UnsupportedError``.
    """
    _refuse_packed(x)
    leaves = data.leaves_of(x)
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    if not all(shapes):
        raise InputError("x holds what has no axes.", got=shown(x), expected="arrays with samples first")
    if not any(len(shape) >= 2 and min(shape[:2]) >= least for shape in shapes):
        got = ", ".join(map(str, shapes))
        what = "The data has no earlier time step" + (", or no other sample to compare with." if least > 1 else ".")
        expected = f"x of shape (sample, time, ...), at least {least} of each"
        raise InputError(what, got=got, expected=expected)


def _refuse_packed(tree: Any) -> None:
    if any(data.is_packed(leaf) for leaf in data.leaves_of(tree)):
        raise UnsupportedError(
            "This call takes padded arrays: a packed sequence has no axes of samples and steps.",
            got="PackedSequence",
            hint="pass padded arrays, and pack within the model",
        )


def _batches(source: Any, most: int) -> list[tuple[Any, Any]]:
    """Return (x, y) of the first batches of a data set, until they have ``most`` samples."""
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
    """Join batches along the sample axis; raise ``InputError`` if their other sizes differ."""
    if trees[0] is None:
        return None
    columns = zip(*(data.leaves_of(tree) for tree in trees), strict=True)
    try:
        joined = iter([np.concatenate(column) for column in columns])
    except ValueError as error:
        shapes = dict.fromkeys(str([tuple(leaf.shape) for leaf in data.leaves_of(tree)]) for tree in trees)
        raise InputError(
            "The batches differ in other axes than the number of samples.",
            got=", then ".join(shapes),
            hint="pad all batches to one length, or pass one of them",
        ) from error
    return data.map_leaves(lambda _: next(joined), trees[0])
