"""``rl.weights`` on torch: gate order, both biases, and gradients equal to autograd's, also by time step."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

pytestmark = pytest.mark.check

ORDER = {"RNN": [0], "LSTM": [0, 1, 2, 3], "GRU": [1, 0, 2]}
X, Y = torch.randn(3, 5, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = getattr(nn, kind)(2, 4, num_layers=2, batch_first=True, **options).double()
        width = (options.get("proj_size") or 4) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(width, 2).double()

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def rnnlens_layout(kind, values):
    """Convert torch's (gate * unit, n) to (n, gate, unit) and (gate * unit,) to (gate, unit), gates as in rnnlens."""
    gates = len(ORDER[kind])
    split = values.reshape(gates, values.shape[0] // gates, *values.shape[1:])[ORDER[kind]]
    return np.moveaxis(split, -1, 0) if split.ndim == 3 else split


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (kind, {"bidirectional": bidirectional, "bias": bias, **extra})
        for kind, bidirectional, bias in itertools.product(ORDER, (False, True), (False, True))
        for extra in ([{}, {"proj_size": 3}] if kind == "LSTM" else [{}])
    ],
)
def test_values_and_gradients_are_torchs(kind, options):
    torch.manual_seed(1)
    net = Net(kind, **options)
    loss = nn.functional.mse_loss(net(X), Y)
    parameters = dict(net.named_parameters())
    grads = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))

    weights = rl.weights(net, X, Y, loss=nn.functional.mse_loss)
    weights_by_time = rl.weights(net, X, Y, loss=nn.functional.mse_loss, by_time=True)

    names = {"kernel": "weight_ih", "recurrent_kernel": "weight_hh"}
    if options["bias"]:
        names |= {"bias": "bias_ih", "recurrent_bias": "bias_hh"}
    for layer, (direction, suffix) in itertools.product(
        (0, 1), enumerate(["", "_reverse"][: 1 + options["bidirectional"]])
    ):
        selection = {"direction": direction} if options["bidirectional"] else {}
        node, steps = weights[f"rnn[{layer}]"], weights_by_time[f"rnn[{layer}]"]
        for name, parameter in names.items():
            key = f"rnn.{parameter}_l{layer}{suffix}"
            np.testing.assert_array_equal(
                node[name].isel(selection), rnnlens_layout(kind, parameters[key].detach().numpy())
            )
            expected = rnnlens_layout(kind, grads[key].numpy())
            np.testing.assert_allclose(node[f"{name}_grad"].isel(selection), expected, rtol=0, atol=1e-12)
            np.testing.assert_allclose(steps[f"{name}_grad"].sum("time").isel(selection), expected, rtol=0, atol=1e-12)
        if "proj_size" in options:
            expected = grads[f"rnn.weight_hr_l{layer}{suffix}"].numpy().T
            np.testing.assert_allclose(node["projection_grad"].isel(selection), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(weights["head"].weight_grad, grads["head.weight"].numpy(), rtol=0, atol=1e-12)


def test_two_biases_are_kept_apart_and_summed_where_a_sum_means_something():
    lstm = rl.weights(Net("LSTM"))["rnn[0]"]
    np.testing.assert_allclose(lstm.bias_total, lstm.bias + lstm.recurrent_bias)
    assert "bias_total" not in rl.weights(Net("GRU"))["rnn[0]"]


def test_nothing_of_the_model_changes():
    net = Net("GRU")
    before = {k: v.clone() for k, v in net.state_dict().items()}
    rl.weights(net, X, Y, loss=nn.functional.mse_loss)["rnn[0]"].kernel.values[...] = 3
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
