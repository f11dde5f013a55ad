"""Keras models, of Keras 3 or tf_keras, for the tests of every adapter; see ``tested_adapter.py``."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np
from specimen import Declared, Specimen, generators
from spoken_keras import LEGACY, engine, keras, states_of

layers = keras.layers
surroundings = nullcontext


def tokens():
    """Return a model of padded token ids: a masked bidirectional LSTM and a GRU that returns its last step."""
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.Embedding(12, 3, mask_zero=True),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
            layers.GRU(3),
            layers.Dense(2),
        ]
    )


def sequences():
    """Return a model of float inputs that answers at every step."""
    return keras.Sequential([keras.Input((None, 3)), layers.SimpleRNN(4, return_sequences=True), layers.Dense(2)])


@keras.saving.register_keras_serializable("rnnlens_tests")
class Centred(keras.Model):
    """A model whose samples depend on each other: the mean over the batch is subtracted."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = layers.GRU(3, return_sequences=True), layers.Dense(2)

    def call(self, x):
        return self.head(self.rnn(x - keras.ops.mean(x, axis=0, keepdims=True)))


def of_sequences(samples, steps):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((samples, steps, 3)), rng.standard_normal((samples, steps, 2))
    return {"x": x.astype("float32"), "y": y.astype("float32")}


def of_weighted_sequences(samples, steps):
    return {**of_sequences(samples, steps), "sample_weight": np.linspace(0.5, 1.5, samples)[:, None]}


def of_weighted_tokens(samples, steps):
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 12, (samples, steps)) * (np.arange(steps) < rng.integers(3, steps + 1, (samples, 1)))
    y = rng.standard_normal((samples, 2)).astype("float32")
    return {"x": ids.astype("int32"), "y": y, "sample_weight": np.linspace(0.5, 1.5, samples)}


def specimen(make, data):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(loss="mse")
    model(data(2, 5)["x"])  # a model of the user's class is built at its first call
    return Specimen(model, data, None, "mae")


INDEPENDENT = {
    "tokens": partial(specimen, tokens, of_weighted_tokens),
    "sequences": partial(specimen, sequences, of_weighted_sequences),
}
mixing = partial(specimen, Centred, of_sequences)


def tagger():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None, 3))
    hidden = layers.LSTM(4, return_sequences=True, name="lstm")(inputs)
    model = keras.Model(inputs, layers.Dense(2, name="top")(hidden))
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)  # compiled programs have tests of their own
    return model, "mse"


def declared():
    keras.utils.set_random_seed(0)
    ids = keras.Input((4,), dtype="int32", name="ids")
    inner = keras.Sequential([keras.Input((4, 3)), layers.Dense(3, activation="relu", name="hidden")], name="block")
    x = inner(layers.Embedding(7, 3, name="table")(ids))
    x = layers.Bidirectional(layers.GRU(2, return_sequences=True), name="both")(x)
    x = layers.SpatialDropout1D(0.5, name="drop")(layers.BatchNormalization(name="norm")(x))
    x = layers.ReLU(negative_slope=0.1, name="leaky")(layers.ReLU(name="relu")(x))
    outputs = {"tag": layers.Dense(2, name="tag")(x), "all": layers.Activation("relu", name="act")(x)}
    model = keras.Model(ids, outputs)
    return Declared(
        model,
        {"x": np.arange(8).reshape(2, 4) % 7, "y": {"tag": np.ones((2, 4, 2)), "all": np.ones((2, 4, 4))}},
        {"table", "block", "block/hidden", "both", "norm", "drop", "relu", "leaky", "tag", "act"},
        {"inputs": ("ids",), "outputs": ("all", "tag")},
        roles={"embedding": {"table"}, "dropout": {"drop"}, "relu": {"block/hidden", "relu", "act"}},
        tables={"table": {"embeddings"}},
        statistics={"norm": {"moving_mean", "moving_variance"}},
        optimizer=(keras.optimizers.SGD(0.5), ""),
    )


def _compiled(clipping=None, scale=1.0, **options):
    """Return a function that compiles a model with Adam, and the facts that it then has."""

    def compile_model(model):
        optimizer = keras.optimizers.Adam(**options)
        if scale != 1.0:
            optimizer = (keras.mixed_precision if LEGACY else keras.optimizers).LossScaleOptimizer(
                optimizer, initial_scale=scale
            )
        model.compile(optimizer, {"tag": "mse"})

    lookups = engine() == "tensorflow"
    facts = {"optimizer": "Adam", "clipping": clipping, "loss": {"tag": "mse"}, "loss_scale": scale}
    return compile_model, {**facts, "clips_lookups_apart": lookups}


TRAININGS = {
    "plain": _compiled(),
    "clipnorm": _compiled(("clipnorm", 0.5), clipnorm=0.5),
    "global clipnorm": _compiled(("global_clipnorm", 2.0), global_clipnorm=2),
    "clipvalue": _compiled(("clipvalue", 0.1), clipvalue=0.1),
    "scaled loss": _compiled(("clipnorm", 3.0), 64.0, clipnorm=3.0),
}


class Private(layers.Layer):
    """A user's layer with a property ``activation`` that raises an error."""

    @property
    def activation(self):
        raise ValueError("not here")

    def call(self, x):
        return x


def guarded():
    rnn = layers.SimpleRNN(2, activation="relu", name="rnn")
    return keras.Sequential([keras.Input((4, 3)), rnn, Private(name="private")]), np.ones((2, 4, 3)), {"rnn"}


def tensors():
    """Return tensors of the engine that fit almost no argument."""
    if engine() != "tensorflow":
        return {
            "a tensor": lambda: keras.ops.ones((2, 5, 3)),
            "half tensor": lambda: keras.ops.ones((2, 5, 3), dtype="bfloat16"),
            "complex tensor": lambda: keras.ops.ones((2, 5, 3), dtype="complex64"),
            "variable": lambda: keras.Variable(np.ones((2, 5, 3))),
        }
    import tensorflow as tf

    return {
        "a tensor": lambda: tf.ones((2, 5, 3)),
        "half tensor": lambda: tf.ones((2, 5, 3), tf.bfloat16),
        "complex tensor": lambda: tf.ones((2, 5, 3), tf.complex64),
        "ragged tensor": lambda: tf.ragged.constant([[1.0], [1.0, 2.0]]),
        "sparse tensor": lambda: tf.sparse.from_dense(tf.ones((2, 5))),
        "variable": lambda: tf.Variable(tf.ones((2, 5, 3))),
        "string tensor": lambda: tf.constant(["a"]),
        "data set": lambda: tf.data.Dataset.from_tensor_slices((np.ones((2, 5, 3)), np.ones((2, 5, 2)))).batch(2),
        "single samples": lambda: tf.data.Dataset.from_tensor_slices((np.ones((2, 5, 3)), np.ones((2, 5, 2)))),
    }


def torch_tensors():
    """Return torch tensors, which are foreign to most engines."""
    import torch

    return {
        "requires grad": lambda: torch.ones(2, 5, 3, requires_grad=True),
        "bfloat16": lambda: torch.ones(2, 5, 3, dtype=torch.bfloat16),
        "meta": lambda: torch.ones(2, 5, 3, device="meta"),
        "sparse": lambda: torch.ones(2, 5, 3).to_sparse(),
    }


class Batches(keras.utils.Sequence if LEGACY else keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.ones((2, 5, 3)), np.ones((2, 5, 2))


FOREIGN = {
    "symbolic": lambda: keras.Input((5, 3)),
    "layer": lambda: layers.LSTM(2),
    "empty model": keras.Sequential,
    "model class": lambda: keras.Model,
    "loss class": lambda: keras.losses.MeanSquaredError,
    "loss": keras.losses.MeanSquaredError,
    "optimizer": keras.optimizers.SGD,
    "metric": keras.metrics.MeanSquaredError,
    "batches": Batches,
    **tensors(),
    **({} if LEGACY else torch_tensors()),
}


class Trap(layers.Layer):
    """A layer that raises an error in its forward pass when ``raised`` is set."""

    def __init__(self, **options):
        super().__init__(**options)
        self.raised = None

    def call(self, x):
        if self.raised is not None:
            raise self.raised("in the forward pass")
        return x


def stateful():
    """Return a specimen with statistics, states, dropout, penalties, an optimizer and metrics."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input(batch_shape=(2, 4, 3))
    x = layers.BatchNormalization(name="norm")(inputs)
    x = layers.LSTM(3, return_sequences=True, stateful=True, dropout=0.3, recurrent_dropout=0.2, name="lstm")(x)
    x = layers.Bidirectional(layers.SimpleRNN(2), name="bi")(x)
    trap = Trap(name="trap")
    outputs = layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l2", name="head")(
        trap(layers.Dropout(0.5)(x))
    )
    model, rng = keras.Model(inputs, outputs), np.random.default_rng(0)
    model.compile("adam", "mse", metrics=["mae"], run_eagerly=True)
    data = {"x": rng.normal(size=(2, 4, 3)), "y": rng.normal(size=(2, 2))}
    model.fit(*data.values(), epochs=1, batch_size=2, verbose=0)
    model.run_eagerly = False
    return Specimen(model, lambda *_: data, None, layer="lstm", trap=trap)


def change(model, x):
    x += 1
    model.set_weights([weight + 1 for weight in model.get_weights()])


def forget():
    keras.backend.clear_session(**({} if LEGACY else {"free_memory": True}))


def _variables(model):
    if not LEGACY:
        return [*model.variables, *model.metrics_variables, *(model.optimizer.variables if model.optimizer else ())]
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    return [*model.variables, *states_of(model), *metrics, *model.optimizer.variables]


def _process():
    """Return the state of the random generators and Keras' own process-wide state."""
    if LEGACY:
        from tensorflow.python.eager import context

        return [context.context()._rng.getstate()]
    from keras.src.backend.common import global_state

    seeds = global_state.get_global_attribute("global_seed_generator")
    state = [id(seeds), global_state.get_global_attribute("current_call_ctx")]
    if seeds is not None:
        state.append(keras.ops.convert_to_numpy(seeds.state).tolist())
    if engine() == "torch":
        import torch

        state.append(torch.random.get_rng_state().tolist())
    return state


def state_of(model, *arrays):
    variables, every_layer = _variables(model), list(model._flatten_layers())
    return {
        "variables": [np.array(keras.ops.convert_to_numpy(variable)).tobytes() for variable in variables],
        "arrays": [array.tobytes() for array in arrays],
        "attributes": [{name: id(value) for name, value in vars(layer).items()} for layer in every_layer],
        "losses": [id(loss) for layer in every_layer for loss in layer._losses],
        "gradients": engine() == "torch" and [(v.value.requires_grad, v.value.grad) for v in model.variables],
        "generators": (*_process(), *generators()),
        "compiled": model._is_compiled if LEGACY else model.compiled,
    }
