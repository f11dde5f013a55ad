"""Namespace ``rl.tf1``: functions for users of sessions and placeholders.

>>> import rnnlens as rl  # doctest: +SKIP
>>> net = rl.tf1.graph(session, inputs={"x": x}, outputs={"y": y}, loss=loss, targets=labels)  # doctest: +SKIP
>>> trace = rl.trace(net, data, truth)  # doctest: +SKIP
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from rnnlens.arguments import anything, checked
from rnnlens.errors import InputError, LayerNotFoundError, UnsupportedError, has_attribute, short_repr

from .sequences import FILLS, axis_before_transpose, find_user_tensor

__all__ = ["Net", "graph"]


#: Prefixes of operation types of training, saving and variables.
_NO_ENDS = ("Apply", "ResourceApply", "Assign", "ResourceScatter", "Scatter", "Save", "Restore", "Var")
#: Operations that return the results of a loop; the search for axes stops there.
_ENDS_OF_LOOPS = frozenset({"TensorArrayGatherV3", "TensorListStack", "Exit", "While", "StatelessWhile"})


@dataclass(frozen=True, eq=False)
class Net:
    """Part of a TensorFlow-1 graph as a model: inputs, outputs, loss, feeds, and the session with its variables.

    It is created by :func:`graph`, and every function of rnnlens accepts it as a model. It is immutable and keeps no
    values: variables are read from the session at every call.

    Attributes
    ----------
    session
        The user's session; it is only used to read variables.
    inputs
        By name: the tensors that get the same feed, one or several (the two branches of a ``tf.cond``).
    outputs
        By name: one tensor each.
    loss
        The scalar that is differentiated, or None.
    targets
        For each target: the tensors that get the same feed.
    feed
        Values fed in every run, besides inputs and targets.
    keras
        For a tf_keras model: the names of its layers, weights and placeholders; None for other graphs.
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
        """The user's TensorFlow graph, as the session has it."""
        return self.session.graph

    @property
    def has_own_loss(self) -> bool:
        """True if there is a loss that needs no targets from ``y``."""
        return self.loss is not None and not self.targets

    @property
    def ends(self) -> list[Any]:
        """Outputs and loss; if neither is given, all unread floating tensors that are no part of training or saving."""
        named_tensors = [*self.outputs.values(), *([] if self.loss is None else [self.loss])]
        return named_tensors or [t for op in self.graph.get_operations() if _is_end(op) for t in op.outputs]

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", loss={self.loss.name}"
        return f"rl.tf1.graph(inputs={list(self.inputs)}, outputs={list(self.outputs)}{loss})"


class TimeMajorNet(Net):
    """Part of a TensorFlow-1 graph whose inputs are (time, sample, ...)."""


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
    """Return a TensorFlow-1 graph as a model, which every function of rnnlens accepts.

    Each tensor can also be given by its name: ``"output/dense/BiasAdd:0"``. Nothing is added to the graph, which may be
    finalised. The session is only used to read variables.

    Parameters
    ----------
    session
        ``tf.compat.v1.Session`` in which the variables have their values (or a ``MonitoredSession``).
    inputs
        The tensor to which ``x`` is fed, or a dict of tensors by name. All tensors of a list get the same value, for
        example the inputs for training and for evaluation under a ``tf.cond``; the gradient by such an input is the sum
        over them. Any tensor may be fed, not only placeholders: for example the batch of a queue or an iterator.
    outputs
        Outputs of the model: a tensor, a list, or a dict by name.
    loss
        The scalar to differentiate. ``rl.trace(..., loss="name:0")`` uses another one.
    targets
        The tensor to which ``y`` is fed, or a list of tensors that all get it; a tuple or a dict for several targets.
    feed
        Values by tensor that are fed in every run and not split into batches: phase, keep probability, an initial
        state.

    Returns
    -------
    Net
        An immutable object.

    Raises
    ------
    InputError
        If an argument is no tensor of the session's graph, or the loss is not a floating-point scalar.
    LayerNotFoundError
        If the graph has no tensor of a given name.

    Examples
    --------
    >>> net = rl.tf1.graph(session, inputs={"x": [x_train, x_devel]}, outputs={"output": output}, loss=loss,
    ...                    targets=[y_train, y_devel], feed={phase: False, rate: 0.0})  # doctest: +SKIP
    >>> rl.gradients(net, x, of="lstm_model/rnn.final_hidden", reduce="sum")  # doctest: +SKIP
    """
    session = raw_session(session)
    if not isinstance(feed, Mapping | None):
        raise InputError("feed= is given by tensor.", got=short_repr(feed), expected="{tensor or its name: value}")
    find_tensor, find_tensors = partial(tensor_of, session.graph), partial(_equally_fed_tensors, session.graph)
    input_tensors = {
        name: find_tensors(f"inputs[{name!r}]", t) for name, t in _tensors_by_name("input", inputs).items()
    }
    net_class = (
        TimeMajorNet
        if is_time_major(session.graph, [t for tensors in input_tensors.values() for t in tensors])
        else Net
    )
    return net_class(
        session,
        MappingProxyType(input_tensors),
        MappingProxyType(
            {name: find_tensor(f"outputs[{name!r}]", t) for name, t in _tensors_by_name("output", outputs).items()}
        ),
        None if loss is None else scalar(find_tensor("loss", loss)),
        _target_tensors(find_tensors, targets),
        MappingProxyType({find_tensor("feed", tensor): value for tensor, value in (feed or {}).items()}),
    )


def is_time_major(graph: Any, inputs: Sequence[Any]) -> bool:
    """Return whether all loops of a graph step along the first axis of its inputs, on every path between them."""
    input_refs, axes = {tensor.ref() for tensor in inputs}, set()
    for op in graph.get_operations():
        if op.type in FILLS and not op.name.startswith("gradients"):
            source, arguments = find_user_tensor(op.inputs[FILLS[op.type]])
            axes |= _matching_axes(source, 0 if arguments["time_major"] else 1, input_refs)
    return axes == {0}


def _matching_axes(tensor: Any, axis: int, input_refs: set[Any]) -> set[int]:
    """Return which axes of the tensors ``input_refs`` become axis ``axis`` of ``tensor``, following transpositions."""
    axes, waiting_pairs, seen_pairs = set(), [(tensor, axis)], set()
    while waiting_pairs:
        current, current_axis = waiting_pairs.pop()
        if (current.ref(), current_axis) in seen_pairs or current.op.type in _ENDS_OF_LOOPS:
            continue
        seen_pairs.add((current.ref(), current_axis))
        if current.ref() in input_refs:
            axes.add(current_axis)
        elif current.op.type == "Transpose":
            input_axis = axis_before_transpose(current.op, current_axis)
            waiting_pairs.extend([] if input_axis is None else [(current.op.inputs[0], input_axis)])
        else:
            waiting_pairs.extend((t, current_axis) for t in current.op.inputs)
    return axes


def _is_end(operation: Any) -> bool:
    """Return whether an operation's result is floating and unread, and no part of training, saving or a variable."""
    is_excluded = operation.name.startswith("gradients") or operation.type.startswith(_NO_ENDS)
    return not is_excluded and any(t.dtype.base_dtype.is_floating and not t.consumers() for t in operation.outputs)


def raw_session(session: Any) -> Any:
    """Return the plain session behind a monitored one, whose own ``run`` would call hooks."""
    inner = session._tf_sess if has_attribute(session, "_tf_sess") else None
    raw = inner() if callable(inner) else session
    is_usable = has_attribute(raw, "run") and has_attribute(raw, "graph")
    if not is_usable or not has_attribute(raw.graph, "get_tensor_by_name"):
        raise InputError(
            "This is no session.", got=short_repr(session), expected="tf.compat.v1.Session", hint="rl.tf1.graph(sess)"
        )
    refuse_closed(raw)
    return raw


def refuse_closed(session: Any) -> None:
    """Raise InputError for a closed session."""
    if getattr(session, "_closed", False):
        raise InputError("The session is closed, and its variables with it.", hint="an open session")


def scalar(loss: Any) -> Any:
    """Return a loss tensor unchanged. Raise InputError if it has several elements, or is an integer."""
    if not loss.dtype.base_dtype.is_floating:
        got = f"{loss.name}, {loss.dtype.base_dtype.name}"
        raise InputError("A loss that is no floating number has no gradient.", got=got, expected="a float")
    if loss.shape.rank not in (None, 0):
        expected, hint = "one number", "tf.reduce_mean(loss), in your graph"
        raise InputError("A loss is one number.", got=f"{loss.name}, shape {loss.shape}", expected=expected, hint=hint)
    return loss


def tensor_of(graph: Any, argument: str, reference: Any) -> Any:
    """Return a tensor of a graph, given as a tensor, as a variable or by name; raise an error if there is none."""
    if isinstance(reference, str):
        name = reference if ":" in reference else f"{reference}:0"
        try:
            return graph.get_tensor_by_name(name)
        except (KeyError, ValueError, TypeError):  # TypeError: a name that is not UTF-8
            operation_names = [operation.name for operation in graph.get_operations() if operation.outputs]
            close_matches = difflib.get_close_matches(name.partition(":")[0], operation_names, n=3, cutoff=0.5)
            hint = "the name of a tensor: loss.name"
            hint = f"did you mean {' or '.join(map(repr, close_matches))}? Else {hint}" if close_matches else hint
            raise LayerNotFoundError(f"{argument}: no tensor of the graph is called {name!r}.", hint=hint) from None
    tensor = reference._graph_element if has_attribute(reference, "_graph_element") else reference
    if not (has_attribute(tensor, "op") and has_attribute(tensor, "graph")):
        expected = 'a tensor of the graph, or its name: "output/dense/BiasAdd:0"'
        raise InputError(f"{argument} is no tensor.", got=short_repr(reference), expected=expected)
    if tensor.graph is not graph:
        expected = "a tensor of the session's graph"
        raise InputError(f"{argument} belongs to another graph.", got=tensor.name, expected=expected)
    return tensor


def _equally_fed_tensors(graph: Any, argument: str, references: Any) -> tuple[Any, ...]:
    """Return the tensors that are fed the same array: a single one, or several of the same dtype."""
    reference_list = list(references) if isinstance(references, list | tuple) else [references]
    tensors = tuple(tensor_of(graph, argument, reference) for reference in reference_list)
    if not tensors or len({tensor.dtype.base_dtype for tensor in tensors}) > 1:
        got = [f"{tensor.name} {tensor.dtype.name}" for tensor in tensors]
        raise InputError(f"{argument} have different dtypes.", got=got, expected="tensors of one dtype")
    return tensors


def _tensors_by_name(kind: str, tensors: Any) -> Mapping[str, Any]:
    """Return tensors by name; a single tensor or a list gets default names."""
    if tensors is None:
        return {}
    if isinstance(tensors, Mapping):
        if not all(isinstance(name, str) and name for name in tensors):
            expected = f'{{"name": tensor}}: {kind}s by name'
            raise InputError(f"{kind}s= is given by name.", got=short_repr(tensors), expected=expected)
        return tensors
    if kind == "output" and isinstance(tensors, list | tuple):
        return {f"output_{i}" if len(tensors) > 1 else "output": tensor for i, tensor in enumerate(tensors)}
    return {kind: tensors}


def _target_tensors(find_tensors: Callable[[str, Any], tuple[Any, ...]], targets: Any) -> tuple[tuple[Any, ...], ...]:
    if targets is None:
        return ()
    if isinstance(targets, Mapping):
        return tuple(find_tensors(f"targets[{name!r}]", reference) for name, reference in targets.items())
    return tuple(
        find_tensors("targets", reference) for reference in (targets if isinstance(targets, tuple) else (targets,))
    )


def refuse_remote(session: Any) -> None:
    """Raise UnsupportedError for a session whose variables are in another process."""
    target = getattr(session, "sess_str", b"") or b""
    if target and target != b"local":
        hint = "load a checkpoint into a local tf.compat.v1.Session()"
        raise UnsupportedError("The session is one of another process.", got=target.decode(), hint=hint)
