"""tf_keras models that were built with eager execution disabled, as nets of their Keras graph.

No function of Keras is called that adds operations to it, such as ``get_session``.
"""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from types import MappingProxyType
from typing import Any

import numpy as np

from ...errors import InputError, ModelError, UnsupportedError, message, two_layers_called
from ...typing import Array, leaves_of
from ..protocol import Batch, LayerInfo
from .naming import KerasNames, KerasSite
from .public import Net

_KINDS = {"SimpleRNN": "simple_rnn", "LSTM": "lstm", "GRU": "gru"}
_KINDS |= {f"ConvLSTM{rank}D": f"conv_lstm_{rank}d" for rank in (1, 2, 3)}


def net_of(model: Any) -> Net:
    """Return a tf_keras model as a net of its graph. Raise ModelError if the model has no graph yet."""
    inputs, outputs = _flat(getattr(model, "inputs", None)), _flat(getattr(model, "outputs", None))
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
        keras=_names(model, graph, outputs),
    )


def _is_compiled(model: Any) -> bool:
    return bool(getattr(model, "optimizer", None)) and getattr(model, "total_loss", None) is not None


def _flat(tensors: Any) -> list[Any]:
    return [] if tensors is None else [t for t in leaves_of(tensors) if hasattr(t, "op")]


def _names(model: Any, graph: Any, outputs: list[Any]) -> KerasNames:
    sites: list[KerasSite] = []
    owners: dict[str, tuple[str, str]] = {}
    made: dict[str, tuple[str, ...]] = {}
    for name, layer, wrapper in _walk(model):
        if name in made:
            raise ModelError(two_layers_called(name))
        halves = (layer.forward_layer, layer.backward_layer) if hasattr(layer, "forward_layer") else (layer,)
        sites += [_site(name, half, layer, wrapper) for half in halves if _is_recurrent(layer)]
        for variable, key in _keys(layer):
            owners.setdefault(variable, (name, key))
        made[name] = _outputs(layer, graph)
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
        tuple(sites),
        tuple(owners.items()),
        tuple((name, tensors) for name, tensors in made.items() if tensors),
        phase.name if hasattr(phase, "name") else None if phase is None else bool(phase),
        extra=tuple(loss.name for loss in model.losses if hasattr(loss, "op") and loss.graph is graph),
        masks=tuple(_mask(tensor) for tensor in outputs),
        **compiled,
    )


def _mask(tensor: Any) -> str | None:
    mask = getattr(tensor, "_keras_mask", None)
    return None if mask is None else str(mask.name)


def _walk(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, layer, TimeDistributed wrapper or None) for every layer, containers before their contents."""
    seen = {id(model)}
    if _is_recurrent(model):
        yield model.name, model, None
        return

    def visit(parent: Any, prefix: str, wrapper: Any) -> Iterator[tuple[str, Any, Any]]:
        for child in parent._flatten_layers(include_self=False, recursive=False):
            if id(child) in seen or type(child).__name__ == "InputLayer":
                continue
            seen.add(id(child))
            yield prefix + child.name, child, wrapper
            if not _is_recurrent(child):
                inside = child if type(child).__name__ == "TimeDistributed" else wrapper
                yield from visit(child, f"{prefix}{child.name}/", inside)

    yield from visit(model, "", None)


def _is_recurrent(layer: Any) -> bool:
    return hasattr(layer, "forward_layer") or any(base.__name__ == "RNN" for base in type(layer).__mro__)


def _site(name: str, half: Any, owner: Any, wrapper: Any) -> KerasSite:
    cell = getattr(half, "cell", None)
    return KerasSite(
        name,
        "backward" if half.go_backwards else "forward",
        owner is not half,
        frozenset() if cell is None else frozenset(_operation(v) for v in cell.weights),
        bool(half.return_sequences),
        bool(half.built),
        _refusal(name, half, owner, wrapper),
        _dropped(name, half),
        len(getattr(cell, "cells", ())) > 1,
        _info(name, half, owner),
    )


def _refusal(name: str, half: Any, owner: Any, wrapper: Any) -> str:
    """Return the error text if one direction ``half`` of a layer cannot be captured; "" otherwise."""
    kind, what = type(half).__name__, f"Layer {name!r} cannot be traced"
    if wrapper is not None:
        return message(
            f"{what}: {kind} inside TimeDistributed runs once per outer step.",
            hint="give the inner layer a model of its own and trace that on one outer step, x[:, i]",
        )
    if "CuDNN" in kind:
        return message(f"{what}: {kind} runs in a kernel of the GPU.", hint="name the other layers, layers=[...]")
    nodes = getattr(owner, "_inbound_nodes", [])
    masked = any(node.call_kwargs.get("mask") is not None for node in nodes)
    masked = masked or any(_mask(tensor) for node in nodes for tensor in _flat(node.keras_inputs))
    if getattr(half, "unroll", False) and masked:
        hint = "unroll=False, which computes the same"
        return message(f"{what}: its steps are unrolled, and masked.", got="unroll=True, with a mask", hint=hint)
    return ""


def _dropped(name: str, half: Any) -> str:
    """Return the error text if one direction ``half`` of a layer drops states inside its loop; "" otherwise."""
    cell = getattr(half, "cell", None)
    cells = getattr(cell, "cells", [cell])  # the input of a stacked cell is the state of the one below
    kinds = ("recurrent_dropout", "dropout") if len(cells) > 1 else ("recurrent_dropout",)
    rates = {kind: max(getattr(part, kind, 0) or 0 for part in cells) for kind in kinds}
    if not any(rates.values()):
        return ""
    return message(
        f"Layer {name!r} cannot be traced: its states are dropped within its loop.",
        got=", ".join(f"{key}={rate}" for key, rate in rates.items() if rate) + ", eager execution disabled",
        hint="the same weights in a layer without, which is what evaluation runs; or run eagerly",
    )


def _info(name: str, half: Any, owner: Any) -> LayerInfo:
    cell = getattr(half, "cell", half)
    kind = next((_KINDS[base.__name__] for base in type(half).__mro__ if base.__name__ in _KINDS), type(cell).__name__)
    size = getattr(cell, "state_size", getattr(half, "units", 0))
    sizes = leaves_of(list(size) if isinstance(size, list | tuple) else [size])
    both = owner is not half
    options = {
        "return_state": half.return_state,
        "go_backwards": half.go_backwards and not both,
        "unroll": getattr(half, "unroll", False),
        "dropout": getattr(cell, "dropout", 0.0),
        "recurrent_dropout": getattr(cell, "recurrent_dropout", 0.0),
    }
    return LayerInfo(
        name=name,
        kind=type(owner).__name__,
        cell=kind,
        units=int(sizes[0]),
        direction="bidirectional" if both else "backward" if half.go_backwards else "forward",
        return_sequences=half.return_sequences,
        stateful=half.stateful,
        options=options | ({"merge_mode": owner.merge_mode} if both else {}),
    )


def _operation(variable: Any) -> str:
    """Return the name of the operation of a variable."""
    handle = getattr(variable, "handle", None)
    return str(variable.op.name if handle is None else handle.op.name)


def _keys(layer: Any) -> list[tuple[str, str]]:
    """Return pairs of a variable's operation name and a short name that is unique within the layer."""
    own = [_operation(v) for v in getattr(layer, "weights", [])]
    last = [name.rpartition("/")[2] for name in own]
    if len(set(last)) == len(last):
        return list(zip(own, last, strict=True))
    marker = f"{layer.name}/"
    return [(name, name.partition(marker)[2] or name) for name in own]


def _outputs(layer: Any, graph: Any) -> tuple[str, ...]:
    """Return the names of the output tensors of a layer's calls; calls with several outputs are left out."""
    calls = [_flat(node.outputs) for node in getattr(layer, "_inbound_nodes", [])]
    return tuple(tensors[0].name for tensors in calls if len(tensors) == 1 and tensors[0].graph is graph)


def phase_feed(net: Net, training: bool) -> dict[str, bool]:
    """Return the ``feed_dict`` of Keras' learning phase; raise UnsupportedError if the graph fixes the other phase."""
    phase = net.keras.phase
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
    given = [np.asarray(leaf) for leaf in leaves_of(batch.sample_weight)]
    found: list[Array | None] = [*given, *[None] * (len(targets) - len(given))]
    if batch.class_weight is None:
        return found
    if len(targets) != 1:
        raise InputError("class_weight= is for models with one target.", got=f"{len(targets)} targets")
    labels = targets[0].argmax(-1) if targets[0].ndim > 1 and targets[0].shape[-1] > 1 else targets[0]
    labels = labels.reshape(len(labels), -1)[:, 0].astype(int)
    weights = np.array([dict(batch.class_weight).get(int(label), 1.0) for label in labels])
    return [weights if found[0] is None else weights * found[0]]
