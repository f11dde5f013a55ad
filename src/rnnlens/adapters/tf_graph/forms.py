"""Tensors as sums of products: two graphs that compute the same with different operations get the same form.

``u * h + (1 - u) * n``, written with any operation, order of arguments or split of a product, is the form
``h u + n - n u`` over *atoms*: states, inputs, matrix products, activations of forms, blocks of variables. A cell is
recognised by comparing forms (:mod:`.cells`), so names of operations do not matter.

Forms are interned: equal forms are one object, so that they are compared by identity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorflow.python.framework.tensor_util import constant_value

from .blocks import Source, behind_identities, block_of, constant_of, window_of
from .sequences import NO_SETTINGS, GraphSettings, is_filled_with

#: Factor of the products of a form. The first entry is its kind; see :class:`Forms`.
Atom = tuple[Any, ...]

_TRANSPARENT = frozenset({"Identity", "EnsureShape", "PlaceholderWithDefault", "PreventGradient", "CheckNumerics"})
_ADD = frozenset({"Add", "AddV2", "BiasAdd", "BiasAddV1"})
#: Operations that take a part of a tensor, or change its shape.
_PARTS = frozenset({"StridedSlice", "Slice", "GatherV2", "Gather", "Transpose", "Reshape", "ExpandDims", "Squeeze"})
_SELECT = frozenset({"Select", "SelectV2"})
#: TensorFlow's operation -> name of the same activation in rnnlens.
_ACTIVATIONS = {
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Relu": "relu",
    "Relu6": "relu6",
    "Elu": "elu",
    "Selu": "selu",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "Exp": "exponential",
}
_ELEMENTWISE = (
    _TRANSPARENT | _ADD | {"AddN", "Mul", "Sub", "Neg", "RealDiv", "Maximum", "Minimum", "Floor"} | set(_ACTIVATIONS)
)
#: Operations of which known cells are built, including those that read their variables.
_IN_CELLS = (
    (_ELEMENTWISE - {"Floor"})
    | _PARTS
    | _SELECT
    | frozenset(
        {
            "MatMul",
            "Split",
            "SplitV",
            "ConcatV2",
            "ClipByValue",
            "LeakyRelu",
            "Const",
            "Enter",
            "RefEnter",
            "ReadVariableOp",
        }
        | {"VariableV2", "Variable", "VarHandleOp", "Switch", "Placeholder", "GreaterEqual", "TensorArrayReadV3"}
        | {"TensorListGetItem", "Pack", "Less", "LogicalNot", "Cast"}
    )
)


def understood(operation: Any) -> bool:
    """Return whether known cells are built of operations of this type."""
    return operation.type in _IN_CELLS


@dataclass(frozen=True, eq=False)
class TensorForm:
    """A sum of products of atoms: ``terms`` maps each product, a sorted tuple of atoms, to its factor."""

    terms: Mapping[tuple[Atom, ...], float]
    number: int

    def __repr__(self) -> str:
        return f"<{self.number}: {' + '.join(f'{c:g} {list(t)}' for t, c in self.terms.items())}>"

    @property
    def atom(self) -> Atom | None:
        """The atom that the form consists of; None for any other form."""
        if len(self.terms) == 1:
            ((product, factor),) = self.terms.items()
            if factor == 1.0 and len(product) == 1:
                return product[0]
        return None

    @property
    def constant(self) -> float | None:
        """Number that a form without atoms equals; None for any other form."""
        if not self.terms:
            return 0.0
        return self.terms.get(()) if len(self.terms) == 1 else None


@dataclass(frozen=True)
class Columns:
    """Concatenation of forms along the last axis, each with its width."""

    parts: tuple[tuple[TensorForm, int], ...]


Value = TensorForm | Columns


class Forms:
    """Conversion of tensors to forms, for one graph or for the body of one loop.

    Atoms are ``("leaf", name, start, stop)``, columns of a tensor that is not expanded; ``("matmul", form, block)``;
    ``("block", block)``, a vector of a variable; ``("act", name, form)``; ``("clip", low, high, form)``;
    ``("where", condition, form, form)``; ``("sum", form)``, a sum that is a factor of a product.

    Parameters
    ----------
    leaves
        Names of tensors that are not expanded, by id of the tensor.
    outer
        Loop invariants: tensors of the body and the tensors outside that are passed in as them.
    settings
        Rates and switches outside of the loop, whose present values are used as constants.
    """

    def __init__(self, leaves: Mapping[int, Any], outer: Source, settings: GraphSettings = NO_SETTINGS) -> None:
        self._leaves, self._outer, self._settings = leaves, outer, settings
        self._interned: dict[frozenset[tuple[tuple[Atom, ...], float]], TensorForm] = {}
        self._found: dict[int, Value] = {}
        self._leaves_of: dict[TensorForm, frozenset[Any]] = {}
        self._alike: dict[Any, int] = {}
        self._by_form: dict[TensorForm, list[Any]] = defaultdict(list)
        self.tensors: dict[Any, Any] = {}

    def of(self, tensor: Any) -> Value:
        """Return the form of a tensor, or ``Columns`` for a concatenation.

        The graph is traversed without recursion, so its depth is not limited.
        """
        waiting = [tensor]
        while waiting:
            current = waiting[-1]
            if id(current) in self._found:
                waiting.pop()
                continue
            needed = [t for t in self._read(current) if id(t) not in self._found]
            if needed:
                waiting.extend(needed)
                continue
            made = self._found[id(current)] = self._made(current)
            self.tensors[id(current)] = current
            self._by_form[self._alone(made)].append(current)
            waiting.pop()
        return self._found[id(tensor)]

    def form(self, tensor: Any) -> TensorForm:
        """Return the form of a tensor; a concatenation becomes a single leaf."""
        return self._alone(self.of(tensor))

    def _alone(self, value: Value) -> TensorForm:
        return value if isinstance(value, TensorForm) else self.leaf(("columns", value.parts))

    def tensors_of(self, form: TensorForm) -> list[Any]:
        """Return the tensors, of those converted so far, that have the given form."""
        return self._by_form.get(form, [])

    # Making forms.

    def make(self, terms: Mapping[tuple[Atom, ...], float]) -> TensorForm:
        """Return the one form object with the given terms."""
        kept = {product: factor for product, factor in terms.items() if factor != 0.0}
        key = frozenset(kept.items())
        if key not in self._interned:
            self._interned[key] = TensorForm(kept, len(self._interned))
        return self._interned[key]

    def leaf(self, name: Any, start: int | None = None, stop: int | None = None) -> TensorForm:
        """Return the form of some columns of a tensor that is not expanded further."""
        return self.single(("leaf", name, start, stop))

    def single(self, atom: Atom) -> TensorForm:
        """Return the form that consists of one atom."""
        return self.make({(atom,): 1.0})

    def scalar(self, value: float) -> TensorForm:
        """Return the form of a number."""
        return self.make({(): value})

    def add(self, a: TensorForm, b: TensorForm, sign: float = 1.0) -> TensorForm:
        """Return the form ``a + sign * b``."""
        terms = dict(a.terms)
        for product, factor in b.terms.items():
            terms[product] = terms.get(product, 0.0) + sign * factor
        return self.make(terms)

    def multiply(self, a: TensorForm, b: TensorForm) -> TensorForm:
        """Return the product of two forms.

        A sum of a number and one gate, such as 1 - u, is multiplied out; other sums stay one factor.
        """
        if a.constant == 1.0 or b.constant == 1.0:
            return b if a.constant == 1.0 else a
        return self._times(self._factor(a), self._factor(b))

    def activated(self, name: str, form: TensorForm) -> TensorForm:
        """Return the form of an activation applied to a form."""
        return self.single(("act", name, form))

    def clipped(self, low: float | None, high: float | None, form: TensorForm) -> TensorForm:
        """Return a form clipped to bounds.

        Two one-sided bounds become one clip; 0.2 z + 0.5 clipped to [0, 1] becomes a hard sigmoid.
        """
        atom = form.atom
        if atom is not None and atom[0] == "clip" and (atom[1] is None) != (low is None):
            low, high = (atom[1] if low is None else low), (atom[2] if high is None else high)
            form = atom[3]
        if (low, high) == (0.0, 1.0):
            for slope, name in ((0.2, "hard_sigmoid_keras2"), (1 / 6, "hard_sigmoid")):
                if abs(form.terms.get((), 0.0) - 0.5) < 1e-9:
                    inner = self.add(form, self.scalar(form.terms[()]), -1.0)
                    scaled = self.scaled(inner, 1 / slope)
                    if scaled is not None:
                        return self.activated(name, scaled)
        return self.single(("clip", low, high, form))

    def scaled(self, form: TensorForm, factor: float) -> TensorForm | None:
        """Return a form times a number if the result is one sum, or has only whole factors; None otherwise."""
        found = {product: c * factor for product, c in form.terms.items()}
        if len(found) == 1:
            ((product, c),) = found.items()
            if len(product) == 1 and product[0][0] == "sum" and abs(c - 1) < 1e-6:
                inner: TensorForm = product[0][1]
                return inner
        whole = {product: float(round(c)) for product, c in found.items() if abs(c - round(c)) < 1e-6}
        return self.make(whole) if len(whole) == len(found) else None

    def _factor(self, form: TensorForm) -> TensorForm:
        plain = len(form.terms) <= 1 or (len(form.terms) == 2 and () in form.terms and self._is_gate(form))
        return form if plain else self.single(("sum", form))

    @staticmethod
    def _is_gate(form: TensorForm) -> bool:
        return all(len(product) <= 1 and all(a[0] in ("act", "leaf") for a in product) for product in form.terms)

    def _times(self, a: TensorForm, b: TensorForm) -> TensorForm:
        terms: dict[tuple[Atom, ...], float] = {}
        for p, x in a.terms.items():
            for q, y in b.terms.items():
                product = tuple(sorted((*p, *q), key=self.order))
                terms[product] = terms.get(product, 0.0) + x * y
        return self.make(terms)

    def order(self, atom: Atom) -> int:
        """Return the sort key of an atom within a product."""
        return self.single(atom).number

    def mentioned(self, value: Value) -> frozenset[Any]:
        """Return the names of all leaves inside a value, at any depth."""
        parts = [value] if isinstance(value, TensorForm) else [form for form, _ in value.parts]
        return frozenset().union(*(self._mentioned(form) for form in parts))

    def _mentioned(self, form: TensorForm) -> frozenset[Any]:
        if form not in self._leaves_of:
            found: set[Any] = set()
            for atom in {atom for product in form.terms for atom in product}:
                if atom[0] == "leaf":
                    found |= {atom[1]} if atom[1][0] != "columns" else self.mentioned(Columns(atom[1][1]))
                for part in atom[1:]:
                    if isinstance(part, TensorForm):
                        found |= self._mentioned(part)
            self._leaves_of[form] = frozenset(found)
        return self._leaves_of[form]

    # Columns.

    def columns(self, value: Value, start: int, stop: int) -> Value:
        """Return the columns ``start:stop`` of a value."""
        if isinstance(value, TensorForm):
            return self._restricted(value, start, stop)
        parts: list[tuple[TensorForm, int]] = []
        at = 0
        for form, width in value.parts:
            low, high = max(start, at), min(stop, at + width)
            if low < high:
                whole = (low, high) == (at, at + width)
                parts.append((form if whole else self._restricted(form, low - at, high - at), high - low))
            at += width
        return parts[0][0] if len(parts) == 1 else Columns(tuple(parts))

    def _restricted(self, form: TensorForm, start: int, stop: int) -> TensorForm:
        terms: dict[tuple[Atom, ...], float] = {}
        for product, factor in form.terms.items():
            cut = tuple(sorted((self._cut(atom, start, stop) for atom in product), key=self.order))
            terms[cut] = terms.get(cut, 0.0) + factor
        return self.make(terms)

    def _cut(self, atom: Atom, start: int, stop: int) -> Atom:
        kind = atom[0]
        if kind == "leaf":
            begin = atom[2] or 0
            return (*atom[:2], begin + start, begin + stop)
        if kind == "matmul":
            return (*atom[:2], atom[2].columns_of(start, stop))
        if kind == "block":
            return ("block", atom[1].columns_of(start, stop))
        if kind == "where":
            return (*atom[:2], *(self._restricted(form, start, stop) for form in atom[2:]))
        return (*atom[:-1], self._restricted(atom[-1], start, stop))

    def aligned(self, *values: Value) -> list[tuple[tuple[TensorForm, ...], int | None]]:
        """Cut all values at the same columns; return the pieces with their widths.

        If no value is a concatenation, there is one piece of width None.
        """
        joined = next((v for v in values if isinstance(v, Columns)), None)
        if joined is None:
            return [(tuple(v for v in values if isinstance(v, TensorForm)), None)]
        edges = sorted({edge for v in values if isinstance(v, Columns) for edge in _edges(v)})
        pieces: list[tuple[tuple[TensorForm, ...], int | None]] = []
        for start, stop in zip([0, *edges], edges, strict=False):
            cut = tuple(self.columns(v, start, stop) for v in values)
            pieces.append((tuple(c for c in cut if isinstance(c, TensorForm)), stop - start))
        return pieces

    def _elementwise(self, function: Callable[..., TensorForm], *values: Value) -> Value:
        made = [(function(*forms), width) for forms, width in self.aligned(*values)]
        return made[0][0] if made[0][1] is None else Columns(tuple((f, w or 0) for f, w in made))

    # Forms of operations.

    def _read(self, tensor: Any) -> list[Any]:
        """Return the tensors whose forms are needed to make this tensor's form."""
        if id(tensor) in self._leaves:
            return []
        outside = self._outer.get(tensor)
        if outside is not None:
            return [outside] if not self._is_weight(tensor) else []
        if self._is_weight(tensor) or self._number(tensor) is not None:
            return []
        op, instead = tensor.op, self._settings.chosen_branch(tensor, self._outer)
        if instead is not None:
            return [instead]
        if op.type == "MatMul":
            return [op.inputs[0]]
        if op.type in _SELECT:
            return [*op.inputs[1:], *(t for t in op.inputs[0].op.inputs if t.dtype.is_floating)]
        if op.type in ("Split", "ConcatV2", "SplitV", "StridedSlice", "LeakyRelu", "ClipByValue", "Slice"):
            return [t for t in op.inputs if t.dtype.is_floating]
        return list(op.inputs) if op.type in _ELEMENTWISE else []

    def _is_weight(self, tensor: Any) -> bool:
        return block_of(tensor, self._outer) is not None

    def _number(self, tensor: Any) -> Any:
        """Return the value of a constant, or the present value of a setting; None for other tensors."""
        number = constant_of(tensor, self._outer)
        return self._settings.value(tensor, self._outer) if number is None else number

    def _made(self, tensor: Any) -> Value:
        if id(tensor) in self._leaves:
            return self.leaf(self._leaves[id(tensor)])
        outside = self._outer.get(tensor)
        block = block_of(tensor, self._outer)
        if block is not None:
            return self.single(("block", block))
        if outside is not None:
            return self._found[id(outside)]
        number = self._number(tensor)
        if number is not None and tensor.dtype.is_floating:
            return self.scalar(float(number))
        instead = self._settings.chosen_branch(tensor, self._outer)
        if instead is not None:
            return self.scalar(1.0) if is_filled_with(1, instead, self._outer) else self._found[id(instead)]
        made, op = self._operation(tensor), tensor.op
        return self.leaf(("tensor", self._first_alike(tensor), op.type)) if made is None else made

    def _first_alike(self, tensor: Any) -> int:
        """Return the id of the first tensor that takes the same part of the same tensor.

        An example is ``x[:, t]``, which some cells slice once per gate.
        """
        op = tensor.op
        if op.type not in _PARTS:
            return id(tensor)
        values = [constant_value(t) for t in op.inputs]
        taken = tuple(id(t) if v is None else v.tobytes() for t, v in zip(op.inputs, values, strict=True))
        attrs = tuple(sorted((k, v.SerializeToString()) for k, v in op.node_def.attr.items() if not k.startswith("_")))
        return self._alike.setdefault((op.type, tensor.value_index, taken, attrs), id(tensor))

    def _operation(self, tensor: Any) -> Value | None:
        op = tensor.op
        if not tensor.dtype.is_floating:
            return None
        values = [self._found.get(id(t)) for t in op.inputs]
        if op.type in _TRANSPARENT:
            return values[0]
        if op.type in _ACTIVATIONS:
            return self._elementwise(lambda f: self.activated(_ACTIVATIONS[op.type], f), values[0])  # type: ignore[arg-type]
        if op.type == "LeakyRelu" and abs(op.get_attr("alpha") - 0.2) < 1e-7:
            return self._elementwise(lambda f: self.activated("leaky_relu", f), values[0])  # type: ignore[arg-type]
        if op.type == "MatMul":
            return self._matmul(op, values[0])
        if op.type in _SELECT:
            return self._where(op, values)
        if op.type in ("Split", "SplitV", "StridedSlice", "Slice"):
            return self._cut_of(tensor, values)
        if op.type == "ConcatV2":
            return self._joined(op, values)
        return self._arithmetic(op, values)

    def _arithmetic(self, op: Any, values: list[Any]) -> Value | None:
        if any(v is None for v in values):
            return None
        if op.type in _ADD:
            return self._elementwise(self.add, *values)
        if op.type == "AddN":
            total = values[0]
            for value in values[1:]:
                total = self._elementwise(self.add, total, value)
            return total  # type: ignore[no-any-return]
        if op.type == "Sub":
            return self._elementwise(lambda a, b: self.add(a, b, -1.0), *values)
        if op.type == "Neg":
            return self._elementwise(lambda a: self.multiply(self.scalar(-1.0), a), *values)
        if op.type == "Mul":
            return self._elementwise(self.multiply, *values)
        if op.type == "RealDiv" and isinstance(values[1], TensorForm) and values[1].constant:
            by = self.scalar(1 / values[1].constant)
            return self._elementwise(lambda a: self.multiply(by, a), values[0])
        if op.type in ("Maximum", "Minimum"):
            return self._bounded(op, values)
        if op.type == "Floor" and _is_uniform(values[0], start=1.0):
            return self.scalar(1.0)
        if op.type == "ClipByValue":
            low, high = (v.constant if isinstance(v, TensorForm) else None for v in values[1:])
            if low is not None and high is not None:
                return self._elementwise(lambda a: self.clipped(low, high, a), values[0])
        return None

    def _bounded(self, op: Any, values: list[Any]) -> Value | None:
        for value, bound in (values, values[::-1]):
            if isinstance(bound, TensorForm) and bound.constant is not None:
                limits = (bound.constant, None) if op.type == "Maximum" else (None, bound.constant)
                return self._elementwise(lambda a, at=limits: self.clipped(at[0], at[1], a), value)
        return None

    def _matmul(self, op: Any, value: Any) -> Value | None:
        if op.get_attr("transpose_a") or op.get_attr("transpose_b"):
            return None
        block = block_of(op.inputs[1], self._outer)
        if block is None or value is None or block.rows is None:
            return None
        if isinstance(value, TensorForm):
            return self.single(("matmul", value, block))
        total, at = self.scalar(0.0), 0
        for form, width in value.parts:
            total = self.add(total, self.single(("matmul", form, block.rows_of(at, at + width))))
            at += width
        return total

    def _where(self, op: Any, values: list[Any]) -> Value | None:
        if values[1] is None or values[2] is None:
            return None
        if self.holds(op.inputs[0]):
            return values[1]  # type: ignore[no-any-return]
        condition = id(op.inputs[0])
        self.tensors[condition] = op.inputs[0]
        return self._elementwise(lambda a, b: self.single(("where", condition, a, b)), values[1], values[2])

    def holds(self, condition: Any) -> bool:
        """Return whether a condition is always true, such as dropout's "uniform draw >= rate" at a rate of 0."""
        if condition.op.type != "GreaterEqual" or not condition.op.inputs[0].dtype.is_floating:
            return False
        drawn, rate = map(self.of, condition.op.inputs)
        return _is_uniform(drawn) and isinstance(rate, TensorForm) and rate.constant is not None and rate.constant <= 0

    def _cut_of(self, tensor: Any, values: list[Any]) -> Value | None:
        found = cut_of(tensor)
        value = values[1] if tensor.op.type == "Split" else values[0]
        return None if found is None or value is None else self.columns(value, *found)

    def _joined(self, op: Any, values: list[Any]) -> Value | None:
        axis, rank = constant_of(op.inputs[-1], self._outer), op.outputs[0].shape.rank
        if axis is None or rank is None or int(axis) % rank != rank - 1:
            return None
        parts: list[tuple[TensorForm, int]] = []
        multiplied = {reader.type for reader in op.outputs[0].consumers()} == {"MatMul"}
        for tensor, value in zip(op.inputs[:-1], values[:-1], strict=True):
            width = tensor.shape[-1]
            if width is None or value is None:
                return None
            # A concatenation in [x, h] @ W is the input x; in a state it is several states.
            input_of_cell = multiplied and behind_identities(tensor).op.type == "ConcatV2"
            whole = input_of_cell or isinstance(value, TensorForm)
            parts += [(self._alone(value), int(width))] if whole else list(value.parts)
        return Columns(tuple(parts))


def cut_of(tensor: Any) -> tuple[int, int] | None:
    """Return the columns (start, stop) that a split or slice takes along the last axis; None for another cut."""
    window = window_of(tensor)
    if window is None or any(w != (0, None) for w in window[:-1]):
        return None
    start, stop = window[-1]
    if stop is None:
        source = tensor.op.inputs[1] if tensor.op.type == "Split" else tensor.op.inputs[0]
        stop = source.shape[-1]
    return None if stop is None else (start, int(stop))


def _is_uniform(value: Any, start: float = 0.0) -> bool:
    """Return whether a form is a uniform random number in [start, start + 1)."""
    if not isinstance(value, TensorForm):
        return False
    terms = dict(value.terms)
    if terms.pop((), 0.0) != start or len(terms) != 1:
        return False
    ((product, factor),) = terms.items()
    atom = product[0]
    return factor == 1.0 and len(product) == 1 and atom[0] == "leaf" and atom[1][-1] == "RandomUniform"


def _edges(value: Columns) -> list[int]:
    return [int(edge) for edge in np.cumsum([width for _, width in value.parts])]
