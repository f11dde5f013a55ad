"""``eigenvalues``: those of the step Jacobian, on the unit circle."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import PathCollection
from matplotlib.colors import LinearSegmentedColormap

from ..errors import InputError, message, shown
from ..results.dynamics import FixedPoints
from ..vocabulary import TIME
from ._data import Numbers, positions
from ._door import figure as figure_door
from ._keywords import checked
from ._panels import ALARM, Grid, open_panels

_ORDER = LinearSegmentedColormap.from_list("rnnlens.order", ("#56b4e9", "#0072b2", "#08306b"))


@figure_door()
def eigenvalues(values: Any, *, title: str | None = None, ax: Any = None, figure: Any = None, **point: Any) -> Any:
    """Draw the eigenvalues of step Jacobians in the complex plane, with the unit circle.

    A mode on the circle is kept from step to step, one at 0 is forgotten at once, one outside grows. Later steps are
    darker; beside it the moduli of all modes, largest first, median over samples and steps with their whole range.

    Parameters
    ----------
    values
        What ``rl.step_eigenvalues(model, x)`` returned; the fixed points of ``rl.fixed_points``; or a complex array
        whose last axis counts modes.
    title
        Instead of the one made from the labels.
    ax, figure
        Two Axes, or a Figure or SubFigure to draw into.
    **point
        Properties of matplotlib's PathCollection.

    Returns
    -------
    1-D array of two Axes

    Raises
    ------
    InputError
        If there are no eigenvalues, or a keyword is unknown.
    """
    keywords = checked(point, PathCollection, figure="eigenvalues", extra=("marker", "s"))
    found, colours, label, layer = _of(values)
    panels = open_panels(
        2, name="eigenvalues", grid=Grid((3.7, 3.2), shape=(1, 2), widths=(1.25, 1)), ax=ax, figure=figure
    )
    finite = np.isfinite(found)
    outside = int((np.abs(found[finite]) > 1).sum())
    _plane(panels.axes[0], found, colours, label, keywords)
    _moduli(panels.axes[1], found)
    said = f"{outside:,} of {int(finite.sum()):,} outside the unit circle"
    bad = int((~finite).sum())
    missing = f"NaN: {bad:,} of {found.size:,} ({100 * bad / found.size:.3g} %)" if bad else None
    head = " · ".join(part for part in (layer, "eigenvalues of the step Jacobian") if part)
    panels.title(title or head, [said, missing])
    return panels.result()


def _of(values: Any) -> tuple[Numbers, Numbers, str, str]:
    """(row, mode) of complex numbers, a place in time for each row, what that is, and the layer."""
    if isinstance(values, FixedPoints):
        array = values.eigenvalues.values
        return array, np.zeros(len(array)), "", str(values.layers[0])
    if isinstance(values, xr.Dataset) and "eigenvalue_real" in values:
        whole = values["eigenvalue_real"] + 1j * values["eigenvalue_imag"]
        whole = whole.transpose(..., "mode")
        when = np.zeros(whole.shape[:-1])
        if whole.dims[-2:-1] == (TIME,):
            when = np.broadcast_to(positions(whole, TIME), when.shape)
        flat = whole.values.reshape(-1, whole.shape[-1])
        return flat, when.reshape(-1), "time step", str(values.attrs.get("layer", ""))
    array = np.asarray(values.values if isinstance(values, xr.DataArray) else values)
    if array.dtype.kind not in "cf" or array.ndim == 0 or array.size == 0:
        raise InputError(
            message(
                "plot.eigenvalues draws eigenvalues.",
                got=shown(values),
                expected="numbers, the last axis counting modes",
                hint="rl.step_eigenvalues(model, x)",
            )
        )
    flat = array.reshape(-1, array.shape[-1]).astype(complex)
    return flat, np.zeros(len(flat)), "", ""


def _plane(ax: Any, values: Numbers, when: Numbers, label: str, keywords: dict[str, Any]) -> None:
    """All of them, in the order of time."""
    angle = np.linspace(0, 2 * np.pi, 200)
    ax.plot(np.cos(angle), np.sin(angle), color="0.4", linewidth=0.9, gid="unit circle")
    for line in (ax.axhline, ax.axvline):
        line(0, color="0.8", linewidth=0.6, zorder=0.5)
    times = np.broadcast_to(when[:, None], values.shape)
    seen = np.isfinite(values)
    size = float(np.clip(9000 / max(1, values.size), 3, 18))
    look: dict[str, Any] = {"s": size, "alpha": 0.6, "linewidth": 0, "zorder": 2, "gid": "eigenvalues"}
    look["rasterized"] = values.size > 2000  # a vector file would list them one by one
    look |= {"c": times[seen], "cmap": _ORDER} if label else {"color": "#0072b2"}
    drawn = ax.scatter(values.real[seen], values.imag[seen], **{**look, **keywords})
    if label and len(np.unique(when)) > 1:
        ax.figure.colorbar(drawn, ax=[ax], fraction=0.08, pad=0.02).set_label(label)
    reach = 1.1 * max(1.0, float(np.abs(values[seen]).max(initial=0.0)))
    ax.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xlabel="real part", ylabel="imaginary part")
    ax.tick_params(labelsize="small")
    if not seen.all():
        for spine in ax.spines.values():
            spine.set(edgecolor=ALARM, linewidth=1.4)


def _moduli(ax: Any, values: Numbers) -> None:
    """|eigenvalue| by rank."""
    seen = np.isfinite(values).all(axis=1)
    moduli = -np.sort(-np.abs(values[seen]), axis=1)
    rank = np.arange(1, values.shape[1] + 1)
    ax.axhline(1, color="0.4", linewidth=0.9)
    if len(moduli):
        ax.fill_between(
            rank, moduli.min(axis=0), moduli.max(axis=0), color="#0072b2", alpha=0.2, linewidth=0, gid="range"
        )
        look = {"marker": "." if len(rank) < 40 else None, "linewidth": 1.2, "gid": "moduli"}
        ax.plot(rank, np.median(moduli, axis=0), color="#0072b2", **look)
    ax.set(xlabel="mode, largest first", ylabel="modulus")
    ax.set_ylim(0, None)
    ax.set_xlim(0.5, len(rank) + 0.5)
    ax.tick_params(labelsize="small")
