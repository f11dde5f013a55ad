"""The gradient of the loss at every step of a bidirectional GRU, asked in graph mode.

    "How can I visualise RNN/LSTM gradients: which steps still learn? K.function and get_gradients give me the gradient
    of the layer's output only."

With eager disabled the model lives in a graph and a session. ``output_grad`` is what ``get_gradients`` gave,
``hidden_grad`` the gradient through time.

    RNNLENS_CONTROL_FLOW=v2 python examples/legacy/e_gradient_pictures_graph.py
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
from tensorflow.keras.layers import GRU, Bidirectional, Dense, Input  # noqa: E402  (after the mode is chosen)
from tensorflow.keras.models import Model  # noqa: E402

tf.keras.backend.set_floatx(dtype)
tf.set_random_seed(0)
ipt = Input((10, 4))
hidden = Bidirectional(GRU(6, return_sequences=True, reset_after=True), name="bi")(ipt)
model = Model(ipt, Dense(2)(GRU(3, reset_after=True, name="gru", recurrent_activation="sigmoid")(hidden)))
model.compile("adam", "mse")
random = np.random.default_rng(0)
x, y = random.normal(size=(4, 10, 4)).astype(dtype), random.normal(size=(4, 2)).astype(dtype)
model.train_on_batch(x, y)

# rnnlens
trace = rl.trace(model, x, y)
total, direct = trace["bi"].hidden_grad, trace["bi"].output_grad
ax = rl.plot.heatmap(total.isel(sample=0, direction=0))
# ---

names = [v.name.partition(":")[0] for v in model.weights]
w = [value.astype(np.float64) for value in model.get_weights()]
halves = w[0:3], w[3:6]
act = model.get_layer("bi").forward_layer.cell.recurrent_activation.__name__


def gate(z):
    """Keras 2 under TensorFlow 1 takes the hard sigmoid unless told otherwise."""
    return np.where(abs(z.real) < 2.5, 0.2 * z + 0.5, z.real > 0) if act == "hard_sigmoid" else 1 / (1 + np.exp(-z))


def gru(w, x, rec, bump):
    n, h, states = len(w[1]), np.zeros((len(x), len(w[1])), complex), []
    for t in range(x.shape[1]):
        a, b = x[:, t] @ w[0] + w[2][0], h @ w[1] + w[2][1]
        z, r = rec(a[:, :n] + b[:, :n]), rec(a[:, n : 2 * n] + b[:, n : 2 * n])
        h = z * h + (1 - z) * np.tanh(a[:, 2 * n :] + r * b[:, 2 * n :]) + bump.get(t, 0)
        states.append(h)
    return np.stack(states, 1)


def loss(direction, t, unit):
    """The loss of each sample, one unit of one state of one direction moved by a complex step."""
    perturbation = np.zeros((len(x), 6), complex)
    perturbation[:, unit] = 1e-30j
    forward = gru(halves[0], x, gate, {t: perturbation} if direction == 0 else {})
    backward = gru(halves[1], x[:, ::-1], gate, {9 - t: perturbation} if direction == 1 else {})[:, ::-1]
    top = gru(w[6:9], np.concatenate([forward, backward], 2), lambda z: 1 / (1 + np.exp(-z)), {})
    return ((top[:, -1] @ w[9] + w[10] - y) ** 2).sum(1) / y.size


truth = [[[loss(d, t, k).imag / 1e-30 for k in range(6)] for d in range(2)] for t in range(10)]
hold("total gradient, both directions", total, np.transpose(truth, (3, 0, 1, 2)), dtype)
ratio = abs(direct).mean("sample").max("unit") / abs(total).mean("sample").max("unit")
print("share that the direct gradient shows of the first step: " + " ".join(f"{float(v):.2f}" for v in ratio[0]))
