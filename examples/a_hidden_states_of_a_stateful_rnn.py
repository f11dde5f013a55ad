"""Which of 1403 steps still move the hidden state?

    "I have a stateful SimpleRNN with 200 units over a frozen embedding: a vocabulary of 500, 100 dimensions, 9600
    sequences of 1403 steps, and I set a random initial state. I want the gradient of the mean hidden state with respect
    to the embedded input: a single number per time step. The tape returns None, and everything at once does not fit."

The ids are integers, so nothing can be differentiated by them; the embedding's output can. Sequences stream through in
batches of the size that the stateful model was built for, so memory does not grow with their number.

    python examples/a_hidden_states_of_a_stateful_rnn.py            # some seconds
    python examples/a_hidden_states_of_a_stateful_rnn.py --full     # 9600 x 1403 x 100, 200 units, within 4 GiB

Two targets are asked for: the hidden state averaged over all steps, and that of the last step alone. The first says
which inputs matter at all; the second, how far back the last state remembers.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from _options import options, save

import rnnlens as rl

VOCABULARY, BATCH = 500, 32


def build(steps: int, dimensions: int, units: int) -> keras.Model:
    """Frozen embedding, then a stateful SimpleRNN that returns every hidden state."""
    ids = keras.Input(batch_shape=(BATCH, steps), dtype="int32")
    embedded = keras.layers.Embedding(VOCABULARY, dimensions, trainable=False, name="embedding")(ids)
    hidden = keras.layers.SimpleRNN(units, stateful=True, return_sequences=True, name="rnn")(embedded)
    return keras.Model(ids, hidden)


def sequences(count: int, steps: int):
    """Batches of ids, made as they are asked for."""
    random = np.random.default_rng(1)
    for _ in range(count // BATCH):
        yield random.integers(0, VOCABULARY, (BATCH, steps), dtype=np.int32)


def gradient(model: keras.Model, data, start: np.ndarray, **target) -> xr.DataArray:
    """A number per step: the norm over embedding dimensions, averaged over all sequences."""
    return rl.gradients(
        model,
        data,
        of="rnn.hidden",
        reduce="mean",
        per_sample=True,
        wrt="embedding.output",
        measure="norm",
        across="mean",
        initial_state={"rnn": [start]},
        **target,
    )


def main() -> None:
    """Two gradients, one figure."""
    args = options(__doc__)
    count, steps, dimensions, units = (9600, 1403, 100, 200) if args.full else (64, 120, 20, 32)
    keras.utils.set_random_seed(0)
    model = build(steps, dimensions, units)
    start = np.random.default_rng(2).normal(size=(1, units)).astype("float32")

    all_steps = gradient(model, sequences(count, steps), start)
    last_step = gradient(model, sequences(count, steps), start, at={"time": -1})

    both_targets = xr.concat(
        [all_steps, last_step], xr.Variable("target", ["all steps", "last step"]), combine_attrs="override"
    )
    both_targets.attrs["long_name"] = "norm of d mean(hidden) / d embedded input"
    figure = plt.figure(figsize=(9, 4), layout="constrained")
    ax = rl.plot.curves(both_targets, log=True, title=f"{count} sequences", figure=figure)
    save(ax, args.out / "a_hidden_states.png")

    reach = int((last_step > 0.01 * last_step.max()).sum())
    print(f"{count} sequences of {steps} steps, one number per step: {all_steps.sizes}")
    print(f"The last state still feels {reach} of {steps} steps (gradient above 1 % of the largest).")


if __name__ == "__main__":
    main()
