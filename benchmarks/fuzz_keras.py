"""Compare every verb with the engine's own autodiff on random Keras models, most of them without an Input.

    KERAS_BACKEND=torch python benchmarks/fuzz_keras.py --count 100     # or jax, tensorflow
    python benchmarks/fuzz_keras.py --tf-keras --count 60

Models are drawn by their number; `fuzz_torch.py` explains how outcomes are counted. Half of them are fitted for a batch
first, as their users fit them. The reference is the engine's gradient of the same loss by a plain call.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
LEGACY = "--tf-keras" in sys.argv
if LEGACY:
    import tensorflow as tf
    import tf_keras as keras
else:
    import keras

import _fuzz  # noqa: E402
import numpy as np  # noqa: E402  Keras reads its engine when it is imported

import rnnlens as rl  # noqa: E402

L = keras.layers
STEPS, SAMPLES, FEATURES = 6, 4, 3


@keras.utils.register_keras_serializable("fuzz")
class LeakyCell(L.Layer):
    """A leaky cell, h' = (1 - a) h + a tanh(W x + U h) with a = 0.3."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = self.state_size = self.output_size = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.recurrent = self.add_weight(shape=(self.units, self.units), name="recurrent", initializer="orthogonal")
        self.built = True

    def call(self, x, states):
        tanh, matmul = (tf.tanh, tf.matmul) if LEGACY else (keras.ops.tanh, keras.ops.matmul)
        h = 0.7 * states[0] + 0.3 * tanh(matmul(x, self.kernel) + matmul(states[0], self.recurrent))
        return h, [h]


class Segments(L.Layer):
    """A layer called on consecutive segments of the sequence, with its states changed in between."""

    def __init__(self, inner, segment, change, last):
        super().__init__()
        self.inner, self.segment, self.change, self.last = inner, segment, change, last

    def build(self, shape):
        self.inner.build(shape)
        self.decay = self.add_weight(shape=(), initializer="ones", name="decay")
        self.built = True

    def changed(self, state, t):
        stop = tf.stop_gradient if LEGACY else keras.ops.stop_gradient
        return {
            "none": lambda: state,
            "norm": lambda: state / (1.0 + state * state),
            "decay": lambda: 0.7 * state * self.decay,
            "reset": lambda: state * float(t % 4 != 0),
            "detach": lambda: stop(state) if t == 2 * self.segment else state,
            "noise": lambda: state + 0.1 * ((7 * t) % 5 - 2),
        }[self.change]()

    def call(self, x):
        states, outs = None, []
        for t in range(0, STEPS, self.segment):
            states = None if states is None else [self.changed(state, t) for state in states]
            out, *states = self.inner(x[:, t : t + self.segment], initial_state=states)
            outs.append(out)
        return outs[-1][:, -1] if self.last else (tf.concat if LEGACY else keras.ops.concatenate)(outs, 1)


class Subclassed(keras.Model):
    """A subclassed model that calls its layers in `call`."""

    def __init__(self, parts, unused):
        super().__init__()
        self.parts = parts
        self.spare = L.Dense(3) if unused else None

    def call(self, x, training=False):
        for part in self.parts:
            x = part(x)
        return x


def draw_layers(choose):
    """Return the layers of a random model, first to last."""
    layers = []
    input_kind = choose("input", ["numbers", "numbers", "ids", "masked"])
    if input_kind == "ids":
        layers.append(L.Embedding(11, FEATURES, mask_zero=choose("mask zero", [True, False])))
    if input_kind == "masked":
        layers.append(L.Masking())
    count = choose("parts", [1, 1, 2])
    # With masks, "all" would also mask the loss in Keras, which the reference does not.
    pool = choose("pool", ["last", "mean", "max"] + ["all"] * (input_kind == "numbers"))
    for i in range(count):
        sequences = i < count - 1 or pool != "last"
        kinds = ["LSTM", "GRU", "SimpleRNN", "RNN of LSTMCell", "stack", "leaky"]
        # Segments receive no mask.
        kind = choose(f"{i} kind", kinds + ["segments", "segments"] * (input_kind == "numbers"))
        units = choose(f"{i} units", [FEATURES, 5])
        options = {"return_sequences": sequences, "go_backwards": choose(f"{i} backwards", [False, False, True])}
        if kind == "segments":
            layers.append(draw_segments(choose, i, units, sequences))
            continue
        cells = {
            "RNN of LSTMCell": lambda units=units: L.LSTMCell(units),
            "stack": lambda units=units: [L.GRUCell(units), L.LSTMCell(units)],
            "leaky": lambda units=units: LeakyCell(units),
        }
        layer = L.RNN(cells[kind](), **options) if kind in cells else getattr(L, kind)(units, **options)
        if choose(f"{i} both", [False, False, True]) and not options["go_backwards"]:
            layer = L.Bidirectional(layer, merge_mode=choose(f"{i} merge", ["concat", "sum", "ave"]))
        layers.append(layer)
        if sequences:
            extra = choose(f"{i} extra", ["none", "none", "norm", "dropout", "dense"])
            layers += {"norm": [L.LayerNormalization()], "dropout": [L.Dropout(0.3)], "dense": [L.Dense(4)]}.get(
                extra, []
            )
    layers += {"mean": [L.GlobalAveragePooling1D()], "max": [L.GlobalMaxPooling1D()]}.get(pool, [])
    return [*layers, L.Dense(2)]


def draw_segments(choose, i, units, sequences):
    """Return a random library layer, or a layer of stacked cells, that runs segment by segment."""
    name = choose(f"{i} layer", ["LSTM", "GRU", "SimpleRNN", "stack"])
    options = {"return_sequences": True, "return_state": True}
    stack = [L.GRUCell(units), L.LSTMCell(units)]
    inner = L.RNN(stack, **options) if name == "stack" else getattr(L, name)(units, **options)
    if name != "stack" and choose(f"{i} both", [False, False, True]):
        inner = L.Bidirectional(inner)
    change = choose(f"{i} change", ["none", "norm", "decay", "reset", "detach", "noise"])
    return Segments(inner, choose(f"{i} segment", [1, 1, 2, 3]), change, last=not sequences)


def draw_model(number, seed):
    """Return a random model, its x and y, and the choices made for it."""
    draw = random.Random(f"{seed} {number}")
    choices: dict[str, Any] = {}

    def choose(name, options):
        choices[name] = draw.choice(options)
        return choices[name]

    keras.utils.set_random_seed(number)
    layers = draw_layers(choose)
    build_style = choose("made", ["no Input", "no Input", "Input", "functional", "subclass"])
    integer = choices["input"] == "ids"
    shape, dtype = ((STEPS,), "int32") if integer else ((STEPS, FEATURES), None)
    if build_style == "functional":
        x = keras.Input(choose("steps", [shape, (None, *shape[1:])]), dtype=dtype)
        y = x
        for layer in layers:
            y = layer(y)
        model = keras.Model(x, y)
    elif build_style == "subclass":
        model = Subclassed(layers, choose("unused", [False, True]))
    else:
        model = keras.Sequential(([keras.Input(shape, dtype=dtype)] if build_style == "Input" else []) + layers)
    rng = np.random.default_rng(number)
    x = rng.integers(0, 11, (SAMPLES, STEPS)) if integer else rng.normal(size=(SAMPLES, STEPS, FEATURES))
    if choices["input"] == "masked":
        x[:2, STEPS - 2 :] = 0
    if integer:
        x[:, 0] = 3
    x = x.astype("int32" if integer else "float64")
    output = model(x)
    y = rng.normal(size=tuple(output.shape))
    model.compile("sgd", "mse")
    if choose("fitted", [True, False]):
        model.fit(np.repeat(x, 2, axis=0), np.repeat(y, 2, axis=0), batch_size=8, epochs=1, verbose=0)
    return model, x, y, choices


def assert_close(label, actual, expected):
    """Compare two arrays within 1e-6; Keras computes parts in float32, also under a policy of float64."""
    _fuzz.assert_close(label, actual, expected, 1e-6)


def reference(model, x, y):
    """Return the loss, its gradient with respect to x (None for ids), and the sum of all squared weight gradients."""
    integer = x.dtype.kind == "i"
    backend = "tensorflow" if LEGACY else keras.backend.backend()
    if backend == "torch":
        import torch

        leaf = torch.from_numpy(x).requires_grad_(not integer)
        weights = [v.value for v in model.trainable_variables]
        loss = ((model(leaf, training=False) - torch.from_numpy(y)) ** 2).mean()
        grads = torch.autograd.grad(loss, ([] if integer else [leaf]) + weights, allow_unused=True)
        grads = [None if g is None else g.numpy() for g in grads]
        loss = float(loss)
    elif backend == "tensorflow":
        import tensorflow as tf

        leaf = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(leaf)
            loss = tf.reduce_mean((model(leaf, training=False) - y) ** 2)
        grads = tape.gradient(loss, ([] if integer else [leaf]) + list(model.trainable_variables))
        grads = [None if g is None else tf.convert_to_tensor(g).numpy() for g in grads]
        loss = float(loss)
    else:
        compiled = compiled_reference(model, integer)
        trained = [v.value for v in model.trainable_variables]
        other_variables = [v.value for v in model.non_trainable_variables]
        loss, jax_grads = compiled(x, trained, other_variables, y)
        grads = [*jax_grads[: 0 if integer else 1], *jax_grads[-1]]
    squares = sum(float((np.asarray(g) ** 2).sum()) for g in grads[0 if integer else 1 :] if g is not None)
    return float(loss), None if integer else grads[0], squares


@functools.lru_cache(1)
def compiled_reference(model, integer):
    """Return loss and gradients of a model as one JAX function, compiled as Keras compiles a model.

    Layers that compute in float32, such as LayerNormalization, then round in the same way.
    """
    import jax
    import jax.numpy as jnp

    def run(leaf, weights, other_variables, y):
        return jnp.mean((model.stateless_call(weights, other_variables, leaf, training=False)[0] - y) ** 2)

    return jax.jit(jax.value_and_grad(run, (1,) if integer else (0, 1)))


def reference_jacobian(model, x):
    """Return the Jacobian of each sample's output with respect to its input, (sample, *out, *in), by the engine."""
    backend = "tensorflow" if LEGACY else keras.backend.backend()
    if backend == "torch":
        import torch

        run = lambda sample: model(sample[None], training=False)[0]  # noqa: E731
        return np.stack([torch.autograd.functional.jacobian(run, torch.from_numpy(sample)).numpy() for sample in x])
    if backend == "tensorflow":
        import tensorflow as tf

        leaf = tf.constant(x)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(leaf)
            y = model(leaf, training=False)
        full_jacobian = tape.jacobian(y, leaf, experimental_use_pfor=False).numpy()
        return np.stack([np.take(full_jacobian[n], n, axis=full_jacobian[n].ndim - x.ndim) for n in range(len(x))])
    import jax

    trained = [v.value for v in model.trainable_variables]
    other_variables = [v.value for v in model.non_trainable_variables]
    run = lambda sample: model.stateless_call(trained, other_variables, sample[None], training=False)[0][0]  # noqa: E731
    jacobian = jax.jit(jax.jacrev(run))
    return np.stack([np.asarray(jacobian(sample)) for sample in jax.numpy.asarray(x)])


def check_trace(model, x, y):
    trace = rl.trace(model, x, y)
    loss, _, _ = reference(model, x, y)
    assert_close("trace: loss", trace.loss, loss)
    return trace.certificate


def check_gradients(model, x, y):
    _, by_input, squares = reference(model, x, y)
    if by_input is not None:
        assert_close("gradients: input", rl.gradients(model, x, y, wrt="input"), by_input)
    result = rl.gradients(model, x, y, wrt="weights")
    assert_close("gradients: norm of all weights", _fuzz.sum_of_squares(result), squares)
    return result.certificate


def check_batches(model, x, y):
    """Compare gradients computed in batches, of which the last is shorter, with the reference."""
    if x.dtype.kind == "i":
        return None
    # The reference uses the same batches: parts that Keras computes in float32 round differently by batch size.
    batch_grads = [(reference(model, x[rows], y[rows])[1], len(x[rows])) for rows in (slice(3), slice(3, None))]
    by_input = np.concatenate([np.asarray(grad) * (count / len(x)) for grad, count in batch_grads])
    computed = rl.gradients(model, x, y, wrt="input", batch_size=3)
    assert_close("gradients in batches: input", computed, by_input)
    return computed.certificate


def check_jacobian(model, x, y):
    if x.dtype.kind == "i":
        return None
    computed = rl.jacobian(model, x)
    assert_close("jacobian", computed, reference_jacobian(model, x))
    return computed.certificate


CHECKS = {"trace": check_trace, "gradients": check_gradients, "batches": check_batches, "jacobian": check_jacobian}


def main() -> int:
    """Draw the models; print a table and every model that is not right."""
    parser = _fuzz.make_parser(__doc__, 100)
    parser.add_argument("--tf-keras", action="store_true")
    arguments = parser.parse_args()
    if LEGACY:
        keras.backend.set_floatx("float64")
    else:
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        if keras.backend.backend() == "jax":
            import jax

            jax.config.update("jax_enable_x64", True)
    table = _fuzz.Table(CHECKS, arguments.only is not None)
    for number in _fuzz.model_numbers(arguments):
        try:
            model, x, y, choices = draw_model(number, arguments.seed)
            reference(model, x, y)
        except Exception as error:
            print(f"{number} not a model of Keras: {type(error).__name__}: {str(error)[:100]}")
            continue
        for name, check in CHECKS.items():
            run = functools.partial(check, model, x, y)
            weights = lambda: dict(enumerate(model.get_weights()))  # noqa: E731, B023  called at once
            table.add(number, name, *_fuzz.run_check(run, weights), choices)
        keras.backend.clear_session()
    return table.finish()


if __name__ == "__main__":
    sys.exit(main())
