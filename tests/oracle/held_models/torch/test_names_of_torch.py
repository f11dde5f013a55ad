"""Modules that give a method of torch another meaning, and functions beside a loop that are only named like scans."""

import numpy as np
import pytest
import torch
from tests.helpers.order_of_calls import facts
from torch import nn

import rnnlens as rl


class ByFamily(nn.Module):
    """A layer of a package that returns its parameters, modules and states as dictionaries, by family."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def parameters(self, family=None):
        return {name: p for name, p in self.named_parameters() if family is None or family in name}

    def modules(self):
        return dict(self.named_children())

    def forward(self, x):
        return self.lstm(x)[0]


class Plain(ByFamily):
    parameters, modules = nn.Module.parameters, nn.Module.modules


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(x))


def build(kind, *, whole):
    torch.manual_seed(0)
    layer = kind()
    return (layer if whole else Net(layer)).double()


VERBS = {
    "layers": lambda m, x, y: rl.layers(m, x).names,
    "trace": lambda m, x, y: rl.trace(m, x, y, loss=nn.functional.mse_loss),
    "gradients": lambda m, x, y: rl.gradients(m, x, y, loss=nn.functional.mse_loss),
    "jacobian": lambda m, x, y: rl.jacobian(m, x),
    "weights": lambda m, x, y: rl.weights(m, x, y, loss=nn.functional.mse_loss),
    "find_nonfinite": lambda m, x, y: repr(rl.find_nonfinite(m, x, y, loss=nn.functional.mse_loss)),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("verb", VERBS)
def test_parameters_of_another_meaning_change_no_answer(verb, whole):
    x, y = torch.randn(4, 6, 3).double(), torch.randn(4, 6, 4 if whole else 2).double()
    own, plain = (VERBS[verb](build(kind, whole=whole), x, y) for kind in (ByFamily, Plain))
    if isinstance(own, (str, tuple, list)):
        assert str(own) == str(plain)
        return
    first, second = facts(own), facts(plain)
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, second[name])


def warm_scan(device):
    """Prepare a device."""


class WithOwnLoop(nn.Module):
    """A loop of its own equations, in a file that has a function named like a scan, which takes one argument."""

    def __init__(self):
        super().__init__()
        self.kernel, self.recurrent = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 4) / 4)
        self.device = None

    def forward(self, x):
        if self.device is not None:
            warm_scan(self.device)
        h = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            h = torch.tanh(step @ self.kernel + h @ self.recurrent)
        return h


def test_a_function_of_one_argument_is_no_scan():
    with pytest.raises(rl.errors.ModelError) as error:
        rl.trace(WithOwnLoop(), torch.randn(4, 6, 3))
    assert "warm_scan" not in str(error.value)
    assert "rl.torch.step(lambda x, h:" in str(error.value)
