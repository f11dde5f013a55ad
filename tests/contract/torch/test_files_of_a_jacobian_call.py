"""``rl.jacobian`` passes ``model`` through at most 9 files before the adapter, each called from one other file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from trails import trail

import rnnlens as rl
from rnnlens.verbs import time_jacobian
from rnnlens.verbs.time_jacobian.request import JacobianRequest

MOST_FILES = 9


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


QUESTIONS = {
    "output by input": {},
    "state by state": {"of": "rnn.hidden", "wrt": "rnn.cell"},
    "output by state": {"wrt": "rnn.cell"},
    "norms": {"measure": "norm"},
    "a sketch": {"sketch": 4},
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_few_files_each_entered_from_one_other(question):
    model, x = Tagger(), torch.randn(2, 5, 3)
    with rl.options(certify="always"):
        route = trail(lambda: rl.jacobian(model, x, **QUESTIONS[question]), rl.jacobian, "model", JacobianRequest)
    assert route.files[0] == "verbs/jacobian.py"
    assert {
        "verbs/time_jacobian/request.py",
        "verbs/time_jacobian/network.py",
        "verbs/certificates/of_jacobian.py",
    } <= set(route.files)
    assert len(route.files) <= MOST_FILES, route.files
    assert not route.entered_twice


def test_the_readme_lists_every_file():
    folder = Path(time_jacobian.__file__).parent
    listed_files = re.findall(r"^\| `(\w+\.py)` \|", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed_files) == sorted(file.name for file in folder.glob("*.py") if file.name != "__init__.py")
