"""Decompression bombs, false headers and user errors: one clear error at once, and a traceback only with --debug."""

import io
import os
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
from typer.testing import CliRunner

from rnnlens.cli.app import app
from rnnlens.cli.data import read_data
from rnnlens.cli.demo import make_folder
from rnnlens.errors import FileError, TooLargeError
from rnnlens.settings import options

from .conftest import PROGRAM, TORCH, environment


def header(shape, dtype="<f8"):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def refusal_lines(error, path):
    start = time.perf_counter()
    with pytest.raises(error) as caught:
        read_data(path)
    assert time.perf_counter() - start < 2
    return str(caught.value).splitlines()


@pytest.fixture
def bomb(tmp_path):
    """Provide an npz file of a third of a MiB that unpacks to 300 MiB of zeros."""
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as member:
        member.write(header((300 * 2**20 // 8,)))
        for _ in range(75):
            member.write(bytes(2**22))
    return path


def test_a_zip_bomb_is_refused_before_it_is_unpacked(bomb):
    lines = refusal_lines(FileError, bomb)
    assert lines[0] == "This file unpacks to far more than it holds."
    assert lines[1].endswith("that would become 300 MiB")


def test_as_a_model_or_as_weights_too(in_process, bomb, folder):
    (folder / "own.py").write_text(TORCH)
    for arguments in (("bomb.keras",), ("own:make", "--weights", "bomb.keras")):
        bomb.rename(folder / "bomb.keras") if bomb.exists() else None
        completed = in_process("layers", *arguments)
        assert (completed.returncode, completed.stderr.splitlines()[0]) == (
            2,
            "This file unpacks to far more than it holds.",
        )


def test_what_unpacks_to_more_than_the_memory_granted_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros((1000, 1000)))
    with options(memory="1 MiB"):
        lines = refusal_lines(TooLargeError, tmp_path / "x.npz")
        assert lines[0] == "These arrays are larger than the memory granted."
        assert lines[-1] == '  try:      --memory "8.39 MiB"'
    with options(memory="9 MiB"):
        assert read_data(tmp_path / "x.npz").x.shape == (1000, 1000)


def test_only_what_is_wanted_is_read(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros((10, 3)), other=np.zeros((1000, 1000)))
    with options(memory="1 MiB"):
        assert read_data(tmp_path / "x.npz").x.shape == (10, 3)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@pytest.mark.parametrize("shape", [(2**39,), (2**20, 2**19), (2**62, 2**62)])
def test_a_header_that_claims_terabytes(tmp_path, suffix, shape):
    path = tmp_path / f"x{suffix}"
    content = header(shape) + b"\0"
    if suffix == ".npy":
        path.write_bytes(content)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", content)
    lines = refusal_lines(FileError, path)
    assert lines[0] == "This data file is damaged."
    assert "1 B there" in lines[1]


def test_every_header_of_numpy_is_read(tmp_path):
    array = np.arange(6.0).reshape(2, 3)
    for version in ((1, 0), (2, 0), (3, 0)):
        with (tmp_path / "x.npy").open("wb") as stream:
            np.lib.format.write_array(stream, array, version=version)
        np.testing.assert_array_equal(read_data(tmp_path / "x.npy").x, array)
    np.savez_compressed(tmp_path / "x.npz", x=array)
    np.testing.assert_array_equal(read_data(tmp_path / "x.npz").x, array)


def test_a_folder_that_is_gone(command, folder):
    removed = folder / "gone"
    removed.mkdir()
    code = f"import os; os.chdir({str(removed)!r}); os.rmdir({str(removed)!r}); "
    for arguments in (["show", "run.nc"], ["layers", "own:make"]):
        completed = subprocess.run(
            [sys.executable, "-P", "-c", code + PROGRAM, *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        removed.mkdir()
        assert (completed.returncode, completed.stderr.splitlines()[0]) == (2, "The current folder is gone.")


@pytest.mark.parametrize("seed", [2**70, 2**32, -1])
@pytest.mark.parametrize("arguments", [("trace", "m:f", "data.npz"), ("demo",)])
def test_a_seed_that_no_generator_takes(arguments, seed):
    completed = CliRunner().invoke(app, [*arguments, "--seed", str(seed)])
    assert completed.exit_code == 2
    assert (
        f"should be {'greater than or equal to 0' if seed < 0 else 'less than or equal to 4294967295'}"
        in completed.output
    )


def test_targets_of_the_wrong_shape(in_process, folder):
    (folder / "own.py").write_text(TORCH)
    x = np.zeros((5, 4, 2))
    for y in (np.zeros((5, 7)), np.array([["a"]] * 5)):
        np.savez(folder / "data.npz", x=x, y=y)
        completed = in_process("trace", "own:make", "data.npz", "--loss", "mse")
        assert completed.returncode == 2
        assert "Traceback" not in completed.stderr
        assert len([line for line in completed.stderr.splitlines() if not line.startswith(("  ", "warning"))]) == 1


def test_the_demo_fails_before_training(in_process, folder):
    (folder / "file").write_text("in the way")
    completed = in_process("demo", "-o", "file")
    assert (completed.returncode, completed.stderr.splitlines()[0]) == (2, "Figures cannot be written there.")
    for path in ("file/below", "n" * 300, "/proc/figures"):
        with pytest.raises(FileError, match="Figures cannot be written there"):
            make_folder(folder / path)
    assert (folder / "file").read_text() == "in the way"


def test_an_error_nobody_foresaw_is_one_line_and_code_1(in_process, folder):
    (folder / "own.py").write_text("def make():\n    raise KeyError('my own')\n")
    completed = in_process("layers", "own:make")
    assert (completed.returncode, completed.stdout) == (1, "")
    assert completed.stderr.splitlines() == [
        "An unexpected error.",
        "  got:      KeyError: 'my own'",
        "  try:      --debug shows where",
    ]
    for arguments in (("--debug", "layers", "own:make"), ("layers", "own:make", "--debug")):
        completed = in_process(*arguments)
        assert completed.returncode == 1
        assert "Traceback" in completed.stderr
        assert 'own.py", line 2, in make' in completed.stderr


def test_the_codes_are_said_where_users_look(in_process):
    help_text = " ".join(in_process("--help").stdout.split())
    for phrase in ("0 success", "1 an unexpected error", "2 wrong arguments", "130 interrupted", "--debug"):
        assert phrase in help_text
    assert in_process("no-such-command").returncode == 2
    assert in_process("--version").returncode == 0


def test_a_file_of_hdf5_with_short_names_of_losses(folder):
    import keras

    from rnnlens.cli.models import load_model

    for loss in ("mse", "mae", "mape", "msle", "kld", "bce"):
        model = keras.Sequential([keras.Input((4, 2)), keras.layers.LSTM(3), keras.layers.Dense(1)])
        model.compile("sgd", loss, metrics=[loss])
        model.save(folder / "model.h5")
        assert load_model(str(folder / "model.h5")).loss is keras.losses.get(loss)


def test_standard_error_is_a_closed_pipe(command):
    read_end, write_end = os.pipe()
    os.close(read_end)
    os.close(write_end)
    assert command("show", "none.nc").returncode == 2
