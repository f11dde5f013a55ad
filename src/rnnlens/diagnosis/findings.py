"""Rules that turn measures into findings, and the sentences of a diagnosis.

Each rule compares numbers with a threshold that was set on networks of known condition. Conditions that the numbers
cannot separate from others have no rule: saturated gates, a short memory alone, a positive leading exponent alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from ..measures.facts import DEAD, constant_features, padding_share, static_share
from ..measures.intervention import USED
from ..measures.residual import Missed
from ..results.diagnosis import Finding
from ..typing import Array
from .carried import CarriedMemory
from .everyday import Checked
from .layers import LayerFacts
from .memory import EFFECT, ENOUGH, FEWEST, MISCALIBRATED, P_VALUE, Memory, finds_nothing, is_missed
from .signal_path import DECAYED, Cause, SignalPath

MODEL = "model"
#: State transfer below which no training signal crosses this number of steps.
VANISHED = 1e-4
#: Share of the output's largest gradient by any input from which on a path leads around the recurrence.
DIRECT = 1e-2
#: Growth of a cotangent on the state, in decades, that counts as exploding; healthy trained networks stay below.
EXPLODED = 2.0
#: Smallest total growth (natural log) of small differences, minus two standard errors, that counts as chaotic.
CHAOS = np.log(100.0)
#: Share of padded steps, and of samples whose input does not change over time, above which each is reported.
PADDED, STATIC = 0.5, 0.95
#: Factor between the memory in use and the attributed memory from which on they disagree.
DISAGREE = 2.0
#: Decades between the total gradients of two layers from which on they are reported.
UNEQUAL = 4.0
#: Share of subnormal numbers among the states above which they are reported.
UNDERFLOWN = 0.01

#: Findings by code, each with what shows it in a report: memory in use, missed lags, state transfer, gradient, ...
FIGURE_OF_CODE = {
    "NO_SKILL": "memory",
    "MISCALIBRATED": "memory",
    "MISSED_DEPENDENCY": "missed",
    "VANISHING": "transfer",
    "PATH_OPEN": "transfer",
    "NO_PATH": "transfer",
    "EXPLODING": "transfer",
    "CHAOTIC": "transfer",
    "LAST_STEP_ONLY": "memory",
    "DEAD_UNITS": "states",
    "PADDING_DOMINATES": "input",
    "CONSTANT_INPUT": "input",
    "STATIC_INPUT": "input",
    "GRADIENT_MEMORY_DISAGREE": "memory",
    "NONFINITE": "states",
    "UNDERFLOW": "states",
    "UNEQUAL_LAYERS": "gradient",
    "FEW_SAMPLES": "memory",
    "SAMPLES_MIXED": "input",
    "TARGET_SHAPE": "memory",
    "OUTPUT_FORM": "memory",
    "WEIGHTS_WITHOUT_GRADIENT": "gradient",
    "FROZEN": "gradient",
    "STATE_CARRIED": "states",
    "BACKWARD_HALF_AT_ITS_FIRST_STEP": "states",
    "LEAK": "input",
    "INPUT_SCALE": "input",
    "UNIFORM_OUTPUT": "memory",
    "UPDATES_TOO_SMALL": "gradient",
    "UPDATES_TOO_LARGE": "gradient",
    "TARGET_UNRELATED": "missed",
}

#: Findings of everyday bugs that keep weights from learning what they get a training signal of.
_UNTRAINED = frozenset(
    {"WEIGHTS_WITHOUT_GRADIENT", "FROZEN", "UPDATES_TOO_SMALL", "UPDATES_TOO_LARGE", "TARGET_SHAPE", "OUTPUT_FORM"}
)

_ORDER = {"fault": 0, "unknown": 1, "caution": 2, "fact": 3}


def headline(memory: Memory, baseline: tuple[str, Memory] | None, residual_test: Missed | None) -> str:
    """Describe the memory in use of the model beside that of a ``baseline`` (name, memory), or why it is unknown."""
    if not memory.is_known:
        return f"Memory in use unknown: {memory.reason}."
    sentences = [
        f"The model depends on {_used_text(memory)} ({'; '.join(_remarks(memory, baseline))}).",
        _loss_text(memory),
    ]
    if memory.skill is None:
        sentences.append("Without a target it is not known whether that helps.")
    later_used, later_count = memory.later_steps
    if later_count:
        if later_count == 1:
            sentences.append(f"It {'also depends' if later_used else 'does not depend'} on the only later step.")
        else:
            verb_phrase = f"also depends on {later_used}" if later_used else "depends on none"
            sentences.append(f"It {verb_phrase} of the {later_count} later steps.")
    if memory.count_matters:
        sentences.append("The number of steps before the last also changes its output, whatever their inputs.")
    is_clear = residual_test is not None and not is_missed(residual_test, memory) and finds_nothing(residual_test)
    if is_clear and not memory.censored:
        sentences.append("No sign of unused information in older steps (residual test).")
    return " ".join(sentence for sentence in sentences if sentence)


def layer_sentence(name: str, carried_memory: CarriedMemory) -> str:
    """Describe the memory that the state of one layer carries."""
    is_prediction, length = carried_memory.quantity == "prediction", carried_memory.length
    if carried_memory.use.size == 0 or carried_memory.use[0] <= USED:
        unchanged_quantity = "the prediction" if is_prediction else "its own later states"
        return f"{name}: the state carries nothing from one step to the next that changes {unchanged_quantity}."
    if length >= carried_memory.steps:
        return f"{name}: the state carries information from the first step to the last of {carried_memory.steps}."
    reason = (
        f"replacing the state earlier does not change {'the prediction' if is_prediction else 'its own last state'}"
    )
    return f"{name}: the state carries information over {steps_text(length)}; {reason}."


def _used_text(memory: Memory) -> str:
    n, steps = memory.length.value, memory.steps
    up_to_own = " up to its own" if memory.later_steps[1] else ""
    if steps == 1:
        return "its only step"
    if n == 1:
        return f"the input of the last step only, of {steps} steps{up_to_own}"
    if memory.censored:
        return f"all {steps} steps{up_to_own}, and may use more than the data contains"
    return f"the last {n:.0f} of {steps} steps{up_to_own}"


def _remarks(memory: Memory, baseline: tuple[str, Memory] | None) -> list[str]:
    length, steps = memory.length, memory.steps
    remarks = [f"95 % CI {length.low:.0f}-{length.high:.0f}{' or more' if length.high >= steps else ''}"]
    if memory.skill is not None:
        raw_skill, recalibrated = memory.skill.raw, memory.skill.recalibrated
        remarks.append(
            f"skill {raw_skill.value:.2f}" + ("" if raw_skill.low > 0 else f", {recalibrated.value:.2f} recalibrated")
        )
    if memory.of_distribution:
        remarks.append("by the Jensen-Shannon divergence of the output distribution")
    if memory.rare_length.value > 2 * length.value:
        scale = "divergence" if memory.of_distribution else "variance"
        remarks.append(f"{_count_text(memory.rare_length.value, steps)} at 1 % of the {scale}")
    if baseline is not None and baseline[1].context.size:
        remarks.append(f"{baseline[0]}: {_count_text(baseline[1].length.value, baseline[1].steps)}")
    return remarks


def _loss_text(memory: Memory) -> str:
    """Return text on the score lost without the oldest used step and older ones; "" if n = 1 or unknown."""
    lost_share, length = memory.lost_without, memory.length.value
    if length == 1 or math.isnan(lost_share):
        return ""
    needed = memory.needed_length.value
    needed_text = (
        f" 5 % of the score depends on the last {_count_text(needed, memory.steps)}." if needed > 2 * length else ""
    )
    replaced = f"Replacing step {length:.0f} from the end and everything older"
    if lost_share < 0.005:
        return f"{replaced} changes the prediction, but loses none of the score.{needed_text}"
    return f"{replaced} loses {'all' if lost_share >= 0.995 else _percent(lost_share)} of the score.{needed_text}"


def _older_text(memory: Memory) -> str:
    """Return text on the change of the prediction by all steps but the last; "" if it was not measured."""
    if not memory.context.size or memory.context[0] != 1:
        return ""
    return f": exchanging all earlier inputs changes it by {100 * memory.use[0]:.1f} % of {memory.scale}"


def _count_text(value: float, steps: int) -> str:
    """Return a number of steps as text; one that reaches all ``steps`` of the data is a lower bound: ">= 64"."""
    return f">= {steps}" if value >= steps else f"{value:.0f}"


def steps_text(count: float) -> str:
    """Return a number of steps with its noun: "1 step", "2 steps"."""
    return f"{count:.0f} {'step' if round(count) == 1 else 'steps'}"


class ExaminedData(NamedTuple):
    """Data of a diagnosis: input numbers (sample, time, feature), their mask, and the prediction (sample, unit)."""

    x: Array
    mask: Array | None
    prediction: xr.DataArray


def findings(
    memory: Memory,
    residual_test: Missed | None,
    layers: Sequence[LayerFacts],
    attributed_steps: int | None,
    examined: ExaminedData,
    path: SignalPath | str | None = None,
    everyday: Checked | None = None,
) -> list[Finding]:
    """Apply all rules to the measures and return the findings, faults first.

    ``path`` is the gradient of the output by the missed input, or why there is none.
    ``everyday`` has the findings of everyday bugs, and what they rule out.
    """
    unsorted_findings = [
        *_nonfinite_findings(layers, examined.prediction),
        *_skill_findings(memory, everyday.ruled_out if everyday else []),
        *(everyday.findings if everyday else []),
        *_missed_findings(memory, residual_test, layers, path, everyday.findings if everyday else []),
        *_dynamics_findings(memory, layers),
        *_unit_findings(layers),
        *_data_findings(examined.x, examined.mask),
        *_memory_findings(memory, attributed_steps),
    ]
    return sorted(unsorted_findings, key=lambda finding: _ORDER[finding.severity])


def _half_prefix(layer: LayerFacts) -> str:
    """Return the start of a sentence about one half of a bidirectional layer; empty for any other layer."""
    return f"{layer.half.capitalize()}: " if layer.half else ""


def _skill_findings(memory: Memory, ruled_out: Sequence[str]) -> Iterator[Finding]:
    if memory.skill is None or not np.isfinite(memory.skill.raw.value):
        return
    raw_skill, recalibrated, gain = memory.skill.raw, memory.skill.recalibrated, memory.skill.gain
    evidence = {
        "skill": raw_skill.value,
        "low": raw_skill.low,
        "high": raw_skill.high,
        "recalibrated": recalibrated.value,
    }
    if not memory.skill.proven:
        yield Finding(
            "NO_SKILL",
            "unknown",
            MODEL,
            f"The model predicts no better than a constant (skill {raw_skill.value:.2f}, 95 % CI {raw_skill.low:.2f} "
            f"to {raw_skill.high:.2f}; recalibrated {recalibrated.value:.2f}), so its memory in use is not meaningful."
            + (f" Ruled out: {', '.join(ruled_out)}." if ruled_out else ""),
            {**evidence, "ruled_out": list(ruled_out)},
            "the 95 % interval of the skill reaches 0, also after recalibration",
            "compare with the skill on the training data. If that is high, the model is overfitted: regularise, or use "
            "more data. If not, check the target and the learning rate, and whether it can overfit 16 samples.",
        )
    elif recalibrated.low > 0 and memory.miscalibrated:
        yield Finding(
            "MISCALIBRATED",
            "caution",
            MODEL,
            f"The predictions are off in scale: skill {raw_skill.value:.2f} as they are, "
            f"{recalibrated.value:.2f} recalibrated.",
            {**evidence, "gain": gain.value, "gain_low": gain.low},
            f"recalibration gains more than {_percent(MISCALIBRATED)} of the loss of a constant, 95 % interval",
            "compare with the skill on the training data: if it is much higher there, the model is overfitted. If "
            "classes were weighted in the loss, this is expected. Else rescale the outputs (arXiv:1706.04599).",
        )


def _missed_findings(
    memory: Memory,
    residual_test: Missed | None,
    layers: Sequence[LayerFacts],
    path: SignalPath | str | None,
    everyday: Sequence[Finding],
) -> Iterator[Finding]:
    if residual_test is None or not is_missed(residual_test, memory):
        return
    lag = missed_lag(residual_test)
    yield Finding(
        "MISSED_DEPENDENCY",
        "fault",
        MODEL,
        f"The input {lag_text(lag)} would explain errors of the model: {_percent(residual_test.effect)} of the "
        f"variance of the target (residual test, p < {P_VALUE}).",
        {"effect": residual_test.effect, "p_value": residual_test.p_value, "step": residual_test.step, "lag": lag},
        f"cross-validated ridge of the residual on all steps, or on the one step that it chooses, explains >= "
        f"{_percent(EFFECT)} of Var y, permutation p < {P_VALUE}",
        "",
    )
    if layers:  # a loop over depth has no step of the data whose signal could be followed
        yield _path_finding(memory, layers, lag, path, everyday)


def missed_lag(residual_test: Missed) -> int:
    """Return how many steps before the last the input lies that explains most of the errors."""
    return len(residual_test.by_step) - 1 - residual_test.step


def _path_finding(
    memory: Memory,
    layers: Sequence[LayerFacts],
    lag: int,
    path: SignalPath | str | None,
    everyday: Sequence[Finding] = (),
) -> Finding:
    """Say whether a training signal reaches the missed input: by the gradient through the whole model, if it is known.

    That gradient decides whether there is a path at all; the state transfer decides whether what is left is too little.
    Where there is a path, the findings of ``everyday`` bugs name what else keeps the weights from learning it.
    """
    layer = max(layers, key=lambda layer: layer.signal(lag, memory.steps))
    transfer = layer.signal(lag, memory.steps)
    evidence = {"kappa": transfer, "lag": lag}
    measured = path if isinstance(path, SignalPath) else None
    if measured is not None:
        evidence |= {"gradient": 0.0 if measured.is_zero else measured.share}
        forgets = max(layer.transferred(lag, memory.steps) for layer in layers) < DECAYED
        if measured.cause is not None and not (measured.cause.by_recurrence and forgets):
            return _no_path(measured.cause, evidence)
    untrained = _untrained_text(everyday)
    overfitted_or = untrained or (_OVERFITTED if memory.miscalibrated else "")
    if not lag:
        return Finding(
            "PATH_OPEN",
            "fault",
            MODEL,
            f"No recurrence lies between that input and the output{_share_text(measured)}, so a vanishing gradient is "
            "not the reason.",
            evidence,
            "missed at the last step",
            overfitted_or or "train longer, or more units; check that the output is read after it.",
        )
    is_direct = measured is not None and measured.share >= DIRECT
    if (transfer < VANISHED and not is_direct) or (measured is not None and measured.is_zero):
        return _vanishing(layer, lag, measured, evidence)
    reason = f" (the whole model was not differentiated: {path})" if isinstance(path, str) else ""
    return Finding(
        "PATH_OPEN",
        "fault",
        layer.name,
        f"{_half_prefix(layer)}A training signal reaches that input (state transfer over {steps_text(lag)}: "
        f"{transfer:.1g}{_share_text(measured, '; ')}), so a vanishing gradient is not the reason{reason}.",
        evidence,
        f"missed, the gradient of the output by that input is not 0, and kappa there >= {VANISHED:g}, or that gradient "
        f">= {DIRECT:g} of the largest by any step",
        overfitted_or
        or "the cause is not visible in the network: train longer; if trained on windows, use one longer than "
        f"{steps_text(lag)}; else more units. Another initialisation will not help.",
    )


def _untrained_text(everyday: Sequence[Finding]) -> str:
    """Return the advice that names the findings why weights are not trained; "" if there are none."""
    codes = list(dict.fromkeys(finding.code for finding in everyday if finding.code in _UNTRAINED))
    if not codes:
        return ""
    return f"the likely cause is {' and '.join(codes)}: repair that first, then train longer."


def _share_text(path: SignalPath | None, start: str = " (") -> str:
    """Return text on the gradient of the output by the missed input; "" if it is not known."""
    if path is None:
        return ""
    end = ")" if start == " (" else ""
    return f"{start}the output's gradient by it: {path.share:.1g} of the largest by any step{end}"


def _vanishing(layer: LayerFacts, lag: int, path: SignalPath | None, evidence: Mapping[str, Any]) -> Finding:
    transfer = float(evidence["kappa"])
    signal_text = "No training signal reaches that input" if transfer < VANISHED else "The gradient is 0 at that input"
    gradient_text = ""
    if path is not None and path.is_saturated:
        gradient_text = "; the units are saturated: with inputs scaled down the gradient is not 0"
    elif path is not None and path.is_zero:
        gradient_text = "; the output's gradient by it is 0"
    return Finding(
        "VANISHING",
        "fault",
        layer.name,
        f"{_half_prefix(layer)}{signal_text}: the state transfer over {steps_text(lag)} is "
        f"{transfer:.1e}{gradient_text}.",
        evidence,
        f"missed, and kappa at the missed step < {VANISHED:g}",
        "scale the inputs to a standard deviation of 1."
        if path is not None and path.is_saturated
        else layer.against_vanishing,
    )


def _no_path(cause: Cause, evidence: Mapping[str, Any]) -> Finding:
    lines = [f"{cut.file}:{cut.line}" for cut in cause.cuts]
    return Finding(
        "NO_PATH",
        "fault",
        MODEL,
        "No training signal can reach that input: the gradient of the output by it, through the whole model, is "
        f"exactly 0 in every sample. {cause.sentence}",
        {**evidence, "cause": cause.code, "lines": lines},
        "missed, and the framework's gradient of the output by that input is 0 or missing in every sample",
        cause.remedy,
    )


_OVERFITTED = (
    "compare with the skill on the training data: if it is much higher there, the model is overfitted; regularise, or "
    "use more data. Neither longer training nor more units will help then."
)


def lag_text(lag: int) -> str:
    """Return the place of an input: "2 steps before the last"."""
    return f"{steps_text(lag)} before the last" if lag else "at the last step"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


_REPAIR = "rl.find_nonfinite(model, x, y) finds the first one; check the data and the learning rate, clip gradients."


def _nonfinite_findings(layers: Sequence[LayerFacts], prediction: xr.DataArray) -> Iterator[Finding]:
    """Yield findings on layers with states that are not finite, or else on predictions that are not finite."""
    nonfinite_layers = [layer for layer in layers if layer.states.nan or layer.states.infinite]
    for layer in nonfinite_layers:
        nan, infinite, count = layer.states.nan, layer.states.infinite, layer.states.count
        yield Finding(
            "NONFINITE",
            "fault",
            layer.name,
            f"{_half_prefix(layer)}{nan} of {count} numbers of the state are NaN, {infinite} infinite.",
            {"nan": nan, "infinite": infinite, "count": count},
            "any",
            _REPAIR,
        )
    is_nonfinite = ~np.isfinite(prediction.values).all(axis=1)
    if is_nonfinite.any() and not nonfinite_layers:
        first_sample = prediction["sample"].values[is_nonfinite.argmax()].item()
        yield Finding(
            "NONFINITE",
            "fault",
            MODEL,
            f"{int(is_nonfinite.sum())} of {is_nonfinite.size} predictions are not finite, the first at sample "
            f"{first_sample}.",
            {"samples": int(is_nonfinite.sum()), "first": first_sample, "count": int(is_nonfinite.size)},
            "any",
            _REPAIR,
        )


def _dynamics_findings(memory: Memory, layers: Sequence[LayerFacts]) -> Iterator[Finding]:
    for layer in layers:
        if layer.states.nan or layer.states.infinite:
            continue
        rate, error = layer.transfer.leading_exponent()
        steps = len(layer.transfer.log_ratio) - 1
        # Not the gradient of the output: if the output uses several steps, it may be largest at an earlier one.
        growth = layer.transfer.growth
        if growth >= EXPLODED:
            yield Finding(
                "EXPLODING",
                "fault",
                layer.name,
                f"{_half_prefix(layer)}Gradients by the state, in units of its spread, grow backwards in time by "
                f"{growth:.1f} decades within {steps_text(steps)}.",
                {"growth": growth, "of the output": layer.growth, "lambda_1": rate, "stderr": error},
                f">= {EXPLODED:g} decades",
                "clip the norm of the gradient (arXiv:1211.5063), a smaller recurrent kernel, or a gated cell.",
            )
        if np.isfinite(error) and (rate - 2 * error) * steps > CHAOS and layer.bounded:
            yield _chaos_finding(layer, rate, error, steps)
        subnormal, count = layer.states.underflow, layer.states.count
        if subnormal > UNDERFLOWN * count:
            yield Finding(
                "UNDERFLOW",
                "caution",
                layer.name,
                f"{_half_prefix(layer)}{_percent(subnormal / count)} of the state is subnormal: too small for its "
                "dtype, and 0 on an engine that flushes such numbers.",
                {"underflow": subnormal, "count": count},
                f"> {_percent(UNDERFLOWN)}",
                "compute in a wider dtype, or scale the state.",
            )
    yield from _unequal_findings(layers)


def _chaos_finding(layer: LayerFacts, rate: float, error: float, steps: int) -> Finding:
    return Finding(
        "CHAOTIC",
        "fault",
        layer.name,
        f"{_half_prefix(layer)}The state is chaotic: small differences grow by a factor of {np.exp(rate):.3g} per "
        f"step, {np.exp(rate * steps):.2g} within {steps_text(steps)} (leading exponent {rate:.3f} +- {error:.3f}), "
        "while the state stays bounded.",
        {"lambda_1": rate, "stderr": error, "steps": steps},
        "(lambda_1 - 2 standard errors) T > ln 100, and the state is bounded",
        "a smaller gain of the recurrent kernel (spectral radius towards 1; Sompolinsky, Crisanti, Sommers 1988), or a "
        "gated cell.",
    )


def _unequal_findings(layers: Sequence[LayerFacts]) -> Iterator[Finding]:
    by_size = sorted((layer for layer in layers if layer.adjoint_size > 0), key=lambda layer: layer.adjoint_size)
    if len(by_size) < 2:
        return
    smallest, largest = by_size[0], by_size[-1]
    decades = float(np.log10(largest.adjoint_size / smallest.adjoint_size))
    if decades >= UNEQUAL:
        largest_name = f"{largest.name}, {largest.half}" if largest.half else largest.name
        yield Finding(
            "UNEQUAL_LAYERS",
            "caution",
            smallest.name,
            f"{_half_prefix(smallest)}Its total gradient is {decades:.1f} decades smaller than that of {largest_name}.",
            {"decades": decades},
            f">= {UNEQUAL:g} decades between layers",
            "normalisation or residual connections between the layers, or one learning rate per layer.",
        )


def _unit_findings(layers: Sequence[LayerFacts]) -> Iterator[Finding]:
    for layer in layers:
        count = int(layer.dead.sum())
        if count:
            yield Finding(
                "DEAD_UNITS",
                "fault",
                layer.name,
                f"{_half_prefix(layer)}{count} of {layer.dead.size} units are dead: their "
                f"values do not vary, or less than {DEAD:g} of the other units'.",
                {"dead": count, "units": int(layer.dead.size), "which": np.flatnonzero(layer.dead).tolist()},
                "spread over samples and steps <= 1e-4 of the median unit's",
                "with relu a lower learning rate, a leaky activation or another initialisation; else fewer units.",
            )


def _data_findings(x: Array, mask: Array | None) -> Iterator[Finding]:
    if (padded_share := padding_share(x, mask)) > PADDED:
        yield Finding(
            "PADDING_DOMINATES",
            "caution",
            MODEL,
            f"{_percent(padded_share)} of the steps "
            + (
                "are masked." if mask is not None else "repeat their neighbour at one end of a sample, as padding does."
            ),
            {"padding": padded_share},
            f"> {_percent(PADDED)} masked, or identical steps at one end",
            "mask the padding, or batch samples of similar length.",
        )
    if (is_constant := constant_features(x)).any():
        yield Finding(
            "CONSTANT_INPUT",
            "caution",
            MODEL,
            f"{int(is_constant.sum())} of {is_constant.size} input features never vary: nothing can be learned from "
            "them but a constant.",
            {"features": np.flatnonzero(is_constant).tolist()},
            "max == min over all samples and steps",
            "remove them, or check how they were scaled.",
        )
    if (unchanging_share := static_share(x)) > STATIC:
        yield Finding(
            "STATIC_INPUT",
            "caution",
            MODEL,
            f"The input of {_percent(unchanging_share)} of the samples does not change over time.",
            {"share": unchanging_share},
            f"> {_percent(STATIC)} of the samples",
            "a network without recurrence is enough.",
        )


def _memory_findings(memory: Memory, attributed_steps: int | None) -> Iterator[Finding]:
    sample_count = memory.samples
    if sample_count and sample_count < ENOUGH:
        consequence = "too few to measure memory" if sample_count < FEWEST else "the intervals are too narrow"
        yield Finding(
            "FEW_SAMPLES",
            "unknown" if sample_count < FEWEST else "caution",
            MODEL,
            f"{sample_count} samples: {consequence}.",
            {"samples": sample_count},
            f"< {ENOUGH}",
            f"pass at least {ENOUGH} samples.",
        )
    if not memory.is_known:
        return
    length = memory.length
    if length.value == 1 and not memory.count_matters and not memory.later_steps[0]:
        yield Finding(
            "LAST_STEP_ONLY",
            "fact",
            MODEL,
            f"The prediction depends on the input of the last step only{_older_text(memory)}.",
            {"memory": 1},
            "n = 1" if memory.skill is None else "n = 1 with skill",
            "nothing, if the task needs no more; only a missed dependency would be a fault.",
        )
    if not attributed_steps:
        return
    ratio = max(attributed_steps / length.value, length.value / attributed_steps)
    is_outside = not length.low / DISAGREE < attributed_steps < length.high * DISAGREE
    if ratio >= DISAGREE and is_outside:
        yield Finding(
            "GRADIENT_MEMORY_DISAGREE",
            "caution",
            MODEL,
            f"Gradients attribute the prediction to the last {steps_text(attributed_steps)}, replacing inputs "
            f"to the last {length.value:.0f}: a gradient tells of small changes, however much the input varies, and is "
            "nearly 0 where units are saturated, as in a latch.",
            {"attributed": attributed_steps, "memory": length.value},
            f"a factor of {DISAGREE:g}, outside the interval",
            "rely on the memory in use (Bengio, Simard, Frasconi 1994).",
        )
