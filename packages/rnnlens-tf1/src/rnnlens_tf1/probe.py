"""Random numbers for the tensors of a graph: tensors with the same numbers compute the same, by whatever operations.

Inputs, states and products with a variable get random numbers; sums, products, activations and cuts are computed from
them. Two different polynomials agree at random numbers with negligible probability (Schwartz 1980, J. ACM 27(4),
corollary 1). A cell's equation is tested by looking up the tensor that has the numbers of its result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from hashlib import blake2b
from typing import Any

import numpy as np
from tensorflow.python.framework.tensor_util import constant_value

from rnnlens.typing import Array

from .blocks import (
    Outer,
    TensorPlan,
    block_of,
    columns_of_slice,
    constant_of,
    convolution_parts,
    evaluate,
    slice_input,
    width_of,
)
from .recurrences import Block, Convolution
from .sequences import NO_SETTINGS, GraphSettings, is_filled_with

_TRANSPARENT = frozenset({"Identity", "EnsureShape", "PlaceholderWithDefault", "PreventGradient", "CheckNumerics"})
_ADDS = frozenset({"Add", "AddV2", "AddN", "BiasAdd", "BiasAddV1"})
_CUTS = frozenset({"Split", "SplitV", "StridedSlice", "Slice"})
_SELECTS = frozenset({"Select", "SelectV2"})
_BOUNDS = frozenset({"Maximum", "Minimum", "ClipByValue"})
#: TensorFlow's operation -> name of the same activation in rnnlens.
_ACTIVATIONS = {op: op.lower() for op in ("Tanh", "Sigmoid", "Relu", "Relu6", "Elu", "Selu", "Softplus", "Softsign")}
_ACTIVATIONS |= {"Exp": "exponential", "LeakyRelu": "leaky_relu"}
#: Slopes of hard sigmoids ``clip(slope * z + 0.5, 0, 1)``.
_HARD_SIGMOIDS = {"hard_sigmoid_keras2": 0.2, "hard_sigmoid": 1 / 6}
#: All activations that a cell can have.
ACTIVATIONS = ("linear", *_ACTIVATIONS.values(), *_HARD_SIGMOIDS)
#: Operations whose values are computed from those of their inputs.
COMPUTED = frozenset(
    {"MatMul", "ConcatV2", "Mul", "Sub", "Neg", "RealDiv", "Floor", "GreaterEqual", *_ACTIVATIONS}
    | (_TRANSPARENT | _ADDS | _CUTS | _SELECTS | _BOUNDS)
)
#: Operations that take a part of a tensor, or change its shape.
PARTS = frozenset({"StridedSlice", "Slice", "GatherV2", "Gather", "Transpose", "Reshape", "ExpandDims", "Squeeze"})
#: Number of rows; a uniform draw is near 0 in half of them, and near 1 in the others.
_ROWS = 4

Key = bytes  #: Identity of a quantity: equal for tensors that have the same numbers.


def apply_activation(name: str, numbers: Array) -> Array:
    """Apply a smooth function in place of an activation, a different one for each name, to recognise it in a graph."""
    return numbers if name == "linear" else np.sin(numbers + ACTIVATIONS.index(name))


@dataclass(frozen=True)
class Affine:
    """Affine map ``sum(source @ block) + sum(vectors) + sum(vector * seen) + constant``.

    ``products`` has the block of a variable by source, ``peepholes`` the vector by the quantity that it multiplies.
    """

    products: Mapping[Key, Block]
    vectors: tuple[Block, ...] = ()
    peepholes: Mapping[Key, Block] = field(default_factory=dict)
    constant: float = 0.0

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks of weight variables that the affine map contains."""
        return (*self.products.values(), *self.vectors, *self.peepholes.values())

    @property
    def width(self) -> int:
        """Number of output units of the affine map."""
        return next(iter(self.products.values())).width

    def add(self, other: Affine) -> Affine | None:
        """Return the sum of two affine maps; None if the sum cannot be represented as one."""
        widths = {block.width for block in (*self.blocks, *other.blocks)}
        if len(widths) > 1 or self.products.keys() & other.products.keys():
            return None
        vectors, constant = (*self.vectors, *other.vectors), self.constant + other.constant
        peepholes = {**self.peepholes, **other.peepholes}
        return Affine({**self.products, **other.products}, vectors, peepholes, constant)

    def columns(self, start: int, stop: int) -> Affine:
        """Return the affine map restricted to its output units ``start:stop``."""
        products, peepholes = (
            {key: block.columns_of(start, stop) for key, block in blocks.items()}
            for blocks in (self.products, self.peepholes)
        )
        vectors = tuple(block.columns_of(start, stop) for block in self.vectors)
        return replace(self, products=products, vectors=vectors, peepholes=peepholes)


@dataclass(frozen=True, eq=False)
class ProbedValue:
    """Numbers (row, column) of a tensor, and how they were computed."""

    numbers: Array
    #: The tensor is this activation of this affine map; None if it is anything else.
    affine: Affine | None = None
    activation: str = "linear"
    #: Of a concatenation along the last axis: the values that are concatenated.
    parts: tuple[ProbedValue, ...] = ()
    #: Lower bound, upper bound, and the value to which they were applied; None for others.
    clipping: tuple[float | None, float | None, ProbedValue] | None = None

    @cached_property
    def key(self) -> Key:
        """Hash key of the probed numbers, equal for values that differ by rounding only."""
        return numbers_key(self.numbers)

    @property
    def width(self) -> int:
        """Number of columns of the probed tensor."""
        return int(self.numbers.shape[1])

    @property
    def constant(self) -> float | None:
        """The number that all elements of the probed tensor equal; None if they differ."""
        return self.affine.constant if self.affine is not None and not self.affine.blocks else None

    @property
    def gate(self) -> Affine | None:
        """Affine map whose activation is this tensor, as in a gate; None if the tensor cannot be a gate."""
        affine = self.affine
        if affine is None or not affine.products:
            return None
        vectors = (*affine.vectors, *affine.peepholes.values())
        return affine if all(block.is_vector for block in vectors) else None

    @property
    def clip(self) -> float | None:
        """Bound b of a tensor that was clipped to ``[-b, b]``; None if it was not."""
        low, high, _ = self.clipping or (None, None, self)
        return high if low is not None and high is not None and -low == high else None

    def columns(self, start: int, stop: int) -> ProbedValue:
        """Return the probed value of the columns ``start:stop`` of a tensor's last axis."""
        affine = self.affine if self.affine is None else self.affine.columns(start, stop)
        clipped = self.clipping and (*self.clipping[:2], self.clipping[2].columns(start, stop))
        return ProbedValue(self.numbers[:, start:stop], affine, self.activation, (), clipped)


def numbers_key(numbers: Array) -> Key:
    """Return a hash key of an array of numbers; arrays that differ by rounding only have equal keys."""
    return blake2b((np.round(numbers, 6) + 0.0).tobytes(), digest_size=16).digest()


class Probe:
    """Values of tensors at random numbers, for one graph or for the body of one loop.

    ``leaves`` are ids of states before the step and of sequences read in it. Settings count as constants.
    """

    def __init__(self, leaves: Sequence[int], outer: Outer, settings: GraphSettings = NO_SETTINGS) -> None:
        self._leaves, self._outer, self._settings = frozenset(leaves), outer, settings
        self._values: dict[int, ProbedValue] = {}
        self._seeds: dict[Any, int] = {}
        #: Tensors computed so far, by their quantity.
        self.tensors: dict[Key, list[Any]] = defaultdict(list)
        #: One value per quantity.
        self.by_key: dict[Key, ProbedValue] = {}
        #: Gates, and affine maps that could be gates without an activation, by their sources.
        self.gates: dict[frozenset[Key], dict[Any, ProbedValue]] = defaultdict(dict)
        #: Quantities that are multiplied with a quantity somewhere.
        self.cofactors: dict[Key, dict[Key, ProbedValue]] = defaultdict(dict)
        #: Values clipped from a quantity.
        self.clips: dict[Key, list[ProbedValue]] = defaultdict(list)

    def value_of(self, tensor: Any) -> ProbedValue:
        """Return the value of a tensor, computed from random inputs, and how it depends on weights."""

        def recorded_plan(current_tensor: Any) -> TensorPlan:
            inputs, compute = self._evaluation_plan(current_tensor)
            return inputs, lambda: self._store_value(current_tensor, compute())

        with np.errstate(all="ignore"):
            value: ProbedValue = evaluate(tensor, self._values, recorded_plan)
        return value

    def find_value(self, numbers: Array) -> ProbedValue | None:
        """Return the probed value equal to ``numbers`` within rounding; None if no tensor has them."""
        return self.by_key.get(numbers_key(numbers))

    def _store_value(self, tensor: Any, value: ProbedValue) -> ProbedValue:
        """Store the probed value of a tensor in the lookup tables, and return it."""
        self.tensors[value.key].append(tensor)
        self.by_key.setdefault(value.key, value)
        if value.gate is not None:
            self.gates[frozenset(value.gate.products)].setdefault((value.key, value.activation), value)
        if value.clip is not None and value.clipping is not None:
            self.clips[value.clipping[2].key].append(value)
        if tensor.op.type == "Mul":
            for factor, cofactor in (tensor.op.inputs, reversed(tensor.op.inputs)):
                if id(factor) in self._values and id(cofactor) in self._values:
                    self.cofactors[self._values[id(factor)].key][self._values[id(cofactor)].key] = self._values[
                        id(cofactor)
                    ]
        return value

    def _random_numbers(self, name: Any, start: int, stop: int) -> Array:
        """Return columns ``start:stop`` of random test numbers (row, column); equal names give equal numbers."""
        seed = self._seeds.setdefault(name, len(self._seeds))
        numbers: Array = np.random.default_rng(seed).normal(size=(stop, _ROWS))[start:].T
        return numbers

    def _evaluation_plan(self, tensor: Any) -> TensorPlan:
        """Return how the probe computes a tensor: the tensors that it reads, and a function of their values."""
        outside_tensor, op = self._outer.get(id(tensor)), tensor.op
        if id(tensor) in self._leaves:
            return [], lambda: self._leaf_value(tensor, id(tensor))
        block = block_of(tensor, self._outer)
        if block is not None:
            return [], lambda: ProbedValue(
                self._random_numbers((block.variable, block.rows), *block.columns), Affine({}, (block,))
            )
        if outside_tensor is not None:
            return [outside_tensor], lambda: self._values[id(outside_tensor)]
        number = constant_of(tensor, self._outer)
        number = self._settings.value(tensor, self._outer) if number is None else number
        if number is not None:
            return (
                [],
                lambda: _constant_value(float(number)) if _is_number(tensor) else self._leaf_value(tensor, id(tensor)),
            )
        branch_value = self._settings.chosen_branch(tensor, self._outer)
        if branch_value is not None and is_filled_with(1, branch_value, self._outer):
            return [], lambda: _constant_value(1.0)
        if branch_value is not None:
            return [branch_value], lambda: self._values[id(branch_value)]
        conv_parts = convolution_parts(op)
        if conv_parts is not None:
            source, kernel, convolution = conv_parts
            product = self._weight_product
            return [
                source
            ], lambda: product(self._values[id(source)], kernel, convolution) or self._leaf_value(tensor, id(tensor))
        if not _is_computed(tensor):
            return [], lambda: self._leaf_value(tensor, self._slice_key(tensor))
        inputs = [op.inputs[0]] if op.type == "MatMul" else [t for t in op.inputs if _is_number(t)]
        return inputs, lambda: self._computed_value(tensor) or self._leaf_value(tensor, self._slice_key(tensor))

    def _leaf_value(self, tensor: Any, name: Any) -> ProbedValue:
        if tensor.op.type == "RandomUniform":  # the extremes, so that a rate near 0 or 1 shows
            return ProbedValue(np.tile([[1e-12], [1 - 1e-12]], (_ROWS // 2, 1)))
        by_sample = tensor.shape.rank in (None, 0) or (tensor.shape.rank == 1 and tensor.dtype.name == "bool")
        return ProbedValue(self._random_numbers(("leaf", name), 0, 1 if by_sample else width_of(tensor) or 1))

    def _slice_key(self, tensor: Any) -> Any:
        """Return a key that is equal for all tensors that slice the same part of one tensor, such as ``x[:, t]``."""
        op = tensor.op
        if op.type not in PARTS:
            return id(tensor)
        values = [constant_value(t) for t in op.inputs]
        slice_indices = tuple(id(t) if v is None else v.tobytes() for t, v in zip(op.inputs, values, strict=True))
        attrs = tuple(sorted((k, v.SerializeToString()) for k, v in op.node_def.attr.items() if not k.startswith("_")))
        return op.type, tensor.value_index, slice_indices, attrs

    def _computed_value(self, tensor: Any) -> ProbedValue | None:
        """Compute the probed value of an operation's output from those of its inputs; None for other operations."""
        op = tensor.op
        values: list[Any] = [self._values.get(id(t)) for t in op.inputs]
        first_value = values[0]
        if op.type in _TRANSPARENT:
            return first_value  # type: ignore[no-any-return]
        if op.type in _ACTIVATIONS:
            return _activated_value(_ACTIVATIONS[op.type], first_value)
        if op.type == "MatMul":
            is_transposed = op.get_attr("transpose_a") or op.get_attr("transpose_b")
            return None if is_transposed else self._weight_product(first_value, op.inputs[1])
        if op.type in _CUTS:
            columns, value = columns_of_slice(tensor), self._values[id(slice_input(tensor))]
            return None if columns is None else value.columns(*columns) if value.width > 1 else value
        if op.type == "ConcatV2":
            return self._concatenated_value(op, values[:-1])
        if len({value.width for value in values} - {1}) > 1:
            return None
        if op.type in _SELECTS:
            # A condition that is not computed has random weights; 1 and 0 choose a side.
            condition, if_true, if_false = (value.numbers for value in values)
            return (
                values[1]
                if np.all(condition == 1.0)
                else ProbedValue(condition * if_true + (1.0 - condition) * if_false)
            )
        if op.type == "GreaterEqual":
            return ProbedValue((first_value.numbers >= values[1].numbers).astype(float))
        if op.type == "Floor":
            return ProbedValue(np.floor(first_value.numbers))
        if op.type == "ClipByValue":
            return self._clipped_value(first_value, values[1].constant, values[2].constant)
        if op.type in _BOUNDS:
            bounds = [value.constant for value in values]
            value, bound = (first_value, bounds[1]) if bounds[0] is None else (values[1], bounds[0])
            return (
                self._clipped_value(value, bound, None)
                if op.type == "Maximum"
                else self._clipped_value(value, None, bound)
            )
        return _arithmetic(op.type, values)

    def _weight_product(
        self, value: ProbedValue, kernel: Any, convolution: Convolution | None = None
    ) -> ProbedValue | None:
        """Multiply a probed value by a weight block, or convolve it; for concatenated values sum their products."""
        block = block_of(kernel, self._outer)
        if block is None or block.rows is None or (convolution is None) != (not block.window):
            return None
        block, total, row_offset = replace(block, convolution=convolution), _constant_value(0.0), 0
        start = block.rows[0] if isinstance(block.rows, tuple) else 0
        for part in value.parts or (value,):
            part_block = (
                replace(block, rows=(start + row_offset, start + row_offset + part.width)) if value.parts else block
            )
            numbers = self._random_numbers(
                (part.key, part_block.variable, part_block.rows, convolution), *part_block.columns
            )
            self.by_key.setdefault(part.key, part)
            total = _add_values(total, ProbedValue(numbers, Affine({part.key: part_block})))
            row_offset += part.width
        return total

    def _clipped_value(self, value: ProbedValue, low: float | None, high: float | None) -> ProbedValue | None:
        """Clip a probed value; a lower and an upper bound become one clip, and a clipped affine map a hard sigmoid."""
        if low is None and high is None:
            return None
        if value.clipping is not None and (value.clipping[0] is None) != (low is None):
            inner_low, inner_high, value = value.clipping
            low, high = (inner_low if low is None else low), (inner_high if high is None else high)
        for name, slope in _HARD_SIGMOIDS.items() if (low, high) == (0.0, 1.0) else ():
            numbers = (value.numbers - 0.5) / slope  # of the tensor behind the line slope * z + 0.5, if it is one
            for base in self.by_key.values():
                if base.numbers.shape == numbers.shape and np.allclose(base.numbers, numbers, 1e-5, 1e-6):
                    return _activated_value(name, base)
        shift = sum(bound * weight for bound, weight in ((low, 0.7), (high, 1.3)) if bound is not None)
        return ProbedValue(np.sin(1.7 * value.numbers + shift), clipping=(low, high, value))

    def _concatenated_value(self, op: Any, values: list[ProbedValue]) -> ProbedValue | None:
        axis, rank = constant_of(op.inputs[-1], self._outer), op.outputs[0].shape.rank
        if axis is None or rank is None or int(axis) % rank != rank - 1:
            return None
        widths = [width_of(t) for t in op.inputs[:-1]]
        if None in widths:
            return None
        parts = [
            ProbedValue(np.broadcast_to(value.numbers, (_ROWS, width or 0)), value.affine, value.activation)
            for value, width in zip(values, widths, strict=True)
        ]
        return ProbedValue(np.concatenate([part.numbers for part in parts], axis=1), parts=tuple(parts))


def _is_number(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.name == "bool")


def _is_computed(tensor: Any) -> bool:
    """Return whether the value of a tensor is computed from others, row by row."""
    if tensor.op.type not in COMPUTED or not _is_number(tensor):
        return False
    if tensor.op.type == "LeakyRelu":
        return bool(abs(tensor.op.get_attr("alpha") - 0.2) < 1e-7)
    if tensor.op.type == "GreaterEqual":
        return bool(tensor.op.inputs[0].dtype.is_floating)
    if tensor.shape.rank in (None, 0, 1, 2):
        return True
    # Of images, each pixel must be computed from the same pixel of the inputs, and from vectors.
    images = [t for t in tensor.op.inputs if _is_number(t) and t.shape.rank not in (0, 1)]
    has_equal_shapes = all(t.shape.rank == tensor.shape.rank and t.shape[1:-1] == tensor.shape[1:-1] for t in images)
    return bool(tensor.shape.rank <= 5 and has_equal_shapes)


def _constant_value(number: float) -> ProbedValue:
    return ProbedValue(np.full((_ROWS, 1), number), Affine({}, constant=number))


def _linear_map(value: ProbedValue) -> Affine | None:
    return value.affine if value.activation == "linear" else None


def _add_values(left: ProbedValue, right: ProbedValue) -> ProbedValue:
    maps = _linear_map(left), _linear_map(right)
    affine = None if maps[0] is None or maps[1] is None else maps[0].add(maps[1])
    return ProbedValue(left.numbers + right.numbers, affine)


def _scale_value(value: ProbedValue, number: float) -> ProbedValue:
    if value.constant is not None:
        return _constant_value(value.constant * number)
    return value if number == 1.0 else ProbedValue(value.numbers * number)


def _multiply_values(left: ProbedValue, right: ProbedValue) -> ProbedValue:
    """Multiply two probed values element by element; the product with a vector of weights is a peephole."""
    for value, scale in ((left, right), (right, left)):
        if scale.constant is not None:
            return _scale_value(value, scale.constant)
        if np.all(scale.numbers == 1.0):
            return value
    affine = None
    for value, vector in ((left, right), (right, left)):
        weights = _linear_map(vector)
        if weights is not None and len(weights.vectors) == len(weights.blocks) == 1 and not weights.constant:
            affine = Affine({}, (), {value.key: weights.vectors[0]})
    return ProbedValue(left.numbers * right.numbers, affine)


def _arithmetic(kind: str, values: Sequence[ProbedValue]) -> ProbedValue | None:
    if kind in _ADDS:
        return reduce(_add_values, values)
    if kind == "Sub":
        return _add_values(values[0], _scale_value(values[1], -1.0))
    if kind == "Neg":
        return _scale_value(values[0], -1.0)
    if kind == "Mul":
        return _multiply_values(*values)
    return _scale_value(values[0], 1 / values[1].constant) if values[1].constant else None


def _activated_value(name: str, value: ProbedValue) -> ProbedValue:
    return ProbedValue(apply_activation(name, value.numbers), _linear_map(value), name)
