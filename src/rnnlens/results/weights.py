"""``Weights``, the result of ``rl.weights``: weights by kernel and gate, gradients, and counts of NaN and infinity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xarray as xr

from ..errors import did_you_mean, message
from .base import Result
from .layers import LayerView, sizes_of
from .schema import LabelledLayer


class LayerWeights(LayerView):
    """Weights of one layer, their gradients, and counts of NaN and infinity: ``w["lstm"].recurrent_kernel_grad``."""

    @property
    def nonfinite(self) -> dict[str, int]:
        """Number of NaN and infinite values by variable; variables without any are left out."""
        counted: dict[str, int] = {}
        for name in self:
            stem, _, what = name.rpartition("_")
            if what == "count" and self.dataset[name].chunks is None:
                total = int(self.dataset[name].sum())
                stem = stem.rpartition("_")[0]
                if total:
                    counted[stem] = counted.get(stem, 0) + total
        return counted

    def _absence(self, name: str) -> str:
        hint = did_you_mean(name, self)
        if name.endswith("_grad") and name.removesuffix("_grad") in self:
            hint = "pass data for gradients: rl.weights(model, x, y)"
        return message(f"Layer {self.name!r} has no {name!r} here.", hint=hint)

    def _variables(self) -> list[tuple[str, str]]:
        flags = {name: f"  {count} NaN or infinite" for name, count in self.nonfinite.items()}
        shown = [name for name in self if not name.endswith("_count")]
        return [(name, f"({sizes_of(self.dataset[name])}){flags.get(name, '')}") for name in shown]


class Weights(Result, kind="weights"):
    """Result of ``rl.weights``: a mapping from layer names to :class:`LayerWeights`.

    Parameters
    ----------
    penalties
        Regularisation penalty by weight, ``"lstm/kernel"`` -> number.
    loss
        Loss of the batch that was differentiated; None without data.
    """

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset | LabelledLayer] | xr.DataTree,
        *,
        penalties: Mapping[str, float] | None = None,
        loss: float | None = None,
        **common: Any,
    ) -> None:
        super().__init__(datasets, **common)
        self.penalties = dict(penalties or {})
        self.loss = loss

    @property
    def penalty_loss(self) -> float:
        """Sum of all penalties, which weight regularisation adds to the loss."""
        return float(sum(self.penalties.values()))

    @property
    def nonfinite(self) -> dict[str, int]:
        """Number of NaN and infinite values by weight, ``"lstm/kernel"`` -> count; weights without any are left out."""
        return {f"{layer}/{name}": n for layer in self for name, n in self[layer].nonfinite.items()}

    def _complete(self, found: Mapping[str, Any]) -> None:
        super()._complete(found)
        self.loss = None if found["value"] is None else float(found["value"])

    def _node(self, name: str) -> LayerWeights:
        return LayerWeights(name, self.dataset(name))

    def __getitem__(self, name: str) -> LayerWeights:
        return self._node(self._resolve(name))

    def _meta(self) -> dict[str, Any]:
        return {**super()._meta(), "penalties": self.penalties, "loss": self.loss}

    def _rows(self) -> list[tuple[str, str]]:
        return [(name, ", ".join(n for n in self[name] if not n.endswith("_count"))) for name in self]

    def _remarks(self) -> list[tuple[str, str]]:
        bad = [("WARNING", f"{name}: {count} NaN or infinite") for name, count in self.nonfinite.items()]
        penalty = [("penalty", f"{self.penalty_loss:.6g} from {len(self.penalties)} weights")] if self.penalties else []
        return bad + penalty + super()._remarks()
