"""Models and losses that are a ``tf.function``: their layers are seen, and gradients are those of the user's tape."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

import rnnlens as rl

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(4, 5, 3)).astype("float32"), rng.normal(size=(4, 2)).astype("float32")


def test_a_loop_inside_a_graph_function_is_followed_and_its_weights_have_the_gradients_of_fit():
    class Unrolled(keras.Model):
        def __init__(self):
            super().__init__()
            self.cell = keras.layers.GRUCell(4, name="cell")
            self.head = keras.layers.Dense(2, name="head")

        @tf.function
        def call(self, x):
            state = tf.zeros((4, 4), x.dtype)
            for t in range(5):
                state = self.cell(x[:, t], [state])[0]
            return self.head(state)

    model = Unrolled()
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model(tf.constant(X))
    trace = rl.trace(model, X, Y)
    assert trace.certificate.state == "passed"
    assert "hidden_grad" in trace["cell"]
    gradient = rl.gradients(model, X, Y, wrt="head/kernel")
    before = np.array(model.head.kernel)
    model.fit(X, Y, batch_size=4, verbose=0)  # one step of gradient descent
    np.testing.assert_allclose(gradient.values, before - np.array(model.head.kernel), rtol=1e-4)


class OverTensors(keras.Model):
    """A loop over the steps of a tensor, which is a loop of the graph."""

    def __init__(self):
        super().__init__()
        self.cell = keras.layers.GRUCell(4, name="cell")
        self.head = keras.layers.Dense(2)

    @tf.function
    def call(self, x):
        state, states = tf.zeros((tf.shape(x)[0], 4)), tf.TensorArray(tf.float32, tf.shape(x)[1])
        for t in tf.range(tf.shape(x)[1]):
            state = self.cell(x[:, t], [state])[0]
            states = states.write(t, state)
        return self.head(tf.transpose(states.stack(), (1, 0, 2)))


def test_a_loop_over_tensors_inside_a_graph_function_has_a_jacobian_and_a_diagnosis():
    """They ended in an error of TensorFlow's about the stage of a graph, called the model's own."""
    model = OverTensors()
    model(X)
    model.compile("sgd", "mse")
    jacobian = rl.jacobian(model, X)
    assert jacobian.attrs["certificate"].startswith("certified")
    with tf.GradientTape(persistent=True) as tape:
        inputs = tf.constant(X)
        tape.watch(inputs)
        outputs = model(inputs)
    expected = tape.batch_jacobian(outputs, inputs, experimental_use_pfor=False)
    found = jacobian.transpose("sample", "out_time", "out_unit", "in_time", "in_feature")
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert rl.diagnose(model, X, np.zeros((4, 5, 2), "float32")).findings


def ctc():
    """Return a new graph function of the CTC loss: TensorFlow keeps in it how it was differentiated first."""

    @tf.function
    def loss(y, logits):
        return tf.reduce_mean(tf.nn.ctc_loss(y, logits, [2, 2], [4, 4], logits_time_major=False, blank_index=3))

    return loss


@pytest.mark.compiled
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_loss_whose_graph_only_a_graph_can_differentiate(is_inside):
    """A persistent tape fails in the nested loops of CTC; the model's states are those of before."""
    inputs = keras.Input(batch_shape=(2, 4, 3))
    recurrent = keras.layers.GRU(5, return_sequences=True, stateful=True)
    model = keras.Model(inputs, keras.layers.Dense(4)(recurrent(inputs)))
    x, y, loss = X[:2, :4], np.array([[0, 1], [2, 1]], "int32"), ctc()
    model(x)
    before = np.array(recurrent.states[0])
    result = rl.gradients(model, x, y, loss=(lambda *pair: loss(*pair)) if is_inside else loss, of="loss", wrt="input")
    np.testing.assert_array_equal(np.array(recurrent.states[0]), before)
    again = loss if not is_inside else ctc()  # TensorFlow itself fails in a graph that it differentiated twice
    with tf.GradientTape() as tape:
        tape.watch(x := tf.constant(x))
        value = again(y, model(x))
    expected = tape.gradient(value, x)
    np.testing.assert_allclose(np.squeeze(result.values), expected, rtol=1e-5, atol=1e-7)
    assert is_inside or result.certificate.state == "passed"
