"""curves, heatmap, points: the drawn values and labels are those of the data."""

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import SymLogNorm
from tests.unit.plot.runs import suptitle

import rnnlens as rl
from rnnlens.errors import InputError
from rnnlens.plot._frame import near_square
from rnnlens.plot._images import extreme_of_blocks
from rnnlens.plot.curves import thin

pytestmark = pytest.mark.slow


def mosaic(data, **keywords):
    """Draw a heatmap with one panel per sample."""
    return rl.plot.heatmap(data, samples="panels", **keywords)


def line_vertices(ax):
    (collection,) = [c for c in ax.collections if c.get_gid() == "lines"]
    return np.stack([path.vertices for path in collection.get_paths()])


def line_values(ax):
    return line_vertices(ax)[:, :, 1]


# -- curves


@pytest.mark.parametrize("units", [1, 6, 7, 13])
def test_each_panel_is_the_unit_that_its_title_names(gradient, units):
    data = gradient(units=units)
    axes = rl.plot.curves(data)
    assert len(axes) == units
    for ax in axes:
        unit = int(ax.get_title().removeprefix("unit "))
        np.testing.assert_array_equal(line_values(ax), data.values[:, :, unit])
        np.testing.assert_array_equal(line_vertices(ax)[:, :, 0], np.tile(np.arange(5), (3, 1)))


def test_panels_take_names_from_coordinates_not_positions(gradient):
    data = gradient(units=6).isel(unit=[4, 1])
    assert [ax.get_title() for ax in rl.plot.curves(data)] == ["unit 4", "unit 1"]


def test_labels_come_from_the_attributes(gradient, text_of):
    text = text_of(rl.plot.curves(gradient())).replace("\n", " ")
    for expected in (
        "lstm · total gradient of the hidden state",
        "total gradient of the hidden state [loss]",
        "time step",
    ):
        assert expected in text


def test_legend_names_samples_with_the_colours_of_their_lines(gradient, by_gid):
    data = gradient(samples=3).isel(sample=[2, 0])
    axes = rl.plot.curves(data)
    (legend,) = axes[0].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["2", "0"]
    (line_collection,) = by_gid(axes[0], "lines")
    for handle, colour in zip(legend.get_lines(), line_collection.get_colors(), strict=True):
        assert mpl.colors.same_color(handle.get_color(), colour)


@pytest.mark.parametrize("name", ["curves", "heatmap", "histogram", "points"])
def test_the_note_of_a_figure_without_a_title_lies_within_it(name, render):
    values = np.full((3, 4) if name in ("points", "heatmap") else (2, 5, 1), np.nan)
    axes = getattr(rl.plot, name)(values)
    figure = render(axes)
    (note,) = [text for text in figure.artists if text.get_gid() == "note"]
    assert note.get_window_extent().y1 <= figure.bbox.y1
    assert note.get_window_extent().y0 >= max(ax.get_window_extent().y1 for ax in axes)


def test_lines_of_a_single_panel_are_named_at_their_ends(render):
    values = xr.DataArray(np.arange(12.0).reshape(3, 4), dims=("sample", "time"), coords={"sample": [7, 8, 9]})
    axes = rl.plot.curves(values)
    render(axes)
    assert axes[0].figure.legends == []
    ends = {text.get_text(): text for text in axes[0].texts}
    assert list(ends) == ["sample 7", "sample 8", "sample 9"]
    assert ends["sample 7"].xy[1] < ends["sample 8"].xy[1] < ends["sample 9"].xy[1]


def test_one_sample_needs_no_legend(gradient):
    assert rl.plot.curves(gradient(samples=1))[0].figure.legends == []


def test_many_samples_have_their_median_and_say_so(gradient, by_gid):
    data = gradient(samples=20) ** 3  # cubed: a few samples are much larger than the others
    axes = rl.plot.curves(data)
    (median,) = by_gid(axes[2], "median")
    np.testing.assert_allclose(median.get_ydata(), np.median(data.values[:, :, 2], axis=0))
    assert "20 samples, black: their median" in suptitle(axes)


def test_shared_and_free_value_axes(gradient):
    data = gradient().copy()
    data[:, :, 3] *= 10
    shared_axes = rl.plot.curves(data)
    assert len({ax.get_ylim() for ax in shared_axes}) == 1
    free_axes = rl.plot.curves(data, shared=False)
    assert free_axes[3].get_ylim()[1] > 5 * free_axes[0].get_ylim()[1]
    for ax in free_axes:
        low, high = ax.get_ylim()
        assert low < line_values(ax).min()
        assert line_values(ax).max() < high


def test_of_512_units_the_largest_are_drawn_and_the_figure_says_so(gradient):
    data = gradient(samples=2, units=512)
    data[..., 3] = -1e3
    axes = rl.plot.curves(data)
    assert [ax.get_title() for ax in axes] == ["unit 3", *(f"unit {i}" for i in range(477, 512))]
    assert "the 36 largest of 512 units" in suptitle(axes)


def test_pages_hold_each_unit_once(gradient):
    data = gradient(samples=1, units=11)
    titles = [ax.get_title() for page in range(3) for ax in rl.plot.curves(data, max_panels=4, page=page)]
    assert titles == [f"unit {i}" for i in range(11)]
    assert "units 8-10 of 11 (page 2 of 0-2)" in suptitle(rl.plot.curves(data, max_panels=4, page=2))


def test_a_page_that_is_not_there(gradient):
    with pytest.raises(InputError, match=r"page=3\n  expected: 0 to 2"):
        rl.plot.curves(gradient(units=11), max_panels=4, page=3)


def test_gates_are_rows_named_by_the_result(layer):
    data = layer(units=3).gates
    axes = rl.plot.curves(data)
    assert [ax.get_title() for ax in axes[:4]] == [
        "input · unit 0",
        "input · unit 1",
        "input · unit 2",
        "forget · unit 0",
    ]
    np.testing.assert_array_equal(line_values(axes[4]), data.sel(gate="forget", unit=1).values)


def test_panel_per_sample_has_a_line_per_unit(gradient):
    data = gradient(samples=3, units=4)
    axes = rl.plot.curves(data, panel="sample")
    assert [ax.get_title() for ax in axes] == ["sample 0", "sample 1", "sample 2"]
    np.testing.assert_array_equal(line_values(axes[2]), data.values[2].T)


def test_directions_are_side_by_side_in_chronological_time(gradient, by_gid, text_of):
    data = gradient(directions=True)
    axes = rl.plot.curves(data)
    assert len(axes) == 8
    np.testing.assert_array_equal(line_values(axes[1]), data.sel(direction="forward").values[:, :, 1])
    np.testing.assert_array_equal(line_values(axes[5]), data.sel(direction="backward").values[:, :, 1])
    assert len(by_gid(axes[0].get_figure(root=True), "direction separator")) == 1
    assert {"forward", "backward"} <= set(text_of(axes).split("\n"))


def test_as_computed_turns_only_the_backward_half(gradient, text_of):
    data = gradient(directions=True)
    axes = rl.plot.curves(data, as_computed=True)
    np.testing.assert_array_equal(line_values(axes[1]), data.sel(direction="forward").values[:, :, 1])
    np.testing.assert_array_equal(line_values(axes[5]), data.sel(direction="backward").values[:, ::-1, 1])
    assert "as computed (from the last)" in text_of(axes)
    assert "as computed" not in text_of(rl.plot.curves(data))


def test_missing_values_are_gaps_crosses_and_a_count(gradient, by_gid):
    data = gradient()
    data[1, 2, 3], data[0, 4, 3] = np.nan, np.inf
    axes = rl.plot.curves(data)
    (cross,) = by_gid(axes[3], "non-finite")
    np.testing.assert_array_equal(cross.get_xdata(), [2, 4])
    assert np.isnan(line_values(axes[3])[1, 2])
    assert by_gid(axes[0], "non-finite") == []
    assert "NaN: 1 of 60 (1.67 %), Inf: 1 of 60 (1.67 %)" in suptitle(axes)
    assert np.isfinite(axes[3].get_ylim()).all()


def test_all_missing_is_still_a_figure(gradient, render):
    axes = rl.plot.curves(gradient() * np.nan)
    render(axes)
    assert "NaN: 60 of 60 (100 %)" in suptitle(axes)


def test_long_lines_keep_their_spikes():
    values = np.zeros((2, 10_007))
    values[0, 4321], values[1, 10_006] = 5.0, -3.0
    thinned, positions = thin(values, np.arange(10_007), 1200)
    assert thinned.shape[1] == len(positions) <= 1300
    assert (thinned[0].max(), thinned[1].min()) == (5.0, -3.0)
    assert abs(positions[thinned[0].argmax()] - 4321) < 20
    assert (np.diff(positions) > 0).all()


def test_log_axis_is_symmetric_and_linear_near_zero(gradient):
    (ax,) = rl.plot.curves(gradient(units=1) - 1, log=True)
    assert ax.get_yscale() == "symlog"
    assert ax.yaxis.get_transform().linthresh == pytest.approx(1e-4 * 1.04, rel=1e-3)


def test_what_is_never_negative_has_a_true_log_axis_and_marks_below(gradient, by_gid):
    data = gradient(units=1, steps=40, samples=2)
    data[:] = 0.3 ** np.arange(40.0)[None, :, None]
    data[1, 5] = 0
    (ax,) = rl.plot.curves(data, log=True)
    assert ax.get_yscale() == "log"
    floor = ax.get_ylim()[0]
    marked_steps = [line.get_xdata().tolist() for line in by_gid(ax, "below") if hasattr(line, "get_xdata")]
    steps_below = np.flatnonzero(0.3 ** np.arange(40.0) < floor).tolist()
    assert marked_steps == [steps_below, [5, *steps_below]]
    assert [t.get_text() for t in by_gid(ax, "below") if hasattr(t, "get_text")] == [f"below {floor:.0e}"]
    points = rl.plot.points(data.isel(time=0), log=True)
    assert points[0].get_yscale() == "log"


def test_one_time_step_is_a_marker(gradient, by_gid, render):
    axes = rl.plot.curves(gradient(steps=1))
    render(axes)
    points = by_gid(axes[2], "point")
    assert [(p.get_marker(), p.get_xdata()[0], p.get_ydata()[0]) for p in points] == [
        ("o", 0, gradient(steps=1).values[s, 0, 2]) for s in range(3)
    ]
    assert by_gid(rl.plot.curves(gradient(steps=2))[2], "point") == []


def test_keywords_reach_the_lines(gradient, by_gid):
    axes = rl.plot.curves(gradient(), lw=3, color="red")
    (line_collection,) = by_gid(axes[0], "lines")
    assert line_collection.get_linewidth()[0] == 3
    assert mpl.colors.same_color(line_collection.get_color()[0], "red")


def test_values_without_time_are_refused_with_the_right_figure(gradient):
    with pytest.raises(InputError, match=r"draw values without time with plot\.points"):
        rl.plot.curves(gradient().isel(time=-1))


def test_rank_decides_the_dimensions_of_plain_arrays(gradient):
    values = gradient().values
    np.testing.assert_array_equal(line_values(rl.plot.curves(values)[2]), values[:, :, 2])
    np.testing.assert_array_equal(line_values(rl.plot.curves(values[0])[2]), values[:1, :, 2])
    np.testing.assert_array_equal(line_values(rl.plot.curves(values[0, :, 0])[0]), values[:1, :, 0])
    transposed_axes = rl.plot.curves(values.T, dims=("unit", "time", "sample"))
    np.testing.assert_array_equal(line_values(transposed_axes[2]), values[:, :, 2])


def test_dims_that_do_not_fit(gradient):
    with pytest.raises(
        InputError, match=r"dims= does not fit the array\.\n  got:      \('time',\) for shape \(3, 5, 4\)"
    ):
        rl.plot.curves(gradient().values, dims=("time",))


@pytest.mark.parametrize("count", range(1, 80))
def test_grids_are_never_strips(count):
    rows, columns = near_square(count)
    assert (rows - 1) * columns < count <= rows * columns
    assert count < 4 or max(rows, columns) <= 3.5 * min(rows, columns)


# -- heatmap


@pytest.mark.parametrize("samples", [1, 3, 5])
def test_each_image_is_unit_by_time_of_its_sample(gradient, samples):
    data = gradient(samples=samples)
    axes = mosaic(data)
    assert [ax.get_title() for ax in axes] == [f"sample {i}" for i in range(samples)]
    for i, ax in enumerate(axes):
        (image,) = ax.images
        np.testing.assert_array_equal(image.get_array(), data.values[i].T)
        assert tuple(image.get_extent()) == (-0.5, 4.5, 3.5, -0.5)


def test_zero_is_white_and_the_scale_symmetric(gradient):
    axes = mosaic(gradient() - 0.5)
    (image,) = axes[0].images
    assert (image.norm.vmin, image.norm.vmax) == (-image.norm.vmax, pytest.approx(1.5403))
    assert image.to_rgba(np.zeros((1, 1)))[0, 0].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("log", [False, True])
def test_what_is_never_negative_has_colours_of_one_sign(gradient, log):
    (image,) = rl.plot.heatmap(gradient(samples=1), log=log)[0].images
    assert (image.norm.vmin, image.norm.vmax) == (0, gradient(samples=1).values.max())
    assert image.to_rgba(np.zeros((1, 1)))[0, 0].tolist() == [1, 1, 1, 1]
    assert image.cmap.name == "rnnlens.positive"


@pytest.mark.parametrize("name", ["heatmap", "curves", "points", "histogram"])
def test_an_array_without_labels_has_no_title(name):
    values = np.random.default_rng(0).normal(size=(2, 5) if name == "points" else (2, 6, 5))
    axes = mosaic(values) if name == "heatmap" else getattr(rl.plot, name)(values)
    assert axes[0].figure.get_suptitle() == ""
    if name == "heatmap":  # the reduction over samples must be named
        drawn = rl.plot.heatmap(values)
        assert drawn[0].figure.get_suptitle().strip() == "values"
        assert suptitle(drawn) == "values RMS over 2 samples, each by its own peak"


def test_steps_that_are_padding_in_every_sample_are_grey_in_the_picture_of_all(gradient):
    mask = np.arange(6) < np.array([4, 3, 2])[:, None]
    data = gradient(samples=3, steps=6).assign_coords(mask=(("sample", "time"), mask)) + 0.1
    data = data.assign_coords(mask=(("sample", "time"), mask))
    for axes in (rl.plot.heatmap(data), rl.plot.before_after(data, data * 2, samples="rms")):
        grey_cells = np.ma.getmaskarray(axes[0].images[0].get_array())
        np.testing.assert_array_equal(grey_cells, np.broadcast_to(np.arange(6) >= 4, grey_cells.shape))
        assert [line for line in axes[0].lines if line.get_gid() == "non-finite"] == []


def test_zero_is_white_on_a_log_scale_too(gradient):
    (image,) = rl.plot.heatmap(gradient(samples=1) - 0.5, log=True)[0].images
    assert isinstance(image.norm, SymLogNorm)
    np.testing.assert_allclose(image.to_rgba(np.zeros((1, 1)))[0, 0], 1)


def test_shared_scale_holds_for_all_panels_and_is_that_of_the_whole_array(gradient):
    data = gradient(samples=40)
    axes = mosaic(data, max_panels=2)
    assert {ax.images[0].norm.vmax for ax in axes} == {data.values.max()}
    assert len({ax.images[0].norm.vmax for ax in mosaic(data, shared=False, max_panels=2)}) == 2


def test_one_colour_bar_when_shared_else_one_per_panel(gradient):
    def count_bars(axes):
        return len(axes[0].figure.axes) - len(axes)

    assert count_bars(mosaic(gradient())) == 1
    assert count_bars(mosaic(gradient(), shared=False)) == 3
    assert count_bars(mosaic(gradient(), colorbar=False)) == 0


def test_limit_fixes_the_scale(gradient):
    scales = [mosaic(data, limit=0.01)[0].images[0].norm for data in (gradient() - 0.5, gradient())]
    assert [(norm.vmin, norm.vmax) for norm in scales] == [(-0.01, 0.01), (0, 0.01)]


def test_one_nan_neither_spoils_the_scale_nor_hides(gradient, by_gid):
    data = gradient()
    data[1, 2, 3] = np.nan
    data[1, 0, 0] = -np.inf
    axes = mosaic(data)
    (image,) = axes[1].images
    assert image.norm.vmax == np.nanmax(data.values)
    assert np.argwhere(np.ma.getmaskarray(image.get_array())).tolist() == [[0, 0], [3, 2]]
    (cross,) = by_gid(axes[1], "non-finite")
    assert sorted(zip(cross.get_xdata(), cross.get_ydata(), strict=True)) == [(0, 0), (2, 3)]
    assert mpl.colors.same_color(image.cmap.get_bad(), "#7a7a7a")
    assert "NaN: 1 of 60 (1.67 %), Inf: 1 of 60 (1.67 %)" in suptitle(axes)


def test_both_halves_are_equally_wide(gradient, render):
    axes = rl.plot.heatmap(gradient(samples=1, directions=True))
    render(axes)
    forward, backward = (ax.get_window_extent().width for ax in axes)
    assert forward == pytest.approx(backward, abs=1)


def test_samples_have_their_losses_and_networks_their_rms(gradient):
    data = gradient(samples=3)
    axes = rl.plot.heatmap(data, losses=[3.0, 1.0, 2.0])
    assert [ax.get_title() for ax in axes] == ["sample 2, loss 2 (the median)", "sample 1, loss 1", "sample 0, loss 3"]
    (ax,) = rl.plot.heatmap(data, samples="rms")
    shapes = data.values / data.values.max(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(ax.images[0].get_array(), np.sqrt((shapes**2).mean(axis=0)).T)


def test_gates_are_stacked_with_separators_and_names(layer, by_gid):
    data = layer(samples=1, units=3).gates
    (ax,) = rl.plot.heatmap(data)
    np.testing.assert_array_equal(ax.images[0].get_array(), data.values[0].transpose(1, 2, 0).reshape(12, 6))
    assert [line.get_ydata()[0] for line in by_gid(ax, "gate separator")] == [2.5, 5.5, 8.5]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["input", "forget", "candidate", "output"]


def test_heatmap_directions_and_as_computed(gradient):
    data = gradient(samples=1, directions=True)
    forward, backward = rl.plot.heatmap(data)
    np.testing.assert_array_equal(forward.images[0].get_array(), data.sel(direction="forward").values[0].T)
    np.testing.assert_array_equal(backward.images[0].get_array(), data.sel(direction="backward").values[0].T)
    reversed_ax = rl.plot.heatmap(data, as_computed=True)[1]
    np.testing.assert_array_equal(reversed_ax.images[0].get_array(), data.sel(direction="backward").values[0, ::-1].T)


def test_axes_can_be_chosen(gradient):
    data = gradient()
    axes = rl.plot.heatmap(data, x="time", y="sample")
    assert [ax.get_title() for ax in axes] == [f"unit {i}" for i in range(4)]
    np.testing.assert_array_equal(axes[3].images[0].get_array(), data.values[:, :, 3])


def test_unknown_axis_is_refused_with_the_known_ones(gradient):
    with pytest.raises(InputError, match=r"did you mean 'unit'\?"):
        rl.plot.heatmap(gradient(), y="units")


@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (12, 12), (1, 9)])
def test_merged_cells_keep_the_largest_magnitude_with_its_sign(rows, columns):
    matrix = np.random.default_rng(0).normal(size=(rows, columns))
    merged = extreme_of_blocks(matrix, (2, 3))
    for r in range(merged.shape[0]):
        for c in range(merged.shape[1]):
            block = matrix[2 * r : 2 * r + 2, 3 * c : 3 * c + 3].ravel()
            assert merged[r, c] == block[np.abs(block).argmax()]


def test_merged_cells_do_not_swallow_nan():
    matrix = np.zeros((4, 4))
    matrix[3, 0] = np.nan
    assert np.isnan(extreme_of_blocks(matrix, (2, 2))[1, 0])


def test_large_images_are_merged_and_say_so(gradient):
    data = gradient(samples=1, steps=1500, units=500)
    (ax,) = rl.plot.heatmap(data)
    assert ax.images[0].get_array().shape == (250, 500)
    assert tuple(ax.images[0].get_extent()) == (-0.5, 1499.5, 499.5, -0.5)
    assert "one cell shows 2 units x 3 steps, by their value of largest magnitude" in suptitle([ax])


def test_merged_cells_stay_in_their_place_where_sizes_do_not_divide(gradient):
    (ax,) = rl.plot.heatmap(gradient(samples=1, steps=1501, units=501))
    assert ax.images[0].get_array().shape == (251, 501)
    assert tuple(ax.images[0].get_extent()) == pytest.approx((-0.5, 1502.5, 501.5, -0.5))
    assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, 1500.5), (500.5, -0.5))


def test_64_samples_are_thinned_and_say_so(gradient):
    axes = mosaic(gradient(samples=64))
    assert len(axes) == 16
    assert "16 of 64 samples, evenly spaced" in suptitle(axes)


def test_imshow_keywords_override(gradient):
    (image,) = rl.plot.heatmap(gradient(samples=1), cmap="gray", vmin=0, vmax=2)[0].images
    assert (image.cmap.name, image.norm.vmin, image.norm.vmax) == ("gray", 0, 2)


# -- points


def test_points_lie_at_their_unit_and_value(gradient, by_gid):
    data = gradient().isel(time=-1)
    (ax,) = rl.plot.points(data)
    (points,) = by_gid(ax, "points")
    expected = [(unit, data.values[sample, unit]) for sample in range(3) for unit in range(4)]
    np.testing.assert_allclose(points.get_offsets(), expected)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["0", "1", "2"]


def test_512_units_and_64_samples_fit_one_panel(gradient, by_gid, render):
    axes = rl.plot.points(gradient(samples=64, units=512, steps=1).isel(time=0))
    (points,) = by_gid(axes[0], "points")
    assert len(points.get_offsets()) == 64 * 512
    assert "64 samples" in suptitle(axes)
    assert render(axes).get_size_inches()[0] <= 12


def test_points_of_both_directions_and_of_both_states(gradient, layer, by_gid):
    data = gradient(directions=True).isel(time=0)
    forward, backward = rl.plot.points(data)
    np.testing.assert_allclose(by_gid(backward, "points")[0].get_offsets()[:, 1], data.values[:, 1].ravel())
    assert forward.get_ylim() == backward.get_ylim()
    states = gradient().isel(time=[0, 1]).rename(time="state").assign_coords(state=["hidden", "cell"])
    assert [ax.get_title() for ax in rl.plot.points(states)] == ["hidden", "cell"]


def test_points_mark_missing_values(gradient, by_gid):
    data = gradient().isel(time=-1)
    data[1, 2] = np.nan
    (ax,) = rl.plot.points(data)
    assert by_gid(ax, "non-finite")[0].get_xdata().tolist() == [2]
    assert "NaN: 1 of 12 (8.33 %)" in suptitle([ax])


def test_six_units_are_all_labelled_and_the_outlier_named(gradient, by_gid):
    data = gradient(units=6).isel(time=-1)
    assert by_gid(rl.plot.points(data)[0], "outlier") == []
    data[1, 4] = 40.0
    (ax,) = rl.plot.points(data)
    assert ax.get_xticks().tolist() == [0, 1, 2, 3, 4, 5]
    (outlier,) = by_gid(ax, "outlier")
    assert (outlier.get_text(), outlier.xy) == ("sample 1", (4.0, 40.0))


def test_points_over_time_are_refused(gradient):
    with pytest.raises(InputError, match=r"select a step, such as \.isel\(time=-1\), or use plot\.curves"):
        rl.plot.points(gradient())


def test_points_per_sample(gradient, by_gid):
    data = gradient().isel(time=0)
    axes = rl.plot.points(data, panel="sample")
    assert [ax.get_title() for ax in axes] == ["sample 0", "sample 1", "sample 2"]
    np.testing.assert_allclose(by_gid(axes[1], "points")[0].get_offsets()[:, 1], data.values[1])


def array(*dims):
    return xr.DataArray(np.random.default_rng(0).normal(size=tuple(range(2, 2 + len(dims)))), dims=dims)


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda: rl.plot.curves(array("time"), panel="time"), "plot.curves has a place of its own for 'time'."),
        (lambda: rl.plot.curves(array("time", "unit"), panel="time"), "plot.curves has a place of its own for 'time'."),
        (lambda: rl.plot.curves(array("direction", "time"), panel="direction"), "a place of its own for 'direction'"),
        (lambda: rl.plot.points(array("direction", "unit"), panel="direction"), "a place of its own for 'direction'"),
        (
            lambda: rl.plot.heatmap(array("direction", "time", "unit"), x="direction"),
            "a place of its own for 'direction'",
        ),
        (lambda: rl.plot.points(array("time")), "plot.points draws values without time."),
        (lambda: rl.plot.points(array("sample", "time")), "plot.points draws values without time."),
        (lambda: rl.plot.curves(array("sample", "out_time", "in_time")), "plot.time_jacobian or plot.lag_profile"),
        (lambda: rl.plot.gates(array("sample", "time", "gate")), "'unit' among them"),
        (lambda: rl.plot.gradient_flow(array("sample", "time").to_dataset(name="hidden_grad")), "'unit' among them"),
        (lambda: rl.plot.before_after(array("time"), array("time")), "plot.before_after needs two dimensions."),
    ],
)
def test_a_dimension_in_the_wrong_place_is_named(draw, expected):
    with pytest.raises(InputError) as caught:
        draw()
    assert expected in str(caught.value)
