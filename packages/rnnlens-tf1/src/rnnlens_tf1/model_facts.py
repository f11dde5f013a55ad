"""Facts about a graph that need no run of it: its layers, their parts, and the selection of layers for a capture."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import tensorflow.compat.v1 as tf

from rnnlens.adapters.protocol import (
    NOT_LOOKED_INTO,
    LayerInfo,
    ModelFacts,
    Obstacle,
    Port,
    Role,
    Submodule,
    Taps,
    WeightLocation,
)
from rnnlens.errors import LayerNotFoundError, ModelError, UnsupportedError, did_you_mean

from . import keras_v1
from .blocks import dtype_of
from .missing_gradient import find_obstacle
from .open_net import OpenNet, open_net
from .public import Net
from .recurrences import Loop
from .weights import is_table, layers_of, variables_used, weight_location

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


def net_of(model: Any) -> Net:
    """Return the ``Net`` of a model: the net itself, or one made of a session or of a tf_keras model."""
    if isinstance(model, Net):
        return model
    if isinstance(model, tf.Session):
        return Net(model, {}, {})
    return keras_v1.net_of(model)


class GraphFacts(ModelFacts):
    """Facts of the net of a graph; see :class:`rnnlens.adapters.protocol.ModelFacts`."""

    @cached_property
    def _opened(self) -> OpenNet:
        return open_net(self._net)

    @cached_property
    def _net(self) -> Net:
        return net_of(self.model)

    @cached_property
    def submodules(self) -> Mapping[str, Submodule]:  # type: ignore[override]
        """Layers with the dtype of their weights; tables of rows are embeddings."""
        graph, submodules = self._opened.copy.graph, {}
        for name, layer in layers_of(self._opened).items():
            blocks_of_weights = layer.weights.values()
            dtypes = [dtype_of(graph.get_operation_by_name(blocks[0].variable)).name for blocks in blocks_of_weights]
            is_embedding = layer.output is not None and any(is_table(graph, blocks) for blocks in blocks_of_weights)
            roles: frozenset[Role] = frozenset({"embedding"} if is_embedding else ())
            submodules[name] = Submodule(roles, dtypes[-1] if dtypes else "")
        return submodules

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the net's inputs."""
        return tuple(self._net.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the net's outputs."""
        return tuple(self._net.outputs)

    @property
    def loss(self) -> Any:
        """Loss tensor of the net."""
        return self._net.loss

    @property
    def has_own_loss(self) -> bool:  # type: ignore[override]
        """Whether the net has a loss that needs no targets from the batch."""
        return self._net.has_own_loss

    @property
    def optimizer(self) -> str:  # type: ignore[override]
        """Name of the optimizer of a tf_keras model."""
        return "" if self._net.keras is None else self._net.keras.optimizer

    @cached_property
    def tensors(self) -> Container[str]:  # type: ignore[override]
        """Names of all tensors of the graph."""
        get_operations = self._net.graph.get_operations
        return self._opened.copy.build_once(
            "tensors", lambda: frozenset(t.name for op in get_operations() for t in op.outputs)
        )

    @cached_property
    def provenance(self) -> Mapping[str, str]:
        """TensorFlow's version, the kind of while loops, the dtype and the device."""
        net, session = self._net, self._net.session
        kinds = {_HOW[loop.kind] for loop in self._opened.loops}
        dtypes = {tensor.dtype.base_dtype for tensor in net.outputs.values()}
        devices = session.list_devices() if hasattr(session, "list_devices") else []
        return {
            "framework": f"tensorflow {tf.__version__}",
            "engine": f"tensorflow {tf.__version__}",
            "adapter": "tf_graph",
            "graph": f"version {net.graph.version}, {', '.join(sorted(kinds)) or 'no loop'}",
            "dtype": ", ".join(sorted(dtype.name for dtype in dtypes if dtype.is_floating)),
            "device": "gpu" if any(device.device_type == "GPU" for device in devices) else "cpu",
        }

    def reduction(self, loss: Any) -> str | None:
        """Return the ``reduction`` attribute of a loss, or of that of a tf_keras model, as text; None without one."""
        is_net = isinstance(self.model, Net | tf.Session)
        return super().reduction(self.model.loss if loss is None and not is_net else loss)

    def weight_location(self, layer: str, direction: str | None, key: str) -> WeightLocation | None:
        """Find the variable, and the block of rows and columns in it, that is a layer's weight."""
        return weight_location(self._opened, layer, direction, key)

    def find_obstacle(self, of: Sequence[Port], wrt: Port) -> Obstacle | None:
        """Find in the graph, without running it, why no gradient reaches ``wrt``."""
        assert self.batch is not None
        return find_obstacle(open_net(self._net, self.batch.seed), self.batch, of, wrt)


def refusals(opened: OpenNet) -> dict[str, str]:
    """Return, by name, why recurrent layers that were found without a loop cannot be captured."""
    keras_names = opened.net.keras
    return (
        dict(opened.copy.left_out_reasons)
        if keras_names is None
        else keras_names.refusals(opened.loops, variables_used(opened))
    )


def select_layers(opened: OpenNet, taps: Taps) -> tuple[list[Loop], list[str], list[str]]:
    """Return the loops to capture, the names of the other requested layers, and notes on layers that are left out.

    If not all layers have to run, those that cannot be captured, or that have no output, are left out.
    """
    loop_names = [loop.name for loop in opened.loops]
    layers = layers_of(opened)
    refusal_by_layer = refusals(opened)
    notes = list[str]()
    call_requests = []  # of the node name of a call, such as rnn#0, and the name that was requested
    for name in taps.layers or ():
        calls = [loop.name for loop in opened.loops if loop.layer == name]
        call_requests += [(call, name) for call in ([name] if opened.layer_loops(name) else calls or [name])]
    if taps.layers is None:
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
    elif not taps.all_must_run:
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
