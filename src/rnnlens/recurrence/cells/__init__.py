"""Recurrent cells, one class in one file each: what their parts are called, their equations, and their derivatives."""

from __future__ import annotations

from .cell import Cell
from .gru import GRU
from .lstm import LSTM
from .record import Record
from .simple_rnn import SimpleRNN
from .stepped import StepCell

__all__ = ["GRU", "LSTM", "Cell", "Record", "SimpleRNN", "StepCell", "cell_of_kind", "kinds"]

_KINDS: dict[str, type[Cell]] = {cell.kind: cell for cell in (SimpleRNN, LSTM, GRU)}


def kinds() -> dict[str, type[Cell]]:
    """Every kind of cell that is known by name."""
    return dict(_KINDS)


def cell_of_kind(kind: str) -> type[Cell]:
    """The class of a kind of cell; :class:`Cell` itself, without gates, for one that is not known."""
    return _KINDS.get(kind, Cell)
