"""HTML of results in a notebook: heading, findings, one expandable row per layer, checks and provenance.

The HTML loads nothing and runs no script. Colours follow the surrounding theme. Without styles, as in a mail, the text
is complete and in the same order.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xarray as xr

from .profiles import Profile
from .profiles import of as curves_of

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
        """Build the row of one part of a result from its data."""
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
