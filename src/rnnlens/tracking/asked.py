"""What every watch is asked in the same words, checked alike at the door of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from ..adapters.protocol import Adapter
from ..arguments import Check, anything, called, checked, loss, names, path, switch, whole
from ..errors import InputError, LayerNotFoundError, did_you_mean, message
from ..verbs.tracing.request import TraceRequest

P = ParamSpec("P")
R = TypeVar("R")


def _some_names(name: str, value: Any) -> Any:
    """As ``names``; also none at all."""
    return () if isinstance(value, list | tuple) and not value else names(name, value)


def _points(name: str, value: Any) -> int | None:
    return None if value is None else whole(least=1)(name, value)


#: What is not here is looked at by what it is for: a schedule, a probe, a logger.
_TABLE: dict[str, Check] = {
    "path": path,
    "loss": loss,
    "on_batch": called,
    "quantities": names,
    "layers": names,
    "keep": _some_names,
    "direct": _some_names,
    "stop_on": _some_names,
    "resume": switch,
    "points": _points,
    "step": whole(least=0),
}


def at_the_door(function: Callable[P, R]) -> Callable[P, R]:
    """Check what a watch is given, by the name of the argument, before anything is opened."""
    given = [name for name in inspect.signature(function).parameters if name != "self"]
    return checked(**{name: _TABLE.get(name, anything) for name in given})(function)


def listed(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """One name or several as a tuple; None for None."""
    if value is None:
        return None
    return (value,) if isinstance(value, str) else tuple(value)


def quantities_of(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Names of quantities of a trace.

    Raises
    ------
    InputError
        If one is none.
    """
    found = listed(value)
    TraceRequest.of(None, found, True)
    return found


def refuse_unknown(layers: Iterable[str] | None, adapter: Adapter, model: Any) -> None:
    """Refuse the name of a layer that the model does not have; one of several calls, ``"lstm#0"``, goes by its layer.

    Raises
    ------
    LayerNotFoundError
        With the names there are.
    """
    known = {info.name: None for info in adapter.describe(model)} | dict.fromkeys(adapter.facts(model).submodules)
    for name in layers or ():
        if name not in known and name.partition("#")[0] not in known:
            raise LayerNotFoundError(message(f"No layer is called {name!r}.", hint=did_you_mean(name, known)))


def refuse_idle(probe: Any, batches: Any, epochs: Collection[int], of_batches: Mapping[str, Any]) -> None:
    """Refuse an argument that would do nothing beside the others.

    Parameters
    ----------
    of_batches
        By name: arguments that are of the batches which are trained on; not given where they are false.

    Raises
    ------
    InputError
        For ``epochs`` without a probe, and for what is of batches where none are looked at.
    """
    if epochs and probe is None:
        what = "epochs= says when a probe is recorded, and there is none."
        raise InputError(message(what, got=f"epochs={tuple(epochs)}", hint="probe=(x, y)"))
    if probe is not None and batches is None:
        for name, value in of_batches.items():
            if value:
                what = f"{name}= is of batches that are trained on, and beside a probe none are looked at."
                raise InputError(message(what, got="batches=None", hint="batches=50, or leave out probe="))
