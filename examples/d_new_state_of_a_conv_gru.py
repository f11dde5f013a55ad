"""How does the new state of a GRU depend on every parameter before it?

    "My network is Conv1D, batch normalisation, relu, GRU, on sequences of different lengths, with dropout, and a Dense
    head. I need the gradient of the *new state* of the GRU with respect to every parameter, CNN and batch norm and all.
    For some of them I get None and I do not know which ones should be None. The batch size must stay open."

All connected weights come back in one call; the others are listed with the reason, in words.

    python examples/d_new_state_of_a_conv_gru.py            # some seconds
    python examples/d_new_state_of_a_conv_gru.py --full     # 64 samples, 400 steps, 128 units, with dropout
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from _options import options, save

import rnnlens as rl


def build(units: int) -> keras.Model:
    """Batch size and length are open: None."""
    x = keras.Input((None, 6))
    mask = keras.ops.any(x != 0, axis=-1)  # Conv1D passes no mask on, so the GRU is given it
    y = keras.layers.Conv1D(2 * units, 5, padding="causal", name="conv1d")(x)
    y = keras.layers.BatchNormalization(name="batch_norm")(y)
    y = keras.layers.ReLU(name="relu")(y)
    y = keras.layers.GRU(units, dropout=0.2, name="gru")(y, mask=mask)
    return keras.Model(x, keras.layers.Dense(1, name="head")(y))


def ragged(count: int, longest: int) -> np.ndarray:
    """Sequences of different lengths, padded with zeros at the end."""
    random = np.random.default_rng(0)
    x = random.normal(size=(count, longest, 6)).astype("float32")
    lengths = random.integers(longest // 2, longest + 1, count)
    return x * (np.arange(longest)[None, :, None] < lengths[:, None, None])


def main() -> None:
    """Ask, read the reasons, draw."""
    args = options(__doc__)
    samples, steps, units = (64, 400, 128) if args.full else (5, 20, 8)
    keras.utils.set_random_seed(0)
    model = build(units)

    g = rl.gradients(model, ragged(samples, steps), of="gru.final_hidden", reduce="sum", wrt="weights")
    print(g)
    for name, reason in g.disconnected.items():
        print(f"\n{name} has no gradient [{reason.code}]: {reason.sentence}\n  instead: {reason.remedy}")

    training = rl.gradients(
        model, ragged(samples, steps), of="gru.final_hidden", reduce="sum", wrt="conv1d/kernel", training=True, seed=3
    )
    change = float(abs(training - g["conv1d/kernel"]).max() / abs(g["conv1d/kernel"]).max())
    print(
        f"\ntraining=True (dropout, batch statistics) changes the gradient of the kernel by up to {100 * change:.0f} %"
    )

    gru = g["gru"].dataset
    grads = gru.rename({name: f"{name}_grad" for name in gru.data_vars})
    axes = rl.plot.weights_heatmap(grads, grad=True, title="gradient of the new state, by gate")
    save(axes, args.out / "d_new_state.png")


if __name__ == "__main__":
    main()
