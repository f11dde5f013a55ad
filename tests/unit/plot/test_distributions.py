"""histogram, weights_histogram, weights_heatmap: counts, shares and positions are exact."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.patches import StepPatch
from tests.unit.plot.runs import suptitle

import rnnlens as rl
from rnnlens.errors import InputError
from rnnlens.plot.histograms import count_in_bins

GATES = ["input", "forget", "candidate", "output"]


def histograms_of(ax):
    return [patch.get_data() for patch in ax.patches if isinstance(patch, StepPatch)]


# -- histogram


def test_every_value_is_counted_once(gradient):
    data = gradient()
    (ax,) = rl.plot.histogram(data, bins=7)
    (histogram,) = histograms_of(ax)
    expected, edges = np.histogram(data.values, bins=7)
    np.testing.assert_array_equal(histogram.values, expected)
    np.testing.assert_allclose(histogram.edges, edges)
    assert histogram.values.sum() == data.size


def test_counting_in_pieces_is_counting():
    values = np.random.default_rng(0).normal(size=(3, 1_700_000)).astype(np.float32)
    edges = np.linspace(float(values.min()), float(values.max()), 61)
    np.testing.assert_array_equal(
        count_in_bins(values, edges), np.histogram(values, bins=60, range=(edges[0], edges[-1]))[0]
    )


def test_grid_has_the_unit_that_each_title_names(gradient):
    data = gradient(units=5)
    axes = rl.plot.histogram(data, panel="unit", shared=False, bins=4)
    for ax in axes:
        unit = int(ax.get_title().removeprefix("unit "))
        np.testing.assert_array_equal(histograms_of(ax)[0].values, np.histogram(data.values[:, :, unit], bins=4)[0])


def test_shared_grid_has_common_bins_and_counts(gradient):
    axes = rl.plot.histogram(gradient(), panel="unit")
    assert len({tuple(histograms_of(ax)[0].edges) for ax in axes}) == 1
    assert len({ax.get_ylim() for ax in axes}) == 1


def test_rows_and_columns(gradient):
    axes = rl.plot.histogram(gradient(samples=2, units=3), panel=("sample", "unit"))
    assert [ax.get_title() for ax in axes] == [f"sample {s} · unit {u}" for s in range(2) for u in range(3)]
    spec = axes[3].get_subplotspec()
    assert (spec.rowspan.start, spec.colspan.start) == (1, 0)


def test_overlaid_positions_have_a_legend_in_their_colours(layer):
    data = layer().gates
    axes = rl.plot.histogram(data, overlay="gate")
    patches = [patch for patch in axes[0].patches if isinstance(patch, StepPatch)]
    assert [patch.get_gid() for patch in patches] == [f"histogram {gate}" for gate in GATES]
    (legend,) = axes[0].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == GATES
    for patch, gate in zip(patches, GATES, strict=True):
        assert patch.get_data().values.sum() == data.sel(gate=gate).size
    for patch, handle in zip(patches, legend.legend_handles, strict=True):
        assert mpl.colors.same_color(patch.get_edgecolor(), handle.get_color())


def test_more_than_two_are_outlines_two_are_filled(layer):
    data = layer().gates
    for count in (2, 3):
        axes = rl.plot.histogram(data.isel(gate=slice(count)), overlay="gate")
        assert {patch.get_fill() for patch in axes[0].patches} == {count == 2}


def test_a_mapping_is_overlaid_by_name(gradient):
    axes = rl.plot.histogram({"epoch 0": gradient(), "epoch 9": gradient(samples=1)})
    assert [histogram.values.sum() for histogram in histograms_of(axes[0])] == [60, 20]


def test_log_counts_show_single_values_beside_a_spike():
    values = np.concatenate([np.zeros(100_000), [1.0]])
    (ax,) = rl.plot.histogram(values, log=True)
    assert ax.get_yscale() == "log"
    assert ax.get_ylim()[0] < 1 < 100_000 < ax.get_ylim()[1]


def test_clipped_peak_is_cut_and_its_count_written(by_gid):
    values = np.concatenate([np.zeros(5000), np.linspace(-1, 1, 41)])
    (ax,) = rl.plot.histogram(values, bins=10, clip_peaks=1)
    counts = np.sort(histograms_of(ax)[0].values)
    assert counts[-2] < ax.get_ylim()[1] < counts[-1]
    (note,) = by_gid(ax, "clipped peak")
    assert note.get_text() == f"{counts[-1]:,} ↑"
    assert "tallest 1 per panel cut off" in suptitle([ax])


def test_missing_values_are_left_out_and_counted_exactly(gradient):
    data = gradient()
    data[0, 0, 2] = np.nan
    data[1, 1, 2] = np.inf
    axes = rl.plot.histogram(data, panel="unit")
    assert histograms_of(axes[2])[0].values.sum() == 13
    assert "NaN: 1 of 15 (6.67 %), Inf: 1 of 15 (6.67 %)" in axes[2].get_title()
    assert axes[0].get_title() == "unit 0"


@pytest.mark.parametrize("values", [np.full(5, np.nan), np.array([1.0])])
def test_single_and_missing_data_have_bins(values, render):
    axes = rl.plot.histogram(values)
    render(axes)
    assert histograms_of(axes[0])[0].values.sum() == np.isfinite(values).sum()


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_constant_is_counted_not_binned(value, render, by_gid):
    axes = rl.plot.histogram(np.full(64, value))
    render(axes)
    assert histograms_of(axes[0]) == []
    line, label = sorted(by_gid(axes[0], "constant"), key=lambda artist: hasattr(artist, "get_text"))
    assert line.get_xdata()[0] == value
    assert label.get_text() == f"64 x {value:g}"


def test_zero_biases_are_counted(weights, text_of):
    data = weights(units=64)
    data["bias"].values[:] = 0.0
    data["bias"].values[1] = 1.0
    text = text_of(rl.plot.weights_histogram(data)).split("\n")
    assert (text.count("64 x 0"), text.count("64 x 1")) == (3, 1)


def test_impossible_bins_are_refused(gradient):
    with pytest.raises(InputError, match="bins >= 1"):
        rl.plot.histogram(gradient(), bins=0)
    with pytest.raises(InputError, match="A mapping is overlaid already"):
        rl.plot.histogram({"a": gradient()}, overlay="unit")


# -- weights_heatmap


@pytest.mark.parametrize("units", [1, 4, 7])
def test_each_weight_is_drawn_at_its_row_gate_and_unit(weights, units):
    data = weights(units=units)
    axes = rl.plot.weights_heatmap(data)
    assert [ax.get_title() for ax in axes] == ["kernel", "recurrent kernel", "bias"]
    for ax in axes:
        values = data[ax.get_title().replace(" ", "_")]
        picture = ax.images[0].get_array().reshape(-1, 4, units)
        for number, gate in enumerate(GATES):
            np.testing.assert_array_equal(picture[:, number], np.atleast_2d(values.sel(gate=gate).values))


def test_gates_are_separated_and_named_in_the_order_of_the_data(weights, by_gid):
    data = weights().isel(gate=[2, 0, 1, 3])
    for ax in rl.plot.weights_heatmap(data):
        assert [line.get_xdata()[0] for line in by_gid(ax, "gate separator")] == [3.5, 7.5, 11.5]
        assert [t.get_text() for t in ax.get_xticklabels()] == ["candidate", "input", "forget", "output"]
        np.testing.assert_allclose(ax.get_xticks(), [1.5, 5.5, 9.5, 13.5])


def test_kernels_share_one_symmetric_scale_and_the_bias_has_its_own(weights):
    data = weights()
    axes = rl.plot.weights_heatmap(data)
    largest = max(abs(data[name].values).max() for name in ("kernel", "recurrent_kernel"))
    assert {(ax.images[0].norm.vmin, ax.images[0].norm.vmax) for ax in axes[:2]} == {(-largest, largest)}
    assert axes[2].images[0].norm.vmax == abs(data.bias.values).max()
    assert len(axes[0].figure.axes) == 5  # a colour bar for the kernels, one for the bias
    free_axes = rl.plot.weights_heatmap(data, shared=False)
    assert [ax.images[0].norm.vmax for ax in free_axes] == [abs(data[name].values).max() for name in data]


def test_a_large_bias_does_not_wash_out_the_kernels(weights):
    data = weights()
    data["bias"].values[1] = 50.0
    axes = rl.plot.weights_heatmap(data)
    assert [ax.images[0].norm.vmax for ax in axes] == [0.5, 0.5, 50.0]


def test_outliers_do_not_wash_out_the_rest_and_the_figure_says_so(weights):
    data = weights(features=20, units=30)
    data["kernel"].values[1, 0, 0] = 50.0
    axes = rl.plot.weights_heatmap(data)
    assert axes[0].images[0].norm.vmax < 4
    assert "the 99.5 % quantile of magnitudes; largest 50" in suptitle(axes)


def test_kernels_are_drawn_in_one_order_whatever_that_of_the_data(weights):
    data = weights()[["bias", "recurrent_kernel", "kernel"]]
    assert [ax.get_title() for ax in rl.plot.weights_heatmap(data)] == ["kernel", "recurrent kernel", "bias"]


def test_missing_weights_are_marked_counted_and_not_zeroed(weights, by_gid):
    data = weights()
    data["kernel"].values[1, 2, 3] = np.nan
    kernel, recurrent, _ = rl.plot.weights_heatmap(data)
    assert kernel.get_title() == "kernel · NaN: 1 of 48 (2.08 %)"
    assert recurrent.get_title() == "recurrent kernel"
    assert np.argwhere(np.ma.getmaskarray(kernel.images[0].get_array())).tolist() == [[1, 11]]
    (cross,) = by_gid(kernel, "non-finite")
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (11, 1)
    largest = max(np.nanmax(np.abs(data[name].values)) for name in data)
    assert kernel.images[0].norm.vmax == largest


def test_directions_of_weights_are_side_by_side(weights, by_gid):
    data = weights(directions=True)
    axes = rl.plot.weights_heatmap(data)
    assert [ax.get_title() for ax in axes] == ["kernel", "recurrent kernel", "bias"] * 2
    np.testing.assert_array_equal(
        axes[3].images[0].get_array(), data["kernel"].sel(direction="backward").values.reshape(3, 16)
    )
    assert len(by_gid(axes[0].get_figure(root=True), "direction separator")) == 1


def test_gradients_by_time_are_summed_over_it(weights):
    data = weights()
    by_time = np.random.default_rng(0).normal(size=(5, 4, 4, 4))
    data["recurrent_kernel_grad"] = (("time", "unit_in", "gate", "unit"), by_time)
    (ax,) = rl.plot.weights_heatmap(data, grad=True)
    np.testing.assert_allclose(ax.images[0].get_array(), by_time.sum(axis=0).reshape(4, 16))


def test_magnitudes_are_white_at_zero(weights):
    for ax in rl.plot.weights_heatmap(weights(), absolute=True):
        (image,) = ax.images
        assert image.get_array().min() >= 0
        assert image.norm.vmin == 0
        np.testing.assert_allclose(image.to_rgba(np.zeros((1, 1)))[0, 0], 1)


def test_weights_without_gates_are_drawn_by_their_last_axis():
    kernel = np.arange(24.0).reshape(2, 3, 4)
    axes = rl.plot.weights_heatmap({"kernel": kernel, "bias": np.arange(4.0)})
    np.testing.assert_array_equal(axes[0].images[0].get_array(), kernel.reshape(6, 4))


def test_plain_arrays_of_a_recurrent_layer_have_gates(weights):
    data = weights(directions=True)
    arrays = {name: data[name].values for name in data}
    named, unnamed = rl.plot.weights_heatmap(data), rl.plot.weights_heatmap(arrays)
    for named_ax, unnamed_ax in zip(named, unnamed, strict=True):
        np.testing.assert_array_equal(named_ax.images[0].get_array(), unnamed_ax.images[0].get_array())


def test_512_units_are_merged_within_gates(weights):
    data = weights(features=2, units=512)
    axes = rl.plot.weights_heatmap(data)
    assert axes[0].images[0].get_array().shape == (2, 4 * 171 - 1)
    assert "one cell shows up to 2 rows x 3 units" in suptitle(axes)  # of both kernels: 1 x 3, and 2 x 3


@pytest.mark.parametrize("figure", ["weights_heatmap", "weights_histogram"])
def test_what_holds_no_weights_is_refused(weights, figure):
    with pytest.raises(InputError) as caught:
        getattr(rl.plot, figure)(weights(), grad=True)
    assert str(caught.value) == (
        f"plot.{figure} found no gradients of weights here.\n"
        "  got:      variables kernel, recurrent_kernel, bias\n"
        "  expected: kernel, recurrent_kernel, bias with _grad\n"
        "  try:      pass data to rl.weights(model, x, y) for gradients"
    )
    with pytest.raises(InputError, match="draws the weights of one layer"):
        getattr(rl.plot, figure)(np.zeros((3, 4)))


def test_counts_and_norms_of_weights_are_no_weights(weights):
    data = weights()
    data["kernel_nan_count"] = (("gate",), np.zeros(4))
    assert len(rl.plot.weights_heatmap(data)) == 3


# -- weights_histogram


def test_each_panel_is_the_gate_that_its_title_names(weights):
    data = weights()
    axes = rl.plot.weights_histogram(data, shared=False, bins=5)
    assert len(axes) == 12
    for ax in axes:
        kernel, gate = ax.get_title().split(" · ")
        np.testing.assert_array_equal(
            histograms_of(ax)[0].values, np.histogram(data[kernel.replace(" ", "_")].sel(gate=gate).values, bins=5)[0]
        )


def test_share_of_nan_is_exact_per_gate_and_direction(weights):
    data = weights(features=25, units=100, directions=True)
    data["kernel"].values[1, 7, 3, 40] = np.nan  # backward, output gate: 1 of 2,500
    axes = rl.plot.weights_histogram(data)
    titles = [ax.get_title() for ax in axes]
    assert titles[12 + 3] == "kernel · output\nNaN: 1 of 2,500 (0.04 %)"
    assert [t for t in titles if "NaN" in t] == [titles[12 + 3]]
    assert histograms_of(axes[12 + 3])[0].values.sum() == 2499
    assert "NaN: 1 of 100,800 (0.000992 %)" in suptitle(axes)


def test_gates_of_a_kernel_share_bins_kernels_do_not(weights):
    axes = rl.plot.weights_histogram(weights())
    rows = [{tuple(histograms_of(ax)[0].edges) for ax in axes[4 * i : 4 * i + 4]} for i in range(3)]
    assert [len(row) for row in rows] == [1, 1, 1]
    assert len(set.union(*rows)) == 3
    shared_axes = rl.plot.weights_histogram(weights(), shared=True)
    assert len({tuple(histograms_of(ax)[0].edges) for ax in shared_axes}) == 1
    assert len({ax.get_ylim() for ax in shared_axes}) == 1


def test_colours_that_end_before_the_values_have_pointed_bars(weights, gradient):
    def colorbar_extend(axes):
        bar = next(ax for ax in axes[0].figure.axes if ax not in list(axes))
        return bar._colorbar.extend

    data = weights(features=20, units=30)
    data["kernel"].values[1, 0, 0] = 50.0
    assert colorbar_extend(rl.plot.weights_heatmap(data)) == "max"
    assert colorbar_extend(rl.plot.weights_heatmap(weights())) == "neither"
    assert colorbar_extend(rl.plot.heatmap(gradient() - 1, limit=0.5, samples="panels")) == "both"
    assert colorbar_extend(rl.plot.heatmap(gradient() - 1, limit=1.01, samples="panels")) == "max"


def test_missing_weights_are_red_in_title_and_panel(weights):
    data = weights()
    data["kernel"].values[1, 2, 3] = np.nan
    for draw in (rl.plot.weights_heatmap, rl.plot.weights_histogram):
        axes = draw(data)
        red_titles = [ax.title.get_color() == "#c00000" for ax in axes]
        assert red_titles == ["NaN" in ax.get_title() for ax in axes]
        assert sum(red_titles) == 1
        assert axes[0].figure._suptitle.get_color() == ("#c00000" if draw is rl.plot.weights_histogram else "black")
