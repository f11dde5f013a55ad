"""Gradients that fall below the normal numbers of their dtype within a few hundred steps."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.autodiff import torch as engine

STEPS = 320


class Last(nn.Module):
    """An untrained recurrent network with a head at the last step."""

    def __init__(self, kind, layers=1):
        super().__init__()
        self.rnn = kind(4, 96, num_layers=layers, batch_first=True)
        self.head = nn.Linear(96, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class ByHand(nn.Module):
    """An untrained RNN loop whose step is differentiated by torch, with a head at the last step."""

    def __init__(self):
        super().__init__()
        self.into, self.across, self.head = nn.Linear(4, 96), nn.Linear(96, 96, bias=False), nn.Linear(96, 3)

    def forward(self, x):
        h = x.new_zeros(len(x), 96)
        for t in range(x.shape[1]):
            h = rl.torch.step(lambda x, h: torch.tanh(self.into(x) + self.across(h)), x[:, t], h)
        return self.head(h)


def subnormal_arithmetic_works():
    """Return whether this thread computes with numbers below the smallest normal one."""
    return float(torch.tensor([1e-39]) * 0.5) != 0


@pytest.mark.parametrize(
    "make_model",
    [lambda: Last(nn.LSTM), lambda: Last(nn.GRU, 2), lambda: Last(nn.RNN), ByHand],
    ids=["LSTM", "GRU", "RNN", "by hand"],
)
def test_they_are_zero_below_a_bound_and_right_above_it(make_model):
    torch.manual_seed(0)
    model, x, y = make_model(), torch.randn(8, STEPS, 4), torch.randint(0, 3, (8,))
    exact_model = make_model().double()
    exact_model.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    trace = rl.trace(model, x, y, loss=nn.functional.cross_entropy)
    reference = rl.trace(exact_model, x.double(), y, loss=nn.functional.cross_entropy)
    assert all(check.ok for check in trace.checks)
    for layer in trace.layers:
        actual, expected = trace[layer].hidden_grad.values, reference[layer].hidden_grad.values
        bound = np.finfo("float32").smallest_normal
        underflow = 4 * 96 * bound  # a gradient sums 4 * 96 products, each of which may have been set to zero
        assert np.abs(expected).max(axis=(0, 2))[0] < bound < np.abs(expected).max()
        scale = np.abs(expected).max(axis=(0, 2), keepdims=True)
        assert (np.abs(actual - expected) <= 1e-4 * scale + underflow).all()
        assert not actual[:, 0].any()
    assert subnormal_arithmetic_works()


def test_a_large_pass_has_a_thread_of_its_own_and_leaves_no_setting_behind():
    x = torch.randn(engine.WORTH_A_THREAD, requires_grad=True)
    threads = []
    y = (x * 1e-20).mul(1e-19)
    y.register_hook(lambda grad: threads.append(threading.get_ident()))
    (grad,) = engine.backward_pass([y.sum()], [x])
    assert threads != [threading.get_ident()]
    assert not grad.any()
    assert torch.autograd.grad((x * 1e-20).mul(1e-19).sum(), x)[0].all()


def test_an_error_in_a_large_pass_is_the_callers():
    x = torch.randn(engine.WORTH_A_THREAD, requires_grad=True)
    y = x * 2

    def fail(grad):
        raise KeyError("mine")

    y.register_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        engine.backward_pass([y.sum()], [x])


def test_a_small_pass_stays_in_the_callers_thread():
    x = torch.randn(3, requires_grad=True)
    y, threads = x * 2, []
    y.register_hook(lambda grad: threads.append(threading.get_ident()))
    engine.backward_pass([y.sum()], [x])
    assert threads == [threading.get_ident()]


def test_a_hook_of_the_backward_pass_may_call_a_verb():
    class Curious(Last):
        def forward(self, x):
            hidden = self.rnn(x)[0]
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: inner.append(rl.weights(self)))
            return self.head(hidden[:, -1])

    model, inner = Curious(nn.RNN), []
    rl.trace(model, torch.randn(16, 100, 4), torch.randint(0, 3, (16,)), loss=nn.functional.cross_entropy)
    assert inner
