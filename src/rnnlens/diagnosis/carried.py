"""The memory that each layer of several carries: its state exchanged for another sample's, the others left alone.

The inputs stay: from step T - k on the model runs again, every layer from its own state at that step but for one, which
starts from another sample's. What changes in the prediction is what that layer alone brought over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import data
from ..errors import InputError, RnnlensError
from ..measures.intervention import USED, donors, memory_length, search, squared_change, total_variance
from ..results.schema import to_host
from ..typing import Array
from .experiment import LOOKED_INTO, Experiment

#: Share of the variance by which a run from the middle may differ from the whole run, and still be the same model.
_SAME = 1e-4


@dataclass(frozen=True)
class Carried:
    """What the state of one layer brings over: ``use`` (context,), and the memory n that follows."""

    context: Array
    use: Array
    length: int
    steps: int


def measure_carried(experiment: Experiment) -> tuple[dict[str, Carried], str]:
    """By layer; and why it could not be measured, where it could not."""
    bench = _Bench(experiment)
    if not bench.possible:
        return {}, bench.why
    try:
        return {name: bench.measure(name) for name in bench.states}, ""
    except RnnlensError as error:
        return {}, str(error).partition("\n")[0].rstrip(".")


class _Bench:
    """States of all layers at all steps, and runs that start in the middle."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.why = experiment, ""
        count = min(LOOKED_INTO, experiment.samples.count)
        self.x = data.map_leaves(lambda leaf: leaf[:count], experiment.samples.x)
        self.steps = experiment.samples.steps
        self.states: dict[str, list[Array]] = {}
        self.possible = self._look(count)

    def _look(self, count: int) -> bool:
        calls = [call for call, _ in self.experiment.runs]
        if any(call.bidirectional or call.direction == "backward" or "#" in call.layer for call in calls):
            self.why = "it exists for layers that run forward, once"
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
        return self._is_the_same()

    def _is_the_same(self) -> bool:
        if not self.variance or self.steps < 4:
            self.why = "the prediction does not vary"
            return False
        try:
            apart = float(squared_change(self.prediction, self._run(self.steps // 2, None)).mean())
        except InputError:
            self.why = "the model takes sequences of this length only, so that no run of it can start in the middle"
            return False
        except RnnlensError as error:
            self.why = str(error).partition("\n")[0].rstrip(".")
            return False
        if apart > _SAME * self.variance:
            self.why = "run from the middle the model answers otherwise: something but the states looks back"
            return False
        return True

    def _run(self, keep: int, exchanged: str | None) -> Array:
        """F of a run over the last ``keep`` steps from the states before them, one layer's exchanged."""
        at = self.steps - keep - 1
        start: dict[str, Any] = {}
        for name, states in self.states.items():
            order = self.lender if name == exchanged else slice(None)
            start[name] = [s[:, at][order] for s in states]
        place = -1

        def cut(leaf: Any) -> Any:
            nonlocal place
            place += 1
            return leaf[:, -keep:] if place in self.experiment.samples.sequences else leaf

        raw = self.experiment.outputs(data.map_leaves(cut, self.x), start)
        target = self.experiment.target
        return raw if target is None else target.of_samples(np.arange(len(raw))).prediction(raw)

    def measure(self, name: str) -> Carried:
        """U by the state of one layer."""

        def probe(keep: int) -> tuple[Array, Array]:
            change = squared_change(self.prediction, self._run(keep, name))
            return change, np.zeros_like(change)

        found = search(probe, self.steps, 2 * self.variance, (USED,))
        context = np.array(sorted(found.change))
        use = np.array([found.change[k].mean() for k in context]) / (2 * self.variance)
        length = memory_length(dict(zip(context.tolist(), use.tolist(), strict=True)), self.steps)
        return Carried(context, use, length, self.steps)
