"""Coordinates of a DataArray survive into every result whose axes count the same thing."""

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import rnnlens as rl

B, T, F, H = 4, 6, 3, 5
SAMPLES, DAYS, BANDS = np.arange(100, 100 + B), np.datetime64("2024-02-01") + np.arange(T), list("abc")


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(F, H, batch_first=True), nn.Linear(H, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


@pytest.fixture
def series():
    values = np.random.default_rng(0).normal(size=(B, T, F)).astype("float32")
    coords = {"sample": SAMPLES, "time": DAYS, "feature": BANDS}
    return xr.DataArray(values, dims=("sample", "time", "feature"), coords=coords)


def same(labels, expected):
    return list(np.asarray(labels)) == list(np.asarray(expected))


def test_of_a_trace(series):
    found = rl.trace(Tagger(), series, torch.zeros(B, T, 2), loss=nn.functional.mse_loss, layers=["lstm", "head"])
    for array in (found["lstm"].hidden, found["lstm"].hidden_grad, found["head"].output):
        assert same(array.sample, SAMPLES)
        assert same(array.time, DAYS)
    assert same(found["lstm"].input.feature, BANDS)
    assert same(found["lstm"].unit, range(H))


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("wrt", ["input", "lstm.hidden"])
def test_of_gradients(series, wrt, batch_size):
    loss, y = nn.functional.mse_loss, torch.zeros(B, T, 2)
    found = rl.gradients(Tagger(), series, y, loss=loss, wrt=wrt, batch_size=batch_size)
    assert same(found.sample, SAMPLES)
    assert same(found.time, DAYS)
    assert wrt != "input" or same(found.feature, BANDS)


def test_of_a_time_jacobian(series):
    found = rl.jacobian(Tagger(), series, at={"out_time": [-1], "in_time": slice(1, 3)})
    assert same(found.sample, SAMPLES)
    assert same(found.out_time, DAYS[-1:])
    assert same(found.in_time, DAYS[1:3])
    assert same(found.in_feature, BANDS)
    plain = rl.jacobian(Tagger(), series.values)
    assert same(plain.in_time, range(T))


def test_they_go_through_a_file(series, tmp_path):
    found = rl.jacobian(Tagger(), series.assign_coords(time=np.arange(T) + 1900), measure="norm")
    found.save(tmp_path / "jacobian.nc")
    again = rl.open(tmp_path / "jacobian.nc")
    assert same(again.in_time, np.arange(T) + 1900)
    assert same(again.sample, SAMPLES)


def test_units_never_take_the_labels_of_features(series):
    class Narrow(Tagger):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(F, F, batch_first=True), nn.Linear(F, F)

    found = rl.gradients(Narrow(), series, torch.zeros(B, T, F), loss=nn.functional.mse_loss, wrt="lstm.hidden")
    assert same(found.unit, range(F))


def test_two_inputs_that_disagree_name_nothing(series):
    class Sum(Tagger):
        def forward(self, x, z):
            return super().forward(x + z)

    other = series.assign_coords(time=DAYS + 1)
    found = rl.gradients(Sum(), (series, other), torch.zeros(B, T, 2), loss=nn.functional.mse_loss, wrt="lstm.hidden")
    assert same(found.sample, SAMPLES)
    assert same(found.time, range(T))
