"""Results of every kind are restored from files with their class, also where it has not been imported yet."""

import json
import subprocess
import sys

import numpy as np
import pytest

from rnnlens.cli import console
from rnnlens.cli.steps import summary_of
from rnnlens.results import opening
from rnnlens.results.base import Result, result_class
from rnnlens.results.diagnosis import Diagnosis, Finding
from rnnlens.results.gradients import Gradients, Reason, Weights

from .conftest import lstm_dataset, normal


def gradients():
    dataset = lstm_dataset()[["hidden_grad"]]
    dataset["hidden_grad"].attrs["tensor"] = "lstm.hidden"
    reason = Reason("head/kernel", "not_on_path", "It is not on the path.", 'of="output"')
    return Gradients({"lstm": dataset}, value=0.5, disconnected={"head/kernel": reason})


def weights():
    return Weights({"lstm": lstm_dataset()[["gates"]]}, penalties={"lstm/kernel": 0.25}, loss=1.0)


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
@pytest.mark.parametrize("make_result", [gradients, weights])
def test_they_come_back(make_result, tmp_path, suffix):
    result = make_result()
    result.save(tmp_path / f"run{suffix}")
    loaded = opening.open(tmp_path / f"run{suffix}")
    assert type(loaded) is type(result)
    assert repr(loaded) == repr(result)
    assert loaded._meta() == result._meta()
    code = f"import rnnlens as rl; print(type(rl.open({str(tmp_path / f'run{suffix}')!r})).__name__)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == type(result).__name__


def test_a_new_kind_needs_a_constructor_and_its_metadata_only(tmp_path):
    class Spectrum(Result, kind="spectrum_of_a_test"):
        def __init__(self, datasets, *, exponents=(), **common):
            super().__init__(datasets, **common)
            self.exponents = list(exponents)

        def _meta(self):
            return {**super()._meta(), "exponents": self.exponents}

    Spectrum({"b": lstm_dataset("b"), "a": lstm_dataset("a")}, exponents=[0.5, -1.0]).save(tmp_path / "run.nc")
    loaded = opening.open(tmp_path / "run.nc")
    assert isinstance(loaded, Spectrum)
    assert loaded.exponents == [0.5, -1.0]
    assert loaded.layers == ("b", "a")
    assert loaded["a"].identical(loaded.dataset("a"))


def test_a_kind_in_a_file_imports_nothing_of_ours_by_accident():
    assert result_class("files") is None
    assert result_class("no_such_kind") is None
    assert result_class("../evil") is None


def test_the_data_of_a_result_is_not_copied():
    values = normal(3, 4, 2)
    dataset = lstm_dataset()
    dataset["hidden"].values = values
    assert Weights({"lstm": dataset}).dataset("lstm")["hidden"].values is values


def test_evidence_of_findings_is_strict_json(capsys):
    evidence = {"growth": np.float32(2.5), "of the output": float("nan"), "stderr": np.float64("inf"), "steps": 30}
    finding = Finding("EXPLODING", "fault", "lstm", "Gradients grow.", evidence)
    diagnosis = Diagnosis({"lstm": lstm_dataset()}, findings=[finding])
    expected = {"growth": 2.5, "of the output": None, "stderr": None, "steps": 30}

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(diagnosis.to_json(), parse_constant=refuse)["findings"][0]["evidence"] == expected
    console.print_json(summary_of(diagnosis))  # `rnnlens diagnose --json`
    assert json.loads(capsys.readouterr().out)["findings"][0]["evidence"] == expected
