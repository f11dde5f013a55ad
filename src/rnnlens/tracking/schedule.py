"""When a record is made: every N steps, at powers of two, at the end of given epochs, or as a function says."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ..errors import InputError, message, shown

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
