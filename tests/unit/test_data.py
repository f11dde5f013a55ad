"""Every kind of data source yields the same batches."""

import numpy as np
import pytest

from rnnlens import data
from rnnlens.errors import InputError, UserCodeError

X = np.arange(30, dtype=np.float32).reshape(10, 3)
Y = np.arange(10)


def collect_batches(batches):
    collected = list(batches)
    return collected, [
        None if collected[0][i] is None else np.concatenate([np.asarray(batch[i]) for batch in collected])
        for i in range(3)
    ]


def tf_dataset(size):
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


def torch_loader(size):
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=size)


def zarr_array(size, tmp_path):
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(tmp_path / "x.zarr", shape=X.shape, chunks=(size, 3), dtype="f4")
    array[:] = X
    return array


def test_arrays_come_whole_without_a_batch_size():
    batches, (x, y, weight) = collect_batches(data.batches(X, Y))
    assert len(batches) == 1
    assert batches[0].x is X
    assert weight is None
    np.testing.assert_array_equal(y, Y)
    np.testing.assert_array_equal(x, X)


@pytest.mark.parametrize("size", [1, 3, 10, 99])
def test_arrays_are_cut_with_all_that_belongs_to_them(size):
    weight = np.linspace(0, 1, 10)
    batches, (x, y, w) = collect_batches(data.batches(X, Y, sample_weight=weight, batch_size=size))
    assert len(batches) == -(-10 // size) == data.count_batches(X, size)
    assert all(len(batch.x) <= size for batch in batches)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    np.testing.assert_array_equal(w, weight)


@pytest.mark.parametrize(
    "make_inputs", [lambda a: [a, a[:, :1]], lambda a: (a, a[:, :1]), lambda a: {"a": a, "b": a[:, :1]}]
)
def test_several_inputs_are_cut_alike_and_keep_their_structure(make_inputs):
    inputs = make_inputs(X)
    for i, batch in enumerate(data.batches(inputs, batch_size=4)):
        assert type(batch.x) is type(inputs)
        leaves = list(batch.x.values()) if isinstance(batch.x, dict) else list(batch.x)
        np.testing.assert_array_equal(leaves[0], X[4 * i : 4 * i + 4])
        np.testing.assert_array_equal(leaves[1], X[4 * i : 4 * i + 4, :1])


@pytest.mark.slow  # imports TensorFlow
def test_tf_dataset_yields_numpy():
    batches, (x, y, _) = collect_batches(data.batches(tf_dataset(4)))
    assert [len(batch.x) for batch in batches] == [4, 4, 2]
    assert all(isinstance(batch.x, np.ndarray) for batch in batches)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)


@pytest.mark.slow
def test_tf_dataset_is_rebatched():
    batches, (x, _, _) = collect_batches(data.batches(tf_dataset(4), batch_size=5))
    assert [len(batch.x) for batch in batches] == [5, 5]
    np.testing.assert_array_equal(x, X)


@pytest.mark.parametrize("as_numpy", [False, True])
def test_loader_yields_tensors_or_numpy(as_numpy):
    import torch

    batches, (x, y, _) = collect_batches(data.batches(torch_loader(4), as_numpy=as_numpy))
    assert isinstance(batches[0].x, np.ndarray if as_numpy else torch.Tensor)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    assert data.count_batches(torch_loader(4)) == 3


def test_generator_of_x_of_pairs_and_of_triples():
    for element, filled in ((X, 1), ((X, Y), 2), ((X, Y, Y * 1.0), 3)):
        (batch,) = data.batches(iter([element]))
        assert [field is not None for field in batch] == [True] * filled + [False] * (3 - filled)


def test_what_the_users_source_raises_is_named_and_keeps_its_class():
    batches = data.batches(1 / number for number in [1, 0])
    next(batches)
    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        next(batches)
    assert isinstance(caught.value, UserCodeError)
    assert str(caught.value) == (
        "Your data set, a generator, raised ZeroDivisionError.\n  got:      division by zero\n"
        "  try:      the first traceback shows where"
    )


def test_zarr_is_read_chunk_by_chunk(tmp_path):
    array = zarr_array(4, tmp_path)
    batches, (x, _, _) = collect_batches(data.batches(array))
    assert [batch.x.shape[0] for batch in batches] == [4, 4, 2]
    np.testing.assert_array_equal(x, X)
    batches, (x, _, _) = collect_batches(data.batches(array, Y, batch_size=6))
    assert [batch.x.shape[0] for batch in batches] == [6, 4]


def test_one_initial_state_serves_every_batch():
    state = {"lstm": [np.ones((1, 2)), np.arange(10.0)[:, None]]}
    first, second = data.samples_of_arrays(state, 3, 6)["lstm"]
    np.testing.assert_array_equal(first, np.ones((3, 2)))
    np.testing.assert_array_equal(second[:, 0], [3, 4, 5])
    assert data.samples_of_arrays(None, 0, 3) is None


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: list(data.batches(X, Y[:9])),
            "x and y have different numbers of samples.\n"
            "  got:      10 and 9, the lengths of the first axes of x and y\n"
            '  try:      if another axis counts samples, name the axes: axes={"input": ("time", "sample", "feature"), '
            '"y": ("time", "sample")}',
        ),
        (
            lambda: list(data.batches(X[:0])),
            "Batch is empty.\n  got:      x of shape (0, 3)\n  expected: at least 1 sample",
        ),
        (
            lambda: list(data.batches(iter([]))),
            "The data set is empty.\n  got:      a list_iterator without batches\n  expected: at least 1 batch\n"
            "  try:      a generator can be read only once: create a new one for every call",
        ),
        (
            lambda: list(data.batches(iter([X]), Y)),
            "A list_iterator has its own targets and weights.\n  got:      y or sample_weight beside it\n"
            "  expected: batches of x, (x, y) or (x, y, sample_weight)\n"
            "  try:      zip y into the data set: batches of (x, y)",
        ),
        (
            lambda: list(data.batches(iter([X]), batch_size=2)),
            "A list_iterator has its own batches.\n  got:      batch_size=2\n"
            "  try:      set the batch size when creating the data set",
        ),
        (
            lambda: list(data.batches(X, batch_size=0)),
            "The batch size must be positive.\n  got:      batch_size=0",
        ),
        (
            lambda: list(data.batches("a path")),
            "This data cannot be split into batches.\n  got:      str\n"
            "  expected: an array with samples first, tf.data.Dataset, DataLoader, generator or Zarr array",
        ),
        (
            lambda: list(data.batches(iter([(X, Y, Y, Y)]))),
            "An element of the data set has too many parts.\n  got:      4 parts\n"
            "  expected: x, (x, y) or (x, y, sample_weight)\n"
            "  try:      put several inputs into one tuple or dict: ((x1, x2), y)",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(call, text):
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value) == text
