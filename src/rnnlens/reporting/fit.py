"""What fits into a page of a given size: how many samples, and how many steps of them, a reader gets to see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .tracks import Track

#: Bytes of base64 for each byte.
_BASE64 = 4 / 3
#: What the page takes without any data: styles, script, words, figures that need no script.
_PAGE = 260_000


@dataclass(frozen=True)
class Plan:
    """How much of the numbers goes into the page.

    Attributes
    ----------
    curves, maps
        How many samples have curves (a number for each step), and maps (a number for each unit and step).
    curve_bin, map_bin
        How many steps are merged into one.
    """

    curves: int
    curve_bin: int
    maps: int
    map_bin: int


def plan(tracks: Sequence[Track], features: int, moments: int, budget: int) -> Plan:
    """The richest plan of a page of at most ``budget`` bytes.

    Curves of all samples come before maps of more than a few, since the samples are picked by them; at least the
    typical and the hardest sample have maps, if need be with many steps merged.
    """
    samples, steps = tracks[0].samples, max(track.steps for track in tracks)
    for few in (8, 2):
        for curve_steps, map_steps in (
            (1000, 500),
            (500, 250),
            (250, 250),
            (250, 125),
            (125, 125),
            (125, 60),
            (60, 60),
        ):
            for curves in sorted({samples, min(samples, 24), min(samples, few)}, reverse=True):
                found = Plan(curves, _width(steps, curve_steps), min(few, samples), _width(steps, map_steps))
                if _size(found, tracks, features, moments) <= budget:
                    return _with_more_maps(found, tracks, features, moments, budget)
    return Plan(min(samples, 2), _width(steps, 60), 1, _width(steps, 30))


def _with_more_maps(found: Plan, tracks: Sequence[Track], features: int, moments: int, budget: int) -> Plan:
    for maps in sorted({tracks[0].samples, 48, 32, 24, 16, 12}, reverse=True):
        more = Plan(found.curves, found.curve_bin, min(maps, found.curves), found.map_bin)
        if more.maps > found.maps and _size(more, tracks, features, moments) <= budget:
            return more
    return found


def _size(found: Plan, tracks: Sequence[Track], features: int, moments: int) -> float:
    """Bytes of the page, with images that do not shrink."""
    total = features * (found.maps + 2) * _steps(tracks[0], found.map_bin)
    for track in tracks:
        gates = 0 if track.gates is None else len(track.gate_names)
        lines = len(track.states) + len(track.gradients) + gates * (1 if track.gate_gradients is None else 2)
        total += lines * 2 * (found.curves + 6) * _steps(track, found.curve_bin)
        values = sum(a.shape[-1] for a in (*track.states.values(), *track.gradients.values()))
        values += gates * (0 if track.gates is None else track.gates.shape[-1])
        total += values * found.maps * _steps(track, found.map_bin)
        total += min(track.units, 512) ** 2
    return _PAGE + _BASE64 * total * moments


def _steps(track: Track, width: int) -> int:
    return -(-track.steps // width)


def _width(steps: int, most: int) -> int:
    return max(1, -(-steps // most))
