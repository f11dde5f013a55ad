"""A layer that a loop calls once per step is one array over time, with the gradients of the engine's own autodiff.

Each model can add offsets to the outputs of its embedding and of its head at each step: the gradient with respect to an
offset is that of the output.
"""

import numpy as np
import pytest
from spoken_keras import engine, gradient, keras

import rnnlens as rl
from rnnlens.errors import LayerNotFoundError
from rnnlens.verbs.differentiation import gather

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.op_by_op]

L, ops = keras.layers, keras.ops
B, T, V, F, H, C = 3, 5, 7, 3, 4, 2
SIZES = {"embedding": F, "head": C}
IDS = np.random.default_rng(0).integers(0, V, (B, T))
Y = np.random.default_rng(1).normal(size=(B, T, C))


class Loop(keras.Model):
    """A loop over a cell that embeds each word and reads each state."""

    cells = 1

    def __init__(self):
        super().__init__()
        self.embedding, self.head = L.Embedding(V, F, name="embedding"), L.Dense(C, name="head")
        self.cell = self.make_cell()

    def make_cell(self):
        return L.GRUCell(H, name="cell")

    def step(self, x, states):
        return self.cell(x, states)

    def call(self, ids, offsets=None):
        offsets = offsets or {}
        states, scores = [ops.zeros((B, H), dtype="float64") for _ in range(self.cells)], []
        for t in range(T):
            h, states = self.step(self.layer("embedding", ids[:, t], t, offsets), states)
            scores.append(self.layer("head", h, t, offsets))
        return ops.stack(scores, 1)

    def layer(self, name, x, t, offsets):
        output = getattr(self, name)(x)
        return output + offsets[name][:, t] if name in offsets else output


class ChangedStates(Loop):
    """States that the loop changes between the steps."""

    def step(self, x, states):
        return self.cell(x, [0.9 * state + 0.1 for state in states])


class TwoCells(Loop):
    """Two cells in turn."""

    cells = 2

    def make_cell(self):
        self.second = L.SimpleRNNCell(H, name="second")
        return super().make_cell()

    def step(self, x, states):
        h, first = self.cell(x, states[:1])
        h, second = self.second(h, states[1:])
        return h, [*first, *second]


class LayerOfOneStep(Loop):
    """A recurrent layer called for one step after the other, on (sample, 1, feature)."""

    def make_cell(self):
        return L.GRU(H, return_sequences=True, return_state=True, name="cell")

    def step(self, x, states):
        h, *states = self.cell(x, initial_state=states)
        return h, states

    def layer(self, name, x, t, offsets):
        x = getattr(self, name)(x[:, None] if name == "embedding" else x)
        x = x + offsets[name][:, t : t + 1] if name in offsets else x
        return x if name == "embedding" else x[:, 0]


class TwiceAStep(Loop):
    """The head reads each state twice."""

    def layer(self, name, x, t, offsets):
        output = super().layer(name, x, t, offsets)
        return output + self.head(0.5 * x) if name == "head" else output


class SecondSequence(Loop):
    """The same cell runs over two sequences."""

    def call(self, ids, offsets=None):
        return super().call(ids, offsets) + super().call((ids + 1) % V)


ONCE_PER_STEP = {kind.__name__: kind for kind in (Loop, ChangedStates, TwoCells, LayerOfOneStep)}
REPEATED = {kind.__name__: kind for kind in (TwiceAStep, SecondSequence)}


def built(kind):
    model = kind()
    model(ops.convert_to_tensor(IDS))
    model.compile("sgd", "mse")
    return model


def loss(model, offsets):
    return ops.mean((model.call(ops.convert_to_tensor(IDS), offsets) - ops.convert_to_tensor(Y)) ** 2)


def expected_gradient(model, name):
    return gradient(lambda offsets: loss(model, {name: offsets}), np.zeros((B, T, SIZES[name])))


@pytest.mark.product(keep=("Loop",) if engine() == "jax" else ("Loop", "LayerOfOneStep"))
@pytest.mark.parametrize("case", ONCE_PER_STEP)
def test_calls_of_all_steps_are_one_array(case):
    model = built(ONCE_PER_STEP[case])
    for name in SIZES:
        expected = expected_gradient(model, name)
        by_output = rl.gradients(model, IDS, Y, of="loss", wrt=f"{name}.output")
        assert by_output.dims == ("sample", "time", "unit")
        np.testing.assert_allclose(by_output, expected, rtol=1e-9, atol=1e-13)
        assert by_output.certificate.certified == ("value", f"{name}.output")
        one_call = rl.gradients(model, IDS, Y, of="loss", wrt=f"{name}#1.output")
        np.testing.assert_allclose(np.asarray(one_call).reshape(B, -1), expected[:, 1], rtol=1e-9, atol=1e-13)


def test_a_wrong_gradient_at_an_output_is_not_certified(monkeypatch):
    """Gradients at the first call alone are those of a plausible fault: all other steps are zero."""
    right = gather.batch_gradients

    def first_step_only(request):
        answer = right(request)
        answer.gradients = {name: grad * (np.arange(T) == 0)[:, None] for name, grad in answer.gradients.items()}
        return answer

    monkeypatch.setattr(gather, "batch_gradients", first_step_only)
    certificate = rl.gradients(built(Loop), IDS, Y, of="loss", wrt="embedding.output").certificate
    assert certificate.uncertified == ("embedding.output",)


class OneTable(Loop):
    """Scores read the table of the embedding, too."""

    def layer(self, name, x, t, offsets):
        output = super().layer(name, x, t, offsets)
        if name == "head":
            output = output + ops.matmul(x[:, :F], ops.transpose(self.embedding.embeddings))[:, :C]
        return output


def test_an_output_is_not_certified_by_a_table_that_is_read_elsewhere_too():
    model = built(OneTable)
    by_output = rl.gradients(model, IDS, Y, of="loss", wrt="embedding.output")
    np.testing.assert_allclose(by_output, expected_gradient(model, "embedding"), rtol=1e-9, atol=1e-13)
    assert by_output.certificate.state == "passed"
    assert by_output.certificate.uncertified == ("embedding.output",)


def test_the_trace_and_the_input_have_all_steps_too():
    model = built(Loop)
    trace = rl.trace(model, IDS, Y, layers=["embedding", "cell", "head"])
    assert sorted(trace) == ["cell", "embedding", "head"]
    for name in SIZES:
        np.testing.assert_allclose(trace[name].output_grad, expected_gradient(model, name), rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(trace["head"].output, ops.convert_to_numpy(model(IDS)), rtol=1e-9)
    by_output = expected_gradient(model, "head")
    kernel = ops.convert_to_numpy(model.head.kernel)
    by_input = rl.gradients(model, IDS, Y, of="loss", wrt="head.input")
    np.testing.assert_allclose(by_input, by_output @ kernel.T, rtol=1e-9, atol=1e-13)


@pytest.mark.product(keep=("TwiceAStep",))
@pytest.mark.parametrize("case", REPEATED)
def test_other_repeated_calls_are_refused_with_names_that_work(case):
    model = built(REPEATED[case])
    with pytest.raises(LayerNotFoundError, match=rf"'head' was called {2 * T} times") as refusal:
        rl.gradients(model, IDS, Y, of="loss", wrt="head.output")
    assert f"head#0 to head#{2 * T - 1}" in str(refusal.value)
    assert '"head#0.output"' in str(refusal.value)
    assert rl.gradients(model, IDS, Y, of="loss", wrt="head#0.output").shape == (B, C)
    assert f"head#{2 * T - 1}" in rl.trace(model, IDS, Y, layers=["head"])
