"""Cells, layers and models in torch with a right forward pass and a backward pass of their own, right or wrong."""

from __future__ import annotations

import torch
from torch import nn


class TanhStep(torch.autograd.Function):
    """h = tanh(x W^T + s U^T) with a backward pass by hand."""

    @staticmethod
    def forward(ctx, x, state, weight, recurrent, mistake):
        h = torch.tanh(x @ weight.T + state @ recurrent.T)
        ctx.save_for_backward(x, state, weight, recurrent, h)
        ctx.mistake = mistake
        return h

    @staticmethod
    def backward(ctx, grad):
        x, state, weight, recurrent, h = ctx.saved_tensors
        mistake = ctx.mistake
        z = grad * (1 - h * h)
        if mistake == "derivative of the input":
            z = grad * (1 - torch.tanh(x @ weight.T) ** 2)
        to_state = z @ (recurrent.T if mistake == "no transpose" else recurrent)
        to_x, to_weight, to_recurrent = z @ weight, z.T @ x, z.T @ state
        if mistake == "no state gradient":
            to_state = torch.zeros_like(to_state)
        elif mistake == "first row only":
            to_x = torch.cat([to_x[:1], torch.zeros_like(to_x[1:])])
        elif mistake == "weights of the first row":
            to_weight = z[:1].T @ x[:1]
        elif mistake == "negative":
            to_weight = -to_weight
        elif mistake == "recurrent weights missing":
            to_recurrent = None
        return to_x, to_state, to_weight, to_recurrent, None


class Cell(nn.Module):
    """A cell (x_t, state) -> state around :class:`TanhStep`."""

    def __init__(self, mistake=""):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3) / 2)
        self.recurrent = nn.Parameter(torch.randn(4, 4) / 2)
        self.mistake = mistake

    def forward(self, x, state):
        return TanhStep.apply(x, state, self.weight, self.recurrent, self.mistake)


class LinearScan(torch.autograd.Function):
    """s_t = a_t s_{t-1} + b_t over (sample, time, unit) with a backward pass by hand; real or complex."""

    @staticmethod
    def forward(ctx, a, b, initial, mistake):
        states, state = [], initial
        for t in range(b.shape[1]):
            state = a[:, t] * state + b[:, t]
            states.append(state)
        states = torch.stack(states, 1)
        ctx.save_for_backward(a, states, initial)
        ctx.mistake = mistake
        return states

    @staticmethod
    def backward(ctx, grad):
        a, states, initial = ctx.saved_tensors
        mistake, steps = ctx.mistake, a.shape[1]
        factors = a if mistake == "conjugate" else a.conj()
        later, totals = torch.zeros_like(initial), []
        for t in reversed(range(steps)):
            if mistake == "truncated" and (t + 1) % 4 == 0:
                later = torch.zeros_like(later)
            total = grad[:, t] + later
            totals.append(total)
            later = factors[:, t - 1 if mistake == "a_t for a_{t+1}" else t] * total
        totals = torch.stack(totals[::-1], 1)
        before = torch.cat([initial[:, None], states[:, :-1]], 1)
        read = states if mistake == "S_t for S_{t-1}" else before
        to_initial = torch.zeros_like(later) if mistake == "initial missing" else later
        if mistake == "last chunk missing":
            totals = torch.cat([totals[:, : steps // 4 * 4], torch.zeros_like(totals[:, steps // 4 * 4 :])], 1)
        return totals * read.conj(), totals, to_initial, None


class Layer(nn.Module):
    """Gated linear recurrence (x, initial) -> (outputs, last state); complex with a rotation per unit."""

    def __init__(self, mistake="", *, rotation=False):
        super().__init__()
        self.gate, self.value = nn.Linear(3, 4), nn.Linear(3, 4)
        self.angle = nn.Parameter(torch.linspace(0.3, 2, 4)) if rotation else None
        self.mistake = mistake

    def forward(self, x, initial):
        a, b = torch.sigmoid(self.gate(x) + 2), self.value(x)
        if self.angle is not None:
            a = torch.polar(a, self.angle.expand_as(a))
            b = torch.complex(b, torch.zeros_like(b))
        states = LinearScan.apply(a, b, initial, self.mistake)
        return states, states[:, -1]


class Model(nn.Module):
    """A layer between an embedding or projection and a head; its state begins at zero."""

    def __init__(self, mistake="", *, tokens=False):
        super().__init__()
        self.enter = nn.Embedding(7, 3) if tokens else nn.Linear(3, 3)
        self.layer, self.head = Layer(mistake), nn.Linear(4, 2)

    def forward(self, x):
        h = self.enter(x)
        return self.head(self.layer(h, h.new_zeros(len(h), 4))[0])
