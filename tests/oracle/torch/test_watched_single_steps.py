"""Batch mode of ``rl.torch.watch`` joins calls of torch's layers on single steps, as ``rl.trace`` does."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

SAMPLES, STEPS, FEATURES, HIDDEN = 2, 5, 3, 4


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("kind", "layers"), [("RNN", 1), ("GRU", 2), ("LSTM", 1), ("LSTM", 2)])
def test_steps_of_the_authors_loop_are_one_layer(kind, layers, batch_first):
    """The loop is in the script, which also reads the state between the steps, as attention does."""
    torch.manual_seed(0)
    rnn = getattr(nn, kind)(FEATURES, HIDDEN, layers, batch_first=batch_first).double()
    out = nn.Linear(2 * HIDDEN, 2).double()
    optimizer = torch.optim.SGD([*rnn.parameters(), *out.parameters()], lr=0.1)
    axis = 1 if batch_first else 0

    def run(x):
        state, scores = None, []
        for step in x.split(1, axis):
            output, state = rnn(step, state)
            top = (state[0] if kind == "LSTM" else state)[-1]
            scores.append(out(torch.cat([output.squeeze(axis), top], 1)))
        return torch.stack(scores, axis)

    def train():
        optimizer.zero_grad()
        run(x).pow(2).mean().backward()
        optimizer.step()

    x = torch.randn((SAMPLES, STEPS, FEATURES) if batch_first else (STEPS, SAMPLES, FEATURES), dtype=torch.float64)
    model = nn.ModuleDict({"rnn": rnn, "out": out})
    before = copy.deepcopy(model.state_dict())
    trace = rl.trace(rl.torch.model(run, rnn, out), x, torch.zeros(1), loss=lambda scores, _: scores.pow(2).mean())
    assert trace.certificate.state == "passed"
    train()
    after = copy.deepcopy(model.state_dict())
    model.load_state_dict(before)
    with rl.torch.watch(model, every=1) as watch:
        train()
    assert all(torch.equal(after[name], weight) for name, weight in model.state_dict().items())

    batch = watch.latest
    assert list(batch.trace) == list(trace)
    for name in trace:
        for quantity in ("hidden", "hidden_grad", "output_grad", "gate_grad", "input_grad"):
            if quantity in trace[name]:
                np.testing.assert_allclose(
                    batch.trace[name][quantity], trace[name][quantity], rtol=1e-11, atol=1e-16, err_msg=quantity
                )
    np.testing.assert_allclose(batch.direct[name].output_grad, trace[name].output_grad, rtol=1e-11, atol=1e-16)


def test_a_state_from_another_layer_starts_a_layer_of_its_own():
    torch.manual_seed(0)
    encoder, decoder = nn.GRU(FEATURES, HIDDEN), nn.GRU(FEATURES, HIDDEN)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    with rl.torch.watch(nn.ModuleDict({"encoder": encoder, "decoder": decoder}), every=1) as watch:
        optimizer.zero_grad()
        _, state = encoder(torch.randn(1, SAMPLES, FEATURES))
        for _ in range(STEPS):
            output, state = decoder(torch.randn(1, SAMPLES, FEATURES), state)
        output.sum().backward()
        optimizer.step()
    assert {name: watch.latest.trace[name].hidden.sizes["time"] for name in watch.latest.trace} == {
        "encoder": 1,
        "decoder": STEPS,
    }
