"""Weights of a graph, by layer, as blocks of variables: listed, cut out of gradients, and perturbed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rnnlens.adapters.protocol import LayerWeights, Port, WeightLocation
from rnnlens.recurrence.cells import Cell
from rnnlens.typing import Array

from .blocks import NO_LOOP, dtype_of, is_variable, transitive_closure, variable_of
from .graph_copy import dependency_cone
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
    call_outputs: tuple[Any, ...] = ()

    def weight_blocks(self, key: str, direction: str | None) -> tuple[Block, ...]:
        """Return the blocks of a weight of the layer or of one of its directions; empty if there is none."""
        directed_key = key if direction is None or "/" in key else f"{direction}/{key}"
        return self.weights.get(directed_key) or self.weights.get(key, ())

    @property
    def output(self) -> Any:
        """Output tensor of the layer; None unless it has exactly one call with one output."""
        return self.call_outputs[0] if len(self.call_outputs) == 1 else None


def layers_of(opened: OpenNet) -> dict[str, LayerVariables]:
    """Return all layers with weights that the outputs or the loss depend on, in the order of the graph."""
    return opened.copy.build_once("layers", lambda: _build_layers(opened))


def variables_used(opened: OpenNet) -> frozenset[str]:
    """Return the names of the operations of all variables that the outputs or the loss depend on."""
    return opened.copy.build_once(
        "used", lambda: frozenset(op.name for op in _used_operations(opened) if is_variable(op))
    )


def _used_operations(opened: OpenNet) -> set[Any]:
    end_tensors = [opened.copy.tensor(tensor.name) for tensor in opened.net.ends]
    taps = [tensor for loop in opened.loops for boundary in (*loop.final, loop.input) for tensor in boundary.tensors]
    return set(dependency_cone([*end_tensors, *taps]))


def _build_layers(opened: OpenNet) -> dict[str, LayerVariables]:
    end_tensors = [opened.copy.tensor(tensor.name) for tensor in opened.net.ends]
    operations = _used_operations(opened)
    variables = [op for op in opened.copy.graph.get_operations() if op in operations and is_variable(op)]
    owners = {name: loop.layer for loop in opened.loops for name in loop.cell.variables}
    keras_owners = {} if opened.net.keras is None else dict(opened.net.keras.owners)
    layers: dict[str, LayerVariables] = {}
    for variable in variables:
        name = owners.get(variable.name)
        variable_scope, _, variable_key = variable.name.rpartition("/")
        scope, key = (
            (name, "")
            if name is not None
            else keras_owners.get(variable.name, (variable_scope or _NO_SCOPE, variable_key))
        )
        if scope not in layers:
            layers[scope] = _recurrent_variables(opened.first_call_loops(scope))
        if name is None:
            layers[scope].weights[key] = (Block(variable.name),)
    for loop in opened.loops:  # loops without variables, or with those of another layer
        layers.setdefault(loop.layer, _recurrent_variables(opened.first_call_loops(loop.layer)))
    keras_outputs = {} if opened.net.keras is None else dict(opened.net.keras.outputs)
    for scope, tensors in keras_outputs.items():  # layers without weights have an output all the same
        layers.setdefault(scope, LayerVariables()).call_outputs = tuple(map(opened.copy.tensor, tensors))
    for scope, layer in layers.items():
        if not layer.loops and opened.net.keras is None:
            output = _layer_output(scope, operations, end_tensors)
            layer.call_outputs = () if output is None else (output,)
    return layers


def _recurrent_variables(loops: Sequence[Loop]) -> LayerVariables:
    """Return the weights of a recurrent layer; those of two directions with ``forward/`` and ``backward/`` in front."""
    prefixes = {loop.direction: f"{loop.direction}/" if len(loops) > 1 else "" for loop in loops}
    weights = {prefixes[loop.direction] + key: blocks for loop in loops for key, blocks in weights_of(loop).items()}
    return LayerVariables(weights, list(loops))


def weights_of(loop: Loop) -> Mapping[str, tuple[Block, ...]]:
    """Return the weights of one cell by name: ``gates.kernel`` for the variable ``rnn/my_cell/gates/kernel``."""
    if loop.cell.body is None:
        return loop.cell.weights
    blocks_by_key = {}
    for variable in loop.cell.body.variables:
        short_name = variable.removeprefix(f"{loop.scope}/")
        short_name = variable.removeprefix(f"{loop.name}/") if short_name == variable else short_name
        blocks_by_key[short_name.replace("/", ".")] = (Block(variable),)
    return blocks_by_key


def _variable_names(blocks: Sequence[Block]) -> list[str]:
    return [block.variable for block in blocks]


def _layer_output(scope: str, operations: set[Any], end_tensors: Sequence[Any]) -> Any:
    """Return the only floating-point tensor of a scope that other scopes read; None if there are several or none."""
    end_refs = {tensor.ref() for tensor in end_tensors}
    leaving_tensors = []
    for operation in operations:
        if not operation.name.startswith(f"{scope}/") or is_variable(operation):
            continue
        for tensor in operation.outputs:
            readers = [op for op in tensor.consumers() if op in operations]
            outside_readers = [op for op in readers if not op.name.startswith((f"{scope}/", "gradients"))]
            is_float = tensor.dtype.base_dtype.is_floating and variable_of(tensor, NO_LOOP) is None
            if is_float and (
                tensor.ref() in end_refs or any(op.type not in ("Shape", "Size") for op in outside_readers)
            ):
                leaving_tensors.append(tensor)
    return leaving_tensors[0] if len(leaving_tensors) == 1 else None


def assemble_weight(blocks: Sequence[Block], values: Mapping[str, Array], *, with_constants: bool = False) -> Array:
    """Assemble a weight, or its gradient, from blocks of variables; ``with_constants`` adds the constants of blocks."""
    parts = []
    for block in blocks:
        part = block.select_from(np.asarray(values[block.variable]))
        parts.append(
            part + np.asarray(block.added_constant, part.dtype) if with_constants and block.added_constant else part
        )
    return np.concatenate(parts, axis=-1) if len(parts) > 1 else np.array(parts[0])


def known_cell(loop: Loop, values: Mapping[str, Array]) -> Cell:
    """Create the cell of a loop with known equations, with weights taken from the variables' ``values``."""
    arrays = {key: assemble_weight(blocks, values, with_constants=True) for key, blocks in loop.cell.weights.items()}
    assert loop.cell.cell is not None
    return loop.cell.cell(**arrays, **loop.cell.options)


def layer_weights(opened: OpenNet) -> dict[str, LayerWeights]:
    """Return the values and roles of all weights by layer; see :meth:`Adapter.weights`."""
    layers = layers_of(opened)
    graph = opened.copy.graph
    trainable = {variable.op.name for variable in opened.net.graph.get_collection("trainable_variables")}
    names = dict.fromkeys(
        n for layer in layers.values() for blocks in layer.weights.values() for n in _variable_names(blocks)
    )
    values = opened.read_variables(names)
    floats = {name for name in names if dtype_of(graph.get_operation_by_name(name)).is_floating}
    weights_by_layer = {}
    for scope, layer in layers.items():
        float_weights = {
            key: blocks for key, blocks in layer.weights.items() if floats.issuperset(_variable_names(blocks))
        }
        if not float_weights and not layer.loops:
            continue  # a layer without weights
        known_loops = [loop for loop in layer.loops if loop.cell.cell is not None]
        cell_kinds = {(loop.cell.cell, loop.cell.units, frozenset(loop.cell.weights)) for loop in known_loops}
        is_known = len(known_loops) == len(layer.loops) and len(cell_kinds) == 1
        weights_by_layer[scope] = LayerWeights(
            values={key: assemble_weight(blocks, values) for key, blocks in float_weights.items()},
            trainable={key: trainable.issuperset(_variable_names(blocks)) for key, blocks in float_weights.items()},
            cells={loop.direction: known_cell(loop, values) for loop in known_loops if is_known},
            statistics=frozenset(key for key in float_weights if key in _STATISTICS),
            tables=frozenset(key for key, blocks in float_weights.items() if is_table(graph, blocks)),
        )
    return weights_by_layer


def is_table(graph: Any, blocks: Sequence[Block]) -> bool:
    """Return whether the rows of a variable are looked up by integers, as in an embedding."""

    def passed_tensors(tensor: Any) -> list[Any]:
        return [output for reader in tensor.consumers() if reader.type in _PASSING for output in reader.outputs]

    tensors = transitive_closure([graph.get_operation_by_name(blocks[0].variable).outputs[0]], passed_tensors)
    return any(op.type in _LOOKUPS and op.inputs[0] is tensor for tensor in tensors for op in tensor.consumers())


def weight_name(blocks: Sequence[Block]) -> str:
    """Return the name of a weight in the framework: that of its variable, or of its blocks of variables."""
    if len(blocks) == 1 and blocks[0].is_whole:
        return blocks[0].variable
    block_texts = [
        f"{block.variable}[{_range_text(block.rows)}{_range_text(block.columns)}]".replace(",]", "]")
        for block in blocks
    ]
    return "+".join(block_texts)


def all_weights(opened: OpenNet) -> dict[str, tuple[Block, ...]]:
    """Return the weights of all layers by their names in the framework."""
    return {weight_name(blocks): blocks for layer in layers_of(opened).values() for blocks in layer.weights.values()}


def _range_text(index_range: tuple[int, Any] | int | None) -> str:
    if index_range is None:
        return ""
    return f"{index_range}," if isinstance(index_range, int) else f"{index_range[0]}:{index_range[1]},"


def weight_location(opened: OpenNet, layer: str, direction: str | None, key: str) -> WeightLocation | None:
    """Return where a layer's weight is among the variables, or None: see :meth:`Adapter.weight_location`."""
    layers = layers_of(opened)
    blocks = layers[layer].weight_blocks(key, direction) if layer in layers else ()
    if not blocks:
        return None
    name = weight_name(blocks)
    owning_layers = [
        n for n, other in layers.items() for other_blocks in other.weights.values() if weight_name(other_blocks) == name
    ]
    return WeightLocation(name, lambda gradient: gradient, tied=len(owning_layers) > 1)


@contextmanager
def perturbed_port(net: Net, port: Port, size: float) -> Iterator[bool]:
    """Perturb the variables of a weight while active, as :meth:`Adapter.perturbed_port`; yield False for others."""
    opened = open_net(net)
    layer = layers_of(opened).get(str(port.layer)) if port.kind == "weight" else None
    blocks = () if layer is None else layer.weights.get(port.key, ())
    names = list(dict.fromkeys(block.variable for block in blocks))
    if not names:
        yield False
        return
    perturbations = {}
    for name, value in opened.read_variables(names).items():
        scale = float(np.sqrt(np.mean(np.square(value, dtype=np.float64)))) or 1.0
        pattern = np.random.default_rng(0).normal(size=value.shape)
        perturbations[net.graph, name] = (size * scale * pattern).astype(value.dtype)
    token = PERTURBATIONS.set({**PERTURBATIONS.get(), **perturbations})
    try:
        yield True
    finally:
        PERTURBATIONS.reset(token)
