"""Sweeps of many cotangents (or tangents) at once through a linear system: G[t, k] = C A_t ... A_{k+1} B_k.

The reverse sweep starts from the outputs and walks against the recurrence; the forward sweep starts from the inputs and
walks with it. Each step is one batched matrix product over the rows that are alive, into memory allocated once. Where
more rows are alive than the state has numbers, the reverse sweep goes in blocks of steps.
Reverse and forward accumulation: Griewank, Walther 2008, doi:10.1137/1.9780898717761, chapter 3; what is new here is
the shape of the linearisation (:mod:`rnnlens.recurrence.linear`) and the cut (:mod:`rnnlens.recurrence.sweep_blocked`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .linear import System
from .pruning import NoPruning, Pruning
from .replay import steps
from .sources import Source, Units
from .sweep_blocked import BlockedSweep, plan_blocks
from .sweep_forward import Entrances, ForwardSweep
from .sweep_parts import Cost, Sink, Taps
from .sweep_reverse import ReverseSweep
from .sweep_units import UnitSweep

__all__ = ["Entrances", "Taps", "forward", "forward_flops", "reverse", "reverse_flops", "unit_flops"]


def reverse(
    system: System,
    source: Source | Units,
    taps: Taps,
    *,
    samples: slice = slice(None),
    pruning: Pruning | None = None,
    progress: Callable[[], None] | None = None,
) -> Cost:
    """Pull rows of cotangents back through the recurrence.

    Parameters
    ----------
    source
        Cotangents of the states, as they enter. ``Units`` for systems in which units never meet.
    taps
        ``input`` receives dL/dx_t, ``states`` the total dL/ds_t (of c_t as it is produced), ``initial`` dL/ds_0.
    samples
        Which samples to sweep.
    """
    if isinstance(source, Units):
        with system.work.quiet():
            return UnitSweep(system, source, taps, samples, pruning or NoPruning()).run(progress)
    length = 0 if taps.states or pruning is not None or source.lasting else _block_length(system, source, taps)
    with system.work.quiet():
        if length:
            return BlockedSweep(system, source, taps, samples, length).run(progress)
        return ReverseSweep(system, source, taps, samples, pruning or NoPruning()).run(progress)


def _block_length(system: System, source: Source, taps: Taps) -> int:
    order = list(steps(system.time, system.order, reverse=True))
    wanted = [i for i, t in enumerate(order) if taps.wants(t)]
    stop = system.time if taps.initial or not wanted else wanted[-1] + 1
    alive = [source.count - source.first(t) for t in order[:stop]]
    return plan_blocks(system, alive, system.features if wanted and taps.input is not None else 0).length


def forward(
    system: System,
    entrances: Entrances,
    sinks: dict[int, Sink],
    steps: frozenset[int],
    *,
    samples: slice = slice(None),
    pruning: Pruning | None = None,
    progress: Callable[[], None] | None = None,
) -> Cost:
    """Push rows of tangents forward through the recurrence.

    Parameters
    ----------
    entrances
        Where rows enter. They are kept youngest first: a sink's row 0 belongs to the group that enters last.
    sinks
        By state: receive the change of the state after each of ``steps``.
    """
    with system.work.quiet():
        return ForwardSweep(system, entrances, sinks, steps, samples, pruning or NoPruning()).run(progress)


def reverse_flops(system: System, alive: Sequence[int] | np.ndarray[Any, Any], with_input: bool) -> float:
    """Operations of a reverse sweep, where so many rows are ``alive`` at its steps; from states only without blocks."""
    if with_input:
        return 2.0 * system.batch * plan_blocks(system, alive, system.features).products
    return 2.0 * system.batch * float(np.sum(alive)) * system.multiplications(False)


def unit_flops(system: System, state: int, alive: Sequence[int] | np.ndarray[Any, Any], features: int) -> float:
    """Operations of a reverse sweep of all units of a state, where so many groups of them are ``alive`` at its steps.

    ``features``: numbers made of each unit at a step; 1 where they are reduced on the spot.
    """
    pattern = system.pattern(state)
    assert pattern is not None
    per_group = pattern.count * system.multiplications(False) + pattern.entries * features
    return 2.0 * system.batch * float(np.sum(alive)) * per_group


def forward_flops(system: System, alive: int, out_rows: int) -> float:
    """Operations of a forward sweep; each row alive is also multiplied into ``out_rows`` outputs (0: none)."""
    readout = out_rows * system.state_sizes[0]
    return 2.0 * system.batch * alive * (system.multiplications(False) + readout)
