"""Loops without a module per step, made visible by ``rl.torch.step``, against autograd on the plain loops."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens import errors
from rnnlens.adapters.protocol import Batch, Taps
from rnnlens.adapters.registry import adapter_for
from rnnlens.recurrence.adjoint import weight_gradients
from rnnlens.recurrence.replay import Replay
from rnnlens.verbs.recurrent_layers import sweep

X = np.random.default_rng(0).normal(size=(2, 5, 3))


class HandwrittenLoop(nn.Module):
    """An RNN loop without modules; ``visible``: whether its steps go through ``rl.torch.step``."""

    def __init__(self, visible=True):
        super().__init__()
        torch.manual_seed(0)
        self.visible = visible
        self.W, self.U = (nn.Parameter(torch.randn(n, 4).double() / 2) for n in (3, 4))
        self.head = nn.Linear(4, 2).double()

    def forward(self, x, record=None):
        W, U, h = self.W, self.U, x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            if self.visible:
                h = rl.torch.step(lambda x, h: torch.tanh(x @ W + h @ U), x[:, t], h)
            else:
                h = torch.tanh(x[:, t] @ W + h @ U)
            if record is not None:
                record.append(h)
        return self.head(h)


def loss(output):
    return (output**2).sum() + output.sum()


def assert_close(computed, reference):
    np.testing.assert_allclose(np.asarray(computed), reference.detach().numpy(), rtol=1e-10, atol=1e-13)


def test_the_line_changes_nothing_outside_of_rnnlens():
    x = torch.tensor(X)
    assert torch.equal(HandwrittenLoop()(x), HandwrittenLoop(visible=False)(x))


def test_states_and_gradients_are_those_of_the_loop_as_it_was():
    model, states, x = HandwrittenLoop(), [], torch.tensor(X, requires_grad=True)
    value = loss(HandwrittenLoop(visible=False)(x, states))
    trace = rl.trace(model, X, loss=loss)
    assert_close(trace["loop"].hidden, torch.stack(states, 1))
    assert_close(trace["loop"].hidden_grad, torch.stack(torch.autograd.grad(value, states, retain_graph=True), 1))
    assert_close(trace["loop"].input_grad, torch.autograd.grad(value, x)[0])
    assert trace.certificate.state == "passed"
    assert "weight gradient sum" in {check.name for check in trace.checks}


def test_its_weights_are_the_parameters_that_the_function_used():
    """A step's weights are W and U, not those of other layers; their gradients summed over steps equal torch's."""
    model, untouched = HandwrittenLoop(), HandwrittenLoop(visible=False)
    loss(untouched(torch.tensor(X))).backward()
    (call,) = adapter_for(model).run(model, Batch(X, loss=loss), Taps.direct(weight_grads=True)).capture.calls
    assert set(call.weight_grads) == {"W", "U"}
    replay = Replay.from_call(call)
    computed = weight_gradients(replay, sweep(call, replay, call.output_grad, call.final_state_grad, call.state_grad))
    for name, grad in (("W", untouched.W.grad), ("U", untouched.U.grad)):
        assert_close(call.weight_grads[name], grad)
        assert_close(computed[name], grad)


def test_it_is_listed_with_data():
    model = HandwrittenLoop()
    assert len(rl.layers(model)) == 0
    (row,) = rl.layers(model, X)
    assert (row.name, row.units) == ("loop", 4)
    assert len(rl.layers(model)) == 0
    states = []
    output = HandwrittenLoop(visible=False)(torch.tensor(X), states)
    grads = torch.autograd.grad(output.sum(), states)
    assert_close(rl.gradients(model, X, of="output", reduce="sum", wrt="loop.hidden"), torch.stack(grads, 1))
    assert list(rl.trace(model, X, layers="loop").layers) == ["loop"]


def test_the_time_jacobian():
    expected = torch.autograd.functional.jacobian(HandwrittenLoop(visible=False), torch.tensor(X))
    jacobian = rl.jacobian(HandwrittenLoop(), X)
    for n in range(len(X)):
        assert_close(jacobian[n].transpose("out_unit", "in_time", "in_feature"), expected[n, :, n])


def test_two_loops_two_states_and_a_name_of_its_own():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(7, 8), nn.Linear(8, 4)

        def forward(self, x):
            h = c = below = x.new_zeros(len(x), 4)
            for t in range(x.shape[1]):

                def lower(x, h, c):
                    f, n = self.first(torch.cat([x, h], -1)).chunk(2, -1)
                    c = torch.sigmoid(f) * c + torch.tanh(n)
                    return torch.tanh(c), c

                h, c = rl.torch.step(lower, x[:, t], h, c, name="memory")
                below = rl.torch.step(lambda x, h: torch.tanh(self.second(torch.cat([x, h], -1))), h, below)
            return below

    torch.manual_seed(1)
    model = Two().double()
    trace = rl.trace(model, X, loss=loss)
    assert list(trace.layers) == ["memory", "loop"]
    assert trace["memory"].state_1_grad.shape == (2, 5, 4)
    assert trace.certificate.state == "passed"


def test_a_step_that_is_another_function_every_time_is_refused():
    class Changing(HandwrittenLoop):
        def forward(self, x):
            h = x.new_zeros(len(x), 4)
            for t in range(x.shape[1]):
                h = rl.torch.step(lambda _, h: torch.tanh(x[:, t] @ self.W + h @ self.U), x[:, t], h)  # noqa: B023
            return self.head(h)

    with pytest.raises(errors.UnsupportedError, match="loop"):
        rl.trace(Changing(), X, loss=loss)


def test_the_message_of_an_invisible_loop_names_the_line():
    with pytest.raises(errors.ModelError, match=r"h = rl\.torch\.step\(lambda x, h: torch\.tanh\(x @ W \+ h @ U\)"):
        rl.trace(HandwrittenLoop(visible=False), X, loss=loss)


def test_no_state_and_no_function_are_refused():
    with pytest.raises(errors.InputError, match="its input and its state"):
        rl.torch.step(lambda x: x, torch.zeros(1, 2))


def test_the_model_is_let_go_and_can_be_copied():
    model = HandwrittenLoop()
    rl.trace(model, X, loss=loss)
    twin = copy.deepcopy(model)
    assert rl.trace(twin, X, loss=loss)["loop"].hidden.shape == (2, 5, 4)
    model_ref = weakref.ref(model)
    del model
    gc.collect()
    assert model_ref() is None
