"""What lies around the recurrences: tensors that the framework has, and the segments from one to the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ...adapters.protocol import Port, Pullback
from ...autodiff.tensors import like
from ...typing import Array
from .outer import OuterTensor, moved
from .segments import Segment, probe, refuse_coupled


@dataclass
class Surroundings:
    """One run of the model, ready to be differentiated outside of the recurrences; cotangents go down in it.

    Attributes
    ----------
    values
        Its tensors, as the framework has them.
    pullback
        The framework's own differentiation; None where nothing is left to ask.
    segments
        By the tensor at which they start, then by that at which they end: as far as they are known.
    """

    values: Mapping[Port, Array] = field(default_factory=dict)
    pullback: Pullback | None = None
    tensors: dict[Port, OuterTensor] = field(default_factory=dict)
    segments: dict[Port, dict[Port, Segment]] = field(default_factory=dict)
    _uncoupled: set[Port] = field(default_factory=set)

    def below(self, port: Port) -> Mapping[Port, Segment]:
        """The segments that start at a tensor; probed once."""
        if port not in self.segments:
            known = self.pullback is not None
            self.segments[port] = probe(self.pull, self.tensors[port], self.tensors) if known else {}
        return self.segments[port]

    def pull(self, port: Port, rows: Array) -> Mapping[Port, Array | None]:
        """(row, sample, [time,] feature) at a tensor, through the framework to all that it differentiates by."""
        return self.pull_all({port: rows})

    def pull_all(self, rows: Mapping[Port, Array]) -> Mapping[Port, Array | None]:
        """The same from several tensors at once, summed where they meet."""
        assert self.pullback is not None
        cotangents = {port: like(self.tensors[port].closed(some), self.values[port]) for port, some in rows.items()}
        found = self.pullback.vjp(cotangents)
        return {port: None if a is None else self.tensors[port].opened(a) for port, a in found.items()}

    def through(self, port: Port, rows: Array, only: Collection[Port] | None = None) -> dict[Port, Array]:
        """Rows (sample, row, [time,] feature) at a tensor to those directly below it, in the same form."""
        segments = {p: segment for p, segment in self.below(port).items() if only is None or p in only}
        found = {below: segment.apply(rows) for below, segment in segments.items() if segment.kind != "through"}
        rest = [below for below, segment in segments.items() if segment.kind == "through"]
        if rest:
            pulled = self.pull(port, moved(rows, 0, 1))
            arrived = {below: pulled[below] for below in rest}
            found |= {below: like(moved(a, 0, 1), rows) for below, a in arrived.items() if a is not None}
        return found

    def refuse_coupled(self, port: Port) -> None:
        """Raise if what starts at some samples of a tensor arrives at others; tried once."""
        if port not in self._uncoupled:
            refuse_coupled(self.pull, self.tensors[port])
            self._uncoupled.add(port)
