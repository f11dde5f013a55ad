"""Recurrent cells, one class per file: names of their parts, equations, and derivatives.

The public module ``rl.cells`` also has the names needed to add a cell: :class:`Cell`, :func:`register`, the quantities
of common weights, and :func:`sigmoid`, which every framework can differentiate.
"""

from __future__ import annotations

from ...vocabulary import BIAS, KERNEL, PROJECTION, RECURRENT_BIAS, RECURRENT_KERNEL, Quantity
from ..activations import sigmoid
from ..trajectory import Record
from .cell import Cell, by_name
from .conv_lstm import ConvLSTM1D as ConvLSTM1D
from .conv_lstm import ConvLSTM2D as ConvLSTM2D
from .conv_lstm import ConvLSTM3D as ConvLSTM3D
from .gru import GRU as GRU
from .gru import gru_tensorflow1, gru_torch
from .lru import LRU as LRU
from .lstm import CIFG as CIFG
from .lstm import LSTM as LSTM
from .lstm_layer_norm import LayerNormLSTM as LayerNormLSTM
from .lstm_peephole import PeepholeLSTM as PeepholeLSTM
from .minimal import MinGRU as MinGRU
from .minimal import MinLSTM as MinLSTM
from .registry import cell_of_kind, kinds, register, registered
from .simple_rnn import IndRNN as IndRNN
from .simple_rnn import SimpleRNN as SimpleRNN
from .stepped import StepCell

__all__ = [
    "BIAS",
    "KERNEL",
    "PROJECTION",
    "RECURRENT_BIAS",
    "RECURRENT_KERNEL",
    "Cell",
    "Quantity",
    "Record",
    "StepCell",
    "by_name",
    "cell_of_kind",
    "gru_tensorflow1",
    "gru_torch",
    "kinds",
    "register",
    "registered",
    "sigmoid",
]
__all__ += [cell.__name__ for cell in kinds().values()]
