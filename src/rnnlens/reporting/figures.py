"""A figure of a report: its numbers for the script, and a drawing for those who have none.

``kind`` says how it is drawn: ``"lines"`` over time, ``"map"`` of rows over time (or over ``columns`` with names),
``"jacobian"``, ``"curve"`` over something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from ..typing import Array
from .fit import Plan


@dataclass(frozen=True)
class Head:
    """What a figure is called: its id in the page, title, a sentence, and the code that draws or gives the same."""

    id: str
    title: str
    words: str = ""
    code: str = ""


@dataclass
class Figure:
    """One figure: its words, its numbers as JSON can hold them, and a drawing of what is looked at first."""

    head: Head
    kind: str
    spec: dict[str, Any] = field(default_factory=dict)
    drawing: Markup = field(default_factory=Markup)
    remarks: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Its id in the page."""
        return self.head.id

    def to_json(self) -> dict[str, Any]:
        """What the script reads."""
        return {"id": self.id, "kind": self.kind, "title": self.head.title, **self.spec}


@dataclass(frozen=True)
class Shown:
    """Which samples have curves and maps, the first of them being drawn; and how many steps are one."""

    plan: Plan
    telling: tuple[int, ...]

    @property
    def curves(self) -> tuple[int, ...]:
        """Samples with curves."""
        return self.telling[: self.plan.curves]

    @property
    def maps(self) -> tuple[int, ...]:
        """Samples with maps."""
        return self.telling[: self.plan.maps]


@dataclass(frozen=True)
class Over:
    """What a figure over time is of: a track, by number, and which of its steps are data at each moment."""

    shown: Shown
    track: int
    masks: Sequence[Array | None]
