"""Which steps move the hidden states of a stateful SimpleRNN, asked in tf.keras?

    "k.gradients(ht, model_rnn.input) gives [None], and GradientTape too. How do I get the gradient of the hidden
    states?"

The ids are integers, so nothing has a gradient by them; the output of the embedding has. ``predict`` left a state
behind: Keras 2 goes on from it, whatever ``initial_state`` says, and so does the answer.
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
from _held import chosen_dtype, hold
from tensorflow.keras.layers import Embedding, Input, SimpleRNN
from tensorflow.keras.models import Model

import rnnlens as rl

dtype = chosen_dtype(__doc__)
tf.keras.backend.set_floatx(dtype)
tf.keras.utils.set_random_seed(0)

batch_size, input_length, vocabulary, dimensions, units = 4, 12, 50, 10, 20
Emat = np.random.default_rng(0).normal(size=(vocabulary, dimensions))
xtr_pad = np.random.default_rng(1).integers(0, vocabulary, size=(batch_size, input_length))

inp = Input(batch_shape=(batch_size, input_length), name="input")
emb_out = Embedding(vocabulary, dimensions, weights=[Emat], trainable=False, name="embedding")(inp)
h0 = tf.random.uniform((batch_size, units), dtype=dtype)
rnn = SimpleRNN(units, return_sequences=True, stateful=True, name="simpleRNN")
rnn_allstates = rnn(emb_out, initial_state=h0)
model_rnn = Model(inputs=inp, outputs=rnn_allstates, name="model_rnn")
ht = model_rnn.predict(xtr_pad, batch_size=batch_size, verbose=0)

# rnnlens
last = rl.gradients(model_rnn, xtr_pad, of="simpleRNN.hidden", at={"time": -1}, reduce="mean", wrt="embedding.output")
every = rl.gradients(model_rnn, xtr_pad, of="simpleRNN.hidden", reduce="mean", wrt="embedding.output")
per_step = abs(last).mean(["sample", "unit"])  # one number per step, as was asked
# ---

W, U, b = (w.astype(np.float64) for w in rnn.get_weights())
x, h, states = Emat[xtr_pad], rnn.states[0].numpy().astype(np.float64), []
for t in range(input_length):
    h = np.tanh(x[:, t] @ W + h @ U + b)
    states.append(h)


def by_hand(weight):
    """The adjoint of h_t = tanh(W x_t + U h_{t-1} + b); ``weight`` of each h_t in the mean."""
    carry, gradient = np.zeros((batch_size, units)), np.zeros(x.shape)
    for t in reversed(range(input_length)):
        through = (carry + weight[t]) * (1 - states[t] ** 2)
        gradient[:, t], carry = through @ W.T, through @ U.T
    return gradient


only_last = np.zeros(input_length)
only_last[-1] = 1 / (batch_size * units)
hold("mean of the last hidden state", last, by_hand(only_last), dtype)
hold("mean of all hidden states", every, by_hand(np.full(input_length, 1 / (batch_size * units * input_length))), dtype)
try:
    rl.gradients(model_rnn, xtr_pad, of="simpleRNN.hidden", reduce="mean", wrt="input")
except rl.errors.DisconnectedError as error:
    print(f"by the ids: {str(error).splitlines()[0]}")
print("the last state, by step: " + " ".join(f"{float(v):.1e}" for v in per_step))
