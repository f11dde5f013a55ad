"""Count what a call left in memory."""

import gc


def graphs_left() -> int:
    """Return the number of TensorFlow's function graphs in this process after all garbage is collected."""
    for _ in range(3):  # TensorFlow takes a graph apart when it is collected, and that is garbage again
        gc.collect()
    return sum(type(item).__name__ == "FuncGraph" for item in gc.get_objects())
