"""``rl.keras.model``: a loop over time outside of the layers is a model, with the numbers of the author's own loop."""

import keras
import numpy as np
import pytest
from keras_plain import jacobian as framework_jacobian

import rnnlens as rl

pytestmark = [pytest.mark.one_engine, pytest.mark.usefixtures("float64")]

X = np.random.default_rng(0).normal(size=(3, 4, 2))


class Agent:
    """A plain class whose method has the loop; it counts its calls and has a gain."""

    def __init__(self):
        keras.utils.set_random_seed(0)
        self.memory, self.policies = keras.layers.GRUCell(3, name="gru_cell"), [keras.layers.Dense(2)]
        self.calls, self.gain = [], 1.0

    def act(self, observations):
        self.calls.append(len(self.calls))
        state, scores = keras.ops.zeros((observations.shape[0], 3)), []
        for t in range(observations.shape[1]):
            output, (state,) = self.memory(observations[:, t], [state])
            scores.append(self.policies[0](output) * self.gain)
        return keras.ops.stack(scores, axis=1)


def test_a_method_with_a_loop_has_the_numbers_of_the_method():
    """The Jacobian is autograd's of the method, follows its attributes, and leaves the object as it was."""
    agent = Agent()
    agent.act(X)
    model = rl.keras.model(agent.act)
    weights, calls = model.get_weights(), list(agent.calls)
    for agent.gain in (1.0, 2.0):
        found = rl.jacobian(model, X)
        assert list(agent.calls) == calls
        truth = framework_jacobian(Agent.act.__get__(agent), X)
        np.testing.assert_allclose(found.values, truth, rtol=1e-9, atol=1e-12)
        agent.calls[:] = calls
    trace = rl.trace(model, X, np.zeros((3, 4, 2)), loss="mse")
    assert (trace["gru_cell"].hidden.shape, trace.certificate.state) == ((3, 4, 3), "passed")
    assert all(np.array_equal(a, b) for a, b in zip(weights, model.get_weights(), strict=True))


def test_parameters_of_the_function_are_the_names_of_the_inputs():
    """Encoder and decoder, called by a function of two inputs: both are traced, and inputs go by name."""
    keras.utils.set_random_seed(0)
    encoder = keras.layers.LSTM(3, return_state=True, name="encoder")
    decoder = keras.layers.GRU(3, return_sequences=True, name="decoder")

    def translate(source, target):
        return decoder(target, initial_state=encoder(source)[1])

    translate(X, X)
    model, target = rl.keras.model(translate, encoder, decoder), X[:, ::-1].copy()
    truth = framework_jacobian(lambda source: translate(source, target), X).sum(axis=(1, 2))
    for x in ((X, target), {"target": target, "source": X}):
        grad = rl.gradients(model, x, of="output", reduce="sum", wrt="input[source]")
        np.testing.assert_allclose(grad.values, truth, rtol=1e-9, atol=1e-12)
    assert set(rl.trace(model, (X, target), np.zeros((3, 4, 3)), loss="mse")) == {"encoder", "decoder"}


def test_layers_that_are_not_built_are_named_with_the_call_that_builds_them():
    """The hint of the error, ``model(x)``, makes the model traceable."""
    agent = Agent()
    model = rl.keras.model(agent.act)
    with pytest.raises(rl.errors.UnbuiltModelError, match=r"model\(x\)"):
        rl.layers(model)
    model(X)
    assert list(rl.trace(model, X, np.zeros((3, 4, 2)), loss="mse")) == ["gru_cell"]


@pytest.mark.one_engine
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3,), "takes a function of the data"),
        ((keras.layers.Dense(2),), "rl.trace\\(layer, x\\)"),
        ((len, 3), "A part of a model is a layer"),
        ((len,), "No layer was given"),
    ],
    ids=["number", "layer", "part", "none"],
)
def test_what_is_no_function_or_no_layer_is_refused(arguments, text):
    """Each refusal names what was given, and the call to type."""
    with pytest.raises(rl.errors.InputError, match=text):
        rl.keras.model(*arguments)
