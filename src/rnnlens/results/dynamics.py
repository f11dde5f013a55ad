"""Results about the dynamics of one layer: its fixed points, and its Lyapunov spectrum."""

from __future__ import annotations

from typing import Any

import xarray as xr

from .base import Result


class FixedPoints(Result, kind="dynamics"):
    """What ``rl.fixed_points`` returns: ``p.states (point, state)``, ``p.eigenvalues``, ``p.stable``, ``p.fixed``."""

    @property
    def data(self) -> xr.Dataset:
        """All variables of the layer."""
        return self.dataset(self.layers[0])

    @property
    def eigenvalues(self) -> xr.DataArray:
        """(point, mode), complex, largest modulus first."""
        return self.data["eigenvalue_real"] + 1j * self.data["eigenvalue_imag"]

    @property
    def eigenvectors(self) -> xr.DataArray:
        """(point, state, mode), complex."""
        return self.data["eigenvector_real"] + 1j * self.data["eigenvector_imag"]

    @property
    def states(self) -> xr.DataArray:
        """(point, state): the states of the cell side by side."""
        return self.data["states"]

    @property
    def stable(self) -> xr.DataArray:
        """(point,) of bool."""
        return self.data["stable"]

    @property
    def fixed(self) -> xr.DataArray:
        """(point,) of bool; the others are slow points."""
        return self.data["fixed"]

    def _headline(self) -> str:
        count, stable = int(self.fixed.sum()), int(self.stable.sum())
        slow = int((~self.fixed).sum())
        return f"{count} fixed points, {stable} of them stable, {count - stable} saddles; {slow} slow points"

    def _rows(self) -> list[tuple[str, str]]:
        rows = []
        values = abs(self.eigenvalues).values
        for i in range(min(len(values), 12)):
            kind = "stable" if self.stable.values[i] else "saddle" if self.fixed.values[i] else "slow"
            unstable = int((values[i] >= 1).sum())
            rows.append(
                (
                    f"point {i}",
                    f"{kind}, {unstable} unstable modes, largest |eigenvalue| {values[i].max():.4g}, "
                    f"from {int(self.data['starts'][i])} starts, speed {float(self.data['speed'][i]):.1g}",
                )
            )
        return rows

    def _meta(self) -> dict[str, Any]:
        return super()._meta()
