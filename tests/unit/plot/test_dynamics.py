"""Drawn values of gates, gradient_flow, weight_norms, time_jacobian, lag_profile, before_after."""

import math

import numpy as np
import pytest
import xarray as xr
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tests.unit.plot.runs import suptitle

import rnnlens as rl
from rnnlens.errors import InputError

pytestmark = pytest.mark.slow


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
        assert activity.get_ylabel() == (gate if gate == "candidate" else f"{gate} gate")
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
    reversed_axes = rl.plot.gates(data, as_computed=True)
    np.testing.assert_allclose(reversed_axes[13].images[0].get_array(), backward[:, ::-1])
    np.testing.assert_allclose(reversed_axes[1].images[0].get_array(), axes[1].images[0].get_array())


def test_gates_need_a_gate_dimension(gradient):
    with pytest.raises(InputError, match=r"expected: 'gate' among them"):
        rl.plot.gates(gradient())


def test_a_layer_without_gates_is_refused(layer):
    with pytest.raises(InputError, match=r"needs 'gates', which this layer does not have"):
        rl.plot.gates(layer().drop_vars("gates"))


def test_words_of_the_saturation_map(layer):
    axes = rl.plot.gates(layer())
    assert [ax.get_ylabel() for ax in axes[2::3]] == [
        "share near 0 (< 0.1)",
        "share near 0 (< 0.1)",
        "share near -1 (< -0.9)",
        "share near 0 (< 0.1)",
    ]
    assert axes[-1].get_xlabel() == "share near 1 (> 0.9)"
    assert axes[8].get_xlabel() == "share near +1 (> 0.9)"


# -- gradient_flow


def end_labels(ax):
    """Return the text at the end of each line."""
    labels = [text.get_text().split("\n") for text in ax.texts if text.get_gid() == "end"]
    return [": ".join([lines[0], ", ".join(lines[1:])]) if lines[1:] else lines[0] for lines in labels]


def legend_labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("decay", [0.5, 0.8])
def test_flow_draws_the_shape(layer, decay):
    (ax,) = rl.plot.gradient_flow(layer(samples=3, steps=30, units=4, decay=decay))
    assert ax.get_yscale() == "log"
    steps, total = curve(ax, "hidden_grad")
    np.testing.assert_array_equal(steps, np.arange(30))
    np.testing.assert_allclose(total, decay ** np.arange(30)[::-1])


def test_the_reach_holds_95_percent_of_the_squares(layer):
    squares = 0.25 ** np.arange(30)
    reach = int(np.argmax(np.cumsum(squares) >= 0.95 * squares.sum())) + 1
    (ax,) = rl.plot.gradient_flow(layer(steps=30, decay=0.5))
    assert legend_labels(ax)[0] == f"total, $dL/dh_t$: {reach} steps"
    assert ax.get_title().replace("\n", " ") == f"lstm: {reach} steps back carry 95 % of the gradient"


def test_neither_a_spike_nor_a_hard_sample_decides(layer):
    data = layer(samples=5, steps=30, decay=0.9)
    (reference_ax,) = rl.plot.gradient_flow(data)
    data["hidden_grad"].values[0] = data["hidden_grad"].values[0, ::-1] * 1e4
    (ax,) = rl.plot.gradient_flow(data)
    assert legend_labels(ax) == legend_labels(reference_ax)
    np.testing.assert_allclose(curve(ax, "hidden_grad")[1], 0.9 ** np.arange(30)[::-1])


def test_direct_gradient_of_one_step_is_a_point_and_zeros_are_counted(layer):
    (ax,) = rl.plot.gradient_flow(layer(steps=30))
    _, direct = curve(ax, "output_grad")
    assert np.isnan(direct[:-1]).all()
    assert direct[-1] == 1
    assert legend_labels(ax)[1].startswith("direct, ")
    assert legend_labels(ax)[1].endswith(": 0 at 29 of 30 steps")


def test_points_are_drawn_only_where_a_line_would_not_show(layer):
    data = layer(steps=30)
    (lone_point,) = [line for line in rl.plot.gradient_flow(data)[0].lines if line.get_gid() == "output_grad"]
    data["output_grad"] = data.hidden_grad
    (long_line,) = [line for line in rl.plot.gradient_flow(data)[0].lines if line.get_gid() == "output_grad"]
    assert (lone_point.get_marker(), long_line.get_marker()) == ("o", "None")


def test_vanishing_float32_gradients_do_not_underflow(layer):
    data = layer(steps=8)
    data["hidden_grad"] = (data.hidden_grad * 1e-30).astype("float32")
    np.testing.assert_allclose(curve(rl.plot.gradient_flow(data)[0], "hidden_grad")[1], 0.5 ** np.arange(8)[::-1])


def test_an_arrow_marks_where_a_line_leaves_the_axis(layer, by_gid):
    (ax,) = rl.plot.gradient_flow(layer(steps=60, decay=0.4))
    assert ax.get_ylim()[0] == 1e-6
    last = np.flatnonzero(0.4 ** np.arange(60)[::-1] < 1e-6).max()
    marks, label = sorted(by_gid(ax, "below"), key=lambda artist: hasattr(artist, "get_text"))
    assert marks.get_xdata().tolist() == [last]
    assert label.get_text() == "below 1e-6"


def test_flow_of_the_backward_half_runs_the_other_way(layer):
    axes = rl.plot.gradient_flow(layer(steps=30, directions=True))
    assert [ax.get_title().partition(":")[0] for ax in axes] == ["lstm · forward", "lstm · backward"]
    assert (np.diff(curve(axes[1], "hidden_grad")[1]) < 0).all()
    reversed_axes = rl.plot.gradient_flow(layer(steps=30, directions=True), as_computed=True)
    assert (np.diff(curve(reversed_axes[1], "hidden_grad")[1]) > 0).all()
    assert legend_labels(axes[0]) == legend_labels(axes[1]) == legend_labels(reversed_axes[1])
    assert [ax.get_xlabel() for ax in reversed_axes] == ["time step", "time step, as computed (from the last)"]


def test_of_two_networks_the_first_is_grey_and_the_title_has_both_reaches(layer):
    (ax,) = rl.plot.gradient_flow({"before": layer(steps=30, decay=0.5), "after": layer(steps=30, decay=0.9)})
    before, after = [line for line in ax.lines if line.get_gid() == "hidden_grad"]
    np.testing.assert_allclose(after.get_ydata(), 0.9 ** np.arange(30)[::-1])
    reaches = [int(np.argmax(np.cumsum(d ** (2 * np.arange(30))) >= 0.95 / (1 - d**2) * (1 - d**60))) + 1
               for d in (0.5, 0.9)]  # fmt: skip
    assert legend_labels(ax) == [f"before: {reaches[0]} steps", f"after: {reaches[1]} steps"]
    assert ax.get_title() == f"{reaches[0]} → {reaches[1]} steps back carry 95 % of the gradient"
    assert (before.get_color(), after.get_color()) == ("#8c8c8c", "#d55e00")


def test_the_title_of_three_networks_says_how_far_back_their_gradients_reach(layer):
    networks = {"a": layer(steps=30, decay=0.5), "b": layer(steps=30, decay=0.9), "c": layer(steps=30, decay=1.0)}
    axes = rl.plot.gradient_flow(networks)
    reaches = [label.partition(": ")[2].split()[0] for label in legend_labels(axes[0])]
    assert suptitle(axes).startswith(f"The gradient reaches back {reaches[0]}, {reaches[1]} and {reaches[2]} steps ")


def test_a_picture_of_zeros_is_white_and_says_so(jacobian, gradient):
    zeros, flat = 0 * jacobian(samples=2, steps=6), 0 * gradient(samples=2)
    pictures = {
        "heatmap": rl.plot.heatmap(flat),
        "before_after": rl.plot.before_after(flat, flat, samples="rms"),
        "time_jacobian": rl.plot.time_jacobian(zeros),
        "jacobian_margins": rl.plot.jacobian_margins(zeros),
        "total_and_frozen": rl.plot.total_and_frozen(zeros, zeros),
    }
    for name, axes in pictures.items():
        assert "every value is 0" in suptitle(axes), name
        assert not any(line.get_gid() == "non-finite" for ax in axes for line in ax.lines), name
        assert not np.ma.getmaskarray(axes[0].images[0].get_array()).all(), name
        assert np.nanmax(np.ma.filled(axes[0].images[0].get_array(), 0.0)) == 0, name
    assert "every value is 0" not in suptitle(rl.plot.heatmap(gradient(samples=2)))


def test_before_and_after_name_their_reduction_below_the_title(gradient):
    axes = rl.plot.before_after(gradient(samples=3), gradient(samples=3), samples="rms")
    assert "RMS" not in axes.figure.get_suptitle()
    assert suptitle(axes).endswith("RMS over 3 samples, each by its own peak")


def test_names_of_a_lag_profile_stand_beside_the_panel(jacobian, render):
    axes = rl.plot.lag_profile({"before training": jacobian(steps=30), "after": jacobian(steps=30, decay=0.9)})
    ax, figure = axes[0], render(axes)
    assert ax.get_xlim() == (-0.5, 29.5)
    panel, canvas = ax.get_window_extent(), figure.bbox
    label_boxes = [text.get_window_extent() for text in ax.texts if text.get_gid() == "end"]
    assert len(label_boxes) == 2
    for box in label_boxes:
        assert box.x0 >= panel.x1
        assert canvas.x0 <= box.x0 < box.x1 <= canvas.x1
    assert not label_boxes[0].overlaps(label_boxes[1])


def test_panels_share_one_value_axis_with_ticks_at_the_left(layer, render):
    moments = {name: xr.DataTree.from_dict({"low": layer(decay=d), "top": layer(decay=0.9)}) for name, d in MOMENTS}
    networks = {name: {key: node.to_dataset() for key, node in tree.items()} for name, tree in moments.items()}
    axes = rl.plot.gradient_flow(networks)
    render(axes)
    assert [ax.get_title().partition(":")[0] for ax in axes] == ["low", "top"]
    assert [label.partition(":")[0] for label in legend_labels(axes[0])] == ["before", "after"]
    assert [ax.yaxis.get_tick_params()["labelleft"] for ax in axes] == [True, False]


MOMENTS = (("before", 0.5), ("after", 0.9))


def test_panels_are_stacked_on_a_narrow_figure(layer):
    tree = xr.DataTree.from_dict({"low": layer(), "top": layer(decay=0.9)})
    axes = rl.plot.gradient_flow(tree, figure=Figure(figsize=(3.9, 6), layout="constrained"))
    assert len({ax.get_subplotspec().colspan.start for ax in axes}) == 1


def test_flow_has_a_panel_per_layer_on_one_scale(layer):
    layers = {"low": layer(decay=0.5), "wide": layer(directions=True), "top": layer(decay=0.9)}
    tree = xr.DataTree.from_dict(layers)
    axes = rl.plot.gradient_flow(tree)
    assert [ax.get_title().partition(":")[0] for ax in axes] == ["low", "wide · forward", "wide · backward", "top"]
    assert len({ax.get_ylim() for ax in axes}) == 1
    total_only = xr.DataTree.from_dict({"low": layer(decay=0.5), "top": layer(decay=0.9)})
    for node in total_only.values():
        del node["output_grad"]
    assert len({ax.get_ylim() for ax in rl.plot.gradient_flow(total_only, shared=False)}) > 1


def test_last_output_only_lies_at_the_last_step(layer):
    data = layer(steps=7)
    data["output_grad"] = data.output_grad.isel(time=-1, drop=True)
    steps, _ = curve(rl.plot.gradient_flow(data)[0], "output_grad")
    assert steps.tolist() == [6]


def test_missing_gradients_are_marked_counted_and_red(layer, by_gid):
    data = layer()
    data["hidden_grad"].values[0, 3, 1] = np.nan
    axes = rl.plot.gradient_flow(data)
    assert by_gid(axes[0], "non-finite")[0].get_xdata().tolist() == [3]
    assert "lstm, total gradient of the hidden state: NaN: 1 of 36 (2.78 %)" in suptitle(axes)
    assert axes[0].spines["top"].get_edgecolor()[:3] == pytest.approx((0.7529, 0, 0), abs=1e-3)
    assert axes[0].figure._suptitle.get_color() == "#c00000"
    assert rl.plot.gradient_flow(layer())[0].figure._suptitle.get_color() == "black"


def test_steps_are_marked_on_every_panel_with_time(layer, gradient, by_gid):
    axes = rl.plot.gradient_flow(layer(steps=30)).mark(10, 20, label="asked for")
    lines = [line for line in by_gid(axes[0], "mark") if hasattr(line, "get_xdata") and len(line.get_xdata()) == 2]
    assert [line.get_xdata()[0] for line in lines] == [10, 20]
    with pytest.raises(InputError, match="No panel of this figure has time across"):
        rl.plot.histogram(gradient()).mark(3)
    with pytest.raises(InputError, match="steps"):
        axes.mark("sixty")


def test_marks_hang_within_the_panel_below_its_title(gradient):
    unmarked, marked = (rl.plot.heatmap(gradient(samples=1, steps=30)) for _ in range(2))
    marked.mark(14, 15)
    pictures = []
    for axes in (unmarked, marked):
        canvas = FigureCanvasAgg(axes.figure)
        canvas.draw()
        pictures.append(np.asarray(canvas.buffer_rgba()).astype(int))
    changed = np.flatnonzero(np.abs(pictures[1] - pictures[0]).sum(axis=(1, 2)))
    top = len(pictures[0]) - marked[0].get_window_extent().y1
    assert top - 1 <= changed.min() < top + 3


def test_a_trace_without_loss_has_no_flow(layer):
    with pytest.raises(InputError, match=r"trace with a loss: rl\.trace\(model, x, y\)"):
        rl.plot.gradient_flow(layer()[["gates"]])
    with pytest.raises(InputError, match="draws the layers of a trace"):
        rl.plot.gradient_flow(np.zeros((2, 3, 4)))


def with_memory(data, decay):
    """Add a state ``memory`` whose gradient is multiplied by ``decay`` per step back."""
    memory = data.hidden_grad * 0 + decay ** np.arange(data.sizes["time"])[::-1][:, None]
    return data.assign(memory_grad=memory, memory=memory, initial_memory_grad=memory.isel(time=0))


def test_states_of_other_names_have_a_line_after_the_hidden_state(layer):
    (ax,) = rl.plot.gradient_flow(with_memory(layer(steps=30, decay=0.5), 0.9))
    names = [label.partition(":")[0] for label in legend_labels(ax)]
    assert names[:2] == ["total, $dL/dh_t$", "total, dL/dmemory_t"]
    lines = [line for line in ax.lines if line.get_gid().endswith("_grad")]
    assert [line.get_gid() for line in lines] == ["hidden_grad", "memory_grad", "output_grad"]
    assert len({line.get_color() for line in lines}) == 3
    np.testing.assert_allclose(curve(ax, "memory_grad")[1], 0.9 ** np.arange(30)[::-1])


def test_networks_are_compared_by_the_gradient_of_any_state(layer):
    networks = {"a": with_memory(layer(), 0.9), "b": with_memory(layer(), 0.8)}
    (ax,) = rl.plot.gradient_flow(networks, quantity="memory_grad")
    drawn = [line.get_ydata() for line in ax.lines if line.get_gid() == "memory_grad"]
    np.testing.assert_allclose(drawn, [0.9 ** np.arange(6)[::-1], 0.8 ** np.arange(6)[::-1]])
    with pytest.raises(InputError, match=r"found no gradient[\s\S]*memory_grad"):
        rl.plot.gradient_flow(networks, quantity="memori_grad")
    with pytest.raises(InputError, match="found no gradient"):
        rl.plot.gradient_flow(networks, quantity="gates")


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


def test_norms_of_zeros_have_a_value_axis():
    (ax,) = rl.plot.weight_norms({"lstm/kernel": [0.0, 0.0]})
    low, high = ax.get_ylim()
    assert low <= 0 < high


def test_missing_norms_are_gaps(by_gid):
    (ax,) = rl.plot.weight_norms({"lstm/kernel": [1.0, math.nan, 3.0]})
    assert np.isnan(ax.lines[0].get_ydata()[1])
    assert by_gid(ax, "non-finite")[0].get_xdata().tolist() == [1]
    assert "NaN: 1 of 3 (33.3 %)" in suptitle([ax])


def test_norms_are_linear_below_one_decade_and_named_at_their_ends():
    (ax,) = rl.plot.weight_norms({"lstm/kernel": [3.0, 2.5], "lstm/bias": [2.0, 2.2]})
    assert ax.get_yscale() == "linear"
    assert ax.get_ylabel() == "norm"
    assert end_labels(ax) == ["kernel", "bias"]
    (ax,) = rl.plot.weight_norms({"lstm/kernel": [30.0, 2.5], "lstm/bias": [2.0, 0.0]})
    assert ax.get_yscale() == "log"
    assert ax.get_ylabel() == "norm, log scale"
    (below_label,) = [text.get_text() for text in ax.texts if text.get_gid() == "below"]
    assert below_label == "below 1"


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
    assert "median over 2 samples, each by its own peak; peaks: 1, quartiles 1 to 1" in suptitle([ax])
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


def test_what_comes_after_the_output_is_hatched_and_the_last_step_ticked(jacobian, by_gid):
    data = jacobian(steps=40)
    (ax,) = rl.plot.time_jacobian(data)
    (hatched,) = by_gid(ax, "non-causal")
    path = hatched.get_paths()[0]
    hatched_cells = [(o, i) for o in range(40) for i in range(40) if path.contains_point((i, o))]
    assert hatched_cells == [(o, i) for o in range(40) for i in range(o + 1, 40)]
    assert (ax.get_xticks()[-1], ax.get_yticks()[-1]) == (39, 39)
    transposed = data.copy(data=data.values.transpose(0, 2, 1))
    path = by_gid(rl.plot.time_jacobian(transposed)[0], "non-causal")[0].get_paths()[0]
    assert path.contains_point((3, 20))
    assert not path.contains_point((20, 3))
    assert by_gid(rl.plot.time_jacobian(data + 1)[0], "non-causal") == []


def test_samples_of_all_sizes_count_alike_in_a_jacobian(jacobian):
    data = jacobian(samples=3) * xr.DataArray([1.0, 10.0, 1e4], dims="sample")
    (ax,) = rl.plot.time_jacobian(data)
    np.testing.assert_allclose(ax.images[0].get_array(), jacobian().values[0])
    assert "peaks: 10, quartiles 5.5 to 5e+03" in suptitle([ax])
    (ax,) = rl.plot.time_jacobian(data, samples="mean")
    np.testing.assert_allclose(ax.images[0].get_array(), jacobian().values[0] * 10011 / 3)


def test_missing_blocks_of_any_sample_are_crossed_out(jacobian, by_gid):
    data = jacobian()
    data[1, 4, 2] = np.nan
    (ax,) = rl.plot.time_jacobian(data)
    (cross,) = by_gid(ax, "non-finite")
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (2, 4)
    assert "NaN: 1 of 72 (1.39 %)" in suptitle([ax])


def test_the_note_lies_below_the_title_and_above_the_panels(jacobian, render):
    (ax,) = rl.plot.time_jacobian(jacobian(samples=3) * np.array([1.23, 45.6, 7.89])[:, None, None])
    figure = render([ax])
    (note,) = figure.artists
    assert "".join(note.get_text().split()) == "medianover3samples,eachbyitsownpeak;peaks:7.9,quartiles4.6to27"
    title, panel = figure._suptitle.get_window_extent(), ax.get_tightbbox()
    assert panel.y1 < note.get_window_extent().y0 < note.get_window_extent().y1 < title.y1
    assert note.get_fontsize() < figure._suptitle.get_fontsize()


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
    assert by_gid(ax, "mean lag")[0].get_xdata()[0] == pytest.approx(1.0, rel=1e-4)
    assert by_gid(ax, "horizon")[0].get_xdata()[0] == 6
    assert end_labels(ax) == ["mean lag 1: horizon 6"]
    assert "dotted: mean lag; triangle: horizon, 1 % of the peak" in suptitle([ax])


def test_a_horizon_at_the_last_lag_is_censored(jacobian):
    (ax,) = rl.plot.lag_profile(jacobian(steps=40, decay=0.99))
    assert end_labels(ax) == ["mean lag 18.2: horizon ≥ 39"]


def test_a_hard_sample_does_not_decide_the_profile(jacobian):
    data = jacobian(samples=5, steps=10)
    data[0] = 1e3 * (data[0] > 0)
    np.testing.assert_allclose(curve(rl.plot.lag_profile(data)[0], "profile")[1], 0.5 ** np.arange(10.0))
    mean = curve(rl.plot.lag_profile(data, samples="mean")[0], "profile")[1]
    np.testing.assert_allclose(mean, (1e3 + 4 * 0.5 ** np.arange(10.0)) / 5)


def test_the_band_holds_the_quartiles(jacobian, by_gid):
    data = xr.concat([jacobian(samples=1, decay=d) for d in (0.5, 0.6, 0.7, 0.8, 0.9)], "sample")
    (band,) = by_gid(rl.plot.lag_profile(data)[0], "band")
    at_lag_2 = band.get_paths()[0].vertices[np.isclose(band.get_paths()[0].vertices[:, 0], 2), 1]
    assert sorted(set(at_lag_2.round(9))) == pytest.approx([0.36, 0.64])


def test_delays_of_the_task_are_marked(jacobian, by_gid):
    (ax,) = rl.plot.lag_profile(jacobian(), delays=(2, 4))
    lines = [line for line in by_gid(ax, "delay") if len(line.get_xdata()) == 2]
    assert [line.get_xdata()[0] for line in lines] == [2, 4]


def test_lag_profiles_are_compared_by_name(jacobian):
    (ax,) = rl.plot.lag_profile({"before": jacobian(decay=0.5), "after": jacobian(decay=0.9)})
    np.testing.assert_allclose(curve(ax, "profile after")[1], 0.9 ** np.arange(6.0))
    assert [label.split(":")[0] for label in end_labels(ax)] == ["before", "after"]


def test_band_is_there_with_several_samples_only(jacobian, by_gid):
    assert len(by_gid(rl.plot.lag_profile(jacobian(samples=3))[0], "band")) == 1
    assert by_gid(rl.plot.lag_profile(jacobian(samples=1))[0], "band") == []
    assert by_gid(rl.plot.lag_profile(jacobian(samples=3), confidence=0)[0], "band") == []


def test_lag_counts_from_coordinates_where_times_are_selected(jacobian):
    data = jacobian(steps=8).assign_coords(out_time=range(8), in_time=range(8)).isel(out_time=[7])
    _, profile = curve(rl.plot.lag_profile(data)[0], "profile")
    np.testing.assert_allclose(profile, 0.5 ** np.arange(8.0))


# -- before_after


def test_before_and_after_share_one_scale_and_their_ratio_has_its_own(gradient):
    before, after = gradient(samples=2) + 0.1, (gradient(samples=2) + 0.1) * 3
    after[0, 0, 0], after[0, 1, 0] = 0.0, -1e6
    axes = rl.plot.before_after(before, after)
    assert [ax.get_title() for ax in axes[:3]] == ["before · sample 0", "after · sample 0", "ratio · sample 0"]
    expected = np.full(before.shape, np.log10(3.0))
    expected[0, 0, 0], expected[0, 1, 0] = -12, np.log10(1e6 / before[0, 1, 0])
    for row in range(2):
        for ax, values in zip(axes[3 * row : 3 * row + 3], (before.values, after.values, expected), strict=True):
            np.testing.assert_allclose(ax.images[0].get_array(), values[row].T)
    assert {(ax.images[0].norm.vmin, ax.images[0].norm.vmax) for i, ax in enumerate(axes) if i % 3 < 2} == {(-1e6, 1e6)}
    assert {(ax.images[0].norm.vmin, ax.images[0].norm.vmax) for ax in axes[2::3]} == {(-1, 1)}
    bars = [ax for ax in axes[0].figure.axes if ax not in list(axes)]
    assert [text.get_text() for text in bars[1].get_yticklabels()] == ["≤ 0.1", "1", "≥ 10"]
    assert bars[1].get_ylabel() == "times as large"


def test_the_ratio_of_two_pictures_by_own_peaks_is_one_of_shares(gradient):
    axes = rl.plot.before_after(gradient(samples=4), gradient(samples=4) * 1e-3, samples="rms")
    bars = [ax.get_ylabel() for ax in axes[0].figure.axes if ax not in list(axes)]
    assert bars == ["RMS, share of the peak", "times the share"]
    np.testing.assert_allclose(axes[2].images[0].get_array(), 0, atol=1e-6)  # log10 of the ratio of the shapes


@pytest.mark.parametrize("floor", [0.05, 6.4e-5, 1e-9])
def test_a_bar_over_few_decades_or_many_has_ticks_that_do_not_touch(floor):
    values = np.geomspace(floor, 0.94, 30).reshape(1, 5, 6)
    bar = rl.plot.time_jacobian(values)[0].figure.axes[-1]
    ticks = bar.get_yticks()
    assert 4 <= len(ticks) <= 7
    assert (ticks[1:] >= 1.9 * ticks[:-1]).all()
    assert bar.get_yticklabels()[0].get_text().startswith("≤")


def test_before_after_of_traces_has_rows_for_each_layer(layer):
    before, after = ({"low": layer(decay=d), "top": layer(decay=d, units=5, directions=True)} for d in (0.5, 0.9))
    axes = rl.plot.before_after(before, after, samples="rms")
    assert [ax.get_title().replace("\n", " · ") for ax in axes[::3]] == [
        "before · low", "before · top · forward", "before · top · backward",
    ]  # fmt: skip
    assert [ax.images[0].get_array().shape for ax in axes[1::3]] == [(3, 6), (5, 6), (5, 6)]
    with pytest.raises(InputError, match="compares two results of the same dimensions and sizes"):
        rl.plot.before_after(before, {"low": layer(), "other": layer()})


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


def test_the_picture_of_a_network_is_the_rms_of_its_samples(gradient):
    before = gradient(samples=3) + 0.1
    after = before * xr.DataArray([1.0, 1e3, 1e-3], dims="sample")
    axes = rl.plot.before_after(before, after, samples="rms")
    assert [ax.get_title() for ax in axes] == ["before", "after", "ratio"]
    shapes = before.values / before.values.max(axis=(1, 2), keepdims=True)
    expected = np.sqrt((shapes**2).mean(axis=0)).T
    for ax in axes[:2]:
        np.testing.assert_allclose(ax.images[0].get_array(), expected)
    assert "RMS over 3 samples, each by its own peak" in suptitle(axes)


def test_samples_are_named_with_their_losses_the_typical_one_first(gradient):
    axes = rl.plot.before_after(gradient(samples=5), gradient(samples=5), losses=[0.9, 0.1, 0.5, 0.2, 0.4], max_rows=5)
    assert [ax.get_title() for ax in axes[::3]][:2] == ["before · sample 4", "before · sample 3"]  # losses: after only
    titles = [ax.get_title().replace("\n", " · ") for ax in axes[1::3]]
    assert titles[:2] == ["after · sample 4, loss 0.4 (the median)", "after · sample 3, loss 0.2"]
    np.testing.assert_allclose(axes[0].images[0].get_array(), gradient(samples=5).values[4].T)
    with pytest.raises(InputError, match="losses= has one number for each sample"):
        rl.plot.before_after(gradient(), gradient(), losses=[1.0])


def test_results_of_different_sizes_are_not_compared(gradient):
    with pytest.raises(InputError, match="compares two results of the same dimensions and sizes"):
        rl.plot.before_after(gradient(), gradient(units=5))


def test_before_after_counts_missing_values_of_each(gradient):
    after = gradient()
    after[0, 0, 0] = np.nan
    assert "after: NaN: 1 of 60 (1.67 %)" in suptitle(rl.plot.before_after(gradient(), after))
