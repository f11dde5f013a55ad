"""Switch TensorFlow's graph optimiser off: for a graph that runs once or twice it costs more than it saves."""


def disable() -> None:
    """Disable the optimiser in this process, sessions included."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
