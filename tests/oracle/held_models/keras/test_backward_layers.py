"""A layer that runs backward is read from its own last step, in results, records, figures and the report."""

import keras
import numpy as np
import pytest

import rnnlens as rl
from rnnlens.reporting.tracks import sort_keys, tracks_of
from rnnlens.tracking.records import summary

X = np.random.default_rng(0).normal(size=(6, 9, 3)).astype("f4")
Y = np.random.default_rng(1).normal(size=(6, 1)).astype("f4")


@pytest.fixture(scope="module")
def models():
    """Return a forward and a backward model with the same weights: equal on data whose time is reversed."""
    forward, backward = (
        keras.Sequential(
            [keras.Input((9, 3)), keras.layers.LSTM(4, go_backwards=go_backwards, name="rnn"), keras.layers.Dense(1)]
        )
        for go_backwards in (False, True)
    )
    backward.set_weights(forward.get_weights())
    return forward, backward


@pytest.fixture(scope="module")
def traces(models):
    forward, backward = models
    return rl.trace(forward, X, Y, loss="mse"), rl.trace(backward, X[:, ::-1].copy(), Y, loss="mse")


@pytest.mark.one_engine
def test_measures_of_a_record(traces):
    (forward_scalars, forward_layers), (backward_scalars, backward_layers) = map(summary, traces)
    assert forward_scalars.keys() == backward_scalars.keys()
    for name, number in forward_scalars.items():
        np.testing.assert_allclose(backward_scalars[name], number, rtol=1e-5, err_msg=name)
    for name, is_by_time in (("lag_profile", False), ("adjoint_profile", True)):
        profile = backward_layers["rnn"][name].values
        expected = forward_layers["rnn"][name].values
        np.testing.assert_allclose(profile[::-1] if is_by_time else profile, expected, rtol=1e-5)


@pytest.mark.one_engine
def test_mean_lag_by_which_the_report_sorts_units(traces):
    forward, backward = (sort_keys(tracks_of(trace)[0], None)["mean_lag"] for trace in traces)
    np.testing.assert_allclose(backward, forward, rtol=1e-5)


@pytest.mark.one_engine
def test_lags_of_weight_gradients(models):
    forward, backward = models
    weights = [
        rl.weights(model, x, Y, loss="mse", by_time=True)["rnn"]
        for model, x in ((forward, X), (backward, X[:, ::-1].copy()))
    ]
    curves = [
        [line.get_ydata() for axes in rl.plot.weight_lags(layer) for line in axes.get_lines()] for layer in weights
    ]
    for forward_curve, backward_curve in zip(*curves, strict=True):
        np.testing.assert_allclose(backward_curve, forward_curve, rtol=1e-4, atol=1e-6)


@pytest.mark.one_engine
def test_lifetimes_of_memory(models, traces):
    points = []
    for model, trace, x in zip(models, traces, (X, X[:, ::-1].copy()), strict=True):
        jacobian = rl.jacobian(model, x, of="rnn.cell", wrt="rnn.initial_cell")
        (axes,) = rl.plot.memory_lifetime(trace["rnn"], jacobian, max_lines=9)
        offsets = [np.asarray(scatter.get_offsets()) for scatter in axes.collections]
        points.append(offsets if model is models[0] else offsets[::-1])
        assert axes.get_ylabel().startswith("$|\\partial{}c_t/\\partial{}c_0|$")
    for forward_points, backward_points in zip(*points, strict=True):
        np.testing.assert_allclose(backward_points, forward_points, rtol=1e-4)
