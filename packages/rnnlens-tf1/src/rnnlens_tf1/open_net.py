"""A net in a copy of its graph: its recurrences at the present settings, and the values of its variables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import numpy as np

from rnnlens.typing import Array

from .blocks import is_variable, read_variables
from .discover import find_loops
from .graph_copy import GraphCopy, dependency_cone
from .naming import rename_loops
from .public import Net, refuse_closed, refuse_remote
from .recurrences import Loop
from .unrolled import left_out_reasons

#: Copies of the present version of each graph, for the outputs, losses and seeds used last.
_COPIES: weakref.WeakKeyDictionary[Any, dict[Any, GraphCopy]] = weakref.WeakKeyDictionary()
_MOST_COPIES, _MOST_BUILT = 4, 32
#: Operations that a setting must not depend on: data, and results of loops.
_UNSETTLED = frozenset({"Placeholder", "Exit", "RefExit", "While", "StatelessWhile"})

#: Perturbations added to variables in the copies, by graph and name, in this thread.
PERTURBATIONS: ContextVar[Mapping[tuple[Any, str], Array]] = ContextVar("perturbations", default=MappingProxyType({}))


class OpenNet:
    """The user's net, the copy of its graph, and the tensors there that are its inputs and outputs."""

    def __init__(self, net: Net, copy: GraphCopy) -> None:
        self.net, self.copy = net, copy
        self.inputs = [tuple(copy.tensor(t.name) for t in tensors) for tensors in net.inputs.values()]
        self.outputs = [copy.tensor(tensor.name) for tensor in net.outputs.values()]
        #: Recurrences of the net, in the order of the graph.
        self.loops = copy.loops

    def layer_loops(self, name: str) -> list[Loop]:
        """Return the loops of one layer: one, or one per direction with the forward loop first."""
        loops = [loop for loop in self.loops if loop.name == name]
        return sorted(loops, key=lambda loop: loop.direction == "backward")

    def first_call_loops(self, name: str) -> list[Loop]:
        """Return the loops of the first call of a layer; the list is empty if the layer is not recurrent."""
        return self.layer_loops(name) or self.layer_loops(f"{name}#0")

    def read_variables(self, names: Iterable[str]) -> dict[str, Array]:
        """Return the present values of variables in the user's session, with any active perturbation added."""
        values = read_variables(self.net.session, names)
        return {name: value + PERTURBATIONS.get().get((self.net.graph, name), 0) for name, value in values.items()}

    def variable_values(self, fetches: Sequence[Any], feed: Mapping[Any, Any]) -> dict[str, Array]:
        """Return the present values of all variables that some tensors depend on, with any perturbation added."""
        return self.read_variables(self.copy.dependences(fetches, feed).variables)


def open_net(net: Net, seed: int | None = None) -> OpenNet:
    """Return the net with a copy of the present version of its graph; copies are cached."""
    refuse_closed(net.session)
    refuse_remote(net.session)
    graph, end_tensors = net.graph, net.ends
    copies = _COPIES.setdefault(graph, {})
    scalar_feeds = tuple((t.name, np.asarray(value).item()) for t, value in net.feed.items() if not np.ndim(value))
    key = (graph.version, tuple(tensor.name for tensor in end_tensors), seed or 0, net.keras, scalar_feeds)
    for stale in [other for other in copies if other[0] != graph.version]:
        copies.pop(stale).close()
    if key in copies:
        settings = copies[key].settings  # a rate or switch may have changed since the cells were recognised
        settings_changed = any(
            not np.array_equal(v, settings[name]) for name, v in read_variables(net.session, settings).items()
        )
        if settings_changed or len(copies[key].built_tensors) > _MOST_BUILT:
            copies.pop(key).close()
    if key not in copies:
        while len(copies) >= _MOST_COPIES:
            copies.pop(next(iter(copies))).close()
        copy = GraphCopy(net.session, seed or 0)
        stacks = (
            []
            if net.keras is None
            else [recurrence.variables for recurrence in net.keras.recurrences if recurrence.is_stack]
        )
        copied_ends = [copy.tensor(tensor.name) for tensor in end_tensors]
        loops = find_loops(copy.graph, copied_ends, _setting_reader(net, copy), stacks, may_vary=net.keras is not None)
        if net.keras is None:  # layers of Keras that are not found are refused by their own names
            copy.left_out_reasons = left_out_reasons(copied_ends, loops)
        copy.tap(rename_loops(loops, net.keras))
        copies[key] = copy
    copies[key] = copies.pop(key)
    return OpenNet(net, copies[key])


def _setting_reader(net: Net, copy: GraphCopy) -> Callable[[Any], Any]:
    """Return a function from a scalar of the copy to its value, or to None if it depends on data, draws or a loop."""
    feed = {
        copy.tensor(t.name): np.asarray(setting_value)
        for t, setting_value in net.feed.items()
        if not np.ndim(setting_value)
    }
    if net.keras is not None and isinstance(net.keras.learning_phase, str):
        feed[copy.tensor(net.keras.learning_phase)] = np.asarray(False)  # the learning phase

    def setting_value(tensor: Any) -> Any:
        if tensor.graph is not copy.graph:
            return None
        operations = dependency_cone([tensor], feed)
        if any(
            op.type in _UNSETTLED or (op.op_def.is_stateful and not is_variable(op) and op.type != "ReadVariableOp")
            for op in operations
        ):
            return None
        variable_values = read_variables(net.session, [op.name for op in operations if is_variable(op)])
        copy.settings |= variable_values
        return copy.run({0: tensor}, feed, variable_values)[0].item()

    return setting_value
