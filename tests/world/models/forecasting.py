"""Packages for time series: channels before steps, encoder and decoder, the last step alone."""

from __future__ import annotations

from typing import Any

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


@program("darts", "RNNModel's module")
def darts_rnn() -> Program:
    from darts.models.forecasting.rnn_model import _RNNModule
    from darts.utils.data.torch_datasets.utils import ModuleStage, PLModuleInput

    model = _RNNModule(
        "LSTM",
        input_size=2,
        hidden_dim=5,
        num_layers=1,
        target_size=2,
        nr_params=1,
        input_chunk_length=7,
        output_chunk_length=1,
    )
    return Program(
        model,
        batch(5, 7, 2, dtype=torch.float32),
        batch(5, 7, 2, dtype=torch.float32),
        lambda returned, target: functional.mse_loss(returned.prediction.squeeze(-1), target),
        output_axes=("sample", "time", "unit", "parameter"),
        output=lambda returned: returned.prediction,
        of="output[prediction]",
        given=lambda x: PLModuleInput(past_target=x, stage=ModuleStage.TRAIN),
        wrt="input[past_target]",
    )


@program("darts", "BlockRNNModel's module")
def darts_block_rnn() -> Program:
    from darts.models.forecasting.block_rnn_model import _BlockRNNModule
    from darts.utils.data.torch_datasets.utils import ModuleStage, PLModuleInput

    model = _BlockRNNModule(
        "GRU",
        activation="ReLU",
        input_size=2,
        hidden_dim=5,
        future_cov_dim=0,
        num_layers=1,
        target_size=2,
        nr_params=1,
        input_chunk_length=7,
        output_chunk_length=3,
    )
    return Program(
        model,
        batch(5, 7, 2, dtype=torch.float32),
        batch(5, 3, 2, dtype=torch.float32),
        lambda returned, target: functional.mse_loss(returned.prediction.squeeze(-1), target),
        output_axes=("sample", "time", "unit", "parameter"),
        output=lambda returned: returned.prediction,
        of="output[prediction]",
        given=lambda x: PLModuleInput(past_target=x, stage=ModuleStage.TRAIN),
        wrt="input[past_target]",
    )


@program("neuralforecast", "LSTM")
def neuralforecast_lstm() -> Program:
    from neuralforecast.models import LSTM

    return _windows(LSTM(h=3, input_size=8, encoder_hidden_size=5, decoder_hidden_size=4, max_steps=1))


@program("neuralforecast", "GRU, recurrent decoding")
def neuralforecast_recurrent_gru() -> Program:
    from neuralforecast.models import GRU

    model = GRU(h=3, input_size=8, encoder_hidden_size=5, encoder_n_layers=1, recurrent=True, max_steps=1)
    return _windows(model)


@program("neuralforecast", "DilatedRNN")
def neuralforecast_dilated() -> Program:
    from neuralforecast.models import DilatedRNN

    model = DilatedRNN(h=3, input_size=8, encoder_hidden_size=5, dilations=[[1, 2]], decoder_hidden_size=4, max_steps=1)
    # A linear layer mixes the steps into the horizon, of which every entry depends on every step.
    return _windows(model, ("sample", "horizon", "unit"))


def _windows(model: torch.nn.Module, output_axes: tuple[str, ...] = ("sample", "time", "unit")) -> Program:
    """Return a program of a dictionary of a window's parts, as neuralforecast's own training step makes it."""
    return Program(
        model,
        batch(4, 8, 1, dtype=torch.float32),
        batch(4, 3, 1, dtype=torch.float32),
        functional.mse_loss,
        output_axes=output_axes,
        given=lambda x: {"insample_y": x, "futr_exog": None, "hist_exog": None, "stat_exog": None},
        wrt="input[insample_y]",
    )


@program("pytorch-forecasting", "RecurrentNetwork")
def pytorch_forecasting_recurrent() -> Program:
    from pytorch_forecasting import RecurrentNetwork

    data, parts = _dataset()
    return _of_dataset(RecurrentNetwork.from_dataset(data, cell_type="LSTM", hidden_size=6, rnn_layers=1), parts)


@program("pytorch-forecasting", "TemporalFusionTransformer")
def pytorch_forecasting_tft() -> Program:
    from pytorch_forecasting import TemporalFusionTransformer

    data, parts = _dataset()
    model = TemporalFusionTransformer.from_dataset(
        data, hidden_size=6, lstm_layers=1, attention_head_size=1, output_size=1, loss=_mae()
    )
    return _of_dataset(model, parts)


def _mae() -> torch.nn.Module:
    from pytorch_forecasting.metrics import MAE

    return MAE()


def _dataset() -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a data set of three series and the parts of one batch of it."""
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    numbers = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "value": numbers.random(36),
            "price": numbers.random(36),
            "series": np.repeat(["a", "b", "c"], 12),
            "step": np.tile(np.arange(12), 3),
        }
    )
    data = TimeSeriesDataSet(
        frame,
        group_ids=["series"],
        target="value",
        time_idx="step",
        max_encoder_length=5,
        max_prediction_length=2,
        time_varying_unknown_reals=["value"],
        time_varying_known_reals=["price"],
    )
    return data, next(iter(data.to_dataloader(train=False, batch_size=4)))[0]


def _of_dataset(model: torch.nn.Module, parts: dict[str, torch.Tensor]) -> Program:
    return Program(
        model,
        parts["encoder_cont"],
        batch(len(parts["encoder_cont"]), 2, 1, dtype=torch.float32),
        lambda returned, target: functional.mse_loss(returned.prediction, target),
        output=lambda returned: returned.prediction,
        of="output[prediction]",
        given=lambda x: {**parts, "encoder_cont": x},
        wrt="input[encoder_cont]",
    )


@program("pytorch-forecasting", "sLSTMNetwork, steps first")
def pytorch_forecasting_slstm() -> Program:
    from pytorch_forecasting.layers import sLSTMNetwork

    return Program(
        sLSTMNetwork(3, 6, 2, 2),
        batch(7, 5, 3, dtype=torch.float32),
        batch(5, 2, dtype=torch.float32),
        lambda returned, target: functional.mse_loss(returned[0], target),
        input_axes=("time", "sample", "feature"),
        output_axes=("sample", "unit"),
        output=lambda returned: returned[0],
        of="output[0]",
    )


@program("pypots", "GRUD")
def pypots_grud() -> Program:
    from pypots.classification import GRUD

    classifier = GRUD(n_steps=6, n_features=3, rnn_hidden_size=5, n_classes=2, epochs=1)
    parts = {key: part for key, part in _incomplete().items() if key != "X"}
    return Program(
        classifier.model,
        batch(4, 6, 3, dtype=torch.float32),
        torch.tensor([0, 1, 1, 0]),
        lambda returned, target: functional.cross_entropy(returned["logits"], target),
        output_axes=("sample", "unit"),
        output=lambda returned: returned["logits"],
        of="output[logits]",
        given=lambda x: {"X": x, **parts, "empirical_mean": torch.zeros(4, 3), "X_filledLOCF": torch.zeros(4, 6, 3)},
        wrt="input[X]",
    )


@program("pypots", "BRITS")
def pypots_brits() -> Program:
    from pypots.imputation import BRITS

    return _imputation(BRITS(n_steps=6, n_features=3, rnn_hidden_size=5, epochs=1).model)


@program("pypots", "MRNN")
def pypots_mrnn() -> Program:
    from pypots.imputation import MRNN

    return _imputation(MRNN(n_steps=6, n_features=3, rnn_hidden_size=5, epochs=1).model)


def _incomplete() -> dict[str, torch.Tensor]:
    mask = torch.ones(4, 6, 3)
    mask[0, 2, 1] = mask[2, 4:, 0] = 0
    return {"missing_mask": mask, "deltas": 1 + torch.arange(72.0).reshape(4, 6, 3) % 3}


def _imputation(model: torch.nn.Module) -> Program:
    """Return a program of a series and its reversal, of which the imputed series is compared with a target."""
    forward = _incomplete()
    backward = {key: part.flip(1) for key, part in forward.items()}

    def given(x: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        return {"forward": {"X": x, **forward}, "backward": {"X": reversed_x, **backward}}

    x = batch(4, 6, 3, dtype=torch.float32)
    reversed_x = x.flip(1)
    return Program(
        model,
        x,
        batch(4, 6, 3, dtype=torch.float32),
        lambda returned, target: functional.mse_loss(returned["reconstruction"], target),
        output=lambda returned: returned["reconstruction"],
        of="output[reconstruction]",
        given=given,
        wrt="input[forward.X]",
    )


@program("pypots", "USGAN")
def pypots_usgan() -> Program:
    from pypots.imputation import USGAN

    return _imputation(USGAN(n_steps=6, n_features=3, rnn_hidden_size=5, epochs=1).model)


@program("neuralforecast", "RNN")
def neuralforecast_rnn() -> Program:
    from neuralforecast.models import RNN

    return _windows(RNN(h=3, input_size=8, encoder_hidden_size=5, decoder_hidden_size=4, max_steps=1))


@program("gluonts", "DeepARModel, unrolled")
def gluonts_deepar() -> Program:
    from gluonts.torch.model.deepar.module import DeepARModel

    import rnnlens as rl

    model = DeepARModel("D", context_length=5, prediction_length=1, hidden_size=6, num_layers=1, lags_seq=[1, 2])

    def hidden(series: torch.Tensor) -> torch.Tensor:
        x = series.squeeze(-1)
        static, times = torch.zeros(len(x), 1), torch.zeros(len(x), x.shape[1], 1)
        known, future = x[:, -1:], times[:, :1]
        output: torch.Tensor = model.unroll_lagged_rnn(
            static.long(), static, times, x, torch.ones_like(x), future, known
        )[2]
        return output

    return Program(
        rl.torch.model(hidden, model),
        batch(4, 7, 1, dtype=torch.float32).abs(),
        batch(4, 5, 6, dtype=torch.float32),
        functional.mse_loss,
        call=hidden,
        modules=(model,),
    )
