"""Figures over time: Jacobian margins, gates, lifetimes, lags of dL/dW, inputs, texts, samples, eigenvalues."""

import numpy as np
import pytest
import xarray as xr
from tests.unit.plot.runs import suptitle

import rnnlens as rl
from rnnlens.errors import InputError

pytestmark = pytest.mark.slow


def curve(ax, gid):
    (line,) = [line for line in ax.lines if line.get_gid() == gid]
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def is_red(ax):
    return ax.spines["top"].get_edgecolor()[:3] == pytest.approx((0.7529, 0, 0), abs=1e-3)


# -- jacobian_margins


def test_margins_are_the_profile_and_the_column_sums_of_what_is_drawn(jacobian, by_gid):
    data = jacobian(samples=3, steps=12, decay=0.7) * xr.DataArray([1.0, 5.0, 1e3], dims="sample")
    matrix, profile, columns = rl.plot.jacobian_margins(data, delays=(3, 8))
    picture = np.asarray(matrix.images[0].get_array())
    np.testing.assert_allclose(picture, jacobian(samples=1, steps=12, decay=0.7).values[0])
    values, lags = curve(profile, "profile")
    np.testing.assert_array_equal(lags, np.arange(12))
    assert profile.get_ylim() == (-0.5, 11.5)  # lag upward
    np.testing.assert_allclose(values, 0.7 ** np.arange(12.0))
    np.testing.assert_allclose(curve(columns, "columns")[1], picture.sum(axis=0))
    assert [line.get_ydata()[0] - line.get_xdata()[0] for line in by_gid(matrix, "delay")] == [3, 8]
    assert [line.get_ydata()[0] for line in by_gid(profile, "delay")] == [3, 8]
    assert [text.get_text() for text in by_gid(matrix, "lag")] == ["lag 3", "lag 8"]
    assert matrix.get_xlim() == columns.get_xlim()


def test_margins_of_the_backward_half_look_ahead(jacobian, by_gid):
    values = np.stack([jacobian(steps=8).values, jacobian(steps=8).values.transpose(0, 2, 1)])
    both_directions = xr.DataArray(
        values,
        dims=("direction", "sample", "out_time", "in_time"),
        coords={"direction": ["forward", "backward"]},
    )
    axes = rl.plot.jacobian_margins(both_directions, delays=2)
    for profile in (axes[1], axes[4]):
        np.testing.assert_allclose(curve(profile, "profile")[0], 0.5 ** np.arange(8.0))
    (line,) = by_gid(axes[3], "delay")
    assert line.get_ydata()[0] - line.get_xdata()[0] == -2


def test_one_output_step_is_a_line_with_margins(jacobian, render):
    row, profile, columns = axes = rl.plot.jacobian_margins(jacobian(steps=6).isel(out_time=[-1]), delays=2)
    render(axes)
    np.testing.assert_allclose(curve(row, "row")[1], 0.5 ** np.arange(6.0)[::-1])
    np.testing.assert_allclose(curve(columns, "columns")[1], 0.5 ** np.arange(6.0)[::-1])
    assert len(profile.lines) == 2


def test_the_title_names_the_steps_that_carry_the_jacobian(jacobian):
    data = jacobian(samples=1, steps=20, decay=0.5) * 0 + np.tril(np.ones((20, 20))) * 1e-6
    data[..., 2], data[..., 6] = 5.0, 3.0
    assert suptitle(rl.plot.time_jacobian(data)).startswith("input steps 2") is False  # step 2 carries 62 %
    assert suptitle(rl.plot.time_jacobian(data)).startswith("input step 2 carries 62% of the time Jacobian")
    data[..., 6], data[..., 9] = 5.0, 5.0
    assert suptitle(rl.plot.time_jacobian(data)).startswith("input steps 2 and 6 carry 67% of the time Jacobian")
    assert suptitle(rl.plot.time_jacobian(jacobian(samples=1, steps=20, decay=1.0))).startswith("time Jacobian")


# -- gates_over_time


def test_gates_of_a_unit_are_lines_of_one_panel(layer, by_gid):
    data = layer(samples=5, steps=7, units=3)
    axes = rl.plot.gates_over_time(data)
    assert [ax.get_title() for ax in axes] == ["unit 0", "unit 1", "unit 2"]
    for unit, ax in enumerate(axes):
        for gate in data.gate.values:
            values = data.gates.sel(gate=gate).values[:, :, unit]
            np.testing.assert_allclose(curve(ax, f"gate {gate}")[1], np.median(values, axis=0))
            (band,) = by_gid(ax, f"band {gate}")
            low, high = band.get_paths()[0].vertices[:, 1].min(), band.get_paths()[0].vertices[:, 1].max()
            assert (low, high) == pytest.approx(
                (np.quantile(values, 0.25, axis=0).min(), np.quantile(values, 0.75, axis=0).max())
            )
    (legend,) = axes[0].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["input", "forget", "candidate", "output"]


def test_padded_steps_of_gates_are_grey_and_count_in_nothing(layer, by_gid):
    data = layer(samples=2, steps=6, units=1)
    data["mask"] = (("sample", "time"), np.arange(6)[None] < np.array([4, 2])[:, None])
    (ax,) = rl.plot.gates_over_time(data)
    values = data.gates.sel(gate="forget").values[:, :, 0]
    expected = [*values[:, :2].mean(axis=0), values[0, 2], values[0, 3], np.nan, np.nan]
    np.testing.assert_allclose(curve(ax, "gate forget")[1], expected)
    assert len(by_gid(ax, "padding")) == 2


# -- saturation_arrows


def test_arrows_lead_from_the_shares_before_to_those_after(layer, by_gid):
    before, after = layer(samples=4, steps=9), layer(samples=4, steps=9)
    after["gates"].values[..., 0, 1] = 0.95
    after["gates"].values[..., 2, 2] = -0.95
    axes = rl.plot.saturation_arrows(before, after)
    for number, (ax, gate) in enumerate(zip(axes, before.gate.values, strict=True)):
        low = -0.9 if gate == "candidate" else 0.1
        shares = [
            np.stack([(gates.values > 0.9).mean(axis=(0, 1)), (gates.values < low).mean(axis=(0, 1))], axis=1)
            for gates in (before.gates.isel(gate=number), after.gates.isel(gate=number))
        ]
        (arrows,) = by_gid(ax, "after")
        np.testing.assert_allclose(arrows.get_offsets(), shares[0])
        np.testing.assert_allclose(np.stack([arrows.U, arrows.V], axis=1), shares[1] - shares[0], atol=1e-12)
    assert axes[0].get_xlabel() == "share near 1 (> 0.9)"
    assert axes[2].get_ylabel() == "share near -1 (< -0.9)"


def test_arrows_between_other_gates_are_refused(layer):
    with pytest.raises(InputError, match="compares the same gates and units"):
        rl.plot.saturation_arrows(layer(units=3), layer(units=4))


def test_a_proposal_is_drawn_as_one_by_any_name(layer):
    data = layer(units=3)
    data["gates"].values[:, :, 3] -= 1
    data["gates"].attrs["proposals"] = "output"
    axes = rl.plot.gates(data)
    assert [ax.get_ylabel() for ax in axes[::3]] == ["input gate", "forget gate", "candidate gate", "output"]
    assert [ax.get_ylabel()[:14] for ax in axes[2::3]] == ["share near 0 ("] * 3 + ["share near -1 "]
    assert axes[9].get_ylim()[0] < -1
    assert axes[6].get_ylim()[0] > -0.1
    titles = [ax.get_title() for ax in rl.plot.saturation_arrows(data, data)]
    assert titles == ["input gate", "forget gate", "candidate gate", "output"]


# -- memory_lifetime


def test_the_product_of_gates_lies_against_what_arrives(layer, initial_jacobian, by_gid):
    data = layer(samples=3, steps=6, units=3)
    data["gates"].values[:, :, 1] = np.array([0.9, 0.5, 0.8])
    (ax,) = rl.plot.memory_lifetime(data, initial_jacobian(samples=3))
    for step in (1, 3, 5):
        (points,) = by_gid(ax, f"units {step}")
        x, y = np.asarray(points.get_offsets()).T
        np.testing.assert_allclose(x, np.array([0.9, 0.5, 0.8]) ** (step + 1))
        np.testing.assert_allclose(y, 0.9 ** (step + 1))
    (line,) = by_gid(ax, "identity")
    np.testing.assert_array_equal(line.get_xdata(), line.get_ydata())


def test_lifetimes_of_the_backward_half_count_from_the_end(layer, initial_jacobian, by_gid):
    data = layer(samples=2, steps=6, units=3, directions=True)
    data["gates"].values[:, :, 1, 1] = 0.9
    _, backward = rl.plot.memory_lifetime(data, initial_jacobian(directions=True))
    (points,) = by_gid(backward, "units 1")
    np.testing.assert_allclose(points.get_offsets(), 0.9**5)


def test_padding_keeps_everything(layer, initial_jacobian, by_gid):
    data = layer(samples=1, steps=6, units=3)
    data["gates"].values[:, :, 1] = 0.9
    data["mask"] = (("sample", "time"), np.array([[True] * 2 + [False] * 4]))
    (ax,) = rl.plot.memory_lifetime(data, initial_jacobian(samples=1))
    (points,) = by_gid(ax, "units 5")
    np.testing.assert_allclose(points.get_offsets()[:, 0], 0.81)


def test_what_has_no_lifetime_is_refused(layer, initial_jacobian):
    with pytest.raises(InputError, match="The Jacobian does not fit the gates"):
        rl.plot.memory_lifetime(layer(units=3), initial_jacobian(units=4))
    with pytest.raises(InputError, match="The forget gate, which keeps the state, was not selected"):
        rl.plot.memory_lifetime(layer().isel(gate=[0, 2, 3]), initial_jacobian())
    other_cell = layer()
    del other_cell["gates"].attrs["keeping"]
    with pytest.raises(InputError, match="No gate of this cell keeps its state"):
        rl.plot.memory_lifetime(other_cell, initial_jacobian())


# -- weight_lags


def test_shares_of_a_geometric_gradient(weights_by_time, by_gid):
    axes = rl.plot.weight_lags(weights_by_time(steps=10), delays=4)
    assert [ax.get_title() for ax in axes] == [
        f"{name}: half from lag 0" for name in ("kernel", "recurrent kernel", "bias")
    ]
    expected = np.cumsum(0.5 ** np.arange(10)) / np.sum(0.5 ** np.arange(10))
    for ax in axes:
        for gate in ("input", "forget", "candidate", "output"):
            np.testing.assert_allclose(curve(ax, f"share {gate}")[1], expected)
        assert by_gid(ax, "delay")[0].get_xdata()[0] == 4
    norms = {
        f"{name}_norm": np.sqrt((array**2).sum([d for d in array.dims if d not in ("time", "gate")]))
        for name, array in weights_by_time(steps=10).items()
    }
    norm_axes = rl.plot.weight_lags(xr.Dataset(norms, attrs={"layer": "lstm"}))
    np.testing.assert_allclose(curve(norm_axes[1], "share forget")[1], expected)


def test_lags_of_the_backward_half_count_from_the_first_step(weights_by_time):
    axes = rl.plot.weight_lags(weights_by_time(steps=10, directions=True))
    np.testing.assert_allclose(curve(axes[4], "share input")[1], curve(axes[1], "share input")[1])


def test_lags_that_stand_out_are_named_and_half_of_the_gradient_is_placed(by_gid):
    norms = np.full((50, 1), 1.0)
    norms[[40, 10], 0] = 57.0, 33.5  # of steps: lags 9 and 39
    data = xr.Dataset({"kernel_grad_norm": (("time", "gate"), norms)}, coords={"gate": ["forget"]})
    (ax,) = rl.plot.weight_lags(data, cumulative=False)
    assert [text.get_text() for text in by_gid(ax, "peak")] == ["9", "39"]
    assert ax.get_title() == "kernel: half from lags 0 to 13"  # 9 + 57 + 4 of 138.5
    (cumulative_ax,) = rl.plot.weight_lags(data)
    assert by_gid(cumulative_ax, "peak") == []


def test_a_gate_without_a_gradient_is_named(weights_by_time, by_gid):
    data = weights_by_time()
    data["kernel_grad"].values[:, :, 1] = 0
    axes = rl.plot.weight_lags(data)
    assert by_gid(axes[0], "silent")[0].get_text() == "no share: forget"
    with pytest.raises(InputError, match="needs gradients of the weights by time"):
        rl.plot.weight_lags(data.isel(time=0, drop=True))


@pytest.mark.parametrize("units", [1, 6])
def test_the_legend_of_memory_lifetime_counts_units_that_the_gates_explain(layer, initial_jacobian, units):
    traced_layer, jacobian = layer(samples=3, steps=12, units=units), initial_jacobian(samples=3, steps=12, units=units)
    (ax,) = rl.plot.memory_lifetime(traced_layer, jacobian)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    points = [collection for collection in ax.collections if str(collection.get_gid()).startswith("units")]
    for label, collection in zip(labels, points, strict=True):
        x, y = np.asarray(collection.get_offsets()).T
        assert label.endswith(f": {((x <= 2 * y) & (y <= 2 * x)).sum()} of {units}")
    step, count = labels[-1].removeprefix("step ").split(": ")
    assert f"forget gates explain {count} units at step {step}" in suptitle([ax])


# -- input_map


def sensitivity(gradient, x):
    return np.sqrt(((gradient * x.std(axis=0)) ** 2).sum(axis=-1))


def test_gradients_count_by_how_much_their_input_varies(by_gid):
    rng = np.random.default_rng(0)
    gradient, x = rng.normal(size=(2, 5, 8, 2))
    x[:, 3] = 1.0  # never varies
    (ax,) = rl.plot.input_map(gradient, x)
    values = sensitivity(gradient, x)
    expected = np.median(values / values.max(axis=1, keepdims=True), axis=0)
    np.testing.assert_allclose(curve(ax, "sensitivity")[1], expected)
    assert curve(ax, "sensitivity")[1][3] == 0
    (sample_ax,) = rl.plot.input_map(gradient, x, sample=2)
    np.testing.assert_allclose(curve(sample_ax, "sensitivity")[1], values[2])


def test_the_bar_of_a_narrow_margin_is_as_tall_as_it(render, jacobian):
    axes = rl.plot.jacobian_margins(jacobian(steps=30))
    figure = render(axes)
    assert (axes[1].get_title(), axes[1].get_ylabel()) == ("mean by lag", "lag")
    bar = next(panel for panel in figure.axes if panel not in list(axes))
    assert bar.get_window_extent().height > 0.9 * axes[1].get_window_extent().height


def test_steps_are_pixels_row_by_row():
    gradient, x = np.random.default_rng(0).normal(size=(2, 1, 64, 1))
    (ax,) = rl.plot.input_map(gradient, shape=(8, 8))
    np.testing.assert_allclose(ax.images[0].get_array(), np.abs(gradient).reshape(8, 8))
    with pytest.raises(InputError, match=r"shape= is not that of the image\.\n  got:      shape=\(8, 9\)"):
        rl.plot.input_map(gradient, x, shape=(8, 9))


@pytest.mark.parametrize(
    ("sizes", "claim"),
    [
        ({20: 0.8, 59: 1.0}, "most on steps 20 and 59"),
        ({59: 1.0}, "most on step 59"),
        ({3: 0.5, 7: 1.0, 30: 0.9}, "most on steps 3, 7 and 30"),
        ({step: 1.0 - step / 100 for step in range(50, 60)} | {50: 0.6}, "most on steps 50 to 59"),
        ({1: 0.9, 20: 1.0, 30: 0.9, 59: 0.6}, "most on step 20"),
        ({}, "on no step"),
        (dict.fromkeys(range(60), 2.0), "equally on all 60 steps"),
        ({4: 1.0, 8: np.nan}, "most on step 4"),
    ],
)
def test_the_title_of_an_input_map_names_the_largest_steps(sizes, claim):
    gradient = np.zeros((1, 60, 1))
    gradient[0, list(sizes), 0] = list(sizes.values())
    (ax,) = rl.plot.input_map(gradient)
    assert ax.figure.get_suptitle().strip() == f"the loss depends {claim}"
    assert ax.get_ylim()[1] > 0.5  # also where all values are 0
    assert ax.get_xlim()[1] >= 60.0  # a peak at the last step is not drawn on the frame


def test_an_input_map_without_a_finite_number_claims_nothing():
    (ax,) = rl.plot.input_map(np.full((1, 6, 1), np.nan))
    assert suptitle([ax]) == "no finite gradient of the loss NaN: 6 of 6 (100 %)"


@pytest.mark.parametrize("log", [False, True])
def test_a_gradient_of_zeros_is_no_missing_one(log, by_gid):
    (ax,) = rl.plot.input_map(np.zeros((3, 6, 1)), log=log)
    assert by_gid(ax, "non-finite") == []
    (text_ax,) = rl.plot.input_map(np.zeros((3, 6, 1)), tokens="sixsix", log=log)
    assert by_gid(text_ax, "non-finite") == []


def test_a_logarithmic_input_map_shows_twelve_decades_and_marks_what_is_below(by_gid):
    gradient = 10.0 ** -np.arange(41.0)[::-1].reshape(1, 41, 1)
    (ax,) = rl.plot.input_map(gradient, log=True)
    low, high = ax.get_ylim()
    assert 1e-14 < low < high < 10
    assert len(by_gid(ax, "below")) > 0


def test_of_a_long_text_the_lines_about_its_largest_token_are_drawn():
    gradient = np.zeros((1, 5000, 1))
    gradient[0, 4321] = 1.0
    axes = rl.plot.input_map(gradient, tokens="abcde" * 1000)
    note = suptitle(axes).partition("tokens ")[2]
    first, last = (int(part) for part in note.partition(" of")[0].split(" to "))
    assert first < 4321 < last
    assert note.endswith(" of 5000")


def test_the_title_of_an_input_map_names_the_largest_pixel_and_token():
    gradient = np.zeros((1, 6, 1))
    gradient[0, 4] = 1.0
    (ax,) = rl.plot.input_map(gradient, shape=(2, 3))
    assert ax.figure.get_suptitle().strip() == "the loss depends most on row 1, column 1"
    (ax,) = rl.plot.input_map(gradient, tokens=["a ", "b ", "c ", "d ", "e ", "f "])
    assert ax.figure.get_suptitle().strip() == "the loss depends most on “e” (step 4)"
    assert ax.figure.get_figheight() < 2  # a text of one line is no tall picture


def test_a_gradient_of_something_else_than_the_loss_says_so():
    attrs = {"long_name": "gradient of output with respect to input", "layer": "model"}
    gradient = xr.DataArray(np.ones((2, 5, 1)), dims=("sample", "time", "feature"), attrs=attrs)
    (ax,) = rl.plot.input_map(gradient)
    assert suptitle([ax]).startswith("model · the output depends equally on all 5 steps")
    assert ax.get_ylabel().startswith("|d output / $dx_t$|")
    (loss_ax,) = rl.plot.input_map(gradient.assign_attrs(long_name="gradient of loss with respect to input"))
    assert suptitle([loss_ax]).startswith("model · the loss depends equally on all 5 steps")
    assert loss_ax.get_ylabel().startswith("$|dL/dx_t|$")


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4)])
def test_an_image_is_as_tall_as_its_colour_bar(shape, render):
    (ax,) = rl.plot.input_map(np.random.default_rng(0).normal(size=(3, 64, 1)), shape=shape)
    figure = render([ax])
    bar = next(panel for panel in figure.axes if panel is not ax)
    assert ax.get_window_extent().height > 0.85 * bar.get_window_extent().height


def test_tokens_are_shaded_by_their_gradient(by_gid):
    gradient = np.array([0.0, 1.0, 4.0, 2.0])[None, :, None]
    (ax,) = rl.plot.input_map(gradient, tokens=["a ", "long ", "short ", "end"])
    (token_boxes,) = by_gid(ax, "tokens")
    np.testing.assert_array_equal(token_boxes.get_array(), [0, 0.25, 1, 0.5])  # share of the peak
    widths = [path.vertices[:, 0].max() - path.vertices[:, 0].min() for path in token_boxes.get_paths()]
    assert widths == [2, 5, 6, 3]
    assert "".join(text.get_text() for text in ax.texts) == "a long short end"
    with pytest.raises(InputError, match=r"one token for each step\.\n  got:      2 tokens\n  expected: 4 of them"):
        rl.plot.input_map(gradient, tokens=["a", "b"])


def test_one_sample_has_the_spread_of_its_steps():
    gradient, x = np.random.default_rng(0).normal(size=(2, 1, 9, 2))
    axes = rl.plot.input_map(gradient, x)
    expected = np.sqrt(((gradient[0] * x[0].std(axis=0)) ** 2).sum(axis=-1))
    np.testing.assert_allclose(curve(axes[0], "sensitivity")[1], expected)
    assert "one sample: s.d. over its steps" in suptitle(axes)
    with pytest.raises(InputError, match="x= is not the input of this gradient"):
        rl.plot.input_map(gradient, x[:, 1:])


# -- unit_over_text


def test_letters_are_shaded_by_the_state_after_them(gradient, by_gid):
    data = gradient(samples=2, steps=5, units=4) - 0.5
    axes = rl.plot.unit_over_text(data, "12345", units=[3, 1], sample=1)
    assert [ax.get_title(loc="left") for ax in axes] == ["unit 3", "unit 1"]
    (token_boxes,) = by_gid(axes[0], "tokens")
    np.testing.assert_allclose(token_boxes.get_array(), data.values[1, :, 3])
    assert token_boxes.norm.vmin == -token_boxes.norm.vmax
    with pytest.raises(InputError, match="There is no such unit"):
        rl.plot.unit_over_text(data, "12345", units=4)


def test_one_gate_is_drawn_over_text(layer, by_gid, gradient):
    data = layer(samples=2, steps=6, units=3)
    axes = rl.plot.unit_over_text(data.gates, "abcdef", gate="forget", units=[1], sample=1)
    np.testing.assert_allclose(by_gid(axes[0], "tokens")[0].get_array(), data.gates.values[1, :, 1, 1])
    assert suptitle(axes) == "lstm · forget gate"
    with pytest.raises(InputError) as caught:
        rl.plot.unit_over_text(data.gates, "abcdef")
    assert str(caught.value) == (
        "plot.unit_over_text draws one gate.\n"
        "  got:      all gates\n"
        "  expected: one of input, forget, candidate, output\n"
        "  try:      gate='input'"
    )
    with pytest.raises(InputError, match="This array has no gates"):
        rl.plot.unit_over_text(data.hidden_grad, "abcdef", gate="forget")


def test_an_unknown_sample_of_a_text_is_refused(gradient):
    data = gradient(samples=2, steps=5, units=4)
    with pytest.raises(InputError, match="There is no such sample"):
        rl.plot.unit_over_text(data, "12345", sample=2)


def test_a_long_text_is_broken_and_cut_with_a_note(by_gid):
    text = "word " * 1000
    axes = rl.plot.unit_over_text(np.zeros((5000, 1)), text)
    (token_boxes,) = by_gid(axes[0], "tokens")
    token_count = len(token_boxes.get_array())
    assert 72 * 40 - 200 < token_count <= 72 * 40
    assert f"first {token_count} of 5000 tokens" in suptitle(axes)


# -- gradient_carriers


def test_half_of_the_gradient_comes_from_one_of_four(by_gid):
    data = np.array([1.0, 1.0, 1.0, 3.0])[:, None, None] * np.ones((4, 1, 1))
    scatter, share = rl.plot.gradient_carriers(data, [0.1, 0.2, 0.3, 2.0])
    (points,) = by_gid(scatter, "samples")
    np.testing.assert_allclose(points.get_offsets(), [[0.1, 1], [0.2, 1], [0.3, 1], [2, 3]])
    np.testing.assert_allclose(curve(share, "lorenz"), [[0, 0.25, 0.5, 0.75, 1], [0, 1 / 6, 2 / 6, 3 / 6, 1]])
    assert "1 of 4 samples carry half of the gradient" in suptitle([scatter])
    assert by_gid(scatter, "largest")[0].get_text() == "sample 3 (largest)"
    assert by_gid(scatter, "typical")[0].get_text() == "sample 1 (typical)"
    with pytest.raises(InputError, match="losses= has one number for each sample"):
        rl.plot.gradient_carriers(data, [1.0])


# -- eigenvalues


def test_eigenvalues_lie_in_the_plane_and_their_moduli_beside(by_gid):
    values = np.array([[1.1, 0.5j, -0.2], [0.9, 0.4j, 0.1]])
    plane, moduli = rl.plot.eigenvalues(values)
    (points,) = by_gid(plane, "eigenvalues")
    offsets = np.asarray(points.get_offsets())
    np.testing.assert_allclose(offsets[:, 0] + 1j * offsets[:, 1], values.reshape(-1))
    np.testing.assert_allclose(curve(moduli, "moduli")[1], [1.0, 0.45, 0.15])
    x, y = curve(plane, "unit circle")
    np.testing.assert_allclose(x**2 + y**2, 1)
    assert "1 of 6 outside the unit circle" in suptitle([plane])
    with pytest.raises(InputError, match=r"rl\.step_eigenvalues\(model, x\)"):
        rl.plot.eigenvalues("0.5")


def test_fixed_points_have_eigenvalues(fixed_points, by_gid):
    plane, _ = rl.plot.eigenvalues(fixed_points())
    assert len(by_gid(plane, "eigenvalues")[0].get_offsets()) == 9


# -- norm_history


def test_rows_are_shapes_and_the_size_stands_beside(layer):
    moments = {epoch: layer(samples=3, steps=8, units=4, decay=d) for epoch, d in ((0, 0.5), (5, 0.7), (20, 0.9))}
    moments[20]["hidden_grad"] = moments[20].hidden_grad * 10
    shapes, size = rl.plot.norm_history(moments)
    expected = np.array([0.5, 0.7, 0.9])[:, None] ** np.arange(8)[::-1]
    np.testing.assert_allclose(shapes.images[0].get_array(), expected)
    assert [text.get_text() for text in shapes.get_yticklabels()] == ["0", "5", "20"]
    assert shapes.images[0].origin == "lower"
    np.testing.assert_allclose(curve(size, "size")[0], [2, 2, 20])


def test_a_history_as_one_array(gradient):
    data = xr.concat([gradient(), 2 * gradient()], "epoch").assign_coords(epoch=[1, 4])
    shapes, _ = rl.plot.norm_history(data)
    assert shapes.images[0].get_array().shape == (2, 5)
    with pytest.raises(InputError, match="needs a training dimension"):
        rl.plot.norm_history(gradient())
    with pytest.raises(InputError, match="The moments differ in their steps"):
        rl.plot.norm_history({0: gradient(), 1: gradient(steps=4)})


# -- all figures


def draw_figure(name, samples, units, directions, fixtures):
    """Draw a figure from data of this size, with one NaN in the first sample, unit and direction."""
    layer, initial_jacobian, weights_by_time = fixtures
    traced_layer = layer(samples=samples, steps=12, units=units, directions=directions)
    traced_layer["hidden_grad"].values[(0, 3, *[0] * (traced_layer.hidden_grad.ndim - 2))] = np.nan
    traced_layer["gates"].values[..., 1, 0][0, 3] = np.nan
    total = traced_layer.hidden_grad
    if name == "memory_lifetime":
        jacobian = initial_jacobian(samples=samples, steps=12, units=units, directions=directions)
        return rl.plot.memory_lifetime(traced_layer, jacobian)
    if name == "weight_lags":
        data = weights_by_time(units=min(units, 64), directions=directions)
        data["kernel_grad"].values[(0, 3, 0, 1, 0) if directions else (3, 0, 1, 0)] = np.nan
        return rl.plot.weight_lags(data)
    forward_only = total.isel(direction=0, drop=True) if directions else total
    return {
        "gates_over_time": lambda: rl.plot.gates_over_time(traced_layer),
        "saturation_arrows": lambda: rl.plot.saturation_arrows(traced_layer, traced_layer),
        "input_map": lambda: rl.plot.input_map(forward_only),
        "unit_over_text": lambda: rl.plot.unit_over_text(total, "twelve steps"),
        "gradient_carriers": lambda: rl.plot.gradient_carriers(total, np.arange(1.0, samples + 1)),
        "norm_history": lambda: rl.plot.norm_history({0: traced_layer, 1: traced_layer}),
        "gradient_flow": lambda: rl.plot.gradient_flow({"a": traced_layer, "b": traced_layer}),
    }[name]()


def test_letters_on_dark_boxes_are_white():
    texts = rl.plot.unit_over_text(np.array([[-1.0], [-0.7], [0.0], [0.3], [1.0]]), "abcde")[0].texts
    assert [text.get_color() for text in texts] == ["white", "white", "black", "black", "white"]


def test_a_single_lag_is_drawn_as_a_point(jacobian, layer, by_gid):
    one_step = jacobian(steps=1)
    (profile,) = by_gid(rl.plot.lag_profile(one_step)[0], "profile")
    margins = rl.plot.jacobian_margins(one_step)
    (gate_mean,) = by_gid(rl.plot.gates(layer(steps=1))[0], "mean")
    lines = [profile, *by_gid(margins[1], "profile"), *by_gid(margins[2], "columns"), gate_mean]
    assert [line.get_marker() for line in lines] == ["o"] * 4


@pytest.mark.pairs
@pytest.mark.parametrize("directions", [False, True])
@pytest.mark.parametrize(("samples", "units"), [(1, 512), (64, 6)])
@pytest.mark.parametrize(
    "name",
    [
        "gates_over_time",
        "saturation_arrows",
        "memory_lifetime",
        "weight_lags",
        "input_map",
        "unit_over_text",
        "gradient_carriers",
        "norm_history",
        "gradient_flow",
    ],
)
def test_every_size_is_drawn_and_a_nan_is_told(
    name, samples, units, directions, layer, initial_jacobian, weights_by_time, render
):
    axes = draw_figure(name, samples, units, directions, (layer, initial_jacobian, weights_by_time))
    render(axes)
    assert "NaN: " in suptitle(axes)
    assert axes[0].get_figure(root=True)._suptitle.get_color() == "#c00000"


def test_single_lags_of_a_weight_are_the_steps_of_the_cumulative_line(weights_by_time):
    data = weights_by_time(steps=10)
    for each, summed in zip(rl.plot.weight_lags(data, cumulative=False), rl.plot.weight_lags(data), strict=True):
        for line, cumulative_line in zip(each.get_lines(), summed.get_lines(), strict=False):
            np.testing.assert_allclose(np.cumsum(line.get_ydata()), cumulative_line.get_ydata(), rtol=1e-12)


def test_the_period_of_a_turning_mode_is_in_the_title():
    turning = 0.98 * np.exp(2j * np.pi / 29 * np.array([1, -1]))
    axes = rl.plot.eigenvalues(np.tile(np.append(turning, 0.4), (5, 1)))
    assert suptitle(axes).startswith("the slowest mode keeps 0.98 of itself per step, and turns once in 29 steps")
    assert [text.get_text() for text in axes[0].texts] == ["slowest mode,\nturns in 29 steps"]
    slow = 0.98 * np.exp(2j * np.pi / 290 * np.array([1, -1]))
    assert "turns once in 290 steps" in suptitle(rl.plot.eigenvalues(np.tile(slow, (5, 1))))
    assert axes[0].get_ylim()[1] < 0.6  # as far as the eigenvalues reach
    assert "turns" not in suptitle(rl.plot.eigenvalues(np.array([[0.9, 0.2j, -0.2j]])))


def test_a_gate_half_open_is_white(layer):
    images = [ax.images[0] for ax in rl.plot.gates(layer()) if ax.images]
    assert {image.norm.vmin for image in images} == {0.0, -1.0}
    assert {image.to_rgba(0.5)[:3] for image in images if image.norm.vmin == 0} == {(1.0, 1.0, 1.0)}
