"""Which parameters move the new state of a GRU behind a CNN, asked of a TensorFlow-1 graph?

    "My network is Conv1D, batch normalisation, relu, GRU with dropout, on sequences of different lengths. tf.gradients
    of the new state by every parameter gives None for some, and I do not know which should be None."

Both placeholders of each ``tf.cond`` have to be fed: rnnlens takes them as one input.

    RNNLENS_CONTROL_FLOW=v2 python examples/legacy/d_new_state_graph.py   # loops as While; v1 otherwise
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
tf.set_random_seed(0)
m_dtype, batch, steps, features, units = tf.as_dtype(dtype), 5, 12, 6, 8

phase_train = tf.placeholder(tf.bool, [], name="phase_train")
dropout = tf.placeholder(m_dtype, [], name="dropout")
inputs_train_ph = tf.placeholder(m_dtype, [batch, None, features], name="inputs_train")
inputs_devel_ph = tf.placeholder(m_dtype, [batch, None, features], name="inputs_devel")
initial_state = tf.placeholder(m_dtype, [batch, units], name="initial_state")
inputs = tf.cond(phase_train, lambda: inputs_train_ph, lambda: inputs_devel_ph)
used = tf.sign(tf.reduce_max(tf.abs(inputs), axis=2))
length = tf.cast(tf.reduce_sum(used, axis=1), tf.int32)
with tf.variable_scope("layer_cell"):
    z = tf.layers.conv1d(inputs, 2 * units, 5, padding="same", name="conv1d")
    z = tf.nn.relu(tf.layers.batch_normalization(z, training=phase_train, name="batch_normalization"))
with tf.variable_scope("lstm_model"):
    cell = tf.nn.rnn_cell.DropoutWrapper(
        tf.nn.rnn_cell.GRUCell(units), input_keep_prob=1.0 - dropout, state_keep_prob=1.0 - dropout
    )
    outputs, new_state = tf.nn.dynamic_rnn(cell, z, sequence_length=length, initial_state=initial_state)
with tf.variable_scope("output"):
    output = tf.layers.dense(tf.reshape(outputs, [-1, units]), 2, name="dense")
    output = tf.reshape(output, [5, -1, 2]) * used[:, :, None]

sess = tf.Session()
sess.run(tf.global_variables_initializer())
random = np.random.default_rng(0)
h0 = random.normal(size=(batch, units)).astype(dtype)
lengths = np.array([12, 7, 12, 3, 9])
x = (random.normal(size=(batch, steps, features)) * (np.arange(steps) < lengths[:, None])[..., None]).astype(dtype)

# rnnlens
net = rl.tf1.graph(
    sess, inputs={"inputs": [inputs_train_ph, inputs_devel_ph]}, outputs={"output": output},
    feed={phase_train: False, dropout: 0.0, initial_state: h0},
)  # fmt: skip
g = rl.gradients(net, x, of=new_state, reduce="sum", wrt="weights")
# ---

print(g)
w = {v.op.name: sess.run(v).astype(np.float64) for v in tf.global_variables()}


def by_hand(w):
    """The sum of the new state, written out: complex numbers pass, so its derivative is one complex step."""
    taps, norm, gru = w["layer_cell/conv1d/kernel"], "layer_cell/batch_normalization/", "lstm_model/rnn/gru_cell/"
    padded = np.pad(x.astype(np.float64), ((0, 0), (2, 2), (0, 0)))
    z = sum(padded[:, i : i + steps] @ taps[i] for i in range(5)) + w["layer_cell/conv1d/bias"]
    z = (z - w[norm + "moving_mean"]) / np.sqrt(w[norm + "moving_variance"] + 1e-3) * w[norm + "gamma"]
    z = z + w[norm + "beta"]
    z, h = np.where(z.real > 0, z, 0), h0.astype(complex)
    for t in range(steps):
        gates = np.concatenate([z[:, t], h], 1) @ w[gru + "gates/kernel"] + w[gru + "gates/bias"]
        r, u = np.split(1 / (1 + np.exp(-gates)), 2, axis=1)
        inner = np.concatenate([z[:, t], r * h], 1) @ w[gru + "candidate/kernel"] + w[gru + "candidate/bias"]
        h = np.where((t < lengths)[:, None], u * h + (1 - u) * np.tanh(inner), h)
    return h.sum()


def derivative(name):
    """By every entry of one variable."""
    gradient = np.zeros(w[name].size)
    for i in range(gradient.size):
        perturbed = w[name].astype(complex)
        perturbed.ravel()[i] += 1e-30j
        gradient[i] = by_hand({**w, name: perturbed}).imag / 1e-30
    return gradient.reshape(w[name].shape)


for name in ("conv1d/kernel", "conv1d/bias", "batch_normalization/gamma", "batch_normalization/beta"):
    hold(name, g[f"layer_cell/{name}"], derivative(f"layer_cell/{name}"), dtype)
gates, candidate = (
    derivative(f"lstm_model/rnn/gru_cell/{part}/kernel")[: 2 * units] for part in ("gates", "candidate")
)
hold("GRU, update gate", g["lstm_model/rnn/kernel"].sel(gate="update"), gates[:, units:], dtype)
hold("GRU, candidate", g["lstm_model/rnn/kernel"].sel(gate="candidate"), candidate, dtype)
assert {g.disconnected[f"output/dense/{key}"].code for key in ("kernel", "bias")} == {"not_on_path"}
