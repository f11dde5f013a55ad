"""The sentence of a diagnosis: what is used of the past, how sure that is, and what it was before training."""

from __future__ import annotations

import math

from ..measures.intervention import USED
from .carried import Carried
from .memory import Memory


def headline(name: str, memory: Memory, before: Memory | None, missed: bool) -> str:
    """One sentence that the numbers bear out; "unknown" where they bear none out.

    Parameters
    ----------
    name
        The layer, or "the model" where there are several.
    before
        The same at initialisation, to be shown and not judged.
    missed
        Whether something older in the data would help.
    """
    if not memory.known:
        return f"{name}: memory unknown: {memory.why}."
    return " ".join(part for part in (_used(name, memory, before) + _worth(memory), _older(missed, memory)) if part)


def by_layer(name: str, carried: Carried) -> str:
    """What one layer of several brings over."""
    if carried.length >= carried.steps:
        return f"{name}: its state carries from the first of {carried.steps} steps to the last."
    if carried.use.size and carried.use[0] <= USED:
        return f"{name}: exchanging its state changed nothing at any step that was tried."
    return f"{name}: its state matters for {carried.length} steps; exchanged earlier, the prediction recovers."


def _used(name: str, memory: Memory, before: Memory | None) -> str:
    length, steps = memory.length, memory.steps
    remarks = [f"95 % CI {length.low:.0f}-{length.high:.0f}{' or more' if length.high >= steps else ''}"]
    if before is not None and before.context.size:
        remarks.append(f"{_count(before.length.value, before.steps)} at initialisation")
    if length.value == 1:
        used = f"{name} uses the last step only, of {steps}"
    elif memory.censored:
        used = f"{name} uses all {steps} steps, and might use more than the data has"
    else:
        used = f"{name} uses the last {length.value:.0f} of {steps} steps"
    rare = memory.rare.value
    if rare > 2 * length.value:
        remarks.append(f"{_count(rare, steps)} where 1 % of the variance counts")
    return f"{used} ({'; '.join(remarks)})"


def _worth(memory: Memory) -> str:
    """What is lost where the oldest of the used steps, and all before it, are another sequence's."""
    lost = memory.lost_without
    if memory.length.value == 1 or math.isnan(lost):
        return "."
    share = f"{min(max(lost, 0), 1):.0%}".replace("%", " %") if lost < 1.005 else "all"
    more = memory.needed.value
    needs = (
        f"; of what it learned 5 % needs the last {_count(more, memory.steps)}"
        if more > 2 * memory.length.value
        else ""
    )
    return (
        f": with the oldest of these, and all before, from another sequence {share} of what it learned is lost{needs}."
    )


def _older(missed: bool, memory: Memory) -> str:
    if missed:
        return ""
    return "" if memory.censored else "Nothing older in the data would help, as far as the test of the residual sees."


def _count(value: float, steps: int) -> str:
    return f">= {steps}" if value >= steps else f"{value:.0f}"
