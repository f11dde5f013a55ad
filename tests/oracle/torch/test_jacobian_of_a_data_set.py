"""The mean time Jacobian of a data set, against torch's own Jacobian of the whole model, sample by sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rnnlens as rl
from rnnlens.errors import InputError, UnsupportedError

N, T, F, H, OUT = 7, 5, 3, 4, 2


class Tagger(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.rnn, self.head = nn.LSTM(F, H, batch_first=batch_first), nn.Linear(H, OUT)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tagger().double()


@pytest.fixture
def x():
    return torch.randn(N, T, F, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def autograd_jacobian(model, x):
    """Return the Jacobian (sample, out step, unit, in step, feature) by autograd."""
    jacobians = [torch.autograd.functional.jacobian(lambda s: model(s[None])[0], sample) for sample in x]
    return torch.stack(jacobians).numpy()


def data_sources(x):
    return {
        "arrays": (x, {"batch_size": 3}),
        "one batch of all": (x, {"batch_size": N}),
        "loader": (DataLoader(TensorDataset(x), batch_size=2), {}),
        "generator": ((x[i : i + 4] for i in range(0, N, 4)), {}),
    }


@pytest.mark.parametrize("source", ["arrays", "one batch of all", "loader", "generator"])
@pytest.mark.parametrize("measure", [None, "norm"])
def test_the_mean_over_all_samples_whatever_the_batches(model, x, source, measure):
    full = autograd_jacobian(model, x)
    sizes = full if measure is None else np.sqrt((full**2).sum((2, 4)))
    data, options = data_sources(x)[source]
    jacobian = rl.jacobian(model, data, measure=measure, across="mean", **options)
    np.testing.assert_allclose(jacobian.values, sizes.mean(0), rtol=1e-9, atol=1e-13)
    assert jacobian.dims == rl.jacobian(model, x, measure=measure, across="mean").dims
    assert jacobian.attrs["samples"] == N
    assert jacobian.certificate.state == "passed"


def test_samples_on_the_second_axis(x):
    torch.manual_seed(0)
    model = Tagger(batch_first=False).double()
    full = np.stack(
        [torch.autograd.functional.jacobian(lambda s: model(s[:, None])[:, 0], sample).numpy() for sample in x]
    )
    jacobian = rl.jacobian(model, x.transpose(0, 1).contiguous(), across="mean", batch_size=2)
    np.testing.assert_allclose(jacobian.values, full.mean(0), rtol=1e-9, atol=1e-13)


def test_refused_by_name(model, x):
    with pytest.raises(InputError, match="keeps no samples"):
        rl.jacobian(model, x, batch_size=2)
    with pytest.raises(UnsupportedError, match="sketch= applies to one batch"):
        rl.jacobian(model, x, batch_size=2, across="mean", sketch=4)
    with pytest.raises(InputError, match="Batches differ in length"):
        rl.jacobian(model, iter([x, x[:, :3]]), across="mean")
