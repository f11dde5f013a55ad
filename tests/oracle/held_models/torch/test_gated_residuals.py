"""Blocks with two arguments beside a recurrence, ``add_norm(x, skip)``, and a normalisation of two features.

The shape of fusion transformers for time series: each variable is embedded by itself, a gated residual block weighs the
variables by a normalised softmax of two numbers, and an LSTM reads their sum.
"""

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.verbs.certificates import of_gradients


class AddNorm(nn.Module):
    """A residual connection: two arguments of one shape, one result, and weights. No state goes through it."""

    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)

    def forward(self, x, skip):
        return self.norm(x + skip)


class Fusion(nn.Module):
    """Two variables, weighed for every step, before an LSTM and a residual block; a scale for each sample."""

    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.ModuleList([nn.Linear(1, width) for _ in range(2)])
        self.inner, self.outer = AddNorm(width), AddNorm(width)
        self.score, self.score_norm = nn.Linear(2 * width, 2), AddNorm(2)
        self.lstm, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x, scale):
        parts = [embed(x[..., [i]]) for i, embed in enumerate(self.embed)]
        scores = self.score(torch.cat(parts, -1))
        shares = torch.softmax(self.score_norm(scores, torch.tanh(scores)), -1)
        read = sum(self.inner(part, part.tanh()) * shares[..., [i]] for i, part in enumerate(parts))
        return self.head(self.outer(self.lstm(read)[0], read)) * scale[:, None]


def make(dtype):
    torch.manual_seed(0)
    model = Fusion().to(dtype)
    x, y = torch.randn(4, 5, 2, dtype=dtype), torch.randn(4, 5, 1, dtype=dtype)
    return model, (x, torch.ones(4, 1, dtype=dtype)), y


def test_a_block_of_two_arguments_does_not_hide_the_axes():
    model, (x, scale), y = make(torch.float64)
    by_input = rl.gradients(model, (x, scale), of="output", reduce="sum", wrt="input[0]")
    assert by_input.dims == ("sample", "time", "feature")
    jacobian = rl.jacobian(model, (x, scale), of="output", wrt="input[0]")
    full = torch.autograd.functional.jacobian(lambda x: model(x, scale), x)
    expected = torch.stack([full[i, ..., i, :, :] for i in range(len(x))])
    order = ("sample", "out_time", "out_unit", "in_time", "in_feature")
    np.testing.assert_allclose(jacobian.transpose(*order), expected, atol=1e-12)
    assert rl.diagnose(model, (x, scale), y, loss=nn.functional.mse_loss).findings is not None


def with_distant_scores(model, x, y):
    """Move the scores apart, so that their normalisation passes next to no gradient: each is a sum that cancels."""
    with torch.no_grad():
        model.score.bias[0] += 3
    return model, x, y


@pytest.mark.parametrize(
    ("dtype", "factor", "state"),
    [
        (torch.float32, 1.003, "passed"),
        (torch.float32, 1.1, "failed"),
        (torch.float64, 1.003, "failed"),
    ],
)
def test_float32_gradients_that_are_as_near_to_float64_as_the_frameworks_are_certified(dtype, factor, state):
    """The framework's own gradient of these scores is off by 5e-3 in float32; so may another order of sums be."""
    model, x, y = with_distant_scores(*make(dtype))
    exact = of_gradients.certify_batch

    def certify_changed(request, answer):
        gradients = {n: g * factor if n.layer == "score" else g for n, g in answer.gradients.items()}
        return exact(request, replace(answer, gradients=gradients))

    told = pytest.warns(rl.errors.SelfCheckWarning) if state == "failed" else nullcontext()
    with mock.patch.object(of_gradients, "certify_batch", certify_changed), told:
        result = rl.gradients(model, x, y, loss=nn.functional.mse_loss)
    assert result.certificate.state == state, result.certificate.sentence
