"""A layer that is called once per step of a loop is one array over time, with the gradients of autograd."""

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

B, T, V, F, H, C = 3, 6, 7, 5, 4, 2
LAYERS = ["embedding", "head"]


class Loop(nn.Module):
    """A loop over ``nn.GRUCell`` that embeds each word and reads each state."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.cell = nn.Embedding(V, F), nn.Linear(H, C), self.make_cell()

    def make_cell(self):
        return nn.GRUCell(F, H)

    def start(self, ids):
        return torch.zeros(len(ids), H, dtype=self.head.weight.dtype)

    def step(self, x, state):
        state = self.cell(x, state)
        return state, state

    def forward(self, ids):
        state, scores = self.start(ids), []
        for t in range(ids.shape[1]):
            h, state = self.step(self.embedding(ids[:, t]), state)
            scores.append(self.head(h))
        return torch.stack(scores, 1)


class Leaky(nn.Module):
    """A cell of the user's."""

    def __init__(self):
        super().__init__()
        self.joint = nn.Linear(F + H, H)

    def forward(self, x, h):
        return 0.7 * h + 0.3 * torch.tanh(self.joint(torch.cat([x, h], 1)))


class OwnCell(Loop):
    def make_cell(self):
        return Leaky()


class StepFunction(Loop):
    """Equations in the loop, without a cell."""

    def make_cell(self):
        return nn.Linear(F + H, H)

    def step(self, x, state):
        state = rl.torch.step(lambda x, h: torch.tanh(self.cell(torch.cat([x, h], 1))), x, state)
        return state, state


class LSTMTimeFirst(Loop):
    """``nn.LSTM`` called for one step after the other, on (1, sample, feature)."""

    def make_cell(self):
        return nn.LSTM(F, H)

    def start(self, ids):
        return None

    def step(self, x, state):
        return self.cell(x, state)

    def forward(self, ids):
        state, scores = None, []
        for t in range(ids.shape[1]):
            h, state = self.cell(self.embedding(ids[:, t : t + 1].T), state)
            scores.append(self.head(h))
        return torch.cat(scores)


class LSTMSampleFirst(LSTMTimeFirst):
    """``nn.LSTM`` called for one step after the other, on (sample, 1, feature)."""

    def make_cell(self):
        return nn.LSTM(F, H, batch_first=True)

    def forward(self, ids):
        state, scores = None, []
        for t in range(ids.shape[1]):
            h, state = self.cell(self.embedding(ids[:, t : t + 1]), state)
            scores.append(self.head(h))
        return torch.cat(scores, 1)


def double(kind):
    torch.manual_seed(0)
    return kind().double()


def words(samples=B):
    return torch.randint(0, V, (samples, T), generator=torch.Generator().manual_seed(1))


def loss(scores):
    return (scores * torch.sin(torch.arange(scores.numel(), dtype=scores.dtype)).reshape(scores.shape)).sum()


def by_autograd(model, ids, name):
    """Return the values of a layer at all steps, (sample, time, unit), and the gradients of the loss there."""
    outputs = []
    handle = model.get_submodule(name).register_forward_hook(lambda m, args, output: outputs.append(output))
    try:
        value = loss(model(ids))
    finally:
        handle.remove()
    arrays = [[t.reshape(len(ids), -1) for t in ts] for ts in (outputs, torch.autograd.grad(value, outputs))]
    return tuple(torch.stack(steps, 1).detach().numpy() for steps in arrays)


@pytest.mark.parametrize("kind", [Loop, OwnCell, StepFunction, LSTMTimeFirst, LSTMSampleFirst])
@pytest.mark.parametrize("samples", [B, 1])
def test_a_layer_of_each_step_is_one_array_over_time(kind, samples):
    model, ids = double(kind), words(samples)
    for layers in (LAYERS, [*LAYERS, "cell"] if kind is Loop else LAYERS[:1]):
        trace = rl.trace(model, ids, loss=loss, layers=layers)
        assert sorted(trace.layers) == sorted(layers)
        for name in set(layers) - {"cell"}:
            values, gradients = by_autograd(model, ids, name)
            assert trace[name].output.dims == trace[name].output_grad.dims == ("sample", "time", "unit")
            np.testing.assert_allclose(trace[name].output, values, rtol=0, atol=1e-12)
            np.testing.assert_allclose(trace[name].output_grad, gradients, rtol=0, atol=1e-12)
    for name in LAYERS:
        result = rl.gradients(model, ids, of="loss", loss=loss, wrt=f"{name}.output")
        assert result.dims == ("sample", "time", "unit")
        np.testing.assert_allclose(result, by_autograd(model, ids, name)[1], rtol=0, atol=1e-12)


def test_a_single_step_of_a_joined_layer_has_its_number():
    model, ids = double(Loop), words()
    for step in (0, T - 1):
        result = rl.gradients(model, ids, of="loss", loss=loss, wrt=f"embedding#{step}.output")
        np.testing.assert_allclose(result, by_autograd(model, ids, "embedding")[1][:, step], rtol=0, atol=1e-12)


class Translator(nn.Module):
    """Encoder and decoder, loops of different lengths that share an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, F), nn.Linear(H, V)
        self.encoder, self.decoder = nn.GRUCell(F, H), nn.GRUCell(F, H)

    def forward(self, ids):
        h = torch.zeros(len(ids), H, dtype=self.head.weight.dtype)
        for t in range(ids.shape[1]):
            h = self.encoder(self.embedding(ids[:, t]), h)
        scores, word = [], ids[:, 0]
        for _ in range(T - 2):
            h = self.decoder(self.embedding(word), h)
            scores.append(self.head(h))
            word = scores[-1].argmax(1)
        return torch.stack(scores, 1)


def test_each_loop_has_an_array_of_its_own():
    model, ids = double(Translator), words()
    trace = rl.trace(model, ids, loss=loss, layers=LAYERS)
    assert sorted(trace.layers) == ["embedding#0", "embedding#1", "head"]
    values, gradients = by_autograd(model, ids, "embedding")
    for number, steps in enumerate((slice(0, T), slice(T, None))):
        name = f"embedding#{number}"
        np.testing.assert_allclose(trace[name].output, values[:, steps], rtol=0, atol=1e-12)
        np.testing.assert_allclose(trace[name].output_grad, gradients[:, steps], rtol=0, atol=1e-12)
        result = rl.gradients(model, ids, of="loss", loss=loss, wrt=f"{name}.output")
        np.testing.assert_allclose(result, gradients[:, steps], rtol=0, atol=1e-12)


class TwicePerStep(Loop):
    def forward(self, ids):
        state, scores = self.start(ids), []
        for t in range(ids.shape[1]):
            x = self.embedding(ids[:, t]) + self.embedding(ids[:, t - 1])
            state = self.cell(x, state)
            scores.append(self.head(state))
        return torch.stack(scores, 1)


class OfOnePart(Loop):
    """The head reads the last steps only; the embedding runs before the loop, once for each word."""

    def forward(self, ids):
        words, state, scores = [self.embedding(column) for column in ids.T], self.start(ids), []
        for t, word in enumerate(words):
            state = self.cell(word, state)
            if t > 1:
                scores.append(self.head(state))
        return torch.stack(scores, 1)


@pytest.mark.parametrize(
    ("kind", "counts"), [(TwicePerStep, {"embedding": 2 * T}), (OfOnePart, {"embedding": T, "head": T - 2})]
)
def test_calls_that_belong_to_no_step_keep_their_numbers(kind, counts):
    trace = rl.trace(double(kind), words(), loss=loss, layers=[*counts])
    assert sorted(trace.layers) == sorted(f"{name}#{i}" for name, count in counts.items() for i in range(count))


def test_a_loop_outside_of_the_module_joins_them_too():
    parts, ids = double(Loop), words()
    model = rl.torch.model(lambda x: Loop.forward(parts, x), parts.embedding, parts.cell, parts.head)
    modules = dict(model.named_modules())
    name = next(name for name, module in modules.items() if module is parts.embedding)
    result = rl.gradients(model, ids, of="loss", loss=loss, wrt=f"{name}.output")
    np.testing.assert_allclose(result, by_autograd(parts, ids, "embedding")[1], rtol=0, atol=1e-12)
