"""The result of ``rl.weights``: weights by kernel and gate, their gradients, and what is not finite among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import xarray as xr

from ..errors import QuantityNotFoundError, did_you_mean, message
from .base import Result, refuse_no_name
from .certificate import Certificate
from .checks import Check


class LayerWeights:
    """Weights of one layer by attribute or name: ``w.kernel``, ``w["recurrent_kernel_grad"]``; ``.dataset`` has all."""

    def __init__(self, name: str, dataset: xr.Dataset) -> None:
        self.name = name
        self.dataset = dataset

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the variables: weights, gradients, and counts of what is not finite."""
        return tuple(str(name) for name in self.dataset.data_vars)

    @property
    def nonfinite(self) -> dict[str, int]:
        """Number of NaN and infinite values per variable that has any."""
        counted: dict[str, int] = {}
        for name in self.names:
            stem, _, what = name.rpartition("_")
            if what == "count":
                total = int(self.dataset[name].sum())
                stem = stem.rpartition("_")[0]
                if total:
                    counted[stem] = counted.get(stem, 0) + total
        return counted

    def __getitem__(self, name: str) -> xr.DataArray:
        refuse_no_name(name, self.names, f"layer {self.name!r}")
        if name in self.dataset.data_vars:
            return self.dataset[name]
        missing = f"Layer {self.name!r} has no {name!r} here."
        hint = did_you_mean(name, self.names)
        if name.endswith("_grad") and name.removesuffix("_grad") in self.names:
            hint = "pass data for gradients: rl.weights(model, x, y)"
        raise QuantityNotFoundError(message(missing, hint=hint))

    def __getattr__(self, name: str) -> xr.DataArray:
        if name.startswith("_") or name == "dataset":
            raise AttributeError(name)
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self.dataset.data_vars

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.names]

    def __repr__(self) -> str:
        lines = [f"<rnnlens LayerWeights {self.name!r}>"]
        shown = [name for name in self.names if not name.endswith("_count")]
        width = max((len(name) for name in shown), default=0)
        bad = self.nonfinite
        for name in shown:
            shape = ", ".join(f"{dim}: {size}" for dim, size in self.dataset[name].sizes.items())
            flag = f"  {bad[name]} NaN or infinite" if name in bad else ""
            lines.append(f"  {name:<{width}}  ({shape}){flag}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.dataset._repr_html_()


class Weights(Result, kind="weights"):
    """What ``rl.weights`` returns: a mapping from layer names to :class:`LayerWeights`.

    Parameters
    ----------
    penalties
        Regularisation penalty per weight, ``"lstm/kernel"`` -> number.
    loss
        The loss of the batch that the gradients are of; None without data.
    """

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset] | xr.DataTree,
        *,
        penalties: Mapping[str, float] | None = None,
        loss: float | None = None,
        provenance: Mapping[str, str] | None = None,
        notes: Iterable[str] = (),
        checks: Iterable[Check | Mapping[str, Any]] = (),
        certificate: Certificate | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(datasets, provenance=provenance, notes=notes, checks=checks, certificate=certificate)
        self.penalties = dict(penalties or {})
        self.loss = loss

    @property
    def penalty_loss(self) -> float:
        """Sum of all penalties: what weight regularisation adds to the loss."""
        return float(sum(self.penalties.values()))

    @property
    def nonfinite(self) -> dict[str, int]:
        """Number of NaN and infinite values per weight that has any, ``"lstm/kernel"`` -> count."""
        return {f"{layer}/{name}": n for layer in self for name, n in self[layer].nonfinite.items()}

    def _node(self, name: str) -> LayerWeights:
        return LayerWeights(name, self.dataset(name))

    def __getitem__(self, name: str) -> LayerWeights:
        return self._node(self._resolve(name))

    def _meta(self) -> dict[str, Any]:
        return {**super()._meta(), "penalties": self.penalties, "loss": self.loss}

    def _rows(self) -> list[tuple[str, str]]:
        return [(name, ", ".join(n for n in self[name].names if not n.endswith("_count"))) for name in self]

    def _remarks(self) -> list[tuple[str, str]]:
        bad = [("WARNING", f"{name}: {count} NaN or infinite") for name, count in self.nonfinite.items()]
        penalty = [("penalty", f"{self.penalty_loss:.6g} from {len(self.penalties)} weights")] if self.penalties else []
        return bad + penalty + super()._remarks()
