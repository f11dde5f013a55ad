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
from ..measures.intervention import USED, SquaredDifference, donors, memory_length, search
from ..measures.transfer import steps_are_incomplete
from ..recurrence.replay import Replay, replay
from ..results.schema import to_host
from ..typing import Array
from .experiment import MOST_CAPTURED, Experiment

#: Largest difference of a run from the middle from the whole run, as a share of the prediction's variance.
_MISMATCH_TOLERANCE = 1e-4


@dataclass(frozen=True)
class CarriedMemory:
    """Memory carried by one layer: its ``use`` (context,), and the memory in use n as ``length``.

    ``quantity`` names the quantity whose change was measured: ``"prediction"``, or the layer's own last ``"state"``.
    ``context`` contains the k, and ``steps`` is the length of the sequence.
    """

    context: Array
    use: Array
    length: int
    steps: int
    quantity: Literal["prediction", "state"] = "prediction"


def measure_carried(experiment: Experiment) -> tuple[dict[str, CarriedMemory], str]:
    """Measure the carried memory of every layer; return it by layer, and the reason if the model could not be used."""
    exchange = _StateExchange(experiment)
    if not exchange.is_possible:
        return {}, exchange.reason
    if exchange.reason:
        return {call.layer: exchange.measure_alone(call, run) for call, run in experiment.replays}, exchange.reason
    try:
        return {name: exchange.measure(name) for name in exchange.states}, ""
    except RnnlensError as error:
        return {}, str(error).partition("\n")[0].rstrip(".")


class _StateExchange:
    """States of all layers at all steps, and runs of the model that start from them at a later step."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.reason = experiment, ""
        n_samples = min(MOST_CAPTURED, experiment.samples.count)
        self.steps = experiment.samples.steps
        self.states: dict[str, list[Array]] = {}
        self.is_possible = self._prepare(n_samples)

    def _prepare(self, n_samples: int) -> bool:
        calls = [call for call, _ in self.experiment.replays]
        if self.experiment.depth_loops and not calls:
            self.reason = "a loop over depth does not run over the steps of the data"
        elif self.experiment.scans:
            self.reason = "whole-sequence layers cannot start from another state"
        elif any(call.bidirectional or call.direction == "backward" or "#" in call.layer for call in calls):
            self.reason = "it is measured for forward layers that are called once"
        elif any(call.input.shape[0] != n_samples for call in calls):
            self.reason = "the layers run on another number of samples than the data have"
        elif any(steps_are_incomplete(run) for _, run in self.experiment.replays):
            self.reason = "the model's code changes the state between the steps"
        elif any(call.input.shape[1] != self.steps for call in calls):
            self.reason = "the layers do not run over the steps of the input"
        elif (self.experiment.examined_lengths != self.steps).any():
            self.reason = "the samples differ in length"
        if self.reason:
            return False
        self.states = {
            call.layer: [np.asarray(to_host(s)) for s in run.states] for call, run in self.experiment.replays
        }
        self.prediction = self.experiment.prediction[:n_samples]
        self.variation = self.experiment.difference(self.prediction)
        self.lender = donors(n_samples, seed=self.experiment.seed)
        if not self.variation.between_samples or self.steps < 4:
            self.reason = "the prediction does not vary"
            return False
        self.reason = self._obstacle()
        return True

    def _obstacle(self) -> str:
        """Return the reason why the model cannot start in the middle of the sequence; empty if it can."""
        try:
            mismatch = float(self.variation.change(self._predict(self.steps // 2, None)).mean())
        except InputError:
            return "the model takes sequences of this length only"
        except RnnlensError as error:
            return str(error).partition("\n")[0].rstrip(".")
        if mismatch > _MISMATCH_TOLERANCE * self.variation.between_samples / 2:
            return "parts of the model other than the states read older steps"
        return ""

    def _predict(self, n_steps: int, exchanged_layer: str | None) -> Array:
        """Predict from the last ``n_steps`` steps and the states before them, with another's of ``exchanged_layer``."""
        start_step = self.steps - n_steps - 1
        initial_states: dict[str, Any] = {}
        for name, states in self.states.items():
            sample_order = self.lender if name == exchanged_layer else slice(None)
            initial_states[name] = [s[:, start_step][sample_order] for s in states]
        n_samples = len(self.lender)
        last_inputs = self.experiment.samples.map_sequences(
            lambda leaf: leaf[:n_samples, -n_steps:], lambda leaf: leaf[:n_samples]
        )
        return self.experiment.to_prediction(self.experiment.outputs(last_inputs, initial_states))

    def measure(self, name: str) -> CarriedMemory:
        """Measure how much the prediction depends on the state of one layer."""
        return self._search(lambda n_steps: self.variation.change(self._predict(n_steps, name)), self.variation)

    def measure_alone(self, call: RecurrentCall, run: Replay) -> CarriedMemory:
        """Measure how much a layer's last state depends on its earlier state, by a run of the layer alone."""
        last_state = self.states[call.layer][0][:, -1].astype(np.float64)
        variation = SquaredDifference(last_state)
        if not variation.between_samples:
            return CarriedMemory(np.empty(0), np.empty(0), 1, self.steps, "state")

        def change(n_steps: int) -> Array:
            sample_order = run.xp.asarray(self.lender, device=device(run.input))
            initial_states = tuple(run.xp.take(s[:, -n_steps - 1, ...], sample_order, axis=0) for s in run.states)
            mask = None if run.mask is None else run.mask[:, -n_steps:]
            final_state = replay(
                run.cell, run.input[:, -n_steps:, ...], initial_states, mask=mask, order="forward"
            ).states[0]
            return variation.change(np.asarray(to_host(final_state))[:, -1])

        return replace(self._search(change, variation), quantity="state")

    def _search(self, measure_change: Callable[[int], Array], variation: SquaredDifference) -> CarriedMemory:
        def probe(n_steps: int) -> tuple[Array, Array]:
            change = measure_change(n_steps)
            return change, np.zeros_like(change)

        probes = search(probe, self.steps, variation.between_samples, (USED,))
        context = np.array(sorted(probes.change))
        use = np.array([probes.change[k].mean() for k in context]) / variation.between_samples
        memory = memory_length(dict(zip(context.tolist(), use.tolist(), strict=True)), self.steps)
        return CarriedMemory(context, use, memory, self.steps)
