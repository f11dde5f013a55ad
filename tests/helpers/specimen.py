"""A model with data of any length for it, and two losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import rnnlens as rl

#: Samples and steps of the data, unless a test asks for others.
SAMPLES, STEPS = 32, 9


@dataclass
class Specimen:
    """``data(samples, steps)`` returns the keywords of a verb: x and y, and more where the model has it."""

    model: Any
    data: Callable[[int, int], dict[str, Any]]
    loss: Any
    other_loss: Any

    def trace(self, samples: int = SAMPLES, steps: int = STEPS, **options: Any) -> Any:
        """Return the trace of the model on that many samples and steps."""
        return rl.trace(self.model, **{"loss": self.loss, **self.data(samples, steps), **options})
