"""Models without a recurrent layer that rnnlens knows, and with steps on the first axis: names and numbers."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

STEPS, SAMPLES = 6, 5


class OwnLoop(nn.Module):
    """A recurrence of plain operations on (step, sample, feature), which is no layer of any library."""

    def __init__(self, *, last, backwards):
        super().__init__()
        self.read, self.keep, self.top = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.last, self.backwards = last, backwards

    def forward(self, x):
        read, state, outputs = self.read(x), x.new_zeros(x.shape[1], 4), []
        for step in reversed(read) if self.backwards else read:
            state = torch.tanh(step + self.keep(state))
            outputs.append(self.top(state))
        return outputs[-1] if self.last else torch.stack(outputs[::-1] if self.backwards else outputs)


def data():
    return torch.randn(STEPS, SAMPLES, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(params=[False, True], ids=["all steps", "last step"])
def last(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"])
def model(request, last):
    torch.manual_seed(1)
    return OwnLoop(last=last, backwards=request.param).double()


def test_gradients_have_the_right_names(model):
    x = data().requires_grad_()
    model(x).sum().backward()
    found = rl.gradients(model, data(), of="output", wrt="input", reduce="sum")
    assert found.dims == ("sample", "time", "feature")
    np.testing.assert_allclose(found.transpose("time", "sample", "feature").values, x.grad.numpy(), rtol=1e-12)
    inner = rl.gradients(model, data(), of="output", wrt="read.output", reduce="sum")
    assert dict(inner.sizes) == {"sample": SAMPLES, "time": STEPS, "unit": 4}


def test_a_nan_is_found_in_its_sample_and_at_its_step(model):
    x = data()
    x[3, 2, 1] = float("nan")
    found = rl.find_nonfinite(model, x)
    assert "at step 3 of sample 2" in repr(found)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(3, 4), nn.Tanh()),
        nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0, batch_first=True),
        nn.Conv1d(SAMPLES, 4, 2),
        nn.Sequential(nn.BatchNorm1d(SAMPLES), nn.Tanh()).train(),
    ],
    ids=["dense", "attention", "convolution", "batch normalisation"],
)
@pytest.mark.parametrize("training", [False, True])
def test_samples_first_stays_the_convention(model, training):
    x = data()
    found = rl.gradients(model.double(), x, of="output", wrt="input", reduce="sum", training=training)
    assert dict(found.sizes)["sample"] == STEPS
