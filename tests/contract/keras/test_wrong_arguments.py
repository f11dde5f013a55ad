"""Wrong arguments in calls on a Keras model: each gives an error before anything runs, and none is ignored."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import torch

import rnnlens as rl
from rnnlens.errors import InputError, LayerNotFoundError, ModelError, TooLargeError, UnsupportedError, UserCodeError

pytestmark = pytest.mark.op_by_op

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 5, 3))
Y = RNG.normal(size=(4, 5, 2))


@pytest.fixture(scope="module")
def model():
    inputs = keras.Input((None, 3))
    hidden = keras.layers.LSTM(4, return_sequences=True, name="lstm")(inputs)
    network = keras.Model(inputs, keras.layers.Dense(2, name="top")(hidden))
    network.compile(loss="mse")
    return network


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X, Y


WRONG_CALLS = {
    "a data set": (lambda m: rl.trace(m, Batches()), InputError, "x is a data set"),
    "a class of loss": (lambda m: rl.trace(m, X, Y, loss=keras.losses.Huber), InputError, "loss=Huber()"),
    "a class of model": (lambda m: rl.trace(keras.Model, X), ModelError, "not a model"),
    "meta": (lambda m: rl.trace(m, torch.zeros(4, 5, 3, device="meta")), InputError, "a shape but no values"),
    "symbolic": (lambda m: rl.trace(m, keras.Input((5, 3))), InputError, "a shape but no values"),
    "masked": (lambda m: rl.trace(m, np.ma.masked_array(X, X > 0)), InputError, "x.filled(0)"),
    "complex": (lambda m: rl.trace(m, X * 1j), UnsupportedError, "its imaginary part would be dropped"),
    "huge": (lambda m: rl.trace(m, np.broadcast_to(X[0], (10**9, 5, 3))), TooLargeError, "at most 2 GiB"),
    "samples of y": (lambda m: rl.trace(m, X, Y[:2]), InputError, "y "),
    "a call": (lambda m: rl.trace(m, X, layers="lstm#0"), LayerNotFoundError, "'lstm#0'"),
    "a state": (lambda m: rl.trace(m, X, quantities="state_99"), InputError, "No layer here has 'state_99'."),
    "states of": (lambda m: rl.trace(m, X, initial_state={"no": [X[:, 0]]}), LayerNotFoundError, "names 'no'"),
    "one of two": (lambda m: rl.trace(m, X, initial_state={"lstm": [np.zeros((4, 4))]}), InputError, "another shape"),
    "probes": (lambda m: rl.jacobian(m, X, sketch=10**9), TooLargeError, "random probes of sketch="),
    "a switch": (lambda m: rl.trace(m, X, training=2), InputError, "training= is a switch."),
}


@pytest.mark.one_engine
@pytest.mark.parametrize("case", WRONG_CALLS)
def test_a_wrong_argument_is_one_error_that_says_what_to_do(model, case):
    call, kind, phrase = WRONG_CALLS[case]
    with pytest.raises(kind) as caught:
        call(model)
    assert phrase in str(caught.value)


SAME_NUMBERS = {
    "big-endian": lambda: X.astype(">f8"),
    "a torch tensor that requires grad": lambda: torch.tensor(X, requires_grad=True),
    "lists": X.tolist,
    "a tensor of the engine": lambda: keras.ops.convert_to_tensor(X),
}


@pytest.mark.product(keep=("a tensor of the engine",))
@pytest.mark.parametrize("form", SAME_NUMBERS)
def test_the_same_numbers_in_another_form_give_the_same_result(model, form):
    expected = rl.trace(model, X, Y)["lstm"].hidden_grad
    actual = rl.trace(model, SAME_NUMBERS[form](), Y, training=np.False_)["lstm"].hidden_grad
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.one_engine
def test_bfloat16_of_another_framework_is_taken_as_the_numbers_that_it_holds(model):
    rounded = torch.tensor(X).bfloat16()
    expected = rl.trace(model, rounded.double().numpy())["lstm"].hidden
    np.testing.assert_allclose(rl.trace(model, rounded)["lstm"].hidden, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.product
@pytest.mark.parametrize("loss_source", ["loss", "compiled"])
def test_given_states_count_in_every_gradient(model, loss_source):
    states = [RNG.normal(size=(4, 4)) for _ in range(2)]
    loss = {"loss": "mse"} if loss_source == "loss" else {}
    traced = rl.trace(model, X, Y, initial_state={"lstm": states}, **loss)
    gradients = rl.gradients(model, X, Y, wrt=["input", "top.weights"], initial_state={"lstm": states}, **loss)
    assert abs(gradients.value - traced.loss) < 1e-6 * abs(traced.loss)
    assert abs(rl.trace(model, X, Y, **loss).loss - traced.loss) > 1e-3
    np.testing.assert_allclose(gradients["input"], traced["lstm"].input_grad, rtol=1e-4, atol=1e-7)


class OwnError(Exception):
    pass


def _fail(*_):
    raise OwnError("gone")


@pytest.mark.one_engine
def test_what_the_users_code_raises_says_whose_it_was_and_is_still_its_own(model):
    for code_name, call in {
        "Your loss": lambda: rl.trace(model, X, Y, loss=_fail),
        "Your function": lambda: rl.gradients(model, X, of=_fail, wrt="input"),
    }.items():
        with pytest.raises(OwnError) as caught:
            call()
        assert isinstance(caught.value, UserCodeError)
        assert str(caught.value).startswith(f"{code_name} raised OwnError.")


@pytest.mark.one_engine
def test_a_model_without_recurrence_is_shown_a_call_that_works():
    feedforward = keras.Sequential([keras.Input((5, 3)), keras.layers.Dense(2)])
    with pytest.raises(ModelError) as caught:
        rl.jacobian(feedforward, X)
    call = str(caught.value).rpartition("rl.")[2]
    jacobian = eval(f"rl.{call}", {"rl": rl, "model": feedforward, "x": X})
    kernel = keras.ops.convert_to_numpy(feedforward.layers[-1].kernel)
    np.testing.assert_allclose(jacobian, np.broadcast_to(kernel[:, 0], X.shape), rtol=1e-6)
