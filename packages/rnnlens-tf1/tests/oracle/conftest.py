"""Each test has its own graph; tests that do not depend on the control flow run under v2 only in full runs."""

from graph_mode import graph, mark_full_under_v2, v1

__all__ = ["graph", "v1"]

pytest_collection_modifyitems = mark_full_under_v2(
    "test_dropout_wrapper.py",
    "test_order_of_calls.py",
    "test_conv_lstm.py::test_layers_of_keras",
    "test_conv_lstm.py::test_the_layer_of_keras",
    "test_conv_lstm.py::test_states_gates_total_gradients_and_weights[2-static",
    "test_conv_lstm.py::test_states_gates_total_gradients_and_weights[1-python",
    "test_conv_lstm.py::test_states_gates_total_gradients_and_weights[3-",
    "test_conv_lstm.py::test_time_jacobians_by_norms_over_places_and_channels[1-static",
    "test_crossed_cells.py::test_cells_side_by_side",
    "test_every_state_of_every_model",
    "test_programs.py::test_layers",
    "test_programs.py::test_gradients",
    "test_programs.py::test_jacobian",
    "test_graphs_in_practice.py::test_unrolled",
    "test_graphs_in_practice.py::test_refused_by_name[static_lengths]",
    "test_a_cell_state_that_the_head_reads",
    "test_conv_lstm.py::test_cells_that_differ_in_a_detail_have_states_and_no_gates[3-",
    "test_conv_lstm.py::test_cells_that_differ_in_a_detail_have_states_and_no_gates[1-",
    "test_conv_lstm.py::test_cells_that_differ_in_a_detail_have_states_and_no_gates[2-options3",
    "test_crossed_cells.py::test_states_gradients_and_jacobians_of_a_loop[Skewed",
    "test_crossed_cells.py::test_states_gradients_and_jacobians_of_a_loop[OldOutput",
    "test_programs.py::test_trace[penn_treebank",
    "test_programs.py::test_trace[residual_stack",
    "test_programs.py::test_trace[sampling",
)
