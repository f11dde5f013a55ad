"""Every option of torch's fused recurrences, in full product, against the recurrence written out and differentiated."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import rnnlens as rl

_spec = importlib.util.spec_from_file_location("torch_unrolled", Path(__file__).with_name("unrolled.py"))
unrolled = importlib.util.module_from_spec(_spec)
sys.modules["torch_unrolled"] = unrolled
_spec.loader.exec_module(unrolled)

B, T, F, H, P = 3, 4, 2, 3, 2
LENGTHS = torch.tensor([2, 4, 3])
CELLS = {
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "lstm": (nn.LSTM, {}),
    "lstm_projected": (nn.LSTM, {"proj_size": P}),
    "gru": (nn.GRU, {}),
}
FEEDS = ("plain", "hx", "unbatched", "unbatched_hx", "packed", "packed_sorted", "packed_hx")


class Model(nn.Module):
    """The module alone, fed in one of the ways that torch allows; returns what it returns."""

    def __init__(self, module, feed):
        super().__init__()
        self.rnn, self.feed = module, feed

    def forward(self, x, *states):
        hx = states if len(states) > 1 else states[0] if states else None
        if self.feed.startswith("packed"):
            order = self.feed == "packed_sorted"
            lengths = LENGTHS.sort(descending=True).values if order else LENGTHS
            x = pack_padded_sequence(x, lengths, batch_first=self.rnn.batch_first, enforce_sorted=order)
        return self.rnn(x, hx)


def canonical(returned, module, feed):
    """(sample, time, unit) and (layer * direction, sample, unit) of whatever torch returned."""
    output, finals = returned
    finals = finals if isinstance(finals, tuple) else (finals,)
    if isinstance(output, PackedSequence):
        output = pad_packed_sequence(output, batch_first=True)[0]
    elif feed.startswith("unbatched"):
        output, finals = output.unsqueeze(0), [f.unsqueeze(1) for f in finals]
    elif not module.batch_first:
        output = output.transpose(0, 1)
    return output, finals


def functional(output, finals):
    """A scalar in which every output and final state has a part of its own."""

    def part(value):
        weights = torch.arange(value.numel(), dtype=value.dtype).reshape(value.shape).sin()
        return (weights * value + 0.5 * value**2).sum()

    return part(output) + sum(part(f) for f in finals)


def make(cell, layers, both, first, bias, feed, dtype):
    torch.manual_seed(0)
    kind, options = CELLS[cell]
    module = kind(F, H, layers, bidirectional=both, batch_first=first, bias=bias, **options).double()
    rng = np.random.default_rng(1)
    samples = 1 if feed.startswith("unbatched") else B
    x = torch.tensor(rng.normal(size=(samples, T, F)))
    sizes = [P if cell == "lstm_projected" else H, *([H] if module.mode == "LSTM" else [])]
    shape = (layers * (1 + both), samples)
    given = [torch.tensor(rng.normal(size=(*shape, size))) for size in sizes]
    states = given if feed.endswith("hx") else [torch.zeros_like(s) for s in given]
    lengths = torch.full((samples,), T)
    if feed.startswith("packed"):
        lengths = LENGTHS.sort(descending=True).values if feed == "packed_sorted" else LENGTHS
    mask = torch.arange(T)[None, :] < lengths[:, None]
    reference = unrolled.Unrolled(module, x, mask, states)
    fed = x if first else x.transpose(0, 1)
    passed = given if feed.endswith("hx") else []
    if feed.startswith("unbatched"):
        fed, passed = x[0], [s[:, 0] for s in passed]
    model = Model(module.to(dtype), feed)
    return model, (fed.to(dtype), *(s.to(dtype) for s in passed)), reference, mask


def compare(got, expected, name, bound):
    got, expected = np.asarray(got, dtype="float64"), expected.numpy()
    assert got.shape == expected.shape, name
    scale = max(np.abs(expected).max(), 1e-12)
    assert np.abs(got - expected).max() / scale <= bound, name


def check_direction(node, expected, gradient, side, mask, bound):
    def value(name):
        array = node[name]
        return array.isel(direction=side) if "direction" in array.dims else array

    compare(value("hidden"), expected.seen["hidden"], "hidden", bound)
    compare(value("output"), expected.seen["output"], "output", bound)
    compare(value("output_grad"), unrolled.stacked(expected, "output", gradient), "output_grad", bound)
    compare(value("hidden_grad"), unrolled.stacked(expected, "hidden", gradient), "hidden_grad", bound)
    real = mask[:, :, None, None]
    compare(value("gate_grad"), unrolled.gate_gradients(expected, gradient), "gate_grad", bound)
    for name, prefix in (("gates", "gate"), ("gate_preactivation", "pre")):
        compare(np.where(real, value(name), 0), unrolled.gates(expected, prefix) * real, name, bound)
    if "cell" in expected.seen:
        compare(value("cell"), expected.seen["cell"], "cell", bound)
        # At padding torch computes no cell state: only the state carried over is comparable.
        compare(
            np.where(mask[:, :, None], value("cell_grad"), 0),
            unrolled.stacked(expected, "cell", gradient) * mask[:, :, None],
            "cell_grad",
            bound,
        )
    for when, taps in (("initial", expected.state_taps), ("final", expected.final_taps)):
        states = ("hidden", "cell")[: len(taps)]
        for i, tap in enumerate(taps):
            whole = f"{when}_state_grad"
            name = whole if whole in node.dataset else f"{when}_{states[i]}_grad"
            array = value(name).isel(state=i) if name == whole else value(name)
            compare(array, gradient(tap), name, bound)


def check(cell, layers, both, first, bias, feed, dtype, bound):
    model, x, reference, mask = make(cell, layers, both, first, bias, feed, dtype)
    loss = functional(reference.output, reference.final)
    gradient = reference.gradients(loss)
    trace = rl.trace(model, x, loss=lambda returned: functional(*canonical(returned, model.rnn, feed)))
    expected = loss.item()
    assert abs(trace.loss - expected) <= bound * max(1, abs(expected))
    for layer, row in enumerate(reference.by_direction):
        node = trace[f"rnn[{layer}]" if layers > 1 else "rnn"]
        for side, expected in enumerate(row):
            check_direction(node, expected, gradient, side, mask, bound)
        compare(node.input_grad, sum(gradient(expected.x_tap) for expected in row), "input_grad", bound)
        if not mask.all():
            assert np.array_equal(node.mask.values, mask.numpy())
    assert all(c.ok for c in trace.checks)


PRODUCT = list(itertools.product(CELLS, (1, 2), (False, True), (True, False), (True, False)))


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize(("cell", "layers", "both", "first", "bias"), PRODUCT)
def test_float64(cell, layers, both, first, bias, feed):
    check(cell, layers, both, first, bias, feed, torch.float64, 1e-10)


@pytest.mark.parametrize("feed", ["plain", "packed_hx"])
@pytest.mark.parametrize(("cell", "layers", "both", "first", "bias"), PRODUCT)
def test_float32(cell, layers, both, first, bias, feed):
    check(cell, layers, both, first, bias, feed, torch.float32, 1e-4)


def test_direct_is_not_total():
    """A last-step loss reaches one step of the output from above and every step of the state through time."""
    torch.manual_seed(0)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(F, H, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0][:, -1]

    node = rl.trace(Last(), torch.randn(B, T, F), loss=lambda out: out.sum())["lstm"]
    assert (np.abs(node.output_grad).max(("sample", "unit")) > 0).values.tolist() == [False] * (T - 1) + [True]
    assert (np.abs(node.hidden_grad).max(("sample", "unit")) > 0).all()
