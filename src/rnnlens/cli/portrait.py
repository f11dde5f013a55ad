"""Before and after: what a diagnosis and two traces of one network say about it, as a table, a sentence and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from rich.table import Table

from .. import plot
from ..recurrence.measures import finite_mean, safe_norm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..results.diagnosis import Diagnosis
    from ..results.trace import Trace


@dataclass(frozen=True)
class Portrait:
    """One network before and after training.

    Attributes
    ----------
    accuracy
        Share of held-out digits that are named correctly, before and after.
    diagnosis
        Of the trained network, with the untrained one as baseline.
    traces
        Before and after.
    """

    layer: str
    accuracy: tuple[float, float]
    diagnosis: Diagnosis
    traces: tuple[Trace, Trace]


def lag_norms(gradient: np.ndarray) -> np.ndarray:
    """Mean over samples of the norm at each step, the last step first: (sample, time, unit) to (lag,)."""
    norms: np.ndarray = finite_mean(safe_norm(gradient, axis=-1), axis=0)
    return norms[::-1]


def table(portraits: Sequence[Portrait]) -> Table:
    """One row per network."""
    result = Table(title="How much of the 64 pixels before it a digit is named by")
    result.add_column("layer")
    for column in ("memory in use", "95 % interval", "at 1 %", "untrained", "training signal at lag 63", "accuracy"):
        result.add_column(column, justify="right")
    for portrait in portraits:
        result.add_row(portrait.layer, *_cells(portrait))
    result.caption = (
        "On held-out digits. Memory in use: the last steps that the prediction needs, all others being another's.\n"
        "Training signal: what is left of a cotangent on the final state, 63 steps back, after training."
    )
    return result


def _cells(portrait: Portrait) -> tuple[str, ...]:
    model, layer = portrait.diagnosis["model"], portrait.diagnosis[portrait.layer]
    last = int(model["steps"])
    low, high = (steps(float(bound), last) for bound in model["memory_interval"].values)
    known = bool(model.attrs["known"])
    before, after = (percent(share) for share in portrait.accuracy)
    return (
        steps(float(model["memory"]), last) if known else "unknown",
        f"{low} to {high}" if known else "",
        steps(float(model["memory_1_percent"]), last) if known else "",
        steps(float(model["memory_before"]), last),
        f"{float(layer['kappa'][last - 1]):.1e}",
        f"{before} → {after}",
    )


def percent(share: float) -> str:
    """A share in whole percent."""
    return f"{100 * share:.0f} %"


def steps(count: float, last: int) -> str:
    """A number of steps; at least all of them, where it is not known to be fewer."""
    return "unknown" if math.isnan(count) else f">= {last}" if count >= last else f"{count:.0f}"


def sentence(portrait: Portrait) -> str:
    """What the diagnosis says, and what was learned."""
    before, after = portrait.accuracy
    said = next(iter(portrait.diagnosis.sentences.values()))
    return f"{said} Accuracy {percent(before)} → {percent(after)}."


def draw(portraits: Sequence[Portrait], folder: Path) -> list[Path]:
    """Write the figures: the gradient by step for all networks; for each the gradient by unit, and its diagnosis."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"gradient-by-step.png": draw_steps(portraits)}
    figures |= {f"{portrait.layer}-before-after.png": draw_units(portrait) for portrait in portraits}
    figures |= {f"{p.layer}-diagnosis.png": plot.diagnosis(p.diagnosis)[0].figure for p in portraits}
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110)
    return [folder / name for name in figures]


def draw_steps(portraits: Sequence[Portrait]) -> Figure:
    """A panel per network: norm of the total gradient at each step, before and after."""
    norms = xr.DataArray(
        [[lag_norms(seen[p.layer].hidden_grad.values)[::-1] for seen in p.traces] for p in portraits],
        dims=("network", "training", "time"),
        coords={"network": [p.layer for p in portraits], "training": ["before", "after"]},
        attrs={"long_name": "norm of the total gradient", "units": "loss"},
    )
    axes = plot.curves(norms, panel="network", title="How far back the loss reaches")
    top = float(norms.max())
    for ax in axes:
        ax.set_ylim(1e-8 * top, 3 * top)
        ax.set_yscale("log")
    figure: Figure = axes[0].figure
    return figure


def draw_units(portrait: Portrait) -> Figure:
    """Units by time for the first held-out digit, each panel with a colour scale of its own."""
    pair = [seen[portrait.layer].hidden_grad.isel(sample=0) for seen in portrait.traces]
    both = xr.concat(
        pair, xr.DataArray(["before", "after"], dims="training", name="training"), combine_attrs="override"
    )
    figure: Figure = plot.heatmap(both, shared=False)[0].figure
    return figure
