"""Two workers for the tests on a cluster: starting a worker takes as long as ten of these tests."""

import pytest
from dask.distributed import Client, LocalCluster


@pytest.fixture(scope="session")
def cluster():
    """Start two worker processes of one thread each."""
    options = {"processes": True, "threads_per_worker": 1, "dashboard_address": ":0", "memory_limit": "4GiB"}
    with LocalCluster(n_workers=2, **options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    """Connect to the two workers; it is Dask's default client while the tests of one file run."""
    with Client(cluster) as client:
        yield client
