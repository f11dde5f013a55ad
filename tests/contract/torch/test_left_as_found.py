"""Model, tensors, random states and flags are restored after success, errors and interrupts."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.adapters.protocol import Batch, Port, Taps
from rnnlens.adapters.torch import adapter

B, T, F, H = 2, 4, 3, 5
_LIVE = []


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(2 * H, H)

    def forward(self, x, h):
        return torch.tanh(self.mix(torch.cat([x, h], 1)))


class StatefulModel(nn.Module):
    """Model whose forward changes statistics, attributes and random states and keeps a graph; one part is frozen."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(F)
        self.rnn = nn.LSTM(F, H, 2, batch_first=True, dropout=0.3)
        self.step, self.cell = nn.GRUCell(H, H), Cell()
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(H, 2))
        self.register_buffer("calls", torch.zeros(()))
        self.memory, self.log, self.fail = None, [], None
        self.rnn.weight_ih_l0.requires_grad_(False)
        self.head.eval()

    def forward(self, x):
        self.calls += 1
        y, _ = self.rnn(self.norm(x.transpose(1, 2)).transpose(1, 2) + random.random() + np.random.rand())  # noqa: NPY002
        h = k = y.new_zeros(len(x), H)
        for t in range(T):
            h = self.step(y[:, t], h)
            k = self.cell(h, k)
            self.log.append(k)
        self.memory, self.extra = k, h
        _LIVE[:] = [weakref.ref(k), weakref.ref(y)]
        if self.fail is not None:
            raise self.fail("forward")
        return self.head(k + torch.rand_like(k))


def complete_state(model, x):
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "identity": {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())},
        "grad": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "training": {name: m.training for name, m in model.named_modules()},
        "hooks": {
            name: [len(getattr(m, kind)) for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
            for name, m in model.named_modules()
        },
        "attributes": {name: sorted(m.__dict__) for name, m in model.named_modules()},
        "forward": ["forward" in m.__dict__ for m in model.modules()],
        "own": (model.memory, list(model.log)),
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),  # noqa: NPY002
        "flags": (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.mkldnn.enabled,
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
        ),
        "input": (x.clone(), x.requires_grad, x.grad, x._version),
    }


def deep_equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(deep_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(deep_equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def bad_loss(output, target):
    raise ZeroDivisionError("loss")


def interrupted_loss(output, target):
    raise KeyboardInterrupt


ENDINGS = {
    "ok": (None, nn.functional.mse_loss, None),
    "loss raises": (None, bad_loss, ZeroDivisionError),
    "loss is interrupted": (None, interrupted_loss, KeyboardInterrupt),
    "forward raises": (ZeroDivisionError, nn.functional.mse_loss, ZeroDivisionError),
    "forward is interrupted": (KeyboardInterrupt, nn.functional.mse_loss, KeyboardInterrupt),
    "wrong y": (None, lambda output, target: output, rl.errors.InputError),
}


def run_trace(model, x, y, loss, training):
    return rl.trace(model, x, y, loss=loss, training=training, seed=1)


def run_pullback(model, x, y, loss, training):
    ports = [Port("output", "rnn[0]"), Port("weight", "rnn[0]", key="kernel"), Port("weight", "cell.mix", key="bias")]
    with adapter.run(model, Batch(x, y, loss=loss, training=training), Taps.ports([Port("loss")], ports)) as pullback:
        pullback.pull({Port("loss"): torch.ones(2)})


@pytest.mark.parametrize("verb", [run_trace, run_pullback])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("ending", ENDINGS)
def test_as_found(verb, training, ending):
    torch.manual_seed(0)
    fail, loss, error = ENDINGS[ending]
    model = StatefulModel()
    x, y = torch.randn(B, T, F), torch.randn(B, 2)
    x.requires_grad_(True)
    model(x).sum().backward()
    x.grad = None
    model.memory, model.log, model.extra = "mine", ["mine"], None
    model.fail = fail
    before = complete_state(model, x)
    if error is None:
        verb(model, x, y, loss, training)
    else:
        with pytest.raises(error):
            verb(model, x, y, loss, training)
    after = complete_state(model, x)
    for name, value in before.items():
        assert deep_equal(value, after[name]), name
    gc.collect()
    assert all(reference() is None for reference in _LIVE), "a tensor of the forward pass is still alive"


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_gradients_also_where_the_caller_turned_them_off(grad_mode):
    model, x = nn.GRU(F, H, batch_first=True), torch.randn(B, T, F)
    expected = rl.trace(model, x, loss=lambda out: out[0].sum())["gru"].hidden_grad.values
    with grad_mode():
        x = x.clone()
        actual = rl.trace(model, x, loss=lambda out: out[0].sum())["gru"].hidden_grad.values
        assert not torch.is_grad_enabled()
    np.testing.assert_array_equal(actual, expected)


def test_results_do_not_follow_the_users_tensors():
    """A trace does not change if the user's weights and inputs change afterwards."""
    model, x = nn.LSTM(F, H, batch_first=True), torch.randn(B, T, F)
    trace = rl.trace(model, x, loss=lambda out: out[0].sum())
    before = {name: value.values.copy() for name, value in trace["lstm"].dataset.items()}
    with torch.no_grad():
        x.add_(1)
        for p in model.parameters():
            p.mul_(2)
    for name, value in before.items():
        np.testing.assert_array_equal(trace["lstm"][name].values, value)


def test_naming_a_cell_leaves_no_trace_on_it():
    cell = Cell()
    before = dict(cell.__dict__)
    with rl.torch.cell(cell):
        assert dict(cell.__dict__) == before
    rl.torch.cell(cell)
    reference = weakref.ref(cell)
    del cell
    gc.collect()
    assert reference() is None
