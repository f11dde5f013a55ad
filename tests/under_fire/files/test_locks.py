"""What locks do: readers are never kept out by our writers, nor writers by each other; leftovers are told from work."""

import errno
import fcntl
import os
import threading

import h5py
import pytest

import rnnlens as rl
from rnnlens.errors import FileError
from rnnlens.results import disk

from .conftest import made, values

#: A writer that stands still where the new file has its name and the save has not ended.
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
    made(1).save(tmp_path / f"run{suffix}")
    function = "disk._sync_folder" if suffix == ".nc" else "disk._replace_folder"
    writer = start(STANDS_AT_THE_END.format(suffix=suffix, function=function))
    assert writer.stdout.readline() == "named\n"
    assert values(rl.open(tmp_path / f"run{suffix}")) == [2.0]
    if suffix == ".nc":
        for mode in ("r", "r+"):
            h5py.File(tmp_path / "run.nc", mode).close()
    made(3).save(tmp_path / f"run{suffix}")
    assert values(rl.open(tmp_path / f"run{suffix}")) == [3.0]
    assert writer.poll() is None


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_who_clears_up_too_late_does_not_keep_readers_out(tmp_path, suffix, monkeypatch):
    """One that saw a leftover, locks it when it has become the result, and stands there."""
    path = tmp_path / f"run{suffix}"
    made(1).save(path)
    seen, named, held, end = (threading.Event() for _ in range(4))
    clearing = threading.Thread(target=disk.remove_leftovers, args=(tmp_path,))
    lock, remove, keep = fcntl.flock, disk._remove, disk._keep_permissions

    def late_lock(handle, how):
        if threading.current_thread() is clearing:
            seen.set()
            assert named.wait(60)
        lock(handle, how)

    def standing_remove(found):
        if threading.current_thread() is clearing:
            held.set()
            assert end.wait(60)
        remove(found)

    def seen_before_it_is_named(*paths):
        keep(*paths)
        if not clearing.ident:
            clearing.start()
            assert seen.wait(60)

    monkeypatch.setattr(fcntl, "flock", late_lock)
    monkeypatch.setattr(disk, "_remove", standing_remove)
    monkeypatch.setattr(disk, "_keep_permissions", seen_before_it_is_named)
    made(2).save(path)
    named.set()
    assert held.wait(60)
    try:
        assert values(rl.open(path)) == [2.0]
    finally:
        end.set()
        clearing.join(60)
    assert values(rl.open(path)) == [2.0]
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_taken_for_a_leftover_as_soon_as_it_was_born(tmp_path, suffix, moment, monkeypatch):
    path, cleared = tmp_path / f"run{suffix}", []
    owner, name = (os, "mkdir") if moment == "before it is opened" else (fcntl, "flock")
    real = getattr(owner, name)

    def clear_once(*args):
        if owner is os:
            real(*args)
        if not cleared and any(found.startswith(disk.TEMPORARY) for found in os.listdir(tmp_path)):
            cleared.append(True)
            disk.remove_leftovers(tmp_path)
        if owner is fcntl:
            real(*args)

    monkeypatch.setattr(owner, name, clear_once)
    made(1).save(path)
    assert cleared
    assert values(rl.open(path)) == [1.0]
    assert os.listdir(tmp_path) == [path.name]


def test_a_program_that_writes_the_file_itself(start, tmp_path):
    """It locks the file, which the error says; a save leaves alone what it has open."""
    path = tmp_path / "run.nc"
    made(1)["lstm0"].hidden.to_netcdf(path)
    theirs = start(
        """
        import h5py
        with h5py.File("run.nc", "r+") as file:
            print("open", flush=True)
            while not os.path.exists("go on"):
                time.sleep(0.01)
            print(float(file["hidden"][0, 0, 0]))
        """
    )
    assert theirs.stdout.readline() == "open\n"
    with pytest.raises(FileError, match="This file cannot be read") as caught:
        rl.open(path)
    assert "after the program that is writing it has finished" in str(caught.value)
    made(2).save(path)
    assert values(rl.open(path)) == [2.0]
    (tmp_path / "go on").touch()
    assert theirs.stdout.readline() == "1.0\n"


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_where_folders_cannot_be_locked(tmp_path, suffix, swaps, monkeypatch):
    """Saving works; what a killed process left cannot be told from what another writes, and stays."""

    def refuse(*_):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    if not swaps:
        monkeypatch.setattr(disk, "_swap_names", lambda one, other: False)
    left = tmp_path / f"{disk.TEMPORARY}left"
    left.mkdir()
    for value in (1, 2):
        made(value).save(tmp_path / f"run{suffix}")
        assert values(rl.open(tmp_path / f"run{suffix}")) == [value]
    assert sorted(os.listdir(tmp_path)) == sorted([left.name, f"run{suffix}"])
    aside = tmp_path / f"{disk.ASIDE}gone.zarr"
    aside.mkdir()
    disk.recover(tmp_path / "gone.zarr")
    assert aside.exists()
