"""How strongly does the loss pull on an inner recurrent layer, batch by batch, and can training answer to it?

    "I wrote my own cell, a minimal gated unit, and use it inside a *subclassed* model. After every batch of fit() I
    want the gradient of the loss with respect to the output of that inner layer, and I want to use it in the next epoch
    to change the layer. layer.output does not exist in a subclassed model, and the tape gives None."

``rl.keras.Watch`` tells it of *the very batch that was trained on*: the weights before the update, the sample weights,
the dropout masks of that step. Training itself is bit for bit what it would have been. At the end of an epoch the rule
acts: gradient noise on the recurrent kernel of that layer, annealed as in Neelakantan et al. 2015 (arXiv:1511.06807),
in proportion to how far the gradient at the first step lies below that at the last. A layer that gets no news from far
back is shaken a little. The same watch keeps the run on disk, to be read while it is written and afterwards.

    python examples/b_gradient_of_an_inner_layer_during_fit.py            # some seconds
    python examples/b_gradient_of_an_inner_layer_during_fit.py --full     # 60 epochs, 64 units, 50 steps
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from _options import options, save

import rnnlens as rl


class MinimalGatedCell(keras.layers.Layer):
    """f_t = sigmoid(W_f [x, h]), h_t = (1 - f) h_{t-1} + f tanh(W [x, f h]): Zhou et al. 2016, arXiv:1603.09420."""

    def __init__(self, units: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.units = self.state_size = self.output_size = units

    def build(self, input_shape) -> None:
        """One kernel per gate for the input and for the state."""
        for gate in ("forget", "candidate"):
            setattr(self, gate, self.add_weight((input_shape[-1], self.units), name=gate))
            name = f"recurrent_{gate}"
            setattr(self, name, self.add_weight((self.units, self.units), initializer="orthogonal", name=name))

    def call(self, x, states):
        """One step."""
        (h,) = states
        f = keras.ops.sigmoid(x @ self.forget + h @ self.recurrent_forget)
        n = keras.ops.tanh(x @ self.candidate + (f * h) @ self.recurrent_candidate)
        h = (1 - f) * h + f * n
        return h, [h]


class Adder(keras.Model):
    """A subclassed model: two recurrent layers, the inner one with the hand-written cell."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.inner = keras.layers.RNN(MinimalGatedCell(units), return_sequences=True, name="inner")
        self.outer = keras.layers.GRU(units, name="outer")
        self.head = keras.layers.Dense(1, name="head")

    def call(self, x):
        """From a sequence of pairs to one number."""
        return self.head(self.outer(self.inner(x)))


class ShakeWhatHearsNothing(keras.callbacks.Callback):
    """Notes the gradient at the inner layer of every batch; after every epoch, changes the layer by it."""

    def __init__(self) -> None:
        super().__init__()
        self.profiles: list[xr.DataArray] = []
        self.direct: list[float] = []
        self.noise: list[float] = []
        self.random = np.random.default_rng(0)

    def record_batch(self, batch) -> None:
        """One number per time step: the norm over samples and units; and what the layer's output gets from above."""
        inner = batch.traced(layers="inner", quantities=["output_grad", "hidden_grad"])["inner"]
        self.profiles.append(np.sqrt((inner.hidden_grad**2).sum(["sample", "unit"])))
        self.direct.append(float(np.sqrt((inner.output_grad**2).sum())))

    def on_epoch_end(self, epoch, logs=None) -> None:
        """Noise on the recurrent candidate kernel, more of it the less the first step is heard."""
        last = self.profiles[-1]
        deafness = 1.0 - min(1.0, float(last[0] / last.max()))
        scale = 0.02 * deafness / (1 + epoch) ** 0.55
        kernel = self.model.inner.cell.recurrent_candidate
        kernel.assign_add(self.random.normal(0.0, scale, kernel.shape))
        self.noise.append(scale)


def adding_problem(count: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Add the two numbers that are marked: one in the first half, one in the second (Hochreiter, Schmidhuber 1997)."""
    random = np.random.default_rng(0)
    values, marks = random.uniform(0, 1, (count, steps)), np.zeros((count, steps))
    rows = np.arange(count)
    marks[rows, random.integers(0, steps // 2, count)] = 1
    marks[rows, random.integers(steps // 2, steps, count)] = 1
    return np.stack([values, marks], axis=-1).astype("float32"), (values * marks).sum(1, keepdims=True).astype(
        "float32"
    )


def main() -> None:
    """Train, watch, draw."""
    args = options(__doc__)
    units, steps, epochs, count = (64, 50, 60, 4096) if args.full else (8, 12, 2, 128)
    keras.utils.set_random_seed(0)
    x, y = adding_problem(count, steps)
    model = Adder(units)
    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss="mse")
    model(x[:1])
    shaker, path = ShakeWhatHearsNothing(), args.out / "b_inner_layer.zarr"
    watch = rl.keras.Watch(path, batches=1, on_batch=shaker.record_batch, layers=["inner"], resume=False)
    history = model.fit(x, y, batch_size=64, epochs=epochs, verbose=0, callbacks=[watch, shaker])

    profile = xr.concat(shaker.profiles, "batch")
    picked = profile.isel(batch=np.linspace(0, profile.sizes["batch"] - 1, 4).astype(int))
    picked.attrs["long_name"] = "norm of dL/dh_t of the inner layer"
    figure = plt.figure(figsize=(9, 4), layout="constrained")
    ax = rl.plot.curves(picked, log=True, title="from the first batch to the last", figure=figure)
    save(ax, args.out / "b_inner_layer.png")

    first, final = profile[0], profile[-1]
    losses = history.history["loss"]
    print(f"{profile.sizes['batch']} batches watched; loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    before, after = float(first[0] / first[-1]), float(final[0] / final[-1])
    print(f"gradient at step 0 over that at the last step: {before:.3g} -> {after:.3g}")
    print(f"norm of the direct gradient at the layer's output: {shaker.direct[0]:.3g} -> {shaker.direct[-1]:.3g}")
    run = rl.open(path)
    norm = float(run.scalar("grad_norm")[-1])
    print(f"kept in {path.name}: {run.steps.size} batches, the last with weight gradients of norm {norm:.3g}")
    print("noise given to the layer after each epoch: " + ", ".join(f"{scale:.4f}" for scale in shaker.noise[:6]))


if __name__ == "__main__":
    main()
