"""A given initial state is used for loss, states and gradients; a stateful layer starts from its own state.

The reference is the same model with the state as one more input, and its central differences.
"""

import keras
import numpy as np
import pytest
from keras import layers

import rnnlens as rl
from rnnlens.errors import InputError

N, T, F, U = 4, 3, 2, 3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, T, F)).astype("float32"), RNG.normal(size=(N, 1)).astype("float32")
STATE = [RNG.normal(size=(N, U)).astype("float32") for _ in range(2)]


def model_and_loss():
    """Return a model, and one with the same weights that takes the initial states as inputs."""
    keras.utils.set_random_seed(2)
    lstm, head = layers.LSTM(U, name="lstm"), layers.Dense(1, name="head")
    x, h, c = keras.Input((T, F)), keras.Input((U,)), keras.Input((U,))
    model = keras.Model(x, head(lstm(x)))
    model_with_states = keras.Model([x, h, c], head(lstm(x, initial_state=[h, c])))
    model.compile(loss="mse")

    def loss(x=X):
        return float(np.mean((np.asarray(keras.ops.convert_to_numpy(model_with_states([x, *STATE]))) - Y) ** 2))

    return model, loss


@pytest.mark.one_engine
@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_given_state_holds_for_every_verb(batch_size):
    model, loss = model_and_loss()
    initial_state = {"lstm": STATE}
    assert rl.trace(model, X, Y, initial_state=initial_state).loss == pytest.approx(loss(), rel=1e-5)
    wrt = ["input", "head.weights", "lstm.hidden"]
    grads = rl.gradients(model, X, Y, initial_state=initial_state, wrt=wrt, batch_size=batch_size)
    assert float(grads.value) == pytest.approx(loss(), rel=1e-5)
    direction = RNG.normal(size=X.shape).astype("float32")
    slope = (loss(x=X + 3e-2 * direction) - loss(x=X - 3e-2 * direction)) / 6e-2
    assert float((grads["model"]["input"] * direction).sum()) == pytest.approx(slope, rel=2e-2, abs=1e-4)


@pytest.mark.one_engine
def test_a_state_of_another_size_is_refused():
    model, _ = model_and_loss()
    for verb in (rl.trace, rl.gradients):
        with pytest.raises(InputError):
            verb(model, X, Y, initial_state={"lstm": [STATE[0][:, :2], STATE[1]]})


@pytest.mark.one_engine
@pytest.mark.parametrize("of", ["lstm.hidden", "lstm.final_hidden"])
def test_the_states_of_a_stateful_layer_can_be_differentiated(of):
    keras.utils.set_random_seed(2)
    lstm = layers.LSTM(U, stateful=True, return_sequences=True, name="lstm")
    model = keras.Sequential([keras.Input(batch_shape=(N, T, F)), lstm, layers.Dense(1)])
    input_grad = rl.gradients(model, X, of=of, reduce="sum", wrt="input")

    def value(x):
        lstm.reset_states()
        outputs = np.asarray(keras.ops.convert_to_numpy(lstm(keras.ops.convert_to_tensor(x))))
        lstm.reset_states()
        return float(outputs.sum() if of == "lstm.hidden" else outputs[:, -1].sum())

    direction = RNG.normal(size=X.shape).astype("float32")
    slope = (value(X + 3e-2 * direction) - value(X - 3e-2 * direction)) / 6e-2
    assert float((input_grad * direction).sum()) == pytest.approx(slope, rel=2e-2, abs=1e-3)
