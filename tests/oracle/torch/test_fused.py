"""All combinations of options of torch's fused recurrences, against an unrolled loop differentiated by autograd."""

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

pytestmark = pytest.mark.check

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
    """Wrapper that calls a recurrent module with plain, unbatched or packed input, with or without initial states."""

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


def canonical_layout(returned, module, feed):
    """Return torch's output as (sample, time, unit) and its final states as (layer * direction, sample, unit)."""
    output, finals = returned
    finals = finals if isinstance(finals, tuple) else (finals,)
    if isinstance(output, PackedSequence):
        output = pad_packed_sequence(output, batch_first=True)[0]
    elif feed.startswith("unbatched"):
        output, finals = output.unsqueeze(0), [f.unsqueeze(1) for f in finals]
    elif not module.batch_first:
        output = output.transpose(0, 1)
    return output, finals


def scalar_loss(output, finals):
    """Return a scalar that weights every output and final state differently."""

    def weighted_sum(value):
        weights = torch.arange(value.numel(), dtype=value.dtype).reshape(value.shape).sin()
        return (weights * value + 0.5 * value**2).sum()

    return weighted_sum(output) + sum(weighted_sum(f) for f in finals)


def make_case(cell, layers, bidirectional, batch_first, bias, feed, dtype):
    torch.manual_seed(0)
    kind, options = CELLS[cell]
    module = kind(F, H, layers, bidirectional=bidirectional, batch_first=batch_first, bias=bias, **options).double()
    rng = np.random.default_rng(1)
    samples = 1 if feed.startswith("unbatched") else B
    x = torch.tensor(rng.normal(size=(samples, T, F)))
    sizes = [P if cell == "lstm_projected" else H, *([H] if module.mode == "LSTM" else [])]
    shape = (layers * (1 + bidirectional), samples)
    initial_states = [torch.tensor(rng.normal(size=(*shape, size))) for size in sizes]
    states = initial_states if feed.endswith("hx") else [torch.zeros_like(s) for s in initial_states]
    lengths = torch.full((samples,), T)
    if feed.startswith("packed"):
        lengths = LENGTHS.sort(descending=True).values if feed == "packed_sorted" else LENGTHS
    mask = torch.arange(T)[None, :] < lengths[:, None]
    reference = unrolled.Unrolled(module, x, mask, states)
    inputs = x if batch_first else x.transpose(0, 1)
    passed_states = initial_states if feed.endswith("hx") else []
    if feed.startswith("unbatched"):
        inputs, passed_states = x[0], [s[:, 0] for s in passed_states]
    model = Model(module.to(dtype), feed)
    return model, (inputs.to(dtype), *(s.to(dtype) for s in passed_states)), reference, mask


def assert_close(actual, expected, name, bound):
    actual, expected = np.asarray(actual, dtype="float64"), expected.numpy()
    assert actual.shape == expected.shape, name
    scale = max(np.abs(expected).max(), 1e-12)
    assert np.abs(actual - expected).max() / scale <= bound, name


def check_direction(node, expected, gradient, direction, mask, bound):
    def array_of(name):
        array = node[name]
        return array.isel(direction=direction) if "direction" in array.dims else array

    assert_close(array_of("hidden"), expected.values["hidden"], "hidden", bound)
    assert_close(array_of("output"), expected.values["output"], "output", bound)
    assert_close(
        array_of("output_grad"), unrolled.stacked_gradients(expected, "output", gradient), "output_grad", bound
    )
    assert_close(
        array_of("hidden_grad"), unrolled.stacked_gradients(expected, "hidden", gradient), "hidden_grad", bound
    )
    valid = mask[:, :, None, None]
    assert_close(array_of("gate_grad"), unrolled.gate_gradients(expected, gradient), "gate_grad", bound)
    for name, prefix in (("gates", "gate"), ("gate_preactivation", "pre")):
        assert_close(np.where(valid, array_of(name), 0), unrolled.gate_values(expected, prefix) * valid, name, bound)
    if "cell" in expected.values:
        assert_close(array_of("cell"), expected.values["cell"], "cell", bound)
        # torch computes no cell state at padding, so the gradients are compared at real steps only.
        assert_close(
            np.where(mask[:, :, None], array_of("cell_grad"), 0),
            unrolled.stacked_gradients(expected, "cell", gradient) * mask[:, :, None],
            "cell_grad",
            bound,
        )
    for when, taps in (("initial", expected.state_taps), ("final", expected.final_taps)):
        states = ("hidden", "cell")[: len(taps)]
        for i, tap in enumerate(taps):
            joint_name = f"{when}_state_grad"
            name = joint_name if joint_name in node.dataset else f"{when}_{states[i]}_grad"
            array = array_of(name).isel(state=i) if name == joint_name else array_of(name)
            assert_close(array, gradient(tap), name, bound)


def check(cell, layers, bidirectional, batch_first, bias, feed, dtype, bound):
    model, x, reference, mask = make_case(cell, layers, bidirectional, batch_first, bias, feed, dtype)
    loss = scalar_loss(reference.output, reference.final)
    gradient = reference.gradients(loss)
    trace = rl.trace(model, x, loss=lambda returned: scalar_loss(*canonical_layout(returned, model.rnn, feed)))
    expected = loss.item()
    assert abs(trace.loss - expected) <= bound * max(1, abs(expected))
    for layer, row in enumerate(reference.by_direction):
        node = trace[f"rnn[{layer}]" if layers > 1 else "rnn"]
        for direction, expected in enumerate(row):
            check_direction(node, expected, gradient, direction, mask, bound)
        assert_close(node.input_grad, sum(gradient(expected.x_tap) for expected in row), "input_grad", bound)
        if not mask.all():
            assert np.array_equal(node.mask.values, mask.numpy())
    assert all(c.ok for c in trace.checks)


PRODUCT = list(itertools.product(CELLS, (1, 2), (False, True), (True, False), (True, False)))


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize(("cell", "layers", "bidirectional", "batch_first", "bias"), PRODUCT)
def test_float64(cell, layers, bidirectional, batch_first, bias, feed):
    check(cell, layers, bidirectional, batch_first, bias, feed, torch.float64, 1e-10)


@pytest.mark.parametrize("feed", ["plain", "packed_hx"])
@pytest.mark.parametrize(("cell", "layers", "bidirectional", "batch_first", "bias"), PRODUCT)
def test_float32(cell, layers, bidirectional, batch_first, bias, feed):
    check(cell, layers, bidirectional, batch_first, bias, feed, torch.float32, 1e-4)


def test_direct_is_not_total():
    """With a loss on the last output, the direct gradient is non-zero at one step, the total gradient at every step."""
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
