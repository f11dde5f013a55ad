"""What a graph says of itself without being run: its layers, their parts, where its numbers come from."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any, Literal

import tensorflow.compat.v1 as tf

from ..protocol import LayerInfo, ModelFacts, Role, Submodule
from .chosen import refusals
from .opened import Opened, opened
from .public import Net
from .weights import LayerVariables, base, is_table, layers_of

_HOW = {"v1": "while loop", "v2": "While", "unrolled": "unrolled"}


def describe(net: Net) -> list[LayerInfo]:
    """A row per layer: both directions of a bidirectional one together."""
    found = opened(net)
    if net.keras is not None:
        return _of_keras(found)
    return [_info(found, name) for name in dict.fromkeys(base(loop) for loop in found.loops)]


def _of_keras(found: Opened) -> list[LayerInfo]:
    """The layers as Keras has them; masked where their loops are."""
    names = found.net.keras
    refused = refusals(found)
    rows: dict[str, LayerInfo] = {}
    for site in names.sites:
        loops = [loop for loop in found.loops if loop.name.partition("#")[0] == site.name]
        options = dict(site.info.options)
        if site.name in refused:
            options["refused"] = refused[site.name].splitlines()[0]
        masked = any(loop.lengths is not None or loop.mask is not None for loop in loops) if loops else None
        # Of a cell that was found the labels are those of its equations, whatever layer is around it.
        kinds = {loop.cell.kind for loop in loops if loop.cell.cell is not None}
        cell = next(iter(kinds)) if len(kinds) == 1 else site.info.cell
        rows.setdefault(site.name, replace(site.info, cell=cell, masked=masked, options=options))
    return list(rows.values())


def _info(found: Opened, name: str) -> LayerInfo:
    loops = found.first_call(name)
    first, calls = loops[0], len({loop.name for loop in found.loops if base(loop) == name})
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
    """See :meth:`Adapter.facts`."""
    found = opened(net)
    layers = layers_of(found)
    return ModelFacts(
        submodules={name: _part(found, layer) for name, layer in layers.items()},
        inputs=tuple(net.inputs),
        outputs=tuple(net.outputs),
        loss=net.loss,
        optimizer="" if net.keras is None else net.keras.optimizer,
        tensors=_Tensors(net.graph),
    )


class _Tensors(Container[str]):
    """The names of all tensors of a graph: ``"output/dense/BiasAdd:0"``."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or ":" not in name:
            return False
        try:
            self._graph.get_tensor_by_name(name)
        except (KeyError, ValueError):
            return False
        return True


def _part(found: Opened, layer: LayerVariables) -> Submodule:
    graph, dtype = found.copy.graph, ""
    tables = any(is_table(graph, pieces) for pieces in layer.weights.values())
    roles: frozenset[Role] = frozenset({"embedding"} if tables and layer.output is not None else ())
    for pieces in layer.weights.values():
        operation = graph.get_operation_by_name(pieces[0].variable)
        dtype = tf.as_dtype(operation.get_attr("dtype")).base_dtype.name
    return Submodule(roles, dtype)


def provenance(net: Net) -> Mapping[str, str]:
    """Framework and its version, engine, dtype, device."""
    found = opened(net)
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
