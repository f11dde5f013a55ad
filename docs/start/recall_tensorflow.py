import os

os.environ["KERAS_BACKEND"] = "tensorflow"  # before Keras is imported

import keras
import numpy as np

import rnnlens as rl

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(512, 20, 1)).astype("float32")
y = x[:, 5]  # what is asked for at the end came in at step 5, 15 steps from the end

model = keras.Sequential(
    [
        keras.Input((20, 1)),
        keras.layers.GRU(24, name="gru"),
        keras.layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(1e-2), "mse")
model.fit(x, y, epochs=30, batch_size=64, verbose=0)

trace = rl.trace(model, x[:64], y[:64])  # the loss is the compiled one
print(trace)
print(rl.diagnose(model, x, y))
rl.plot.gradient_flow(trace).save("gradient.png")
