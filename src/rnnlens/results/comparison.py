"""The result of ``rl.compare``: several diagnoses side by side."""

from __future__ import annotations

import math

import xarray as xr

from .base import Part, Result

#: Columns of the table: variable, heading, how a number is written.
COLUMNS = (("skill", "skill", "{:.2f}"), ("memory", "memory", "{:.0f}"), ("memory_1_percent", "at 1 %", "{:.0f}"))


class Comparison(Result, kind="comparison"):
    """What ``rl.compare`` returns: ``c.table``, a Dataset over ``name``; prints as a table.

    ``difference`` and ``difference_interval`` are those of the memory from the first, by a bootstrap over the samples
    that all share.
    """

    @property
    def table(self) -> xr.Dataset:
        """One row per diagnosis."""
        return self.dataset(self.layers[0])

    def _headline(self) -> str:
        return f"{self.table.sizes['name']} diagnoses"

    def _rows(self) -> list[tuple[str, str]]:
        table = self.table
        rows = []
        for i, name in enumerate(table["name"].values):
            parts = [_cell(table, key, words, form, i) for key, words, form in COLUMNS]
            if i and bool(table["known"].values[[0, i]].all()):
                low, high = table["difference_interval"].values[i]
                difference = f"{table['difference'].values[i]:+.0f}"
                parts.append(f"{difference} against the first (95 % CI {low:+.0f} to {high:+.0f})")
            codes = str(table["findings"].values[i])
            rows.append((str(name), ", ".join([*parts, codes] if codes else parts)))
        return rows

    def _parts(self) -> list[Part]:
        return [(name, words, None) for name, words in self._rows()]


def _cell(table: xr.Dataset, key: str, words: str, form: str, row: int) -> str:
    value = float(table[key].values[row])
    if math.isnan(value) or (key != "skill" and not bool(table["known"].values[row])):
        return f"{words} unknown"
    low, high = (float(v) for v in table[f"{key}_interval"].values[row])
    return f"{words} {form.format(value)} ({form.format(low)} to {form.format(high)})"
