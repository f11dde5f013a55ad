"""Facts about a graph that need no run of it: its layers, their parts, and the selection of layers for a capture."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any, Literal

import tensorflow.compat.v1 as tf

from ...errors import LayerNotFoundError, ModelError, UnsupportedError, did_you_mean
from ..protocol import NOT_LOOKED_INTO, CaptureRequest, LayerInfo, ModelFacts, Role, Submodule
from .open_net import OpenNet, open_net
from .public import Net
from .recurrences import Loop
from .weights import LayerVariables, is_table, layers_of, variables_used

_HOW = {"v1": "while loop", "v2": "While", "unrolled": "unrolled"}


def describe(net: Net) -> list[LayerInfo]:
    """Return one row per recurrent layer; a bidirectional layer is one row."""
    found = open_net(net)
    if net.keras is not None:
        return _of_keras(found)
    return [_info(found, name) for name in dict.fromkeys(loop.layer for loop in found.loops)]


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
    """Container of the names of all tensors of a graph, such as ``"output/dense/BiasAdd:0"``."""

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


def _part(found: OpenNet, layer: LayerVariables) -> Submodule:
    graph, dtype = found.copy.graph, ""
    tables = any(is_table(graph, pieces) for pieces in layer.weights.values())
    roles: frozenset[Role] = frozenset({"embedding"} if tables and layer.output is not None else ())
    for pieces in layer.weights.values():
        operation = graph.get_operation_by_name(pieces[0].variable)
        dtype = tf.as_dtype(operation.get_attr("dtype")).base_dtype.name
    return Submodule(roles, dtype)


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
    """Return the reason for each recurrent layer of a Keras model that cannot be captured, by layer name."""
    names = found.net.keras
    return {} if names is None else names.refusals(found.loops, variables_used(found))


def uncalled(found: OpenNet) -> list[str]:
    """Return a note on the recurrent Keras layers that outputs and loss do not depend on, if there are any."""
    names = [] if found.net.keras is None else found.net.keras.uncalled(variables_used(found))
    return [f"Left out, since outputs and loss do not depend on it: {', '.join(names)}."] if names else []


def within_reach(found: OpenNet, request: CaptureRequest) -> tuple[tuple[str, ...] | None, list[str]]:
    """Return the requested layers and notes on those left out.

    If not all layers have to run, those that cannot be captured are left out. Layers without an output, such as
    variables outside of all layers, are left out as well.
    """
    if request.all_must_run or request.layers is None:
        return request.layers, [] if request.layers is not None else uncalled(found)
    refused = refusals(found) | {loop.name: loop.cell.refused for loop in found.loops if loop.cell.refused}
    layers, kept = layers_of(found), dict[str, None]()
    for name in request.layers:
        calls = [loop.name for loop in found.loops if name in (loop.name, loop.layer)]
        if not calls and name in layers and layers[name].output is not None:
            calls = [name]
        kept |= dict.fromkeys(call for call in calls if call not in refused and name not in refused)
    return tuple(kept), [f"{NOT_LOOKED_INTO}: {why.splitlines()[0]}" for why in dict.fromkeys(refused.values())]


def chosen(found: OpenNet, wanted: tuple[str, ...] | None) -> tuple[list[Loop], list[str]]:
    """Return the loops to capture, and the names of the other requested layers."""
    infos = list(dict.fromkeys(loop.name for loop in found.loops))
    layers = layers_of(found)
    refused = refusals(found)
    if wanted is None:
        if not infos and not refused:
            raise ModelError(
                "There is no recurrent loop on the way to the outputs or the loss.",
                expected="a while loop, or a static_rnn or Python loop over a cell of known equations",
                hint="tf.nn.dynamic_rnn for a cell of other equations; outputs= and loss=",
            )
        asked = infos
    else:
        calls = {name: [loop.name for loop in found.loops if loop.layer == name] or [name] for name in wanted}
        asked = list(dict.fromkeys(call for name in wanted for call in (calls[name] if name not in infos else [name])))
    for name in [*asked, *(refused if wanted is None else ())]:
        if name in refused:
            raise UnsupportedError(refused[name])
    loops = [loop for name in asked for loop in found.layer(name)]
    for loop in loops:
        if loop.cell.refused:
            raise UnsupportedError(loop.cell.refused)
    others = [name for name in asked if name not in infos]
    for name in others:
        if name not in layers and ":" not in name:
            raise LayerNotFoundError(
                f"No layer is called {name!r}.", hint=did_you_mean(name, dict.fromkeys([*infos, *layers]))
            )
    return loops, others
