"""Packages for text and for series of events: encoders of padded sequences."""

from __future__ import annotations

from typing import Any

import torch
from programs import Program, WithHead, batch, program
from torch import nn
from torch.nn import functional


@program("joeynmt", "RecurrentEncoder")
def joeynmt_encoder() -> Program:
    from joeynmt.encoders import RecurrentEncoder

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = RecurrentEncoder("gru", hidden_size=5, emb_size=3), nn.Linear(10, 2)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            mask = torch.arange(x.shape[1]) < lengths[:, None]
            return self.head(self.encoder(x, lengths, mask[:, None])[0])

    net, lengths = Net(), torch.tensor([7, 7, 7, 7])
    return _of_steps(net, call=lambda x: net(x, lengths), given=lambda x: {"x": x, "lengths": lengths}, wrt="input[x]")


@program("pytorch-lifestream", "RnnEncoder")
def lifestream_encoder() -> Program:
    from ptls.data_load.padded_batch import PaddedBatch
    from ptls.nn import RnnEncoder

    class Events(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = RnnEncoder(input_size=3, hidden_size=5, type="gru", is_reduce_sequence=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(PaddedBatch(x, torch.tensor([7, 7, 5, 4]))).payload

    return _of_steps(WithHead(Events(), 5))


def _of_steps(model: nn.Module, **known: Any) -> Program:
    x, y = batch(4, 7, 3, dtype=torch.float32), batch(4, 7, 2, dtype=torch.float32)
    return Program(model, x, y, functional.mse_loss, **known)
