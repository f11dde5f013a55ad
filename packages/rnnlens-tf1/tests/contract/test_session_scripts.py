"""Each session script of examples/legacy compares its results with NumPy, and the page on TensorFlow 1 runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).resolve().parents[4]
SCRIPTS = sorted((ROOT / "examples" / "legacy").glob("[a-e]_*_graph.py"))
EXPECTED_LINES = {
    "a": ["mean of the last hidden state: equal", "mean of all hidden states: equal", "[integer_input]"],
    "b": ["hidden gradient after the last batch: equal"],
    "c": ["d output[10] / d input: equal"],
    "d": ["conv1d/kernel: equal", "batch_normalization/gamma: equal", "GRU, update gate: equal"],
    "e": ["total gradient, both directions: equal"],
}
#: The script that quick runs include, under each control flow; the others run the same code once more.
QUICK = ("d_new_state_graph",)


def cases():
    for script in SCRIPTS:
        for dtype in ("float64", "float32"):
            marks = () if script.stem in QUICK and dtype == "float64" else (pytest.mark.full,)
            yield pytest.param(script, dtype, marks=marks, id=f"{script.stem}-{dtype}")


@pytest.mark.parametrize(("script", "dtype"), list(cases()))
def test_an_answer_is_equal_to_its_oracle(script, dtype):
    process = subprocess.run(
        [sys.executable, script, "--dtype", dtype],
        env={**os.environ, "MPLBACKEND": "Agg", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert all(sentence in process.stdout for sentence in EXPECTED_LINES[script.name[0]]), process.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_at_most_six_lines_are_ours(script):
    lines = [line.strip() for line in script.read_text().splitlines()]
    start, end = lines.index("# rnnlens"), lines.index("# ---")
    assert 0 < len([line for line in lines[start + 1 : end] if line.strip()]) <= 6


@pytest.mark.filterwarnings("ignore:`Model.state_updates`:UserWarning")
def test_the_page_about_sessions_runs(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "tensorflow-1.md"
    examples = list(Sybil(parsers=[PythonCodeBlockParser(), SkipParser()]).parse(page).examples())
    assert len(examples) > 5
    for example in examples:
        example.evaluate()
