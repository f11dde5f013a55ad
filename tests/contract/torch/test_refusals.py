"""Meaningless arguments are refused by name; arguments in a rare form give the same values."""

from __future__ import annotations

from itertools import repeat

import numpy as np
import pytest
import torch
from hostile import RaisesOnAnyUse, RaisingArray, UnreadableArray
from torch import nn

import rnnlens as rl
from rnnlens.errors import InputError, ModelError, RnnlensError

pytestmark = pytest.mark.check

X = np.random.default_rng(0).normal(size=(16, 6, 3)).astype("f4")
Y = np.random.default_rng(1).normal(size=(16, 6, 2)).astype("f4")
LOSS = nn.functional.mse_loss
VERBS = {
    "trace": lambda net, **options: rl.trace(net, X, Y, loss=LOSS, **options),
    "gradients": lambda net, **options: rl.gradients(net, X, Y, loss=LOSS, **options),
    "weights": lambda net, **options: rl.weights(net, X, Y, loss=LOSS, **options),
    "jacobian": lambda net, **options: rl.jacobian(net, X, **options),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.top = nn.Linear(4, 2)

    def forward(self, x):
        return self.top(self.lstm(x)[0])


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def spoiled_array(shape, value):
    array = np.ones(shape, "f4")
    array.flat[1] = value
    return array


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_and_states_that_are_not_finite(net, value):
    for verb in ("trace", "gradients", "weights"):
        with pytest.raises(InputError, match="sample_weight is not finite"):
            VERBS[verb](net, sample_weight=spoiled_array(16, value))
    for verb in ("trace", "gradients", "jacobian"):
        with pytest.raises(InputError, match=r"initial_state\['lstm'\] is not finite"):
            VERBS[verb](net, initial_state={"lstm": [spoiled_array((16, 4), value), np.zeros((16, 4), "f4")]})
    for verb in (rl.lyapunov, rl.step_eigenvalues, rl.fixed_points):
        with pytest.raises(InputError, match="The inputs or states of 'lstm' are not finite"):
            verb(net, spoiled_array(X.shape, value))
    with pytest.raises(InputError, match="The starts are not finite"):
        rl.fixed_points(net, X, starts=spoiled_array((4, 8), value))
    with pytest.raises(InputError, match="The input is not finite"):
        rl.fixed_points(net, X, input=spoiled_array(3, value))


def test_weights_in_a_packed_sequence(net):
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    for call in (*VERBS.values(), lambda net, **options: rl.find_nonfinite(net, X, Y, loss=LOSS, **options)):
        if call is not VERBS["jacobian"]:
            with pytest.raises(InputError, match="sample_weight is a packed sequence"):
                call(net, sample_weight=packed)


@pytest.mark.parametrize("steps", [{0, 1}, frozenset({1}), {0: 1}, iter([0]), (i for i in [0])], ids=str)
def test_steps_without_an_order(net, steps):
    with pytest.raises(InputError, match="takes numbers in an order"):
        rl.jacobian(net, X, at={"out_time": steps})
    with pytest.raises(InputError, match="takes numbers in an order"):
        rl.gradients(net, X, of="output", wrt="input", reduce="sum", at={"time": steps})


def test_names_and_steps_given_twice(net):
    with pytest.raises(InputError, match=r"wrt= names 'input' twice"):
        VERBS["gradients"](net, wrt=["input", "input"])
    for verb in (rl.trace, rl.weights):
        with pytest.raises(InputError, match=r"layers= names 'lstm' twice"):
            verb(net, X, Y, loss=LOSS, layers=["lstm", "lstm"])
    for steps in ([1, 1], [0, -6], np.array([2, 2])):
        with pytest.raises(InputError, match="selects a position along 'time' twice"):
            rl.gradients(net, X, of="output", wrt="input", reduce="sum", at={"time": steps})


def test_objects_that_cannot_be_read(net):
    cyclic = {}
    cyclic["a"] = cyclic
    with pytest.raises(ModelError, match="not a model"):
        rl.layers(cyclic)
    with pytest.raises(InputError, match="wrt= names nothing"):
        rl.gradients(net, X, Y, loss=LOSS, wrt=RaisesOnAnyUse())
    for keep in (np.array(0.5), RaisesOnAnyUse()):
        with pytest.raises(InputError, match="keep= has shares"):
            rl.weights(net, X, Y, loss=LOSS, measure="norm", keep=keep)


@pytest.mark.parametrize("returned", [None, "0.5", 1j, np.ones(2, complex)], ids=str)
def test_a_loss_that_returns_no_number(net, returned):
    with pytest.raises(InputError, match="The loss returns no real number"):
        rl.diagnose(net, X, Y, loss=lambda *_: returned)
    with pytest.raises(InputError, match="not a scalar"):
        rl.trace(net, X, Y, loss=lambda *_: returned)


def test_steps_beyond_what_there_is(net):
    with pytest.raises(InputError, match="The search is too large"):
        rl.fixed_points(net, X, period=10**6)
    with pytest.raises(InputError, match="step= is beyond the output"):
        rl.diagnose(net, X, Y, step=10**20)
    with pytest.raises(InputError, match="count= is beyond the states"):
        rl.lyapunov(net, X, count=10**20)
    with pytest.raises(InputError):
        rl.jacobian(net, X, at={"out_time": 10**20})


@pytest.mark.parametrize(
    "value", [UnreadableArray(), RaisingArray(), RaisesOnAnyUse()], ids=lambda value: type(value).__name__
)
def test_objects_whose_conversion_raises(net, value):
    for call in (
        lambda: rl.trace(net, value, Y, loss=LOSS),
        lambda: rl.find_nonfinite(net, X, value, loss=LOSS),
        lambda: rl.gradients(net, X, Y, loss=LOSS, sample_weight=value),
        lambda: rl.jacobian(net, X, initial_state={"lstm": [value, value]}),
        lambda: rl.diagnose(net, X, value),
        lambda: rl.fixed_points(net, X, input=value),
        lambda: rl.fixed_points(net, X, starts=value),
        lambda: rl.report(net, X, value, path="/nowhere/r.html"),
    ):
        with pytest.raises(RnnlensError):
            call()


def test_batches_of_other_lengths_and_without_end(net):
    with pytest.raises(InputError, match="differ in other axes than the number of samples"):
        rl.diagnose(net, iter([(X[:8], Y[:8]), (X[8:, :4], Y[8:, :4])]))
    with pytest.raises(InputError, match="never ends"):
        rl.gradients(net, repeat(X), of="output", wrt="input", reduce="sum")


def test_the_flag_of_a_negative_sign_changes_no_number(net):
    negative = torch.complex(torch.zeros(X.shape), torch.as_tensor(-X)).conj().imag
    assert negative.is_neg()
    np.testing.assert_array_equal(
        rl.trace(net, negative, Y, loss=LOSS)["lstm"].hidden_grad, rl.trace(net, X, Y, loss=LOSS)["lstm"].hidden_grad
    )
    np.testing.assert_array_equal(rl.jacobian(net, negative), rl.jacobian(net, X))
    np.testing.assert_array_equal(rl.fixed_points(net, negative)["lstm"].states, rl.fixed_points(net, X)["lstm"].states)
    np.testing.assert_array_equal(
        rl.trace(net, X, Y, loss=LOSS, sample_weight=negative[:, 0, 0]).loss,
        rl.trace(net, X, Y, loss=LOSS, sample_weight=X[:, 0, 0]).loss,
    )


def test_a_trace_is_not_cut_along_a_dimension_that_no_layer_has(net):
    assert rl.trace(net, X, at={"unit": [0], "time": -1})["lstm"].hidden.shape == (16, 1, 1)
    with pytest.raises(InputError, match="at= has a dimension 'units' that no traced layer has") as caught:
        rl.trace(net, X, at={"units": [0]})
    assert "did you mean 'unit'" in str(caught.value)
