"""Rows of the summary that ``speed.py`` prints, handed over by the benchmarks that it runs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

#: Environment variable with the file that collects the rows; without it nothing is collected.
COLLECT = "RNNLENS_BENCHMARK_ROWS"


@dataclass(frozen=True)
class Row:
    """One measured figure: what it is of, its peer, and its bar.

    Attributes
    ----------
    group, call
        Heading in the table, and the measured call.
    value, unit
        The figure: a ratio (``"x"``), ``"ms"``, ``"s"`` or ``"GiB"``.
    peer
        What it is a ratio to, or beside what it was measured.
    bar
        The limit; None for a figure without one.
    at_least
        Whether the figure must be at least the bar, as a speed-up; else at most.
    """

    group: str
    call: str
    value: float
    unit: str
    peer: str = ""
    bar: float | None = None
    at_least: bool = False

    @property
    def is_met(self) -> bool | None:
        """Whether the bar is met; None without a bar."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar


def collect(*rows: Row) -> None:
    """Append rows to the summary that is being made, if there is one."""
    if path := os.environ.get(COLLECT):
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, in the order in which they were measured."""
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
