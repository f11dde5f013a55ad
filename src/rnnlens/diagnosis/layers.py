"""Measures of one recurrent layer: state transfer, total gradient by lag, gates, units, non-finite numbers.

Whole-sequence layers (Mamba, delta rules) have half-life and ranks of their states instead of gates and units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Batch, Capture, CaptureRequest, RecurrentCall, SequenceCall
from ..errors import UnsupportedError
from ..layout import canonical_order
from ..measures.facts import Census, census, dead_units, gate_timescale, stuck_gates
from ..measures.profiles import Band, attributed_memory, attribution, band
from ..measures.transfer import Transfer, state_transfer, theil_sen
from ..recurrence.arrays import namespace
from ..recurrence.replay import Replay
from ..recurrence.sequence import SequenceCell, forward, pull_back, sweep
from ..results.schema import to_host
from ..settings import options
from ..typing import Array
from ..verbs.gradients import gradients
from ..verbs.traced_scans import scan_measures
from .experiment import Experiment


@dataclass(frozen=True)
class LayerFacts:
    """Measures of one call of one direction of a recurrent layer.

    Attributes
    ----------
    adjoint_norms : (sample, lag)
        Norm of the output's total gradient at the hidden state; None if unknown.
    state_norms : (time,)
        Mean norm of the state, in the order of the recurrence.
    against_vanishing
        Remedy against a vanishing gradient in this kind of layer.
    scan
        Labelled measures of a whole-sequence layer alone: half-life, effective state size and rank.
    """

    name: str
    direction: str
    cell: str
    against_vanishing: str
    transfer: Transfer
    adjoint_norms: Array | None
    states: Census
    state_norms: Array
    dead: Array = field(default_factory=lambda: np.zeros(0, dtype=bool))
    timescale: Array | None = None
    shut: Array | None = None
    open: Array | None = None
    scan: Mapping[str, xr.Variable] = field(default_factory=dict)

    @cached_property
    def adjoint(self) -> Band | None:
        """Norm of the output's total gradient by lag, each sample divided by its own peak; None if unknown."""
        return None if self.adjoint_norms is None else band(self.adjoint_norms)

    @property
    def decay(self) -> float:
        """Theil-Sen slope of the median of :attr:`adjoint`; NaN if it is unknown."""
        return float("nan") if self.adjoint is None else theil_sen(self.adjoint.median)

    @property
    def growth(self) -> float:
        """Largest norm of the output's gradient over its first non-zero one, in decades; median over samples."""
        norms = np.nan_to_num(np.zeros((1, 1)) if self.adjoint_norms is None else self.adjoint_norms)
        if not norms.any():
            return 0.0
        start = np.array([row[np.flatnonzero(row)[0]] if row.any() else np.nan for row in norms])
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.nanmedian(np.log10(norms.max(axis=1)) - np.log10(start)))

    @property
    def adjoint_size(self) -> float:
        """Median over samples of the output gradient's largest norm at the hidden state; NaN if unknown."""
        if self.adjoint_norms is None:
            return float("nan")
        # Half of the largest float, so that the mean of two of them is finite.
        half = np.finfo(self.adjoint_norms.dtype).max / 2
        return float(np.median(np.nan_to_num(self.adjoint_norms, posinf=half).max(axis=1)))

    def signal(self, lag: int, steps: int) -> float:
        """Return the share of a training signal that is left ``lag`` steps before the end of ``steps`` steps.

        It is the larger of two shares: of a cotangent on the final state through the recurrence, and of the output's
        gradient at the state, for models that use every step (attention, pooling). If the layer has fewer steps than
        the data, the lag is scaled.
        """
        ways = [self.transfer.kappa] + ([] if self.adjoint is None else [self.adjoint.median])
        own = len(self.transfer.kappa) - 1
        at = round(lag * own / steps)
        if self.direction == "backward":
            if own < steps:  # in the middle it has not processed the older steps
                return 0.0
            at = own - 1 - at
        return max(float(way[min(at, len(way) - 1)]) for way in ways)

    @property
    def bounded(self) -> bool:
        """Whether the mean norm of the final state is below three times that after a quarter of the steps."""
        return float(self.state_norms[-1]) < 3 * max(float(self.state_norms[len(self.state_norms) // 4]), 1e-30)


def measure_layers(experiment: Experiment) -> tuple[list[LayerFacts], int | None]:
    """Measure every recurrent call; also count the last input steps that gradients attribute the prediction to."""
    if not experiment.runs:
        return [], None
    for call, _ in experiment.runs:
        if call.cell.space:
            raise UnsupportedError(
                f"Layer {call.layer!r} cannot be diagnosed: its states have axes of space.",
                expected="layers whose states are (sample, time, unit)",
                hint="rl.trace and rl.gradients give its gates and total gradients at every step and place",
            )
    found = _output_gradients(experiment)
    layers = [
        _facts(call, run, found.get((call.layer, call.direction)), experiment.ends(call))
        for call, run in experiment.runs
    ]
    return layers, _attribution(experiment, found)


def _output_gradients(experiment: Experiment) -> dict[tuple[str, str], Array]:
    """Compute a random projection's gradient by (layer, direction) and, at ("input", ""), by the input."""
    calls = [call for call, _ in experiment.runs]
    nodes = list(dict.fromkeys(call.layer for call in calls))
    several = len(data.leaves_of(experiment.capture.outputs)) > 1
    of = f"output[{experiment.which}]" if several else "output"
    wrt = [f"{node}.hidden" for node in nodes] + [f"{nodes[0]}.input"]
    # Samples do not interact in inference, so the gradient of the sum contains the gradient of each sample.
    with options(certify="never"):
        found = gradients(
            experiment.model,
            experiment.few,
            of=of,
            reduce=projection(experiment),
            wrt=wrt,
            axes=experiment.axes_of(of),
        )
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


def projection(experiment: Experiment) -> Any:
    """Draw random weights of the output at the examined step, which project it to one number per sample."""
    whole = experiment.looked_at
    weights = np.random.default_rng(experiment.seed).normal(size=experiment.raw.shape[1])
    projection: Array = np.zeros(whole.shape)
    if experiment.is_sequence:
        projection[np.arange(len(whole)), experiment.place(whole)] = weights.reshape(whole.shape[2:])
    else:
        projection[...] = weights.reshape(whole.shape[1:])
    names = [experiment.layout.names[i] for i in canonical_order(experiment.layout.names)]
    # The last axis was added if the output has one number per step.
    return xr.DataArray(projection if len(names) == projection.ndim else projection[..., 0], dims=names)


def by_lag(values: Array, order: Sequence[int], ends: Array | None) -> Array:
    """Reorder (sample, time) by ``order`` to (sample, lag): 0 at each sample's end, NaN before its first step."""
    turned = values[:, order]
    if ends is None:
        return turned
    begin = np.array([list(order).index(int(end)) for end in ends])
    place = np.arange(turned.shape[1] - int(begin.min()))[None, :] + begin[:, None]
    inside = place < turned.shape[1]
    return np.where(inside, np.take_along_axis(turned, np.where(inside, place, 0), axis=1), np.nan)


def _facts(call: RecurrentCall, run: Replay, gradient: Array | None, ends: Array | None) -> LayerFacts:
    order = list(run.steps(reverse=True))
    norms = None
    if gradient is not None:
        norms = by_lag(_norms(gradient), order, ends)
    mask = None if run.mask is None else np.asarray(to_host(run.mask), dtype=bool)
    states = np.concatenate([to_host(s) for s in run.states], axis=-1)
    shut, opened = (None, None) if run.gates is None else stuck_gates(to_host(run.gates), mask)
    timescale = None
    if run.cell.keeping is not None and run.gates is not None:
        timescale = gate_timescale(to_host(run.gates)[:, :, run.cell.gates.index(run.cell.keeping)], mask)
    return LayerFacts(
        name=call.layer,
        direction=call.direction,
        cell=run.cell.kind,
        against_vanishing=run.cell.against_vanishing,
        transfer=state_transfer(run, ends=ends),
        adjoint_norms=norms,
        states=census(states),
        state_norms=_norms(states[:, order[::-1]]).mean(axis=0),
        dead=dead_units(to_host(run.states[0]), mask),
        timescale=timescale,
        shut=shut,
        open=opened,
    )


def _attribution(experiment: Experiment, found: dict[tuple[str, str], Array]) -> int | None:
    gradient, (_, run) = found.get(("input", "")), experiment.runs[0]
    if gradient is None or gradient.shape != tuple(run.input.shape):
        return None
    scores = attribution(gradient, to_host(run.input))
    backwards = list(range(scores.shape[1]))[::-1]
    by_lags = by_lag(scores, backwards, experiment.ends(experiment.runs[0][0]))
    return attributed_memory(np.nan_to_num(by_lags)[:, ::-1])


#: Largest number of samples whose scans are captured, and of random cotangents of the state transfer.
_SAMPLES, _DIRECTIONS = 8, 4

_AGAINST_VANISHING = (
    "slower decays at the start of training (A_log, dt_bias; Gu, Dao 2023, arXiv:2312.00752, section 3.6), or "
    "attention layers in between."
)


def measure_scans(experiment: Experiment) -> tuple[list[LayerFacts], int | None]:
    """Measure every scan, and count the attributed input steps as :func:`measure_layers` does."""
    if not experiment.scans:
        return [], None
    capture = _capture(experiment)
    facts = []
    for call in capture.sequences:
        kind = experiment.scans[call.layer.rpartition("#")[0] or call.layer].cell
        steps = call.cell.steps
        facts.append(_scan_facts(call, kind, experiment.reach if steps == experiment.samples.steps else steps))
    return facts, _scan_attribution(experiment, capture)


def _capture(experiment: Experiment) -> Capture:
    """Capture all scans and embeddings under a random projection of the output, which takes the place of a loss."""
    weights = projection(experiment).transpose(*experiment.layout.names).values[:_SAMPLES]

    def projected(outputs: Any, _: Any = None) -> Any:
        leaf = data.leaves_of(outputs)[experiment.which]
        xp = namespace(leaf)
        return (leaf * xp.asarray(weights, dtype=leaf.dtype, device=leaf.device)).sum()

    x = experiment.given(data.map_leaves(lambda leaf: leaf[:_SAMPLES], experiment.samples.x))
    names = (*experiment.scans, *experiment.embeddings)
    request = CaptureRequest(names, weight_grads=False, boundaries=True, all_must_run=False)
    return experiment.adapter.capture(experiment.model, Batch(x, np.zeros(len(weights)), loss=projected), request)


def _scan_facts(call: SequenceCall, kind: str, seen: int) -> LayerFacts:
    """Measure one scan in one sweep over chunks of steps, up to step ``seen``."""
    assert call.output_grad is not None
    cell = call.cell.at(slice(0, seen))
    _, starts, last = forward(cell)
    norms, sizes, moments, states = [], [], np.zeros((3, *cell.shape[2:])), Census(0, 0, 0, 0)
    for chunk, _ in sweep(cell, starts, call.output_grad[:, :seen]):
        values = to_host(chunk.states)
        norms.append(_norms(to_host(chunk.grads)))
        sizes.append(_norms(values).mean(axis=0))
        moments += _moments(values)
        counted = census(values)
        states = Census(*(a + b for a, b in zip(vars(states).values(), vars(counted).values(), strict=True)))
    return LayerFacts(
        name=call.layer,
        direction="forward",
        cell=kind,
        against_vanishing=_AGAINST_VANISHING,
        transfer=_transfer(cell, _spread(moments)),
        adjoint_norms=by_lag(np.concatenate(norms[::-1], axis=1), range(seen)[::-1], None),
        states=states,
        state_norms=np.concatenate(sizes[::-1]),
        scan=scan_measures(cell, to_host(last)),
    )


def _norms(values: Array) -> Array:
    """Return the norms (sample, time) of arrays (sample, time, *axes)."""
    return np.linalg.norm(values.reshape(*values.shape[:2], -1).astype(np.float64), axis=-1)


def _moments(states: Array) -> Array:
    """Return the count, sum and sum of squares of finite states over samples and steps, (3, *axes)."""
    values = np.where(np.isfinite(states), states, 0.0).astype(np.float64)
    return np.stack([np.isfinite(states).sum((0, 1)), values.sum((0, 1)), (values**2).sum((0, 1))])


def _spread(moments: Array) -> Array:
    """Return the standard deviation of each number of the state, at least 1e-3 of the median one."""
    count, total, squares = np.maximum(moments[0], 1), moments[1], moments[2]
    spread = np.sqrt(np.maximum(squares / count - (total / count) ** 2, 0.0))
    return np.maximum(spread, 1e-3 * (float(np.median(spread)) or 1.0))


def _transfer(cell: SequenceCell, spread: Array) -> Transfer:
    """Pull random cotangents on the last state back through a scan, in units of the spread of each number."""
    rng, logs = np.random.default_rng(0), []
    xp, like = namespace(cell.write[0]), cell.write[0]
    for _ in range(_DIRECTIONS):
        drawn = rng.normal(size=(cell.shape[0], *cell.shape[2:]))
        drawn /= _norms(drawn[:, None])[:, 0].reshape(-1, *(1,) * spread.ndim)
        cotangent = xp.asarray(drawn / spread, dtype=like.dtype, device=like.device)
        sizes = [_norms(to_host(c)[:, None] * spread)[:, 0] for c in pull_back(cell, cotangent)]
        with np.errstate(divide="ignore"):
            logs.append(np.log(np.stack([np.ones(cell.shape[0]), *sizes])))
    return Transfer(np.mean(logs, axis=0))


def _scan_attribution(experiment: Experiment, capture: Capture) -> int | None:
    """Count the last steps with 95 % of the attribution to embedded ids or float input, if there are any."""
    if capture.plain and capture.plain[0].output_grad is not None:
        x, gradient = to_host(capture.plain[0].output), to_host(capture.plain[0].output_grad)
    else:
        pairs = zip(data.leaves_of(experiment.samples.x), capture.input_grads, strict=False)
        found = next(((leaf, grad) for leaf, grad in pairs if grad is not None), None)
        if found is None:
            return None
        x, gradient = found[0][:_SAMPLES], to_host(found[1])
    if gradient.shape != x.shape or x.ndim != 3 or x.shape[1] != experiment.samples.steps:
        return None
    scores = attribution(gradient, x)[:, : experiment.reach]
    return attributed_memory(np.nan_to_num(by_lag(scores, range(experiment.reach)[::-1], None))[:, ::-1])


def scan_sentence(layer: LayerFacts) -> str:
    """Describe how long the state of a whole-sequence layer lasts by its decay."""
    half_life = np.ravel(layer.scan["half_life"].values)
    typical, slow = float(np.median(half_life)), float(np.quantile(half_life, 0.9, method="lower"))
    if math.isinf(typical):
        return f"{layer.name}: its state does not decay."
    if slow < 1:
        return f"{layer.name}: half of its state decays within less than one step."
    if half_life.size < 2 or slow < 1.5 * typical:
        return f"{layer.name}: half of its state decays within {_number(typical)} steps."
    longest = "do not decay" if math.isinf(slow) else f"take {_number(slow)} steps or more"
    return (
        f"{layer.name}: half of its state decays within {_number(typical)} steps (median); the slowest tenth {longest}."
    )


def _number(steps: float) -> str:
    return f"{steps:.0f}" if steps >= 10 else f"{steps:.1f}"
