"""A recurrence as a linear time-varying system around its trajectory: delta s_t = A_t delta s_{t-1} + B_t delta x_t.

A_t and B_t are never stored as such. What a sweep multiplies with at step t is one *product* matrix per sample, built
once and shared by all cotangents (or tangents):

``gated`` (LSTM)
    only two H x H blocks of A_t are full, the rest is diagonal. With dc the total gradient of c_t,
    ``[dc | dh] @ product = [dh_{t-1} | dx]``, ``dc_{t-1} = keep * dc``, and ``dc = lambda_c + lift * dh`` on arrival.
    Rows of ``product``: unit of c, then unit of h. ``keep`` is the forget gate, ``lift`` is o * act'(c).
dense (all others)
    ``lambda @ product = [lambda_{t-1} | dx]``, all diagonals folded in.

A masked step carries the state over and has no input: that too is only a matter of what stands in these matrices, so
that a sweep needs no branches. Columns of ``product``: the state before, then the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..typing import Array
from .inplace import Workspace
from .parallel import still_wanted


@dataclass
class Steps:
    """The linearisation of steps ``first ... first + n - 1`` (chronological).

    product : (sample, step, row, column); keep, lift : (sample, step, unit) of a gated system, else None.
    path : (sample, step, unit of h, unit of c): dh_t/dc_t within the step, of an LSTM in the dense form.
    produced : gives (sample, step, row, column): what leaves a custom cell's step by each state as it is produced.
    """

    first: int
    product: Array
    keep: Array | None = None
    lift: Array | None = None
    path: Array | None = None
    produced: Callable[[], Array] | None = None


class System(Protocol):
    """One recurrent call, linearised on demand.

    Attributes
    ----------
    rows, columns
        Shape of a product matrix without its input columns.
    gated
        Which of the two forms of this module.
    """

    work: Workspace
    batch: int
    time: int
    features: int
    order: Literal["forward", "backward"]
    state_sizes: tuple[int, ...]
    rows: int
    columns: int
    gated: bool

    def build(self, first: int, stop: int, samples: slice, *, inputs: bool) -> Steps:
        """Linearise steps ``first ... stop - 1`` of some samples; without input columns where not ``inputs``."""


def state_columns(system: System, state: int) -> slice:
    """Where a state's cotangent lies in a row of a sweep. A gated row is [c | h | x], a dense one [states | x]."""
    if system.gated:
        units = system.state_sizes[1]
        return slice(units, 2 * units) if state == 0 else slice(0, units)
    start = sum(system.state_sizes[:state])
    return slice(start, start + system.state_sizes[state])


def walk(
    system: System, samples: slice, *, reverse: bool, inputs: bool, budget: int, steps: Sequence[int] | None = None
) -> Iterator[tuple[int, Steps, int]]:
    """Steps in the order of the recurrence (or against it): time index, block, index within the block.

    Blocks are as long as ``budget`` bytes allow: long enough to build them with few calls, never all of them at once.
    ``steps``: only these, a stretch without gaps in either order.
    """
    width = system.columns + (system.features if inputs else 0)
    count = len(range(*samples.indices(system.batch)))
    per_step = max(1, count * system.rows * width * system.work.itemsize)
    length = max(1, min(system.time, budget // per_step))
    chronological = (system.order == "forward") != reverse
    first, end = (0, system.time) if steps is None else (min(steps), max(steps) + 1)
    starts = range(first, end, length)
    for start in starts if chronological else reversed(starts):
        stop = min(start + length, end)
        block = system.build(start, stop, samples, inputs=inputs)
        inner = range(start, stop) if chronological else range(stop - 1, start - 1, -1)
        for t in inner:
            still_wanted()
            yield t, block, t - start
