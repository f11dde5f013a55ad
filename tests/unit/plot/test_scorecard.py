"""The figure of a scorecard: a panel for each measure that any model has, dashes where it is not defined."""

import numpy as np
import pytest

import rnnlens as rl
from rnnlens.errors import InputError


def test_a_panel_for_each_defined_measure_and_a_dash_where_it_is_not(comparison, render, text_of):
    axes = rl.plot.scorecard(comparison())
    render(axes)
    assert [ax.get_title() for ax in axes] == ["weights", "prediction depends on"]
    weights, memory = axes
    np.testing.assert_array_equal(weights.collections[0].get_offsets(), [[740, 0], [2372, 1], [90000, 2]])
    np.testing.assert_array_equal(memory.collections[0].get_offsets(), [[12, 0], [3, 2]])
    assert weights.get_xscale() == "log"
    assert (memory.get_xscale(), memory.get_xlim()[0], memory.get_xlabel()) == ("linear", 0, "step")
    (interval,) = [line for line in memory.lines if line.get_gid() == "interval"]
    assert list(interval.get_xdata()) == [10, 14]
    assert [t.xy[1] for t in memory.texts if t.get_gid() == "not defined"] == [1]
    assert [t.get_text() for t in weights.get_yticklabels()] == ["rnn", "lstm", "mamba"]


def test_other_results_are_refused(comparison, diagnosis):
    with pytest.raises(InputError, match=r"plot\.scorecard draws a comparison"):
        rl.plot.scorecard(diagnosis())
    bare = type(comparison())({"comparison": comparison().scorecard})
    with pytest.raises(InputError, match="This comparison has no scorecard"):
        rl.plot.scorecard(bare)


def test_printed_it_is_a_table_with_reasons_below(comparison):
    lines = str(comparison()).splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("scorecard")) :]
    assert table[0].split() == ["scorecard", "rnn", "lstm", "mamba"]
    assert table[1].split() == ["weights", "740", "2372", "90000"]
    assert table[2].split() == ["prediction", "depends", "on", "12", "(10", "to", "14)", "-", "3"]
    assert table[-1] == "not defined: prediction depends on of lstm: only of Mamba"
