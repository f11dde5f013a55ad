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
from .draw import Scale, png_url, row_codes, scale_of
from .samples import TimeMap
from .tracks import merge_steps

#: Largest number of units for which the recurrent kernel is drawn; more cells would be too small.
MAX_KERNEL_UNITS = 512
#: Largest number of columns of the time Jacobian.
_MAX_COLUMNS = 250


@dataclass(frozen=True)
class Caption:
    """Texts of a figure: id in the page, title, a sentence, and code that draws or returns the same."""

    id: str
    title: str
    sentence: str = ""
    code: str = ""


@dataclass
class ReportFigure:
    """One figure: its caption, its data as JSON, and a static drawing of the first sample."""

    caption: Caption
    kind: str
    spec: dict[str, Any] = field(default_factory=dict)
    drawing: Markup = field(default_factory=Markup)
    remarks: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Id of the figure in the page."""
        return self.caption.id

    def to_json(self) -> dict[str, Any]:
        """Return the figure's data as JSON for the script of the page."""
        return {"id": self.id, "kind": self.kind, "title": self.caption.title, **self.spec}


@dataclass(frozen=True)
class PagePlan:
    """The samples of the page, the most informative first, and how much of them is in it."""

    #: All samples, in the order in which they have priority.
    priority_order: tuple[int, ...]
    #: Number of samples with curves (one value per step), and number of steps merged into one.
    curve_count: int
    curve_bin: int
    #: The same for maps (one value per unit and step).
    map_count: int
    map_bin: int

    @property
    def curves(self) -> tuple[int, ...]:
        """Indices of the samples that the page shows with curves."""
        return self.priority_order[: self.curve_count]

    @property
    def maps(self) -> tuple[int, ...]:
        """Indices of the samples that the page shows with maps."""
        return self.priority_order[: self.map_count]


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
    unit_maps: Mapping[str, tuple[str, int]] = field(default_factory=dict)


def lines(
    caption: Caption, moments_by_name: Mapping[str, Sequence[Array]], track_steps: TrackSteps, axis: ValueAxis
) -> ReportFigure:
    """Return a figure of named curves, each (sample, time), at one moment or two (before and after training)."""
    bin_width, first_mask = track_steps.plan.curve_bin, track_steps.masks[0]
    encoded_lines, static_lines, nonfinite_count = [], [], 0
    for name, moments in moments_by_name.items():
        merged_moments = [
            _merge_masked_steps(v, mask, bin_width, axis.log)
            for v, mask in zip(moments, track_steps.masks, strict=True)
        ]
        encoded_moments = [
            _encode_curves(values, padded, track_steps.plan, axis.log) for values, padded in merged_moments
        ]
        encoded_lines.append({"name": name, "unit": axis.unit_maps.get(name), "moments": encoded_moments})
        clean_values = moments[0] if first_mask is None else np.where(first_mask, moments[0], np.nan)
        clean_values, (low, median_curve, high) = (
            np.asarray(clean_values, dtype=np.float64),
            finite_quartiles(clean_values),
        )
        steps, sample = np.arange(clean_values.shape[1]), clean_values[track_steps.plan.priority_order[0]]
        static_lines.append(draw.StaticLine(name, steps, sample, median_curve, low, high))
        nonfinite_count += int((~np.isfinite(moments[0] if first_mask is None else moments[0][first_mask])).sum())
    spec: dict[str, Any] = {
        "track": track_steps.track,
        "y": axis.label,
        "log": axis.log,
        "share": axis.share,
        "bin": bin_width,
        "steps": int(next(iter(moments_by_name.values()))[0].shape[1]),
        "samples": list(track_steps.plan.curves),
        "lines": encoded_lines,
    }
    padded = () if first_mask is None else np.flatnonzero(~first_mask[track_steps.plan.priority_order[0]]).tolist()
    curve_axes = draw.CurveAxes(x="time step", y=axis.label, log=axis.log, unit_range=axis.share, padded=padded)
    notes = [f"{nonfinite_count:,} values are NaN or infinite: gaps, marked red."] if nonfinite_count else []
    return ReportFigure(caption, "lines", spec, draw.lines(static_lines, curve_axes), notes)


def _merge_masked_steps(values: Array, mask: Array | None, width: int, log: bool) -> tuple[Array, Array | None]:
    """Merge ``width`` steps into one; also return which merged steps are padding only."""
    if mask is None:
        return merge_steps(values, width, as_rms=log), None
    return merge_steps(np.where(mask, values, 0.0), width, as_rms=log), merge_steps(mask, width) == 0


def _encode_curves(curves: Array, padded: Array | None, plan: PagePlan, log: bool) -> dict[str, Any]:
    """Encode curves of the shown samples, and median and quartiles of all, absolute and relative to own peaks."""
    clean_curves = curves if padded is None else np.where(padded, np.nan, curves)
    scale, rows = scale_of(clean_curves, log=log), np.asarray(plan.curves)
    encoded_curves = {
        "scale": scale.to_json(),
        "rows": row_codes(curves[rows], scale, None if padded is None else padded[rows]),
        "band": row_codes(finite_quartiles(clean_curves), scale),
        "width": int(curves.shape[1]),
    }
    if log:
        relative_quartiles = finite_quartiles(by_own_peak(clean_curves))
        relative_scale = scale_of(relative_quartiles, log=True)
        encoded_curves["own"] = {
            "scale": relative_scale.to_json(),
            "band": row_codes(relative_quartiles, relative_scale),
        }
    return encoded_curves


def curve_figure(caption: Caption, static_lines: Sequence[draw.StaticLine], axes: draw.CurveAxes) -> ReportFigure:
    """Return a figure of curves over an axis other than time: lags, steps kept, training steps."""
    encoded_lines = []
    for line in static_lines:
        arrays = {"x": line.x, "y": line.y, "low": line.low, "high": line.high}
        rounded_values = {
            key: [float(f"{v:.5g}") for v in values] for key, values in arrays.items() if values is not None
        }
        encoded_lines.append({"name": line.name, **rounded_values})
    marks, levels = [list(mark) for mark in axes.marks], [list(level) for level in axes.levels]
    spec: dict[str, Any] = {
        "x": axes.x,
        "y": axes.y,
        "log": axes.log,
        "marks": marks,
        "levels": levels,
        "lines": encoded_lines,
    }
    return ReportFigure(caption, "curve", spec, draw.lines(static_lines, axes))


@dataclass(frozen=True)
class Choice:
    """One of several maps of a figure: (sample, time, row) at each moment, with its palette."""

    name: str
    moments: Sequence[Array]
    palette: str


def maps(caption: Caption, choices: Sequence[Choice], track_steps: TrackSteps, row_name: str = "unit") -> ReportFigure:
    """Return a figure of maps (time, row) of each sample; at a second moment only the first two samples have one."""
    first_values, sample = choices[0].moments[0], track_steps.plan.priority_order[0]
    spec: dict[str, Any] = {"track": track_steps.track, "row": row_name, "bin": track_steps.plan.map_bin, "choices": []}
    spec |= {"steps": int(first_values.shape[1]), "rows": int(first_values.shape[2])}
    mask = track_steps.masks[0]
    padded = () if mask is None else np.flatnonzero(~mask[sample]).tolist()
    drawings, nonfinite_count = [], 0
    for choice_index, choice in enumerate(choices):
        tables = []
        for moment_index, (values, step_mask) in enumerate(zip(choice.moments, track_steps.masks, strict=True)):
            mapped_samples = track_steps.plan.maps[: 2 if moment_index else None]
            tables.append(
                {
                    shown_sample: _encode_map(values, step_mask, shown_sample, track_steps, choice.palette)
                    for shown_sample in mapped_samples
                }
            )
        url, scale, missing_count = tables[0][sample]
        axes = draw.ImageAxes("time step", row_name, choice.moments[0].shape[2], spec["steps"], padded=padded)
        label, id = choice.name if len(choices) > 1 else "", f"{caption.id}-{choice_index}"
        drawings.append(draw.picture(url, id, scale, axes, palette=choice.palette, label=label))
        tables[0][sample] = ("", scale, missing_count)  # the script reads it from the drawing
        moments = [
            {str(shown_sample): [url, scale.to_json()] for shown_sample, (url, scale, _) in table.items()}
            for table in tables
        ]
        spec["choices"].append({"name": choice.name, "palette": choice.palette, "moments": moments})
        nonfinite_count += missing_count
    notes = [f"{nonfinite_count:,} values of this sample are NaN or infinite: red."] if nonfinite_count else []
    return ReportFigure(caption, "map", spec, Markup("").join(drawings), notes)


def _encode_map(
    values: Array, mask: Array | None, sample: int, track_steps: TrackSteps, palette: str
) -> tuple[str, Scale, int]:
    """Encode one sample's (time, row) values as an image; return its URL, scale, and count of non-finite values."""
    bin_width, sample_values = track_steps.plan.map_bin, values[sample : sample + 1]
    padded = None
    if mask is not None:
        sample_mask = mask[sample : sample + 1]
        sample_values = np.where(sample_mask[:, :, None], sample_values, 0.0)
        padded = merge_steps(sample_mask, bin_width)[0] == 0
    table = merge_steps(
        np.abs(sample_values) if palette == "size" else sample_values, bin_width, as_rms=palette == "size"
    )[0].T
    scale = Scale(0.0, 1.0)
    if palette != "gate":
        scale = scale_of(table, log=palette == "size", signed=palette == "signed")
    return png_url(table, palette, scale, padded), scale, int((~np.isfinite(table)).sum())


def unit_map(caption: Caption, table: Array, columns: Sequence[str], track: int) -> ReportFigure:
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
    drawing = draw.picture(png_url(table, "size", scale), f"{caption.id}-0", scale, axes, palette="size")
    return ReportFigure(caption, "map", spec, drawing)


def jacobian(time_map: TimeMap) -> ReportFigure:
    """Return the figure of the time Jacobian: norms on a logarithmic scale, future inputs hatched."""
    bin_width = max(1, -(-time_map.norms.shape[1] // _MAX_COLUMNS))
    table, first_times = merge_steps(time_map.norms, bin_width, as_rms=True), time_map.in_times[::bin_width]
    is_later = first_times[None, :] > time_map.out_times[:, None]
    scale = scale_of(np.where(is_later, 0.0, table) if time_map.causal else table, log=True)
    url = png_url(table, "size", scale)
    steps, has_rows = int(time_map.in_times[-1]) + 1, len(time_map.out_times) > 1
    spec: dict[str, Any] = {
        "track": None,
        "bin": bin_width,
        "rows": int(table.shape[0]),
        "width": int(table.shape[1]),
        "steps": steps,
        "out": [int(t) for t in time_map.out_times],
        "first": [int(t) for t in first_times],
        "causal": time_map.causal,
        "averaged": time_map.samples,
        "scale": scale.to_json(),
        "png": "" if has_rows else url,  # the script reads it from the drawing
    }
    if has_rows:
        axes = draw.ImageAxes(
            "input step", "output step", len(table), steps, (), time_map.out_times, time_map.causal, upward=True
        )
        drawing = draw.picture(url, "jacobian-0", scale, axes, palette="size")
    else:
        line = draw.StaticLine("norm", np.asarray(time_map.in_times, dtype=np.float64), time_map.norms[0])
        drawing = draw.lines([line], draw.CurveAxes(x="input step", y="norm", log=True))
    sentence = f"{time_map.description[:1].upper()}{time_map.description[1:]}."
    caption = Caption("jacobian", "Output step by input step", sentence, time_map.code)
    figure = ReportFigure(caption, "jacobian", spec, drawing)
    if bin_width > 1:
        figure.remarks.append(f"{bin_width} input steps are one column: root mean square.")
    if has_rows and len(time_map.out_times) < steps:
        figure.remarks.append(f"{len(time_map.out_times)} of {steps} output steps.")
    return figure
