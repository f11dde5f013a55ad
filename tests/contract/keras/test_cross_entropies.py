"""Cross-entropies of saturated outputs are computed as Keras does, and certified."""

import numpy as np
import pytest
from spoken_keras import keras

import rnnlens as rl

pytestmark = pytest.mark.one_engine("torch", "tf_keras")


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_a_cross_entropy_is_computed_as_keras_does(activation):
    """The loss of saturated outputs equals Keras' own, which it clips for probabilities but not for their logits."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(1)
    units = 4 if activation == "softmax" else 1
    model = keras.Sequential(
        [keras.Input((6, 3)), keras.layers.LSTM(4), keras.layers.Dense(units, activation=activation)]
    )
    model.layers[-1].kernel.assign(400 * model.layers[-1].kernel)
    x, y = rng.standard_normal((32, 6, 3)).astype("float32"), rng.integers(0, units + 1, 32) % max(units, 2)
    loss = "sparse_categorical_crossentropy" if activation == "softmax" else "binary_crossentropy"
    model.compile(loss=loss)
    y = y.astype("int32") if activation == "softmax" else y[:, None].astype("float32")
    expected = model.evaluate(x, y, batch_size=32, verbose=0)
    for _ in range(3):  # certified with all samples, then with a part of them
        trace = rl.trace(model, x, y)
        assert trace.certificate.state == "passed"
        assert float(trace.loss) == pytest.approx(expected, rel=1e-5)
