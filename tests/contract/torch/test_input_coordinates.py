"""Results have the coordinates of an input DataArray on all axes that count the same samples, steps or features."""

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import rnnlens as rl

pytestmark = pytest.mark.check

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


def labels_equal(labels, expected):
    return list(np.asarray(labels)) == list(np.asarray(expected))


def test_of_a_trace(series):
    trace = rl.trace(Tagger(), series, torch.zeros(B, T, 2), loss=nn.functional.mse_loss, layers=["lstm", "head"])
    for array in (trace["lstm"].hidden, trace["lstm"].hidden_grad, trace["head"].output):
        assert labels_equal(array.sample, SAMPLES)
        assert labels_equal(array.time, DAYS)
    assert labels_equal(trace["lstm"].input.feature, BANDS)
    assert labels_equal(trace["lstm"].unit, range(H))


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("wrt", ["input", "lstm.hidden"])
def test_of_gradients(series, wrt, batch_size):
    loss, y = nn.functional.mse_loss, torch.zeros(B, T, 2)
    gradients = rl.gradients(Tagger(), series, y, loss=loss, wrt=wrt, batch_size=batch_size)
    assert labels_equal(gradients.sample, SAMPLES)
    assert labels_equal(gradients.time, DAYS)
    assert wrt != "input" or labels_equal(gradients.feature, BANDS)


def test_of_a_time_jacobian(series):
    jacobian = rl.jacobian(Tagger(), series, at={"out_time": [-1], "in_time": slice(1, 3)})
    assert labels_equal(jacobian.sample, SAMPLES)
    assert labels_equal(jacobian.out_time, DAYS[-1:])
    assert labels_equal(jacobian.in_time, DAYS[1:3])
    assert labels_equal(jacobian.in_feature, BANDS)
    unlabelled = rl.jacobian(Tagger(), series.values)
    assert labels_equal(unlabelled.in_time, range(T))


@pytest.mark.parametrize("by_time", [False, True])
def test_of_weights(series, by_time):
    y = torch.zeros(B, T, 2)
    weights = rl.weights(Tagger(), series, y, loss=nn.functional.mse_loss, by_time=by_time)["lstm"]
    assert labels_equal(weights.kernel.feature, BANDS)
    assert labels_equal(weights.kernel_grad.feature, BANDS)
    assert labels_equal(weights.recurrent_kernel.unit, range(H))
    assert not by_time or labels_equal(weights.recurrent_kernel_grad.time, DAYS)


def test_of_weights_of_a_layer_that_reads_no_input(series):
    class Deep(Tagger):
        def __init__(self):
            super().__init__()
            self.below, self.lstm = nn.Linear(F, F), nn.LSTM(F, H, batch_first=True)

        def forward(self, x):
            return super().forward(self.below(x))

    weights = rl.weights(Deep(), series, torch.zeros(B, T, 2), loss=nn.functional.mse_loss)["lstm"]
    assert labels_equal(weights.kernel.feature, range(F))


def labelled_series(model, count, steps=12):
    """Return x with sample labels from 500 on, and y: the first two features of its last step."""
    values = np.random.default_rng(1).normal(size=(count, steps, F)).astype("float32")
    coords = {"sample": 500 + np.arange(count)}
    return xr.DataArray(values, dims=("sample", "time", "feature"), coords=coords), values[:, -1, :2]


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("count", [130, 600])
def test_of_a_diagnosis(labels, count):
    class Reader(Tagger):
        def forward(self, x):
            return super().forward(x)[:, -1]

    x, y = labelled_series(Reader(), count)
    change = rl.diagnose(Reader(), x if labels else x.values, y)["model"].change
    positions = np.arange(count) if count == 130 else np.sort(np.random.default_rng(0).permutation(count)[:512])
    assert labels_equal(change.sample, positions + 500 * labels)


def test_a_finding_names_the_sample_by_its_label():
    class Broken(Tagger):
        def forward(self, x):
            return super().forward(x)[:, -1] + torch.where(x[:, :1, 0] > 5, torch.nan, 0.0)

    x, y = labelled_series(Broken(), 130)
    x[7, 0, 0] = 6.0
    (finding,) = [f for f in rl.diagnose(Broken(), x, y).findings if f.code == "NONFINITE"]
    assert "the first at sample 507" in finding.sentence
    assert finding.evidence["first"] == 507


def test_of_eigenvalues_of_steps(series):
    eigenvalues = rl.step_eigenvalues(Tagger(), series, steps=2, samples=3)
    assert labels_equal(eigenvalues.sample, SAMPLES[:3])
    assert labels_equal(eigenvalues.time, DAYS[[0, -1]])
    assert labels_equal(rl.step_eigenvalues(Tagger(), series.values, steps=2).time, [0, T - 1])


def test_of_a_report(series, tmp_path):
    y = torch.zeros(B, T, 2)
    options = {"loss": nn.functional.mse_loss, "diagnosis": False, "jacobian": False}
    page = rl.report(Tagger(), series, y, tmp_path / "report.html", **options)
    assert '"103"' in page.read_text()


def test_they_go_through_a_file(series, tmp_path):
    jacobian = rl.jacobian(Tagger(), series.assign_coords(time=np.arange(T) + 1900), measure="norm")
    jacobian.save(tmp_path / "jacobian.nc")
    opened = rl.open(tmp_path / "jacobian.nc")
    assert labels_equal(opened.in_time, np.arange(T) + 1900)
    assert labels_equal(opened.sample, SAMPLES)


def test_units_never_take_the_labels_of_features(series):
    class Narrow(Tagger):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(F, F, batch_first=True), nn.Linear(F, F)

    gradients = rl.gradients(Narrow(), series, torch.zeros(B, T, F), loss=nn.functional.mse_loss, wrt="lstm.hidden")
    assert labels_equal(gradients.unit, range(F))


def test_two_inputs_that_disagree_name_nothing(series):
    class Sum(Tagger):
        def forward(self, x, z):
            return super().forward(x + z)

    shifted = series.assign_coords(time=DAYS + 1)
    gradients = rl.gradients(
        Sum(), (series, shifted), torch.zeros(B, T, 2), loss=nn.functional.mse_loss, wrt="lstm.hidden"
    )
    assert labels_equal(gradients.sample, SAMPLES)
    assert labels_equal(gradients.time, range(T))
