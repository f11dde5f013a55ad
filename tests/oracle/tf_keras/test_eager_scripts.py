"""Each eager script of examples/legacy runs in a process of its own and compares its results with NumPy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEGACY = Path(__file__).resolve().parents[3] / "examples" / "legacy"
SCRIPTS = sorted(LEGACY.glob("[a-e]_*_eager.py"))
EXPECTED_LINES = {
    "a": ["mean of the last hidden state: equal", "mean of all hidden states: equal", "by the ids: "],
    "b": ["training is the same without, to the last bit", "batch 15: direct", "batch 15: total"],
    "c": ["d output[10] / d input: equal", "norms of the whole map: equal"],
    "e": ["total gradient, both directions: equal", "direct gradient of the layer above: equal"],
}


def test_all_but_that_of_a_graph_are_there():
    assert [script.name[0] for script in SCRIPTS] == list("abce")


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "script",
    [script if script.name[0] == "b" else pytest.param(script, marks=pytest.mark.full) for script in SCRIPTS],
    ids=lambda script: script.stem,
)
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
    lines, count, in_block = script.read_text().splitlines(), 0, False
    for line in lines:
        in_block = (in_block or line == "# rnnlens") and line != "# ---"
        count += (in_block and line != "# rnnlens") or line.endswith("# rnnlens")
    assert 0 < count <= 6
