"""``rl.tf1``: what only users of sessions and placeholders need.

>>> import rnnlens as rl  # doctest: +SKIP
>>> net = rl.tf1.graph(session, inputs={"x": x}, outputs={"y": y}, loss=loss, targets=labels)  # doctest: +SKIP
>>> trace = rl.trace(net, data, truth)  # doctest: +SKIP
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ...arguments import anything, checked
from ...errors import InputError, LayerNotFoundError, UnsupportedError, message, shown
from .sequences import before_transpose, course_of

__all__ = ["Net", "graph"]


#: Operations of training and saving.
_NO_ENDS = ("Apply", "ResourceApply", "Assign", "ResourceScatter", "Scatter", "Save", "Restore", "Var")


#: Operations that lay the steps of a tensor out for a loop, and which of their inputs that is.
_STEPS = {"TensorArrayScatterV3": 2, "TensorListFromTensor": 0}
#: Operations that put the steps of a loop together again: what is behind them is in the order of that loop.
_ENDS_OF_LOOPS = frozenset({"TensorArrayGatherV3", "TensorListStack", "Exit", "While", "StatelessWhile"})


@dataclass(frozen=True, eq=False)
class Net:
    """A part of a TensorFlow-1 graph as a model: what it is fed, what it gives, the session with its variables.

    Made by :func:`graph`. Every verb takes it where it takes a model. Nothing in it can be changed, and it holds no
    copy of anything: variables are read from the session at every call.

    Attributes
    ----------
    session
        The user's session; nothing is run in it but reading variables.
    inputs
        By name: the tensors that are fed alike, one or several (the two ends of a ``tf.cond``).
    outputs
        By name: one tensor each.
    loss
        The scalar that is differentiated, or None.
    targets
        For each target: the tensors that are fed alike.
    feed
        What is fed in every run, besides inputs and targets.
    keras
        Of a tf_keras model: what Keras knows of the graph; None of a graph that was put together by hand.
    """

    session: Any
    inputs: Mapping[str, tuple[Any, ...]]
    outputs: Mapping[str, Any]
    loss: Any = None
    targets: tuple[tuple[Any, ...], ...] = ()
    feed: Mapping[Any, Any] = field(default_factory=dict)
    keras: Any = field(default=None, repr=False)

    @property
    def graph(self) -> Any:
        """The user's graph."""
        return self.session.graph

    @property
    def has_own_loss(self) -> bool:
        """Whether there is a loss that is not told its targets by y."""
        return self.loss is not None and not self.targets

    @property
    def ends(self) -> list[Any]:
        """What counts: outputs and loss; where neither is named, all that nothing goes on from but training."""
        named = [*self.outputs.values(), *([] if self.loss is None else [self.loss])]
        return named or [t for op in self.graph.get_operations() if _ends(op) for t in op.outputs]

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", loss={self.loss.name}"
        return f"rl.tf1.graph(inputs={list(self.inputs)}, outputs={list(self.outputs)}{loss})"


class TimeMajorNet(Net):
    """A part of a graph that is fed (time, sample, ...)."""


@checked(session=anything, inputs=anything, outputs=anything, loss=anything, targets=anything, feed=anything)
def graph(
    session: Any,
    *,
    inputs: Any = None,
    outputs: Any = None,
    loss: Any = None,
    targets: Any = None,
    feed: Mapping[Any, Any] | None = None,
) -> Net:
    """A TensorFlow-1 graph as a model, which every verb takes.

    Wherever a tensor is taken, its name does as well: ``"output/dense/BiasAdd:0"``. Nothing is added to the graph,
    which may be finalised; nothing but reading of variables is run in the session.

    Parameters
    ----------
    session
        ``tf.compat.v1.Session`` in which the variables have their values (or a ``MonitoredSession``).
    inputs
        What ``x`` is fed to: a tensor, or a dict by name of tensors. A list of tensors is fed alike: the inputs for
        training and for development under a ``tf.cond``; the gradient by such an input is the sum over them. Any
        tensor may be fed, not placeholders alone: the batch that a queue or an iterator brings, for one.
    outputs
        What the model returns: a tensor, a list, or a dict by name.
    loss
        The scalar to differentiate. ``rl.trace(..., loss="name:0")`` takes another one.
    targets
        What ``y`` is fed to: a tensor, a list of tensors fed alike; a tuple or a dict for several targets.
    feed
        What is fed in every run and is not cut into batches: phase, keep probability, an initial state.

    Returns
    -------
    Net
        A frozen object.

    Raises
    ------
    InputError
        If something is no tensor of the session's graph, or the loss is not one floating number.
    LayerNotFoundError
        If a name is that of no tensor.

    Examples
    --------
    >>> net = rl.tf1.graph(session, inputs={"x": [x_train, x_devel]}, outputs={"output": output}, loss=loss,
    ...                    targets=[y_train, y_devel], feed={phase: False, rate: 0.0})  # doctest: +SKIP
    >>> rl.gradients(net, x, of="lstm_model/rnn.final_hidden", reduce="sum")  # doctest: +SKIP
    """
    session = raw_session(session)
    if not isinstance(feed, Mapping | None):
        raise InputError(message("feed= is given by tensor.", got=shown(feed), expected="{tensor or its name: value}"))
    find = _Finder(session.graph)
    fed = {name: find.alike(f"inputs[{name!r}]", t) for name, t in _named("input", inputs).items()}
    kind = TimeMajorNet if is_time_major(session.graph, [t for alike in fed.values() for t in alike]) else Net
    return kind(
        session,
        MappingProxyType(fed),
        MappingProxyType({name: find.one(f"outputs[{name!r}]", t) for name, t in _named("output", outputs).items()}),
        None if loss is None else scalar(find.one("loss", loss)),
        _targets(find, targets),
        MappingProxyType({find.one("feed", tensor): value for tensor, value in (feed or {}).items()}),
    )


def is_time_major(graph: Any, inputs: Sequence[Any]) -> bool:
    """Whether the loops of a graph take steps along the first axis of its inputs, on every way from these to them."""
    given, axes = {tensor.ref() for tensor in inputs}, set()
    for op in graph.get_operations():
        if op.type in _STEPS and not op.name.startswith("gradients"):
            course = course_of(op.inputs[_STEPS[op.type]])
            axes |= _axes_at(course.source, 0 if course.time_major else 1, given)
    return axes == {0}


def _axes_at(tensor: Any, axis: int, given: set[Any]) -> set[int]:
    """The axes of given tensors that become an axis of another, as far as transpositions on the way tell."""
    found, waiting, seen = set(), [(tensor, axis)], set()
    while waiting:
        current, at = waiting.pop()
        if (current.ref(), at) in seen or current.op.type in _ENDS_OF_LOOPS:
            continue
        seen.add((current.ref(), at))
        if current.ref() in given:
            found.add(at)
        elif current.op.type == "Transpose":
            before = before_transpose(current.op, at)
            waiting.extend([] if before is None else [(current.op.inputs[0], before)])
        else:
            waiting.extend((t, at) for t in current.op.inputs)
    return found


def _ends(operation: Any) -> bool:
    """Whether nothing goes on from an operation, and it is no part of training, of saving or of a variable."""
    trained = operation.name.startswith("gradients") or operation.type.startswith(_NO_ENDS)
    return not trained and any(t.dtype.base_dtype.is_floating and not t.consumers() for t in operation.outputs)


def raw_session(session: Any) -> Any:
    """The session itself: one that is monitored runs its hooks at every call."""
    inner = getattr(session, "_tf_sess", None)
    found = inner() if callable(inner) else session
    if not (hasattr(found, "run") and hasattr(found, "graph") and hasattr(found.graph, "get_tensor_by_name")):
        raise InputError(
            message(
                "This is no session.", got=shown(session), expected="tf.compat.v1.Session", hint="rl.tf1.graph(sess)"
            )
        )
    refuse_closed(found)
    return found


def refuse_closed(session: Any) -> None:
    """Refuse a session that has been closed.

    Raises
    ------
    InputError
        If it has.
    """
    if getattr(session, "_closed", False):
        raise InputError(message("The session is closed, and its variables with it.", hint="an open session"))


def scalar(loss: Any) -> Any:
    """A loss that is one number that can be differentiated.

    Raises
    ------
    InputError
        If it is several, or an integer.
    """
    if not loss.dtype.base_dtype.is_floating:
        got = f"{loss.name}, {loss.dtype.base_dtype.name}"
        raise InputError(message("A loss that is no floating number has no gradient.", got=got, expected="a float"))
    if loss.shape.rank not in (None, 0):
        expected, hint = "one number", "tf.reduce_mean(loss), in your graph"
        raise InputError(
            message("A loss is one number.", got=f"{loss.name}, shape {loss.shape}", expected=expected, hint=hint)
        )
    return loss


def tensor_of(graph: Any, where: str, given: Any) -> Any:
    """A tensor of a graph, given as such, as a variable, or by name.

    Raises
    ------
    InputError, LayerNotFoundError
        If there is none.
    """
    if isinstance(given, str):
        return _by_name(graph, where, given)
    found = getattr(given, "_graph_element", given) if hasattr(given, "assign") else given
    if not (hasattr(found, "op") and hasattr(found, "graph")):
        expected = 'a tensor of the graph, or its name: "output/dense/BiasAdd:0"'
        raise InputError(message(f"{where} is no tensor.", got=shown(given), expected=expected))
    if found.graph is not graph:
        expected = "a tensor of the session's graph"
        raise InputError(message(f"{where} belongs to another graph.", got=found.name, expected=expected))
    return found


def _by_name(graph: Any, where: str, name: str) -> Any:
    full = name if ":" in name else f"{name}:0"
    try:
        return graph.get_tensor_by_name(full)
    except (KeyError, ValueError):
        hint = _similar(graph, name.partition(":")[0])
        raise LayerNotFoundError(message(f"{where}: no tensor of the graph is called {full!r}.", hint=hint)) from None


def _similar(graph: Any, name: str) -> str:
    """The names that could have been meant: a graph has thousands."""
    known = [operation.name for operation in graph.get_operations() if operation.outputs]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    where = "the name of a tensor: loss.name"
    return f"did you mean {' or '.join(map(repr, close))}? Else {where}" if close else where


class _Finder:
    """Tensors of one graph."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def one(self, where: str, given: Any) -> Any:
        return tensor_of(self._graph, where, given)

    def alike(self, where: str, given: Any) -> tuple[Any, ...]:
        """One tensor, or several that are fed alike."""
        several = list(given) if isinstance(given, list | tuple) else [given]
        found = tuple(self.one(where, one) for one in several)
        if not found or len({tensor.dtype.base_dtype for tensor in found}) > 1:
            got = [f"{tensor.name} {tensor.dtype.name}" for tensor in found]
            raise InputError(message(f"{where} cannot be fed alike.", got=got, expected="tensors of one dtype"))
        return found


def _named(what: str, given: Any) -> Mapping[str, Any]:
    """By name, as results show them."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        if not all(isinstance(name, str) and name for name in given):
            expected = f'{{"name": tensor}}: {what}s by name'
            raise InputError(message(f"{what}s= is given by name.", got=shown(given), expected=expected))
        return given
    if what == "output" and isinstance(given, list | tuple):
        return {f"output_{i}" if len(given) > 1 else "output": tensor for i, tensor in enumerate(given)}
    return {what: given}


def _targets(find: _Finder, given: Any) -> tuple[tuple[Any, ...], ...]:
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return tuple(find.alike(f"targets[{name!r}]", one) for name, one in given.items())
    if isinstance(given, tuple):
        return tuple(find.alike("targets", one) for one in given)
    return (find.alike("targets", given),)


def refuse_remote(session: Any) -> None:
    """Refuse a session whose variables live in another process.

    Raises
    ------
    UnsupportedError
        By name.
    """
    target = getattr(session, "sess_str", b"") or b""
    if target and target != b"local":
        hint = "load a checkpoint into a local tf.compat.v1.Session()"
        raise UnsupportedError(message("The session is one of another process.", got=target.decode(), hint=hint))
