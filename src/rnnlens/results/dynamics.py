"""``FixedPoints``, the result of ``rl.fixed_points``."""

from __future__ import annotations

import xarray as xr

from ..measures.fixed_points import point_kinds
from .base import Result

_KINDS = ("stable", "saddle", "repeller", "marginal")


class FixedPoints(Result, kind="dynamics"):
    """Fixed and slow points of one layer: ``p.states (point, state)``, ``p.eigenvalues``, ``p.kinds``, ``p.curves``."""

    @property
    def data(self) -> xr.Dataset:
        """All variables of the layer."""
        return self.dataset(self.layers[0])

    @property
    def eigenvalues(self) -> xr.DataArray:
        """Eigenvalues of the step Jacobian (point, mode), complex, largest modulus first."""
        return self.data["eigenvalue_real"] + 1j * self.data["eigenvalue_imag"]

    @property
    def eigenvectors(self) -> xr.DataArray:
        """Eigenvectors of the step Jacobian (point, state, mode), complex."""
        return self.data["eigenvector_real"] + 1j * self.data["eigenvector_imag"]

    @property
    def states(self) -> xr.DataArray:
        """Fixed and slow points (point, state); the states of the cell are concatenated."""
        return self.data["states"]

    @property
    def stable(self) -> xr.DataArray:
        """Stability of each point: (point,) of bool."""
        return self.data["stable"]

    @property
    def fixed(self) -> xr.DataArray:
        """Mask of the fixed points: (point,) of bool; the others are slow points."""
        return self.data["fixed"]

    @property
    def kinds(self) -> list[str]:
        """Kind of each point: ``"stable"``, ``"saddle"``, ``"repeller"``, ``"marginal"`` or ``"slow"``."""
        curve = self.data["curve"] if "curve" in self.data else xr.full_like(self.fixed, -1, dtype=int)
        return point_kinds(self.eigenvalues.values, self.fixed.values, curve.values)

    @property
    def curves(self) -> list[str]:
        """Kind of each curve of marginal points: ``"line"`` or ``"ring"``."""
        return [name for name in str(self.data.attrs.get("curves", "")).split(", ") if name]

    def _headline(self) -> str:
        kinds = self.kinds
        parts = [_count(kinds.count(kind), kind) for kind in _KINDS if kind in kinds] or ["no fixed points"]
        parts += [_count(kinds.count("slow"), "slow", "point")] if "slow" in kinds else []
        on_curves = [f"a {name} of {self._size(i)} marginal points" for i, name in enumerate(self.curves)]
        return f"{', '.join(on_curves)}; {', '.join(parts)}" if on_curves else ", ".join(parts)

    def _size(self, curve: int) -> int:
        return int((self.data["curve"] == curve).sum())

    def _rows(self) -> list[tuple[str, str]]:
        moduli, kinds, data = abs(self.eigenvalues).values, self.kinds, self.data
        return [
            (
                f"point {i}",
                f"{kinds[i]}, {int((moduli[i] > 1).sum())} unstable modes, largest |eigenvalue| {moduli[i].max():.4g}, "
                f"from {int(data['starts'][i])} starts, speed {float(data['speed'][i]):.1g}",
            )
            for i in range(min(len(moduli), 12))
        ]


def _count(count: int, kind: str, noun: str = "fixed point") -> str:
    return f"{count} {kind} {noun}" + ("" if count == 1 else "s")
