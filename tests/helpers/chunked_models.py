"""Models, data and graph functions of tests/dask, importable by the workers that the tests start."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
import xarray as xr

T, F = 12, 3


class Net(torch.nn.Module):
    """An LSTM with a linear read-out of its last step."""

    def __init__(self, units=8):
        super().__init__()
        self.lstm = torch.nn.LSTM(F, units, batch_first=True)
        self.out = torch.nn.Linear(units, 1)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


class TimeMajor(Net):
    """The same network with time as the first axis."""

    def forward(self, x):
        return self.out(self.lstm(x.transpose(0, 1))[0][:, -1])


class RaisesForLargeInput(Net):
    """A network that raises at once for an input above 1000, and a second later for one above 10,000."""

    def forward(self, x):
        largest = float(x.detach().max())
        if largest > 1e3:
            time.sleep(1.0 if largest > 1e4 else 0.0)
            raise ValueError("an input is too large")
        return super().forward(x)


class WrongOnWorkers(Net):
    """A network whose output changes at every second call, so that its certificate fails."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x) * (1.0 + 0.25 * (type(self).calls % 2))


class Slow(Net):
    """A network that takes a tenth of a second per chunk."""

    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)


class KillsItsWorker(Net):
    """A network that kills its process at its first chunk, once for each file in the folder ``kills``."""

    def __init__(self, kills, main_pid):
        super().__init__()
        self.kills, self.main_pid = str(kills), main_pid

    def forward(self, x):
        if os.getpid() != self.main_pid:
            remaining = sorted(Path(self.kills).iterdir())
            if remaining:
                remaining[0].unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def make_seeded(kind, *arguments):
    torch.manual_seed(0)
    return kind(*arguments)


def samples(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, T, F)).astype("float32"), rng.normal(size=(count, 1)).astype("float32")


def labelled_array(x):
    coords = {"sample": 100 + np.arange(x.shape[0]), "time": np.arange(x.shape[1]) * 0.01}
    return xr.DataArray(x, dims=("sample", "time", "feature"), coords=coords)
