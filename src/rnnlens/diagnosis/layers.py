"""Measures of one recurrent layer: what its state transfers, how its adjoint fades, what its gates and units do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import RecurrentCall
from ..measures.facts import Census, census, dead_units, gate_timescale, stuck_gates
from ..measures.profiles import Band, attributed_memory, attribution, band
from ..measures.transfer import Transfer, state_transfer, theil_sen
from ..recurrence.cells import KnownCell
from ..recurrence.run import Run
from ..results.schema import plain
from ..typing import Array
from ..verbs.gradients import gradients
from .experiment import LOOKED_INTO, Experiment

#: The gate that keeps the state, by kind of cell.
KEEPING = {"lstm": "forget", "gru": "update"}


@dataclass(frozen=True)
class LayerFacts:
    """One call of one direction of a recurrent layer.

    Attributes
    ----------
    adjoint : Band over lag
        Norm of the output's total gradient by the hidden state, each sample by its own peak.
    growth
        Decades by which that gradient is larger somewhere than where it starts, median over samples.
    final_norm, quarter_norm
        Mean norm of the state at the last step and after a quarter of them: whether it stays bounded.
    """

    name: str
    direction: str
    cell: str
    run: Run
    transfer: Transfer
    adjoint: Band | None
    adjoint_norms: Array | None
    growth: float
    decay: float
    dead: Array
    timescale: Array | None
    shut: Array | None
    open: Array | None
    states: Census
    final_norm: float
    quarter_norm: float

    @property
    def bounded(self) -> bool:
        """Whether the state does not run away: its norm at the end is below three times that after a quarter."""
        return self.final_norm < 3 * max(self.quarter_norm, 1e-30)


@dataclass(frozen=True)
class Attribution:
    """What gradients say about the question that the exchange of prefixes answers."""

    profile: Band
    memory: int


def measure_layers(experiment: Experiment) -> tuple[list[LayerFacts], Attribution | None]:
    """Every recurrent call, and the attribution to the input of the first."""
    found = _output_gradients(experiment)
    layers = [_facts(call, run, found.get((call.layer, call.direction))) for call, run in experiment.runs]
    return layers, _attribution(experiment, found)


def _output_gradients(experiment: Experiment) -> dict[tuple[str, str], Array]:
    """Total gradient of one random projection of the output by each layer's hidden state, and by the first's input."""
    few = data.map_leaves(lambda leaf: leaf[:LOOKED_INTO], experiment.samples.x)
    sequence = plain(data.leaves_of(experiment.capture.outputs)[experiment.output]).ndim >= 3
    size = experiment.raw.shape[1]
    weights = np.random.default_rng(experiment.seed).normal(size=size)
    calls = [call for call, _ in experiment.runs]
    nodes = list(dict.fromkeys(call.layer for call in calls))
    step = experiment.step if experiment.step != -1 else int(experiment.last[0]) - 1
    options: dict[str, Any] = {"at": {"time": step}} if sequence else {}
    several = len(data.leaves_of(experiment.capture.outputs)) > 1
    of = f"output[{experiment.output}]" if several else "output"
    wrt = [f"{node}.hidden" for node in nodes] + [f"{nodes[0]}.input"]
    found = gradients(experiment.model, few, of=of, reduce=weights, per_sample=True, wrt=wrt, **options)
    arrays: dict[tuple[str, str], Array] = {}
    for node in nodes:
        if "hidden" not in found[node]:
            continue
        hidden = found[node]["hidden"]
        if "direction" in hidden.dims:
            for way in ("forward", "backward"):
                arrays[node, way] = hidden.sel(direction=way).values
        else:
            arrays[node, next(c.direction for c in calls if c.layer == node)] = hidden.values
    if "input" in found[nodes[0]]:
        arrays["input", ""] = found[nodes[0]]["input"].values
    return arrays


def _facts(call: RecurrentCall, run: Run, gradient: Array | None) -> LayerFacts:
    order = list(run.steps(reverse=True))
    norms = None
    if gradient is not None:
        norms = np.linalg.norm(np.asarray(gradient, dtype=np.float64), axis=-1)[:, order]
    mask = None if run.mask is None else np.asarray(plain(run.mask), dtype=bool)
    hidden = plain(run.states[0])
    states = np.concatenate([plain(s) for s in run.states], axis=-1)
    sizes = np.linalg.norm(states[:, order[::-1]].astype(np.float64), axis=-1).mean(axis=0)
    profile = None if norms is None else band(norms)
    kind = run.cell.kind if isinstance(run.cell, KnownCell) else "custom"
    shut, opened = (None, None) if run.gates is None else stuck_gates(plain(run.gates), mask)
    return LayerFacts(
        call.layer,
        call.direction,
        kind,
        run,
        state_transfer(run),
        profile,
        norms,
        _growth(norms),
        float("nan") if profile is None else theil_sen(profile.median),
        dead_units(hidden, mask),
        _timescale(run, mask),
        shut,
        opened,
        census(states),
        float(sizes[-1]),
        float(sizes[len(sizes) // 4]),
    )


def _growth(norms: Array | None) -> float:
    """log10 of the largest over the first norm against the order of the recurrence, median over samples."""
    if norms is None or not norms.any():
        return 0.0
    start = np.array([row[np.flatnonzero(row)[0]] if row.any() else np.nan for row in norms])
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.nanmedian(np.log10(norms.max(axis=1) / start)))


def _timescale(run: Run, mask: Array | None) -> Array | None:
    if not isinstance(run.cell, KnownCell) or run.cell.kind not in KEEPING or run.gates is None:
        return None
    gate = run.cell.gates.index(KEEPING[run.cell.kind])
    return gate_timescale(plain(run.gates)[:, :, gate], mask)


def _attribution(experiment: Experiment, found: dict[tuple[str, str], Array]) -> Attribution | None:
    gradient, (_, run) = found.get(("input", "")), experiment.runs[0]
    if gradient is None or gradient.shape != tuple(run.input.shape):
        return None
    scores = attribution(gradient, plain(run.input))
    order = list(run.steps(reverse=True))
    return Attribution(band(np.sqrt(scores[:, order])), attributed_memory(scores))
