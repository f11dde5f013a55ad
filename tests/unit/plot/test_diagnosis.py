"""Figures of a diagnosis and of fixed points: drawn values, titles and markers."""

import numpy as np
import pytest

import rnnlens as rl
from rnnlens.errors import InputError
from rnnlens.results.schema import concat_directions

pytestmark = pytest.mark.slow


def lines(ax, gid):
    return [line for line in ax.get_lines() if line.get_gid() == gid]


def test_curves_and_the_memory_stand_where_they_were_measured(diagnosis, render):
    d = diagnosis()
    axes = rl.plot.diagnosis(d)
    render(axes)
    (use,) = lines(axes[0], "use")
    np.testing.assert_array_equal(use.get_xdata(), d["model"].context)
    np.testing.assert_array_equal(use.get_ydata(), d["model"].use)
    (memory,) = lines(axes[0], "memory")
    assert set(memory.get_xdata()) == {11}
    assert axes[0].get_xscale() == "linear"
    assert {"memory in use: 11", "5 %"} <= {text.get_text() for text in axes[0].texts}


def test_the_title_is_the_sentence(diagnosis, text_of):
    assert "lstm uses the last 11 of 40 steps" in text_of(rl.plot.diagnosis(diagnosis()))


def test_the_headline_is_the_whole_first_sentence(diagnosis):
    d = diagnosis()
    sentences = "The model depends on the last 11 of 40 steps (95 % CI 11-11; baseline: 3). Nothing else: no sign."
    axes = rl.plot.diagnosis(type(d)({name: d[name] for name in d}, sentences={"lstm": sentences}))
    assert axes.figure.get_suptitle().replace("\n", " ") == sentences.partition(" Nothing")[0]
    assert axes.figure.get_supxlabel() == "Nothing else: no sign."


def test_no_memory_is_drawn_where_it_is_unknown(diagnosis):
    axes = rl.plot.diagnosis(diagnosis(memory_known=False))
    assert lines(axes[0], "memory") == []
    assert "memory unknown" in {text.get_text() for text in axes[0].texts}


def test_what_lies_below_the_axis_is_marked(diagnosis):
    ax = rl.plot.diagnosis(diagnosis())[3]
    (below,) = lines(ax, "below")
    assert below.get_xdata().tolist() == [np.flatnonzero(0.3 ** np.arange(41.0) <= 1e-5).min()]


def test_the_missed_step_is_the_highest(diagnosis):
    ax = rl.plot.diagnosis(diagnosis())[2]
    (collection,) = [c for c in ax.collections if c.get_gid() == "missed"]
    heights = [segment[1, 1] for segment in collection.get_segments()]
    assert int(np.argmax(heights)) == 25
    np.testing.assert_allclose(heights[25], 0.4 / 0.05)  # in units of the threshold
    assert ax.get_ylim()[1] > 8


def test_a_model_without_errors_misses_nothing(diagnosis):
    d = diagnosis()
    model = d["model"].assign(missed=d["model"].missed * 0, missed_threshold=0.0)
    ax = rl.plot.diagnosis(type(d)({"model": model, "lstm": d["lstm"]}, sentences=d.sentences))[2]
    (collection,) = [c for c in ax.collections if c.get_gid() == "missed"]
    assert all(segment[1, 1] == 0 for segment in collection.get_segments())


def test_what_was_not_measured_has_no_panel(diagnosis):
    d = diagnosis()
    titles = [ax.get_title() for ax in rl.plot.diagnosis(d)]
    assert titles == [
        "Use of older steps",
        "Performance lost when older steps are replaced",
        "Do the errors depend on past inputs?",
        "Gradient surviving k steps back",
        "Time constants of the gates",
    ]
    reduced = type(d)(
        {"model": d["model"].drop_vars(["missed", "missed_threshold"]), "lstm": d["lstm"].drop_vars("timescale")},
        sentences=d.sentences,
    )
    assert [ax.get_title() for ax in rl.plot.diagnosis(reduced)] == [titles[0], titles[1], titles[3]]


def test_the_adjoint_is_that_of_the_output(diagnosis):
    d = diagnosis()
    profile = d["lstm"].kappa.values
    adjoint = {f"adjoint{end}": ("lag_out", profile) for end in ("", "_low", "_high")}
    ax = rl.plot.diagnosis(type(d)({"model": d["model"], "lstm": d["lstm"].assign(adjoint)}, sentences=d.sentences))[3]
    (curve,) = lines(ax, "adjoint")
    assert curve.get_label() == "of the output, by own peak"


def test_each_half_of_a_bidirectional_layer_has_its_panels(diagnosis, render):
    d = diagnosis()
    layer = concat_directions([d["lstm"], d["lstm"] * 0.5])
    axes = rl.plot.diagnosis(type(d)({"model": d["model"], "lstm": layer}, sentences=d.sentences))
    render(axes)
    assert [ax.get_title() for ax in axes[3:]] == [
        "Gradient surviving k steps back, forward half",
        "Gradient surviving k steps back, backward half",
        "Time constants of the gates, forward half",
        "Time constants of the gates, backward half",
    ]
    for index, (gradient, scales) in enumerate(zip(axes[3:5], axes[5:], strict=True)):
        (curve,), (units,) = lines(gradient, "kappa"), lines(scales, "timescale")
        assert curve.get_ydata()[0] == layer.kappa.values[index, 0]
        np.testing.assert_array_equal(units.get_ydata(), layer.timescale.values[index])


def test_each_measure_of_how_far_back_is_a_bar_with_its_sentence(diagnosis, render, text_of):
    d = diagnosis()
    axes = rl.plot.how_far_back(d)
    render(axes)
    bars = {bar.get_gid(): bar.get_width() for bar in axes[0].patches}
    assert bars == {"prediction depends on": 11, "state of lstm carries": 9, "training signal reaches": 40}
    (interval,) = lines(axes[0], "interval")
    assert list(interval.get_xdata()) == [10, 12]
    assert axes[0].get_xlim() == (0, 40)
    text = text_of(axes)
    for shown in ("prediction depends on: 11 (95 % CI 10-12)", "training signal reaches: ≥ 40", *d.why_they_differ):
        assert shown in text
    with pytest.raises(InputError, match="how_far_back draws a diagnosis"):
        rl.plot.how_far_back(type(d)({"model": d["model"]}))


def test_points_of_each_kind_and_the_unstable_modes(fixed_points, render):
    axes = rl.plot.fixed_points(fixed_points())
    render(axes)
    legend = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert legend == ["stable point (2)", "saddle point (1)"]
    assert len(lines(axes[0], "mode")) == 1
    assert np.ptp(axes[0].get_xlim()) == pytest.approx(np.ptp(axes[0].get_ylim()))  # no component is stretched


def test_points_of_several_inputs_have_the_number_of_theirs_and_a_half_is_named(fixed_points, render, text_of):
    made = fixed_points()
    inputs = {"input_index": ("point", np.array([0, 1, 1])), "inputs": (("input", "feature"), np.zeros((2, 1)))}
    axes = rl.plot.fixed_points(type(made)({"gru": made.data.assign(inputs).assign_attrs(direction="backward")}))
    render(axes)
    numbers = [text for text in axes[0].texts if text.get_gid() == "input"]
    assert [text.get_text() for text in numbers] == ["0", "1", "1"]
    ends = [line.get_xydata() for kind in ("stable", "saddle") for line in lines(axes[0], kind)]
    assert {tuple(text.xy) for text in numbers} == {tuple(xy) for xy in np.concatenate(ends)}
    assert "2 inputs, backward half" in " ".join(text_of(axes).split())
    assert "number: its input" in [text.get_text() for text in axes[0].get_legend().get_texts()]


@pytest.mark.parametrize("figure", [rl.plot.diagnosis, rl.plot.fixed_points])
def test_anything_else_is_refused(figure):
    with pytest.raises(InputError, match="draws"):
        figure({"lstm": 1})
