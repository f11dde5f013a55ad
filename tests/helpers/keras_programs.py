"""Keras programs from tutorials and in the style of users: each function returns (model, x, y)."""

from __future__ import annotations

from typing import Any

import numpy as np
from spoken_keras import LEGACY, keras

L, ops = keras.layers, keras.ops
SAMPLES, STEPS, FEATURES, UNITS, VOCABULARY = 3, 5, 3, 4, 7


def numbers(*shape: int) -> Any:
    """Return normally distributed numbers, equal at each call."""
    return np.random.default_rng(len(shape)).normal(size=shape)


def ids(*shape: int, low: int = 1) -> Any:
    """Return token ids without padding."""
    return np.random.default_rng(5).integers(low, VOCABULARY, shape).astype("int32")


def compile_model(model: Any, x: Any, y: Any, loss: Any = "mse", **options: Any) -> tuple[Any, Any, Any]:
    """Build the model by a call, as its first batch does, and compile it."""
    model(x)
    model.compile("sgd", loss, **options)
    return model, x, y


def detach(tensor: Any) -> Any:
    """Return the tensor without its gradient."""
    return ops.stop_gradient(tensor)


# -- tutorials of keras.io and tensorflow.org


def imdb_bidirectional_lstm():
    inputs = keras.Input(shape=(None,), dtype="int32")
    x = L.Embedding(VOCABULARY, FEATURES)(inputs)
    x = L.Bidirectional(L.LSTM(UNITS, return_sequences=True, name="low"), name="first")(x)
    x = L.Bidirectional(L.LSTM(UNITS), name="second")(x)
    model = keras.Model(inputs, L.Dense(1, activation="sigmoid")(x))
    return compile_model(model, ids(SAMPLES, STEPS), np.array([[0.0], [1.0], [1.0]]), "binary_crossentropy")


def text_generation_of_characters():
    model = keras.Sequential(
        [keras.Input((STEPS, VOCABULARY)), L.LSTM(UNITS, name="lstm"), L.Dense(VOCABULARY, activation="softmax")]
    )
    x = np.eye(VOCABULARY)[ids(SAMPLES, STEPS)]
    return compile_model(model, x, np.eye(VOCABULARY)[ids(SAMPLES)], "categorical_crossentropy")


def addition():
    model = keras.Sequential([L.LSTM(UNITS, name="reader"), L.RepeatVector(2)])
    model.add(L.LSTM(UNITS, return_sequences=True, name="writer"))
    model.add(L.Dense(VOCABULARY, activation="softmax"))
    x = np.eye(VOCABULARY)[ids(SAMPLES, STEPS)]
    return compile_model(model, x, np.eye(VOCABULARY)[ids(SAMPLES, 2)], "categorical_crossentropy")


def weather():
    inputs = L.Input(shape=(STEPS, FEATURES))
    model = keras.Model(inputs, L.Dense(1)(L.LSTM(UNITS, name="lstm")(inputs)))
    return compile_model(model, numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, 1))


def text_generation_with_a_gru():
    class Generator(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = L.Embedding(VOCABULARY, FEATURES)
            self.gru = L.GRU(UNITS, return_sequences=True, return_state=True, name="gru")
            self.dense = L.Dense(VOCABULARY)

        def call(self, inputs, states=None, return_state=False, training=False):
            x = self.embedding(inputs, training=training)
            x, states = self.gru(x, initial_state=states, training=training)
            x = self.dense(x, training=training)
            return (x, states) if return_state else x

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compile_model(Generator(), ids(SAMPLES, STEPS), ids(SAMPLES, STEPS), loss)


class CrossAttention(L.Layer):
    def __init__(self):
        super().__init__()
        self.mha = L.MultiHeadAttention(key_dim=UNITS, num_heads=1)
        self.layernorm, self.add = L.LayerNormalization(), L.Add()

    def call(self, x, context):
        return self.layernorm(self.add([x, self.mha(query=x, value=context)]))


def translation():
    """Return a translator whose decoder calls the GRU once over all target steps."""

    class Translator(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = L.Embedding(VOCABULARY, UNITS)
            self.encoder = L.Bidirectional(L.GRU(UNITS, return_sequences=True), merge_mode="sum", name="encoder")
            self.decoder = L.GRU(UNITS, return_sequences=True, return_state=True, name="decoder")
            self.attention, self.head = CrossAttention(), L.Dense(VOCABULARY)

        def call(self, inputs):
            context, x = inputs
            context = self.encoder(self.embedding(context))
            x, _ = self.decoder(self.embedding(x))
            return self.head(self.attention(x, context))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compile_model(Translator(), [ids(SAMPLES, STEPS), ids(SAMPLES, 4)], ids(SAMPLES, 4), loss)


class StepwiseDecoder(keras.Model):
    """A model that calls a GRU layer once per step, on that step's input and the last state."""

    def __init__(self):
        super().__init__()
        self.encoder = L.GRU(UNITS, return_sequences=True, return_state=True, name="encoder")
        self.gru = L.GRU(UNITS, return_sequences=True, return_state=True, name="gru")
        self.attention, self.head = L.AdditiveAttention(name="attention"), L.Dense(FEATURES, name="head")

    def call(self, x):
        memory, state = self.encoder(x)
        inputs, outputs = x[:, -1:], []
        for _ in range(4):
            output, state = self.gru(inputs, initial_state=state)
            inputs = self.head(ops.concatenate([output, self.attention([output, memory])], -1))
            outputs.append(inputs)
        return ops.concatenate(outputs, 1)


def translation_step_by_step():
    return compile_model(StepwiseDecoder(), numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, 4, FEATURES))


def stateful_lstm():
    model = keras.Sequential(
        [
            L.Input(batch_shape=(SAMPLES, STEPS, FEATURES)) if not LEGACY
            else L.InputLayer(batch_input_shape=(SAMPLES, STEPS, FEATURES)),
            L.LSTM(UNITS, stateful=True, return_sequences=True, name="lower"),
            L.LSTM(UNITS, stateful=True, name="upper"),
            L.Dense(2),
        ]
    )  # fmt: skip
    return compile_model(model, numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, 2))


class MinimalRNNCell(L.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = self.state_size = units

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units), initializer="uniform", name="kernel")
        self.recurrent_kernel = self.add_weight(
            shape=(self.units, self.units), initializer="uniform", name="recurrent_kernel"
        )
        self.built = True

    def call(self, inputs, states):
        output = ops.matmul(inputs, self.kernel) + ops.matmul(states[0], self.recurrent_kernel)
        return output, [output]


def custom_cell():
    cells = [MinimalRNNCell(UNITS), MinimalRNNCell(UNITS + 1)]
    model = keras.Sequential([L.RNN(cells, name="rnn"), L.Dense(1)])
    return compile_model(model, numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, 1))


class TemporalSoftmax(L.Layer):
    supports_masking = True

    def compute_mask(self, inputs, mask=None):
        return None

    def call(self, inputs, mask=None):
        inputs_exp = ops.exp(inputs)
        broadcast = ops.expand_dims(ops.cast(mask, inputs_exp.dtype), -1)
        return inputs_exp * broadcast / ops.sum(inputs_exp * broadcast, axis=1, keepdims=True)


def masking_and_padding():
    inputs = keras.Input(shape=(None,), dtype="int32")
    x = L.Embedding(VOCABULARY, FEATURES, mask_zero=True)(inputs)
    x = L.LSTM(UNITS, return_sequences=True, name="lstm")(x)
    x = L.Dense(1)(x)
    outputs = TemporalSoftmax()(x)
    x = ids(SAMPLES, STEPS)
    x[0, 3:], x[1, 2:] = 0, 0
    return compile_model(keras.Model(inputs, outputs), x, numbers(SAMPLES, STEPS, 1))


def masking_layer():
    model = keras.Sequential([L.Masking(), L.GRU(UNITS, return_sequences=True, name="gru"), L.LSTM(UNITS, name="lstm")])
    model.add(L.Dense(2))
    x = numbers(SAMPLES, STEPS, FEATURES)
    x[0, 3:], x[1, 4:] = 0, 0
    return compile_model(model, x, numbers(SAMPLES, 2))


def encoder_decoder_states():
    """Return a model of two input sequences: the encoder's state is the decoder's initial state."""
    encoder_inputs, decoder_inputs = keras.Input((None, FEATURES), name="a"), keras.Input((None, FEATURES), name="b")
    _, state_h, state_c = L.LSTM(UNITS, return_state=True, name="encoder")(encoder_inputs)
    decoder = L.LSTM(UNITS, return_sequences=True, return_state=True, name="decoder")
    decoder_outputs, _, _ = decoder(decoder_inputs, initial_state=[state_h, state_c])
    model = keras.Model([encoder_inputs, decoder_inputs], L.Dense(FEATURES, activation="softmax")(decoder_outputs))
    x = [numbers(SAMPLES, STEPS, FEATURES), 0.5 * numbers(SAMPLES, 4, FEATURES)]
    return compile_model(model, x, np.eye(FEATURES)[ids(SAMPLES, 4) % FEATURES], "categorical_crossentropy")


class FeedBack(keras.Model):
    """The autoregressive forecaster of the time-series tutorial."""

    def __init__(self, units=UNITS, out_steps=3):
        super().__init__()
        self.out_steps, self.units = out_steps, units
        self.lstm_cell = L.LSTMCell(units, name="lstm_cell")
        self.lstm_rnn = L.RNN(self.lstm_cell, return_state=True, name="lstm_rnn")
        self.dense = L.Dense(FEATURES)

    def warmup(self, inputs):
        x, *state = self.lstm_rnn(inputs)
        return self.dense(x), state

    def call(self, inputs, training=None):
        prediction, state = self.warmup(inputs)
        predictions = [prediction]
        for _ in range(1, self.out_steps):
            x, state = self.lstm_cell(predictions[-1], states=state, training=training)
            predictions.append(self.dense(x))
        return ops.transpose(ops.stack(predictions), [1, 0, 2])


def autoregressive():
    return compile_model(FeedBack(), numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, 3, FEATURES))


class ResidualWrapper(keras.Model):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def call(self, inputs, *args, **kwargs):
        return inputs + self.model(inputs, *args, **kwargs)


def residual_forecast():
    inner = keras.Sequential([L.LSTM(UNITS, return_sequences=True, name="lstm"), L.Dense(FEATURES)])
    x = numbers(SAMPLES, STEPS, FEATURES)
    return compile_model(ResidualWrapper(inner), x, x[:, ::-1].copy())


# -- programs in the style of users


def detached_halves():
    inputs = keras.Input((STEPS, FEATURES))
    low = L.LSTM(UNITS, return_sequences=True, name="low")(inputs)
    high = L.GRU(UNITS, name="high")(L.Lambda(detach)(low))
    joined = L.Concatenate()([high, L.GlobalAveragePooling1D()(low)])
    return compile_model(
        keras.Model(inputs, L.Dense(2)(joined)), numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, 2)
    )


def cut_between_chunks():
    """Return a model with truncated backpropagation: the state continues, its gradient is stopped."""

    class Truncated(keras.Model):
        def __init__(self):
            super().__init__()
            self.lstm = L.LSTM(UNITS, return_sequences=True, return_state=True, name="lstm")
            self.head = L.Dense(2)

        def call(self, x):
            first, *state = self.lstm(x[:, :3])
            second, *_ = self.lstm(x[:, 3:], initial_state=[detach(s) for s in state])
            return self.head(ops.concatenate([first, second], 1))

    return compile_model(Truncated(), numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, STEPS, 2))


def attention_pooling():
    inputs = keras.Input((STEPS, FEATURES))
    h, last = L.GRU(UNITS, return_sequences=True, return_state=True, name="gru")(inputs)
    scores = L.Dense(1, use_bias=False)(L.Activation("tanh")(L.Dense(UNITS)(h)))
    pooled = L.Dot(axes=1)([L.Softmax(axis=1)(scores), h])
    joined = L.Concatenate()([L.Flatten()(pooled), last])
    return compile_model(
        keras.Model(inputs, L.Dense(2)(joined)), numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, 2)
    )


def siamese():
    left, right = keras.Input((STEPS, FEATURES), name="left"), keras.Input((STEPS, FEATURES), name="right")
    shared = L.Bidirectional(L.LSTM(UNITS), name="shared")
    a, b = shared(left), shared(right)
    model = keras.Model({"left": left, "right": right}, L.Dense(1)(L.Subtract()([a, b])))
    x = {"left": numbers(SAMPLES, STEPS, FEATURES), "right": numbers(SAMPLES, STEPS, FEATURES)[::-1].copy()}
    return compile_model(model, x, numbers(SAMPLES, 1))


def unused_head():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.lstm, self.other = L.LSTM(UNITS, name="lstm"), L.GRU(UNITS, name="other")
            self.head, self.spare = L.Dense(2), L.Dense(5)

        def build(self, shape):
            self.lstm.build(shape)
            self.other.build(shape)
            self.head.build((shape[0], UNITS))
            self.spare.build((shape[0], UNITS))
            self.built = True

        def call(self, x):
            return self.head(self.lstm(x))

    model = Two()
    model.build((None, STEPS, FEATURES))
    return compile_model(model, numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, 2))


class ScaledLSTM(L.LSTM):
    """A layer subclass whose call scales the input and the output."""

    def call(self, sequences, initial_state=None, mask=None, training=False):
        return 2.0 * super().call(0.5 * sequences, initial_state=initial_state, mask=mask, training=training)


class NormedGRUCell(L.GRUCell):
    """A GRU whose state is scaled after each step."""

    def call(self, inputs, states, training=False):
        h, _ = super().call(inputs, states, training=training)
        h = h / (1.0 + ops.sum(h * h, axis=-1, keepdims=True))
        return h, [h]


def subclassed_layer():
    model = keras.Sequential([ScaledLSTM(UNITS, return_sequences=True, name="lstm"), L.Dense(2)])
    return compile_model(model, numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, STEPS, 2))


def subclassed_cell():
    model = keras.Sequential([L.RNN(NormedGRUCell(UNITS), return_sequences=True, name="rnn"), L.Dense(2)])
    return compile_model(model, numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, STEPS, 2))


def time_first():
    class TimeFirst(keras.Model):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = L.LSTM(UNITS, return_sequences=True, name="lstm"), L.Dense(2)

        def call(self, x):
            return ops.transpose(self.head(self.lstm(ops.transpose(x, (1, 0, 2)))), (1, 0, 2))

    return compile_model(TimeFirst(), numbers(STEPS, SAMPLES, FEATURES), numbers(STEPS, SAMPLES, 2))


def by_hand_both_ways():
    """Return a model that reverses the output of a backward layer, with a residual connection."""
    inputs = keras.Input((STEPS, UNITS))
    forward = L.SimpleRNN(UNITS, return_sequences=True, name="there")(inputs)
    backward = L.GRU(UNITS, return_sequences=True, go_backwards=True, name="back")(inputs)
    backward = L.Lambda(lambda t: t[:, ::-1] if LEGACY else ops.flip(t, 1))(backward)
    merged = L.Add()([forward, backward, inputs])
    model = keras.Model(inputs, L.Dense(2)(L.LayerNormalization()(merged)))
    return compile_model(model, numbers(SAMPLES, STEPS, UNITS), numbers(SAMPLES, STEPS, 2))


def generator_of_steps():
    """Return a model that calls a layer on its own output, with its two states passed back each time."""

    class Generator(keras.Model):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = L.LSTM(UNITS, return_state=True, name="lstm"), L.Dense(FEATURES)

        def call(self, x):
            output, h, c = self.lstm(x)
            outputs = [self.head(output)]
            for _ in range(3):
                output, h, c = self.lstm(ops.expand_dims(outputs[-1], 1), initial_state=[h, c])
                outputs.append(self.head(output))
            return ops.stack(outputs, 1)

    return compile_model(Generator(), numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, 4, FEATURES))


def own_training_step():
    """Return a model with its own ``train_step``, which must not be called; its loss is that of `compute_loss`."""

    class Trained(keras.Model):
        def __init__(self):
            super().__init__()
            self.gru, self.head = L.GRU(UNITS, return_sequences=True, name="gru"), L.Dense(2)

        def call(self, x, training=False):
            return self.head(self.gru(x, training=training))

        def train_step(self, *args):
            raise AssertionError("rnnlens does not train")

    return compile_model(Trained(), numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, STEPS, 2))


def several_outputs():
    inputs = keras.Input((STEPS, FEATURES))
    h = L.LSTM(UNITS, return_sequences=True, name="lstm")(inputs)
    tags = L.Dense(2, name="tags")(h)
    score = L.Dense(1, name="score")(L.GRU(UNITS, name="gru")(h))
    y = {"tags": numbers(SAMPLES, STEPS, 2), "score": numbers(SAMPLES, 1)}
    model = keras.Model(inputs, {"tags": tags, "score": score})
    losses, weights = {"tags": "mse", "score": "mse"}, {"tags": 0.3, "score": 2.0}
    return compile_model(model, numbers(SAMPLES, STEPS, FEATURES), y, losses, loss_weights=weights)


def adapted_head():
    """Return a model with LoRA on a dense layer, above an embedding whose table is frozen."""
    model = keras.Sequential([L.Embedding(VOCABULARY, FEATURES), L.LSTM(UNITS, name="lstm"), L.Dense(2)])
    model(ids(SAMPLES, STEPS))
    model.layers[-1].enable_lora(2)
    model.layers[0].trainable = False
    return compile_model(model, ids(SAMPLES, STEPS), numbers(SAMPLES, 2))


def convolutions_per_step():
    model = keras.Sequential(
        [L.TimeDistributed(L.Dense(6, activation="relu")), L.Conv1D(UNITS, 3, padding="same"), L.GRU(UNITS, name="gru")]
    )
    model.add(L.Dense(2))
    return compile_model(model, numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, 2))


def state_in_a_variable():
    """Return a model that stores its state in a variable and starts the next batch from it."""

    class Keeps(keras.Model):
        def __init__(self):
            super().__init__()
            self.gru = L.GRU(UNITS, return_sequences=True, return_state=True, name="gru")
            self.head = L.Dense(2)
            self.kept = self.add_weight(shape=(SAMPLES, UNITS), initializer="zeros", trainable=False, name="kept")

        def call(self, x):
            h, last = self.gru(x, initial_state=ops.convert_to_tensor(self.kept) * 1.0)
            self.kept.assign(detach(last))
            return self.head(h)

    return compile_model(Keeps(), numbers(SAMPLES, STEPS, FEATURES), numbers(SAMPLES, STEPS, 2))


TUTORIALS = (
    *(imdb_bidirectional_lstm, text_generation_of_characters, addition, weather, text_generation_with_a_gru),
    *(translation, translation_step_by_step, stateful_lstm, custom_cell, masking_and_padding, masking_layer),
    *(encoder_decoder_states, autoregressive, residual_forecast),
)
STRANGERS = (
    *(detached_halves, cut_between_chunks, attention_pooling, siamese, unused_head, subclassed_layer, subclassed_cell),
    *(time_first, by_hand_both_ways, generator_of_steps, own_training_step, several_outputs, adapted_head),
    *(convolutions_per_step, state_in_a_variable),
)
PROGRAMS = {program.__name__.replace("_", " "): program for program in (*TUTORIALS, *STRANGERS)}
