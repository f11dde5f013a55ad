import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rnnlens as rl
from rnnlens import settings
from rnnlens.cli import steps

from .conftest import TORCH

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def keras_files(tmp_path_factory):
    """Save a loadable Keras model, one with a Lambda layer, and one with an unregistered class; return the folder."""
    import keras

    class Unregistered(keras.layers.Layer):
        def call(self, x):
            return x

    folder = tmp_path_factory.mktemp("models")
    for name, extra in {"good": [], "unsafe": [keras.layers.Lambda(lambda x: x * 2)], "own": [Unregistered()]}.items():
        lstm = keras.layers.LSTM(3, name="lstm")
        model = keras.Sequential([keras.Input((4, 2)), *extra, lstm, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.save(folder / f"{name}.keras")
    return folder


def arrays_of(path):
    with np.load(path) as file:
        return dict(file)


def test_version_and_help(rnnlens):
    result = rnnlens("--version")
    assert (result.code, result.out) == (0, f"rnnlens {rl.__version__}\n")
    listing = rnnlens("--help").out
    for command in ("layers", "trace", "diagnose", "report", "show", "demo"):
        assert command in listing
        assert rnnlens(command, "--help").code == 0


def test_layers_of_a_keras_file(rnnlens, keras_files):
    result = rnnlens("layers", keras_files / "good.keras")
    assert result.code == 0
    assert "1 recurrent layer" in result.out
    assert "lstm" in result.out
    assert "last step" in result.out
    assert result.err == ""


def test_trace_and_show_a_keras_file(rnnlens, folder, keras_files):
    import keras

    result = rnnlens("trace", keras_files / "good.keras", "data.npz", "-o", "run.nc")
    assert result.code == 0, result.err
    assert result.err == "wrote run.nc\n"
    data = arrays_of(folder / "data.npz")
    model = keras.saving.load_model(keras_files / "good.keras")
    expected = rl.trace(model, data["x"], data["y"])
    saved = rl.open(folder / "run.nc")
    np.testing.assert_array_equal(saved["lstm"].hidden_grad, expected["lstm"].hidden_grad)
    assert result.out.splitlines()[0] == repr(saved).splitlines()[0]
    for line in repr(saved).splitlines()[2:]:  # the lines after the title and the layer
        assert line.strip() in result.out
    row = next(line for line in result.out.splitlines() if line.startswith("lstm"))
    sizes = np.linalg.norm(saved["lstm"].hidden_grad.values.astype(float), axis=-1)
    relative = np.median(sizes / sizes.max(axis=1, keepdims=True), axis=0)
    blocks = [1 + np.log10(v / relative.max()) / 6 for v in relative]
    assert "".join("▁▂▃▄▅▆▇█"[round(share * 7)] for share in blocks) in row
    assert f"{sizes.max():.2g}" in row
    assert rnnlens("show", "run.nc").out == result.out
    assert rnnlens("show", "run.nc", "lstm").out == f"{saved['lstm']!r}\n"
    assert "dL/dh_t" in rnnlens("show", "run.nc", "lstm.hidden_grad").out


def test_json_for_scripts(rnnlens, folder, keras_files):
    result = rnnlens("trace", keras_files / "good.keras", "data.npz", "-o", "run.nc", "--json")
    summary, saved = json.loads(result.out), rl.open(folder / "run.nc")
    assert (summary["schema"], summary["kind"], summary["loss"]) == (1, "trace", pytest.approx(saved.loss))
    layer = summary["layers"][0]
    assert layer["name"] == "lstm"
    assert layer["variables"]["hidden"] == dict(saved["lstm"].hidden.sizes)
    curve = layer["profiles"]["all"]
    sizes = np.linalg.norm(saved["lstm"].hidden_grad.values.astype(float), axis=-1)
    relative = np.median(sizes / sizes.max(axis=1, keepdims=True), axis=0)
    np.testing.assert_allclose(curve["values"], relative, rtol=1e-5)
    assert curve["peak"] == pytest.approx(sizes.max())
    assert summary["certificate"]["state"] == "passed"
    assert all(check["ok"] for check in summary["checks"])
    assert json.loads(rnnlens("show", "run.nc", "--json").out) == summary
    array = json.loads(rnnlens("show", "run.nc", "lstm.hidden_grad", "--json").out)
    np.testing.assert_allclose(array["values"], saved["lstm"].hidden_grad, rtol=1e-6)
    assert array["dims"] == dict(saved["lstm"].hidden_grad.sizes)
    rows = json.loads(rnnlens("layers", keras_files / "good.keras", "--json").out)
    assert [row["name"] for row in rows] == ["lstm"]


def test_a_report_of_a_file(rnnlens, folder, keras_files):
    arguments = ("-o", "out.html", "--baseline", "init", "--no-diagnosis", "--title", "Mine")
    result = rnnlens("report", keras_files / "good.keras", "data.npz", *arguments)
    assert (result.code, result.err) == (0, "wrote out.html\n")
    text = (folder / "out.html").read_text("utf-8")
    assert "<h1>Mine</h1>" in text
    assert "re-initialised" in text
    rnnlens("trace", keras_files / "good.keras", "data.npz", "-o", "run.nc")
    result = rnnlens("report", "run.nc", "--json")
    assert json.loads(result.out) == {"report": "report.html", "bytes": (folder / "report.html").stat().st_size}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("data.npz", "-o", "out.txt"), "A report is an HTML file."),
        ((), "A report of a model needs data."),
        (("missing.npz",), "There is no such data file."),
        (("data.npz", "--tokens", "none.txt"), "The tokens cannot be read."),
    ],
)
def test_a_report_that_cannot_be(rnnlens, folder, keras_files, arguments, message):
    result = rnnlens("report", keras_files / "good.keras", *arguments)
    assert result.code == 2
    assert result.err.startswith(message)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("option", [("--samples", 3), ("-l", "lstm"), ("--no-diagnosis",), ("--seed", 0)])
def test_a_saved_result_is_reported_on_as_it_is(rnnlens, folder, keras_files, option):
    rnnlens("trace", keras_files / "good.keras", "data.npz", "-o", "run.nc")
    result = rnnlens("report", "run.nc", *option)
    assert result.code == 2
    assert result.err.startswith("A saved result is shown as it is.")


def test_layers_of_a_report_and_weights_of_its_samples(rnnlens, folder, keras_files):
    data = arrays_of(folder / "data.npz")
    np.savez(folder / "weighed.npz", **data, sample_weight=np.ones(len(data["x"])))
    options = ("-l", "lstm,nope", "--no-diagnosis", "--no-jacobian")
    result = rnnlens("report", keras_files / "good.keras", "weighed.npz", *options)
    assert result.code == 2
    assert result.err.startswith("sample_weight is left out")
    assert "'nope'" in result.err


def test_trace_only_what_is_asked(rnnlens, folder, keras_files):
    arguments = ("-q", "hidden_grad,output", "-q", "mask", "-l", "lstm", "-n", 2, "--loss", "mae", "-o", "run.zarr")
    result = rnnlens("trace", keras_files / "good.keras", "data.npz", *arguments)
    assert result.code == 0, result.err
    saved = rl.open(folder / "run.zarr")
    assert set(saved["lstm"]) <= {"output", "hidden_grad", "mask"}
    assert {"output", "hidden_grad"} <= set(saved["lstm"])
    assert saved["lstm"].output.sizes["sample"] == 2


def test_unsafe_content_is_refused_with_the_reason_unless_wanted(rnnlens, keras_files):
    path = keras_files / "unsafe.keras"
    result = rnnlens("layers", path)
    assert result.code == 2
    assert result.err == (
        "This model file is not loaded, because doing so could run code that it contains.\n"
        f"  got:      {path}: a Lambda layer that Keras' safe mode refuses\n"
        "  try:      --unsafe, if you trust whoever made the file\n"
    )
    assert rnnlens("layers", path, "--unsafe").code == 0


def test_custom_classes_are_imported_where_the_user_says(rnnlens, keras_files, module):
    path = keras_files / "own.keras"
    result = rnnlens("layers", path)
    assert result.code == 2
    assert result.err == (
        "The model uses 'Unregistered', which is not known here.\n"
        f"  got:      {path}\n"
        "  try:      --import your.module, where it is defined\n"
    )
    name = module(
        """
        import keras

        class Unregistered(keras.layers.Layer):
            def call(self, x):
                return x
        """
    )
    assert rnnlens("layers", path, "--import", name).code == 0


def test_trace_a_torch_module_with_weights(rnnlens, folder, module):
    import torch

    name = module(TORCH)
    user_module = __import__(name)
    torch.manual_seed(1)
    model = user_module.make()
    torch.save(model.state_dict(), "state.pt")
    torch.save({"epoch": 3, "state_dict": model.state_dict()}, "checkpoint.pt")
    data = {key: torch.from_numpy(value) for key, value in arrays_of("data.npz").items()}
    expected = rl.trace(model, data["x"], data["y"], loss=user_module.squared)
    losses = ("mse_loss", "mse", f"{name}:squared")
    for weights, loss in (("state.pt", losses[0]), ("checkpoint.pt", losses[1]), ("state.pt", losses[2])):
        result = rnnlens("trace", f"{name}:make", "--weights", weights, "data.npz", "--loss", loss, "-o", "run.nc")
        assert result.code == 0, result.err
        saved = rl.open("run.nc")
        np.testing.assert_allclose(saved["rnn[1]"].hidden_grad, expected["rnn[1]"].hidden_grad, rtol=1e-6)
    assert "rnn[0]" in rnnlens("layers", f"{name}:model").out


def test_pickled_weights_are_refused_with_the_reason_unless_wanted(rnnlens, module):
    import torch

    name = module(TORCH)
    torch.save(__import__(name).model, "whole.pt")
    arguments = ("trace", f"{name}:make", "--weights", "whole.pt", "data.npz")
    result = rnnlens(*arguments)
    assert result.code == 2
    assert result.err == (
        "This weights file is not loaded, because doing so could run code that it contains.\n"
        "  got:      whole.pt: more than tensors (torch.load with weights_only=True refuses it)\n"
        "  expected: torch.save(model.state_dict(), path)\n"
        "  try:      --unsafe, if you trust whoever made the file\n"
    )
    assert rnnlens(*arguments, "--unsafe", "--loss", "mse").code == 0


def test_factories_and_weights_that_do_not_fit(rnnlens, module, folder):
    import torch

    name = module(TORCH)
    torch.save({"rnn.weight_ih_l0": torch.zeros(1)}, "other.pt")
    (folder / "broken.pt").write_text("text")
    first_lines = {
        (f"{name}:makee",): f"{name} has nothing named 'makee'.",
        (f"{name}:number",): f"{name}:number is neither a model nor a function.",
        (f"{name}:needs",): f"{name}:needs cannot be called without arguments.",
        ("no_such_module:make",): "There is no module 'no_such_module'.",
        ("data.npz",): "This names no model.",
        ("missing.keras",): "There is no such model file.",
        ("missing.keras", "--weights", "other.pt"): "A model file has its own weights.",
        (f"{name}:make", "--weights", "other.pt"): "The shapes of these weights do not match the model.",
        (f"{name}:make", "--weights", "missing.pt"): "There is no such weights file.",
    }
    for arguments, line in first_lines.items():
        result = rnnlens("layers", *arguments)
        assert (result.code, result.err.splitlines()[0]) == (2, line)
        assert "Traceback" not in result.err
    assert rnnlens("layers", f"{name}:make", "--weights", "broken.pt").code == 2


def test_hints_are_what_to_type_on_the_command_line(rnnlens, module, folder):
    name = module(TORCH)
    (folder / "good.keras").write_text("")
    (folder / "table.csv").write_text("1,2")
    np.savez("other_names.npz", a=np.zeros(2), b=np.zeros(2))
    hints = {
        ("layers", "whole.pt"): "my_module:make --weights whole.pt, where make() in my_module.py returns the model",
        ("layers", "net.py"): "net:make, where make() in it returns the model",
        ("layers", "net"): "net:make, where make() in it returns the model",
        ("layers", f"{name}:makee"): "did you mean 'make'?",
        ("layers", f"{name}.py:make"): f"{name}:make",
        ("layers", "goood.keras"): "good.keras",
        ("layers", "good.kers"): "good.keras",
        ("layers", f"{name}s:make"): f"{name}, of this folder",
        ("trace", f"{name}:make", "table.csv"): "numpy.savez('data.npz', x=x, y=y)",
        ("trace", f"{name}:make", "other_names.npz"): "--x NAME --y NAME, with names from the file: a, b",
        ("trace", f"{name}:make", "data.npz"): "--loss ",
    }
    for arguments, hint in hints.items():
        result = rnnlens(*arguments)
        assert result.code == 2
        assert f"\n  try:      {hint}" in result.err, arguments
        assert "loss=" not in result.err


def test_a_damaged_model_file(rnnlens, folder):
    (folder / "broken.keras").write_text("text")
    result = rnnlens("layers", "broken.keras")
    assert result.code == 2
    assert result.err.startswith("This model file cannot be loaded.\n  got:      broken.keras: ")


def test_our_errors_are_printed_without_a_traceback(rnnlens, keras_files):
    good = keras_files / "good.keras"
    first_lines = {
        ("trace", good, "missing.npz"): "There is no such data file.",
        ("trace", good, "data.npz", "-q", "hiden_grad"): "There is no quantity 'hiden_grad'.",
        ("trace", good, "data.npz", "-o", "nowhere/run.nc"): "There is no such folder.",
        ("trace", good, "data.npz", "-o", "run.txt"): "The suffix of the path must name the format.",
        ("trace", good, "data.npz", "--x", "z"): "No array named 'z' in data.npz.",
        ("show", "missing.nc"): "There is no such file.",
    }
    for arguments, line in first_lines.items():
        result = rnnlens(*arguments)
        assert (result.code, result.err.splitlines()[0], result.out) == (2, line, "")
        assert "Traceback" not in result.err
    result = rnnlens("trace", good, "data.npz", "-l", "lsmt")
    assert result.code == 2
    assert "did you mean 'lstm'?" in result.err


def test_show_what_is_not_there(rnnlens, folder, keras_files):
    rnnlens("trace", keras_files / "good.keras", "data.npz", "-o", "run.nc", "-q", "hidden")
    for name, line in {
        "gru": "No layer named 'gru' in this trace.",
        "lstm.gates": "'gates' was not computed for layer 'lstm': it is not among quantities=.",
        "gru.hidden": "Nothing named 'gru.hidden' in this result.",
    }.items():
        result = rnnlens("show", "run.nc", name)
        assert (result.code, result.err.splitlines()[0]) == (2, line)


def test_a_failed_self_check_is_one_yellow_line(rnnlens, keras_files, monkeypatch):
    import warnings

    monkeypatch.setattr("rnnlens.verbs.recurrent_layers.rounding_bound", lambda *_, **__: 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = rnnlens("trace", keras_files / "good.keras", "data.npz")
    assert result.code == 0
    assert "warning: lstm: the replayed output differs from the captured one by" in result.err
    assert "FAILED lstm: the replayed output differs" in result.out


def test_an_interrupt_ends_with_its_own_code(rnnlens, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("rnnlens.cli.steps.load_model", interrupt)
    assert rnnlens("layers", "m:f").code == 130


def test_the_demo_is_handed_its_options(rnnlens, monkeypatch):
    calls = []
    monkeypatch.setattr("rnnlens.cli.demo.run", lambda *args, **kwargs: calls.append((args, kwargs)))
    assert rnnlens("demo", "-o", "figures", "--epochs", "2").code == 0
    ((args, kwargs),) = calls
    assert str(args[0]) == "figures"
    assert kwargs == {"epochs": 2, "seed": 0}


def choose_engine(environment, home):
    code = (
        "from rnnlens.cli import models; import os, importlib.util\n"
        f"missing, present = {environment.pop('WITHOUT', '')!r}, importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == missing else present(name)\n"
        "models._choose_engine(announce=True); print(os.environ.get('KERAS_BACKEND'))"
    )
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(home), **environment}
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean)
    return completed.stdout.strip(), completed.stderr.strip()


def test_the_engine_is_the_users_choice_else_an_installed_one_and_it_is_said(tmp_path):
    message = "Keras runs on {} (set KERAS_BACKEND to choose)"
    assert choose_engine({"KERAS_BACKEND": "torch"}, tmp_path) == ("torch", "")
    assert choose_engine({}, tmp_path) == ("jax", message.format("jax"))
    assert choose_engine({"WITHOUT": "jax"}, tmp_path) == ("torch", message.format("torch"))
    (tmp_path / ".keras").mkdir()
    (tmp_path / ".keras" / "keras.json").write_text('{"backend": "tensorflow"}')
    assert choose_engine({}, tmp_path) == ("tensorflow", message.format("tensorflow"))
    assert choose_engine({"WITHOUT": "tensorflow"}, tmp_path) == ("jax", message.format("jax"))
    (tmp_path / ".keras" / "keras.json").write_text("damaged")
    assert choose_engine({}, tmp_path) == ("jax", message.format("jax"))


def test_the_command_is_installed_and_runs_as_a_module(tmp_path):
    completed = subprocess.run(
        [sys.executable, "-m", "rnnlens.cli", "show", "none.nc"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert completed.returncode == 2
    assert completed.stdout == ""
    assert completed.stderr.splitlines()[0] == "There is no such file."


def test_a_command_leaves_no_option_behind(rnnlens, keras_files):
    before = settings.current()
    rnnlens("layers", keras_files / "good.keras")
    assert settings.current() == before


def test_a_keras_factory_takes_a_weights_file(rnnlens, folder, module):
    name = module(
        """
        import keras

        def make():
            return keras.Sequential([keras.Input((4, 2)), keras.layers.LSTM(3, name="lstm"), keras.layers.Dense(1)])

        def other():
            return keras.Sequential([keras.Input((4, 2)), keras.layers.LSTM(5, name="lstm")])
        """
    )
    model = __import__(name).make()
    model.save_weights("model.weights.h5")
    data = arrays_of("data.npz")
    arguments = ("data.npz", "--weights", "model.weights.h5", "--loss", "mse", "-o", "run.nc")
    result = rnnlens("trace", f"{name}:make", *arguments)
    assert result.code == 0, result.err
    expected = rl.trace(model, data["x"], data["y"], loss="mse")
    np.testing.assert_array_equal(rl.open("run.nc")["lstm"].hidden_grad, expected["lstm"].hidden_grad)
    result = rnnlens("trace", f"{name}:other", *arguments)
    assert result.code == 2
    assert result.err.splitlines()[0] == "The shapes of these weights do not match the model."


DIAGNOSED = """
    import torch
    from torch import nn

    class Last(nn.Module):
        '''Says the last value, and nothing else.'''

        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(1, 2, batch_first=True)
            with torch.no_grad():
                for weight in self.rnn.parameters():
                    weight.zero_()
                self.rnn.weight_ih_l0[0, 0] = 0.01
        def forward(self, x):
            return self.rnn(x)[0][:, -1, :1] * 100

    def make():
        return Last()
"""


def test_diagnose_says_what_is_used_and_fails_on_what_was_named(rnnlens, folder, module):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 12, 1)).astype("float32")
    np.savez(folder / "held_out.npz", x=x, y=x[:, -1])
    factory = f"{module(DIAGNOSED)}:make"
    result = rnnlens("diagnose", factory, "held_out.npz", "-o", "d.nc")
    assert result.code == 0, result.err
    assert "the input of the last step only, of 12 steps" in result.out
    assert rl.open(folder / "d.nc").codes == ("DEAD_UNITS", "LEAK", "LAST_STEP_ONLY")
    failed = rnnlens("diagnose", factory, "held_out.npz", "--fail-on", "dead_units")
    assert failed.code == 3
    assert "found: DEAD_UNITS" in failed.err
    assert rnnlens("diagnose", factory, "held_out.npz", "--fail-on", "VANISHING").code == 0
    misspelt = rnnlens("diagnose", factory, "held_out.npz", "--fail-on", "VANISHED")
    assert misspelt.code == 2
    assert "did you mean 'VANISHING'?" in misspelt.err


def test_diagnose_prints_json_of_a_stable_layout(rnnlens, folder, module):
    import json

    x = np.random.default_rng(0).normal(size=(200, 12, 1)).astype("float32")
    np.savez(folder / "held_out.npz", x=x, y=x[:, -1])
    result = rnnlens("diagnose", f"{module(DIAGNOSED)}:make", "held_out.npz", "--json")
    document = json.loads(result.out)
    keys = {"schema", "sentences", "findings", "measures", "how_far_back", "why_they_differ", "notes", "provenance"}
    assert set(document) == keys
    assert document["schema"] == 1
    assert document["measures"]["model"]["memory"] == 1
    finding = document["findings"][0]
    assert set(finding) == {"code", "severity", "layer", "sentence", "evidence", "threshold", "remedy"}


def test_every_finding_with_a_page_can_be_named_by_fail_on():
    pages = Path(__file__).parents[3] / "docs" / "findings"
    assert sorted(steps.FIGURE_OF_CODE) == sorted(page.stem for page in pages.glob("*.md") if page.stem != "README")
