"""``plot.maps`` draws the norm over channels, or one channel, at the chosen steps."""

import numpy as np
import pytest
import xarray as xr
from tests.unit.plot.runs import suptitle

import rnnlens as rl
from rnnlens.errors import InputError

KERAS = ("sample", "time", "height", "width", "channel")
TORCH = ("sample", "time", "channel", "height", "width")


def conv_gradient(dims=KERAS, **sizes):
    sizes = {
        "sample": 2,
        "time": 30,
        "height": 5,
        "width": 7,
        "channel": 3,
        "depth": 2,
        "gate": 4,
        "direction": 2,
    } | sizes
    values = np.random.default_rng(0).normal(size=[sizes[dim] for dim in dims])
    attrs = {"long_name": "total gradient of the hidden state", "units": "loss", "layer": "conv"}
    return xr.DataArray(values, dims=dims, name="hidden_grad", attrs=attrs)


def image_values(ax):
    return np.ma.filled(np.ma.asarray(ax.images[0].get_array(), dtype=float), np.nan)


@pytest.mark.parametrize("dims", [KERAS, TORCH])
def test_twelve_steps_show_the_norm_over_channels_on_one_scale_from_zero(dims, text_of, render):
    array = conv_gradient(dims)
    axes = rl.plot.maps(array, sample=1)
    render(axes)
    expected_steps = np.linspace(0, 29, 12).round().astype(int)
    assert [ax.get_title() for ax in axes] == [f"step {step}" for step in expected_steps]
    norms = np.sqrt((array.transpose(*KERAS).values[1] ** 2).sum(-1))
    for ax, step in zip(axes, expected_steps, strict=True):
        np.testing.assert_allclose(image_values(ax), norms[step], rtol=1e-12)
    limits = np.array([ax.images[0].get_clim() for ax in axes])
    np.testing.assert_allclose(limits, [[0.0, norms.max()]] * 12, rtol=1e-12)
    text = text_of(axes).replace("\n", " ")
    assert "conv · total gradient of the hidden state · norm over channels · sample 1" in text
    assert "12 of 30 steps, evenly spaced" in text
    bars = [ax for ax in axes.figure.axes if ax not in list(axes)]
    assert len(bars) == 1


def test_one_channel_keeps_its_signs_around_zero():
    array = conv_gradient()
    first, last = rl.plot.maps(array, channel=2, steps=[3, 29])
    np.testing.assert_array_equal(image_values(first), array.values[0, 3, :, :, 2])
    np.testing.assert_array_equal(image_values(last), array.values[0, 29, :, :, 2])
    largest = np.abs(array.values[0, ..., 2]).max()
    assert first.images[0].get_clim() == last.images[0].get_clim() == (-largest, largest)
    assert first.images[0].get_cmap().name == "rnnlens.diverging"


def test_row_0_of_the_picture_is_on_top():
    (ax,) = rl.plot.maps(conv_gradient(), steps=[0])
    bottom, top = ax.get_ylim()
    assert bottom > top
    assert ax.images[0].origin == "upper"


def test_steps_are_those_of_the_time_coordinate():
    array = conv_gradient(time=3).assign_coords(time=[10, 20, 30])
    (ax,) = rl.plot.maps(array, steps=[20])
    np.testing.assert_allclose(image_values(ax), np.sqrt((array.values[0, 1] ** 2).sum(-1)))
    assert ax.get_title() == "step 20"


def test_plain_arrays_are_in_the_order_of_keras_or_of_dims():
    array = conv_gradient(TORCH)
    (keras_ax,) = rl.plot.maps(array.transpose(*KERAS).values, steps=[4])
    (torch_ax,) = rl.plot.maps(array.values, dims=TORCH, steps=[4])
    np.testing.assert_allclose(image_values(keras_ax), image_values(torch_ax))


def test_one_axis_of_space_is_one_strip_over_time(render):
    array = conv_gradient(("sample", "time", "width", "channel"))
    norms = np.sqrt((array.values[0] ** 2).sum(-1)).T
    (strip,) = axes = rl.plot.maps(array)
    render(axes)
    np.testing.assert_allclose(image_values(strip), norms)
    assert (strip.get_xlabel(), strip.get_ylabel()) == ("time step", "width")
    (selected_steps,) = rl.plot.maps(array, steps=[4, 5, 6])
    np.testing.assert_allclose(image_values(selected_steps), norms[:, 4:7])
    assert selected_steps.get_xlim() == (3.5, 6.5)


def test_both_directions_are_drawn_side_by_side():
    array = conv_gradient(("sample", "time", "direction", "height", "width", "channel"), time=4)
    axes = rl.plot.maps(array.assign_coords(direction=["forward", "backward"]))
    assert len(axes) == 8
    np.testing.assert_allclose(image_values(axes[6]), np.sqrt((array.values[0, 2, 1] ** 2).sum(-1)))


def test_a_missing_value_is_crossed_out_and_counted_and_padding_is_not(by_gid, text_of):
    array = conv_gradient(time=3).copy()
    array[0, 1, 2, 4, 0] = np.nan
    mask = np.ones((2, 3), bool)
    mask[:, 2] = False
    axes = rl.plot.maps(array.assign_coords(mask=(("sample", "time"), mask)))
    assert np.argwhere(np.isnan(image_values(axes[1]))).tolist() == [[2, 4]]
    (cross,) = by_gid(axes[1], "non-finite")
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (4, 2)
    assert np.isnan(image_values(axes[2])).all()
    assert not by_gid(axes[2], "non-finite")
    assert "NaN: 1 of 315" in text_of(axes)
    assert axes[0].images[0].get_clim()[1] == np.nanmax(np.sqrt((array.values[0, :2] ** 2).sum(-1)))


@pytest.mark.parametrize(
    ("dims", "keywords", "message"),
    [
        (("sample", "time", "channel"), {}, r"needs axes of space(.|\n)*plot.heatmap"),
        (("sample", "height", "width", "channel"), {}, "'time' among them"),
        (("sample", "time", "depth", "height", "width", "channel"), {}, r"two axes of space(.|\n)*isel\(depth=0\)"),
        (("sample", "time", "height", "width", "gate", "channel"), {}, r"no place(.|\n)*isel\(gate=0\)"),
        (KERAS, {"sample": 2}, "sample=0 to 1"),
        (KERAS, {"channel": 3}, "channel=0 to 2"),
        (("sample", "time", "height", "width"), {"channel": 0}, "an array with channels"),
        (KERAS, {"steps": [30]}, "steps from 0 to 29"),
        (KERAS, {"steps": []}, "steps"),
        (KERAS, {"steps": "all"}, "steps"),
    ],
)
def test_what_has_no_picture_is_refused_by_name(dims, keywords, message):
    with pytest.raises(InputError, match=message):
        rl.plot.maps(conv_gradient(dims), **keywords)


def test_a_plain_array_of_rank_4_is_not_guessed():
    with pytest.raises(InputError, match="dims="):
        rl.plot.maps(np.ones((2, 3, 4, 5)))


def test_maps_of_zeros_say_so():
    zeros = xr.DataArray(np.zeros((2, 3, 4, 4, 2)), dims=("sample", "time", "height", "width", "channel"))
    assert "every value is 0" in suptitle(rl.plot.maps(zeros))
    assert "every value is 0" not in suptitle(rl.plot.maps(zeros + 1))
