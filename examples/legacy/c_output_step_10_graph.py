"""Which input steps move output step 10, asked of a model in a graph?

"I want the derivative of one step of the output by the whole input. A slice outside of the tape gives None, and
batch_jacobian of everything takes all my memory."

RNNLENS_CONTROL_FLOW=v2 python examples/legacy/c_output_step_10_graph.py
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow.compat.v1 as tf  # was: import tensorflow as tf
from _held import chosen_dtype, hold

import rnnlens as rl

dtype = chosen_dtype(__doc__)
if os.environ.get("RNNLENS_CONTROL_FLOW", "v1") == "v1":
    tf.disable_v2_behavior()  # was: TensorFlow 1
else:
    tf.disable_eager_execution()
import tf_keras  # noqa: E402  (after the mode is chosen)

tf_keras.backend.set_floatx(dtype)
steps, features, units = 20, 3, 8
m_inputs = tf_keras.Input((steps, features))
m_hidden = tf_keras.layers.LSTM(units, return_sequences=True, name="lstm")(m_inputs)
m_outputs = tf_keras.layers.TimeDistributed(tf_keras.layers.Dense(1), name="head")(m_hidden)
my_model = tf_keras.Model(m_inputs, m_outputs, name="my_model")
my_model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(2, steps, features)).astype(dtype)
my_model.train_on_batch(x, x[:, :, :1])

# rnnlens
row = rl.jacobian(my_model, x, at={"out_time": [10]})
strongest = abs(row).mean("sample").argmax("in_time")
# ---

W, U, b, V, _ = (w.astype(np.float64) for w in my_model.get_weights())


def output_10(x):
    """Written out; complex numbers pass, so a derivative is one complex step."""
    h = c = np.zeros((len(x), units))
    for t in range(11):
        i, f, g, o = np.split(x[:, t] @ W + h @ U + b, 4, axis=1)
        c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        h = np.tanh(c) / (1 + np.exp(-o))
    return (h @ V)[:, 0]


truth = np.zeros(x.shape)
for t in range(steps):
    for k in range(features):
        perturbed = x.astype(complex)
        perturbed[:, t, k] += 1e-30j
        truth[:, t, k] = output_10(perturbed).imag / 1e-30
hold("d output[10] / d input", row.values.reshape(truth.shape), truth, dtype)
print("strongest step by feature:", strongest.values.ravel())
