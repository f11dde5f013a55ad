"""Measures of how far back a model looks, side by side: each with a sentence, and why they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..measures.intervention import USED
from ..measures.profiles import band, gradient_reach
from ..results.diagnosis import StepsBack
from ..typing import Array
from .carried import CarriedMemory
from .findings import VANISHED, steps_text
from .memory import Memory

#: Two numbers of steps differ if they differ by more than this share of the larger one, and by more than one step.
_DIFFERENT = 0.2


def measure_steps_back(
    memory: Memory, carried_by_layer: Mapping[str, CarriedMemory], gradient_by_lag: Array | None
) -> list[StepsBack]:
    """Return how far the prediction, the state of each layer, the training signal and its bulk go back, in that order.

    ``gradient_by_lag`` (sample, lag) is the norm of the gradient of the examined output by the input.
    """
    rows = [_prediction_row(memory)] if memory.is_known else []
    for name, carried in carried_by_layer.items():
        scale = memory.scale if carried.quantity == "prediction" else "its variance"
        rows.append(_state_row(name, carried, scale))
    attributed_steps = count_attributed_steps(gradient_by_lag)
    if gradient_by_lag is not None and attributed_steps is not None:
        rows += [_signal_row(memory.steps, gradient_by_lag), _bulk_row(memory.steps, attributed_steps)]
    return rows


def _prediction_row(memory: Memory) -> StepsBack:
    if memory.censored:
        sentence = "Replacing the first step by another sample's still changes the prediction by more than 5 %."
    else:
        sentence = (
            f"Replacing all older inputs by another sample's changes the prediction by at most 5 % of {memory.scale}."
        )
    length = memory.length
    return StepsBack("prediction depends on", length.value, memory.steps, sentence, low=length.low, high=length.high)


def _state_row(layer: str, carried: CarriedMemory, scale: str) -> StepsBack:
    is_prediction = carried.quantity == "prediction"
    steps = carried.length if carried.use.size and carried.use[0] > USED else 0
    changed = "the prediction" if is_prediction else "its own last state"
    change = "still changes" if steps >= carried.steps else "changes"
    least = "more than 5 %" if steps >= carried.steps else "at most 5 %"
    step = "the first step" if steps >= carried.steps else "an earlier step"
    sentence = f"Exchanging the state of {layer} at {step} {change} {changed} by {least} of {scale}."
    return StepsBack("state carries", steps, carried.steps, sentence, layer=layer, of_prediction=is_prediction)


def _signal_row(steps: int, gradient_by_lag: Array) -> StepsBack:
    present = np.flatnonzero(np.nan_to_num(band(gradient_by_lag).median) >= VANISHED)
    reached = int(present[-1]) + 1 if present.size else 0
    if reached >= steps:
        sentence = (
            f"The gradient of the output by the first input is at least {VANISHED:g} of the peak (median sample)."
        )
    else:
        sentence = f"The gradient of the output by older inputs is below {VANISHED:g} of the peak (median sample)."
    return StepsBack("training signal reaches", reached, steps, sentence)


def _bulk_row(steps: int, attributed_steps: int) -> StepsBack:
    sentence = "These steps hold 95 % of the squared gradient of the output by the inputs (median sample)."
    return StepsBack("gradient in use", attributed_steps, steps, sentence)


def count_attributed_steps(gradient_by_lag: Array | None) -> int | None:
    """Count the last steps that hold 95 % of the squared gradient (sample, lag); None if it is unknown, or 0."""
    if gradient_by_lag is None or not np.nan_to_num(gradient_by_lag).any():
        return None
    return max(gradient_reach(gradient_by_lag), 1)


def differences(rows: Sequence[StepsBack]) -> list[str]:
    """Explain why the measures differ, one sentence for each pair that does."""
    steps = {row.measure: row for row in rows}
    sentences = []
    depends, signal = steps.get("prediction depends on"), steps.get("training signal reaches")
    used = steps.get("gradient in use")
    carried = max(
        (row for row in rows if row.measure == "state carries" and row.of_prediction),
        key=lambda row: row.steps,
        default=None,
    )
    if depends and signal and _differ(depends, signal):
        if signal.steps < depends.steps:
            sentences.append(
                "The prediction depends on inputs that the training signal does not reach (older than "
                f"{steps_text(signal.steps)}): an exchange of values passes saturated states and detached ones, a "
                "gradient does not."
            )
        else:
            sentences.append(
                f"The training signal reaches inputs older than {steps_text(depends.steps)}, on which the prediction "
                "hardly depends: training could still use them, if they help."
            )
    if depends and used and _differ(depends, used):
        sentences.append(
            f"The prediction depends on more steps than hold 95 % of the gradient ({used.steps:.0f}): few steps with a "
            "large gradient outweigh many with a small one, each of which the exchange counts."
            if used.steps < depends.steps
            else f"95 % of the gradient takes more steps ({used.steps:.0f}) than the prediction depends on: a gradient "
            "does not weigh a step by how much its input varies."
        )
    if depends and carried and _differ(depends, carried):
        sentences.append(
            f"The prediction depends on steps that no layer's state carries so long ({carried.steps:.0f}): the output "
            "also reads older steps directly, or several layers carry them together."
            if carried.steps < depends.steps
            else f"The state of {carried.layer} carries more than the prediction depends on: exchanged alone, it "
            "contradicts the rest of the model."
        )
    return sentences


def _differ(one: StepsBack, other: StepsBack) -> bool:
    difference = abs(one.steps - other.steps)
    return difference > 1 and difference > _DIFFERENT * max(one.steps, other.steps)
