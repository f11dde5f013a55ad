"""Fixtures for tests of figures: synthetic results with known values, and checks that apply to every figure."""

import io

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

from rnnlens.results.diagnosis import Comparison, Diagnosis, FixedPoints, StepsBack

LSTM = ["input", "forget", "candidate", "output"]


@pytest.fixture(autouse=True)
def leave_matplotlib_alone(monkeypatch):
    """Fail if a test shows a figure, leaves one open in pyplot, or changes matplotlib's rcParams."""

    def forbidden(*args, **kwargs):
        raise AssertionError("show() was called")

    monkeypatch.setattr(plt, "show", forbidden)
    before = dict(mpl.rcParams)
    yield
    assert plt.get_fignums() == []
    assert {key: value for key, value in mpl.rcParams.items() if before[key] != value} == {}


@pytest.fixture
def render():
    """Return a function that renders a figure as PNG, so that layout warnings are raised and text positions are set."""

    def draw(axes):
        figure = axes[0].get_figure(root=True)
        figure.savefig(io.BytesIO(), format="png", dpi=60)
        return figure

    return draw


@pytest.fixture
def text_of():
    """Return a function that joins all visible text of a figure."""

    def visible_text(axes):
        figure = axes[0].get_figure(root=True)
        return "\n".join(t.get_text() for t in figure.findobj(mpl.text.Text) if t.get_visible())

    return visible_text


@pytest.fixture(scope="session")
def comparison():
    """Return a function that makes a scorecard of three models and three measures; the last is defined for none."""

    def make():
        value = np.array([[740.0, 12.0, np.nan], [2372.0, np.nan, np.nan], [90000.0, 3.0, np.nan]])
        interval = np.full((3, 3, 2), np.nan)
        interval[0, 1] = 10, 14
        dims, undefined = ("name", "measure"), np.where(np.isnan(value), "only of Mamba", "")
        card = xr.Dataset(
            {
                "value": (dims, value),
                "interval": ((*dims, "bound"), interval),
                "layer": (dims, np.full((3, 3), "")),
                "reason": (dims, undefined),
                "verb": (dims, np.full((3, 3), "rl.diagnose")),
            },
            coords={
                "name": ["rnn", "lstm", "mamba"],
                "measure": ["weights", "prediction depends on", "effective state size"],
                "bound": ["low", "high"],
                "units": ("measure", ["1", "step", "1"]),
            },
        )
        table = xr.Dataset({"error": ("name", ["ModelError: no diagnosis"] * 3)}, coords={"name": card["name"]})
        return Comparison({"comparison": table, "scorecard": card})

    return make


@pytest.fixture(scope="session")
def attention():
    """Return a function that makes the hidden attention of 2 samples, 3 channels and 5 steps; held is half of total."""

    def make():
        lag = np.arange(5)[:, None] - np.arange(5)
        total = np.where(lag >= 0, 0.5**lag, 0.0) * np.array([1.0, -2.0, 8.0])[:, None, None] * np.ones((2, 1, 1, 1))
        dims = ("map", "sample", "channel", "out_time", "in_time")
        coords = {"map": ["frozen", "total"], "channel": [0, 4, 9]}
        return xr.DataArray(np.stack([total / 2, total]), dims=dims, coords=coords, attrs={"layer": "mixer"})

    return make


@pytest.fixture(scope="session")
def gradient():
    """Return a function that makes distinct values sample + time / 100 + unit / 10000 (sample, time, unit)."""

    def make(samples=3, steps=5, units=4, *, directions=False, dtype="float64"):
        values = (
            np.arange(samples)[:, None, None]
            + np.arange(steps)[None, :, None] / 100
            + np.arange(units)[None, None, :] / 10000
        )
        attrs = {"long_name": "total gradient of the hidden state", "units": "loss", "layer": "lstm"}
        coords = {
            "sample": np.arange(samples),
            "time": ("time", np.arange(steps), {"long_name": "time step"}),
            "unit": np.arange(units),
        }
        if not directions:
            return xr.DataArray(
                values.astype(dtype), dims=("sample", "time", "unit"), coords=coords, name="hidden_grad", attrs=attrs
            )
        stacked = np.stack([values, -values - 1], axis=2).astype(dtype)
        coords["direction"] = ["forward", "backward"]
        return xr.DataArray(
            stacked, dims=("sample", "time", "direction", "unit"), coords=coords, name="hidden_grad", attrs=attrs
        )

    return make


@pytest.fixture(scope="session")
def layer():
    """Return a function that makes a traced layer: gates, and gradients multiplied by ``decay`` per step back."""

    def make(samples=2, steps=6, units=3, *, decay=0.5, directions=False, name="lstm"):
        rng = np.random.default_rng(0)
        decay_profile = decay ** np.arange(steps)[::-1].astype(float)
        hidden = np.broadcast_to(decay_profile[None, :, None], (samples, steps, units)).copy()
        direct = np.zeros_like(hidden)
        direct[:, -1] = hidden[:, -1]
        gates = rng.uniform(size=(samples, steps, 4, units))
        dims: tuple = ("sample", "time", "unit")
        if directions:
            dims = ("sample", "time", "direction", "unit")
            hidden, direct = (np.stack([v, v[:, ::-1]], axis=2) for v in (hidden, direct))
            gates = np.stack([gates, gates[:, ::-1]], axis=2)
        gate_dims = (*dims[:-1], "gate", "unit")
        attrs = {"layer": name, "units": "loss"}
        data = {
            "hidden_grad": (dims, hidden, {**attrs, "long_name": "total gradient of the hidden state"}),
            "output_grad": (dims, direct, {**attrs, "long_name": "direct gradient of the output"}),
            "gates": (gate_dims, gates, {**attrs, "units": "1", "long_name": "gate activation", "keeping": "forget"}),
        }
        coords = {"gate": LSTM} | ({"direction": ["forward", "backward"]} if directions else {})
        return xr.Dataset(data, coords=coords, attrs={"layer": name, "cell": "lstm"})

    return make


@pytest.fixture(scope="session")
def weights():
    """Return a function that makes weights of an LSTM in which every entry has a value of its own."""

    def make(features=3, units=4, *, directions=False):
        def fill(offset, *shape):
            return offset + np.arange(np.prod(shape), dtype=float).reshape(shape) / 1000

        data = {
            "kernel": (("feature", "gate", "unit"), fill(0.1, features, 4, units)),
            "recurrent_kernel": (("unit_in", "gate", "unit"), fill(-0.5, units, 4, units)),
            "bias": (("gate", "unit"), fill(0.0, 4, units)),
        }
        if directions:
            data = {name: (("direction", *dims), np.stack([v, -v])) for name, (dims, v) in data.items()}
        coords = {"gate": LSTM} | ({"direction": ["forward", "backward"]} if directions else {})
        return xr.Dataset(data, coords=coords, attrs={"layer": "lstm", "cell": "lstm"})

    return make


@pytest.fixture(scope="session")
def jacobian():
    """Return a function that makes norms ``decay ** lag`` (sample, out_time, in_time); 0 for later inputs."""

    def make(samples=2, steps=6, *, decay=0.5):
        lag = np.arange(steps)[:, None] - np.arange(steps)
        norms = np.where(lag >= 0, decay ** np.maximum(lag, 0).astype(float), 0.0)
        return xr.DataArray(
            np.broadcast_to(norms, (samples, steps, steps)).copy(),
            dims=("sample", "out_time", "in_time"),
            name="jacobian",
            attrs={"long_name": "norm of the time Jacobian", "units": "1"},
        )

    return make


@pytest.fixture(scope="session")
def initial_jacobian():
    """Return a function that makes d(state)/d(initial state): 0.9**t * I (sample, out_time, out_unit, in_feature)."""

    def make(samples=2, steps=6, units=3, *, directions=False):
        own_share = 0.9 ** np.arange(1.0, steps + 1)[:, None, None] * np.eye(units)
        values = np.broadcast_to(own_share, (samples, steps, units, units)).copy()
        dims = ("sample", "out_time", "out_unit", "in_feature")
        if directions:
            stacked = np.zeros((samples, steps, 2, units, 2, units))
            stacked[:, :, 0, :, 0], stacked[:, :, 1, :, 1] = values, values[:, ::-1]
            values, dims = stacked, ("sample", "out_time", "direction", "out_unit", "in_direction", "in_feature")
        return xr.DataArray(values, dims=dims, name="jacobian", attrs={"of": "lstm.cell", "wrt": "lstm.initial_cell"})

    return make


@pytest.fixture(scope="session")
def weights_by_time():
    """Return a function that makes per-step gradients of an LSTM's weights: ``decay ** lag`` in every entry."""

    def make(steps=10, units=4, *, decay=0.5, directions=False):
        increments = decay ** np.arange(steps)[::-1]
        data = {}
        for name, dims, shape in (
            ("kernel", ("feature", "gate", "unit"), (3, 4, units)),
            ("recurrent_kernel", ("unit_in", "gate", "unit"), (units, 4, units)),
            ("bias", ("gate", "unit"), (4, units)),
        ):
            values = np.broadcast_to(increments.reshape(-1, *[1] * len(shape)), (steps, *shape)).copy()
            dims = ("time", *dims)
            if directions:
                values, dims = np.stack([values, values[::-1]]), ("direction", *dims)
            data[f"{name}_grad"] = (dims, values)
        coords = {"gate": LSTM} | ({"direction": ["forward", "backward"]} if directions else {})
        return xr.Dataset(data, coords=coords, attrs={"layer": "lstm", "cell": "lstm"})

    return make


@pytest.fixture
def by_gid():
    """Return a function that lists the artists of an Axes or figure with the given gid."""

    def find(owner, gid):
        return list(owner.findobj(lambda artist: artist.get_gid() == gid))

    return find


@pytest.fixture(scope="session")
def diagnosis():
    """Return a function that makes a diagnosis: the network uses 11 of 40 steps and misses the one 25 steps back."""

    def make(*, memory_known=True, units=6):
        context = np.array([1, 2, 4, 8, 10, 11, 16, 39])
        use = np.where(context < 11, 0.8, 1e-6)
        band = np.stack([use * 0.9, use * 1.1], axis=1)
        missed = np.full(40, 0.01)
        missed[25] = 0.4
        model = xr.Dataset(
            {
                "use": ("context", use),
                "use_interval": (("context", "bound"), band),
                "benefit": ("context", use),
                "benefit_interval": (("context", "bound"), band),
                "steps": 40,
                "memory": 11.0,
                "missed": ("lag", missed),
                "missed_threshold": 0.05,
                "missed_effect": 0.35,
            },
            coords={"context": context, "bound": ["low", "high"]},
            attrs={"known": memory_known, "why": "", "censored": False},
        )
        kappa = 0.3 ** np.arange(41.0)
        layer = xr.Dataset(
            {
                **{name: ("lag", kappa * share) for name, share in KAPPA},
                "timescale": ("cell_unit", np.linspace(1, 20, units)),
            }
        )
        sentences = {"lstm": "lstm uses the last 11 of 40 steps (95 % CI 11-11)."}
        rows = [
            StepsBack("prediction depends on", 11.0, 40, "Older steps change nothing.", low=10.0, high=12.0),
            StepsBack("state carries", 9.0, 40, "An older state changes nothing.", layer="lstm"),
            StepsBack("training signal reaches", 40.0, 40, "All steps have a gradient."),
        ]
        reasons = ["The training signal reaches more steps."]
        data = {"model": model, "lstm": layer}
        return Diagnosis(data, sentences=sentences, how_far_back=rows, why_they_differ=reasons)

    return make


KAPPA = (("kappa", 1.0), ("kappa_low", 0.5), ("kappa_high", 2.0))


@pytest.fixture(scope="session")
def fixed_points():
    """Return a function that makes two stable fixed points and a saddle between them, on a line in state space."""

    def make():
        states = np.array([[-1.0, 0, 0], [0.0, 0, 0], [1.0, 0, 0]])
        values = np.array([[0.5, 0.1, 0], [2.0, 0.1, 0], [0.5, 0.1, 0]])
        vectors = np.broadcast_to(np.eye(3), (3, 3, 3))
        cloud = np.random.default_rng(0).normal(size=(50, 3)) * [1, 0.5, 0.1]
        data = xr.Dataset(
            {
                "states": (("point", "state"), states),
                "speed": ("point", np.zeros(3)),
                "fixed": ("point", np.ones(3, bool)),
                "stable": ("point", np.array([True, False, True])),
                "starts": ("point", np.array([20, 3, 27])),
                "eigenvalue_real": (("point", "mode"), values),
                "eigenvalue_imag": (("point", "mode"), values * 0),
                "eigenvector_real": (("point", "state", "mode"), vectors),
                "eigenvector_imag": (("point", "state", "mode"), vectors * 0),
                "trajectory": (("start", "state"), cloud),
            }
        )
        return FixedPoints({"gru": data})

    return make
