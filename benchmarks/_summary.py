"""Rows of the summary that ``speed.py`` prints, passed on by the benchmarks that it runs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

#: Environment variable with the path of the file that collects the rows; without it nothing is collected.
COLLECT = "RNNLENS_BENCHMARK_ROWS"


@dataclass(frozen=True)
class Row:
    """One measured figure with its peer and its bar.

    Attributes
    ----------
    group, call
        Heading in the table, and the measured call.
    value, unit
        The figure: a ratio (``"x"``), ``"ms"``, ``"s"`` or ``"GiB"``.
    peer
        The call that a ratio is relative to, or that was measured for comparison.
    bar
        The limit; None for a figure without one.
    at_least
        Whether the figure must be at least the bar, as a speed-up must; else at most.
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
    """Append rows to the collecting file, if there is one."""
    if path := os.environ.get(COLLECT):
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file in the order of measurement."""
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
