"""tf_keras models that were built with eager execution disabled, as nets of their Keras graph.

No function of Keras is called that adds operations to it, such as ``get_session``.
"""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from types import MappingProxyType
from typing import Any

import numpy as np

from rnnlens.adapters.protocol import Batch, LayerInfo
from rnnlens.errors import InputError, ModelError, UnsupportedError, duplicate_name_message, message
from rnnlens.typing import Array, leaves_of, values_of

from .naming import KerasNames, KerasRecurrence
from .public import Net

_KINDS = {"SimpleRNN": "simple_rnn", "LSTM": "lstm", "GRU": "gru"}
_KINDS |= {f"ConvLSTM{rank}D": f"conv_lstm_{rank}d" for rank in (1, 2, 3)}


def net_of(model: Any) -> Net:
    """Return a tf_keras model as a net of its graph. Raise ModelError if the model has no graph yet."""
    inputs, outputs = _tensor_leaves(getattr(model, "inputs", None)), _tensor_leaves(getattr(model, "outputs", None))
    if not inputs or not outputs:
        raise ModelError(
            f"Model {model.name!r} has no graph yet.",
            expected="a model that was called on its inputs",
            hint="model.fit or model.predict on a batch; with eager disabled that is when its graph is built",
        )
    from tf_keras.src import backend

    graph = outputs[0].graph
    with graph.as_default():
        session = backend._get_session()
    targets = list(getattr(model, "_feed_targets", None) or []) if _is_compiled(model) else []
    names = list(getattr(model, "input_names", None) or [t.op.name for t in inputs])
    out_names = list(getattr(model, "output_names", None) or [t.op.name for t in outputs])
    loss = model.total_loss if _is_compiled(model) else None
    return Net(
        session,
        MappingProxyType({name: (tensor,) for name, tensor in zip(names, inputs, strict=True)}),
        MappingProxyType(dict(zip(out_names, outputs, strict=True))),
        loss if hasattr(loss, "op") else None,
        tuple((tensor,) for tensor in targets),
        keras=_describe_model(model, graph, outputs),
    )


def _is_compiled(model: Any) -> bool:
    return bool(getattr(model, "optimizer", None)) and getattr(model, "total_loss", None) is not None


def _tensor_leaves(tensors: Any) -> list[Any]:
    return [] if tensors is None else [t for t in values_of(tensors) if hasattr(t, "op")]


def _describe_model(model: Any, graph: Any, outputs: list[Any]) -> KerasNames:
    recurrences: list[KerasRecurrence] = []
    owners: dict[str, tuple[str, str]] = {}
    outputs_by_layer: dict[str, tuple[str, ...]] = {}
    for name, layer, wrapper in _walk_layers(model):
        if name in outputs_by_layer:
            raise ModelError(duplicate_name_message(name))
        direction_layers = (layer.forward_layer, layer.backward_layer) if hasattr(layer, "forward_layer") else (layer,)
        recurrences += [
            _describe_recurrence(name, direction_layer, layer, wrapper)
            for direction_layer in direction_layers
            if _is_recurrent(layer)
        ]
        for variable, key in _weight_keys(layer):
            owners.setdefault(variable, (name, key))
        outputs_by_layer[name] = _output_names(layer, graph)
    from tf_keras.src import backend

    phase = backend._GRAPH_LEARNING_PHASES.get(graph)
    phase = phase() if callable(phase) else phase
    compiled: dict[str, Any] = {}
    if _is_compiled(model):
        weights, scales = getattr(model, "_feed_sample_weights", None) or [], model._loss_weights_list
        compiled["weights"] = tuple(tensor.name for tensor in weights)
        compiled |= {"optimizer": type(model.optimizer).__name__, "loss": model.loss}
        compiled["scales"] = tuple(map(float, scales)) if all(isinstance(scale, Real) for scale in scales) else None
    return KerasNames(
        tuple(recurrences),
        tuple(owners.items()),
        tuple((name, tensors) for name, tensors in outputs_by_layer.items() if tensors),
        phase.name if hasattr(phase, "name") else None if phase is None else bool(phase),
        added_losses=tuple(loss.name for loss in model.losses if hasattr(loss, "op") and loss.graph is graph),
        masks=tuple(_mask_name(tensor) for tensor in outputs),
        **compiled,
    )


def _mask_name(tensor: Any) -> str | None:
    mask = getattr(tensor, "_keras_mask", None)
    return None if mask is None else str(mask.name)


def _walk_layers(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, layer, TimeDistributed wrapper or None) for every layer, containers before their contents."""
    seen_ids = {id(model)}
    if _is_recurrent(model):
        yield model.name, model, None
        return

    def visit(parent: Any, prefix: str, wrapper: Any) -> Iterator[tuple[str, Any, Any]]:
        for child in parent._flatten_layers(include_self=False, recursive=False):
            if id(child) in seen_ids or type(child).__name__ == "InputLayer":
                continue
            seen_ids.add(id(child))
            yield prefix + child.name, child, wrapper
            if not _is_recurrent(child):
                inner_wrapper = child if type(child).__name__ == "TimeDistributed" else wrapper
                yield from visit(child, f"{prefix}{child.name}/", inner_wrapper)

    yield from visit(model, "", None)


def _is_recurrent(layer: Any) -> bool:
    return hasattr(layer, "forward_layer") or any(base.__name__ == "RNN" for base in type(layer).__mro__)


def _describe_recurrence(name: str, direction_layer: Any, owner: Any, wrapper: Any) -> KerasRecurrence:
    cell = getattr(direction_layer, "cell", None)
    return KerasRecurrence(
        name,
        "backward" if direction_layer.go_backwards else "forward",
        owner is not direction_layer,
        frozenset() if cell is None else frozenset(_operation_name(v) for v in cell.weights),
        bool(direction_layer.return_sequences),
        bool(direction_layer.built),
        _refusal(name, direction_layer, owner, wrapper),
        _dropout_refusal(name, direction_layer),
        len(getattr(cell, "cells", ())) > 1,
        _layer_info(name, direction_layer, owner),
    )


def _refusal(name: str, direction_layer: Any, owner: Any, wrapper: Any) -> str:
    """Return the error text if ``direction_layer``, one direction of a layer, cannot be captured; "" otherwise."""
    kind, problem = type(direction_layer).__name__, f"Layer {name!r} cannot be traced"
    if wrapper is not None:
        return message(
            f"{problem}: {kind} inside TimeDistributed runs once per outer step.",
            hint="give the inner layer a model of its own and trace that on one outer step, x[:, i]",
        )
    if "CuDNN" in kind:
        return message(f"{problem}: {kind} runs in a kernel of the GPU.", hint="name the other layers, layers=[...]")
    nodes = getattr(owner, "_inbound_nodes", [])
    is_masked = any(node.call_kwargs.get("mask") is not None for node in nodes)
    is_masked = is_masked or any(_mask_name(tensor) for node in nodes for tensor in _tensor_leaves(node.keras_inputs))
    if getattr(direction_layer, "unroll", False) and is_masked:
        hint = "unroll=False, which computes the same"
        return message(f"{problem}: its steps are unrolled, and masked.", got="unroll=True, with a mask", hint=hint)
    return ""


def _dropout_refusal(name: str, direction_layer: Any) -> str:
    """Return the error text if ``direction_layer``, one direction of a layer, drops states in its loop; else ""."""
    cell = getattr(direction_layer, "cell", None)
    cells = getattr(cell, "cells", [cell])  # the input of a stacked cell is the state of the one below
    kinds = ("recurrent_dropout", "dropout") if len(cells) > 1 else ("recurrent_dropout",)
    rates = {kind: max(getattr(stacked_cell, kind, 0) or 0 for stacked_cell in cells) for kind in kinds}
    if not any(rates.values()):
        return ""
    return message(
        f"Layer {name!r} cannot be traced: its states are dropped within its loop.",
        got=", ".join(f"{key}={rate}" for key, rate in rates.items() if rate) + ", eager execution disabled",
        hint="the same weights in a layer without, which is what evaluation runs; or run eagerly",
    )


def _layer_info(name: str, direction_layer: Any, owner: Any) -> LayerInfo:
    cell = getattr(direction_layer, "cell", direction_layer)
    kind = next(
        (_KINDS[base.__name__] for base in type(direction_layer).__mro__ if base.__name__ in _KINDS),
        type(cell).__name__,
    )
    size = getattr(cell, "state_size", getattr(direction_layer, "units", 0))
    sizes = values_of(list(size) if isinstance(size, list | tuple) else [size])
    is_bidirectional = owner is not direction_layer
    options = {
        "return_state": direction_layer.return_state,
        "go_backwards": direction_layer.go_backwards and not is_bidirectional,
        "unroll": getattr(direction_layer, "unroll", False),
        "dropout": getattr(cell, "dropout", 0.0),
        "recurrent_dropout": getattr(cell, "recurrent_dropout", 0.0),
    }
    return LayerInfo(
        name=name,
        kind=type(owner).__name__,
        cell=kind,
        units=int(sizes[0]),
        direction="bidirectional" if is_bidirectional else "backward" if direction_layer.go_backwards else "forward",
        return_sequences=direction_layer.return_sequences,
        stateful=direction_layer.stateful,
        options=options | ({"merge_mode": owner.merge_mode} if is_bidirectional else {}),
    )


def _operation_name(variable: Any) -> str:
    """Return the name of the operation of a variable."""
    handle = getattr(variable, "handle", None)
    return str(variable.op.name if handle is None else handle.op.name)


def _weight_keys(layer: Any) -> list[tuple[str, str]]:
    """Return pairs of a variable's operation name and a short name that is unique within the layer."""
    operation_names = [_operation_name(v) for v in getattr(layer, "weights", [])]
    short_names = [name.rpartition("/")[2] for name in operation_names]
    if len(set(short_names)) == len(short_names):
        return list(zip(operation_names, short_names, strict=True))
    marker = f"{layer.name}/"
    return [(name, name.partition(marker)[2] or name) for name in operation_names]


def _output_names(layer: Any, graph: Any) -> tuple[str, ...]:
    """Return the names of the output tensors of a layer's calls; calls with several outputs are left out."""
    calls = [_tensor_leaves(node.outputs) for node in getattr(layer, "_inbound_nodes", [])]
    return tuple(tensors[0].name for tensors in calls if len(tensors) == 1 and tensors[0].graph is graph)


def phase_feed(net: Net, training: bool) -> dict[str, bool]:
    """Return the ``feed_dict`` of Keras' learning phase; raise UnsupportedError if the graph fixes the other phase."""
    phase = net.keras.learning_phase
    if isinstance(phase, bool) and phase != training:
        raise UnsupportedError(
            "The model was built under K.set_learning_phase, for one phase alone.",
            got=f"training={training}",
            expected=f"training={phase}",
        )
    return {phase: training} if isinstance(phase, str) else {}


def sample_weights(batch: Batch) -> list[Array | None]:
    """Return one array of sample weights per target, class weights included; None where neither is given."""
    targets = [np.asarray(leaf) for leaf in leaves_of(batch.y)]
    user_weights = [np.asarray(leaf) for leaf in leaves_of(batch.sample_weight)]
    target_weights: list[Array | None] = [*user_weights, *[None] * (len(targets) - len(user_weights))]
    if batch.class_weight is None:
        return target_weights
    if len(targets) != 1:
        raise InputError("class_weight= is for models with one target.", got=f"{len(targets)} targets")
    labels = targets[0].argmax(-1) if targets[0].ndim > 1 and targets[0].shape[-1] > 1 else targets[0]
    labels = labels.reshape(len(labels), -1)[:, 0].astype(int)
    class_weights = np.array([dict(batch.class_weight).get(int(label), 1.0) for label in labels])
    return [class_weights if target_weights[0] is None else class_weights * target_weights[0]]
