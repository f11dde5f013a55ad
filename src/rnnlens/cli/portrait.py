"""Table, sentence and figures of one network before and after training, for ``rnnlens demo``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .. import plot

if TYPE_CHECKING:
    from ..results.diagnosis import Diagnosis
    from ..results.trace import Trace


@dataclass(frozen=True)
class Portrait:
    """Results of one network before and after training.

    Attributes
    ----------
    accuracy
        Share of held-out digits that are classified correctly, before and after training.
    diagnosis
        Diagnosis of the trained network, with the untrained one as baseline.
    traces
        Traces of the held-out digits, before and after training.
    losses
        Loss of each held-out digit after training.
    """

    layer: str
    accuracy: tuple[float, float]
    diagnosis: Diagnosis
    traces: tuple[Trace, Trace]
    losses: np.ndarray

    @property
    def kind(self) -> str:
        """Kind of the layer, the name of the network in figures: ``GRU``."""
        return str(self.traces[0][self.layer].info.get("kind", self.layer))


def table(portraits: Sequence[Portrait]) -> Table:
    """Return a table with one row per network."""
    result = Table(title="How many of its 64 pixels a digit is recognised by", box=SIMPLE_HEAD, pad_edge=False)
    result.add_column("layer", no_wrap=True)
    # Lines of the headings are broken so that the table fits into 80 characters.
    for column in (
        "memory\nin use",
        "95 %\ninterval",
        "at 1 %",
        "untrained",
        "training\nsignal\nat lag 63",
        "accuracy",
    ):
        result.add_column(column, justify="right", no_wrap=True)
    for portrait in portraits:
        result.add_row(portrait.layer, *_cells(portrait))
    result.caption = (
        "On held-out digits. Memory in use: how many of the last steps the prediction depends on.\n"
        "Training signal: share of a gradient at the final state that is left 63 steps back, after training."
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
    """Format a share in whole percent."""
    return f"{100 * share:.0f} %"


def steps(count: float, last: int) -> str:
    """Format a number of steps; ``>= last`` if it reaches the whole sequence, ``unknown`` for NaN."""
    return "unknown" if math.isnan(count) else f">= {last}" if count >= last else f"{count:.0f}"


def sentence(portrait: Portrait) -> str:
    """Return the first sentence of the diagnosis, and the accuracy before and after training."""
    before, after = portrait.accuracy
    said = next(iter(portrait.diagnosis.sentences.values()))
    return f"{said} Accuracy {percent(before)} → {percent(after)}."


#: Names of the two traces in figures.
MOMENTS = ("before training", "after training")


def draw(portraits: Sequence[Portrait], folder: Path) -> list[Path]:
    """Write the figures and return their paths.

    They show the gradient by step for all networks, and by unit, by sample and with the diagnosis for each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"gradient-by-step.svg": draw_steps(portraits)}
    figures |= {"gradient-by-step-narrow.svg": draw_steps(portraits, narrow=True)}
    figures |= {f"{portrait.layer}-before-after.png": draw_units(portrait) for portrait in portraits}
    figures |= {f"{portrait.layer}-samples.png": draw_samples(portrait) for portrait in portraits}
    figures |= {f"{p.layer}-diagnosis.png": plot.diagnosis(p.diagnosis)[0].figure for p in portraits}
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110)
    return [folder / name for name in figures]


def draw_steps(portraits: Sequence[Portrait], narrow: bool = False) -> Figure:
    """Draw the total gradient at each step before the answer, a panel per network; stacked if ``narrow``."""
    traces = {moment: {p.kind: p.traces[i][p.layer] for p in portraits} for i, moment in enumerate(MOMENTS)}
    paper = Figure((3.9, 2.2 * len(portraits) + 1.2), layout="constrained") if narrow else None
    drawn = plot.gradient_flow(traces, title="Gradient of the loss at each step before the answer", figure=paper)
    last = int(next(iter(portraits)).diagnosis["model"]["steps"]) - 1
    lags = range(0, last + 1, 20 if last > 30 else 5)
    for ax in drawn:
        ax.set_xticks([last - lag for lag in lags], labels=[str(lag) for lag in lags])
        if ax.get_xlabel():
            ax.set_xlabel("steps before the answer", fontsize="small")
    figure: Figure = drawn.figure
    return figure


def draw_units(portrait: Portrait) -> Figure:
    """Draw units by time, before and after: the RMS over held-out digits, each digit divided by its own peak."""
    before, after = (seen[portrait.layer] for seen in portrait.traces)
    title = f"{portrait.kind}: total gradient of the hidden state, RMS over {len(portrait.losses)} digits"
    drawn = plot.before_after(before, after, samples="rms", names=MOMENTS, log=True, title=title)
    figure: Figure = drawn.figure
    return figure


def draw_samples(portrait: Portrait) -> Figure:
    """Draw units by time for single digits, named with their losses; the typical digit comes first."""
    before, after = (seen[portrait.layer] for seen in portrait.traces)
    title = f"{portrait.kind}: total gradient of the hidden state, single digits"
    look: dict[str, Any] = {"names": MOMENTS, "log": True, "max_rows": 3, "title": title}
    drawn = plot.before_after(before, after, losses=portrait.losses, **look)
    figure: Figure = drawn.figure
    return figure
