"""Recurrent cells, one class per file: names of their parts, equations, and derivatives.

The public module ``rl.cells`` also has the names needed to add a cell: :class:`Cell`, :func:`register`, the quantities
of common weights, and :func:`sigmoid`, which every framework can differentiate.
"""

from __future__ import annotations

from ...vocabulary import BIAS, KERNEL, PROJECTION, RECURRENT_BIAS, RECURRENT_KERNEL, Quantity
from ..activations import sigmoid
from ..trajectory import Record
from .cell import Cell, by_name
from .cifg import CIFG
from .conv_lstm import ConvLSTM1D, ConvLSTM2D, ConvLSTM3D
from .gru import GRU, gru_tensorflow1, gru_torch
from .ind_rnn import IndRNN
from .lru import LRU
from .lstm import LSTM
from .lstm_layer_norm import LayerNormLSTM
from .lstm_peephole import PeepholeLSTM
from .min_gru import MinGRU
from .min_lstm import MinLSTM
from .registry import cell_of_kind, kinds, register, registered
from .simple_rnn import SimpleRNN
from .stepped import StepCell

__all__ = [
    "BIAS",
    "CIFG",
    "GRU",
    "KERNEL",
    "LRU",
    "LSTM",
    "PROJECTION",
    "RECURRENT_BIAS",
    "RECURRENT_KERNEL",
    "Cell",
    "ConvLSTM1D",
    "ConvLSTM2D",
    "ConvLSTM3D",
    "IndRNN",
    "LayerNormLSTM",
    "MinGRU",
    "MinLSTM",
    "PeepholeLSTM",
    "Quantity",
    "Record",
    "SimpleRNN",
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
