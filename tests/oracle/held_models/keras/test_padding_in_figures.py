"""Data padded by 0, 10 and 40 steps, before or behind: figures show the same measures, and grey padding."""

import keras
import numpy as np
import pytest

import rnnlens as rl

pytestmark = pytest.mark.usefixtures("uncertified")

STEPS = 12
REAL = np.random.default_rng(0).normal(size=(3, STEPS, 2)).astype("float32")


def padded(count, side):
    zeros = np.zeros((3, count, 2), "float32")
    return np.concatenate([REAL, zeros] if side == "post" else [zeros, REAL], axis=1)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None, 2))
    x = keras.layers.Masking()(inputs)
    x = keras.layers.Bidirectional(keras.layers.GRU(3, return_sequences=True), name="both")(x)
    x = keras.layers.LSTM(4, name="lstm")(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


CASES = [(count, side) for side in ("pre", "post") for count in (10, 40)]


def end_labels(axes):
    """Return the labels at the ends of lines: reach, decay per step, half-lives and horizons."""
    return [text.get_text() for ax in axes for text in ax.texts if text.get_gid() == "end"]


@pytest.mark.one_engine
@pytest.mark.parametrize(("count", "side"), CASES)
def test_gradient_flow(model, count, side):
    trace, padded_trace = (
        rl.trace(model, x, np.ones((3, 1), "float32"), loss="mse") for x in (REAL, padded(count, side))
    )
    expected, axes = rl.plot.gradient_flow(trace), rl.plot.gradient_flow(padded_trace)
    reaches = [
        [text.get_text() for text in ax.get_legend().get_texts() if "0 at" not in text.get_text()] for ax in axes
    ]
    assert reaches == [
        [text.get_text() for text in ax.get_legend().get_texts() if "0 at" not in text.get_text()] for ax in expected
    ]
    assert sum(" step" in text for ax in reaches for text in ax) == 4  # of h and c of both directions
    start = count if side == "pre" else 0
    for ax, expected_ax in zip(axes, expected, strict=True):
        for line, reference in zip(ax.get_lines(), expected_ax.get_lines(), strict=True):
            if line.get_gid() in ("hidden_grad", "cell_grad"):
                np.testing.assert_allclose(
                    line.get_ydata()[start : start + STEPS], reference.get_ydata(), rtol=2e-3, atol=1e-9
                )
                assert np.isnan(np.delete(line.get_ydata(), np.arange(start, start + STEPS))).all()
    for ax in axes:
        assert sum(patch.get_gid() == "padding" for patch in ax.patches) == count


@pytest.mark.one_engine
@pytest.mark.parametrize(("count", "side"), CASES)
@pytest.mark.parametrize(
    "options", [{"of": "lstm.hidden"}, {"of": "both.output", "measure": "norm"}, {"of": "lstm.cell"}]
)
def test_lag_profile(model, count, side, options):
    jacobian, padded_jacobian = (rl.jacobian(model, x, **options) for x in (REAL, padded(count, side)))
    expected, axes = rl.plot.lag_profile(jacobian), rl.plot.lag_profile(padded_jacobian)
    assert end_labels(axes) == end_labels(expected)
    line, reference = axes[0].get_lines()[0].get_ydata(), expected[0].get_lines()[0].get_ydata()
    np.testing.assert_allclose(line[:STEPS], reference, rtol=2e-3)
    assert np.isnan(line[STEPS:]).all()


@pytest.mark.one_engine
@pytest.mark.parametrize("side", ["pre", "post"])
def test_maps(model, side):
    is_real = np.arange(10 + STEPS) >= 10 if side == "pre" else np.arange(10 + STEPS) < STEPS
    x = padded(10, side)
    x[1] = np.concatenate([REAL[1], REAL[1]])[: 10 + STEPS]  # a sample without padding
    trace = rl.trace(model, x, np.ones((3, 1), "float32"), loss="mse")
    for name in ("hidden", "hidden_grad"):
        axes = rl.plot.heatmap(trace["lstm"][name], samples="panels")
        for sample, ax in enumerate(axes):
            grey = np.ma.getmaskarray(ax.images[0].get_array())
            np.testing.assert_array_equal(grey, np.broadcast_to(~is_real & (sample != 1), grey.shape))
            assert not [line for line in ax.get_lines() if line.get_gid() == "non-finite"]
        assert "padding is grey" in axes[0].figure.artists[0].get_text()
    jacobian = rl.jacobian(model, x, of="lstm.hidden", wrt="both.output", measure="norm")
    axes = rl.plot.time_jacobian(jacobian, samples="panels")
    for sample, ax in enumerate(axes):
        grey = np.ma.getmaskarray(ax.images[0].get_array())
        expected = ~(is_real[:, None] & is_real[None, :]) & (sample != 1)
        np.testing.assert_array_equal(grey, expected)
    mean = rl.plot.time_jacobian(jacobian, samples="mean")[0].images[0].get_array()
    unpadded = jacobian.values[1]
    np.testing.assert_allclose(mean[~is_real], unpadded[~is_real], rtol=1e-5)
    median = rl.plot.time_jacobian(jacobian)[0].images[0].get_array()
    np.testing.assert_allclose(median[~is_real], unpadded[~is_real] / unpadded.max(), rtol=1e-5)


@pytest.mark.one_engine
def test_masks_are_saved_with_the_result(model, tmp_path):
    jacobian = rl.jacobian(model, padded(4, "post"), of="lstm.hidden", measure="norm", out=tmp_path / "j.zarr")
    assert "padding left out" in rl.plot.lag_profile(jacobian)[0].figure.artists[0].get_text()
