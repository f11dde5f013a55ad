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
    found = open_net(net)
    if net.keras is not None:
        return _of_keras(found)
    rows = [_info(found, name) for name in dict.fromkeys(loop.layer for loop in found.loops)]
    for name, why in found.copy.left_out.items() if rows else ():  # without rows, the error of a verb names them
        options = {"left out": why.splitlines()[0]}
        rows.append(LayerInfo(name, name.rpartition("/")[2], "unknown", 0, "forward", False, options=options))
    return rows


def _of_keras(found: OpenNet) -> list[LayerInfo]:
    """Return one row per recurrent Keras layer, with the cell and mask of the loops found for it."""
    names = found.net.keras
    refused = refusals(found)
    rows: dict[str, LayerInfo] = {}
    for site in names.sites:
        loops = [loop for loop in found.loops if loop.layer == site.name]
        options = dict(site.info.options)
        if site.name in refused:
            options["refused"] = refused[site.name].splitlines()[0]
        masked = any(loop.lengths is not None or loop.mask is not None for loop in loops) if loops else None
        # The label of a recognised cell follows its equations, not the class of the layer.
        kinds = {loop.cell.kind for loop in loops if loop.cell.cell is not None}
        cell = next(iter(kinds)) if len(kinds) == 1 else site.info.cell
        rows.setdefault(site.name, replace(site.info, cell=cell, masked=masked, options=options))
    return list(rows.values())


def _info(found: OpenNet, name: str) -> LayerInfo:
    loops = found.first_call(name)
    first, calls = loops[0], len({loop.name for loop in found.loops if loop.layer == name})
    direction: Literal["forward", "backward", "bidirectional"] = first.direction
    options: dict[str, Any] = dict(first.cell.options) | {"run as": _HOW[first.kind]}
    if first.time_major:
        options["time_major"] = True
    if first.cell.refused:
        options["refused"] = next(iter(first.cell.refused.splitlines()))
    if first.cell.unknown:
        options["unknown cell"] = first.cell.unknown
    if calls > 1:
        options["calls"] = calls
    return LayerInfo(
        name=name,
        kind=first.scope.rpartition("/")[2] or first.cell.kind,
        cell=first.cell.kind,
        units=first.cell.units,
        direction="bidirectional" if len(loops) > 1 else direction,
        return_sequences=first.output is not None,
        masked=any(loop.lengths is not None or loop.mask is not None for loop in loops),
        options=options,
    )


def facts(net: Net) -> ModelFacts:
    """Return the parts, inputs, outputs and loss of the net; see :meth:`Adapter.facts`."""
    found = open_net(net)
    graph, parts = found.copy.graph, {}
    for name, layer in layers_of(found).items():
        dtypes = [dtype_of(graph.get_operation_by_name(pieces[0].variable)).name for pieces in layer.weights.values()]
        tables = layer.output is not None and any(is_table(graph, pieces) for pieces in layer.weights.values())
        roles: frozenset[Role] = frozenset({"embedding"} if tables else ())
        parts[name] = Submodule(roles, dtypes[-1] if dtypes else "")
    every = net.graph.get_operations
    return ModelFacts(
        submodules=parts,
        inputs=tuple(net.inputs),
        outputs=tuple(net.outputs),
        loss=net.loss,
        optimizer="" if net.keras is None else net.keras.optimizer,
        tensors=found.copy.once("tensors", lambda: frozenset(t.name for op in every() for t in op.outputs)),
    )


def provenance(net: Net) -> Mapping[str, str]:
    """Return the framework and its version, the engine, the dtype and the device."""
    found = open_net(net)
    kinds = {_HOW[loop.kind] for loop in found.loops}
    floats = {tensor.dtype.base_dtype.name for tensor in net.outputs.values() if tensor.dtype.base_dtype.is_floating}
    devices = found.net.session.list_devices() if hasattr(found.net.session, "list_devices") else []
    on = "gpu" if any(device.device_type == "GPU" for device in devices) else "cpu"
    return {
        "framework": f"tensorflow {tf.__version__}",
        "engine": f"tensorflow {tf.__version__}",
        "adapter": "tf_graph",
        "graph": f"version {net.graph.version}, {', '.join(sorted(kinds)) or 'no loop'}",
        "dtype": ", ".join(sorted(floats)),
        "device": on,
    }


def refusals(found: OpenNet) -> dict[str, str]:
    """Return, by name, why recurrent layers that were found without a loop cannot be captured."""
    names = found.net.keras
    return dict(found.copy.left_out) if names is None else names.refusals(found.loops, variables_used(found))


def selected(found: OpenNet, request: CaptureRequest) -> tuple[list[Loop], list[str], list[str]]:
    """Return the loops to capture, the names of the other requested layers, and notes on layers that are left out.

    If not all layers have to run, those that cannot be captured, or that have no output, are left out.
    """
    infos, layers, refused, notes = [loop.name for loop in found.loops], layers_of(found), refusals(found), list[str]()
    pairs = []  # of the node name of a call, such as rnn#0, and the name that was requested
    for name in request.layers or ():
        calls = [loop.name for loop in found.loops if loop.layer == name]
        pairs += [(call, name) for call in ([name] if found.layer(name) else calls or [name])]
    if request.layers is None:
        if not infos and not refused:
            raise ModelError(
                "There is no recurrent loop on the way to the outputs or the loss.",
                expected="a while loop, or a static_rnn or Python loop over a cell of known equations",
                hint="tf.nn.dynamic_rnn for a cell of other equations; outputs= and loss=",
            )
        # Beside loops that can be read, steps of unknown equations are part of what lies between these.
        left_out = found.copy.left_out if infos else {}
        pairs = [(name, name) for name in (*infos, *refused) if name not in left_out]
        idle = [] if found.net.keras is None else found.net.keras.uncalled(variables_used(found))
        notes = [f"Left out, since outputs and loss do not depend on it: {', '.join(idle)}."] if idle else []
        notes += [f"Left out: {why.splitlines()[0]}" for why in left_out.values()]
    elif not request.all_must_run:
        refused |= {loop.name: loop.cell.refused for loop in found.loops if loop.cell.refused}
        has_output = {name for name, layer in layers.items() if layer.output is not None}.union(infos)
        pairs = [pair for pair in pairs if pair[0] in has_output and refused.keys().isdisjoint(pair)]
        notes = [f"{NOT_LOOKED_INTO}: {why.splitlines()[0]}" for why in dict.fromkeys(refused.values())]
    asked = list(dict.fromkeys(call for call, _ in pairs))
    loops = [loop for name in asked for loop in found.layer(name)]
    for why in (*(refused.get(name) for name in asked), *(loop.cell.refused for loop in loops)):
        if why:
            raise UnsupportedError(why)
    others = [name for name in asked if name not in infos]
    for name in others:
        if name not in layers and ":" not in name:
            known = dict.fromkeys([*infos, *layers])
            raise LayerNotFoundError(f"No layer is called {name!r}.", hint=did_you_mean(name, known))
    return loops, others, notes
