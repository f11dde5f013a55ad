"""Decides which call continues which: a call that starts from the state its predecessor returned is the next step.

The same state means the same values and an unchanged gradient path. The state returned to the user and the state inside
the recurrence are two tensors of the graph, so the gradient at the former is the direct gradient only. This is correct
if the user passes the state on unchanged, or keeps the earlier state for some samples (a mask, or a batch that shrinks
as short sequences end). Equal values are checked first. Then a random cotangent is pulled back, to check that the path
leaves gradients unchanged. A detached, scaled or mixed state fails one of the two checks and starts a new recurrence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

States = tuple[Tensor, ...]


@dataclass
class StateLink:
    """Initial and final states of one call, and the call before it in the same recurrence.

    ``given``: states that the user passed in. ``fed``: equal states that the layer computed on, connected to the
    ``raw`` of the call before in the graph. ``raw``: states that the layer returned. ``handed``: states that the user
    got, and may change in place. ``kept``: originals of ``handed``, which the user's code cannot reach. ``output``:
    output (time, sample, unit) of a layer's call, whose last step is its (upper) hidden state; None for a cell.
    """

    given: States
    fed: States
    raw: States
    handed: States
    kept: States
    before: Continuation | None = None
    output: Tensor | None = None

    def __post_init__(self) -> None:
        self._versions = tuple(tensor._version for tensor in self.handed)
        #: States of the recurrence, initial state first; one list shared by all of its calls.
        self.history: list[States] = [self.given] if self.before is None else self.before.link.history
        self.history.append(self.kept)
        self.step = len(self.history) - 1
        #: Index in ``history`` of each sample's state in ``given``; None if all have the last one.
        self.origin: Tensor | None = None if self.before is None else self.before.origin

    def continued_by(self, given: States, *, rowwise: bool) -> Continuation | None:
        """Return how a call with the state ``given`` continues this one; None if it does not.

        With ``rowwise``, some samples may have kept their state from before this call, and the last samples may have
        left the batch.
        """
        if len(given) != len(self.kept):
            return None
        same = zip(given, self.handed, self._versions, self.kept, strict=True)
        # Compare values too: a write through ``.data`` does not change a tensor's version.
        if all(new is old and new._version == seen and _equal(new, kept) for new, old, seen, kept in same):
            return Continuation(self.raw, None, self)
        rows: Tensor | None = None
        for index in range(len(given)):
            found = self.passed_on(given[index], index, rowwise)
            if found is None or (rows is not None and not torch.equal(rows, found)):
                return None
            rows = found
        if rows is None or all(new is old for new, old in zip(given, self.given, strict=True)):
            return None  # the previous call started from this state too: a branch, not a step
        count = given[0].shape[0]
        if bool(rows.all()) and count == self.raw[0].shape[0]:
            return Continuation(self.raw, None, self)
        keep = [rows.reshape(-1, *[1] * (raw.dim() - 1)) for raw in self.raw]
        parts = zip(keep, self.raw, self.fed, strict=True)
        return Continuation(tuple(torch.where(k, raw[:count], old[:count]) for k, raw, old in parts), rows, self)

    def passed_on(self, new: Tensor, index: int, rowwise: bool) -> Tensor | None:
        """Return the samples (sample,) for which ``new`` is this call's state unchanged.

        All other samples must have kept their state from before the call; else the result is None.
        """
        old, before, count = self.kept[index], self.given[index], new.shape[0]
        if not new.requires_grad or new.shape[1:] != old.shape[1:] or count > old.shape[0] or new.dtype != old.dtype:
            return None
        if not rowwise and (count != old.shape[0] or not _equal(new, old)):
            return None
        is_old, is_before = _rows_equal(new, old[:count]), _rows_equal(new, self.fed[index][:count])
        if not bool((is_old | is_before).all()):
            return None
        # The earlier states that samples may still have if they did not move on.
        steps = {self.step - 1} if self.origin is None else set(self.origin.tolist())
        held = [self.history[int(step)][index] for step in sorted(steps)]
        # Recent sources first: the cost of autograd grows with the age of the oldest source.
        for sources in ([before], [before, *held]):
            passed = self._by_gradient(new, index, sources, is_old, is_before)
            if passed is not None:
                return passed
        return None

    def _by_gradient(
        self, new: Tensor, index: int, sources: list[Tensor], is_old: Tensor, is_before: Tensor
    ) -> Tensor | None:
        """Return in which samples the state ``new`` is this call's new state unchanged: a bool tensor (sample,).

        A random cotangent is pulled back from ``new``: it arrives unchanged at the call's new state, or at a state
        from before the call (``sources``) of a sample that the call left out. None if in any sample it does neither.
        """
        count, probe = new.shape[0], probe_like(new)
        pulled = _at_sources(new, [self.kept[index], *sources], probe)
        to_old, *arrived = (torch.zeros_like(probe) if grad is None else grad[:count] for grad in pulled)
        to_old = to_old + self._to_output(new, index, probe)
        passed, kept = is_old & _rows_equal(to_old, probe), torch.zeros_like(is_before)
        for at in arrived:
            kept = kept | _rows_equal(at, probe)
        if not self.history[0][index].requires_grad:  # a constant initial state has no gradient to compare
            kept = kept | (self._origins(count, new.device) == 0)
        kept = kept & is_before & ~_any_in_rows(to_old)
        return passed if bool((passed | kept).all()) else None

    def _to_output(self, new: Tensor, index: int, probe: Tensor) -> Tensor | float:
        """Pull ``probe`` at the state ``new`` back to the last step of the layer's output.

        Returns NaN if earlier steps receive it.
        """
        if index or self.output is None or len(self.kept[0]) > 1:
            return 0.0
        (steps,) = torch.autograd.grad(new, [self.output], probe, retain_graph=True, allow_unused=True)
        if steps is None:
            return 0.0
        return steps[-1:] if not bool((steps[:-1] != 0).any()) else torch.full_like(probe, torch.nan)

    def _origins(self, count: int, device: torch.device) -> Tensor:
        if self.origin is None:
            return torch.full((count,), self.step - 1, device=device)
        return self.origin[:count]


@dataclass
class Continuation:
    """States fed to the next call; ``rows`` (sample,) is False where a sample keeps its earlier state, or None."""

    fed: States
    rows: Tensor | None
    link: StateLink

    @property
    def origin(self) -> Tensor | None:
        """Number of the step whose state each sample continues from, (sample,); None if it is the last step for all."""
        if self.rows is None:
            return None
        device = self.rows.device
        return torch.where(self.rows, self.link.step, self.link._origins(len(self.rows), device))


def upstream(nodes: Iterable[Any], done: set[Any]) -> Iterator[Any]:
    """Yield autograd nodes and all nodes that they depend on, each once.

    Nodes in ``done`` are left out, new ones added.
    """
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in done:
            done.add(node)
            yield node
            waiting.extend(parent for parent, _ in node.next_functions)


def follows(given: States, link: StateLink, seen: set[Any] | None = None) -> bool:
    """Return whether states depend on states or outputs of an earlier call, by nodes of the autograd graph.

    ``seen`` is the set of nodes that were searched without success; it is extended.
    """
    ends = {tensor.grad_fn for tensor in (*link.kept, *([] if link.output is None else [link.output]))}
    return any(node in ends for node in upstream([t.grad_fn for t in given], set() if seen is None else seen))


def rows_reset(given: States, link: StateLink) -> tuple[Tensor, bool]:
    """Return which samples, (sample,) of bool, start a call with states that do not depend on the call before it.

    The second result is True if all other samples start with the states that the call before returned, unchanged.
    """
    first = 0 if link.output is None else 1  # a layer's states and output have the samples on the second axis
    count = given[0].shape[first]
    sources = [*link.kept, *([] if link.output is None else [link.output])]
    reset, unchanged = (torch.ones(count, dtype=torch.bool, device=given[0].device) for _ in range(2))

    def rows(tensor: Tensor) -> Tensor:
        return tensor.movedim(first, 0)[:count]

    for index, new in enumerate(given):
        if not new.requires_grad:
            unchanged = torch.zeros_like(unchanged)
            continue
        probe = probe_like(new)
        pulled = _at_sources(new, sources, probe)
        for grad in pulled:
            reset = reset if grad is None else reset & ~_any_in_rows(rows(grad))
        same = _rows_equal(rows(new), rows(link.kept[index]))
        passed = pulled[index]
        unchanged = unchanged & same & (False if passed is None else _rows_equal(rows(passed), rows(probe)))
    return reset, bool((reset | unchanged).all())


def probe_like(tensor: Tensor) -> Tensor:
    """Return fixed random numbers between 0.5 and 1.5 of the tensor's shape, without using torch's global generator."""
    generator = torch.Generator().manual_seed(tensor.numel())
    drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5
    return drawn.to(tensor)


def _at_sources(value: Tensor, sources: list[Tensor], cotangent: Tensor) -> list[Tensor | None]:
    """Pull the cotangent of ``value`` back to each source; None without a path."""
    live = [source for source in sources if source.requires_grad]
    found = iter(torch.autograd.grad(value, live, cotangent, retain_graph=True, allow_unused=True))
    return [next(found) if source.requires_grad else None for source in sources]


def _rows_equal(a: Tensor, b: Tensor) -> Tensor:
    return _same(a, b).reshape(a.shape[0], -1).all(dim=1)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (a.shape == b.shape and bool(_same(a, b).all()))


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Return where two tensors are equal; NaN equals NaN, because a NaN state is passed on all the same."""
    return (a == b) | (torch.isnan(a) & torch.isnan(b))


def _any_in_rows(a: Tensor) -> Tensor:
    return (a != 0).reshape(a.shape[0], -1).any(dim=1)
