"""Torch trainings in the style of users, to be run with and without a watch."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

STEPS = 12


class Reader(nn.Module):
    """A stacked LSTM with dropout, batch normalisation and a linear head."""

    def __init__(self, kind=nn.LSTM, units=6, **options):
        super().__init__()
        self.lstm = kind(3, units, batch_first=True, **options)
        self.norm = nn.BatchNorm1d(units * (2 if self.lstm.bidirectional else 1))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(self.norm.num_features, 1)

    def forward(self, x):
        sequence, _ = self.lstm(x)
        return self.head(self.dropout(self.norm(sequence[:, -1])))


def data(samples=96, steps=STEPS, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, steps, 3, generator=generator)
    return x, x.sum((1, 2))[:, None] / steps


def model_and_optimizer(make=None, seed=0, lr=1e-2):
    torch.manual_seed(seed)
    model = Reader(num_layers=2, dropout=0.3) if make is None else make()
    return model, torch.optim.Adam(model.parameters(), lr=lr)


def train(model, optimizer, watch=None, *, epochs=2, batch=16, after_step=None, clip=None, loss=mse_loss):
    """Train by a plain loop over a shuffling loader; ``after_step(watch, x, y)`` runs after every step."""
    x, y = data()
    loader = DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True)
    torch.manual_seed(11)
    with nullcontext() if watch is None else watch as active_watch:
        for _ in range(epochs):
            for xs, ys in loader:
                optimizer.zero_grad()
                value = loss(model(xs), ys)
                value.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if after_step is not None:
                    after_step(active_watch, xs, ys)
    return model


def same_weights(first, second):
    first_weights, second_weights = first.state_dict(), second.state_dict()
    return list(first_weights) == list(second_weights) and all(
        torch.equal(first_weights[name], second_weights[name]) for name in first_weights
    )
