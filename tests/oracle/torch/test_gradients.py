"""Every (of, wrt) pair of docs/gradients.md against autograd on the same network in plain operations."""

from types import SimpleNamespace

import numpy as np
import pytest
import tapped_network as net
import torch
from torch import nn

import rnnlens as rl

pytestmark = pytest.mark.check

OPS = SimpleNamespace(
    tensor=torch.tensor,
    tanh=torch.tanh,
    sigmoid=torch.sigmoid,
    mean=torch.mean,
    stack=lambda a, i: torch.stack(a, dim=i),
    concat=lambda a, i: torch.cat(a, dim=i),
)
P = net.random_arrays(net.WEIGHTS, 0)
# torch's LSTM and RNN have a second bias, the reference network has not: it is zero.
X = np.random.default_rng(1).normal(size=(net.B, net.T, net.F))
Y = np.random.default_rng(2).normal(size=(net.B, net.OUT))
E = net.zero_taps(return_sequences=True)
TARGET_WEIGHTS = {
    name: np.random.default_rng(i).normal(size=E[name].shape) for i, name in enumerate(net.TARGETS) if name in E
}
#: Weight name in rnnlens -> name in the reference network.
REFERENCE_NAMES = {
    name.replace("conv1d/kernel", "conv1d/weight").replace("head/kernel", "head/weight"): name for name in net.WEIGHTS
}


class Causal(nn.Conv1d):
    """A causal convolution of width 2 with input and output (sample, time, feature)."""

    def forward(self, x):
        padded = nn.functional.pad(x.mT, (1, 0))
        return torch.tanh(super().forward(padded)).mT


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1d = Causal(net.F, net.C, 2)
        self.lstm = nn.LSTM(net.C, net.H, batch_first=True)
        self.gru = nn.GRU(net.H, net.G, batch_first=True, bidirectional=True)
        self.rnn = nn.RNN(2 * net.G, net.R, batch_first=True)
        self.head = nn.Linear(net.R, net.OUT)

    def forward(self, x):
        a, _ = self.lstm(self.conv1d(x))
        b, _ = self.gru(a)
        c, _ = self.rnn(b)
        return self.head(c[:, -1])


def torch_layout(array):
    """Convert weights (n, gate, unit) to torch's layout (gate * unit, n)."""
    return torch.tensor(array.reshape(array.shape[0], -1).T.copy())


@pytest.fixture(scope="module")
def model():
    m = Net().double()
    with torch.no_grad():
        m.conv1d.weight.copy_(torch.tensor(P["conv1d/kernel"].transpose(2, 1, 0)))
        m.conv1d.bias.copy_(torch.tensor(P["conv1d/bias"]))
        m.lstm.weight_ih_l0.copy_(torch_layout(P["lstm/kernel"]))
        m.lstm.weight_hh_l0.copy_(torch_layout(P["lstm/recurrent_kernel"]))
        m.lstm.bias_ih_l0.copy_(torch.tensor(P["lstm/bias"].ravel()))
        m.lstm.bias_hh_l0.zero_()
        for d, suffix in enumerate(("", "_reverse")):
            # torch orders the gates reset, update, candidate.
            order = [1, 0, 2]
            getattr(m.gru, f"weight_ih_l0{suffix}").copy_(torch_layout(P["gru/kernel"][d][:, order]))
            getattr(m.gru, f"weight_hh_l0{suffix}").copy_(torch_layout(P["gru/recurrent_kernel"][d][:, order]))
            getattr(m.gru, f"bias_ih_l0{suffix}").copy_(torch.tensor(P["gru/bias"][d][order].ravel()))
            getattr(m.gru, f"bias_hh_l0{suffix}").copy_(torch.tensor(P["gru/recurrent_bias"][d][order].ravel()))
        m.rnn.weight_ih_l0.copy_(torch_layout(P["rnn/kernel"]))
        m.rnn.weight_hh_l0.copy_(torch_layout(P["rnn/recurrent_kernel"]))
        m.rnn.bias_ih_l0.copy_(torch.tensor(P["rnn/bias"].ravel()))
        m.rnn.bias_hh_l0.zero_()
        m.head.weight.copy_(torch.tensor(P["head/kernel"].T.copy()))
        m.head.bias.copy_(torch.tensor(P["head/bias"]))
    return m


def leaf_tensors(arrays):
    return {name: torch.tensor(a, requires_grad=True) for name, a in arrays.items()}


def reference_gradients(scalar):
    """Return the value and the gradients by name of ``scalar(all tensors)``; None where torch finds no path."""
    p, e = leaf_tensors(P), leaf_tensors(E)
    value = scalar(net.run_network(p, e, torch.tensor(X), torch.tensor(Y), OPS))
    grads = torch.autograd.grad(value, [*p.values(), *e.values()], allow_unused=True)
    return value.item(), {n: None if g is None else g.numpy() for n, g in zip([*p, *e], grads, strict=True)}


def written_layout(name, array):
    """Convert a gradient of torch's layers to the layout of the reference network."""
    if name == "conv1d/weight":
        return array.transpose(2, 1, 0)
    return array.T if name == "head/weight" else array


def check(g, expected, value):
    # Compare the value first: gradients of another scalar could be close to zero as well.
    np.testing.assert_allclose(g.value, value, rtol=1e-10)
    scale = max(np.abs(a).max() for a in expected.values() if a is not None)
    for name in [*REFERENCE_NAMES, *net.TAPS]:
        reference = expected[REFERENCE_NAMES.get(name, name)]
        if reference is None:
            assert name in g.disconnected, name
            continue
        actual = written_layout(name, g[name].values)
        assert actual.shape == reference.shape, name
        assert np.abs(actual - reference).max() <= 1e-10 * scale, name
        # Compare each gradient relative to its own size too: the bound above is too loose for small gradients.
        np.testing.assert_allclose(actual, reference, rtol=1e-8, atol=1e-13 * scale, err_msg=name)


@pytest.mark.parametrize("of", net.TARGETS)
def test_every_pair_equals_autodiff(model, of):
    weights = TARGET_WEIGHTS.get(of, 1.0)
    value, expected = reference_gradients(
        lambda out: (out[of] * torch.tensor(weights)).sum() if of != "loss" else out["loss"]
    )
    target = {"y": torch.tensor(Y), "loss": nn.functional.mse_loss} if of == "loss" else {"reduce": weights}
    check(rl.gradients(model, torch.tensor(X), of=of, wrt=[*REFERENCE_NAMES, *net.TAPS], **target), expected, value)


def test_callable_of_the_output(model):
    value, expected = reference_gradients(lambda out: out["output"][:, 1].exp().sum())
    g = rl.gradients(model, torch.tensor(X), of=lambda out: out[:, 1].exp().sum(), wrt=[*REFERENCE_NAMES, *net.TAPS])
    check(g, expected, value)


def test_callable_of_named_tensors_inside_and_outside(model):
    def mixed_sum(hidden, cell, by_direction, out):
        return (hidden[:, 2] * cell[:, 3]).sum() + (by_direction[:, 1, 0] ** 2).sum() + out.sum() ** 2

    names = ["lstm.hidden", "lstm.cell", "gru.hidden", "output"]
    value, expected = reference_gradients(lambda out: mixed_sum(*(out[name] for name in names)))
    check(
        rl.gradients(model, torch.tensor(X), of=(mixed_sum, *names), wrt=[*REFERENCE_NAMES, *net.TAPS]), expected, value
    )
