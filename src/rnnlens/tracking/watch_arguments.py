"""Arguments that all watches share, checked in the same way; ``Schedule``: the steps at which a record is due."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

from ..adapters.protocol import Adapter
from ..arguments import Check, anything, callable_value, checked, integer, loss, names, path, switch
from ..arguments import as_list as as_list
from ..errors import InputError, LayerNotFoundError, did_you_mean, short_repr
from ..verbs.traced_layers import TraceSelection
from ..vocabulary import named_states

POWERS = "powers of two"
Every = int | str | Callable[[int, int], bool]


@dataclass(frozen=True)
class Schedule:
    """Steps and epochs at which a record is due.

    Parameters
    ----------
    every
        Number of steps between records, 0 for never; ``"powers of two"`` for steps 1, 2, 4, 8, ...; or a function
        ``(step, epoch) -> bool``.
    epochs
        Epochs, from 0, at whose end a record is made in addition.
    """

    every: Every = 50
    epochs: Collection[int] = ()

    def __post_init__(self) -> None:
        """Check the fields; raise InputError for another ``every``, or ``epochs`` that are no whole numbers."""
        is_powers = isinstance(self.every, str) and self.every == POWERS
        if not (is_powers or _is_whole_number(self.every) or callable(self.every)):
            raise InputError(
                "every= is no schedule.",
                got=short_repr(self.every),
                expected=f"a number of steps (0: never), {POWERS!r}, or a function (step, epoch) -> bool",
            )
        epochs = as_list(self.epochs)
        if epochs is None or not all(map(_is_whole_number, epochs)):
            got = short_repr(self.epochs)
            raise InputError("epochs= are whole numbers from 0.", got=got, expected="such as (4, 9)")
        object.__setattr__(self, "epochs", tuple(map(int, epochs)))

    @property
    def is_off(self) -> bool:
        """True if no step or epoch is ever due."""
        return _is_whole_number(self.every) and self.every == 0 and not self.epochs

    def is_due(self, step: int, epoch: int) -> bool:
        """Return whether a record is due after ``step`` batches of training, in ``epoch``."""
        if callable(self.every):
            return bool(self.every(step, epoch))
        if isinstance(self.every, str):
            return step > 0 and step & (step - 1) == 0
        return self.every > 0 and step % int(self.every) == 0

    def is_due_after(self, epoch: int) -> bool:
        """Return whether a record is due at the end of ``epoch``."""
        return epoch in self.epochs

    def __str__(self) -> str:
        every_text = self.every if isinstance(self.every, str) else getattr(self.every, "__name__", self.every)
        return f"every={every_text}" + (f", epochs={sorted(self.epochs)}" if self.epochs else "")


def _is_whole_number(value: Any) -> bool:
    """Return whether a value is a whole number of at least 0; NumPy integers count, booleans do not."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


P = ParamSpec("P")
R = TypeVar("R")


def _possibly_empty_names(name: str, value: Any) -> Any:
    """Check that an argument is a name or a list of names, which may be empty."""
    return () if isinstance(value, list | tuple) and not value else names(name, value)


def _checked_points(name: str, value: Any) -> int | None:
    return None if value is None else integer(least=1)(name, value)


#: Check of each argument by name; others (schedule, probe, loggers) are checked where they are used.
_CHECKS: dict[str, Check] = {
    "path": path,
    "loss": loss,
    "on_batch": callable_value,
    "on_alert": callable_value,
    "quantities": names,
    "layers": names,
    "keep": _possibly_empty_names,
    "direct": _possibly_empty_names,
    "stop_on": _possibly_empty_names,
    "resume": switch,
    "points": _checked_points,
    "step": integer(least=0),
}


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that its arguments are checked by name before any file is opened."""
    argument_names = [name for name in inspect.signature(function).parameters if name != "self"]
    return checked(**{name: _CHECKS.get(name, anything) for name in argument_names})(function)


def names_tuple(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Convert one name or several to a tuple; None stays None."""
    if value is None:
        return None
    return (value,) if isinstance(value, str) else tuple(value)


def quantity_names(value: str | Iterable[str] | None, *, own_states: bool = False) -> tuple[str, ...] | None:
    """Return names of trace quantities as a tuple, None for None; raise InputError for an unknown name.

    ``own_states``: the model may have cells of the user's own, whose states have names that only a run shows.
    """
    quantities = names_tuple(value)
    stems = list(dict.fromkeys(name.removesuffix("_grad") for name in quantities or ())) if own_states else []
    TraceSelection.of(None, quantities, True, lambda: named_states(stems) if stems else ())
    return quantities


def refuse_unknown_layers(layers: Iterable[str] | None, adapter: Adapter, model: Any) -> None:
    """Raise LayerNotFoundError for a layer that the model lacks; ``"lstm#0"`` (one of several calls) is ``"lstm"``."""
    names = [info.name for info in adapter.known_layers(model)]
    known_names = dict.fromkeys([*names, *adapter.facts(model).submodules])
    for name in layers or ():
        if name not in known_names and name.partition("#")[0] not in known_names:
            raise LayerNotFoundError(f"No layer is called {name!r}.", hint=did_you_mean(name, known_names))


def refuse_idle_arguments(
    probe: Any, batches: Any, epochs: Collection[int], batch_arguments: Mapping[str, Any]
) -> None:
    """Raise InputError for ``epochs`` without a probe, and for ``batch_arguments`` if no batches are captured."""
    if epochs and probe is None:
        problem = "epochs= schedules a probe, and there is no probe."
        raise InputError(problem, got=f"epochs={tuple(epochs)}", hint="probe=(x, y)")
    if probe is not None and batches is None:
        for name, value in batch_arguments.items():
            if value:
                problem = f"{name}= applies to training batches, which are not recorded when there is a probe."
                raise InputError(problem, got="batches=None", hint="batches=50, or leave out probe=")
