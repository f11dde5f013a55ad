"""Rollouts that the model cuts into episodes: more sequences reach the recurrent layer than there are samples."""

import ast
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import rnnlens as rl


class Rollout(nn.Module):
    """A GRU over every episode by itself, padded to the longest one, as policies of reinforcement learning do."""

    def __init__(self, packs):
        super().__init__()
        self.packs = packs
        self.gru, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, begins):
        flat, starts = x.flatten(0, 1), begins.squeeze(-1).clone()
        starts[:, 0] = True
        lengths = torch.diff(torch.cat([starts.flatten().nonzero()[:, 0], torch.tensor([len(flat)])]))
        episodes = rnn.pad_sequence(flat.split(lengths.tolist()), batch_first=True)
        if self.packs:
            packed = rnn.pack_padded_sequence(episodes, lengths, batch_first=True, enforce_sorted=False)
            steps = rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]
        else:
            steps = self.gru(episodes)[0]
        joined = torch.cat([step[:length] for step, length in zip(steps, lengths.tolist(), strict=True)])
        return self.head(joined).unflatten(0, x.shape[:2])


@pytest.fixture(params=[False, True], ids=["padded", "packed"])
def rollout(request):
    torch.manual_seed(0)
    begins = torch.zeros(4, 6, 1, dtype=torch.bool)
    begins[0, 3] = begins[2, 2] = True
    return (
        Rollout(request.param).double(),
        {"x": torch.randn(4, 6, 3).double(), "begins": begins},
        torch.randn(4, 6, 2).double(),
    )


def test_the_axes_that_the_diagnosis_says_to_type_work(rollout):
    model, x, y = rollout
    with pytest.raises(rl.errors.InputError) as error:
        rl.diagnose(model, x, y, loss=nn.functional.mse_loss)
    axes = ast.literal_eval(re.search(r"axes=(\{.*?\})", str(error.value)).group(1))
    assert set(axes) == {"input[x]", "input[begins]"}
    typed = rl.diagnose(model, x, y, loss=nn.functional.mse_loss, axes=axes)
    assert typed.findings is not None
