"""What do gradients through time look like?

    "Show me the gradients of my recurrent layer: over time, by unit, by sample, before and after training, one way and
    both ways, and when only the last step is returned. What am I supposed to see?"

    python examples/e_gradient_pictures.py            # some seconds
    python examples/e_gradient_pictures.py --full     # 256 units, 100 steps, after 20 and after 200 iterations

What there is to see, in the order of the figures:

1. One way, few iterations (1D): the direct gradient of a layer that feeds a last-step loss is zero at all steps but
   one. The total gradient is not: it decays backward from the last step, unit by unit at its own rate.
2. One way, many iterations (1D): training has raised the gradient at early steps wherever the task needs them. The same
   picture drawn with direct gradients would still be zero.
3. Both ways (2D): the forward half decays toward the first step and the backward half toward the last: each half hears
   least of what lies furthest behind it in its own direction.
4. Last step only (0D): one number per unit and sample; the spread over samples, not the mean, says which units the
   loss pulls in different directions.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from _options import options, save

import rnnlens as rl

LSTM, GRU = keras.layers.LSTM, keras.layers.GRU


def build(layer: keras.layers.Layer, steps: int) -> keras.Model:
    """One recurrent layer, then one number from its last output."""
    model = keras.Sequential([keras.Input((steps, 4)), layer, keras.layers.Dense(1, name="head")])
    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss="mse")
    return model


def data(count: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The target is the sum of the first inputs of the first tenth of the steps: far from where the loss is."""
    x = np.random.default_rng(0).normal(size=(count, steps, 4)).astype("float32")
    return x, x[:, : max(1, steps // 10), 0].sum(1, keepdims=True)


def train(model: keras.Model, x: np.ndarray, y: np.ndarray, iterations: int) -> None:
    """So many batches of 32."""
    rows = np.resize(np.arange(len(x)), 32 * iterations)
    model.fit(x[rows], y[rows], batch_size=32, shuffle=False, verbose=0)


def share(gradient) -> float:
    """The gradient at the first step over that at the last, as norms over samples and units."""
    norm = np.sqrt((gradient**2).sum(["sample", "unit"]))
    return float(norm[0] / norm[-1])


def main() -> None:
    """Four figures."""
    args = options(__doc__)
    units, steps, few, many = (256, 100, 20, 200) if args.full else (6, 30, 5, 60)
    x, y = data(512, steps)
    batch = x[:16], y[:16]

    keras.utils.set_random_seed(0)
    one_way = build(LSTM(units, name="lstm"), steps)
    for iterations in (few, many):
        train(one_way, x, y, iterations)
        g = rl.gradients(one_way, *batch, of="loss", wrt="lstm.hidden")
        print(f"one way, {iterations} more iterations: first step over last {share(g):.2g}")
        save(rl.plot.curves(g.isel(unit=slice(6)), log=True), args.out / f"e_1d_one_way_{iterations}_iterations.png")
    last = rl.gradients(one_way, *batch, of="loss", wrt="lstm.output")
    spread = float(last.std("sample").mean() / abs(last).mean())
    print(f"last step only: {dict(last.sizes)}; the spread over samples is {spread:.2g} of the mean size")
    save(rl.plot.points(last), args.out / "e_0d_last_step.png")

    both_ways = build(keras.layers.Bidirectional(GRU(units), name="both"), steps)
    train(both_ways, x, y, few)
    g = rl.gradients(both_ways, *batch, of="loss", wrt="both.hidden")
    forward, backward = (share(g.sel(direction=d)) for d in ("forward", "backward"))
    print(f"both ways: first step over last, forward half {forward:.2g}, backward half {backward:.2g}")
    save(rl.plot.heatmap(g.mean("sample", keep_attrs=True)), args.out / "e_2d_both_ways.png")


if __name__ == "__main__":
    main()
