"""Which call continues which: a call that starts from the very state its predecessor returned is the next time step.

"The very state" is a statement about gradients as much as about values. The state handed to the user and the state that
feeds the recurrence are kept apart in the graph, so that a gradient that arrives at the former came from above and only
from above. That is sound only if the user passes the state on unchanged, or, row by row, keeps the state of before (a
mask, or a batch that shrinks as short sequences end). Equal values are checked first; that the path carries gradients
unchanged is then checked by pulling a random vector back through it. A detached, scaled or mixed state fails one of the
two and starts a new run of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Link:
    """The states around one call.

    Attributes
    ----------
    given
        What the user passed in.
    fed
        What the layer computed on: equal to ``given``, wired to the predecessor's ``raw``.
    raw
        What the layer returned, inside the graph.
    handed
        What the user got: copies of ``raw``.
    """

    given: tuple[Tensor, ...]
    fed: tuple[Tensor, ...]
    raw: tuple[Tensor, ...]
    handed: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        self._versions = tuple(tensor._version for tensor in self.handed)

    def continued_by(
        self, given: tuple[Tensor, ...], *, rowwise: bool
    ) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
        """How a call with the state ``given`` continues this one: the states to feed, and the rows that were real.

        Returns None if it does not. The rows, (sample,) of bool, say for which samples this call's state was passed
        on; the others kept the state from before this call. None for all of them.
        """
        if len(given) != len(self.handed):
            return None
        if all(
            new is old and new._version == seen
            for new, old, seen in zip(given, self.handed, self._versions, strict=True)
        ):
            return self.raw, None
        rows: Tensor | None = None
        for new, old, before in zip(given, self.handed, self.given, strict=True):
            found = _passed_on(new, old, before, rowwise)
            if found is None or (rows is not None and not torch.equal(rows, found)):
                return None
            rows = found
        if rows is None or not bool(rows.any()):
            return None
        count = given[0].shape[0]
        if bool(rows.all()) and count == self.raw[0].shape[0]:
            return self.raw, None
        keep = [rows.reshape(-1, *[1] * (raw.dim() - 1)) for raw in self.raw]
        fed = tuple(
            torch.where(k, raw[:count], before[:count]) for k, raw, before in zip(keep, self.raw, self.fed, strict=True)
        )
        return fed, rows


def _passed_on(new: Tensor, old: Tensor, before: Tensor, rowwise: bool) -> Tensor | None:
    """Rows in which ``new`` is ``old`` passed on unchanged; None if any row is neither that nor ``before``."""
    count = new.shape[0]
    if not new.requires_grad or new.shape[1:] != old.shape[1:] or count > old.shape[0] or new.dtype != old.dtype:
        return None
    if not rowwise and (count != old.shape[0] or not torch.equal(new, old)):
        return None
    same = _rows_equal(new, old[:count]) | _rows_equal(new, before[:count])
    if not bool(same.all()):
        return None
    probe = torch.rand_like(new) + 0.5
    sources = [old, before] if before.requires_grad else [old]
    pulled = torch.autograd.grad(new, sources, probe, retain_graph=True, allow_unused=True)
    to_old = torch.zeros_like(old) if pulled[0] is None else pulled[0]
    if bool(to_old[count:].any()):
        return None
    is_old, not_old = _rows_equal(to_old[:count], probe), _rows_equal(to_old[:count], torch.zeros_like(probe))
    if len(sources) == 2:
        to_before = torch.zeros_like(before) if pulled[1] is None else pulled[1]
        is_old = is_old & _rows_equal(to_before[:count], torch.zeros_like(probe))
        not_old = not_old & _rows_equal(to_before[:count], probe)
    return is_old if bool((is_old | not_old).all()) else None


def _rows_equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b).reshape(a.shape[0], -1).all(dim=1)
