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
from ..results.encoding import to_strict_json
from ..results.gradients import Weights
from ..typing import Array
from ..vocabulary import DIRECTION, GATE, UNIT, UNIT_IN
from . import evidence
from .contents import ReportContents
from .draw import palette_colours
from .figures import (
    MAX_KERNEL_UNITS,
    Caption,
    Choice,
    PagePlan,
    ReportFigure,
    TrackSteps,
    ValueAxis,
    jacobian,
    lines,
    maps,
    unit_map,
)
from .samples import Ranking
from .terms import explain
from .tracks import Track, norms, sort_keys, symbol
from .training import figures_of_runs

#: Largest size of the page in bytes, for any data, so that it can be sent by mail.
MAX_PAGE_BYTES = 1_900_000
#: Bytes of the page without data: styles, script, texts, static figures.
_FIXED_BYTES = 260_000
#: Bytes of a map besides its values: its palette, the headers of the PNG, its entry in the data.
_MAP_BYTES = 900
#: Bytes of base64 text per byte.
_BASE64_RATIO = 4 / 3
#: Largest number of rows of a map of the input, and of features drawn as curves.
_MAX_FEATURES, _MAX_CURVES = 64, 3
#: Number of panels of a section that are visible at first; the others are folded.
VISIBLE_COUNT = 2
_STATE_TITLES = {"hidden": "Hidden state", "cell": "Cell state"}
#: Symbols of the kernels in formulas.
_KERNEL_SYMBOLS = {"kernel": "W", "recurrent_kernel": "U"}
OUTGOING_NAME = "U leaving"
#: Parts of the script, in their order.
_SCRIPTS = ("base", "values", "panel", "lines", "maps", "controls", "theme", "downloads", "main")


@dataclass
class Section:
    """A heading with figures."""

    id: str
    title: str
    intro: str = ""
    figures: list[ReportFigure] = field(default_factory=list)
    track: int | None = None

    @property
    def visible_figures(self) -> list[ReportFigure]:
        """Figures that are visible when the page opens."""
        return (
            self.figures
            if self.track is None or len(self.figures) <= VISIBLE_COUNT + 1
            else self.figures[:VISIBLE_COUNT]
        )

    @property
    def folded_figures(self) -> list[ReportFigure]:
        """Figures that are collapsed when the page opens."""
        return self.figures[len(self.visible_figures) :]


def sections_of(contents: ReportContents, plan: PagePlan | None) -> list[Section]:
    """Return the page's sections in order: evidence, input, time Jacobian, layers, and results without a figure."""
    sections = []
    if contents.diagnosis is not None and (evidence_figures := evidence.figures_of(contents.diagnosis)):
        sections.append(Section("evidence", "Memory", "The measurements behind the sentences above.", evidence_figures))
    if plan is not None:
        sections += [_input_section(contents, plan), *_track_sections(contents, plan)]
    if contents.time_map is not None:
        intro = "How much each input step moves each output step."
        intro += " Click a row to colour the input strip by it." * (plan is not None)
        position = 1 + (sections[0].id == "evidence") if plan is not None else len(sections)
        sections.insert(position, Section("jacobian-section", "Time Jacobian", intro, [jacobian(contents.time_map)]))
    sections += [
        Section(f"other-{i}", type(result).__name__, str(result)) for i, result in enumerate(contents.other_results)
    ]
    if contents.run is not None:
        run_name = "run" if contents.run.path is None else contents.run.path.name
        sections.insert(0, Section("training", "Training", "", figures_of_runs({run_name: contents.run})))
    return [section for section in sections if section.figures or section.intro]


def _input_section(contents: ReportContents, plan: PagePlan) -> Section:
    """Return the section of the network's input and the gradient of the loss at it."""
    moments, figures = contents.moments, []
    first_moment, layer = moments[0], repr(moments[0].input_layer)
    track_steps = TrackSteps(plan, 0, [moment.tracks[0].mask for moment in moments])
    sensitivities = [moment.sensitivity for moment in moments if moment.sensitivity is not None]
    if len(sensitivities) == len(moments) and first_moment.input is not None:
        sentence = f"Norm over features of dL/dx_t{first_moment.scaling}."
        caption = Caption("input-size", "Gradient at the input", sentence, f"rl.plot.curves(trace[{layer}].input_grad)")
        curve_name = "|dL/dx_t| · s.d." if first_moment.scaling else "|dL/dx_t|"
        figures.append(
            lines(caption, {curve_name: sensitivities}, track_steps, ValueAxis("norm over features", log=True))
        )
    inputs = [moment.input for moment in moments if moment.input is not None]
    if len(inputs) == len(moments):
        figures.append(_input_figure(layer, [_select_features(values, contents) for values in inputs], track_steps))
    return Section("input-section", "Input", contents.padding_note, figures, track=0)


def _input_figure(layer: str, inputs: Sequence[Array], track_steps: TrackSteps) -> ReportFigure:
    """Return a figure of the input: few features as curves, more as a map."""
    sentence, feature_count = f"Input of layer {layer} at each step.", inputs[0].shape[-1]
    if feature_count <= _MAX_CURVES:
        curves_by_name = {f"feature {i}": [values[:, :, i] for values in inputs] for i in range(feature_count)}
        caption = Caption("input", "Input", sentence, f"rl.plot.curves(trace[{layer}].input)")
        return lines(caption, curves_by_name, track_steps, ValueAxis("x_t"))
    caption = Caption("input", "Input", sentence, f"rl.plot.heatmap(trace[{layer}].input)")
    return maps(caption, [Choice("x_t", inputs, "signed")], track_steps, "feature")


def _select_features(values: Array, contents: ReportContents) -> Array:
    """Select the features with the largest standard deviation, in their order."""
    if values.shape[-1] <= _MAX_FEATURES:
        return values
    deviations = np.nan_to_num(np.asarray(values, dtype=np.float64)).std(axis=(0, 1))
    note = f"The input is drawn by {_MAX_FEATURES} of its {values.shape[-1]} features, those that vary most."
    if note not in contents.left_out:
        contents.left_out.append(note)
    return values[:, :, np.sort(np.argsort(deviations)[::-1][:_MAX_FEATURES])]


def _track_sections(contents: ReportContents, plan: PagePlan) -> list[Section]:
    """Return one section of the report for each direction of each layer: gradients, gates, states, weights."""
    sections = []
    for track_number, track in enumerate(contents.moments[0].tracks):
        tracks = [moment.tracks[track_number] for moment in contents.moments]
        track_steps = TrackSteps(plan, track_number, [moment_track.mask for moment_track in tracks])
        gate_figures = (
            _gate_figures(tracks, track_steps) if all(moment_track.gates is not None for moment_track in tracks) else []
        )
        figures = [*_gradient_figures(tracks, track_steps), *_state_figures(tracks, track_steps), *gate_figures]
        if gate_figures and all(moment_track.gate_gradients is not None for moment_track in tracks):
            figures += _gate_gradient_figures(tracks, track_steps)
        figures += _weight_figures(track_number, track, contents.weights)
        first_ids = [f"track-{track_number}-gradient", f"track-{track_number}-gates"]  # curves side by side, then maps
        figures.sort(key=lambda figure: figure.id not in first_ids)
        intro = f"{track.description}, {track.steps} steps"
        sections.append(Section(f"track-{track_number}", track.title, intro, figures, track_number))
    return sections


def _gradient_figures(tracks: Sequence[Track], track_steps: TrackSteps) -> list[ReportFigure]:
    """Return figures of the total gradient through time: its norm, and a map of units by time steps."""
    prefix, layer = f"track-{track_steps.track}", repr(tracks[0].layer)
    state_by_curve = {f"|dL/d{symbol(s)}_t|": s for s in tracks[0].gradients if all(s in t.gradients for t in tracks)}
    if not state_by_curve:
        return []
    row_name, array_code = tracks[0].row_name, _array_code(tracks[0], f"{next(iter(state_by_curve.values()))}_grad")
    sentence = (
        f"Norm over {row_name}s of the total gradient, which includes the path through the layer's own recurrence."
    )
    title, code = "Gradient of the loss through time", f"rl.plot.gradient_flow(trace[{layer}])"
    if row_name != "unit":  # a whole-sequence layer
        all_axes = [row_name, *tracks[0].normed_axes]
        code = f"rl.plot.curves((trace[{layer}]['state_grad'] ** 2).sum({all_axes!r}) ** 0.5, log=True)"
    norms_by_curve = {
        name: [norms(track.gradients[state]) for track in tracks] for name, state in state_by_curve.items()
    }
    unit_maps = {name: (f"{prefix}-gradients", choice_index) for choice_index, name in enumerate(state_by_curve)}
    axis = ValueAxis(f"norm over {row_name}s", log=True, unit_maps=unit_maps)
    curves = lines(Caption(f"{prefix}-gradient", title, sentence, code), norms_by_curve, track_steps, axis)
    sentence = f"Magnitude of the total gradient of each {row_name}, at each step."
    choices = [Choice(name, [t.gradients[state] for t in tracks], "size") for name, state in state_by_curve.items()]
    caption = Caption(
        f"{prefix}-gradients", f"Gradient by {row_name}", sentence, f"rl.plot.heatmap({array_code}, log=True)"
    )
    return [curves, maps(caption, choices, track_steps, row_name)]


def _array_code(track: Track, variable: str) -> str:
    """Return Python code for the values of a map: a variable of the trace, or its norm over axes of the state."""
    array = f"trace[{track.layer!r}][{variable!r}]"
    return f"({array} ** 2).sum({list(track.normed_axes)!r}) ** 0.5" if track.normed_axes else array


def _state_figures(tracks: Sequence[Track], track_steps: TrackSteps) -> list[ReportFigure]:
    """Return one figure for each state of a layer: a map of units by time steps."""
    figures = []
    for state in (state for state in tracks[0].states if all(state in track.states for track in tracks)):
        title = _STATE_TITLES.get(state, state.replace("_", " ").capitalize())
        id_part = "".join(c if c.isalnum() else "-" for c in state.lower())
        row_name, code = tracks[0].row_name, f"rl.plot.heatmap({_array_code(tracks[0], state)})"
        sentence = f"{'Norm' if tracks[0].normed_axes else 'Value'} of the state of each {row_name}, at each step."
        sentence = sentence if row_name != "unit" else "Value of each unit, at each step."
        caption = Caption(f"track-{track_steps.track}-{id_part}", title, sentence, code)
        choice = Choice(f"{symbol(state)}_t", [track.states[state] for track in tracks], "signed")
        figures.append(maps(caption, [choice], track_steps, row_name))
    return figures


def _gate_figures(tracks: Sequence[Track], track_steps: TrackSteps) -> list[ReportFigure]:
    """Return figures of the gates: their mean over units, and maps of units by time steps."""
    prefix, layer = f"track-{track_steps.track}", repr(tracks[0].layer)
    moments_by_gate = {
        name: [np.asarray(t.gates)[:, :, i] for t in tracks] for i, name in enumerate(tracks[0].gate_names)
    }
    proposals = [name for name in moments_by_gate if name in tracks[0].proposals]
    with np.errstate(invalid="ignore"):
        is_share = {
            name: name not in proposals
            and not any(((values < 0) | (values > 1)).any(where=np.isfinite(values)) for values in moments)
            for name, moments in moments_by_gate.items()
        }
    sentence = "Mean over units."
    if len(proposals) < len(moments_by_gate):
        sentence = "Mean over units: a gate is closed near 0, open near 1."
    if proposals:
        names = " and ".join(proposals).capitalize()
        sentence += f" {names}: proposed for the new state; no gate, and may be negative."
    caption = Caption(f"{prefix}-gates", "Gates", sentence, f"rl.plot.gates(trace[{layer}])")
    unit_maps = {name: (f"{prefix}-gate-units", choice_index) for choice_index, name in enumerate(moments_by_gate)}
    axis = ValueAxis("mean over units", share=all(is_share.values()), unit_maps=unit_maps)
    means_by_gate = {name: [values.mean(axis=-1) for values in moments] for name, moments in moments_by_gate.items()}
    choices = [Choice(n, moments, "gate" if is_share[n] else "signed") for n, moments in moments_by_gate.items()]
    code = f"rl.plot.heatmap(trace[{layer}].gates.isel(gate=0))"
    unit_caption = Caption(f"{prefix}-gate-units", "Gates by unit", "Each gate of each unit, at each step.", code)
    return [lines(caption, means_by_gate, track_steps, axis), maps(unit_caption, choices, track_steps)]


def _gate_gradient_figures(tracks: Sequence[Track], track_steps: TrackSteps) -> list[ReportFigure]:
    """Return figures of the gradient at the pre-activation of each gate."""
    code = f"rl.plot.curves((trace[{tracks[0].layer!r}].gate_grad ** 2).sum('unit') ** 0.5, log=True)"
    sentence = (
        "Norm over units of dL/dz_t, where z_t is the gate's pre-activation: the gradient that trains its weights."
    )
    caption = Caption(f"track-{track_steps.track}-gate-gradient", "Gradient of the gates through time", sentence, code)
    norms_by_gate = {
        f"|dL/dz_t| {name}": [norms(np.asarray(track.gate_gradients)[:, :, i]) for track in tracks]
        for i, name in enumerate(tracks[0].gate_names)
    }
    return [lines(caption, norms_by_gate, track_steps, ValueAxis("norm over units", log=True))]


def _weight_figures(track_number: int, track: Track, weights: Weights | None) -> list[ReportFigure]:
    """Return figures of the norms of the weights of each unit, and of the recurrent kernel from unit to unit."""
    columns, unit_matrix = weight_norms(track, weights)
    layer, prefix, figures = repr(track.layer.partition("#")[0]), f"track-{track_number}", []
    if columns:
        sentence = "Norm of the weights W, U that enter each unit, by gate, and of those that leave it."
        caption = Caption(f"{prefix}-weights", "Weights by unit", sentence, f"rl.weights(model)[{layer}]")
        figures.append(unit_map(caption, np.stack(list(columns.values()), axis=1), list(columns), track_number))
    if unit_matrix is not None and track.units <= MAX_KERNEL_UNITS:
        sentence = "Recurrent kernel, root mean square over gates: row to unit, column from unit."
        code = f"rl.plot.weights_heatmap(rl.weights(model)[{layer}])"
        figures.append(
            unit_map(Caption(f"{prefix}-kernel", "From unit to unit", sentence, code), unit_matrix, [], track_number)
        )
    return figures


def weight_norms(track: Track, weights: Weights | None) -> tuple[dict[str, Array], Array | None]:
    """Return norms per unit of incoming weights (by kernel and gate) and outgoing ones, and (unit, unit_in) RMS."""
    layer = track.layer.partition("#")[0]
    if weights is None or layer not in weights:
        return {}, None
    dataset = weights.dataset(layer)
    if DIRECTION in dataset.dims:
        dataset = dataset.sel({DIRECTION: track.direction or dataset[DIRECTION].values[0]})
    columns: dict[str, Array] = {}
    unit_matrix = None
    for name, short_name in _KERNEL_SYMBOLS.items():
        array = dataset.get(name)
        if array is None or UNIT not in array.dims or array.sizes[UNIT] != track.units:
            continue
        input_dim = next(str(dim) for dim in array.dims if dim not in (GATE, UNIT))
        gates = [str(gate) for gate in array[GATE].values] if GATE in array.dims else [""]
        values = np.asarray(array.transpose(input_dim, ..., UNIT).values, dtype=np.float64)
        values = values.reshape(len(values), len(gates), track.units)
        columns |= {f"{short_name} {gate}".strip(): safe_norm(values[:, i], axis=0) for i, gate in enumerate(gates)}
        if input_dim == UNIT_IN and len(values) == track.units:
            columns[OUTGOING_NAME] = safe_norm(values.reshape(track.units, -1), axis=1)
            unit_matrix = np.sqrt((values**2).mean(axis=1)).T
    return columns, unit_matrix


def plan_of(contents: ReportContents, max_bytes: int = MAX_PAGE_BYTES) -> PagePlan | None:
    """Choose how many samples have curves and maps in a page of at most ``max_bytes`` bytes; None without a trace.

    Curves of all samples have priority over maps of more than a few, since readers select samples by their curves.
    At least the typical and the hardest sample have maps, if necessary with many steps merged.
    """
    if not contents.moments or not contents.moments[0].tracks or contents.ranking is None:
        return None
    priority_order, tracks = contents.ranking.priority_order, contents.moments[0].tracks
    samples, steps = tracks[0].samples, max(track.steps for track in tracks)
    width_pairs = ((1000, 500), (500, 250), (250, 250), (250, 125), (125, 125), (125, 60), (60, 60))
    for fewest_maps in (8, 2):
        for width_pair in width_pairs:
            curve_bin, map_bin = (-(-steps // width) for width in width_pair)
            for curve_count in sorted({samples, min(samples, 24), min(samples, fewest_maps)}, reverse=True):
                plan = PagePlan(priority_order, curve_count, curve_bin, min(fewest_maps, samples), map_bin)
                if _page_bytes(plan, contents) <= max_bytes:
                    for map_count in sorted({samples, 48, 32, 24, 16, 12}, reverse=True):
                        larger_plan = replace(plan, map_count=min(map_count, curve_count))
                        if larger_plan.map_count > plan.map_count and _page_bytes(larger_plan, contents) <= max_bytes:
                            return larger_plan
                    return plan
    return PagePlan(priority_order, min(samples, 2), -(-steps // 60), 1, -(-steps // 30))


def _page_bytes(plan: PagePlan, contents: ReportContents) -> float:
    """Estimate the bytes of the page, with images that do not compress."""
    first_moment = contents.moments[0]
    feature_count = 0 if first_moment.input is None else min(first_moment.input.shape[-1], _MAX_FEATURES)
    value_count = feature_count * (plan.map_count + 2) * -(-first_moment.tracks[0].steps // plan.map_bin)
    map_total = int(feature_count > _MAX_CURVES)
    for track in first_moment.tracks:
        gate_count = 0 if track.gates is None else len(track.gate_names)
        curve_total = len(track.states) + len(track.gradients) + gate_count * (1 if track.gate_gradients is None else 2)
        value_count += curve_total * 2 * (plan.curve_count + 6) * -(-track.steps // plan.curve_bin)
        unit_values = sum(array.shape[-1] for array in (*track.states.values(), *track.gradients.values()))
        unit_values += gate_count * (0 if track.gates is None else track.gates.shape[-1])
        value_count += unit_values * plan.map_count * -(-track.steps // plan.map_bin)
        value_count += min(track.units, 512) ** 2
        map_total += len(track.states) + len(track.gradients) + gate_count
    map_bytes = _MAP_BYTES * map_total * plan.map_count
    return _FIXED_BYTES + _BASE64_RATIO * (value_count * len(contents.moments) + map_bytes)


@dataclass(frozen=True)
class ReportOrigin:
    """Title of a report, and the call that reproduces it."""

    title: str
    code: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    when: str = ""


def render(
    contents: ReportContents, report_origin: ReportOrigin, *, compact: bool = False, max_bytes: int = MAX_PAGE_BYTES
) -> str:
    """Render the report as the text of one HTML file, with all styles, scripts and data in it.

    A ``compact`` page, for a notebook cell, has no table of contents and no account of how it was made.
    """
    plan = plan_of(contents, max_bytes)
    sections: list[Section] = sections_of(contents, plan)
    all_figures = [figure for section in sections for figure in section.figures]
    script = "\n".join(["'use strict';", "(function () {", *(asset(f"{name}.js") for name in _SCRIPTS), "})();"])
    tracks = contents.moments[0].tracks if contents.moments else []
    context = {
        "origin": report_origin,
        "compact": compact,
        "purpose": evidence.purpose(contents),
        "contents": contents,
        "sections": sections,
        "findings": evidence.findings(contents, all_figures, tracks),
        "sentences": {} if contents.diagnosis is None else contents.diagnosis.sentences,
        "how_far_back": [] if contents.diagnosis is None else contents.diagnosis.how_far_back,
        "why_they_differ": [] if contents.diagnosis is None else contents.diagnosis.why_they_differ,
        "alerts": [] if contents.run is None else contents.run.alerts,
        "badge": evidence.badge(contents),
        "facts": evidence.facts(contents),
        "versions": evidence.versions(contents),
        "measures": evidence.measures(contents.diagnosis),
        "checks": [check for result in evidence.results(contents) for check in result.checks],
        "notes": list(dict.fromkeys(note for result in evidence.results(contents) for note in result.notes)),
        "left_out": evidence.omissions_of(contents, plan),
        "interactive": plan is not None,
        "data": to_strict_json(_page_data(contents, plan, all_figures)),
        "style": Markup(asset("report.css")),
        "script": Markup(script),
        "policy": security_policy(script),
    }
    environment = Environment(  # all text except the drawings of this package
        loader=FunctionLoader(asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["explain"] = explain
    return environment.get_template("page.html").render(context)


def asset(name: str) -> str:
    """Return the text of a template, a style sheet or a part of the script."""
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def security_policy(script: str) -> str:
    """Return the Content-Security-Policy: nothing is loaded, and only this script runs, by its hash."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _page_data(contents: ReportContents, plan: PagePlan | None, figures: Sequence[ReportFigure]) -> dict[str, Any]:
    """Return the data of all figures as JSON for the script of the page."""
    page_data: dict[str, Any] = {
        "figures": [figure.to_json() for figure in figures],
        "palettes": {name: bytes(palette_colours(name).ravel()).hex() for name in ("size", "signed", "gate")},
        "moments": [moment.name for moment in contents.moments],
        "steps": 0 if contents.time_map is None else int(contents.time_map.in_times[-1]) + 1,
        "samples": [],
        "tracks": [],
    }
    if plan is None or contents.ranking is None:
        return page_data
    ranking: Ranking = contents.ranking
    page_data |= {
        "steps": contents.moments[0].tracks[0].steps,
        "samples": [
            {
                "number": contents.labels[i],
                "loss": None if contents.losses is None else float(contents.losses[i]),
                "target": contents.targets[i],
            }
            for i in range(len(contents.sample_positions))
        ],
        "order": [i for i in ranking.order if i in set(plan.curves)],
        "by_loss": contents.losses is not None,
        "typical": ranking.typical,
        "hardest": ranking.hardest,
        "easiest": ranking.easiest,
        "tracks": [_track_json(contents, track_number) for track_number in range(len(contents.moments[0].tracks))],
    }
    if contents.token_texts is not None:
        page_data["words"] = {str(i): contents.token_texts[i] for i in plan.maps}
    return page_data


def _track_json(contents: ReportContents, track_number: int) -> dict[str, Any]:
    track = contents.moments[0].tracks[track_number]
    columns, _ = weight_norms(track, contents.weights)
    unit_norms = None
    if columns:
        unit_norms = np.sqrt(sum(values**2 for name, values in columns.items() if name != OUTGOING_NAME))
    keys = sort_keys(track, unit_norms)
    return {
        "title": track.title,
        "layer": track.layer,
        "units": track.units,
        "steps": track.steps,
        "keys": {name: [float(f"{v:.4g}") for v in values] for name, values in keys.items()},
    }
