"""Curves over time: a number for each sample and step, their median and quartiles over samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..typing import Array
from . import draw
from .encode import row_codes, scale_of
from .figures import Figure, Head, Over, Shown
from .tracks import binned, by_own_peak, quartiles


@dataclass(frozen=True)
class Axis:
    """The axis of values.

    Attributes
    ----------
    log
        They are sizes: shown on a logarithmic axis first, and by own peak on request.
    share
        They lie between 0 and 1.
    of_units
        By name of a curve, the map (and which of its choices) that has the same of single units.
    """

    label: str
    log: bool = False
    share: bool = False
    of_units: Mapping[str, tuple[str, int]] = field(default_factory=dict)


def lines(head: Head, named: Mapping[str, Sequence[Array]], over: Over, axis: Axis) -> Figure:
    """Curves by name, (sample, time) at one or two moments."""
    width, first = over.shown.plan.curve_bin, over.masks[0]
    held, drawn, broken = [], [], 0
    for name, moments in named.items():
        encoded = [_encoded(*_clean(v, m, width, axis.log), over.shown, axis.log) for v, m in _each(moments, over)]
        held.append({"name": name, "unit": axis.of_units.get(name), "moments": encoded})
        drawn.append(_drawn(name, moments[0], first, over.shown.telling[0]))
        broken += int((~np.isfinite(moments[0] if first is None else moments[0][first])).sum())
    spec: dict[str, Any] = {
        "track": over.track,
        "y": axis.label,
        "log": axis.log,
        "share": axis.share,
        "bin": width,
        "steps": int(next(iter(named.values()))[0].shape[1]),
        "samples": list(over.shown.curves),
        "lines": held,
    }
    drawing = draw.lines(drawn, x="time step", y=axis.label, log=axis.log, unit_range=axis.share)
    said = [f"{broken:,} values are NaN or infinite: gaps, marked red."] if broken else []
    return Figure(head, "lines", spec, drawing, said)


def _each(moments: Sequence[Array], over: Over) -> list[tuple[Array, Array | None]]:
    return list(zip(moments, over.masks, strict=True))


def _clean(values: Array, mask: Array | None, width: int, log: bool) -> tuple[Array, Array | None]:
    """Merged steps, and which of them are no data."""
    if mask is None:
        return binned(values, width, size=log), None
    return binned(np.where(mask, values, 0.0), width, size=log), binned(mask, width) == 0


def _encoded(curves: Array, padded: Array | None, shown: Shown, log: bool) -> dict[str, Any]:
    """Curves of the samples shown, and the median of all with its quartiles, as they are and each by its own peak."""
    clean = curves if padded is None else np.where(padded, np.nan, curves)
    scale, rows = scale_of(clean, log=log), np.asarray(shown.curves)
    found = {
        "scale": scale.to_json(),
        "rows": row_codes(curves[rows], scale, None if padded is None else padded[rows]),
        "band": row_codes(quartiles(clean), scale),
        "width": int(curves.shape[1]),
    }
    if log:
        relative = quartiles(by_own_peak(clean))
        own = scale_of(relative, log=True)
        found["own"] = {"scale": own.to_json(), "band": row_codes(relative, own)}
    return found


def _drawn(name: str, values: Array, mask: Array | None, sample: int) -> draw.Line:
    clean = np.asarray(values if mask is None else np.where(mask, values, np.nan), dtype=np.float64)
    low, middle, high = quartiles(clean)
    return draw.Line(name, np.arange(clean.shape[1]), clean[sample], middle, low, high)
