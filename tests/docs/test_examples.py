"""Every example runs at its reduced size, prints its sentence and writes its figures."""

import io
import os
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[a-h]_*.py"))

#: By example, its last printed sentence and the files that it writes.
OUTPUTS = {
    "a": ("The last state still feels", {"a_hidden_states.png"}),
    "b": ("4 batches watched", {"b_inner_layer.png", "b_inner_layer.zarr"}),
    "c": ("output 10 is moved most by input step", {"c_output_step_10.png"}),
    "d": ("head/kernel has no gradient [not_on_path]", {"d_new_state.png"}),
    "e": (
        "both ways: first step over last",
        {
            "e_0d_last_step.png",
            "e_1d_one_way_5_iterations.png",
            "e_1d_one_way_60_iterations.png",
            "e_2d_both_ways.png",
        },
    ),
    "g": ("the frozen map shows", {"g_memory.png"}),
    "h": ("most weights: delta rule", {"h_scorecard.png"}),
    "f": ("as initialised: the gradient reaches", {"f_film.png", "f_timeline.png"}),
}


def test_all_eight_are_there():
    assert [script.name[0] for script in SCRIPTS] == list("abcdefgh")


#: Examples on TensorFlow run in separate processes; the others run in this one, which has JAX and torch.
ON_TENSORFLOW = "bd"


def output_of_process(script, folder):
    environment = {key: value for key, value in os.environ.items() if key != "KERAS_BACKEND"}
    completed = subprocess.run(
        [sys.executable, script, "--out", folder],
        env={**environment, "MPLBACKEND": "Agg", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def output_in_process(script, folder):
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), redirect_stdout(output):
        patch.syspath_prepend(EXAMPLES)
        patch.setattr(sys, "argv", [str(script), "--out", str(folder)])
        warnings.simplefilter("default")
        runpy.run_path(str(script), run_name="__main__")
    return output.getvalue()


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=pytest.mark.full) if script.name[0] in "ef" else script for script in SCRIPTS],
    ids=lambda script: script.stem,
)
def test_example_runs_and_draws(script, tmp_path):
    output = (
        output_of_process(script, tmp_path) if script.name[0] in ON_TENSORFLOW else output_in_process(script, tmp_path)
    )
    sentence, figures = OUTPUTS[script.name[0]]
    assert sentence in output
    assert {path.name for path in tmp_path.iterdir()} == figures
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir() if path.is_file())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_example_opens_with_a_question_and_says_how_to_run_it_in_full(script):
    lines = script.read_text().splitlines()
    assert lines[0].startswith('"""')
    assert lines[0].endswith("?")
    assert any(f"python examples/{script.name} --full" in line for line in lines)
