"""Measures of whole-sequence layers (Mamba, delta rules): state transfer, total gradient by lag, half-life, ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import data
from ..adapters.protocol import Batch, Capture, CaptureRequest, SequenceCall
from ..measures.facts import Census, census
from ..measures.profiles import attributed_memory, attribution, band
from ..measures.transfer import Transfer, theil_sen
from ..recurrence.arrays import namespace
from ..recurrence.sequence import SequenceCell, forward, pull_back, sweep
from ..results.schema import to_host
from ..typing import Array
from ..verbs.tracing.sequences import scan_measures
from .experiment import Experiment
from .layers import Attribution, LayerFacts, by_lag, growth, projection

#: Largest number of samples whose scans are captured, and of random cotangents of the state transfer.
_SAMPLES, _DIRECTIONS = 8, 4

_AGAINST_VANISHING = (
    "slower decays at the start of training (A_log, dt_bias; Gu, Dao 2023, arXiv:2312.00752, section 3.6), or "
    "attention layers in between."
)


def measure_scans(experiment: Experiment) -> tuple[list[LayerFacts], Attribution | None]:
    """Measure every scan of the examined model, and attribute the prediction to input steps; nothing without scans."""
    if not experiment.scans:
        return [], None
    capture = _capture(experiment)
    facts = []
    for call in capture.sequences:
        kind = experiment.scans[call.layer.rpartition("#")[0] or call.layer].cell
        steps = call.cell.steps
        facts.append(_facts(call, kind, experiment.reach if steps == experiment.samples.steps else steps))
    return facts, _attribution(experiment, capture)


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


def _facts(call: SequenceCall, kind: str, seen: int) -> LayerFacts:
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
    size = np.concatenate(sizes[::-1])
    gradient = by_lag(np.concatenate(norms[::-1], axis=1), range(seen)[::-1], None)
    profile = band(gradient)
    return LayerFacts(
        name=call.layer,
        direction="forward",
        cell=kind,
        against_vanishing=_AGAINST_VANISHING,
        transfer=_transfer(cell, _spread(moments)),
        adjoint=profile,
        adjoint_norms=gradient,
        growth=growth(gradient),
        decay=theil_sen(profile.median),
        dead=np.zeros(0, dtype=bool),
        timescale=None,
        shut=None,
        open=None,
        states=states,
        final_norm=float(size[-1]),
        quarter_norm=float(size[len(size) // 4]),
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


def _attribution(experiment: Experiment, capture: Capture) -> Attribution | None:
    """Attribute the prediction to the steps of the embedded ids, or of the float input."""
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
    lags = by_lag(scores, range(experiment.reach)[::-1], None)
    return Attribution(band(np.sqrt(lags)), attributed_memory(np.nan_to_num(lags)[:, ::-1]))
