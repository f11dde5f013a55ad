"""A disk that is full during a save: one clear error, the process continues, and the old file is unchanged.

The tests use the system's limit on the size of a file, which needs no disk of a particular size and no privileges.
"""

import os
import textwrap

import pytest

import rnnlens as rl

from .conftest import make_trace, values

SAVE = """
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
for attempt in range(3):
    try:
        made(2, steps={steps}).save("run{suffix}")
    except rl.errors.FileError as error:
        print(str(error).splitlines()[0], flush=True)
print("alive", values(rl.open("run{suffix}")))
"""


@pytest.mark.parametrize("limit", [100, 5_000, 60_000, 200_000, 400_000])
def test_netcdf(python, tmp_path, limit):
    make_trace(1).save(tmp_path / "run.nc")
    completed = python(SAVE.format(limit=limit, steps=400, suffix=".nc"))
    assert completed.stdout == "The file cannot be written.\n" * 3 + "alive [1.0]\n", completed.stderr
    assert completed.returncode == 0
    assert os.listdir(tmp_path) == ["run.nc"]


@pytest.mark.parametrize("limit", [10, 100, 300, 1_000, 3_000])
def test_zarr(python, tmp_path, limit):
    make_trace(1).save(tmp_path / "run.zarr")
    completed = python(SAVE.format(limit=limit, steps=400, suffix=".zarr"))
    assert completed.stdout == "The file cannot be written.\n" * 3 + "alive [1.0]\n", completed.stderr
    assert completed.returncode == 0
    assert os.listdir(tmp_path) == ["run.zarr"]


def test_with_room_it_is_saved(python, tmp_path):
    for suffix in (".nc", ".zarr"):
        make_trace(1).save(tmp_path / f"run{suffix}")
        completed = python(SAVE.format(limit=10_000_000, steps=400, suffix=suffix))
        assert completed.stdout == "alive [2.0]\n", completed.stderr


def test_too_little_memory_for_an_image(python, tmp_path):
    make_trace(1).save(tmp_path / "run.nc")
    code = """
        made(3).save("warm.nc")
        big = made(2, steps=60_000, layers=1)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 30_000_000,) * 2)
        try:
            big.save("run.nc")
        except rl.errors.TooLargeError as error:
            print(str(error).splitlines()[0])
        made(4).save("small.nc")
        print("alive")
    """
    completed = python(code)
    assert completed.stdout == "A netCDF file of this result is larger than the memory limit.\nalive\n", (
        completed.stderr
    )
    assert completed.returncode == 0
    assert values(rl.open(tmp_path / "run.nc")) == [1.0]
    assert values(rl.open(tmp_path / "small.nc")) == [4.0]


JACOBIAN = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.GRU(3, 4, batch_first=True).double()
    def forward(self, x):
        return self.rnn(x)[0]
torch.manual_seed(0)
model, x = Net(), torch.randn(6, 20, 3, dtype=torch.float64)
"""


def test_a_time_jacobian_in_pieces(python, tmp_path):
    code = JACOBIAN + textwrap.dedent(
        """
        rl.jacobian(model, x, out="whole.zarr", memory="1 KiB")
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, 3_000))
        try:
            rl.jacobian(model, x, out="j.zarr", memory="1 KiB")
        except rl.errors.FileError as error:
            print(str(error).splitlines()[0])
        print("alive")
        """
    )
    completed = python(code)
    assert completed.stdout == "The file cannot be written.\nalive\n", completed.stderr
    partial = rl.open(tmp_path / "j.zarr")
    assert not partial.finished
    assert partial.shape == rl.open(tmp_path / "whole.zarr").shape
    assert rl.open(tmp_path / "whole.zarr").finished
