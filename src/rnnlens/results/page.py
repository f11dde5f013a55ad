"""HTML of results in a notebook, and the curve of each layer that summarises a result in it, in text and in JSON.

The HTML loads nothing and runs no script. Colours follow the surrounding theme. Without styles, as in a mail, the text
is complete and in the same order.
"""

from __future__ import annotations

import html
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
from .encoding import plain

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
    over
        Name of the horizontal axis: ``"time step"``, ``"lag"``, ``"training step"``.
    peak
        Largest value before the curve was divided by it.
    log
        Whether the curve is drawn on a logarithmic scale.
    """

    label: str
    over: str
    values: Array
    peak: float
    log: bool = True

    def blocks(self, width: int = 32) -> str:
        """Format the curve as a line of block characters, ``width`` characters long."""
        return blocks(self.values, width, decades=DECADES if self.log else None)

    def svg(self) -> str:
        """Draw the curve as inline SVG."""
        scale = f", {DECADES} decades" if self.log else ""
        return svg(self.values, f"{self.label} over {self.over}{scale}", decades=DECADES if self.log else None)

    def to_json(self) -> dict[str, Any]:
        """Return the curve as plain numbers, with None for values that are not finite."""
        rounded = [float(f"{v:.6g}") for v in self.values]
        return {"label": self.label, "over": self.over, "peak": plain(self.peak), "values": plain(rounded)}


def of_dataset(dataset: xr.Dataset) -> dict[str, Profile]:
    """Return the curve of a layer by direction: its gradient over time, else its states, else its curve by lag."""
    if STEP in dataset.dims:
        return _of_training(dataset)
    for name, label in (
        ("hidden_grad", "|dL/dh_t|"),
        ("output_grad", "|∂L/∂y_t|"),
        ("hidden", "|h_t|"),
        ("output", "|y_t|"),
    ):
        if name in dataset and TIME in dataset[name].dims:
            return _each_direction(dataset[name], label)
    if "kappa" in dataset:
        return _each_direction(dataset["kappa"], "state transfer", dim="lag")
    if "use" in dataset:
        values = np.asarray(dataset["use"].values, dtype=np.float64)
        return {"": Profile("use of what is older", "steps kept", values, _largest(values), log=False)}
    timed = (array for array in dataset.data_vars.values() if TIME in array.dims and array.dtype.kind == "f")
    first = next(timed, None)
    return {} if first is None else _each_direction(first, str(first.attrs.get("long_name", first.name)))


def _of_training(dataset: xr.Dataset) -> dict[str, Profile]:
    """Return the curves of a training: the gradient over time in the last record, and the reach over all records."""
    found = {}
    if "adjoint_profile" in dataset and dataset.sizes[STEP]:
        last = dataset["adjoint_profile"].isel({STEP: -1})
        found = {f"last record{f', {way}' if way else ''}": p for way, p in _each_direction(last, "|dL/dh_t|").items()}
    if "reach" in dataset and dataset["reach"].dims == (STEP,):
        found["training"] = _over_training(dataset["reach"], "reach in steps")
    return found


def _over_training(array: xr.DataArray, label: str) -> Profile:
    values = np.asarray(array.values, dtype=np.float64)
    return Profile(label, "training step", values, _largest(values), log=False)


def of_array(array: xr.DataArray) -> dict[str, Profile]:
    """Return the curve of an array: of a time Jacobian its last output step, of any other its norm over time."""
    if IN_TIME in array.dims:
        last = array.isel({OUT_TIME: -1}) if OUT_TIME in array.dims else array
        return {"": _profile(last, "last output step by input step", IN_TIME)}
    if array.dims == (STEP,):
        return {"": _over_training(array, str(array.name))}
    if TIME in array.dims and array.dtype.kind == "f":
        return _each_direction(array, f"|{array.name}|" if array.name else "norm")
    return {}


def curves_of(part: xr.Dataset | xr.DataArray | None) -> dict[str, Profile]:
    """Return the curve of a layer's Dataset or of an array; empty for None."""
    if part is None:
        return {}
    return of_dataset(part) if isinstance(part, xr.Dataset) else of_array(part)


def _each_direction(array: xr.DataArray, label: str, dim: str = TIME) -> dict[str, Profile]:
    if DIRECTION not in array.dims:
        return {"": _profile(array, label, dim)}
    names = [str(d) for d in array[DIRECTION].values] if DIRECTION in array.coords else ["forward", "backward"]
    return {name: _profile(array.isel({DIRECTION: i}), label, dim) for i, name in enumerate(names)}


def _profile(array: xr.DataArray, label: str, dim: str) -> Profile:
    """Compute norms over all axes but sample and ``dim``, divide each sample by its peak, and take the median."""
    if SAMPLE in array.dims and array.sizes[SAMPLE] > _SAMPLES:
        array = array.isel({SAMPLE: np.linspace(0, array.sizes[SAMPLE] - 1, _SAMPLES).astype(int)})
    rest = [str(d) for d in array.dims if d not in (SAMPLE, dim)]
    lead = [SAMPLE] if SAMPLE in array.dims else []
    values = np.asarray(array.transpose(*lead, dim, *rest).values, dtype=np.float64)
    shape = (*values.shape[: len(lead) + 1], -1)
    norms = safe_norm(values.reshape(shape), axis=-1) if rest else np.abs(values)
    norms = norms if lead else norms[None]
    peak = _largest(norms)
    relative = own_peak(norms)
    if not len(relative):
        return Profile(label, _words(dim), np.zeros(norms.shape[1]), peak)
    broken = ~np.isfinite(norms).all(axis=0)
    return Profile(label, _words(dim), np.where(broken, np.nan, finite_median(relative)), peak)


def _words(dim: str) -> str:
    return {TIME: "time step", IN_TIME: "input step", "lag": "lag"}.get(dim, dim)


def _largest(values: Array) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else float("nan")


def blocks(values: Array, width: int = 32, *, decades: float | None = None) -> str:
    """Format a curve as block characters, scaled from 0 (or ``decades`` below the largest value) to the largest.

    Steps that share a character show their largest value.

    >>> blocks([0, 1, 2, 4])
    '▁▃▅█'
    >>> blocks([1, 1e-1, 1e-2, 1e-9, float("nan")], decades=4)
    '█▆▅·✗'
    """
    merged = _merged(np.asarray(values, dtype=np.float64), width)
    shares = _shares(merged, decades)
    last = len(BLOCKS) - 1
    return "".join(
        BROKEN if math.isnan(share) else BELOW if share < 0 else BLOCKS[min(last, round(share * last))]
        for share in shares
    )


def svg(values: Array, title: str, *, decades: float | None = None) -> str:
    """Format a curve as an inline SVG line; values that are not finite are gaps with a red mark at the bottom."""
    width, height = 160, 28
    shares = _shares(_merged(np.asarray(values, dtype=np.float64), width), decades)
    room = width / max(len(shares) - 1, 1)
    commands, pen, feet = [], "M", []
    for place, share in enumerate(shares):
        if math.isnan(share):
            feet.append(f"M{place * room:.1f} {height}v-5")
            pen = "M"
            continue
        commands.append(f"{pen}{place * room:.1f} {1 + (1 - max(share, 0)) * (height - 2):.1f}")
        pen = "L"
    if len(commands) == 1:
        commands.append("h1")
    red = f'<path d="{"".join(feet)}" stroke="#e5484d" stroke-width="2"/>' if feet else ""
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" fill="none" '
        f'stroke="currentColor" stroke-width="1.5" stroke-linejoin="round" stroke-linecap="round">'
        f'<title>{html.escape(title)}</title><path d="{"".join(commands)}"/>{red}</svg>'
    )


def _merged(values: Array, width: int) -> Array:
    """Reduce values to at most ``width`` by the maximum of neighbours; NaN where one of them is not finite."""
    values = np.where(np.isfinite(values), values, np.nan)
    if len(values) <= width:
        return values
    return np.array([part.max() for part in np.array_split(values, width)])


def _shares(values: Array, decades: float | None) -> list[float]:
    """Scale values so that the largest is 1, for colours and heights; NaN stays NaN.

    Linear from 0, or from the lowest value if negative; with ``decades`` logarithmic, 0 that many decades below 1.
    """
    finite = values[np.isfinite(values)]
    high = float(finite.max()) if finite.size else 0.0
    if decades is None:
        low = min(float(finite.min()) if finite.size else 0.0, 0.0)
        span = high - low or 1.0
        return [float(v) if math.isnan(v) else float((v - low) / span) for v in values]
    if high <= 0:
        return [float(v) if math.isnan(v) else -1.0 for v in values]
    return [v if math.isnan(v) else 1 + math.log10(v / high) / decades if v > 0 else -1.0 for v in map(float, values)]


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
    words: str
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    inside: str = ""

    @classmethod
    def of(cls, name: str, words: str, data: xr.Dataset | xr.DataArray | None) -> Row:
        """Create the row for one part of a result, with its curves, from the part's data."""
        if data is None:
            return cls(name, words)
        inside: Any = data
        curves = {} if data.chunks else curves_of(data)  # lazy data are not computed for a page
        return cls(name, words, curves, str(inside._repr_html_()))


@dataclass(frozen=True)
class Said:
    """A finding: its severity (``"fault"``, ``"caution"``, ``"fact"``, ``"unknown"``, or ``""``), code and sentence."""

    severity: str
    code: str
    sentence: str


def page(title: str, rows: Sequence[Row], remarks: Iterable[tuple[str, str]], said: Sequence[Said] = ()) -> str:
    """Return the notebook page of a result as HTML; all text except ``Row.inside`` is escaped."""
    found = "".join(_finding(one) for one in said)
    layers = "".join(_row(row) for row in rows)
    return around(f"<strong>{html.escape(title)}</strong>{found}{layers}{_remarks(remarks)}")


def around(inside: str) -> str:
    """Wrap HTML in a ``div`` with the styles of rnnlens."""
    return f'<div class="rnnlens">{_STYLE}{inside}</div>'


def _finding(one: Said) -> str:
    code = f"<strong>{html.escape(one.code)}</strong> " if one.code else ""
    return f'<div class="rl-finding rl-{html.escape(one.severity)}">{code}{html.escape(one.sentence)}</div>'


def _row(row: Row) -> str:
    curves = "".join(_curve(direction, profile) for direction, profile in row.profiles.items())
    words = f'<span class="rl-soft">{html.escape(row.words)}</span>' if row.words else ""
    head = f'<span class="rl-row"><strong>{html.escape(row.name)}</strong> {words} {curves}</span>'
    if not row.inside:
        return f'<div style="margin-left:1.1em">{head}</div>'
    return f"<details><summary>{head}</summary>{row.inside}</details>"


def _curve(direction: str, profile: Profile) -> str:
    words = " ".join(part for part in (direction, profile.label) if part)
    peak = f"peak {profile.peak:.2g}"
    arrow = f'<br><small class="rl-soft">{html.escape(profile.over)} →</small>'
    drawn = f'<span style="display:inline-block;text-align:center;line-height:1">{profile.svg()}{arrow}</span>'
    return f'<span>{drawn} <span class="rl-soft">{html.escape(words)}, {peak}</span></span> '


def _remarks(remarks: Iterable[tuple[str, str]]) -> str:
    """Return the HTML below the layers: failures visible, all other remarks in a collapsed table."""
    rows = list(remarks)
    failed = [text for _, text in rows if text.startswith(("FAILED", "NOT certified", "WARNING"))]
    cells = "".join(f"<tr><th>{html.escape(label)}</th><td>{html.escape(text)}</td></tr>" for label, text in rows)
    bad = "".join(f'<div class="rl-bad">{html.escape(text)}</div>' for text in failed)
    if not rows:
        return ""
    return f"{bad}<details><summary class='rl-soft'>checks, notes, versions</summary><table>{cells}</table></details>"
