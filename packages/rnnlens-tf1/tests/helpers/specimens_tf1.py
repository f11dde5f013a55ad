"""TensorFlow-1 graphs for the tests of every adapter; see ``tests/helpers/tested_adapter.py``."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import graph_mode  # noqa: F401  sets the control flow of this process
import numpy as np
import tensorflow.compat.v1 as tf
from specimen import NO_TRAINING, Declared, Specimen, generators

import rnnlens as rl


@contextmanager
def surroundings():
    """Give each test a new graph and a session."""
    with tf.Graph().as_default() as graph, tf.Session(graph=graph):
        tf.set_random_seed(1)
        yield


def network(cells, *, centred=False, dtype=tf.float64):
    """Return a net of layers under each other and a head at every step, with the names of its two losses."""
    session = tf.get_default_session()
    x, y = tf.placeholder(dtype, [None, None, 3], name="x"), tf.placeholder(dtype, [None, None, 2], name="y")
    hidden = x - tf.reduce_mean(x, axis=0, keepdims=True) if centred else x
    for name, cell in cells.items():
        hidden, _ = tf.nn.dynamic_rnn(cell, hidden, dtype=dtype, scope=name)
    head = tf.layers.dense(hidden, 2, name="top")
    losses = [tf.reduce_mean(tf.square(head - y), name="squared"), tf.reduce_mean(tf.abs(head - y), name="absolute")]
    session.run(tf.global_variables_initializer())
    return rl.tf1.graph(session, inputs=x, outputs={"head": head}, loss=losses[0], targets=y), losses


def data(samples, steps):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(samples, steps, 3)), "y": rng.normal(size=(samples, steps, 2))}


def specimen(make_cells, **options):
    net, (_, absolute) = network(make_cells(), **options)
    return Specimen(net, data, None, absolute.name)


def stack():
    return {"lower": tf.nn.rnn_cell.LSTMCell(4), "upper": tf.nn.rnn_cell.GRUCell(5)}


def simple():
    return {"rnn": tf.nn.rnn_cell.BasicRNNCell(4)}


INDEPENDENT = {"stack": partial(specimen, stack), "simple": partial(specimen, simple)}
mixing = partial(specimen, stack, centred=True)


def tagger():
    net, _ = network({"lstm": tf.nn.rnn_cell.LSTMCell(4)}, dtype=tf.float32)
    return net, None


def declared():
    net, (loss, _) = network({"lstm": tf.nn.rnn_cell.LSTMCell(4)}, dtype=tf.float32)
    return Declared(net, data(2, 5), {"lstm", "top"}, {"inputs": ("input",), "outputs": ("head",), "loss": loss})


TRAININGS = NO_TRAINING


class Private(tf.nn.rnn_cell.BasicRNNCell):
    """A user's cell with a property that raises an error."""

    @property
    def activation(self):
        raise ValueError("not here")


def guarded():
    return network({"rnn": Private(4, activation=tf.nn.relu)})[0], np.ones((2, 5, 3)), set()


def _closed_session():
    session = tf.Session()
    session.close()
    return session


FOREIGN = {
    "placeholder": lambda: tf.get_default_graph().get_tensor_by_name("x:0"),
    "loss tensor": lambda: tf.get_default_graph().get_tensor_by_name("squared:0"),
    "session": tf.get_default_session,
    "graph": tf.Graph,
    "variable": lambda: tf.global_variables()[0],
    "operation": lambda: tf.get_default_graph().get_operation_by_name("x"),
    "closed session": _closed_session,
}


def stateful():
    """Return a specimen with a random operation and the variables of an optimizer."""
    net, _ = network({"lstm": tf.nn.rnn_cell.LSTMCell(4)})
    tf.random.uniform([], seed=5, name="noise")
    # No gradient through the loop, which has run already: TensorFlow cannot extend it then.
    tf.train.AdamOptimizer(0.1).minimize(tf.add_n([tf.nn.l2_loss(variable) for variable in tf.trainable_variables()]))
    tf.get_default_session().run(tf.global_variables_initializer())
    return Specimen(net, data, None, layer="lstm")


def change(_net, x):
    x += 1
    for variable in tf.global_variables():
        variable.load(2 * variable.eval(), tf.get_default_session())


def forget():
    """TensorFlow's graph and session are those of the test, not of the net."""


def state_of(_net, *arrays):
    session, graph = tf.get_default_session(), tf.get_default_graph()
    return {
        "variables": [value.tobytes() for value in session.run(tf.global_variables())],
        "arrays": [array.tobytes() for array in arrays],
        "session": (id(session), session.graph is graph),
        "graph": (graph.version, graph.seed, graph.finalized),
        "operations": graph.as_graph_def(add_shapes=True).SerializeToString(deterministic=True),
        "collections": {name: list(graph.get_collection(name)) for name in graph.get_all_collection_keys()},
        "generators": generators(),
    }
