"""The definition of the user's graph, and copies made from it: with names and seeds of their own."""

from __future__ import annotations

from itertools import count
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import control_flow_pb2
from tensorflow.python.framework import meta_graph

from ...errors import UnsupportedError, message

#: What control flow v1 needs, so that its loops can be differentiated.
_CONTEXTS = ("while_context", "cond_context")
#: Operations that draw random numbers, other ones at every run.
RANDOM = frozenset(
    [
        "RandomUniform",
        "RandomStandardNormal",
        "TruncatedNormal",
        "RandomUniformInt",
        "RandomShuffle",
        "Multinomial",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "ParameterizedTruncatedNormal",
    ]
)
#: Another draw for every seed: an odd number near 2^32 divided by the golden ratio.
_ANOTHER_DRAW = 0x9E3779B1
_numbers = count()


def definition(graph: Any) -> Any:
    """The graph as a ``MetaGraphDef``: read, not touched.

    Raises
    ------
    UnsupportedError
        If it is larger than the 2 GB that one message of TensorFlow holds.
    """
    try:
        return tf.train.export_meta_graph(graph=graph, collection_list=list(_CONTEXTS))
    except ValueError as error:
        if "2GB" not in str(error) and "2 GB" not in str(error) and "too large" not in str(error):
            raise
        raise UnsupportedError(
            message(
                "The graph is larger than the 2 GB that a GraphDef can have, so it cannot be copied.",
                got=str(error),
                hint="hold large constants (a frozen embedding) in a variable, or feed them through a placeholder",
            )
        ) from error


def imported(meta: Any) -> Any:
    """A new graph, made of a definition; its functions have names that no other copy in this process has.

    TensorFlow keeps functions by name for all graphs together, and gives those of a While that it differentiates a name
    that follows from the old one.
    """
    own = {function.signature.name for function in meta.graph_def.library.function}
    graph = tf.Graph()
    if own:
        changed, mark = type(meta)(), f"_copy{next(_numbers)}"
        changed.CopyFrom(meta)
        _rename_functions(changed.graph_def, own, mark)
        meta = changed
    with graph.as_default():
        meta_graph.import_scoped_meta_graph(meta)
    return graph


def _rename_functions(definition: Any, own: set[str], mark: str) -> None:
    """Give functions another name, wherever they are named."""
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    for node in nodes:
        if node.op in own:
            node.op += mark
        for value in node.attr.values():
            for function in (value.func, *value.list.func) if value.HasField("func") else value.list.func:
                if function.name in own:
                    function.name += mark
    for function in definition.library.function:
        function.signature.name += mark
    for gradient in definition.library.gradient:
        gradient.function_name += mark
        gradient.gradient_func += mark if gradient.gradient_func in own else ""


def seeded(meta: Any, seed: int) -> Any:
    """The definition with seeds for operations that have none, and loops of one step at a time.

    So equal calls draw equal numbers: a loop that may run ahead draws for a later step first where it is ready first.
    """
    nodes = [*meta.graph_def.node, *(node for f in meta.graph_def.library.function for node in f.node_def)]
    drawn = [node for node in nodes if node.op in RANDOM]
    if not drawn:
        return meta
    changed = type(meta)()
    changed.CopyFrom(meta)
    nodes = [*changed.graph_def.node, *(node for f in changed.graph_def.library.function for node in f.node_def)]
    for i, node in enumerate(node for node in nodes if node.op in RANDOM):
        unset = not node.attr["seed"].i and not node.attr["seed2"].i
        if unset or seed:
            node.attr["seed"].i = (node.attr["seed"].i or i + 1) + seed * _ANOTHER_DRAW
    for node in nodes:
        if "parallel_iterations" in node.attr:
            node.attr["parallel_iterations"].i = 1
    contexts = changed.collection_def["while_context"].bytes_list.value
    contexts[:] = [_step_by_step(context) for context in contexts]
    return changed


def _step_by_step(context: bytes) -> bytes:
    """What control flow v1 keeps of a loop, for the loops of its gradient."""
    found = control_flow_pb2.WhileContextDef.FromString(context)
    found.parallel_iterations = 1
    return bytes(found.SerializeToString())
