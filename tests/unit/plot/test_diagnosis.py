"""What the figures of a diagnosis and of fixed points draw."""

import numpy as np
import pytest

import rnnlens as rl
from rnnlens.errors import InputError


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
    assert "n = 11" in {text.get_text() for text in axes[0].texts}


def test_the_title_is_the_sentence(diagnosis, text_of):
    assert "lstm uses the last 11 of 40 steps" in text_of(rl.plot.diagnosis(diagnosis()))


def test_no_memory_is_drawn_where_it_is_unknown(diagnosis):
    axes = rl.plot.diagnosis(diagnosis(known=False))
    assert lines(axes[0], "memory") == []
    assert "memory unknown" in {text.get_text() for text in axes[0].texts}


def test_what_lies_below_the_axis_is_marked(diagnosis):
    ax = rl.plot.diagnosis(diagnosis())[2]
    (below,) = lines(ax, "below")
    assert below.get_xdata().min() == np.flatnonzero(0.3 ** np.arange(41.0) <= 1e-12).min()


def test_the_missed_step_is_the_highest(diagnosis):
    ax = rl.plot.diagnosis(diagnosis())[1]
    (collection,) = [c for c in ax.collections if c.get_gid() == "missed"]
    heights = [segment[1, 1] for segment in collection.get_segments()]
    assert int(np.argmax(heights)) == 25
    assert ax.get_ylim()[1] > 0.4


def test_points_of_each_kind_and_the_unstable_modes(fixed_points, render):
    axes = rl.plot.fixed_points(fixed_points())
    render(axes)
    assert {line.get_label() for line in axes[0].get_lines() if not line.get_label().startswith("_")} == {
        "states",
        "stable (2)",
        "saddle (1)",
    }
    assert len(lines(axes[0], "mode")) == 1


@pytest.mark.parametrize("figure", [rl.plot.diagnosis, rl.plot.fixed_points])
def test_anything_else_is_refused(figure):
    with pytest.raises(InputError, match="draws"):
        figure({"lstm": 1})
