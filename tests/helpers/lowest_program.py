"""Program that uses every verb on a Keras model, with the installed versions; fails if a result is wrong."""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import rnnlens as rl

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(4, 6, 3)).astype("f4"), np.zeros((4, 2), "f4")


def main() -> None:
    """Run the verbs, save and open their results, and watch a training."""
    model = keras.Sequential([keras.Input((6, 3)), keras.layers.LSTM(5, name="lstm"), keras.layers.Dense(2)])
    model.compile(loss="mse", optimizer="sgd")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert rl.gradients(model, X, Y, wrt="input").certificate.state == "passed"
        for verb in (rl.trace, rl.gradients, rl.weights):
            result = verb(model, X, Y)
            assert result.certificate.state == "passed", (verb.__name__, result.certificate)
            for suffix in (".nc", ".zarr"):
                result.save(folder / f"{verb.__name__}{suffix}")
                assert rl.open(folder / f"{verb.__name__}{suffix}").layers == result.layers
        assert rl.jacobian(model, X).certificate.state == "passed"
        assert not rl.find_nonfinite(model, X, Y)
        model.fit(X, Y, epochs=4, verbose=0, callbacks=[rl.keras.Watch(folder / "run.zarr", probe=(X, Y), every=1)])
        run = rl.open(folder / "run.zarr")
        assert run.steps.values.tolist() == [0, 1, 2, 3, 4]
        assert not run.gaps
    print(f"{keras.__version__} on {keras.backend.backend()} {version(keras.backend.backend())}: 1 passed")


if __name__ == "__main__":
    main()
