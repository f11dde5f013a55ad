"""Maps: rows (units or features) over the steps of one sample; units over kernels; units over units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from ..typing import Array
from . import draw
from .encode import Scale, image, scale_of
from .figures import Figure, Head, Over
from .tracks import binned


@dataclass(frozen=True)
class Choice:
    """One of the maps that a figure shows in turn: (sample, time, row) at each moment, in a palette of ``encode``."""

    name: str
    moments: Sequence[Array]
    palette: str


def maps(head: Head, choices: Sequence[Choice], over: Over, rows: str = "unit") -> Figure:
    """Maps of the samples that have them; of a second moment only the most telling have one."""
    first = choices[0].moments[0]
    spec: dict[str, Any] = {"track": over.track, "row": rows, "bin": over.shown.plan.map_bin, "choices": []}
    spec |= {"steps": int(first.shape[1]), "rows": int(first.shape[2])}
    drawings, broken = [], 0
    for place, choice in enumerate(choices):
        moments: list[dict[str, Any]] = []
        for number, (values, mask) in enumerate(zip(choice.moments, over.masks, strict=True)):
            kept = over.shown.maps if number == 0 else over.shown.maps[:2]
            tables = {sample: _table(values, mask, sample, over, choice.palette) for sample in kept}
            moments.append({str(sample): [table.url, table.scale.to_json()] for sample, table in tables.items()})
        spec["choices"].append({"name": choice.name, "palette": choice.palette, "moments": moments})
        looked_at = str(over.shown.telling[0])
        table = _table(first if place == 0 else choice.moments[0], over.masks[0], int(looked_at), over, choice.palette)
        name = choice.name if len(choices) > 1 else ""
        drawings.append(_drawing(f"{head.id}-{place}", table, spec["steps"], rows, name))
        moments[0][looked_at][0] = ""  # the script reads it out of the drawing
        broken += table.broken
    said = [f"{broken:,} values of this sample are NaN or infinite: red."] if broken else []
    return Figure(head, "map", spec, Markup("").join(drawings), said)


@dataclass(frozen=True)
class _Table:
    """A map of one sample as an image."""

    url: str
    scale: Scale
    rows: int
    palette: str
    broken: int


def _table(values: Array, mask: Array | None, sample: int, over: Over, palette: str) -> _Table:
    width, one = over.shown.plan.map_bin, values[sample : sample + 1]
    padded = None
    if mask is not None:
        real = mask[sample : sample + 1]
        one, padded = np.where(real[:, :, None], one, 0.0), binned(real, width)[0] == 0
    table = binned(np.abs(one) if palette == "size" else one, width, size=palette == "size")[0].T
    scale = Scale(0.0, 1.0)
    if palette != "gate":
        scale = scale_of(table, log=palette == "size", signed=palette == "signed")
    return _Table(image(table, palette, scale, padded), scale, len(table), palette, int((~np.isfinite(table)).sum()))


def _drawing(id: str, table: _Table, steps: int, rows: str, label: str) -> Markup:
    axes = draw.Axes("time step", rows, table.rows, steps)
    return draw.picture(table.url, id, table.scale, axes, palette=table.palette, label=label)


def of_units(head: Head, table: Array, columns: Sequence[str], track: int) -> Figure:
    """A map of units (row) over columns with names, such as norms of weights; over the units themselves without."""
    scale = scale_of(table)
    spec: dict[str, Any] = {
        "track": track,
        "row": "unit",
        "bin": 1,
        "columns": list(columns),
        "square": not columns,
        "steps": int(table.shape[1]),
        "rows": int(table.shape[0]),
        "choices": [{"name": "", "palette": "size", "moments": [{"all": ["", scale.to_json()]}]}],
    }
    axes = draw.Axes("" if columns else "from unit", "unit", len(table), int(table.shape[1]), columns)
    drawing = draw.picture(image(table, "size", scale), f"{head.id}-0", scale, axes, palette="size")
    return Figure(head, "map", spec, drawing)
