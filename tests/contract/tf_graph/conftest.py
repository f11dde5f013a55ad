"""Every test has a graph of its own; what does not depend on the control flow is run under one."""

from graph_mode import CONTROL_FLOW, graph, v1

__all__ = ["graph", "v1"]

#: Files, and tests, of the same code under either control flow: run under v1, and under both with all that is ``full``.
ONE_FLOW = ("test_doors.py", "test_200_calls_take_no_more_memory", "test_a_reason_where_tensorflow_gives_none")


def pytest_collection_modifyitems(items):
    """What does not depend on the control flow is run under one."""
    for item in items:
        if CONTROL_FLOW != "v1" and any(name in item.nodeid for name in ONE_FLOW):
            item.add_marker("full")
