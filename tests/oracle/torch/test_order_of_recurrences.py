"""Time Jacobians of loops in which a cell reads a cell called after it, or an earlier state of another cell.

The reference is autograd on the unmodified model, with hooks that only record.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

B, T, F, H = 2, 6, 3, 4


class Delayed(nn.Module):
    """A loop in which ``b`` reads the state of ``a`` from ``delay`` steps back, whichever is called first."""

    def __init__(self, delay, lower_first, cell=nn.GRUCell):
        super().__init__()
        self.a, self.b, self.head = cell(F, H), cell(H, H), nn.Linear(H, 2)
        self.delay, self.lower_first = delay, lower_first

    def start(self, x):
        zeros = x.new_zeros(len(x), H)
        return (zeros, zeros) if isinstance(self.a, nn.LSTMCell) else zeros

    def forward(self, x):
        upper, outputs = self.start(x), []
        history = [self.start(x)] * (self.delay + 1)
        for t in range(x.shape[1]):
            if self.lower_first:
                history.append(self.a(x[:, t], history[-1]))
                upper = self.b(hidden(history[-1 - self.delay]), upper)
            else:
                upper = self.b(hidden(history[-self.delay]), upper)
                history.append(self.a(x[:, t], history[-1]))
            outputs.append(self.head(hidden(upper)))
        return torch.stack(outputs, 1)


class FirstReadsLater(nn.Module):
    """A loop in which the cell called first reads the last state of the cell called second."""

    def __init__(self):
        super().__init__()
        self.b, self.a, self.head = nn.GRUCell(H, H), nn.GRUCell(F, H), nn.Linear(H, 2)

    def forward(self, x):
        upper = lower = x.new_zeros(len(x), H)
        outputs = []
        for t in range(x.shape[1]):
            upper = self.b(lower, upper)
            lower = self.a(x[:, t], lower)
            outputs.append(self.head(upper))
        return torch.stack(outputs, 1)


class Tower(nn.Module):
    """Three cells, called from the top down; each reads the previous state of the one below."""

    def __init__(self):
        super().__init__()
        self.c, self.b, self.a, self.head = nn.RNNCell(H, H), nn.GRUCell(H, H), nn.RNNCell(F, H), nn.Linear(H, 2)

    def forward(self, x):
        c = b = a = x.new_zeros(len(x), H)
        outputs = []
        for t in range(x.shape[1]):
            c, b, a = self.c(b, c), self.b(a, b), self.a(x[:, t], a)
            outputs.append(self.head(c))
        return torch.stack(outputs, 1)


def hidden(state):
    return state[0] if isinstance(state, tuple) else state


def reference_jacobian(model, x, of, wrt):
    """Return the Jacobian (sample, out_time, out_unit, in_time, in_feature), one backward pass per output entry."""
    states = {name: [] for name in "abc" if hasattr(model, name)}
    handles = [
        getattr(model, name).register_forward_hook(lambda m, i, o, name=name: states[name].append(hidden(o)))
        for name in states
    ]
    x = x.clone().requires_grad_()
    output = model(x)
    for handle in handles:
        handle.remove()
    above = output if of == "output" else torch.stack(states[of[0]], 1)
    below = [x] if wrt == "input" else states[wrt[0]]
    rows = np.zeros((B, T, above.shape[2], T, F if wrt == "input" else H))
    for t in range(T):
        for u in range(above.shape[2]):
            grads = torch.autograd.grad(above[:, t, u].sum(), below, retain_graph=True, allow_unused=True)
            filled = [torch.zeros_like(tensor) if g is None else g for tensor, g in zip(below, grads, strict=True)]
            rows[:, t, u] = filled[0] if wrt == "input" else torch.stack(filled, 1)
    return rows


MODELS = {
    "earlier state, lower called last": lambda: Delayed(1, False),
    "earlier state, lower called first": lambda: Delayed(1, True),
    "two steps, lower called last": lambda: Delayed(2, False),
    "two steps, lower called first": lambda: Delayed(2, True),
    "two steps, LSTM": lambda: Delayed(2, False, nn.LSTMCell),
    "first reads later": FirstReadsLater,
    "tower from the top": Tower,
}
ENDS = [("output", "input"), ("output", "a.hidden"), ("b.hidden", "input"), ("b.hidden", "a.hidden")]


@pytest.mark.parametrize(("of", "wrt"), ENDS)
@pytest.mark.parametrize("kind", list(MODELS))
def test_recurrences_are_swept_in_the_order_in_which_they_read_each_other(kind, of, wrt):
    torch.manual_seed(0)
    model, x = MODELS[kind]().double(), torch.randn(B, T, F, dtype=torch.float64)
    with rl.options(certify="always"):
        jacobian = rl.jacobian(model, x, of=of, wrt=wrt)
    expected = reference_jacobian(model, x, of, wrt)
    assert abs(expected).max() > 1e-3
    np.testing.assert_allclose(jacobian.values, expected, atol=1e-12)
    assert jacobian.certificate.state == "passed", jacobian.certificate
    assert jacobian.certificate.certified == ("random combinations of its rows",)  # between the ends themselves


def test_a_wrong_order_between_ends_inside_the_model_fails_the_certificate(monkeypatch):
    """A sweep in the wrong order of two recurrences loses rows, and the certificate fails."""
    from rnnlens.verbs.time_jacobian.network import JacobianNetwork

    path = JacobianNetwork.path.func
    reversed_path = property(lambda self: replace(path(self), order=tuple(reversed(range(len(self.recurrences))))))
    monkeypatch.setattr(JacobianNetwork, "path", reversed_path)
    model, x = Delayed(1, False).double(), torch.randn(B, T, F, dtype=torch.float64)
    with rl.options(certify="always"), pytest.warns(rl.errors.SelfCheckWarning):
        jacobian = rl.jacobian(model, x, of="output", wrt="a.hidden")
    assert jacobian.certificate.state == "failed"


@pytest.mark.parametrize(
    ("of", "wrt"), [("output", "lstm.hidden"), ("lstm.cell", "lstm.hidden"), ("lstm.cell", "input")]
)
def test_states_of_a_fused_layer_rest_on_the_whole_model(of, wrt):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(F, H, batch_first=True), nn.Linear(H, 2)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    with rl.options(certify="always"):
        jacobian = rl.jacobian(Tagger(), torch.randn(B, T, F), of=of, wrt=wrt)
    assert jacobian.certificate.state == "passed", jacobian.certificate
    assert jacobian.certificate.resting == (f"d {of} / d {wrt}",)
