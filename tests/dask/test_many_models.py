"""``rl.compare`` diagnoses several models in this process or as tasks on two workers; a failure becomes a row."""

import os

import numpy as np
import pytest
import torch
from chunked_models import KillsItsWorker, Net, make_seeded, samples
from dask.distributed import Client, LocalCluster

import rnnlens as rl

X, _ = samples(128)
Y = X[:, -3:, :1].sum(axis=1)

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return the paths of three state dicts, the last of them damaged."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = [folder / f"epoch-{number}.pt" for number in range(3)]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        torch.save(Net().state_dict(), path)
    paths[2].write_bytes(b"damaged")
    return paths


def load_net(path):
    net = Net()
    net.load_state_dict(torch.load(path, weights_only=True))
    return net


def test_checkpoints_on_workers_give_the_table_of_one_process(client, checkpoints):
    local = rl.compare(checkpoints, X, Y, load=load_net, samples=128)
    distributed = rl.compare(checkpoints, X, Y, load=load_net, samples=128, client=client)
    assert list(local.table["name"].values) == ["epoch-0", "epoch-1", "epoch-2"]
    assert local.table.drop_vars("error").identical(distributed.table.drop_vars("error"))
    diagnosis = rl.diagnose(load_net(checkpoints[1]), X, Y, samples=128)
    assert distributed.diagnoses["epoch-1"].to_json() == diagnosis.to_json()
    assert list(distributed.diagnoses) == ["epoch-0", "epoch-1"]
    for comparison in (local, distributed):
        errors = [str(error) for error in comparison.table["error"].values]
        assert errors[:2] == ["", ""]
        assert errors[2].startswith("UnpicklingError: ")
        assert "2 diagnoses, 1 failed" in str(comparison)
        assert "epoch-2  failed: UnpicklingError: " in str(comparison)


def test_models_functions_and_diagnoses_may_be_mixed(client):
    net = make_seeded(Net)
    net.lstm = torch.nn.utils.parametrizations.weight_norm(net.lstm, "weight_hh_l0")
    broken = make_seeded(Net)
    broken.source = (number for number in range(3))
    diagnosis = rl.diagnose(make_seeded(Net), X, Y)
    models = {"known": diagnosis, "normed": net, "wide": lambda: make_seeded(Net, 12), "broken": broken}
    local = rl.compare(models, X, Y)
    distributed = rl.compare(models, X, Y, client=client)
    assert distributed.diagnoses["known"] is diagnosis
    assert str(distributed.table["error"].values[3]).startswith(
        "UnsupportedError: Not everything can be sent to workers: "
    )
    assert "Net.source" in str(distributed.table["error"].values[3])
    assert local.table["error"].values[3] == ""
    rows = {"name": ["known", "normed", "wide"]}
    assert local.table.sel(rows).drop_vars("error").identical(distributed.table.sel(rows).drop_vars("error"))


def test_a_model_that_kills_its_worker_is_a_row(checkpoints, tmp_path):
    import dask

    def load(number):
        if number != 1:
            return load_net(checkpoints[0])
        return KillsItsWorker(tmp_path, pid)

    pid = os.getpid()
    for number in range(4):
        (tmp_path / str(number)).touch()
    options = {"threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(n_workers=1, **options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        comparison = rl.compare([0, 1, 2], X, Y, load=load, client=client)
    errors = comparison.table["error"].values
    assert [str(error).partition(":")[0] for error in errors] == ["", "KilledWorker", ""]
    assert comparison.diagnoses["0"].to_json() == comparison.diagnoses["2"].to_json()


def test_keras_files_run_on_the_engine_of_the_client(client, tmp_path):
    keras = pytest.importorskip("keras")
    layers = keras.layers
    for seed in (0, 1):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([layers.Input(X.shape[1:]), layers.GRU(4), layers.Dense(1)])
        model.compile(loss="mse")
        model.save(tmp_path / f"seed-{seed}.keras")
    paths = sorted(tmp_path.iterdir())
    local = rl.compare(paths, X, Y)
    distributed = rl.compare(paths, X, Y, client=client)
    assert local.table["error"].values.tolist() == ["", ""]
    assert distributed.diagnoses["seed-1"].provenance == local.diagnoses["seed-1"].provenance
    for name in ("skill", "memory", "difference"):
        np.testing.assert_allclose(distributed.table[name], local.table[name], rtol=1e-6)


def test_the_table_of_failures_alone(tmp_path):
    def load(seed):
        raise OSError(f"no checkpoint of seed {seed}")

    comparison = rl.compare([3, 4], X, Y, load=load)
    assert "0 diagnoses, 2 failed" in str(comparison)
    assert comparison.table["error"].values.tolist() == [
        "OSError: no checkpoint of seed 3",
        "OSError: no checkpoint of seed 4",
    ]
    assert np.isnan(comparison.table["skill"].values).all()
    comparison.save(tmp_path / "c.zarr")
    assert str(rl.open(tmp_path / "c.zarr")) == str(comparison)


REFUSED = {
    "no data": (lambda net: rl.compare([net]), "These are no diagnoses"),
    "a state dict": (lambda net: rl.compare([net.state_dict()], X, Y), r"models\['0'\] is no model(.|\n)*load="),
    "a path": (lambda net: rl.compare(["a/b.pt"], X, Y), r"models\['b'\] is no model(.|\n)*load="),
    "an iterator": (lambda net: rl.compare([net], iter([X])), "which the first model would use up"),
    "a wrong keyword": (lambda net: rl.compare([net], X, Y, sample=3), r"have no argument 'sample'(.|\n)*samples"),
    "a wrong value": (lambda net: rl.compare([net], X, Y, samples="x"), "samples= is a whole number"),
    "no client": (lambda net: rl.compare([net], X, Y, client="localhost:8786"), "client= is no client"),
    "no function": (lambda net: rl.compare([1], X, Y, load=Net()(torch.tensor(X[:1]))), "load= is a function"),
    "equal names": (lambda net: rl.compare([1, 1], X, Y, load=load_net), "Two models have the same name"),
    "x that cannot travel": (
        lambda net: rl.compare([net], X, Y, client=UnusedClient(), loss=Unpicklable()),
        r"arguments\.loss",
    ),
}


class UnusedClient:
    """Client that fails the test when it is used."""

    submit = scatter = cancel = staticmethod(lambda *_, **__: pytest.fail("was used"))


class Unpicklable:
    """A loss that cannot be pickled."""

    def __call__(self, output, y):
        return ((output - y) ** 2).mean()

    def __reduce__(self):
        raise TypeError("cannot pickle this loss")


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_is_refused(call, message):
    with pytest.raises(rl.errors.RnnlensError, match=message):
        call(make_seeded(Net))
