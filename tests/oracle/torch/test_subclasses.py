"""Subclasses of torch's layers and cells that override forward, against torch's autograd on the same model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import rnnlens as rl

pytestmark = pytest.mark.check

B, T, N, H = 3, 5, 4, 6


class NormedLSTM(nn.LSTM):
    """An nn.LSTM with layer norm on its output."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.norm = nn.LayerNorm(self.hidden_size)

    def forward(self, x, state=None):
        out, state = super().forward(x, state)
        return self.norm(out), state


class ResidualLSTM(nn.LSTM):
    """An nn.LSTM with a linear skip path, which returns the output without the states."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.beside = nn.Linear(self.input_size, self.hidden_size)

    def forward(self, x):
        return super().forward(x)[0] + self.beside(x)


class ScaledLSTM(nn.LSTM):
    """Weight drop in its usual form: the kernel is called with weights computed from the parameters."""

    def forward(self, x, state=None):
        zeros = x.new_zeros(self.num_layers, len(x), self.hidden_size)
        weights = [w * 0.9 if i == 1 else w for i, w in enumerate(self._flat_weights)]
        out, *state = torch._VF.lstm(x, (zeros, zeros), weights, self.bias, 1, 0.0, self.training, False, True)
        return out, tuple(state)


class SteppedGRU(nn.GRU):
    """A GRU that loops over torch's single-step kernel."""

    def forward(self, x, state=None):
        h, outputs = x.new_zeros(len(x), self.hidden_size), []
        for t in range(x.shape[1]):
            weights = (self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0)
            h = torch._VF.gru_cell(x[:, t], h, *weights)
            outputs.append(h)
        return torch.stack(outputs, 1), h[None]


class OwnGRU(nn.GRU):
    """A subclass of nn.GRU with its own loop and equations."""

    def forward(self, x, state=None):
        h, outputs = x.new_zeros(len(x), self.hidden_size), []
        for t in range(x.shape[1]):
            gates = F.linear(x[:, t], self.weight_ih_l0, self.bias_ih_l0)
            gates = gates + F.linear(h, self.weight_hh_l0, self.bias_hh_l0)
            r, z, n = gates.chunk(3, 1)
            h = torch.sigmoid(z) * h + torch.sigmoid(r) * torch.tanh(n)
            outputs.append(h)
        return torch.stack(outputs, 1), h[None]


class CalledThrough(nn.GRUCell):
    """A subclass of nn.GRUCell whose forward only calls the parent's."""

    def forward(self, x, h=None):
        return super().forward(x, h)


class SwappedThrough(nn.RNNCell):
    """An nn.RNNCell that takes the state first; with equal sizes, shapes do not tell state from input."""

    def forward(self, state, x):
        return super().forward(x, state)


class OwnGRUCell(nn.GRUCell):
    """A subclass of nn.GRUCell with other equations than torch's."""

    def forward(self, x, h):
        r, z, n = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, 1)
        rh, zh, nh = F.linear(h, self.weight_hh, self.bias_hh).chunk(3, 1)
        n = torch.relu(n + torch.sigmoid(r + rh) * nh)
        return (1 - torch.sigmoid(z + zh)) * n + torch.sigmoid(z + zh) * h


class SwappedCell(nn.GRUCell):
    """A subclass of nn.GRUCell that takes the state first, with its own equations."""

    def forward(self, h, x):
        gates = F.linear(x, self.weight_ih, self.bias_ih) + F.linear(h, self.weight_hh, self.bias_hh)
        return torch.tanh(gates[:, : self.hidden_size])


class NormedCell(nn.LSTMCell):
    """An nn.LSTMCell with layer norm on the hidden state that is passed on."""

    def __init__(self, *args):
        super().__init__(*args)
        self.norm = nn.LayerNorm(self.hidden_size)

    def forward(self, x, state):
        h, c = super().forward(x, state)
        return self.norm(h), c


class LeakyCell(nn.RNNCell):
    """A leaky cell: half the old state plus half of torch's step."""

    def forward(self, x, h):
        return 0.5 * h + 0.5 * super().forward(x, h)


class CoupledCell(nn.LSTMCell):
    """A subclass of nn.LSTMCell that returns (h, (h, c)), with coupled input and forget gates."""

    def forward(self, x, state):
        h, c = state
        gates = F.linear(x, self.weight_ih, self.bias_ih) + F.linear(h, self.weight_hh, self.bias_hh)
        i, _, u, o = gates.chunk(4, 1)
        c = (1 - torch.sigmoid(i)) * c + torch.sigmoid(i) * torch.tanh(u)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, (h, c)


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.head = kind(N, H, batch_first=True), nn.Linear(H, 2)

    def forward(self, x):
        out = self.rnn(x)
        return self.head((out[0] if isinstance(out, tuple) else out)[:, -1])


class Loop(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell, self.head = kind(H if kind is SwappedThrough else N, H), nn.Linear(H, 2)
        self.swapped = kind in (SwappedThrough, SwappedCell)

    def forward(self, x):
        h = x.new_zeros(len(x), H)
        state = (h, h) if isinstance(self.cell, nn.LSTMCell) else h
        for t in range(x.shape[1]):
            state = self.cell(state, x[:, t]) if self.swapped else self.cell(x[:, t], state)
            state = state[1] if isinstance(self.cell, CoupledCell) else state
        return self.head(state[0] if isinstance(state, tuple) else state)


KERNEL_SUBCLASSES = (NormedLSTM, ResidualLSTM, ScaledLSTM, SteppedGRU)
WITH_GATES = (CalledThrough, SwappedThrough)
CELLS = (*WITH_GATES, OwnGRUCell, SwappedCell, NormedCell, LeakyCell, CoupledCell)


def build(kind):
    torch.manual_seed(0)
    model = (Loop if kind in CELLS else Layer)(kind).double()
    size = H if kind is SwappedThrough else N
    return model, torch.randn(B, T, size, dtype=torch.float64), torch.randn(B, 2, dtype=torch.float64)


def torch_gradients(model, x, y):
    x = x.clone().requires_grad_()
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(F.mse_loss(model(x), y), [x, *parameters.values()], allow_unused=True)
    return grads[0].numpy(), dict(zip(parameters, grads[1:], strict=True))


def norms_of(gradients):
    return sorted(float(np.linalg.norm(a.values)) for layer in gradients for a in gradients[layer].values())


@pytest.mark.parametrize("kind", [*KERNEL_SUBCLASSES, OwnGRU, *CELLS])
@pytest.mark.filterwarnings("error")
def test_gradients_by_inputs_and_weights_are_torchs(kind):
    model, x, y = build(kind)
    input_grad, weight_grads = torch_gradients(model, x, y)
    gradients = rl.gradients(model, x, y, loss=F.mse_loss, wrt="input")
    np.testing.assert_allclose(gradients.values, input_grad, rtol=0, atol=1e-14)
    weights = rl.gradients(model, x, y, loss=F.mse_loss, wrt="weights")
    expected = sorted(float(grad.norm()) for grad in weight_grads.values() if grad is not None)
    np.testing.assert_allclose(norms_of(weights), expected, rtol=1e-12)
    assert weights.certificate.state == "passed"


@pytest.mark.parametrize("kind", [*KERNEL_SUBCLASSES, *CELLS])
@pytest.mark.filterwarnings("error")
def test_one_recurrence_is_traced_listed_and_differentiated(kind):
    model, x, y = build(kind)
    name = "cell" if kind in CELLS else "rnn"
    assert [row.name for row in rl.layers(model)] == [name]
    trace = rl.trace(model, x, y, loss=F.mse_loss)
    assert list(trace) == [name]
    assert trace.certificate.state == "passed"
    assert trace[name].hidden.shape == (B, T, H)
    assert ("gates" in trace[name]) == (kind in (*KERNEL_SUBCLASSES, *WITH_GATES))
    rl.weights(model, x, y, loss=F.mse_loss)
    expected = torch.autograd.functional.jacobian(model, x)[range(B), :, range(B)].numpy()
    np.testing.assert_allclose(rl.jacobian(model, x).values, expected, rtol=0, atol=1e-14)


def test_a_layer_that_computes_its_own_steps_is_refused_by_name():
    model, x, y = build(OwnGRU)
    for call in (
        lambda: rl.trace(model, x, y, loss=F.mse_loss),
        lambda: rl.jacobian(model, x),
        lambda: rl.gradients(model, x, y, loss=F.mse_loss, wrt="rnn.hidden"),
    ):
        with pytest.raises(rl.errors.UnsupportedError, match=r"Layer 'rnn' computes its steps in its own forward"):
            call()


def test_what_is_not_shown_of_a_model_is_noted():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.rnn = OwnGRU(N, H, batch_first=True), nn.LSTM(H, H, batch_first=True)

        def forward(self, x):
            return self.rnn(self.own(x)[0])[0][:, -1]

    torch.manual_seed(0)
    trace = rl.trace(Both(), torch.randn(B, T, N))
    assert trace.notes == ["own: OwnGRU.forward does not call torch's kernel, so its steps were not recorded."]


@pytest.mark.parametrize("kind", [CalledThrough, LeakyCell, ResidualLSTM])
def test_watching_does_not_end_a_training(kind):
    inner, x, y = build(kind)
    model = nn.Sequential(nn.LSTM(N, N, batch_first=True).double(), First(), inner)
    with rl.torch.watch(model, every=1) as watch:
        for _ in range(2):
            F.mse_loss(model(x), y).backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
    assert "0" in watch.latest.layers


class First(nn.Module):
    def forward(self, returned):
        return returned[0]
