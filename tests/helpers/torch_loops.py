"""References for loops of cells: their equations in plain operations, with a zero added wherever a gradient is due.

The gradient with respect to an added zero is the total derivative there, by torch's own autodiff, without rnnlens.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn


class Taps:
    """Added zeros, and the values that they were added to, by quantity in the order of the calls."""

    def __init__(self):
        self.zeros, self.values = {}, {}

    def add(self, name, value):
        zero = torch.zeros_like(value, requires_grad=True)
        self.zeros.setdefault(name, []).append(zero)
        value = value + zero
        self.values.setdefault(name, []).append(value)
        return value


class WrittenOutCell(nn.Module):
    """An ``nn.LSTMCell``, ``nn.GRUCell`` or ``nn.RNNCell`` in plain operations, on the same parameters."""

    def __init__(self, cell):
        super().__init__()
        self.source, self.taps = [cell], Taps()
        self.kind = {nn.LSTMCell: "lstm", nn.GRUCell: "gru", nn.RNNCell: "rnn"}[type(cell)]

    def forward(self, x, state=None):
        cell = self.source[0]
        x = self.taps.add("input", x)
        if state is None:
            zeros = x.new_zeros(len(x), cell.hidden_size)
            state = (zeros, zeros) if self.kind == "lstm" else zeros
        h = state[0] if self.kind == "lstm" else state
        wx = x @ cell.weight_ih.T + (0 if cell.bias_ih is None else cell.bias_ih)
        wh = h @ cell.weight_hh.T + (0 if cell.bias_hh is None else cell.bias_hh)
        if self.kind == "rnn":
            return self.taps.add("hidden", torch.tanh(self.taps.add("z0", wx + wh)))
        if self.kind == "gru":
            (rx, zx, nx), (rh, zh, nh) = wx.chunk(3, 1), wh.chunk(3, 1)
            z = torch.sigmoid(self.taps.add("z0", zx + zh))
            r = torch.sigmoid(self.taps.add("z1", rx + rh))
            n = torch.tanh(self.taps.add("z2", nx + r * nh))
            return self.taps.add("hidden", (1 - z) * n + z * h)
        i, f, g, o = (self.taps.add(f"z{k}", z) for k, z in enumerate((wx + wh).chunk(4, 1)))
        c = self.taps.add("cell", torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g))
        h = self.taps.add("hidden", torch.sigmoid(o) * torch.tanh(c))
        return h, c


def write_out_cells(model):
    """Return a copy of the model with its cells written out, and their taps by the cell's path.

    The copy shares the parameters of the original. User-written cells have a method ``note(name, value)`` for every
    tensor of interest.
    """
    memo = {id(p): p for p in model.parameters()}
    twin, taps = copy.deepcopy(model, memo), {}
    for path, module in list(twin.named_modules()):
        if type(module) in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
            parent, _, name = path.rpartition(".")
            replacement = WrittenOutCell(module)
            if parent and isinstance(twin.get_submodule(parent), nn.ModuleList):
                twin.get_submodule(parent)[int(name)] = replacement
            else:
                setattr(twin.get_submodule(parent) if parent else twin, name, replacement)
            taps[path] = replacement.taps
        elif hasattr(module, "note"):
            taps[path] = Taps()
            module.note = taps[path].add
    return twin, taps


def gradients_or_zero(value, tensors):
    """Return gradients of a value; zero for tensors that it does not depend on."""
    grads = torch.autograd.grad(value, tensors, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, grads, strict=True)]


def stack_steps(tensors):
    """Stack one tensor per step into (sample, time, unit)."""
    return torch.stack(list(tensors), dim=1).detach().numpy()


def jacobian_rows(value, tensors):
    """Return the Jacobian d value / d tensors, (sample, out..., step, in), of ``value`` (sample, out...)."""
    flat = value.reshape(len(value), -1)
    jacobians = []
    for n in range(len(value)):
        gradient_rows = [
            torch.stack([g[n] for g in gradients_or_zero(flat[n, k], tensors)]) for k in range(flat.shape[1])
        ]
        jacobians.append(torch.stack(gradient_rows).reshape(*value.shape[1:], *gradient_rows[0].shape))
    return torch.stack(jacobians).numpy()


def weighted_loss(output):
    """Return a sum that weights every entry of the output differently."""
    weights = torch.linspace(0.5, 2.0, output[0].numel(), dtype=output.dtype).reshape(output.shape[1:])
    return (weights * output).sin().sum()


def recurrences_of(model, taps):
    """Return (name in a result, path of the cell, slice of its calls) for every recurrence."""
    recurrences = []
    for path, tap in taps.items():
        lengths = list(getattr(model, "lengths", [len(tap.zeros["hidden"])]))
        starts = np.cumsum([0, *lengths])
        for i, length in enumerate(lengths):
            calls = slice(int(starts[i]), int(starts[i]) + length)
            recurrences.append((path if len(lengths) == 1 else f"{path}#{i}", path, calls))
    return recurrences


def states_of(tap):
    """Return the names of a cell's states."""
    return [name for name in ("hidden", "cell", "state_1") if name in tap.zeros]


def assert_close(actual, expected, label):
    """Assert equality up to float64 rounding."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, label
    np.testing.assert_allclose(actual, expected, atol=1e-9 * max(np.abs(expected).max(), 1e-3), rtol=0, err_msg=label)
