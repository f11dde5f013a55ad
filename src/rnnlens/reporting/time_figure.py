"""The time Jacobian as a figure: output steps down, input steps across; white is vanished, hatched cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..typing import Array
from . import draw
from .encode import image, scale_of
from .figures import Figure, Head
from .time_map import TimeMap

#: Columns, at most.
_COLUMNS = 250


def jacobian(found: TimeMap) -> Figure:
    """Norms on a logarithmic scale; steps that cannot matter, since they come later, are no data."""
    width = max(1, -(-found.norms.shape[1] // _COLUMNS))
    table = _merged(found.norms, width)
    first = found.in_times[::width]
    later = first[None, :] > found.out_times[:, None]
    scale = scale_of(np.where(later, 0.0, table) if found.causal else table, log=True)
    url = image(table, "size", scale)
    steps, several = int(found.in_times[-1]) + 1, len(found.out_times) > 1
    spec: dict[str, Any] = {
        "track": None,
        "bin": width,
        "rows": int(table.shape[0]),
        "width": int(table.shape[1]),
        "steps": steps,
        "out": [int(t) for t in found.out_times],
        "first": [int(t) for t in first],
        "causal": found.causal,
        "scale": scale.to_json(),
        "png": "" if several else url,  # the script reads it out of the drawing
    }
    if several:
        axes = draw.Axes("input step", "output step", len(table), steps, (), found.out_times, found.causal)
        drawing = draw.picture(url, "jacobian-0", scale, axes, palette="size")
    else:
        line = draw.Line("norm", np.asarray(found.in_times, dtype=np.float64), found.norms[0])
        drawing = draw.lines([line], x="input step", y="norm", log=True)
    words = f"{found.words[:1].upper()}{found.words[1:]}."
    figure = Figure(Head("jacobian", "Output step by input step", words, found.code), "jacobian", spec, drawing)
    if width > 1:
        figure.remarks.append(f"{width} input steps are one column: root mean square.")
    if several and len(found.out_times) < steps:
        figure.remarks.append(f"{len(found.out_times)} of {steps} output steps.")
    return figure


def _merged(norms: Array, width: int) -> Array:
    if width == 1:
        return norms
    starts = np.arange(0, norms.shape[1], width)
    counts = np.diff([*starts, norms.shape[1]])
    found: Array = np.sqrt(np.add.reduceat(norms**2, starts, axis=1) / counts)
    return found
