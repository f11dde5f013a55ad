"""The figures of one layer: gradients, states, gates over time; weights by unit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..recurrence.measures import safe_norm
from ..results.weights import Weights
from ..typing import Array
from ..vocabulary import DIRECTION, GATE, UNIT, UNIT_IN
from .curves import Axis, lines
from .figures import Figure, Head, Over, Shown
from .maps import Choice, maps, of_units
from .tracks import Track, norms, symbol

_TITLES = {"hidden": "Hidden state", "cell": "Cell state"}
#: A kernel between more units is left out, since nobody could tell its cells apart.
LARGEST = 512
#: Kernels as they are written in formulas.
_SHORT = {"kernel": "W", "recurrent_kernel": "U"}
LEAVING = "U leaving"


def of_track(number: int, tracks: Sequence[Track], shown: Shown) -> list[Figure]:
    """Gradients, states and gates of one track; ``tracks`` are those of all moments."""
    over = Over(shown, number, [track.mask for track in tracks])
    found = [*_gradients(tracks, over), *_states(tracks, over)]
    if all(track.gates is not None for track in tracks):
        found += _gates(tracks, over)
        found += _gate_gradients(tracks, over) if all(track.gate_gradients is not None for track in tracks) else []
    return found


def _gradients(tracks: Sequence[Track], over: Over) -> list[Figure]:
    prefix, layer = f"track-{over.track}", repr(tracks[0].layer)
    names = {f"|dL/d{symbol(s)}_t|": s for s in tracks[0].gradients if all(s in t.gradients for t in tracks)}
    if not names:
        return []
    head = Head(
        f"{prefix}-gradient",
        "Gradient of the loss through time",
        "Norm over units of the total gradient, also through the layer's own recurrence.",
        f"rl.plot.gradient_flow(trace[{layer}])",
    )
    sizes = {name: [norms(track.gradients[state]) for track in tracks] for name, state in names.items()}
    of_each = {name: (f"{prefix}-gradients", place) for place, name in enumerate(names)}
    curves = lines(head, sizes, over, Axis("norm over units", log=True, of_units=of_each))
    code = f"rl.plot.heatmap(trace[{layer}][{next(iter(names.values())) + '_grad'!r}], log=True)"
    words = "Size of the total gradient of each unit, at each step."
    choices = [Choice(name, [t.gradients[state] for t in tracks], "size") for name, state in names.items()]
    return [curves, maps(Head(f"{prefix}-gradients", "Gradient by unit", words, code), choices, over)]


def _states(tracks: Sequence[Track], over: Over) -> list[Figure]:
    found = []
    for state in (state for state in tracks[0].states if all(state in track.states for track in tracks)):
        title = _TITLES.get(state, state.replace("_", " ").capitalize())
        name = "".join(c if c.isalnum() else "-" for c in state.lower())
        code = f"rl.plot.heatmap(trace[{tracks[0].layer!r}][{state!r}])"
        head = Head(f"track-{over.track}-{name}", title, "Value of each unit, at each step.", code)
        choice = Choice(f"{symbol(state)}_t", [track.states[state] for track in tracks], "signed")
        found.append(maps(head, [choice], over))
    return found


def _gates(tracks: Sequence[Track], over: Over) -> list[Figure]:
    prefix, layer = f"track-{over.track}", repr(tracks[0].layer)
    gates = {name: [np.asarray(t.gates)[:, :, i] for t in tracks] for i, name in enumerate(tracks[0].gate_names)}
    open_or_shut = {name: all(_is_share(values) for values in moments) for name, moments in gates.items()}
    words = "Mean over units: near 0 a gate is shut, near 1 open." + (
        "" if all(open_or_shut.values()) else " A candidate is no gate: it may be negative."
    )
    head = Head(f"{prefix}-gates", "Gates", words, f"rl.plot.gates(trace[{layer}])")
    of_each = {name: (f"{prefix}-gate-units", place) for place, name in enumerate(gates)}
    axis = Axis("mean over units", share=all(open_or_shut.values()), of_units=of_each)
    means = {name: [values.mean(axis=-1) for values in moments] for name, moments in gates.items()}
    choices = [Choice(n, moments, "gate" if open_or_shut[n] else "signed") for n, moments in gates.items()]
    code = f"rl.plot.heatmap(trace[{layer}].gates.isel(gate=0))"
    by_unit = Head(f"{prefix}-gate-units", "Gates by unit", "Each gate of each unit, at each step.", code)
    return [lines(head, means, over, axis), maps(by_unit, choices, over)]


def _gate_gradients(tracks: Sequence[Track], over: Over) -> list[Figure]:
    code = f"rl.plot.curves((trace[{tracks[0].layer!r}].gate_grad ** 2).sum('unit') ** 0.5, log=True)"
    words = "Norm over units of dL/dz_t, z the sum that goes into the gate's activation: what its weights learn from."
    head = Head(f"track-{over.track}-gate-gradient", "Gradient of the gates through time", words, code)
    sizes = {
        f"|dL/dz_t| {name}": [norms(np.asarray(track.gate_gradients)[:, :, i]) for track in tracks]
        for i, name in enumerate(tracks[0].gate_names)
    }
    return [lines(head, sizes, over, Axis("norm over units", log=True))]


def _is_share(values: Array) -> bool:
    finite = values[np.isfinite(values)]
    return bool(((finite >= 0) & (finite <= 1)).all())


def of_weights(number: int, track: Track, weights: Weights | None) -> list[Figure]:
    """Norms of the weights of each unit, and the recurrent kernel from unit to unit."""
    columns, square = weight_norms(track, weights)
    layer, prefix, found = repr(track.layer.partition("#")[0]), f"track-{number}", []
    if columns:
        words = "Norm of the weights W, U that enter each unit, by gate, and of those that leave it."
        head = Head(f"{prefix}-weights", "Weights by unit", words, f"rl.weights(model)[{layer}]")
        found.append(of_units(head, np.stack(list(columns.values()), axis=1), list(columns), number))
    if square is not None and track.units <= LARGEST:
        words = "Recurrent kernel, root mean square over gates: row to unit, column from unit."
        code = f"rl.plot.weights_heatmap(rl.weights(model)[{layer}])"
        found.append(of_units(Head(f"{prefix}-kernel", "From unit to unit", words, code), square, [], number))
    return found


def weight_norms(track: Track, weights: Weights | None) -> tuple[dict[str, Array], Array | None]:
    """By column (unit,): norms of incoming weights by kernel and gate, of outgoing ones; and (unit, unit_in)."""
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
        ordered = array.transpose(lead, *([GATE] if GATE in array.dims else []), UNIT).values
        values = np.asarray(ordered, dtype=np.float64).reshape(len(ordered), len(gates), track.units)
        columns |= {f"{short} {gate}".strip(): safe_norm(values[:, i], axis=0) for i, gate in enumerate(gates)}
        if lead == UNIT_IN and len(values) == track.units:
            columns[LEAVING] = safe_norm(values.reshape(track.units, -1), axis=1)
            square = np.sqrt((values**2).mean(axis=1)).T
    return columns, square
