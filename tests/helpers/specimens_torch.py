"""Torch models for the tests of every adapter; see ``tested_adapter.py``."""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from specimen import NO_TRAINING, Declared, Specimen, generators
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


class Carrying(nn.Module):
    """Model with two 2-D weights called ``weight``, one of which is a table, and attributes called as facts are."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.rnn = nn.RNN(3, 4, num_layers=2, nonlinearity="relu", batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.heads = nn.ModuleList([nn.Linear(4, 2, dtype=torch.float64), nn.ReLU6()])
        self.leaky = nn.LeakyReLU()
        self.loss, self.optimizer, self.input_names = "mse", "mine", ["mine"]

    def forward(self, x):
        hidden = self.drop(self.rnn(self.table(x))[0])
        return self.leaky(self.heads[1](self.heads[0](hidden.double())))


def declared():
    torch.manual_seed(0)
    model = Carrying().eval()
    return Declared(
        model,
        {"x": torch.arange(10).reshape(2, 5) % 7, "y": torch.randn(2, 5, 2).double(), "loss": functional.mse_loss},
        {"table", "rnn[0]", "rnn[1]", "drop", "heads.0", "heads.1", "leaky"},
        {"inputs": (), "outputs": ()},
        roles={"embedding": {"table"}, "dropout": {"drop"}, "relu": {"rnn[0]", "rnn[1]", "heads.1"}},
        tables={"table": {"weight"}},
        optimizer=(torch.optim.SGD(model.heads.parameters(), lr=0.5), "heads."),
    )


TRAININGS = NO_TRAINING


class Private(nn.Module):
    """A user's module with a property ``nonlinearity`` that raises an error."""

    @property
    def nonlinearity(self):
        raise ValueError("not here")

    def forward(self, x):
        return x


def guarded():
    return nn.Sequential(nn.Linear(3, 4), Private(), nn.ReLU()), torch.ones(2, 5, 3), {"2"}


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


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(10, 5)

    def forward(self, x, h):
        return torch.tanh(self.mix(torch.cat([x, h], 1)))


class Stateful(nn.Module):
    """Model whose forward changes statistics, attributes and generators and keeps a graph; one part is frozen."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.rnn = nn.LSTM(3, 5, 2, batch_first=True, dropout=0.3)
        self.step, self.cell = nn.GRUCell(5, 5), Cell()
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 2))
        self.register_buffer("calls", torch.zeros(()))
        self.memory, self.log, self.raised = "mine", ["mine"], None
        self.rnn.weight_ih_l0.requires_grad_(False)
        self.head.eval()

    def forward(self, x):
        self.calls += 1
        y, _ = self.rnn(self.norm(x.transpose(1, 2)).transpose(1, 2) + random.random() + np.random.rand())  # noqa: NPY002
        h = k = y.new_zeros(len(x), 5)
        for t in range(x.shape[1]):
            h = self.step(y[:, t], h)
            k = self.cell(h, k)
            self.log.append(k)
        self.memory, self.extra = k, h
        _LIVE[:] = [weakref.ref(k), weakref.ref(y)]
        if self.raised is not None:
            raise self.raised("forward")
        return self.head(k + torch.rand_like(k))


#: Tensors of the last forward pass of a ``Stateful``.
_LIVE = []


def stateful():
    """Return a specimen whose weights have gradients, and whose input asks for one."""
    torch.manual_seed(0)
    model, x, y = Stateful(), torch.randn(2, 4, 3), torch.randn(2, 2)
    model(x).sum().backward()
    model.memory, model.log, model.extra = "mine", ["mine"], None
    return Specimen(
        model, lambda *_: {"x": x.requires_grad_(), "y": y}, functional.mse_loss, layer="rnn[0]", trap=model
    )


def forget():
    """Torch remembers no model."""


@torch.no_grad()
def change(model, x):
    x.add_(1)
    for parameter in model.parameters():
        parameter.mul_(2)


def _state_of_tensor(tensor):
    grad = None if tensor.grad is None else tensor.grad.numpy().tobytes()
    return id(tensor), tensor.detach().numpy().tobytes(), tensor._version, tensor.requires_grad, grad


def _state_of_module(module):
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return module.training, sorted(vars(module)), list(map(len, hooks))


def state_of(model, *tensors):
    gc.collect()
    named = [*model.named_parameters(), *model.named_buffers(), *enumerate(tensors)]
    return {
        "tensors": {name: _state_of_tensor(tensor) for name, tensor in named},
        "modules": {name: _state_of_module(module) for name, module in model.named_modules()},
        "own": (getattr(model, "memory", None), list(getattr(model, "log", []))),
        "generators": (torch.get_rng_state().tolist(), *generators()),
        "flags": (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.mkldnn.enabled,
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
        ),
        "alive": [reference() is not None for reference in _LIVE],
    }
