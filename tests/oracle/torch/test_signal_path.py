"""What a diagnosis says about the path of the gradient is what torch's autograd computes on the untouched model."""

from __future__ import annotations

import linecache

import numpy as np
import pytest
import torch
from drawn_paths import STEPS, draw, gradient_size
from torch import nn

import rnnlens as rl

PATHS = {"NO_PATH", "VANISHING", "PATH_OPEN"}


def data(steps=30, lag=9, features=3, samples=256):
    x = np.random.default_rng(0).normal(size=(samples, steps, features)).astype("float32")
    return x, x[:, steps - 1 - lag, :1]


class Net(nn.Module):
    def __init__(self, layer=nn.GRU, **options):
        super().__init__()
        self.rnn = layer(3, 12, batch_first=True, **options)
        self.head = nn.Linear(12 * (1 + options.get("bidirectional", False)), 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class ReadsTheFirstStep(Net):
    def forward(self, x):
        out = self.rnn(x)[0]
        return self.head(out[:, 0])


class Windowed(Net):
    def forward(self, x):
        recent = x[:, -5:]
        return self.head(self.rnn(recent)[0][:, -1])


class WithoutGradient(Net):
    def forward(self, x):
        with torch.no_grad():
            out = self.rnn(x)[0]
        return self.head(out[:, -1])


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 12), nn.Linear(12, 1)

    def forward(self, x):
        h = x.new_zeros(len(x), 12)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h.detach())
        return self.head(h)


class DetachedStep(Loop):
    def step(self, u, h):
        kept = h.detach()
        return self.cell(u, kept)

    def forward(self, x):
        h = x.new_zeros(len(x), 12)
        for t in range(x.shape[1]):
            h = rl.torch.step(self.step, x[:, t], h)
        return self.head(h)


class Argmax(Net):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 12)

    def forward(self, x):
        out = self.rnn(x)[0]
        chosen = out[:, -1].argmax(-1)
        return self.head(self.table(chosen))


class FirstStepOfTheBackwardHalf(Net):
    def forward(self, x):
        out = self.rnn(x)[0]
        return self.head(torch.cat([torch.zeros_like(out[:, -1, :12]), out[:, -1, 12:]], -1))


@pytest.mark.parametrize(
    ("make", "cause", "code"),
    [
        (ReadsTheFirstStep, "selection", "return self.head(out[:, 0])"),
        (Windowed, "selection", "recent = x[:, -5:]"),
        (WithoutGradient, "no_grad", "out = self.rnn(x)[0]"),
        (Loop, "detach", "h = self.cell(x[:, t], h.detach())"),
        (DetachedStep, "detach", "kept = h.detach()"),
        (Argmax, "argmax", "chosen = out[:, -1].argmax(-1)"),
    ],
)
def test_a_path_that_is_cut_is_named_with_cause_and_line(make, cause, code):
    torch.manual_seed(0)
    model, (x, y) = make().eval(), data()
    assert gradient_size(model, x, 20) == 0.0
    d = rl.diagnose(model, x, y, loss=nn.functional.mse_loss)
    (found,) = [f for f in d.findings if f.code in PATHS]
    assert found.code == "NO_PATH"
    assert found.evidence["cause"] == cause
    ((file, _, line),) = [place.rpartition(":") for place in found.evidence["lines"]]
    assert linecache.getline(file, int(line)).strip() == code
    assert code in found.sentence


def test_a_half_that_the_output_does_not_read_is_no_path():
    torch.manual_seed(0)
    x, y = data()
    model = FirstStepOfTheBackwardHalf(bidirectional=True).eval()
    assert gradient_size(model, x, 20) == 0.0
    d = rl.diagnose(model, x, y, loss=nn.functional.mse_loss)
    assert "NO_PATH" in d.codes
    assert "PATH_OPEN" not in d.codes


def test_saturated_units_are_no_cut():
    torch.manual_seed(0)
    x, y = data()
    d = rl.diagnose(Net(nn.RNN).eval(), 1e4 * x, y, loss=nn.functional.mse_loss)
    (found,) = [f for f in d.findings if f.code in PATHS]
    assert found.code == "VANISHING"
    assert "saturated" in found.sentence
    assert "scale the inputs" in found.remedy


def test_ids_that_the_output_does_not_read_are_no_path():
    class Words(Net):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, ids):
            return self.head(self.rnn(self.table(ids))[0][:, 3])

    torch.manual_seed(0)
    ids = np.random.default_rng(0).integers(0, 5, size=(256, 20))
    y = (ids[:, 12] == 2).astype("float32")[:, None]
    d = rl.diagnose(Words().eval(), ids, y, loss=nn.functional.mse_loss)
    (found,) = [f for f in d.findings if f.code in PATHS]
    assert found.code == "NO_PATH"
    assert "[:, 3]" in found.sentence


@pytest.mark.parametrize("seed", range(300))
def test_on_drawn_models_the_finding_says_what_autograd_computes(seed):
    model, x, y, lag = draw(seed)
    d = rl.diagnose(model, x, y, loss=nn.functional.mse_loss, samples=192)
    found = [f for f in d.findings if f.code in PATHS]
    assert len(found) == int("MISSED_DEPENDENCY" in d.codes)
    for finding in found:
        size = gradient_size(model, x, STEPS - 1 - finding.evidence["lag"])
        assert (finding.code == "PATH_OPEN") <= (size > 0), (model.__dict__, finding)
        assert (finding.code == "NO_PATH") <= (size == 0), (model.__dict__, finding)
        if finding.evidence["lag"] == lag and size == 0:
            assert finding.code == "NO_PATH"
