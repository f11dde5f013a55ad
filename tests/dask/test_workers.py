"""Worker processes: how often the model is sent, threads, memory of the C library, names of tasks."""

import resource
from contextlib import contextmanager

import dask
import dask.array as da
import numpy as np
import pytest
import torch
from chunked_models import Net, make_seeded, samples
from dask.distributed import Client, LocalCluster

import rnnlens as rl

MSE = torch.nn.functional.mse_loss
CHUNK = 16
X, Y = samples(160)

#: Clusters of their own; that each worker has the model once, and one thread, test_cluster.py holds too.
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@contextmanager
def start_workers(workers, threads, **config):
    """Start workers with the given configuration of Dask, and yield their client."""
    options = {"n_workers": workers, "threads_per_worker": threads, "dashboard_address": ":0", "memory_limit": "4GiB"}
    with dask.config.set(config), LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client


def to_dask(array):
    return da.from_array(array, chunks=(CHUNK, *array.shape[1:]))


def input_gradients(net):
    return rl.gradients(net, to_dask(X), to_dask(Y), loss=MSE, wrt="input")


def count_bytes():
    """Record the size of every model that this process unpickles."""
    from rnnlens import cluster

    def unpickled(self, state):
        cluster.sizes.append(len(state["_bytes"]))
        self.__dict__.update(state)

    cluster.sizes = []
    cluster.TravellingModel.__setstate__ = unpickled


def bytes_of_models():
    from rnnlens import cluster

    return cluster.sizes


def test_the_model_travels_once_to_each_worker():
    # Dask's memory manager drops copies that no waiting task needs, and sends them again.
    with start_workers(2, 1, **{"distributed.scheduler.active-memory-manager.start": False}) as client:
        net = make_seeded(Net, 256)
        client.run(count_bytes)
        result = input_gradients(net)
        size = len(result._tasks.model.pack())
        assert size > 4 * sum(weight.numel() for weight in net.parameters())
        result.compute()
        assert list(client.run(bytes_of_models).values()) == [[size]] * 2


def thread_counts():
    """Return the numbers of threads of torch and of each BLAS and OpenMP library, as set in this thread."""
    import torch
    from threadpoolctl import threadpool_info

    libraries = {library["filepath"].rpartition("/")[2]: library["num_threads"] for library in threadpool_info()}
    return {"torch": torch.get_num_threads(), **libraries}


def start_with_four_threads(monkeypatch, threads):
    """Start one worker of ``threads`` threads whose libraries use four threads by default."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    # Read by the C library when a process starts. They replace Dask's own, of which the threshold is one.
    variables = {"MALLOC_TRIM_THRESHOLD_": 65536, "OMP_NUM_THREADS": 4}
    method = {"distributed.worker.multiprocessing-method": "spawn"}
    return start_workers(1, threads, **method, **{"distributed.nanny.pre-spawn-environ": variables})


def page_faults():
    """Return the page faults of allocating and freeing an array of 4 MiB 50 times, after a warm-up."""
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(50):
            np.ones(4 << 20, np.uint8)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return after - before


NAMES = {
    "rnnlens-gradients-lstm": lambda net, x, y: rl.gradients(net, x, y, loss=MSE, wrt="lstm.hidden"),
    "rnnlens-gradients": lambda net, x, y: rl.gradients(net, x, y, loss=MSE),
    "rnnlens-jacobian-output": lambda net, x, y: rl.jacobian(net, x, measure="norm"),
    "rnnlens-weights": lambda net, x, y: rl.weights(net, x, y, loss=MSE),
    "rnnlens-trace": lambda net, x, y: rl.trace(net, x, y, loss=MSE),
}


def test_threads_memory_and_names_of_tasks_of_a_worker(monkeypatch):
    """On a worker, libraries use one thread, freed memory is reused by the next chunk, each chunk is one named task.

    Dask's nanny sets the C library to return freed memory to the system at once, which is slow.
    """
    with start_with_four_threads(monkeypatch, 1) as client:
        pages = 50 * (4 << 20) // resource.getpagesize()
        (before,) = client.run(page_faults).values()
        for make in NAMES.values():
            make(make_seeded(Net), to_dask(X), to_dask(Y)).compute()
        (after,) = client.run(page_faults).values()
        threads = client.submit(thread_counts).result()
        counts = client.run_on_scheduler(
            lambda dask_scheduler: {
                name: prefix.state_counts["memory"] for name, prefix in dask_scheduler.task_prefixes.items()
            }
        )
    assert before > 0.3 * pages  # not all: some pages are larger than 4 KiB
    assert after < 0.1 * before
    assert threads == dict.fromkeys(threads, 1)
    assert {name: counts.get(name) for name in NAMES} == dict.fromkeys(NAMES, 10)


def test_libraries_use_as_many_threads_as_the_worker_has(monkeypatch):
    with start_with_four_threads(monkeypatch, 2) as client:
        input_gradients(make_seeded(Net)).compute()
        threads = client.submit(thread_counts).result()
    assert threads == dict.fromkeys(threads, 2)
