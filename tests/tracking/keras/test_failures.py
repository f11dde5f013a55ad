"""Whatever fails in a watch, ``fit`` returns its History; a model without ``Input`` is followed."""

import gc
import warnings

import keras
import numpy as np
import pytest

import rnnlens as rl
from rnnlens.errors import TrackingWarning

random = np.random.default_rng(0)
X = random.normal(size=(20, 6, 3)).astype("float32")
Y = X.sum((1, 2))[:, None].astype("float32")


def network():
    """Without ``Input``: the commonest program there is."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.LSTM(4, name="lstm"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def losses(*callbacks):
    return network().fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[*callbacks]).history["loss"]


@pytest.mark.parametrize("mode", ["probe", "batch"])
def test_a_model_without_input_is_followed(tmp_path, mode):
    given = {"probe": (X[:5], Y[:5])} if mode == "probe" else {}
    watched = losses(rl.keras.Watch(tmp_path / "a.zarr", every=2, **given))
    np.testing.assert_array_equal(watched, losses())
    run = rl.open(tmp_path / "a.zarr")
    assert list(run) == ["lstm"]
    assert run.ended == "finished"
    assert not run.gaps
    steps = run.steps.values.tolist()
    assert steps[-3:] == [2, 4, 6]
    late = any("built by its first batch" in note for note in run.notes)
    if mode == "probe":
        assert steps[0] == int(late)  # of the weights before training, or of those that the first step left


class Logger:
    def write(self, record):
        if record.step == 4:
            raise ConnectionError("gone")

    def close(self, reason):
        raise ConnectionError("gone")


@pytest.mark.one_engine
def test_a_logger_that_raises_leaves_the_history(tmp_path):
    watch = rl.keras.Watch(tmp_path / "a.zarr", every=2, loggers=Logger())
    with pytest.warns(TrackingWarning, match="the logger Logger; training goes on") as told:
        watched = losses(watch)
    np.testing.assert_array_equal(watched, losses())
    assert len([one for one in told if one.category is TrackingWarning]) == 1
    assert rl.open(tmp_path / "a.zarr").steps.values.tolist() == [2, 4, 6]
    assert [(gap.where, gap.first, gap.records) for gap in watch.gaps] == [("the logger Logger", 4, 2)]


@pytest.mark.one_engine
def test_a_disk_that_is_full_until_the_end_leaves_the_history(tmp_path, monkeypatch):
    from zarr.storage import LocalStore

    real = LocalStore.set
    full = []

    async def failing(self, key, value):
        if full:
            raise OSError(28, "No space left on device")
        await real(self, key, value)

    monkeypatch.setattr(LocalStore, "set", failing)
    fills = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: full.append(batch))
    with pytest.warns(TrackingWarning, match="No space left"):
        watched = losses(rl.keras.Watch(tmp_path / "a.zarr", every=1), fills)
    np.testing.assert_array_equal(watched, losses())
    assert rl.open(tmp_path / "a.zarr").steps.values.tolist() == [1]


@pytest.mark.one_engine
@pytest.mark.parametrize("mode", ["probe", "batch"])
def test_ctrl_c_is_recorded_as_interrupted(tmp_path, mode):
    def interrupt(batch, logs):
        if batch == 1:
            raise KeyboardInterrupt

    given = {"probe": (X[:5], Y[:5])} if mode == "probe" else {}
    watch = rl.keras.Watch(tmp_path / "a.zarr", every=1, **given)
    model = network()
    try:
        stop = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[watch, stop])
    except KeyboardInterrupt:
        pass
    gc.collect()
    run = rl.open(tmp_path / "a.zarr")
    assert run.ended == "interrupted"
    assert run.steps.values.tolist()[-2:] == [1, 2]
    assert type(model.train_function).__module__.split(".")[0] != "rnnlens"
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[watch])
    assert rl.open(tmp_path / "a.zarr").ended == "finished"


def dense_and_dropout():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((6, 3)), keras.layers.LSTM(4, name="lstm"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    return model


PLACES = {
    "copies of the weights": "rnnlens.adapters.keras.training_capture.copy_of",
    "the batch handed on": "rnnlens.adapters.keras.training_capture.TrainStep._tee",
    "taps in the step": "rnnlens.adapters.keras.step_gradients._loop",
    "taps read after the step": "rnnlens.adapters.keras.step_gradients._turned",
    "the record": "rnnlens.tracking.batches.TrainedBatch.__init__",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("direct", [(), ("lstm",)], ids=["separate", "direct"])
def test_an_error_of_ours_within_the_step_leaves_the_history(tmp_path, monkeypatch, place, direct):
    def fit(*callbacks):
        model = dense_and_dropout()
        history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[*callbacks])
        return history.history["loss"], model.get_weights()

    expected, weights = fit()

    def failing(*_, **__):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(place, failing)
    watch = rl.keras.Watch(tmp_path / "a.zarr", every=2, direct=direct)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found, trained = fit(watch)
    np.testing.assert_array_equal(found, expected)
    for one, other in zip(trained, weights, strict=True):
        np.testing.assert_array_equal(one, other)
    met = "taps" not in place and "_loop" not in place and "_turned" not in place
    on_taps = bool(direct) and keras.backend.backend() in ("torch", "tensorflow")
    if met or on_taps:
        assert watch.gaps
        assert all("ours" in gap.reason for gap in watch.gaps)
        assert sum(issubclass(one.category, TrackingWarning) for one in told) == 1
