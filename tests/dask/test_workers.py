"""Worker processes: bytes of the model that reach each, threads, memory of the C library, names of tasks."""

import resource

import dask
import dask.array as da
import numpy as np
import pytest
import torch
from chunked_models import Net, samples, seeded
from dask.distributed import Client, LocalCluster

import rnnlens as rl

MSE = torch.nn.functional.mse_loss
CHUNK = 16
X, Y = samples(160)

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def cluster():
    """Return a function that starts workers and returns their client."""
    opened = []

    def start(workers, threads):
        options = {"threads_per_worker": threads, "dashboard_address": ":0", "memory_limit": "4GiB"}
        opened.append(LocalCluster(n_workers=workers, **options))
        opened.append(Client(opened[-1]))
        return opened[-1]

    yield start
    for each in reversed(opened):
        each.close()


def lazy(array):
    return da.from_array(array, chunks=(CHUNK, *array.shape[1:]))


def of(net):
    return rl.gradients(net, lazy(X), lazy(Y), loss=MSE, wrt="input")


def count_bytes():
    """Let this process record the size of every model that it unpickles."""
    from rnnlens.cluster import travel

    def unpickled(self, state):
        travel.sizes.append(len(state["_bytes"]))
        self.__dict__.update(state)

    travel.sizes = []
    travel.TravellingModel.__setstate__ = unpickled


def bytes_of_models():
    from rnnlens.cluster import travel

    return travel.sizes


@pytest.mark.parametrize("workers", [1, 2])
def test_the_model_travels_once_to_each_worker(cluster, workers):
    # Dask's memory manager drops copies that no waiting task needs, and sends them again.
    with dask.config.set({"distributed.scheduler.active-memory-manager.start": False}):
        client, net = cluster(workers, 1), seeded(Net, 256)
    client.run(count_bytes)
    result = of(net)
    size = len(result._tasks.model.pack())
    assert size > 4 * sum(weight.numel() for weight in net.parameters())
    result.compute()
    assert list(client.run(bytes_of_models).values()) == [[size]] * workers


def threads_here():
    """Return the threads of torch, and of every BLAS and OpenMP library in this thread of this process."""
    import torch
    from threadpoolctl import threadpool_info

    libraries = {library["filepath"].rpartition("/")[2]: library["num_threads"] for library in threadpool_info()}
    return {"torch": torch.get_num_threads(), **libraries}


@pytest.mark.parametrize("threads", [1, 2])
def test_libraries_use_as_many_threads_as_the_worker_has(cluster, threads, monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with dask.config.set({"distributed.nanny.pre-spawn-environ": {"OMP_NUM_THREADS": 4}}):
        client = cluster(1, threads)
    of(seeded(Net)).compute()
    found = client.submit(threads_here).result()
    assert found == dict.fromkeys(found, threads)


def page_faults():
    """Return how many pages are mapped anew while arrays of 4 MiB are made and freed 50 times, after a first time."""
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(50):
            np.ones(4 << 20, np.uint8)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return after - before


def test_freed_memory_is_kept_for_the_next_chunk(cluster):
    """Dask's nanny has it returned to the system at once, which is slow."""
    client = cluster(1, 1)
    pages = 50 * (4 << 20) // resource.getpagesize()
    (before,) = client.run(page_faults).values()
    of(seeded(Net)).compute()
    (after,) = client.run(page_faults).values()
    assert before > 0.3 * pages  # pages of 4 KiB, and some larger ones
    assert after < 0.1 * before


NAMES = {
    "rnnlens-gradients-lstm": lambda net, x, y: rl.gradients(net, x, y, loss=MSE, wrt="lstm.hidden"),
    "rnnlens-gradients": lambda net, x, y: rl.gradients(net, x, y, loss=MSE),
    "rnnlens-jacobian-output": lambda net, x, y: rl.jacobian(net, x, measure="norm"),
    "rnnlens-weights": lambda net, x, y: rl.weights(net, x, y, loss=MSE),
    "rnnlens-trace": lambda net, x, y: rl.trace(net, x, y, loss=MSE),
}


def test_the_dashboard_counts_one_task_for_each_chunk(cluster):
    client = cluster(1, 1)
    for make in NAMES.values():
        make(seeded(Net), lazy(X), lazy(Y)).compute()
    counts = client.run_on_scheduler(
        lambda dask_scheduler: {
            name: prefix.state_counts["memory"] for name, prefix in dask_scheduler.task_prefixes.items()
        }
    )
    assert {name: counts.get(name) for name in NAMES} == dict.fromkeys(NAMES, 10)
