"""Findings on a recorded ``fit``, and the numbers behind them against weights that a callback saves by hand."""

import warnings

import keras
import numpy as np
import pytest

import rnnlens as rl

EPOCHS, BATCHES, BATCH = 2, 6, 8
X = np.random.default_rng(0).normal(size=(BATCHES * BATCH, 9, 2)).astype("float32")
Y = X[:, -2, :1]


class Saved(keras.callbacks.Callback):
    """The weights by path after each batch, and before the first."""

    def on_train_begin(self, logs=None):
        self.weights = [self.current()]

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.current())

    def current(self):
        sync = getattr(self.model, "jax_state_sync", None)
        if sync is not None:
            sync()
        return {v.path: np.array(keras.ops.convert_to_numpy(v)) for v in self.model.trainable_variables}


def fit(path, optimizer, *, stop=False, frozen=False, every=1, **watched):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((9, 2))
    hidden = keras.layers.LSTM(6, name="lstm", trainable=not frozen)(inputs)
    hidden = keras.layers.Lambda(keras.ops.stop_gradient)(hidden) if stop else hidden
    model = keras.Model(inputs, keras.layers.Dense(1, name="head")(hidden))
    model.compile(optimizer, "mse")
    saved = Saved()
    watch = rl.keras.Watch(path, every=every, **(watched or {"probe": (X[:16], Y[:16])}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of variables without gradient
        model.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[watch, saved], shuffle=False)
    return rl.open(path), saved.weights


def ratio(before, after):
    return np.linalg.norm(after.astype(float) - before.astype(float)) / np.linalg.norm(before.astype(float))


@pytest.mark.parametrize("watched", [{}, {"batches": 4}], ids=["probe", "batch"])
def test_update_ratios_are_those_of_weights_saved_by_hand(tmp_path, watched):
    run, saved = fit(tmp_path / "a.zarr", keras.optimizers.Adam(1e-2), every=4, **watched)
    steps = [step for step in run.steps.values if step]
    assert steps == [4, 8, 12]
    for name in saved[0]:
        recorded = run.scalar(f"update_ratio/{name}").sel(step=steps).values
        expected = [ratio(saved[s - 1][name], saved[s][name]) for s in steps]
        np.testing.assert_allclose(recorded, expected, rtol=1e-6, err_msg=name)
    assert run.findings == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("optimizer", "code"),
    [
        (lambda: keras.optimizers.Adam(1e-7), "UPDATES_TOO_SMALL"),
        (lambda: keras.optimizers.Adam(3.0), "UPDATES_TOO_LARGE"),
    ],
)
def test_a_learning_rate_far_off(tmp_path, optimizer, code):
    run, _ = fit(tmp_path / "a.zarr", optimizer())
    assert [finding.code for finding in run.findings] == [code]


def test_weights_behind_a_stop_gradient(tmp_path):
    run, saved = fit(tmp_path / "a.zarr", keras.optimizers.Adam(1e-2), stop=True)
    (finding,) = run.findings
    unchanged = [name for name in saved[0] if np.array_equal(saved[0][name], saved[-1][name])]
    assert finding.code == "WEIGHTS_WITHOUT_GRADIENT"
    assert finding.severity == "fault"
    assert finding.evidence["weights"] == unchanged
    assert "3 of 5 trained weights did not change at all in 12 recorded steps, and the others did" in finding.sentence


def test_a_frozen_layer(tmp_path):
    run, _ = fit(tmp_path / "a.zarr", keras.optimizers.Adam(1e-2), frozen=True)
    (finding,) = run.findings
    assert (finding.code, finding.layer) == ("FROZEN", "lstm")


def test_gradients_accumulated_over_batches_are_not_judged(tmp_path):
    run, saved = fit(tmp_path / "a.zarr", keras.optimizers.Adam(1e-2, gradient_accumulation_steps=3))
    assert all(np.array_equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert not any("update_ratio" in name for name in run.scalars)
    assert run.findings == []
