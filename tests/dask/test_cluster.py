"""Lazy results on a cluster of two workers: numbers equal to those in memory, one model per worker, errors."""

import os

import dask.array as da
import numpy as np
import pytest
import torch
from chunked_models import Net, RaisesForLargeInput, make_seeded, samples

import rnnlens as rl

MSE = torch.nn.functional.mse_loss
CHUNK = 16
X, Y = samples(160)

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module")
def expected():
    return rl.gradients(make_seeded(Net), X, Y, loss=MSE, wrt="input", batch_size=CHUNK).values


def to_dask(array):
    return da.from_array(array, chunks=(CHUNK, *array.shape[1:]))


def input_gradients(net, x=X):
    return rl.gradients(net, to_dask(x), to_dask(Y), loss=MSE, wrt="input")


def state_of_worker():
    """Return the number of models kept, the threads of torch and the process id of a worker."""
    import torch

    from rnnlens import cluster

    return len(cluster._models), torch.get_num_threads(), os.getpid()


def test_equal_bit_for_bit_and_each_worker_rebuilds_the_model_once(client, expected):
    result = input_gradients(make_seeded(Net))
    computed = result.compute()
    np.testing.assert_array_equal(computed.values, expected)
    assert computed.certificate.state == "passed"
    result.compute()
    states = client.run(state_of_worker).values()
    assert [(models, threads) for models, threads, _ in states] == [(1, 1), (1, 1)]
    assert os.getpid() not in [process for _, _, process in states]


def test_sums_over_chunks_are_equal_bit_for_bit(client):
    net = make_seeded(Net)
    computed = rl.gradients(net, to_dask(X), to_dask(Y), loss=MSE).compute()
    streamed = rl.gradients(net, X, Y, loss=MSE, batch_size=CHUNK)
    for tensor in streamed.tensors:
        np.testing.assert_array_equal(computed[tensor].values, streamed[tensor].values)


def test_modules_with_parametrizations_travel(client):
    net = make_seeded(Net)
    net.lstm = torch.nn.utils.parametrizations.weight_norm(net.lstm, "weight_hh_l0")
    streamed = rl.gradients(net, X, Y, loss=MSE, wrt="input", batch_size=CHUNK).values
    np.testing.assert_array_equal(input_gradients(net).compute().values, streamed)


def test_a_part_that_cannot_travel_is_named(client):
    net = make_seeded(Net)
    net.source = (number for number in range(3))
    with pytest.raises(rl.errors.UnsupportedError, match=r"Net\.source cannot be serialised"):
        input_gradients(net)


def test_an_exception_names_its_samples_and_loses_nothing_of_the_others(client, tmp_path):
    x = X.copy()
    x[40] = 5e3
    result = input_gradients(make_seeded(RaisesForLargeInput), x)
    with pytest.raises(rl.errors.UserCodeError, match="Samples 32 to 47 failed"):
        result.compute()
    with pytest.raises(rl.errors.UserCodeError, match=r"1 of 10 chunks(.|\n)*Samples 32 to 47"):
        result.save(tmp_path / "g.zarr")
    (folder,) = tmp_path.iterdir()
    assert len(list((folder / ".chunks").iterdir())) == 9
