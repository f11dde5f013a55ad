"""Which loops and layers of a graph a question is about."""

from __future__ import annotations

from ...errors import LayerNotFoundError, ModelError, UnsupportedError, did_you_mean, message
from ..protocol import NOT_LOOKED_INTO, CaptureRequest
from .found import Loop
from .opened import Opened
from .weights import base, layers_of, variables_used


def refusals(found: Opened) -> dict[str, str]:
    """The recurrent layers of a Keras model that cannot be looked into, and why."""
    names = found.net.keras
    return {} if names is None else names.refusals(found.loops, variables_used(found))


def uncalled(found: Opened) -> list[str]:
    """A note that names the recurrent layers of a Keras model that outputs and loss do not depend on, if any."""
    names = [] if found.net.keras is None else found.net.keras.uncalled(variables_used(found))
    return [f"Left out, since outputs and loss do not depend on it: {', '.join(names)}."] if names else []


def within_reach(found: Opened, request: CaptureRequest) -> tuple[tuple[str, ...] | None, list[str]]:
    """The names asked for; where not all of them have to be seen without those that have nothing to show, and why.

    Variables in no scope of a layer, and scopes out of which nothing comes, have no output.
    """
    if request.all_must_run or request.layers is None:
        return request.layers, [] if request.layers is not None else uncalled(found)
    refused = refusals(found) | {loop.name: loop.cell.refused for loop in found.loops if loop.cell.refused}
    layers, kept = layers_of(found), dict[str, None]()
    for name in request.layers:
        calls = [loop.name for loop in found.loops if name in (loop.name, base(loop))]
        if not calls and name in layers and layers[name].output is not None:
            calls = [name]
        kept |= dict.fromkeys(call for call in calls if call not in refused and name not in refused)
    return tuple(kept), [f"{NOT_LOOKED_INTO}: {why.splitlines()[0]}" for why in dict.fromkeys(refused.values())]


def chosen(found: Opened, wanted: tuple[str, ...] | None) -> tuple[list[Loop], list[str]]:
    """The loops to look at, and the names of the other layers."""
    infos = list(dict.fromkeys(loop.name for loop in found.loops))
    layers = layers_of(found)
    refused = refusals(found)
    if wanted is None:
        if not infos and not refused:
            raise ModelError(
                message("There is no recurrent loop on the way to the outputs or the loss.", hint="outputs= and loss=")
            )
        asked = infos
    else:
        calls = {name: [loop.name for loop in found.loops if base(loop) == name] or [name] for name in wanted}
        asked = list(dict.fromkeys(call for name in wanted for call in (calls[name] if name not in infos else [name])))
    for name in [*asked, *(refused if wanted is None else ())]:
        if name in refused:
            raise UnsupportedError(refused[name])
    loops = [loop for name in asked for loop in found.layer(name)]
    for loop in loops:
        if loop.cell.refused:
            raise UnsupportedError(loop.cell.refused)
    others = [name for name in asked if name not in infos]
    for name in others:
        if name not in layers and ":" not in name:
            raise LayerNotFoundError(
                message(f"No layer is called {name!r}.", hint=did_you_mean(name, dict.fromkeys([*infos, *layers])))
            )
    return loops, others
