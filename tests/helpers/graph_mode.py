"""One control flow per process: ``RNNLENS_CONTROL_FLOW=v1`` (the default) or ``v2``; never eager."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import grappler
import pytest
import tensorflow.compat.v1 as tf

CONTROL_FLOW = os.environ.get("RNNLENS_CONTROL_FLOW", "v1")
if CONTROL_FLOW == "v1":
    tf.disable_v2_behavior()
else:
    tf.disable_eager_execution()
tf.get_logger().setLevel("ERROR")
grappler.disable()


@pytest.fixture(autouse=True)
def graph():
    """Give each test a new default graph."""
    with tf.Graph().as_default() as new_graph:
        tf.set_random_seed(1)
        yield new_graph


@pytest.fixture
def v1() -> bool:
    """Return whether loops are Enter and Exit operations instead of While."""
    return CONTROL_FLOW == "v1"


def mark_full_under_v2(*names: str):
    """Return a hook that marks tests as ``full`` under v2: once a loop is read, the code is the same for both.

    ``names`` are parts of the names of files and tests; they run under v1, and under both with all that is ``full``.
    """

    def pytest_collection_modifyitems(items):
        for item in items:
            if CONTROL_FLOW != "v1" and any(name in item.nodeid for name in names):
                item.add_marker("full")

    return pytest_collection_modifyitems
