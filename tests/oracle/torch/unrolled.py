"""Torch's recurrences, unrolled in plain operations, with a zero added wherever a gradient is wanted.

Nothing of rnnlens is used: the gradient with respect to an added zero is the total derivative there, by autograd.
Packed batches run with a mask: a sample that has ended keeps its state.
"""

from __future__ import annotations

import torch

GATE_ORDER = {"lstm": (0, 1, 2, 3), "gru": (1, 0, 2), "rnn": (0,)}


def zero_tap(like):
    return torch.zeros_like(like, requires_grad=True)


class OneDirection:
    """One direction of one layer, unrolled; ``taps`` hold the added zeros, ``values`` the tensors, by quantity name."""

    def __init__(self, kind, weights, x, mask, state, *, backward=False, activation=torch.tanh):
        self.kind, self.act = kind, activation
        self.w = weights
        self.x_tap = zero_tap(x)
        self.state_taps = [zero_tap(s) for s in state]
        x = x + self.x_tap
        state = [s + tap for s, tap in zip(state, self.state_taps, strict=True)]
        order = range(x.shape[1])
        rows = {}
        for t in reversed(order) if backward else order:
            state, rows[t] = self.step(x[:, t], mask[:, t, None], state)
        stack = [rows[t] for t in order]
        self.taps = {name: [row[name][0] for row in stack] for name in stack[0]}
        self.values = {name: torch.stack([row[name][1] for row in stack], dim=1) for name in stack[0]}
        self.final = state
        self.final_taps = [zero_tap(s) for s in state]
        self.output = torch.stack([row["output"][2] for row in stack], dim=1)
        self.returned = [s + tap for s, tap in zip(state, self.final_taps, strict=True)]

    def linear(self, value, weight, bias):
        return value @ self.w[weight].T + self.w.get(bias, 0)

    def step(self, x, valid, state):
        wx, wh = self.linear(x, "weight_ih", "bias_ih"), self.linear(state[0], "weight_hh", "bias_hh")
        gate_count = len(GATE_ORDER[self.kind])
        zx, zh = wx.chunk(gate_count, 1), wh.chunk(gate_count, 1)
        row = {}
        if self.kind == "gru":
            taps = [zero_tap(z) for z in zx]
            r_in, z_in = zx[0] + zh[0] + taps[0], zx[1] + zh[1] + taps[1]
            r, z = torch.sigmoid(r_in), torch.sigmoid(z_in)
            n_in = zx[2] + r * zh[2] + taps[2]
            n = torch.tanh(n_in)
            pre, act, new = [r_in, z_in, n_in], [r, z, n], [(1 - z) * n + z * state[0]]
        else:
            taps = [zero_tap(z) for z in zx]
            pre = [a + b + tap for a, b, tap in zip(zx, zh, taps, strict=True)]
            if self.kind == "rnn":
                act = [self.act(pre[0])]
                new = [act[0]]
            else:
                act = [torch.sigmoid(pre[0]), torch.sigmoid(pre[1]), torch.tanh(pre[2]), torch.sigmoid(pre[3])]
                c_tap = zero_tap(state[1])
                c = torch.where(valid, act[1] * state[1] + act[0] * act[2], state[1]) + c_tap
                h = act[3] * torch.tanh(c)
                h = h @ self.w["weight_hr"].T if "weight_hr" in self.w else h
                new = [h, c]
                row["cell"] = (c_tap, c.detach())
        h_tap, y_tap = zero_tap(new[0]), zero_tap(new[0])
        hidden = torch.where(valid, new[0], state[0]) + h_tap
        output = torch.where(valid, hidden + y_tap, torch.zeros_like(hidden))  # torch pads with a constant
        row["hidden"] = (h_tap, hidden.detach())
        row["output"] = (y_tap, output.detach(), output)
        order = GATE_ORDER[self.kind]
        for g, source in enumerate(order):
            row[f"gate{g}"] = (taps[source], act[source].detach())
            row[f"pre{g}"] = (taps[source], pre[source].detach())
        return [hidden, *new[1:]], row


def gate_values(direction, prefix):
    names = sorted(name for name in direction.values if name.startswith(prefix))
    return torch.stack([direction.values[name] for name in names], dim=2)


class Unrolled:
    """An unrolled ``nn.RNN/LSTM/GRU``: ``by_direction[layer][direction]``, and ``output`` and ``final`` as in torch."""

    def __init__(self, module, x, mask, states):
        kind = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn"}[type(module).__name__]
        activation = torch.relu if getattr(module, "nonlinearity", "tanh") == "relu" else torch.tanh
        directions = 2 if module.bidirectional else 1
        self.by_direction = []
        finals = []
        for layer in range(module.num_layers):
            row = []
            for d in range(directions):
                suffix = f"_l{layer}" + ("_reverse" if d else "")
                weights = {
                    name.removesuffix(suffix): p.detach()
                    for name, p in module.named_parameters()
                    if name.endswith(suffix) and (d or not name.endswith("_reverse"))
                }
                start = [s[layer * directions + d] for s in states]
                row.append(OneDirection(kind, weights, x, mask, start, backward=bool(d), activation=activation))
            x = torch.cat([direction.output for direction in row], dim=2)
            finals.extend(direction.returned for direction in row)
            self.by_direction.append(row)
        self.output = x
        self.final = [torch.stack(column) for column in zip(*finals, strict=True)]

    def gradients(self, loss):
        """Differentiate the loss by every added zero, and return a function from a zero to its gradient."""
        directions = [direction for row in self.by_direction for direction in row]
        taps = [tap for direction in directions for column in direction.taps.values() for tap in column]
        boundary_taps = [
            tap for direction in directions for tap in (direction.x_tap, *direction.state_taps, *direction.final_taps)
        ]
        grads = torch.autograd.grad(loss, [*taps, *boundary_taps], allow_unused=True)
        grad_by_id = {
            id(tap): torch.zeros_like(tap) if g is None else g
            for tap, g in zip([*taps, *boundary_taps], grads, strict=True)
        }
        return lambda tap: grad_by_id[id(tap)]


def stacked_gradients(direction, name, gradient):
    return torch.stack([gradient(tap) for tap in direction.taps[name]], dim=1)


def gate_gradients(direction, gradient):
    names = sorted(name for name in direction.taps if name.startswith("pre"))
    return torch.stack([stacked_gradients(direction, name, gradient) for name in names], dim=2)
