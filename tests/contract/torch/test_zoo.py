"""Common torch models: each is traced, its self-checks are within bounds, and its gradients equal torch's own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rnnlens as rl
from rnnlens.adapters.protocol import Batch, Port, Taps
from rnnlens.adapters.torch import adapter
from rnnlens.recurrence.replay import Replay
from rnnlens.verbs.recurrent_layers import sweep

_spec = importlib.util.spec_from_file_location("torch_zoo", Path(__file__).with_name("zoo.py"))
zoo = importlib.util.module_from_spec(_spec)
sys.modules["torch_zoo"] = zoo
_spec.loader.exec_module(zoo)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def build(name):
    torch.manual_seed(0)
    return zoo.ZOO[name]()


def test_the_zoo_is_large_enough():
    assert len(zoo.ZOO) >= 12


@pytest.mark.parametrize("name", zoo.ZOO)
def test_traced(name):
    model, x, y, loss, nodes = build(name)
    trace = rl.trace(model, x, y, loss=loss, seed=3)
    assert list(trace) == nodes
    assert len(trace.checks) >= len(nodes)
    assert all(check.ok for check in trace.checks), trace.checks
    for node in nodes:
        assert np.isfinite(trace[node].hidden_grad).all()
        assert (trace[node].hidden_grad != 0).any(), node


@pytest.mark.parametrize("name", zoo.ZOO)
def test_loss_and_weight_gradients_are_those_of_training(name):
    """The captured loss and the norm of dL/dW equal those of ``loss.backward()``."""
    model, x, y, loss, _ = build(name)
    capture = adapter.run(model, Batch(x, y, loss=loss, seed=3), Taps.direct(weight_grads=True)).capture
    model.eval()
    torch.manual_seed(3)
    zoo.random.seed(3)
    args, keywords = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
    value = loss(model(*args, **keywords), y)
    value.backward()
    assert capture.loss == pytest.approx(value.item(), rel=1e-6)
    computed = {}
    for call in capture.calls:
        for key, grad in call.weight_grads.items():
            computed.setdefault((call.weights_key, key), grad)
    recurrent = {call.layer.partition("#")[0].partition("[")[0] for call in capture.calls}
    reference = [p.grad for n, p in model.named_parameters() if any(n.startswith(f"{layer}.") for layer in recurrent)]
    norm = sum(float((g.double() ** 2).sum()) for g in computed.values()) ** 0.5
    assert norm == pytest.approx(sum(float((g.double() ** 2).sum()) for g in reference) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_gradients_below_a_layer_are_those_of_the_pullback(name):
    """Backpropagation through a layer from its direct gradients gives torch's gradient of its initial state."""
    model, x, y, loss, nodes = build(name)
    batch = Batch(x, y, loss=loss, seed=3)
    calls = {}
    for call in adapter.run(model, batch, Taps.direct(weight_grads=True)).capture.calls:
        calls.setdefault(call.layer, []).append(call)
    ports = [
        Port("initial_state", node, 0, direction=call.direction if call.bidirectional else None)
        for node in nodes
        for call in calls[node]
    ]
    with adapter.run(model, batch, Taps.ports([Port("loss")], ports)) as pullback:
        pulled_grads = pullback.pull({Port("loss"): torch.ones(1)})
    for port in ports:
        call = next(c for c in calls[port.layer] if port.direction in (None, c.direction))
        run = Replay.from_call(call)
        computed = sweep(call, run, call.output_grad, call.final_state_grad, call.state_grad).initial_state_grad[0]
        if pulled_grads[port] is None:  # the cell created its initial zeros itself
            assert name == "minimal_gated_unit"
            continue
        scale = float(computed.abs().max()) or 1.0
        torch.testing.assert_close(pulled_grads[port][0], computed, atol=1e-5 * scale, rtol=0)
