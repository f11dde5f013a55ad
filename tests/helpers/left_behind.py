"""Count the TensorFlow graphs that a call left in memory."""

import gc


def graphs_left() -> int:
    """Return the number of TensorFlow's function graphs in this process after all garbage is collected."""
    for _ in range(3):  # collecting a TensorFlow graph leaves new garbage
        gc.collect()
    return sum(type(item).__name__ == "FuncGraph" for item in gc.get_objects())
