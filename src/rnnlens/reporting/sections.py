"""Which figures a report has, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..typing import Array
from . import evidence, time_figure
from .curves import Axis, lines
from .figures import Figure, Head, Over, Shown
from .fit import plan
from .layer_figures import of_track, of_weights
from .maps import Choice, maps
from .material import Material

#: Of the page, whatever the data: what "about 2 MB" means to those who mail it.
BUDGET = 1_900_000
#: Rows of an input that has more features than a reader can tell apart.
_FEATURES = 64
#: So many features are told apart as curves.
_LINES = 3


@dataclass
class Section:
    """A heading with figures."""

    id: str
    title: str
    words: str = ""
    figures: list[Figure] = field(default_factory=list)
    track: int | None = None


def shown_of(material: Material) -> Shown | None:
    """Which samples and steps fit into the page; None without a trace."""
    if not material.moments or not material.moments[0].tracks or material.ranking is None:
        return None
    first = material.moments[0]
    features = 0 if first.input is None else min(first.input.shape[-1], _FEATURES)
    found = plan(first.tracks, features, len(material.moments), BUDGET)
    return Shown(found, material.ranking.telling)


def sections_of(material: Material, shown: Shown | None) -> list[Section]:
    """Evidence of the findings, input, time Jacobian, layers, and results that have no figure here."""
    sections = []
    if material.diagnosis is not None and (drawn := evidence.figures_of(material.diagnosis)):
        words = "What the sentences above rest on."
        sections.append(Section("evidence", "Memory", words, drawn))
    if shown is not None:
        sections += [_of_input(material, shown), *_of_tracks(material, shown)]
    if material.time_map is not None:
        drawn = [time_figure.jacobian(material.time_map)]
        words = "Which input step moved which output step. Click a row: it colours the strip of the input."
        place = 1 + (sections[0].id == "evidence") if shown is not None else len(sections)
        sections.insert(place, Section("jacobian-section", "Time Jacobian", words, drawn))
    sections += [Section(f"other-{i}", type(result).__name__, str(result)) for i, result in enumerate(material.others)]
    return [section for section in sections if section.figures or section.words]


def _of_input(material: Material, shown: Shown) -> Section:
    """What the network reads, and what the loss says of it."""
    moments, found = material.moments, []
    first, layer = moments[0], repr(moments[0].tracks[0].layer)
    over = Over(shown, 0, [moment.tracks[0].mask for moment in moments])
    sizes = [moment.sensitivity for moment in moments if moment.sensitivity is not None]
    if len(sizes) == len(moments) and first.input is not None:
        scaled = len(first.input) > 1
        words = "Norm over features of dL/dx_t" + (
            " times the standard deviation of x_t over samples." if scaled else "."
        )
        head = Head("input-size", "Gradient at the input", words, f"rl.plot.curves(trace[{layer}].input_grad)")
        name = "|dL/dx_t| · s.d." if scaled else "|dL/dx_t|"
        found.append(lines(head, {name: sizes}, over, Axis("norm over features", log=True)))
    inputs = [moment.input for moment in moments if moment.input is not None]
    if len(inputs) == len(moments):
        found.append(_input(layer, [_fewer_features(values, material) for values in inputs], over))
    return Section("input-section", "Input", "", found, 0)


def _input(layer: str, inputs: Sequence[Array], over: Over) -> Figure:
    """Few features as curves, more as a map."""
    words, count = "What the first layer is fed at each step.", inputs[0].shape[-1]
    if count <= _LINES:
        named = {f"feature {i}": [values[:, :, i] for values in inputs] for i in range(count)}
        head = Head("input", "Input", words, f"rl.plot.curves(trace[{layer}].input)")
        return lines(head, named, over, Axis("x_t"))
    head = Head("input", "Input", words, f"rl.plot.heatmap(trace[{layer}].input)")
    return maps(head, [Choice("x_t", inputs, "signed")], over, "feature")


def _fewer_features(values: Array, material: Material) -> Array:
    """Those that vary most, in their order, of an input of many features."""
    if values.shape[-1] <= _FEATURES:
        return values
    spread = np.nan_to_num(np.asarray(values, dtype=np.float64)).std(axis=(0, 1))
    said = f"The input is drawn by {_FEATURES} of its {values.shape[-1]} features, those that vary most."
    if said not in material.left_out:
        material.left_out.append(said)
    kept: Array = values[:, :, np.sort(np.argsort(spread)[::-1][:_FEATURES])]
    return kept


def _of_tracks(material: Material, shown: Shown) -> list[Section]:
    sections = []
    for number, track in enumerate(material.moments[0].tracks):
        drawn = of_track(number, [m.tracks[number] for m in material.moments], shown)
        drawn += of_weights(number, track, material.weights)
        words = f"{track.words}, {track.steps} steps"
        sections.append(Section(f"track-{number}", track.title, words, drawn, number))
    return sections
