"""After any other verbs, a verb returns the numbers, axes, notes and certificate that it returns on a fresh copy."""

from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from itertools import pairwise, product
from weakref import WeakSet

import pytest
import torch
from function_models import make_model, noise
from order_of_calls import Calls
from planted_cells import plant_scaled_gradient
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rnnlens as rl

jacobian = import_module("rnnlens.verbs.jacobian")
B, T, F, H, V = 6, 7, 4, 5, 4
LENGTHS = torch.tensor([7, 6, 6, 4, 3, 2])


def swapped(x):
    return x.transpose(1, 2)


def run_packed(m, x):
    packed = pack_padded_sequence(x, LENGTHS[: len(x)], batch_first=True)
    return m.head(pad_packed_sequence(m.rnn(packed)[0], batch_first=True)[0])


def loop_over_steps(m, x):
    h, outputs = x.new_zeros(len(x), H), []
    for t in range(x.shape[1]):
        h = m.rnn(x[:, t], h)
        outputs.append(m.head(h))
    return torch.stack(outputs, 1)


def modules(recurrent=nn.GRU, width=1, **options):
    options = options if recurrent is nn.GRUCell else {"batch_first": True, **options}
    return {"rnn": recurrent(F, H, **options), "head": nn.Linear(width * H, V)}


#: Forward function, submodules and shape of the input.
KINDS = {
    "chain": lambda: (lambda m, x: m.head(m.rnn(x)[0]), modules(nn.LSTM), (B, T, F)),
    "channels first": lambda: (lambda m, x: swapped(m.head(m.rnn(swapped(x))[0])), modules(), (B, F, T)),
    "channels first, sizes equal": lambda: (lambda m, x: swapped(m.head(m.rnn(swapped(x))[0])), modules(), (4, 4, 4)),
    "channels first, convolution": lambda: (
        lambda m, x: m.head(m.rnn(swapped(m.conv(x)))[0][:, -1]),
        {"conv": nn.Conv1d(F, F, 3, padding=1), **modules()},
        (B, F, T),
    ),
    "channels first, time first inside": lambda: (
        lambda m, x: m.head(m.rnn(x.permute(2, 0, 1))[0][-1]),
        modules(nn.LSTM, batch_first=False),
        (B, F, T),
    ),
    "chain of many samples": lambda: (lambda m, x: m.head(m.rnn(x)[0]), modules(nn.LSTM), (16, T, F)),
    "time first": lambda: (lambda m, x: m.head(m.rnn(x)[0]), modules(nn.RNN, batch_first=False), (T, B, F)),
    "last step": lambda: (lambda m, x: m.head(m.rnn(x)[0][:, -1]), modules(), (B, T, F)),
    "loop of cells": lambda: (loop_over_steps, modules(nn.GRUCell), (B, T, F)),
    "both directions": lambda: (
        lambda m, x: m.head(m.rnn(x)[0].tanh()),
        modules(width=2, bidirectional=True),
        (B, T, F),
    ),
    "packed": lambda: (run_packed, modules(nn.LSTM), (B, T, F)),
}


@pytest.fixture(params=KINDS)
def calls(request):
    torch.manual_seed(0)
    run, submodules, shape = KINDS[request.param]()
    model, x = make_model(run, **submodules), noise(*shape)
    y = torch.roll(model(x).detach(), 1, 0)
    return Calls(lambda: deepcopy(model), x, y, nn.functional.mse_loss, "rnn")


def test_drawn_pairs_and_triples(calls):
    quick = replace(calls, left_out=("diagnose",))
    quick.check([*quick.drawn(9), *quick.drawn(2, 3), ("gradients by input", "jacobian")])
    replace(quick, certify="auto").check([*quick.drawn(3, seed=2), ("jacobian", "jacobian")])


@pytest.mark.parametrize("certify", ["auto", "first"])
@pytest.mark.parametrize("calls", ["chain of many samples"], indirect=True)
def test_each_verb_after_itself(calls, certify):
    quick = replace(calls, left_out=("diagnose", "gradients in batches"), certify=certify)
    quick.check([(verb, verb) for verb in quick.verbs])


@pytest.mark.parametrize("calls", ["channels first", "last step"], indirect=True)
def test_a_diagnosis_after_gradients_and_gradients_after_a_diagnosis(calls):
    calls.check([("gradients by input", "diagnose"), ("diagnose", "jacobian")])


@pytest.mark.filterwarnings("ignore::rnnlens.errors.SelfCheckWarning")
@pytest.mark.parametrize("calls", ["time first"], indirect=True)
def test_a_certificate_that_failed_fails_again(calls, monkeypatch):
    plant_scaled_gradient(monkeypatch, 1.01)  # of traces
    original = jacobian.execute
    monkeypatch.setattr(jacobian, "execute", lambda *args: original(*args) * 1.01)
    faulty = replace(calls, certify="auto")
    for verb in ("trace", "weights", "jacobian", "gradients by states"):
        assert faulty.verbs[verb](calls.copy_model()).certificate.state == "failed", verb
    faulty.check([("jacobian", "jacobian"), ("trace", "jacobian"), ("jacobian", "trace"), ("weights", "trace")])


@pytest.mark.full
@pytest.mark.parametrize("certify", ["always", "auto", "first"])
def test_each_verb_after_each(calls, certify):
    calls.check_each_after_each(certify)


@pytest.mark.parametrize("calls", ["chain"], indirect=True)
def test_a_verb_that_remembers_is_found(calls, monkeypatch):
    """Check the test itself: a Jacobian that changes with an earlier call for the input's gradient."""
    original, asked = {name: getattr(rl, name) for name in ("gradients", "jacobian")}, WeakSet()

    def gradients(model, *args, **options):
        if options["wrt"] == "input" and "per_sample" in options:
            asked.add(model)
        return original["gradients"](model, *args, **options)

    def remembering_jacobian(model, *args, **options):
        return original["jacobian"](model, *args, **options) * (1.001 if model in asked else 1)

    monkeypatch.setattr(rl, "gradients", gradients)
    monkeypatch.setattr(rl, "jacobian", remembering_jacobian)
    calls = replace(calls, left_out=tuple(set(calls.verbs) - {"trace", "gradients of samples", "jacobian", "layers"}))
    assert {pair for walk in calls.walks() for pair in pairwise(walk)} == set(product(calls.verbs, repeat=2))
    with pytest.raises(AssertionError, match=r"^jacobian after gradients of samples: /value has other numbers$"):
        calls.check([("trace", "gradients of samples", "layers", "jacobian")])
