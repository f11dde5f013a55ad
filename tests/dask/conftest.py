"""Fixtures of a Dask cluster: two workers, forked from a process that has imported torch and rnnlens."""

from multiprocessing import forkserver

import dask
import pytest
from dask.distributed import Client, LocalCluster
from distributed.utils import get_mp_context

#: Modules imported once, by the fork server (torch imports sympy); none of them starts a thread.
IMPORTED = (
    "distributed",
    "torch",
    "rnnlens.cluster",
    "rnnlens.verbs.gradients",
    "rnnlens.adapters.torch",
    "sympy",
)


@pytest.fixture(scope="session", autouse=True)
def forked_workers():
    """Fork workers from a fresh process instead of starting an interpreter for each; tests may set ``spawn`` again."""
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        get_mp_context().set_forkserver_preload(list(IMPORTED))
        yield
    forkserver._forkserver._stop()  # waits for the server, so that its CPU time counts for the suite


@pytest.fixture(scope="session")
def cluster(forked_workers):
    """Start two worker processes of one thread each."""
    options = {"processes": True, "threads_per_worker": 1, "dashboard_address": ":0", "memory_limit": "4GiB"}
    with LocalCluster(n_workers=2, **options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    """Connect a client to the two workers; it is Dask's default client for all tests of one file."""
    with Client(cluster) as client:
        yield client
