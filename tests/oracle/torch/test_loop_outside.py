"""``rl.torch.model``: a loop over time outside of the modules is a model, with the numbers of the author's own loop."""

from __future__ import annotations

import copy
import inspect

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl
from rnnlens.errors import InputError, ModelError

SAMPLES, STEPS, LETTERS, HIDDEN, CLASSES = 3, 5, 7, 4, 6


@pytest.fixture(autouse=True)
def _float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(LETTERS, HIDDEN), nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, words):
        return self.gru(self.embedding(words))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(LETTERS, HIDDEN), nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, LETTERS)

    def forward(self, word, hidden):
        output, hidden = self.gru(torch.relu(self.embedding(word)), hidden)
        return self.out(output), hidden


def translation():
    """Return two modules joined by a training script: the loop of the decoder is in the script."""
    encoder, decoder = Encoder(), Decoder()

    def decode(hidden, target):
        scores = []
        for t in range(target.shape[1]):
            step_scores, hidden = decoder(target[:, t : t + 1], hidden)
            scores.append(step_scores)
        return torch.cat(scores, 1)

    def translate(source, target):
        return decode(encoder(source)[1], target)

    x = torch.randint(LETTERS, (SAMPLES, 4)), torch.randint(LETTERS, (SAMPLES, STEPS))
    y = torch.randint(LETTERS, (SAMPLES, STEPS))
    return translate, (encoder, decoder), x, y, lambda o, t: nn.functional.cross_entropy(o.flatten(0, 1), t.flatten())


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_hidden = nn.Linear(LETTERS + HIDDEN, HIDDEN)
        self.to_output = nn.Linear(HIDDEN, CLASSES)

    def forward(self, letter, hidden):
        hidden = torch.tanh(self.to_hidden(torch.cat([letter, hidden], 1)))
        return self.to_output(hidden), hidden


def names():
    """Return a classifier of names, letter by letter; its script keeps the last output."""
    rnn = Letters()

    def classify(lines):
        hidden = torch.zeros(len(lines), HIDDEN)
        for letter in lines.unbind(1):
            output, hidden = rnn(letter, hidden)
        return output

    y = torch.randint(CLASSES, (SAMPLES,))
    return classify, (rnn,), torch.randn(SAMPLES, STEPS, LETTERS), y, nn.functional.cross_entropy


class Agent:
    """Plain class with modules in its attributes, and the log of a rollout."""

    def __init__(self):
        self.memory, self.policy, self.log = nn.LSTMCell(LETTERS, HIDDEN), nn.Linear(HIDDEN, 2), []

    def act(self, observations):
        state = [torch.zeros(len(observations), HIDDEN)] * 2
        scores = []
        for observation in observations.unbind(1):
            state = self.memory(observation, state)
            scores.append(self.policy(state[0]))
            self.log.append(scores[-1])
        return torch.stack(scores, 1)


def agent():
    """Return the method of a plain object and the modules in its attributes."""
    player = Agent()
    x, y = torch.randn(SAMPLES, STEPS, LETTERS), torch.randn(SAMPLES, STEPS, 2)
    return player.act, (player.memory, player.policy), x, y, nn.functional.mse_loss


class AgentModule(nn.Module):
    """Module without forward."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(LETTERS, HIDDEN), nn.Linear(HIDDEN, 2)

    def values(self, observations, hidden):
        outputs, hidden = self.gru(observations.transpose(0, 1), hidden)
        return self.head(outputs).transpose(0, 1)


def agent_module():
    """Return a method of a module that has no forward."""
    player, x = AgentModule(), (torch.randn(SAMPLES, STEPS, LETTERS), torch.randn(1, SAMPLES, HIDDEN))
    return player.values, (player,), x, torch.randn(SAMPLES, STEPS, 2), nn.functional.mse_loss


PROGRAMS = [translation, names, agent, agent_module]


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_of_inputs_and_weights_are_those_of_the_authors_loop(program):
    function, modules, x, y, loss = program()
    model = rl.torch.model(function, *modules)
    inputs = x if isinstance(x, tuple) else (x,)
    leaves = [part.clone().requires_grad_() if part.is_floating_point() else part for part in inputs]
    floating = [leaf for leaf in leaves if leaf.is_floating_point()]
    parameters = dict(model.named_parameters())
    truth = torch.autograd.grad(loss(function(*leaves), y), [*parameters.values(), *floating])
    log_before = len(function.__self__.log) if program is agent else 0

    gradients = rl.gradients(model, x, y, loss=loss, wrt="weights")
    # Gates and axes of a weight have another order than in torch, so the numbers are compared in order of size.
    computed = np.sort(np.concatenate([np.ravel(part) for name in gradients for part in gradients[name].values()]))
    expected = np.sort(np.concatenate([np.ravel(grad) for grad in truth[: len(parameters)]]))
    np.testing.assert_allclose(computed, expected, rtol=1e-12, atol=1e-15)
    if floating:
        name = "input[observations]" if program is agent_module else "input"
        by_input = rl.gradients(model, x, y, loss=loss, wrt=name)
        np.testing.assert_allclose(by_input, truth[len(parameters)], rtol=1e-12, atol=1e-15)
    trace = rl.trace(model, x, y, loss=loss)
    assert trace.certificate.state == "passed"
    assert log_before == (len(function.__self__.log) if program is agent else 0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_names_are_those_of_the_authors_variables():
    function, modules, _x, _, _ = translation()
    model = rl.torch.model(function, *modules)
    assert [row.name for row in rl.layers(model)] == ["encoder.gru", "decoder.gru"]
    assert model.encoder is modules[0]
    assert [*inspect.signature(model.forward).parameters] == ["source", "target"]
    player = Agent()
    assert [name for name, _ in rl.torch.model(player.act).named_children()] == ["memory", "policy"]
    named = rl.torch.model(player.act, core=player.memory, head=player.policy)
    assert [row.name for row in rl.layers(named)] == ["core"]
    weight = nn.Parameter(torch.randn(3, 2))
    assert [name for name, _ in rl.torch.model(lambda x: x @ weight, weight).named_parameters()] == ["weight"]


def test_inputs_are_named_after_parameters():
    function, modules, x, y, loss = agent_module()
    gradients = rl.gradients(rl.torch.model(function, *modules), x, y, loss=loss, wrt="input[hidden]")
    hidden = x[1].clone().requires_grad_()
    (truth,) = torch.autograd.grad(loss(function(x[0], hidden), y), hidden)
    np.testing.assert_allclose(np.squeeze(gradients), truth.squeeze(), rtol=1e-12)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_copy_calls_the_copied_modules(program):
    function, modules, x, _, _ = program()
    model = rl.torch.model(function, *modules)
    inputs = x if isinstance(x, tuple) else (x,)
    twin, before = copy.deepcopy(model), model(*inputs)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(*inputs), before)
    assert not torch.equal(twin(*inputs), before)
    assert not twin(*inputs).any()


@pytest.mark.parametrize("program", [names, agent])
def test_jacobians_are_those_of_the_authors_loop_whatever_ran_before(program):
    function, modules, x, y, loss = program()
    model, fresh = rl.torch.model(function, *modules), rl.torch.model(function, *modules)
    flags = [module.training for module in model.modules()]
    jacobian = rl.jacobian(model, x, of="output", wrt="input")
    rl.trace(model, x, y, loss=loss)
    again = rl.jacobian(model, x, of="output", wrt="input")
    np.testing.assert_array_equal(jacobian.values, again.values)
    np.testing.assert_array_equal(jacobian.values, rl.jacobian(fresh, x, of="output", wrt="input").values)
    truth = torch.autograd.functional.jacobian(function, x)
    assert jacobian.certificate.state == "passed"
    for sample in range(SAMPLES):
        entries = jacobian.isel(sample=sample)
        order = [dim for dim in ("out_time", "out_unit", "out_feature", "in_time", "in_feature") if dim in entries.dims]
        np.testing.assert_allclose(
            np.asarray(entries.transpose(*order)), truth[sample][..., sample, :, :], rtol=1e-10, atol=1e-14
        )
    assert flags == [module.training for module in model.modules()]


def test_a_module_that_was_not_given_is_named():
    function, (encoder, _), x, _, _ = translation()
    with pytest.raises(ModelError, match=r"(?s)not part of the model.*Embedding.*rl\.torch\.model"):
        rl.torch.model(function, encoder)(*x)


def test_flags_are_the_users():
    function, modules, _x, _, _ = translation()
    model = rl.torch.model(function, *modules)
    modules[0].eval(), modules[1].eval()
    assert not model.training
    model.train()
    assert modules[0].training
    assert modules[1].gru.training
    assert model.training


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((3,), "takes a function"), ((nn.Linear(1, 1),), "rl.trace"), ((len, 3), "int"), ((lambda x: x,), "No module")],
)
def test_refusals(arguments, text):
    with pytest.raises(InputError, match=text):
        rl.torch.model(*arguments)


def test_a_trace_of_one_step_says_where_the_loop_may_be():
    rnn = Letters()
    page = "docs/how-to/loop-outside-the-module.md"
    letter, hidden = torch.randn(SAMPLES, LETTERS), torch.zeros(SAMPLES, HIDDEN)
    with rl.torch.cell(rnn):
        notes = rl.trace(rnn, (letter, hidden)).notes
    assert any("single step" in note and page in note for note in notes)
    with pytest.raises(ModelError, match=page):
        rl.trace(nn.Linear(LETTERS, 2), letter)
    function, modules, x, _, _ = translation()
    assert not any(page in note for note in rl.trace(rl.torch.model(function, *modules), x).notes)
