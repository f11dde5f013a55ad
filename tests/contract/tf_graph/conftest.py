"""Every test has a graph of its own; what does not depend on the control flow is run under one."""

from graph_mode import graph, under_v1, v1

__all__ = ["graph", "v1"]

pytest_collection_modifyitems = under_v1(
    "test_doors.py",
    "test_keras.py",
    "test_200_calls_take_no_more_memory",
    "test_a_reason_where_tensorflow_gives_none",
)
