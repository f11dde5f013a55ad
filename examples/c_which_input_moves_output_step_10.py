"""Which input step moves output step 10?

    "I have an LSTM with TimeDistributed(Dense) on top. I want to know which of the input steps move the output at step
    10. tape.batch_jacobian took all my memory and gave me five nameless axes."

``rl.jacobian`` computes only the rows asked for, and every axis has a name, so slices and partial sums read as
sentences.

    python examples/c_which_input_moves_output_step_10.py            # some seconds
    python examples/c_which_input_moves_output_step_10.py --full     # 10 samples, 100 steps, 32 units: the whole map
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import matplotlib.pyplot as plt
import numpy as np
from _options import options, save

import rnnlens as rl


def running_mean(count: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Two noisy inputs; the target is the mean of the first over the last four steps. The second is a distraction."""
    x = np.random.default_rng(0).normal(size=(count, steps, 2)).astype("float32")
    padded = np.pad(x[:, :, 0], ((0, 0), (3, 0)))
    return x, np.lib.stride_tricks.sliding_window_view(padded, 4, axis=1).mean(-1)[..., None]


def main() -> None:
    """Train a little, ask, draw."""
    args = options(__doc__)
    samples, steps, units, epochs = (10, 100, 32, 40) if args.full else (4, 20, 8, 30)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((steps, 2)),
            keras.layers.LSTM(units, return_sequences=True, name="lstm"),
            keras.layers.TimeDistributed(keras.layers.Dense(1), name="head"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
    x, y = running_mean(512, steps)
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=0)

    J = rl.jacobian(model, x[:samples], at={"out_time": [10]})
    print(f"the Jacobian has named axes: {dict(J.sizes)}")
    row = J.isel(out_time=0, out_unit=0)  # d output[10] / d input: (sample, in_time, in_feature)
    by_step = abs(row).sum("in_feature").mean("sample")
    by_feature = abs(row).sum("in_time").mean("sample")
    recent = float(by_step.sel(in_time=slice(7, 10)).sum() / by_step.sum())
    print(f"output 10 is moved most by input step {int(by_step.idxmax('in_time'))}")
    later = float(by_step.sel(in_time=slice(11, None)).sum())
    print(f"steps 7 to 10 carry {100 * recent:.0f} % of it, steps after 10 carry {later:.1g}")
    print("by input: " + ", ".join(f"feature {i}: {float(v):.3f}" for i, v in enumerate(by_feature)))

    figure = plt.figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subfigures(1, 2)
    rl.plot.time_jacobian(rl.jacobian(model, x[:samples], measure="norm"), figure=left)
    rows = row.mean("sample").rename(in_time="time", in_feature="feature")
    rows.attrs["long_name"] = "d output[10] / d input, mean over samples"
    rl.plot.curves(rows, figure=right, title="what moves output step 10")
    save(figure.axes, args.out / "c_output_step_10.png")


if __name__ == "__main__":
    main()
