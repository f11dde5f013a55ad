"""Figures of a report: data for the script, and a static drawing.

``ReportFigure.kind`` selects the drawing: ``"lines"`` over time, ``"map"`` of rows over time (or over named columns),
``"jacobian"`` (output step by input step), ``"curve"`` over another axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup

from ..measures.profiles import by_own_peak, finite_quartiles
from ..typing import Array
from . import draw
from .draw import Scale, image, row_codes, scale_of
from .samples import TimeMap
from .tracks import binned

#: Largest number of units for which the recurrent kernel is drawn; more cells would be too small.
LARGEST = 512
#: Largest number of columns of the time Jacobian.
_COLUMNS = 250


@dataclass(frozen=True)
class Caption:
    """Texts of a figure: id in the page, title, a sentence, and code that draws or returns the same."""

    id: str
    title: str
    words: str = ""
    code: str = ""


@dataclass
class ReportFigure:
    """One figure: its caption, its data as JSON, and a static drawing of the first sample."""

    head: Caption
    kind: str
    spec: dict[str, Any] = field(default_factory=dict)
    drawing: Markup = field(default_factory=Markup)
    remarks: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Id of the figure in the page."""
        return self.head.id

    def to_json(self) -> dict[str, Any]:
        """Return the figure's data as JSON for the script of the page."""
        return {"id": self.id, "kind": self.kind, "title": self.head.title, **self.spec}


@dataclass(frozen=True)
class PagePlan:
    """The samples of the page, the most informative first, and how much of them is in it."""

    #: All samples, in the order in which they have priority.
    telling: tuple[int, ...]
    #: Number of samples with curves (one value per step), and number of steps merged into one.
    curve_count: int
    curve_bin: int
    #: The same for maps (one value per unit and step).
    map_count: int
    map_bin: int

    @property
    def curves(self) -> tuple[int, ...]:
        """Indices of the samples that the page shows with curves."""
        return self.telling[: self.curve_count]

    @property
    def maps(self) -> tuple[int, ...]:
        """Indices of the samples that the page shows with maps."""
        return self.telling[: self.map_count]


@dataclass(frozen=True)
class TrackSteps:
    """Time axis of a figure: number of its track, and the mask of each moment."""

    plan: PagePlan
    track: int
    masks: Sequence[Array | None]


@dataclass(frozen=True)
class ValueAxis:
    """The value axis of curves."""

    label: str
    #: Whether values are magnitudes: on a logarithmic axis, and relative to their own peak if the reader selects it.
    log: bool = False
    #: Whether the values lie between 0 and 1.
    share: bool = False
    #: By name of a curve: the map, and the choice within it, with the values of single units.
    of_units: Mapping[str, tuple[str, int]] = field(default_factory=dict)


def lines(head: Caption, named: Mapping[str, Sequence[Array]], over: TrackSteps, axis: ValueAxis) -> ReportFigure:
    """Return a figure of named curves, each (sample, time), at one moment or two (before and after training)."""
    width, first = over.plan.curve_bin, over.masks[0]
    encoded_lines, drawn, broken = [], [], 0
    for name, moments in named.items():
        merged = [_merge_steps(v, m, width, axis.log) for v, m in zip(moments, over.masks, strict=True)]
        encoded = [_encode_curves(values, padded, over.plan, axis.log) for values, padded in merged]
        encoded_lines.append({"name": name, "unit": axis.of_units.get(name), "moments": encoded})
        clean = moments[0] if first is None else np.where(first, moments[0], np.nan)
        clean, (low, middle, high) = np.asarray(clean, dtype=np.float64), finite_quartiles(clean)
        steps, sample = np.arange(clean.shape[1]), clean[over.plan.telling[0]]
        drawn.append(draw.StaticLine(name, steps, sample, middle, low, high))
        broken += int((~np.isfinite(moments[0] if first is None else moments[0][first])).sum())
    spec: dict[str, Any] = {
        "track": over.track,
        "y": axis.label,
        "log": axis.log,
        "share": axis.share,
        "bin": width,
        "steps": int(next(iter(named.values()))[0].shape[1]),
        "samples": list(over.plan.curves),
        "lines": encoded_lines,
    }
    padded = () if first is None else np.flatnonzero(~first[over.plan.telling[0]]).tolist()
    frame = draw.CurveAxes(x="time step", y=axis.label, log=axis.log, unit_range=axis.share, padded=padded)
    notes = [f"{broken:,} values are NaN or infinite: gaps, marked red."] if broken else []
    return ReportFigure(head, "lines", spec, draw.lines(drawn, frame), notes)


def _merge_steps(values: Array, mask: Array | None, width: int, log: bool) -> tuple[Array, Array | None]:
    """Merge ``width`` steps into one; also return which merged steps are padding only."""
    if mask is None:
        return binned(values, width, size=log), None
    return binned(np.where(mask, values, 0.0), width, size=log), binned(mask, width) == 0


def _encode_curves(curves: Array, padded: Array | None, plan: PagePlan, log: bool) -> dict[str, Any]:
    """Encode curves of the shown samples, and median and quartiles of all, absolute and relative to own peaks."""
    clean = curves if padded is None else np.where(padded, np.nan, curves)
    scale, rows = scale_of(clean, log=log), np.asarray(plan.curves)
    encoded = {
        "scale": scale.to_json(),
        "rows": row_codes(curves[rows], scale, None if padded is None else padded[rows]),
        "band": row_codes(finite_quartiles(clean), scale),
        "width": int(curves.shape[1]),
    }
    if log:
        relative = finite_quartiles(by_own_peak(clean))
        own = scale_of(relative, log=True)
        encoded["own"] = {"scale": own.to_json(), "band": row_codes(relative, own)}
    return encoded


@dataclass(frozen=True)
class Choice:
    """One of several maps of a figure: (sample, time, row) at each moment, with its palette."""

    name: str
    moments: Sequence[Array]
    palette: str


def maps(head: Caption, choices: Sequence[Choice], over: TrackSteps, rows: str = "unit") -> ReportFigure:
    """Return a figure of maps (time, row) of each sample; at a second moment only the first two samples have one."""
    first, sample = choices[0].moments[0], over.plan.telling[0]
    spec: dict[str, Any] = {"track": over.track, "row": rows, "bin": over.plan.map_bin, "choices": []}
    spec |= {"steps": int(first.shape[1]), "rows": int(first.shape[2])}
    mask = over.masks[0]
    padded = () if mask is None else np.flatnonzero(~mask[sample]).tolist()
    drawings, broken = [], 0
    for place, choice in enumerate(choices):
        tables = []
        for number, (values, real) in enumerate(zip(choice.moments, over.masks, strict=True)):
            kept = over.plan.maps[: 2 if number else None]
            tables.append({one: _encode_map(values, real, one, over, choice.palette) for one in kept})
        url, scale, missing = tables[0][sample]
        axes = draw.ImageAxes("time step", rows, choice.moments[0].shape[2], spec["steps"], padded=padded)
        label, id = choice.name if len(choices) > 1 else "", f"{head.id}-{place}"
        drawings.append(draw.picture(url, id, scale, axes, palette=choice.palette, label=label))
        tables[0][sample] = ("", scale, missing)  # the script reads it from the drawing
        moments = [{str(one): [url, scale.to_json()] for one, (url, scale, _) in table.items()} for table in tables]
        spec["choices"].append({"name": choice.name, "palette": choice.palette, "moments": moments})
        broken += missing
    notes = [f"{broken:,} values of this sample are NaN or infinite: red."] if broken else []
    return ReportFigure(head, "map", spec, Markup("").join(drawings), notes)


def _encode_map(
    values: Array, mask: Array | None, sample: int, over: TrackSteps, palette: str
) -> tuple[str, Scale, int]:
    """Encode one sample's (time, row) values as an image; return its URL, scale, and count of non-finite values."""
    width, one = over.plan.map_bin, values[sample : sample + 1]
    padded = None
    if mask is not None:
        real = mask[sample : sample + 1]
        one, padded = np.where(real[:, :, None], one, 0.0), binned(real, width)[0] == 0
    table = binned(np.abs(one) if palette == "size" else one, width, size=palette == "size")[0].T
    scale = Scale(0.0, 1.0)
    if palette != "gate":
        scale = scale_of(table, log=palette == "size", signed=palette == "signed")
    return image(table, palette, scale, padded), scale, int((~np.isfinite(table)).sum())


def of_units(head: Caption, table: Array, columns: Sequence[str], track: int) -> ReportFigure:
    """Return a map of units (rows) over named columns, such as norms of weights, or over the units themselves."""
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
    axes = draw.ImageAxes("" if columns else "from unit", "unit", len(table), int(table.shape[1]), columns)
    drawing = draw.picture(image(table, "size", scale), f"{head.id}-0", scale, axes, palette="size")
    return ReportFigure(head, "map", spec, drawing)


def jacobian(found: TimeMap) -> ReportFigure:
    """Return the figure of the time Jacobian: norms on a logarithmic scale, future inputs hatched."""
    width = max(1, -(-found.norms.shape[1] // _COLUMNS))
    table, first = binned(found.norms, width, size=True), found.in_times[::width]
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
        "averaged": found.samples,
        "scale": scale.to_json(),
        "png": "" if several else url,  # the script reads it from the drawing
    }
    if several:
        axes = draw.ImageAxes("input step", "output step", len(table), steps, (), found.out_times, found.causal)
        drawing = draw.picture(url, "jacobian-0", scale, axes, palette="size")
    else:
        line = draw.StaticLine("norm", np.asarray(found.in_times, dtype=np.float64), found.norms[0])
        drawing = draw.lines([line], draw.CurveAxes(x="input step", y="norm", log=True))
    words = f"{found.words[:1].upper()}{found.words[1:]}."
    head = Caption("jacobian", "Output step by input step", words, found.code)
    figure = ReportFigure(head, "jacobian", spec, drawing)
    if width > 1:
        figure.remarks.append(f"{width} input steps are one column: root mean square.")
    if several and len(found.out_times) < steps:
        figure.remarks.append(f"{len(found.out_times)} of {steps} output steps.")
    return figure
