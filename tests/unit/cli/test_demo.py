"""``rnnlens demo``: figures from known gradients, sentences from given numbers, a complete run at a reduced size."""

from __future__ import annotations

import io
import os
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import xarray as xr
from rich.console import Console

from rnnlens.cli.demo import (
    RECIPES,
    Portrait,
    draw_samples,
    draw_steps,
    draw_units,
    load_digits,
    load_keras,
    run,
    sentence,
    table,
)
from rnnlens.errors import InputError
from rnnlens.results.diagnosis import Diagnosis
from rnnlens.results.schema import layer_dataset
from rnnlens.results.trace import Trace

pytestmark = pytest.mark.slow

STEPS = 64


def fading(rate: float) -> Trace:
    """Return a trace whose total gradient and input gradient are multiplied by ``rate`` with every step back."""
    norm = rate ** np.arange(STEPS)[::-1]
    arrays = {
        "hidden_grad": np.tile(norm[None, :, None], (3, 1, 4)),
        "input_grad": np.tile(norm[None, :, None], (3, 1, 1)),
    }
    info = {"name": "gru", "kind": "GRU", "cell": "gru", "units": 4, "direction": "forward"}
    return Trace({"gru": layer_dataset(arrays, info=info)}, loss=1.0)


def diagnosis(*, memory_known: bool = True, memory: float = 61, before: float = 4) -> Diagnosis:
    """Return a diagnosis with the given numbers of steps in memory, after and ``before`` training."""
    model = xr.Dataset(
        {
            "use": ("context", [0.9, 0.01]),
            "use_interval": (("context", "bound"), [[0.8, 0.95], [0.0, 0.02]]),
            "benefit": ("context", [0.9, 0.01]),
            "benefit_interval": (("context", "bound"), [[0.8, 0.95], [0.0, 0.02]]),
            "steps": STEPS,
            "memory": memory,
            "memory_interval": ("bound", [memory - 1, memory]),
            "memory_1_percent": 64.0,
            "memory_before": before,
        },
        coords={"context": [1, 61]},
        attrs={"known": memory_known, "why": "", "censored": False},
    )
    layer = xr.Dataset({"kappa": ("lag", 0.5 ** np.arange(STEPS + 1))})
    layer = layer.assign(kappa_low=layer.kappa, kappa_high=layer.kappa)
    return Diagnosis({"model": model, "gru": layer}, sentences={"gru": "gru uses the last 61 of 64 steps."})


def portrait(accuracy: tuple[float, float] = (0.05, 0.9), **options: Any) -> Portrait:
    return Portrait("gru", accuracy, diagnosis(**options), (fading(0.5), fading(0.9)), np.array([0.9, 0.1, 0.4]))


def output_of(*renderables: object) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    for item in renderables:
        console.print(item)
    return console.export_text()


def test_table_shows_the_diagnosis():
    text = output_of(table([portrait()]))
    for expected in ("gru", "61", "60 to 61", ">= 64", "4", f"{0.5**63:.1e}", "5 % → 90 %"):
        assert expected in text


def test_no_memory_is_shown_where_it_is_unknown():
    text = output_of(table([portrait(memory_known=False)]))
    assert "unknown" in text
    assert "61" not in text


def test_sentence_is_that_of_the_diagnosis():
    assert sentence(portrait()) == "gru uses the last 61 of 64 steps. Accuracy 5 % → 90 %."


def test_figures_show_before_and_after():
    (panel,) = draw_steps([portrait()]).figure.axes
    before, after = (line for line in panel.lines if line.get_gid() == "hidden_grad")
    np.testing.assert_allclose(before.get_ydata(), 0.5 ** np.arange(STEPS)[::-1])
    np.testing.assert_allclose(after.get_ydata(), 0.9 ** np.arange(STEPS)[::-1])
    names = [text.get_text().partition(":")[0] for text in panel.get_legend().get_texts()]
    assert names == ["before training", "after training"]
    assert panel.get_xlabel() == "steps before the answer"
    positions = {
        text.get_text(): float(position)
        for position, text in zip(panel.get_xticks(), panel.get_xticklabels(), strict=True)
    }
    assert positions["0"] == STEPS - 1
    assert panel.get_yscale() == "log"


def test_the_picture_of_a_network_is_that_of_all_its_digits_each_by_its_own_peak():
    images = [ax for ax in draw_units(portrait()).figure.axes if ax.images]
    assert [ax.get_title() for ax in images] == [
        "before training",
        "after training",
        "ratio",
    ]
    np.testing.assert_allclose(images[1].images[0].get_array()[2], 0.9 ** np.arange(STEPS)[::-1])
    titles = [ax.get_title() for ax in draw_samples(portrait()).figure.axes if ax.images]
    assert titles[0] == "before training · sample 2"  # its loss before training is unknown
    assert titles[1] == "after training\nsample 2, loss 0.4 (the median)"


def test_digits_are_split_without_overlap_and_scaled():
    digits = load_digits(None, seed=0)
    assert digits.x_train.shape == (1437, 64, 1)
    assert digits.x_test.shape == (360, 64, 1)
    x = np.concatenate([digits.x_train, digits.x_test])
    assert abs(float(x.mean())) < 1e-6
    assert float(x.std()) == pytest.approx(1.0, abs=1e-6)


#: Run of a few seconds per network.
REDUCED = {"units": 4, "epochs": 1, "train": 64}


@pytest.mark.parametrize("cells", [("GRU",), tuple(RECIPES)], ids=["one network", "all networks"])
def test_everything_at_a_reduced_size(cells, tmp_path):
    console = Console(width=120, record=True, file=io.StringIO())
    portraits = run(tmp_path / "figures", cells=cells, **REDUCED, console=console)
    text = console.export_text()
    assert [portrait.layer for portrait in portraits] == [RECIPES[cell].layer for cell in cells]
    for portrait in portraits:
        assert f"\n {portrait.layer} " in text
        assert next(iter(portrait.diagnosis.sentences.values())) in text.replace("\n", " ")
        assert (tmp_path / "figures" / f"{portrait.layer}-before-after.png").stat().st_size > 0
        assert (tmp_path / "figures" / f"{portrait.layer}-diagnosis.png").stat().st_size > 0
    assert (tmp_path / "figures" / "gradient-by-step.svg").stat().st_size > 0


@pytest.mark.full
def test_a_second_run_has_the_same_results(tmp_path):
    first, second = (
        run(tmp_path / name, cells=["SimpleRNN"], **REDUCED, console=Console(quiet=True))[0] for name in ("one", "two")
    )
    assert second.accuracy == first.accuracy
    assert str(second.diagnosis) == str(first.diagnosis)


def test_nothing_to_compare_without_training(tmp_path):
    with pytest.raises(InputError) as caught:
        run(tmp_path, epochs=0)
    assert str(caught.value) == ("Nothing to compare without training.\n  got:      epochs=0\n  expected: >= 1")


@pytest.mark.parametrize(("user_engine", "engine"), [(None, "jax"), ("torch", "torch")])
def test_engine_is_jax_unless_the_user_chose_one(user_engine, engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", ModuleType("keras"))
    monkeypatch.delenv("KERAS_BACKEND")
    if user_engine:
        monkeypatch.setenv("KERAS_BACKEND", user_engine)
    load_keras()
    assert os.environ["KERAS_BACKEND"] == engine
