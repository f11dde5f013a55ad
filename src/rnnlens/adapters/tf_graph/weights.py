"""Weights of a graph, by layer, as blocks of variables: listed, cut out of gradients, and perturbed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...recurrence.cells import Cell
from ...typing import Array
from ..protocol import LayerWeights, Port, WeightLocation
from .blocks import NO_LOOP, dtype_of, is_variable, reached, variable_of
from .graph_copy import cone
from .open_net import PERTURBATIONS, OpenNet, open_net
from .public import Net
from .recurrences import Block, Loop

#: Names of the running statistics of batch normalisation.
_STATISTICS = ("moving_mean", "moving_variance", "renorm_mean", "renorm_stddev")
#: Name of the layer of variables that are in no scope.
_NO_SCOPE = "variables"
_LOOKUPS = ("Gather", "GatherV2", "ResourceGather", "SparseMatMul")
_PASSING = ("Identity", "ReadVariableOp", "Enter")


@dataclass
class LayerVariables:
    """Weights of one layer as blocks of variables, its loops if it is recurrent, and its output tensor per call."""

    weights: dict[str, tuple[Block, ...]] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)
    calls: tuple[Any, ...] = ()

    def pieces(self, key: str, direction: str | None) -> tuple[Block, ...]:
        """Return the blocks of a weight of the layer or of one of its directions; empty if there is none."""
        full = key if direction is None or "/" in key else f"{direction}/{key}"
        return self.weights.get(full) or self.weights.get(key, ())

    @property
    def output(self) -> Any:
        """Output tensor of the layer; None unless it has exactly one call with one output."""
        return self.calls[0] if len(self.calls) == 1 else None


def layers_of(found: OpenNet) -> dict[str, LayerVariables]:
    """Return all layers with weights that the outputs or the loss depend on, in the order of the graph."""
    return found.copy.once("layers", lambda: _layers(found))


def variables_used(found: OpenNet) -> frozenset[str]:
    """Return the names of the operations of all variables that the outputs or the loss depend on."""
    return found.copy.once("used", lambda: frozenset(op.name for op in _operations(found) if is_variable(op)))


def _operations(found: OpenNet) -> set[Any]:
    ends = [found.copy.tensor(tensor.name) for tensor in found.net.ends]
    taps = [tensor for loop in found.loops for boundary in (*loop.final, loop.input) for tensor in boundary.tensors]
    return set(cone([*ends, *taps]))


def _layers(found: OpenNet) -> dict[str, LayerVariables]:
    ends = [found.copy.tensor(tensor.name) for tensor in found.net.ends]
    operations = _operations(found)
    variables = [op for op in found.copy.graph.get_operations() if op in operations and is_variable(op)]
    owners = {name: loop.layer for loop in found.loops for name in loop.cell.variables}
    of_keras = {} if found.net.keras is None else dict(found.net.keras.owners)
    layers: dict[str, LayerVariables] = {}
    for variable in variables:
        name = owners.get(variable.name)
        folder, _, last = variable.name.rpartition("/")
        scope, key = (name, "") if name is not None else of_keras.get(variable.name, (folder or _NO_SCOPE, last))
        if scope not in layers:
            layers[scope] = _recurrent(found.first_call(scope))
        if name is None:
            layers[scope].weights[key] = (Block(variable.name),)
    for loop in found.loops:  # loops without variables, or with those of another layer
        layers.setdefault(loop.layer, _recurrent(found.first_call(loop.layer)))
    made = {} if found.net.keras is None else dict(found.net.keras.outputs)
    for scope, tensors in made.items():  # layers without weights have an output all the same
        layers.setdefault(scope, LayerVariables()).calls = tuple(map(found.copy.tensor, tensors))
    for scope, layer in layers.items():
        if not layer.loops and found.net.keras is None:
            output = _output(scope, operations, ends)
            layer.calls = () if output is None else (output,)
    return layers


def _recurrent(loops: Sequence[Loop]) -> LayerVariables:
    """Return the weights of a recurrent layer; those of two directions with ``forward/`` and ``backward/`` in front."""
    lead = {loop.direction: f"{loop.direction}/" if len(loops) > 1 else "" for loop in loops}
    weights = {lead[loop.direction] + key: pieces for loop in loops for key, pieces in weights_of(loop).items()}
    return LayerVariables(weights, list(loops))


def weights_of(loop: Loop) -> Mapping[str, tuple[Block, ...]]:
    """Return the weights of one cell by name: ``gates.kernel`` for the variable ``rnn/my_cell/gates/kernel``."""
    if loop.cell.body is None:
        return loop.cell.weights
    found = {}
    for variable in loop.cell.body.variables:
        inner = variable.removeprefix(f"{loop.scope}/")
        inner = variable.removeprefix(f"{loop.name}/") if inner == variable else inner
        found[inner.replace("/", ".")] = (Block(variable),)
    return found


def _held(pieces: Sequence[Block]) -> list[str]:
    return [piece.variable for piece in pieces]


def _output(scope: str, operations: set[Any], ends: Sequence[Any]) -> Any:
    """Return the only floating-point tensor of a scope that other scopes read; None if there are several or none."""
    last = {tensor.ref() for tensor in ends}
    leaving = []
    for operation in operations:
        if not operation.name.startswith(f"{scope}/") or is_variable(operation):
            continue
        for tensor in operation.outputs:
            readers = [op for op in tensor.consumers() if op in operations]
            outside = [op for op in readers if not op.name.startswith((f"{scope}/", "gradients"))]
            floats = tensor.dtype.base_dtype.is_floating and variable_of(tensor, NO_LOOP) is None
            if floats and (tensor.ref() in last or any(op.type not in ("Shape", "Size") for op in outside)):
                leaving.append(tensor)
    return leaving[0] if len(leaving) == 1 else None


def block(pieces: Sequence[Block], values: Mapping[str, Array], *, added: bool = False) -> Array:
    """Assemble a weight, or its gradient, from blocks of variables; ``added`` includes what the graph adds to them."""
    parts = []
    for piece in pieces:
        part = piece.of(np.asarray(values[piece.variable]))
        parts.append(part + np.asarray(piece.plus, part.dtype) if added and piece.plus else part)
    return np.concatenate(parts, axis=-1) if len(parts) > 1 else np.array(parts[0])


def known_cell(loop: Loop, values: Mapping[str, Array]) -> Cell:
    """Create the cell of a loop with known equations, with weights taken from the variables' ``values``."""
    arrays = {key: block(pieces, values, added=True) for key, pieces in loop.cell.weights.items()}
    assert loop.cell.cell is not None
    return loop.cell.cell(**arrays, **loop.cell.options)


def listed(found: OpenNet) -> dict[str, LayerWeights]:
    """Return the values and roles of all weights by layer; see :meth:`Adapter.weights`."""
    layers = layers_of(found)
    graph = found.copy.graph
    trainable = {variable.op.name for variable in found.net.graph.get_collection("trainable_variables")}
    names = dict.fromkeys(n for layer in layers.values() for pieces in layer.weights.values() for n in _held(pieces))
    values = found.read(names)
    floats = {name for name in names if dtype_of(graph.get_operation_by_name(name)).is_floating}
    made = {}
    for scope, layer in layers.items():
        present = {key: pieces for key, pieces in layer.weights.items() if floats.issuperset(_held(pieces))}
        if not present and not layer.loops:
            continue  # a layer without weights
        known = [loop for loop in layer.loops if loop.cell.cell is not None]
        alike = {(loop.cell.cell, loop.cell.units, frozenset(loop.cell.weights)) for loop in known}
        is_known = len(known) == len(layer.loops) and len(alike) == 1
        made[scope] = LayerWeights(
            values={key: block(pieces, values) for key, pieces in present.items()},
            trainable={key: trainable.issuperset(_held(pieces)) for key, pieces in present.items()},
            cells={loop.direction: known_cell(loop, values) for loop in known if is_known},
            statistics=frozenset(key for key in present if key in _STATISTICS),
            tables=frozenset(key for key, pieces in present.items() if is_table(graph, pieces)),
        )
    return made


def is_table(graph: Any, pieces: Sequence[Block]) -> bool:
    """Return whether the rows of a variable are looked up by integers, as in an embedding."""

    def passed_on(tensor: Any) -> list[Any]:
        return [same for reader in tensor.consumers() if reader.type in _PASSING for same in reader.outputs]

    tensors = reached([graph.get_operation_by_name(pieces[0].variable).outputs[0]], passed_on)
    return any(op.type in _LOOKUPS and op.inputs[0] is tensor for tensor in tensors for op in tensor.consumers())


def name_of(pieces: Sequence[Block]) -> str:
    """Return the name of a weight in the framework: that of its variable, or of its blocks of variables."""
    if len(pieces) == 1 and pieces[0].is_whole:
        return pieces[0].variable
    blocks = [f"{p.variable}[{_window(p.rows)}{_window(p.columns)}]".replace(",]", "]") for p in pieces]
    return "+".join(blocks)


def all_weights(found: OpenNet) -> dict[str, tuple[Block, ...]]:
    """Return the weights of all layers by their names in the framework."""
    return {name_of(p): p for layer in layers_of(found).values() for p in layer.weights.values()}


def _window(part: tuple[int, Any] | int | None) -> str:
    if part is None:
        return ""
    return f"{part}," if isinstance(part, int) else f"{part[0]}:{part[1]},"


def place_of(found: OpenNet, layer: str, direction: str | None, key: str) -> WeightLocation | None:
    """Return where a layer's weight is among the variables, as in :meth:`Adapter.place`; None if there is none."""
    layers = layers_of(found)
    pieces = layers[layer].pieces(key, direction) if layer in layers else ()
    if not pieces:
        return None
    name = name_of(pieces)
    users = [n for n, other in layers.items() for p in other.weights.values() if name_of(p) == name]
    return WeightLocation(name, lambda gradient: gradient, tied=len(users) > 1)


@contextmanager
def perturbed_port(net: Net, port: Port, size: float) -> Iterator[bool]:
    """Perturb the variables of a weight while active, as :meth:`Adapter.perturbed_port`; yield False for others."""
    found = open_net(net)
    layer = layers_of(found).get(str(port.layer)) if port.kind == "weight" else None
    pieces = () if layer is None else layer.weights.get(port.key, ())
    names = list(dict.fromkeys(piece.variable for piece in pieces))
    if not names:
        yield False
        return
    moves = {}
    for name, value in found.read(names).items():
        spread = float(np.sqrt(np.mean(np.square(value, dtype=np.float64)))) or 1.0
        pattern = np.random.default_rng(0).normal(size=value.shape)
        moves[net.graph, name] = (size * spread * pattern).astype(value.dtype)
    token = PERTURBATIONS.set({**PERTURBATIONS.get(), **moves})
    try:
        yield True
    finally:
        PERTURBATIONS.reset(token)
