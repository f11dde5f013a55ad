"""The page of a report: its sections in their order, how much fits into 2 MB, and their rendering to one HTML file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from ..recurrence.measures import safe_norm
from ..results.encoding import plain
from ..results.gradients import Weights
from ..typing import Array
from ..vocabulary import DIRECTION, GATE, UNIT, UNIT_IN
from . import evidence
from .draw import colours
from .figures import (
    LARGEST,
    Caption,
    Choice,
    PagePlan,
    ReportFigure,
    TrackSteps,
    ValueAxis,
    jacobian,
    lines,
    maps,
    of_units,
)
from .material import Material
from .samples import Ranking
from .tracks import Track, norms, sort_keys, symbol

#: Largest size of the page in bytes, for any data, so that it can be sent by mail.
BUDGET = 1_900_000
#: Bytes of the page without data: styles, script, texts, static figures.
_PAGE = 260_000
#: Bytes of base64 text per byte.
_BASE64 = 4 / 3
#: Largest number of rows of a map of the input, and of features drawn as curves.
_FEATURES, _LINES = 64, 3
#: Number of panels of a section that are visible at first; the others are folded.
OPEN = 2
_TITLES = {"hidden": "Hidden state", "cell": "Cell state"}
#: Symbols of the kernels in formulas.
_SHORT = {"kernel": "W", "recurrent_kernel": "U"}
LEAVING = "U leaving"
#: Parts of the script, in their order.
_SCRIPTS = ("base", "values", "panel", "lines", "maps", "controls", "downloads", "main")


@dataclass
class Section:
    """A heading with figures."""

    id: str
    title: str
    words: str = ""
    figures: list[ReportFigure] = field(default_factory=list)
    track: int | None = None

    @property
    def open(self) -> list[ReportFigure]:
        """Figures that are visible when the page opens."""
        return self.figures if self.track is None or len(self.figures) <= OPEN + 1 else self.figures[:OPEN]

    @property
    def folded(self) -> list[ReportFigure]:
        """Figures that are collapsed when the page opens."""
        return self.figures[len(self.open) :]


def sections_of(material: Material, plan: PagePlan | None) -> list[Section]:
    """Return the page's sections in order: evidence, input, time Jacobian, layers, and results without a figure."""
    sections = []
    if material.diagnosis is not None and (drawn := evidence.figures_of(material.diagnosis)):
        sections.append(Section("evidence", "Memory", "The measurements behind the sentences above.", drawn))
    if plan is not None:
        sections += [_of_input(material, plan), *_of_tracks(material, plan)]
    if material.time_map is not None:
        words = "How much each input step moves each output step. Click a row to colour the input strip by it."
        place = 1 + (sections[0].id == "evidence") if plan is not None else len(sections)
        sections.insert(place, Section("jacobian-section", "Time Jacobian", words, [jacobian(material.time_map)]))
    sections += [Section(f"other-{i}", type(result).__name__, str(result)) for i, result in enumerate(material.others)]
    return [section for section in sections if section.figures or section.words]


def _of_input(material: Material, plan: PagePlan) -> Section:
    """Return the section of the network's input and the gradient of the loss at it."""
    moments, found = material.moments, []
    first, layer = moments[0], repr(moments[0].tracks[0].layer)
    over = TrackSteps(plan, 0, [moment.tracks[0].mask for moment in moments])
    sizes = [moment.sensitivity for moment in moments if moment.sensitivity is not None]
    if len(sizes) == len(moments) and first.input is not None:
        words = f"Norm over features of dL/dx_t{first.scaling}."
        head = Caption("input-size", "Gradient at the input", words, f"rl.plot.curves(trace[{layer}].input_grad)")
        name = "|dL/dx_t| · s.d." if first.scaling else "|dL/dx_t|"
        found.append(lines(head, {name: sizes}, over, ValueAxis("norm over features", log=True)))
    inputs = [moment.input for moment in moments if moment.input is not None]
    if len(inputs) == len(moments):
        found.append(_input(layer, [_fewer_features(values, material) for values in inputs], over))
    return Section("input-section", "Input", material.padding_note, found, 0)


def _input(layer: str, inputs: Sequence[Array], over: TrackSteps) -> ReportFigure:
    """Return a figure of the input: few features as curves, more as a map."""
    words, count = "Input of the first recurrent layer at each step.", inputs[0].shape[-1]
    if count <= _LINES:
        named = {f"feature {i}": [values[:, :, i] for values in inputs] for i in range(count)}
        head = Caption("input", "Input", words, f"rl.plot.curves(trace[{layer}].input)")
        return lines(head, named, over, ValueAxis("x_t"))
    head = Caption("input", "Input", words, f"rl.plot.heatmap(trace[{layer}].input)")
    return maps(head, [Choice("x_t", inputs, "signed")], over, "feature")


def _fewer_features(values: Array, material: Material) -> Array:
    """Select the features with the largest standard deviation, in their order."""
    if values.shape[-1] <= _FEATURES:
        return values
    spread = np.nan_to_num(np.asarray(values, dtype=np.float64)).std(axis=(0, 1))
    note = f"The input is drawn by {_FEATURES} of its {values.shape[-1]} features, those that vary most."
    if note not in material.left_out:
        material.left_out.append(note)
    return values[:, :, np.sort(np.argsort(spread)[::-1][:_FEATURES])]


def _of_tracks(material: Material, plan: PagePlan) -> list[Section]:
    """Return one section of the report for each direction of each layer: gradients, gates, states, weights."""
    sections = []
    for number, track in enumerate(material.moments[0].tracks):
        tracks = [m.tracks[number] for m in material.moments]
        over = TrackSteps(plan, number, [one.mask for one in tracks])
        gates = _gates(tracks, over) if all(one.gates is not None for one in tracks) else []
        drawn = [*_gradients(tracks, over), *_states(tracks, over), *gates]
        if gates and all(one.gate_gradients is not None for one in tracks):
            drawn += _gate_gradients(tracks, over)
        drawn += _of_weights(number, track, material.weights)
        first = [f"track-{number}-gradient", f"track-{number}-gates"]  # curves side by side, then maps
        drawn.sort(key=lambda figure: figure.id not in first)
        words = f"{track.words}, {track.steps} steps"
        sections.append(Section(f"track-{number}", track.title, words, drawn, number))
    return sections


def _gradients(tracks: Sequence[Track], over: TrackSteps) -> list[ReportFigure]:
    """Return figures of the total gradient through time: its norm, and a map of units by time steps."""
    prefix, layer = f"track-{over.track}", repr(tracks[0].layer)
    names = {f"|dL/d{symbol(s)}_t|": s for s in tracks[0].gradients if all(s in t.gradients for t in tracks)}
    if not names:
        return []
    rows, array = tracks[0].rows, _array(tracks[0], f"{next(iter(names.values()))}_grad")
    words = f"Norm over {rows}s of the total gradient, which includes the path through the layer's own recurrence."
    title, code = "Gradient of the loss through time", f"rl.plot.gradient_flow(trace[{layer}])"
    sizes = {name: [norms(track.gradients[state]) for track in tracks] for name, state in names.items()}
    of_each = {name: (f"{prefix}-gradients", place) for place, name in enumerate(names)}
    axis = ValueAxis(f"norm over {rows}s", log=True, of_units=of_each)
    curves = lines(Caption(f"{prefix}-gradient", title, words, code), sizes, over, axis)
    words = f"Magnitude of the total gradient of each {rows}, at each step."
    choices = [Choice(name, [t.gradients[state] for t in tracks], "size") for name, state in names.items()]
    head = Caption(f"{prefix}-gradients", f"Gradient by {rows}", words, f"rl.plot.heatmap({array}, log=True)")
    return [curves, maps(head, choices, over, rows)]


def _array(track: Track, variable: str) -> str:
    """Return Python code for the values of a map: a variable of the trace, or its norm over axes of the state."""
    array = f"trace[{track.layer!r}][{variable!r}]"
    return f"({array} ** 2).sum({list(track.within)!r}) ** 0.5" if track.within else array


def _states(tracks: Sequence[Track], over: TrackSteps) -> list[ReportFigure]:
    """Return one figure for each state of a layer: a map of units by time steps."""
    found = []
    for state in (state for state in tracks[0].states if all(state in track.states for track in tracks)):
        title = _TITLES.get(state, state.replace("_", " ").capitalize())
        name = "".join(c if c.isalnum() else "-" for c in state.lower())
        rows, code = tracks[0].rows, f"rl.plot.heatmap({_array(tracks[0], state)})"
        words = f"{'Norm' if tracks[0].within else 'Value'} of the state of each {rows}, at each step."
        words = words if rows != "unit" else "Value of each unit, at each step."
        head = Caption(f"track-{over.track}-{name}", title, words, code)
        choice = Choice(f"{symbol(state)}_t", [track.states[state] for track in tracks], "signed")
        found.append(maps(head, [choice], over, rows))
    return found


def _gates(tracks: Sequence[Track], over: TrackSteps) -> list[ReportFigure]:
    """Return figures of the gates: their mean over units, and maps of units by time steps."""
    prefix, layer = f"track-{over.track}", repr(tracks[0].layer)
    gates = {name: [np.asarray(t.gates)[:, :, i] for t in tracks] for i, name in enumerate(tracks[0].gate_names)}
    with np.errstate(invalid="ignore"):
        is_share = {
            name: not any(((values < 0) | (values > 1)).any(where=np.isfinite(values)) for values in moments)
            for name, moments in gates.items()
        }
    words = "Mean over units: a gate is closed near 0, open near 1."
    words += "" if all(is_share.values()) else " A candidate is not a gate and may be negative."
    head = Caption(f"{prefix}-gates", "Gates", words, f"rl.plot.gates(trace[{layer}])")
    of_each = {name: (f"{prefix}-gate-units", place) for place, name in enumerate(gates)}
    axis = ValueAxis("mean over units", share=all(is_share.values()), of_units=of_each)
    means = {name: [values.mean(axis=-1) for values in moments] for name, moments in gates.items()}
    choices = [Choice(n, moments, "gate" if is_share[n] else "signed") for n, moments in gates.items()]
    code = f"rl.plot.heatmap(trace[{layer}].gates.isel(gate=0))"
    by_unit = Caption(f"{prefix}-gate-units", "Gates by unit", "Each gate of each unit, at each step.", code)
    return [lines(head, means, over, axis), maps(by_unit, choices, over)]


def _gate_gradients(tracks: Sequence[Track], over: TrackSteps) -> list[ReportFigure]:
    """Return figures of the gradient at the pre-activation of each gate."""
    code = f"rl.plot.curves((trace[{tracks[0].layer!r}].gate_grad ** 2).sum('unit') ** 0.5, log=True)"
    words = "Norm over units of dL/dz_t, where z_t is the gate's pre-activation: the gradient that trains its weights."
    head = Caption(f"track-{over.track}-gate-gradient", "Gradient of the gates through time", words, code)
    sizes = {
        f"|dL/dz_t| {name}": [norms(np.asarray(track.gate_gradients)[:, :, i]) for track in tracks]
        for i, name in enumerate(tracks[0].gate_names)
    }
    return [lines(head, sizes, over, ValueAxis("norm over units", log=True))]


def _of_weights(number: int, track: Track, weights: Weights | None) -> list[ReportFigure]:
    """Return figures of the norms of the weights of each unit, and of the recurrent kernel from unit to unit."""
    columns, square = weight_norms(track, weights)
    layer, prefix, found = repr(track.layer.partition("#")[0]), f"track-{number}", []
    if columns:
        words = "Norm of the weights W, U that enter each unit, by gate, and of those that leave it."
        head = Caption(f"{prefix}-weights", "Weights by unit", words, f"rl.weights(model)[{layer}]")
        found.append(of_units(head, np.stack(list(columns.values()), axis=1), list(columns), number))
    if square is not None and track.units <= LARGEST:
        words = "Recurrent kernel, root mean square over gates: row to unit, column from unit."
        code = f"rl.plot.weights_heatmap(rl.weights(model)[{layer}])"
        found.append(of_units(Caption(f"{prefix}-kernel", "From unit to unit", words, code), square, [], number))
    return found


def weight_norms(track: Track, weights: Weights | None) -> tuple[dict[str, Array], Array | None]:
    """Return norms per unit of incoming weights (by kernel and gate) and outgoing ones, and (unit, unit_in) RMS."""
    layer = track.layer.partition("#")[0]
    if weights is None or layer not in weights:
        return {}, None
    dataset = weights.dataset(layer)
    if DIRECTION in dataset.dims:
        dataset = dataset.sel({DIRECTION: track.direction or dataset[DIRECTION].values[0]})
    columns: dict[str, Array] = {}
    square = None
    for name, short in _SHORT.items():
        array = dataset.get(name)
        if array is None or UNIT not in array.dims or array.sizes[UNIT] != track.units:
            continue
        lead = next(str(dim) for dim in array.dims if dim not in (GATE, UNIT))
        gates = [str(gate) for gate in array[GATE].values] if GATE in array.dims else [""]
        values = np.asarray(array.transpose(lead, ..., UNIT).values, dtype=np.float64)
        values = values.reshape(len(values), len(gates), track.units)
        columns |= {f"{short} {gate}".strip(): safe_norm(values[:, i], axis=0) for i, gate in enumerate(gates)}
        if lead == UNIT_IN and len(values) == track.units:
            columns[LEAVING] = safe_norm(values.reshape(track.units, -1), axis=1)
            square = np.sqrt((values**2).mean(axis=1)).T
    return columns, square


def plan_of(material: Material) -> PagePlan | None:
    """Choose how many samples have curves and maps in a page of at most ``BUDGET`` bytes; None without a trace.

    Curves of all samples have priority over maps of more than a few, since readers select samples by their curves.
    At least the typical and the hardest sample have maps, if necessary with many steps merged.
    """
    if not material.moments or not material.moments[0].tracks or material.ranking is None:
        return None
    telling, tracks = material.ranking.telling, material.moments[0].tracks
    samples, steps = tracks[0].samples, max(track.steps for track in tracks)
    widths = ((1000, 500), (500, 250), (250, 250), (250, 125), (125, 125), (125, 60), (60, 60))
    for few in (8, 2):
        for most in widths:
            curve_bin, map_bin = (-(-steps // count) for count in most)
            for curves in sorted({samples, min(samples, 24), min(samples, few)}, reverse=True):
                found = PagePlan(telling, curves, curve_bin, min(few, samples), map_bin)
                if _page_bytes(found, material) <= BUDGET:
                    for maps in sorted({samples, 48, 32, 24, 16, 12}, reverse=True):
                        more = replace(found, map_count=min(maps, curves))
                        if more.map_count > found.map_count and _page_bytes(more, material) <= BUDGET:
                            return more
                    return found
    return PagePlan(telling, min(samples, 2), -(-steps // 60), 1, -(-steps // 30))


def _page_bytes(plan: PagePlan, material: Material) -> float:
    """Estimate the bytes of the page, with images that do not compress."""
    first = material.moments[0]
    features = 0 if first.input is None else min(first.input.shape[-1], _FEATURES)
    total = features * (plan.map_count + 2) * -(-first.tracks[0].steps // plan.map_bin)
    for track in first.tracks:
        gates = 0 if track.gates is None else len(track.gate_names)
        curves = len(track.states) + len(track.gradients) + gates * (1 if track.gate_gradients is None else 2)
        total += curves * 2 * (plan.curve_count + 6) * -(-track.steps // plan.curve_bin)
        values = sum(a.shape[-1] for a in (*track.states.values(), *track.gradients.values()))
        values += gates * (0 if track.gates is None else track.gates.shape[-1])
        total += values * plan.map_count * -(-track.steps // plan.map_bin)
        total += min(track.units, 512) ** 2
    return _PAGE + _BASE64 * total * len(material.moments)


@dataclass(frozen=True)
class ReportOrigin:
    """Title of a report, and the call that reproduces it."""

    title: str
    code: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    when: str = ""


def render(material: Material, made: ReportOrigin) -> str:
    """Render the report as the text of one HTML file, with all styles, scripts and data in it."""
    plan = plan_of(material)
    sections: list[Section] = sections_of(material, plan)
    every = [figure for section in sections for figure in section.figures]
    script = "\n".join(["'use strict';", "(function () {", *(_asset(f"{name}.js") for name in _SCRIPTS), "})();"])
    tracks = material.moments[0].tracks if material.moments else []
    context = {
        "made": made,
        "material": material,
        "sections": sections,
        "findings": evidence.findings(material.diagnosis, every, tracks),
        "sentences": {} if material.diagnosis is None else material.diagnosis.sentences,
        "badge": evidence.badge(material),
        "facts": evidence.facts(material),
        "versions": evidence.versions(material),
        "measures": evidence.measures(material.diagnosis),
        "checks": [check for result in evidence.results(material) for check in result.checks],
        "notes": list(dict.fromkeys(note for result in evidence.results(material) for note in result.notes)),
        "left_out": evidence.left_out(material, plan),
        "interactive": plan is not None,
        "data": plain(_data(material, plan, every)),
        "style": Markup(_asset("report.css")),
        "script": Markup(script),
        "policy": _policy(script),
    }
    escaping = Environment(  # all text except the drawings of this package
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return escaping.get_template("page.html").render(context)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def _policy(script: str) -> str:
    """Return the Content-Security-Policy: nothing is loaded, and only this script runs, by its hash."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _data(material: Material, plan: PagePlan | None, every: Sequence[ReportFigure]) -> dict[str, Any]:
    """Return the data of all figures as JSON for the script of the page."""
    page: dict[str, Any] = {
        "figures": [figure.to_json() for figure in every],
        "palettes": {name: bytes(colours(name).ravel()).hex() for name in ("size", "signed", "gate")},
        "moments": [found.name for found in material.moments],
        "steps": 0,
        "samples": [],
        "tracks": [],
    }
    if plan is None or material.ranking is None:
        return page
    ranking: Ranking = material.ranking
    page |= {
        "steps": material.moments[0].tracks[0].steps,
        "samples": [
            {
                "number": material.labels[i],
                "loss": None if material.losses is None else float(material.losses[i]),
                "target": material.targets[i],
            }
            for i in range(len(material.numbers))
        ],
        "order": [i for i in ranking.order if i in set(plan.curves)],
        "by_loss": material.losses is not None,
        "typical": ranking.typical,
        "hardest": ranking.hardest,
        "easiest": ranking.easiest,
        "tracks": [_track_json(material, number) for number in range(len(material.moments[0].tracks))],
    }
    if material.words is not None:
        page["words"] = {str(i): material.words[i] for i in plan.maps}
    return page


def _track_json(material: Material, number: int) -> dict[str, Any]:
    track = material.moments[0].tracks[number]
    columns, _ = weight_norms(track, material.weights)
    total = None
    if columns:
        total = np.sqrt(sum(values**2 for name, values in columns.items() if name != LEAVING))
    keys = sort_keys(track, total)
    return {
        "title": track.title,
        "layer": track.layer,
        "units": track.units,
        "steps": track.steps,
        "keys": {name: [float(f"{v:.4g}") for v in values] for name, values in keys.items()},
    }
