"""Packages for sound: spectrograms with steps last, light gated units, convolutions before recurrent layers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from programs import Program, WithHead, batch, program, replaced
from torch import nn
from torch.nn import functional


def _light_by_step() -> AbstractContextManager[dict[str, Any]]:
    """Write the step of a light GRU's loop as the error says."""
    from speechbrain.nnet.RNN import LiGRU_Layer

    import rnnlens as rl

    def loop(self: Any, projected: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        def step(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            candidate, update = (x + self.u(h)).chunk(2, 1)
            update = torch.sigmoid(update)
            return update * h + (1 - update) * self.act(candidate)

        states = []
        for x in projected.unbind(1):
            state = rl.torch.step(step, x, state)
            states.append(state)
        return torch.stack(states, 1)

    return replaced(LiGRU_Layer, "_ligru_cell", loop)


def _quasi_by_scan() -> AbstractContextManager[dict[str, Any]]:
    """Declare the scan of a quasi-recurrent layer, whose steps come first."""
    from speechbrain.nnet.RNN import QuasiRNNLayer

    import rnnlens as rl

    def forget_mult(_: Any, f: torch.Tensor, x: torch.Tensor, hidden: Any) -> torch.Tensor:
        assert hidden is None
        return rl.torch.scan((1 - f).transpose(0, 1), (f * x).transpose(0, 1)).transpose(0, 1)

    return replaced(QuasiRNNLayer, "forgetMult", forget_mult)


LIGHT_HINTS = {"h = rl.torch.step(": _light_by_step}
QUASI_HINTS = {"(rl.torch.scan)": _quasi_by_scan}


@program("openunmix", "OpenUnmix, steps last")
def open_unmix() -> Program:
    from openunmix.model import OpenUnmix

    return Program(
        OpenUnmix(nb_bins=5, nb_channels=2, hidden_size=6, nb_layers=2),
        batch(3, 2, 5, 7, dtype=torch.float32).abs(),
        batch(3, 2, 5, 7, dtype=torch.float32).abs(),
        functional.mse_loss,
        input_axes=("sample", "axis_1", "feature", "time"),
        output_axes=("sample", "channel", "bin", "time"),
    )


@program("speechbrain", "GRU")
def speechbrain_gru() -> Program:
    from speechbrain.nnet.RNN import GRU

    return _speech(WithHead(GRU(hidden_size=5, input_shape=(4, 7, 3)), 5))


@program("speechbrain", "LiGRU")
def speechbrain_ligru() -> Program:
    from speechbrain.nnet.RNN import LiGRU

    return _speech(WithHead(LiGRU(hidden_size=5, input_shape=(4, 7, 3)), 5), hints=LIGHT_HINTS)


@program("speechbrain", "LiGRU, bidirectional")
def speechbrain_bidirectional_ligru() -> Program:
    from speechbrain.nnet.RNN import LiGRU

    return _speech(WithHead(LiGRU(hidden_size=5, input_shape=(4, 7, 3), bidirectional=True), 10), hints=LIGHT_HINTS)


@program("speechbrain", "QuasiRNN")
def speechbrain_quasi_rnn() -> Program:
    from speechbrain.nnet.RNN import QuasiRNN

    return _speech(WithHead(QuasiRNN(hidden_size=5, input_shape=(4, 7, 3)), 5), hints=QUASI_HINTS)


@program("speechbrain", "CRDNN")
def speechbrain_crdnn() -> Program:
    from speechbrain.lobes.models.CRDNN import CRDNN

    model = CRDNN(
        input_shape=(4, 7, 6),
        cnn_blocks=1,
        cnn_channels=(2,),
        rnn_neurons=5,
        rnn_layers=1,
        dnn_neurons=2,
        dnn_blocks=1,
    )
    return _speech(model, features=6, steps=8, hints=LIGHT_HINTS)


def _speech(model: nn.Module, features: int = 3, steps: int = 7, **known: Any) -> Program:
    x = batch(4, steps, features, dtype=torch.float32)
    return Program(model, x, torch.zeros_like(model.eval()(x)), functional.mse_loss, **known)


@program("speechbrain", "AttentionalRNNDecoder")
def attentional_decoder() -> Program:
    from speechbrain.nnet.RNN import AttentionalRNNDecoder

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = AttentionalRNNDecoder("gru", "content", 6, 5, 1, enc_dim=4, input_size=3)

        def forward(self, x: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
            steps, _attention = self.decoder(x, encoded, torch.ones(len(x)))
            return steps

    net, encoded = Net(), batch(4, 9, 4, dtype=torch.float32)
    return _of_steps(
        net, 6, call=lambda x: net(x, encoded), given=lambda x: {"x": x, "encoded": encoded}, wrt="input[x]"
    )


@program("asteroid", "SingleRNN, bidirectional")
def asteroid_single() -> Program:
    from asteroid.masknn.recurrent import SingleRNN

    return _of_steps(WithHead(SingleRNN("lstm", 3, 5, bidirectional=True), 10))


@program("asteroid", "StackedResidualRNN")
def asteroid_stacked() -> Program:
    from asteroid.masknn.recurrent import StackedResidualRNN

    return _of_steps(StackedResidualRNN("gru", 3, 2, bidirectional=False), 3)


@program("espnet", "RNN, bidirectional LSTM")
def espnet_rnn() -> Program:
    from espnet.nets.pytorch_backend.rnn.encoders import RNN

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = RNN(3, 2, 5, 2, 0.0, typ="blstm")

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return self.encoder(x, lengths)[0]

    net, lengths = Net(), torch.tensor([7, 7, 5, 4])
    return _of_steps(net, call=lambda x: net(x, lengths), given=lambda x: {"x": x, "lengths": lengths}, wrt="input[x]")


@program("torchaudio", "DeepSpeech")
def deep_speech() -> Program:
    from torchaudio.models import DeepSpeech

    return Program(
        DeepSpeech(3, n_hidden=6, n_class=2),
        batch(4, 1, 7, 3, dtype=torch.float32),
        batch(4, 7, 2, dtype=torch.float32),
        functional.mse_loss,
        input_axes=("sample", "channel", "time", "feature"),
        axes={"input": ("sample", "channel", "time", "feature")},
    )


def _of_steps(model: nn.Module, units: int = 2, **known: Any) -> Program:
    x, y = batch(4, 7, 3, dtype=torch.float32), batch(4, 7, units, dtype=torch.float32)
    return Program(model, x, y, functional.mse_loss, **known)
