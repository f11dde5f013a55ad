"""Facts about a graph that need no run of it: its layers, their parts, and the selection of layers for a capture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import tensorflow.compat.v1 as tf

from ...errors import LayerNotFoundError, ModelError, UnsupportedError, did_you_mean
from ..protocol import NOT_LOOKED_INTO, CaptureRequest, LayerInfo, ModelFacts, Role, Submodule
from .blocks import dtype_of
from .open_net import OpenNet, open_net
from .public import Net
from .recurrences import Loop
from .weights import is_table, layers_of, variables_used

_HOW = {"v1": "while loop", "v2": "While", "unrolled": "unrolled"}


def describe(net: Net) -> list[LayerInfo]:
    """Return one row per recurrent layer; a bidirectional layer is one row."""
    opened = open_net(net)
    if net.keras is not None:
        return _keras_layer_infos(opened)
    rows = [_loop_layer_info(opened, name) for name in dict.fromkeys(loop.layer for loop in opened.loops)]
    # Without rows, the error of a verb names them.
    for name, reason in opened.copy.left_out_reasons.items() if rows else ():
        options = {"left out": reason.splitlines()[0]}
        rows.append(LayerInfo(name, name.rpartition("/")[2], "unknown", 0, "forward", False, options=options))
    return rows


def _keras_layer_infos(opened: OpenNet) -> list[LayerInfo]:
    """Return one row per recurrent Keras layer, with the cell and mask of the loops found for it."""
    keras_names = opened.net.keras
    refusal_by_layer = refusals(opened)
    rows: dict[str, LayerInfo] = {}
    for recurrence in keras_names.recurrences:
        loops = [loop for loop in opened.loops if loop.layer == recurrence.name]
        options = dict(recurrence.info.options)
        if recurrence.name in refusal_by_layer:
            options["refused"] = refusal_by_layer[recurrence.name].splitlines()[0]
        is_masked = any(loop.lengths is not None or loop.mask is not None for loop in loops) if loops else None
        # The label of a recognised cell follows its equations, not the class of the layer.
        cell_kinds = {loop.cell.kind for loop in loops if loop.cell.cell is not None}
        cell = next(iter(cell_kinds)) if len(cell_kinds) == 1 else recurrence.info.cell
        rows.setdefault(recurrence.name, replace(recurrence.info, cell=cell, masked=is_masked, options=options))
    return list(rows.values())


def _loop_layer_info(opened: OpenNet, name: str) -> LayerInfo:
    loops = opened.first_call_loops(name)
    first_loop, call_count = loops[0], len({loop.name for loop in opened.loops if loop.layer == name})
    direction: Literal["forward", "backward", "bidirectional"] = first_loop.direction
    options: dict[str, Any] = dict(first_loop.cell.options) | {"run as": _HOW[first_loop.kind]}
    if first_loop.time_major:
        options["time_major"] = True
    if first_loop.cell.refusal:
        options["refused"] = next(iter(first_loop.cell.refusal.splitlines()))
    if first_loop.cell.unknown_reason:
        options["unknown cell"] = first_loop.cell.unknown_reason
    if call_count > 1:
        options["calls"] = call_count
    return LayerInfo(
        name=name,
        kind=first_loop.scope.rpartition("/")[2] or first_loop.cell.kind,
        cell=first_loop.cell.kind,
        units=first_loop.cell.units,
        direction="bidirectional" if len(loops) > 1 else direction,
        return_sequences=first_loop.output is not None,
        masked=any(loop.lengths is not None or loop.mask is not None for loop in loops),
        options=options,
    )


def facts(net: Net) -> ModelFacts:
    """Return the parts, inputs, outputs and loss of the net; see :meth:`Adapter.facts`."""
    opened = open_net(net)
    graph, submodules = opened.copy.graph, {}
    for name, layer in layers_of(opened).items():
        dtypes = [dtype_of(graph.get_operation_by_name(blocks[0].variable)).name for blocks in layer.weights.values()]
        is_embedding = layer.output is not None and any(is_table(graph, blocks) for blocks in layer.weights.values())
        roles: frozenset[Role] = frozenset({"embedding"} if is_embedding else ())
        submodules[name] = Submodule(roles, dtypes[-1] if dtypes else "")
    get_operations = net.graph.get_operations
    return ModelFacts(
        submodules=submodules,
        inputs=tuple(net.inputs),
        outputs=tuple(net.outputs),
        loss=net.loss,
        optimizer="" if net.keras is None else net.keras.optimizer,
        tensors=opened.copy.build_once(
            "tensors", lambda: frozenset(t.name for op in get_operations() for t in op.outputs)
        ),
    )


def provenance(net: Net) -> Mapping[str, str]:
    """Return the framework and its version, the engine, the dtype and the device."""
    opened = open_net(net)
    kinds = {_HOW[loop.kind] for loop in opened.loops}
    floats = {tensor.dtype.base_dtype.name for tensor in net.outputs.values() if tensor.dtype.base_dtype.is_floating}
    devices = opened.net.session.list_devices() if hasattr(opened.net.session, "list_devices") else []
    device_kind = "gpu" if any(device.device_type == "GPU" for device in devices) else "cpu"
    return {
        "framework": f"tensorflow {tf.__version__}",
        "engine": f"tensorflow {tf.__version__}",
        "adapter": "tf_graph",
        "graph": f"version {net.graph.version}, {', '.join(sorted(kinds)) or 'no loop'}",
        "dtype": ", ".join(sorted(floats)),
        "device": device_kind,
    }


def refusals(opened: OpenNet) -> dict[str, str]:
    """Return, by name, why recurrent layers that were found without a loop cannot be captured."""
    keras_names = opened.net.keras
    return (
        dict(opened.copy.left_out_reasons)
        if keras_names is None
        else keras_names.refusals(opened.loops, variables_used(opened))
    )


def select_layers(opened: OpenNet, request: CaptureRequest) -> tuple[list[Loop], list[str], list[str]]:
    """Return the loops to capture, the names of the other requested layers, and notes on layers that are left out.

    If not all layers have to run, those that cannot be captured, or that have no output, are left out.
    """
    loop_names = [loop.name for loop in opened.loops]
    layers = layers_of(opened)
    refusal_by_layer = refusals(opened)
    notes = list[str]()
    call_requests = []  # of the node name of a call, such as rnn#0, and the name that was requested
    for name in request.layers or ():
        calls = [loop.name for loop in opened.loops if loop.layer == name]
        call_requests += [(call, name) for call in ([name] if opened.layer_loops(name) else calls or [name])]
    if request.layers is None:
        if not loop_names and not refusal_by_layer:
            raise ModelError(
                "There is no recurrent loop on the way to the outputs or the loss.",
                expected="a while loop, or a static_rnn or Python loop over a cell of known equations",
                hint="tf.nn.dynamic_rnn for a cell of other equations; outputs= and loss=",
            )
        # Beside loops that can be read, steps of unknown equations are part of what lies between these.
        left_out = opened.copy.left_out_reasons if loop_names else {}
        call_requests = [(name, name) for name in (*loop_names, *refusal_by_layer) if name not in left_out]
        uncalled_layers = [] if opened.net.keras is None else opened.net.keras.uncalled_layers(variables_used(opened))
        notes = (
            [f"Left out, since outputs and loss do not depend on it: {', '.join(uncalled_layers)}."]
            if uncalled_layers
            else []
        )
        notes += [f"Left out: {reason.splitlines()[0]}" for reason in left_out.values()]
    elif not request.all_must_run:
        refusal_by_layer |= {loop.name: loop.cell.refusal for loop in opened.loops if loop.cell.refusal}
        has_output = {name for name, layer in layers.items() if layer.output is not None}.union(loop_names)
        call_requests = [
            pair for pair in call_requests if pair[0] in has_output and refusal_by_layer.keys().isdisjoint(pair)
        ]
        notes = [f"{NOT_LOOKED_INTO}: {reason.splitlines()[0]}" for reason in dict.fromkeys(refusal_by_layer.values())]
    call_names = list(dict.fromkeys(call for call, _ in call_requests))
    loops = [loop for name in call_names for loop in opened.layer_loops(name)]
    for reason in (*(refusal_by_layer.get(name) for name in call_names), *(loop.cell.refusal for loop in loops)):
        if reason:
            raise UnsupportedError(reason)
    other_names = [name for name in call_names if name not in loop_names]
    for name in other_names:
        if name not in layers and ":" not in name:
            known_names = dict.fromkeys([*loop_names, *layers])
            raise LayerNotFoundError(f"No layer is called {name!r}.", hint=did_you_mean(name, known_names))
    return loops, other_names, notes
