"""Files with false sizes, hidden contents or links to elsewhere: an rnnlens error at once, before data are read.

All of them are opened in one process, whose peak memory shows what reading them took.
"""

import hashlib
import json
import os
import shutil
import subprocess
import zlib

import h5py
import numpy as np
import pytest
import xarray as xr
import zarr

import rnnlens as rl
from rnnlens.errors import FileError, InputError, RnnlensError, TooLargeError
from rnnlens.results.disk.store import MANIFEST, read_manifest
from rnnlens.results.saving import root_attrs, save, tree_of
from rnnlens.results.trace import Trace

from .conftest import make_trace, values

MARKS = root_attrs("dataset", {})
SECRET = b"what is in another file" * 10


def chunked_and_empty(file):
    file.create_dataset("x", shape=(2**29,), chunks=(2**16,), dtype="f8", compression="gzip")


def moderately_large_and_empty(file):
    file.create_dataset("x", shape=(2**26,), dtype="f8")


def circle(file):
    inner = file.create_group("a/b")
    inner["back"] = file["a"]


def hard_link(file):
    file["x"] = np.ones(3)
    file["y"] = file["x"]


def soft_link(file):
    file["x"] = np.ones(3)
    file["y"] = h5py.SoftLink("/x")


def external_link(file):
    with h5py.File("other.h5", "w") as other_file:
        other_file["x"] = np.ones(3)
    file["x"] = h5py.ExternalLink("other.h5", "/x")


def external_storage(file):
    with open("secret", "wb") as secret:
        secret.write(SECRET)
    file.create_dataset("x", shape=(len(SECRET),), dtype="u1", external=[("secret", 0, len(SECRET))])


def virtual_dataset(file):
    with h5py.File("other.h5", "w") as other_file:
        other_file["x"] = np.ones(3)
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource("other.h5", "x", (3,))
    file.create_virtual_dataset("x", layout)


def bomb_in_a_chunk(file):
    x = file.create_dataset("x", shape=(2**16,), chunks=(2**16,), dtype="f8", compression="gzip")
    x.id.write_direct_chunk((0,), zlib.compress(bytes(2**29), 9))


def many_labels(file):
    file.create_dataset("x", shape=(2**27,), dtype=h5py.string_dtype(), chunks=(2**16,), compression="gzip")


def deep_groups(file):
    file.create_group("/".join("g" * 1000))


def object_references(file):
    file.create_dataset("x", shape=(3,), dtype=h5py.ref_dtype)


def deep_json(file):
    file.attrs["deep"] = "json:" + "[" * 100_000


def deep_meta(file):
    file.attrs["rnnlens_meta"] = "[" * 100_000


def huge_text(file):
    file.attrs["text"] = "json:[" + "[]," * 5_000_000 + "0]"


def schema_of_text(file):
    file.attrs["rnnlens_schema"] = "abc"


NETCDF = [
    chunked_and_empty,
    moderately_large_and_empty,
    circle,
    hard_link,
    soft_link,
    external_link,
    external_storage,
    virtual_dataset,
    bomb_in_a_chunk,
    many_labels,
    deep_groups,
    object_references,
    deep_json,
    deep_meta,
    huge_text,
    schema_of_text,
]


def change_array(root, **changed):
    metadata = json.loads((root / "x" / ".zarray").read_text())
    (root / "x" / ".zarray").write_text(json.dumps({**metadata, **changed}))


def claims_terabytes(root):
    change_array(root, shape=[2**31], chunks=[1000])


def claims_a_large_chunk(root):
    change_array(root, chunks=[2**31])


def lacks_most(root):
    change_array(root, shape=[2**27], chunks=[1000])


def lacks_one(root):
    (root / "x" / "1").unlink()


def holds_a_link(root):
    (root.parent.parent / "secret").write_bytes(SECRET)
    (root / "x" / "1").unlink()
    (root / "x" / "1").symlink_to(root.parent.parent / "secret")


def goes_in_circles(root):
    (root / "y").symlink_to(root)


def holds_a_pipe(root):
    os.mkfifo(root / "pipe")


def pickles(root):
    change_array(root, dtype="|O", filters=[{"id": "pickle"}])


def unpacks_to_gigabytes(root):
    chunk = bytearray((root / "x" / "0").read_bytes())
    chunk[4:8] = (2**31 - 100).to_bytes(4, "little")
    (root / "x" / "0").write_bytes(chunk)


def unpacks_to_terabytes(root):
    change_array(root, compressor={"id": "zstd", "level": 1})
    (root / "x" / "0").write_bytes(b"\x28\xb5\x2f\xfd\xe0" + (2**40).to_bytes(8, "little") + bytes(10))


def has_negative_shape(root):
    change_array(root, shape=[-5])


def is_deep(root):
    (root / "/".join("g" * 200)).mkdir(parents=True)


def has_deep_json(root):
    (root / "x" / ".zattrs").write_text("[" * 100_000)


def has_huge_json(root):
    (root / "x" / ".zattrs").write_text('{"a": [' + "[]," * 5_000_000 + "0]}")


def has_no_json(root):
    (root / "x" / ".zarray").write_text("[1]")


ZARR = [
    claims_terabytes,
    claims_a_large_chunk,
    lacks_most,
    lacks_one,
    holds_a_link,
    goes_in_circles,
    holds_a_pipe,
    pickles,
    unpacks_to_gigabytes,
    unpacks_to_terabytes,
    has_negative_shape,
    is_deep,
    has_deep_json,
    has_huge_json,
    has_no_json,
]


def rewrite_manifest(root):
    """Rewrite the list of checksums to match the files, as the author of a hostile file would."""
    digests = read_manifest(root)
    for key in digests:
        if (root / key).is_file():
            digests[key] = hashlib.sha256((root / key).read_bytes()).hexdigest()
    (root / MANIFEST).write_text("".join(f"{digest}  {key}\n" for key, digest in digests.items()))


OPENING = """
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024
made(1).save("warm.nc"); rl.open("warm.nc"); made(1).save("warm.zarr"); rl.open("warm.zarr")
for path in sorted(os.listdir("hostile")):
    before, start = peak(), time.perf_counter()
    try:
        rl.open("hostile/" + path)
        said = "opened"
    except BaseException as error:
        said = type(error).__name__
    print(json.dumps([path, said, time.perf_counter() - start, peak() - before]), flush=True)
"""


def open_all(python):
    completed = python(OPENING)
    assert completed.returncode == 0, completed.stderr[-2000:]
    rows = [json.loads(line) for line in completed.stdout.splitlines()]
    assert [row for row in rows if row[1] not in ("FileError", "TooLargeError")] == []
    assert [row for row in rows if row[2] > 2] == []
    assert [row for row in rows if row[3] > 500] == []
    return [row[0] for row in rows]


def test_netcdf(python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile").mkdir()
    for build in NETCDF:
        with h5py.File(tmp_path / "hostile" / f"{build.__name__}.nc", "w") as file:
            file.attrs.update(MARKS)
            build(file)
    assert len(open_all(python)) == len(NETCDF)


def test_zarr(python, tmp_path):
    (tmp_path / "hostile").mkdir()
    saved = tmp_path / "saved.zarr"
    save_in_three_chunks(saved)
    file_count = 0
    for build in ZARR:
        for seal in (False, True):
            root = tmp_path / "hostile" / f"{build.__name__}-{seal}.zarr"
            shutil.copytree(saved, root)
            build(root)
            if seal:
                rewrite_manifest(root)
            file_count += 1
    assert len(open_all(python)) == file_count


def save_in_three_chunks(path):
    dataset = xr.Dataset({"x": ("t", np.arange(3000.0))})
    dataset["x"].encoding["chunks"] = (1000,)
    save(tree_of(dataset), path)
    assert sorted(p.name for p in (path / "x").iterdir() if p.name.isdigit()) == ["0", "1", "2"]


def test_the_limit_is_the_users(tmp_path):
    for suffix in (".nc", ".zarr"):
        make_trace(1, steps=4000, layers=1).save(tmp_path / f"run{suffix}")
        with pytest.raises(TooLargeError) as caught:
            rl.open(tmp_path / f"run{suffix}", memory="4 MiB")
        lines = str(caught.value).splitlines()
        assert lines[0] == "This file is larger than the memory limit."
        assert lines[1].startswith(f"  got:      {tmp_path}/run{suffix}: arrays of 4.9")
        assert lines[2] == "  expected: at most 4 MiB (memory=)"
        assert lines[3].startswith('  try:      memory="5.')
        with rl.options(memory="4 MiB"), pytest.raises(TooLargeError):
            rl.open(tmp_path / f"run{suffix}")
        assert values(rl.open(tmp_path / f"run{suffix}", memory="6 MiB")) == [1.0]
    lazy = rl.open(tmp_path / "run.zarr", memory="4 MiB", lazy=True)
    assert values(lazy) == [1.0]


def test_a_damaged_part_is_found_also_when_it_is_read_later(tmp_path):
    make_trace(1).save(tmp_path / "run.zarr")
    lazy = rl.open(tmp_path / "run.zarr", lazy=True)
    chunk = next((tmp_path / "run.zarr" / "lstm0" / "hidden").glob("[0-9]*"))
    content = bytearray(chunk.read_bytes())
    content[-1] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(FileError, match="checksum"):
        np.asarray(lazy["lstm0"].hidden)
    chunk.unlink()
    with pytest.raises(FileError, match="missing"):
        np.asarray(lazy["lstm0"].hidden)


def test_zeros_and_nan_are_written_too(tmp_path):
    """Chunks of only the fill value are written, unlike Zarr's default, so that a lost chunk is noticed."""
    for value in (0.0, np.nan):
        make_trace(value).save(tmp_path / "run.zarr")
        assert np.array_equal(values(rl.open(tmp_path / "run.zarr"))[0], value, equal_nan=True)
        next((tmp_path / "run.zarr" / "lstm0" / "hidden").glob("[0-9]*")).unlink()
        with pytest.raises(FileError, match="missing"):
            rl.open(tmp_path / "run.zarr")


def test_a_checksum_that_was_cut_off_is_missed(tmp_path):
    make_trace(1).save(tmp_path / "run.nc")
    content = (tmp_path / "run.nc").read_bytes()
    (tmp_path / "run.nc").write_bytes(content[:-20])
    with pytest.raises(FileError, match="its checksum is missing"):
        rl.open(tmp_path / "run.nc")
    make_trace(1).save(tmp_path / "run.zarr")
    (tmp_path / "run.zarr" / MANIFEST).unlink()
    with pytest.raises(FileError, match="its checksum is missing"):
        rl.open(tmp_path / "run.zarr")


def test_others_read_our_files_and_sha256sum_checks_them(tmp_path):
    trace = make_trace(1)
    trace.save(tmp_path / "run.nc")
    trace.save(tmp_path / "run.zarr")
    for path, engine in ((tmp_path / "run.nc", "h5netcdf"), (tmp_path / "run.zarr", "zarr")):
        with xr.open_datatree(path, engine=engine) as tree:
            assert float(tree["lstm1/hidden"].mean()) == 1.0
    assert zarr.open_group(tmp_path / "run.zarr", mode="r")["lstm1/hidden"][:].mean() == 1.0
    subprocess.run(["sha256sum", "--check", "--quiet", MANIFEST], cwd=tmp_path / "run.zarr", check=True)


@pytest.mark.parametrize("name", ["two\nlines", "back\\slash", "\x85\u2028", "späße"])
def test_names_of_layers_survive_the_list(tmp_path, name):
    trace = Trace({name: make_trace(1).dataset("lstm0")})
    trace.save(tmp_path / "run.zarr")
    assert rl.open(tmp_path / "run.zarr").layers == (name,)


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_what_could_not_be_opened_again_is_not_saved(tmp_path, suffix):
    """Saving refuses megabytes of attributes, whose JSON takes seconds to read; no result of rnnlens has them."""
    dataset = xr.Dataset(attrs={"long": list(range(1_000_000))})
    with pytest.raises(InputError, match="'long'"):
        save(tree_of(dataset), tmp_path / f"run{suffix}")
    assert os.listdir(tmp_path) == []


def test_errors_are_ours(tmp_path):
    (tmp_path / "run.zarr").mkdir()
    (tmp_path / "run.zarr" / MANIFEST).write_bytes(b"\xff\xfe")
    with pytest.raises(RnnlensError):
        rl.open(tmp_path / "run.zarr")
