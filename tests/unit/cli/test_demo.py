"""The demo: its numbers from known gradients, its words from its numbers, and the whole of it at a reduced size."""

from __future__ import annotations

import io
import os
import sys
from types import ModuleType

import numpy as np
import pytest
from rich.console import Console

from rnnlens.cli.demo import load_digits, load_keras, run
from rnnlens.cli.portrait import Portrait, Reading, draw_steps, draw_units, lag_norms, read, sentence, table, verdict
from rnnlens.errors import InputError
from rnnlens.results.schema import layer_dataset
from rnnlens.results.trace import Trace

STEPS = 64


def fading(rate: float) -> Trace:
    """A trace whose total gradient shrinks by ``rate`` with every step back, and whose input gradient is the same."""
    norm = rate ** np.arange(STEPS)[::-1]
    arrays = {
        "hidden_grad": np.tile(norm[None, :, None], (3, 1, 4)),
        "input_grad": np.tile(norm[None, :, None], (3, 1, 1)),
    }
    info = {"name": "gru", "kind": "GRU", "cell": "gru", "units": 4, "direction": "forward"}
    return Trace({"gru": layer_dataset(arrays, info=info)}, loss=1.0)


def reading(**changed: float) -> Reading:
    return Reading(**{"accuracy": 0.9, "reach": 1.0, "half": 30.0, "mean_lag": 20.0, **changed})


def output_of(*printed: object) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    for item in printed:
        console.print(item)
    return console.export_text()


def test_numbers_of_a_geometric_gradient():
    seen = read(fading(0.5)["gru"], np.ones((STEPS, 1)), accuracy=0.25)
    # 0.5**tau > 0.01 for tau = 0..6; the mean lag of a geometric series is rate / (1 - rate)
    assert seen.reach == 7 / STEPS
    assert seen.half == pytest.approx(1.0)
    assert seen.mean_lag == pytest.approx(1.0, abs=1e-6)
    assert seen.accuracy == 0.25


def test_half_is_counted_from_the_last_step_and_not_from_the_peak():
    gradient = np.full((1, STEPS, 1), 1e-3)
    gradient[:, -11] = 1.0
    info = {"name": "gru", "kind": "GRU", "cell": "gru", "units": 1, "direction": "forward"}
    trace = Trace({"gru": layer_dataset({"hidden_grad": gradient, "input_grad": gradient}, info=info)})
    assert 10 < read(trace["gru"], np.ones((STEPS, 1)), accuracy=0.0).half < 11


def test_input_that_never_varies_is_not_listened_to():
    spread = np.zeros((STEPS, 1))
    spread[-1] = 1.0
    assert read(fading(0.9)["gru"], spread, accuracy=0.0).mean_lag == 0.0


def test_gradient_that_never_halves():
    seen = read(fading(1.0)["gru"], np.ones((STEPS, 1)), accuracy=0.0)
    assert seen.half == float("inf")
    assert "never" in output_of(table([Portrait("gru", seen, seen, (fading(1.0), fading(1.0)))]))


def test_mean_is_taken_of_norms_and_the_last_step_comes_first():
    gradient = np.zeros((2, 3, 2))
    gradient[0, 2] = [3, 4]
    gradient[1, 2] = [-3, -4]
    np.testing.assert_allclose(lag_norms(gradient), [5, 0, 0])


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"accuracy": 0.1, "reach": 0.1, "mean_lag": 2}, {}, "it learned to look far back, although the gradient had"),
        ({"accuracy": 0.1, "reach": 0.9, "mean_lag": 2}, {}, "it learned to look further back"),
        ({"accuracy": 0.1, "reach": 0.1, "mean_lag": 19}, {}, "it learned the task without looking further back"),
        ({"accuracy": 0.1, "reach": 0.1, "mean_lag": 2}, {"accuracy": 0.2}, "it did not learn the task"),
    ],
)
def test_verdict_follows_from_the_comparison(before, after, words):
    assert verdict(reading(**before), reading(**after)).startswith(words)


def test_sentence_names_its_numbers():
    portrait = Portrait("gru", reading(accuracy=0.05, reach=0.14, mean_lag=1.6), reading(), ())
    assert sentence(portrait) == (
        "gru: before training the loss reached back over 14 % of the steps and listened 1.6 steps back on average; "
        "after, over 100 % and 20.0. Accuracy 5 % → 90 %: it learned to look far back, although the gradient had "
        "vanished over most steps at the start."
    )


def test_figures_show_before_and_after():
    portrait = Portrait("gru", reading(), reading(), (fading(0.5), fading(0.9)))
    figure = draw_steps([portrait])
    (panel,) = figure.axes
    before, after = (np.asarray(path.vertices)[:, 1] for path in panel.collections[0].get_paths())
    np.testing.assert_allclose(before, 2 * 0.5 ** np.arange(STEPS)[::-1])
    np.testing.assert_allclose(after, 2 * 0.9 ** np.arange(STEPS)[::-1])
    assert panel.get_yscale() == "log"
    images = [ax for ax in draw_units(portrait).axes if ax.images]
    assert [ax.get_title() for ax in images] == ["training before", "training after"]


def test_digits_are_split_without_overlap_and_scaled():
    digits = load_digits(None, seed=0)
    assert digits.x_train.shape == (1437, 64, 1)
    assert digits.x_test.shape == (360, 64, 1)
    x = np.concatenate([digits.x_train, digits.x_test])
    assert abs(float(x.mean())) < 1e-6
    assert float(x.std()) == pytest.approx(1.0, abs=1e-6)


def test_everything_at_a_reduced_size(tmp_path):
    console = Console(width=120, record=True, file=io.StringIO())
    size = {"units": 4, "epochs": 1, "train": 64}
    portraits = run(tmp_path / "figures", **size, console=console)
    printed = console.export_text()
    assert [portrait.layer for portrait in portraits] == ["simple_rnn", "gru", "lstm"]
    for portrait in portraits:
        assert f"│ {portrait.layer}" in printed
        assert f"{portrait.layer}: before training the loss reached back over" in printed
        assert (tmp_path / "figures" / f"{portrait.layer}-before-after.png").stat().st_size > 0
        assert portrait.before != portrait.after
    assert (tmp_path / "figures" / "gradient-by-step.png").stat().st_size > 0
    again = run(tmp_path / "again", cells=["SimpleRNN"], **size, console=Console(quiet=True))
    assert again[0].after == portraits[0].after


def test_nothing_to_compare_without_training(tmp_path):
    with pytest.raises(InputError) as caught:
        run(tmp_path, epochs=0)
    assert str(caught.value) == ("Nothing to compare without training.\n  got:      epochs=0\n  expected: >= 1")


@pytest.mark.parametrize(("chosen", "engine"), [(None, "jax"), ("torch", "torch")])
def test_engine_is_jax_unless_the_user_chose_one(chosen, engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", ModuleType("keras"))
    monkeypatch.delenv("KERAS_BACKEND")
    if chosen:
        monkeypatch.setenv("KERAS_BACKEND", chosen)
    load_keras()
    assert os.environ["KERAS_BACKEND"] == engine
