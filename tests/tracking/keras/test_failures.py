"""Failures in a Keras watch do not interrupt ``fit``; a model without ``Input`` is recorded."""

import errno
import gc
import os
import pickle
import shutil
import warnings
import weakref

import numpy as np
import pytest
from spoken_keras import LEGACY, engine, keras
from zarr.storage import LocalStore

import rnnlens as rl
from rnnlens.errors import TrackingWarning

pytestmark = pytest.mark.one_engine("torch", "tf_keras")

rng = np.random.default_rng(0)
X = rng.normal(size=(20, 6, 3)).astype("float32")
Y = X.sum((1, 2))[:, None].astype("float32")
STEPS = 6


def network():
    """Return a compiled LSTM without ``Input``, as most user programs define it: its first batch builds it."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.LSTM(4, name="lstm"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def network_with_input():
    """Return a compiled LSTM with ``Input``, which is built before its first batch."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6, 3)), keras.layers.LSTM(4, name="lstm"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def losses(*callbacks, network=network):
    history = network().fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[*callbacks])
    return history.history["loss"]


class FeedBack(keras.Model):
    """An LSTM layer for warm-up and a loop over its cell, as in TensorFlow's tutorial on time series."""

    def __init__(self):
        super().__init__()
        self.lstm_cell = keras.layers.LSTMCell(4, name="lstm_cell")
        self.lstm_rnn = keras.layers.RNN(self.lstm_cell, return_state=True, name="lstm_rnn")
        self.dense = keras.layers.Dense(3)

    def call(self, x, training=None):
        output, *state = self.lstm_rnn(x)
        for _ in range(2):
            output, state = self.lstm_cell(self.dense(output), states=state, training=training)
        return self.dense(output)[:, :1]


def feedback_network():
    keras.utils.set_random_seed(1)
    model = FeedBack()
    model.compile("adam", "mse")
    return model


def test_a_cell_in_a_layer_and_in_a_loop_is_followed(tmp_path):
    """Weights of a cell that a layer and a loop share are recorded once, under the layer's name."""
    unwatched = losses(network=feedback_network)
    watched = losses(rl.keras.Watch(tmp_path / "a.zarr", probe=(X[:5], Y[:5]), every=3), network=feedback_network)
    np.testing.assert_allclose(watched, unwatched, rtol=1e-5)
    names = [str(name) for name in rl.open(tmp_path / "a.zarr").scalars]
    assert "lstm_rnn/weight_norm/kernel" in names
    assert not any(name.startswith("lstm_cell/weight_norm") for name in names)


@pytest.mark.product(keep=("probe",))
@pytest.mark.parametrize("mode", ["probe", "batch"])
def test_a_model_without_input_is_followed(tmp_path, mode):
    probe_options = {"probe": (X[:5], Y[:5])} if mode == "probe" else {}
    watched = losses(rl.keras.Watch(tmp_path / "a.zarr", every=2, **probe_options))
    np.testing.assert_array_equal(watched, losses())
    run = rl.open(tmp_path / "a.zarr")
    assert list(run) == ["lstm"]
    assert run.ended == "finished"
    assert not run.gaps
    steps = run.steps.values.tolist()
    assert steps[-3:] == [2, 4, 6]
    late = any("built by its first batch" in note for note in run.notes)
    if mode == "probe":
        assert steps[0] == int(late)  # step 0, of the initial weights, is missing where they do not exist yet


class Logger:
    """A logger that raises at the listed records and, optionally, when it is closed."""

    def __init__(self, failing, close=False):
        self.failing, self.fails_at_close, self.records = failing, close, 0

    def write(self, record):
        self.records += 1
        if self.records in self.failing:
            raise ConnectionError(f"no answer after {self.records} s")

    def close(self, reason):
        if self.fails_at_close:
            raise ConnectionError("gone")


def watched_losses(watch, *callbacks):
    """Return the losses of a watched training and the messages of the TrackingWarnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss_history = losses(watch, *callbacks, network=network_with_input)
    return loss_history, [str(warning.message) for warning in caught if issubclass(warning.category, TrackingWarning)]


@pytest.mark.one_engine
@pytest.mark.parametrize(
    ("failing", "close", "missing"),
    [((1,), False, 1), ((STEPS,), False, 1), ((2, 3, 5), False, 3), ((), True, 1)],
    ids=["first record", "last record", "three in between", "close"],
)
def test_a_logger_that_raises_costs_its_own_records_alone(tmp_path, failing, close, missing):
    watch = rl.keras.Watch(tmp_path / "a.zarr", every=1, loggers=Logger(failing, close))
    watched, messages = watched_losses(watch)
    np.testing.assert_array_equal(watched, losses(network=network_with_input))
    assert len(messages) == 1
    assert "the logger Logger; training goes on" in messages[0]
    run = rl.open(tmp_path / "a.zarr")
    assert run.steps.values.tolist() == list(range(1, STEPS + 1))
    assert run.ended == "finished"
    (gap,) = watch.gaps if close else run.gaps
    assert (gap.where, gap.records) == ("the logger Logger", missing)
    if not close:
        assert (gap.first, gap.last) == (min(failing), max(failing))


@pytest.mark.one_engine("torch", "tf_keras")
@pytest.mark.product(keep=("ENOSPC-until the end",))
@pytest.mark.parametrize("until", [4, None], ids=["for a while", "until the end"])
@pytest.mark.parametrize("code", ["ENOSPC", "ESTALE", "EIO"])
def test_a_disk_that_takes_nothing_leaves_the_history(tmp_path, monkeypatch, code, until):
    """``fit`` returns its usual losses while run files cannot be written (full disk, lost network drive, I/O error)."""
    original_set, broken, batches = LocalStore.set, [False], []

    async def failing(self, key, value):
        if broken[0]:
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))
        await original_set(self, key, value)

    def after_step(batch, logs=None):
        batches.append(batch)
        broken[0] = len(batches) >= 2 and (until is None or len(batches) < until)

    monkeypatch.setattr(LocalStore, "set", failing)
    path = tmp_path / "a.zarr"
    breaks = keras.callbacks.LambdaCallback(on_train_batch_end=after_step)
    watch = rl.keras.Watch(path, every=1)
    watched, messages = watched_losses(watch, breaks)
    broken[0] = False
    np.testing.assert_array_equal(watched, losses(network=network_with_input))
    assert messages
    assert all("the run; training goes on" in message for message in messages)
    assert len(messages) <= 2  # one about a step, one about closing the run
    run = rl.open(path)
    if until is None:
        assert run.steps.values.tolist() == [1, 2]
        assert watch.gaps[0].records >= STEPS - 2
    else:
        assert run.steps.values.tolist() == [1, 2, 5, 6]
        assert [(gap.where, gap.first, gap.last, gap.records) for gap in run.gaps] == [("the run", 3, 4, 2)]


@pytest.mark.one_engine
@pytest.mark.parametrize("removal", ["deleted", "emptied", "replaced"])
def test_a_folder_that_is_gone_is_said_once(tmp_path, removal):
    path, batches = tmp_path / "a.zarr", []

    def after_step(batch, logs=None):
        batches.append(batch)
        if len(batches) == 3:
            if removal == "emptied":
                for child in path.iterdir():
                    shutil.rmtree(child) if child.is_dir() else child.unlink()
            else:
                path.rename(tmp_path / "elsewhere")
            if removal == "replaced":
                path.mkdir()

    watch = rl.keras.Watch(path, every=1)
    watched, messages = watched_losses(watch, keras.callbacks.LambdaCallback(on_train_batch_end=after_step))
    np.testing.assert_array_equal(watched, losses(network=network_with_input))
    assert len(messages) == 1
    assert "was removed or replaced" in messages[0]
    assert [(gap.where, gap.first) for gap in watch.gaps] == [("the run", 4)]
    assert not path.exists() or not list(path.rglob("*"))


@pytest.mark.one_engine("jax", "torch")
def test_a_probe_that_cannot_be_traced_is_a_gap(tmp_path, monkeypatch):
    def failing(*_, **__):
        raise ZeroDivisionError("of the probe")

    monkeypatch.setattr("rnnlens.tracking.records.trace", failing)
    watch = rl.keras.Watch(tmp_path / "a.zarr", every=2, probe=(X[:5], Y[:5]))
    watched, messages = watched_losses(watch)
    np.testing.assert_array_equal(watched, losses(network=network_with_input))
    assert len(messages) == 1
    (gap,) = watch.gaps
    assert (gap.where, gap.first, gap.last, gap.records) == ("probe", 0, STEPS, 4)
    assert [tuple(stored_gap) for stored_gap in rl.open(tmp_path / "a.zarr").gaps] == [tuple(gap)]


@pytest.mark.one_engine
def test_a_watch_that_cannot_begin_leaves_the_history(monkeypatch):
    def failing(*_, **__):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("rnnlens.integrations.keras.sinks_of", failing)
    watched, messages = watched_losses(rl.keras.Watch(every=1, on_batch=lambda batch: None))
    np.testing.assert_array_equal(watched, losses(network=network_with_input))
    assert messages == ["This training is not watched; it goes on.\n  got:      ZeroDivisionError: ours"]


class Saving(keras.callbacks.Callback):
    """A callback that after each step saves, reloads and clones the model, and keeps an average of its weights."""

    def __init__(self, path):
        super().__init__()
        self.path, self.copies, self.average = path, [], None

    def on_train_batch_end(self, batch, logs=None):
        self.model.save(self.path)
        copied = keras.models.clone_model(self.model)
        copied.set_weights(self.model.get_weights())
        self.copies.append((keras.models.load_model(self.path), copied, self.model.get_weights()))
        now = self.model.get_weights()
        self.average = (
            now if self.average is None else [0.9 * a + 0.1 * b for a, b in zip(self.average, now, strict=True)]
        )


@pytest.mark.product(keep=("separate",) if LEGACY else ("direct",))
@pytest.mark.parametrize("direct", [(), ("lstm",)], ids=["separate", "direct"])
def test_whole_models_saved_and_copied_in_a_watch_are_models(tmp_path, direct):
    path = tmp_path / "model.keras"
    plain_saving, watched_saving = Saving(path), Saving(path)
    expected = losses(plain_saving, network=network_with_input)
    watch = rl.keras.Watch(tmp_path / "a.zarr", every=1, direct=direct)
    watched, messages = watched_losses(watch, watched_saving)
    np.testing.assert_array_equal(watched, expected)
    assert not messages
    assert not watch.gaps
    for actual, reference in zip(watched_saving.average, plain_saving.average, strict=True):
        np.testing.assert_array_equal(actual, reference)
    before = rl.open(tmp_path / "a.zarr").steps.size
    for loaded, copied, weights in watched_saving.copies:
        for saved_model in (loaded, copied):
            for actual, reference in zip(saved_model.get_weights(), weights, strict=True):
                np.testing.assert_array_equal(actual, reference)
        outputs = [keras.ops.convert_to_numpy(saved_model(X)) for saved_model in (loaded, copied)]
        np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
    loaded, _, _ = watched_saving.copies[-1]
    loaded.fit(X, Y, batch_size=8, verbose=0)  # trains without a watch
    assert rl.open(tmp_path / "a.zarr").steps.size == before == STEPS
    assert pickle.loads(pickle.dumps(loaded.get_config()))


@pytest.mark.one_engine
def test_nothing_holds_the_users_locals(tmp_path):
    class UserObject:
        pass

    user_object = UserObject()
    weak_ref = weakref.ref(user_object)
    losses(rl.keras.Watch(tmp_path / "a.zarr", every=2), network=network_with_input)
    del user_object
    gc.collect()
    assert weak_ref() is None


@pytest.mark.one_engine
@pytest.mark.parametrize("mode", ["probe", "batch"])
def test_ctrl_c_is_recorded_as_interrupted(tmp_path, mode):
    def interrupt(batch, logs):
        if batch == 1:
            raise KeyboardInterrupt

    probe_options = {"probe": (X[:5], Y[:5])} if mode == "probe" else {}
    watch = rl.keras.Watch(tmp_path / "a.zarr", every=1, **probe_options)
    model = network()
    try:
        stop = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[watch, stop])
    except KeyboardInterrupt:
        pass
    gc.collect()
    run = rl.open(tmp_path / "a.zarr")
    assert run.ended == "interrupted"
    late = mode == "batch" and engine() == "tensorflow"  # this batch creates the weights: not recorded
    assert run.steps.values.tolist()[-2:] == ([2] if late else [1, 2])
    assert type(model.train_function).__module__.split(".")[0] != "rnnlens"
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[watch])
    assert rl.open(tmp_path / "a.zarr").ended == "finished"


def dense_and_dropout():
    keras.utils.set_random_seed(1)
    dropout = [] if LEGACY else [keras.layers.Dropout(0.5)]  # dropout in batches of tf_keras is refused
    model = keras.Sequential([keras.Input((6, 3)), keras.layers.LSTM(4, name="lstm"), *dropout, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


PATCHED_NAMES = {
    "copies of the weights": "rnnlens.adapters.keras.training_capture.copy_of",
    "the batch handed on": "rnnlens.adapters.keras.training_capture.TrainStep._tee",
    "taps in the step": "rnnlens.adapters.keras.step_gradients._recording_loop",
    "taps read after the step": "rnnlens.adapters.keras.step_gradients._in_time_order",
    "the record": "rnnlens.tracking.batches.TrainedBatch.__init__",
}


@pytest.mark.product(keep=("separate-the batch handed on",) if LEGACY else ("direct-taps in the step",))
@pytest.mark.parametrize("patched_name", PATCHED_NAMES.values(), ids=PATCHED_NAMES)
@pytest.mark.parametrize("direct", [(), ("lstm",)], ids=["separate", "direct"])
def test_an_error_of_ours_within_the_step_leaves_the_history(tmp_path, monkeypatch, patched_name, direct):
    def fit(*callbacks):
        model = dense_and_dropout()
        history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[*callbacks])
        return history.history["loss"], model.get_weights()

    expected, weights = fit()

    def failing(*_, **__):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(patched_name, failing)
    watch = rl.keras.Watch(tmp_path / "a.zarr", every=2, direct=direct)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched, trained = fit(watch)
    np.testing.assert_array_equal(watched, expected)
    for weight, reference in zip(trained, weights, strict=True):
        np.testing.assert_array_equal(weight, reference)
    reached = (
        "taps" not in patched_name and "_recording_loop" not in patched_name and "_in_time_order" not in patched_name
    )
    on_taps = bool(direct) and not LEGACY and engine() in ("torch", "tensorflow")
    if reached or on_taps:
        assert watch.gaps
        assert all("ours" in gap.reason for gap in watch.gaps)
        assert sum(issubclass(warning.category, TrackingWarning) for warning in caught) == 1
