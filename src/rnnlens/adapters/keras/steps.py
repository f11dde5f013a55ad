"""Which axis of a tensor counts steps, and which are space: read off the graph of its layers.

A layer that runs once per step names the axes of its input and output; layers that keep axes apart pass the names on,
in both directions. Names never follow from the number of axes: a picture beside a film has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ...autodiff.tensors import dtype_name
from ...layout import Layout, layout_of_axes
from ...vocabulary import CHANNEL, FEATURE, SAMPLE, SPACE, TIME, UNIT
from ..protocol import Port
from .dialect import Dialect, dialect_of
from .restore import borrowed, undo_contents

#: Layers and operations whose output has the axes of their inputs: entry by entry, or all but the last one mixed.
_ENTRY_BY_ENTRY = frozenset(
    [
        *("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax", "Relu", "Tanh", "Sigmoid", "Silu", "Gelu"),
        *("Dropout", "AlphaDropout", "GaussianDropout", "GaussianNoise", "ActivityRegularization", "Masking", "Cast"),
        *("SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "Identity", "Rescaling", "Normalization"),
        *("BatchNormalization", "LayerNormalization", "UnitNormalization", "GroupNormalization", "Dense"),
        *("Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Average", "Maximum", "Minimum", "Concatenate"),
    ]
)
#: Beginnings of the names of layers that slide along axes of space, which keep their order.
_SLIDING = ("Conv", "SeparableConv", "DepthwiseConv", "MaxPooling", "AveragePooling", "ZeroPadding", "UpSampling")

#: Tensors as ids, and the pairs (axis, name) that are known of each.
_Names = dict[int, set[tuple[int, str]]]


def layouts(model: Any, x: Any) -> dict[Port, Layout]:
    """Return the layouts of a model's inputs, outputs and layers' outputs whose steps its graph shows.

    A model with code of its own is called on symbolic tensors for a graph, if an input of ``x`` may be a film.
    """
    keras = dialect_of(model)
    if keras.operations(model) is not None:
        inputs = model.inputs
        if isinstance(x, dict):  # ports have the order of the data
            struct = keras.graph_of(model)[0]
            by_name = struct if isinstance(struct, dict) else {tensor.name: tensor for tensor in inputs}
            if set(by_name) != set(x) or len(by_name) != len(inputs):
                return {}
            inputs = [by_name[name] for name in x]
        try:
            return _layouts(keras, inputs, model.outputs)
        except (AttributeError, IndexError, TypeError):  # a graph that the user's code has edited: nothing is shown
            return {}
    leaves = keras.tree.flatten(x)
    if (
        isinstance(x, dict)
        or not isinstance(model, keras.Model)
        or max((np.ndim(leaf) for leaf in leaves), default=0) < 4
    ):
        return {}
    books = [nodes for layer in model._flatten_layers() for nodes in (layer._inbound_nodes, layer._outbound_nodes)]
    undo_steps = [undo_contents(book) for book in (*books, keras.name_counters())]
    try:
        with borrowed(model, keras):
            inputs = [
                keras.layers.Input(np.shape(leaf)[1:], dtype=dtype_name(leaf), name=f"rnnlens_input_{i}")
                for i, leaf in enumerate(leaves)
            ]
            outputs = keras.tree.flatten(model.call(keras.tree.pack_sequence_as(x, inputs)))
            return _layouts(keras, inputs, outputs)
    except Exception:  # code that needs numbers: nothing is shown
        return {}
    finally:
        for undo in undo_steps:
            undo()


def _layouts(keras: Dialect, inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[Port, Layout]:
    nodes = list(_nodes(keras, outputs))
    names: _Names = {}
    links = []
    for operation, sources, results in nodes:
        _name_steps(keras, operation, sources, results, names)
        links += [
            (id(source), id(result), kept)
            for result in results
            for source in sources
            if (kept := _kept_axes(keras, operation, _shape(source), _shape(result)))
        ]
    is_changed = True
    while is_changed:
        is_changed = any(_pass_on(names, *link) for link in links)
    operations = [operation for operation, _, _ in nodes]
    ports = {Port("input", index=i): tensor for i, tensor in enumerate(inputs)}
    ports |= {Port("output", index=i): tensor for i, tensor in enumerate(outputs)}
    ports |= {
        Port("output", operation.name): results[0]
        for operation, _, results in nodes
        if operations.count(operation) == 1 and len(results) == 1
    }
    found = {p: _layout(p.kind, len(_shape(tensor)), names.get(id(tensor), set())) for p, tensor in ports.items()}
    return {port: layout for port, layout in found.items() if layout is not None}


def _nodes(keras: Dialect, outputs: Sequence[Any]) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Yield (operation, input tensors, output tensors) of each call that the outputs are computed from."""
    seen, remaining = set[int](), list(outputs)
    while remaining:
        operation, index = getattr(remaining.pop(), "_keras_history", (None, None))[:2]
        node = None if operation is None else operation._inbound_nodes[index]
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        # Keras 2 has all inputs of a call under a name of its own.
        sources = keras.tree.flatten(getattr(node, "keras_inputs", None) or node.input_tensors)
        results = keras.tree.flatten(node.output_tensors)
        if sources and sources[0] is not results[0]:  # an input is its own source in Keras 2
            yield operation, sources, results
            remaining += sources


def _name_steps(keras: Dialect, operation: Any, inputs: Sequence[Any], outputs: Sequence[Any], names: _Names) -> None:
    """Add the names of the axes of a layer that runs once per step."""
    layer = operation.forward_layer if isinstance(operation, keras.layers.Bidirectional) else operation
    is_per_step = isinstance(layer, keras.layers.TimeDistributed)
    if not is_per_step and not isinstance(layer, keras.layers.RNN):
        return
    if not is_per_step and keras.time_major(layer):
        return
    has_steps = is_per_step or layer.return_sequences
    for tensor, is_sequence in [(inputs[0], True), *((outputs[0], has_steps),) * bool(outputs)]:
        rank = len(_shape(tensor))
        if rank < 3:
            continue
        space = _space_of_frames(layer) if is_per_step else _space_of_images(keras, layer)
        named = names.setdefault(id(tensor), set())
        if is_sequence:
            named.add((1, TIME))
        first = 1 + is_sequence
        named |= {(first + i, name) for i, name in enumerate(space)} if len(space) == rank - first - 1 else set()


def _space_of_images(keras: Dialect, layer: Any) -> tuple[str, ...]:
    """Return the axes of space of a convolutional recurrent layer with channels last."""
    kinds = [getattr(keras.layers, f"ConvLSTM{i}D") for i in SPACE]
    count = next((i for i, kind in zip(SPACE, kinds, strict=True) if isinstance(layer, kind)), 0)
    return SPACE[count] if count and layer.cell.data_format == "channels_last" else ()


def _space_of_frames(wrapper: Any) -> tuple[str, ...]:
    """Return the axes of space of the convolutions or poolings in a ``TimeDistributed`` layer, if any."""
    layers = [
        layer
        for layer in wrapper._flatten_layers()
        if hasattr(layer, "data_format") and (hasattr(layer, "kernel_size") or hasattr(layer, "pool_size"))
    ]
    counts = {int(type(layer).__name__.rpartition("D")[0][-1:] or 0) for layer in layers}
    is_last = {layer.data_format for layer in layers} == {"channels_last"}
    return SPACE.get(counts.pop(), ()) if is_last and len(counts) == 1 else ()


def _shape(tensor: Any) -> tuple[int | None, ...]:
    return tuple(tensor.shape)


def _kept_axes(
    keras: Dialect, operation: Any, before: tuple[int | None, ...], after: tuple[int | None, ...]
) -> dict[int, int]:
    """Return for each axis of an operation's input that it keeps apart the axis of its output; empty if not known."""
    kind = type(operation).__name__ if keras.is_from_keras(type(operation)) else ""
    if kind in ("Permute", "Transpose"):
        dims = getattr(operation, "dims", None)
        order = (0, *dims) if dims is not None else tuple(operation.axes or range(len(before))[::-1])
        return {axis: i for i, axis in enumerate(order)} if order[0] == 0 else {}
    if kind == "Reshape":
        return _kept_by_reshaping(before, after)
    if kind == "Embedding":
        return {i: i for i in range(1, len(before))}
    if len(before) != len(after):
        return {}
    if kind.startswith(_SLIDING):
        return {i: i for i in range(1, len(before) - 1)} if operation.data_format == "channels_last" else {}
    is_last_mixed = kind == "Dense"
    count = (len(before) - is_last_mixed) * (kind in _ENTRY_BY_ENTRY)
    return {i: i for i in range(1, count) if before[i] == after[i] != 1}


def _kept_by_reshaping(before: tuple[int | None, ...], after: tuple[int | None, ...]) -> dict[int, int]:
    """Return the axes with as many entries before or behind them as an axis of the output of the same length."""
    return {
        i: j
        for i in range(1, len(before))
        for j in range(1, len(after))
        if before[i] == after[j] != 1
        and (_is_same_size(before[1:i], after[1:j]) or _is_same_size(before[i + 1 :], after[j + 1 :]))
    }


def _is_same_size(first: tuple[int | None, ...], second: tuple[int | None, ...]) -> bool:
    known = [size for size in (*first, *second) if size is not None]
    return len(known) == len(first) + len(second) and prod(known[: len(first)]) == prod(known[len(first) :])


def _pass_on(names: _Names, before: int, after: int, kept: Mapping[int, int]) -> bool:
    """Pass names between the kept axes of two tensors, both ways; return whether there are new ones."""
    below, above = names.setdefault(before, set()), names.setdefault(after, set())
    count = len(below) + len(above)
    above |= {(kept[axis], name) for axis, name in below if axis in kept}
    kept_from = {j: i for i, j in kept.items()}
    below |= {(kept_from[axis], name) for axis, name in above if axis in kept_from}
    return len(below) + len(above) > count


def _layout(kind: str, axis_count: int, named: set[tuple[int, str]]) -> Layout | None:
    """Return the layout of a tensor with these names; None where the convention holds, or nothing is known."""
    steps = [axis for axis, name in named if name == TIME]
    if not steps or (axis_count < 4 and steps == [1]):
        return None
    axes, names = [axis for axis, _ in named], [name for _, name in named]
    is_clear = len(set(axes)) == len(axes) and len(set(names)) == len(names)
    known = {axis: (name,) for axis, name in named} if is_clear else {}
    last = CHANNEL if kind == "output" and set(names) & set(SPACE[3]) else FEATURE if kind == "input" else UNIT
    return layout_of_axes(axis_count, {0: (SAMPLE,), **known}, last)
