"""When a record is made: every N steps, at powers of two, at the end of given epochs, or as a function says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

from ..adapters.protocol import Adapter
from ..arguments import Check, anything, called, checked, loss, names, path, switch, whole
from ..errors import InputError, LayerNotFoundError, did_you_mean, message, shown
from ..verbs.tracing.request import TraceRequest

POWERS = "powers of two"
Every = int | str | Callable[[int, int], bool]


@dataclass(frozen=True)
class Schedule:
    """Whether a record is due.

    Parameters
    ----------
    every
        A number of steps, with 0 for never; ``"powers of two"``: steps 1, 2, 4, 8, ...; or a function
        ``(step, epoch) -> bool``.
    epochs
        Epochs, from 0, at whose end a record is made as well.
    """

    every: Every = 50
    epochs: Collection[int] = ()

    def __post_init__(self) -> None:
        """Refuse what is no schedule.

        Raises
        ------
        InputError
            For a negative number, another word, or epochs that are no whole numbers.
        """
        if not (_is_whole(self.every) or self.every == POWERS or callable(self.every)):
            raise InputError(
                message(
                    "every= is no schedule.",
                    got=shown(self.every),
                    expected=f"a number of steps (0: never), {POWERS!r}, or a function (step, epoch) -> bool",
                )
            )
        given: Any = self.epochs
        if not (isinstance(given, Collection) and not isinstance(given, str) and all(map(_is_whole, given))):
            raise InputError(message("epochs= are whole numbers from 0.", got=shown(given), expected="such as (4, 9)"))
        object.__setattr__(self, "epochs", tuple(map(int, given)))

    @property
    def off(self) -> bool:
        """Whether nothing is ever due."""
        return _is_whole(self.every) and self.every == 0 and not self.epochs

    def due(self, step: int, epoch: int) -> bool:
        """Whether a record is due once ``step`` batches were trained on, in ``epoch``."""
        if callable(self.every):
            return bool(self.every(step, epoch))
        if isinstance(self.every, str):
            return step > 0 and step & (step - 1) == 0
        return self.every > 0 and step % int(self.every) == 0

    def due_after(self, epoch: int) -> bool:
        """Whether a record is due at the end of ``epoch``."""
        return epoch in self.epochs

    def __str__(self) -> str:
        words = self.every if isinstance(self.every, str) else getattr(self.every, "__name__", self.every)
        return f"every={words}" + (f", epochs={sorted(self.epochs)}" if self.epochs else "")


def _is_whole(value: Any) -> bool:
    """Whether it counts something: also NumPy's integers do."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


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
