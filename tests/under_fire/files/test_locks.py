"""File locks: writers block neither readers nor each other, and leftovers are distinguished from running saves."""

import errno
import fcntl
import os
import threading

import h5py
import pytest

import rnnlens as rl
from rnnlens.errors import FileError
from rnnlens.results import disk

from .conftest import make_trace, values

#: A writer that pauses when the new file has its name, before the save ends.
STANDS_AT_THE_END = """
    from rnnlens.results import disk
    real = {function}
    def stand(*paths):
        real(*paths)
        print("named", flush=True)
        time.sleep(120)
    {function} = stand
    made(2).save("run{suffix}")
"""


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_readers_and_writers_beside_a_writer_that_has_not_ended(start, tmp_path, suffix):
    make_trace(1).save(tmp_path / f"run{suffix}")
    function = "disk._sync_folder" if suffix == ".nc" else "disk._replace_folder"
    writer = start(STANDS_AT_THE_END.format(suffix=suffix, function=function))
    assert writer.stdout.readline() == "named\n"
    assert values(rl.open(tmp_path / f"run{suffix}")) == [2.0]
    if suffix == ".nc":
        for mode in ("r", "r+"):
            h5py.File(tmp_path / "run.nc", mode).close()
    make_trace(3).save(tmp_path / f"run{suffix}")
    assert values(rl.open(tmp_path / f"run{suffix}")) == [3.0]
    assert writer.poll() is None


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_who_clears_up_too_late_does_not_keep_readers_out(tmp_path, suffix, monkeypatch):
    """Readers are not blocked if a cleaner locks a supposed leftover after it became the result, and pauses there."""
    path = tmp_path / f"run{suffix}"
    make_trace(1).save(path)
    leftover_seen, file_named, removing, release = (threading.Event() for _ in range(4))
    clearing = threading.Thread(target=disk.remove_leftovers, args=(tmp_path,))
    flock, remove, keep_permissions = fcntl.flock, disk._remove, disk._keep_permissions

    def late_lock(handle, operation):
        if threading.current_thread() is clearing:
            leftover_seen.set()
            assert file_named.wait(60)
        flock(handle, operation)

    def blocking_remove(leftover):
        if threading.current_thread() is clearing:
            removing.set()
            assert release.wait(60)
        remove(leftover)

    def start_clearing(*paths):
        keep_permissions(*paths)
        if not clearing.ident:
            clearing.start()
            assert leftover_seen.wait(60)

    monkeypatch.setattr(fcntl, "flock", late_lock)
    monkeypatch.setattr(disk, "_remove", blocking_remove)
    monkeypatch.setattr(disk, "_keep_permissions", start_clearing)
    make_trace(2).save(path)
    file_named.set()
    assert removing.wait(60)
    try:
        assert values(rl.open(path)) == [2.0]
    finally:
        release.set()
        clearing.join(60)
    assert values(rl.open(path)) == [2.0]
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_taken_for_a_leftover_as_soon_as_it_was_born(tmp_path, suffix, moment, monkeypatch):
    path, cleared = tmp_path / f"run{suffix}", []
    owner, name = (os, "mkdir") if moment == "before it is opened" else (fcntl, "flock")
    original = getattr(owner, name)

    def clear_once(*args):
        if owner is os:
            original(*args)
        if not cleared and any(entry.startswith(disk.TEMPORARY) for entry in os.listdir(tmp_path)):
            cleared.append(True)
            disk.remove_leftovers(tmp_path)
        if owner is fcntl:
            original(*args)

    monkeypatch.setattr(owner, name, clear_once)
    make_trace(1).save(path)
    assert cleared
    assert values(rl.open(path)) == [1.0]
    assert os.listdir(tmp_path) == [path.name]


def test_a_program_that_writes_the_file_itself(start, tmp_path):
    """Opening a file that another program writes gives an error that says so; saving leaves its open file unchanged."""
    path = tmp_path / "run.nc"
    make_trace(1)["lstm0"].hidden.to_netcdf(path)
    writer = start(
        """
        import h5py
        with h5py.File("run.nc", "r+") as file:
            print("open", flush=True)
            while not os.path.exists("go on"):
                time.sleep(0.01)
            print(float(file["hidden"][0, 0, 0]))
        """
    )
    assert writer.stdout.readline() == "open\n"
    with pytest.raises(FileError, match="This file cannot be read") as caught:
        rl.open(path)
    assert "after the program that is writing it has finished" in str(caught.value)
    make_trace(2).save(path)
    assert values(rl.open(path)) == [2.0]
    (tmp_path / "go on").touch()
    assert writer.stdout.readline() == "1.0\n"


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_where_folders_cannot_be_locked(tmp_path, suffix, swaps, monkeypatch):
    """Without folder locks saving works, and leftovers stay: they could be the files of a running save."""

    def refuse(*_):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    if not swaps:
        monkeypatch.setattr(disk, "_swap_names", lambda first, second: False)
    leftover = tmp_path / f"{disk.TEMPORARY}left"
    leftover.mkdir()
    for value in (1, 2):
        make_trace(value).save(tmp_path / f"run{suffix}")
        assert values(rl.open(tmp_path / f"run{suffix}")) == [value]
    assert sorted(os.listdir(tmp_path)) == sorted([leftover.name, f"run{suffix}"])
    aside = tmp_path / f"{disk.ASIDE}gone.zarr"
    aside.mkdir()
    disk.recover(tmp_path / "gone.zarr")
    assert aside.exists()
