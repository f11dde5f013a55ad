"""Data of an experiment: samples in one order of axes, exchanged prefixes, and conversion to the model's own order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import Adapter, Batch, Port, Taps
from ..arguments.data import TEXT_HINT, is_source
from ..autodiff.tensors import dtype_name
from ..errors import InputError, RnnlensError, UnsupportedError, shape_of, short_repr
from ..layout import Layout, canonical_order
from ..results.schema import to_host
from ..typing import Array, named_constants
from ..verbs.axes import DATA, InputCoordinates, ModelAxes, axes_to_write, sample_axes_to_type
from ..verbs.batches import layouts_of_inputs
from ..verbs.names import Catalogue
from ..vocabulary import SAMPLE, TIME


class Orientation:
    """Order of axes of the data and outputs of one model, as the user declared it or as found by short runs.

    Parameters
    ----------
    layouts
        Layouts declared by the user, by the name of a tensor or ``"y"``.
    """

    def __init__(self, adapter: Adapter, model: Any, x: Any, layouts: Mapping[str, Layout] | None) -> None:
        #: A few samples of x as the model takes them; None where samples come first by the framework's convention.
        self._few: Batch | None = None
        self.declared = {name: layout for name, layout in (layouts or {}).items() if name not in DATA}
        self.axes = ModelAxes(adapter, model, layouts, Catalogue(adapter, model, x))
        self.inputs = self._input_layouts(x)
        self.targets: list[Layout] = []

    def _input_layouts(self, x: Any) -> list[Layout] | None:
        """Return the layout of each leaf of x; None if in all of them samples come first, then steps."""
        leaves = data.leaves_of(x)
        if self.axes.adapter.samples_first:
            stated = [self.axes.layout(Port("input", index=i), shape_of(leaf) or ()) for i, leaf in enumerate(leaves)]
            if all(_is_canonical(layout) for layout in stated):
                return None
            self._few = Batch(x)
            return stated
        failure: Exception | None = None
        layouts: Sequence[Layout | None] | None = [_samples_first(len(shape_of(leaf) or ())) for leaf in leaves]
        few = None
        lengths = {(shape_of(leaf) or (0,))[0] for leaf in leaves if data.has_axes(leaf)}
        if len(lengths) == 1 and not any(name.startswith("input") for name in self.declared):
            try:
                few = self._few_of_first_axis(x)
            except RnnlensError as error:
                failure = error
        if few is None and (folded := self._folded_layouts(x)):
            self._few = Batch(x)
            return folded
        if few is None:
            few = x
            try:
                layouts = layouts_of_inputs(self.axes, Batch(x), x)
            except InputError as error:
                listed = [name for name in named_constants(x) if "." in name]
                if failure is not None and listed:
                    raise InputError(
                        "Some samples alone could not be run: what is no array is passed on whole.",
                        got=f"a list or dict of {len(listed)} numbers or other constants among the inputs",
                        expected="arrays for what belongs to the samples",
                        hint="a list with an entry for each sample as a tensor or array, which is cut with the samples",
                    ) from failure
                raise failure or error from error
        if layouts is None or any(map(data.is_packed, leaves)):
            return None
        self._few = Batch(few)
        self.axes.learn(self._few, [Port("input", index=i) for i in range(len(leaves))])
        detected = [self.axes.layout(Port("input", index=i), np.shape(leaf)) for i, leaf in enumerate(leaves)]
        named = [
            self._with_time_axis(leaf, found, layout, is_known=any(TIME in found.names for found in detected))
            for leaf, found, layout in zip(leaves, detected, layouts, strict=True)
        ]
        return None if all(_is_canonical(layout) for layout in named) else named

    def _folded_layouts(self, x: Any) -> list[Layout] | None:
        """Return the layout of each leaf of x if samples and steps are folded into one axis of some leaf; else None.

        The model runs on all of x: a part of a folded axis may be no whole number of samples.
        """
        leaves = data.leaves_of(x)
        if any(map(data.is_packed, leaves)):
            return None
        ports = [Port("input", index=i) for i in range(len(leaves))]
        try:
            self.axes.learn(Batch(x), [*ports, Port("output")])
            layouts = [
                self.axes.layout(port, np.shape(leaf)) if data.has_axes(leaf) else Layout(())
                for port, leaf in zip(ports, leaves, strict=True)
            ]
        except RnnlensError:  # a choice of the sample axis, or the diagnosis itself, meets the error again
            return None
        is_known = all(SAMPLE in layout.names for layout in layouts if layout.axes)
        return layouts if is_known and any(layout.is_folded for layout in layouts) else None

    def _few_of_first_axis(self, x: Any) -> Any:
        """Return a few entries of the first axis of x if the recurrent layers get one sample for each; else None.

        The model runs once, on a number of entries that no other axis of x has.
        """
        shapes = [shape_of(leaf) or (3,) for leaf in data.leaves_of(x) if data.has_axes(leaf)]
        other_sizes = {size for shape in shapes for size in shape[1:]}
        max_count = min(shape[0] for shape in shapes)
        count = next(
            (count for count in (3, 2, *range(4, max_count + 1)) if count <= max_count and count not in other_sizes),
            None,
        )
        if count is None:
            return None
        first_entries = data.select(x, slice(count))
        capture = self.axes.adapter.run(self.axes.model, Batch(first_entries), Taps.states(sequences=False)).capture
        counts = {*(int(call.input.shape[0]) for call in capture.calls), *capture.scanned.values()}
        return first_entries if counts <= {count} else None

    @staticmethod
    def _with_time_axis(leaf: Any, detected: Layout, layout: Layout | None, *, is_known: bool) -> Layout:
        """Return the layout of an input leaf, with a time axis.

        Unless ``is_known``, the time axis of some leaf, it is the first axis that does not count samples.
        """
        if not data.has_axes(leaf):
            return Layout(())
        names = list(detected.names if layout is None or SAMPLE in detected.names else layout.names)
        other_axes = [i for i, name in enumerate(names) if name != SAMPLE]
        if not is_known and TIME not in names and other_axes:
            names[other_axes[0]] = TIME
        return Layout.of_names(names)

    def in_canonical_order(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Convert x and y to NumPy, with the sample axis first and the time axis second."""
        x, y = _to_numpy(x), _to_numpy(y)
        if self._few is None and "y" not in self.axes.data:
            return x, y
        count = self._count_samples(x)
        x = x if self.inputs is None else _reorder_leaves(partial(_to_canonical, samples=count), x, self.inputs)
        leaves = data.leaves_of(x)
        steps = next((leaf.shape[1] for i, leaf in enumerate(leaves) if leaf.ndim > 1 and self.has_time(i)), 1)
        targets = [] if y is None else data.leaves_of(y)
        if self._few is not None:
            self.axes.learn(self._few, [Port("output", index=i) for i in range(len(targets))])
        self.targets = [self._target_layout(i, leaf, count, steps) for i, leaf in enumerate(targets)]
        return x, None if y is None else _reorder_leaves(partial(_to_canonical, samples=count), y, self.targets)

    def has_time(self, index: int) -> bool:
        """Return whether an input leaf with several axes may have a time axis, its second in canonical order."""
        return self.inputs is None or TIME in self.inputs[index].names

    def _count_samples(self, x: Any) -> int:
        """Return the number of samples of x in the model's own order."""
        if self.inputs is None:
            return data.sample_count(x)
        for leaf, layout in zip(data.leaves_of(x), self.inputs, strict=True):
            if layout.sample is not None and not layout.is_folded:
                return int(leaf.shape[layout.sample])
        return self.axes.samples(Batch(x))

    def _target_layout(self, index: int, leaf: Array, count: int, steps: int) -> Layout:
        """Return the layout of a target: that of its output if it has the same axes, samples first, or steps first.

        Raise ``InputError`` if both or neither of the latter fit.
        """
        if not leaf.ndim:
            return Layout(())
        if "y" in self.axes.data:
            return self.axes.data["y"]
        port = Port("output", index=index)
        output = self.axes.stated.get(port, self.axes.found_layouts.get(port))
        if output is not None and len(output.axes[0]) > 1 and leaf.shape[:1] == (count * steps,):
            return Layout((output.axes[0], *((f"axis_{i}",) for i in range(1, leaf.ndim))))  # one for each row
        if output is not None and not output.is_folded and len(output.names) == leaf.ndim:
            sizes = dict(zip(output.names, leaf.shape, strict=True))
            if (sizes.get(SAMPLE), sizes.get(TIME)) == (count, steps):
                return output
        if self.inputs is None and leaf.shape[:1] != (count * steps,):
            return _samples_first(leaf.ndim)
        other_dims = tuple(f"axis_{i}" for i in range(2, leaf.ndim))
        fit_by_dims = {
            _samples_first(leaf.ndim).names: leaf.shape[:1] == (count,),
            (TIME, SAMPLE, *other_dims): leaf.shape[:2] == (steps, count),
        }
        fitting_dims = [names for names, is_fit in fit_by_dims.items() if is_fit]
        if len(fitting_dims) != 1:
            raise InputError(
                "rnnlens could not determine which axis of y counts samples.",
                got=f"shape {leaf.shape} for {count} samples of {steps} steps",
                hint=f"name the axes: {sample_axes_to_type('y', leaf.shape, count, steps)}",
            )
        return Layout.of_names(fitting_dims[0])

    def canonical_input(self, x: Any) -> Any:
        """Convert inputs, or arrays shaped like them, from the model's own order of axes to samples first."""
        if self.inputs is None:
            return x
        return _reorder_leaves(partial(_to_canonical, samples=self._count_samples(x)), x, self.inputs)

    def as_given(self, x: Any) -> Any:
        """Convert x from samples first to the model's own order of axes."""
        return x if self.inputs is None else _reorder_leaves(_from_canonical, x, self.inputs)

    def target_as_given(self, y: Any) -> Any:
        """Convert targets from samples first to the order in which they were given to :meth:`in_canonical_order`."""
        return _reorder_leaves(_from_canonical, y, self.targets) if self.targets else y

    def _name_of_output(self, index: int) -> str:
        """Return the name in ``axes=`` of an output of the model."""
        outputs = self.axes.adapter.run(self.axes.model, self._few, Taps()).returned if self._few is not None else None
        return f"output[{index}]" if len(data.leaves_of(outputs)) > 1 else "output"

    def canonical_output(self, array: Array, index: int, x: Any, samples: int) -> Array:
        """Convert one output of the model to (sample, time, ...) or (sample, ...).

        ``x`` is the input of the model in its own order, with ``samples`` samples. An output (sample, time) gets a last
        axis of size 1.
        """
        port = Port("output", index=index)
        if self._may_have_other_axes(array, port, x, samples):
            first_samples = x if self.inputs is not None else data.select(x, slice(3))
            self.axes.learn(Batch(first_samples), [port])
        layout = self.axes.layout(port, array.shape)
        if SAMPLE not in layout.names:
            raise InputError(
                "rnnlens could not determine which axis of the output counts samples.",
                got=f"shape {array.shape}",
                hint=f"name the axes: {sample_axes_to_type(self._name_of_output(index), array.shape, samples)}",
            )
        canonical = _to_canonical(array, layout, samples)
        return canonical[:, :, None] if set(layout.names) == {SAMPLE, TIME} else canonical

    def _may_have_other_axes(self, array: Array, port: Port, x: Any, samples: int) -> bool:
        """Return whether an output may have axes other than (sample, unit), so that an experiment must find them."""
        lengths = {leaf.shape[1] for leaf in data.leaves_of(x) if len(leaf.shape) > 1}
        may_have_time = array.ndim > 2 or (array.ndim == 2 and array.shape[1] > 1 and array.shape[1] in lengths)
        return self.inputs is not None or port in self.axes.stated or array.shape[:1] != (samples,) or may_have_time

    def output_layout(self, array: Array, index: int) -> Layout:
        """Return the layout of an output of the model; axes of unknown role have default names."""
        return self.axes.layout(Port("output", index=index), array.shape)


def _samples_first(count: int) -> Layout:
    """Return the layout of ``count`` axes of which the first one counts samples."""
    return Layout.of_names((SAMPLE, *(f"axis_{i}" for i in range(1, count)))[:count])


def _is_canonical(layout: Layout) -> bool:
    """Return whether samples are on the first axis of a tensor, and steps, if it has any, on the second."""
    names = layout.names
    return not layout.is_folded and names[:1] in ((), (SAMPLE,)) and (TIME not in names or names[1] == TIME)


def _to_canonical(array: Array, layout: Layout, samples: int) -> Array:
    """Split folded axes of an array of ``samples`` samples, and put samples first, then steps."""
    if not array.ndim:
        return array
    folded_sizes = [size for axis, size in zip(layout.axes, array.shape, strict=False) if len(axis) > 1]
    if len(layout.axes) != array.ndim or any(size % samples for size in folded_sizes):
        received = f"axes ({', '.join(map(str, axes_to_write(layout.axes)))}) for shape {array.shape}"
        expected = "one name for each axis" + (f"; a folded axis of {samples} samples" if folded_sizes else "")
        raise InputError("axes= does not fit.", got=received, expected=expected)
    split_array = layout.split_folded(array, samples)
    return np.ascontiguousarray(np.transpose(split_array, canonical_order(layout.names)))


def _from_canonical(array: Array, layout: Layout) -> Array:
    if not array.ndim:
        return array
    return np.ascontiguousarray(layout.fold(np.transpose(array, np.argsort(canonical_order(layout.names)))))


def _reorder_leaves(reorder: Callable[[Array, Layout], Array], tree: Any, layouts: Sequence[Layout]) -> Any:
    """Apply ``reorder(leaf, layout)`` to every leaf of a nested structure with its layout."""
    remaining_layouts = iter(layouts)
    return data.map_leaves(lambda leaf: reorder(leaf, next(remaining_layouts)), tree)


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
        return data.sample_count(self.x)

    def with_targets(self, ignored: int, step: int) -> Samples:
        """Return the samples whose target is not the ignored class: at ``step``, or, of -1, at any step."""
        has_target = self._are_targets(ignored)
        if has_target is None or has_target.all():
            return self
        by_step = has_target.reshape(self.count, -1)
        if step == -1 or not -by_step.shape[1] <= step < by_step.shape[1]:
            is_kept = by_step.any(axis=1)
        else:
            is_kept = by_step[:, step]
        if not is_kept.any():
            got = f"{ignored} for all {self.count} samples"
            raise InputError(
                "The loss ignores all targets at the examined step.", got=got, hint="step=, or other samples"
            )
        kept = np.flatnonzero(is_kept)
        x, y = data.select(self.x, kept), data.select(self.y, kept)
        return replace(self, x=x, y=y, labels=self.labels[kept])

    def lengths_with_targets(self, ignored: int) -> Array | None:
        """Return the number of steps up to each sample's last target (sample,); None if no target is ignored."""
        has_target = self._are_targets(ignored)
        if has_target is None or has_target.all() or has_target.ndim < 2 or has_target.shape[1] != self.steps:
            return None
        return self.steps - has_target[:, ::-1].argmax(axis=1)

    def _are_targets(self, ignored: int) -> Array | None:
        """Return where the targets are not the ignored class, (sample[, time]); None unless they are class numbers."""
        leaves = data.leaves_of(self.y)
        if len(leaves) != 1 or leaves[0].dtype.kind not in "iu" or leaves[0].ndim not in (1, 2):
            return None
        has_target = leaves[0] != ignored
        return has_target if bool((leaves[0][has_target] >= 0).all()) else None

    def with_later_exchanged(self, begin: int, lender: Array) -> Any:
        """Return x with the steps from ``begin`` on replaced by those of another sample."""
        is_replaced = np.broadcast_to(np.arange(self.steps) >= begin, (self.count, self.steps))
        return self.map_sequences(lambda leaf: np.where(_append_axes(is_replaced, leaf.ndim), leaf[lender], leaf))

    def shortened(self, lengths: Array, kept_lengths: Array) -> Any:
        """Return x with only the last ``kept_lengths`` of the ``lengths`` real steps of each sample, then padding."""
        if (lengths == self.steps).all():
            return self.map_sequences(lambda leaf: leaf[:, -int(kept_lengths.max()) :])
        padding_sample = int(lengths.argmin())
        position = np.arange(self.steps)[None, :]
        source = np.minimum(position + (lengths - kept_lengths)[:, None], self.steps - 1)
        is_real = position < kept_lengths[:, None]

        def shift_steps(leaf: Array) -> Array:
            shifted = np.take_along_axis(leaf, _append_axes(source, leaf.ndim), axis=1)
            return np.where(_append_axes(is_real, leaf.ndim), shifted, leaf[padding_sample, -1])

        def replace_lengths(leaf: Array) -> Array:
            if leaf.size == len(kept_lengths) and np.array_equal(leaf.reshape(-1), lengths):
                return kept_lengths.reshape(leaf.shape).astype(leaf.dtype)
            return leaf

        return self.map_sequences(shift_steps, replace_lengths)

    def map_sequences(self, change: Change, otherwise: Change = lambda leaf: leaf) -> Any:
        """Apply ``change`` to the leaves of x that have a time axis, and ``otherwise`` to the leaves without one."""
        leaf_index = iter(range(len(data.leaves_of(self.x))))
        return data.map_leaves(
            lambda leaf: change(leaf) if next(leaf_index) in self.sequences else otherwise(leaf) if leaf.ndim else leaf,
            self.x,
        )

    def with_prefix_exchanged(self, kept_lengths: Array, lender: Array, lengths: Array) -> Any:
        """Return x with all steps before each sample's last ``kept_lengths`` real ones replaced by another sample's.

        Samples of unequal length are aligned at their last real step. A shorter lender is repeated cyclically.
        """
        position = np.arange(self.steps)[None, :]
        is_own = position >= (lengths - kept_lengths)[:, None]
        from_end = lengths[:, None] - position
        lender_steps = (lengths[lender][:, None] - from_end) % np.maximum(lengths[lender], 1)[:, None]

        def exchange(leaf: Array) -> Array:
            lender_leaf = np.take_along_axis(leaf[lender], _append_axes(lender_steps, leaf.ndim), axis=1)
            return np.where(_append_axes(is_own, leaf.ndim), leaf, lender_leaf)

        return self.map_sequences(exchange)


def _append_axes(array: Array, ndim: int) -> Array:
    return array[(slice(None), slice(None), *([None] * (ndim - 2)))]


def read_samples(x: Any, y: Any, max_samples: int, orient: Callable[[Any], Orientation]) -> Samples:
    """Read at most ``max_samples`` samples, from arrays or from the first batches of a data set.

    Parameters
    ----------
    orient
        Function that finds the order of axes of a batch.

    Raises
    ------
    InputError
        If no array has a time axis, the batches do not fit together, or y has another number of samples.
    """
    pairs = _read_batches(x, max_samples) if is_source(x) else [(x, y)]
    first_x = pairs[0][0]
    _refuse_packed(first_x)
    for _, target in pairs:
        _refuse_packed(target)
    if not any(sum(size > 1 for size in shape_of(leaf) or ()) > 1 for leaf in data.leaves_of(first_x)):
        refuse_without_time(first_x)
    orientation = orient(first_x)
    coordinates = None if len(pairs) > 1 else InputCoordinates(first_x, orientation.axes)
    ordered_pairs = [orientation.in_canonical_order(x, y) for x, y in pairs]
    x, y = ordered_pairs[0] if len(ordered_pairs) == 1 else map(_join_batches, zip(*ordered_pairs, strict=True))
    refuse_without_time(x)
    count = data.sample_count(x)
    if y is not None and any(leaf.shape[:1] not in ((count,), ()) for leaf in data.leaves_of(y)):
        received = f"y of shape {', '.join(str(leaf.shape) for leaf in data.leaves_of(y))} for {count} samples"
        raise InputError("The target does not fit.", got=received, expected="one row for each sample")
    labels = None if coordinates is None else coordinates.find(SAMPLE, count)
    labels = np.arange(count) if labels is None else labels
    if count > max_samples:
        sample_indices = np.sort(np.random.default_rng(0).permutation(count)[:max_samples])
        labels = labels[sample_indices]
        x = data.select(x, sample_indices)
        y = None if y is None else data.select(y, sample_indices)
    leaves = data.leaves_of(x)
    with_steps = [i for i, leaf in enumerate(leaves) if leaf.ndim >= 2 and orientation.has_time(i)]
    steps = leaves[with_steps[0]].shape[1]
    sequences = tuple(i for i in with_steps if leaves[i].shape[1] == steps)
    return Samples(x, y, steps, sequences, labels, orientation)


def refuse_without_time(x: Any, *, least: int = 2) -> None:
    """Raise ``InputError`` unless an array has at least ``least`` samples and ``least`` steps.

    Packed sequences raise ``UnsupportedError``.
    """
    _refuse_packed(x)
    leaves = data.leaves_of(x)
    shapes = [tuple(leaf.shape) for leaf in leaves if data.has_axes(leaf)]
    if not shapes:
        raise InputError("x has no axes.", got=short_repr(x), expected="arrays with samples first")
    if not any(len(shape) >= 2 and min(shape[:2]) >= least for shape in shapes):
        received = ", ".join(map(str, shapes))
        message = "The data has no earlier time step" + (", or no other sample to compare with." if least > 1 else ".")
        expected = f"x of shape (sample, time, ...), at least {least} of each"
        hint = TEXT_HINT if any(dtype_name(leaf) == "string" for leaf in leaves) else None
        raise InputError(message, got=received, expected=expected, hint=hint)


def _refuse_packed(tree: Any) -> None:
    if any(data.is_packed(leaf) for leaf in data.leaves_of(tree)):
        raise UnsupportedError(
            "This call takes padded arrays: a packed sequence has no axes of samples and steps.",
            got="PackedSequence",
            hint="pass padded arrays, and pack within the model",
        )


def _read_batches(source: Any, max_samples: int) -> list[tuple[Any, Any]]:
    """Return (x, y) of the first batches of a data set, until they have ``max_samples`` samples."""
    pairs, count = [], 0
    for batch in data.batches(source, as_numpy=True):
        pairs.append((batch.x, batch.y))
        count += data.sample_count(batch.x)
        if count >= max_samples:
            break
    return pairs


def _to_numpy(tree: Any) -> Any:
    return None if tree is None else data.map_leaves(lambda leaf: np.asarray(to_host(leaf)), tree)


def _join_batches(trees: Sequence[Any]) -> Any:
    """Join batches along the sample axis; raise ``InputError`` if their other sizes differ."""
    if trees[0] is None:
        return None
    columns = zip(*(data.leaves_of(tree) for tree in trees), strict=True)
    try:
        joined = iter([np.concatenate(column) if np.ndim(column[0]) else column[0] for column in columns])
    except ValueError as error:
        shapes = dict.fromkeys(str([tuple(leaf.shape) for leaf in data.leaves_of(tree)]) for tree in trees)
        raise InputError(
            "The batches differ in other axes than the number of samples.",
            got=", then ".join(shapes),
            hint="pad all batches to one length, or pass one of them",
        ) from error
    return data.map_leaves(lambda _: next(joined), trees[0])
