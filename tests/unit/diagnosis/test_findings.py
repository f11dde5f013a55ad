"""The headline of a diagnosis, and the table of findings, which lists every code that a rule returns."""

import ast
from pathlib import Path

import numpy as np
import pytest

import rnnlens
from rnnlens.diagnosis.findings import FIGURE_OF_CODE, headline
from rnnlens.diagnosis.how_far_back import differences
from rnnlens.diagnosis.memory import Interval, Memory
from rnnlens.diagnosis.of_model import _power_notes
from rnnlens.measures.residual import Missed
from rnnlens.results.diagnosis import StepsBack

FILES = ("findings.py", "everyday.py", "loss_arguments.py", "updates.py")
RULES = [Path(rnnlens.__file__).parent / "diagnosis" / name for name in FILES]


def codes_of_rules():
    trees = [ast.walk(ast.parse(path.read_text())) for path in RULES]
    calls = [n for tree in trees for n in tree if isinstance(n, ast.Call)]
    return {call.args[0].value for call in calls if getattr(call.func, "id", "") == "Finding"}


def test_the_table_names_every_code_that_a_rule_gives():
    assert codes_of_rules() == set(FIGURE_OF_CODE)


@pytest.mark.parametrize(
    ("benefit", "expected"),
    [
        (1.0, "loses all of the score"),
        (0.12, "loses 12 % of the score"),
        (0.002, "changes the prediction, but loses none of the score"),
        (-0.1, "changes the prediction, but loses none of the score"),
    ],
)
def test_the_sentence_does_not_say_that_steps_in_use_lose_0_percent(benefit, expected):
    length = Interval(3.0, 3.0, 3.0)
    context, benefits = np.array([0, 2, 3]), np.array([1.0, benefit, 0.0])
    memory = Memory(
        10, None, True, context=context, benefit=benefits, length=length, rare_length=length, needed_length=length
    )
    assert f"Replacing step 3 from the end and everything older {expected}." in headline(memory, None, None)


@pytest.mark.parametrize(("peak", "is_said"), [(0.055, True), (0.04, False)])
def test_a_peak_that_a_figure_draws_above_the_threshold_has_its_sentence(peak, is_said):
    """The threshold lies between two of the permuted maxima, so that a peak above it may have p = 2 / 101."""
    by_step = np.array([0.01, peak, 0.02])
    test = Missed(effect=0.001, p_value=2 / 101, step=1, by_step=by_step, threshold=0.05, samples=100)
    said = [note for note in _power_notes(test) if "beyond 99 % of chance" in note]
    assert bool(said) == is_said


@pytest.mark.parametrize(
    ("later_steps", "expected"),
    [
        ((0, 1), "It does not depend on the only later step."),
        ((1, 1), "It also depends on the only later step."),
        ((2, 9), "It also depends on 2 of the 9 later steps."),
    ],
)
def test_later_steps_are_counted_in_words_that_fit_their_number(later_steps, expected):
    one = Interval(1.0, 1.0, 1.0)
    memory = Memory(10, None, True, length=one, rare_length=one, needed_length=one, later_steps=later_steps)
    text = headline(memory, None, None)
    assert expected in text
    assert "of 10 steps up to its own" in text


@pytest.mark.parametrize(("steps", "noun"), [(1, "1 step"), (2, "2 steps")])
def test_one_step_is_no_plural_where_measures_differ(steps, noun):
    signal, prediction = (
        StepsBack(name, steps, 20, "") for name in ("training signal reaches", "prediction depends on")
    )
    older = [
        sentence
        for rows in (
            [StepsBack("training signal reaches", 12, 20, ""), prediction],
            [StepsBack("prediction depends on", 12, 20, ""), signal],
        )
        for sentence in differences(rows)
    ]
    assert len(older) == 2
    assert all(f"older than {noun}" in sentence and f"{noun}s" not in sentence for sentence in older)
