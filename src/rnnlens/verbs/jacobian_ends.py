"""From two names to the two ends of a time Jacobian, and the graph between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .. import data
from ..adapters.protocol import Adapter, Batch, Port
from ..errors import InputError, message
from .axes import Axes
from .inside import Inside
from .jacobian_chain import chain_graph
from .jacobian_composed import Composed
from .jacobian_graph import Graph, open_graph, open_uncut
from .jacobian_target import Swept, Tensor, disconnected, inner_tensor, output_tensor, readable
from .jacobian_wanted import Ends
from .names import Catalogue, TensorName


@contextmanager
def resolve(
    adapter: Adapter,
    model: Any,
    batch: Batch,
    known: Catalogue,
    inside: Inside,
    swept: Sequence[Swept],
    names: tuple[TensorName, TensorName],
    axes: Axes,
) -> Iterator[tuple[Tensor, Tensor, Graph | None]]:
    """The two ends and, where anything lies between them that is not recurrent, an open graph.

    Raises
    ------
    InputError
        If the input is integer.
    DisconnectedError
        If nothing leads from one end to the other.
    """
    of, wrt = readable(names[0], known, "of"), readable(names[1], known, "wrt")
    _refuse_integers(wrt, batch, known)
    if inside.entangled:
        with _uncut(adapter, model, batch, inside, swept, (of, wrt), axes) as found:
            yield found
        return
    start, end = _inner(of, inside, swept, "of"), _inner(wrt, inside, swept, "wrt")
    if start is not None and end is not None and {id(h) for h in start.halves} == {id(h) for h in end.halves}:
        yield start, end, None
        return
    ports = [None if tensor is not None else _port(name) for tensor, name in ((start, of), (end, wrt))]
    graph = chain_graph(adapter, model, batch, inside, ports[0], ports[1])
    graph = graph or open_graph(adapter, model, batch, inside, ports[0], ports[1], axes)
    with graph.pullback:
        start = start or _border(of, ports[0], graph)
        end = end or _border(wrt, ports[1], graph)
        _check_path(graph, list(swept), start, end)
        yield start, end, graph


@contextmanager
def _uncut(
    adapter: Adapter,
    model: Any,
    batch: Batch,
    inside: Inside,
    swept: Sequence[Swept],
    names: tuple[TensorName, TensorName],
    axes: Axes,
) -> Iterator[tuple[Tensor, Tensor, Graph]]:
    """The two ends and a graph through everything; a state that the framework has a tensor for is a border."""
    of, wrt = names
    inner = [None if inside.is_stepwise(n) else _inner(n, inside, swept, r) for n, r in ((of, "of"), (wrt, "wrt"))]
    start, end = inner
    ports = (None if start is not None else _port(of), None if end is not None else _port(wrt))
    readers = [port for one in (end.halves if end is not None else ()) for port in one.half.readers()]
    graph = open_uncut(adapter, model, batch, inside, ports, axes, *readers)
    with graph.pullback:
        yield start or _border(of, ports[0], graph), end or _border(wrt, ports[1], graph), graph


def _inner(name: TensorName, inside: Inside, swept: Sequence[Swept], role: str) -> Tensor | None:
    """The tensor, if it lies inside a recurrent call."""
    if name.what in ("state", "final_state", "initial_state"):
        return inner_tensor(name, [_swept(half, swept) for half in inside.layer(name.layer)])
    if role == "wrt" or name.what != "output" or name.layer is None:
        return None
    calls = [node for node in inside.halves if node == name.layer or node.rpartition("#")[0] == name.layer]
    if not calls:
        return None
    halves = inside.layer(name.layer)
    return output_tensor(name, _swept(halves[0], swept)) if len(halves) == 1 else None


def _swept(half: Any, swept: Sequence[Swept]) -> Swept:
    return next(one for one in swept if one.half is half)


def _port(name: TensorName) -> Port:
    return Port(name.what, name.layer, name.index)  # type: ignore[arg-type]


def _border(name: TensorName, port: Port | None, graph: Graph) -> Tensor:
    assert port is not None
    border = graph.borders[port]
    return Tensor(name, [], port, name.what, 0, border.features, border.times)


def _refuse_integers(wrt: TensorName, batch: Batch, known: Catalogue) -> None:
    if wrt.what != "input" or wrt.layer is not None:
        return
    leaves = data.leaves_of(batch.x)
    if wrt.index >= len(leaves):
        raise InputError(message(f"The model has no {wrt.text}.", got=f"{len(leaves)} inputs"))
    leaf = leaves[wrt.index]
    kind = str((leaf.data if data.is_packed(leaf) else leaf).dtype).removeprefix("torch.")
    if "float" in kind or "complex" in kind:
        return
    tables = [layer for layer, w in known.weights.items() if any(_is_table(key, w.values[key]) for key in w.values)]
    hint = " or ".join(f'wrt="{layer}.output"' for layer in tables) or 'x.astype("float32")'
    raise InputError(
        message(
            "Integers cannot be differentiated by.", got=f"{wrt.text} of dtype {kind}", expected="floats", hint=hint
        )
    )


def _is_table(key: str, value: Any) -> bool:
    """Weights that look up rows: Keras names them; in torch a lone (rows, columns) weight could be one."""
    return key == "embeddings" or (key == "weight" and len(value.shape) == 2)


def _check_path(graph: Graph, swept: list[Swept], start: Tensor, end: Tensor) -> None:
    composed = Composed(graph, swept, Ends(start, end, None, None, None, None, (), False))
    if start.port is not None:
        connected = composed._leads(start.port, end)
    else:
        connected = any(
            composed.is_useful(i, end) for i, one in enumerate(swept) if any(one is h for h in start.halves)
        )
    if connected:
        return
    raise disconnected(start, end)
