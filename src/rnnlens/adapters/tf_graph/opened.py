"""A net in our copy of its graph: what is fed, what is fetched, which loops there are."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from ...errors import InputError, LayerNotFoundError, UnsupportedError, did_you_mean, message, shown
from ...trees import leaves_of
from ...typing import Array
from ..protocol import Batch
from .definition import definition
from .found import Loop
from .graph_copy import GraphCopy, cone
from .loops import find
from .losses import fed_to, is_built, loss_in
from .naming import renamed
from .public import Net, refuse_closed, refuse_remote
from .variables import is_variable, read

_NONE: Mapping[tuple[Any, str], Array] = MappingProxyType({})
#: Copies by graph: of its present version, for the ends and seeds that were asked for last.
_COPIES: weakref.WeakKeyDictionary[Any, dict[Any, GraphCopy]] = weakref.WeakKeyDictionary()
_MOST_COPIES, _MOST_BUILT = 4, 32
#: Operations whose values are no settings: data, and results of loops.
_UNSETTLED = frozenset({"Placeholder", "Exit", "RefExit", "While", "StatelessWhile"})

#: What is added to variables in our copies, by graph and name, while an experiment runs in this thread.
NUDGES: ContextVar[Mapping[tuple[Any, str], Array]] = ContextVar("nudges of variables", default=_NONE)


class Opened:
    """A net, in a copy of its graph.

    Attributes
    ----------
    net, copy
        The user's, and ours.
    inputs, outputs, loss
        The tensors of the copy.
    """

    def __init__(self, net: Net, copy: GraphCopy) -> None:
        self.net, self.copy = net, copy
        self.inputs = [tuple(map(copy.same, alike)) for alike in net.inputs.values()]
        self.outputs = [copy.same(tensor) for tensor in net.outputs.values()]
        self.loss = None if net.loss is None else copy.same(net.loss)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The recurrences of the net, in the order of the graph."""
        return self.copy.loops

    def layer(self, name: str) -> list[Loop]:
        """The loops of one layer: one, or one per direction, forward first."""
        found = [loop for loop in self.loops if loop.name == name]
        return sorted(found, key=lambda loop: loop.direction == "backward")

    def first_call(self, name: str) -> list[Loop]:
        """The loops of the first call of a layer; none for one that is not recurrent."""
        return self.layer(name) or self.layer(f"{name}#0")

    def read(self, names: Iterable[str]) -> dict[str, Array]:
        """Present values of variables, from the user's session; nudged where an experiment nudges them."""
        found = read(self.net.session, names)
        return {name: value + NUDGES.get().get((self.net.graph, name), 0) for name, value in found.items()}

    def variables(self, fetches: Sequence[Any], feed: Mapping[Any, Any]) -> dict[str, Array]:
        """Present values of the variables that some tensors depend on, from the user's session."""
        return self.read(self.copy.behind(fetches, feed).variables)

    def close(self) -> None:
        """Free what a run holds."""
        self.copy.close()


def opened(net: Net, seed: int | None = None) -> Opened:
    """The net in a copy of the present version of its graph."""
    refuse_closed(net.session)
    refuse_remote(net.session)
    graph = net.graph
    ends = net.ends
    kept = _COPIES.setdefault(graph, {})
    numbers = tuple((t.name, np.asarray(value).item()) for t, value in net.feed.items() if not np.ndim(value))
    key = (graph.version, tuple(tensor.name for tensor in ends), seed or 0, net.keras, numbers)
    for stale in [other for other in kept if other[0] != graph.version]:
        kept.pop(stale).close()
    if key not in kept or len(kept[key].built) > _MOST_BUILT or _is_set_otherwise(net, kept[key].settings):
        if key in kept:
            kept.pop(key).close()
        while len(kept) >= _MOST_COPIES:
            kept.pop(next(iter(kept))).close()
        made = GraphCopy(definition(graph), seed or 0, getattr(net.session, "_config", None))
        stacks = () if net.keras is None else net.keras.stacks
        setting, inner_ends = _Setting(net, made), [made.same(tensor) for tensor in ends]
        loops = find(made.graph, inner_ends, setting, stacks, may_vary=net.keras is not None)
        made.tap(renamed(loops, net.keras))
        made.settings = setting.held
        kept[key] = made
    kept[key] = kept.pop(key)
    return Opened(net, kept[key])


def _is_set_otherwise(net: Net, settings: Mapping[str, Array]) -> bool:
    """Whether a variable that is a rate or a switch has another value than when the cells were recognised."""
    return any(not np.array_equal(value, settings[name]) for name, value in read(net.session, settings).items())


class _Setting:
    """The values of single numbers of a copy as a net sets them; the learning phase of Keras is off.

    ``held`` has the values of the variables that these depend on.
    """

    def __init__(self, net: Net, copy: GraphCopy) -> None:
        self._net, self._copy = net, copy
        self.held: dict[str, Array] = {}
        self._feed = {copy.tensor(t.name): np.asarray(value) for t, value in net.feed.items() if not np.ndim(value)}
        if net.keras is not None and isinstance(net.keras.phase, str):
            self._feed[copy.tensor(net.keras.phase)] = np.asarray(False)

    def __call__(self, tensor: Any) -> Any:
        """None for what depends on data, chance or a loop."""
        operations = cone([tensor], self._feed)
        if any(op.type in _UNSETTLED or (op.op_def.is_stateful and not _holds_value(op)) for op in operations):
            return None
        held = read(self._net.session, [op.name for op in operations if is_variable(op)])
        self.held |= held
        return self._copy.run({0: tensor}, self._feed, held)[0].item()


def _holds_value(operation: Any) -> bool:
    return is_variable(operation) or operation.type == "ReadVariableOp"


def names_of_inputs(net: Net, x: Any) -> list[str]:
    """The names of the inputs in the order of the leaves of x.

    Raises
    ------
    InputError
        If x does not fit the inputs.
    """
    known = list(net.inputs)
    if not known:
        raise InputError(
            message(
                "A session by itself does not say what x is fed to.",
                expected="a net: a part of its graph as a model, with names for what it is fed and what it returns",
                hint='net = rl.tf1.graph(session, inputs={"x": placeholder}, outputs={"y": tensor}, loss=loss, '
                "targets=labels, feed={keep_prob: 1.0}), and then rl.trace(net, x, y)",
            )
        )
    if isinstance(x, Mapping):
        unknown = [key for key in x if key not in known]
        if unknown or len(x) < len(known):
            missing = [name for name in known if name not in x]
            got = f"{list(map(str, x))}" + (f", without {missing}" if missing else "")
            raise InputError(message("x does not fit the inputs of the graph.", got=got, expected=", ".join(known)))
        return list(x)
    if len(leaves_of(x)) != len(known):
        got, expected = f"{len(leaves_of(x))} arrays", f"{len(known)}: {', '.join(known)}"
        raise InputError(message("x does not fit the inputs of the graph.", got=got, expected=expected))
    return known


def fed(found: Opened, batch: Batch) -> dict[Any, Array]:
    """What every run of a batch is fed, in the copy."""
    feed = fed_in(found.net, found.copy.graph, batch)
    if is_built(found.net, batch):
        feed |= fed_to(loss_in(found.net, found.copy.graph, found.copy.tensor, batch, found.copy.built), batch)
    for layer, states in (batch.initial_state or {}).items():
        feed |= _started(found, layer, states)
    return feed


def fed_in(net: Net, graph: Any, batch: Batch) -> dict[Any, Array]:
    """What the tensors of any copy of the net's graph are fed, but for what was built there."""
    _refuse(net, batch)
    feed = {tensor.name: _fitting(f"feed[{tensor.op.name!r}]", tensor, value) for tensor, value in net.feed.items()}
    for name, leaf in zip(names_of_inputs(net, batch.x), leaves_of(batch.x), strict=True):
        given = {tensor.name: _fitting(f"x[{name!r}]", tensor, leaf) for tensor in net.inputs[name]}
        if any(0 in array.shape for array in given.values()):
            got, expected = f"x[{name!r}] of shape {np.shape(leaf)}", "at least 1 sample and 1 time step"
            raise InputError(message("x is empty.", got=got, expected=expected))
        feed |= given
    if net.keras is not None:
        from . import keras_v1

        feed |= {name: np.asarray(value) for name, value in keras_v1.phase_feed(net, batch.training).items()}
    if not is_built(net, batch):
        feed |= _targets(net, batch)
    return {graph.get_tensor_by_name(name): value for name, value in feed.items()}


def _targets(net: Net, batch: Batch) -> dict[str, Array]:
    """Targets and, of a Keras model, the weights of samples, by the tensors that they are fed to."""
    leaves = [np.asarray(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf) for leaf in leaves_of(batch.y)]
    if not leaves:
        return {}
    if len(leaves) != len(net.targets):
        got = f"{len(leaves)} array{'s' * (len(leaves) != 1)}"
        expected = f"{len(net.targets)}, one for each of targets=" if net.targets else "none: the net has no targets="
        hint = "rl.tf1.graph(..., targets=labels) says what y is fed to"
        raise InputError(message("y does not fit the targets of the graph.", got=got, expected=expected, hint=hint))
    pairs = list(zip(net.targets, leaves, strict=True))
    feed = {tensor.name: _fitting("y", tensor, _ranked(net, tensor, leaf)) for alike, leaf in pairs for tensor in alike}
    if net.keras is not None:
        from . import keras_v1

        given = zip(net.keras.weights, keras_v1.sample_weights(batch), strict=False)
        feed |= {name: np.asarray(weight) for name, weight in given if weight is not None}
    return feed


def _ranked(net: Net, tensor: Any, leaf: Array) -> Array:
    """Keras takes one number per sample for a column of them."""
    short = net.keras is not None and tensor.shape.rank == np.ndim(leaf) + 1 and tensor.shape[-1] in (1, None)
    return leaf[..., None] if short else leaf


def _refuse(net: Net, batch: Batch) -> None:
    """Refuse by name what a graph has no place for."""
    if net.keras is not None:
        return
    if batch.training:
        raise UnsupportedError(
            message(
                "A graph has no training mode of its own: it has what you feed for it.",
                got="training=True",
                hint="rl.tf1.graph(..., feed={phase: True})",
            )
        )
    for name in ("sample_weight", "class_weight"):
        if getattr(batch, name) is not None:
            raise UnsupportedError(
                message(
                    f"{name}= has no place in a graph: its loss weighs as it was built.",
                    hint="feed the weights: rl.tf1.graph(..., targets=(labels, weights)), y=(labels, weights)",
                )
            )


def _started(found: Opened, layer: str, states: Sequence[Any]) -> dict[Any, Array]:
    """The states that a layer is made to start from."""
    loops = found.layer(layer)
    if not loops:
        names = [loop.name for loop in found.loops]
        raise LayerNotFoundError(message(f"No layer is called {layer!r}.", hint=did_you_mean(layer, names)))
    entries = [boundary.tensors[0] for loop in loops for boundary in loop.initial]
    if len(states) != len(entries):
        got, expected = f"{len(states)} states", f"{len(entries)}"
        raise InputError(message(f"initial_state[{layer!r}] does not fit.", got=got, expected=expected))
    return {tap: _fitting(f"initial_state[{layer!r}]", tap, state) for tap, state in zip(entries, states, strict=True)}


def _fitting(where: str, tensor: Any, value: Any) -> Array:
    """An array that a tensor can be fed.

    Raises
    ------
    InputError
        If it does not fit in shape or kind.
    """
    dtype = tensor.dtype.base_dtype
    array = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    if array.dtype.kind in "OUS" and dtype != tf.string:
        raise InputError(
            message(f"{where} holds no numbers.", got=shown(value), expected=f"{tensor.name} {dtype.name}")
        )
    if not tensor.shape.is_compatible_with(array.shape):
        got, expected = f"shape {array.shape}", f"{tensor.name} {tensor.shape}"
        raise InputError(message(f"{where} does not fit the graph.", got=got, expected=expected))
    if not (dtype.is_floating or dtype.is_complex) and array.dtype.kind == "f" and not np.all(array == np.round(array)):
        got, expected = f"{array.dtype}", f"{tensor.name} {dtype.name}"
        raise InputError(message(f"{where} does not fit the graph.", got=got, expected=expected))
    return array.astype(dtype.as_numpy_dtype, copy=False) if dtype != tf.string else array


def loss_tensor(found: Opened, batch: Batch) -> Any:
    """The scalar of the copy that is differentiated; see :func:`losses.loss_in`."""
    return loss_in(found.net, found.copy.graph, found.copy.tensor, batch, found.copy.built).tensor
