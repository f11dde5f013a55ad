"""Decoders that are fed what they returned: states are found by the graph, whatever the arguments are called.

The values are those of autograd with retained gradients on the plain model.
"""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import rnnlens as rl

SIZE = 5
rng = np.random.default_rng(0)
X, CONTEXT = torch.tensor(rng.normal(size=(4, 6, SIZE))), torch.tensor(rng.normal(size=(4, SIZE)))


def loss(output):
    return (output**2).sum()


class LeakyCell(nn.RNNCell):
    """A leaky cell: half the old state plus half of torch's step."""

    def forward(self, x, h):
        return 0.5 * h + 0.5 * super().forward(x, h)


def decoder_cell(order, names, *, deep):
    """Return a cell of the arguments ``order`` of (y, h, c) under ``names``; ``deep``: the scores read y, too."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.word, self.turn, self.read = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(2 * SIZE, SIZE)

        def step(self, *given):
            given = dict(zip(order, given, strict=True))
            h = torch.tanh(self.word(given["y"]) + self.turn(given["h"]) + given.get("c", 0.0))
            return self.read(torch.cat([h, given["y"] if deep else h], 1)), h

    arguments = ", ".join(names)
    Cell.forward = eval(f"lambda self, {arguments}: self.step({arguments})")
    return Cell()


#: What the next step is fed, of the scores ``y`` and the true features ``x``.
FEEDS = {
    "scores": lambda y, x, t: y,
    "shares": lambda y, x, t: torch.softmax(y, 1),
    "best": lambda y, x, t: nn.functional.one_hot(y.argmax(1), SIZE).to(y),
    "teacher": lambda y, x, t: x,
    "now and then the teacher": lambda y, x, t: x if t % 2 else y,
}


class Decoder(nn.Module):
    def __init__(self, order, names, feed, *, deep=False):
        super().__init__()
        torch.manual_seed(0)
        self.order, self.feed, self.states = order, FEEDS[feed], []
        self.cell = decoder_cell(order, names, deep=deep)
        self.double()

    def forward(self, x):
        y, h, outputs, self.states = x[:, 0], torch.tanh(x.mean(1)), [], []
        for t in range(x.shape[1]):
            given = {"y": y, "h": h, "c": CONTEXT}
            y, h = self.cell(*(given[name] for name in self.order))
            outputs.append(y)
            self.states.append(h)
            y = self.feed(y, x[:, t], t)
        return torch.stack(outputs, 1)


def truth_of(model):
    grads = torch.autograd.grad(loss(model(X)), model.states)
    return torch.stack(model.states, 1).detach().numpy(), torch.stack(grads, 1).numpy()


def check(layer, truth):
    hidden, hidden_grad = truth
    np.testing.assert_allclose(layer["hidden"].values, hidden, atol=1e-13)
    np.testing.assert_allclose(layer["hidden_grad"].values, hidden_grad, atol=1e-13)
    assert "state_1" not in layer


NAMES = [("word", "state", "c"), ("prev", "context", "c"), ("memory", "x", "hidden"), ("h", "prev", "y")]
CASES = [
    *product(("yh", "hy", "cyh", "ych", "yhc", "hcy"), ("scores", "shares"), (False,)),
    *product(("yh", "hy"), ("scores", "shares", "now and then the teacher"), (True,)),
    *product(("yh", "hcy"), ("best", "teacher"), (False, True)),
]


@pytest.mark.parametrize(("order", "feed", "deep"), CASES)
def test_the_state_is_found_whatever_it_is_called(order, feed, deep):
    for names in NAMES:
        model = Decoder(order, names[: len(order)], feed, deep=deep)
        truth, trace = truth_of(model), rl.trace(model, X, loss=loss)
        check(trace["cell"], truth)
        assert trace.certificate.state == "passed"
        assert not any("by the names" in note for note in trace.notes)


@pytest.mark.parametrize("feed", ["scores", "teacher"])
def test_in_a_training_step_too(tmp_path, feed):
    for i, names in enumerate(NAMES):
        model, seen = Decoder("yh", names[:2], feed), []
        truth = truth_of(model)
        with rl.torch.watch(model, tmp_path / f"{i}.zarr", batches=1, on_batch=seen.append):
            loss(model(X)).backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        check(seen[0].traced()["cell"], truth)


@pytest.mark.parametrize("name", ["prev", "word"])
def test_a_name_that_decided_is_told_and_a_declaration_decides_instead(name):
    model = Decoder("ych", (name, "context", "past"), "scores", deep=True)
    notes = "".join(rl.trace(model, X, loss=loss).notes)
    assert "by the names and places of the arguments" in notes
    assert "rl.torch.cell(model.cell, state=...)" in notes
    rl.torch.cell(model.cell, state="past")
    truth, trace = truth_of(model), rl.trace(model, X, loss=loss)
    check(trace["cell"], truth)
    assert not any("by the names" in note for note in trace.notes)


def test_two_states_before_the_input_are_states():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(SIZE, SIZE)

        def forward(self, h, c, x):
            gates = self.cell.weight_ih @ x.T + self.cell.weight_hh @ h.T
            i, f, g, o = gates.T.chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(c), c

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = Cell()

        def forward(self, x):
            h = c = x.new_zeros(len(x), SIZE)
            for t in range(x.shape[1]):
                h, c = self.step(h, c, x[:, t])
            return h

    torch.manual_seed(0)
    model = Loop().double()
    rl.torch.cell(model.step)
    trace = rl.trace(model, X, loss=loss)
    assert trace["step"].input.shape == X.shape
    np.testing.assert_allclose(trace["step"].hidden[:, -1], model(X).detach().numpy(), atol=1e-13)
    assert trace["step"].final_state_grad.sizes["state"] == 2


def test_a_watched_subclass_of_a_torch_cell_has_the_gradients_of_its_own_step(tmp_path):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.states = LeakyCell(SIZE, SIZE), []

        def forward(self, x):
            h, self.states = x.new_zeros(len(x), SIZE), []
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
                self.states.append(h)
            return torch.stack(self.states, 1)

    torch.manual_seed(0)
    model, seen = Loop().double(), []
    truth = truth_of(model)
    with rl.torch.watch(model, tmp_path / "run.zarr", batches=1, on_batch=seen.append):
        loss(model(X)).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    check(seen[0].traced()["cell"], truth)
