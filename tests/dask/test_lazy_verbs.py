"""Verbs on Dask arrays against the same verbs in memory: numbers, labels, laziness, refused arguments."""

import dask
import dask.array as da
import numpy as np
import pytest
import torch
import xarray as xr
from chunked_models import F, Net, RaisesForLargeInput, T, TimeMajor, labelled_array, make_seeded, samples
from dask.callbacks import Callback

import rnnlens as rl
from rnnlens.verbs.chunked import graph

MSE = torch.nn.functional.mse_loss
CHUNK = 16
X, Y = samples(50)


@pytest.fixture(autouse=True)
def one_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture(scope="module")
def net():
    return make_seeded(Net)


def to_dask(array, chunk=CHUNK):
    return da.from_array(array, chunks=(chunk, *array.shape[1:]))


def assert_same(actual, expected):
    """Assert equal numbers, names, labels and attributes, except attributes that refer to a single batch."""
    assert actual.dtype == expected.dtype
    bare_actual = xr.DataArray(actual).drop_attrs()
    xr.testing.assert_identical(bare_actual, xr.DataArray(expected).drop_attrs())
    of_one_batch = {"flops", "peak_bytes", "replay_residual", "note", "record", "certificate"}
    assert actual.attrs.keys() - of_one_batch == expected.attrs.keys() - of_one_batch
    for name in actual.attrs.keys() - of_one_batch:
        assert actual.attrs[name] == expected.attrs[name], name


GRADIENTS = {
    "input": {"wrt": "input", "loss": MSE},
    "norm by step": {"wrt": "input", "loss": MSE, "measure": "norm"},
    "mean over samples": {"wrt": "input", "loss": MSE, "measure": "norm", "across": "mean"},
    "sum over samples": {"wrt": "lstm.hidden", "loss": MSE, "across": "sum"},
    "state": {"wrt": "lstm.hidden", "loss": MSE},
    "one weight": {"wrt": "lstm/recurrent_kernel", "loss": MSE},
    "of a state": {"of": "lstm.hidden", "wrt": "input", "at": {"time": -1}, "reduce": "sum"},
    "weighted samples": {"of": "output", "wrt": "input", "reduce": np.linspace(0, 1, 50)[:, None].astype("float32")},
    "of each sample": {"of": "output", "wrt": "lstm/kernel", "per_sample": True, "reduce": "sum"},
    "summed loss": {"wrt": "input", "loss": torch.nn.MSELoss(reduction="sum")},
    "own loss, said to be a mean": {"wrt": "input", "loss": lambda a, b: ((a - b) ** 2).mean(), "combine": "mean"},
}


@pytest.mark.parametrize("keywords", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_those_of_the_streaming_call_bit_for_bit(net, keywords):
    expected = rl.gradients(net, labelled_array(X), Y, batch_size=CHUNK, **keywords)
    result = rl.gradients(net, labelled_array(to_dask(X)), to_dask(Y), **keywords)
    assert result.chunks is not None
    assert_same(result.compute(), expected)


def test_gradients_of_all_weights_have_value_and_certificate(net):
    expected = rl.gradients(net, X, Y, loss=MSE, batch_size=CHUNK)
    result = rl.gradients(net, to_dask(X), Y, loss=MSE)
    assert "lazy" in repr(result)
    computed = result.compute()
    for tensor in expected.tensors:
        assert_same(computed[tensor], expected[tensor])
    assert computed.value == expected.value
    assert computed.certificate.state == expected.certificate.state == "passed"


JACOBIANS = {
    "whole": {},
    "norm": {"measure": "norm"},
    "mean": {"across": "mean"},
    "mean norm": {"measure": "norm", "across": "mean"},
    "state to input": {"of": "lstm.hidden", "at": {"out_time": [3, -1]}, "measure": "spectral"},
}


@pytest.mark.parametrize("keywords", JACOBIANS.values(), ids=JACOBIANS)
def test_time_jacobians_are_those_in_memory_bit_for_bit(net, keywords):
    batches = {"batch_size": CHUNK} if "across" in keywords else {}
    result = rl.jacobian(net, labelled_array(to_dask(X)), **keywords)
    assert_same(result.compute(), rl.jacobian(net, labelled_array(X), **batches, **keywords))
    assert result.compute().checks


def test_weights_are_those_in_memory(net):
    expected, result = rl.weights(net, X, Y, loss=MSE), rl.weights(net, to_dask(X), to_dask(Y), loss=MSE)
    assert result["lstm"].kernel_grad.chunks is not None
    repr(result)
    computed = result.compute()
    assert computed.loss == pytest.approx(expected.loss, rel=1e-6)
    for layer in expected:
        for name in expected[layer]:
            reference = expected[layer].dataset[name]
            xr.testing.assert_allclose(computed[layer].dataset[name], reference, rtol=1e-5, atol=1e-8)
            assert computed[layer].dataset[name].dtype == reference.dtype


def test_traces_are_those_in_memory(net):
    expected = rl.trace(net, labelled_array(X), Y, loss=MSE)
    computed = rl.trace(net, labelled_array(to_dask(X)), to_dask(Y), loss=MSE).compute()
    assert computed.loss == pytest.approx(expected.loss, rel=1e-6)
    assert computed.certificate.state == "passed"
    for layer in expected:
        actual, reference = computed.dataset(layer), expected.dataset(layer)
        assert set(actual.variables) == set(reference.variables)
        xr.testing.assert_allclose(actual, reference, rtol=1e-5, atol=1e-8)
        np.testing.assert_array_equal(actual["sample"], labelled_array(X)["sample"])
        np.testing.assert_array_equal(actual["time"], labelled_array(X)["time"])


def test_samples_may_lie_on_another_axis():
    net, axes = make_seeded(TimeMajor), {"input": ("time", "sample", "feature")}
    x = np.ascontiguousarray(X.swapaxes(0, 1))
    lazily = da.from_array(x, chunks=(T, CHUNK, F))
    expected = rl.gradients(net, x, Y, loss=MSE, wrt="input", batch_size=CHUNK)
    assert_same(rl.gradients(net, lazily, Y, loss=MSE, wrt="input").compute(), expected)
    assert_same(rl.gradients(net, lazily, Y, loss=MSE, wrt="input", axes=axes).compute(), expected)


def test_nothing_is_read_or_run_until_it_is_asked_for(net):
    blocks_read = []

    def block(block_id):
        blocks_read.append(block_id)
        return np.ones((CHUNK, T, F), "float32")

    x = da.map_blocks(block, chunks=((CHUNK,) * 3, (T,), (F,)), dtype="float32", meta=np.empty((0, 0, 0), "float32"))
    y = da.ones((CHUNK * 3, 1), chunks=(CHUNK, 1), dtype="float32")
    blocks_read.clear()
    results = [
        rl.gradients(net, x, y, loss=MSE, wrt="input"),
        rl.gradients(net, x, y, loss=MSE),
        rl.jacobian(net, x, measure="norm", across="mean"),
        rl.weights(net, x, y, loss=MSE),
        rl.trace(net, x, y, loss=MSE),
    ]
    for result in results:
        repr(result)
        result._repr_html_()
    assert blocks_read == []
    results[0][:CHUNK].compute()
    assert len(blocks_read) == 1
    results[2].compute()
    assert len(blocks_read) == 4


def test_there_is_one_task_for_each_chunk_and_its_name_says_what_it_does(net):
    class Keys(Callback):
        def _pretask(self, key, dsk, state):
            names.append(key[0] if isinstance(key, tuple) else key)

    names = []
    with Keys():
        rl.gradients(net, to_dask(X), to_dask(Y), loss=MSE, wrt="lstm.hidden").compute()
    tasks = [dask.utils.key_split(name) for name in names]
    assert tasks.count("rnnlens-gradients-lstm") == 4


CALLS = {
    "gradients": lambda net: rl.gradients(net, to_dask(X), to_dask(Y), loss=MSE, wrt="input"),
    "gradients of all weights": lambda net: rl.gradients(net, to_dask(X), to_dask(Y), loss=MSE),
    "sum over samples": lambda net: rl.gradients(net, to_dask(X), to_dask(Y), loss=MSE, wrt="input", across="sum"),
    "jacobian": lambda net: rl.jacobian(net, to_dask(X), across="mean", measure="norm"),
    "weights": lambda net: rl.weights(net, to_dask(X), to_dask(Y), loss=MSE),
    "trace": lambda net: rl.trace(net, to_dask(X), to_dask(Y), loss=MSE),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_chunk_is_computed_once(net, call, monkeypatch):
    """Each chunk is computed once, although Dask could fuse its task both into the numbers and into the checks."""
    first_rows, original = [], graph.compute_chunk

    def compute_chunk(task, model, rows, *args):
        first_rows.append(rows[0])
        return original(task, model, rows, *args)

    monkeypatch.setattr(graph, "compute_chunk", compute_chunk)
    call(net).compute()
    assert sorted(first_rows) == [0, 1, 2, 3]


@pytest.mark.parametrize("verb", ["gradients", "weights", "trace"])
def test_a_loss_that_does_not_combine_is_refused(net, verb):
    with pytest.raises(rl.errors.UnsupportedError, match="does not follow from that of each chunk"):
        getattr(rl, verb)(net, to_dask(X), to_dask(Y), loss=lambda a, b: ((a - b) ** 2).mean())


def test_labels_that_the_loss_ignores_are_refused_at_their_chunk():
    class Classes(Net):
        def __init__(self):
            super().__init__()
            self.out = torch.nn.Linear(8, 4)

    labels = np.arange(50) % 4
    labels[20] = -100
    lazily = rl.gradients(
        make_seeded(Classes), to_dask(X), to_dask(labels), loss=torch.nn.functional.cross_entropy, wrt="input"
    )
    with pytest.raises(rl.errors.UnsupportedError, match="Samples 16 to 31 failed: The loss of this chunk"):
        lazily.compute()


REFUSED = {
    "clip": ({"clip": {"clipnorm": 1.0}}, "clip= needs the norm over all samples"),
    "samples of a target": ({"of": "output", "at": {"sample": 3}, "reduce": "sum"}, "at= selects no samples"),
    "norm of a sum": ({"measure": "norm"}, "is that of the sum over all samples"),
}


@pytest.mark.parametrize(("keywords", "message"), REFUSED.values(), ids=REFUSED)
def test_options_that_need_all_samples_are_refused(net, keywords, message):
    with pytest.raises(rl.errors.UnsupportedError, match=message):
        rl.gradients(net, to_dask(X), to_dask(Y), loss=MSE, **keywords)


@pytest.mark.parametrize("option", [{"out": "j.zarr"}, {"rtol": 1e-3}, {"sketch": 4}])
def test_options_of_one_jacobian_are_refused(net, option):
    with pytest.raises(rl.errors.UnsupportedError, match="applies to one batch"):
        rl.jacobian(net, to_dask(X), measure="norm", **option)


@pytest.mark.parametrize("verb", ["find_nonfinite", "report", "lyapunov", "step_eigenvalues", "fixed_points"])
@pytest.mark.parametrize("wrap", [labelled_array, lambda x: x, lambda x: (x,)], ids=["DataArray", "dask", "tuple"])
def test_verbs_that_need_numbers_say_what_to_do(net, verb, wrap):
    with pytest.raises(rl.errors.InputError, match=r"is lazy, and this call needs numbers(.|\n)*\.compute\(\)"):
        getattr(rl, verb)(net, wrap(to_dask(X)))


def test_steps_in_chunks_are_put_together_with_a_note(net):
    x = labelled_array(da.from_array(X, chunks=(CHUNK, 5, F)))
    result = rl.gradients(net, x, to_dask(Y), loss=MSE, wrt="input")
    assert "in chunks along time" in result.attrs["note"]
    assert_same(result.compute(), rl.gradients(net, labelled_array(X), Y, loss=MSE, wrt="input", batch_size=CHUNK))


@pytest.mark.parametrize("chunks", [(50,), (1,) * 50, (20, 7, 23), (0, 25, 0, 25)], ids=str)
def test_chunks_of_any_sizes(net, chunks):
    x = da.from_array(X[:, :, :], chunks=(tuple(c for c in chunks if c), T, F))
    if 0 in chunks:
        x = da.concatenate([x[:0], x[:25], x[:0], x[25:]])
    result = rl.gradients(net, x, to_dask(Y), loss=MSE, wrt="input")
    assert_same(result.compute(), rl.gradients(net, X, Y, loss=MSE, wrt="input", batch_size=max(chunks)))


HOSTILE = {
    "unknown sizes": (lambda: to_dask(X)[da.from_array(X[:, 0, 0] > 0, chunks=CHUNK)], "chunks of unknown sizes"),
    "no samples": (lambda: to_dask(X)[:0], "Batch is empty"),
    "objects": (lambda: to_dask(X.astype(object)), "is not numeric"),
    "complex": (lambda: to_dask(X.astype(complex)), "is complex"),
    "a number": (lambda: to_dask(X).sum(), "is a single number"),
    "fewer targets": (lambda: (to_dask(X), Y[:49]), "which axis of y counts samples"),
    "a Delayed": (lambda: dask.delayed(X), "is not numeric"),
}


@pytest.mark.parametrize(("make", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_data_are_refused_before_anything_runs(net, make, message):
    data = make()
    x, y = data if isinstance(data, tuple) else (data, to_dask(Y))
    with pytest.raises(rl.errors.RnnlensError, match=message):
        rl.gradients(net, x, y, loss=MSE, wrt="input")


def test_nan_in_one_chunk_stays_there(net):
    x = X.copy()
    x[20] = np.nan
    gradients = rl.gradients(net, to_dask(x), of="output", reduce="sum", wrt="input").compute()
    bad = np.isnan(gradients.values).any(axis=(1, 2))
    assert bad.tolist() == [i == 20 for i in range(50)]


@pytest.mark.parametrize("verb", ["gradients", "trace", "weights"])
def test_weights_of_samples_of_every_chunk_are_finite(net, verb):
    weights = np.ones(50)
    weights[20] = np.nan
    options = {"wrt": "input"} if verb == "gradients" else {}
    result = getattr(rl, verb)(net, to_dask(X), to_dask(Y), loss="mse", sample_weight=to_dask(weights), **options)
    with pytest.raises(rl.errors.InputError, match="sample_weight is not finite"):
        result.compute()


def test_a_chunk_beyond_the_memory_is_refused(net):
    with rl.options(memory=1000), pytest.raises(rl.errors.TooLargeError, match="A chunk of 16 samples"):
        rl.gradients(net, to_dask(X), to_dask(Y), loss=MSE, wrt="input")


def test_an_exception_names_the_samples_of_its_chunk():
    x = X.copy()
    x[40] = 5e3
    result = rl.gradients(make_seeded(RaisesForLargeInput), to_dask(x), to_dask(Y), loss=MSE, wrt="input")
    with pytest.raises(rl.errors.UserCodeError, match=r"Samples 32 to 47 failed: (.|\n)*an input is too large"):
        result.compute()
    assert np.isfinite(result[:32].values).all()


def test_weights_that_change_before_computing_are_noticed():
    net = make_seeded(Net)
    result = rl.gradients(net, to_dask(X), to_dask(Y), loss=MSE, wrt="input")
    with torch.no_grad():
        net.out.bias += 1
    with pytest.raises(rl.errors.ModelError, match="weights changed after this lazy result was made"):
        result.compute()


def test_failed_certificates_warn_when_computed(net, monkeypatch):
    from rnnlens.verbs.chunked import works

    def wrong_gradients(request):
        batch = original(request)
        batch.gradients = {name: grad * 1.5 for name, grad in batch.gradients.items()}
        return batch

    original = works.batch_gradients
    monkeypatch.setattr(works, "batch_gradients", wrong_gradients)
    result = rl.gradients(net, to_dask(X), to_dask(Y), loss=MSE, wrt="input")
    with pytest.warns(rl.errors.SelfCheckWarning, match="samples 0 to 15"):
        computed = result.compute()
    assert computed.certificate.state == "failed"


def test_saving_by_regions_and_opening(net, tmp_path):
    path = tmp_path / "g.zarr"
    expected = rl.gradients(net, labelled_array(X), Y, loss=MSE, wrt="input", batch_size=CHUNK)
    rl.gradients(net, labelled_array(to_dask(X)), to_dask(Y), loss=MSE, wrt="input").save(path)
    opened = rl.open(path)
    assert_same(opened, expected)
    assert opened.certificate.state == "passed"
    assert [entry.name for entry in tmp_path.iterdir()] == ["g.zarr"]
    traced = rl.trace(net, labelled_array(to_dask(X)), to_dask(Y), loss=MSE)
    traced.save(path)
    assert rl.open(path).loss == pytest.approx(traced.compute().loss)


def test_a_save_with_a_failed_chunk_keeps_the_others_and_goes_on(tmp_path):
    x, net = X.copy(), make_seeded(RaisesForLargeInput)
    x[40] = 5e3
    switch = {"bad": True}
    data = da.from_array(X, chunks=(CHUNK, T, F)).map_blocks(
        lambda block: np.where(switch["bad"] & (block == X[40, 0, 0]), 5e3, block).astype("float32"), dtype="float32"
    )
    result = rl.gradients(net, data, to_dask(Y), loss=MSE, wrt="input")
    with pytest.raises(rl.errors.UserCodeError, match=r"1 of 4 chunks(.|\n)*Samples 32 to 47"):
        result.save(tmp_path / "g.zarr")
    assert not (tmp_path / "g.zarr").exists()
    switch["bad"] = False
    tasks = []

    class Keys(Callback):
        def _pretask(self, key, dsk, state):
            tasks.append(dask.utils.key_split(key[0] if isinstance(key, tuple) else key))

    with Keys():
        result.save(tmp_path / "g.zarr")
    assert tasks.count("rnnlens-gradients-input-write") == 1
    expected = rl.gradients(net, X, Y, loss=MSE, wrt="input", batch_size=CHUNK)
    np.testing.assert_array_equal(rl.open(tmp_path / "g.zarr").values, expected.values)


def test_a_full_disk_is_one_clear_error(net, tmp_path, monkeypatch):
    from rnnlens.results.disk import regions

    def full_for_records(path, parts):
        if path.suffix == ".json" and path.stem.isdigit():
            raise OSError(28, "No space left on device")
        write_file(path, parts)

    write_file = regions.write_file

    result = rl.gradients(net, to_dask(X), to_dask(Y), loss=MSE, wrt="input")
    with monkeypatch.context() as patch:
        patch.setattr(regions, "write_file", full_for_records)
        with pytest.raises(rl.errors.FileError, match=r"4 of 4 chunks(.|\n)*No space left on device(.|\n)*goes on"):
            result.save(tmp_path / "g.zarr")
    result.save(tmp_path / "g.zarr")
    assert rl.open(tmp_path / "g.zarr").shape == X.shape


def test_xarray_writes_the_same_numbers_by_chunks(net, tmp_path):
    result = rl.gradients(net, labelled_array(to_dask(X)), to_dask(Y), loss=MSE, wrt="input")
    result.to_zarr(tmp_path / "g.zarr", zarr_format=2, consolidated=False)
    opened = xr.open_dataarray(tmp_path / "g.zarr", engine="zarr", consolidated=False, chunks={})
    assert opened.chunks[0] == (16, 16, 16, 2)
    np.testing.assert_array_equal(opened, result.compute())
