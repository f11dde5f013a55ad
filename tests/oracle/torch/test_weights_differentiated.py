"""Weights that the forward differentiates by or replaces, weights with hooks, and trees: right, or refused by name."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import rnnlens as rl
from rnnlens.errors import ModelError, UnsupportedError

SAMPLES, STEPS, FEATURES, UNITS = 4, 7, 3, 4
X = torch.tensor(np.random.default_rng(0).normal(size=(SAMPLES, STEPS, FEATURES)))
Y = torch.zeros(SAMPLES, 2).double()
mse = nn.functional.mse_loss


class InnerStep(nn.Module):
    """Takes one gradient step on its own weights, as in meta-learning, and predicts with the result."""

    def __init__(self, kind):
        super().__init__()
        self.rnn, self.out = kind(FEATURES, UNITS, batch_first=True), nn.Linear(UNITS, 2)

    def predict(self, x, weights):
        parts = {"rnn": {}, "out": {}}
        for name, weight in weights.items():
            parts[name.partition(".")[0]][name.partition(".")[2]] = weight
        return functional_call(self.out, parts["out"], functional_call(self.rnn, parts["rnn"], x)[0][:, -1])

    def forward(self, x):
        weights = dict(self.named_parameters())
        inner_loss = self.predict(x, weights).pow(2).mean()
        grads = torch.autograd.grad(inner_loss, list(weights.values()), create_graph=True)
        adapted = {name: w - 0.5 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        return self.predict(x, adapted)


class Scaled(nn.Module):
    """Calls its layer with scaled weights."""

    def __init__(self, kind):
        super().__init__()
        self.rnn, self.out = kind(FEATURES, UNITS, batch_first=True), nn.Linear(UNITS, 2)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        weights = {name: weight * self.scale for name, weight in self.rnn.named_parameters()}
        return self.out(functional_call(self.rnn, weights, x)[0][:, -1])


def hooked(kind):
    """Return a model that clips the gradients of some of its weights by hooks."""
    model = Scaled(kind)
    model.forward = lambda x: model.out(model.rnn(x)[0][:, -1])
    model.rnn.weight_hh_l0.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    model.out.weight.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
    return model


def truth_of(model):
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(mse(model(X), Y), list(parameters.values()), allow_unused=True)
    return {name: grad for name, grad in zip(parameters, grads, strict=True) if grad is not None}


@pytest.mark.parametrize("make", [InnerStep, Scaled, hooked])
def test_gradients_of_weights_are_those_of_the_untouched_model(make):
    torch.manual_seed(0)
    model = make(nn.RNN).double()
    gradients = rl.gradients(model, X, Y, loss=mse, wrt="weights")
    assert gradients.certificate.state == "passed"
    names = {"weight_ih_l0": "kernel", "weight_hh_l0": "recurrent_kernel", "bias_ih_l0": "bias"}
    names |= {"bias_hh_l0": "recurrent_bias"}
    for name, grad in truth_of(model).items():
        layer, _, key = name.rpartition(".")
        found = gradients[layer or "scaled"][names.get(key, key)].values
        expected = grad.T if key in ("weight_ih_l0", "weight_hh_l0") else grad
        np.testing.assert_allclose(np.reshape(found, expected.shape), expected, atol=1e-13, err_msg=name)


def test_an_inner_step_is_refused_by_verbs_that_sweep_the_recurrence():
    model = InnerStep(nn.LSTM).double()
    for verb in (rl.trace, rl.weights):
        with pytest.raises(UnsupportedError, match=r"(?s)weights of rnn.*rl\.gradients\(model, x, y, loss=loss"):
            verb(model, X, Y, loss=mse)
    with pytest.raises(UnsupportedError, match="differentiates by the weights of rnn"):
        rl.jacobian(model, X)
    with pytest.raises(UnsupportedError, match="differentiates by the weights of rnn"):
        rl.gradients(model, X, Y, loss=mse, wrt="input")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_trace_says_that_it_does_not_apply_a_hook_on_a_weight():
    torch.manual_seed(0)
    model = hooked(nn.GRU).double()
    with pytest.warns(rl.errors.SelfCheckWarning, match="weight gradients differ"):
        trace = rl.trace(model, X, Y, loss=mse)
    assert trace.certificate.state == "failed"
    assert any("rnn: the hook on weight_hh (register_hook) is not applied" in note for note in trace.notes)


class BinaryCell(nn.Module):
    """A step of a tree: its states are those of two children."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(FEATURES + 2 * UNITS, 5 * UNITS)

    def forward(self, x, left, right):
        i, f, g, o, u = self.gates(torch.cat([x, left[0], right[0]], 1)).chunk(5, 1)
        cell = f.sigmoid() * left[1] + g.sigmoid() * right[1] + i.sigmoid() * u.tanh()
        return o.sigmoid() * cell.tanh(), cell


class Tree(nn.Module):
    """Recurses over the nodes of a binary tree, of all samples together or of each in turn."""

    def __init__(self, by_sample):
        super().__init__()
        self.cell, self.out, self.by_sample = BinaryCell(), nn.Linear(UNITS, 2), by_sample

    def node(self, x, i):
        if i >= x.shape[1]:
            zeros = x.new_zeros(len(x), UNITS)
            return zeros, zeros
        return self.cell(x[:, i], self.node(x, 2 * i + 1), self.node(x, 2 * i + 2))

    def forward(self, x):
        trees = x.split(1) if self.by_sample else [x]
        return self.out(torch.cat([self.node(tree, 0)[0] for tree in trees]))


@pytest.mark.parametrize("by_sample", [True, False])
def test_a_tree_is_no_recurrence_through_time_and_its_weights_have_gradients(by_sample):
    torch.manual_seed(0)
    model = Tree(by_sample).double()
    with pytest.raises(ModelError, match=r"cell: its inputs change from step to step"):
        rl.trace(model, X, Y, loss=mse)
    with pytest.raises(ModelError, match="none ran in this forward pass"):
        rl.jacobian(model, X)
    gradients = rl.gradients(model, X, Y, loss=mse, wrt="weights")
    np.testing.assert_allclose(gradients["cell.gates.weight"], truth_of(model)["cell.gates.weight"], atol=1e-14)
