"""``film`` and ``timeline`` of a run with known values: drawn values, axes and markers."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from tests.unit.plot.runs import STEPS, make_run

import rnnlens as rl
from rnnlens.errors import InputError

pytestmark = pytest.mark.slow


def mesh(ax):
    (collection,) = [c for c in ax.collections if c.get_gid() == "film"]
    return collection


def test_a_panel_per_layer_and_the_loss_below():
    axes = rl.plot.film(make_run())
    assert [ax.get_title() for ax in axes] == ["lstm", "gru", ""]
    assert axes[-1].get_ylabel() == "loss"
    assert axes[-1].get_xlabel() == "training step"


def test_each_record_is_divided_by_its_own_peak():
    """Records that grow in training are drawn alike: 1 at their last step, a tenth of that for each step back."""
    values = mesh(rl.plot.film(make_run(times=4))[0]).get_array()
    np.testing.assert_allclose(values, np.outer([1e-3, 1e-2, 1e-1, 1.0], np.ones(len(STEPS))))


def test_time_goes_down_and_training_across_from_record_to_record():
    axes = rl.plot.film(make_run(times=4))
    corners = mesh(axes[0]).get_coordinates()
    np.testing.assert_allclose(corners[0, :, 0], [-25, 25, 75, 125, 175, 225])
    np.testing.assert_allclose(corners[:, 0, 1], [-0.5, 0.5, 1.5, 2.5, 3.5])
    assert axes[0].get_ylim() == (3.5, -0.5)
    assert {ax.get_xlim() for ax in axes} == {(-25, 225)}


def test_what_is_below_the_scale_is_white_and_what_is_no_number_grey():
    run = make_run(layers=("lstm",), times=9)
    run["lstm"].adjoint_profile.values[1, 2] = np.nan
    film_mesh = mesh(rl.plot.film(run, decades=3)[0])
    colours = film_mesh.to_rgba(film_mesh.get_array()).reshape(9, len(STEPS), 4)
    np.testing.assert_allclose(colours[0, 0, :3], 1.0, atol=0.02)
    assert np.ptp(colours[2, 1, :3]) < 0.01
    assert colours[2, 1, 0] < 0.6
    assert colours[8, 0, 0] > colours[8, 0, 2]  # orange


def test_both_directions_have_a_panel_each():
    axes = rl.plot.film(make_run(layers=("bi",), times=4, directions=2))
    assert [ax.get_title() for ax in axes[:2]] == ["bi (forward)", "bi (backward)"]
    np.testing.assert_allclose(mesh(axes[1]).get_array()[:, 0], [1.0, 1e-1, 1e-2, 1e-3])


def test_records_that_are_denser_early_lie_on_a_logarithmic_axis():
    axes = rl.plot.film(make_run(steps=[0, 1, 2, 4, 8, 16, 32]))
    assert {ax.get_xscale() for ax in axes} == {"symlog"}
    assert [t.get_text() for t in axes[-1].get_xticklabels()] == ["0", "1", "2", "5", "10", "20"]
    assert rl.plot.film(make_run())[0].get_xscale() == "linear"


def test_the_accuracy_comes_before_the_loss_and_any_scalar_by_name():
    run = make_run(names={"loss": np.ones(5), "accuracy": np.linspace(0, 1, 5), "lstm/reach": np.arange(5)})
    assert rl.plot.film(run)[-1].get_ylabel() == "accuracy"
    assert rl.plot.film(run, below="lstm/reach")[-1].get_ylabel() == "reach"
    assert len(rl.plot.film(run, layers="lstm", below="")) == 1


def test_moments_are_marked_in_every_panel_and_named():
    axes = rl.plot.film(make_run(), moments={"it begins": 60, "it can": 150})
    for ax in axes:
        assert [line.get_xdata()[0] for line in ax.lines if line.get_gid() == "moment"] == [60, 150]
    assert [text.get_text() for text in axes[0].texts if text.get_gid() == "moment"] == ["1 it begins", "2 it can"]
    unordered = rl.plot.film(make_run(), moments={"it can": 150, "it begins": 60})  # numbered in order of step
    assert [text.get_text() for text in unordered[0].texts if text.get_gid() == "moment"] == ["1 it begins", "2 it can"]


def test_names_of_moments_stay_on_the_canvas(render):
    names = {f"the moment at which it can do number {i}": 20 * i for i in range(1, 8)}
    axes = rl.plot.film(make_run(), moments=names)
    figure = render(axes)
    extent = axes[-1].xaxis.label.get_window_extent()
    assert extent.x0 >= 0
    assert extent.x1 <= figure.bbox.width
    axes = rl.plot.timeline(make_run(names=NAMES), moments=names)
    figure = render(axes)
    extent = figure._supxlabel.get_window_extent()
    assert extent.x0 >= 0
    assert extent.x1 <= figure.bbox.width
    assert {ax.get_xlim() for ax in axes} == {(-25, 225)}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: rl.plot.film(np.zeros((3, 4))), "draws a run"),
        (lambda: rl.plot.film(make_run(), layers="lstn"), "No layer 'lstn'"),
        (lambda: rl.plot.film(make_run(), quantity="gates"), "No gates was recorded"),
        (lambda: rl.plot.film(make_run(), below="acc"), "No scalar 'acc'"),
        (lambda: rl.plot.film(make_run(), moments={"late": 900}), "'late' is not in this run"),
        (lambda: rl.plot.film(make_run(), moments=[3]), "moments= names moments"),
        (lambda: rl.plot.timeline(make_run(), "acc*"), "No scalar of this run is called 'acc*'"),
        (lambda: rl.plot.timeline({}), "draws a run"),
    ],
)
def test_what_cannot_be_drawn_is_said(call, expected):
    with pytest.raises(InputError) as error:
        call()
    assert expected in str(error.value)


NAMES = {
    "loss": [1.0, 0.5, 0.1, 0.05, 0.01],
    "lstm/reach": [3, 4, 5, 6, 7],
    "gru/reach": [2, 2, 2, 2, 2],
    "lstm/forget/near_1": [0, 0.1, 0.2, 0.3, np.nan],
    "lstm/weight_norm/kernel": [1, 2, 3, 4, 5],
}


def test_a_panel_per_kind_of_number_and_a_line_per_layer():
    axes = rl.plot.timeline(make_run(names=NAMES))
    titles = ["loss", "steps that the gradient reaches", "share of gates near 1", "norm of weights"]
    assert [ax.get_title() for ax in axes] == titles
    lines = {line.get_label(): line.get_ydata() for line in axes[1].lines}
    np.testing.assert_array_equal(lines["lstm"], [3, 4, 5, 6, 7])
    np.testing.assert_array_equal(lines["gru"], [2, 2, 2, 2, 2])
    assert axes[0].get_yscale() == "log"
    assert axes[2].get_ylim() == (-0.03, 1.03)


def test_norms_of_gradients_are_told_from_norms_of_weights():
    norms = ["grad_norm", "grad_norm_clipped", "a/lstm/weight_norm/kernel", "a/lstm/weight_grad_norm/kernel"]
    names = {name: [1.0] * 5 for name in [*norms, "bi/forward/weight_grad_norm_clipped/recurrent_kernel"]}
    labels_by_title = {
        ax.get_title(): [line.get_label() for line in ax.lines] for ax in rl.plot.timeline(make_run(names=names))
    }
    assert labels_by_title == {
        "norm of weights": ["a/lstm kernel"],
        "norm of the gradient of weights": ["a/lstm kernel", "bi/forward recurrent_kernel clipped"],
        "norm of the gradient of all weights": ["grad norm", "clipped"],
    }


def test_what_is_not_finite_is_marked():
    axes = rl.plot.timeline(make_run(names=NAMES), "*/near_1")
    (marks,) = [line for line in axes[0].lines if line.get_gid() == "non-finite"]
    assert list(marks.get_xdata()) == [200]


def test_a_gradient_that_does_not_fade_is_no_fault():
    """A decay that is NaN because the gradient does not fade has a legend entry, no line and no red marker."""
    names = {"bi/forward/decay": [0.9, 0.8, np.nan, 0.7, 0.6], "bi/backward/decay": [np.nan] * 5}
    (ax,) = rl.plot.timeline(make_run(names=names))
    assert [line.get_label() for line in ax.lines] == ["bi forward", "bi backward (does not fade)"]
    assert list(ax.lines[0].get_xdata()) == [0, 50, 150, 200]
    assert not [line for line in ax.lines if line.get_gid() == "non-finite"]


@pytest.mark.parametrize("user_axes", [False, True], ids=["a figure of ours", "axes of the user"])
def test_many_names_stand_beside_the_panel(user_axes):
    names = {f"lstm/{gate}/near_0": [0.5] * 5 for gate in "abcdefg"}
    (ax,) = rl.plot.timeline(make_run(names=names), ax=[Figure().add_subplot()] if user_axes else None)
    for _ in range(2):  # the layout needs two passes
        ax.figure.draw_without_rendering()
    legend = ax.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [f"lstm {gate}" for gate in "abcdefg"]
    left = legend.get_window_extent().x0
    assert (left >= ax.get_window_extent().x1) == (not user_axes)
    assert legend.get_window_extent().x1 <= ax.figure.bbox.x1


def test_patterns_select():
    assert len(rl.plot.timeline(make_run(names=NAMES), ["loss", "*/reach"])) == 2
