"""Rules: from measures to findings. Each compares numbers with a threshold that was set on networks of known condition.

What cannot be told apart from a network's numbers is not claimed: saturated gates are no fault, a short memory is none
unless something is missed, and a positive leading exponent is no chaos by itself (docs/findings).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..measures.facts import Census, constant_features, padding_share, static_share
from ..measures.residual import Missed
from ..results.diagnosis import Finding
from ..typing import Array
from .layers import Attribution, LayerFacts
from .memory import ENOUGH, FEWEST, Memory
from .missed import EFFECT, P_VALUE, is_missed

MODEL = "model"
#: State transfer below which no training signal crosses that many steps.
VANISHED = 1e-4
#: Decades by which a cotangent on the state may grow on its way back; in healthy trained networks it does not.
EXPLODED = 2.0
#: exp of the leading exponent times the length, with two standard errors to spare.
CHAOS = np.log(100.0)
#: Share of padded steps, and of samples without change over time.
PADDED, STATIC = 0.5, 0.95
#: Factor between memory in use and what attribution says.
DISAGREE = 2.0
#: Decades between the adjoints of two layers.
UNEQUAL = 4.0
#: Share of subnormal numbers among the states.
UNDERFLOWN = 0.01

_ORDER = {"fault": 0, "unknown": 1, "caution": 2, "fact": 3}


def findings(
    memory: Memory,
    missed: Missed | None,
    layers: Sequence[LayerFacts],
    attributed: Attribution | None,
    x: Array,
    mask: Array | None,
    prediction: Array,
) -> list[Finding]:
    """All findings, faults first."""
    found = [
        *_about_numbers(layers, prediction),
        *_about_skill(memory),
        *_about_missed(memory, missed, layers),
        *_about_dynamics(memory, layers),
        *_about_units(layers),
        *_about_data(x, mask),
        *_about_memory(memory, attributed),
    ]
    return sorted(found, key=lambda finding: _ORDER[finding.severity])


def _about_skill(memory: Memory) -> Iterator[Finding]:
    skill = memory.skill
    if skill is None or not np.isfinite(skill.value) or skill.low > 0:
        return
    yield Finding(
        "NO_SKILL",
        "unknown",
        MODEL,
        f"The model predicts no better than the best constant (skill {skill.value:.2f}, 95 % CI {skill.low:.2f} to "
        f"{skill.high:.2f}), so that what it uses of its past says nothing.",
        {"skill": skill.value, "low": skill.low, "high": skill.high},
        "the 95 % interval of skill reaches 0",
        "train first; if the loss does not fall at all, check the target, the learning rate, and whether a tiny subset "
        "can be learned by heart.",
    )


def _about_missed(memory: Memory, missed: Missed | None, layers: Sequence[LayerFacts]) -> Iterator[Finding]:
    if missed is None or not is_missed(missed):
        return
    lag = len(missed.by_step) - 1 - missed.step
    yield Finding(
        "MISSED_DEPENDENCY",
        "fault",
        MODEL,
        f"The input at {_step(lag)} would explain what the model gets wrong: {_percent(missed.effect)} of the variance "
        f"of the target, p < {P_VALUE}.",
        {"effect": missed.effect, "p_value": missed.p_value, "step": missed.step, "lag": lag},
        f"cross-validated ridge on the residual explains >= {_percent(EFFECT)} of Var y, permutation p < {P_VALUE}",
        "",
    )
    where = max(layers, key=lambda layer: layer.signal(lag, memory.steps))
    path = where.signal(lag, memory.steps)
    evidence = {"kappa": path, "lag": lag}
    if not lag:
        yield Finding(
            "PATH_OPEN",
            "fault",
            MODEL,
            "No recurrence stands between that input and the output: it was not learned for another reason.",
            evidence,
            "missed at the last step",
            "train longer, or more units; see that the output is read where that input is in.",
        )
        return
    if path < VANISHED:
        yield Finding(
            "VANISHING",
            "fault",
            where.name,
            f"No training signal gets there: of a cotangent on the final state {path:.1e} is left {_ago(lag)}.",
            evidence,
            f"missed, and kappa at the missed step < {VANISHED:g}",
            where.run.cell.against_vanishing,
        )
        return
    yield Finding(
        "PATH_OPEN",
        "fault",
        where.name,
        f"The way there is open ({path:.1g} of a training signal is left {_ago(lag)}): it was not learned for another "
        "reason.",
        evidence,
        f"missed, and kappa at the missed step >= {VANISHED:g}",
        "which reason cannot be told from the network: train longer; if it was trained on windows, a window longer "
        f"than {lag} {'step' if lag == 1 else 'steps'}; else more units. Another initialisation will not help.",
    )


def _step(lag: int) -> str:
    return f"the step {lag} before the last" if lag else "the last step"


def _ago(lag: int) -> str:
    return f"{lag} {'step' if lag == 1 else 'steps'} back"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


_MEND = "rl.find_nonfinite(model, x, y) says where the first is; mend the data, the learning rate, clip gradients."


def _about_numbers(layers: Sequence[LayerFacts], prediction: Array) -> Iterator[Finding]:
    """States that are not finite, by layer; or else predictions, of whichever sample."""
    broken = [layer for layer in layers if layer.states.nan or layer.states.infinite]
    for layer in broken:
        nan, infinite, count = layer.states.nan, layer.states.infinite, layer.states.count
        yield Finding(
            "NONFINITE",
            "fault",
            layer.name,
            f"{nan} of {count} numbers of the state are NaN, {infinite} infinite.",
            {"nan": nan, "infinite": infinite, "count": count},
            "any",
            _MEND,
        )
    bad = ~np.isfinite(prediction).all(axis=1)
    if bad.any() and not broken:
        yield Finding(
            "NONFINITE",
            "fault",
            MODEL,
            f"{int(bad.sum())} of {bad.size} predictions are not finite, that of sample {int(bad.argmax())} first.",
            {"samples": int(bad.sum()), "first": int(bad.argmax()), "count": int(bad.size)},
            "any",
            _MEND,
        )


def _about_dynamics(memory: Memory, layers: Sequence[LayerFacts]) -> Iterator[Finding]:
    for layer in layers:
        if layer.states.nan or layer.states.infinite:
            continue
        rate, error = layer.transfer.leading_exponent()
        steps = len(layer.transfer.log_ratio) - 1
        # Not the gradient of the output: where every step is read, it is larger at some than at the last by itself.
        growth = layer.transfer.growth
        if growth >= EXPLODED:
            chaotic = np.isfinite(error) and (rate - 2 * error) * steps > CHAOS and layer.bounded
            yield Finding(
                "EXPLODING",
                "fault",
                layer.name,
                f"Gradients grow on their way back: by {growth:.1f} decades within {steps} steps.",
                {"growth": growth, "of the output": layer.growth, "lambda_1": rate, "stderr": error},
                f">= {EXPLODED:g} decades",
                "clip the norm of the gradient (arXiv:1211.5063), a smaller recurrent kernel or gain, or a gated cell.",
            )
            if chaotic:
                yield _chaotic(layer, rate, error, steps)
        elif np.isfinite(error) and (rate - 2 * error) * steps > CHAOS and layer.bounded:
            yield _chaotic(layer, rate, error, steps)
        yield from _underflow(layer.name, layer.states)
    yield from _unequal(layers)


def _chaotic(layer: LayerFacts, rate: float, error: float, steps: int) -> Finding:
    return Finding(
        "CHAOTIC",
        "fault",
        layer.name,
        f"The state is chaotic: small differences grow by {np.exp(rate):.3g} a step (leading exponent {rate:.3f} "
        f"+- {error:.3f}) while the state stays bounded, so that no input can be told from {steps} steps later.",
        {"lambda_1": rate, "stderr": error, "steps": steps},
        "(lambda_1 - 2 standard errors) T > ln 100, and the state is bounded",
        "a smaller gain of the recurrent kernel (spectral radius towards 1; Sompolinsky, Crisanti, Sommers 1988), or a "
        "gated cell.",
    )


def _underflow(name: str, states: Census) -> Iterator[Finding]:
    if states.underflow > UNDERFLOWN * states.count:
        yield Finding(
            "UNDERFLOW",
            "caution",
            name,
            f"{_percent(states.underflow / states.count)} of the state is subnormal, too small for its dtype.",
            {"underflow": states.underflow, "count": states.count},
            f"> {_percent(UNDERFLOWN)}",
            "compute in a wider dtype, or scale the state.",
        )


def _unequal(layers: Sequence[LayerFacts]) -> Iterator[Finding]:
    alive = {layer.name: layer.adjoint_size for layer in layers if layer.adjoint_size > 0}
    if len(alive) < 2:
        return
    low, high = min(alive, key=alive.__getitem__), max(alive, key=alive.__getitem__)
    decades = float(np.log10(alive[high] / alive[low]))
    if decades >= UNEQUAL:
        yield Finding(
            "UNEQUAL_LAYERS",
            "caution",
            low,
            f"Its gradient is {decades:.1f} decades smaller than that of {high}.",
            {"decades": decades},
            f">= {UNEQUAL:g} decades between layers",
            "normalisation or residual connections between the layers, or one learning rate per layer.",
        )


def _about_units(layers: Sequence[LayerFacts]) -> Iterator[Finding]:
    for layer in layers:
        count = int(layer.dead.sum())
        if count:
            yield Finding(
                "DEAD_UNITS",
                "fault",
                layer.name,
                f"{count} of {layer.dead.size} units never move.",
                {"dead": count, "units": int(layer.dead.size), "which": np.flatnonzero(layer.dead).tolist()},
                "spread over samples and steps <= 1e-4 of the median unit's",
                "with relu a lower learning rate, a leaky activation or another initialisation; else fewer units.",
            )


def _about_data(x: Array, mask: Array | None) -> Iterator[Finding]:
    padded = padding_share(x, mask)
    if padded > PADDED:
        yield Finding(
            "PADDING_DOMINATES",
            "caution",
            MODEL,
            f"{_percent(padded)} of the steps are padding.",
            {"padding": padded},
            f"> {_percent(PADDED)} masked, or identical steps at one end",
            "mask the padding, or put samples of like length into one batch.",
        )
    constant = constant_features(x)
    if constant.any():
        yield Finding(
            "CONSTANT_INPUT",
            "caution",
            MODEL,
            f"{int(constant.sum())} of {constant.size} input features never vary: a gradient by them means nothing.",
            {"features": np.flatnonzero(constant).tolist()},
            "max == min over all samples and steps",
            "leave them out, or check how they were scaled.",
        )
    static = static_share(x)
    if static > STATIC:
        yield Finding(
            "STATIC_INPUT",
            "caution",
            MODEL,
            f"The input of {_percent(static)} of the samples does not change over time.",
            {"share": static},
            f"> {_percent(STATIC)} of the samples",
            "a network without recurrence would do.",
        )


def _about_memory(memory: Memory, attributed: Attribution | None) -> Iterator[Finding]:
    samples = memory.change.shape[1] if memory.change.size else 0
    if samples and samples < ENOUGH:
        yield Finding(
            "FEW_SAMPLES",
            "unknown" if samples < FEWEST else "caution",
            MODEL,
            f"{samples} samples: "
            + ("too few to speak of memory." if samples < FEWEST else "intervals are too narrow."),
            {"samples": samples},
            f"< {ENOUGH}",
            f"pass at least {ENOUGH} samples.",
        )
    if not memory.known:
        return
    length = memory.length
    if length.value == 1:
        yield Finding(
            "LAST_STEP_ONLY",
            "fact",
            MODEL,
            "Only the last step is used.",
            {"memory": 1},
            "n = 1 with skill",
            "nothing, if the task needs no more: only a missed dependency would be a fault.",
        )
    if attributed is None or not attributed.memory:
        return
    ratio = max(attributed.memory / length.value, length.value / attributed.memory)
    outside = not length.low / DISAGREE < attributed.memory < length.high * DISAGREE
    if ratio >= DISAGREE and outside:
        yield Finding(
            "GRADIENT_MEMORY_DISAGREE",
            "caution",
            MODEL,
            f"Gradients point to the last {attributed.memory} steps, the model uses {length.value:.0f}: "
            + (
                "a robust memory (a latch) has no gradient."
                if attributed.memory < length.value
                else "gradients have heavy tails, believe the exchange of inputs."
            ),
            {"attributed": attributed.memory, "memory": length.value},
            f"a factor of {DISAGREE:g}, outside the interval",
            "nothing: believe the memory in use (Bengio, Simard, Frasconi 1994).",
        )
