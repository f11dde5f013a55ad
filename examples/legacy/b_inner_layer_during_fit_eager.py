"""What is the gradient of the loss at an inner layer, after each batch of fit, in a subclassed tf.keras model?

    "Layer minimalrnn has no inbound nodes."

is what ``layer.output`` says in a subclassed model. The layer is asked for by its name instead; training goes on as it
would have without the callback, to the last bit.
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
from _held import chosen_dtype, hold
from tensorflow.keras import backend

import rnnlens as rl

dtype = chosen_dtype(__doc__)
backend.set_floatx(dtype)


class MinimalRNNCell(tf.keras.layers.AbstractRNNCell):
    def __init__(self, units, **kwargs):
        self.units = units
        super().__init__(**kwargs)

    @property
    def state_size(self):
        return self.units

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units), initializer="uniform", name="kernel")
        self.recurrent_kernel = self.add_weight(
            shape=(self.units, self.units), initializer="uniform", name="recurrent_kernel"
        )
        self.built = True

    def call(self, inputs, states):
        prev_output = states[0]
        h = backend.dot(inputs, self.kernel)
        output = h + backend.dot(prev_output, self.recurrent_kernel)
        return output, output


class MyModel(tf.keras.Model):
    def __init__(self, units):
        super().__init__()
        self.rnn = tf.keras.layers.RNN(MinimalRNNCell(units), name="minimalrnn")
        self.out = tf.keras.layers.Dense(4, name="out")

    def call(self, inputs):
        return self.out(self.rnn(inputs))


x = np.random.default_rng(0).normal(size=(10, 6, 3)).astype(dtype)
y = np.random.default_rng(1).normal(size=(10, 4)).astype(dtype)
traces, weights = [], []


class Keep(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        weights.append([w.astype(np.float64) for w in self.model.get_weights()])
        traces.append(rl.trace(self.model, x[batch : batch + 1], y[batch : batch + 1])["minimalrnn"])  # rnnlens


def train(callbacks):
    tf.keras.utils.set_random_seed(0)
    model = MyModel(2)
    model.compile(optimizer="sgd", loss="mse")
    history = model.fit(
        x, y, epochs=2, batch_size=1, validation_split=0.2, verbose=0, callbacks=callbacks, shuffle=False
    )
    return model, history.history


watched_model, history = train([Keep()])
plain_model, plain_history = train([])
assert history == plain_history
assert all(np.array_equal(a, b) for a, b in zip(watched_model.get_weights(), plain_model.get_weights(), strict=True))
print(f"{len(traces)} batches watched; training is the same without, to the last bit")

for number in (0, 5, len(traces) - 1):  # h_t = x_t K + h_{t-1} R, y = h_T D + d: every gradient in closed form
    K, R, D, d = weights[number]
    inputs, target = x[number % 8].astype(np.float64), y[number % 8]
    h = np.zeros(2)
    for step in inputs:
        h = step @ K + h @ R
    direct = (2 * (h @ D + d - target) / 4) @ D.T
    through = [direct @ np.linalg.matrix_power(R.T, 5 - t) for t in range(6)]
    hold(f"batch {number}: direct, at the layer's output", traces[number].output_grad[0], direct, dtype)
    hold(f"batch {number}: total, at every hidden state", traces[number].hidden_grad[0], through, dtype)
