"""Measures of one recurrent layer: state transfer, total gradient by lag, gates, units, non-finite numbers.

Whole-sequence layers (Mamba, delta rules) have half-life and ranks of their states instead of gates and units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from .. import data
from ..adapters.protocol import Batch, Capture, RecurrentCall, SequenceCall, Taps
from ..errors import LayerNotFoundError, UnsupportedError
from ..layout import canonical_order
from ..measures.facts import Census, census, dead_units, gate_timescale, stuck_gates
from ..measures.profiles import Band, band
from ..measures.transfer import Transfer, state_transfer, steps_are_incomplete, theil_sen
from ..recurrence.arrays import namespace
from ..recurrence.replay import Replay
from ..recurrence.sequence import SequenceCell, forward, pull_back
from ..results.schema import to_host
from ..typing import Array
from ..verbs.axes import an_axes_table
from ..verbs.differentiation.pull import batch_gradients
from ..verbs.differentiation.request import GradientArguments, read_request
from ..verbs.recurrent_layers import ReplayedLayers
from ..verbs.traced_scans import scan_measures
from ..vocabulary import BACKWARD, DIRECTION, FORWARD
from .experiment import Experiment


@dataclass(frozen=True)
class LayerFacts:
    """Measures of one call of one direction of a recurrent layer.

    Attributes
    ----------
    bidirectional
        Whether the layer has another direction, with facts of its own and the same name.
    adjoint_norms : (sample, lag)
        Norm of the output's total gradient at the hidden state; None if unknown.
    state_norms : (time,)
        Mean norm of the state, in the order of the recurrence.
    against_vanishing
        Remedy against a vanishing gradient in this kind of layer.
    gates
        Names of the gates that are a share between 0 and 1, in the order of ``stuck_shut`` and ``stuck_open``, which
        are (gate, unit).
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
    gates: tuple[str, ...] = ()
    stuck_shut: Array | None = None
    stuck_open: Array | None = None
    bidirectional: bool = False
    scan: Mapping[str, xr.Variable] = field(default_factory=dict)

    @property
    def half(self) -> str:
        """Which half of a bidirectional layer this is, as ``"backward half"``; empty for any other layer."""
        return f"{self.direction} half" if self.bidirectional else ""

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
        first_norms = np.array([row[np.flatnonzero(row)[0]] if row.any() else np.nan for row in norms])
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.nanmedian(np.log10(norms.max(axis=1)) - np.log10(first_norms)))

    @property
    def adjoint_size(self) -> float:
        """Median over samples of the output gradient's largest norm at the hidden state; NaN if unknown."""
        if self.adjoint_norms is None:
            return float("nan")
        # Half of the largest float, so that the mean of two of them is finite.
        half_of_largest = np.finfo(self.adjoint_norms.dtype).max / 2
        return float(np.median(np.nan_to_num(self.adjoint_norms, posinf=half_of_largest).max(axis=1)))

    def signal(self, lag: int, steps: int) -> float:
        """Return the share of a training signal that is left ``lag`` steps before the end of ``steps`` steps.

        It is the larger of two shares: of a cotangent on the final state through the recurrence, and of the output's
        gradient at the state, for models that use every step (attention, pooling). If the layer has fewer steps than
        the data, the lag is scaled.
        """
        curves = [self.transfer.kappa] + ([] if self.adjoint is None else [self.adjoint.median])
        index = self._index_of(lag, steps)
        if index is None:
            return 0.0
        norms = self.adjoint_norms
        if (
            self.bidirectional
            and norms is not None
            and not np.nan_to_num(norms[:, min(index, norms.shape[1] - 1)]).any()
        ):
            return 0.0  # the output does not read this half so late, whatever its state carries
        return max(float(curve[min(index, len(curve) - 1)]) for curve in curves)

    def transferred(self, lag: int, steps: int) -> float:
        """Return the state transfer ``lag`` steps before the end of ``steps`` steps, whatever the output reads."""
        index, kappa = self._index_of(lag, steps), self.transfer.kappa
        return 0.0 if index is None else float(kappa[min(index, len(kappa) - 1)])

    def _index_of(self, lag: int, steps: int) -> int | None:
        """Return the lag in this layer's own order; None if it has not processed that step."""
        last_lag = len(self.transfer.kappa) - 1
        index = round(lag * last_lag / steps)
        if self.direction != "backward":
            return index
        return last_lag - 1 - index if last_lag >= steps else None  # in the middle the older steps are still to come

    @property
    def bounded(self) -> bool:
        """Whether the mean norm of the final state is below three times that after a quarter of the steps."""
        return float(self.state_norms[-1]) < 3 * max(float(self.state_norms[len(self.state_norms) // 4]), 1e-30)


def measure_layers(experiment: Experiment) -> list[LayerFacts]:
    """Measure every recurrent call."""
    for call, _ in experiment.replays:
        if call.cell.space:
            raise UnsupportedError(
                f"Layer {call.layer!r} cannot be diagnosed: its states have axes of space.",
                expected="layers whose states are (sample, time, unit)",
                hint="rl.trace and rl.gradients give its gates and total gradients at every step and place",
            )
    output_gradients = _output_gradients(experiment)
    return [
        _layer_facts(call, run, output_gradients.get((call.layer, call.direction)), experiment.final_indices(call))
        for call, run in experiment.replays
        if not steps_are_incomplete(run)
    ]


def _output_gradients(experiment: Experiment) -> dict[tuple[str, str], Array]:
    """Compute a random projection's gradient by the hidden state of each (layer, direction)."""
    if not experiment.replays:
        return {}
    calls = [call for call, _ in experiment.replays]
    first_states = {call.layer: call.cell.state_names[0] for call in calls}
    has_several = len(data.leaves_of(experiment.capture.outputs)) > 1
    target = f"output[{experiment.output_index}]" if has_several else "output"
    wrt = [f"{layer}.{state}" for layer, state in first_states.items()]
    # Samples do not interact in inference, so the gradient of the sum contains the gradient of each sample.
    # A loop that detaches its states between some steps may have no port for a state: then the adjoint is not known.
    axes = an_axes_table("axes", experiment.axes_of(target))
    arrays: dict[tuple[str, str], Array] = {}
    with suppress(LayerNotFoundError):
        request = read_request(
            experiment.model,
            experiment.first_batch,
            GradientArguments(target, wrt, {}, draw_projection(experiment), False, axes=axes),
        )
        replayed = ReplayedLayers.of(calls, experiment.capture.entangled, runs=[run for _, run in experiment.replays])
        found = batch_gradients(replace(request.of_batch(experiment.first_batch, request.target), replayed=replayed))
        for name, gradient in found.gradients.items():
            if gradient is None:
                continue
            if DIRECTION in found.dims[name]:
                halves = np.moveaxis(gradient, found.dims[name].index(DIRECTION), 0)
                arrays[str(name.layer), FORWARD], arrays[str(name.layer), BACKWARD] = halves
            else:
                direction = next(call.direction for call in calls if call.layer == name.layer)
                arrays[str(name.layer), direction] = gradient
    return arrays


def draw_projection(experiment: Experiment) -> Any:
    """Draw random weights of the output at the examined step, which project it to one number per sample."""
    output = experiment.examined_output
    weights = np.random.default_rng(experiment.seed).normal(size=experiment.raw_output.shape[1])
    projection: Array = np.zeros(output.shape)
    if experiment.is_sequence:
        projection[np.arange(len(output)), experiment.examined_indices(output)] = weights.reshape(output.shape[2:])
    else:
        projection[...] = weights.reshape(output.shape[1:])
    names = [experiment.layout.names[i] for i in canonical_order(experiment.layout.names)]
    # The last axis was added if the output has one number per step.
    return xr.DataArray(projection if len(names) == projection.ndim else projection[..., 0], dims=names)


def reorder_by_lag(values: Array, order: Sequence[int], final_steps: Array | None) -> Array:
    """Reorder (sample, time) by ``order`` to (sample, lag): 0 at each sample's end, NaN before its first step."""
    reordered = values[:, order]
    if final_steps is None:
        return reordered
    start_index = np.array([list(order).index(int(end)) for end in final_steps])
    position = np.arange(reordered.shape[1] - int(start_index.min()))[None, :] + start_index[:, None]
    is_inside = position < reordered.shape[1]
    return np.where(is_inside, np.take_along_axis(reordered, np.where(is_inside, position, 0), axis=1), np.nan)


def _layer_facts(call: RecurrentCall, run: Replay, gradient: Array | None, final_steps: Array | None) -> LayerFacts:
    order = list(run.steps(reverse=True))
    adjoint_norms = None
    if gradient is not None:
        adjoint_norms = reorder_by_lag(_norms(gradient), order, final_steps)
    mask = None if run.mask is None else np.asarray(to_host(run.mask), dtype=bool)
    states = np.concatenate([to_host(s) for s in run.states], axis=-1)
    shares = tuple(gate for gate in run.cell.gates if gate not in run.cell.proposals)
    shut = opened = timescale = None
    if shares and run.gates is not None:
        share_indices = [run.cell.gates.index(gate) for gate in shares]
        shut, opened = stuck_gates(to_host(run.gates)[:, :, share_indices], mask)
    if run.cell.keeping is not None and run.gates is not None:
        timescale = gate_timescale(to_host(run.gates)[:, :, run.cell.gates.index(run.cell.keeping)], mask)
    return LayerFacts(
        name=call.layer,
        direction=call.direction,
        cell=run.cell.kind,
        against_vanishing=run.cell.against_vanishing,
        transfer=state_transfer(run, ends=final_steps),
        adjoint_norms=adjoint_norms,
        states=census(states),
        state_norms=_norms(states[:, order[::-1]]).mean(axis=0),
        dead=dead_units(to_host(run.states[0]), mask),
        timescale=timescale,
        gates=shares,
        stuck_shut=shut,
        stuck_open=opened,
        bidirectional=call.bidirectional,
    )


#: Largest number of samples whose scans are captured, and of random cotangents of the state transfer.
_SAMPLES, _DIRECTIONS = 8, 4

_AGAINST_VANISHING = (
    "slower decays at the start of training (A_log, dt_bias; Gu, Dao 2023, arXiv:2312.00752, section 3.6), or "
    "attention layers in between."
)


def measure_scans(experiment: Experiment) -> list[LayerFacts]:
    """Measure every scan."""
    if not experiment.scans:
        return []
    capture = _capture_scans(experiment)
    facts = []
    for call in capture.sequences:
        kind = experiment.scans[call.layer.rpartition("#")[0] or call.layer].cell
        steps = call.cell.steps
        facts.append(
            _scan_facts(call, kind, experiment.max_examined_length if steps == experiment.samples.steps else steps)
        )
    return facts


def _capture_scans(experiment: Experiment) -> Capture:
    """Capture all scans under a random projection of the output, which takes the place of a loss."""
    weights = draw_projection(experiment).transpose(*experiment.layout.names).values[:_SAMPLES]

    def projected_output(outputs: Any, _: Any = None) -> Any:
        leaf = data.leaves_of(outputs)[experiment.output_index]
        xp = namespace(leaf)
        return (leaf * xp.asarray(weights, dtype=leaf.dtype, device=leaf.device)).sum()

    x = experiment.in_model_order(data.select(experiment.samples.x, slice(_SAMPLES)))
    batch = Batch(x, np.zeros(len(weights)), loss=projected_output)
    taps = Taps.everything(tuple(experiment.scans), weight_grads=False, all_must_run=False)
    return experiment.adapter.run(experiment.model, batch, taps).capture


def _scan_facts(call: SequenceCall, kind: str, n_steps: int) -> LayerFacts:
    """Measure one scan in one sweep over chunks of steps, up to step ``n_steps``."""
    assert call.output_grad is not None
    cell = call.cell.at(slice(0, n_steps))
    run = forward(cell)[1]
    adjoint_norms, state_norms, moments, states = [], [], np.zeros((3, *cell.shape[2:])), Census(0, 0, 0, 0)
    for chunk, _ in run.sweep(
        call.output_grad[:, :n_steps], call.last_state_grad if n_steps == call.cell.steps else None
    ):
        chunk_states = to_host(chunk.states())
        adjoint_norms.append(_norms(to_host(chunk.grads())))
        state_norms.append(_norms(chunk_states).mean(axis=0))
        moments = moments + _state_moments(chunk_states)
        chunk_census = census(chunk_states)
        states = Census(*(a + b for a, b in zip(vars(states).values(), vars(chunk_census).values(), strict=True)))
    return LayerFacts(
        name=call.layer,
        direction="forward",
        cell=kind,
        against_vanishing=_AGAINST_VANISHING,
        transfer=_scan_transfer(cell, _state_spread(moments)),
        adjoint_norms=reorder_by_lag(np.concatenate(adjoint_norms[::-1], axis=1), range(n_steps)[::-1], None),
        states=states,
        state_norms=np.concatenate(state_norms[::-1]),
        scan=scan_measures(cell, to_host(run.last_state)),
    )


def _norms(values: Array) -> Array:
    """Return the norms (sample, time) of arrays (sample, time, *axes)."""
    sizes = np.abs(values) if np.iscomplexobj(values) else values
    return np.linalg.norm(sizes.reshape(*values.shape[:2], -1).astype(np.float64), axis=-1)


def _state_moments(states: Array) -> Array:
    """Return the count, sum and sum of squared sizes of finite states over samples and steps, (3, *axes)."""
    values = np.where(np.isfinite(states), states, 0.0).astype(np.result_type(states, np.float64))
    return np.stack([np.isfinite(states).sum((0, 1)), values.sum((0, 1)), (np.abs(values) ** 2).sum((0, 1))])


def _state_spread(moments: Array) -> Array:
    """Return the standard deviation of each state entry from ``moments``: count, sum and sum of squares.

    Each is at least 1e-3 of the median standard deviation.
    """
    count, total, squares = np.maximum(moments[0].real, 1), moments[1], moments[2].real
    spread = np.sqrt(np.maximum(squares / count - np.abs(total / count) ** 2, 0.0))
    return np.maximum(spread, 1e-3 * (float(np.median(spread)) or 1.0))


def _scan_transfer(cell: SequenceCell, spread: Array) -> Transfer:
    """Pull random cotangents on the last state back through a scan, in units of the spread of each number."""
    rng, log_norms = np.random.default_rng(0), []
    xp, prototype = namespace(cell.write[0]), cell.write[0]
    for _ in range(_DIRECTIONS):
        random_vectors = rng.normal(size=(cell.shape[0], *cell.shape[2:]))
        random_vectors /= _norms(random_vectors[:, None])[:, 0].reshape(-1, *(1,) * spread.ndim)
        cotangent = xp.asarray(random_vectors / spread, dtype=prototype.dtype, device=prototype.device)
        cotangent_norms = [_norms(to_host(c)[:, None] * spread)[:, 0] for c in pull_back(cell, cotangent)]
        with np.errstate(divide="ignore"):
            log_norms.append(np.log(np.stack([np.ones(cell.shape[0]), *cotangent_norms])))
    return Transfer(np.mean(log_norms, axis=0))


def scan_sentence(layer: LayerFacts) -> str:
    """Describe how long the state of a whole-sequence layer lasts by its decay."""
    half_life = np.ravel(layer.scan["half_life"].values)
    median_half_life, slow_half_life = float(np.median(half_life)), float(np.quantile(half_life, 0.9, method="lower"))
    if math.isinf(median_half_life):
        return f"{layer.name}: its state does not decay."
    if slow_half_life < 1:
        return f"{layer.name}: half of its state decays within less than one step."
    if half_life.size < 2 or slow_half_life < 1.5 * median_half_life:
        return f"{layer.name}: half of its state decays within {_number_text(median_half_life)} steps."
    slowest_text = (
        "do not decay" if math.isinf(slow_half_life) else f"take {_number_text(slow_half_life)} steps or more"
    )
    return (
        f"{layer.name}: half of its state decays within {_number_text(median_half_life)} steps (median); "
        f"the slowest tenth {slowest_text}."
    )


def _number_text(steps: float) -> str:
    return f"{steps:.0f}" if steps >= 10 else f"{steps:.1f}"
