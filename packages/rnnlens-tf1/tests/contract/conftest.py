"""Each test has its own graph; tests that do not depend on the control flow run under v2 only in full runs."""

from graph_mode import graph, mark_full_under_v2, v1

__all__ = ["graph", "v1"]

pytest_collection_modifyitems = mark_full_under_v2(
    "test_wrong_arguments.py",
    "test_session_scripts.py",
    "test_keras.py",
    "test_200_calls_take_no_more_memory",
    "test_a_reason_where_tensorflow_gives_none",
    # Missing gradients between loop and target, and unrolled steps: these tests read no loop.
    "test_no_reason_where_there_is_a_gradient",
    "test_the_one_that_was_asked_for_raises",
    "test_integer_ids_and_what_to_ask_for_instead",
    "test_statistics_that_the_phase_does_not_read",
    "test_one_of_each_cell[gru_after",
    "test_masked_and_unrolled_is_refused_by_name",
    "test_a_mask_that_comes_with_the_input_is_as_good",
)
