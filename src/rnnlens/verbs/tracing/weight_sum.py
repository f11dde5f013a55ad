"""Per-step weight gradients held against the framework's dL/dW."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...adapters.protocol import RecurrentCall
from ...results.checks import Check, weight_sum_check
from ...typing import Array


class WeightSum:
    """Per-step weight gradients summed over time and over all calls that share the weights, against the framework's."""

    def __init__(self, call: RecurrentCall, reference: Mapping[str, Array]) -> None:
        self.layer, self.reference, self.steps = call.layer.partition("#")[0], reference, 0
        self.dtype = call.compute_dtype or str(call.input.dtype)
        self.total: dict[str, Array] = {}
        self.scale = 0.0

    def add(self, grads: Mapping[str, Array], steps: int, scale: float) -> None:
        """Add what one call contributed, and what rounding in it goes by (:class:`rounding.Rounding`)."""
        self.steps += steps
        self.scale = math.hypot(self.scale, scale)
        for name, grad in grads.items():
            self.total[name] = self.total[name] + grad if name in self.total else grad

    def check(self) -> Check:
        """Compare with the framework's dL/dW."""
        return weight_sum_check(
            self.layer, self.total, self.reference, steps=self.steps, dtype=self.dtype, scale=self.scale
        )
