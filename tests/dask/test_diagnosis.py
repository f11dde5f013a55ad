"""A diagnosis of lazy data reads some samples, and is that of these samples in memory."""

import dask.array as da
import numpy as np
import pytest
import torch
from torch.nn import functional

import rnnlens as rl


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = torch.nn.GRU(2, 4, batch_first=True), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def test_a_diagnosis_of_lazy_data_is_that_of_the_samples_read():
    values = np.random.default_rng(0).normal(size=(2048, 8, 2)).astype("float32")
    x, model = da.from_array(values, chunks=(128, 8, 2)), Net()
    d = rl.diagnose(model, x, x[:, -2, :1], loss=functional.mse_loss, samples=128)
    rows = (np.linspace(0, 2040, 16).astype(int)[:, None] + np.arange(8)).reshape(-1)
    expected = rl.diagnose(model, values[rows], values[rows, -2, :1], loss=functional.mse_loss)
    assert d.codes == expected.codes
    np.testing.assert_array_equal(d["model"]["missed"].values, expected["model"]["missed"].values)
    assert "128 of 2,048 samples were read" in str(d)
    with pytest.raises(rl.errors.InputError, match="lazy"):
        rl.diagnose(model, x, x[:, -2, :1], axes={"input": ("sample", "time", "feature")})
