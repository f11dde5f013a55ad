"""When does a network that reads digits pixel by pixel learn to remember, and what does that look like?

    "I watch the loss fall, and then it stands for a while, and then it falls again. At which moment does the memory
    form? Is it there before the accuracy is, or the other way round?"

scikit-learn's digits (64 pixels, one per step) are named after the last pixel. A callback traces a held-out batch every
so many steps; the film shows, for each of these records, how large the gradient of the loss is at every one of the 64
steps, relative to its own peak: white is nothing. Four moments are named from the numbers of the run: the network as it
was initialised, the first record at which the gradient reaches half of the image, the first at which it reaches the
first row of pixels, and the first at which three of four held-out digits are named rightly.

    python examples/f_film_of_a_training.py            # some seconds: it has learned next to nothing
    python examples/f_film_of_a_training.py --full     # until it reads digits; some minutes
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from _options import options, save
from sklearn.datasets import load_digits

import rnnlens as rl


class Accuracy(keras.callbacks.Callback):
    """Share of the held-out digits that are named rightly, at every record of the watch; stands behind it."""

    def __init__(self, watch, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.watch, self.x, self.y, self.by_step = watch, x, y, {}

    def note(self) -> None:
        """Once per record."""
        step = self.watch.record.step
        if step not in self.by_step:
            predicted = np.asarray(self.model.predict_on_batch(self.x)).argmax(axis=1)
            self.by_step[step] = float(np.mean(predicted == self.y))

    def on_train_begin(self, logs=None) -> None:
        """Before training."""
        self.note()

    def on_train_batch_end(self, batch, logs=None) -> None:
        """Where the watch has just recorded."""
        self.note()


def digits() -> tuple[np.ndarray, np.ndarray]:
    """(sample, step, 1) in an order drawn once, and the digit of each."""
    bundled = load_digits()
    order = np.random.default_rng(0).permutation(len(bundled.target))
    pixels = (bundled.data - bundled.data.mean()) / bundled.data.std()
    return pixels[order][:, :, None].astype("float32"), bundled.target[order]


def often_at_first(step: int, epoch: int) -> bool:
    """Memory forms early: every 5 steps up to 300, then every 50."""
    return step % (5 if step <= 300 else 50) == 0


def moments(run, accuracy: xr.DataArray) -> dict[str, int]:
    """Up to four moments of a training, by what its numbers did; one that never came is left out."""
    reach = run["gru"].reach
    reached = {
        "as initialised": reach >= 0,
        "the gradient reaches half of the image": reach >= 32,
        "it reaches the first row of pixels": reach > 64 - 8,
        "three of four digits are right": accuracy >= 0.75,
    }
    return {name: int(run.steps[int(when.values.argmax())]) for name, when in reached.items() if bool(when.any())}


def main() -> None:
    """Train, watch, draw."""
    args = options(__doc__)
    units, epochs, every, count = (32, 80, often_at_first, 1400) if args.full else (8, 2, 4, 320)
    keras.utils.set_random_seed(0)
    x, y = digits()
    held_x, held_y = x[1400:], y[1400:]
    layers = keras.layers
    model = keras.Sequential([keras.Input((64, 1)), layers.GRU(units, name="gru"), layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3, clipnorm=1.0), loss)

    # `rnnlens tail example-output/f_run.zarr` shows it while it runs.
    path = (args.out if args.full else Path(tempfile.mkdtemp())) / "f_run.zarr"
    watch = rl.keras.Watch(path, probe=(held_x[:32], held_y[:32]), every=every, resume=False)
    recorder = Accuracy(watch, held_x, held_y)
    model.fit(x[:count], y[:count], batch_size=32, epochs=epochs, verbose=0, callbacks=[watch, recorder])

    run = rl.open(path)
    accuracy = xr.DataArray([recorder.by_step[int(s)] for s in run.steps], {"step": run.steps.values}, name="accuracy")
    milestones = moments(run, accuracy)
    figure = plt.figure(figsize=(9, 5), layout="constrained")
    save(rl.plot.film(run, below=accuracy, moments=milestones, figure=figure), args.out / "f_film.png")
    save(rl.plot.timeline(run, ["loss", "*/reach", "gru/*/near_*"], moments=milestones), args.out / "f_timeline.png")

    print(f"{run.steps.size} records of {int(run.steps[-1])} steps; accuracy {accuracy.values[-1]:.0%}")
    print(f"{len(milestones)} of 4 moments came:")
    for name, step in milestones.items():
        reach = float(run["gru"].reach.sel(step=step))
        right = float(accuracy.sel(step=step))
        print(f"step {step:>5}  {name}: the gradient reaches {reach:.0f} of 64 steps, {right:.0%} are right")


if __name__ == "__main__":
    main()
