"""A report of data on disk reads the samples that it shows and diagnoses, never all of them."""

import numpy as np
import torch
from torch import nn

import rnnlens as rl
from rnnlens import reporting


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def test_data_larger_than_memory(tmp_path, monkeypatch):
    # 200 GiB in a sparse file: only its first samples are written.
    shape = (1_000_000, 1000, 50)
    x = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype="float32", shape=shape)
    y = np.zeros((len(x), 1), "float32")
    x[:64, :4] = np.random.default_rng(0).normal(size=(64, 4, 50))
    diagnosed = []

    def diagnose(model, x, y, **options):
        diagnosed.append(x)
        raise rl.errors.InputError("Not measured here.")

    monkeypatch.setattr(reporting.contents, "diagnose", diagnose)
    torch.manual_seed(0)
    view = x[:, :4, :3]
    path = rl.report(Reader(), view, y, loss=nn.functional.mse_loss, path=tmp_path / "report.html", jacobian=False)
    assert path.stat().st_size > 10_000
    assert [data.shape for data in diagnosed] == [view.shape]
    assert np.shares_memory(diagnosed[0], x)
