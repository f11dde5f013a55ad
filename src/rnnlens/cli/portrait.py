"""Before and after: what two traces of one network say about it, as numbers, a sentence and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from rich.table import Table

from .. import plot
from ..recurrence.measures import finite_mean, half_life, mean_lag, safe_norm, share_above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..results.trace import LayerTrace, Trace

#: A step counts as reached where its gradient exceeds this share of the largest.
REACH = 0.01


@dataclass(frozen=True)
class Reading:
    """What one trace says about one network.

    Attributes
    ----------
    accuracy
        Share of held-out digits that are named correctly.
    reach
        Share of steps whose total gradient exceeds 1 % of the largest.
    half
        Lag, counted from the last step, at which the total gradient has fallen to half of its largest; infinite if it
        never does.
    mean_lag
        Mean number of steps back at which the loss listens to its input: gradient times standard deviation of the
        pixel, since a gradient at a pixel that never varies means nothing.
    """

    accuracy: float
    reach: float
    half: float
    mean_lag: float


@dataclass(frozen=True)
class Portrait:
    """One network before and after training."""

    layer: str
    before: Reading
    after: Reading
    traces: tuple[Trace, Trace]


def read(seen: LayerTrace, spread: np.ndarray, accuracy: float) -> Reading:
    """Put the numbers of one trace together; ``spread`` is the standard deviation of the input, (time, feature)."""
    total = lag_norms(seen.hidden_grad.values)
    listened = lag_norms(seen.input_grad.values * spread)
    return Reading(
        accuracy,
        reach=float(share_above(total, threshold=REACH)),
        half=float(np.argmax(total) + half_life(total)),
        mean_lag=float(mean_lag(listened)),
    )


def lag_norms(gradient: np.ndarray) -> np.ndarray:
    """Mean over samples of the norm at each step, the last step first: (sample, time, unit) to (lag,)."""
    norms: np.ndarray = finite_mean(safe_norm(gradient, axis=-1), axis=0)
    return norms[::-1]


def table(portraits: Sequence[Portrait]) -> Table:
    """One row per network, before → after."""
    result = Table(title="What the loss after the last pixel says about the 64 steps before it")
    result.add_column("layer")
    for column in ("steps reached", "half at lag", "mean lag of the input", "accuracy"):
        result.add_column(column, justify="right")
    for portrait in portraits:
        pairs = [
            (percent(r.reach), lag(r.half), f"{r.mean_lag:.1f}", percent(r.accuracy))
            for r in (portrait.before, portrait.after)
        ]
        result.add_row(portrait.layer, *(f"{before} → {after}" for before, after in zip(*pairs, strict=True)))
    result.caption = (
        "Before → after training, on held-out digits. Steps reached: total gradient dL/dh_t above 1 % of its largest.\n"
        "Mean lag of the input: by |dL/dx_t| times the standard deviation of pixel t."
    )
    return result


def percent(share: float) -> str:
    """A share in whole percent."""
    return f"{100 * share:.0f} %"


def lag(steps: float) -> str:
    """A number of steps, or that there is none."""
    return f"{steps:.1f}" if np.isfinite(steps) else "never"


def sentence(portrait: Portrait) -> str:
    """What happened to one network, in words that its numbers bear out."""
    before, after = portrait.before, portrait.after
    return (
        f"{portrait.layer}: before training the loss reached back over {percent(before.reach)} of the steps "
        f"and listened {before.mean_lag:.1f} steps back on average; "
        f"after, over {percent(after.reach)} and {after.mean_lag:.1f}. "
        f"Accuracy {percent(before.accuracy)} → {percent(after.accuracy)}: {verdict(before, after)}."
    )


def verdict(before: Reading, after: Reading) -> str:
    """Compare before with after; a gradient that vanishes at initialisation alone foretells nothing."""
    learned = after.accuracy > 0.5 > before.accuracy
    if not learned:
        return "it did not learn the task"
    if after.mean_lag < 1.2 * before.mean_lag:
        return "it learned the task without looking further back than at the start"
    if before.reach < 0.5:
        return "it learned to look far back, although the gradient had vanished over most steps at the start"
    return "it learned to look further back"


def draw(portraits: Sequence[Portrait], folder: Path) -> list[Path]:
    """Write the figures: the gradient by step for all networks, and by unit for each."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"gradient-by-step.png": draw_steps(portraits)}
    figures |= {f"{portrait.layer}-before-after.png": draw_units(portrait) for portrait in portraits}
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
