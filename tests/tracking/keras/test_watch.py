"""A Keras watch leaves training unchanged bit for bit, and what it records belongs to the batches that were trained."""

import warnings

import keras
import numpy as np
import pytest

import rnnlens as rl
from rnnlens.errors import InputError, LayerNotFoundError, TrackingWarning, UnsupportedError

ENGINE = keras.backend.backend()
STEPS, BATCH, EPOCHS = 6, 8, 2
#: Marks tests of code that is the same on every engine: the default run uses torch, which compiles nothing.
engine_independent = pytest.mark.full if ENGINE != "torch" else lambda test: test


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4 * BATCH, STEPS, 3)).astype("float32")
    return x, rng.normal(size=(4 * BATCH, 1)).astype("float32"), rng.uniform(0.5, 2, 4 * BATCH).astype("float32")


def network(optimizer="adam", dropout=0.3, **options):
    """Return a compiled LSTM and GRU with dropout, recurrent dropout, batch normalisation, a penalty and metrics."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((STEPS, 3)),
            keras.layers.LSTM(5, return_sequences=True, dropout=dropout, recurrent_dropout=dropout, name="lstm"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(dropout, name="drop"),
            keras.layers.GRU(4, name="gru"),
            keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.01), name="head"),
        ]
    )
    model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=["mse"], **options)
    return model


def fit(model, data, callbacks=(), **options):
    x, y, weight = data
    keras.utils.set_random_seed(2)
    fit_options = {"batch_size": BATCH, "epochs": EPOCHS, "sample_weight": weight, "verbose": 0, **options}
    history = model.fit(x, y, callbacks=list(callbacks), **fit_options).history
    return [np.array(keras.ops.convert_to_numpy(v)) for v in [*model.variables, *model.optimizer.variables]], history


@pytest.fixture(scope="module")
def unwatched_fit(data):
    """Provide the variables and the history of a training without a watch."""
    return fit(network(), data, validation_data=data[:2])


def small_network(**options):
    """Return a compiled one-layer LSTM, for tests that compile several programs."""
    keras.utils.set_random_seed(1)
    lstm = keras.layers.LSTM(4, dropout=0.3, name="lstm")
    model = keras.Sequential([keras.Input((STEPS, 3)), lstm, keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


def watch_makers(path, data):
    """Return the constructors of a probe watch and of a batch watch by name."""
    x, y, _ = data
    return {
        "probe": lambda: rl.keras.Watch(path, probe=(x[:5], y[:5]), every=3, epochs=(1,)),
        "batch": lambda: rl.keras.Watch(path, batches=2, on_batch=lambda batch: batch.weights),
    }


# On the other engines, the tests below compare recorded gradients with the updates of an undisturbed training.
@engine_independent
@pytest.mark.parametrize("kind", ["probe", "batch"])
def test_training_is_not_disturbed(kind, tmp_path, data, unwatched_fit):
    batch_logs = []
    log_callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batch_logs.append(dict(logs)))
    watch = watch_makers(tmp_path / "a.zarr", data)[kind]()
    watched, history = fit(network(), data, [watch, log_callback], validation_data=data[:2])
    for expected, actual in zip(unwatched_fit[0], watched, strict=True):
        np.testing.assert_array_equal(expected, actual)
    assert history == unwatched_fit[1]
    assert len(batch_logs) == 8
    assert rl.open(tmp_path / "a.zarr").steps.values.tolist() == {"probe": [0, 3, 6, 8], "batch": [2, 4, 6, 8]}[kind]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["probe", "batch"])
def test_two_hundred_steps_are_not_disturbed(kind, tmp_path, data):
    unwatched, unwatched_history = fit(network(), data, epochs=50)
    watched, watched_history = fit(network(), data, [watch_makers(tmp_path / "a.zarr", data)[kind]()], epochs=50)
    for expected, actual in zip(unwatched, watched, strict=True):
        np.testing.assert_array_equal(expected, actual)
    assert watched_history == unwatched_history


class Weights(keras.callbacks.Callback):
    """A callback that keeps the trainable weights after every step."""

    def __init__(self):
        super().__init__()
        self.after = []

    def on_train_batch_end(self, batch, logs=None):
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        self.after.append({v.path: np.array(keras.ops.convert_to_numpy(v)) for v in self.model.trainable_variables})


#: By name of a gradient: the end of its weight's path, and the weight's shape with gates on an axis of their own.
KERNELS = {
    "lstm/kernel": ("lstm/lstm_cell/kernel", (3, 4, 5)),
    "gru/recurrent_kernel": ("gru/gru_cell/recurrent_kernel", (4, 3, 4)),
    "head/kernel": ("head/kernel", (4, 1)),
}
RATE = 0.5


def check_weight_updates(model, data, tolerance=1e-5, rate=RATE):
    """Check after every SGD step that each weight moved by -rate times its gradient recorded for that batch."""
    recorded, weights = [], Weights()

    def record(batch):
        recorded.append({name: np.asarray(batch.gradients[name].values) for name in KERNELS})

    before = {v.path: np.array(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables}
    fit(model, data, [rl.keras.Watch(batches=1, on_batch=record), weights])
    path_of = lambda end: next(path for path in before if path.endswith(end))  # noqa: E731
    assert len(recorded) == len(weights.after) == 8
    for gradients, after in zip(recorded, weights.after, strict=True):
        for name, (end, shape) in KERNELS.items():
            update = (before[path_of(end)] - after[path_of(end)]).reshape(shape) / rate
            largest = np.abs(gradients[name]).max()
            assert largest > 1e-4
            np.testing.assert_allclose(gradients[name], update, rtol=0, atol=tolerance * max(1.0, largest))
        before = after


def test_the_gradients_are_those_that_the_optimizer_took(data):
    check_weight_updates(network(keras.optimizers.SGD(RATE)), data)


#: Ways in which users compile; torch's compiler takes minutes for one layer and is left out.
COMPILED = {
    "op by op": {"run_eagerly": True},
    "jit_compile=False": {"jit_compile": False},
    **({"jit_compile=True": {"jit_compile": True}} if ENGINE != "torch" else {}),
}


@pytest.mark.one_engine("tensorflow", "torch")  # JAX compiles its step in any case
@pytest.mark.product(keep=() if ENGINE == "torch" else ("jit_compile=True",))
@pytest.mark.parametrize("compile_mode", COMPILED)
def test_however_the_step_is_compiled(compile_mode, data):
    """Recorded gradients match the updates of eager and compiled steps (XLA on TensorFlow: only without dropout)."""
    same_masks = ENGINE == "jax" or compile_mode != "jit_compile=True"
    model = network(keras.optimizers.SGD(RATE), dropout=0.3 if same_masks else 0.0, **COMPILED[compile_mode])
    check_weight_updates(model, data)
    for name, value in COMPILED[compile_mode].items():
        assert getattr(model, name) == value


if ENGINE != "jax":
    # torch's compiler causes this warning by its own imports.
    @pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
    def test_masks_that_only_a_compiled_step_can_draw_are_refused(data):
        model = network(jit_compile=True)
        with pytest.raises(UnsupportedError, match="Layer 'lstm' draws random numbers in a compiled training step"):
            fit(model, data, [rl.keras.Watch(batches=1)])


@pytest.fixture(params=["mixed_float16", "mixed_bfloat16"])
def half_policy(request):
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(previous)


@pytest.mark.one_engine("jax", "torch")
@pytest.mark.product(keep=("mixed_float16",))
def test_half_precision_is_that_of_the_step(half_policy, data):
    """Recorded gradients in half precision match the updates within rounding; the loss scale is divided out."""
    rate = 0.02  # a step whose scaled gradients overflow is skipped and changes no weight
    sgd = keras.optimizers.SGD(rate)
    scaled_sgd = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate), initial_scale=256.0)
    check_weight_updates(
        network(scaled_sgd if half_policy == "mixed_float16" else sgd), data, tolerance=2e-2, rate=rate
    )


@engine_independent
def test_training_in_half_precision_is_not_disturbed(half_policy, tmp_path, data):
    unwatched, unwatched_history = fit(network(), data)
    for kind in ("probe", "batch"):
        watched, watched_history = fit(network(), data, [watch_makers(tmp_path / f"{kind}.zarr", data)[kind]()])
        for expected, actual in zip(unwatched, watched, strict=True):
            np.testing.assert_array_equal(expected, actual)
        assert watched_history == unwatched_history


class Penalised(keras.Model):
    """A model with its own ``train_step``, which calls that of Keras."""

    def train_step(self, *args):
        return super().train_step(*args)


@engine_independent
def test_a_step_of_ones_own(data):
    inner = network(keras.optimizers.SGD(RATE))
    model = Penalised(inner.inputs, inner.outputs)
    model.compile(keras.optimizers.SGD(RATE), "mse")
    check_weight_updates(model, data)


@engine_independent
def test_batches_of_a_generator_and_weights_of_classes(tmp_path):
    """``class_weight`` enters the recorded gradients as sample weights, and batches may come from a generator."""
    rng = np.random.default_rng(1)
    x, labels = rng.normal(size=(16, STEPS, 3)).astype("float32"), np.arange(16) % 3
    cost = {0: 1.0, 1: 3.0, 2: 0.5}

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return x[index * 8 :][:8], labels[index * 8 :][:8]

    def classifier():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.GRU(4, name="gru"), keras.layers.Dense(3, activation="softmax", name="head")]
        model = keras.Sequential([keras.Input((STEPS, 3)), *layers])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    traces = []
    first_step = lambda step, epoch: step == 1  # noqa: E731
    watch = rl.keras.Watch(tmp_path / "a.zarr", batches=first_step, on_batch=lambda batch: traces.append(batch.trace))
    classifier().fit(Batches(), class_weight=cost, verbose=0, shuffle=False, callbacks=[watch])
    weight = np.array([cost[int(label)] for label in labels[:8]], dtype="float32")
    reference = rl.trace(classifier(), x[:8], labels[:8], sample_weight=weight, training=True)
    scale = float(abs(reference["gru"].hidden_grad).max())
    np.testing.assert_allclose(traces[0]["gru"].hidden_grad, reference["gru"].hidden_grad, atol=1e-5 * scale)
    assert rl.open(tmp_path / "a.zarr").steps.values.tolist() == [1]

    def forever():
        while True:
            yield x[:8], labels[:8]

    watch = rl.keras.Watch(tmp_path / "b.zarr", batches=2)
    classifier().fit(forever(), steps_per_epoch=4, shuffle=False, verbose=0, callbacks=[watch])
    assert rl.open(tmp_path / "b.zarr").steps.values.tolist() == [2, 4]


@engine_independent
def test_an_end_before_its_time(tmp_path, data):
    """Early stopping is recorded as "stopped"; after Ctrl-C the run can be read and the model can train again."""
    early = keras.callbacks.EarlyStopping(monitor="loss", min_delta=100.0, patience=0)
    fit(network(), data, [rl.keras.Watch(tmp_path / "a.zarr", batches=2), early], epochs=9)
    run = rl.open(tmp_path / "a.zarr")
    assert run.ended == "stopped"
    assert run.steps.values.tolist() == [2, 4, 6, 8]

    def fail(batch, logs):
        if batch == 2:
            raise KeyboardInterrupt

    model = network()
    with pytest.raises(KeyboardInterrupt):
        fit(
            model,
            data,
            [rl.keras.Watch(tmp_path / "b.zarr", batches=1), keras.callbacks.LambdaCallback(on_train_batch_end=fail)],
        )
    assert rl.open(tmp_path / "b.zarr").steps.values.tolist() == [1, 2, 3]
    fit(model, data, epochs=1)


@engine_independent
def test_a_note_is_written_once(tmp_path, data):
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    fit(network(optimizer), data, [rl.keras.Watch(tmp_path / "a.zarr", every=2)])
    notes = rl.open(tmp_path / "a.zarr").notes
    assert len([note for note in notes if "of this batch alone" in note]) == 1


def test_direct_total_and_gates_are_of_that_batch(data):
    """Recorded gradients and gates equal ``rl.trace`` of the batch with the weights before the step (no dropout)."""
    x, y, _ = data
    records = []

    def record(batch):
        records.append((batch.trace, np.asarray(keras.ops.convert_to_numpy(batch.x))))

    model, twin = network(dropout=0.0), network(dropout=0.0)
    fit(model, data, [rl.keras.Watch(batches=lambda step, epoch: step == 1, on_batch=record)])
    ((trace, batch_x),) = records
    rows = [int(np.flatnonzero((x == row).all((1, 2)))[0]) for row in batch_x]
    assert rows != sorted(rows)  # fit has shuffled the rows
    with rl.options(certify="never"):
        reference = rl.trace(twin, x[rows], y[rows], sample_weight=data[2][rows], training=True)
    assert trace.loss == pytest.approx(reference.loss, rel=1e-5)
    for layer in ("lstm", "gru"):
        for name in ("output_grad", "hidden_grad", "gates"):
            expected = reference[layer][name].values
            np.testing.assert_allclose(trace[layer][name], expected, atol=1e-5 * np.abs(expected).max())


if ENGINE == "torch":

    def test_keras_itself_has_one_batch_per_execution_here(data):
        with pytest.raises(ValueError, match="steps_per_execution"):
            fit(small_network(steps_per_execution=3), data, [rl.keras.Watch(batches=1)])


if ENGINE == "tensorflow":

    def test_a_strategy_of_tensorflow(tmp_path, data):
        """Under a tf.distribute strategy, recording batches is refused before training; a probe changes nothing."""
        import tensorflow as tf

        def distributed_network(**options):
            with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
                return small_network(**options)

        model = distributed_network()
        start = model.get_weights()
        with pytest.raises(UnsupportedError, match=r"(?s)under a tf.distribute strategy.*MirroredStrategy.*probe="):
            fit(model, data, [rl.keras.Watch(batches=1)])
        for before, after in zip(start, model.get_weights(), strict=True):
            np.testing.assert_array_equal(before, after)
        unwatched, unwatched_history = fit(distributed_network(), data)
        watch = rl.keras.Watch(tmp_path / "a.zarr", probe=(data[0][:5], data[1][:5]), every=4)
        watched, watched_history = fit(distributed_network(), data, [watch])
        for expected, actual in zip(unwatched, watched, strict=True):
            np.testing.assert_array_equal(expected, actual)
        assert watched_history == unwatched_history
        assert rl.open(tmp_path / "a.zarr").steps.values.tolist() == [0, 4, 8]

    def test_the_step_that_tells_direct_gradients_is_compiled_once(data):
        """With ``direct=``, a second watch reuses the compiled training step; ``model.compile`` makes a new one."""
        model, traces = small_network(), []
        step = model.train_step
        model.train_step = lambda batch: (traces.append(1), step(batch))[1]

        def count_traces():
            captured = []
            record = lambda batch: captured.append(batch.traced(layers="lstm", quantities="output_grad"))  # noqa: E731
            fit(model, data, [rl.keras.Watch(batches=1, direct="lstm", on_batch=record)], epochs=1)
            assert len(captured) == 4
            assert float(abs(captured[-1]["lstm"].output_grad).max()) > 0
            return len(traces)

        first_count = count_traces()
        assert first_count > 0
        assert count_traces() == first_count
        model.compile("sgd", "mse")
        assert count_traces() > first_count


if ENGINE != "torch":

    def test_of_several_batches_per_execution_the_first_is_told(data):
        records = []

        def record(batch):
            records.append((batch.step, float(batch.traced(quantities=["hidden"]).loss), batch.notes))

        unwatched, unwatched_history = fit(small_network(steps_per_execution=3), data)
        losses = []
        fit(small_network(), data, [rl.keras.Watch(batches=1, on_batch=lambda b: losses.append(b.trace.loss))])
        watched, watched_history = fit(
            small_network(steps_per_execution=3), data, [rl.keras.Watch(batches=1, on_batch=record)]
        )
        for expected, actual in zip(unwatched, watched, strict=True):
            np.testing.assert_array_equal(expected, actual)
        assert watched_history == unwatched_history
        assert [step for step, _, _ in records] == [1, 4, 5, 8]
        np.testing.assert_allclose(
            [loss for _, loss, _ in records], [losses[0], losses[3], losses[4], losses[7]], rtol=1e-5
        )
        assert "first of 3 batches" in records[0][2][-1]


def test_direct_gradients_from_the_step_itself(data, unwatched_fit):
    """Gradients captured in the step by ``direct=`` equal those of a replay, and training is unchanged bit for bit."""
    pairs = []

    def record(batch):
        captured = batch.traced(layers=["lstm", "gru"], quantities="output_grad")
        assert (ENGINE == "jax") != any("without a second pass" in note for note in captured.notes)
        output_grad = batch["lstm"].output_grad
        assert ("trace" in vars(batch)) == (ENGINE == "jax")
        np.testing.assert_array_equal(output_grad, (batch.trace if ENGINE == "jax" else captured)["lstm"].output_grad)
        np.testing.assert_array_equal(batch["lstm"].hidden_grad, batch.trace["lstm"].hidden_grad)
        assert list(batch) == ["lstm", "gru"]
        pairs.append((captured, batch.trace))

    watch = rl.keras.Watch(batches=1, on_batch=record, direct=["lstm", "gru"])
    watched, history = fit(network(), data, [watch], validation_data=data[:2])
    for reference, actual in zip(unwatched_fit[0], watched, strict=True):
        np.testing.assert_array_equal(reference, actual)
    assert history == unwatched_fit[1]
    assert len(pairs) == 8
    for captured, retraced in pairs:
        assert captured.loss == pytest.approx(retraced.loss, rel=1e-5)
        for layer in ("lstm", "gru"):
            expected = retraced[layer].output_grad
            assert captured[layer].output_grad.dims == expected.dims
            scale = float(abs(expected).max())
            np.testing.assert_allclose(captured[layer].output_grad, expected, rtol=0, atol=1e-5 * scale)


@engine_independent
def test_before_and_after_clipping_are_both_told(tmp_path, data):
    clipping = keras.optimizers.SGD(0.1, global_clipnorm=0.05)
    fit(network(clipping), data, [rl.keras.Watch(tmp_path / "a.zarr", every=4)])
    run = rl.open(tmp_path / "a.zarr")
    assert (run.scalar("grad_norm") > 0.05).all()
    np.testing.assert_allclose(run.scalar("grad_norm_clipped"), 0.05, rtol=1e-4)


@engine_independent
def test_accumulated_gradients_are_named_as_such(tmp_path, data):
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    fit(network(optimizer), data, [rl.keras.Watch(tmp_path / "a.zarr", every=8)])
    assert any("of this batch alone" in note for note in rl.open(tmp_path / "a.zarr").notes)


@engine_independent
def test_a_second_training_goes_on_with_the_run(tmp_path, data):
    x, y, _ = data
    model, path = network(), tmp_path / "a.zarr"
    fit(model, data, [rl.keras.Watch(path, probe=(x[:5], y[:5]), every=4)])
    fit(model, data, [rl.keras.Watch(path, probe=(x[:5], y[:5]), every=4)])
    assert rl.open(path).steps.values.tolist() == [0, 4, 8, 12, 16]


@engine_independent
def test_a_model_of_before_drops_what_came_after(tmp_path, data):
    x, y, _ = data
    model, path = network(), tmp_path / "a.zarr"
    fit(model, data, [rl.keras.Watch(path, probe=(x[:5], y[:5]), every=4)])
    model.save(tmp_path / "m.keras")
    fit(model, data, [rl.keras.Watch(path, probe=(x[:5], y[:5]), every=4)])
    older = keras.models.load_model(tmp_path / "m.keras")
    fit(older, data, [rl.keras.Watch(path, probe=(x[:5], y[:5]), every=3)], epochs=1)
    assert rl.open(path).steps.values.tolist() == [0, 4, 8, 9, 12]


@engine_independent
def test_nothing_recorded_is_said_once(tmp_path, data):
    x, y, _ = data
    watch = rl.keras.Watch(tmp_path / "a.zarr", probe=(x[:5], y[:5]), every=100)
    with pytest.warns(TrackingWarning, match="8 batches were trained, and every=100 selected none") as caught:
        fit(network(), data, [watch])
    assert len([warning for warning in caught if warning.category is TrackingWarning]) == 1


def test_off_does_nothing(tmp_path, data):
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrackingWarning)
        watch = rl.keras.Watch(tmp_path / "a.zarr", probe=(data[0][:5], data[1][:5]), every=0)
        fit(small_network(), data, [watch])
    assert not (tmp_path / "a.zarr").exists()
    assert keras.src.utils.is_default(watch.on_train_batch_end)


def test_the_model_gets_its_step_back(tmp_path, data):
    model = small_network()
    fit(model, data, [rl.keras.Watch(batches=1)])
    assert type(model.train_function).__module__.split(".")[0] != "rnnlens"

    def fail(batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(model, data, [rl.keras.Watch(batches=1, on_batch=fail)])
    after, _ = fit(model, data)
    assert all(np.isfinite(value).all() for value in after)


@pytest.mark.parametrize("probe", [3, (), (1, 2, 3, 4)])
def test_what_is_no_probe(probe, tmp_path):
    with pytest.raises(InputError, match="probe= is a batch"):
        rl.keras.Watch(tmp_path / "a.zarr", probe=probe)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "hiden_grad"}, "no quantity"),
        ({"keep": ["hiden_grad"]}, "no quantity"),
        ({"probe": (1, 2), "on_batch": print}, "on_batch= applies to training batches"),
        ({"probe": (1, 2), "direct": "lstm"}, "direct= applies to training batches"),
        ({"epochs": (1,)}, "there is no probe"),
        ({"probe": (1, 2), "epochs": 3}, "epochs= are whole numbers"),
        ({"every": -1, "batches": 2}, "no schedule"),
        ({"evry": 3}, "Watch cannot be called like this.*did you mean 'every'"),
        ({"path": 3}, "is the path of a file"),
        ({"points": "many"}, "points= is a whole number"),
        ({"batches": 1, "on_batch": 3}, "cannot be called"),
    ],
)
@engine_independent
def test_what_would_be_ignored_is_refused(options, message):
    with pytest.raises(InputError, match=f"(?s){message}"):
        rl.keras.Watch(**options)


@engine_independent
def test_one_name_is_a_name(tmp_path, data):
    x, y, _ = data
    fit(network(), data, [rl.keras.Watch(tmp_path / "a.zarr", probe=(x[:5], y[:5]), every=4, keep="hidden_grad")])
    assert rl.open(tmp_path / "a.zarr")["lstm"].hidden_grad.dims == ("step", "sample", "time", "unit")


@engine_independent
def test_a_layer_that_is_called_twice_has_the_gradients_of_both(data):
    first_input, second_input, lstm = (
        keras.Input((STEPS, 3)),
        keras.Input((STEPS, 3)),
        keras.layers.LSTM(4, name="lstm"),
    )
    model = keras.Model([first_input, second_input], keras.layers.Dense(1)(lstm(first_input) + 2 * lstm(second_input)))
    model.compile("sgd", "mse")
    x, y, _ = data
    traces = []

    def record(batch):
        traces.append((batch.traced(layers="lstm", quantities="output_grad"), batch.trace))

    watch = rl.keras.Watch(batches=lambda step, epoch: step == 1, direct="lstm", on_batch=record)
    model.fit([x, x[::-1]], y, batch_size=BATCH, verbose=0, callbacks=[watch])
    captured, full_trace = traces[0]
    assert list(captured) == list(full_trace) == ["lstm#0", "lstm#1"]
    np.testing.assert_allclose(captured["lstm#1"].output_grad, 2 * captured["lstm#0"].output_grad, rtol=1e-5)


@engine_independent
def test_a_schedule_that_counts_is_asked_once(data):
    asked_steps, recorded_steps = [], []

    def every_other(step, epoch):
        asked_steps.append(step)
        return len(asked_steps) % 2 == 0

    fit(
        network(), data, [rl.keras.Watch(batches=every_other, on_batch=lambda batch: recorded_steps.append(batch.step))]
    )
    assert asked_steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert recorded_steps == [2, 4, 6, 8]


@engine_independent
def test_what_cannot_begin_leaves_the_model_and_the_run(tmp_path, data):
    x, y, _ = data
    model, path = network(), tmp_path / "a.zarr"
    with pytest.raises(LayerNotFoundError, match="No layer is called 'nope'"):
        fit(model, data, [rl.keras.Watch(path, batches=2, layers="nope")])
    assert not path.exists()
    with pytest.raises(InputError):
        fit(model, data, [rl.keras.Watch(path, probe=(x[:5, :, :2], y[:5]), batches=2)])
    assert type(model.train_function).__module__.split(".")[0] != "rnnlens"
    assert rl.open(path).ended == "InputError"


@engine_independent
def test_a_report_that_cannot_be_written_does_not_end_training(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nonfinite.nc").mkdir()  # a folder at the report's path, so that saving fails
    x, y, weight = data
    broken = np.array(x)
    broken[0, 0, 0] = np.nan
    with pytest.warns(TrackingWarning, match="is not finite, and its incident could not be saved"):
        fit(network(), (broken, y, weight), [rl.keras.Watch(batches=0, on_nonfinite="report")])
