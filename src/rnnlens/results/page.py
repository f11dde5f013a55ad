"""HTML of results in a notebook, and the curve of each layer that summarises a result in it, in text and in JSON.

The HTML loads nothing and runs no script. Colours follow the surrounding theme. Without styles, as in a mail, the text
is complete and in the same order. A notebook shows an interactive view in its place, where there is one.
"""

from __future__ import annotations

import html
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from ..measures.profiles import finite_median, own_peak
from ..recurrence.measures import safe_norm
from ..typing import Array
from ..vocabulary import DIRECTION, IN_TIME, OUT_TIME, SAMPLE, TIME
from .encoding import to_strict_json
from .schema import state_of

#: Module that makes interactive views. It is imported by name on first display, since its pages are made of results.
_VIEWS = "rnnlens.reporting.notebook"
#: Name of the dimension of a training's records.
STEP = "step"
#: Number of decades below the peak that a logarithmic curve shows.
DECADES = 6
#: Largest number of samples, evenly chosen, in the median of a curve.
_SAMPLES = 64
BLOCKS = "▁▂▃▄▅▆▇█"
#: Characters for values below the smallest block, and for values that are not finite.
BELOW, BROKEN = "·", "✗"


@dataclass(frozen=True)
class Profile:
    """Curve over steps.

    Attributes
    ----------
    label
        Name of the curve, such as ``"|dL/dh_t|"``.
    axis_label
        Name of the horizontal axis: ``"time step"``, ``"lag"``, ``"training step"``.
    peak
        Largest value before the curve was divided by it.
    log
        Whether the curve is drawn on a logarithmic scale.
    """

    label: str
    axis_label: str
    values: Array
    peak: float
    log: bool = True

    def blocks(self, width: int = 32) -> str:
        """Format the curve as a line of block characters, ``width`` characters long."""
        return blocks(self.values, width, decades=DECADES if self.log else None)

    def svg(self) -> str:
        """Draw the curve as inline SVG."""
        scale = f", {DECADES} decades" if self.log else ""
        return svg(self.values, f"{self.label} over {self.axis_label}{scale}", decades=DECADES if self.log else None)

    def to_json(self) -> dict[str, Any]:
        """Return the curve as plain numbers, with None for values that are not finite."""
        rounded = [float(f"{v:.6g}") for v in self.values]
        return {
            "label": self.label,
            "over": self.axis_label,
            "peak": to_strict_json(self.peak),
            "values": to_strict_json(rounded),
        }


def dataset_curves(dataset: xr.Dataset) -> dict[str, Profile]:
    """Return the curve of a layer by direction: its gradient over time, else its states, else its curve by lag."""
    if STEP in dataset.dims:
        return _training_curves(dataset)
    state = state_of(dataset.attrs)
    symbol = "h" if state == "hidden" else state
    for name, label in (
        (f"{state}_grad", f"|dL/d{symbol}_t|"),
        ("output_grad", "|∂L/∂y_t|"),
        (state, f"|{symbol}_t|"),
        ("output", "|y_t|"),
    ):
        if name in dataset and TIME in dataset[name].dims:
            return _direction_profiles(dataset[name], label)
    if "kappa" in dataset:
        return _direction_profiles(dataset["kappa"], "state transfer", dim="lag")
    if "use" in dataset:
        values = np.asarray(dataset["use"].values, dtype=np.float64)
        return {"": Profile("use of what is older", "steps kept", values, _largest(values), log=False)}
    timed_arrays = (array for array in dataset.data_vars.values() if TIME in array.dims and array.dtype.kind == "f")
    first_timed = next(timed_arrays, None)
    return (
        {}
        if first_timed is None
        else _direction_profiles(first_timed, str(first_timed.attrs.get("long_name", first_timed.name)))
    )


def _training_curves(dataset: xr.Dataset) -> dict[str, Profile]:
    """Return the curves of a training: the gradient over time in the last record, and the reach over all records."""
    curves = {}
    if "adjoint_profile" in dataset and dataset.sizes[STEP]:
        last_profile = dataset["adjoint_profile"].isel({STEP: -1})
        curves = {
            f"last record{f', {direction}' if direction else ''}": profile
            for direction, profile in _direction_profiles(last_profile, "|dL/dh_t|").items()
        }
    if "reach" in dataset and dataset["reach"].dims == (STEP,):
        curves["training"] = _training_profile(dataset["reach"], "reach in steps")
    return curves


def _training_profile(array: xr.DataArray, label: str) -> Profile:
    values = np.asarray(array.values, dtype=np.float64)
    return Profile(label, "training step", values, _largest(values), log=False)


def array_curves(array: xr.DataArray) -> dict[str, Profile]:
    """Return the curve of an array: of a time Jacobian its last output step, of any other its norm over time."""
    if IN_TIME in array.dims:
        last_output_step = array.isel({OUT_TIME: -1}) if OUT_TIME in array.dims else array
        return {"": _profile(last_output_step, "last output step by input step", IN_TIME)}
    if array.dims == (STEP,):
        return {"": _training_profile(array, str(array.name))}
    if TIME in array.dims and array.dtype.kind == "f":
        return _direction_profiles(array, f"|{array.name}|" if array.name else "norm")
    return {}


def curves_of(data: xr.Dataset | xr.DataArray | None) -> dict[str, Profile]:
    """Return the curve of a layer's Dataset or of an array; empty for None."""
    if data is None:
        return {}
    return dataset_curves(data) if isinstance(data, xr.Dataset) else array_curves(data)


def _direction_profiles(array: xr.DataArray, label: str, dim: str = TIME) -> dict[str, Profile]:
    if DIRECTION not in array.dims:
        return {"": _profile(array, label, dim)}
    names = [str(d) for d in array[DIRECTION].values] if DIRECTION in array.coords else ["forward", "backward"]
    return {name: _profile(array.isel({DIRECTION: i}), label, dim) for i, name in enumerate(names)}


def _profile(array: xr.DataArray, label: str, dim: str) -> Profile:
    """Compute norms over all axes but sample and ``dim``, divide each sample by its peak, and take the median."""
    if SAMPLE in array.dims and array.sizes[SAMPLE] > _SAMPLES:
        array = array.isel({SAMPLE: np.linspace(0, array.sizes[SAMPLE] - 1, _SAMPLES).astype(int)})
    other_dims = [str(d) for d in array.dims if d not in (SAMPLE, dim)]
    sample_dims = [SAMPLE] if SAMPLE in array.dims else []
    values = np.asarray(array.transpose(*sample_dims, dim, *other_dims).values, dtype=np.float64)
    shape = (*values.shape[: len(sample_dims) + 1], -1)
    norms = safe_norm(values.reshape(shape), axis=-1) if other_dims else np.abs(values)
    norms = norms if sample_dims else norms[None]
    peak = _largest(norms)
    relative_norms = own_peak(norms)
    if not len(relative_norms):
        return Profile(label, _axis_name(dim), np.zeros(norms.shape[1]), peak)
    is_broken = ~np.isfinite(norms).all(axis=0)
    return Profile(label, _axis_name(dim), np.where(is_broken, np.nan, finite_median(relative_norms)), peak)


def _axis_name(dim: str) -> str:
    return {TIME: "time step", IN_TIME: "input step", "lag": "lag"}.get(dim, dim)


def _largest(values: Array) -> float:
    finite_magnitudes = np.abs(values[np.isfinite(values)])
    return float(finite_magnitudes.max()) if finite_magnitudes.size else float("nan")


def blocks(values: Array, width: int = 32, *, decades: float | None = None) -> str:
    """Format a curve as block characters, scaled from 0 (or ``decades`` below the largest value) to the largest.

    Steps that share a character show their largest value.

    >>> blocks([0, 1, 2, 4])
    '▁▃▅█'
    >>> blocks([1, 1e-1, 1e-2, 1e-9, float("nan")], decades=4)
    '█▆▅·✗'
    """
    merged_values = _merge_neighbours(np.asarray(values, dtype=np.float64), width)
    shares = _relative_heights(merged_values, decades)
    highest = len(BLOCKS) - 1
    return "".join(
        BROKEN if math.isnan(share) else BELOW if share < 0 else BLOCKS[min(highest, round(share * highest))]
        for share in shares
    )


def svg(values: Array, title: str, *, decades: float | None = None) -> str:
    """Format a curve as an inline SVG line; values that are not finite are gaps with a red mark at the bottom."""
    width, height = 160, 28
    heights = _relative_heights(_merge_neighbours(np.asarray(values, dtype=np.float64), width), decades)
    spacing = width / max(len(heights) - 1, 1)
    commands, pen, gap_marks = [], "M", []
    for index, height_share in enumerate(heights):
        if math.isnan(height_share):
            gap_marks.append(f"M{index * spacing:.1f} {height}v-5")
            pen = "M"
            continue
        commands.append(f"{pen}{index * spacing:.1f} {1 + (1 - max(height_share, 0)) * (height - 2):.1f}")
        pen = "L"
    if len(commands) == 1:
        commands.append("h1")
    gap_path = f'<path d="{"".join(gap_marks)}" stroke="#e5484d" stroke-width="2"/>' if gap_marks else ""
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" fill="none" '
        f'stroke="currentColor" stroke-width="1.5" stroke-linejoin="round" stroke-linecap="round">'
        f'<title>{html.escape(title)}</title><path d="{"".join(commands)}"/>{gap_path}</svg>'
    )


def _merge_neighbours(values: Array, width: int) -> Array:
    """Reduce values to at most ``width`` by the maximum of neighbours; NaN where one of them is not finite."""
    values = np.where(np.isfinite(values), values, np.nan)
    if len(values) <= width:
        return values
    return np.array([neighbours.max() for neighbours in np.array_split(values, width)])


def _relative_heights(values: Array, decades: float | None) -> list[float]:
    """Scale values so that the largest is 1, for colours and heights; NaN stays NaN.

    Linear from 0, or from the lowest value if negative; with ``decades`` logarithmic, 0 that many decades below 1.
    """
    finite_values = values[np.isfinite(values)]
    highest = float(finite_values.max()) if finite_values.size else 0.0
    if decades is None:
        lowest = min(float(finite_values.min()) if finite_values.size else 0.0, 0.0)
        span = highest - lowest or 1.0
        return [float(v) if math.isnan(v) else float((v - lowest) / span) for v in values]
    if highest <= 0:
        return [float(v) if math.isnan(v) else -1.0 for v in values]
    return [
        v if math.isnan(v) else 1 + math.log10(v / highest) / decades if v > 0 else -1.0 for v in map(float, values)
    ]


_STYLE = (
    "<style>"
    ".rnnlens{color:var(--jp-content-font-color0,var(--vscode-foreground,currentColor));"
    "font-family:var(--jp-content-font-family,var(--vscode-font-family,system-ui,sans-serif));font-size:13px;"
    "line-height:1.5;max-width:100%}"
    ".rnnlens summary{cursor:pointer;list-style-position:outside;margin-left:1.1em}"
    ".rnnlens .rl-row{display:inline-flex;flex-wrap:wrap;gap:0 1.2em;align-items:center;vertical-align:middle}"
    ".rnnlens .rl-soft{opacity:.7}"
    ".rnnlens svg{color:var(--jp-brand-color1,var(--vscode-charts-blue,#3b82c4));vertical-align:middle}"
    ".rnnlens table{border-collapse:collapse;margin:2px 0 2px 1.1em;background:none;color:inherit;font-size:inherit}"
    ".rnnlens th,.rnnlens td{text-align:left!important;vertical-align:top;padding:1px 12px 1px 0;border:0;"
    "background:none;color:inherit;white-space:normal}"
    ".rnnlens .rl-finding{border-left:3px solid currentColor;padding-left:8px;margin:4px 0 4px 1.1em}"
    ".rnnlens .rl-fault{border-color:#d93a3a}.rnnlens .rl-caution{border-color:#b98900}"
    ".rnnlens .rl-bad{color:#d93a3a;font-weight:600}"
    "</style>"
)


@dataclass(frozen=True)
class Row:
    """One layer on a notebook page: name, description, curves by direction, and expandable HTML."""

    name: str
    description: str
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    details_html: str = ""

    @classmethod
    def of(cls, name: str, description: str, data: xr.Dataset | xr.DataArray | None) -> Row:
        """Create the row for one part of a result, with its curves, from the part's data."""
        if data is None:
            return cls(name, description)
        contents: Any = data
        curves = {} if data.chunks else curves_of(data)  # lazy data are not computed for a page
        return cls(name, description, curves, str(contents._repr_html_()))


@dataclass(frozen=True)
class ShownFinding:
    """A finding: its severity (``"fault"``, ``"caution"``, ``"fact"``, ``"unknown"``, or ``""``), code and sentence."""

    severity: str
    code: str
    sentence: str


def result_page(
    title: str, rows: Sequence[Row], remarks: Iterable[tuple[str, str]], findings: Sequence[ShownFinding] = ()
) -> str:
    """Return the notebook page of a result as HTML; all text except ``Row.details_html`` is escaped."""
    finding_html = "".join(_finding(finding) for finding in findings)
    rows_html = "".join(_row(row) for row in rows)
    return html_with_styles(f"<strong>{html.escape(title)}</strong>{finding_html}{rows_html}{_remarks(remarks)}")


def html_with_styles(body: str) -> str:
    """Wrap HTML in a ``div`` with the styles of rnnlens."""
    return f'<div class="rnnlens">{_STYLE}{body}</div>'


def _finding(finding: ShownFinding) -> str:
    code = f"<strong>{html.escape(finding.code)}</strong> " if finding.code else ""
    return f'<div class="rl-finding rl-{html.escape(finding.severity)}">{code}{html.escape(finding.sentence)}</div>'


def _row(row: Row) -> str:
    curves = "".join(_curve(direction, profile) for direction, profile in row.profiles.items())
    description = f'<span class="rl-soft">{html.escape(row.description)}</span>' if row.description else ""
    heading = f'<span class="rl-row"><strong>{html.escape(row.name)}</strong> {description} {curves}</span>'
    if not row.details_html:
        return f'<div style="margin-left:1.1em">{heading}</div>'
    return f"<details><summary>{heading}</summary>{row.details_html}</details>"


def _curve(direction: str, profile: Profile) -> str:
    caption = " ".join(part for part in (direction, profile.label) if part)
    peak = f"peak {profile.peak:.2g}"
    arrow = f'<br><small class="rl-soft">{html.escape(profile.axis_label)} →</small>'
    figure = f'<span style="display:inline-block;text-align:center;line-height:1">{profile.svg()}{arrow}</span>'
    return f'<span>{figure} <span class="rl-soft">{html.escape(caption)}, {peak}</span></span> '


def _remarks(remarks: Iterable[tuple[str, str]]) -> str:
    """Return the HTML below the layers: failures visible, all other remarks in a collapsed table."""
    rows = list(remarks)
    failures = [text for _, text in rows if text.startswith(("FAILED", "NOT certified", "WARNING"))]
    cells = "".join(f"<tr><th>{html.escape(label)}</th><td>{html.escape(text)}</td></tr>" for label, text in rows)
    failed = "".join(f'<div class="rl-bad">{html.escape(text)}</div>' for text in failures)
    if not rows:
        return ""
    return (
        f"{failed}<details><summary class='rl-soft'>checks, notes, versions</summary><table>{cells}</table></details>"
    )


def interactive_bundle(result: Any) -> dict[str, Any]:
    """Return the interactive view of a result by MIME type; empty for a result without one, such as a lazy result.

    IPython completes an empty bundle with ``_repr_html_``, the static page.
    """
    bundle: dict[str, Any] = importlib.import_module(_VIEWS).bundle_of(result)
    return bundle


def drawn_page(result: Any) -> Any:
    """Return the figure of a result that also is a page, of a hidden attention; None for any other result."""
    return importlib.import_module(_VIEWS).drawn_page(result)
