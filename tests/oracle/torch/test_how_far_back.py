"""How far back, side by side: each number against autograd of the untouched model, or the network's construction."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

STEPS = 12


class Loop(nn.Module):
    """A linear recurrence that keeps half of its state at each step, optionally without the gradient of the state."""

    def __init__(self, detached):
        super().__init__()
        self.cell, self.head, self.detached = nn.RNNCell(2, 4), nn.Linear(4, 1), detached
        with torch.no_grad():
            self.cell.weight_hh.copy_(0.9 * torch.eye(4))

    def forward(self, x):
        h = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = self.cell(0.1 * x[:, t], h.detach() if self.detached else h)
        return self.head(h)


def numbers(d):
    return {row.measure: row.steps for row in d.how_far_back}


@pytest.fixture(scope="module", params=[False, True], ids=["open", "detached"])
def diagnosed(request):
    torch.manual_seed(0)
    model, x = Loop(request.param).eval(), torch.randn(256, STEPS, 2)
    with torch.no_grad():
        y = model(x)
    return model, x, rl.diagnose(model, x, y, loss=nn.functional.mse_loss)


def test_both_gradient_measures_are_those_of_autograd(diagnosed):
    model, x, d = diagnosed
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    by_lag = gradient.double().norm(dim=-1).flip(1)
    share = (by_lag / by_lag.amax(1, keepdim=True)).median(0).values
    assert numbers(d)["training signal reaches"] == int(torch.nonzero(share >= 1e-4).max()) + 1
    squares = (by_lag**2).cumsum(1)
    in_use = 1 + (squares < 0.95 * squares[:, -1:]).sum(1)
    assert numbers(d)["gradient in use"] == float(in_use.double().median())


def test_the_finding_and_the_table_count_the_gradient_in_the_same_way():
    """Steps with a large gradient whose input hardly varies count in both, as in the table of a trace."""
    torch.manual_seed(0)
    model, x = nn.GRU(2, 4, batch_first=True), torch.randn(256, STEPS, 2)
    x[:, :-1] *= 1e-3

    class LastStep(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = model

        def forward(self, x):
            return self.gru(x)[0][:, -1, :1]

    reader = LastStep().eval()
    with torch.no_grad():
        model.weight_hh_l0[4:8] += 2 * torch.eye(4)
        model.bias_hh_l0[4:8] += 3.0
        y = reader(x)
    d = rl.diagnose(reader, x, y, loss=nn.functional.mse_loss)
    in_use = numbers(d)["gradient in use"]
    assert in_use > 2 * numbers(d)["prediction depends on"] == 2
    (found,) = [finding for finding in d.findings if finding.code == "GRADIENT_MEMORY_DISAGREE"]
    assert f"to the last {in_use:.0f} steps, replacing inputs to the last 1:" in found.sentence
    assert int(d["model"].attributed_memory) == in_use


def test_a_detached_state_is_depended_on_and_receives_no_signal(diagnosed):
    model, _, d = diagnosed
    rows = numbers(d)
    assert rows["prediction depends on"] > 5
    assert (rows["training signal reaches"] == 1) == model.detached
    says_so = any("that the training signal does not reach" in sentence for sentence in d.why_they_differ)
    assert says_so == model.detached


def test_the_measures_are_printed_written_and_kept_in_files(diagnosed, tmp_path):
    _, _, d = diagnosed
    assert f"How far back, in steps of {STEPS}:" in str(d)
    assert "how far back" in repr(d)
    document = json.loads(d.to_json())
    assert {row["measure"]: row["steps"] for row in document["how_far_back"]} == numbers(d)
    assert document["why_they_differ"] == d.why_they_differ
    d.save(tmp_path / "d.nc")
    opened = rl.open(tmp_path / "d.nc")
    assert opened.how_far_back == d.how_far_back
    assert str(opened) == str(d)


def test_a_shift_register_has_one_answer():
    model = nn.Module()
    model.rnn, model.head = nn.RNN(1, 8, batch_first=True), nn.Linear(8, 1)
    model.forward = lambda x: model.head(model.rnn(x)[0][:, -1])
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.rnn.weight_hh_l0.copy_(torch.diag(torch.ones(7), -1))
        model.rnn.weight_ih_l0[0, 0] = 0.01
        model.head.weight[0, 5] = 100
    x = np.random.default_rng(0).normal(size=(256, STEPS, 1)).astype("float32")
    d = rl.diagnose(model, x, x[:, -6], loss=nn.functional.mse_loss)
    assert set(numbers(d).values()) == {6}
    assert d.why_they_differ == []
