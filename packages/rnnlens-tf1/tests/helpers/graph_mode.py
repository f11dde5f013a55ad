"""Settings of a test process for one TensorFlow control flow, ``RNNLENS_CONTROL_FLOW=v1`` (default) or ``v2``."""

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
    """Return whether loops are Enter and Exit operations (v1), not While (v2)."""
    return CONTROL_FLOW == "v1"


def mark_full_under_v2(*names: str):
    """Return a hook that marks tests as ``full`` under v2, where most code after reading the loop is the same.

    ``names`` are parts of the names of files and tests; they run under v1, and in a full run under both.
    """

    def pytest_collection_modifyitems(items):
        for item in items:
            if CONTROL_FLOW != "v1" and any(name in item.nodeid for name in names):
                item.add_marker("full")

    return pytest_collection_modifyitems
