"""``gradient_carriers``: which samples the gradient of a batch is made of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.collections import PathCollection

from ..arguments import as_numbers
from ..errors import InputError, message
from ..measures.samples import carriers, lorenz, typical_first
from ..recurrence.measures import safe_norm
from ..vocabulary import SAMPLE
from ._data import Numbers, labelled, names_of, nonfinite_note, require_dim
from ._door import figure as figure_door
from ._keywords import checked
from ._marks import log_ticks, power_of_ten
from ._panels import Grid, open_panels


@figure_door()
def gradient_carriers(
    gradient: Any, losses: Any, *, title: str | None = None, ax: Any = None, figure: Any = None, **point: Any
) -> Any:
    """Draw who carries the gradient: the loss of each sample against the norm of its gradient, and their Lorenz curve.

    Where the curve hangs far below the diagonal a few samples speak for the batch, and a mean over samples is theirs.

    Parameters
    ----------
    gradient : (sample, ...)
        Of the loss, sample by sample: ``trace["lstm"].hidden_grad``, or any other with a sample dimension.
    losses : (sample,)
        The loss of each sample.
    title
        Instead of the one made from the labels.
    ax, figure
        Two Axes, or a Figure or SubFigure to draw into.
    **point
        Properties of matplotlib's PathCollection, the samples.

    Returns
    -------
    1-D array of two Axes

    Raises
    ------
    InputError
        If there is no sample dimension, not one loss for each sample, or a keyword is unknown.

    References
    ----------
    Lorenz 1905, doi:10.2307/2276207.
    """
    keywords = checked(point, PathCollection, figure="gradient_carriers", extra=("marker", "s"))
    array = labelled(gradient, "gradient_carriers")
    require_dim(array, SAMPLE, "gradient_carriers")
    values = as_numbers("losses", losses).reshape(-1).astype(float)
    ordered = array.transpose(SAMPLE, ...).values.reshape(array.sizes[SAMPLE], -1)
    if len(values) != len(ordered):
        got, expected = f"{len(values)} numbers", f"{len(ordered)} of them"
        raise InputError(message("losses= has one number for each sample.", got=got, expected=expected))
    norms = np.asarray(safe_norm(ordered.astype(np.float64), axis=1, xp=np))
    panels = open_panels(2, name="gradient_carriers", grid=Grid((3.5, 3.1), shape=(1, 2)), ax=ax, figure=figure)
    _scatter(panels.axes[0], values, norms, names_of(array, SAMPLE), keywords)
    _curve(panels.axes[1], norms)
    share = carriers(norms)
    count = len(norms)
    said = None if math.isnan(share) else f"{round(share * count)} of {count} samples carry half of the gradient"
    missing = " and ".join(note for note in (nonfinite_note(array.values), nonfinite_note(values)) if note)
    head = " · ".join(str(part) for part in (array.attrs.get("layer"), "who carries the gradient") if part)
    panels.title(title or head, [said, missing])
    return panels.result()


def _scatter(ax: Any, losses: Numbers, norms: Numbers, names: list[str], keywords: dict[str, Any]) -> None:
    """A point per sample; the typical one and the largest are named."""
    seen = np.isfinite(losses) & np.isfinite(norms)
    limits = [_limits(values[seen]) for values in (losses, norms)]
    inside = [np.maximum(values[seen], low) for values, (low, _) in zip((losses, norms), limits, strict=True)]
    look = {"s": float(np.clip(1200 / max(1, len(norms)), 6, 30)), "color": "#0072b2", "alpha": 0.6, "linewidth": 0}
    ax.scatter(*inside, **{"gid": "samples", "clip_on": False, **look, **keywords})
    ax.set(xlim=limits[0], ylim=limits[1], xlabel="loss of the sample", ylabel="norm of its gradient")
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in ("x", "y"):
        log_ticks(ax, axis, most=6)
    if seen.any():
        largest = int(np.where(seen, norms, -1.0).argmax())
        for place, words in {int(typical_first(losses)[0]): "typical", largest: "largest"}.items():
            at = tuple(max(values[place], low) for values, (low, _) in zip((losses, norms), limits, strict=True))
            ring = {"s": 45, "facecolor": "none", "edgecolor": "black", "linewidth": 0.9, "clip_on": False, "zorder": 3}
            ax.scatter([at[0]], [at[1]], gid=f"ring {words}", **ring)
            text = f"sample {names[place]} ({words})"
            left = ax.transLimits.transform(ax.transScale.transform(at))[0] < 0.4
            way, side = ((4, -8), "left") if left else ((-4, 4), "right")
            ax.annotate(text, at, xytext=way, textcoords="offset points", ha=side, fontsize="x-small", gid=words)
    if (~seen).any():
        ax.plot(np.full((~seen).sum(), 0.03), np.linspace(0.05, 0.4, (~seen).sum()), "x", color="black",
                transform=ax.transAxes, gid="non-finite")  # fmt: skip
    for axis, values, (low, _) in zip("xy", (losses, norms), limits, strict=True):
        if (values[seen] < low).any():
            at, turn = ((0.02, 0.02), 0) if axis == "x" else ((0.02, 0.08), 0)
            words = f"{'loss' if axis == 'x' else 'norm'} below {power_of_ten(low)} at the border"
            ax.annotate(words, at, xycoords="axes fraction", fontsize="x-small", rotation=turn, gid="below")
    ax.tick_params(labelsize="small")


def _limits(values: Numbers) -> tuple[float, float]:
    """Twelve decades at most around what is positive."""
    positive = values[values > 0]
    if not positive.size:
        return 0.1, 10.0
    high = float(positive.max())
    return max(float(positive.min()), high * 1e-12) / 2, high * 2


def _curve(ax: Any, norms: Numbers) -> None:
    """Share of the gradient that the samples with the least of it carry."""
    share = lorenz(norms)
    part = np.linspace(0, 1, len(share))
    ax.plot([0, 1], [0, 1], color="0.5", linewidth=0.8, linestyle="--", gid="equal")
    ax.plot(part, share, color="#d55e00", linewidth=1.5, gid="lorenz")
    ax.fill_between(part, share, part, color="#d55e00", alpha=0.12, linewidth=0)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="share of the samples, least first", ylabel="share of the gradient")
    ax.tick_params(labelsize="small")
