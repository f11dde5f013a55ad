"""Tensors on the CPU as the NumPy arrays that share their memory.

torch's own threads spin while they wait for each other: with one core busy, the thousands of short operations of a
sweep take many times as long. The recurrence therefore runs on NumPy wherever that costs no copy, and deals samples to
threads of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from ..adapters.protocol import RecurrentCall
from ..autodiff.tensors import shared
from ..recurrence.cells import Cell


def on_host(calls: Iterable[RecurrentCall]) -> list[RecurrentCall]:
    """Calls in NumPy where they lie on the CPU; a cell that the framework runs is asked in tensors, step by step."""
    cells: dict[int, Cell] = {}
    found = []
    for call in calls:
        if not call.cell.by_framework and shared(call.input) is not None:
            cell = cells.setdefault(id(call.cell), call.cell.with_weights(_numpy))
            call = replace(call, **{f.name: _numpy(getattr(call, f.name)) for f in fields(call)} | {"cell": cell})
        found.append(call)
    return found


def _numpy(value: Any) -> Any:
    array = shared(value)
    if array is not None:
        return array
    if isinstance(value, tuple):
        return tuple(_numpy(v) for v in value)
    if isinstance(value, dict):
        return {key: _numpy(v) for key, v in value.items()}
    return value
