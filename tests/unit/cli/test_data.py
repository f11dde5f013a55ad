import numpy as np
import pytest

from rnnlens.cli.data import read_data
from rnnlens.errors import FileError, InputError


@pytest.fixture
def save(tmp_path):
    def write(**arrays):
        np.savez(tmp_path / "data.npz", **arrays)
        return tmp_path / "data.npz"

    return write


def test_x_and_y_by_default(save):
    data = read_data(save(x=np.zeros((2, 3)), y=np.ones(2), other=np.zeros(1), sample_weight=np.full(2, 0.5)))
    assert data.x.shape == (2, 3)
    assert data.y.tolist() == [1, 1]
    assert data.sample_weight.tolist() == [0.5, 0.5]
    assert read_data(save(x=np.zeros((2, 3)))).y is None


def test_a_single_array_needs_no_name(save, tmp_path):
    assert read_data(save(pixels=np.zeros((2, 3)))).x.shape == (2, 3)
    np.save(tmp_path / "data.npy", np.ones((4, 1)))
    assert read_data(tmp_path / "data.npy").x.shape == (4, 1)


def test_several_inputs_in_the_order_asked(save):
    path = save(a=np.zeros((2, 1)), b=np.zeros((2, 2)), t=np.ones(2), w=np.ones(2))
    data = read_data(path, ["b", "a"], ["t"], "w")
    assert [array.shape for array in data.x] == [(2, 2), (2, 1)]
    assert data.y.shape == (2,)
    first = data.head(1)
    assert [array.shape for array in first.x] == [(1, 2), (1, 1)]
    assert first.y.shape == first.sample_weight.shape == (1,)
    assert data.head(None) is data


def error_message(error, path, *names):
    with pytest.raises(error) as caught:
        read_data(path, *names)
    return str(caught.value)


def test_an_unknown_array_is_named_with_the_closest(save):
    path = save(x=np.zeros(1), target=np.zeros(1))
    assert error_message(InputError, path, ["x"], ["targt"]) == (
        f"No array named 'targt' in {path}.\n  try:      did you mean 'target'? Known: 'x', 'target'"
    )


def test_python_objects_are_never_unpickled(save):
    path = save(x=np.array([{"a": 1}], dtype=object))
    assert error_message(FileError, path) == (
        f"This data file cannot be read.\n"
        f"  got:      {path}: it holds Python objects, which could run code on loading\n"
        "  expected: plain arrays, saved with numpy.savez(path, x=..., y=...)\n"
        "  try:      numpy.savez('data.npz', x=x, y=y), with x of shape (sample, time, feature)"
    )


def test_files_that_are_missing_or_damaged(tmp_path):
    path = tmp_path / "data.npz"
    assert error_message(FileError, path) == (
        f"There is no such data file.\n  got:      {path}\n  expected: a .npz file, as numpy.savez writes\n"
        "  try:      numpy.savez('data.npz', x=x, y=y), with x of shape (sample, time, feature)"
    )
    for content, reason in {
        b"": "No data left in file",
        b"text": "it is neither .npz nor .npy",
        b"PK\x03\x04 half a zip": "File is not a zip file",
    }.items():
        path.write_bytes(content)
        message = error_message(FileError, path)
        assert message.startswith(
            f"This data file cannot be read.\n  got:      {path}: {reason}\n  expected: plain arrays"
        )


def test_the_number_of_samples_is_positive(save):
    with pytest.raises(InputError, match="--samples 0"):
        read_data(save(x=np.zeros(2))).head(0)
