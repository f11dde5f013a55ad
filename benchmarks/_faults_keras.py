"""Keras networks on any engine with one planted fault of known origin each, and healthy networks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from _faults_torch import LARGEST, Fault
from keras import layers as kl
from keras import ops

KINDS = {"rnn": kl.SimpleRNN, "lstm": kl.LSTM, "gru": kl.GRU}


class Dividing(keras.layers.Layer):
    """A user-defined cell that divides by its input."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state_size = self.output_size = units

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(shape[-1], self.state_size), name="w")
        self.u = self.add_weight(shape=(self.state_size, self.state_size), name="u")
        self.built = True

    def call(self, x: Any, states: Any, training: Any = None) -> Any:
        h = ops.tanh(x @ self.w + states[0] @ self.u) + 0.1 / x[:, :1]
        return h, [h]


class Closed(keras.layers.Layer):
    """Sigmoid outputs multiplied by a 0/1 gate, so that some probabilities are 0."""

    def __init__(self, gate: Any) -> None:
        super().__init__(name="closed")
        self.gate = ops.convert_to_tensor(gate)

    def call(self, x: Any) -> Any:
        return ops.sigmoid(x) * ops.cast(self.gate[: ops.shape(x)[0]], x.dtype)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def make_data(rng: np.random.Generator) -> tuple[Any, Any]:
    samples, steps = int(rng.integers(3, 8)), int(rng.integers(9, 16))
    return rng.normal(size=(samples, steps, 3)).astype("f"), rng.normal(size=(samples, 2)).astype("f")


def random_index(rng: np.random.Generator, x: Any) -> tuple[int, int, int]:
    return tuple(int(rng.integers(size)) for size in x.shape)  # type: ignore[return-value]


def make_net(
    rng: np.random.Generator, steps: int, *, middle: Any = None, end: Any = None, policy: str = "float32"
) -> Any:
    """Build a random network: Dense or Masking, recurrent layer, Dense; Sequential or functional."""
    keras.utils.set_random_seed(int(rng.integers(2**31)))
    units = int(rng.integers(3, 8))
    kind = KINDS[str(rng.choice(list(KINDS)))]
    layer_or_wrapper = kind(units, dtype=policy, name="cell")
    if rng.random() < 0.3:
        layer_or_wrapper = kl.Bidirectional(kind(units, dtype=policy), name="cell", dtype=policy)
    recurrent = middle or [layer_or_wrapper]
    first = kl.Masking(dtype=policy) if rng.random() < 0.2 else kl.Dense(4, dtype=policy, name="inp")
    model_layers = [*([] if middle else [first]), *recurrent, kl.Dense(2, name="head", dtype=policy), *(end or [])]
    if rng.random() < 0.5:
        model = keras.Sequential([keras.Input((steps, 3)), *model_layers])
    else:
        start = out = keras.Input((steps, 3))
        for layer in model_layers:
            out = layer(out)
        model = keras.Model(start, out)
    model.compile(loss="mse")
    return model


def bad_input(rng: np.random.Generator) -> Fault:
    x, y = make_data(rng)
    sample, step, feature = random_index(rng, x)
    x[sample, step, feature] = rng.choice([np.nan, np.inf, -np.inf])
    expected = {"phase": "data", "layer": "input", "sample": sample, "step": step, "feature": feature}
    return Fault("bad input value", make_net(rng, x.shape[1]), x, y, {}, expected)


def bad_weight(rng: np.random.Generator) -> Fault:
    x, y = make_data(rng)
    model = make_net(rng, x.shape[1])
    variable = model.weights[int(rng.integers(len(model.weights)))]
    value = np.array(variable)
    value.flat[int(rng.integers(value.size))] = rng.choice([np.nan, np.inf])
    variable.assign(value)
    names = [layer.name for layer in model.layers if any(variable is v for v in layer.weights)]
    return Fault("weight not finite", model, x, y, {}, {"phase": "weights", "layer": names[0]})


def exploding_state(rng: np.random.Generator) -> Fault:
    """Return a linear or relu RNN whose recurrent kernel makes its state overflow, at the step that float64 gives."""
    x, y = make_data(rng)
    units, gain = int(rng.integers(3, 7)), float(10 ** rng.uniform(4.2, 6))
    rnn = kl.SimpleRNN(units, activation=str(rng.choice(["linear", "relu"])), name="cell", dtype="float32")
    model = make_net(rng, x.shape[1], middle=[rnn])
    rnn.cell.recurrent_kernel.assign(gain * np.eye(units))
    h, kernel = np.zeros((len(x), units)), np.array(rnn.cell.kernel, dtype=np.float64)
    for step in range(x.shape[1]):
        z = x[:, step] @ kernel + gain * h
        h = z if rnn.activation is keras.activations.linear else np.maximum(z, 0)
        overflowed = (np.abs(z) > LARGEST).any(axis=1)
        if overflowed.any():
            break
    else:
        return exploding_state(rng)
    expected = {"phase": "forward", "layer": "cell", "step": step, "sample": int(np.argmax(overflowed))}
    return Fault("exploding weights", model, x, y, {}, expected, ("recurrent_kernel",))


def exploding_adjoint(rng: np.random.Generator) -> Fault:
    """Return a linear RNN whose state stays 0 and whose gradient overflows in the backward pass."""
    x, y = make_data(rng)
    steps, units, gain = x.shape[1], int(rng.integers(3, 7)), float(10 ** rng.uniform(2, 4))
    rnn = kl.SimpleRNN(units, activation="linear", name="cell", kernel_initializer="zeros", dtype="float32")
    model = make_net(rng, steps, middle=[rnn])
    rnn.cell.recurrent_kernel.assign(gain * np.eye(units))
    head = model.get_layer("head")
    head.kernel.assign(np.ones((units, 2)))
    scale = float(LARGEST / gain ** int(rng.integers(2, steps - 1)) * 0.9)

    def loss(y_true: Any, y_pred: Any) -> Any:
        return ops.sum(y_pred) * scale

    lam, steps_back = 2.0 * scale, 0
    while lam <= LARGEST:
        lam, steps_back = lam * gain, steps_back + 1
    expected = {"phase": "backward", "layer": "cell", "step": steps - 1 - steps_back, "sample": 0}
    if steps - 1 - steps_back < 0:
        return exploding_adjoint(rng)
    return Fault("exploding adjoint", model, x, y, {"loss": loss}, expected, ("recurrent_kernel",))


def half_overflow(rng: np.random.Generator) -> Fault:
    """Return a mixed_float16 network with an input beyond float16, or whose product with a weight is beyond it."""
    x, y = make_data(rng)
    sample, step, feature = random_index(rng, x)
    if rng.random() < 0.5:
        x[sample, step, feature] = float(rng.uniform(7e4, 1e6))
        middle = [KINDS[str(rng.choice(list(KINDS)))](4, dtype="mixed_float16", name="cell")]
        model = make_net(rng, x.shape[1], middle=middle, policy="mixed_float16")
        expected = {"phase": "forward", "layer": "cell", "quantity": "input", "feature": feature}
        causes: tuple[str, ...] = (f"feature {feature}", "more than float16 holds")
    else:
        x[sample, step, feature] = float(rng.uniform(3e4, 6e4))
        kind = str(rng.choice(["lstm", "gru"]))
        layer = KINDS[kind](4, dtype="mixed_float16", name="cell")
        model = make_net(rng, x.shape[1], middle=[layer], policy="mixed_float16")
        kernel = 0.01 * np.ones_like(np.array(layer.cell.kernel))
        gate, unit = int(rng.integers(4 if kind == "lstm" else 3)), int(rng.integers(4))
        kernel[:, gate * 4 + unit] = 4.0
        layer.cell.kernel.assign(kernel)
        names = ("input", "forget", "candidate", "output") if kind == "lstm" else ("update", "reset", "candidate")
        expected = {"phase": "forward", "layer": "cell", "gate": names[gate], "unit": unit}
        causes = (f"feature {feature}", "times kernel 4")
    return Fault("overflow in half", model, x, y, {}, {**expected, "sample": sample, "step": step}, causes)


def log_of_zero(rng: np.random.Generator) -> Fault:
    x, y = make_data(rng)
    sample, unit = int(rng.integers(len(y))), int(rng.integers(2))
    gate = np.ones((len(y), 2), "f")
    gate[sample, unit] = 0.0
    operation = str(rng.choice(["log", "divide", "root"]))
    losses = {
        "log": lambda y, p: -ops.mean(ops.log(p)),
        "divide": lambda y, p: ops.mean(ops.abs(y) / p),
        "root": lambda y, p: ops.mean(ops.sqrt(p)),
    }
    model = make_net(rng, x.shape[1], end=[Closed(gate)])
    cause = {"log": "log of 0", "divide": "division by 0", "root": "root of 0"}[operation]
    phase = "backward" if operation == "root" else "loss"
    expected = {"phase": phase, "layer": "loss", "sample": sample, "unit": unit}
    return Fault("log 0 and the like", model, x, y, {"loss": losses[operation]}, expected, (cause,))


def division_in_a_cell(rng: np.random.Generator) -> Fault:
    x, y = make_data(rng)
    sample, step, _ = random_index(rng, x)
    x[sample, step, 0] = 0.0
    model = make_net(rng, x.shape[1], middle=[kl.RNN(Dividing(int(rng.integers(3, 7))), name="cell")])
    expected = {"phase": "forward", "layer": "cell", "sample": sample, "step": step}
    return Fault("division in a custom cell", model, x, y, {}, expected, ("division by 0", "feature 0"))


def mask_of_a_sample(rng: np.random.Generator) -> Fault:
    """Return a network with a NaN in a float mask that multiplies its input, or in the loss's sample weights."""
    x, y = make_data(rng)
    sample, step, _ = random_index(rng, x)
    if rng.random() < 0.4:
        weight = np.ones(len(x), "f")
        weight[sample] = np.nan
        expected = {"phase": "data", "layer": "sample_weight", "sample": sample}
        return Fault("NaN in a sample's mask", make_net(rng, x.shape[1]), x, y, {"sample_weight": weight}, expected)
    mask = np.ones(x.shape[:2], "f")
    mask[sample, step] = np.nan
    sequence, mask_input = keras.Input(x.shape[1:], name="sequence"), keras.Input(x.shape[1:2], name="mask")
    inner = make_net(rng, x.shape[1])
    model = keras.Model([sequence, mask_input], inner(sequence * mask_input[:, :, None]))
    model.compile(loss="mse")
    expected = {"phase": "data", "layer": "input[mask]", "sample": sample, "step": step}
    return Fault("NaN in a sample's mask", model, [x, mask], y, {}, expected)


def healthy(rng: np.random.Generator) -> Fault:
    """Return a healthy network, also with large or padded inputs, in half precision, or with a user-defined cell."""
    kind = str(rng.choice(["plain", "large", "cell", "half", "padded", "training"]))
    x, y = make_data(rng)
    if kind == "cell":
        x = x + np.sign(x) * 0.1
        return Fault("healthy", make_net(rng, x.shape[1], middle=[kl.RNN(Dividing(4), name="cell")]), x, y)
    if kind == "padded":
        x[0, 4:] = 0.0
    if kind == "large":
        x = x * 1e6
    model = make_net(rng, x.shape[1], policy="mixed_float16" if kind == "half" else "float32")
    return Fault("healthy", model, x, y, {"training": kind == "training"})


FAULTS = (
    bad_input,
    bad_weight,
    exploding_state,
    exploding_adjoint,
    half_overflow,
    log_of_zero,
    division_in_a_cell,
    mask_of_a_sample,
)
