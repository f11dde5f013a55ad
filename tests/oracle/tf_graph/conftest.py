"""Every test has a graph of its own; what does not depend on the control flow is run under one."""

from graph_mode import graph, under_v1, v1

__all__ = ["graph", "v1"]

pytest_collection_modifyitems = under_v1(
    "test_dropout_wrapper.py",
    "test_every_state_of_every_model",
    "test_programs.py::test_layers",
    "test_programs.py::test_gradients",
    "test_a_cell_state_that_the_head_reads[read0",
    "test_a_cell_state_that_the_head_reads[read2",
)
