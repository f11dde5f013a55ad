"""gates, gradient_flow, weight_norms, time_jacobian, lag_profile, before_after."""

import math

import numpy as np
import pytest
import xarray as xr

import rnnlens as rl
from rnnlens.errors import InputError


def suptitle(axes):
    return axes[0].get_figure(root=True).get_suptitle().replace("\n", " ")


def curve(ax, gid):
    (line,) = [line for line in ax.lines if line.get_gid() == gid]
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


# -- gates


def test_gate_rows_hold_mean_map_and_saturation(layer, by_gid):
    data = layer(samples=4, steps=8, units=3)
    axes = rl.plot.gates(data)
    assert len(axes) == 12
    for row, gate in enumerate(data.gate.values):
        activity, picture, saturation = axes[3 * row : 3 * row + 3]
        values = data.gates.sel(gate=gate).values
        assert activity.get_ylabel() == f"{gate} gate"
        np.testing.assert_allclose(curve(activity, "mean")[1], values.mean(axis=(0, 2)))
        np.testing.assert_allclose(picture.images[0].get_array(), values.mean(axis=0).T)
        low = -0.9 if gate == "candidate" else 0.1
        expected = np.stack([(values > 0.9).mean(axis=(0, 1)), (values < low).mean(axis=(0, 1))], axis=1)
        (points,) = by_gid(saturation, "saturation")
        np.testing.assert_allclose(points.get_offsets(), expected)


def test_masked_steps_do_not_count(layer, by_gid):
    data = layer(samples=2, steps=6, units=3)
    mask = np.arange(6)[None] < np.array([4, 2])[:, None]
    data["gates"].values[~mask] = 1e6
    data["mask"] = (("sample", "time"), mask)
    axes = rl.plot.gates(data)
    values = data.gates.sel(gate="forget").values
    expected = [
        values[:2, 0].mean(),
        values[:2, 1].mean(),
        values[0, 2].mean(),
        values[0, 3].mean(),
        math.nan,
        math.nan,
    ]
    np.testing.assert_allclose(curve(axes[3], "mean")[1], expected)
    (points,) = by_gid(axes[5], "saturation")
    assert points.get_offsets()[:, 0].max() < 1
    assert by_gid(axes[4], "non-finite") == []
    assert "masked steps left out" in suptitle(axes)


def test_missing_gates_are_marked_and_counted(layer, by_gid):
    data = layer()
    data["gates"].values[1, 2, 0, 1] = np.nan
    axes = rl.plot.gates(data)
    assert by_gid(axes[0], "non-finite")[0].get_xdata().tolist() == [2]
    (cross,) = by_gid(axes[1], "non-finite")
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (2, 1)
    assert by_gid(axes[4], "non-finite") == []
    assert "NaN: 1 of 144 (0.694 %)" in suptitle(axes)


def test_gates_of_both_directions(layer, by_gid):
    data = layer(directions=True)
    axes = rl.plot.gates(data)
    backward = data.gates.sel(direction="backward", gate="input").values.mean(axis=0).T
    np.testing.assert_allclose(axes[13].images[0].get_array(), backward)
    turned = rl.plot.gates(data, as_computed=True)
    np.testing.assert_allclose(turned[13].images[0].get_array(), backward[:, ::-1])
    np.testing.assert_allclose(turned[1].images[0].get_array(), axes[1].images[0].get_array())


def test_gates_need_a_gate_dimension(gradient):
    with pytest.raises(InputError, match=r"expected: 'gate' among them"):
        rl.plot.gates(gradient())


def test_a_layer_without_gates_is_refused(layer):
    with pytest.raises(InputError, match=r"needs 'gates', which this layer does not have"):
        rl.plot.gates(layer().drop_vars("gates"))


# -- gradient_flow


@pytest.mark.parametrize("decay", [0.5, 0.8])
def test_flow_draws_norms_and_the_exact_decay(layer, by_gid, decay):
    data = layer(samples=3, steps=30, units=4, decay=decay)
    (ax,) = rl.plot.gradient_flow(data)
    assert ax.get_yscale() == "log"
    steps, total = curve(ax, "hidden_grad")
    np.testing.assert_array_equal(steps, np.arange(30))
    np.testing.assert_allclose(total, 2 * decay ** np.arange(30)[::-1])
    line, words = sorted(by_gid(ax, "decay"), key=lambda artist: hasattr(artist, "get_text"))
    np.testing.assert_allclose(line.get_ydata(), total)
    assert words.get_text() == f"x {decay:.3g} a step"


def test_neither_a_spike_nor_a_hard_sample_decides_the_decay(layer, by_gid):
    data = layer(samples=5, steps=30, decay=0.9)
    data["hidden_grad"].values[:, -1] *= 100
    data["hidden_grad"].values[0] = data["hidden_grad"].values[0, ::-1] * 1e4
    (words,) = [a for a in by_gid(rl.plot.gradient_flow(data)[0], "decay") if hasattr(a, "get_text")]
    assert words.get_text() == "x 0.9 a step"


def test_direct_gradient_of_one_step_is_a_point_and_zeros_are_told(layer):
    (ax,) = rl.plot.gradient_flow(layer(steps=30))
    _, direct = curve(ax, "output_grad")
    assert np.isnan(direct[:-1]).all()
    assert direct[-1] == pytest.approx(math.sqrt(3))
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["total, hidden state", "direct, output (0 at 29 of 30 steps)"]


def test_points_are_drawn_only_where_a_line_would_not_show(layer):
    data = layer(steps=30)
    (lone,) = [line for line in rl.plot.gradient_flow(data)[0].lines if line.get_gid() == "output_grad"]
    data["output_grad"] = data.hidden_grad
    (many,) = [line for line in rl.plot.gradient_flow(data)[0].lines if line.get_gid() == "output_grad"]
    assert (lone.get_marker(), many.get_marker()) == ("o", "None")


def test_vanishing_float32_gradients_do_not_underflow(layer):
    data = layer(steps=8)
    data["hidden_grad"] = (data.hidden_grad * 1e-30).astype("float32")
    _, total = curve(rl.plot.gradient_flow(data)[0], "hidden_grad")
    assert (total > 0).all()


def test_flow_of_the_backward_half_runs_the_other_way(layer, by_gid):
    axes = rl.plot.gradient_flow(layer(steps=30, directions=True))
    assert [ax.get_title() for ax in axes] == ["lstm · forward", "lstm · backward"]
    falls = by_gid(axes[1], "decay")[0].get_ydata()
    assert (np.diff(falls) < 0).all()
    turned = rl.plot.gradient_flow(layer(steps=30, directions=True), as_computed=True)
    assert (np.diff(by_gid(turned[1], "decay")[0].get_ydata()) > 0).all()


def test_flow_has_a_panel_per_layer_on_one_scale(layer):
    layers = {"low": layer(decay=0.5), "wide": layer(directions=True), "top": layer(decay=0.9)}
    axes = rl.plot.gradient_flow(layers)
    assert [ax.get_title() for ax in axes] == ["low", "wide · forward", "wide · backward", "top"]
    assert len({ax.get_ylim() for ax in axes}) == 1
    assert len({ax.get_ylim() for ax in rl.plot.gradient_flow(layers, shared=False)}) > 1


def test_last_output_only_lies_at_the_last_step(layer):
    data = layer(steps=7)
    data["output_grad"] = data.output_grad.isel(time=-1, drop=True)
    steps, _ = curve(rl.plot.gradient_flow(data)[0], "output_grad")
    assert steps.tolist() == [6]


def test_gradient_that_does_not_fade_says_so(layer, by_gid):
    (ax,) = rl.plot.gradient_flow(layer(decay=1.0))
    assert [a.get_text() for a in by_gid(ax, "decay") if hasattr(a, "get_text")] == ["x 1 a step"]


def test_missing_gradients_are_marked_and_counted(layer, by_gid):
    data = layer()
    data["hidden_grad"].values[0, 3, 1] = np.nan
    (ax,) = rl.plot.gradient_flow(data)
    assert by_gid(ax, "non-finite")[0].get_xdata().tolist() == [3]
    assert "lstm hidden_grad: NaN: 1 of 36 (2.78 %)" in suptitle([ax])


def test_a_trace_without_loss_has_no_flow(layer):
    with pytest.raises(InputError, match=r"trace with a loss: rl\.trace\(model, x, y\)"):
        rl.plot.gradient_flow(layer()[["gates"]])
    with pytest.raises(InputError, match="draws the layers of a trace"):
        rl.plot.gradient_flow(np.zeros((2, 3, 4)))


# -- weight_norms


def test_norms_have_a_panel_per_layer_and_a_line_per_weight():
    history = xr.Dataset(
        {
            "outer/lstm/kernel": ("step", [4.0, 2.0, 1.0]),
            "outer/lstm/bias": (("step", "gate"), [[1.0, 2.0], [1.0, 3.0], [1.0, 4.0]]),
            "dense/kernel": ("step", [5.0, 5.0, 5.0]),
        },
        coords={"step": [0, 10, 20], "gate": ["input", "forget"]},
    )
    axes = rl.plot.weight_norms(history)
    assert [ax.get_title() for ax in axes] == ["outer/lstm", "dense"]
    assert [line.get_label() for line in axes[0].lines] == ["kernel", "bias input", "bias forget"]
    np.testing.assert_array_equal(axes[0].lines[2].get_ydata(), [2.0, 3.0, 4.0])
    np.testing.assert_array_equal(axes[0].lines[0].get_xdata(), [0, 10, 20])
    assert axes[0].get_ylim() == axes[1].get_ylim()


def test_missing_norms_are_gaps(by_gid):
    (ax,) = rl.plot.weight_norms({"lstm/kernel": [1.0, math.nan, 3.0]})
    assert np.isnan(ax.lines[0].get_ydata()[1])
    assert by_gid(ax, "non-finite")[0].get_xdata().tolist() == [1]
    assert "NaN: 1 of 3 (33.3 %)" in suptitle([ax])


@pytest.mark.parametrize("bad", [{}, {"a": [1, 2], "b": [1]}, 3.0, xr.DataArray(1.0)])
def test_what_is_no_history_is_refused(bad):
    with pytest.raises(InputError, match="draws a history of norms"):
        rl.plot.weight_norms(bad)


# -- time_jacobian


def test_jacobian_is_inputs_across_and_outputs_upward(jacobian):
    data = jacobian(samples=2, steps=6)
    (ax,) = rl.plot.time_jacobian(data)
    (image,) = ax.images
    np.testing.assert_allclose(image.get_array(), data.values[0])
    assert image.origin == "lower"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("input time step", "output time step")
    assert "mean over 2 samples" in suptitle([ax])
    np.testing.assert_allclose(image.to_rgba(np.zeros((1, 1)))[0, 0], 1)


def test_full_jacobian_is_reduced_to_the_frobenius_norm():
    full = np.random.default_rng(0).normal(size=(1, 4, 2, 4, 3))
    (ax,) = rl.plot.time_jacobian(full)
    np.testing.assert_allclose(ax.images[0].get_array(), np.sqrt((full[0] ** 2).sum(axis=(1, 3))))


def test_signed_jacobian_has_white_in_the_middle(jacobian):
    (ax,) = rl.plot.time_jacobian(jacobian() - 0.25, log=False)
    (image,) = ax.images
    assert image.norm.vmin == -image.norm.vmax


def test_selected_times_keep_their_names(jacobian):
    data = jacobian(steps=12).assign_coords(out_time=range(12), in_time=range(12))
    (ax,) = rl.plot.time_jacobian(data.isel(out_time=[1, 2, 11]))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["1", "2", "11"]
    (ax,) = rl.plot.time_jacobian(data.isel(out_time=[5, 11]))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["5", "11"]


def test_one_output_step_is_a_line(jacobian):
    (ax,) = rl.plot.time_jacobian(jacobian(steps=6).isel(out_time=-1, drop=True))
    steps, row = curve(ax, "row")
    np.testing.assert_array_equal(steps, np.arange(6))
    np.testing.assert_allclose(row, 0.5 ** np.arange(6)[::-1])


def test_missing_blocks_of_any_sample_are_crossed_out(jacobian, by_gid):
    data = jacobian()
    data[1, 4, 2] = np.nan
    (ax,) = rl.plot.time_jacobian(data)
    (cross,) = by_gid(ax, "non-finite")
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (2, 4)
    assert "NaN: 1 of 72 (1.39 %)" in suptitle([ax])


def test_jacobian_panels_per_sample(jacobian):
    axes = rl.plot.time_jacobian(jacobian(samples=3), samples="panels")
    assert [ax.get_title() for ax in axes] == ["sample 0", "sample 1", "sample 2"]


def test_jacobian_without_input_time_is_refused(gradient):
    with pytest.raises(InputError, match="'in_time' among them"):
        rl.plot.time_jacobian(gradient())


# -- lag_profile


def test_lag_profile_of_a_geometric_jacobian(jacobian, by_gid):
    (ax,) = rl.plot.lag_profile(jacobian(steps=20))
    lags, profile = curve(ax, "profile")
    np.testing.assert_array_equal(lags, np.arange(20))
    np.testing.assert_allclose(profile, 0.5 ** np.arange(20.0))
    assert by_gid(ax, "half-life")[0].get_xdata()[0] == pytest.approx(1.0)
    assert by_gid(ax, "horizon")[0].get_xdata()[0] == 6
    assert ax.get_legend().get_texts()[0].get_text() == "half-life 1, horizon 6 (1 % of the peak)"


def test_lag_profiles_are_compared_by_name(jacobian):
    (ax,) = rl.plot.lag_profile({"before": jacobian(decay=0.5), "after": jacobian(decay=0.9)})
    np.testing.assert_allclose(curve(ax, "profile after")[1], 0.9 ** np.arange(6.0))
    assert "before: half-life 1" in ax.get_legend().get_texts()[0].get_text()


def test_band_is_there_with_several_samples_only(jacobian, by_gid):
    assert len(by_gid(rl.plot.lag_profile(jacobian(samples=3))[0], "band")) == 1
    assert by_gid(rl.plot.lag_profile(jacobian(samples=1))[0], "band") == []
    assert by_gid(rl.plot.lag_profile(jacobian(samples=3), confidence=0)[0], "band") == []


def test_lag_counts_from_coordinates_where_times_are_selected(jacobian):
    data = jacobian(steps=8).assign_coords(out_time=range(8), in_time=range(8)).isel(out_time=[7])
    _, profile = curve(rl.plot.lag_profile(data)[0], "profile")
    np.testing.assert_allclose(profile, 0.5 ** np.arange(8.0))


# -- before_after


def test_before_after_and_difference_share_one_scale(gradient):
    before, after = gradient(samples=2), gradient(samples=2) * 3
    axes = rl.plot.before_after(before, after)
    assert [ax.get_title() for ax in axes[:3]] == ["before · sample 0", "after · sample 0", "after - before · sample 0"]
    for row in range(2):
        for ax, values in zip(axes[3 * row : 3 * row + 3], (before, after, after - before), strict=True):
            np.testing.assert_allclose(ax.images[0].get_array(), values.values[row].T)
    assert {ax.images[0].norm.vmax for ax in axes} == {after.values.max()}
    assert {ax.images[0].norm.vmin for ax in axes} == {-after.values.max()}


def test_before_after_of_layers_takes_the_quantity(layer):
    axes = rl.plot.before_after(layer(decay=0.5), layer(decay=0.9), quantity="output_grad", names=("init", "trained"))
    assert axes[1].get_title() == "trained · sample 0"
    np.testing.assert_allclose(axes[0].images[0].get_array(), layer(decay=0.5).output_grad.values[0].T)


def test_before_after_of_weights_separates_gates(weights, by_gid):
    axes = rl.plot.before_after(weights().kernel, weights().kernel * 2)
    assert len(axes) == 3
    assert len(by_gid(axes[0], "gate separator")) == 3


def test_before_after_of_both_directions(gradient):
    data = gradient(samples=1, directions=True)
    axes = rl.plot.before_after(data, data * 2, as_computed=True)
    np.testing.assert_allclose(axes[4].images[0].get_array(), 2 * data.sel(direction="backward").values[0, ::-1].T)


def test_results_of_different_sizes_are_not_compared(gradient):
    with pytest.raises(InputError, match="compares two results of the same dimensions and sizes"):
        rl.plot.before_after(gradient(), gradient(units=5))


def test_before_after_counts_missing_values_of_each(gradient):
    after = gradient()
    after[0, 0, 0] = np.nan
    assert "after: NaN: 1 of 60 (1.67 %)" in suptitle(rl.plot.before_after(gradient(), after))
