"""TensorFlow's rewriting of graphs, left out: a test runs a graph once or twice, which gains less than it costs."""


def off() -> None:
    """For this process, sessions included."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
