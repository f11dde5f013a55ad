"""What every watch is asked in the same words, checked alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..errors import InputError, message
from ..verbs.tracing.wanted import Wanted


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
    names = listed(value)
    Wanted.of(None, names, True)
    return names


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
