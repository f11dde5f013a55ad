"""Memory carried by the state of one layer: its state at one step is exchanged for another sample's.

The model runs again on the last k of T steps. Every layer starts from its own state at step T - k, except one, which
starts from another sample's. The change of the prediction is due to that state. If the model cannot start in the middle
of the sequence, only the layer itself is run, and the change of its last state is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from array_api_compat import device

from ..adapters.protocol import RecurrentCall
from ..errors import InputError, RnnlensError
from ..measures.intervention import USED, donors, memory_length, search, squared_change, total_variance
from ..recurrence.replay import Replay, replay
from ..results.schema import to_host
from ..typing import Array
from .experiment import LOOKED_INTO, Experiment

#: Largest difference of a run from the middle from the whole run, as a share of the prediction's variance.
_SAME = 1e-4


@dataclass(frozen=True)
class Carried:
    """Memory carried by one layer: its ``use`` (context,), and the memory in use n as ``length``.

    ``of`` names the quantity whose change was measured: ``"prediction"``, or the layer's own last ``"state"``.
    ``context`` contains the k, and ``steps`` is the length of the sequence.
    """

    context: Array
    use: Array
    length: int
    steps: int
    of: Literal["prediction", "state"] = "prediction"


def measure_carried(experiment: Experiment) -> tuple[dict[str, Carried], str]:
    """Measure the carried memory of every layer; return it by layer, and the reason if the model could not be used."""
    bench = _Bench(experiment)
    if not bench.possible:
        return {}, bench.why
    if bench.why:
        return {call.layer: bench.measure_alone(call, run) for call, run in experiment.runs}, bench.why
    try:
        return {name: bench.measure(name) for name in bench.states}, ""
    except RnnlensError as error:
        return {}, str(error).partition("\n")[0].rstrip(".")


class _Bench:
    """States of all layers at all steps, and runs of the model that start from them at a later step."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.why = experiment, ""
        count = min(LOOKED_INTO, experiment.samples.count)
        self.steps = experiment.samples.steps
        self.states: dict[str, list[Array]] = {}
        self.possible = self._look(count)

    def _look(self, count: int) -> bool:
        calls = [call for call, _ in self.experiment.runs]
        if self.experiment.scans:
            self.why = "whole-sequence layers cannot start from another state"
        elif any(call.bidirectional or call.direction == "backward" or "#" in call.layer for call in calls):
            self.why = "it is measured for forward layers that are called once"
        elif any(call.input.shape[1] != self.steps for call in calls):
            self.why = "the layers do not run over the steps of the input"
        elif (self.experiment.last != self.steps).any():
            self.why = "the samples differ in length"
        if self.why:
            return False
        self.states = {call.layer: [np.asarray(to_host(s)) for s in run.states] for call, run in self.experiment.runs}
        self.prediction = self.experiment.prediction[:count]
        self.variance = total_variance(self.prediction)
        self.lender = donors(count, seed=self.experiment.seed)
        if not self.variance or self.steps < 4:
            self.why = "the prediction does not vary"
            return False
        self.why = self._obstacle()
        return True

    def _obstacle(self) -> str:
        """Return the reason why the model cannot start in the middle of the sequence; empty if it can."""
        try:
            mismatch = float(squared_change(self.prediction, self._run(self.steps // 2, None)).mean())
        except InputError:
            return "the model takes sequences of this length only"
        except RnnlensError as error:
            return str(error).partition("\n")[0].rstrip(".")
        if mismatch > _SAME * self.variance:
            return "parts of the model other than the states read older steps"
        return ""

    def _run(self, keep: int, exchanged: str | None) -> Array:
        """Predict from the last ``keep`` steps and the states before them; ``exchanged``: the layer with another's."""
        at = self.steps - keep - 1
        start: dict[str, Any] = {}
        for name, states in self.states.items():
            order = self.lender if name == exchanged else slice(None)
            start[name] = [s[:, at][order] for s in states]
        count = len(self.lender)
        x = self.experiment.samples.each_sequence(lambda leaf: leaf[:count, -keep:], lambda leaf: leaf[:count])
        raw = self.experiment.outputs(x, start)
        target = self.experiment.target
        return raw if target is None else target.of_samples(np.arange(len(raw))).prediction(raw)

    def measure(self, name: str) -> Carried:
        """Measure how much the prediction depends on the state of one layer."""
        return self._search(lambda keep: squared_change(self.prediction, self._run(keep, name)), self.variance)

    def measure_alone(self, call: RecurrentCall, run: Replay) -> Carried:
        """Measure how much a layer's last state depends on its earlier state, by a run of the layer alone."""
        last = self.states[call.layer][0][:, -1].astype(np.float64)
        variance = total_variance(last)
        if not variance:
            return Carried(np.empty(0), np.empty(0), 1, self.steps, "state")

        def change(keep: int) -> Array:
            order = run.xp.asarray(self.lender, device=device(run.input))
            start = tuple(run.xp.take(s[:, -keep - 1, ...], order, axis=0) for s in run.states)
            mask = None if run.mask is None else run.mask[:, -keep:]
            end = replay(run.cell, run.input[:, -keep:, ...], start, mask=mask, order="forward").states[0]
            return squared_change(last, np.asarray(to_host(end))[:, -1])

        return replace(self._search(change, variance), of="state")

    def _search(self, change: Callable[[int], Array], variance: float) -> Carried:
        def probe(keep: int) -> tuple[Array, Array]:
            changed = change(keep)
            return changed, np.zeros_like(changed)

        found = search(probe, self.steps, 2 * variance, (USED,))
        context = np.array(sorted(found.change))
        use = np.array([found.change[k].mean() for k in context]) / (2 * variance)
        length = memory_length(dict(zip(context.tolist(), use.tolist(), strict=True)), self.steps)
        return Carried(context, use, length, self.steps)
