"""``Comparison``, the result of ``rl.compare``: several diagnoses side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import xarray as xr

from .base import Part, Result
from .diagnosis import Diagnosis

#: Columns of the table: variable, heading, format of a number.
COLUMNS = (("skill", "skill", "{:.2f}"), ("memory", "memory", "{:.0f}"), ("memory_1_percent", "at 1 %", "{:.0f}"))


class Comparison(Result, kind="comparison"):
    """Several diagnoses side by side: ``c.table``, a Dataset over ``name``; prints as a table.

    ``difference`` and ``difference_interval`` compare the memory with that of the first diagnosis, by a bootstrap over
    the samples common to all. The memory is NaN where it is unknown. ``error`` has the error of a model that could
    not be diagnosed, and is empty otherwise.

    Attributes
    ----------
    diagnoses : the diagnoses by name; empty in a comparison that was opened from a file
    """

    def __init__(
        self,
        datasets: Mapping[str, xr.Dataset] | xr.DataTree,
        *,
        diagnoses: Mapping[Any, Diagnosis] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(datasets, **common)
        self.diagnoses = dict(diagnoses or {})

    @property
    def table(self) -> xr.Dataset:
        """Dataset over ``name`` with one row per model."""
        return self.dataset(self.layers[0])

    def _headline(self) -> str:
        failed = int((self.table["error"] != "").sum())
        return f"{self.table.sizes['name'] - failed} diagnoses" + (f", {failed} failed" if failed else "")

    def _rows(self) -> list[tuple[str, str]]:
        table = self.table
        rows = []
        for i, (name, error) in enumerate(zip(table["name"].values, table["error"].values, strict=True)):
            if error:
                rows.append((str(name), f"failed: {str(error).splitlines()[0]}"))
                continue
            parts = [_cell(table, key, words, form, i) for key, words, form in COLUMNS]
            if i != table.attrs["reference"]:
                parts.append(_difference(table, i))
            codes = str(table["findings"].values[i])
            rows.append((str(name), ", ".join([*parts, codes] if codes else parts)))
        return rows

    def _parts(self) -> list[Part]:
        return [(name, words, None) for name, words in self._rows()]


def _difference(table: xr.Dataset, row: int) -> str:
    """Describe how the memory of one diagnosis differs from that of the first one."""
    first = int(table.attrs["reference"])
    value, (low, high) = float(table["difference"].values[row]), table["difference_interval"].values[row]
    if not bool(table["known"].values[[first, row]].all()):
        return "no difference of memory, as one is unknown"
    if math.isnan(value) or math.isnan(low):
        return "no difference of memory, as the samples are not the same"
    return f"memory {value:+.0f} against {table['name'].values[first]} (95 % CI {low:+.0f} to {high:+.0f})"


def _cell(table: xr.Dataset, key: str, words: str, form: str, row: int) -> str:
    value = float(table[key].values[row])
    if math.isnan(value) or (key != "skill" and not bool(table["known"].values[row])):
        return f"{words} unknown"
    low, high = (float(v) for v in table[f"{key}_interval"].values[row])
    return f"{words} {form.format(value)} ({form.format(low)} to {form.format(high)})"
