"""Torch models for the tests of every adapter; see ``tested_adapter.py``."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from specimen import Specimen
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

surroundings = nullcontext


class Stacked(nn.Module):
    """Embedded ids and a float input, two bidirectional layers, and a head at every step."""

    def __init__(self, layer):
        super().__init__()
        self.table = nn.Embedding(9, 3)
        self.rnn = layer(6, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, ids, x):
        return self.head(self.rnn(torch.cat([self.table(ids), x], -1))[0])


class Chain(nn.Module):
    """A chain of library layers: an LSTM and a linear head."""

    def __init__(self):
        super().__init__()
        self.lstm, self.top = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.top(self.lstm(x)[0])


class Centred(Chain):
    """A chain whose samples depend on each other: the mean over the batch is subtracted."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


def data(samples, steps, ids=False):
    """Return x and y of a model that answers at every step; with ``ids``, x is a pair of ids and floats."""
    torch.manual_seed(1)
    numbers, x = torch.randint(0, 9, (samples, steps)), torch.randn(samples, steps, 3)
    return {"x": (numbers, x) if ids else x, "y": torch.randn(samples, steps, 2)}


def specimen(make, *arguments, ids=False):
    torch.manual_seed(0)
    return Specimen(make(*arguments), partial(data, ids=ids), functional.mse_loss, functional.l1_loss)


INDEPENDENT = {
    "LSTM": partial(specimen, Stacked, nn.LSTM, ids=True),
    "GRU": partial(specimen, Stacked, nn.GRU, ids=True),
    "RNN": partial(specimen, Stacked, nn.RNN, ids=True),
    "chain of library layers": partial(specimen, Chain),
}
mixing = partial(specimen, Centred)


def tagger():
    torch.manual_seed(0)
    return Chain(), functional.mse_loss


FOREIGN = {
    "requires grad": lambda: torch.ones(2, 5, 3, requires_grad=True),
    "bfloat16": lambda: torch.ones(2, 5, 3, dtype=torch.bfloat16),
    "meta": lambda: torch.ones(2, 5, 3, device="meta"),
    "sparse": lambda: torch.ones(2, 5, 3).to_sparse(),
    "long": lambda: torch.ones(2, 5, 3, dtype=torch.long),
    "complex tensor": lambda: torch.ones(2, 5, 3, dtype=torch.complex64),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
    "negative bit": lambda: torch._neg_view(torch.ones(2, 5, 3)),
    "conjugate bit": lambda: torch.ones(2, 5, 3, dtype=torch.complex64).conj(),
    "negative view of complex": lambda: torch.ones(2, 5, 3, dtype=torch.complex64).conj().imag,
    "expanded": lambda: torch.ones(1, 1, 3).expand(2, 5, 3),
    "NaN tensor": lambda: torch.full((2, 5, 3), float("nan")),
    "0-d tensor": lambda: torch.tensor(1.0),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 5, 3), 0.1, 0, torch.qint8),
    "loader": lambda: DataLoader(TensorDataset(torch.ones(4, 5, 3), torch.ones(4, 5, 2)), batch_size=2),
    "data set": lambda: TensorDataset(torch.ones(4, 5, 3)),
    "packed": lambda: nn.utils.rnn.pack_sequence([torch.ones(3, 3), torch.ones(2, 3)]),
    "module": lambda: nn.Linear(3, 2),
    "empty model": nn.Sequential,
    "double": lambda: nn.LSTM(3, 4, batch_first=True).double(),
    "meta model": lambda: nn.LSTM(3, 4, device="meta"),
    "loss class": lambda: nn.MSELoss,
    "loss": nn.MSELoss,
    "unreduced loss": lambda: nn.MSELoss(reduction="none"),
    "optimizer": lambda: torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1),
}


def state_of(model):
    modules = list(model.modules())
    return (
        *(p.detach().numpy().tobytes() for p in model.state_dict().values()),
        *(m.training for m in modules),
        *(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules),
        *(p.requires_grad and p.grad is None for p in model.parameters()),
        torch.get_rng_state().numpy().tobytes(),
        np.random.get_state()[1].tobytes(),  # noqa: NPY002  the global state must not change
        torch.is_grad_enabled(),
    )
