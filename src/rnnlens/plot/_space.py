"""Trajectories in three axes: the picture of one view, and the scene that a notebook turns by dragging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _axes
from ._data import Numbers

#: Azimuth and elevation of the picture, in degrees; matplotlib's own 3-D axes begin at the same view.
_AZIMUTH, _ELEVATION = -60.0, 30.0
#: Largest number of points that a scene keeps; longer paths are thinned evenly.
_MOST_POINTS = 20_000
#: Coordinate of the point farthest from the middle along an axis, in the whole numbers of a scene.
_REACH = 1000


def view() -> Numbers:
    """Return the two directions (axis, 2), to the right and upward, of the picture."""
    azimuth, elevation = np.deg2rad([_AZIMUTH, _ELEVATION])
    right = [-np.sin(azimuth), np.cos(azimuth), 0.0]
    up = [-np.sin(elevation) * np.cos(azimuth), -np.sin(elevation) * np.sin(azimuth), np.cos(elevation)]
    return np.array([right, up]).T


def draw_axes(ax: Any, length: float, labels: Sequence[str]) -> Numbers:
    """Draw the three axes through the mean in place of the frame, named at their ends; return their ends."""
    ends = length * view()
    for end, label in zip(ends, labels, strict=True):
        ax.plot([-end[0], end[0]], [-end[1], end[1]], color="0.7", linewidth=0.8, zorder=0, gid="axis")
        side = "left" if end[0] >= 0 else "right"
        _axes.write_text(ax, label, (float(end[0]), float(end[1])), (3, 0), ha=side, va="bottom", gid="axis name")
    ax.set_axis_off()
    return np.concatenate([ends, -ends])


def scene_of(paths: Numbers, half: float, colours: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the scene of paths (sample, time, 3), whose farthest coordinate is ``half``, each by colour and name."""
    samples, steps, _ = paths.shape
    kept = np.unique(np.linspace(0, steps - 1, max(2, min(steps, _MOST_POINTS // max(samples, 1)))).astype(int))
    return {
        "kind": "space",
        "azimuth": _AZIMUTH,
        "elevation": _ELEVATION,
        "reach": _REACH,
        "steps": kept.tolist(),
        "paths": [
            {"at": whole(path[kept], half), "colour": colour, "name": name}
            for path, colour, name in zip(paths, colours, names, strict=True)
        ],
    }


def whole(points: Numbers, half: float) -> list[Any]:
    """Return coordinates as whole numbers, of which ``_REACH`` is ``half``."""
    numbers: list[Any] = np.rint(points * (_REACH / (half or 1.0))).astype(int).tolist()
    return numbers
