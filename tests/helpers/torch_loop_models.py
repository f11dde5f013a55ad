"""Recurrent loops in the style of user code in torch: (sample, time, feature) to one tensor, without mixing samples."""

from __future__ import annotations

import random

import torch
from torch import nn

B, T, F, H, V = 2, 5, 3, 4, 2
LENGTHS = torch.tensor([5, 3])
KINDS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}


def zeros(x, *sizes):
    return [x.new_zeros(len(x), size) for size in sizes]


class PlainLoop(nn.Module):
    """A plain loop over a cell."""

    def __init__(self, kind="lstm"):
        super().__init__()
        self.kind, self.cell, self.head = kind, KINDS[kind](F, H), nn.Linear(H, V)

    def forward(self, x):
        h, c = zeros(x, H, H)
        outputs = []
        for t in range(x.shape[1]):
            if self.kind == "lstm":
                h, c = self.cell(x[:, t], (h, c))
            else:
                h = self.cell(x[:, t], h)
            outputs.append(self.head(h))
        return torch.stack(outputs, 1)


class LastCell(nn.Module):
    """A loop whose head reads h and c after the last step."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(F, H), nn.Linear(2 * H, V)

    def forward(self, x):
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(torch.cat(state, 1))


class CellsRead(nn.Module):
    """A loop whose head reads h_t and c_t at every step."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(F, H), nn.Linear(2 * H, V)

    def forward(self, x):
        h, c = zeros(x, H, H)
        outputs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outputs.append(self.head(torch.cat([h, c], 1)))
        return torch.stack(outputs, 1)


class TwoLayers(nn.Module):
    """Two cells, one above the other, in one loop, with a skip connection over two steps."""

    def __init__(self):
        super().__init__()
        self.lower, self.upper, self.head = nn.LSTMCell(F, H), nn.GRUCell(H, H), nn.Linear(H, V)

    def forward(self, x):
        h, c, g = zeros(x, H, H, H)
        states = [g, g]
        for t in range(x.shape[1]):
            h, c = self.lower(x[:, t], (h, c))
            g = self.upper(torch.relu(h), g)
            states.append(g)
        return torch.stack([self.head(states[t + 2] + 0.5 * states[t]) for t in range(x.shape[1])], 1)


class UpperFirst(nn.Module):
    """Two cells, of which the upper is called first and reads the lower one's previous state."""

    def __init__(self):
        super().__init__()
        self.lower, self.upper, self.head = nn.LSTMCell(F + H, H), nn.GRUCell(H, H), nn.Linear(H, V)

    def forward(self, x):
        h, c, g = zeros(x, H, H, H)
        outputs = []
        for t in range(x.shape[1]):
            g = self.upper(h, g)
            h, c = self.lower(torch.cat([x[:, t], g], 1), (h, c))
            outputs.append(self.head(g + h))
        return torch.stack(outputs, 1)


class FedBack(nn.Module):
    """A loop that feeds each output back as the next input."""

    def __init__(self, kind="lstm"):
        super().__init__()
        self.kind, self.cell, self.head = kind, KINDS[kind](F + V, H), nn.Linear(H, V)

    def forward(self, x):
        h, c, y = zeros(x, H, H, V)
        outputs = []
        for t in range(x.shape[1]):
            joined = torch.cat([x[:, t], y], 1)
            if self.kind == "lstm":
                h, c = self.cell(joined, (h, c))
            else:
                h = self.cell(joined, h)
            y = torch.tanh(self.head(h))
            outputs.append(y)
        return torch.stack(outputs, 1)


class Attention(nn.Module):
    """Encoder and decoder with attention: the decoder's state is the query, the context is part of the next input."""

    def __init__(self, feeding=False):
        super().__init__()
        self.encoder, self.decoder = nn.LSTMCell(F, H), nn.LSTMCell(2 * H if feeding else H, H)
        self.feeding, self.mix, self.head = feeding, nn.Linear(2 * H, H), nn.Linear(H, V)

    def forward(self, x):
        h, c = zeros(x, H, H)
        memory = []
        for t in range(x.shape[1]):
            h, c = self.encoder(x[:, t], (h, c))
            memory.append(h)
        memory = torch.stack(memory, 1)
        outputs, attended = [], torch.zeros_like(h)
        for _ in range(3):
            weights = torch.softmax((memory * h[:, None]).sum(-1), 1)
            context = (weights[:, :, None] * memory).sum(1)
            h, c = self.decoder(torch.cat([context, attended], 1) if self.feeding else context, (h, c))
            attended = torch.tanh(self.mix(torch.cat([h, context], 1)))
            outputs.append(self.head(attended))
        return torch.stack(outputs, 1)


class ChangesState(nn.Module):
    """A loop that changes the state between two steps, at all of them or at one."""

    def __init__(self, change):
        super().__init__()
        self.change, self.cell, self.head, self.norm = change, nn.LSTMCell(F, H), nn.Linear(H, V), nn.LayerNorm(H)

    def forward(self, x):
        h, c = zeros(x, H, H)
        outputs = []
        for t in range(x.shape[1]):
            if t == 2 and self.change == "detach":
                h, c = h.detach(), c.detach()
            if t == 2 and self.change == "restart":
                h, c = zeros(x, H, H)
            if t == 2 and self.change == "restart_hidden":
                h = torch.zeros_like(h)
            if t == 2 and self.change == "scale":
                h, c = 0.5 * h, 0.5 * c
            if t == 2 and self.change == "norm":
                h = self.norm(h)
            if t == 2 and self.change == "squash":
                h, c = torch.tanh(h), torch.tanh(c)
            new_h, new_c = self.cell(x[:, t], (h, c))
            if self.change == "zoneout":
                h, c = 0.9 * new_h + 0.1 * h, 0.7 * new_c + 0.3 * c
            elif self.change == "residual" and t == 3:
                h, c = new_h + outputs[0][1], new_c
            else:
                h, c = new_h, new_c
            outputs.append((self.head(h), h))
        return torch.stack([y for y, _ in outputs], 1)

    @property
    def lengths(self):
        """Return the number of steps of each recurrence."""
        return [2, 3] if self.change in ("detach", "restart") else [T]


class Siamese(nn.Module):
    """One cell applied to two parts of the input, each time from zero states."""

    lengths = (2, 2)

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(F, H), nn.Linear(2 * H, V)

    def last_state(self, x):
        (h,) = zeros(x, H)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h

    def forward(self, x):
        a, b = self.last_state(x[:, :2]), self.last_state(x[:, 2:4])
        return self.head(torch.cat([(a - b).abs(), a * b], 1))


class BidirectionalLoop(nn.Module):
    """A bidirectional loop: one of two cells runs from the last step."""

    def __init__(self):
        super().__init__()
        self.forth, self.back, self.head = nn.LSTMCell(F, H), nn.LSTMCell(F, H), nn.Linear(2 * H, V)

    def run_cell(self, cell, steps):
        h, c = zeros(steps[0], H, H)
        states = []
        for step in steps:
            h, c = cell(step, (h, c))
            states.append(h)
        return states

    def forward(self, x):
        steps = list(x.unbind(1))
        forth, back = self.run_cell(self.forth, steps), self.run_cell(self.back, steps[::-1])[::-1]
        return torch.stack([self.head(torch.cat(pair, 1)) for pair in zip(forth, back, strict=True)], 1)


class Block(nn.Module):
    """A step module with a layer norm around an LSTMCell, which keeps its state in attributes."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.LSTMCell(F, H), nn.LayerNorm(H)

    def forward(self, x):
        self.h, self.c = self.inner(x, (self.h, self.c))
        return self.norm(self.h)


class StateInAttribute(nn.Module):
    """A loop whose state is an attribute of a submodule's submodule."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block()]), nn.Linear(H, V)

    def forward(self, x):
        for block in self.blocks:
            block.h, block.c = zeros(x, H, H)
        return torch.stack([self.head(self.blocks[0](x[:, t])) for t in range(x.shape[1])], 1)


class MaskedLoop(nn.Module):
    """Samples of different lengths: the state of an ended sample is carried over."""

    def __init__(self, masking="where", output="last"):
        super().__init__()
        self.masking, self.output, self.cell, self.head = masking, output, nn.LSTMCell(F, H), nn.Linear(2 * H, V)

    def forward(self, x):
        h, c = zeros(x, H, H)
        outputs = []
        for t in range(x.shape[1]):
            is_real = (t < LENGTHS)[:, None]
            new_h, new_c = self.cell(x[:, t], (h, c))
            if self.masking == "where":
                h, c = torch.where(is_real, new_h, h), torch.where(is_real, new_c, c)
            elif self.masking == "assign":
                rows = is_real[:, 0]
                h, c = h.clone(), c.clone()
                h[rows], c[rows] = new_h[rows], new_c[rows]
            else:
                m = is_real.to(x.dtype)
                h, c = m * new_h + (1 - m) * h, new_c * m + c * (1 - m)
            outputs.append(self.head(torch.cat([h, c], 1)))
        return outputs[-1] if self.output == "last" else torch.stack(outputs, 1)


class TeacherForced(nn.Module):
    """Teacher forcing at random steps, drawn by Python's ``random``."""

    def __init__(self, seeded=False):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(F, H), nn.Linear(H, F)
        self.own = random.Random(3) if seeded else None

    def forward(self, x):
        h, c, y = zeros(x, H, H, F)
        outputs = []
        for t in range(x.shape[1]):
            forced = (self.own or random).random() < 0.5
            h, c = self.cell(x[:, t] if forced else y, (h, c))
            y = self.head(h)
            outputs.append(y)
        return torch.stack(outputs, 1)


class OwnLstm(nn.Module):
    """An LSTM cell in plain operations; ``note`` is called with every tensor that a test may need."""

    note = staticmethod(lambda name, value: value)

    def __init__(self, inputs=F, units=H):
        super().__init__()
        self.gates = nn.Linear(inputs + units, 4 * units)

    def forward(self, x, state):
        h, c = state
        x = self.note("input", x)
        i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = self.note("state_1", torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g))
        h = self.note("hidden", torch.sigmoid(o) * torch.tanh(c))
        return h, c


class OwnLoop(nn.Module):
    """A loop over a user-written LSTM cell; the head reads all states of every step, or only h."""

    def __init__(self, read_all=True):
        super().__init__()
        self.cell, self.head, self.read_all = OwnLstm(), nn.Linear(2 * H if read_all else H, V), read_all

    def forward(self, x):
        h, c = zeros(x, H, H)
        outputs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outputs.append(self.head(torch.cat([h, c], 1) if self.read_all else h))
        return torch.stack(outputs, 1)


class CandidateRead(nn.Module):
    """A masked loop whose outputs read the unmasked new state, and whose next step reads the masked one."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(F, H), nn.Linear(H, V)

    def forward(self, x):
        (h,) = zeros(x, H)
        outputs = []
        for t in range(x.shape[1]):
            new = self.cell(x[:, t], h)
            outputs.append(self.head(new))
            h = torch.where((t < LENGTHS)[:, None], new, h)
        return torch.stack(outputs, 1)


def build(model, *arguments):
    """Return the model in float64, with weights large enough to make a wrong path visible."""
    torch.manual_seed(0)
    model = model(*arguments).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model.eval()


def batch():
    return torch.randn(B, T, F, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
