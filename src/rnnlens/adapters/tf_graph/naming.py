"""Names of layers and their weights: from scopes, or from the Keras model that built the graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...errors import message
from ..protocol import LayerInfo
from .recurrences import Loop


@dataclass(frozen=True)
class KerasSite:
    """One recurrent Keras layer, or one direction of a bidirectional layer.

    ``variables``: names of the operations of its cell's variables. ``built``: whether it has variables; a layer that
    was never called has none. ``refusal``: why it cannot be captured, or "". ``dropped``: why its dropout of states
    prevents a capture unless its cell is recognised without dropout, or "". ``stack``: whether it has several cells.
    """

    name: str
    direction: Literal["forward", "backward"]
    bidirectional: bool
    variables: frozenset[str]
    every_step: bool
    built: bool = True
    refusal: str = ""
    dropped: str = ""
    stack: bool = False
    info: LayerInfo | None = field(default=None, compare=False)


@dataclass(frozen=True)
class KerasNames:
    """Description of a tf_keras model by names of tensors, so that no Keras object is kept alive.

    ``owners``: layer and weight key by the variable's operation. ``outputs``: output tensors by layer, one per call.
    ``phase``: placeholder of the learning phase, or its fixed value. ``weights``: placeholders of sample weights.
    ``extra``: losses that the layers add. ``masks``: mask of each output. ``loss``: loss of the compiled model.
    ``scales``: loss weight of each output; None if any of them is a tensor.
    """

    sites: tuple[KerasSite, ...]
    owners: tuple[tuple[str, tuple[str, str]], ...]
    outputs: tuple[tuple[str, tuple[str, ...]], ...]
    phase: str | bool | None = None
    weights: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    masks: tuple[str | None, ...] = ()
    optimizer: str = field(default="", compare=False)
    loss: Any = field(default=None, compare=False)
    scales: tuple[float, ...] | None = ()

    def uncalled(self, used: Container[str]) -> list[str]:
        """Return the recurrent layers whose variables are not in ``used``: outputs and loss do not depend on them."""
        idle = [
            site
            for site in self.sites
            if not site.built or (site.variables and not any(name in used for name in site.variables))
        ]
        called = {site.name for site in self.sites if site not in idle}
        return list(dict.fromkeys(site.name for site in idle if site.name not in called))

    def refusals(self, loops: Sequence[Loop], used: Container[str]) -> dict[str, str]:
        """Return the reason for each recurrent layer that cannot be captured, by name; unused layers are left out."""
        there = {loop.layer for loop in loops}
        known = there - {loop.layer for loop in loops if loop.cell.cell is None}
        idle, cells = self.uncalled(used), defaultdict[tuple[str, str], set[frozenset[str]]](set)
        for loop in loops:
            cells[loop.layer, loop.direction].add(loop.cell.variables)
        stacked = {layer for (layer, _), read in cells.items() if len(read) > 1}
        found: dict[str, str] = {}
        for site in self.sites:
            what, why = f"Layer {site.name!r} cannot be traced", site.refusal
            if not why and (site.stack or site.name not in known):
                why = site.dropped
            if not why and site.name in stacked:
                hint = "unroll=False, which computes the same; or run eagerly"
                why = message(f"{what}: it stacks cells, and its steps are unrolled.", hint=hint)
            if not why and site.name not in there:
                hint = "unroll=False; or a cell of Keras' own"
                why = message(f"{what}: its steps were not found in the graph.", hint=hint)
            if why and site.name not in idle:
                found.setdefault(site.name, why)
        return found


def renamed(loops: Sequence[Loop], names: KerasNames | None) -> tuple[Loop, ...]:
    """Name loops after the Keras layers whose variables they read; several calls of a layer are numbered."""
    if names is None:
        return _calls_numbered(loops)
    placed = [(loop, _site_of(loop, names)) for loop in loops]
    counts = Counter((site.name, site.direction) for _, site in placed if site is not None)
    seen, found = Counter[tuple[str, str]](), []
    for loop, site in placed:
        if site is None:
            found.append(loop)
            continue
        key = (site.name, site.direction)
        name = site.name if counts[key] == 1 else f"{site.name}#{seen[key]}"
        seen[key] += 1
        output = loop.output
        if output is not None and not site.every_step and (output.stacked or len(output.tensors) > 1):
            output = replace(output, last=True)
        # The steps of an unrolled loop are in the order of the run; its direction is an attribute of the layer.
        direction = site.direction if loop.kind == "unrolled" else loop.direction
        found.append(replace(loop, name=name, bidirectional=site.bidirectional, output=output, direction=direction))
    return tuple(found)


def _calls_numbered(loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """Name loops that run the same cell as calls of one layer, rnn#0 and rnn#1, as in a siamese network."""
    chains = [[loop for loop in loops if loop.name == name] for name in dict.fromkeys(loop.name for loop in loops)]
    calls: dict[Any, list[list[Loop]]] = {}
    for chain in chains:
        read = [loop.cell.weights.items() if loop.cell.body is None else loop.cell.variables for loop in chain]
        cells = [(loop.direction, sorted(map(str, blocks))) for loop, blocks in zip(chain, read, strict=True)]
        if all(read for _, read in cells) and len({direction for direction, _ in cells}) < len(cells):
            calls.setdefault(str(cells[0]), []).extend([loop] for loop in chain)
        else:
            calls.setdefault(str(sorted(cells)) if all(read for _, read in cells) else id(chain), []).append(chain)
    names: dict[int, str] = {}
    for of_layer in calls.values():
        for i, chain in enumerate(of_layer):
            name = of_layer[0][0].name if len(of_layer) == 1 else f"{of_layer[0][0].name}#{i}"
            names |= {id(loop): name for loop in chain}
    return tuple(replace(loop, name=names[id(loop)]) for loop in loops)


def _site_of(loop: Loop, names: KerasNames) -> KerasSite | None:
    """Return the Keras layer with the loop's variables, preferably one named in the loop's scope; None without any."""
    read = loop.cell.variables
    fitting = [site for site in names.sites if read and read <= site.variables]
    fitting = [site for site in fitting if site.direction == loop.direction] or fitting
    named = [site for site in fitting if site.name.rpartition("/")[2] in loop.name]
    return next(iter(named or fitting), None)
