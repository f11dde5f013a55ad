import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rnnlens as rl

x = np.random.default_rng(0).normal(size=(2048, 20, 1)).astype("float32")
y = x[:, 5]  # what is asked for at the end came in at step 5, 15 steps from the end


class Recall(nnx.Module):
    def __init__(self):
        self.rnn = nnx.RNN(nnx.GRUCell(1, 24, rngs=nnx.Rngs(0)))
        self.head = nnx.Linear(24, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.rnn(x)[:, -1])


def mse(output, target):
    return jnp.mean((output - target) ** 2)


@nnx.jit
def train_step(model, optimizer, x, y):
    grads = nnx.grad(lambda model: mse(model(x), y))(model)
    optimizer.update(model, grads)


model = Recall()
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
for _ in range(30):
    for i in range(0, len(x), 64):
        train_step(model, optimizer, x[i : i + 64], y[i : i + 64])

trace = rl.trace(model, x[:64], y[:64], loss=mse)
print(trace)
print(rl.diagnose(model, x, y, loss=mse))
rl.plot.gradient_flow(trace).save("gradient.png")
