"""The gradient of the loss at every step of a bidirectional GRU, asked in eager tf.keras.

    "How can I visualise RNN/LSTM gradients: which steps still learn? K.function and get_gradients give me the gradient
    of the layer's output only."

Run eagerly, ``model.optimizer.get_gradients`` and ``model.total_loss`` are not there at all. ``output_grad`` is what
they gave, ``hidden_grad`` the gradient through time.
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
from _held import chosen_dtype, hold
from tensorflow.keras.layers import GRU, Bidirectional, Dense, Input
from tensorflow.keras.models import Model

import rnnlens as rl

dtype = chosen_dtype(__doc__)
tf.keras.backend.set_floatx(dtype)
tf.keras.utils.set_random_seed(0)
ipt = Input((10, 4))
hidden = Bidirectional(GRU(6, return_sequences=True), name="bi")(ipt)
model = Model(ipt, Dense(2)(GRU(3, name="gru")(hidden)))
model.compile("adam", "mse")
random = np.random.default_rng(0)
x, y = random.normal(size=(4, 10, 4)).astype(dtype), random.normal(size=(4, 2)).astype(dtype)
model.train_on_batch(x, y)

# rnnlens
trace = rl.trace(model, x, y)  # was: model.optimizer.get_gradients(model.total_loss, layer.output), K.function
total, direct = trace["bi"].hidden_grad, trace["bi"].output_grad
ax = rl.plot.heatmap(total.isel(sample=0, direction=0))
# ---

w = [value.astype(np.float64) for value in model.get_weights()]


def gate(z):
    return 1 / (1 + np.exp(-z))


def gru(w, x, bump):
    """States of a GRU that resets after the product; ``bump`` is added to those of some steps."""
    n, h, states = len(w[1]), np.zeros((len(x), len(w[1])), complex), []
    for t in range(x.shape[1]):
        a, b = x[:, t] @ w[0] + w[2][0], h @ w[1] + w[2][1]
        z, r = gate(a[:, :n] + b[:, :n]), gate(a[:, n : 2 * n] + b[:, n : 2 * n])
        h = z * h + (1 - z) * np.tanh(a[:, 2 * n :] + r * b[:, 2 * n :]) + bump.get(t, 0)
        states.append(h)
    return np.stack(states, 1)


def loss(direction, t, unit):
    """The loss of each sample, one unit of one state of one direction moved by a complex step."""
    perturbation = np.zeros((len(x), 6), complex)
    perturbation[:, unit] = 1e-30j
    forward = gru(w[0:3], x, {t: perturbation} if direction == 0 else {})
    backward = gru(w[3:6], x[:, ::-1], {9 - t: perturbation} if direction == 1 else {})[:, ::-1]
    top = gru(w[6:9], np.concatenate([forward, backward], 2), {})[:, -1]
    return ((top @ w[9] + w[10] - y) ** 2).sum(1) / y.size, top


truth = [[[loss(d, t, k)[0].imag / 1e-30 for k in range(6)] for d in range(2)] for t in range(10)]
hold("total gradient, both directions", total, np.transpose(truth, (3, 0, 1, 2)), dtype)
top = loss(0, 0, 0)[1].real
hold(
    "direct gradient of the layer above",
    trace["gru"].output_grad,
    2 * (top @ w[9] + w[10] - y) / y.size @ w[9].T,
    dtype,
)
ratio = abs(direct).mean("sample").max("unit") / abs(total).mean("sample").max("unit")
print("share that the direct gradient shows of the first step: " + " ".join(f"{float(v):.2f}" for v in ratio[0]))
