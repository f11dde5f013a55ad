"""Names of a tensor's axes in the framework's own order, with samples and steps that may be folded into one axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from .typing import Array
from .vocabulary import CHANNEL, DIRECTION, FEATURE, GATE, SAMPLE, SPACE, TIME, UNIT

#: Names of one axis of a tensor: one name, or several folded into it, outermost first.
Axis = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """The names of the axes of a tensor."""

    #: For each axis of the framework's tensor its names, several if it is folded: ``(("time", "sample"), ("unit",))``
    #: for logits of shape (time * sample, unit).
    axes: tuple[Axis, ...]
    #: Whether entries of one sample depend on other samples of the batch.
    is_coupled: bool = False
    #: Number of samples of the batch on which ``is_coupled`` was determined; 0 if it was not tested.
    samples: int = 0
    #: Names of the axes that follow steps but are not called ``time``: several, or one that holds features as well.
    unclear_axes: tuple[str, ...] = ()
    #: For each sample of this tensor its number within the recurrent layers, if a model sorts its samples by length
    #: before them, say; empty if the order is the same.
    order: tuple[int, ...] = ()

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Layout:
        """Create a layout with one name per axis."""
        return cls(tuple((name,) for name in names))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all axes in the framework's order; an axis with folded axes has several names."""
        return tuple(name for axis in self.axes for name in axis)

    @property
    def is_folded(self) -> bool:
        """Whether several named axes are folded into one axis of the tensor."""
        return any(len(axis) > 1 for axis in self.axes)

    @property
    def is_uncertain(self) -> bool:
        """Whether the role of some axis is not known."""
        return any(name.startswith("axis_") for name in self.names)

    @property
    def sample(self) -> int | None:
        """Index of the sample axis in :attr:`names`; None if there is none."""
        return self.names.index(SAMPLE) if SAMPLE in self.names else None

    def cut(self, array: Array, start: int, stop: int, samples: int) -> Array:
        """Return samples ``start:stop`` of an array with ``samples`` samples; all of an array without a sample axis."""
        if self.sample is None:
            return array
        index = (slice(None),) * self.sample + (slice(start, stop),)
        return self.fold(self.split_folded(array, samples)[index])

    def sizes(self, shape: Sequence[int], samples: int) -> tuple[int, ...]:
        """Return the length of each named axis of a tensor of shape ``shape`` with ``samples`` samples."""
        lengths: list[int] = []
        for axis, size in zip(self.axes, shape, strict=True):
            other_length = size // samples
            lengths += [size] if len(axis) == 1 else [samples if name == SAMPLE else other_length for name in axis]
        return tuple(map(int, lengths))

    def split_folded(self, array: Array, samples: int, lead: int = 0) -> Array:
        """Split folded axes of an array, so that each name has its own axis.

        ``lead`` further axes in front are kept.
        """
        if not self.is_folded:
            return array
        return array.reshape((*array.shape[:lead], *self.sizes(array.shape[lead:], samples)))

    def fold(self, array: Array, lead: int = 0) -> Array:
        """Fold the axes of an array again: the inverse of :meth:`split_folded`."""
        if not self.is_folded:
            return array
        sizes = [int(n) for n in array.shape]
        folded, remaining = sizes[:lead], sizes[lead:]
        for axis in self.axes:
            folded.append(prod(remaining[: len(axis)]))
            remaining = remaining[len(axis) :]
        return array.reshape(tuple(folded))


def layout_of_axes(count: int, known_axes: dict[int, Axis], last_name: str) -> Layout:
    """Create the layout of a tensor with ``count`` axes, some of them known.

    The last unknown axis is called ``last_name`` (features or units), the others ``axis_i``.
    """
    unknown_axes = [i for i in range(count) if i not in known_axes]
    names = {i: (f"axis_{i}",) for i in unknown_axes}
    if unknown_axes:
        names[unknown_axes[-1]] = (last_name,)
    return Layout(tuple({**names, **known_axes}[i] for i in range(count)))


def canonical_order(names: Sequence[str]) -> list[int]:
    """Return the permutation of the names to the order of results: sample, time, then the others in their order.

    Where an axis of unknown role may count the samples, the order is kept.
    """
    if SAMPLE not in names and any(name.startswith("axis_") for name in names):
        return list(range(len(names)))
    leading_axes = [names.index(name) for name in (SAMPLE, TIME) if name in names]
    return leading_axes + [i for i in range(len(names)) if i not in leading_axes]


def dims_of(
    shape: Sequence[int],
    *,
    bidirectional: bool = False,
    last: str = UNIT,
    gate: bool = False,
    space: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Return the names of a tensor's axes: sample, time, (direction), (space), ..., unit.

    >>> dims_of((2, 5, 3)), dims_of((2, 3)), dims_of((2, 4, 4, 3))
    (('sample', 'time', 'unit'), ('sample', 'unit'), ('sample', 'axis_1', 'axis_2', 'unit'))
    """
    middle_dims = [TIME, *([DIRECTION] if bidirectional else []), *([GATE] if gate else [])]
    full_dims = with_space((SAMPLE, *middle_dims, last), space)
    if len(shape) == len(full_dims):
        return full_dims
    without_time = tuple(dim for dim in full_dims if dim != TIME)
    if len(shape) == len(without_time):
        return without_time
    if len(shape) < 2:
        return (SAMPLE,)[: len(shape)]
    return (SAMPLE, *(f"axis_{i}" for i in range(1, len(shape) - 1)), last)


def with_space(dims: tuple[str, ...], space: tuple[str, ...]) -> tuple[str, ...]:
    """Insert axes of space before gates, channels and features, into the dimensions of a quantity of a layer.

    >>> with_space(("sample", "time", "gate", "unit"), ("height", "width"))
    ('sample', 'time', 'height', 'width', 'gate', 'channel')
    """
    if not space or not set(dims) & {UNIT, FEATURE} or SAMPLE not in dims:
        return dims
    outer_dims = [dim for dim in dims if dim not in (GATE, UNIT, FEATURE)]
    inner_dims = [CHANNEL if dim == UNIT else dim for dim in dims if dim in (GATE, UNIT, FEATURE)]
    return (*outer_dims, *space, *inner_dims)


def image_axes(sizes: Sequence[int], image: Sequence[int]) -> tuple[str, ...] | None:
    """Return the names of a tensor's axes besides samples and steps, if it is an image (channel, *space) as a cell's.

    ``sizes``: lengths of these axes. The axes of space are as long as those of ``image``, or all scaled alike, as
    convolutions scale them. None if the tensor is no image with channels first, or could have them last as well.

    >>> image_axes((3, 32, 64), (8, 16, 32)), image_axes((32, 64, 3), (8, 16, 32)), image_axes((4, 4, 4), (8, 2, 2))
    (('channel', 'height', 'width'), None, None)
    """
    space = image[1:]

    def is_scaled(lengths: Sequence[int]) -> bool:
        if len(space) == 1:  # one length alone is a multiple of any other
            return lengths[0] == space[0]
        return all(lengths[0] * other == length * space[0] for length, other in zip(lengths, space, strict=True))

    if len(sizes) != len(image) or not is_scaled(sizes[1:]) or is_scaled(sizes[:-1]):
        return None
    return (CHANNEL, *SPACE[len(space)])


def direction_axis(dims: Sequence[str]) -> int:
    """Return the position of the axis for the two directions of a layer: behind time, or else behind sample.

    >>> [direction_axis(dims) for dims in (("sample", "time", "unit"), ("sample", "unit"), ("unit_in", "unit"))]
    [2, 1, 0]
    """
    return max((dims.index(dim) + 1 for dim in (SAMPLE, TIME) if dim in dims), default=0)


def input_dims(shape: Sequence[int], integer: bool = False) -> tuple[str, ...]:
    """Return the names of a model input's axes; integer inputs of rank 2 are ids without a feature axis."""
    if integer and len(shape) == 2:
        return (SAMPLE, TIME)
    return dims_of(shape, last=FEATURE)
