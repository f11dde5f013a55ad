"""``rl.gradients`` passes ``wrt`` through at most 9 files, each called from one other file."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trails import trail

import rnnlens as rl
from rnnlens.verbs.differentiation.plan import GradientPlan
from rnnlens.verbs.differentiation.request import GradientArguments, GradientRequest

MOST_FILES = 9


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def loss(output, target):
    return ((output - target) ** 2).mean()


QUESTIONS = {
    "weights of the loss": {"wrt": "weights", "loss": loss},
    "states of the loss": {"wrt": ["rnn.hidden", "rnn.gates"], "loss": loss},
    "weights of a state": {"of": "rnn.cell", "at": {"time": -1}, "reduce": "sum", "wrt": ["rnn.weights", "input"]},
    "weights by sample": {"of": "output", "reduce": "mean", "per_sample": True, "wrt": "rnn/kernel"},
    "a function of the output": {"of": lambda output: output[:, -1].sum(), "wrt": "rnn.hidden"},
    "a data set": {"wrt": "weights", "loss": nn.functional.mse_loss, "batch_size": 2},
}


def follow_wrt(arguments):
    torch.manual_seed(0)
    model = Net()
    x, y = torch.randn(4, 5, 3), torch.randn(4, 5, 2)
    y = y if "loss" in arguments else None
    return trail(
        lambda: rl.gradients(model, x, y, **arguments),
        rl.gradients,
        "wrt",
        GradientArguments,
        GradientRequest,
        GradientPlan,
    )


@pytest.mark.parametrize("question", QUESTIONS)
def test_few_files_each_entered_from_one_other(question):
    route = follow_wrt(QUESTIONS[question])
    assert route.files[0] == "verbs/gradients.py"
    assert "verbs/differentiation/pull.py" in route.files
    assert len(route.files) <= MOST_FILES, route.files
    assert not route.entered_twice


def test_what_has_no_gradient_is_looked_at_in_the_reasons_only():
    route = follow_wrt({"of": "rnn.final_hidden", "reduce": "sum", "wrt": ["head/weight", "rnn/kernel"]})
    other_files = [file for file in route.files if not file.endswith("missing_gradient.py")]
    assert len(other_files) < MOST_FILES, other_files
    assert len(route.files) == len(other_files) + 1
    assert not route.entered_twice
