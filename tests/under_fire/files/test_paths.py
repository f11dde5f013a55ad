"""Saving keeps the permissions, links and names of files that the user set."""

import json
import os
import stat
import tempfile
from pathlib import Path

import pytest

import rnnlens as rl
from rnnlens.errors import FileError, InputError

from .conftest import make_trace, values

each_format = pytest.mark.parametrize("suffix", [".nc", ".zarr"])


@each_format
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o700])
def test_permissions_stay(tmp_path, suffix, mode):
    path = tmp_path / f"run{suffix}"
    make_trace(1).save(path)
    path.chmod(mode)
    make_trace(2).save(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert values(rl.open(path)) == [2.0]


@each_format
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_new_file_has_the_usual_ones(tmp_path, suffix, mask):
    previous_mask = os.umask(mask)
    try:
        make_trace(1).save(tmp_path / f"run{suffix}")
        ordinary = tmp_path / "usual"
        ordinary.mkdir() if suffix == ".zarr" else ordinary.touch()
    finally:
        os.umask(previous_mask)
    assert (tmp_path / f"run{suffix}").stat().st_mode == ordinary.stat().st_mode


@each_format
def test_a_link_is_written_through(tmp_path, suffix):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    target, link, second_link = (
        tmp_path / "there" / f"real{suffix}",
        tmp_path / "here" / f"run{suffix}",
        tmp_path / f"l{suffix}",
    )
    link.symlink_to(target)  # its target does not exist yet
    second_link.symlink_to(link)
    for value, path in ((1, link), (2, second_link), (3, target)):
        make_trace(value).save(path)
        assert link.is_symlink()
        assert second_link.is_symlink()
        assert not target.is_symlink()
        assert values(rl.open(link)) == values(rl.open(second_link)) == values(rl.open(target)) == [float(value)]
    assert sorted(os.listdir(tmp_path)) == sorted(["here", f"l{suffix}", "there"])


@each_format
def test_names_that_no_file_can_have(tmp_path, suffix, monkeypatch):
    loop = tmp_path / f"loop{suffix}"
    loop.symlink_to(loop)
    for path in (
        tmp_path / ("n" * 300 + suffix),
        tmp_path / ("d" * 300) / f"run{suffix}",
        loop,
    ):
        with pytest.raises(FileError):
            make_trace(1).save(path)
        with pytest.raises(FileError):
            rl.open(path)
    for nonsense in (3, None, [tmp_path], tmp_path / f"n\0n{suffix}"):
        with pytest.raises(InputError):
            make_trace(1).save(nonsense)
        with pytest.raises(InputError):
            rl.open(nonsense)
    longest = tmp_path / ("n" * (255 - len(suffix)) + suffix)
    make_trace(1).save(longest)
    make_trace(2).save(longest)
    assert values(rl.open(longest)) == [2.0]


@each_format
def test_what_may_not_be_written_or_read(tmp_path, suffix, monkeypatch):
    """A missing permission raises a FileError; it is simulated, since the tests may run as root."""
    path = tmp_path / f"run{suffix}"
    make_trace(1).save(path)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    write_call = "mkdir" if suffix == ".zarr" else "open"
    for name, call in ((write_call, lambda: make_trace(2).save(path)), ("stat", lambda: rl.open(path))):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(FileError, match="Permission denied"):
                call()
    assert values(rl.open(path)) == [1.0]


def test_a_folder_without_write_permission(python):
    # Not below pytest's own folder, which other runs of pytest make accessible to its owner only.
    with tempfile.TemporaryDirectory() as outer:
        os.chmod(outer, 0o755)
        sealed = Path(outer, "sealed")
        sealed.mkdir(mode=0o555)
        completed = python(f"""
            if os.getuid() == 0:
                os.setgid(65534); os.setuid(65534)
            for suffix in (".nc", ".zarr"):
                try:
                    made(1).save({str(sealed)!r} + "/run" + suffix)
                except rl.errors.FileError as error:
                    print(str(error).splitlines()[0])
        """)
    assert completed.stdout == "This folder is not writable.\n" * 2, completed.stderr


@pytest.mark.parametrize("schema", ["abc", "1", 1.5, [1], None])
def test_a_schema_that_is_none(tmp_path, schema):
    import h5py

    hidden = make_trace(1)["lstm0"].hidden.assign_attrs(schema=json.dumps(schema) if schema in ([1], None) else schema)
    hidden.to_netcdf(tmp_path / "run.nc", encoding={})
    with h5py.File(tmp_path / "run.nc") as file:
        assert "schema" in file["hidden"].attrs
    with pytest.raises(FileError):
        rl.open(tmp_path / "run.nc")
