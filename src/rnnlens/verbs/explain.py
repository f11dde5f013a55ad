"""Why there is no gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..results.gradients import Reason


@dataclass
class Explanation:
    """Reasons by tensor."""

    disconnected: dict[str, Reason] = field(default_factory=dict)
    flags: dict[str, Reason] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def explain(question: Any, batch: Any, found: Any, dims: Any, masks: Any) -> Explanation:
    """Reasons."""
    result = Explanation()
    for name in question.wrt:
        if name not in found:
            result.disconnected[name.text] = Reason(name.text, "none", "none", "none")
    return result
