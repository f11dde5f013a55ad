"""User layers are traced once for all records of a compiled training, not once per record."""

import keras
import numpy as np
import pytest

import rnnlens as rl

TRACED = []


class Leaky(keras.layers.Layer):
    """A leaky cell, h_t = 0.8 h_{t-1} + tanh(W [x_t, h_{t-1}]), that counts how often Python runs its step."""

    def __init__(self, units):
        super().__init__()
        self.units = self.state_size = self.output_size = units

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1] + self.units, self.units), name="kernel")

    def call(self, x, states):
        TRACED.append("step")
        h = 0.8 * states[0] + keras.ops.tanh(keras.ops.concatenate([x, states[0]], -1) @ self.kernel)
        return h, [h]


class Reader(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.layers.RNN(Leaky(3), return_sequences=True, name="inner")
        self.outer = keras.layers.GRU(3, name="outer")
        self.head = keras.layers.Dense(1, name="head")

    def call(self, x):
        TRACED.append("model")
        return self.head(self.outer(self.inner(x)))


class GradientRecorder(keras.callbacks.Callback):
    """A recorder of each trained batch's gradients and of how often user code has run by then."""

    def __init__(self):
        super().__init__()
        self.runs, self.records = [], []

    def record(self, batch):
        self.records.append((batch, batch.trace["inner"].hidden_grad.values, batch.gradients["inner"]["kernel"].values))
        self.runs.append(len(TRACED))


@pytest.mark.only_on("tensorflow")  # JAX caches compiled programs in any case
def test_later_records_run_no_user_code_and_have_the_numbers_of_fresh_runs():
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(24, 6, 2)).astype("float32")
    model, recorder = Reader(), GradientRecorder()
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    model(x[:4])
    watch = rl.keras.Watch(batches=1, on_batch=recorder.record)
    model.fit(x, x[:, 0, :1], batch_size=4, epochs=1, verbose=0, shuffle=False, callbacks=[watch])
    assert len(recorder.runs) == 6
    assert len(set(recorder.runs[1:])) == 1, "user code ran again"
    assert not np.allclose(recorder.records[1][1], recorder.records[5][1])
    batch, hidden_grad, kernel_grad = recorder.records[-1]  # after training: new calls trace user code
    before = len(TRACED)
    fresh_trace = batch.with_variables_before(lambda: rl.trace(model, batch.x, batch.y, training=True, seed=None))
    assert len(TRACED) > before
    np.testing.assert_allclose(hidden_grad, fresh_trace["inner"].hidden_grad.values, rtol=1e-5, atol=1e-9)
    assert np.abs(kernel_grad).max() > 0
