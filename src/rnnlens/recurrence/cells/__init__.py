"""Recurrent cells, one class in one file each: what their parts are called, their equations, and their derivatives.

As ``rl.cells`` also what a user needs to add one: :class:`Cell`, :func:`register`, the words of common weights and
:func:`sigmoid`, which every framework can differentiate.
"""

from __future__ import annotations

from ...vocabulary import BIAS, KERNEL, PROJECTION, RECURRENT_BIAS, RECURRENT_KERNEL, Quantity
from .cell import Cell, by_name
from .elementwise import sigmoid
from .gru import GRU
from .lstm import LSTM
from .record import Record
from .registry import cell_of_kind, kinds, register, registered
from .simple_rnn import SimpleRNN
from .stepped import StepCell

__all__ = [
    "BIAS",
    "GRU",
    "KERNEL",
    "LSTM",
    "PROJECTION",
    "RECURRENT_BIAS",
    "RECURRENT_KERNEL",
    "Cell",
    "Quantity",
    "Record",
    "SimpleRNN",
    "StepCell",
    "by_name",
    "cell_of_kind",
    "kinds",
    "register",
    "registered",
    "sigmoid",
]
