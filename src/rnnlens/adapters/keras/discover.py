"""Discovery: find the layers of a Keras model and give each the node name that results use."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import (
    LayerNotFoundError,
    ModelError,
    UnbuiltModelError,
    UnsupportedError,
    did_you_mean,
    duplicate_name_message,
    message,
)
from ..protocol import LayerInfo
from .dialect import Dialect, LoopOverCell, dialect_of
from .weights import kind_of, known_class, layer_signature


@dataclass(frozen=True, eq=False)
class RecurrentSite:
    """One place in a model where a recurrence runs: a recurrent layer, one direction of a bidirectional one, or a cell.

    For a cell that the model's own code calls in a loop, ``layer`` is a :class:`.dialect.LoopOverCell`. ``name`` is the
    node name in results. ``refusal`` is the reason why the layer cannot be hooked, or None.
    """

    name: str
    layer: Any
    owner: Any
    bidirectional: bool = False
    refusal: str | None = None

    @property
    def keras(self) -> Dialect:
        """The dialect of the Keras package that the layer belongs to."""
        return dialect_of(self.layer)

    @property
    def direction(self) -> Literal["forward", "backward"]:
        """Direction in which the recurrence runs through time."""
        return "backward" if self.layer.go_backwards else "forward"

    @property
    def is_loop(self) -> bool:
        """Whether the model's own code calls the cell step by step."""
        return isinstance(self.layer, LoopOverCell)


@dataclass(frozen=True)
class ModelLayers:
    """All layers of a model by node name: the recurrent sites in order, and the other layers.

    ``root``: the model itself by its node name, for variables that it holds beside its layers.
    """

    sites: tuple[RecurrentSite, ...]
    other_layers: dict[str, Any]
    root: dict[str, Any]

    def names(self) -> list[str]:
        """Return the names of all layers, recurrent layers first."""
        return list(dict.fromkeys([*(s.name for s in self.sites), *self.other_layers]))

    def layers(self) -> dict[str, Any]:
        """Return the layers by name, recurrent layers first; a bidirectional layer is one."""
        return {**{site.name: site.owner for site in self.sites}, **self.other_layers}

    def holder(self, name: str) -> Any:
        """Return the layer with a node name, or the model itself. Raises LayerNotFoundError if there is neither."""
        return self.root[name] if name in self.root else self.layers()[base_name(name, self)]


def locate_layers(model: Any) -> ModelLayers:
    """Find all layers of a model, nested ones too; raise an error if it is not built or a name is ambiguous."""
    if not model.built:
        raise UnbuiltModelError(
            f"Model {model.name!r} is not built: its weights do not exist yet.",
            expected="a model that was called on a batch",
            hint="model(x)",
        )
    sites: list[RecurrentSite] = []
    other_layers: dict[str, Any] = {}
    for name, layer, wrapper in _walk_layers(model):
        if _is_recurrent(dialect_of(layer), layer) and not layer.built:
            continue  # it was never called: it has no weights, and no output depends on it
        layer_sites = list(_sites_of(name, layer, wrapper, model))
        if (not layer_sites or layer_sites[0].bidirectional) and other_layers.setdefault(name, layer) is not layer:
            raise ModelError(duplicate_name_message(name))
        sites.extend(layer_sites)
    owners: dict[str, Any] = {}
    for site in sites:
        if owners.setdefault(site.name, site.owner) is not site.owner:
            raise ModelError(duplicate_name_message(site.name))
    return ModelLayers(tuple(sites), other_layers, {root_name(model): model})


def root_name(model: Any) -> str:
    """Return the node name of the model itself: its own name, with underscores appended while a layer has that name."""
    inner_graph = getattr(model, "_functional", None)  # of a Sequential, by its name
    used_names = {c.name for c in model._flatten_layers(include_self=False, recursive=False) if c is not inner_graph}
    name = str(model.name)
    while name in used_names:
        name += "_"
    return name


def describe(model: Any) -> list[LayerInfo]:
    """Return one row (``LayerInfo``) per recurrent layer, as ``rl.layers`` lists them.

    A bidirectional layer is one row.
    """
    rows: dict[str, RecurrentSite] = {}
    for site in locate_layers(model).sites:
        rows.setdefault(site.name, site)
    return list(map(_layer_info, rows.values()))


#: Attributes that calls and training of Keras change: flags, compiled functions, records, masks, copies of layer lists.
_CHANGED_BY_KERAS = frozenset(
    [
        *("_called", "_initial_epoch", "stop_training", "stop_evaluating", "stop_predicting", "training", "_modules"),
        *("train_function", "test_function", "predict_function", "train_tf_function", "_eval_epoch_iterator"),
        *("history", "optimizer", "_dropout_mask", "_recurrent_dropout_mask", "_dropout_mask_cache"),
        *("_jax_state", "_jax_state_synced"),
    ]
)
_PLAIN = frozenset({bool, int, float, str, type(None)})


def fingerprint(model: Any) -> Hashable:
    """Return a hashable of a model's layers, their attributes, hooks and code, but not of the values of weights."""
    structure: list[Any] = []
    for layer in model._flatten_layers():
        code = getattr(inspect.getattr_static(type(layer), "call", None), "__code__", None)
        structure += [id(layer), type(layer), code, len(getattr(layer, "_inbound_nodes", ()))]
        structure += [
            (name, value if type(value) in _PLAIN else _identity(value))
            for name, value in vars(layer).items()
            if name not in _CHANGED_BY_KERAS and not name.startswith("_self_")  # TensorFlow's, for checkpoints
        ]
    return tuple(structure)


def _identity(value: Any) -> Any:
    """Return a hashable of an attribute: plain values as they are, containers by their entries, others by identity."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_identity, value))
    if isinstance(value, dict):
        return tuple((str(key), _identity(entry)) for key, entry in value.items())
    return (getattr(value, "__code__", None), id(value)) if inspect.isfunction(value) else id(value)


def choose_layers(
    model_layers: ModelLayers, requested_names: tuple[str, ...] | None
) -> tuple[list[RecurrentSite], dict[str, Any]]:
    """Return the recurrent sites and the other layers that ``requested_names`` names; all sites if it is None.

    A node such as ``"lstm#1"`` is found under its layer's name. An error is raised for an unknown name, a model without
    recurrent layers, and a layer that cannot be hooked.
    """
    if requested_names is None:
        if not model_layers.sites:
            raise ModelError(
                "There is no recurrent layer in this model.",
                expected="a keras.layers.RNN, SimpleRNN, LSTM, GRU or Bidirectional",
                hint="name the layers to look at: layers=[...], " + did_you_mean("", model_layers.names()),
            )
        chosen_sites, other_layers = list(model_layers.sites), {}
    else:
        names = {base_name(name, model_layers) for name in requested_names}
        chosen_sites = [s for s in model_layers.sites if s.name in names]
        recurrent_names = {s.name for s in chosen_sites}
        other_layers = {
            name: layer for name, layer in model_layers.other_layers.items() if name in names - recurrent_names
        }
    for site in chosen_sites:
        if site.refusal is not None:
            raise UnsupportedError(site.refusal)
    return chosen_sites, other_layers


def given_state_layers(model_layers: ModelLayers, initial_state: Mapping[str, Any] | None) -> list[str]:
    """Return the layers for which ``initial_state`` has states; raise LayerNotFoundError for an unknown name."""
    names = list(initial_state or ())
    layer_names = list(dict.fromkeys(site.name for site in model_layers.sites))
    for name in names:
        if name not in layer_names:
            problem = f"initial_state= names {name!r}, which is not a recurrent layer of this model."
            raise LayerNotFoundError(problem, hint=did_you_mean(name, layer_names))
    return names


def implied_sites(
    model_layers: ModelLayers, sites: Iterable[RecurrentSite], other_names: Iterable[str]
) -> list[RecurrentSite]:
    """Return sites to hook besides ``sites``: those in ``other_names``, and layers whose cell a hooked loop calls."""
    sites, names = list(sites), set(other_names)
    looped_cells = {
        id(site.layer.cell) for site in model_layers.sites if site.is_loop and (site in sites or site.name in names)
    }
    return [
        site
        for site in model_layers.sites
        if site not in sites
        and (site.name in names or (not site.is_loop and id(getattr(site.layer, "cell", None)) in looped_cells))
    ]


def step_sites(model_layers: ModelLayers, sites: Iterable[RecurrentSite]) -> list[RecurrentSite]:
    """Return the recurrent layers besides ``sites`` that the model's code may call one step at a time."""
    candidates = (site for site in model_layers.sites if site.refusal is None)
    return implied_sites(
        model_layers, sites, [site.name for site in candidates if site.is_loop or site.layer.return_state]
    )


def base_name(name: str, model_layers: ModelLayers) -> str:
    """Return the layer name in a node name such as ``"lstm#1"``; raise LayerNotFoundError for an unknown one."""
    names = model_layers.names()
    if name in names:
        return name
    layer_name, mark, call_number = name.rpartition("#")
    if mark and call_number.isdigit() and layer_name in names:
        return layer_name
    raise LayerNotFoundError(f"No layer is called {name!r}.", hint=did_you_mean(name, names))


def _walk_layers(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (node name, layer, TimeDistributed wrapper around it or None) of every layer, containers first."""
    keras = dialect_of(model)
    visited_ids: set[int] = {id(model)}
    if _is_recurrent(keras, model):
        yield model.name, model, None
        return

    def visit(parent: Any, prefix: str, wrapper: Any) -> Iterator[tuple[str, Any, Any]]:
        for child in parent._flatten_layers(include_self=False, recursive=False):
            # The Functional model that Keras builds inside a Sequential has the same layers.
            is_inner_graph = isinstance(parent, keras.Sequential) and getattr(parent, "_functional", None) is child
            if id(child) in visited_ids or isinstance(child, keras.layers.InputLayer) or is_inner_graph:
                continue
            visited_ids.add(id(child))
            name = prefix + child.name
            yield name, child, wrapper
            if not _is_recurrent(keras, child):
                child_wrapper = child if isinstance(child, keras.layers.TimeDistributed) else wrapper
                yield from visit(child, name + "/", child_wrapper)

    yield from visit(model, "", None)


def _is_recurrent(keras: Dialect, layer: Any) -> bool:
    return isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional))


def _sites_of(name: str, layer: Any, wrapper: Any, model: Any) -> Iterator[RecurrentSite]:
    keras = dialect_of(layer)
    if isinstance(layer, keras.layers.Bidirectional):
        direction_layers = (layer.forward_layer, layer.backward_layer)
        pair_refusal = _refusal_of_a_pair(name, *direction_layers)
        for direction_layer in direction_layers:
            yield RecurrentSite(
                name, direction_layer, layer, True, _refusal(name, direction_layer, wrapper) or pair_refusal
            )
    elif isinstance(layer, keras.layers.RNN):
        yield RecurrentSite(name, layer, layer, False, _refusal(name, layer, wrapper))
    elif hasattr(layer, "state_size") and layer.built and _is_called(layer, model):
        yield RecurrentSite(name, LoopOverCell(layer), layer)


def _is_called(cell: Any, model: Any) -> bool:
    """Return whether the code of a model may call a cell itself, not only through a recurrent layer.

    A cell of a recurrent layer is called by the code if a method other than ``__init__`` and ``build`` reads it.
    """
    keras, layers = dialect_of(cell), list(model._flatten_layers())
    if not any(isinstance(layer, keras.layers.RNN) and layer.cell is cell for layer in layers):
        return True
    for layer in layers:
        members = vars(layer) | vars(layer).get("_modules", {})  # torch keeps sublayers apart
        names = {name for name, value in members.items() if value is cell}
        methods = [m for base in type(layer).__mro__ if not keras.is_from_keras(base) for m in vars(base).items()]
        code_objects = [
            getattr(method, "__code__", None) for name, method in methods if name not in ("__init__", "build")
        ]
        if any(names & set(code_object.co_names) for code_object in code_objects if code_object is not None):
            return True
    return False


def _refusal(name: str, layer: Any, wrapper: Any) -> str | None:
    keras, kind = dialect_of(layer), type(layer).__name__
    if wrapper is not None:
        return message(
            f"Layer {name!r} cannot be traced: {kind} inside TimeDistributed runs once per outer step.",
            hint="give the inner layer a model of its own and trace that on one outer step, x[:, i]",
        )
    if not isinstance(layer, keras.layers.RNN):
        return message(
            f"Layer {name!r} cannot be traced: its wrapped layer {kind} is not a keras.layers.RNN.",
            hint="wrap the cell in keras.layers.RNN(cell)",
        )
    has_space = any("ConvLSTM" in base.__name__ for base in type(layer).__mro__)
    if has_space and known_class(layer.cell) is None:
        return message(
            f"Layer {name!r} cannot be traced: its states have spatial axes, and rnnlens does not have its equations.",
            got=f"{kind} with data_format={getattr(layer.cell, 'data_format', None)!r}",
            expected="a ConvLSTM layer with data_format='channels_last' and activations of Keras",
            hint="name the other layers, layers=[...]",
        )
    refusal = keras.refusal(layer)
    return (
        None if refusal is None else message(f"Layer {name!r} cannot be traced: {kind} {refusal[0]}.", hint=refusal[1])
    )


def _refusal_of_a_pair(name: str, forward: Any, backward: Any) -> str | None:
    """Return why both directions of a bidirectional layer cannot be shown side by side.

    Returns None if they can. Both need the same quantities in the same sizes, and samples as the first axis.
    """
    layers = [layer for layer in (forward, backward) if isinstance(layer, dialect_of(layer).layers.RNN)]
    if any(dialect_of(layer).time_major(layer) for layer in layers):
        return message(
            f"Layer {name!r} cannot be traced: its directions have time as the first axis.",
            hint="time_major=False, or two layers, one with go_backwards=True",
        )
    signatures = [layer_signature(layer) for layer in layers]
    if len(signatures) < 2 or signatures[0] == signatures[1]:
        return None
    return message(
        f"Layer {name!r} cannot be traced: its two directions have different cells.",
        got=f"{signatures[0][0]} of {signatures[0][1]} and {signatures[1][0]} of {signatures[1][1]} units",
        expected="cells of one type and size, both with a bias or both without",
        hint="two layers, one with go_backwards=True; rl.gradients(...) by the model's own input and weights works",
    )


def _layer_info(site: RecurrentSite) -> LayerInfo:
    keras, layer, cell = site.keras, site.layer, site.layer.cell
    output_size = keras.output_size(cell)
    options = {
        "return_state": layer.return_state,
        "go_backwards": layer.go_backwards,
        "unroll": getattr(layer, "unroll", False),  # layers of cuDNN have none
        "dropout": getattr(cell, "dropout", 0.0),
        "recurrent_dropout": getattr(cell, "recurrent_dropout", 0.0),
    }
    if site.bidirectional:
        options["merge_mode"] = site.owner.merge_mode
        options["go_backwards"] = False
    if site.refusal is not None:
        options["refused"] = site.refusal.splitlines()[0]
    return LayerInfo(
        name=site.name,
        kind=type(site.owner).__name__,
        cell=kind_of(cell),
        units=int(keras.tree.flatten(keras.state_size(layer) if output_size is None else output_size)[0]),
        direction="bidirectional" if site.bidirectional else site.direction,
        return_sequences=layer.return_sequences,
        masked=_is_masked(site.owner),
        stateful=layer.stateful,
        options=options,
    )


def _is_masked(layer: Any) -> bool | None:
    """Return whether a mask reaches the layer; None if that is known only when the model runs."""
    nodes = getattr(layer, "_inbound_nodes", [])
    tensors = [t for node in nodes for t in dialect_of(layer).tree.flatten(node.input_tensors)]
    return any(getattr(t, "_keras_mask", None) is not None for t in tensors) if nodes else None


def refuse_random(site: RecurrentSite, training: bool) -> None:
    """Raise UnsupportedError in training if a cell of unknown equations draws random numbers or mixes samples."""
    keras, cell = site.keras, site.layer.cell
    if not training or known_class(cell) is not None or not isinstance(cell, keras.Layer):
        return
    layers = list(cell._flatten_layers())
    if any(isinstance(layer, keras.layers.BatchNormalization) and layer.trainable for layer in layers):
        raise UnsupportedError(
            f"Layer {site.name!r}: batch normalisation in the cell {type(cell).__name__} mixes the samples "
            "of the batch.",
            got="training=True",
            expected="a cell whose step depends only on its input, its state and its weights",
            hint="training=False",
        )
    if any(_is_random(keras, layer) for layer in layers):
        raise UnsupportedError(
            f"Layer {site.name!r}: dropout inside the cell {type(cell).__name__} cannot be replayed.",
            hint="training=False, or dropout between the layers instead of inside the cell",
        )


def _is_random(keras: Dialect, layer: Any) -> bool:
    rates = [getattr(layer, name, 0) for name in ("dropout", "recurrent_dropout", "rate")]
    has_dropout = any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)
    return has_dropout or (keras.draws_random_numbers(layer) and known_class(layer) is None)
