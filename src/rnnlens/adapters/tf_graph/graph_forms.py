"""Forms of the operations of a graph: what a tensor computes, as a sum of products (:mod:`.forms`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tensorflow.python.framework.tensor_util import constant_value

from .blocks import Source, behind_identities, block_of, constant_of, window_of
from .forms import Columns, FormAlgebra, TensorForm, Value
from .sequences import NO_SETTINGS, GraphSettings, is_filled_with

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


class Forms(FormAlgebra):
    """Conversion of tensors to forms, for one graph or for the body of one loop.

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
        super().__init__()
        self._leaves, self._outer, self._settings = leaves, outer, settings
        self._found: dict[int, Value] = {}
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
            self._by_form[self.alone(made)].append(current)
            waiting.pop()
        return self._found[id(tensor)]

    def form(self, tensor: Any) -> TensorForm:
        """Return the form of a tensor; a concatenation becomes a single leaf."""
        return self.alone(self.of(tensor))

    def tensors_of(self, form: TensorForm) -> list[Any]:
        """Return the tensors, of those converted so far, that have the given form."""
        return self._by_form.get(form, [])

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
            return self.elementwise(lambda f: self.activated(_ACTIVATIONS[op.type], f), values[0])  # type: ignore[arg-type]
        if op.type == "LeakyRelu" and abs(op.get_attr("alpha") - 0.2) < 1e-7:
            return self.elementwise(lambda f: self.activated("leaky_relu", f), values[0])  # type: ignore[arg-type]
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
            return self.elementwise(self.add, *values)
        if op.type == "AddN":
            total = values[0]
            for value in values[1:]:
                total = self.elementwise(self.add, total, value)
            return total  # type: ignore[no-any-return]
        if op.type == "Sub":
            return self.elementwise(lambda a, b: self.add(a, b, -1.0), *values)
        if op.type == "Neg":
            return self.elementwise(lambda a: self.multiply(self.scalar(-1.0), a), *values)
        if op.type == "Mul":
            return self.elementwise(self.multiply, *values)
        if op.type == "RealDiv" and isinstance(values[1], TensorForm) and values[1].constant:
            by = self.scalar(1 / values[1].constant)
            return self.elementwise(lambda a: self.multiply(by, a), values[0])
        if op.type in ("Maximum", "Minimum"):
            return self._bounded(op, values)
        if op.type == "Floor" and _is_uniform(values[0], start=1.0):
            return self.scalar(1.0)
        if op.type == "ClipByValue":
            low, high = (v.constant if isinstance(v, TensorForm) else None for v in values[1:])
            if low is not None and high is not None:
                return self.elementwise(lambda a: self.clipped(low, high, a), values[0])
        return None

    def _bounded(self, op: Any, values: list[Any]) -> Value | None:
        for value, bound in (values, values[::-1]):
            if isinstance(bound, TensorForm) and bound.constant is not None:
                limits = (bound.constant, None) if op.type == "Maximum" else (None, bound.constant)
                return self.elementwise(lambda a, at=limits: self.clipped(at[0], at[1], a), value)
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
        return self.elementwise(lambda a, b: self.single(("where", condition, a, b)), values[1], values[2])

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
            parts += [(self.alone(value), int(width))] if whole else list(value.parts)
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
