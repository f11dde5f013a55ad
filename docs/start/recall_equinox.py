import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import rnnlens as rl

x = np.random.default_rng(0).normal(size=(512, 20, 1)).astype("float32")
y = x[:, 5]  # what is asked for at the end came in at step 5, 15 steps from the end


class Recall(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __call__(self, xs):  # one sample: (time, feature)
        def step(h, x_t):
            return self.cell(x_t, h), None

        h, _ = jax.lax.scan(step, jnp.zeros(24), xs)
        return self.head(h)


def mse(output, target):
    return jnp.mean((output - target) ** 2)


@eqx.filter_jit
def train_step(model, state, x, y):
    grads = eqx.filter_grad(lambda model: mse(jax.vmap(model)(x), y))(model)
    updates, state = optimizer.update(grads, state)
    return eqx.apply_updates(model, updates), state


keys = jax.random.split(jax.random.key(0))
model = Recall(eqx.nn.GRUCell(1, 24, key=keys[0]), eqx.nn.Linear(24, 1, key=keys[1]))
optimizer = optax.adam(1e-2)
state = optimizer.init(eqx.filter(model, eqx.is_array))
for _ in range(30):
    for i in range(0, len(x), 64):
        model, state = train_step(model, state, x[i : i + 64], y[i : i + 64])

trace = rl.trace(model, x[:64], y[:64], loss=mse)
print(trace)
print(rl.diagnose(model, x, y, loss=mse))
rl.plot.gradient_flow(trace).save("gradient.png")
