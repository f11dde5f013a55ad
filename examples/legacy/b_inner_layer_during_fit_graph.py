"""The gradient of the loss at an inner recurrent layer, of a subclassed model with a cell of one's own, in a graph?

"I have a subclassed model with an RNN of my own cell and want the gradient of the loss with respect to the output
of the inner layer during training. Layer minimalrnn has no inbound nodes."

RNNLENS_CONTROL_FLOW=v2 python examples/legacy/b_inner_layer_during_fit_graph.py
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow.compat.v1 as tf  # was: import tensorflow as tf
from _held import chosen_dtype, hold

import rnnlens as rl

dtype = chosen_dtype(__doc__)
if os.environ.get("RNNLENS_CONTROL_FLOW", "v1") == "v1":
    tf.disable_v2_behavior()  # was: eager
else:
    tf.disable_eager_execution()
import tf_keras  # noqa: E402  (after the mode is chosen)

tf_keras.backend.set_floatx(dtype)
layers = tf_keras.layers


class MinimalRNNCell(layers.AbstractRNNCell):
    def __init__(self, units, **kwargs):
        self.units = units
        super().__init__(**kwargs)

    @property
    def state_size(self):
        return self.units

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units), name="kernel")
        self.recurrent_kernel = self.add_weight(shape=(self.units, self.units), name="recurrent_kernel")
        self.built = True

    def call(self, inputs, states):
        output = tf.matmul(inputs, self.kernel) + tf.matmul(states[0], self.recurrent_kernel)
        return output, output


class MyModel(tf_keras.Model):
    def __init__(self, size):
        super().__init__()
        self.minimalrnn = layers.RNN(MinimalRNNCell(size), name="minimalrnn")
        self.out = layers.Dense(4)

    def call(self, inputs):
        return self.out(self.minimalrnn(inputs))


x = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(dtype)
y = np.random.default_rng(1).normal(size=(2, 4)).astype(dtype)  # was: (2, 4, 1)
model, traces = MyModel(2), []
model.compile(optimizer="sgd", loss="mse")


class Keep(tf_keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        # rnnlens
        traces.append(rl.trace(self.model, x, y, layers=["minimalrnn"])["minimalrnn"])
        # ---


model.fit(x, y, epochs=5, batch_size=2, callbacks=[Keep()], verbose=0)
session = tf.keras.backend.get_session()
kernel, recurrent, head = (session.run(model.weights[i]).astype(np.float64) for i in (0, 1, 2))
bias = session.run(model.weights[3]).astype(np.float64)
h, states = np.zeros((2, 2)), []
for t in range(6):
    h = x[:, t] @ kernel + h @ recurrent
    states.append(h)
carry, truth = 2 * (h @ head + bias - y) / y.size @ head.T, np.zeros((2, 6, 2))
hold("direct gradient after the last batch", traces[-1].output_grad, carry, dtype)
for t in reversed(range(6)):
    truth[:, t], carry = carry, carry @ recurrent.T
hold("hidden gradient after the last batch", traces[-1].hidden_grad, truth, dtype)
