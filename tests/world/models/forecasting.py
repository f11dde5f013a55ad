"""Packages for time series: channels before steps, encoder and decoder, the last step alone."""

from __future__ import annotations

import torch
from programs import Program, batch, program
from torch.nn import functional


@program("tsai", "LSTM, channels first")
def tsai_lstm() -> Program:
    from tsai.models.RNN import LSTM

    return _channels_first(LSTM(3, 2, hidden_size=5, n_layers=2))


@program("tsai", "GRU, bidirectional, channels first")
def tsai_gru() -> Program:
    from tsai.models.RNN import GRU

    return _channels_first(GRU(3, 2, hidden_size=5, bidirectional=True))


@program("tsai", "LSTM_FCN beside convolutions")
def tsai_lstm_fcn() -> Program:
    from tsai.models.RNN_FCN import LSTM_FCN

    return _channels_first(LSTM_FCN(3, 2, seq_len=7, hidden_size=5, shuffle=False, conv_layers=[4, 4, 4]))


@program("tsai", "RNNPlus")
def tsai_rnn_plus() -> Program:
    from tsai.models.RNNPlus import RNNPlus

    return _channels_first(RNNPlus(3, 2, seq_len=7, hidden_size=5))


def _channels_first(model: torch.nn.Module) -> Program:
    return Program(
        model.double(),
        batch(5, 3, 7),
        batch(5, 2),
        functional.mse_loss,
        input_axes=("sample", "feature", "time"),
        output_axes=("sample", "unit"),
    )
