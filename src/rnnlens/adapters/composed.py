"""Weights of ours that are put together from several of a framework's: what a registered cell says of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..recurrence.cells.registry import Registration
from ..typing import Array
from .protocol import Port, Pullback


@dataclass(frozen=True)
class Composed:
    """One weight of ours: its name, and for each weight of the framework's cell the layer within, and its key there."""

    registration: Registration
    name: str
    keys: Mapping[str, tuple[str, str]]


class ComposedPullback:
    """A pull-back of which some weight ports are put together; implements :class:`Pullback`."""

    def __init__(self, inner: Pullback, parts: Mapping[Port, tuple[Composed, Mapping[str, Port]]]) -> None:
        self._inner, self._parts, self.outputs = inner, parts, inner.outputs
        self.values: Mapping[Port, Array] = dict(inner.values) | {
            port: what.registration.arrays({n: inner.values[p] for n, p in ports.items()})[what.name]
            for port, (what, ports) in parts.items()
        }

    def vjp(self, cotangents: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """See :meth:`Pullback.vjp`."""
        found = dict(self._inner.vjp(cotangents))
        count = len(next(iter(cotangents.values())))
        return found | {port: self._joined(what, ports, found, count) for port, (what, ports) in self._parts.items()}

    def _joined(
        self, what: Composed, ports: Mapping[str, Port], found: Mapping[Port, Array | None], count: int
    ) -> Array | None:
        if all(found.get(port) is None for port in ports.values()):
            return None
        filled = {}
        for name, port in ports.items():
            grad = found.get(port)
            value = np.asarray(_host(self._inner.values[port]))
            filled[name] = np.zeros((count, *value.shape), value.dtype) if grad is None else np.asarray(_host(grad))
        rows = [what.registration.arrays({n: g[k] for n, g in filled.items()})[what.name] for k in range(count)]
        return np.stack(rows)

    def __enter__(self) -> Pullback:
        self._inner.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._inner.__exit__(*exc)


def with_composed(
    make: Callable[[Sequence[Port], Sequence[Port]], Pullback],
    of: Sequence[Port],
    wrt: Sequence[Port],
    find: Callable[[Port], Composed | None],
) -> Pullback:
    """The pull-back that ``make(of, wrt)`` makes; composed weights among ``wrt`` are pulled in their parts."""
    parts: dict[Port, tuple[Composed, Mapping[str, Port]]] = {}
    plain: dict[Port, None] = {}
    for port in wrt:
        what = find(port) if port.kind == "weight" else None
        if what is None:
            plain[port] = None
            continue
        ports = {n: replace(port, layer=f"{port.layer}{within}", key=key) for n, (within, key) in what.keys.items()}
        parts[port] = (what, ports)
        plain |= dict.fromkeys(ports.values())
    inner = make(of, tuple(plain))
    return ComposedPullback(inner, parts) if parts else inner


def _host(array: Array) -> Array:
    return array.detach().cpu().numpy() if hasattr(array, "detach") else array
