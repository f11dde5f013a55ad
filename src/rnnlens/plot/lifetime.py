"""``memory_lifetime``: what the forget gates of a unit keep, against what really arrives."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.collections import PathCollection

from ..errors import InputError, message
from ..measures.lifetime import kept_by_gates, own_diagonal
from ..measures.samples import finite_median
from ..vocabulary import BACKWARD, DIRECTION, GATE, IN_FEATURE, OUT_TIME, OUT_UNIT, SAMPLE, TIME
from ._colour import line_colours
from ._data import Numbers, labelled, names_of, nonfinite_note, positions, require_dim
from ._door import figure as figure_door
from ._keywords import checked
from ._layers import dataset_of, variable
from ._marks import log_ticks, power_of_ten
from ._panels import Grid, open_panels

#: Gates that keep a state, in the order in which they are looked for.
KEEPING = ("forget", "update")
#: Below this share nothing is left that could be told apart.
_DEEPEST = 1e-12


@figure_door()
def memory_lifetime(
    layer: Any,
    jacobian: Any,
    *,
    max_lines: int = 3,
    title: str | None = None,
    ax: Any = None,
    figure: Any = None,
    **point: Any,
) -> Any:
    """Draw, unit by unit, the product of its forget gates against the measured dc_t/dc_0.

    The product is what the gates by themselves keep of the initial state. On the dashed line it is all that arrives;
    above it more does, through the gates' own dependence on the state; below it something takes it away. Medians over
    samples; a colour for each time step t.

    Parameters
    ----------
    layer : (sample, time, gate, unit), also with direction
        A layer of a trace with a ``forget`` gate (LSTM) or an ``update`` gate (GRU); its mask is obeyed.
    jacobian : (sample, out_time, out_unit, in_feature)
        ``rl.jacobian(model, x, of="lstm.cell", wrt="lstm.initial_cell")`` of the same batch; of a GRU ``hidden`` and
        ``initial_hidden``. With ``at={"out_time": [...]}`` of some steps only.
    max_lines
        At most so many time steps, evenly spaced, the last among them.
    title
        Instead of the one made from the labels.
    ax, figure
        Axes, one per direction, or a Figure or SubFigure to draw into.
    **point
        Properties of matplotlib's PathCollection, the points.

    Returns
    -------
    1-D array of Axes, forward before backward

    Raises
    ------
    InputError
        If there is no gate that keeps, the two do not fit each other, or a keyword is unknown.
    """
    keywords = checked(point, PathCollection, figure="memory_lifetime", extra=("marker", "s"))
    gates = labelled(variable(layer, "gates", "memory_lifetime"), "memory_lifetime")
    require_dim(gates, GATE, "memory_lifetime")
    keep = next((name for name in KEEPING if name in names_of(gates, GATE)), None)
    if keep is None:
        expected = "a forget gate (LSTM) or an update gate (GRU)"
        got = f"gates {', '.join(names_of(gates, GATE))}"
        raise InputError(message("No gate of this cell keeps its state.", got=got, expected=expected))
    array = labelled(jacobian, "memory_lifetime", guess={4: (SAMPLE, OUT_TIME, OUT_UNIT, IN_FEATURE)})
    ways = names_of(gates, DIRECTION) if DIRECTION in gates.dims else [None]
    mask = _mask(layer, gates)
    panels = open_panels(1, name="memory_lifetime", grid=Grid((3.6, 3.5)), halves=ways, ax=ax, figure=figure)
    for number, (place, way) in enumerate(zip(panels.axes, ways, strict=True)):
        kept, arrived, steps = _values(gates, array, keep, number if way else None, mask, most=max_lines)
        _draw(place, kept, arrived, steps, keywords)
    symbol = "c" if keep == "forget" else "h"
    words = f"product of the {keep} gates up to t"
    panels.label(words, f"$|\\partial{{}}{symbol}_t/\\partial{{}}{symbol}_0|$ of the same unit")
    head = " · ".join(str(part) for part in (gates.attrs.get("layer"), "memory lifetime") if part)
    count = gates.sizes.get(SAMPLE, 1)
    note = f"median over {count} samples, a point per unit" if count > 1 else "a point per unit"
    panels.title(title or head, [note, nonfinite_note(array.values), nonfinite_note(gates.sel({GATE: keep}).values)])
    return panels.result()


def _mask(layer: Any, gates: xr.DataArray) -> Numbers | None:
    dataset = dataset_of(layer)
    if dataset is None or "mask" not in dataset or SAMPLE not in gates.dims:
        return None
    return np.asarray(dataset["mask"].transpose(SAMPLE, TIME).values != 0)


def _values(
    gates: xr.DataArray, array: xr.DataArray, keep: str, half: int | None, mask: Numbers | None, *, most: int
) -> tuple[Numbers, Numbers, Numbers]:
    """(step, unit) of what is kept and of what arrives, and the steps."""
    backward = half is not None and names_of(gates, DIRECTION)[half] == BACKWARD
    backward = backward or (half is None and gates.attrs.get("direction") == BACKWARD)
    if half is not None:
        gates = gates.isel({DIRECTION: half})
        own = {dim: half for dim in (DIRECTION, f"in_{DIRECTION}") if dim in array.dims}
        array = array.isel(own)
    unit = next(str(d) for d in gates.dims if d not in (SAMPLE, TIME, GATE))
    lead = [SAMPLE] if SAMPLE in gates.dims else []
    forget = gates.sel({GATE: keep}).transpose(*lead, TIME, unit).values
    forget = forget if lead else forget[None]
    against = slice(None, None, -1) if backward else slice(None)
    kept = kept_by_gates(forget[:, against], None if mask is None else mask[:, against])[:, against]
    sources = [str(d) for d in array.dims if d not in (SAMPLE, OUT_TIME, OUT_UNIT)]
    if OUT_TIME not in array.dims or OUT_UNIT not in array.dims or len(sources) != 1:
        _refuse(array)
    lead = [SAMPLE] if SAMPLE in array.dims else []
    whole = array.transpose(*lead, OUT_TIME, OUT_UNIT, sources[0]).values
    arrived = np.abs(own_diagonal(whole if lead else whole[None]))
    steps = positions(array, OUT_TIME)
    if arrived.shape[2] != kept.shape[2] or arrived.shape[0] != kept.shape[0] or steps.max() >= kept.shape[1]:
        _refuse(array)
    places = np.linspace(-1, len(steps) - 1, min(most, len(steps)) + 1)[1:]
    chosen = sorted({round(place) for place in places})
    at = np.array(chosen)
    found = _median(kept[:, steps[at].astype(int)]), _median(arrived[:, at])
    return *found, steps[at]


def _median(values: Numbers) -> Numbers:
    """Median over samples, NaN where any sample is not finite: it must be seen."""
    return np.where(np.isfinite(values).all(axis=0), finite_median(values), np.nan)


def _refuse(array: xr.DataArray) -> None:
    raise InputError(
        message(
            "The Jacobian does not fit the gates.",
            got=f"dimensions {dict(array.sizes)}",
            expected="(sample, out_time, out_unit, in_feature) of one state and the same batch",
            hint='rl.jacobian(model, x, of="lstm.cell", wrt="lstm.initial_cell")',
        )
    )


def _draw(ax: Any, kept: Numbers, arrived: Numbers, steps: Numbers, keywords: dict[str, Any]) -> None:
    """Points of all units, a colour per step; what is too small lies at the border."""
    values = np.concatenate([kept.reshape(-1), arrived.reshape(-1)])
    positive = values[np.isfinite(values) & (values > 0)]
    low = max(float(positive.min(initial=1.0)), _DEEPEST) / 3
    high = max(float(positive.max(initial=1.0)), 1.0) * 3
    size = float(np.clip(1500 / kept.shape[1], 4, 26))
    deep = False
    for x, y, step, colour in zip(kept, arrived, steps, line_colours(len(steps)), strict=True):
        seen = np.isfinite(x) & np.isfinite(y)
        deep = deep or bool((np.minimum(x, y)[seen] < low).any())
        look = {"s": size, "color": colour, "alpha": 0.7, "linewidth": 0, "label": f"t = {step:g}", "zorder": 3}
        points = np.maximum(x[seen], low), np.maximum(y[seen], low)
        ax.scatter(*points, **{"gid": f"units {step:g}", "clip_on": False, **look, **keywords})
        if not seen.all():
            ax.plot(np.maximum(x[~seen], low), np.full((~seen).sum(), low), "x", color="black", gid="non-finite")
    ax.plot([low, high], [low, high], color="0.4", linewidth=0.9, linestyle="--", zorder=1, gid="identity")
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in ("x", "y"):
        log_ticks(ax, axis, most=5)
    if deep:
        ax.annotate(f"at the border: below {power_of_ten(low)}", (0.97, 0.02), xycoords="axes fraction",
                    ha="right", va="bottom", fontsize="x-small", gid="below")  # fmt: skip
    ax.legend(fontsize="x-small", loc="upper left")
    ax.tick_params(labelsize="small")
