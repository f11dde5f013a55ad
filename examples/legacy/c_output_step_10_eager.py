"""Which input steps move output step 10 of a tf.keras LSTM?

    "I slice the output outside of the tape and get None; I slice it inside and get a sum over everything.
    batch_jacobian takes all of my memory."

One call gives the rows that are asked for, with named axes.
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
from _held import chosen_dtype, hold

import rnnlens as rl

dtype = chosen_dtype(__doc__)
tf.keras.backend.set_floatx(dtype)
tf.keras.utils.set_random_seed(0)

x_train = np.random.default_rng(0).normal(size=(20, 15, 1)).astype(dtype)
y_train = np.cumsum(x_train, axis=1)
my_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(10)

m_inputs = tf.keras.Input(shape=(15, 1))
hidden = tf.keras.layers.LSTM(8, return_sequences=True, name="lstm")(m_inputs)
m_outputs = tf.keras.layers.TimeDistributed(tf.keras.layers.Dense(1), name="head")(hidden)
my_model = tf.keras.Model(m_inputs, m_outputs, name="my_model")
my_model.compile("adam", "mse")
my_model.fit(my_dataset, epochs=2, verbose=0)

x = next(iter(my_dataset))[0]  # was: x += 1, of a name that was not there yet

# rnnlens
row = rl.jacobian(my_model, x, at={"out_time": [10]})  # (sample, out_time, out_unit, in_time, in_feature)
lags = rl.jacobian(my_model, x, measure="norm")
strongest = abs(row.sel(out_time=10)).mean("sample").argmax("in_time")
# ---

kernel, recurrent, bias, head, offset = (w.astype(np.float64) for w in my_model.get_weights())


def forward(inputs):
    """The network in NumPy, for complex inputs too."""
    h = c = np.zeros((len(inputs), 8))
    outputs = []
    for t in range(15):
        i, f, g, o = np.split(inputs[:, t] @ kernel + h @ recurrent + bias, 4, axis=-1)
        i, f, o = (1 / (1 + np.exp(-z)) for z in (i, f, o))
        c = f * c + i * np.tanh(g)
        h = o * np.tanh(c)
        outputs.append(h @ head + offset)
    return np.stack(outputs, axis=1)


jacobian = np.zeros((10, 15, 15))  # d output[t] / d input[k], by the complex step
for k in range(15):
    perturbed = x.numpy().astype(complex)
    perturbed[:, k] += 1e-30j
    jacobian[:, :, k] = forward(perturbed)[..., 0].imag / 1e-30
hold("d output[10] / d input", row[:, 0, 0, :, 0], jacobian[:, 10], dtype)
hold("norms of the whole map", lags, np.abs(jacobian), dtype)
print(f"output 10 is moved most by input step {int(np.asarray(strongest).ravel()[0])}")
